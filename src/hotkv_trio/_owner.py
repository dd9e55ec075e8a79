"""Where native calls run: the owner thread, and for deterministic tests a task in the trio thread.

An engine is used by one thread only, one call at a time (llama.cpp: two threads on one context end the process, and
each calling thread gets a team of OpenMP threads of its own).  So one long-lived thread owns it.  Jobs run in the
order in which they were submitted: that is what makes "clear the slot after the step that uses it" a matter of order.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

logger = logging.getLogger("hotkv_trio")


class Executor(Protocol):
    """Runs jobs one at a time, in order."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run jobs until `stop`; jobs submitted before it are all run.  The runtime shields this from cancellation."""
        ...

    def submit(self, job: Callable[[], T], done: Callable[[outcome.Outcome[T]], None]) -> None:
        """Run ``job`` after all jobs before it; then call ``done``, which must not raise, in the trio thread."""
        ...

    def stop(self) -> None:
        """Let `serve` return once every job submitted so far is done."""
        ...


async def call(executor: Executor, job: Callable[[], T], then: Callable[[outcome.Outcome[T]], None] | None = None) -> T:
    """Run ``job`` and return or raise what it did.  It is waited for also by a cancelled task: it cannot be undone.

    Args:
        executor: where it runs.
        job: what is run.
        then: is told first, in the trio thread, one pass of trio's loop before this task; it must not raise.
    """
    task = trio.lowlevel.current_task()
    result: list[outcome.Outcome[T]] = []

    def done(what: outcome.Outcome[T]) -> None:
        if then is not None:
            then(what)
        result.append(what)
        trio.lowlevel.reschedule(task)

    executor.submit(job, done)
    await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
    return result.pop().unwrap()


def error_of(result: outcome.Outcome[Any]) -> BaseException | None:
    """Return what a job raised, or None."""
    return getattr(result, "error", None)


@final
class OwnerThread:
    """One long-lived thread, joined before `serve` returns.

    Args:
        name: of the thread.
        grace: seconds after which a native call that still runs is reported in the log, with the thread's name, and
            again each time they pass (the engine's opening only once the runtime is to end).  A native call that
            never returns cannot be ended, but it is not waited for in silence.
    """

    def __init__(self, name: str = "hotkv-owner", *, grace: float = 10.0) -> None:
        self.name = name
        self._grace = grace
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[outcome.Outcome[Any]], None]] | None] = (
            queue.SimpleQueue()
        )
        self._busy = False
        self._taken = 0
        self._stopping = False
        self._finished = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """See `Executor.serve`, also about cancellation."""
        # A daemon: an interpreter that exits in the middle of a native call must not wait for it.
        thread = threading.Thread(
            target=self._run_jobs, args=(trio.lowlevel.current_trio_token(),), name=self.name, daemon=True
        )
        thread.start()
        task_status.started()
        while True:
            taken = self._taken
            with trio.move_on_after(self._grace):
                await self._finished.wait()
                break
            # The first job is the engine's opening, which may take its time.
            if self._busy and self._taken == taken and (taken > 1 or self._stopping):
                logger.warning("owner thread %r still runs a native call; waiting for it", self.name)
        thread.join()

    def submit(self, job: Callable[[], T], done: Callable[[outcome.Outcome[T]], None]) -> None:
        """See `Executor.submit`."""
        self._jobs.put((job, done))

    def stop(self) -> None:
        """See `Executor.stop`."""
        self._stopping = True
        self._jobs.put(None)

    def _run_jobs(self, token: trio.lowlevel.TrioToken) -> None:
        try:
            while (item := self._jobs.get()) is not None:
                job, done = item
                self._taken += 1
                self._busy = True
                token.run_sync_soon(done, outcome.capture(job))
                # Otherwise the last job's arrays would live until the next one.
                del item, job, done
                self._busy = False
            token.run_sync_soon(self._finished.set)
        except trio.RunFinishedError:
            # trio.run has ended with the runtime open: nobody is left to tell.
            return


@final
class InlineExecutor:
    """Runs jobs in the trio thread, in a task of its own, with a checkpoint before each: for deterministic tests.

    `hold` makes the next job stall, as if the native call took long, until `resume`.
    """

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], Any], Callable[[outcome.Outcome[Any]], None]]] = deque()
        self._lot = trio.lowlevel.ParkingLot()
        self._stopped = False
        self._held = False

    @property
    def jobs(self) -> int:
        """Jobs submitted and not yet done."""
        return len(self._jobs)

    def hold(self) -> None:
        """Let no further job run until `resume`."""
        self._held = True

    def resume(self) -> None:
        """Let jobs run again."""
        self._held = False
        self._lot.unpark_all()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:  # noqa: ASYNC910
        """See `Executor.serve`."""
        task_status.started()
        while self._jobs or not self._stopped:
            if not self._jobs or self._held:
                await self._lot.park()
                continue
            await trio.lowlevel.checkpoint()
            if not self._held:
                job, done = self._jobs[0]
                result = outcome.capture(job)
                self._jobs.popleft()
                done(result)

    def submit(self, job: Callable[[], T], done: Callable[[outcome.Outcome[T]], None]) -> None:
        """See `Executor.submit`."""
        self._jobs.append((job, done))
        self._lot.unpark_all()

    def stop(self) -> None:
        """See `Executor.stop`."""
        self._stopped = True
        self._lot.unpark_all()
