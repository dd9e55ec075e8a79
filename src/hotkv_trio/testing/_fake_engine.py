"""FakeEngine: an engine in pure Python whose every output is a hash of everything that its slot has seen."""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
import numpy as np

from hotkv_trio._engine import EngineInfo
from hotkv_trio._errors import EngineFailed
from hotkv_trio._recipe import CacheRecipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._engine import Append, Memory, Rows

Method: TypeAlias = Literal["open", "process", "truncate", "clear", "move"]


@attrs.define(eq=False)
class _Slot:
    """One state a token, each a digest of all tokens up to it; ``spoilt`` once its contents mean nothing."""

    states: list[bytes] = attrs.field(factory=list)
    spoilt: bool = False


class FakeEngine:
    """Implements `hotkv_trio.Engine` without a model.

    An output row depends on every token that its slot has seen, and on nothing else; any mix-up of slots, positions
    or results shows at once.  What the core may not do (a wrong position, a slot twice in a call, two calls at once,
    a second thread) is noted in ``violations`` and raised.

    Args:
        n_slots: sequences side by side.
        n_ctx_seq: tokens in each.
        n_vocab: tokens are 0 to ``n_vocab - 1``, and rows are that wide; 0: a later shard, which takes hidden states.
        n_embd: width of hidden states; 0: it takes tokens only.
        bytes_per_token: KV bytes.
        max_batch_tokens: tokens in one call.
        memory: the kind of memory it plays: ``sliding`` cuts back at most ``n_swa`` tokens, ``recurrent`` and
            ``hybrid`` none.
        n_swa: width of the sliding window.
        move_cost: what moving a session to another slot counts as, in native calls; infinity: it cannot be.
    """

    def __init__(
        self,
        *,
        n_slots: int = 4,
        n_ctx_seq: int = 64,
        n_vocab: int = 16,
        n_embd: int = 0,
        bytes_per_token: int = 10,
        max_batch_tokens: int = 512,
        memory: Memory = "attention",
        n_swa: int = 0,
        move_cost: float = 0.1,
    ) -> None:
        self._info = EngineInfo(
            n_slots=n_slots,
            n_ctx_seq=n_ctx_seq,
            bytes_per_token=bytes_per_token,
            slot_bytes=bytes_per_token * n_ctx_seq,
            max_batch_tokens=max_batch_tokens,
            max_outputs=max_batch_tokens,
            n_vocab=n_vocab,
            n_embd=n_embd,
            n_output=n_vocab or n_embd,
            memory=memory,
            move_cost=move_cost,
            layers=(0, 2) if n_vocab else (2, 4),
            layer_count=2 if n_vocab else 4,
            recipe=CacheRecipe(
                model_digest="fake",
                architecture="fake",
                layers=(0, 2) if n_vocab else (2, 4),
                layer_count=2 if n_vocab else 4,
                engine="fake",
                type_k="f16",
                type_v="f16",
                flash_attention=True,
                kv_rotation=False,
                rope_freq_base=0.0,
                rope_freq_scale=0.0,
                yarn=(),
                n_swa=n_swa,
                swa_full=True,
                layout="streams",
                n_ctx_seq=n_ctx_seq,
            ),
        )
        self._n_swa = n_swa
        self._slots: dict[int, _Slot] = defaultdict(_Slot)
        self._failures: dict[Method, deque[BaseException | None]] = defaultdict(deque)
        self._inside = threading.Lock()
        self._go = threading.Event()
        self._go.set()
        self._thread: int | None = None
        self.violations: list[str] = []
        """What the core did that it may not do."""
        self.calls: list[tuple[Append, ...]] = []
        """Every group that `process` was given, also when it failed."""
        self.moves: list[tuple[int, int]] = []
        """The two slots of every `move`, also when it failed."""
        self.opened: bool = False
        self.closed: bool = False

    def fail(self, method: Method, *errors: BaseException | None) -> None:
        """Make the next calls of ``method`` raise these, one each; None lets one succeed.

        A failing `process` has appended half of what it was given, as llama.cpp may have; a failing `move` has copied
        half.
        """
        self._failures[method].extend(errors)

    def stall(self) -> None:
        """Make `process` wait, in the thread that calls it, until `resume`; with an owner thread only."""
        self._go.clear()

    def resume(self) -> None:
        """Let `process` go on."""
        self._go.set()

    def open(self) -> EngineInfo:
        """See `hotkv_trio.Engine.open`."""
        self._enter()
        try:
            self._fail_if_told("open")
            self.opened = True
            return self._info
        finally:
            self._inside.release()

    def process(self, group: Sequence[Append]) -> list[Rows]:
        """See `hotkv_trio.Engine.process`."""
        self._enter()
        try:
            self.calls.append(tuple(group))
            self._check(group)
            self._go.wait()
            if (error := self._next_failure("process")) is not None:
                for append in group:
                    self._append(append, len(append.data) // 2)
                    self._slots[append.slot].spoilt = self._info.memory != "attention"
                raise error
            return [self._append(append, len(append.data)) for append in group]
        finally:
            self._inside.release()

    def truncate(self, slot: int, length: int) -> bool:
        """See `hotkv_trio.Engine.truncate`."""
        self._enter()
        try:
            self._fail_if_told("truncate")
            state = self._slots[slot]
            cut = len(state.states) - length
            if cut < 0:
                self._violated(f"slot {slot} of {len(state.states)} tokens truncated to {length}")
            reach = {"attention": cut, "sliding": self._n_swa}.get(self._info.memory, 0)
            if length and (state.spoilt or cut > reach):
                return False
            del state.states[length:]
            state.spoilt = False
            return True
        finally:
            self._inside.release()

    def clear(self, slot: int) -> None:
        """See `hotkv_trio.Engine.clear`."""
        self._enter()
        try:
            self._fail_if_told("clear")
            self._slots[slot] = _Slot()
        finally:
            self._inside.release()

    def move(self, source: int, target: int) -> None:
        """See `hotkv_trio.Engine.move`."""
        self._enter()
        try:
            self.moves.append((source, target))
            if self._slots[target].states or source == target:
                self._violated(f"slot {source} moved to slot {target}, which is not empty")
            if (error := self._next_failure("move")) is not None:
                half = self._slots[source].states
                self._slots[target] = _Slot(half[: len(half) // 2], spoilt=True)
                raise error
            self._slots[target] = self._slots.pop(source, _Slot())
        finally:
            self._inside.release()

    def length(self, slot: int) -> int:
        """See `hotkv_trio.Engine.length`."""
        return len(self._slots[slot].states)

    def close(self) -> None:
        """See `hotkv_trio.Engine.close`."""
        self._enter()
        if self.closed:
            self._inside.release()
            self._violated("closed twice")
        self.closed = True
        self._inside.release()

    def rows(self, history: Sequence[int]) -> Rows:
        """Return the rows that a session of this history of tokens gets: float32 (len(history), n_vocab)."""
        states = [b""]
        for token in history:
            states.append(_next_state(states[-1], np.int32(token).tobytes()))
        return self._rows(states[1:])

    def _enter(self) -> None:
        if not self._inside.acquire(blocking=False):
            self._violated("two calls at once")
        self._thread = self._thread or threading.get_ident()
        if self._thread != threading.get_ident():
            self._inside.release()
            self._violated("called from a second thread")
        if self.closed:
            self._inside.release()
            self._violated("called after close")

    def _check(self, group: Sequence[Append]) -> None:
        if len({append.slot for append in group}) != len(group) or not group:
            self._violated(f"slots {[append.slot for append in group]} in one call")
        if sum(append.n_tokens for append in group) > self._info.max_batch_tokens:
            self._violated("too many tokens in one call")
        if len({append.data.ndim for append in group}) != 1:
            self._violated("two kinds of data in one call")
        for append in group:
            held = self.length(append.slot)
            if append.position != held or self._slots[append.slot].spoilt:
                self._violated(f"slot {append.slot} holds {held} tokens, appended at {append.position}")
            if not 0 <= append.slot < self._info.n_slots or held + append.n_tokens > self._info.n_ctx_seq:
                self._violated(f"slot {append.slot} cannot hold {held} + {append.n_tokens} tokens")

    def _append(self, append: Append, n_tokens: int) -> Rows:
        states = self._slots[append.slot].states
        for row in append.data[:n_tokens]:
            states.append(_next_state(states[-1] if states else b"", row.tobytes()))
        return self._rows(states[len(states) - append.n_rows :] if append.n_rows else [])

    def _rows(self, states: list[bytes]) -> Rows:
        width = self._info.n_output
        noise = b"".join(hashlib.shake_128(state).digest(2 * width) for state in states)
        return np.frombuffer(noise, dtype="<u2").astype(np.float32).reshape(len(states), width)

    def _fail_if_told(self, method: Method) -> None:
        if (error := self._next_failure(method)) is not None:
            raise error

    def _next_failure(self, method: Method) -> BaseException | None:
        return self._failures[method].popleft() if self._failures[method] else None

    def _violated(self, what: str) -> None:
        self.violations.append(what)
        raise EngineFailed(None, f"the core broke the engine's contract: {what}")


def _next_state(state: bytes, token: bytes) -> bytes:
    return hashlib.blake2b(token, digest_size=16, key=state).digest()
