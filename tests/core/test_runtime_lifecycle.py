"""A runtime's life: how it starts, fails to start, ends, and what leaves it."""

from __future__ import annotations

import logging
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hotkv_trio import CacheMiss, EngineFailed, InvalidInput, OwnerThread, RuntimeClosed, open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor
from tests.core._rig import SLOT, Caught, hold_open, key, native_failure, open_rig, spawn, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from hotkv_trio import Executor, Runtime, Session

threaded_too = pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])


def executor_of(*, threaded: bool) -> Executor:
    return OwnerThread("hotkv-under-test") if threaded else InlineExecutor()


def owner_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "hotkv-under-test"]


@pytest.mark.parametrize(
    "error", [native_failure(), MemoryError("no room"), SystemExit(1)], ids=lambda e: type(e).__name__
)
@threaded_too
async def test_an_engine_that_cannot_be_opened_leaves_no_thread_and_is_closed(
    threaded: bool, error: BaseException
) -> None:
    engine = FakeEngine()
    engine.fail("open", error)
    with pytest.raises(type(error)) as caught:
        async with open_runtime(engine, executor=executor_of(threaded=threaded)):
            raise AssertionError("entered")
    assert caught.value is error
    assert (engine.closed, owner_threads()) == (True, [])


@pytest.mark.parametrize(
    "options",
    [
        {"kv_budget": 0},
        {"kv_budget": -1},
        {"kv_budget": 1.5},
        {"kv_budget": True},
        {"kv_budget": "1G"},
        {"prefill_chunk": 0},
        {"prefill_chunk": -5},
        {"prefill_chunk": 1.5},
        {"prefill_chunk": None},
        {"prefill_chunk": True},
        {"exact": 1},
        {"exact": None},
        {"idle_ttl": 0},
    ],
    ids=repr,
)
@threaded_too
async def test_a_refused_option_leaves_no_thread_and_the_engine_closed(threaded: bool, options: Any) -> None:
    engine = FakeEngine()
    with pytest.raises(InvalidInput, match=next(iter(options))):
        async with open_runtime(engine, executor=executor_of(threaded=threaded), **options):
            raise AssertionError("entered")
    assert (engine.opened, engine.closed, owner_threads()) == (False, True, [])


async def test_a_thread_that_cannot_be_started_leaves_the_engine_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    engine = FakeEngine()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            async with open_runtime(engine):
                raise AssertionError("entered")
    assert (engine.opened, engine.closed) == (False, True)


@threaded_too
async def test_opened_in_a_cancelled_scope_it_ends_at_once_and_closes_the_engine(threaded: bool) -> None:
    engine = FakeEngine()
    with trio.fail_after(20), trio.CancelScope() as scope:
        scope.cancel()
        async with open_runtime(engine, executor=executor_of(threaded=threaded)):
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert (engine.closed, owner_threads()) == (True, [])


@pytest.mark.parametrize("passes", range(12))
async def test_cancelled_at_any_moment_of_its_start_it_closes_the_engine(passes: int) -> None:
    engine = FakeEngine()
    scope = trio.CancelScope()

    async def cancel() -> None:
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel)
            with scope:
                async with open_runtime(engine, executor=InlineExecutor()) as runtime:
                    await runtime.start_session(key("a"))
                    await trio.sleep_forever()
    assert engine.closed
    assert engine.violations == []


@threaded_too
async def test_the_end_joins_the_thread_and_closes_the_engine(threaded: bool) -> None:
    before = threading.active_count()
    engine = FakeEngine()
    async with open_runtime(engine, executor=executor_of(threaded=threaded)) as runtime:
        assert threading.active_count() == before + threaded
        session = await runtime.start_session(key("a"))
        await session.prefill([1, 2])
        closed_inside = engine.closed
    assert (closed_inside, engine.closed) == (False, True)
    assert threading.active_count() == before


