"""Runtime: the sessions of one engine, from the engine's opening to its close.

What becomes of a session's slot is decided in three places only: `_move_in` takes one, `_detach` gives it up (whatever
the reason: release, eviction, expiry, a newer epoch, a failure, the end), and `_cleared` lets it be lent again, once
the owner thread has emptied it after the last native call that named it.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, final

import attrs
import outcome
import trio

from hotkv_trio._compaction import Compaction
from hotkv_trio._directory import Directory, Entry
from hotkv_trio._errors import (
    BudgetExceeded,
    CacheMiss,
    HotKVError,
    InvalidInput,
    MissReason,
    RuntimeClosed,
    StaleEpoch,
)
from hotkv_trio._inputs import check_count
from hotkv_trio._isolation import MOST_SLOTS, IsolationReport, prove
from hotkv_trio._keys import SessionKey
from hotkv_trio._limiter import KVLimiter
from hotkv_trio._nursery import open_body_nursery, protected_context, start_service
from hotkv_trio._owner import Executor, OwnerThread, call, error_of
from hotkv_trio._plan import Plan
from hotkv_trio._recipe import CacheRecipe
from hotkv_trio._scheduler import Scheduler, clear, move
from hotkv_trio._session import Session, Tenancy
from hotkv_trio._statistics import RuntimeStatistics

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from hotkv_trio._engine import Engine, EngineInfo
    from hotkv_trio._slots import Claim

logger = logging.getLogger("hotkv_trio")

_FORKED = "this process was forked after the runtime was opened: open one in each process, after the fork"
_FIRST_RETRY = 1.0
_LAST_RETRY = 60.0
"""Seconds between attempts to empty a quarantined slot: the first wait, doubled up to the last."""


@final
class Runtime:
    """Keeps the hot KV of many sessions on one engine; made by `open_runtime`."""

    def __init__(
        self, engine: Engine, info: EngineInfo, executor: Executor, options: Options, kept: trio.Nursery | None = None
    ) -> None:
        self._engine = engine
        self._info = info
        self._executor = executor
        self._kept = kept
        self._limiter = KVLimiter(
            info.n_slots * info.slot_bytes if options.kv_budget is None else options.kv_budget, _n_slots=info.n_slots
        )
        self._ledger = self._limiter._ledger
        self._directory: Directory[Session] = Directory(options.idle_ttl)
        largest_call = min(info.max_batch_tokens, info.max_outputs)
        self._scheduler = Scheduler(
            engine,
            executor,
            Plan(
                prefill_chunk=min(options.prefill_chunk, largest_call),
                max_group=1 if options.exact else largest_call,
                scattered=info.recipe.layout == "unified",
            ),
            count_hot=self._count_hot,
            make_room=self._make_room,
            compact=self._compact,
        )
        alone = options.exact or info.recipe.layout == "unified"
        self._compaction = Compaction(info.n_slots, math.inf if alone else info.move_cost)
        self._moves = 0
        self._limiter._make_room = self._scheduler.want_room
        self._exact = options.exact
        self._impatient: set[Tenancy] = set()
        self._clearing: set[Tenancy] = set()
        self._retries: dict[int, tuple[float, float]] = {}
        self._retried_for: Claim | None = None
        self._nap = trio.CancelScope()
        self._counts: Counter[str] = Counter()
        self._closed: RuntimeClosed | None = None
        self._crash: Exception | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "exact" if self._exact else "grouped"
        return (
            f"<hotkv_trio.Runtime at {id(self):#x}, {state}, layers {self._info.layers[0]}:{self._info.layers[1]},"
            f" {self._ledger.lent_slots}/{self._info.n_slots} slots lent with {len(self._ledger.waiting)} waiting>"
        )

    @property
    def recipe(self) -> CacheRecipe:
        """What cached KV here depends on; a client that sends an unequal one is refused."""
        return self._info.recipe

    @property
    def info(self) -> EngineInfo:
        """The facts of the engine."""
        return self._info

    @property
    def limiter(self) -> KVLimiter:
        """The one limiter of KV bytes.  Its ``total_bytes`` is the budget, and may be set at any time."""
        return self._limiter

    def statistics(self) -> RuntimeStatistics:
        """Return a moment's view."""
        return RuntimeStatistics(
            sessions=len(self._directory.entries),
            hot=self._count_hot(),
            waiting=len(self._ledger.waiting),
            slots=self._info.n_slots,
            free_slots=self._ledger.free_slots,
            lent_slots=self._ledger.lent_slots,
            clearing_slots=len(self._clearing),
            quarantined_slots=len(self._ledger.quarantined),
            total_bytes=self._limiter.total_bytes,
            borrowed_bytes=self._limiter.borrowed_bytes,
            tombstones=self._directory.tombstones,
            native_calls=self._scheduler.native_calls,
            moves=self._moves,
            tokens_prefilled=self._scheduler.tokens_prefilled,
            tokens_decoded=self._scheduler.tokens_decoded,
            **{name: self._counts[name] for name in _COUNTED},
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every invariant holds; it may be called between any two steps of trio's loop.

        Raises:
            AssertionError: slots or bytes are not conserved, a slot is in two sessions, a cold session holds
                something, or the directory contradicts itself.
        """
        self._ledger.check_integrity()
        self._directory.check_integrity()
        held = {e.session._tenancy for e in self._directory.entries if e.session.hot} | self._clearing
        lent = {borrower for borrower, claim in self._ledger.granted.items() if claim.with_slot}
        if held != lent:
            raise AssertionError(f"sessions hold {held}, the ledger lent to {lent}")
        if any(not e.session.hot and e.session.length for e in self._directory.entries):
            raise AssertionError("a cold session has a length")
        budgeted = sum(claim.nbytes for claim in self._ledger.granted.values() if claim.with_slot)
        if budgeted != self._ledger.lent_slots * self._info.slot_bytes:
            raise AssertionError(f"{self._ledger.lent_slots} slots lent for {budgeted} bytes")

    @protected_context
    @asynccontextmanager
    async def open_session(
        self, key: SessionKey, *, recipe: CacheRecipe | None = None, pinned: bool = False, wait: bool = True
    ) -> AsyncGenerator[Session]:
        """Open a session for as long as the ``async with`` lasts.

        It holds a slot and its bytes when the body begins.  When the body ends, in whatever way, the native call that
        runs for it is waited for, the slot is emptied, and the bytes are back, before anything leaves the block; what
        the body raised leaves it as it is.

        After `trio.Cancelled` while waiting for a slot nothing was taken, and a waiter behind that now fits has been
        woken; the epoch counts as seen.

        Args:
            key: a higher epoch than the newest seen of its id replaces that one and fences it off.
            recipe: what the client's cached KV counts on; refused if it is not this runtime's.
            pinned: neither evict it nor let it expire.
            wait: wait for a slot, in FIFO order, if none can be had at once.

        Raises:
            StaleEpoch: a newer epoch was seen, before or while waiting.
            SessionExists: the key is open already.
            RecipeMismatch: the recipes differ.
            BudgetExceeded: a session is larger than the whole budget.
            trio.WouldBlock: not ``wait``, and no slot can be had without waiting for somebody's work.
            CacheMiss: the session was released by `release` while waiting.
            RuntimeClosed: the runtime has ended, before or meanwhile.
            InvalidInput: an argument is not what it should be.
        """
        scope = trio.CancelScope()
        session = await self._admit(key, scope, recipe=recipe, pinned=pinned, wait=wait)
        try:
            async with open_body_nursery(scope) as nursery:
                session._nursery = nursery
                yield session
        finally:
            await self._close(session, MissReason.RELEASED)  # noqa: ASYNC102

    @trio.lowlevel.enable_ki_protection
    async def serve_session(
        self,
        key: SessionKey,
        *,
        recipe: CacheRecipe | None = None,
        pinned: bool = False,
        wait: bool = True,
        task_status: trio.TaskStatus[Session] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Open a session in a nursery of the caller's, by ``await nursery.start(runtime.serve_session, key)``.

        ``start`` returns the session, hot, once it holds its slot and bytes.  The task ends when the session is
        released, superseded or cancelled, and everything is back then; also when the nursery is cancelled.  Errors,
        and what is true after `trio.Cancelled`, are those of `open_session`.
        """
        async with self.open_session(key, recipe=recipe, pinned=pinned, wait=wait) as session:
            task_status.started(session)
            await session._ended.wait()

    @trio.lowlevel.enable_ki_protection
    async def start_session(
        self, key: SessionKey, *, recipe: CacheRecipe | None = None, pinned: bool = False, wait: bool = True
    ) -> Session:
        """Open a session that the runtime itself keeps, hot between requests, until it is released or goes cold.

        Errors, and what is true after `trio.Cancelled`, are those of `open_session`.  An error of a task in the
        session's nursery ends the session and is logged.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_open()
        if self._kept is None:
            raise RuntimeClosed("the runtime has not started yet")
        session: Session = await self._kept.start(partial(self._keep, key, recipe=recipe, pinned=pinned, wait=wait))
        return session

    def get(self, key: SessionKey) -> Session:
        """Return the open session of exactly this key.

        It may be cold, or go cold or end before it is used: every operation checks again.

        Raises:
            CacheMiss: there is none; ``reason`` says why.
            StaleEpoch: a newer epoch was seen.
            RuntimeClosed: the runtime has ended.
            InvalidInput: ``key`` is not a `SessionKey`.
        """
        self._require_open()
        session = self._directory.look_up(_check_key(key)).session
        if not session._opened:
            raise CacheMiss(key, MissReason.UNKNOWN)
        return session

    @trio.lowlevel.enable_ki_protection
    async def release(self, key: SessionKey) -> bool:
        """End the session of exactly this key; its slot is free and its bytes are back when this returns.

        Either that, or it raises `trio.Cancelled` and nothing was changed.

        Returns:
            Whether there was one.  Releasing again, or what was never there, changes nothing.

        Raises:
            StaleEpoch: a newer epoch was seen; it is not touched.
            RuntimeClosed: the runtime has ended.
            InvalidInput: ``key`` is not a `SessionKey`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_open()
        _check_key(key)
        await trio.lowlevel.checkpoint()
        self._require_open()
        try:
            session = self._directory.look_up(key).session
        except CacheMiss:
            return False
        await self._close(session, MissReason.RELEASED)
        return True

    @trio.lowlevel.enable_ki_protection
    async def verify_isolation(self) -> IsolationReport:
        """Prove on this very engine what isolation holds, bit for bit, and say it.

        It takes up to four slots that are free, as sessions of its own, and makes some hundred native calls in them;
        other sessions' calls go in between.  The slots are free and the bytes are back when it returns or raises, also
        after `trio.Cancelled`.

        Raises:
            trio.WouldBlock: no slot is free.
            EngineFailed: a native call failed that should not have, which is a finding too.
            CacheMiss: a slot was lost meanwhile (by a smaller budget, say).
            RuntimeClosed: the runtime has ended.
            InvalidInput: in the unified layout, a slot is in use, or there are more than four.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_open()
        fit = self._limiter.available_bytes // max(1, self._info.slot_bytes)
        if not (fit := min(MOST_SLOTS, self._ledger.free_slots, fit)):
            raise trio.WouldBlock
        name = f"verify-isolation-{secrets.token_hex(8)}"
        async with AsyncExitStack() as stack:
            slots = []
            for number in range(fit):
                session = await stack.enter_async_context(
                    self.open_session(SessionKey(f"{name}-{number}", 0), pinned=True, wait=False)
                )
                # Busy to its end: its slot holds what it does not know of.
                await session._begin()
                slots.append((session, session._require_slot()))
            proof = prove(self._engine, self._info, [slot for _, slot in slots])
            try:
                while True:
                    await trio.lowlevel.checkpoint()
                    for session, slot in slots:
                        if session._require_slot() != slot:
                            raise CacheMiss(session.key, session._cold_reason)
                    report = await call(self._executor, partial(_advance, proof))
                    if report is not None:
                        return report
            finally:
                proof.close()

    # From here on: for the modules of this package.

    @trio.lowlevel.enable_ki_protection
    async def _keep(  # noqa: ASYNC910
        self,
        key: SessionKey,
        *,
        recipe: CacheRecipe | None,
        pinned: bool,
        wait: bool,
        task_status: trio.TaskStatus[Session],
    ) -> None:
        session: Session | None = None
        try:
            async with self.open_session(key, recipe=recipe, pinned=pinned, wait=wait) as session:
                session._kept = True
                task_status.started(session)
                await session._ended.wait()
        except Exception:
            if session is None:
                raise
            # A session's own tasks must not end the runtime, which is all that is above them here.
            logger.exception("a task of the kept session %s failed; the session has ended", key)

    async def _admit(
        self, key: SessionKey, scope: trio.CancelScope, *, recipe: CacheRecipe | None, pinned: bool, wait: bool
    ) -> Session:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_open()
        _check_key(key)
        if recipe is not None:
            if not isinstance(recipe, CacheRecipe):
                raise InvalidInput(f"recipe must be a CacheRecipe or None, not {recipe!r:.200}")
            self.recipe.require(recipe)
        self._directory.refuse(key)
        if self._info.slot_bytes > self._limiter.total_bytes:
            raise BudgetExceeded(self._info.slot_bytes, self._limiter.total_bytes)
        session = Session(self, key, scope)
        session._entry, older = self._directory.admit(key, session, pinned=pinned)
        self._counts["opened"] += 1
        if older is not None:
            self._end_session(older, "superseded", StaleEpoch(older.key, key.route_epoch))
        try:
            await self._move_in(session, wait=wait)
        except BaseException:
            self._end_session(session, MissReason.RELEASED, CacheMiss(key, MissReason.RELEASED))
            raise
        session._opened = True
        self._rest(session)
        return session

    async def _move_in(self, session: Session, *, wait: bool = True) -> Tenancy:
        """Take bytes and a slot for a cold session; after any exception it holds nothing."""
        tenancy = Tenancy(session)
        claim = tenancy.claim = self._ledger.request(tenancy, self._info.slot_bytes, with_slot=True)
        session._tenancy = tenancy
        try:
            if not (wait or claim.granted):
                if self._ledger.head is not claim or not (self._directory.evictable or self._clearing):
                    raise trio.WouldBlock
                self._impatient.add(tenancy)
            await self._limiter._wait(claim)
        except BaseException:
            self._limiter._withdraw(claim)
            if session._tenancy is tenancy:
                session._tenancy = None
            raise
        finally:
            self._impatient.discard(tenancy)
        # The session may have been ended between the grant and now; then its slot is being emptied already.
        session._require_tenancy(tenancy)
        return tenancy

    def _rest(self, session: Session) -> None:
        """Note that a session has no work, from now on."""
        if not session.hot:
            return
        self._directory.rest(session._entry, trio.current_time())
        if (due := self._directory.next_expiry()) < self._nap.deadline:
            self._nap.deadline = due
        if session._entry.idle_since is not None and (self._ledger.waiting or self._ledger.excess):
            self._scheduler.want_room()

    def _make_room(self) -> None:
        """Evict idle sessions, least recently used first: until the budget holds, and for the head if they suffice."""
        while any(shortfall := self._ledger.shortfall):
            needed = max(math.ceil(shortfall[0] / self._info.slot_bytes), shortfall[1])
            entry = self._directory.victim()
            if entry is None or (needed > self._directory.evictable and not self._ledger.excess):
                break
            self._cool(entry, MissReason.EVICTED)
        head = self._ledger.head
        for tenancy in list(self._impatient):
            if tenancy.claim is not head or any(self._ledger.shortfall):
                self._limiter._refuse(tenancy, trio.WouldBlock())
        # Once for each claim that gets to the head: after that, the clock's turns are enough.
        if head is not None and head.with_slot and not self._ledger.free_slots and head is not self._retried_for:
            self._retried_for = head
            for slot in self._ledger.quarantined:
                self._retry(slot)

    async def _compact(self) -> bool:  # noqa: ASYNC910
        """Bring the slots of the sessions that wait with a decode together, if that pays; return whether it tried."""
        plan = self._scheduler.plan
        working = plan.decoding
        if not self._compaction.note(working):
            return False  # noqa: ASYNC910
        idle = [
            session._require_slot()
            for session in (entry.session for entry in self._directory.entries)
            if session.hot and not session._operations
        ]
        moves = self._compaction.moves(working, idle, self._ledger.free)
        for source, target in moves:
            if not await self._move(source, target):
                break
        return bool(moves)  # noqa: ASYNC910

    async def _move(self, source: int, target: int) -> bool:  # noqa: ASYNC910
        """Move a session to a free slot; return whether that was done."""
        tenancy = self._movable(source)
        if tenancy is None or not self._ledger.can_move(tenancy.claim, target):
            return False  # noqa: ASYNC910
        session = tenancy.session
        left = Tenancy(session)
        left.claim = self._ledger.move(tenancy.claim, target, left)
        self._clearing.add(left)
        self._scheduler.plan.move(source, target)
        moved: list[bool] = []

        def settle(result: outcome.Outcome[bool]) -> None:
            self._cleared(left, result)
            if isinstance(result, outcome.Value) and result.value:
                moved.append(True)
                self._moves += 1
            elif session._tenancy is tenancy:
                logger.error("session %s was lost in a move from slot %d to slot %d", session.key, source, target)
                self._cool(session._entry, MissReason.FAILED)

        with suppress(Exception):
            await call(self._executor, partial(move, self._engine, source, target), settle)
        return bool(moved)  # noqa: ASYNC910

    def _movable(self, slot: int) -> Tenancy | None:
        """Return the tenancy of the slot, if nothing but a queued decode counts on where it is."""
        for entry in self._directory.entries:
            tenancy = entry.session._tenancy
            if tenancy is not None and tenancy.claim.granted and tenancy.slot == slot:
                return tenancy if slot in self._scheduler.plan.decoding or not entry.session._operations else None
        return None

    def _cool(self, entry: Entry[Session], reason: MissReason) -> None:
        """Make a session cold; one that the runtime keeps ends, as its scope would never end otherwise."""
        session = entry.session
        miss = CacheMiss(session.key, reason)
        if session._kept:
            self._end_session(session, reason, miss)
        else:
            self._counts[reason] += 1
            self._detach(session, reason, miss)

    async def _chill(self, session: Session, reason: MissReason) -> None:
        """Make a session cold, and wait until its slot is given back."""
        self._cool(session._entry, reason)
        await _emptied(session)

    async def _close(self, session: Session, reason: MissReason) -> None:
        """End a session, and wait until its slot is given back, whoever gave it up."""
        self._end_session(session, reason, CacheMiss(session.key, reason))
        await _emptied(session)

    def _end_session(self, session: Session, why: MissReason | str, error: HotKVError) -> None:
        """End a session for good; every call on it raises ``error`` from now on.  Ending twice does nothing."""
        if session._gone is not None:
            return
        session._gone = error
        self._counts[why] += 1
        reason = error.reason if isinstance(error, CacheMiss) else MissReason.RELEASED
        self._directory.end(session._entry, reason)
        self._detach(session, reason, error)
        session._ended.set()

    def _detach(self, session: Session, reason: MissReason, error: HotKVError) -> None:
        """Take a session's slot away.  Its queued work raises ``error`` now, its running work after the native call."""
        self._directory.stir(session._entry)
        if session._ticket is not None:
            self._scheduler.fence(session._ticket, attrs.evolve(error))
        tenancy, session._tenancy = session._tenancy, None
        session._length = 0
        session._lost = session._had_kv
        session._cold_reason = reason
        if tenancy is None:
            return
        if not tenancy.claim.granted:
            self._limiter._refuse(tenancy, attrs.evolve(error))
            return
        session._leaving = tenancy
        self._ledger.begin_clearing(tenancy.claim)
        self._clearing.add(tenancy)
        self._executor.submit(partial(clear, self._engine, tenancy.slot), partial(self._cleared, tenancy))

    def _cleared(self, tenancy: Tenancy, result: outcome.Outcome[Any]) -> None:
        """Let a slot be lent again, now that no native call names it and it is empty; or put it into quarantine."""
        self._clearing.discard(tenancy)
        dirty = error_of(result)
        if dirty is not None:
            logger.error("slot %d cannot be emptied and is quarantined: %s", tenancy.slot, dirty)
            self._quarantine(tenancy.slot, _FIRST_RETRY)
        self._limiter._give_back(tenancy, quarantine=dirty is not None)
        tenancy.returned = True

    def _quarantine(self, slot: int, delay: float) -> None:
        due = trio.current_time() + delay
        self._retries[slot] = (due, delay)
        self._nap.deadline = min(self._nap.deadline, due)

    def _retry(self, slot: int) -> None:
        """Try to empty a quarantined slot again, unless an attempt is under way."""
        due, delay = self._retries[slot]
        self._retries[slot] = (math.inf, delay)
        # Nothing may come after the engine's close.
        if due != math.inf and self._closed is None:
            self._executor.submit(partial(clear, self._engine, slot), partial(self._retried, slot, delay))

    def _retried(self, slot: int, delay: float, result: outcome.Outcome[None]) -> None:
        if error_of(result) is not None:
            self._quarantine(slot, min(2 * delay, _LAST_RETRY))
            return
        del self._retries[slot]
        logger.info("slot %d is clean again", slot)
        self._limiter._restore(slot)

    def _count_hot(self) -> int:
        return self._ledger.lent_slots - len(self._clearing)

    def _require_open(self) -> None:
        self._require_process()
        if self._closed is not None:
            raise attrs.evolve(self._closed)

    def _require_process(self) -> None:
        """Refuse a forked process: it has the engine's memory, but neither its owner thread nor llama.cpp's."""
        if os.getpid() != self._pid:
            raise RuntimeClosed(_FORKED)

    def _raise_gone(self, key: SessionKey, error: HotKVError) -> NoReturn:
        """Raise why a session has ended: the newest reason there is."""
        self._require_open()
        newest = self._directory.newest_epoch(key.route_session_id)
        if newest is not None and newest > key.route_epoch:
            raise StaleEpoch(key, newest)
        raise attrs.evolve(error)

    @trio.lowlevel.enable_ki_protection
    async def _watch_clock(self) -> None:
        """Let idle sessions expire, and try quarantined slots again, each at its time."""
        while True:
            now = trio.current_time()
            while (entry := self._directory.expired(now)) is not None:
                self._cool(entry, MissReason.EXPIRED)
            for slot in [slot for slot, (due, _) in self._retries.items() if due <= now]:
                self._retry(slot)
            due = min([self._directory.next_expiry(), *(due for due, _ in self._retries.values())])
            with trio.CancelScope(deadline=due) as self._nap:
                await trio.sleep_forever()

    async def _serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the runtime's own tasks until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_scheduler)
            nursery.start_soon(self._watch_clock)
            task_status.started()

    @trio.lowlevel.enable_ki_protection
    async def _run_scheduler(self) -> None:  # noqa: ASYNC910
        try:
            await self._scheduler.run()
        except trio.Cancelled:
            raise
        except BaseException as exc:
            # Nobody may wait for answers that cannot come any more.
            logger.exception("the scheduler crashed; the runtime is closed")
            self._crash = RuntimeClosed(f"{type(exc).__name__} in a native call: {exc}")
            self._crash.__cause__ = exc
            self._end_all(self._crash)

    def _end_all(self, error: RuntimeClosed) -> None:
        self._closed = self._closed or error
        for entry in self._directory.entries:
            self._end_session(entry.session, MissReason.RELEASED, error)
        for claim in list(self._ledger.waiting.values()):
            self._limiter._refuse(claim.borrower, attrs.evolve(error))

    async def _shut_down(self) -> None:
        """End every session, wait until every slot is empty, and close the engine."""
        self._end_all(RuntimeClosed())
        # Jobs run in order: every slot has been emptied before.
        await call(self._executor, self._engine.close)


_COUNTED = ("opened", "released", "evicted", "expired", "superseded", "failed")


@attrs.frozen(kw_only=True)
class Options:
    """What `open_runtime` was asked for, checked."""

    kv_budget: int | None
    idle_ttl: float
    prefill_chunk: int
    exact: bool

    @classmethod
    def check(cls, *, kv_budget: Any, idle_ttl: Any, prefill_chunk: Any, exact: Any) -> Options:
        """Return the options.

        Raises:
            InvalidInput: one is not what it should be.
        """
        if kv_budget is not None:
            check_count("kv_budget (bytes, or None)", kv_budget)
        if idle_ttl is not None and not (_is_number(idle_ttl) and idle_ttl > 0):
            raise InvalidInput(f"idle_ttl must be None or a number > 0 (seconds), not {idle_ttl!r:.200}")
        check_count("prefill_chunk (tokens)", prefill_chunk)
        if not isinstance(exact, bool):
            raise InvalidInput(f"exact must be a bool, not {exact!r:.200}")
        return cls(
            kv_budget=kv_budget,
            idle_ttl=math.inf if idle_ttl is None else float(idle_ttl),
            prefill_chunk=prefill_chunk,
            exact=exact,
        )


@protected_context
@asynccontextmanager
async def open_runtime(
    engine: Engine,
    *,
    kv_budget: int | None = None,
    idle_ttl: float | None = 600.0,
    prefill_chunk: int = 128,
    exact: bool = False,
    executor: Executor | None = None,
) -> AsyncGenerator[Runtime]:
    """Open an engine and keep sessions on it for as long as the ``async with`` lasts.

    When the body ends, in whatever way, every session ends, its KV is released, the engine is closed and the owner
    thread joined, before anything leaves the block; what the body raised leaves it as it is.  That is also what is
    true after `trio.Cancelled`, and when the engine cannot be opened: the engine is closed in every case.

    Args:
        engine: not opened yet; it belongs to this runtime from now on.
        kv_budget: bytes of KV that all sessions together may hold; None: as much as the engine has.
        idle_ttl: seconds after which an idle session loses its KV; None: never.
        prefill_chunk: tokens of a prefill in one native call, at most: what a decoding neighbour may have to wait for.
        exact: serve one session in each native call, so that its output is bit for bit that of the same calls made
            alone; costs the gain of batched decoding.
        executor: where native calls run; None: an owner thread of the runtime's own.

    Raises:
        InvalidInput: an argument is not what it should be, or ``exact`` in a layout that cannot keep it.
        EngineFailed: the engine could not be opened.
        RuntimeClosed: at the end, if native calls had become impossible and the body did not raise.
    """
    executor = OwnerThread() if executor is None else executor
    services = trio.CancelScope(shield=True)
    async with open_body_nursery(trio.CancelScope()) as nursery:
        try:
            await start_service(nursery, trio.CancelScope(shield=True), executor.serve)
        except BaseException:
            # There is no owner thread, so there is none to close it on.
            engine.close()
            raise
        try:
            try:
                options = Options.check(
                    kv_budget=kv_budget, idle_ttl=idle_ttl, prefill_chunk=prefill_chunk, exact=exact
                )
                info = await call(executor, engine.open)
                if exact and info.recipe.layout == "unified":
                    raise InvalidInput(
                        "exact=True: in the unified layout a session's bits depend on who else is there; the layout"
                        " 'streams' is exact"
                    )
                await trio.lowlevel.checkpoint()
                runtime = Runtime(engine, info, executor, options)
            except BaseException:
                await call(executor, engine.close)  # noqa: ASYNC102
                raise
            try:
                await start_service(nursery, services, runtime._serve)
                async with open_body_nursery(trio.CancelScope()) as kept:
                    runtime._kept = kept
                    try:
                        yield runtime
                    finally:
                        # From here on the nursery of kept sessions takes no more.
                        runtime._closed = runtime._closed or RuntimeClosed()
                if runtime._crash is not None:
                    raise runtime._crash
            finally:
                await runtime._shut_down()  # noqa: ASYNC102
        finally:
            services.cancel(reason="the runtime ended")
            executor.stop()


async def _emptied(session: Session) -> None:
    """Wait, also when cancelled or interrupted, until the slot that the session held last is given back."""
    if session._leaving is None or session._leaving.returned:
        await trio.lowlevel.cancel_shielded_checkpoint()
        return
    # Jobs run in order: this one after the slot has been emptied.
    await call(session._runtime._executor, _do_nothing)


def _do_nothing() -> None:
    """Stand behind the jobs that were submitted before."""


def _advance(proof: Generator[None, None, IsolationReport]) -> IsolationReport | None:
    """Take one step of a proof (on the owner thread); return the report when it is done."""
    try:
        next(proof)
    except StopIteration as stop:
        report: IsolationReport = stop.value
        return report
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_key(key: Any) -> SessionKey:
    if not isinstance(key, SessionKey):
        raise InvalidInput(f"key must be a SessionKey (route session id, route epoch), not {key!r:.200}")
    return key
