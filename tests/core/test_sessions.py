"""A session's life: what each operation does to it, and that no session sees another."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hotkv_trio import CacheMiss, MissReason, Session
from hotkv_trio.testing import FakeEngine
from tests.core._rig import SLOT, Rig, decode_on, hold_open, key, open_rig, spawn

threaded_too = pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
exact_too = pytest.mark.parametrize("exact", [False, True], ids=["grouped", "exact"])


async def test_a_session_holds_slot_and_bytes_from_the_moment_it_is_open_until_it_ends() -> None:
    async with open_rig() as rig:
        async with rig.runtime.open_session(key("a", 3)) as session:
            assert (session.key, session.length, session.hot) == (key("a", 3), 0, True)
            assert rig.limiter.borrowed_bytes == SLOT
            assert rig.runtime.get(key("a", 3)) is session
        assert (session.hot, rig.limiter.borrowed_bytes) == (False, 0)


async def test_prefill_decode_and_truncate() -> None:
    async with open_rig(prefill_chunk=4) as rig, rig.runtime.open_session(key("a")) as session:
        result = await session.prefill([1, 2, 3, 4, 5, 6])
        assert (result.position, result.length, result.output.shape) == (0, 6, (1, 16))
        assert result.output.dtype == np.float32
        result = await session.decode(7)
        assert (result.position, result.length) == (6, 7)
        assert rig.is_solo(result.output, [1, 2, 3, 4, 5, 6, 7])
        await session.truncate(3)
        assert session.length == 3
        await session.truncate(3)
        result = await session.prefill([9, 9, 9, 9, 9], at=3, output="all")
        assert (result.position, result.length, len(result.output)) == (3, 8, 5)
        assert rig.is_solo(result.output, [1, 2, 3, 9, 9, 9, 9, 9])
        await session.truncate(0)
        assert (session.length, session.hot, rig.holds(0)) == (0, True, 0)


@pytest.mark.parametrize("output, rows", [("last", 1), ("all", 9), ("none", 0)])
@pytest.mark.parametrize("prefill_chunk", [1, 4, 9, 100])
async def test_rows_are_the_same_however_the_prefill_is_cut(output: Any, rows: int, prefill_chunk: int) -> None:
    """node-llama-cpp #129: a prompt larger than one call takes is cut into chunks."""
    tokens = list(range(1, 10))
    async with open_rig(prefill_chunk=prefill_chunk) as rig, rig.runtime.open_session(key("a")) as session:
        result = await session.prefill(tokens, output=output)
        assert result.output.shape == (rows, 16)
        assert not rows or rig.is_solo(result.output, tokens)
        assert max(append.n_tokens for group in rig.engine.calls for append in group) <= prefill_chunk


async def test_a_prefill_of_many_times_the_largest_call_is_cut() -> None:
    """node-llama-cpp #129; llama.cpp #24967: all slots asking for all outputs at once."""
    engine = FakeEngine(n_ctx_seq=1000, max_batch_tokens=16)
    async with open_rig(engine, prefill_chunk=128) as rig, trio.open_nursery() as nursery:
        for name in "abcd":
            nursery.start_soon(prefill_all, rig, name, 160)
    assert {append.n_tokens for group in engine.calls for append in group} == {16}


async def prefill_all(rig: Rig, name: str, n_tokens: int) -> None:
    tokens = [ord(name) % 16] * n_tokens
    async with rig.runtime.open_session(key(name)) as session:
        result = await session.prefill(tokens, output="all")
        assert len(result.output) == n_tokens
        assert rig.is_solo(result.output, tokens)


@exact_too
@threaded_too
async def test_sixteen_sessions_with_evictions_each_equal_their_solo_runs(exact: bool, threaded: bool) -> None:
    """LMCache #4385, mlx-lm #965, llama.cpp #10072: answers that carry other sessions' content under load."""
    rng = random.Random(1)
    engine = FakeEngine(n_slots=5, n_ctx_seq=200)
    restarts = 0
    reasons: set[MissReason] = set()

    async def client(number: int) -> None:
        nonlocal restarts
        async with rig.runtime.open_session(key(f"client {number}")) as session:
            history = [number]
            at = 0
            for _ in range(12):
                try:
                    result = await session.prefill(history[at:], at=at)
                except CacheMiss as miss:
                    reasons.add(miss.reason)
                    restarts += 1
                    at = miss.resume_at
                    result = await session.prefill(history, at=0)
                assert rig.is_solo(result.output, history)
                at = len(history)
                history += [int(result.output[-1].argmax())] + [rng.randrange(16)] * rng.choice([0, 0, 7])
                if rng.random() < 0.3:
                    await trio.sleep(0.001)

    async with open_rig(engine, threaded=threaded, exact=exact, prefill_chunk=5, seconds=60) as rig:
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(client, number)
        assert rig.limiter.borrowed_bytes == 0
        statistics = rig.statistics
        assert (statistics.opened, statistics.released) == (16, 16)
    assert reasons == {MissReason.EVICTED}
    assert 0 < restarts <= statistics.evicted
    if exact:
        assert {len(group) for group in engine.calls} == {1}


