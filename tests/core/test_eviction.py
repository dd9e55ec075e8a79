"""TTL and LRU: who goes, when, and who never does."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hotkv_trio import CacheMiss, InvalidInput, MissReason, open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor
from tests.core._rig import SLOT, StepwiseEngine, hold_open, key, open_rig, spawn

if TYPE_CHECKING:
    from hotkv_trio import Session

DAY = 86_400.0


def miss_reason(runtime: Any, name: str) -> MissReason:
    with pytest.raises(CacheMiss) as caught:
        runtime.get(key(name))
    return caught.value.reason


@pytest.mark.parametrize("ttl", [0, 0.0, -1, -math.inf, math.nan, True, "600", b"1", [1]])
async def test_a_ttl_that_is_no_number_above_zero_is_refused_and_the_engine_closed(ttl: Any) -> None:
    """LMCache #4091: a TTL of 0, negative, NaN is refused."""
    engine = FakeEngine()
    with pytest.raises(InvalidInput, match="idle_ttl"):
        async with open_runtime(engine, idle_ttl=ttl, executor=InlineExecutor()):
            raise AssertionError("entered")
    assert (engine.opened, engine.closed) == (False, True)


@pytest.mark.parametrize("ttl", [None, math.inf])
async def test_without_a_ttl_nothing_expires(ttl: float | None, autojump_clock: MockClock) -> None:
    async with open_rig(idle_ttl=ttl, seconds=1e9) as rig:
        session = await rig.runtime.start_session(key("a"))
        await trio.sleep(1000 * DAY)
        assert session.hot


async def test_an_idle_session_expires_at_its_time_and_not_before(autojump_clock: MockClock) -> None:
    async with open_rig(idle_ttl=10, seconds=DAY) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        await trio.sleep(9.9)
        assert session.hot
        await trio.sleep(0.2)
        assert (session.hot, session.length, rig.holds(0), rig.limiter.borrowed_bytes) == (False, 0, 0, 0)
        assert rig.statistics.expired == 1


async def test_a_kept_session_that_expires_ends_and_leaves_its_reason(autojump_clock: MockClock) -> None:
    async with open_rig(idle_ttl=10, seconds=DAY) as rig:
        session = await rig.runtime.start_session(key("a"))
        await session.prefill([1, 2])
        await trio.sleep(11)
        assert miss_reason(rig.runtime, "a") is MissReason.EXPIRED
        with pytest.raises(CacheMiss) as caught:
            await session.decode(3)
        assert caught.value.reason is MissReason.EXPIRED
        assert (rig.statistics.sessions, rig.statistics.tombstones) == (0, 1)
        again = await rig.runtime.start_session(key("a"))
        result = await again.prefill([1, 2])
        assert rig.is_solo(result.output, [1, 2])


async def test_work_refreshes_the_ttl(autojump_clock: MockClock) -> None:
    """LMCache #4091: TTL must not end what is in use."""
    async with open_rig(idle_ttl=10, seconds=DAY) as rig:
        session = await rig.runtime.start_session(key("a"))
        await session.prefill([1, 2])
        for token in range(10):
            await trio.sleep(9)
            await session.decode(token)
        assert session.statistics().idle_since == pytest.approx(trio.current_time())
        await trio.sleep(9)
        await session.truncate(1)
        await trio.sleep(9)
        assert session.hot
        await trio.sleep(2)
        assert not session.hot


async def test_running_work_never_expires(autojump_clock: MockClock) -> None:
    """LMCache #4091: TTL ended long-running work."""
    async with open_rig(idle_ttl=10, seconds=DAY) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            caught = spawn(nursery, session.decode, 3)
            await trio.sleep(1000)
            assert (session.hot, session.statistics().idle_since) == (True, None)
            rig.executor.resume()
        assert rig.is_solo(caught.value.output, [1, 2, 3])
        assert rig.statistics.expired == 0