@threaded_too
async def test_closed_with_live_sessions_all_end_and_no_bytes_are_left(threaded: bool) -> None:
    """Petals #154: old caches stayed after a re-shard."""
    engine = FakeEngine(n_slots=3)
    async with trio.open_nursery() as nursery:
        async with open_rig(engine, threaded=threaded) as rig:
            kept = await rig.runtime.start_session(key("kept"))
            served: Session
            cold: Session
            served, cold = [
                await nursery.start(rig.runtime.serve_session, key(name))  # noqa: ASYNC111 - outlives the runtime on purpose
                for name in ("served", "cold")
            ]
            for session in (kept, served, cold):
                await session.prefill([1, 2])
            rig.limiter.total_bytes = 2 * SLOT
            await until(lambda: rig.limiter.borrowed_bytes == 2 * SLOT)
            rig.limiter.total_bytes = 3 * SLOT
            outside = spawn(nursery, hold_open, rig.runtime, key("outside"))  # noqa: ASYNC111 - outlives the runtime on purpose
            await until(lambda: rig.limiter.borrowed_bytes == 3 * SLOT)
            # It holds its slot a step before it is in its body.
            await wait_all_tasks_blocked()
        assert rig.limiter.borrowed_bytes == 0
        assert [rig.holds(slot) for slot in range(3)] == [0, 0, 0]
        for session in (kept, served, cold):
            assert (session.hot, session.length) == (False, 0)
            with pytest.raises(RuntimeClosed):
                await session.decode(1)
        await wait_all_tasks_blocked()
        assert not outside.done, "its body is not ours to end; its session is"
        nursery.cancel_scope.cancel()


@threaded_too
async def test_closed_with_work_queued_running_and_waiting_everyone_is_answered(threaded: bool) -> None:
    engine = FakeEngine(n_slots=2)
    ended: list[Caught] = []
    async with trio.open_nursery() as nursery:
        async with open_rig(engine, threaded=threaded, exact=True) as rig:
            stall, resume = (engine.stall, engine.resume) if threaded else (rig.executor.hold, rig.executor.resume)
            sessions = [
                await nursery.start(rig.runtime.serve_session, key(name))  # noqa: ASYNC111 - outlives the runtime on purpose
                for name in "ab"
            ]
            stall()
            ended.extend(spawn(nursery, session.prefill, [1, 2]) for session in sessions)
            ended.extend(spawn(nursery, session.decode, 3) for session in sessions)
            ended += [
                spawn(nursery, hold_open, rig.runtime, key("c")),  # noqa: ASYNC111 - outlives the runtime on purpose
                spawn(nursery, rig.limiter.acquire, 1),  # noqa: ASYNC111 - outlives the runtime on purpose
            ]
            await wait_all_tasks_blocked(0.01)
            nursery.start_soon(resume_later, resume)
        await wait_all_tasks_blocked()
        assert [type(caught.error).__name__ for caught in ended] == ["RuntimeClosed"] * 6
        assert len({id(caught.error) for caught in ended}) == 6


async def resume_later(resume: Any) -> None:
    await wait_all_tasks_blocked(0.01)
    resume()


@pytest.mark.parametrize("passes", range(8))
async def test_a_session_started_while_the_runtime_ends_is_refused_or_ended(passes: int) -> None:
    seen: list[str] = []

    async def keep_starting(runtime: Runtime) -> None:
        number = 0
        while True:
            number += 1
            try:
                await runtime.start_session(key(f"late {number}"))
            except RuntimeClosed:
                seen.append("refused")
                return

    async with trio.open_nursery() as nursery, open_rig(FakeEngine(n_slots=2)) as rig:
        nursery.start_soon(keep_starting, rig.runtime)  # noqa: ASYNC111 - outlives the runtime on purpose
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
    assert seen == ["refused"]


@pytest.mark.parametrize("passes", range(6))
async def test_nothing_is_started_in_the_moment_when_the_kept_nursery_has_closed(passes: int) -> None:
    errors: list[BaseException] = []

    async def start_late(runtime: Runtime, ended: trio.Event) -> None:
        await ended.wait()
        for _ in range(passes):
            await trio.lowlevel.checkpoint()
        try:
            await runtime.start_session(key("late"))
        except RuntimeClosed as exc:
            errors.append(exc)

    ended = trio.Event()
    async with trio.open_nursery() as nursery, open_rig() as rig:
        nursery.start_soon(start_late, rig.runtime, ended)  # noqa: ASYNC111 - outlives the runtime on purpose
        await wait_all_tasks_blocked()
        ended.set()
    assert len(errors) == 1


