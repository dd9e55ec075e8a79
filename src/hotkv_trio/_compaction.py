"""Compaction: when to bring the slots of working sessions together, and by which moves.  Pure state.

A native call serves consecutive slots, so sessions that work with holes between them take a call for each run of
consecutive ones.  A move costs as much as some such calls.  Nobody knows how long a choice of working sessions lasts;
but who moves them only once the calls too many have cost as much as the moves will, never pays more than twice what
the best choice with foresight would have (the rule for renting or buying skis; Karlin, Manasse, Rudolph and Sleator,
"Competitive snoopy caching", 1988).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Move: TypeAlias = tuple[int, int]
"""From a slot to one that is free when its turn has come."""


@attrs.define(eq=False)
class Compaction:
    """What holes have cost since the last moves, and the moves that are worth their price."""

    n_slots: int
    move_cost: float
    """Of one move, in native calls."""
    _debt: float = attrs.field(default=0.0, init=False)
    _worthwhile: float = attrs.field(default=0.0, init=False)
    """The debt at which looking for moves makes sense again."""

    def note(self, working: Sequence[int]) -> bool:
        """Note a round of the slots ``working``, in order; return whether to look for moves."""
        holes = count_runs(working) - 1
        if holes <= 0:
            self._debt = self._worthwhile = 0.0
            return False
        self._debt += holes
        return self._debt >= max(self.move_cost, self._worthwhile)

    def moves(self, working: Collection[int], idle: Collection[int], free: Collection[int]) -> list[Move]:
        """Return the moves that make the working slots consecutive, if the holes have cost as much already.

        Args:
            working: slots whose next call is to be made.
            idle: slots of sessions that may be moved out of the way.
            free: slots with nothing in them.
        """
        moves = plan_moves(self.n_slots, working, idle, free)
        cost = len(moves) * self.move_cost
        if moves and cost <= self._debt:
            self._debt = self._worthwhile = 0.0
            return moves
        self._worthwhile = cost if moves else 2 * self._debt
        return []


def count_runs(slots: Sequence[int]) -> int:
    """Return of how many runs of consecutive numbers these consist, which are in order."""
    return sum(1 for i, slot in enumerate(slots) if not i or slots[i - 1] + 1 != slot)


def plan_moves(n_slots: int, working: Collection[int], idle: Collection[int], free: Collection[int]) -> list[Move]:
    """Return the fewest moves after which the working sessions' slots are consecutive; none if that cannot be."""
    working, idle, free = set(working), set(idle), set(free)
    best: range | None = None
    fewest = 0
    for first in range(n_slots - len(working) + 1):
        window = range(first, first + len(working))
        in_the_way = idle.intersection(window)
        if not working.union(in_the_way, free).issuperset(window) or (in_the_way and not free):
            continue
        n_moves = len(working.difference(window)) + len(in_the_way)
        if best is None or n_moves < fewest:
            best, fewest = window, n_moves
    if best is None:
        return []
    moves: list[Move] = []
    coming = sorted(working.difference(best))
    spare = sorted(free.difference(best))
    # The free slots first: each that is taken leaves a free one outside, for a session that is in the way.
    for target in sorted(free.intersection(best)) + sorted(idle.intersection(best)):
        if target in idle:
            moves.append((target, spare.pop()))
        source = coming.pop()
        moves.append((source, target))
        spare.append(source)
    return moves
