"""StepInvariants: checks runtimes after every step of trio's scheduler, and keeps the first violation."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, final

import attrs
import trio
import trio.abc

from hotkv_trio._owner import InlineExecutor
from hotkv_trio.testing._tasks import where

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotkv_trio._runtime import Runtime


@attrs.frozen
class Violation:
    """The first invariant that did not hold."""

    what: str
    step: int
    """Steps of trio's scheduler before it."""
    task: str
    """The task whose step it was, and where it waits now."""
    notes: tuple[str, ...]
    """What was noted before it, oldest first."""

    def __str__(self) -> str:
        """Tell it as a story."""
        led = "".join(f"\n    {note}" for note in self.notes)
        return (
            f"{self.what}\n  found after step {self.step}, of {self.task}\n  what led there:{led or ' nothing noted'}"
        )


@final
class StepInvariants(trio.abc.Instrument):
    """An instrument for `trio.run` and `ScheduleTape.run`.

    After every step: what ``Runtime.check_integrity`` says, the newest epoch of an id only grows, and the engine holds
    as many tokens for a resting session as the session says.  Whenever all tasks wait: nobody waits for a slot that an
    idle session could be evicted for, no session is idle beyond its TTL, and no work is queued with no native call
    under way.  The last two kinds are looked at with an `InlineExecutor` only, where nothing happens in between.

    An instrument must not raise, so the first violation is kept; ask with `check` when the run has ended.

    Example::

        invariants = StepInvariants()


        async def main() -> None:
            async with open_runtime(FakeEngine(), executor=InlineExecutor()) as runtime:
                invariants.watch(runtime)
                ...


        ScheduleTape().run(main, instruments=[invariants])
        invariants.check()

    Args:
        also: further checks to be made after every step; they raise AssertionError.
        history: how many notes to keep.
    """

    def __init__(self, *also: Callable[[], None], history: int = 40) -> None:
        self.also: list[Callable[[], None]] = list(also)
        """Further checks."""
        self._notes: deque[str] = deque(maxlen=history)
        self._runtimes: list[Runtime] = []
        self._newest: dict[tuple[int, str], int] = {}
        self._ready: set[trio.lowlevel.Task] = set()
        self.steps: int = 0
        """Steps seen."""
        self.violation: Violation | None = None
        """The first one."""

    def watch(self, runtime: Runtime) -> None:
        """Check this runtime from now on."""
        self._runtimes.append(runtime)

    def violated(self, what: str) -> None:
        """Keep a violation that somebody else found."""
        if self.violation is None:
            self._keep(AssertionError(what), "the task that found it")

    def note(self, what: str) -> None:
        """Remember something that the report of a violation shall tell."""
        self._notes.append(f"step {self.steps}: {what}")

    def check(self) -> None:
        """Raise the first violation.

        Raises:
            AssertionError: there was one.
        """
        if self.violation is not None:
            raise AssertionError(str(self.violation))

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        """See `trio.abc.Instrument`."""
        self._ready.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """See `trio.abc.Instrument`."""
        self._ready.discard(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        """See `trio.abc.Instrument`."""
        self.steps += 1
        if self.violation is None:
            try:
                for runtime in self._runtimes:
                    self._check_step(runtime)
                for check in self.also:
                    check()
            except Exception as exc:  # noqa: BLE001 - trio would only log it, and drop the instrument
                self._keep(exc, f"{task.name}: {where(task)}")

    def before_io_wait(self, timeout: float) -> None:  # noqa: ARG002 - a MockClock makes it 0 also when all wait
        """See `trio.abc.Instrument`."""
        if self.violation is None and not self._ready:
            try:
                for runtime in self._runtimes:
                    _check_idle(runtime)
            except Exception as exc:  # noqa: BLE001
                self._keep(exc, "some task, since which all of them wait")

    def _keep(self, exc: Exception, task: str) -> None:
        what = str(exc) if isinstance(exc, AssertionError) and str(exc) else repr(exc)
        self.violation = Violation(what, self.steps, task, tuple(self._notes))

    def _check_step(self, runtime: Runtime) -> None:
        runtime.check_integrity()
        inline = isinstance(runtime._executor, InlineExecutor)
        for entry in runtime._directory.entries:
            key, session = entry.key, entry.session
            index = (id(runtime), key.route_session_id)
            newest = self._newest.get(index, -1)
            _require(key.route_epoch >= newest, f"{key} is live, though epoch {newest} was seen")
            self._newest[index] = key.route_epoch
            moving = any(left.session is session for left in runtime._clearing)
            if inline and session.hot and not (moving or session._operations) and session._tenancy is not None:
                held = runtime._engine.length(session._tenancy.slot)
                _require(held == session.length, f"{session!r} rests, but the engine holds {held} tokens for it")


def _check_idle(runtime: Runtime) -> None:
    executor = runtime._executor
    if runtime._closed is not None or not isinstance(executor, InlineExecutor) or executor.jobs:
        return
    _require(not len(runtime._scheduler.plan), "everything waits, though work is queued")
    evictable = runtime._directory.evictable
    nbytes, slots = runtime._ledger.shortfall
    suffices = max(-(-nbytes // runtime._info.slot_bytes), slots) <= evictable
    head = runtime._ledger.head
    _require(
        head is None or not head.with_slot or not suffices,
        f"everything waits, though evicting idle sessions ({evictable}) would let {head} go",
    )
    over = runtime._ledger.borrowed_bytes > runtime._ledger.total_bytes
    _require(not (over and evictable), f"everything waits over budget, though {evictable} idle sessions could go")
    late = trio.current_time() - runtime._directory.next_expiry()
    _require(late < 1e-6, f"everything waits, though a session's idle TTL has passed since {late} s")


def _require(condition: object, what: str) -> None:
    if not condition:
        raise AssertionError(what)
