"""A tape decides the order of tasks, always alike; hung programs end; trio's private names are still there."""

from __future__ import annotations

import inspect
import itertools
import random

import pytest
import trio

from hotkv_trio.testing import Hung, ScheduleTape

CANARY = """
trio has changed what the schedule tape stands on (hotkv_trio/testing/_schedule_tape.py). Look into trio/_core/_run.py
for how the loop orders a batch of ready tasks. If it still shuffles them with a module-wide random source, put the new
names into _dealt_by; if not, keep the tape's public surface and deal the order wherever the batch is formed now.
"""


async def order_of(n: int) -> list[int]:
    ran = []

    async def child(number: int) -> None:
        ran.append(number)
        await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for number in range(n):
            nursery.start_soon(child, number)
    return ran


def test_canary_trio_still_shuffles_as_the_tape_expects() -> None:
    run = trio._core._run
    assert isinstance(run._r, random.Random), CANARY
    assert isinstance(run._ALLOW_DETERMINISTIC_SCHEDULING, bool), CANARY
    source = inspect.getsource(run.unrolled_run)
    assert "_r.shuffle(batch)" in source, CANARY
    assert "batch.sort(key=lambda t: t._counter)" in source, CANARY
    assert "batch.pop()" in source, CANARY


@pytest.mark.parametrize(
    "choice, expected",
    [(0, [0, 1, 2]), (1, [1, 0, 2]), (2, [2, 0, 1]), (3, [0, 2, 1]), (4, [1, 2, 0]), (5, [2, 1, 0]), (6, [0, 1, 2])],
)
def test_a_number_is_an_order(choice: int, expected: list[int]) -> None:
    assert ScheduleTape([choice]).run(order_of, 3) == expected


def test_every_order_has_its_number() -> None:
    orders = {tuple(ScheduleTape([choice]).run(order_of, 4)) for choice in range(24)}
    assert orders == set(itertools.permutations(range(4)))


def test_tasks_run_in_order_when_the_tape_has_ended() -> None:
    tape = ScheduleTape()
    assert tape.run(order_of, 5) == [0, 1, 2, 3, 4]
    assert tape.schedule[0] == (0, 1, 2, 3, 4)
    assert tape.batches > 1


def test_trio_is_left_as_it_was() -> None:
    run = trio._core._run
    before = run._r, run._ALLOW_DETERMINISTIC_SCHEDULING

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("of the program's own")

    with pytest.raises(ValueError, match="own"):
        ScheduleTape([1]).run(fail)
    assert (run._r, run._ALLOW_DETERMINISTIC_SCHEDULING) == before


def test_time_passes_at_once() -> None:
    async def sleep() -> float:
        start = trio.current_time()
        await trio.sleep(3600)
        return trio.current_time() - start

    assert ScheduleTape().run(sleep) == 3600


async def wait_for_nothing() -> None:
    with trio.CancelScope(shield=True):
        await trio.Event().wait()


async def run_in_circles() -> None:
    while True:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("program, said", [(wait_for_nothing, "still waiting"), (run_in_circles, "runs in circles")])
def test_a_hung_program_ends_and_says_where_it_was(program: object, said: str) -> None:
    with pytest.raises(Hung, match=said) as caught:
        ScheduleTape().run(program, max_batches=1000)  # type: ignore[arg-type]
    assert f"{program.__name__} (test_schedule_tape.py:" in str(caught.value)  # type: ignore[attr-defined]
