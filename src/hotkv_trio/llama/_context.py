"""One loaded model with one context: made whole or not at all, its sizes read back, its bytes compared."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final, Literal, NoReturn, final

import attrs

from hotkv_trio._errors import EngineFailed, InvalidInput
from hotkv_trio.llama import _ffi, _log
from hotkv_trio.llama._gguf import padded
from hotkv_trio.llama._tap import make_tap

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hotkv_trio._engine import Memory
    from hotkv_trio.llama._facts import ModelFacts
    from hotkv_trio.llama._tap import Tap, TapKind

MIN_BATCH: Final = 512
"""Tokens that one call takes, unless there are more slots, or fewer cells."""

_MIB: Final = 1 << 20
_ROUNDING: Final = 0.0051
"""MiB by which a figure in llama.cpp's log, which has 2 decimals, may be off."""


@attrs.frozen(kw_only=True)
class ContextOptions:
    """What a context is made with."""

    n_slots: int
    n_ctx: int
    """Tokens that a slot holds at least."""
    type_k: str
    type_v: str
    swa_full: bool
    threads: int
    unified: bool = False
    """Whether all slots share one stream of cells, as many as they would have apart."""

    @property
    def n_ctx_seq(self) -> int:
        """Tokens that a slot holds: llama.cpp rounds up, we ask for what it makes."""
        return padded(self.n_ctx, _ffi.CELL_PAD)

    @property
    def n_batch(self) -> int:
        """Tokens in one call, all of them computed at once; never fewer than slots, which would end the process."""
        return min(max(MIN_BATCH, self.n_slots), self.n_slots * self.n_ctx_seq)

    def slot_bytes(self, facts: ModelFacts, layers: tuple[int, int]) -> int:
        """Return the bytes of one slot's keys and values, without recurrent states.

        Raises:
            InvalidInput: a row of keys or values is no whole number of its type's blocks.
        """
        window = (
            self.n_ctx_seq if self.swa_full else min(self.n_ctx_seq, padded(facts.n_swa + self.n_batch, _ffi.CELL_PAD))
        )
        return sum(
            facts.kv_bytes_per_token((layer, layer + 1), self.type_k, self.type_v)
            * (window if facts.sliding[layer] else self.n_ctx_seq)
            for layer in range(*layers)
        )


