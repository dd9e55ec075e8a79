"""A nursery for a context manager: what its body raises leaves it bare, not in an exception group."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


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