async def test_queued_work_never_expires(autojump_clock: MockClock) -> None:
    async with (
        open_rig(idle_ttl=10, seconds=DAY) as rig,
        rig.runtime.open_session(key("b"), pinned=True) as other,
        rig.runtime.open_session(key("a")) as session,
    ):
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            spawn(nursery, other.prefill, [7, 8])
            await wait_all_tasks_blocked()
            queued = spawn(nursery, session.prefill, [1, 2])
            await trio.sleep(1000)
            assert session.hot
            rig.executor.resume()
        assert rig.is_solo(queued.value.output, [1, 2])


async def test_a_pinned_session_neither_expires_nor_is_evicted(autojump_clock: MockClock) -> None:
    async with open_rig(FakeEngine(n_slots=1), idle_ttl=10, seconds=DAY) as rig:
        session = await rig.runtime.start_session(key("a"), pinned=True)
        await session.prefill([1, 2])
        with trio.move_on_after(1000) as scope:
            await rig.runtime.start_session(key("b"))
        assert scope.cancelled_caught
        assert session.hot
        result = await session.decode(3)
        assert rig.is_solo(result.output, [1, 2, 3])


async def test_each_session_expires_at_its_own_time(autojump_clock: MockClock) -> None:
    async with open_rig(idle_ttl=10, seconds=DAY) as rig:
        sessions = []
        for name in "abc":
            sessions.append(await rig.runtime.start_session(key(name)))
            await trio.sleep(3)
        await trio.sleep(0.5)
        seen = []
        for _ in range(8):
            seen.append([session.hot for session in sessions])
            await trio.sleep(1)
        assert [sum(hot) for hot in seen] == [3, 2, 2, 2, 1, 1, 1, 0]
        assert seen[1] == [False, True, True]


async def test_the_least_recently_used_idle_one_goes_first() -> None:
    """llama-server's router: wrong LRU order."""
    async with open_rig(FakeEngine(n_slots=3)) as rig:
        for name in "abc":
            await rig.runtime.start_session(key(name))
        await rig.runtime.get(key("a")).prefill([1, 2])
        for newcomer, victim in [("d", "b"), ("e", "c"), ("f", "a"), ("g", "d")]:
            await rig.runtime.start_session(key(newcomer))
            assert miss_reason(rig.runtime, victim) is MissReason.EVICTED
            assert rig.statistics.hot == 3
        assert rig.statistics.evicted == 4


async def test_looking_a_session_up_does_not_count_as_use() -> None:
    async with open_rig(FakeEngine(n_slots=2)) as rig:
        for name in "ab":
            await rig.runtime.start_session(key(name))
        rig.runtime.get(key("a"))
        await rig.runtime.start_session(key("c"))
        assert miss_reason(rig.runtime, "a") is MissReason.EVICTED


async def test_a_busy_session_is_never_evicted_the_newcomer_waits() -> None:
    """llama-server's router: a busy one was evicted."""
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        session = await rig.runtime.start_session(key("a"))
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [1, 2])
            await wait_all_tasks_blocked()
            newcomer = spawn(nursery, hold_open, rig.runtime, key("b"))
            await wait_all_tasks_blocked()
            assert (session.hot, rig.statistics.waiting) == (True, 1)
            rig.executor.resume()
            await wait_all_tasks_blocked()
            assert rig.is_solo(running.value.output, [1, 2])
            assert miss_reason(rig.runtime, "a") is MissReason.EVICTED
            assert not newcomer.done
            assert rig.runtime.get(key("b")).hot
            nursery.cancel_scope.cancel()


