"""What the context managers stand on: bare errors, and no KeyboardInterrupt in the middle of their own code."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, final

import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable
    from types import TracebackType

T = TypeVar("T")
P = ParamSpec("P")


def protected_context(
    manager: Callable[P, AbstractAsyncContextManager[T, bool | None]],
) -> Callable[P, AbstractAsyncContextManager[T, bool | None]]:
    """Keep KeyboardInterrupt out of a context manager's own code, though not out of the body.

    One that comes there is raised at the main task's next checkpoint.
    """

    @wraps(manager)
    def enter(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T, bool | None]:
        return _Protected(manager(*args, **kwargs))

    return enter


@final
class _Protected(AbstractAsyncContextManager[T, bool | None]):
    # trio knows protected code by what is on the stack.  A decorated generator is not there yet while contextlib is
    # about to resume it; interrupted in that moment it would never be.

    def __init__(self, inner: AbstractAsyncContextManager[T, bool | None]) -> None:
        self._inner = inner

    @trio.lowlevel.enable_ki_protection
    async def __aenter__(self) -> T:
        return await self._inner.__aenter__()

    @trio.lowlevel.enable_ki_protection
    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc, traceback)  # noqa: ASYNC102 - its own affair


@asynccontextmanager
async def open_body_nursery(scope: trio.CancelScope) -> AsyncGenerator[trio.Nursery]:
    """Open a nursery inside ``scope`` for the tasks that accompany the body.

    When the body ends, in whatever way, the tasks are cancelled and waited for; then what the body raised is raised
    as it is.  A task's error cancels the body, and is raised as trio does, in a group, together with what the body
    raised if that was something of its own.  Cancelling the nursery's own scope counts as cancelling ``scope``.

    Args:
        scope: a cancel scope that is not entered yet.
    """
    error: BaseException | None = None
    with scope:
        try:
            async with trio.open_nursery() as nursery:
                try:
                    yield nursery
                except BaseException as exc:  # noqa: ASYNC103, BLE001 - raised again below, outside the nursery
                    error = exc
                if nursery.cancel_scope.cancel_called:
                    scope.cancel(reason="the nursery of the scope was cancelled")
                nursery.cancel_scope.cancel(reason="the body of the scope ended")
        except BaseExceptionGroup as group:
            if error is None or isinstance(error, trio.Cancelled):
                raise
            raise BaseExceptionGroup("the body and its tasks failed", [error, *group.exceptions]) from None
        if error is not None:
            try:
                raise error
            finally:
                # The frame is kept by the traceback, and the traceback by the error.
                error = None


async def start_service(
    nursery: trio.Nursery, scope: trio.CancelScope, service: Callable[..., Awaitable[None]]
) -> None:
    """Start a task inside ``scope``, as `trio.Nursery.start` does, but neither cancelled nor interrupted meanwhile.

    `trio.Nursery.start` keeps a task that it was cancelled in, and waits for its end.  A service that is shielded, to
    be stopped by whoever started it, would then never be stopped.

    Args:
        nursery: where it runs.
        scope: a shielded cancel scope that is not entered yet; cancel it to stop the service.
        service: takes a ``task_status``; what it raises before it has called ``started`` is raised here.
    """
    status = _Starting(trio.lowlevel.current_task())
    nursery.start_soon(_run_service, scope, service, status)
    await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)


@trio.lowlevel.enable_ki_protection
async def _run_service(  # noqa: ASYNC910
    scope: trio.CancelScope, service: Callable[..., Awaitable[None]], status: _Starting
) -> None:
    try:
        with scope:
            await service(task_status=status)
    except BaseException as exc:  # noqa: ASYNC103 - raised by whoever waits for the start
        if status.over:
            raise
        status.fail(exc)


@final
class _Starting(trio.TaskStatus[None]):
    def __init__(self, task: trio.lowlevel.Task) -> None:
        self._task = task
        self.over = False

    def started(self, value: None = None) -> None:
        self._tell(outcome.Value(value))

    def fail(self, error: BaseException) -> None:
        self._tell(outcome.Error(error))

    def _tell(self, result: outcome.Outcome[None]) -> None:
        self.over = True
        trio.lowlevel.reschedule(self._task, result)
