"""Scheduler: it turns waiting work into native calls, and results into answers.

Native calls are made in rounds (see `_plan`).  Before a round is formed, every session that is ready has had the
chance to join it: the scheduler's task yields until a pass of trio's run loop brings nothing new.  Only then, when what
is idle is truly idle, are sessions evicted to make room.

The task is spared where it is not needed, as each pass of trio's loop is time in which no native call runs: whoever
joins last, of all sessions, begins the round, and where a call's result arrives the round's next call is submitted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import attrs
import outcome
import trio

from hotkv_trio._errors import EngineFailed, HotKVError, InvalidInput, RuntimeClosed
from hotkv_trio._owner import Executor, error_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from hotkv_trio._engine import Append, Engine, Rows
    from hotkv_trio._plan import Call, Plan, Work

_QUIET_PASSES = 2
"""Passes without an arrival after which everybody has had the chance to join."""
_PATIENT_PASSES = 6
"""The same while a session of the previous round is missing: its caller may hand results on through other tasks."""


@attrs.define(eq=False)
class Ticket:
    """One caller's wait for its work."""

    work: Work
    task: trio.lowlevel.Task
    raise_cancel: Callable[[], object] | None = None
    """Set when the caller was cancelled while its work ran."""
    error: HotKVError | None = None
    """What the caller gets instead of a result."""
    kept: bool = True
    """After a failed call: the slot holds what it held before this work, and nothing else."""


@attrs.frozen
class Failure:
    """A native call that failed, and which members' slots were put back as they were before their work."""

    error: HotKVError
    kept: list[bool]


def process(engine: Engine, group: Sequence[Append], starts: Sequence[int]) -> list[Rows] | Failure:
    """Make one native call (on the owner thread); if it fails, put each member's slot back to where its work began."""
    try:
        rows = engine.process(group)
        if [len(part) for part in rows] != [append.n_rows for append in group]:
            raise EngineFailed(None, "the engine returned other rows than were asked for")
        return rows  # noqa: TRY300 - the check belongs to the call
    except (EngineFailed, InvalidInput) as exc:
        error: HotKVError = exc
    except Exception as exc:  # noqa: BLE001 - whatever an engine raises, its neighbours go on
        error = EngineFailed(None, f"{type(exc).__name__}: {exc}")
    kept = [cut(engine, append.slot, start) for append, start in zip(group, starts, strict=True)]
    return Failure(error, kept)


def truncate(engine: Engine, slot: int, length: int) -> bool:
    """Truncate (on the owner thread); return whether the slot now holds exactly ``length`` tokens.

    Raises:
        EngineFailed: the engine raised, whatever it was.
    """
    try:
        return engine.truncate(slot, length) and engine.length(slot) == length
    except EngineFailed:
        raise
    except Exception as exc:
        raise EngineFailed(None, f"{type(exc).__name__}: {exc}") from exc


def clear(engine: Engine, slot: int) -> None:
    """Empty the slot (on the owner thread).

    Raises:
        EngineFailed: it cannot be proven clean.
    """
    engine.clear(slot)
    if left := engine.length(slot):
        raise EngineFailed(None, f"slot {slot} holds {left} tokens after it was cleared")


def move(engine: Engine, source: int, target: int) -> bool:
    """Move one slot's contents (on the owner thread); return whether the other holds them now.

    Raises:
        EngineFailed: the slot that they come from cannot be proven clean.
    """
    try:
        held = engine.length(source)
        engine.move(source, target)
        moved = engine.length(target) == held and not engine.length(source)
    except Exception:  # noqa: BLE001 - whatever an engine raises, one session is lost and its neighbours go on
        moved = False
    if not moved:
        clear(engine, source)
    return moved


def cut(engine: Engine, slot: int, length: int) -> bool:
    """Truncate (on the owner thread); a failure counts as a slot that could not be cut."""
    try:
        return truncate(engine, slot, length)
    except EngineFailed:
        return False


