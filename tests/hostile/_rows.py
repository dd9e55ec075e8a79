"""The table: each kind of value that ends llama.cpp's process or that it takes and gets wrong, and how it is said.

A row is asked of a `World`: real engines on tiny models.  What it raises is its answer.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from hotkv_trio import Append
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import build_tiny_gguf
from tests.hostile._models import TRAINED, build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hotkv_trio._engine import Output, Rows

N_EMBD: Final = 128
ENDS: Final = "ends the process"
WRONG: Final = "accepted and wrong"


def tokens(n: int) -> np.ndarray[Any, Any]:
    return (np.arange(n, dtype=np.int32) * 7 + 3) % 500


def hidden(n: int, width: int = N_EMBD) -> np.ndarray[Any, Any]:
    return np.random.default_rng(n).standard_normal((n, width), dtype=np.float32)


def _spoilt(value: float) -> np.ndarray[Any, Any]:
    states = hidden(40)
    states[17, 5] = value
    return states


class World:
    """An engine whose slot 0 is the neighbour of every row, and others that rows need, opened when they do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = build_tiny_gguf(folder / "llama.gguf", n_layer=2)
        self.engine = self._opened(LlamaEngine(self.path, n_slots=4, n_ctx=256, threads=1))
        self.append(self.engine, slot=0, data=tokens(3))
        self.next_row = self.neighbours_row()
        self._others: dict[str, LlamaEngine] = {}

    def neighbours_row(self) -> Rows:
        """Return what the neighbour answers next, and cut that off again."""
        (rows,) = self.engine.process([Append(0, 3, tokens(70), "all")])
        if not self.engine.truncate(0, 3):
            raise AssertionError("the neighbour could not be cut back")
        return rows

    def append(
        self,
        engine: LlamaEngine | None = None,
        *,
        slot: Any = 1,
        at: Any = 0,
        data: Any = None,
        output: Output = "last",
    ) -> None:
        """Append something that is right but for what is given."""
        (engine or self.engine).process([Append(slot, at, tokens(3) if data is None else data, output)])

    def other(self, name: str) -> LlamaEngine:
        """Return an open engine on another model: an architecture, or ``shard``, the later half of a llama."""
        if name not in self._others:
            if name == "shard":
                engine = LlamaEngine(self.path, layers=(1, 2), n_slots=2, n_ctx=256, threads=1, cache_dir=self.folder)
            else:
                engine = LlamaEngine(build(self.folder / f"{name}.gguf", name), n_slots=2, n_ctx=256, threads=1)
            self._others[name] = self._opened(engine)
        return self._others[name]

    def close(self) -> None:
        for engine in (self.engine, *self._others.values()):
            engine.close()

    @staticmethod
    def _opened(engine: LlamaEngine) -> LlamaEngine:
        engine.open()
        return engine


@attrs.frozen
class Row:
    does: str
    """What llama.cpp does."""
    kind: str
    """The kind of value."""
    value: str
    """The one that is tried."""
    ask: Callable[[World], object]
    error: str = "InvalidInput"
    """The error that it must get; empty: the library makes it right, and serves it."""
    ungated: bool = False
    """Whether the value is known to end the process here when the gate is taken away: the control."""

    @property
    def name(self) -> str:
        return f"{self.kind}: {self.value}"


def _make(**options: Any) -> Callable[[World], object]:
    def make(world: World) -> object:
        engine = LlamaEngine(world.path, **({"n_slots": 2, "n_ctx": 256, "threads": 1} | options))
        try:
            return engine.open()
        finally:
            engine.close()

    return make


def _shared(arch: str, **options: Any) -> Callable[[World], object]:
    """Open a model with all sessions in one pool of cells."""

    def ask(world: World) -> object:
        path = build_tiny_gguf(world.folder / f"shared-{arch}.gguf", arch, n_layer=2)
        engine = LlamaEngine(path, n_slots=2, n_ctx=256, threads=1, layout="unified", **options)
        try:
            return engine.open()
        finally:
            engine.close()

    return ask


def _hidden_shared(world: World) -> object:
    engine = LlamaEngine(world.path, n_slots=2, n_ctx=256, threads=1, layout="unified")
    try:
        engine.open()
        world.append(engine, data=hidden(3))
    finally:
        engine.close()
    return None


def _state(call: str, slot: Any) -> Callable[[World], object]:
    def ask(world: World) -> object:
        arguments = (slot, 0) if call == "truncate" else (slot,)
        return getattr(world.engine, call)(*arguments)

    return ask


def _when(state: str) -> Callable[[World], object]:
    def ask(world: World) -> object:
        engine = LlamaEngine(world.path, n_slots=2, n_ctx=256, threads=1)
        if state == "closed":
            engine.open()
            engine.close()
        world.append(engine)
        return None

    return ask


def _from_another_thread(world: World) -> object:
    caught: list[Exception] = []

    def call() -> None:
        try:
            world.append()
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is the answer
            caught.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]
    return None


def _group(*members: Append) -> Callable[[World], object]:
    return lambda world: world.engine.process(members)


def _appended(**value: Any) -> Callable[[World], object]:
    return lambda world: world.append(**value)


def _after_three(at: int) -> Callable[[World], object]:
    return lambda world: world.append(slot=0, at=at, data=tokens(1))


def _to(name: str, **value: Any) -> Callable[[World], object]:
    return lambda world: world.append(world.other(name), **value)


_SLOTS = (4, -1, 256, 2**31, None)
_TYPES = (999, 4, "i32", "q6_k")

