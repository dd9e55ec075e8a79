"""Recorder: an engine around another one that notes each native call, and what the slots hold at the end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotkv_trio._engine import Append, Engine, EngineInfo, Output, Rows

Member: TypeAlias = "tuple[int, int, int, Output]"
"""Slot, position, tokens, rows asked for: one session's part of a native call, without its contents."""


@attrs.frozen
class NativeCall:
    """One native call."""

    members: tuple[Member, ...]
    seconds: float

    @property
    def n_tokens(self) -> int:
        """Tokens appended."""
        return sum(n_tokens for _, _, n_tokens, _ in self.members)

    @property
    def is_decode(self) -> bool:
        """Whether each member appended one token."""
        return all(n_tokens == 1 for _, _, n_tokens, _ in self.members)


@attrs.frozen(eq=False)
class Held:
    """A native call that is held at its beginning, in the engine's thread."""

    begun: trio.Event = attrs.field(factory=trio.Event, init=False)
    may_go_on: threading.Event = attrs.field(factory=threading.Event, init=False)


class Recorder:
    """Passes every call on to the engine that it is around.  Made inside `trio.run`.

    Args:
        engine: not opened yet.
        on_call: told, in the engine's thread, of each native call that succeeded.
    """

    def __init__(self, engine: Engine, on_call: Callable[[NativeCall], None]) -> None:
        self._engine = engine
        self._on_call = on_call
        self._token = trio.lowlevel.current_trio_token()
        self._held: dict[int, Held] = {}
        self._n_slots = 0
        self.left: list[int] = []
        """Tokens that each slot still held when the engine was closed."""

    def hold(self, slot: int) -> Held:
        """Hold the next native call that serves the slot, until it may go on."""
        self._held[slot] = held = Held()
        return held

    def open(self) -> EngineInfo:
        """See `hotkv_trio.Engine.open`."""
        info = self._engine.open()
        self._n_slots = info.n_slots
        return info

    def process(self, group: Sequence[Append]) -> list[Rows]:
        """See `hotkv_trio.Engine.process`."""
        for append in group:
            if (held := self._held.pop(append.slot, None)) is not None:
                self._token.run_sync_soon(held.begun.set)
                held.may_go_on.wait()
        begun = time.perf_counter()
        rows = self._engine.process(group)
        call = NativeCall(
            tuple((append.slot, append.position, append.n_tokens, append.output) for append in group),
            time.perf_counter() - begun,
        )
        self._on_call(call)
        return rows

    def truncate(self, slot: int, length: int) -> bool:
        """See `hotkv_trio.Engine.truncate`."""
        return self._engine.truncate(slot, length)

    def clear(self, slot: int) -> None:
        """See `hotkv_trio.Engine.clear`."""
        self._engine.clear(slot)

    def move(self, source: int, target: int) -> None:
        """See `hotkv_trio.Engine.move`."""
        if (held := self._held.pop(source, None)) is not None:
            self._held[target] = held
        self._engine.move(source, target)

    def length(self, slot: int) -> int:
        """See `hotkv_trio.Engine.length`."""
        return self._engine.length(slot)

    def close(self) -> None:
        """See `hotkv_trio.Engine.close`."""
        try:
            self.left = [self._engine.length(slot) for slot in range(self._n_slots)]
        finally:
            self._engine.close()
