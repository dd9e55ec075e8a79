"""ScheduleTape: runs a trio program under a chosen schedule, always the same one for the same tape.

This is the only module that touches private names of trio: `_r`, the source of its scheduler's randomness, and
`_ALLOW_DETERMINISTIC_SCHEDULING`, which makes it sort the tasks that are ready before it shuffles them.
``tests/testing/test_schedule_tape.py`` has a canary that says what to do when trio changes either.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from typing import TYPE_CHECKING, Any, TypeVar, final

import trio
import trio.testing

from hotkv_trio.testing._tasks import all_tasks, where

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from trio.abc import Instrument

T = TypeVar("T")

_run: Any = trio._core._run


class Hung(AssertionError):
    """A program stopped for ever, or ran in circles; the message says where each of its tasks waits."""


@final
class ScheduleTape:
    """A schedule as a few small integers, and the means to run a program under it.

    trio runs tasks in batches: all that are ready now, in random order.  Each batch of two or more takes one number
    off the tape; ``n`` tasks stand in the order in which they were made, and

    - 0 runs them in that order;
    - ``k < n`` runs the one with index ``k`` first, then the others in order;
    - a greater ``k`` goes on in the same way among the rest with ``k // n``.

    When the tape has ended, all further batches run in order.  Time is a `trio.testing.MockClock` that jumps as soon
    as every task waits, so a run takes no real time; use an `InlineExecutor`, since the clock would also jump over
    a native call in a thread.

    Example::

        ScheduleTape([0, 2, 1]).run(main)

    Args:
        choices: one number >= 0 a batch.
    """

    def __init__(self, choices: Sequence[int] = ()) -> None:
        self.choices: tuple[int, ...] = tuple(choices)
        self.schedule: list[tuple[int, ...]] = []
        """Of the last run: the order of each batch of two or more tasks."""
        self.batches: int = 0
        """Of the last run: how many batches there were, of any size."""

    def __repr__(self) -> str:
        return f"ScheduleTape({list(self.choices)})"

    def run(
        self,
        program: Callable[..., Awaitable[T]],
        *args: Any,
        instruments: Sequence[Instrument] = (),
        patience: float = 1e5,
        max_batches: int = 100_000,
    ) -> T:
        """Run ``program(*args)`` as `trio.run` does, and return or raise what it does.

        Args:
            program: the async function.
            *args: for it.
            instruments: for `trio.run`.
            patience: seconds of the program's clock after which it counts as hung.
            max_batches: batches after which it counts as running in circles.

        Raises:
            Hung: it did not end.
        """
        self.schedule, self.batches = [], 0
        dealer = _Dealer(self, max_batches)
        with _dealt_by(dealer):
            try:
                return trio.run(
                    _watched,
                    dealer,
                    patience,
                    program,
                    args,
                    clock=trio.testing.MockClock(autojump_threshold=0),
                    instruments=instruments,
                )
            except trio.TrioInternalError:
                if dealer.hung is None:
                    raise
        dealer.bury()
        raise Hung(dealer.hung)


class _Dealer(random.Random):  # noqa: S311 - it deals the order of tasks
    """Stands in for trio's source of randomness."""

    def __init__(self, tape: ScheduleTape, max_batches: int) -> None:
        super().__init__(0)
        self._tape = tape
        self._choices = iter(tape.choices)
        self._max_batches = max_batches
        self.dealing = False
        self.stopped = False
        self.hung: str | None = None
        self._left: list[trio.lowlevel.Task] = []

    def shuffle(self, x: Any) -> None:
        """Put the ready tasks into the order of the tape; trio takes them from the end."""
        tape = self._tape
        tape.batches += 1
        if self.stopped or tape.batches > self._max_batches:
            self._give_up("the program is still waiting" if self.stopped else "the program runs in circles")
        if len(x) < 2 or not self.dealing:
            return
        choice = next(self._choices, 0)
        indices, order = list(range(len(x))), []
        while indices:
            choice, first = divmod(choice, len(indices))
            order.append(indices.pop(first))
        tape.schedule.append(tuple(order))
        x[:] = [x[index] for index in reversed(order)]

    def _give_up(self, why: str) -> None:
        """End the run: what is raised inside trio's loop ends it, whatever is shielded."""
        self._left = list(all_tasks())
        places = [f"  {task.name}: {where(task)}" for task in self._left if task.coro.cr_frame is not None]
        self.hung = "\n".join([f"{why} after {self._tape.batches} batches; its tasks are in", *places])
        raise Hung(self.hung)

    def bury(self) -> None:
        """Keep the coroutines of a run that was given up: collected, they would do their clean-up without a loop."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._left))


@contextlib.contextmanager
def _dealt_by(dealer: _Dealer) -> Generator[None]:
    before = _run._r, _run._ALLOW_DETERMINISTIC_SCHEDULING
    _run._r, _run._ALLOW_DETERMINISTIC_SCHEDULING = dealer, True
    try:
        yield
    finally:
        _run._r, _run._ALLOW_DETERMINISTIC_SCHEDULING = before


async def _watched(dealer: _Dealer, patience: float, program: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    async def watch() -> None:
        await trio.sleep(patience)
        dealer.stopped = True
        await trio.lowlevel.checkpoint()

    trio.lowlevel.spawn_system_task(watch, name="the watch for a hung program")
    # trio's own tasks and the watch have settled after this; the tape is for the program's.
    await trio.lowlevel.checkpoint()
    dealer.dealing = True
    return await program(*args)