@attrs.define(eq=False)
class Scheduler:
    """Queued work in, native calls out."""

    engine: Engine
    executor: Executor
    plan: Plan
    count_hot: Callable[[], int]
    """How many sessions could have work queued."""
    make_room: Callable[[], None]
    """Evicts what is needed; called when idle sessions are truly idle."""
    compact: Callable[[], Awaitable[bool]]
    """Brings the slots of the sessions that wait with a decode together, if that pays; says whether it tried."""
    native_calls: int = attrs.field(default=0, init=False)
    tokens_prefilled: int = attrs.field(default=0, init=False)
    tokens_decoded: int = attrs.field(default=0, init=False)
    _parked: trio.lowlevel.Task | None = attrs.field(default=None, init=False)
    _room_wanted: bool = attrs.field(default=False, init=False)
    _gathering: bool = attrs.field(default=False, init=False)
    """Whether a round may begin: none is under way, and nothing is being prepared for one."""
    _round: Iterator[Call] = attrs.field(factory=lambda: iter(()), init=False)
    """What is left of the round under way."""
    _members: set[int] = attrs.field(factory=set, init=False)
    """The slots of the sessions in the newest round."""
    _end: BaseException | None = attrs.field(default=None, init=False)
    """Why the executor serves no more."""

    def want_room(self) -> None:
        """Have `make_room` called soon."""
        self._room_wanted = True
        self._wake()

    async def perform(self, ticket: Ticket) -> None:
        """Queue the ticket's work and return once it is appended.

        After `trio.Cancelled`, or when the ticket's error is raised, no native call for the work runs or will run;
        ``work.done`` tokens of it may have been appended, which the caller has to cut back.
        """
        # The wait for the session's turn, or for a slot, may have been over before the cancellation came.
        await trio.lowlevel.checkpoint_if_cancelled()
        self.plan.add(ticket.work)
        self._consider()

        def abort(raise_cancel: Callable[[], object]) -> trio.lowlevel.Abort:
            if ticket.work.running:
                ticket.raise_cancel = raise_cancel
                return trio.lowlevel.Abort.FAILED
            self.plan.withdraw(ticket.work)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        if ticket.raise_cancel is not None and (ticket.work.left or ticket.error is not None):
            # Before the error, which may come of the same cancellation: of the session's scope, say.
            ticket.raise_cancel()
        if ticket.error is not None:
            raise ticket.error

    def fence(self, ticket: Ticket, error: HotKVError) -> None:
        """Make the work's caller get ``error``: at once if it is queued, after the native call if it runs."""
        ticket.error = error
        if self.plan.holds(ticket.work):
            self.plan.withdraw(ticket.work)
            self._answer(ticket)

    async def run(self) -> None:
        """Serve until cancelled, which may be once all work has been answered.

        Raises:
            BaseException: whatever ended the executor.
        """
        self._gathering = True
        while True:
            while self._end is None and not (self._gathering and (self.plan or self._room_wanted)):
                await self._park()
            if self._end is not None:
                raise self._end
            if not await self._gather():
                continue
            self._gathering = False
            if self._room_wanted:
                self._room_wanted = False
                self.make_room()
            decodes = self.plan.decodes()
            if len(decodes) > 1 and await self.compact():
                decodes = self.plan.decodes()
            self._begin(decodes)

    async def _gather(self) -> bool:  # noqa: ASYNC910
        """Give everybody the chance to join; return False if the last of them began the round."""
        quiet = 0
        while len(self.plan) < self.count_hot():
            missing = any(slot not in self.plan for slot in self._members)
            if quiet >= (_PATIENT_PASSES if missing else _QUIET_PASSES):
                break
            seen = self.plan.arrivals
            await trio.lowlevel.checkpoint()
            quiet = 0 if self.plan.arrivals != seen else quiet + 1
            if not self._gathering:
                break
        return self._gathering  # noqa: ASYNC910

    def _consider(self) -> None:
        """Begin a round here if everybody has joined it and it is a single call; else leave it to the task."""
        if self._gathering and not self._room_wanted and len(self.plan) == self.count_hot():
            decodes = self.plan.decodes()
            if len(decodes) <= 1:
                self._begin(decodes)
                return
        self._wake()

    def _begin(self, decodes: list[Call]) -> None:
        self._gathering = False
        self._members.clear()
        self._round = self._calls(decodes)
        self._go_on()

    def _calls(self, decodes: list[Call]) -> Iterator[Call]:
        """Give the calls of a round; the prefill that has waited longest is known once the decodes have been made."""
        yield from decodes
        if (chunk := self.plan.prefill()) is not None:
            yield chunk

    def _go_on(self) -> None:
        """Submit the round's next call; after its last, let the next round begin."""
        for planned in self._round:
            self._members.update(work.slot for work in planned.works)
            if self.plan.begin(planned):
                starts = [work.start for work in planned.works]
                job = partial(process, self.engine, planned.group, starts)
                self.executor.submit(job, partial(self._arrived, planned))
                return
        self._gathering = True
        if self.plan or self._room_wanted:
            self._consider()

    def _arrived(self, planned: Call, result: outcome.Outcome[list[Rows] | Failure]) -> None:
        self._settle(planned, result)
        self._end = error_of(result)
        if self._end is None:
            self._go_on()
        else:
            self._wake()

    def _settle(self, planned: Call, result: outcome.Outcome[list[Rows] | Failure]) -> None:
        """Answer those whose work a native call has ended, and queue again what is left of the other."""
        if not isinstance(result, outcome.Value):
            # Not an error of the engine's but an end of its thread (SystemExit, say): nothing is served any more.
            error = error_of(result)
            for work in planned.works:
                what = f"{type(error).__name__} in a native call: {error}"
                self._refuse(work, RuntimeClosed(what), kept=False)
            return
        self.native_calls += 1
        came: list[Rows] | Failure = result.value
        if isinstance(came, Failure):
            for work, kept in zip(planned.works, came.kept, strict=True):
                # A copy for each: one error raised in several tasks would gather all their tracebacks.
                self._refuse(work, work.owner.error or attrs.evolve(came.error), kept=kept)
            return
        complete = self.plan.finish(planned, came)
        for work in planned.works:
            if work.is_single:
                self.tokens_decoded += 1
            else:
                self.tokens_prefilled += planned.n_tokens
            ticket: Ticket = work.owner
            if work in complete or ticket.error is not None or ticket.raise_cancel is not None:
                self._answer(ticket)
            else:
                self.plan.add(work)

    def _refuse(self, work: Work, error: HotKVError, *, kept: bool) -> None:
        work.running = False
        ticket: Ticket = work.owner
        ticket.error, ticket.kept = error, kept
        self._answer(ticket)

    def _answer(self, ticket: Ticket) -> None:
        trio.lowlevel.reschedule(ticket.task, outcome.Value(None))

    async def _park(self) -> None:
        self._parked = trio.lowlevel.current_task()

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._parked = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _wake(self) -> None:
        if self._parked is not None:
            task, self._parked = self._parked, None
            trio.lowlevel.reschedule(task)
