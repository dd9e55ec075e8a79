"""The faults to plant: each a change of the package's source text, and what it would do to those who use it."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault."""

    name: str
    file: str
    """Within the package."""
    old: str
    """Occurs exactly once."""
    new: str


FAULTS = [
    Fault(
        "an unshielded await before the release",
        "_runtime.py",
        "        finally:\n            await self._close(session, MissReason.RELEASED)  # noqa: ASYNC102",
        "        finally:\n            await trio.lowlevel.checkpoint()\n"
        "            await self._close(session, MissReason.RELEASED)",
    ),
    Fault(
        "a session's scope is left before its slot is back",
        "_runtime.py",
        "    await call(session._runtime._executor, _do_nothing)",
        "    await trio.lowlevel.cancel_shielded_checkpoint()",
    ),
    Fault(
        "bytes and slot returned before the native removal",
        "_runtime.py",
        "self._executor.submit(partial(clear, self._engine, tenancy.slot), partial(self._cleared, tenancy))",
        "self._executor.submit(partial(clear, self._engine, tenancy.slot), lambda _: None)\n"
        "        self._clearing.discard(tenancy)\n"
        "        self._limiter._give_back(tenancy)\n"
        "        tenancy.returned = True",
    ),
    Fault(
        "a slot is not emptied for its next tenant",
        "_scheduler.py",
        "    engine.clear(slot)\n    if left := engine.length(slot):",
        "    if left := 0:",
    ),
    Fault(
        "a slot is lent again while it is being emptied",
        "_slots.py",
        "        claim.clearing = True",
        "        claim.clearing = True\n        heapq.heappush(self._free, claim.slot)\n        claim.slot = None",
    ),
    Fault(
        "a slot that could not be emptied is lent again",
        "_runtime.py",
        "self._limiter._give_back(tenancy, quarantine=dirty is not None)",
        "self._limiter._give_back(tenancy)",
    ),
    Fault(
        "a quarantined slot is never tried again",
        "_runtime.py",
        "        if due != math.inf and self._closed is None:",
        "        if False:",
    ),
    Fault(
        "no wake-up when a waiter leaves",
        "_limiter.py",
        "        self._wake(self._ledger.withdraw(claim))",
        "        self._ledger.withdraw(claim)",
    ),
    Fault(
        "no wake-up when bytes come back",
        "_limiter.py",
        "        self._wake(self._ledger.give_back(borrower, quarantine=quarantine))",
        "        self._ledger.give_back(borrower, quarantine=quarantine)",
    ),
    Fault(
        "only one of several waiters is woken",
        "_limiter.py",
        "        for claim in granted:",
        "        for claim in list(granted)[:1]:",
    ),
    Fault(
        "a session that comes to rest is not offered to those who wait",
        "_runtime.py",
        "            self._scheduler.want_room()",
        "            pass",
    ),
    Fault(
        "the last to come is served first",
        "_slots.py",
        "        return next(iter(self.waiting.values()), None)",
        "        return next(reversed(self.waiting.values()), None)",
    ),
    Fault(
        "a wrong LRU victim",
        "_directory.py",
        "        return next(iter(self._idle), None)",
        "        return next(reversed(self._idle), None)",
    ),
    Fault(
        "a busy session counts as idle",
        "_session.py",
        "        self._runtime._directory.stir(self._entry)",
        "        pass",
    ),
    Fault(
        "a pinned session can be evicted",
        "_directory.py",
        "        if entry.live and not entry.pinned:",
        "        if entry.live:",
    ),
    Fault(
        "the idle TTL is not kept",
        "_runtime.py",
        "        if (due := self._directory.next_expiry()) < self._nap.deadline:",
        "        if False:",
    ),
    Fault(
        "a lowered budget evicts nobody",
        "_limiter.py",
        "            self._throw(claim, BudgetExceeded(claim.nbytes, total_bytes))\n        self._make_room()",
        "            self._throw(claim, BudgetExceeded(claim.nbytes, total_bytes))",
    ),
    Fault(
        "a waiter that can never be served is not told",
        "_limiter.py",
        "            self._throw(claim, BudgetExceeded(claim.nbytes, total_bytes))",
        "            pass",
    ),
    Fault(
        "a newer epoch does not end the older session",
        "_runtime.py",
        "        if older is not None:\n            self._end_session",
        "        if False:\n            self._end_session",
    ),
    Fault(
        "the epoch check is left out of opening",
        "_directory.py",
        "        self._refuse_stale(key)\n        if (entry := self._live",
        "        if (entry := self._live",
    ),
    Fault(
        "the epoch check is left out of release and get",
        "_directory.py",
        "        self._refuse_stale(key)\n        entry = self._live.get",
        "        entry = self._live.get",
    ),
    Fault(
        "the epoch of an ended session is forgotten",
        "_directory.py",
        "Tombstone(entry.key.route_epoch, reason)",
        "Tombstone(0, reason)",
    ),
    Fault(
        "the same key can be opened twice",
        "_directory.py",
        "            raise SessionExists(key)",
        "            pass",
    ),
    Fault(
        "queued work is not fenced",
        "_runtime.py",
        "        if session._ticket is not None:",
        "        if False:",
    ),
    Fault(
        "fenced work stays queued",
        "_scheduler.py",
        "            self.plan.withdraw(ticket.work)\n            self._answer(ticket)",
        "            self._answer(ticket)",
    ),
    Fault(
        "cancelled work stays queued",
        "_scheduler.py",
        "            self.plan.withdraw(ticket.work)\n            return trio.lowlevel.Abort.SUCCEEDED",
        "            return trio.lowlevel.Abort.SUCCEEDED",
    ),
    Fault(
        "an off-by-one position in the second chunk",
        "_plan.py",
        "self.start + self.done, self.data",
        "self.start + self.done + bool(self.done), self.data",
    ),
    Fault(
        "a chunk's tokens begin one too early",
        "_plan.py",
        "self.data[self.done : end]",
        "self.data[max(0, self.done - 1) : max(0, self.done - 1) + n_tokens]",
    ),
    Fault(
        "a result delivered to the neighbour",
        "_plan.py",
        "zip(call.works, rows, strict=True)",
        "zip(call.works, rows[::-1], strict=True)",
    ),
    Fault(
        "the last row of a chunked prefill is lost",
        "_plan.py",
        "and end < len(self.data)",
        "and len(self.data) > n_tokens",
    ),
    Fault(
        "the length grows before the native call has succeeded",
        "_session.py",
        "            await self._perform(tenancy, work)\n            self._length += len(checked)\n",
        "            self._length += len(checked)\n            await self._perform(tenancy, work)\n",
    ),
    Fault(
        "a cancelled append is not cut back",
        "_session.py",
        "        return not work.done or await call(  # noqa: ASYNC910",
        "        return True or await call(  # noqa: ASYNC910",
    ),
    Fault(
        "a failed append is not cut back",
        "_scheduler.py",
        "    kept = [cut(engine, append.slot, start) for append, start in zip(group, starts, strict=True)]",
        "    kept = [True for _ in group]",
    ),
    Fault(
        "a failed append is cut back to its last chunk only",
        "_scheduler.py",
        "                starts = [work.start for work in planned.works]",
        "                starts = [work.start + work.done for work in planned.works]",
    ),
    Fault(
        "memory that could not be cut back stays hot",
        "_session.py",
        "            return ticket.kept  # noqa: ASYNC910",
        "            return True  # noqa: ASYNC910",
    ),
    Fault(
        "a cancelled append answers as if it had succeeded",
        "_scheduler.py",
        "            ticket.raise_cancel()",
        "            pass",
    ),
    Fault(
        "two operations of a session run at once",
        "_session.py",
        "        if not self._turn_taken:",
        "        if True:",
    ),
    Fault(
        "what came while a call ran waits for somebody else to come",
        "_scheduler.py",
        "        if self.plan or self._room_wanted:\n            self._consider()",
        "        if self._room_wanted:\n            self._consider()",
    ),
    Fault(
        "a session's turn is not handed on",
        "_session.py",
        "        self._turn_taken = bool(self._turns.unpark())\n",
        "        self._turn_taken = False\n",
    ),
    Fault(
        "a turn goes to whoever waits, though its task was cancelled and gets none",
        "_session.py",
        "        if not self._turn_taken:",
        "        if self._operations == 1:",
    ),
    Fault(
        "a session that ended while it got its slot goes on",
        "_runtime.py",
        "        session._require_tenancy(tenancy)\n        return tenancy",
        "        return tenancy",
    ),
    Fault(
        "a session that lost its KV goes on at position 0 unasked",
        "_session.py",
        "        if at is None and self._lost:",
        "        if False:",
    ),
    Fault(
        "exact mode groups sessions",
        "_runtime.py",
        "max_group=1 if options.exact else largest_call",
        "max_group=largest_call",
    ),
    Fault(
        "a group takes slots that are not next to each other",
        "_plan.py",
        "(self.scattered or last[-1].slot + 1 == work.slot)",
        "True",
    ),
    Fault(
        "work queued for a session that is moved goes to its old slot",
        "_plan.py",
        "                work.slot = target\n",
        "",
    ),
    Fault(
        "the slot that a session is moved from is lent before the move is made",
        "_slots.py",
        "        claim.slot = slot\n        return left",
        "        heapq.heappush(self._free, claim.slot)\n        left.slot = None\n        claim.slot = slot\n"
        "        return left",
    ),
    Fault(
        "a move that failed is taken for done",
        "_runtime.py",
        "            if isinstance(result, outcome.Value) and result.value:",
        "            if isinstance(result, outcome.Value):",
    ),
    Fault(
        "a move that failed leaves the old slot as it is",
        "_scheduler.py",
        "    if not moved:\n        clear(engine, source)\n",
        "",
    ),
    Fault(
        "a truncation forgets to shorten the session",
        "_session.py",
        "        self._length = length\n",
        "",
    ),
    Fault(
        "a conditional append is not checked",
        "_session.py",
        "        elif at is not None and at < self._length:",
        "        elif False:",
    ),
    Fault(
        "a full slot is appended to",
        "_session.py",
        "        if self._length + n_tokens > limit:",
        "        if self._length > limit:",
    ),
]
