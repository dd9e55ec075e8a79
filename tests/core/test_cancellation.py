"""The cancellation table of the design, row by row: what is true after Cancelled."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hotkv_trio import CacheMiss, MissReason, RuntimeClosed
from hotkv_trio.testing import FakeEngine
from tests.core._rig import (
    SLOT,
    Caught,
    Rig,
    StepwiseEngine,
    hold_open,
    hold_pinned,
    key,
    native_failure,
    open_rig,
    spawn,
    until,
)

if TYPE_CHECKING:
    from hotkv_trio import Session
    from hotkv_trio._engine import Memory

operations = pytest.mark.parametrize("operation, data", [("prefill", [3, 4, 5]), ("decode", 3)])
cannot_cut = pytest.mark.parametrize("memory", ["recurrent", "hybrid"])


def start(nursery: trio.Nursery, session: Session, operation: str, data: Any, scope: trio.CancelScope) -> Caught:
    return spawn(nursery, getattr(session, operation), data, scope=scope)


async def is_as_before(rig: Rig, session: Session, history: list[int]) -> None:
    """Whether the next append sees exactly this history, and nothing of what was cancelled."""
    assert session.length == len(history)
    assert session.hot
    result = await session.decode(9, at=len(history))
    assert rig.is_solo(result.output, [*history, 9])


async def test_open_session_while_waiting_takes_nothing_and_wakes_who_fits() -> None:
    """SGLang #22273, #22790, petals #163: a cancel that leaks the lock, the memory, or counts twice."""
    async with open_rig(FakeEngine(n_slots=2), kv_budget=2 * SLOT) as rig, trio.open_nursery() as nursery:
        runtime = rig.runtime
        for name in ("x", "y"):
            spawn(nursery, hold_pinned, rig, name)
        await wait_all_tasks_blocked()
        scope = trio.CancelScope()
        first = spawn(nursery, hold_open, runtime, key("first", 5), scope=scope)
        await wait_all_tasks_blocked()
        assert rig.statistics.waiting == 1
        calls = len(rig.engine.calls)
        scope.cancel()
        await wait_all_tasks_blocked()
        assert isinstance(first.error, trio.Cancelled)
        assert (rig.statistics.waiting, rig.limiter.borrowed_bytes) == (0, 2 * SLOT)
        assert len(rig.engine.calls) == calls
        with pytest.raises(CacheMiss) as caught:
            runtime.get(key("first", 5))
        assert caught.value.reason is MissReason.RELEASED
        nursery.cancel_scope.cancel()


async def test_open_session_cancelled_at_the_head_lets_the_next_one_go() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, trio.open_nursery() as nursery:
        rig.limiter.acquire_on_behalf_of_nowait("somebody else", 10)
        scope = trio.CancelScope()
        # 640 bytes do not fit, but 630 would.
        head = spawn(nursery, hold_open, rig.runtime, key("head"), scope=scope)
        await wait_all_tasks_blocked()
        behind = spawn(nursery, rig.limiter.acquire_on_behalf_of, "behind", 630)
        await wait_all_tasks_blocked()
        assert (head.done, behind.done) == (False, False)
        scope.cancel()
        await wait_all_tasks_blocked()
        assert behind.done
        assert behind.error is None
        rig.limiter.release_on_behalf_of("behind")
        rig.limiter.release_on_behalf_of("somebody else")


@operations
async def test_append_queued_appends_nothing_and_makes_no_native_call(operation: str, data: Any) -> None:
    """llama.cpp #13262: work of clients who left.  ik_llama #1929: cancelling a queued one stops another's decode."""
    async with open_rig() as rig:
        runtime = rig.runtime
        async with runtime.open_session(key("b")) as other, runtime.open_session(key("a")) as session:
            await other.prefill([7, 8])
            await session.prefill([1, 2])
            rig.executor.hold()
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                running = spawn(nursery, other.prefill, [5, 6])
                await wait_all_tasks_blocked()
                assert rig.executor.jobs == 1
                queued = start(nursery, session, operation, data, scope)
                await wait_all_tasks_blocked()
                calls = rig.appended_to(1)
                scope.cancel()
                await wait_all_tasks_blocked()
                assert isinstance(queued.error, trio.Cancelled), "it left at once, though the other's call still runs"
                rig.executor.resume()
            assert rig.appended_to(1) == calls
            assert rig.is_solo(running.value.output, [7, 8, 5, 6])
            await is_as_before(rig, session, [1, 2])