ROWS: Final[tuple[Row, ...]] = (
    Row(
        ENDS,
        "more tokens in a batch than n_batch",
        "600 of 512",
        _group(*[Append(slot, 0, tokens(200), "none") for slot in (1, 2, 3)]),
    ),
    Row(
        ENDS,
        "more outputs than n_outputs_max",
        "600 of 512",
        _group(*[Append(slot, 0, tokens(200), "all") for slot in (1, 2, 3)]),
    ),
    Row(ENDS, "n_seq_max over n_batch", "256 slots of 1 token", _make(n_slots=256, n_ctx=1), error=""),
    Row(ENDS, "n_seq_max over what a context holds", "257", _make(n_slots=257)),
    Row(ENDS, "n_seq_max over what a context holds", "0", _make(n_slots=0)),
    *(
        Row(
            ENDS,
            f"a sequence id out of range, {call}",
            repr(slot),
            _state(call, slot),
            ungated=(call, slot) == ("clear", 4),
        )
        for call, slot in itertools.product(("clear", "truncate", "length"), _SLOTS)
    ),
    *(Row(ENDS, "a sequence id out of range, append", repr(slot), _appended(slot=slot)) for slot in _SLOTS[:-1]),
    Row(ENDS, "an entry with no sequence id", "None", _appended(slot=None)),
    *(Row(ENDS, "type_k that is no type of KV", repr(kind), _make(type_k=kind)) for kind in _TYPES),
    *(Row(ENDS, "type_v that is no type of KV", repr(kind), _make(type_v=kind)) for kind in _TYPES),
    Row(
        ENDS,
        "a position past the trained length, learned positions",
        f"{TRAINED + 1} of {TRAINED}",
        _to("gpt2", data=tokens(TRAINED + 1)),
        ungated=True,
    ),
    Row(ENDS, "hidden states where the graph has no place", "GLM4", _to("glm4", data=hidden(3)), ungated=True),
    Row(ENDS, "a context that is not there", "before open", _when("new")),
    Row(ENDS, "a context that is freed", "after close", _when("closed")),
    Row(ENDS, "concurrent use of one context", "another thread", _from_another_thread),
    Row(ENDS, "more KV than the machine has", "256 slots of 8 Mi tokens", _make(n_slots=256, n_ctx=2**23 - 256)),
    Row(
        WRONG,
        "two entries with one position",
        "slot 1 twice",
        _group(Append(1, 0, tokens(3), "last"), Append(1, 0, tokens(3), "last")),
    ),
    Row(WRONG, "position -1", "-1", _after_three(-1)),
    Row(WRONG, "a first position that is not 0", "3", _appended(at=3)),
    Row(WRONG, "a hole", "4 after 3 tokens", _after_three(4)),
    Row(WRONG, "a replay", "2 after 3 tokens", _after_three(2)),
    *(
        Row(WRONG, "a hidden state that is not finite", said, _appended(data=_spoilt(value)))
        for said, value in (("NaN", np.nan), ("Inf", np.inf), ("-Inf", -np.inf))
    ),
    Row(WRONG, "a hidden state that overflows", "3e38", _appended(data=_spoilt(3e38))),
    Row(WRONG, "a buffer shorter than its rows", f"rows of {N_EMBD - 1}", _appended(data=hidden(3, N_EMBD - 1))),
    Row(WRONG, "a buffer shorter than its rows", "a view with gaps", _appended(data=hidden(3, 2 * N_EMBD)[:, :N_EMBD])),
    Row(WRONG, "a buffer shorter than its rows", "float64", _appended(data=np.zeros((3, N_EMBD)))),
    Row(
        WRONG,
        "tokens and hidden states in one batch",
        "one of each",
        _group(Append(1, 0, tokens(1), "last"), Append(2, 0, hidden(1), "last")),
    ),
    Row(WRONG, "a sliding window in a shared pool of cells", "Gemma 3", _shared("gemma3")),
    Row(
        WRONG,
        "a sliding window in a shared pool of cells",
        "Gemma 3, swa_full=False",
        _shared("gemma3", swa_full=False),
    ),
    Row(WRONG, "recurrent memory in a shared pool of cells", "Mamba", _shared("mamba")),
    Row(WRONG, "recurrent memory in a shared pool of cells", "Jamba", _shared("jamba")),
    Row(WRONG, "hidden states in a shared pool of cells", "3 rows", _hidden_shared),
    Row(WRONG, "hidden states in a shared pool of cells", "a shard", _shared("llama", layers=(1, 2))),
    Row(WRONG, "hidden states under M-RoPE", "Qwen2-VL", _to("qwen2vl", data=hidden(3))),
    Row(WRONG, "tokens on a shard that is not the first", "0", _to("shard", data=np.zeros(1, np.int32))),
    Row(
        WRONG,
        "tokens out of range",
        "-1, hidden in a masked array",
        _appended(data=np.ma.masked_array(np.full(3, -1, np.int32), mask=True)),
    ),
    Row(WRONG, "tokens out of range", "-1", _appended(data=np.array([-1], np.int32))),
    Row(WRONG, "tokens out of range", "512 of 512", _appended(data=np.array([512], np.int32))),
)

NEVER: Final[dict[str, tuple[str, ...]]] = {
    "partial seq_cp between streams": ("seq_cp with positions",),
    "seq_add, seq_div (M-RoPE, or by 0)": ("llama_memory_seq_add", "llama_memory_seq_div"),
    "state calls with a sequence out of range": ("llama_state_seq_", "llama_state_set_data", "llama_state_load_file"),
    "n_rs_seq with a small n_ubatch": ("n_rs_seq",),
    "an abort callback, which is the whole context's": ("abort_callback",),
}
"""Kinds that are closed because nothing in the library says them: the names that its source does not hold."""