async def test_sessions_that_decode_without_a_pause_are_not_evicted_between_two_steps() -> None:
    async with open_rig(FakeEngine(n_slots=2)) as rig, trio.open_nursery() as nursery:
        done: list[str] = []

        async def decode(name: str) -> None:
            async with rig.runtime.open_session(key(name)) as session:
                history = []
                for token in range(15):
                    history.append(token)
                    result = await session.decode(token)
                    assert rig.is_solo(result.output, history)
            done.append(name)

        rig.executor.hold()
        for name in "ab":
            nursery.start_soon(decode, name)
        await wait_all_tasks_blocked()
        nursery.start_soon(decode, "c")
        await wait_all_tasks_blocked()
        assert (rig.statistics.waiting, done) == (1, [])
        rig.executor.resume()
        await wait_all_tasks_blocked()
        assert sorted(done[:2]) == ["a", "b"]
        assert rig.statistics.evicted == 0


async def test_a_waiter_that_left_evicts_nobody() -> None:
    """llama-server's router: a waiter that left still cost somebody the cache."""
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        session = await rig.runtime.start_session(key("a"))
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [1, 2])
            await wait_all_tasks_blocked()
            scope = trio.CancelScope()
            spawn(nursery, rig.runtime.start_session, key("b"), scope=scope)
            await wait_all_tasks_blocked()
            scope.cancel()
            await wait_all_tasks_blocked()
            rig.executor.resume()
        assert running.error is None
        assert (session.hot, rig.statistics.evicted) == (True, 0)


async def test_an_evicted_session_in_a_scope_starts_again_and_another_goes() -> None:
    async with (
        open_rig(FakeEngine(n_slots=2)) as rig,
        rig.runtime.open_session(key("a")) as a,
        rig.runtime.open_session(key("b")) as b,
    ):
        await a.prefill([1, 2])
        await b.prefill([3, 4])
        async with rig.runtime.open_session(key("c")) as c:
            await c.prefill([5, 6])
            assert (a.hot, b.hot, c.hot) == (False, True, True)
            result = await a.prefill([1, 2], at=0)
            assert rig.is_solo(result.output, [1, 2])
            assert (a.hot, b.hot, c.hot) == (True, False, True)
        assert rig.limiter.borrowed_bytes == SLOT


async def test_nobody_is_evicted_for_whom_it_would_not_suffice() -> None:
    """Room is made only if there is enough of it: else caches would be lost for nothing."""
    async with open_rig(FakeEngine(n_slots=3)) as rig:
        idle = await rig.runtime.start_session(key("idle"))
        for name in ("p", "q"):
            await rig.runtime.start_session(key(name), pinned=True)
        async with trio.open_nursery() as nursery:
            large = spawn(nursery, rig.limiter.acquire_on_behalf_of, "large", 2 * SLOT)
            await wait_all_tasks_blocked()
            assert (idle.hot, large.done) == (True, False)
            assert await rig.runtime.release(key("p"))
            await wait_all_tasks_blocked()
            assert (idle.hot, large.done) == (False, True)
        rig.limiter.release_on_behalf_of("large")


async def test_the_evictor_between_get_and_prefill() -> None:
    """LMCache #4133: eviction between look-up and use."""
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        kept = await rig.runtime.start_session(key("a"))
        await kept.prefill([1, 2])
        found = rig.runtime.get(key("a"))
        async with rig.runtime.open_session(key("b")) as other:
            await other.prefill([3, 4])
            calls = len(rig.engine.calls)
            for attempt in (found.decode(3, at=2), found.prefill([3], at=0), found.truncate(1)):
                with pytest.raises(CacheMiss) as caught:
                    await attempt
                assert (caught.value.reason, caught.value.resume_at) == (MissReason.EVICTED, 0)
            assert len(rig.engine.calls) == calls
            result = await other.decode(5)
            assert rig.is_solo(result.output, [3, 4, 5])