@operations
async def test_append_waiting_for_the_sessions_turn_leaves_the_session_usable(operation: str, data: Any) -> None:
    """SGLang #31765: an abort while queued left the session busy for ever."""
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            first = spawn(nursery, session.decode, 3)
            await wait_all_tasks_blocked()
            second = start(nursery, session, operation, data, scope)
            await wait_all_tasks_blocked()
            assert session.statistics().operations == 2
            scope.cancel()
            await wait_all_tasks_blocked()
            assert isinstance(second.error, trio.Cancelled)
            assert session.statistics().operations == 1
            rig.executor.resume()
        assert first.value.length == 3
        await is_as_before(rig, session, [1, 2, 3])
        assert session.statistics().operations == 0


@operations
async def test_append_running_that_is_complete_when_the_call_returns_has_happened(operation: str, data: Any) -> None:
    """Either it all happened and returned, or Cancelled leaves with length as it was."""
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            running = start(nursery, session, operation, data, scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not running.done, "the native call is waited for"
            rig.executor.resume()
        appended = [data] if isinstance(data, int) else data
        assert running.error is None
        assert rig.is_solo(running.value.output, [1, 2, *appended])
        await is_as_before(rig, session, [1, 2, *appended])


async def test_prefill_running_ends_after_one_chunk_and_is_cut_back() -> None:
    async with open_rig(prefill_chunk=4) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [5] * 30, scope=scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not running.done
            rig.executor.resume()
        assert isinstance(running.error, trio.Cancelled)
        assert rig.appended_to(0) == 2, "one chunk at most"
        assert rig.holds(0) == 2
        await is_as_before(rig, session, [1, 2])


async def test_prefill_between_two_chunks_is_cut_back() -> None:
    """The work is queued again, with some of it appended, while a neighbour's call runs."""
    async with (
        open_rig(StepwiseEngine(), prefill_chunk=4) as rig,
        rig.runtime.open_session(key("b")) as other,
        rig.runtime.open_session(key("a")) as session,
    ):
        await other.prefill([7, 8])
        await session.prefill([1, 2])
        scope = trio.CancelScope()
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            prefill = spawn(nursery, session.prefill, [5] * 30, scope=scope)
            await wait_all_tasks_blocked()
            spawn(nursery, other.decode, 9)
            await rig.one_call()
            assert rig.holds(1) == 6
            calls = rig.appended_to(1)
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not prefill.done, "what a chunk appended has to be cut back, on the owner thread"
            rig.all_calls()
        assert isinstance(prefill.error, trio.Cancelled)
        assert rig.appended_to(1) == calls
        assert rig.holds(1) == 2
        await is_as_before(rig, session, [1, 2])


@cannot_cut
async def test_prefill_running_makes_memory_cold_that_cannot_be_cut(memory: Memory) -> None:
    async with (
        open_rig(FakeEngine(memory=memory), prefill_chunk=4) as rig,
        rig.runtime.open_session(key("a")) as session,
    ):
        await session.prefill([1, 2])
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [5] * 30, scope=scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            rig.executor.resume()
        assert isinstance(running.error, trio.Cancelled)
        assert (session.hot, session.length, rig.limiter.borrowed_bytes) == (False, 0, 0)
        with pytest.raises(CacheMiss) as caught:
            await session.decode(1)
        assert caught.value.reason is MissReason.FAILED
        result = await session.prefill([1, 2], at=0)
        assert rig.is_solo(result.output, [1, 2])


@cannot_cut
async def test_a_kept_session_that_goes_cold_by_a_cancel_ends(memory: Memory) -> None:
    """LMCache #5006: cancel, then silence.  Nobody would ever end it otherwise."""
    async with open_rig(FakeEngine(memory=memory), prefill_chunk=4) as rig:
        session = await rig.runtime.start_session(key("a"))
        await session.prefill([1, 2])
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            spawn(nursery, session.prefill, [5] * 30, scope=scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            rig.executor.resume()
        await wait_all_tasks_blocked()
        assert (rig.statistics.sessions, rig.statistics.failed) == (0, 1)
        with pytest.raises(CacheMiss) as caught:
            rig.runtime.get(key("a"))
        assert caught.value.reason is MissReason.FAILED
        again = await rig.runtime.start_session(key("a"))
        assert again.hot


async def test_append_of_a_cold_session_waiting_for_a_slot_takes_nothing() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        async with rig.runtime.open_session(key("b"), pinned=True):
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                restart = spawn(nursery, partial(session.prefill, [1, 2], at=0), scope=scope)
                await wait_all_tasks_blocked()
                assert (rig.statistics.waiting, session.statistics().state) == (1, "waiting")
                scope.cancel()
            assert isinstance(restart.error, trio.Cancelled)
            assert (rig.statistics.waiting, session.statistics().state) == (0, "cold")
        assert rig.limiter.borrowed_bytes == 0
        result = await session.prefill([1, 2], at=0)
        assert rig.is_solo(result.output, [1, 2])


@pytest.mark.parametrize("when", ["before", "waiting for its turn", "running"])
async def test_truncate_is_either_cut_or_unchanged(when: str) -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        history = [1, 2, 3, 4, 5]
        await session.prefill(history)
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            rig.executor.hold()
            if when == "waiting for its turn":
                history.append(6)
                spawn(nursery, session.decode, 6)
                await wait_all_tasks_blocked()
            if when == "before":
                scope.cancel()
            truncate = spawn(nursery, session.truncate, 3, scope=scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert truncate.done == (when != "running")
            rig.executor.resume()
        if when == "running":
            assert truncate.error is None
            await is_as_before(rig, session, history[:3])
        else:
            assert isinstance(truncate.error, trio.Cancelled)
            await is_as_before(rig, session, history)


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
async def test_the_sessions_scope_gives_slot_and_bytes_back_before_it_is_left(threaded: bool) -> None:
    """mesh-llm #1150: the lane was lent again while the timed-out worker still ran.  LMCache #5006: then silence."""
    engine = FakeEngine(n_slots=2)
    async with open_rig(engine, threaded=threaded) as rig, rig.runtime.open_session(key("b"), pinned=True) as other:
        await other.prefill([7, 8])
        stall, resume = (engine.stall, engine.resume) if threaded else (rig.executor.hold, rig.executor.resume)
        ended: list[bool] = []
        held: list[Session] = []

        async def victim() -> None:
            async with rig.runtime.open_session(key("a")) as session:
                held.append(session)
                await session.prefill([1, 2])
                stall()
                await session.prefill([5] * 30)
            ended.append(True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(victim)
            await until(lambda: held and held[0].statistics().state == "busy" and held[0].length == 2)
            await wait_all_tasks_blocked(0.01)
            waiter = spawn(nursery, hold_open, rig.runtime, key("next"))
            held[0].cancel("the test says so")
            await wait_all_tasks_blocked(0.01)
            assert (ended, waiter.done, rig.statistics.free_slots) == ([], False, 0), "it is waited for"
            assert rig.limiter.borrowed_bytes == 2 * SLOT
            resume()
            await until(lambda: ended)
            nursery.cancel_scope.cancel()
        with pytest.raises(CacheMiss):
            rig.runtime.get(key("a"))
        assert rig.holds(1) == 0
        assert rig.limiter.borrowed_bytes == SLOT
        result = await other.decode(9)
        assert rig.is_solo(result.output, [7, 8, 9])
        async with rig.runtime.open_session(key("c")) as tenant:
            result = await tenant.prefill([3, 4])
            assert rig.is_solo(result.output, [3, 4]), "llama.cpp #27148: the next tenant finds it as new"


@pytest.mark.parametrize("where", ["prefill", "waiting for a slot", "asleep"])
async def test_the_runtimes_scope_ends_all_of_it(where: str) -> None:
    engine = FakeEngine(n_slots=2)
    held: list[Session] = []

    async def work(rig: Rig, name: str) -> None:
        async with rig.runtime.open_session(key(name)) as session:
            held.append(session)
            await session.prefill([1, 2])
            if where == "prefill":
                await session.prefill([5] * 30)
            await trio.sleep_forever()

    with trio.CancelScope() as scope:
        async with open_rig(engine, prefill_chunk=4) as rig:
            kept = await rig.runtime.start_session(key("kept"), pinned=True)
            await kept.prefill([3, 4])
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work, rig, "a")
                await wait_all_tasks_blocked()
                if where == "prefill":
                    rig.executor.hold()
                    spawn(nursery, kept.prefill, [5] * 30)
                if where == "waiting for a slot":
                    rig.executor.hold()
                    spawn(nursery, held[0].decode, 3)
                    nursery.start_soon(work, rig, "b")
                await wait_all_tasks_blocked()
                scope.cancel()
                rig.executor.resume()
    assert scope.cancelled_caught
    assert engine.closed
    assert rig.limiter.borrowed_bytes == 0
    for session in [kept, *held]:
        with pytest.raises(RuntimeClosed):
            await session.decode(1)


async def test_opening_in_a_cancelled_scope_ends_at_once_and_takes_nothing() -> None:
    async with open_rig() as rig:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with rig.runtime.open_session(key("a")):
                raise AssertionError("entered")
        assert scope.cancelled_caught
        assert (rig.statistics.opened, rig.limiter.borrowed_bytes) == (0, 0)
        with trio.CancelScope() as scope:
            scope.cancel()
            await rig.runtime.start_session(key("a"))
        assert scope.cancelled_caught
        assert (rig.statistics.opened, rig.limiter.borrowed_bytes) == (0, 0)


async def test_release_cancelled_before_it_begins_changes_nothing() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        with trio.CancelScope() as scope:
            scope.cancel()
            await rig.runtime.release(key("a"))
        assert scope.cancelled_caught
        await is_as_before(rig, session, [1, 2])


async def test_aclose_ends_the_session_also_when_cancelled() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.aclose()
        assert scope.cancelled_caught
        assert (session.hot, rig.limiter.borrowed_bytes, rig.holds(0)) == (False, 0, 0)
        await session.aclose()


async def test_a_failure_and_a_cancel_in_one_call_leave_the_session_as_it_was() -> None:
    async with open_rig(prefill_chunk=4) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.executor.hold()
        rig.engine.fail("process", native_failure())
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [5] * 30, scope=scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            rig.executor.resume()
        assert isinstance(running.error, trio.Cancelled)
        await is_as_before(rig, session, [1, 2])


async def test_a_failure_and_a_cancel_of_the_cut_itself_make_it_cold() -> None:
    async with open_rig(prefill_chunk=4) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.executor.hold()
        rig.engine.fail("truncate", native_failure())
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [5] * 30, scope=scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            rig.executor.resume()
        assert isinstance(running.error, trio.Cancelled)
        assert (session.hot, rig.holds(0), rig.limiter.borrowed_bytes) == (False, 0, 0)


async def test_exact_zeros_after_random_cancels() -> None:
    """Petals #396, #487, LMCache #2942, llama-server's router: random churn ends, and ends with exact zeros."""
    rng = random.Random(0)
    async with open_rig(FakeEngine(n_slots=3, n_ctx_seq=256), prefill_chunk=5, seconds=60) as rig:

        async def client(name: str) -> None:
            for epoch in range(6):
                with trio.move_on_after(0 if rng.random() < 0.05 else 1000) as scope:
                    steps = rng.randrange(12)

                    async def axe(steps: int, scope: trio.CancelScope) -> None:
                        for _ in range(steps):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()

                    async with trio.open_nursery() as nursery:
                        if rng.random() < 0.7:
                            nursery.start_soon(axe, 5 * steps, scope)
                        async with rig.runtime.open_session(key(name, epoch)) as session:
                            history: list[int] = []
                            for _ in range(4):
                                tokens = [rng.randrange(16) for _ in range(rng.choice([1, 3, 17]))]
                                try:
                                    result = await session.prefill(tokens, at=len(history), output="all")
                                except CacheMiss:
                                    history = []
                                    continue
                                history += tokens
                                assert rig.is_solo(result.output, history)
                        nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(client, f"client {number}")
        await wait_all_tasks_blocked()
        statistics = rig.statistics
        assert (statistics.borrowed_bytes, statistics.lent_slots, statistics.waiting) == (0, 0, 0)
        assert (statistics.sessions, statistics.free_slots) == (0, 3)
        assert [rig.holds(slot) for slot in range(3)] == [0, 0, 0]
        assert statistics.opened == statistics.released
