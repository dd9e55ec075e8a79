"""Ledger: bytes and slots, who holds them and who waits for them.

Every transition of bytes and slots happens in this file, and nothing here waits, wakes or calls an engine: a method
changes the state and returns the claims that it granted, and its caller wakes their borrowers.

The rules, in full:

1. A claim asks for bytes, or for bytes and a slot.  Both are granted together or not at all.
2. Claims are granted in the order in which they were made: nobody overtakes the claim at the head, however small.
3. A claim for more than the whole budget is refused when it is made, and when the budget is lowered below it.
4. A borrower has one claim at a time, waiting or granted.
5. A slot is free, lent, or quarantined.  The lowest free one is lent, which keeps slots in use next to each other.
6. A slot that its borrower is done with stays lent until it has been emptied (`begin_clearing`, then `give_back`).
7. A tenant may be moved to a free slot while nobody waits.  Both slots and their bytes are lent until the old one has
   been emptied.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING

import attrs

from hotkv_trio._errors import BudgetExceeded

if TYPE_CHECKING:
    from collections.abc import Hashable


@attrs.define(eq=False)
class Claim:
    """What one borrower asked for, and whether it has it."""

    borrower: Hashable
    nbytes: int
    with_slot: bool
    granted: bool = False
    clearing: bool = False
    """Its borrower is done with it, and the slot is being emptied: the bytes are as good as free, but not free yet."""
    slot: int | None = None
    """The slot lent, once granted to a claim that asked for one."""


@attrs.define(eq=False)
class Ledger:
    """Who holds which bytes and slots, and who waits."""

    total_bytes: int
    n_slots: int = 0
    borrowed_bytes: int = attrs.field(default=0, init=False)
    granted: dict[Hashable, Claim] = attrs.field(factory=dict, init=False)
    waiting: OrderedDict[Hashable, Claim] = attrs.field(factory=OrderedDict, init=False)
    quarantined: set[int] = attrs.field(factory=set, init=False)
    _free: list[int] = attrs.field(init=False)  # a heap

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.n_slots))

    @property
    def available_bytes(self) -> int:
        """Bytes that could be lent now; never negative, though the budget may have been lowered below what is lent."""
        return max(0, self.total_bytes - self.borrowed_bytes)

    @property
    def free_slots(self) -> int:
        """Slots that could be lent now."""
        return len(self._free)

    @property
    def free(self) -> list[int]:
        """The slots that could be lent now."""
        return sorted(self._free)

    @property
    def lent_slots(self) -> int:
        """Slots lent now."""
        return self.n_slots - len(self._free) - len(self.quarantined)

    @property
    def excess(self) -> int:
        """Bytes lent beyond the budget, without those being cleared."""
        over = self.borrowed_bytes - self.total_bytes
        # Asked after every step of every session, which is seldom over the budget.
        return max(0, over - sum(claim.nbytes for claim in self.granted.values() if claim.clearing)) if over > 0 else 0

    @property
    def shortfall(self) -> tuple[int, int]:
        """Bytes and slots to be freed, beyond those being cleared, before the budget holds and the head can go."""
        clearing = [claim for claim in self.granted.values() if claim.clearing]
        head = self.head
        free_bytes = self.total_bytes - self.borrowed_bytes + sum(claim.nbytes for claim in clearing)
        free_slots = len(self._free) + len(clearing)
        wanted = 0 if head is None else head.nbytes
        return max(0, wanted - free_bytes), max(0, int(head is not None and head.with_slot) - free_slots)

    @property
    def head(self) -> Claim | None:
        """The claim that is granted next."""
        return next(iter(self.waiting.values()), None)

    def fits(self, claim: Claim) -> bool:
        """Whether the claim could be granted if it were at the head."""
        return claim.nbytes <= self.total_bytes - self.borrowed_bytes and (not claim.with_slot or bool(self._free))

    def request(self, borrower: Hashable, nbytes: int, *, with_slot: bool = False) -> Claim:
        """Make a claim.  It is granted at once if nobody waits and it fits; else it waits behind all others.

        Raises:
            BudgetExceeded: it can never fit.
            RuntimeError: the borrower has a claim already.
        """
        if borrower in self.granted or borrower in self.waiting:
            raise RuntimeError(f"{borrower!r} already holds or waits for KV bytes")
        if nbytes > self.total_bytes:
            raise BudgetExceeded(nbytes, self.total_bytes)
        claim = Claim(borrower, nbytes, with_slot)
        self.waiting[borrower] = claim
        if len(self.waiting) == 1:
            self._grant()
        return claim

    def withdraw(self, claim: Claim) -> list[Claim]:
        """Take a claim back, whether it waits, was just granted, or was refused, as if it had never been made."""
        if claim.clearing:
            return []
        if self.granted.get(claim.borrower) is claim:
            return self.give_back(claim.borrower)
        if self.waiting.get(claim.borrower) is claim:
            del self.waiting[claim.borrower]
        return self._grant()

    def begin_clearing(self, claim: Claim) -> None:
        """Note that a granted claim's slot is being emptied; only `give_back` ends the claim from now on."""
        claim.clearing = True

    def can_move(self, claim: Claim, slot: int) -> bool:
        """Whether the tenant of a granted claim may be moved to the slot now."""
        return not self.waiting and not claim.clearing and slot in self._free and claim.nbytes <= self.available_bytes

    def move(self, claim: Claim, slot: int, leaver: Hashable) -> Claim:
        """Move the tenant of a granted claim to a free slot.

        Returns:
            The claim of ``leaver`` for the slot left behind, which is being emptied.

        Raises:
            RuntimeError: it may not be moved there now.
        """
        if not self.can_move(claim, slot):
            raise RuntimeError(f"{claim} cannot be moved to slot {slot}")
        left = Claim(leaver, claim.nbytes, with_slot=True, granted=True, clearing=True, slot=claim.slot)
        self.granted[leaver] = left
        self.borrowed_bytes += left.nbytes
        self._free.remove(slot)
        heapq.heapify(self._free)
        claim.slot = slot
        return left

    def give_back(self, borrower: Hashable, *, quarantine: bool = False) -> list[Claim]:
        """End a granted claim.  A slot that cannot be proven clean goes into quarantine instead of being lent again.

        Raises:
            RuntimeError: the borrower holds nothing.
        """
        claim = self.granted.pop(borrower, None)
        if claim is None:
            raise RuntimeError(f"{borrower!r} holds no KV bytes")
        self.borrowed_bytes -= claim.nbytes
        if claim.slot is not None:
            if quarantine:
                self.quarantined.add(claim.slot)
            else:
                heapq.heappush(self._free, claim.slot)
        return self._grant()

    def restore(self, slot: int) -> list[Claim]:
        """Let a quarantined slot, proven clean, be lent again."""
        self.quarantined.remove(slot)
        heapq.heappush(self._free, slot)
        return self._grant()

    def set_total(self, total_bytes: int) -> tuple[list[Claim], list[Claim]]:
        """Change the budget.  Nothing lent is taken back; nothing is lent before it fits.

        Returns:
            The claims granted, and the waiting claims refused because they can never fit any more.
        """
        self.total_bytes = total_bytes
        refused = [claim for claim in self.waiting.values() if claim.nbytes > total_bytes]
        for claim in refused:
            del self.waiting[claim.borrower]
        return self._grant(), refused

    def check_integrity(self) -> None:
        """Raise AssertionError unless bytes and slots are conserved.

        Raises:
            AssertionError: a slot is in two places or in none, bytes do not add up, or a claim waits that could go.
        """
        lent = [claim.slot for claim in self.granted.values() if claim.slot is not None]
        places = sorted([*self._free, *lent, *self.quarantined])
        _require(places == list(range(self.n_slots)), f"free + lent + quarantined slots are {places}")
        held = sum(claim.nbytes for claim in self.granted.values())
        _require(held == self.borrowed_bytes, f"claims hold {held} bytes, borrowed are {self.borrowed_bytes}")
        _require(all(claim.granted for claim in self.granted.values()), "an ungranted claim holds bytes")
        _require(not any(claim.granted for claim in self.waiting.values()), "a granted claim waits")
        _require(self.head is None or not self.fits(self.head), "the head of the queue waits though it fits")

    def _grant(self) -> list[Claim]:
        granted = []
        while (claim := self.head) is not None and self.fits(claim):
            del self.waiting[claim.borrower]
            self.borrowed_bytes += claim.nbytes
            if claim.with_slot:
                claim.slot = heapq.heappop(self._free)
            claim.granted = True
            self.granted[claim.borrower] = claim
            granted.append(claim)
        return granted


def _require(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)
