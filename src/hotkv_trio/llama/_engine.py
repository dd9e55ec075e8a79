"""LlamaEngine: KV in the sequences of one llama.cpp context, for a whole model or a range of its layers.

Each slot is a stream of its own (``kv_unified=False``), flash attention is on, and sliding-window layers keep the full
context: in this layout what the neighbours hold changes no bit of a slot's output.  Each native call is one ubatch:
members in consecutive slots with as many tokens each go together.  A group of another shape is run as several calls,
since llama.cpp would split it anyway, in an order of its own.

In the other layout, ``unified``, all slots share one stream (``kv_unified=True``), and a group of any shape is one
ubatch.  There, what masks keep apart is apart for finite values only, so that nothing but tokens is taken, and a value
that is not finite, which only a damaged model makes of tokens, closes the whole pool until it is overwritten.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, final

import numpy as np

from hotkv_trio._engine import EngineInfo
from hotkv_trio._errors import EngineFailed, InvalidInput
from hotkv_trio._isolation import prove_briefly
from hotkv_trio._recipe import CacheRecipe
from hotkv_trio.llama import _ffi
from hotkv_trio.llama._architectures import ARCHITECTURES, check_range
from hotkv_trio.llama._context import Context, ContextOptions
from hotkv_trio.llama._digest import model_digest
from hotkv_trio.llama._embedding import EmbeddingTable
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._gate import Gate, Limits, check_memory, check_options
from hotkv_trio.llama._slice import cached_slice
from hotkv_trio.llama._vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from hotkv_trio._engine import Append, Rows
    from hotkv_trio._isolation import IsolationReport
    from hotkv_trio.llama._facts import KVType, ModelFacts
    from hotkv_trio.llama._tap import TapKind

Layout: TypeAlias = Literal["streams", "unified"]
"""How slots share a context's cells: each has a stream of its own, or all take them from one."""

LEARNED_POSITIONS: Final = frozenset({"bert", "gpt2", "mpt", "starcoder"})
"""Architectures that look positions up in a table: one past its end ends the process."""

_WHY: Final = {
    _ffi.NO_SLOT: "no free cells for the batch, or a split that is not supported; the memory is as before",
    _ffi.ABORTED: "aborted",
    _ffi.INVALID_BATCH: "llama.cpp refused the batch; the memory is as before",
    _ffi.FATAL: "no memory or no output buffer for the call",
    _ffi.COMPUTE_FAILED: "the computation failed",
}
_UNTOUCHED: Final = (_ffi.NO_SLOT, _ffi.INVALID_BATCH)
"""Codes after which the memory is as before the call."""


