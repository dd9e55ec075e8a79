"""Session: one key's KV, for as long as a scope lasts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, final

import attrs
import numpy as np
import trio

from hotkv_trio._errors import (
    CacheMiss,
    ContextFull,
    EngineFailed,
    HotKVError,
    InvalidInput,
    MissReason,
    PositionMismatch,
    TruncateUnsupported,
)
from hotkv_trio._inputs import check_append, check_at, check_length, check_output, check_single
from hotkv_trio._owner import call
from hotkv_trio._plan import Work
from hotkv_trio._scheduler import Ticket, cut, truncate
from hotkv_trio._statistics import SessionStatistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotkv_trio._directory import Entry
    from hotkv_trio._engine import EngineInfo, Output, Rows
    from hotkv_trio._keys import SessionKey
    from hotkv_trio._runtime import Runtime
    from hotkv_trio._slots import Claim


@attrs.frozen(eq=False)
class StepResult:
    """What an append did."""

    position: int
    """Of the first token appended."""
    length: int
    """Of the session afterwards."""
    output: Rows
    """float32 (rows, n_embd): hidden states; on a shard that owns the last layer (rows, n_vocab): logits."""


@attrs.define(eq=False)
class Tenancy:
    """One session's stay in one slot: from the claim for it until the slot is clean and its bytes are back."""

    session: Session
    claim: Claim = attrs.field(init=False)
    returned: bool = attrs.field(default=False, init=False)

    @property
    def slot(self) -> int:
        """The slot; there is one once the claim is granted."""
        if self.claim.slot is None:
            raise RuntimeError(f"{self.session!r} has no slot yet")
        return self.claim.slot


