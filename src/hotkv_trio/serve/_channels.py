"""What is ready in a channel, taken at once."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")


def waiting(channel: trio.MemoryReceiveChannel[T]) -> Iterator[T]:
    """Yield what can be received without waiting."""
    with suppress(trio.WouldBlock, trio.EndOfChannel):
        while True:
            yield channel.receive_nowait()
