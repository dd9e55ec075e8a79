"""Working sessions' slots are brought together: by which moves, when that pays, and what else may happen meanwhile."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from hotkv_trio import CacheMiss, EngineFailed
from hotkv_trio._compaction import Compaction, count_runs, plan_moves
from hotkv_trio.testing import FakeEngine
from tests.core._rig import SLOT, decode_on, key, open_all, open_rig, spawn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio import Session


def after(moves: list[tuple[int, int]], working: set[int], idle: set[int], free: set[int]) -> tuple[set[int], set[int]]:
    """Make the moves, each from a slot with somebody in it to a free one; return who is where."""
    working, idle, free = set(working), set(idle), set(free)
    for source, target in moves:
        assert target in free
        movers = working if source in working else idle
        movers.remove(source)
        movers.add(target)
        free.remove(target)
        free.add(source)
    return working, idle


@given(st.lists(st.sampled_from(["working", "idle", "free", "busy"]), min_size=1, max_size=12))
def test_moves_make_working_slots_consecutive_and_touch_nothing_else(kinds: list[str]) -> None:
    working, idle, free = ({i for i, kind in enumerate(kinds) if kind == what} for what in ("working", "idle", "free"))
    moves = plan_moves(len(kinds), working, idle, free)
    now, others = after(moves, working, idle, free)
    assert (len(now), len(others)) == (len(working), len(idle))
    if moves:
        assert count_runs(sorted(now)) == 1
        # Never more than two moves for each that has to come.
        assert len(moves) <= 2 * len(working)


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ("www", []),
        ("w.w", [(2, 1)]),
        ("wiw.", [(0, 3)]),
        ("wiw", []),
        ("wbw.", [(0, 3)]),
        (".wi", []),
        ("wb.ww", [(0, 2)]),
        ("i.ww.w", [(5, 1)]),
        ("wiwiw.", [(1, 5), (4, 1)]),
        ("wbiwbb.", [(2, 6), (0, 2)]),
        ("wbbwbb.", []),
    ],
)
def test_the_fewest_moves_are_taken(kinds: str, expected: list[tuple[int, int]]) -> None:
    slots = [{i for i, kind in enumerate(kinds) if kind == what} for what in "wi."]
    assert plan_moves(len(kinds), *slots) == expected


def test_moves_wait_until_holes_have_cost_as_much() -> None:
    compaction = Compaction(n_slots=6, move_cost=1.5)
    working, idle, free = [0, 2, 4], [1, 3], [5]
    # Two calls too many each round; it takes two moves, of the cost of three calls.
    assert compaction.note(working)
    assert compaction.moves(working, idle, free) == []
    assert compaction.note(working)
    assert len(compaction.moves(working, idle, free)) == 2
    assert not compaction.note([0, 2])


def test_a_round_without_holes_owes_nothing() -> None:
    compaction = Compaction(n_slots=6, move_cost=2)
    assert not compaction.note([0, 2])
    assert not compaction.note([0, 1])
    assert not compaction.note([0, 2])
    assert compaction.note([0, 2])


def test_what_cannot_be_brought_together_is_looked_at_ever_less_often() -> None:
    compaction = Compaction(n_slots=3, move_cost=1)
    looked = []
    for number in range(1, 40):
        if compaction.note([0, 2]):
            looked.append(number)
            assert compaction.moves([0, 2], [1], []) == []
    assert looked == [1, 2, 4, 8, 16, 32]


def test_where_moves_are_impossible_none_is_looked_for() -> None:
    compaction = Compaction(n_slots=3, move_cost=math.inf)
    assert not any(compaction.note([0, 2]) for _ in range(100))


def slots_of(sessions: Sequence[Session]) -> list[int]:
    return [session._require_slot() for session in sessions]


async def test_sessions_that_work_come_together_and_nobody_notices() -> None:
    async with open_rig(FakeEngine(n_slots=8, move_cost=1.0)) as rig:
        sessions = await open_all(rig, 7)
        working = [sessions[number] for number in (0, 2, 4, 6)]
        async with trio.open_nursery() as nursery:
            for number in (0, 2, 4, 6):
                nursery.start_soon(decode_on, sessions[number], rig, [number, 3], 12)
        assert all(b == a + 1 for a, b in pairwise(sorted(slots_of(working))))
        assert rig.statistics.moves == len(rig.engine.moves) > 0
        assert len(set(slots_of(sessions))) == 7
        assert [len(group) for group in rig.engine.calls[-4:]] == [4] * 4
        for number in (1, 3, 5):
            await decode_on(sessions[number], rig, [number, 3], 3)
        assert rig.statistics.borrowed_bytes == 7 * SLOT


async def test_in_exact_mode_nobody_is_moved() -> None:
    async with open_rig(FakeEngine(n_slots=8, move_cost=0.1), exact=True) as rig:
        sessions = await open_all(rig, 3)
        await sessions[1].aclose()
        async with trio.open_nursery() as nursery:
            for number in (0, 2):
                nursery.start_soon(decode_on, sessions[number], rig, [number, 3], 12)
        assert rig.engine.moves == []


async def test_a_budget_without_room_for_two_slots_of_one_session_forbids_moves() -> None:
    async with open_rig(FakeEngine(n_slots=4, move_cost=0.1), kv_budget=3 * SLOT) as rig:
        sessions = await open_all(rig, 3)
        async with trio.open_nursery() as nursery:
            for number in (0, 2):
                nursery.start_soon(decode_on, sessions[number], rig, [number, 3], 6)
        assert rig.engine.moves == []
        rig.limiter.total_bytes = 4 * SLOT
        for _ in range(2):
            async with trio.open_nursery() as nursery:
                for number in (0, 2):
                    nursery.start_soon(spawn_decodes, sessions[number])
        assert rig.engine.moves


async def spawn_decodes(session: Session) -> None:
    for _ in range(8):
        await session.decode(1)


@pytest.mark.parametrize("clear_fails", [False, True])
async def test_a_move_that_fails_costs_one_session_and_no_other(clear_fails: bool) -> None:
    async with open_rig(FakeEngine(n_slots=5, move_cost=0.5)) as rig:
        sessions = await open_all(rig, 3)
        rig.engine.fail("move", EngineFailed(None, "made to"))
        if clear_fails:
            rig.engine.fail("clear", LookupError("made to"))
        async with trio.open_nursery() as nursery:
            ended = [spawn(nursery, sessions[number].decode, 5) for number in (0, 2)]
        assert rig.engine.moves == [(0, 3)]
        assert [session.hot for session in sessions] == [False, True, True]
        assert [type(caught.error) for caught in ended] == [CacheMiss, type(None)]
        await decode_on(sessions[1], rig, [1, 3], 3)
        await decode_on(sessions[2], rig, [2, 3, 5], 3)
        assert rig.statistics.failed == 1
        assert rig.statistics.quarantined_slots == int(clear_fails)
        assert rig.statistics.moves == 0


async def test_a_session_superseded_while_it_is_moved_leaves_both_slots() -> None:
    async with open_rig(FakeEngine(n_slots=4, move_cost=0.5)) as rig:
        sessions = await open_all(rig, 3)
        await sessions[1].aclose()
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            ended = [spawn(nursery, sessions[number].decode, 5) for number in (0, 2)]
            await wait_all_tasks_blocked()
            # The move has been submitted, and has not been made.
            assert rig.statistics.clearing_slots == 1
            nursery.start_soon(rig.runtime.start_session, key("session 2", 1))
            await wait_all_tasks_blocked()
            rig.executor.resume()
        assert type(ended[1].error).__name__ == "StaleEpoch"
        assert rig.is_solo(ended[0].value.output, [0, 3, 5])
        assert rig.statistics.clearing_slots == 0
        newest = rig.runtime.get(key("session 2", 1))
        await newest.prefill([7])
        await decode_on(newest, rig, [7], 4)
        assert rig.statistics.lent_slots == 2


async def test_a_slot_asked_for_during_a_move_is_had_after_it() -> None:
    async with open_rig(FakeEngine(n_slots=3, move_cost=0.5)) as rig:
        sessions = await open_all(rig, 3)
        await sessions[1].aclose()
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            ended = [spawn(nursery, sessions[number].decode, 5) for number in (0, 2)]
            await wait_all_tasks_blocked()
            assert (rig.statistics.free_slots, rig.statistics.clearing_slots) == (0, 1)
            opened = spawn(nursery, rig.runtime.start_session, key("newcomer"))
            await wait_all_tasks_blocked()
            assert not opened.done
            rig.executor.resume()
        assert [rig.is_solo(e.value.output, [number, 3, 5]) for e, number in zip(ended, (0, 2), strict=True)] == [
            True
        ] * 2
        assert slots_of([sessions[0], sessions[2], opened.value]) == [0, 1, 2]
        assert rig.statistics.evicted == 0