@final
class Session:
    """One isolated llama.cpp sequence, named by a `SessionKey`; made by `Runtime.open_session` and its sisters.

    It is *hot* while it holds a slot and *cold* while it does not.  A cold session answers with a `CacheMiss`, except
    to an append at position 0, which starts it again.  Any task may call it; operations of one session run one at a
    time, in the order in which they were called.
    """

    def __init__(self, runtime: Runtime, key: SessionKey, scope: trio.CancelScope) -> None:
        self._runtime = runtime
        self._key = key
        self._scope = scope
        self._entry: Entry[Session]
        self._nursery: trio.Nursery
        self._tenancy: Tenancy | None = None
        self._leaving: Tenancy | None = None
        self._length = 0
        self._appended = 0
        self._had_kv = False
        self._lost = False  # KV that a call without a position may count on, until a start at 0 has succeeded
        self._opened = False
        self._kept = False
        self._cold_reason = MissReason.UNKNOWN
        self._gone: HotKVError | None = None
        self._ended = trio.Event()
        self._turn_taken = False
        self._turns = trio.lowlevel.ParkingLot()
        self._operations = 0
        self._ticket: Ticket | None = None

    def __repr__(self) -> str:
        return f"<hotkv_trio.Session {self._key}, {self._state()}, length {self._length}>"

    @property
    def key(self) -> SessionKey:
        """The key."""
        return self._key

    @property
    def length(self) -> int:
        """Tokens in the session's KV: the next position.  It changes only once an operation has succeeded."""
        return self._length

    @property
    def hot(self) -> bool:
        """Whether it holds a slot and its bytes."""
        return self._tenancy is not None and self._tenancy.claim.granted

    @property
    def nursery(self) -> trio.Nursery:
        """For tasks of the caller's own that shall end with the session.

        They are cancelled when the body of the session's scope ends.
        """
        return self._nursery

    def statistics(self) -> SessionStatistics:
        """Return a moment's view."""
        return SessionStatistics(
            key=self._key,
            state=self._state(),
            length=self._length,
            hot=self.hot,
            pinned=self._entry.pinned,
            operations=self._operations,
            tokens_appended=self._appended,
            idle_since=self._entry.idle_since,
        )

    def cancel(self, reason: str | None = None) -> None:
        """Cancel the session's scope: its body and its tasks get `trio.Cancelled`, then its KV is released."""
        self._scope.cancel(reason=reason)

    async def prefill(self, data: Any, *, at: int | None = None, output: Output = "last") -> StepResult:
        """Append tokens or hidden states, in chunks of the runtime's ``prefill_chunk``.

        Either everything was appended and it returns, or it raises `trio.Cancelled` and ``length`` is what it was
        (what a native call was appending is waited for, and cut back); memory that cannot be cut back goes cold.

        Args:
            data: tokens, a flat sequence of integers; or hidden states, float32 (n, n_embd).
            at: the position that the caller counts on; refused if it is not ``length``.
            output: which rows to return: of the ``"last"`` token, of ``"all"``, or ``"none"``.

        Raises:
            CacheMiss: cold, or ``at`` lies beyond what is cached, or the session has ended.
            StaleEpoch: a newer epoch was opened, before or meanwhile.
            PositionMismatch: ``at`` lies inside what is cached.
            ContextFull: it does not fit; nothing was appended.
            InvalidInput: the data, ``at`` or ``output`` is not what it should be; nothing was appended.
            EngineFailed: the engine failed; the session is as before the call, or cold.
            BudgetExceeded: a cold session is larger than the whole budget by now.
            RuntimeClosed: the runtime has ended.
        """
        return await self._append(check_append, data, at, output)

    async def decode(self, data: Any, *, at: int | None = None) -> StepResult:
        """Append one token or one hidden state, and return its row.

        After `trio.Cancelled` ``length`` is what it was; see `prefill`, also for the errors.

        Args:
            data: a token, an integer; or a hidden state, float32 (n_embd,) or (1, n_embd).
            at: the position that the caller counts on; refused if it is not ``length``.
        """
        return await self._append(check_single, data, at, "last")

    @trio.lowlevel.enable_ki_protection
    async def truncate(self, length: int) -> None:
        """Cut the KV back to its first ``length`` tokens.

        After `trio.Cancelled` it was not cut.

        Raises:
            InvalidInput: ``length`` is not an integer from 0 to the session's length; nothing changed.
            TruncateUnsupported: this memory cannot keep that prefix; the session is cold.
            CacheMiss: cold, or the session has ended.
            StaleEpoch: a newer epoch was opened, before or meanwhile.
            EngineFailed: the engine failed; the session is cold.
            RuntimeClosed: the runtime has ended.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_live()
        length = check_length(length)
        await self._begin()
        try:
            self._require_live()
            tenancy = self._tenancy
            if tenancy is None:
                raise CacheMiss(self._key, self._cold_reason)
            if length > self._length:
                raise InvalidInput(f"cannot truncate to {length} tokens: the session's length is {self._length}")
            await trio.lowlevel.checkpoint()
            if length < self._length and self._tenancy is tenancy:
                await self._cut(tenancy, length)
            self._require_tenancy(tenancy)
        finally:
            self._end()

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """End the session: its slot is free and its bytes are back when this returns.  Ending twice does nothing.

        The session has ended and everything is back also after `trio.Cancelled`.
        """
        try:
            await trio.lowlevel.checkpoint()
        finally:
            await self._runtime._close(self, MissReason.RELEASED)  # noqa: ASYNC102

    @trio.lowlevel.enable_ki_protection
    async def _append(
        self, check: Callable[[EngineInfo, Any], Any], data: Any, at: int | None, output: Output
    ) -> StepResult:
        # Before any refusal: what ended the session may be what cancels this call.
        await trio.lowlevel.checkpoint_if_cancelled()
        self._require_live()
        runtime = self._runtime
        checked = check(runtime._info, data)
        output = check_output(output)
        at = check_at(at)
        await self._begin()
        try:
            self._require_live()
            self._require_position(at, len(checked))
            tenancy = self._tenancy
            if tenancy is None:
                tenancy = await runtime._move_in(self)
            work = Work(tenancy.slot, self._length, checked, output, owner=None)
            await self._perform(tenancy, work)
            self._length += len(checked)
            self._appended += len(checked)
            self._had_kv = True
            self._lost = False
            return StepResult(work.start, self._length, _join(work.rows, runtime._info.n_output))
        finally:
            self._end()

    async def _perform(self, tenancy: Tenancy, work: Work) -> None:
        ticket = work.owner = self._ticket = Ticket(work, trio.lowlevel.current_task())
        try:
            await self._runtime._scheduler.perform(ticket)
        except BaseException:
            # Cancelled, or the native call failed.  A session that has lost its slot has nothing to put back.
            if self._tenancy is tenancy:
                as_before = await self._is_as_before(ticket)  # noqa: ASYNC102
                if not as_before and self._tenancy is tenancy:
                    await self._runtime._chill(self, MissReason.FAILED)  # noqa: ASYNC102
            raise
        finally:
            # They refer to each other: left so, an append's rows would wait for the garbage collector.
            self._ticket = work.owner = ticket.error = ticket.raise_cancel = None

    async def _is_as_before(self, ticket: Ticket) -> bool:
        """Put the slot back to where the ticket's work began, as far as that was not done; return whether it is."""
        work = ticket.work
        if ticket.error is not None:
            return ticket.kept  # noqa: ASYNC910
        return not work.done or await call(  # noqa: ASYNC910
            self._runtime._executor, partial(cut, self._runtime._engine, work.slot, work.start)
        )

    async def _cut(self, tenancy: Tenancy, length: int) -> None:  # noqa: ASYNC910
        runtime = self._runtime
        error: HotKVError = TruncateUnsupported(self._key, length, runtime._info.memory)
        kept = False
        try:
            kept = await call(runtime._executor, partial(truncate, runtime._engine, tenancy.slot, length))
        except EngineFailed as exc:
            error = exc
        if self._tenancy is not tenancy:
            return  # noqa: ASYNC910
        if not kept:
            await runtime._chill(self, MissReason.FAILED)
            raise error
        self._length = length

    def _require_live(self) -> None:
        self._runtime._require_process()
        if self._gone is not None:
            self._runtime._raise_gone(self._key, self._gone)

    def _require_tenancy(self, tenancy: Tenancy) -> None:
        self._require_live()
        if self._tenancy is not tenancy:
            raise CacheMiss(self._key, self._cold_reason)

    def _require_slot(self) -> int:
        """Return the slot that it holds.

        Raises:
            CacheMiss: it is cold, or has ended.
        """
        self._require_live()
        if self._tenancy is None:
            raise CacheMiss(self._key, self._cold_reason)
        return self._tenancy.slot

    def _require_position(self, at: int | None, n_tokens: int) -> None:
        limit = self._runtime._info.n_ctx_seq
        if at is None and self._lost:
            raise CacheMiss(self._key, self._cold_reason)
        if self._tenancy is None:
            if at:
                raise CacheMiss(self._key, self._cold_reason if self._had_kv else MissReason.BEYOND)
        elif at is not None and at < self._length:
            raise PositionMismatch(at, self._length)
        elif at is not None and at > self._length:
            raise CacheMiss(self._key, MissReason.BEYOND, self._length)
        if self._length + n_tokens > limit:
            raise ContextFull(self._length, limit, n_tokens)

    async def _begin(self) -> None:  # noqa: ASYNC910
        """Take the session's turn."""
        self._operations += 1
        self._runtime._directory.stir(self._entry)
        if not self._turn_taken:
            self._turn_taken = True
            return  # noqa: ASYNC910
        try:
            await self._turns.park()
        except BaseException:
            self._leave()
            raise

    def _end(self) -> None:
        self._turn_taken = bool(self._turns.unpark())
        self._leave()

    def _leave(self) -> None:
        self._operations -= 1
        if not self._operations:
            self._runtime._rest(self)

    def _state(self) -> str:
        if self._gone is not None:
            return "ended"
        if self._tenancy is None:
            return "cold"
        if not self._tenancy.claim.granted:
            return "waiting"
        return "busy" if self._operations else "idle"


def _join(rows: list[Rows], width: int) -> Rows:
    if len(rows) == 1:
        return rows[0]
    return np.concatenate(rows) if rows else np.empty((0, width), dtype=np.float32)
