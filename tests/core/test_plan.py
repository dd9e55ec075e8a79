"""Which work goes into the next native calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotkv_trio._plan import Call, Plan, Work


def work(slot: int, n_tokens: int = 1, *, output: Any = "last", hidden: bool = False, start: int = 0) -> Work:
    data: Any = np.zeros((n_tokens, 2), np.float32) if hidden else np.arange(n_tokens, dtype=np.int32)
    return Work(slot, start, data, output, owner=f"caller of {slot}")


def plan_of(*works: Work, prefill_chunk: int = 4, max_group: int = 8) -> Plan:
    plan = Plan(prefill_chunk, max_group)
    for one in works:
        plan.add(one)
    return plan


def slots(calls: list[Call]) -> list[list[int]]:
    return [[one.slot for one in planned.works] for planned in calls]


def rows(*counts: int) -> list[Any]:
    return [np.zeros((count, 3), np.float32) for count in counts]


def run_next_chunk(plan: Plan) -> tuple[int, int, bool]:
    """Make the next prefill call; return its slot, its tokens, and whether the work is complete."""
    planned = plan.prefill()
    assert planned is not None
    assert plan.begin(planned)
    complete = plan.finish(planned, rows(0))
    for one in planned.works:
        if one not in complete:
            plan.add(one)
    return planned.works[0].slot, planned.n_tokens, bool(complete)


def test_decodes_of_consecutive_slots_go_in_one_call() -> None:
    plan = plan_of(*[work(slot) for slot in (5, 0, 2, 1, 6, 9)])
    assert slots(plan.decodes()) == [[0, 1, 2], [5, 6], [9]]
    assert all(planned.n_tokens == 1 for planned in plan.decodes())


def test_exact_mode_serves_one_session_a_call() -> None:
    assert slots(plan_of(*[work(slot) for slot in range(3)], max_group=1).decodes()) == [[0], [1], [2]]


def test_a_group_is_no_larger_than_the_engine_takes() -> None:
    assert slots(plan_of(*[work(slot) for slot in range(5)], max_group=2).decodes()) == [[0, 1], [2, 3], [4]]


def test_tokens_and_hidden_states_do_not_share_a_call() -> None:
    assert slots(plan_of(work(0), work(1, hidden=True), work(2)).decodes()) == [[0], [1], [2]]


def test_a_prefill_goes_in_chunks_of_its_own() -> None:
    plan = plan_of(work(0, 10))
    assert [run_next_chunk(plan) for _ in range(3)] == [(0, 4, False), (0, 4, False), (0, 2, True)]
    assert plan.prefill() is None
    assert not len(plan)


def test_prefills_take_turns_chunk_by_chunk() -> None:
    plan = plan_of(work(0, 10), work(1, 5), work(2, 9))
    turns = [run_next_chunk(plan)[:2] for _ in range(8)]
    assert turns == [(0, 4), (1, 4), (2, 4), (0, 4), (1, 1), (2, 4), (0, 2), (2, 1)]


def test_one_token_is_a_decode_and_more_are_a_prefill() -> None:
    plan = plan_of(work(0, 1), work(1, 2))
    assert slots(plan.decodes()) == [[0]]
    planned = plan.prefill()
    assert planned is not None
    assert slots([planned]) == [[1]]


@pytest.mark.parametrize("output, rows_a_chunk", [("none", [0, 0, 0]), ("last", [0, 0, 1]), ("all", [4, 4, 2])])
def test_only_the_last_chunk_owes_the_last_row(output: str, rows_a_chunk: list[int]) -> None:
    plan = plan_of(one := work(0, 10, output=output, start=7))
    seen = []
    for expected in rows_a_chunk:
        planned = plan.prefill()
        assert planned is not None
        (append,) = planned.group
        seen.append(append)
        assert append.n_rows == expected
        plan.begin(planned)
        plan.finish(planned, rows(append.n_rows))
        if one.left:
            plan.add(one)
    assert [append.position for append in seen] == [7, 11, 15]
    assert np.concatenate([append.data for append in seen]).tolist() == list(range(10))
    assert len(one.rows) == sum(count > 0 for count in rows_a_chunk)


def test_withdrawn_work_is_not_called_for() -> None:
    """llama.cpp #13262, #24496: work of clients who left is still run."""
    first, second = work(0), work(1)
    plan = plan_of(first, second)
    (planned,) = plan.decodes()
    plan.withdraw(first)
    assert plan.begin(planned)
    assert slots([planned]) == [[1]]
    assert (first.running, second.running) == (False, True)
    (lonely,) = plan_of(third := work(2)).decodes()
    empty = Plan(4, 8)
    assert not empty.begin(lonely)
    assert not third.running


def test_work_of_the_next_tenant_does_not_slip_into_a_call_planned_for_the_last() -> None:
    old, new = work(0), work(0)
    plan = plan_of(old)
    (planned,) = plan.decodes()
    plan.withdraw(old)
    plan.add(new)
    assert not plan.begin(planned)
    assert 0 in plan
    plan.withdraw(old)
    assert 0 in plan


def test_arrivals_and_length_tell_what_came() -> None:
    plan = plan_of(work(0), work(1, 9))
    assert (len(plan), plan.arrivals) == (2, 2)
    assert (0 in plan, 1 in plan, 2 in plan) == (True, True, False)
    run_next_chunk(plan)
    assert (len(plan), plan.arrivals) == (2, 3)