@final
class LlamaEngine:
    """Holds KV for a model, or for a range of its layers, in numbered slots of one llama.cpp context.

    It is a `hotkv_trio.Engine`: hand it to `hotkv_trio.open_runtime`, which opens it, calls it from one thread, and
    closes it.  The constructor only looks at its arguments; ``open`` loads the model.

    ======================  =========================================  ====================================
    layers                  what is appended                           what comes back
    ======================  =========================================  ====================================
    all                     tokens, or hidden states where the         logits (rows, n_vocab)
                            architecture allows them
    from 0, not all         tokens, or their embeddings (n, n_embd)    hidden states (rows, n_embd)
    from later, not last    hidden states (n, n_embd)                  hidden states (rows, n_embd)
    from later to the last  hidden states (n, n_embd)                  logits (rows, n_vocab)
    ======================  =========================================  ====================================

    Slots share the context in one of two layouts.  **streams**, the default: each slot has cells of its own, and
    nothing that others do changes a bit of what a call for it alone gives.  **unified**, for ragged loads: all slots
    take their cells from one pool, and any sessions go into one call, whatever slots they have.  It promises less:

    - *What holds*: for the same calls in the same order, what the others' tokens are changes no bit.  ``open`` proves
      it on the model and machine at hand, and refuses the layout where it does not hold.
    - *What does not*: who else is there, and when they come and go, does change bits, by where it puts the cells.  A
      session's replay alone is not bit-equal to it, and ``open_runtime(exact=True)`` refuses the layout.
    - *What is refused*: sliding-window, recurrent and hybrid memory, ranges of layers, and hidden states.  A hidden
      state that is not finite, or overflows, reaches every session in the pool; tokens bring none in.  Where a damaged
      model makes one, all sessions fail with `EngineFailed` and go cold, and the pool serves again once all are gone.
    - *Room*: the pool has the cells that the streams would have.  Each slot takes ``n_ctx`` of them at most, a free
      cell serves anybody, and so none of them is ever without.

    Args:
        path: a GGUF file; of a split one, any part.
        layers: first layer, and one past the last; None: all.
        n_slots: sequences side by side, 1 to 256.
        n_ctx: tokens that each of them holds at least; llama.cpp rounds up to a multiple of 256.
        type_k: how keys are stored: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0 or iq4_nl.
        type_v: how values are stored, likewise.
        layout: how slots share the context: ``streams``, or ``unified`` with its weaker promise (see above).
        swa_full: whether sliding-window layers keep the full context.  If not, they take less memory, and a
            slot can be cut back within the window only.
        threads: CPU threads of one call; None: one for each processor that this process may use.  The bits of an
            output depend on their number: past 512 tokens, attention is summed in as many parts.
        tap: how a shard without the last layer reads its hidden states: the ``native`` library, the slower one in
            ``python``, or ``auto``: the first that works.
        cache_dir: where slices of models are kept; None: in the user's cache directory.

    Raises:
        InvalidInput: an argument that no context can be made with; it names the limit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layers: tuple[int, int] | None = None,
        n_slots: int = 4,
        n_ctx: int = 4096,
        type_k: KVType = "f16",
        type_v: KVType = "f16",
        layout: Layout = "streams",
        swa_full: bool = True,
        threads: int | None = None,
        tap: TapKind | Literal["auto"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        check_options(
            layers=layers,
            n_slots=n_slots,
            n_ctx=n_ctx,
            type_k=type_k,
            type_v=type_v,
            layout=layout,
            threads=threads,
            tap=tap,
            max_slots=_ffi.MAX_SLOTS,
            cell_pad=_ffi.CELL_PAD,
            kv_types=_ffi.KV_TYPES,
        )
        self.path: Final = Path(path)
        self._layers = layers
        self._options = ContextOptions(
            n_slots=n_slots,
            n_ctx=n_ctx,
            type_k=type_k,
            type_v=type_v,
            swa_full=swa_full,
            unified=layout == "unified",
            threads=threads or _processors(),
        )
        self._layout: Layout = layout
        self._tap_kind: TapKind | Literal["auto"] = tap
        self._cache_dir = cache_dir
        self._context: Context | None = None
        self._table: EmbeddingTable | None = None
        self._info: EngineInfo | None = None
        self._gate: Gate | None = None
        self._text: Vocabulary | None = None
        self._text_lock = threading.Lock()
        self._held = [0] * n_slots
        self._unsure: set[int] = set()
        self._tainted: set[int] = set()
        self._isolation: IsolationReport | None = None

    def __repr__(self) -> str:
        """Say the file, and what is open."""
        name, info = type(self).__name__, self._info
        if info is None:
            return f"<{name} {self.path.name}, not open>"
        first, end = info.layers
        kind = f"{info.memory}, unified" if self._options.unified else info.memory
        return f"<{name} {self.path.name} {first}:{end}, {info.n_slots} slots x {info.n_ctx_seq} tokens, {kind}>"

    @property
    def tap_kind(self) -> TapKind | None:
        """How the open engine reads the hidden states that leave it; None: it returns logits, or is not open."""
        return None if self._context is None or self._context.tap is None else self._context.tap.kind

    @property
    def isolation(self) -> IsolationReport | None:
        """What the short proof found when the engine was opened; None: not open, or a layout that needs none."""
        return self._isolation

    # Opening and closing.

    def open(self) -> EngineInfo:
        """Load the model and make every slot, all empty.  The calling thread is the only one that may call then.

        In the unified layout a short proof that it holds here follows: some 80 native calls, with 2,700 tokens.

        Raises:
            InvalidInput: the file is no model that can be served, or not with these arguments.
            EngineFailed: llama.cpp could not load it, or its figures are not ours.  Nothing is left behind.
        """
        if self._context is not None:
            raise InvalidInput("the engine is open already")
        try:
            self._info = info = self._opened()
            self._gate = Gate(
                Limits(
                    n_slots=info.n_slots,
                    n_ctx_seq=info.n_ctx_seq,
                    max_batch_tokens=info.max_batch_tokens,
                    max_outputs=info.max_outputs,
                    n_vocab=info.n_vocab,
                    n_embd=info.n_embd,
                )
            )
            if self._options.unified:
                self._isolation = self._proven(info)
        except BaseException:
            self.close()
            raise
        return info

    def _proven(self, info: EngineInfo) -> IsolationReport:
        report = prove_briefly(self, info)
        if not report.isolated:
            broken = "; ".join(words for _, held, words in report.sentences() if held is False)
            raise InvalidInput(f"layout='unified' does not hold here: {broken}; layout='streams' may")
        for slot in range(info.n_slots):
            self.clear(slot)
        return report

    def _opened(self) -> EngineInfo:
        facts = read_model_facts(self.path)
        facts.require_model()
        first, end = layers = facts.check_layers(self._layers)
        whole = layers == (0, facts.n_layer)
        options = self._options
        if options.unified and not whole:
            raise InvalidInput(
                f"layout='unified' with layers {first}:{end}: a shard's hidden states come from elsewhere, and one that"
                " is not finite would reach every session; layout='streams' serves shards"
            )
        kv_bytes, state_bytes = options.slot_bytes(facts, layers), facts.state_bytes(layers)
        check_memory(options.n_slots * (kv_bytes + state_bytes))
        file, boundary = self.path, None
        if not whole:
            architecture = check_range(facts, layers)
            file = cached_slice(self.path, layers, cache_dir=self._cache_dir)
            if first == 0:
                self._table = EmbeddingTable(self.path)
            if end < facts.n_layer:
                boundary = architecture.boundary.format(layer=end - first - 1)
        self._context = context = Context(file, options, tap_tensor=boundary, tap_kind=self._tap_kind)
        context.check_bytes(options.n_slots * kv_bytes, options.n_slots * state_bytes)
        n_ctx_seq = context.n_ctx_seq
        if facts.architecture in LEARNED_POSITIONS:
            n_ctx_seq = min(n_ctx_seq, facts.n_ctx_train)
        takes_hidden = not whole or (facts.architecture in ARCHITECTURES and context.takes_hidden)
        takes_hidden = takes_hidden and not options.unified
        return EngineInfo(
            n_slots=options.n_slots,
            n_ctx_seq=n_ctx_seq,
            bytes_per_token=facts.kv_bytes_per_token(layers, options.type_k, options.type_v),
            slot_bytes=kv_bytes + state_bytes,
            max_batch_tokens=context.n_batch,
            max_outputs=context.n_batch,
            n_vocab=facts.n_vocab if first == 0 else 0,
            n_embd=facts.n_embd if takes_hidden else 0,
            n_output=context.n_vocab if context.tap is None else facts.n_embd,
            memory=context.memory_kind,
            move_cost=self._move_cost(file, context, kv_bytes),
            layers=layers,
            layer_count=facts.n_layer,
            recipe=self._recipe(facts, layers, context, n_ctx_seq),
        )

    def _move_cost(self, file: Path, context: Context, kv_bytes: int) -> float:
        """Return what a move costs, in the fixed part of native calls, by the bytes that each goes through.

        A call reads the weights; a move reads and writes a slot.  Measured on SmolLM2, a call too many takes half as
        long as reading the weights alone would, as its rows are then missing from another.
        """
        if context.memory_kind in {"recurrent", "hybrid"} or self._options.unified:
            return math.inf
        return 2 * 2 * kv_bytes / file.stat().st_size

    def _recipe(self, facts: ModelFacts, layers: tuple[int, int], context: Context, n_ctx_seq: int) -> CacheRecipe:
        rotary = context.rotary
        return CacheRecipe(
            model_digest=model_digest(self.path),
            architecture=facts.architecture,
            layers=layers,
            layer_count=facts.n_layer,
            engine=f"llama.cpp {_ffi.commit()}",
            type_k=self._options.type_k,
            type_v=self._options.type_v,
            flash_attention=True,
            kv_rotation=context.kv_rotation,
            rope_freq_base=facts.rope_freq_base if rotary else 0.0,
            rope_freq_scale=facts.rope_freq_scale if rotary else 0.0,
            yarn=facts.yarn if rotary else (),
            n_swa=context.n_swa,
            swa_full=self._options.swa_full,
            layout=self._layout,
            n_ctx_seq=n_ctx_seq,
        )

    def close(self) -> None:
        """Give everything back.  Closing twice, or what was never opened, does nothing."""
        context, self._context = self._context, None
        self._table = self._info = self._gate = self._isolation = None
        self._held = [0] * self._options.n_slots
        self._unsure.clear()
        self._tainted.clear()
        if context is not None:
            context.close()
        with self._text_lock:
            text, self._text = self._text, None
        if text is not None:
            text.close()

    def _open_context(self) -> tuple[Context, Gate]:
        if self._context is None or self._gate is None:
            raise InvalidInput("the engine is not open")
        return self._context, self._gate

    # Appending.

    def process(self, group: Sequence[Append]) -> list[Rows]:
        """Append each member's data to its slot.

        One native call, if the members' slots follow each other (3, 4, 5) and all append as many tokens.  Any other
        group takes one for each run of members that do; in the unified layout, one all the same.

        Returns:
            For each member its rows, float32 (n_rows, n_output): views of arrays that nobody writes to again.

        Raises:
            InvalidInput: a value that llama.cpp must not see; nothing reached it.
            EngineFailed: llama.cpp refused or failed, or an output that was computed is not finite.  Slots of members
                may hold none, some or all of what was to be appended: each can be cut back or must be cleared, and
                takes nothing before, unless ``length`` shows that it is as it was.  All other slots are untouched.
                A slot whose output was not finite cannot be cut back; it is scrubbed when it is cleared.  In the
                unified layout that goes for all slots, members or not.
        """
        context, gate = self._open_context()
        if self._options.unified and self._tainted:
            gate.check_thread()
            raise EngineFailed(None, "the pool holds values that are not finite, until every slot has been cleared")
        gate.check_group(group, self._held, self._unsure)
        rows: list[Rows] = []
        for run in (group,) if self._options.unified else _runs(group):
            rows += self._call(context, run)
        return rows

    def _call(self, context: Context, run: Sequence[Append]) -> list[Rows]:
        batch = context.batch
        slots = [member.slot for member in run]
        outputs = [self._outputs(context, member) for member in run]
        try:
            for member, wanted in zip(run, outputs, strict=True):
                if (code := self._add(batch, member, wanted)) < 0:
                    raise EngineFailed(code, f"llama.cpp took no more into the batch at slot {member.slot}")
            self._unsure.update(slots)
            computed = self._run(context, sum(map(len, outputs)), slots)
        finally:
            batch.clear()
        for member in run:
            held = self._held[member.slot] + member.n_tokens
            if (last := _ffi.position_max(context.memory, member.slot)) != held - 1:
                raise EngineFailed(None, f"slot {member.slot} should hold {held} tokens; its last position is {last}")
            self._held[member.slot] = held
        self._unsure.difference_update(slots)
        return self._split(run, list(map(len, outputs)), computed)

    def _outputs(self, context: Context, member: Append) -> range:
        """Return which of the member's rows are computed: what was asked for, and what shows that they are finite."""
        n = member.n_tokens
        if context.tap is not None or member.output == "all":
            return range(n)
        # Hidden states come from elsewhere: the last row, which attends to all of them, tells whether they overflowed.
        return range(n - 1, n) if member.output == "last" or member.data.ndim == 2 else range(0)

    def _add(self, batch: _ffi.Batch, member: Append, outputs: range) -> int:
        data: Any = member.data
        if data.ndim == 2:
            return batch.add_hidden(member.slot, member.position, data, outputs)
        if self._table is not None:
            return batch.add_hidden(member.slot, member.position, self._table.rows(data), outputs)
        return batch.add_tokens(member.slot, member.position, data.tolist(), outputs)

    def _run(self, context: Context, n_rows: int, slots: Sequence[int]) -> Rows:
        """Make the native call; return its output rows (n_rows, width), ours."""
        tap = context.tap
        if tap is not None:
            tap.begin(n_rows)
        code = _ffi.process(context.handle, context.batch.handle)
        if code != _ffi.OK:
            if code in _UNTOUCHED:
                self._unsure.difference_update(slots)
            raise EngineFailed(code, f"{_WHY.get(code, 'an unknown code')}; slots {slots}")
        if tap is not None:
            return tap.rows()
        if not n_rows:
            return np.empty((0, context.n_vocab), dtype=np.float32)
        rows = _ffi.logits(context.handle, n_rows, context.n_vocab)
        if rows is None:
            raise EngineFailed(None, f"llama.cpp computed no outputs for slots {slots}")
        return rows

    def _split(self, run: Sequence[Append], counts: Sequence[int], computed: Rows) -> list[Rows]:
        """Return each member's own rows of what was computed."""
        ends = list(itertools.accumulate(counts))
        if not np.isfinite(computed).all():
            bad = [
                member.slot
                for member, n, end in zip(run, counts, ends, strict=True)
                if not np.isfinite(computed[end - n : end]).all()
            ]
            reached = range(self._options.n_slots) if self._options.unified else bad
            self._tainted.update(reached)
            self._unsure.update(reached)
            raise EngineFailed(None, f"the output of slots {bad} is not finite")
        return [computed[end - member.n_rows : end] for member, end in zip(run, ends, strict=True)]

    # Cutting back and clearing.

    def truncate(self, slot: int, length: int) -> bool:
        """Cut the slot back to its first ``length`` tokens.

        Returns:
            True: it holds exactly these, proven by what llama.cpp says of its positions.  False: this memory cannot
            keep them (recurrent and hybrid memory; a sliding window that has moved on, or whose call failed; a slot
            whose output was not finite): the slot must be cleared.

        Raises:
            EngineFailed: the slot must be cleared.
            InvalidInput: no such slot, or a length it has not; nothing was changed.
        """
        context, gate = self._open_context()
        gate.check_thread()
        gate.check_slot(slot)
        gate.check_length(length, self._held[slot])
        if length == 0:
            self.clear(slot)
            return True
        if slot not in self._unsure and length == self._held[slot]:
            return True
        kept = slot not in self._tainted and self._cut(context, slot, length)
        if kept:
            self._held[slot] = length
            self._unsure.discard(slot)
        else:
            self._unsure.add(slot)
        return kept

    def _cut(self, context: Context, slot: int, length: int) -> bool:
        memory = context.memory_kind
        if memory in {"recurrent", "hybrid"} or (memory == "sliding" and slot in self._unsure):
            return False
        # Whatever happens from here on, the slot is not what it was.
        self._unsure.add(slot)
        if not _ffi.remove_from(context.memory, slot, length):
            return False
        first, last = _ffi.position_min(context.memory, slot), _ffi.position_max(context.memory, slot)
        # "Removed" alone proves nothing: a window that has moved on lacks tokens that the next one would attend to.
        needed = max(0, length - context.n_swa) if memory == "sliding" else 0
        return last == length - 1 and 0 <= first <= needed

    def clear(self, slot: int) -> None:
        """Empty the slot, so that its next tenant finds it as new.

        A slot whose output was not finite holds cells that would reach its next tenant, through masks; they are
        overwritten.  While every other slot is tainted or in use by recurrent memory, or in the unified layout any is
        in use, that cannot be done.

        Raises:
            EngineFailed: the slot is not clean, and takes nothing.  Clearing it again may succeed.
            InvalidInput: no such slot; nothing was changed.
        """
        context, gate = self._open_context()
        gate.check_thread()
        gate.check_slot(slot)
        self._unsure.add(slot)
        self._empty(context, slot)
        self._held[slot] = 0
        if slot in self._tainted:
            self._scrub(context, slot)
        self._unsure.discard(slot)

    def _empty(self, context: Context, slot: int) -> None:
        removed = _ffi.remove_from(context.memory, slot, 0)
        last = _ffi.position_max(context.memory, slot)
        if not removed or last != -1:
            raise EngineFailed(None, f"slot {slot} could not be emptied; its last position is {last}")

    def _scrub(self, context: Context, slot: int) -> None:
        """Overwrite the empty slot's cells with finite values."""
        others = [other for other in range(self._options.n_slots) if other != slot]
        if all(self._held[other] == 0 and _ffi.position_max(context.memory, other) == -1 for other in others):
            _ffi.wipe(context.memory)
            self._tainted.clear()
            self._unsure.clear()
            return
        clean = [other for other in others if other not in self._tainted and other not in self._unsure]
        if context.memory_kind in {"recurrent", "hybrid"} or not clean:
            raise EngineFailed(
                None, f"slot {slot} holds values that are not finite, and nothing to overwrite them with"
            )
        _ffi.copy_stream(context.memory, clean[0], slot)
        self._empty(context, slot)
        self._tainted.discard(slot)

    def move(self, source: int, target: int) -> None:
        """Make the empty slot ``target`` hold exactly what ``source`` holds, and empty ``source``.

        Every byte of the slot's cells is copied, before the next call computes.

        Raises:
            EngineFailed: both slots must be cleared.
            InvalidInput: no such slots, ``source`` must be cleared, ``target`` is not empty, or this memory cannot be
                moved; nothing was changed.
        """
        context, gate = self._open_context()
        gate.check_thread()
        gate.check_slot(source)
        gate.check_slot(target)
        if self._info is None or math.isinf(self._info.move_cost):
            raise InvalidInput("this memory cannot be moved to another slot")
        if source in self._unsure or target in self._unsure or self._held[target] or source == target:
            raise InvalidInput(f"slot {source} cannot be moved to slot {target}: one is not clean, or not empty")
        self._unsure.update((source, target))
        _ffi.copy_stream(context.memory, source, target)
        ends = [
            (_ffi.position_min(context.memory, slot), _ffi.position_max(context.memory, slot))
            for slot in (source, target)
        ]
        if ends[0] != ends[1]:
            raise EngineFailed(None, f"slot {source} holds positions {ends[0]}, its copy in slot {target} {ends[1]}")
        self._empty(context, source)
        self._held[target], self._held[source] = self._held[source], 0
        self._unsure.difference_update((source, target))

    def length(self, slot: int) -> int:
        """Return the number of tokens that the slot holds.

        Raises:
            EngineFailed: llama.cpp says another number: the slot must be cleared.
            InvalidInput: no such slot.
        """
        context, gate = self._open_context()
        gate.check_thread()
        gate.check_slot(slot)
        native = _ffi.position_max(context.memory, slot) + 1
        if slot not in self._unsure and native != self._held[slot]:
            self._unsure.add(slot)
            raise EngineFailed(None, f"slot {slot} should hold {self._held[slot]} tokens; llama.cpp says {native}")
        return native

    # Text: any thread, open or not.

    def _vocabulary(self) -> Vocabulary:
        with self._text_lock:
            if self._text is None:
                self._text = Vocabulary(self.path)
            return self._text

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> npt.NDArray[np.int32]:
        """Return the text's tokens, int32 (n,).

        Args:
            text: any text.
            add_special: whether the tokens that the model begins and ends with are added.
            parse_special: whether control tokens written in the text become tokens; not for text from elsewhere.

        Raises:
            InvalidInput: the model file holds no vocabulary, or the text has lone surrogates.
        """
        return self._vocabulary().tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> bytes:
        """Return the bytes that tokens stand for: UTF-8, but a character may be cut at either end.

        Raises:
            InvalidInput: the model file holds no vocabulary, or a token is not in it.
        """
        return self._vocabulary().detokenize(tokens, special=special)

    def is_end(self, token: int) -> bool:
        """Say whether a token ends a generation.

        Raises:
            InvalidInput: the model file holds no vocabulary.
        """
        return self._vocabulary().is_end(token)


def _processors() -> int:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _runs(group: Sequence[Append]) -> Iterator[Sequence[Append]]:
    """Split a group into runs that are one ubatch each: consecutive slots with as many tokens each."""
    first = 0
    for i in range(1, len(group)):
        before, member = group[i - 1], group[i]
        if member.slot != before.slot + 1 or member.n_tokens != before.n_tokens:
            yield group[first:i]
            first = i
    yield group[first:]