@threaded_too
async def test_an_error_of_the_runtimes_body_leaves_it_bare(threaded: bool) -> None:
    engine = FakeEngine()
    error = LookupError("mine")

    async def body() -> None:
        async with open_runtime(engine, executor=executor_of(threaded=threaded)) as runtime:
            session = await runtime.start_session(key("a"))
            await session.prefill([1, 2])
            raise error

    with pytest.raises(LookupError) as caught:
        await body()
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None
    assert engine.closed


async def test_an_error_of_a_sessions_body_leaves_it_bare() -> None:
    error = LookupError("mine")

    async def body(runtime: Runtime) -> None:
        async with runtime.open_session(key("a")) as session:
            session.nursery.start_soon(trio.sleep_forever)
            await session.prefill([1, 2])
            raise error

    async with open_rig() as rig:
        with pytest.raises(LookupError) as caught:
            await body(rig.runtime)
        assert caught.value is error
        assert error.__cause__ is error.__context__ is None
        assert rig.limiter.borrowed_bytes == 0
        with pytest.raises(CacheMiss):
            async with rig.runtime.open_session(key("b")) as session:
                await session.prefill([1], at=7)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=lambda e: type(e).__name__)
async def test_an_end_of_the_world_in_a_body_leaves_it_bare_too(error: BaseException) -> None:
    engine = FakeEngine()
    with pytest.raises(type(error)) as caught:
        async with open_runtime(engine, executor=InlineExecutor()) as runtime, runtime.open_session(key("a")):
            raise error
    assert caught.value is error
    assert engine.closed


async def test_a_group_of_the_bodys_own_stays_the_group_it_is() -> None:
    group = ExceptionGroup("mine", [LookupError("one"), ValueError("two")])
    async with open_rig() as rig:
        with pytest.RaisesGroup(LookupError, ValueError) as caught:
            async with rig.runtime.open_session(key("a")):
                raise group
        assert caught.value is group


async def fail_after_a_while(error: Exception) -> None:
    await trio.lowlevel.checkpoint()
    raise error


async def test_a_tasks_error_in_the_sessions_nursery_ends_the_body_and_leaves_in_a_group() -> None:
    async def body(runtime: Runtime) -> None:
        async with runtime.open_session(key("a")) as session:
            await session.prefill([1, 2])
            session.nursery.start_soon(fail_after_a_while, LookupError("a task's"))
            await trio.sleep_forever()

    async with open_rig() as rig:
        with pytest.RaisesGroup(pytest.RaisesExc(LookupError, match="a task's")):
            await body(rig.runtime)
        assert rig.limiter.borrowed_bytes == 0


async def test_a_tasks_error_and_the_bodys_own_leave_together() -> None:
    async def body(runtime: Runtime) -> None:
        async with runtime.open_session(key("a")) as session:
            session.nursery.start_soon(fail_after_a_while, LookupError("a task's"))
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
            raise ValueError("the body's")

    async with open_rig() as rig:
        with pytest.RaisesGroup(
            pytest.RaisesExc(LookupError, match="a task's"), pytest.RaisesExc(ValueError, match="the body's")
        ):
            await body(rig.runtime)
        assert rig.limiter.borrowed_bytes == 0


async def test_tasks_in_the_sessions_nursery_end_with_the_body() -> None:
    ended: list[str] = []

    async def companion() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.append("companion")

    async with open_rig() as rig:
        async with rig.runtime.open_session(key("a")) as session:
            session.nursery.start_soon(companion)
            await wait_all_tasks_blocked()
        assert ended == ["companion"]
        async with rig.runtime.open_session(key("a")) as session:
            session.nursery.start_soon(companion)
            await wait_all_tasks_blocked()
            session.nursery.cancel_scope.cancel()
            await trio.lowlevel.checkpoint()
            ended.append("not reached")
        assert ended == ["companion"] * 2
        assert rig.limiter.borrowed_bytes == 0