async def test_a_shard_that_evicted_takes_no_append_and_recovers_by_a_replay() -> None:
    """LMCache #1467, exo #1341: shards that evict differently must not go on with different histories."""
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.runtime.open_session(key("a")) as session:
        history = [1, 2, 3]
        await session.prefill(history)
        async with rig.runtime.open_session(key("b")):
            pass
        for at in (None, 3, 1):
            with pytest.raises(CacheMiss) as caught:
                await session.decode(4, at=at)
            assert (caught.value.reason, caught.value.resume_at) == (MissReason.EVICTED, 0)
        result = await session.prefill([*history, 4], at=0)
        assert rig.is_solo(result.output, [*history, 4])


async def test_a_budget_lowered_evicts_idle_ones_until_it_fits() -> None:
    async with open_rig(FakeEngine(n_slots=4)) as rig:
        sessions = [await rig.runtime.start_session(key(name)) for name in "abcd"]
        rig.limiter.total_bytes = 2 * SLOT + 1
        await wait_all_tasks_blocked()
        assert [session.hot for session in sessions] == [False, False, True, True]
        assert rig.limiter.borrowed_bytes == 2 * SLOT


async def test_a_budget_lowered_evicts_no_more_for_a_claim_that_cannot_go_even_so() -> None:
    async with open_rig(FakeEngine(n_slots=3)) as rig, trio.open_nursery() as nursery:
        pinned = await rig.runtime.start_session(key("pinned"), pinned=True)
        older, newer = [await rig.runtime.start_session(key(name)) for name in ("older", "newer")]
        rig.limiter.total_bytes = 2 * SLOT
        large = spawn(nursery, rig.limiter.acquire_on_behalf_of, "large", 2 * SLOT)
        await wait_all_tasks_blocked()
        assert [session.hot for session in (pinned, older, newer)] == [True, False, True]
        assert (large.done, rig.limiter.borrowed_bytes, rig.statistics.evicted) == (False, 2 * SLOT, 1)
        nursery.cancel_scope.cancel()


async def test_a_budget_lowered_waits_for_busy_ones_and_lends_nothing_meanwhile() -> None:
    async with open_rig(FakeEngine(n_slots=2)) as rig:
        sessions = [await rig.runtime.start_session(key(name)) for name in "ab"]
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            ended = [spawn(nursery, session.prefill, [1, 2]) for session in sessions]
            await wait_all_tasks_blocked()
            waiter = spawn(nursery, rig.runtime.start_session, key("c"))
            await wait_all_tasks_blocked()
            rig.limiter.total_bytes = SLOT
            await wait_all_tasks_blocked()
            assert (rig.limiter.borrowed_bytes, rig.limiter.available_bytes, waiter.done) == (2 * SLOT, 0, False)
            rig.executor.resume()
            await wait_all_tasks_blocked()
            assert [caught.error for caught in ended] == [None, None]
            assert waiter.value.hot
            assert rig.limiter.borrowed_bytes == SLOT
            assert rig.statistics.evicted == 2


async def test_a_budget_raised_lets_waiters_go_without_an_eviction() -> None:
    async with open_rig(kv_budget=SLOT) as rig:
        session = await rig.runtime.start_session(key("a"), pinned=True)
        async with trio.open_nursery() as nursery:
            waiter = spawn(nursery, rig.runtime.start_session, key("b"))
            await wait_all_tasks_blocked()
            assert not waiter.done
            rig.limiter.total_bytes = 2 * SLOT
        assert waiter.value.hot
        assert (session.hot, rig.statistics.evicted) == (True, 0)


async def test_the_budget_bounds_the_sessions_though_slots_are_free() -> None:
    async with open_rig(kv_budget=2 * SLOT + SLOT // 2) as rig:
        for name in "abcd":
            await rig.runtime.start_session(key(name))
            assert rig.limiter.borrowed_bytes <= 2 * SLOT
        assert (rig.statistics.hot, rig.statistics.evicted, rig.statistics.free_slots) == (2, 2, 2)


async def test_not_waiting_still_evicts_who_is_idle() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        idle = await rig.runtime.start_session(key("a"))
        newcomer = await rig.runtime.start_session(key("b"), wait=False)
        assert (idle.hot, newcomer.hot) == (False, True)


async def test_not_waiting_for_a_busy_one_says_would_block_and_changes_nothing() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        session = await rig.runtime.start_session(key("a"))
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [1, 2])
            await wait_all_tasks_blocked()
            with pytest.raises(trio.WouldBlock):
                await rig.runtime.start_session(key("b"), wait=False)
            assert rig.statistics.waiting == 0
            rig.executor.resume()
        assert running.error is None
        assert session.hot


