"""KVLimiter: the one limiter of KV bytes, as trio tasks see it.

The state is a `Ledger`; here claims wait and are woken.  Bytes change hands before the waiter is rescheduled, so
that nobody can slip in between; a waiter that is cancelled takes its claim back, which may let the next one go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import attrs
import outcome
import trio

from hotkv_trio._errors import BudgetExceeded, InvalidInput
from hotkv_trio._inputs import check_count
from hotkv_trio._slots import Claim, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable


@attrs.frozen
class KVLimiterStatistics:
    """A moment's view of a `KVLimiter`."""

    total_bytes: int
    """The budget."""
    borrowed_bytes: int
    """Bytes lent."""
    available_bytes: int
    """Bytes that could be lent now."""
    borrowers: int
    """Borrowers that hold bytes."""
    tasks_waiting: int
    """Claims that wait, in FIFO order."""


def _nothing_to_evict() -> None:
    """Stand in where nobody can make room."""


@final
class KVLimiter:
    """Lends bytes of a budget; like `trio.CapacityLimiter`, but a borrower takes any number of bytes in one go.

    Strictly first come, first served: a small claim never overtakes a large one that waits.  A borrower (by default
    the calling task) has one claim at a time.

    Args:
        total_bytes: the budget.

    Raises:
        InvalidInput: ``total_bytes`` is not an integer >= 0.
    """

    def __init__(self, total_bytes: int, *, _n_slots: int = 0) -> None:
        self._ledger = Ledger(_check_total(total_bytes), _n_slots)
        self._parked: dict[Claim, trio.lowlevel.Task] = {}
        # Called when a claim has to wait, or less is free than there should be: the runtime evicts here.
        self._make_room: Callable[[], None] = _nothing_to_evict

    def __repr__(self) -> str:
        return (
            f"<hotkv_trio.KVLimiter at {id(self):#x}, {self.borrowed_bytes}/{self.total_bytes} bytes"
            f" with {len(self._ledger.waiting)} waiting>"
        )

    @property
    def total_bytes(self) -> int:
        """The budget.  Set below what is borrowed, it takes nothing back, and lends nothing before that fits.

        Raises:
            InvalidInput: set to something that is not an integer >= 0.
        """
        return self._ledger.total_bytes

    @total_bytes.setter
    @trio.lowlevel.enable_ki_protection
    def total_bytes(self, total_bytes: int) -> None:
        granted, refused = self._ledger.set_total(_check_total(total_bytes))
        self._wake(granted)
        for claim in refused:
            self._throw(claim, BudgetExceeded(claim.nbytes, total_bytes))
        self._make_room()

    @property
    def borrowed_bytes(self) -> int:
        """Bytes lent."""
        return self._ledger.borrowed_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes that could be lent now."""
        return self._ledger.available_bytes

    def statistics(self) -> KVLimiterStatistics:
        """Return a moment's view."""
        return KVLimiterStatistics(
            total_bytes=self.total_bytes,
            borrowed_bytes=self.borrowed_bytes,
            available_bytes=self.available_bytes,
            borrowers=len(self._ledger.granted),
            tasks_waiting=len(self._ledger.waiting),
        )

    def acquire_nowait(self, nbytes: int) -> None:
        """Borrow bytes for the calling task, without waiting.

        Raises:
            trio.WouldBlock: they are not free, or somebody waits.
            BudgetExceeded: more than the whole budget.
            RuntimeError: the task holds or waits for bytes already.
            InvalidInput: ``nbytes`` is not an integer > 0.
        """
        self.acquire_on_behalf_of_nowait(trio.lowlevel.current_task(), nbytes)

    @trio.lowlevel.enable_ki_protection
    def acquire_on_behalf_of_nowait(self, borrower: Hashable, nbytes: int) -> None:
        """Borrow bytes for ``borrower``, without waiting; see `acquire_nowait`."""
        claim = self._ledger.request(borrower, check_count("the bytes to borrow", nbytes))
        if not claim.granted:
            self._ledger.withdraw(claim)
            raise trio.WouldBlock

    async def acquire(self, nbytes: int) -> None:
        """Borrow bytes for the calling task, waiting until everybody who came before has theirs.

        Either the bytes are borrowed, or it raises `trio.Cancelled`, nothing was taken, and a waiter behind that now
        fits has been woken.

        Raises:
            BudgetExceeded: more than the whole budget, now or because it was lowered meanwhile.
            RuntimeError: the task holds or waits for bytes already.
            InvalidInput: ``nbytes`` is not an integer > 0.
        """
        await self.acquire_on_behalf_of(trio.lowlevel.current_task(), nbytes)

    @trio.lowlevel.enable_ki_protection
    async def acquire_on_behalf_of(self, borrower: Hashable, nbytes: int) -> None:
        """Borrow bytes for ``borrower``; see `acquire`, also for what is true after `trio.Cancelled`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        claim = self._ledger.request(borrower, check_count("the bytes to borrow", nbytes))
        await self._wait(claim)

    def release(self) -> None:
        """Give back what the calling task borrowed.

        Raises:
            RuntimeError: it holds nothing.
        """
        self.release_on_behalf_of(trio.lowlevel.current_task())

    @trio.lowlevel.enable_ki_protection
    def release_on_behalf_of(self, borrower: Hashable) -> None:
        """Give back what ``borrower`` borrowed.

        Raises:
            RuntimeError: it holds nothing.
        """
        self._give_back(borrower)

    def _give_back(self, borrower: Hashable, *, quarantine: bool = False) -> None:
        self._wake(self._ledger.give_back(borrower, quarantine=quarantine))
        self._make_room()

    def _restore(self, slot: int) -> None:
        self._wake(self._ledger.restore(slot))

    def _withdraw(self, claim: Claim) -> None:
        self._wake(self._ledger.withdraw(claim))
        self._make_room()

    def _refuse(self, borrower: Hashable, error: Exception) -> None:
        """Raise ``error`` in the task that waits for ``borrower``'s claim, if one does."""
        if claim := self._ledger.waiting.get(borrower):
            granted = self._ledger.withdraw(claim)
            self._throw(claim, error)
            self._wake(granted)

    async def _wait(self, claim: Claim) -> None:
        """Return once the claim is granted; it is taken back if the wait ends in any other way."""
        if not claim.granted:
            self._make_room()
        if claim.granted:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        self._parked[claim] = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            del self._parked[claim]
            return trio.lowlevel.Abort.SUCCEEDED

        try:
            await trio.lowlevel.wait_task_rescheduled(abort)
        except BaseException:
            self._parked.pop(claim, None)
            self._withdraw(claim)
            raise

    def _wake(self, granted: Iterable[Claim]) -> None:
        for claim in granted:
            if task := self._parked.pop(claim, None):
                trio.lowlevel.reschedule(task)

    def _throw(self, claim: Claim, error: Exception) -> None:
        if task := self._parked.pop(claim, None):
            trio.lowlevel.reschedule(task, outcome.Error(error))


def _check_total(total_bytes: object) -> int:
    if not isinstance(total_bytes, int) or isinstance(total_bytes, bool) or total_bytes < 0:
        raise InvalidInput(f"total_bytes must be an integer >= 0, not {total_bytes!r:.200}")
    return total_bytes