async def test_fifty_tasks_and_one_native_thread() -> None:
    """llama-cpp-python #471, #1367, #1995: two threads on one context crash or freeze."""
    threads: set[int] = set()

    class NotesThreads(FakeEngine):
        def process(self, group: Any) -> Any:
            threads.add(threading.get_native_id())
            return super().process(group)

        def clear(self, slot: int) -> None:
            threads.add(threading.get_native_id())
            super().clear(slot)

        def truncate(self, slot: int, length: int) -> bool:
            threads.add(threading.get_native_id())
            return super().truncate(slot, length)

        def open(self) -> Any:
            threads.add(threading.get_native_id())
            return super().open()

        def close(self) -> None:
            threads.add(threading.get_native_id())
            super().close()

    async def work(number: int) -> None:
        async with rig.runtime.open_session(key(f"task {number}")) as session:
            history = [number % 16, 3]
            await session.prefill(history, at=0)
            await decode_on(session, rig, history, 3)
            await session.truncate(1)

    async with open_rig(NotesThreads(n_slots=8), threaded=True, seconds=60) as rig, trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(work, number)
    assert len(threads) == 1
    assert threading.get_native_id() not in threads


async def test_the_next_tenant_of_a_slot_finds_it_as_new() -> None:
    """llama.cpp #27148, #27422: another conversation's KV appears in a fresh slot."""
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        for number in range(5):
            async with rig.runtime.open_session(key(f"tenant {number}")) as session:
                assert rig.holds(0) == 0
                result = await session.prefill([number, 5], output="all")
                assert rig.is_solo(result.output, [number, 5])


async def test_everything_holds_in_a_slot_that_is_not_the_first() -> None:
    """mesh-llm #1551: a sequence 0 hard-coded on one path."""
    async with (
        open_rig() as rig,
        rig.runtime.open_session(key("first")) as first,
        rig.runtime.open_session(key("second")) as second,
    ):
        await first.prefill([1, 2, 3])
        history = [4, 5, 6]
        await second.prefill(history)
        await second.truncate(2)
        history.pop()
        await decode_on(second, rig, history, 4)
        assert (rig.holds(0), rig.holds(1)) == (3, 6)
        await second.aclose()
        assert (rig.holds(0), rig.holds(1)) == (3, 0)
        result = await first.decode(9)
        assert rig.is_solo(result.output, [1, 2, 3, 9])


async def test_operations_of_one_session_run_one_at_a_time_in_the_order_of_their_calls() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            calls = []
            for operation, data in [("decode", 1), ("prefill", [2, 3]), ("truncate", 2), ("decode", 4), ("decode", 5)]:
                calls.append(spawn(nursery, getattr(session, operation), data))
                await wait_all_tasks_blocked()
            assert session.statistics().operations == 5
            assert rig.executor.jobs == 1
            rig.executor.resume()
        assert [caught.error for caught in calls] == [None] * 5
        assert rig.is_solo(calls[-1].value.output, [1, 2, 4, 5])


async def test_conditional_appends_of_two_tasks_at_one_position_let_one_win() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])

        async def append(token: int) -> None:
            await session.decode(token, at=2)

        async with trio.open_nursery() as nursery:
            ended = [spawn(nursery, append, token) for token in (3, 4)]
        errors = [type(caught.error).__name__ for caught in ended if caught.error]
        assert errors == ["PositionMismatch"]
        assert session.length == 3


async def test_serve_session_is_hot_when_start_returns_and_ends_when_released() -> None:
    async with open_rig() as rig, trio.open_nursery() as nursery:
        session: Session = await nursery.start(rig.runtime.serve_session, key("a"))
        assert session.hot
        assert rig.limiter.borrowed_bytes == SLOT
        result = await session.prefill([1, 2])
        assert rig.is_solo(result.output, [1, 2])
        assert await rig.runtime.release(key("a")) is True
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 0
        second: Session = await nursery.start(rig.runtime.serve_session, key("a"))
        second.cancel()
        await wait_all_tasks_blocked()
        assert (len(nursery.child_tasks), rig.limiter.borrowed_bytes) == (0, 0)
        await nursery.start(rig.runtime.serve_session, key("a", 1))
        await nursery.start(rig.runtime.serve_session, key("a", 2))
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1, "the superseded one has ended without an error"
        nursery.cancel_scope.cancel()


async def test_a_kept_session_stays_hot_between_requests_until_it_is_released() -> None:
    async with open_rig() as rig:
        session = await rig.runtime.start_session(key("a"))
        await session.prefill([1, 2])
        await wait_all_tasks_blocked()
        assert rig.runtime.get(key("a")) is session
        result = await rig.runtime.get(key("a")).decode(3, at=2)
        assert rig.is_solo(result.output, [1, 2, 3])
        assert await rig.runtime.release(key("a"))
        assert (session.hot, rig.limiter.borrowed_bytes, rig.holds(0)) == (False, 0, 0)


