"""Runs a program, judges every outcome with the model, and checks the runtime after every step."""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import attrs
import numpy as np
import trio

from hotkv_trio._errors import CacheMiss, EngineFailed, HotKVError, MissReason, StaleEpoch
from hotkv_trio._keys import SessionKey
from hotkv_trio._owner import InlineExecutor
from hotkv_trio._runtime import open_runtime
from hotkv_trio.testing._fake_engine import FakeEngine
from hotkv_trio.testing._model import Appended, Model, SessionModel
from hotkv_trio.testing._schedule_tape import Hung, ScheduleTape
from hotkv_trio.testing._step_invariants import StepInvariants
from hotkv_trio.testing.programs import (
    Aclose,
    CancelSession,
    Close,
    Decode,
    Fail,
    Open,
    Operation,
    Pause,
    Prefill,
    Program,
    Release,
    Restart,
    SetBudget,
    Sleep,
    Stall,
    Truncate,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hotkv_trio._engine import Append, Engine, EngineInfo, Rows
    from hotkv_trio._runtime import Runtime
    from hotkv_trio._session import Session, Tenancy
    from hotkv_trio.testing._model import Cut

TOKENS = 4
"""Tokens that belong to one operation: every native call says by its tokens whose it is."""
MOST_OPERATIONS = 64


class Oracle(Protocol):
    """Says what a session that lived alone would have been given."""

    def __call__(self, events: Sequence[Appended | Cut], chunk: int) -> Rows:
        """Return the rows that the last event, an append made in chunks of ``chunk`` tokens, was to give."""
        ...


class ProgramFailed(AssertionError):
    """A program did not do what it must; the message says what, what led there, and how to run it again."""


@attrs.frozen
class ProgramRun:
    """What a program that did what it must came to."""

    schedule: tuple[tuple[int, ...], ...]
    steps: int
    native_calls: int
    outcomes: tuple[str, ...]
    """Of each operation, in the order in which they ended."""


def run_program(
    program: Program, *, engine: Engine | None = None, oracle: Oracle | None = None, instruments: Sequence[Any] = ()
) -> ProgramRun:
    """Run a program on a `FakeEngine`, or on another engine, and hold everything that happens to the contract.

    Args:
        program: what to run.
        engine: not opened yet, with at least ``program.slots`` slots; None: a `FakeEngine`.
        oracle: what outputs must be; None: those of the `FakeEngine`, or with another engine, anything.
        instruments: further ones for the run.

    Raises:
        ProgramFailed: something was not as it must be.
    """
    tape = ScheduleTape(program.tape)
    runner = Runner(program, engine, oracle)
    problem: str | None = None
    try:
        tape.run(runner.run, instruments=[runner.invariants, *instruments])
    except Hung as exc:
        problem = f"{runner.invariants.violation or ''}\n{exc}".strip()
    except BaseException as exc:  # noqa: ASYNC103
        if runner.invariants.violation is None:
            exc.add_note(_recipe_for(program))
            raise
    if runner.invariants.violation is not None:
        problem = problem or str(runner.invariants.violation)
    if problem is None:
        problem = runner.judge_end()
    if problem is not None:
        raise ProgramFailed(f"{problem}\n\n{_recipe_for(program)}")
    return ProgramRun(tuple(tape.schedule), runner.invariants.steps, len(runner.recorder.calls), tuple(runner.outcomes))


def _recipe_for(program: Program) -> str:
    names = sorted({type(operation).__name__ for client in program.clients for operation in client} | {"Program"})
    lines = "\n".join(f"        {line}" for line in str(program).splitlines())
    return (
        "from hotkv_trio.testing import run_program\n"
        f"from hotkv_trio.testing.programs import {', '.join(names)}\n\n\n"
        f"def test_found() -> None:\n    run_program(\n{lines}\n    )\n"
    )


class _Recorder:
    """An engine that remembers its calls."""

    def __init__(self, engine: Engine) -> None:
        self.inner = engine
        self.calls: list[tuple[Append, ...]] = []
        self.info: EngineInfo
        self.closed = 0

    def open(self) -> EngineInfo:
        self.info = self.inner.open()
        return self.info

    def process(self, group: Sequence[Append]) -> list[Rows]:
        self.calls.append(tuple(group))
        return self.inner.process(group)

    def truncate(self, slot: int, length: int) -> bool:
        return self.inner.truncate(slot, length)

    def clear(self, slot: int) -> None:
        self.inner.clear(slot)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)

    def length(self, slot: int) -> int:
        return self.inner.length(slot)

    def close(self) -> None:
        self.closed += 1
        self.inner.close()