async def test_not_waiting_and_becoming_busy_in_one_moment_one_of_them_is_refused() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        session = await rig.runtime.start_session(key("a"))
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            impatient = spawn(nursery, partial(rig.runtime.start_session, key("b"), wait=False))
            running = spawn(nursery, session.prefill, [1, 2])
            await wait_all_tasks_blocked()
            rig.executor.resume()
        # Whichever came first: either it waited only for the idle one to be emptied, or not at all.
        if impatient.error is None:
            assert isinstance(running.error, CacheMiss)
            assert impatient.value.hot
        else:
            assert isinstance(impatient.error, trio.WouldBlock)
            assert running.error is None


async def test_not_waiting_behind_somebody_who_waits_says_would_block() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, trio.open_nursery() as nursery:
        rig.executor.hold()
        session = await rig.runtime.start_session(key("a"))
        spawn(nursery, session.prefill, [1, 2])
        await wait_all_tasks_blocked()
        first = spawn(nursery, hold_open, rig.runtime, key("b"))
        await wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            await rig.runtime.start_session(key("c"), wait=False)
        rig.executor.resume()
        await wait_all_tasks_blocked()
        assert not first.done
        nursery.cancel_scope.cancel()


async def test_three_waiters_for_a_slot_leave_at_their_own_deadlines(autojump_clock: MockClock) -> None:
    """Petals #434: a waiter's deadline started only after the others'."""
    async with open_rig(FakeEngine(n_slots=1), seconds=DAY) as rig, rig.runtime.open_session(key("x"), pinned=True):
        start = trio.current_time()
        left: list[tuple[int, int]] = []

        async def wait(seconds: int) -> None:
            with trio.move_on_after(seconds):
                await rig.runtime.start_session(key(f"waits {seconds} s"))
            left.append((seconds, round(trio.current_time() - start)))

        async with trio.open_nursery() as nursery:
            for seconds in (3, 1, 2):
                nursery.start_soon(wait, seconds)
        assert left == [(1, 1), (2, 2), (3, 3)]
        assert rig.statistics.waiting == 0


async def test_all_busy_and_full_waits_without_spinning() -> None:
    """LMCache #2942: a busy loop where everything is taken."""
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        session: Session = await rig.runtime.start_session(key("a"))
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            spawn(nursery, session.prefill, [1, 2])
            for number in range(5):
                spawn(nursery, hold_open, rig.runtime, key(f"waiter {number}"))
            # It returns at all only if every task comes to rest.
            await wait_all_tasks_blocked()
            assert rig.statistics.waiting == 5
            nursery.cancel_scope.cancel()
            rig.executor.resume()
        await wait_all_tasks_blocked()
        assert rig.statistics.waiting == 0


async def test_waiters_are_served_in_the_order_in_which_they_came() -> None:
    """Petals #53 review, llama-server's router: FIFO."""
    served: list[int] = []

    async def client(number: int) -> None:
        async with rig.runtime.open_session(key(f"client {number}"), pinned=True) as session:
            served.append(number)
            await session.prefill([1, 2])

    async with (
        open_rig(StepwiseEngine(n_slots=1)) as rig,
        trio.open_nursery() as nursery,
        rig.runtime.open_session(key("holder"), pinned=True),
    ):
        for number in range(8):
            nursery.start_soon(client, number)
            await wait_all_tasks_blocked()
        assert served == []
    assert served == list(range(8))
