"""KVLimiter: the four rules of a weighted limiter, and that no waiter is ever forgotten."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, assert_no_checkpoints, wait_all_tasks_blocked

from hotkv_trio import BudgetExceeded, InvalidInput, KVLimiter, KVLimiterStatistics
from tests.core._rig import spawn


async def test_a_request_over_the_total_raises_at_once_and_never_parks() -> None:
    limiter = KVLimiter(100)
    with assert_no_checkpoints(), pytest.raises(BudgetExceeded) as caught:
        limiter.acquire_nowait(101)
    assert (caught.value.requested, caught.value.total) == (101, 100)
    with pytest.raises(BudgetExceeded):
        await limiter.acquire(101)
    assert limiter.statistics().tasks_waiting == 0


async def test_waiters_are_served_strictly_first_come_first_served(autojump_clock: MockClock) -> None:
    """Petals #53 review: a large waiter is neither starved by small ones, nor do they pass it."""
    limiter = KVLimiter(100)
    limiter.acquire_on_behalf_of_nowait("holder", 60)
    served: list[str] = []

    async def borrow(name: str, nbytes: int) -> None:
        await limiter.acquire_on_behalf_of(name, nbytes)
        served.append(name)

    async with trio.open_nursery() as nursery:
        for name, nbytes in [("large", 90), ("small", 20), ("smaller", 1)]:
            nursery.start_soon(borrow, name, nbytes)
            await wait_all_tasks_blocked()
        assert served == []
        with pytest.raises(trio.WouldBlock):
            limiter.acquire_on_behalf_of_nowait("tiny", 1)
        limiter.release_on_behalf_of("holder")
        await wait_all_tasks_blocked()
        assert served == ["large"]
        limiter.release_on_behalf_of("large")
    assert sorted(served[1:]) == ["small", "smaller"]
    assert limiter.borrowed_bytes == 21


async def test_the_releaser_hands_the_bytes_over_before_the_waiter_runs() -> None:
    limiter = KVLimiter(10)
    limiter.acquire_nowait(10)
    async with trio.open_nursery() as nursery:
        waiter = spawn(nursery, limiter.acquire_on_behalf_of, "waiter", 10)
        await wait_all_tasks_blocked()
        limiter.release()
        # The waiter has not run since, and nobody slips in before it does.
        assert not waiter.done
        assert limiter.borrowed_bytes == 10
        with pytest.raises(trio.WouldBlock):
            limiter.acquire_nowait(1)
    assert waiter.error is None


async def test_a_cancelled_head_lets_those_behind_go() -> None:
    limiter = KVLimiter(100)
    limiter.acquire_nowait(50)
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        head = spawn(nursery, limiter.acquire_on_behalf_of, "head", 60, scope=scope)
        await wait_all_tasks_blocked()
        second = spawn(nursery, limiter.acquire_on_behalf_of, "second", 30)
        third = spawn(nursery, limiter.acquire_on_behalf_of, "third", 20)
        await wait_all_tasks_blocked()
        assert limiter.statistics().tasks_waiting == 3
        scope.cancel()
    assert isinstance(head.error, trio.Cancelled)
    assert second.error is third.error is None
    assert limiter.borrowed_bytes == 100


async def test_granted_and_cancelled_in_one_moment_keeps_the_bytes() -> None:
    """Either the bytes are borrowed, or Cancelled is raised: never both, never neither."""
    limiter = KVLimiter(10)
    limiter.acquire_nowait(10)
    scope = trio.CancelScope()
    async with trio.open_nursery() as nursery:
        waiter = spawn(nursery, limiter.acquire_on_behalf_of, "waiter", 10, scope=scope)
        await wait_all_tasks_blocked()
        limiter.release()
        scope.cancel()
    assert waiter.error is None
    assert limiter.borrowed_bytes == 10
    limiter.release_on_behalf_of("waiter")
    assert limiter.borrowed_bytes == 0


async def test_each_waiter_leaves_at_its_own_deadline(autojump_clock: MockClock) -> None:
    """Petals #434: a waiter's deadline started only after the others'."""
    limiter = KVLimiter(10)
    limiter.acquire_nowait(10)
    left: list[tuple[int, int]] = []
    start = trio.current_time()

    async def wait(seconds: int) -> None:
        with trio.move_on_after(seconds) as scope:
            await limiter.acquire_on_behalf_of(seconds, 10)
        assert scope.cancelled_caught
        left.append((seconds, round(trio.current_time() - start)))

    async with trio.open_nursery() as nursery:
        for seconds in (3, 1, 2):
            nursery.start_soon(wait, seconds)
    assert left == [(1, 1), (2, 2), (3, 3)]
    assert limiter.statistics().tasks_waiting == 0


