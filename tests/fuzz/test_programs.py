"""Whole programs under drawn schedules: every outcome is one that the contract allows, every step leaves it sound."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings

from hotkv_trio.testing import Program, run_program
from hotkv_trio.testing import programs as p
from hotkv_trio.testing.strategies import moving_programs, programs

FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    # The hunt for planted faults only wants to know how soon each is found.
    phases=[Phase.explicit, Phase.generate, *([] if os.environ.get("HOTKV_FUZZ_NO_SHRINK") else [Phase.shrink])],
    suppress_health_check=list(HealthCheck),
)


# A restart that fails leaves the session hot and empty: an append without a position must go on missing.
LOST = Program(
    clients=((p.Open(), p.Decode(), p.Sleep(3.0), p.Fail(), p.Restart(), p.Prefill()),),
    slots=1,
    chunk=1,
    ttl=2.0,
)

# A slot that comes free is granted to a waiter that was cancelled in the same moment, which gives it back.
GRANTED_TOO_LATE = Program(
    clients=(
        (p.Open(how="serve"),),
        (p.Open(name="b"), p.Pause(checkpoints=7), p.Decode(cancel_after=3), *[p.Decode()] * 4, *[p.Open()] * 3),
        (p.Open(name="c"),),
    ),
    slots=1,
    chunk=1,
)

# A budget that is too small for a moment refuses a waiter; the next to come does not overtake it.
REFUSED_FOR_A_MOMENT = Program(
    clients=(
        (p.Open(), p.Restart()),
        (p.Open(name="b"), p.Sleep(), p.Pause(), p.SetBudget(slots=0), p.SetBudget(slots=2), p.Decode()),
        (p.Open(name="c"),),
        (p.Open(), p.Stall()),
    ),
    chunk=1,
)

# Whoever waits for its turn and is cancelled is no longer handed it, though its task has not run since.
CANCELLED_BEFORE_ITS_TURN = Program(
    clients=(
        (p.Open(name="b", how="serve"), p.Open(), p.Decode(), p.Decode()),
        (p.Open(name="b", how="serve"),),
        (p.Open(name="c", how="serve", hang_up=14), p.Prefill(), p.Decode(of=0), p.CancelSession(), p.Decode()),
        (p.Open(name="b", how="serve"),),
    ),
    chunk=1,
)

# A move fails: the session that was to be moved is lost, whatever of it had arrived.
MOVED_IN_PART = Program(
    clients=(
        (p.Open(),),
        (
            p.Open(epoch=1),
            p.Release(),
            p.Decode(),
            p.Fail(method="move"),
            p.Open(epoch=1),
            p.Prefill(),
            *[p.Decode()] * 3,
        ),
        (p.Open(name="b"), *[p.Decode()] * 3),
    ),
    slots=5,
    chunk=1,
)

# A move fails, and the slot that it was from gets another tenant.
MOVED_NOWHERE = Program(
    clients=(
        (p.Open(), *[p.Decode()] * 3),
        (
            p.Open(name="c"),
            *[p.Decode()] * 3,
            p.Prefill(at=1),
            p.Fail(method="move"),
            p.Decode(),
            p.Decode(at=0),
        ),
        (p.Open(),),
        (p.Open(name="b"), *[p.Decode()] * 3, p.Prefill()),
    ),
    tape=(0, 1),
    slots=5,
    chunk=1,
)


@settings(FUZZ, max_examples=400)
@example(LOST)
@example(CANCELLED_BEFORE_ITS_TURN)
@example(REFUSED_FOR_A_MOMENT)
@example(GRANTED_TOO_LATE)
@given(programs())
def test_every_program_under_every_schedule(program: Program) -> None:
    run_program(program)


@settings(FUZZ, max_examples=250)
@given(programs(slots=[1, 2], memories=["attention"], weights={p.Fail: 0, p.SetBudget: 0}))
def test_contention_for_slots(program: Program) -> None:
    run_program(program)


@settings(FUZZ, max_examples=250)
@given(programs(slots=[1, 2], names="a", weights={p.Fail: 0, p.SetBudget: 0, p.Open: 8, p.Release: 3}))
def test_epochs_that_fence_each_other(program: Program) -> None:
    run_program(program)


@settings(FUZZ, max_examples=250)
@given(programs(max_clients=2, weights={p.Fail: 8, p.SetBudget: 0, p.Prefill: 12, p.Sleep: 0}))
def test_engines_that_fail(program: Program) -> None:
    run_program(program)


@settings(FUZZ, max_examples=150)
@given(programs(slots=[2, 3], weights={p.SetBudget: 10, p.Sleep: 20, p.Fail: 0, p.Stall: 0, p.Truncate: 0}))
def test_budgets_that_move(program: Program) -> None:
    run_program(program)


@settings(FUZZ, max_examples=250)
@example(MOVED_IN_PART)
@example(MOVED_NOWHERE)
@given(moving_programs())
def test_sessions_that_are_moved(program: Program) -> None:
    run_program(program)


@pytest.mark.slow  # an hour: evidence/fuzz/run.py runs it in parts
@settings(FUZZ, max_examples=100_000)
@given(programs())
def test_a_hundred_thousand_programs(program: Program) -> None:
    run_program(program)
