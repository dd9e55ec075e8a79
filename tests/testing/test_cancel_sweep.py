"""The sweep itself: it counts, says where, and finds a planted unshielded await.  And its use on the whole core."""

from __future__ import annotations

import pytest
import trio

from hotkv_trio.testing import FakeEngine, Victim, cancel_at_every_step
from tests.testing.scenarios import SCENARIOS, sweep, sweep_runtime


class Lot:
    """One thing to borrow, with or without a planted leak."""

    def __init__(self, *, leaks: bool) -> None:
        self.lent = 0
        self._leaks = leaks

    async def use(self) -> None:
        self.lent += 1
        try:
            await trio.lowlevel.checkpoint()
        finally:
            if self._leaks:
                await trio.lowlevel.checkpoint()  # noqa: ASYNC102 - the planted fault
            self.lent -= 1


def test_finds_an_unshielded_await_before_the_release() -> None:
    async def program(victim: Victim) -> Lot:
        lot = Lot(leaks=True)
        with victim:
            await lot.use()
        return lot

    def check(lot: Lot) -> None:
        assert lot.lent == 0

    with pytest.raises(AssertionError) as caught:
        cancel_at_every_step(program, check)
    (note,) = caught.value.__notes__
    assert note.startswith("the victim was cancelled at step 0, in program (")
    assert "use (test_cancel_sweep.py:" in note


def test_counts_the_points_and_says_where() -> None:
    async def program(victim: Victim) -> Lot:
        lot = Lot(leaks=False)
        with victim:
            await lot.use()
            await trio.lowlevel.cancel_shielded_checkpoint()
        return lot

    found = cancel_at_every_step(program)
    assert [point.cancelled for point in found.points] == [True, False]
    assert str(found) == "2 cancellation points in 2 places, 1 ended Cancelled"


def test_cancels_by_other_means() -> None:
    async def program(victim: Victim) -> int:
        with trio.CancelScope() as scope, victim.by(scope.cancel):
            await trio.lowlevel.checkpoint()
        return 1

    assert cancel_at_every_step(program).cancelled == 1


def test_a_victim_that_never_lives_is_an_error() -> None:
    async def program(victim: Victim) -> None:
        await trio.lowlevel.checkpoint()

    with pytest.raises(RuntimeError, match="never entered"):
        cancel_at_every_step(program)


def test_a_victim_lives_once() -> None:
    async def program(victim: Victim) -> None:
        with victim:
            await trio.lowlevel.checkpoint()
        with victim.by(list):
            pass

    with pytest.raises(RuntimeError, match="once"):
        cancel_at_every_step(program)


NEVER_WAITS_LONG = {"limiter_acquire": 1}


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_leaks_wherever_it_is_cancelled(name: str) -> None:
    found = sweep(name, lambda: FakeEngine(n_slots=2, n_ctx_seq=16), n_slots=2)
    assert len(found.points) >= NEVER_WAITS_LONG.get(name, 4)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name.startswith(("prefill", "decode", "truncate"))])
def test_memory_that_cannot_be_cut_goes_cold_wherever_it_is_cancelled(name: str) -> None:
    found = sweep(name, lambda: FakeEngine(n_slots=2, n_ctx_seq=16, memory="recurrent"), n_slots=2)
    assert len(found.points) >= 4


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_leaks_under_another_schedule(name: str) -> None:
    tape = [2, 1, 1] * 50
    found = sweep(name, lambda: FakeEngine(n_slots=2, n_ctx_seq=16), n_slots=2, tape=tape, exact=True)
    assert len(found.points) >= NEVER_WAITS_LONG.get(name, 3)


def test_a_runtime_is_closed_wherever_it_is_cancelled() -> None:
    found = sweep_runtime(lambda: FakeEngine(n_slots=2, n_ctx_seq=16))
    assert len(found.points) > 30
    assert found.cancelled > 10