async def test_a_lowered_total_lends_nothing_before_it_fits_and_refuses_who_can_never_fit() -> None:
    limiter = KVLimiter(100)
    limiter.acquire_on_behalf_of_nowait("a", 40)
    limiter.acquire_on_behalf_of_nowait("b", 40)
    async with trio.open_nursery() as nursery:
        large = spawn(nursery, limiter.acquire_on_behalf_of, "large", 60)
        await wait_all_tasks_blocked()
        small = spawn(nursery, limiter.acquire_on_behalf_of, "small", 20)
        await wait_all_tasks_blocked()
        limiter.total_bytes = 50
        await wait_all_tasks_blocked()
        assert isinstance(large.error, BudgetExceeded)
        assert (large.error.requested, large.error.total) == (60, 50)
        assert (limiter.borrowed_bytes, limiter.available_bytes) == (80, 0)
        limiter.release_on_behalf_of("a")
        await wait_all_tasks_blocked()
        assert not small.done
        limiter.release_on_behalf_of("b")
    assert small.error is None
    assert limiter.borrowed_bytes == 20


async def test_a_raised_total_wakes_those_who_fit_now() -> None:
    limiter = KVLimiter(10)
    limiter.acquire_nowait(10)
    async with trio.open_nursery() as nursery:
        first = spawn(nursery, limiter.acquire_on_behalf_of, "first", 10)
        await wait_all_tasks_blocked()
        second = spawn(nursery, limiter.acquire_on_behalf_of, "second", 10)
        await wait_all_tasks_blocked()
        limiter.total_bytes = 20
        await wait_all_tasks_blocked()
        assert (first.done, second.done) == (True, False)
        limiter.release()
    assert limiter.total_bytes == limiter.borrowed_bytes == 20


async def test_a_task_borrows_for_itself_and_has_one_claim() -> None:
    limiter = KVLimiter(10)
    await limiter.acquire(4)
    with pytest.raises(RuntimeError, match="already holds or waits"):
        limiter.acquire_nowait(1)
    with pytest.raises(RuntimeError, match="already holds or waits"):
        await limiter.acquire(1)
    limiter.release()
    with pytest.raises(RuntimeError, match="holds no KV bytes"):
        limiter.release()
    with pytest.raises(RuntimeError, match="holds no KV bytes"):
        limiter.release_on_behalf_of("nobody")
    assert limiter.borrowed_bytes == 0


@pytest.mark.parametrize("nbytes", [0, -1, 1.5, True, None, "10"])
async def test_bytes_to_borrow_are_an_integer_above_zero(nbytes: Any) -> None:
    limiter = KVLimiter(10)
    with pytest.raises(InvalidInput):
        limiter.acquire_nowait(nbytes)
    with pytest.raises(InvalidInput):
        await limiter.acquire(nbytes)


@pytest.mark.parametrize("total", [-1, 1.5, True, None, "10"])
def test_the_total_is_an_integer_from_zero(total: Any) -> None:
    with pytest.raises(InvalidInput):
        KVLimiter(total)
    limiter = KVLimiter(0)
    with pytest.raises(InvalidInput):
        limiter.total_bytes = total
    assert limiter.total_bytes == 0


async def test_acquire_checkpoints_also_when_the_bytes_are_free() -> None:
    limiter = KVLimiter(10)
    with assert_checkpoints():
        await limiter.acquire(1)
    with assert_checkpoints():
        await limiter.acquire_on_behalf_of("b", 1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await limiter.acquire_on_behalf_of("c", 1)
    assert scope.cancelled_caught
    assert limiter.borrowed_bytes == 2
    with assert_no_checkpoints():
        limiter.release()
        limiter.release_on_behalf_of("b")


async def test_statistics_and_repr_say_the_state() -> None:
    limiter = KVLimiter(100)
    limiter.acquire_on_behalf_of_nowait("a", 70)
    limiter.acquire_on_behalf_of_nowait("b", 10)
    async with trio.open_nursery() as nursery:
        spawn(nursery, limiter.acquire, 30)
        await wait_all_tasks_blocked()
        assert limiter.statistics() == KVLimiterStatistics(
            total_bytes=100, borrowed_bytes=80, available_bytes=20, borrowers=2, tasks_waiting=1
        )
        assert repr(limiter) == f"<hotkv_trio.KVLimiter at {id(limiter):#x}, 80/100 bytes with 1 waiting>"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(10))
async def test_random_churn_ends_with_exact_zeros(seed: int, autojump_clock: MockClock) -> None:
    """Petals #396, #487, LMCache #2942: an allocator that deadlocks, or whose counters drift."""
    rng = random.Random(seed)
    limiter = KVLimiter(100)
    holding = 0
    leavers = 0

    async def borrower(name: int) -> None:
        nonlocal holding, leavers
        for _ in range(10):
            nbytes = rng.choice([1, 10, 60, 100])
            with trio.move_on_after(rng.choice([0, 0.5, 5, 1000])) as scope:
                await limiter.acquire_on_behalf_of(name, nbytes)
            if scope.cancelled_caught:
                leavers += 1
                continue
            holding += nbytes
            # Bytes are handed over before the borrower runs.
            assert holding <= limiter.borrowed_bytes <= 100
            await trio.sleep(rng.choice([0, 0.1, 1]))
            holding -= nbytes
            limiter.release_on_behalf_of(name)

    with trio.fail_after(100_000):
        async with trio.open_nursery() as nursery:
            for name in range(20):
                nursery.start_soon(borrower, name)
    assert leavers > 0
    assert limiter.statistics() == KVLimiterStatistics(100, 0, 100, 0, 0)