async def test_a_tasks_error_in_a_kept_sessions_nursery_ends_it_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with open_rig() as rig:
        session = await rig.runtime.start_session(key("a"))
        other = await rig.runtime.start_session(key("b"))
        with caplog.at_level(logging.ERROR, logger="hotkv_trio"):
            session.nursery.start_soon(fail_after_a_while, LookupError("a task's"))
            await wait_all_tasks_blocked()
        assert "a@0" in caplog.text
        assert "a task's" in caplog.text
        with pytest.raises(CacheMiss):
            rig.runtime.get(key("a"))
        assert (session.hot, other.hot, rig.limiter.borrowed_bytes) == (False, True, SLOT)


@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt()], ids=lambda end: type(end).__name__)
@threaded_too
async def test_an_end_of_the_native_side_closes_the_runtime_for_everybody(
    threaded: bool, end: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(n_slots=3)
    ended: list[Caught] = []

    async def body() -> None:
        async with open_rig(engine, threaded=threaded, exact=True) as rig, trio.open_nursery() as nursery:
            stall, resume = (engine.stall, engine.resume) if threaded else (rig.executor.hold, rig.executor.resume)
            sessions = [await rig.runtime.start_session(key(name)) for name in "abc"]
            idle = sessions.pop()
            stall()
            ended.extend(spawn(nursery, session.prefill, [1, 2]) for session in sessions)
            ended.extend(spawn(nursery, session.decode, 3) for session in sessions)
            ended.append(spawn(nursery, rig.limiter.acquire, 3 * SLOT))
            await wait_all_tasks_blocked(0.01)
            engine.fail("process", end)
            resume()
            await until(lambda: all(one.done for one in ended))
            with pytest.raises(RuntimeClosed):
                await idle.decode(1)
            with pytest.raises(RuntimeClosed):
                rig.runtime.get(key("a"))

    with caplog.at_level(logging.CRITICAL), pytest.raises(RuntimeClosed, match=type(end).__name__) as caught:
        await body()
    assert [type(one.error).__name__ for one in ended] == ["RuntimeClosed"] * 5
    assert caught.value.__cause__ is end
    assert engine.closed
    assert [engine.length(slot) for slot in range(3)] == [0, 0, 0]


async def test_a_body_that_raises_after_the_native_side_ended_raises_its_own() -> None:
    engine = FakeEngine()

    async def body() -> None:
        async with open_runtime(engine, executor=InlineExecutor()) as runtime:
            engine.fail("process", SystemExit(3))
            session = await runtime.start_session(key("a"))
            with pytest.raises(RuntimeClosed, match="SystemExit"):
                await session.decode(1)
            raise LookupError

    with pytest.raises(LookupError):
        await body()
    assert engine.closed


async def test_a_failed_close_is_raised_and_still_leaves_no_thread() -> None:
    class CannotClose(FakeEngine):
        def close(self) -> None:
            super().close()
            raise EngineFailed(None, "will not close")

    with pytest.raises(EngineFailed, match="will not close"):
        async with open_runtime(CannotClose(), executor=OwnerThread("hotkv-under-test")):
            pass
    assert owner_threads() == []


async def test_two_runtimes_side_by_side_know_nothing_of_each_other() -> None:
    @asynccontextmanager
    async def both() -> AsyncGenerator[tuple[Runtime, Runtime]]:
        async with (
            open_runtime(FakeEngine(), executor=InlineExecutor()) as first,
            open_runtime(FakeEngine()) as second,
        ):
            yield first, second

    async with both() as (first, second):
        session = await first.start_session(key("a", 5))
        other = await second.start_session(key("a", 1))
        await session.prefill([1, 2])
        assert (session.length, other.length) == (2, 0)
        with pytest.raises(CacheMiss):
            second.get(key("a", 5))
