"""Cancel sweep: cancels a chosen part of a program at each step of its life in turn."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, final

import attrs
import trio
import trio.abc

from hotkv_trio.testing._schedule_tape import ScheduleTape
from hotkv_trio.testing._tasks import where

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from types import TracebackType

    from trio.abc import Instrument

T = TypeVar("T")


def _holds_cancelled(exc: BaseException) -> bool:
    if isinstance(exc, BaseExceptionGroup):
        return any(map(_holds_cancelled, exc.exceptions))
    return isinstance(exc, trio.Cancelled)


@attrs.frozen
class CancelPoint:
    """One step at which the victim was cancelled."""

    step: int
    """Steps of trio's scheduler since the victim's life began."""
    place: str
    """Where the victim's task stood."""
    cancelled: bool
    """Whether a `trio.Cancelled` reached the victim's end; not if it ended in another way first."""


@attrs.frozen
class CancelSweep:
    """What a sweep found: nothing wrong, at these points."""

    points: tuple[CancelPoint, ...]

    @property
    def cancelled(self) -> int:
        """At how many points the victim ended with `trio.Cancelled`."""
        return sum(point.cancelled for point in self.points)

    @property
    def places(self) -> tuple[str, ...]:
        """The different places in which the victim stood when it was cancelled, in the order of its life."""
        return tuple(dict.fromkeys(point.place for point in self.points))

    def __str__(self) -> str:
        """Say the counts."""
        return f"{len(self.points)} cancellation points in {len(self.places)} places, {self.cancelled} ended Cancelled"


@final
class Victim(trio.abc.Instrument):
    """Marks the part of a program that is to be cancelled.

    Use it as a context manager, once in a run: ``with victim:`` opens a cancel scope of its own; ``with
    victim.by(session.cancel):`` marks the life of something that has a scope already, and how to cancel it.
    """

    def __init__(self, at_step: int | None) -> None:
        self._at_step = at_step
        self._cancel: Callable[[], object] | None = None
        self._task: trio.lowlevel.Task | None = None
        self._scope = trio.CancelScope()
        self._by: Any = None
        self.steps: int = 0
        """Steps in its life so far."""
        self.lived: bool = False
        """Whether its life began."""
        self.place: str | None = None
        """Where it stood when it was cancelled; None if it was not."""
        self.cancelled: bool = False
        """Whether it ended with `trio.Cancelled`."""

    def __enter__(self) -> trio.CancelScope:
        self._by = self.by(self._scope.cancel)
        self._scope.__enter__()
        self._by.__enter__()
        return self._scope

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._by.__exit__(kind, exc, traceback)
        return bool(self._scope.__exit__(kind, exc, traceback))

    @contextmanager
    def by(self, cancel: Callable[[], object]) -> Generator[None]:
        """Mark a part of the program that ``cancel()`` cancels."""
        if self.lived:
            raise RuntimeError("a victim lives once in a run")
        self.lived = True
        self._task = trio.lowlevel.current_task()
        self._cancel = cancel
        try:
            yield
        except BaseException as exc:
            self.cancelled = _holds_cancelled(exc)
            raise
        finally:
            self._cancel = None

    def after_task_step(self, task: trio.lowlevel.Task) -> None:  # noqa: ARG002
        """See `trio.abc.Instrument`."""
        if self._cancel is None or self._task is None:
            return
        if self.steps == self._at_step:
            self.place = where(self._task)
            self._cancel()
        self.steps += 1


def cancel_at_every_step(
    program: Callable[[Victim], Awaitable[T]],
    check: Callable[[T], object] | None = None,
    *,
    tape: Sequence[int] = (),
    instruments: Callable[[], Sequence[Instrument]] = tuple,
) -> CancelSweep:
    """Run a program again and again, and cancel its victim one step later each time, until it ends before that.

    A step is one step of trio's scheduler, of any task: so the cancellation falls between any two things that happen
    while the victim lives.  The same tape makes every run the same up to the cancellation.

    Example::

        async def program(victim: Victim) -> RuntimeStatistics:
            async with open_runtime(FakeEngine(), executor=InlineExecutor()) as runtime:
                with victim:
                    async with runtime.open_session(SessionKey("a", 0)) as session:
                        await session.prefill([1, 2, 3])
                return runtime.statistics()


        def check(statistics: RuntimeStatistics) -> None:
            assert statistics.borrowed_bytes == 0


        print(cancel_at_every_step(program, check))

    Args:
        program: an async function that is given the `Victim` and lets it live once.
        check: looks at what the program returned, and raises AssertionError; the program may do so as well.
        tape: the schedule.
        instruments: makes further instruments for each run.

    Returns:
        The points at which the victim was cancelled.

    Raises:
        Exception: what the program or the check raised; a note says at which step the victim was cancelled, and where.
        RuntimeError: the victim did not live.
    """
    points: list[CancelPoint] = []
    while True:
        victim = Victim(len(points))
        try:
            result = ScheduleTape(tape).run(program, victim, instruments=[victim, *instruments()])
            if check is not None:
                check(result)
        except BaseException as exc:
            cut = "not cancelled" if victim.place is None else f"cancelled at step {len(points)}, in {victim.place}"
            exc.add_note(f"the victim was {cut}")
            raise
        if not victim.lived:
            raise RuntimeError("the program did not let the victim live: it never entered `with victim:`")
        if victim.place is None:
            return CancelSweep(tuple(points))
        points.append(CancelPoint(len(points), victim.place, victim.cancelled))