@final
class Context:
    """A model, a context, its memory, a batch, and for a shard a tap.  One thread, from the first call to ``close``."""

    def __init__(
        self,
        path: Path,
        options: ContextOptions,
        *,
        tap_tensor: str | None = None,
        tap_kind: TapKind | Literal["auto"] = "auto",
    ) -> None:
        """Load the model and make everything.

        Args:
            path: the model file.
            options: of the context.
            tap_tensor: the tensor whose rows leave the model; None: its logits do.
            tap_kind: how that tensor is read.

        Raises:
            InvalidInput: the model keeps no memory that sessions could live in, or none that they could share, or
                runs without flash attention.
            EngineFailed: llama.cpp cannot load it, or cannot make the context.  Nothing is left behind.
        """
        _ffi.start_up()
        with contextlib.ExitStack() as made, _log.collected_lines() as lines:
            model = _ffi.load_model(path)
            if model is None:
                _failed(f"llama.cpp cannot load {path}", lines)
            made.callback(_ffi.free_model, model)
            self.memory_kind: Final = _memory_kind(model, path)
            if options.unified:
                _check_unified(self.memory_kind, path)
            self.tap: Final = self._make_tap(made, tap_tensor, _ffi.n_embd(model), options.n_batch, tap_kind)
            handle = _ffi.new_context(
                model,
                n_slots=options.n_slots,
                n_ctx_seq=options.n_ctx_seq,
                n_batch=options.n_batch,
                type_k=options.type_k,
                type_v=options.type_v,
                swa_full=options.swa_full,
                unified=options.unified,
                threads=options.threads,
                tap_callback=None if self.tap is None else self.tap.callback,
                tap_data=None if self.tap is None else self.tap.user_data,
            )
            if handle is None:
                _failed(f"llama.cpp cannot make a context for {path}", lines)
            made.callback(_ffi.free_context, handle)
            memory = _ffi.memory(handle)
            if memory is None:
                raise InvalidInput(f"{path}: a model without a memory holds no sessions")
            if (attention := _log.value(lines, "flash_attn")) != "enabled":
                raise InvalidInput(
                    f"{path.name}: llama.cpp has flash attention {attention} for this model, and without it what one"
                    " session holds reaches others, in either layout; serve another model"
                )
            _check_made(handle, options)
            self.batch: Final = _ffi.Batch(handle, options.n_ctx_seq)
            made.callback(self.batch.close)
            self._made: Final = made.pop_all()
        self.handle: Final = handle
        self.memory: Final = memory
        self.n_ctx_seq: Final = options.n_ctx_seq
        self.n_batch: Final = _ffi.n_batch(handle)
        self.n_vocab: Final = _ffi.n_vocab(model)
        self.n_swa: Final = _ffi.n_swa(model)
        self.rotary: Final = _ffi.rope_type(model) != _ffi.ROPE_NONE
        self.takes_hidden: Final = _ffi.rope_type(model) not in _ffi.ROPE_MULTI and _ffi.n_embd_input(
            model
        ) == _ffi.n_embd(model)
        self.kv_rotation: Final = "1" in {_log.value(lines, "attn_rot_k"), _log.value(lines, "attn_rot_v")}
        self._kv_sizes: Final = _log.buffer_sizes(lines, "KV")
        self._state_sizes: Final = _log.buffer_sizes(lines, "RS")

    def _make_tap(
        self,
        made: contextlib.ExitStack,
        tensor: str | None,
        n_embd: int,
        max_rows: int,
        kind: TapKind | Literal["auto"],
    ) -> Tap | None:
        if tensor is None:
            return None
        tap = make_tap(tensor, n_embd, max_rows, kind)
        made.callback(tap.close)
        return tap

    def check_bytes(self, kv_bytes: int, state_bytes: int) -> None:
        """Hold the bytes that all slots take by our account against llama.cpp's own log lines.

        Raises:
            EngineFailed: they differ; it says both.
        """
        for what, ours, theirs in (("KV", kv_bytes, self._kv_sizes), ("RS", state_bytes, self._state_sizes)):
            if abs(sum(theirs) - ours / _MIB) > _ROUNDING * max(1, len(theirs)):
                raise EngineFailed(
                    None, f"{what} buffers: llama.cpp says {sum(theirs):.2f} MiB, our account is {ours / _MIB:.2f} MiB"
                )

    def close(self) -> None:
        """Give everything back, in reverse order of its making.  Closing twice does nothing."""
        self._made.close()


def _failed(what: str, lines: _log.Lines) -> NoReturn:
    raise EngineFailed(None, f"{what}: {lines.why}")


def _memory_kind(model: int, path: Path) -> Memory:
    """Ask the loaded model what kind of memory it has.

    Raises:
        InvalidInput: it is not a model that appends token after token.
    """
    if not _ffi.is_decoder(model):
        raise InvalidInput(f"{path}: not a decoder (an encoder, or a diffusion model): it has no cache to keep hot")
    if _ffi.is_hybrid(model):
        return "hybrid"
    if _ffi.is_recurrent(model):
        return "recurrent"
    return "sliding" if _ffi.n_swa(model) else "attention"


_NOT_SHARED: Final[Mapping[Memory, str]] = {
    "sliding": "a sliding window, whose cells one session's prefill takes from another's",
    "recurrent": "recurrent memory, one state a session: there is nothing to share",
    "hybrid": "hybrid memory, whose recurrent half has nothing to share and keeps no prefix",
}


def _check_unified(memory: Memory, path: Path) -> None:
    """Refuse memory that sessions cannot share without harm.

    Raises:
        InvalidInput: says what it is, and what would work.
    """
    if why := _NOT_SHARED.get(memory):
        raise InvalidInput(f"layout='unified': {path.name} has {why}; layout='streams' serves it")


def _check_made(handle: int, options: ContextOptions) -> None:
    """Read back what llama.cpp made of what it was asked.

    Raises:
        EngineFailed: it differs in anything that we count on.
    """
    n_stream_tokens = options.n_ctx_seq * (options.n_slots if options.unified else 1)
    found = {
        "sequences": (_ffi.n_seq_max(handle), options.n_slots),
        "tokens in a stream": (_ffi.n_ctx_seq(handle), n_stream_tokens),
        "tokens in a call": (_ffi.n_batch(handle), options.n_batch),
        "tokens computed at once": (_ffi.n_ubatch(handle), options.n_batch),
    }
    wrong = [f"{theirs} {what}, not {ours}" for what, (theirs, ours) in found.items() if theirs != ours]
    if wrong:
        raise EngineFailed(None, f"llama.cpp made another context than it was asked for: {'; '.join(wrong)}")
