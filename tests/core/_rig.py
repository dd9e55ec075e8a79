"""A runtime on a FakeEngine whose invariants are checked after every step of trio's scheduler."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import trio
import trio.testing

from hotkv_trio import EngineFailed, OwnerThread, SessionKey, open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor, StepInvariants

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from hotkv_trio import Append, KVLimiter, Runtime, RuntimeStatistics, Session
    from hotkv_trio._engine import Rows

SLOT = 640
"""Bytes of a FakeEngine's slot."""


def key(name: str, epoch: int = 0) -> SessionKey:
    return SessionKey(name, epoch)


class StepwiseEngine(FakeEngine):
    """Holds the executor after every native call, so that a test decides when the next one is made."""

    executor: InlineExecutor
    stepwise = False

    def process(self, group: Sequence[Append]) -> list[Rows]:
        try:
            return super().process(group)
        finally:
            if self.stepwise:
                self.executor.hold()


@attrs.frozen(eq=False)
class Rig:
    runtime: Runtime
    engine: FakeEngine
    executor: InlineExecutor

    @property
    def statistics(self) -> RuntimeStatistics:
        return self.runtime.statistics()

    @property
    def limiter(self) -> KVLimiter:
        return self.runtime.limiter

    def is_solo(self, rows: Rows, history: Sequence[int]) -> bool:
        """Whether the rows are the last ones of a session of this history that is alone in the world."""
        return len(rows) > 0 and bool(np.array_equal(rows, self.engine.rows(history)[-len(rows) :]))

    def holds(self, slot: int) -> int:
        return self.engine.length(slot)

    def appended_to(self, slot: int) -> int:
        """Native calls that named the slot."""
        return sum(append.slot == slot for group in self.engine.calls for append in group)

    async def one_call(self) -> None:
        """Let one native call be made, with a `StepwiseEngine`."""
        assert isinstance(self.engine, StepwiseEngine)
        self.engine.stepwise = True
        self.executor.resume()
        await trio.testing.wait_all_tasks_blocked()

    def all_calls(self) -> None:
        """Let native calls be made freely again."""
        if isinstance(self.engine, StepwiseEngine):
            self.engine.stepwise = False
        self.executor.resume()


@asynccontextmanager
async def open_rig(
    engine: FakeEngine | None = None, *, threaded: bool = False, seconds: float = 20, **options: Any
) -> AsyncGenerator[Rig]:
    """Open a runtime, inline or with an owner thread, and check at the end that nothing was lost or done wrong."""
    engine = FakeEngine() if engine is None else engine
    executor = InlineExecutor()
    if isinstance(engine, StepwiseEngine):
        engine.executor = executor
    invariants = StepInvariants()
    trio.lowlevel.add_instrument(invariants)
    try:
        with trio.fail_after(seconds):
            async with open_runtime(engine, executor=OwnerThread() if threaded else executor, **options) as runtime:
                invariants.watch(runtime)
                yield Rig(runtime, engine, executor)
    finally:
        trio.lowlevel.remove_instrument(invariants)
    invariants.check()
    assert engine.violations == []
    assert engine.closed
    assert runtime.limiter.borrowed_bytes == 0
    statistics = runtime.statistics()
    assert statistics.lent_slots == 0
    assert statistics.free_slots + statistics.quarantined_slots == statistics.slots


@attrs.define(eq=False)
class Caught:
    """How a call in a task of its own ended."""

    value: Any = None
    error: BaseException | None = None
    done: bool = False


def spawn(
    nursery: trio.Nursery,
    function: Callable[..., Awaitable[object]],
    *args: object,
    scope: trio.CancelScope | None = None,
) -> Caught:
    """Call in a task of its own, and note how that ends."""
    caught = Caught()

    async def run() -> None:
        try:
            with trio.CancelScope() if scope is None else scope:
                try:
                    caught.value = await function(*args)
                except Exception as exc:  # noqa: BLE001 - the test looks at it
                    caught.error = exc
                except BaseException as exc:
                    caught.error = exc
                    raise
        finally:
            caught.done = True

    nursery.start_soon(run)
    return caught


async def hold_open(runtime: Runtime, which: SessionKey, **options: Any) -> None:
    """Open a session, and keep it until cancelled."""
    async with runtime.open_session(which, **options):
        await trio.sleep_forever()


async def hold_pinned(rig: Rig, name: str) -> None:
    """Hold a slot that nobody can take, until cancelled."""
    await hold_open(rig.runtime, key(name), pinned=True)


async def open_all(rig: Rig, n_sessions: int) -> list[Session]:
    """Start sessions in the first slots, each with two tokens: its number, as far as there are tokens, and 3."""
    sessions = [await rig.runtime.start_session(key(f"session {number}")) for number in range(n_sessions)]
    for number, session in enumerate(sessions):
        await session.prefill([number % 16, 3])
    return sessions


async def decode_on(session: Session, rig: Rig, history: list[int], n_tokens: int) -> None:
    """Decode greedily, as its own output says, and check every row against the session alone."""
    for _ in range(n_tokens):
        token = int(rig.engine.rows(history)[-1].argmax())
        history.append(token)
        result = await session.decode(token)
        assert rig.is_solo(result.output, history)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what the owner thread brings about."""
    while not condition():  # noqa: ASYNC110 - a thread has no trio event to set
        await trio.sleep(0.001)


def native_failure(code: int = 2) -> EngineFailed:
    return EngineFailed(code, "told to fail")