@attrs.define(eq=False)
class _Running:
    """One operation that may reach the engine, by its number."""

    number: int
    session: SessionModel
    first: int
    """Native calls made before it began."""
    last: int | None = None
    """Native calls made when it had ended, or when it could not reach the engine any more."""


@attrs.define(eq=False)
class _Seen:
    """What the observer saw of a session after the last step."""

    model: SessionModel
    hot: bool = False
    tenancy: Tenancy | None = None
    waits_from: int | None = None
    """Since when it waits for a slot: a count of events."""
    idle_from: tuple[float, int] | None = None
    """Since when it is idle: clock time, and a count of events, for the order."""


class Runner:
    """Does what clients do, and judges what comes of it."""

    def __init__(self, program: Program, engine: Engine | None = None, oracle: Oracle | None = None) -> None:
        self.program = program
        engine = engine or FakeEngine(
            n_slots=program.slots,
            n_ctx_seq=program.n_ctx,
            n_vocab=TOKENS * MOST_OPERATIONS,
            memory=program.memory,
            n_swa=4 if program.memory == "sliding" else 0,
        )
        self.recorder = _Recorder(engine)
        self.fake = engine if isinstance(engine, FakeEngine) else None
        self.oracle = oracle or (self._fake_rows if self.fake else None)
        self.executor: InlineExecutor
        self.runtime: Runtime
        self.model = Model(program.n_ctx, program.memory)
        self.invariants = StepInvariants()
        self.outcomes: list[str] = []
        self._sessions: dict[int, Session] = {}
        self._seen: dict[Session, _Seen] = {}
        self._releasing: Counter[SessionKey] = Counter()
        self._operations: list[_Running] = []
        self._names = {o.name for client in program.clients for o in client if isinstance(o, Open)}
        self._nursery: trio.Nursery
        self._events = 0
        self._end: str | None = None

    async def run(self, body: Callable[[trio.Nursery], Awaitable[None]] | None = None) -> None:
        """Run the program's clients, or something else, with a runtime."""
        program = self.program
        self.executor = InlineExecutor()
        bytes_of_slot = program.n_ctx * 10 if self.fake else None
        budget = None
        if program.budget is not None and bytes_of_slot is not None:
            budget = program.budget * bytes_of_slot
            self.model.smallest_budget = program.budget
        async with open_runtime(
            self.recorder,
            kv_budget=budget,
            idle_ttl=program.ttl,
            prefill_chunk=program.chunk,
            exact=program.exact,
            executor=self.executor,
        ) as self.runtime:
            self.model.n_ctx = self.runtime.info.n_ctx_seq
            self.invariants.watch(self.runtime)
            self.invariants.also.append(self._observe)
            async with trio.open_nursery() as self._nursery:
                if body is not None:
                    await body(self._nursery)
                for me, operations in enumerate(program.clients):
                    self._nursery.start_soon(self._client, me, deque(operations), name=f"client {me}")
            await self._settle()

    def judge_end(self) -> str | None:
        """Return what is wrong with what is left behind, and with the native calls that were made."""
        if self._end is not None:
            return self._end
        if self.recorder.closed != 1:
            return f"the engine was closed {self.recorder.closed} times"
        if self.fake is not None and self.fake.violations:
            return f"the engine's contract was broken: {self.fake.violations}"
        by_number = {operation.number: operation for operation in self._operations}
        for index, group in enumerate(self.recorder.calls):
            if self.program.exact and len(group) > 1:
                return f"native call {index} serves {len(group)} sessions in exact mode"
            if [append.slot for append in group] != list(range(group[0].slot, group[0].slot + len(group))):
                return f"native call {index} serves slots that are not next to each other"
            for append in group:
                if append.n_tokens > max(self.program.chunk, 1):
                    return f"native call {index} appends {append.n_tokens} tokens at once"
                owner = by_number[int(append.data[0]) // TOKENS]
                if index < owner.first or owner.last is None or index >= owner.last:
                    return f"native call {index} serves operation {owner.number}, of {owner.session.key}, after its end"
        return None

    async def _settle(self) -> None:
        """Let everything come to rest, and look at what is left."""
        self.executor.resume()
        for entry in list(self.runtime._directory.entries):
            self._seen_of(entry.session).model.ending = True
            await self.runtime.release(entry.key)
        # A slot that could not be emptied is tried again from time to time.
        await trio.sleep(1000)
        statistics = self.runtime.statistics()
        left = {
            name: getattr(statistics, name)
            for name in (
                "borrowed_bytes",
                "lent_slots",
                "clearing_slots",
                "quarantined_slots",
                "waiting",
                "sessions",
                "hot",
            )
            if getattr(statistics, name)
        }
        if left:
            self._end = f"left behind: {left}"
        if statistics.free_slots != self.runtime.info.n_slots:
            self._end = f"{statistics.free_slots} of {self.runtime.info.n_slots} slots are free at the end"
        if len(self.runtime._scheduler.plan):
            self._end = "work is still queued at the end"

    # What clients do

    async def _client(self, me: int, operations: deque[Operation]) -> None:  # noqa: ASYNC910
        while operations:
            operation = operations.popleft()
            if isinstance(operation, Open):
                await self._open(me, operation, operations)
            else:
                await self.perform(me, operation)

    async def _inside(self, me: int, operations: deque[Operation]) -> None:  # noqa: ASYNC910
        """Do what a client does with its session."""
        while operations and not isinstance(operations[0], Open):
            operation = operations.popleft()
            if isinstance(operation, Close):
                return  # noqa: ASYNC910
            await self.perform(me, operation)

    async def start(self, me: int, operation: Open) -> None:  # noqa: ASYNC910
        """Start a session that outlives the call, and make it the client's."""
        key = SessionKey(operation.name, operation.epoch)
        self._names.add(operation.name)
        self._note(me, f"start {operation!r} ...")
        outcome: Session | Exception
        try:
            outcome = await self.runtime.start_session(key, pinned=operation.pinned, wait=operation.wait)
        except (HotKVError, trio.WouldBlock) as exc:
            outcome = exc
            live = any(seen.model.key == key for seen in self._seen.values())
            problem = self.model.judge_open(key, wait=operation.wait, live=live, free=False, outcome=exc)
            if problem:
                self.invariants.violated(f"client {me}: {operation!r}: {problem}")
        else:
            self._opened(me, outcome, operation)
        self._told(me, operation, outcome)

    async def _open(self, me: int, operation: Open, operations: deque[Operation]) -> None:  # noqa: ASYNC910
        key = SessionKey(operation.name, operation.epoch)
        live = any(entry.key == key for entry in self.runtime._directory.entries)
        ledger = self.runtime._ledger
        free = ledger.free_slots > 0 and ledger.available_bytes >= self.runtime.info.slot_bytes and not ledger.waiting
        options: dict[str, Any] = {"pinned": operation.pinned, "wait": operation.wait}
        self._note(me, f"{operation!r} ...")
        outcome: str | Exception = "cancelled"
        session: Session | None = None
        with trio.CancelScope() as scope:  # noqa: ASYNC912
            pending, living = [True], [True]
            if operation.cancel_after is not None:
                self._nursery.start_soon(
                    self._cancel_later, me, scope, operation.cancel_after, pending, partial(self.expect_release, key)
                )
            try:
                if operation.how == "scope":
                    async with self.runtime.open_session(key, **options) as session:
                        pending.clear()
                        self._opened(me, session, operation)
                        self._hang_up_later(me, scope, operation, living, session)
                        await self._inside(me, operations)
                        self._seen_of(session).model.ending = True
                elif operation.how == "serve":
                    session = await self._nursery.start(partial(self.runtime.serve_session, key, **options))
                else:
                    session = await self.runtime.start_session(key, **options)
                if operation.how != "scope":
                    pending.clear()
                    self._opened(me, session, operation)
                    self._hang_up_later(me, scope, operation, living, session)
                    try:
                        await self._inside(me, operations)
                    finally:
                        self._seen_of(session).model.ending = True
                        with trio.CancelScope(shield=True):
                            await session.aclose()
                outcome = "closed"
            except (HotKVError, trio.WouldBlock) as exc:
                outcome = exc
            finally:
                pending.clear()
                living.clear()
        self._sessions.pop(me, None)
        self._learn_epochs()
        self._releasing[key] -= scope.cancel_called
        if scope.cancel_called:
            for other, seen in self._seen.items():
                seen.model.ending |= other.key == key and other not in self._sessions.values()
        if session is not None:
            self._seen_of(session).model.ended = True
            leaving = session._leaving
            if session._gone is None or (leaving is not None and not leaving.returned):
                self.invariants.violated(f"client {me}: {operation!r} was left, but {session!r} has not given all back")
            if isinstance(outcome, Exception):
                self.invariants.violated(f"client {me}: {operation!r} ended with {outcome!r}")
        elif isinstance(outcome, Exception):
            if operation.how != "scope":
                # The call was made by another task, at another time.
                live, free = any(seen.model.key == key for seen in self._seen.values()), False
            problem = self.model.judge_open(key, wait=operation.wait, live=live, free=free, outcome=outcome)
            if problem:
                self.invariants.violated(f"client {me}: {operation!r}: {problem}")
        self._told(me, operation, outcome)

    def _hang_up_later(
        self, me: int, scope: trio.CancelScope, operation: Open, living: list[bool], session: Session
    ) -> None:
        def first() -> None:
            self.expect_release(session.key)
            self._seen_of(session).model.ending = True

        if operation.hang_up is not None:
            self._nursery.start_soon(self._cancel_later, me, scope, operation.hang_up, living, first)

    def _opened(self, me: int, session: Session, operation: Open) -> None:
        self._sessions[me] = session
        seen = self._seen_of(session)
        self._note(me, f"{operation!r} -> {session!r}")
        problem = None
        if operation.how == "scope" and session._gone is not None:
            problem = "opened though it had ended"
        if not session.hot and not seen.model.colds and session._gone is None:
            problem = "opened without a slot"
        if session.length:
            problem = f"opened with {session.length} tokens"
        if problem:
            self.invariants.violated(f"client {me}: {operation!r}: {problem}")

    def expect_release(self, key: SessionKey) -> None:
        """Note that a call which opens this key is being cancelled: what it has opened by then is released."""
        self._releasing[key] += 1

    async def perform(self, me: int, operation: Operation) -> None:  # noqa: ASYNC910
        """Do one operation, other than to open, with the client's session if it takes one."""
        if isinstance(operation, Sleep):
            await trio.sleep(operation.seconds)
        elif isinstance(operation, Pause):
            for _ in range(operation.checkpoints):
                await trio.lowlevel.checkpoint()
        elif isinstance(operation, SetBudget):
            self._note(me, repr(operation))
            self.model.smallest_budget = min(self.model.smallest_budget, operation.slots)
            self.runtime.limiter.total_bytes = operation.slots * self.runtime.info.slot_bytes
        elif isinstance(operation, Fail):
            self._note(me, repr(operation))
            if self.fake is not None:
                self.model.failures += operation.times
                errors = [EngineFailed(-3, "as told") for _ in range(operation.times)]
                self.fake.fail(operation.method, *[None] * operation.after, *errors)
        elif isinstance(operation, Stall):
            self._note(me, repr(operation))
            self._nursery.start_soon(self._stall, operation.seconds)
        elif not isinstance(operation, Close | Open):
            of: int | None = getattr(operation, "of", None)
            session, own = self._sessions.get(me if of is None else of), self._sessions.get(me)
            # Who holds a slot that nobody can take must not wait for another: no limiter helps against that.
            if session is not None and (session is own or own is None or not own.statistics().pinned):
                await self._call(me, operation, session)

    async def _stall(self, seconds: float) -> None:
        self.executor.hold()
        await trio.sleep(seconds)
        self.executor.resume()

    async def _call(self, me: int, operation: Any, session: Session) -> None:  # noqa: ASYNC910
        """Call the session or the runtime, and judge what comes of it."""
        seen = self._seen_of(session)
        model = seen.model
        number = len(self._operations)
        if isinstance(operation, CancelSession):
            self._note(me, f"{operation!r} of {session!r}")
            model.ending = True
            session.cancel()
            return  # noqa: ASYNC910
        running = _Running(number, model, len(self.recorder.calls))
        tokens: tuple[int, ...] = ()
        at: int | None = None
        length = 0
        call: Callable[[], Awaitable[Any]]
        if isinstance(operation, Prefill | Decode | Restart):
            if number >= MOST_OPERATIONS:
                return  # noqa: ASYNC910
            self._operations.append(running)
            n = 1 if isinstance(operation, Decode) else operation.n
            tokens = tuple(number * TOKENS + i % TOKENS for i in range(n))
            if isinstance(operation, Restart):
                at = 0
            elif operation.at is not None:
                at = max(0, session.length + operation.at)
            if isinstance(operation, Decode):
                call = partial(session.decode, tokens[0], at=at)
            else:
                call = partial(session.prefill, tokens, at=at, output=getattr(operation, "output", "last"))
        elif isinstance(operation, Truncate):
            length = max(0, session.length - operation.drop)
            call = partial(session.truncate, length)
        else:
            # A release ends whatever session has the key by then.
            self._releasing[session.key] += 1
            call = session.aclose if isinstance(operation, Aclose) else partial(self.runtime.release, session.key)
            model.ending |= isinstance(operation, Aclose) or self._is_live(session)
        self._note(me, f"{operation!r} of {session!r} ...")
        outcome: Any = "cancelled"
        self._learn_epochs()
        colds, stale = model.colds, self.model.is_stale(session.key)
        works = isinstance(operation, Prefill | Decode | Restart | Truncate)
        model.in_flight += works
        with trio.CancelScope() as scope:  # noqa: ASYNC912
            pending = [True]
            if operation.cancel_after is not None:
                self._nursery.start_soon(
                    self._cancel_later, me, scope, operation.cancel_after, pending, partial(self._cut_off, running)
                )
            try:
                outcome = await call()
            except (HotKVError, trio.WouldBlock) as exc:
                outcome = exc
            finally:
                # In the very step in which the call ended: what others do after it is not its affair.
                pending.clear()
                model.in_flight -= works
                self._releasing[session.key] -= isinstance(operation, Release | Aclose)
                self._judge(me, operation, session, tokens, at, length, outcome, colds, stale=stale)
                if running.last is None:
                    running.last = len(self.recorder.calls)

    def _judge(
        self,
        me: int,
        operation: Any,
        session: Session,
        tokens: tuple[int, ...],
        at: int | None,
        length: int,
        outcome: Any,
        colds: int,
        *,
        stale: bool,
    ) -> None:
        self._learn_epochs()
        seen = self._seen_of(session)
        try:
            self._look_at(session)
        except AssertionError as exc:
            self.invariants.violated(str(exc))
        model = seen.model
        used = isinstance(operation, Prefill | Decode | Restart | Truncate) and outcome != "cancelled"
        if seen.idle_from is not None and used:
            # Also a call that was refused at once has used the session; not one that was cancelled before it began.
            self._events += 1
            seen.idle_from = trio.current_time(), self._events
        problem: str | None = None
        if isinstance(operation, Prefill | Decode | Restart):
            if isinstance(outcome, Exception):
                problem = self.model.judge_append(model, len(tokens), at, outcome)
            elif outcome != "cancelled":
                problem = self.model.judge_append(model, len(tokens), at, (outcome.position, outcome.length))
                model.append(tokens, getattr(operation, "output", "last"))
                problem = problem or self._judge_rows(model, outcome.output)
        elif isinstance(operation, Truncate):
            if outcome is None or isinstance(outcome, Exception):
                problem = self.model.judge_truncate(model, length, outcome)
            if outcome is None:
                model.cut(length)
        elif outcome is None or isinstance(outcome, bool):
            if outcome is not None and stale:
                problem = "did not say that the epoch is stale"
            model.ended |= isinstance(operation, Aclose) or not self._is_live(session)
        elif isinstance(outcome, Exception) and not (
            isinstance(outcome, StaleEpoch) and self.model.is_stale(session.key)
        ):
            problem = f"raised {outcome!r}"
        if outcome == "cancelled" and model.colds > colds and self.program.memory == "attention":
            innocent = not self.model.failures and MissReason.FAILED in model.cold
            problem = problem or ("a cancelled call made it cold" if innocent else None)
        if session.hot and not model.in_flight and session.length != len(model.history):
            problem = problem or f"{session!r} should have {len(model.history)} tokens after it"
        if problem:
            self.invariants.violated(f"client {me}: {operation!r}: {problem}")
        self._told(me, operation, outcome)

    def _judge_rows(self, model: SessionModel, rows: Rows) -> str | None:
        if self.oracle is None:
            return None
        expected = self.oracle(model.events, self.program.chunk)
        if rows.shape != expected.shape:
            return f"output of shape {rows.shape}, not {expected.shape}"
        return None if np.array_equal(rows, expected) else f"output that is not that of its own history {model.history}"

    def _fake_rows(self, events: Sequence[Appended | Cut], chunk: int) -> Rows:  # noqa: ARG002
        history: list[int] = []
        for event in events:
            if isinstance(event, Appended):
                history.extend(event.tokens)
                n = {"none": 0, "last": 1, "all": len(event.tokens)}[event.output]
            else:
                del history[event.length :]
        return cast("FakeEngine", self.fake).rows(history)[len(history) - n :]

    async def _cancel_later(  # noqa: ASYNC910
        self, me: int, scope: trio.CancelScope, checkpoints: int, pending: list[bool], first: Callable[[], None]
    ) -> None:
        """Cancel the scope after a while, if ``pending`` still holds something; call ``first`` before that."""
        for _ in range(checkpoints):
            await trio.lowlevel.checkpoint()
        if pending:
            self._note(me, "is cancelled")
            first()
            scope.cancel()

    def _cut_off(self, running: _Running) -> None:
        """Note that an operation may reach the engine no more, save by a native call that has begun."""
        if running.last is None:
            running.last = len(self.recorder.calls) + bool(self.executor.jobs)

    # What the observer sees after every step

    def _seen_of(self, session: Session) -> _Seen:
        if session not in self._seen:
            self._seen[session] = _Seen(SessionModel(session.key))
        return self._seen[session]

    def _is_live(self, session: Session) -> bool:
        return any(entry.session is session for entry in self.runtime._directory.entries)

    def _observe(self) -> None:
        for entry in self.runtime._directory.entries:
            self._seen_of(entry.session)
        self._learn_epochs()
        for session in list(self._seen):
            self._look_at(session)

    def _learn_epochs(self) -> None:
        for name in self._names:
            epoch = self.runtime._directory.newest_epoch(name)
            if epoch is not None:
                self.model.newest[name] = max(self.model.newest.get(name, -1), epoch)

    def _look_at(self, session: Session) -> None:
        """Judge why a session lost its slot; remember since when it is idle."""
        seen = self._seen[session]
        was_hot, seen.hot = seen.hot, session.hot
        if session._gone is not None:
            for running in self._operations:
                if running.session is seen.model:
                    self._cut_off(running)
        if seen.hot and not was_hot:
            self._check_turn(session, seen)
        if session._tenancy is None or seen.hot:
            seen.waits_from = None
        elif seen.waits_from is None:
            self._events += 1
            seen.waits_from = self._events
        tenancy, seen.tenancy = seen.tenancy, session._tenancy
        if was_hot and not seen.hot and session._leaving is not tenancy:
            # Granted to a call that had been cancelled and had not run yet, which took its claim back.
            if seen.model.history:
                raise AssertionError(f"{session!r} lost its slot, but nobody took it away")
        elif was_hot and not seen.hot:
            reason = session._cold_reason
            problem = self._judge_loss(session, seen, reason)
            seen.model.go_cold(reason)
            seen.idle_from = None
            if problem:
                raise AssertionError(f"{session!r} lost its slot ({reason}) {problem}")
        # Not by the calls that clients have made: one may wait for its cancellation before it does anything.
        idle = seen.hot and not session._operations and session._opened
        if not idle:
            seen.idle_from = None
        elif seen.idle_from is None:
            self._events += 1
            seen.idle_from = trio.current_time(), self._events

    def _check_turn(self, session: Session, seen: _Seen) -> None:
        for other, theirs in self._seen.items():
            # Not one whose claim was refused, and whose task has not heard of it yet.
            waits = theirs.waits_from is not None and other._tenancy in self.runtime._ledger.waiting
            if waits and (seen.waits_from is None or cast("int", theirs.waits_from) < seen.waits_from):
                raise AssertionError(f"{session!r} got a slot before {other!r}, which has waited for longer")

    def _judge_loss(self, session: Session, seen: _Seen, reason: MissReason) -> str | None:
        model = seen.model
        if reason is MissReason.RELEASED:
            superseded = self.model.is_stale(session.key)
            return None if model.ending or superseded or self._releasing[session.key] else "though nobody released it"
        if reason is MissReason.FAILED:
            return None if self.model.failures or self.program.memory != "attention" else "though nothing had failed"
        if session._entry.pinned:
            return "though it was pinned"
        if seen.idle_from is None:
            return "though it was not idle"
        if reason is MissReason.EXPIRED:
            idle_for = trio.current_time() - seen.idle_from[0]
            return (
                None if self.program.ttl is not None and idle_for >= self.program.ttl - 1e-6 else f"after {idle_for} s"
            )
        for other, theirs in self._seen.items():
            if other.hot and not other._entry.pinned and theirs.idle_from and theirs.idle_from[1] < seen.idle_from[1]:
                return f"though {other!r} had been idle for longer"
        return None

    def _note(self, me: int, what: str) -> None:
        self.invariants.note(f"client {me}: {what}")

    def _told(self, me: int, operation: Operation, outcome: Any) -> None:
        said = (
            outcome
            if isinstance(outcome, str)
            else type(outcome).__name__
            if isinstance(outcome, Exception)
            else "done"
        )
        if isinstance(outcome, CacheMiss):
            said = f"CacheMiss {outcome.reason}"
        self.outcomes.append(f"{type(operation).__name__}: {said}")
        self._note(me, f"{operation!r} -> {outcome if isinstance(outcome, Exception) else said}")
