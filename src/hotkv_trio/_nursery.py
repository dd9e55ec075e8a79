"""What the context managers stand on: bare errors, and no KeyboardInterrupt in the middle of their own code."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TypeVar, final

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
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