async def test_release_is_idempotent_and_never_takes_another_ones() -> None:
    """LMCache #5095: releasing twice, or with the wrong epoch, changes nothing, and it is said."""
    async with open_rig() as rig:
        session = await rig.runtime.start_session(key("a", 3))
        await session.prefill([1, 2])
        assert await rig.runtime.release(key("a", 4)) is False
        assert await rig.runtime.release(key("b", 3)) is False
        assert (session.hot, session.length) == (True, 2)
        assert await rig.runtime.release(key("a", 3)) is True
        assert await rig.runtime.release(key("a", 3)) is False
        again = await rig.runtime.start_session(key("a", 3))
        await session.aclose()
        assert again.hot
        assert rig.statistics.released == 1


async def test_release_of_a_session_that_waits_for_its_slot_ends_the_wait() -> None:
    async with (
        open_rig(FakeEngine(n_slots=1)) as rig,
        rig.runtime.open_session(key("holder"), pinned=True),
        trio.open_nursery() as nursery,
    ):
        waiter = spawn(nursery, hold_open, rig.runtime, key("a"))
        await wait_all_tasks_blocked()
        with pytest.raises(CacheMiss):
            rig.runtime.get(key("a"))
        assert await rig.runtime.release(key("a")) is True
        await wait_all_tasks_blocked()
        assert isinstance(waiter.error, CacheMiss)
        assert waiter.error.reason is MissReason.RELEASED
        assert rig.statistics.waiting == 0


@threaded_too
async def test_release_waits_for_the_native_call_that_runs(threaded: bool) -> None:
    """mesh-llm #1523, llama.cpp #7378: a connection lost in the middle of a prefill takes only its own session."""
    engine = FakeEngine(n_slots=2)
    async with open_rig(engine, threaded=threaded) as rig, rig.runtime.open_session(key("b")) as other:
        await other.prefill([7, 8])
        session = await rig.runtime.start_session(key("a"))
        stall, resume = (engine.stall, engine.resume) if threaded else (rig.executor.hold, rig.executor.resume)
        stall()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [1] * 9)
            await wait_all_tasks_blocked(0.01)
            release = spawn(nursery, rig.runtime.release, key("a"))
            await wait_all_tasks_blocked(0.01)
            assert not release.done
            assert rig.limiter.borrowed_bytes == 2 * SLOT
            resume()
        assert release.value is True
        assert isinstance(running.error, CacheMiss)
        assert (rig.limiter.borrowed_bytes, rig.holds(1)) == (SLOT, 0)
        result = await other.decode(9)
        assert rig.is_solo(result.output, [7, 8, 9])


async def test_a_session_is_used_from_any_task() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        history: list[int] = []
        for token in range(5):
            history.append(token)
            async with trio.open_nursery() as nursery:
                caught = spawn(nursery, session.decode, token)
            assert rig.is_solo(caught.value.output, history)


async def test_aclose_in_the_body_ends_the_session_and_the_block_ends_as_usual() -> None:
    async with open_rig() as rig:
        async with rig.runtime.open_session(key("a")) as session:
            await session.prefill([1, 2])
            await session.aclose()
            assert (session.hot, rig.limiter.borrowed_bytes, rig.holds(0)) == (False, 0, 0)
            await session.aclose()
            async with rig.runtime.open_session(key("a")) as second:
                await second.prefill([3])
        assert rig.statistics.released == 2


async def test_cancel_ends_the_body_quietly_and_only_that_body() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("b")) as other:
        reached = False
        async with rig.runtime.open_session(key("a")) as session:
            session.cancel("no longer wanted")
            await trio.lowlevel.checkpoint()
            reached = True
        assert not reached
        assert other.hot
        await other.prefill([1, 2])
        assert rig.limiter.borrowed_bytes == SLOT


@pytest.mark.parametrize("length", [7, 8, 9, 63, 64])
async def test_only_a_length_up_to_the_limit_fits_exactly(length: int) -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1] * length, at=0)
        assert (session.length, rig.holds(0)) == (length, length)


async def test_data_changed_by_its_owner_while_it_waits_is_not_what_is_appended() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        tokens = np.array([1, 2, 3], np.int32)
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            caught = spawn(nursery, session.prefill, tokens)
            await wait_all_tasks_blocked()
            tokens[:] = 9
            rig.executor.resume()
        assert rig.is_solo(caught.value.output, [1, 2, 3])


async def test_rows_are_freed_without_the_garbage_collector() -> None:
    """Else a server's memory would grow by megabytes of logits between two of its full runs."""
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        gc.collect()
        gc.disable()
        try:
            rows = [weakref.ref((await session.prefill([token] * 3, output="all")).output) for token in range(6)]
            rows += [weakref.ref((await session.decode(token)).output) for token in range(6)]
            # The last ones may be held by whoever made the call, until the next.
            assert [ref() is None for ref in rows[:-1]] == [True] * 11
        finally:
            gc.enable()
