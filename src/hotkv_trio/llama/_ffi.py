"""The hand on llama.cpp: the one module through which the engine calls it.

Thin typed functions over plain addresses; each says which thread may call it and what it returns, and none accepts a
negative sequence id (to llama.cpp that means *all* sequences).  Calls that only look something up keep the GIL: giving
it up for a tenth of a microsecond can cost the owner thread a whole switch interval to get it back.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from typing import TYPE_CHECKING, Any, Final

import llama_cpp._utils
import llama_cpp.llama_cpp as lib
import numpy as np
from gguf.constants import GGMLQuantizationType

from hotkv_trio.llama import _log
from hotkv_trio.llama._facts import CACHE_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

PINNED_COMMIT: Final = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"
"""The llama.cpp commit that llama-cpp-python 0.3.36 is built from; what the library itself says comes first."""

MAX_SLOTS: Final = 256
"""Sequences in one context: ``LLAMA_MAX_SEQ``."""
CELL_PAD: Final = 256
"""llama.cpp rounds the tokens of a sequence up to a multiple of this."""

KV_TYPES: Final = {name: GGMLQuantizationType[name.upper()].value for name in CACHE_TYPES}
"""Types that KV can be stored in: those that the CPU can write rows of and flash attention can read."""

ROPE_NONE: Final = lib.LLAMA_ROPE_TYPE_NONE
ROPE_MULTI: Final = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE, lib.LLAMA_ROPE_TYPE_VISION)
"""Kinds of RoPE in which a hidden state has several positions."""

_PAGE: Final = 4096

OK: Final = 0
NO_SLOT: Final = 1
ABORTED: Final = 2
INVALID_BATCH: Final = -1
FATAL: Final = -2
COMPUTE_FAILED: Final = -3

# llama_cpp opens these at import for a purpose that is not ours and never closes them.
atexit.register(llama_cpp._utils.outnull_file.close)
atexit.register(llama_cpp._utils.errnull_file.close)

# Function objects of our own: their argument types are set here and change nothing for other users of llama_cpp.
_path = lib._lib._name
_long = ctypes.CDLL(_path)
_short = ctypes.PyDLL(_path)


class _Embedding(ctypes.Structure):
    """``llama_embd``: rows of one hidden state, by address."""

    _fields_ = (("data", ctypes.c_void_p), ("n_rows", ctypes.c_size_t), ("n_embd", ctypes.c_size_t))


def _bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(library, name)
    function.argtypes = arguments  # type: ignore[attr-defined]
    function.restype = result  # type: ignore[attr-defined]
    return function


_void_p, _i32, _u32, _bool = ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_bool

_n_ctx_seq = _bind(_short, "llama_n_ctx_seq", _u32, _void_p)
_n_batch = _bind(_short, "llama_n_batch", _u32, _void_p)
_n_ubatch = _bind(_short, "llama_n_ubatch", _u32, _void_p)
_n_seq_max = _bind(_short, "llama_n_seq_max", _u32, _void_p)
_get_memory = _bind(_short, "llama_get_memory", _void_p, _void_p)
_seq_pos_min = _bind(_short, "llama_memory_seq_pos_min", _i32, _void_p, _i32)
_seq_pos_max = _bind(_short, "llama_memory_seq_pos_max", _i32, _void_p, _i32)
_batch_clear = _bind(_short, "llama_batch_ext_clear", None, _void_p)
_add_token = _bind(_short, "llama_batch_ext_add_token", _i32, _void_p, _i32, _i32)
_add_embd = _bind(_short, "llama_batch_ext_add_embd", _i32, _void_p, _i32, _Embedding)
_set_pos = _bind(_short, "llama_batch_ext_set_pos", _bool, _void_p, _i32, _void_p)
_set_output = _bind(_short, "llama_batch_ext_set_output_logits", _bool, _void_p, _i32, _bool)
_get_logits = _bind(_short, "llama_get_logits", _void_p, _void_p)

_seq_rm = _bind(_long, "llama_memory_seq_rm", _bool, _void_p, _i32, _i32, _i32)
_seq_cp = _bind(_long, "llama_memory_seq_cp", None, _void_p, _i32, _i32, _i32, _i32)
_memory_clear = _bind(_long, "llama_memory_clear", None, _void_p, _bool)
_process = _bind(_long, "llama_process", _i32, _void_p, ctypes.c_int, _void_p)


# Whole process.


@lib.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _data: int | None) -> None:
    _log.receive(level, text)


_ready = threading.Lock()


def start_up() -> None:
    """Make llama.cpp ready and route its log to ours.  Any thread, any number of times."""
    with _ready:
        lib.llama_log_set(_on_log, None)
        lib.llama_backend_init()


def commit() -> str:
    """Return the llama.cpp commit that the loaded library was built from, as it says itself, else the pinned one."""
    try:
        said: bytes = _bind(_short, "ggml_commit", ctypes.c_char_p)()
    except AttributeError:
        return PINNED_COMMIT
    # The source archive of llama-cpp-python leaves files out, which its build takes for local changes.
    found = said.decode().removesuffix("-dirty")
    return found if found and found != "unknown" else PINNED_COMMIT


def system_info() -> str:
    """Return llama.cpp's own line on what its kernels use of this processor."""
    return str(lib.llama_print_system_info().decode())


# Models.  Read-only once loaded: any thread.


def load_model(path: str | os.PathLike[str], *, vocab_only: bool = False) -> int | None:
    """Load a model; None when llama.cpp cannot."""
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.vocab_only = vocab_only
    model: int | None = lib.llama_model_load_from_file(os.fsencode(path), params)
    return model


def free_model(model: int) -> None:
    """Give a model back; its contexts must be gone."""
    lib.llama_model_free(model)


def n_vocab(model: int) -> int:
    """Return the number of tokens, and the width of a row of logits."""
    return int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)))


def n_embd_input(model: int) -> int:
    """Return the width of a hidden state given to the model."""
    return int(lib.llama_model_n_embd_inp(model))


def n_embd(model: int) -> int:
    """Return the width of the hidden states inside the model."""
    return int(lib.llama_model_n_embd(model))


def n_swa(model: int) -> int:
    """Return the width of the sliding window in tokens; 0: there is none."""
    return int(lib.llama_model_n_swa(model))


def rope_type(model: int) -> int:
    """Return the kind of RoPE."""
    return int(lib.llama_model_rope_type(model))


def is_recurrent(model: int) -> bool:
    """Say whether the memory is a recurrent state alone."""
    return bool(lib.llama_model_is_recurrent(model))


def is_hybrid(model: int) -> bool:
    """Say whether the memory is a recurrent state beside KV."""
    return bool(lib.llama_model_is_hybrid(model))


def is_decoder(model: int) -> bool:
    """Say whether the model appends token after token, with no encoder to be run before."""
    return bool(
        lib.llama_model_has_decoder(model)
        and not lib.llama_model_has_encoder(model)
        and not lib.llama_model_is_diffusion(model)
    )


# Contexts.  One thread, from creation to the end.


def new_context(
    model: int,
    *,
    n_slots: int,
    n_ctx_seq: int,
    n_batch: int,
    type_k: str,
    type_v: str,
    swa_full: bool,
    unified: bool,
    threads: int,
    tap_callback: Any = None,
    tap_data: int | None = None,
) -> int | None:
    """Make a context of ``n_slots`` streams, or of one that they share; None when llama.cpp cannot.

    Cells for ``n_slots`` times ``n_ctx_seq`` tokens are made either way.  ``n_ctx_seq`` is a multiple of `CELL_PAD`,
    and ``n_batch`` at least ``n_slots`` (else llama.cpp aborts).
    """
    params = lib.llama_context_default_params()
    params.n_ctx = n_slots * n_ctx_seq
    params.n_batch = params.n_ubatch = params.n_outputs_max = n_batch
    params.n_seq_max = n_slots
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.type_k, params.type_v = KV_TYPES[type_k], KV_TYPES[type_v]
    params.kv_unified = unified
    params.swa_full = swa_full
    params.offload_kqv = params.op_offload = False
    params.embeddings = False
    params.no_perf = True
    if tap_callback is not None:
        params.cb_eval, params.cb_eval_user_data = tap_callback, tap_data
    context: int | None = lib.llama_init_from_model(model, params)
    return context


def free_context(context: int) -> None:
    """Give a context and its memory back; its batches must be gone."""
    lib.llama_free(context)


def n_ctx_seq(context: int) -> int:
    """Return the tokens that a sequence holds."""
    return int(_n_ctx_seq(context))


def n_batch(context: int) -> int:
    """Return the tokens that one call may hold."""
    return int(_n_batch(context))


def n_ubatch(context: int) -> int:
    """Return the tokens that are computed at once."""
    return int(_n_ubatch(context))


def n_seq_max(context: int) -> int:
    """Return the number of sequences."""
    return int(_n_seq_max(context))


def memory(context: int) -> int | None:
    """Return the address of the context's memory; None: it keeps none."""
    found: int | None = _get_memory(context)
    return found


def process(context: int, batch: int) -> int:
    """Append the batch to its sequences; return llama.cpp's code."""
    return int(_process(context, lib.LLAMA_PROCESS_TYPE_DECODE, batch))


def logits(context: int, n_rows: int, width: int) -> npt.NDArray[np.float32] | None:
    """Return a copy of the last call's output rows, in the batch's order; None: llama.cpp has none."""
    address = _get_logits(context)
    if not address:
        return None
    # A copy between addresses that agree modulo a page is several times slower: keep them half a page apart.
    space = np.empty(n_rows * width + _PAGE // 4, dtype=np.float32)
    first = (address + _PAGE // 2 - space.ctypes.data) % _PAGE // 4
    rows = space[first : first + n_rows * width].reshape(n_rows, width)
    ctypes.memmove(rows.ctypes.data, address, rows.nbytes)
    return rows


# Memory.  The context's thread.


def _sequence(slot: int) -> int:
    if slot < 0:
        raise ValueError(f"a negative sequence id ({slot}) means all sequences to llama.cpp")
    return slot


def position_min(kv: int, slot: int) -> int:
    """Return the first position that the sequence holds; -1: none."""
    return int(_seq_pos_min(kv, _sequence(slot)))


def position_max(kv: int, slot: int) -> int:
    """Return the last position that the sequence holds; -1: none."""
    return int(_seq_pos_max(kv, _sequence(slot)))


def remove_from(kv: int, slot: int, position: int) -> bool:
    """Remove the sequence's tokens from ``position`` on; 0: all of them, which no kind of memory refuses."""
    return bool(_seq_rm(kv, _sequence(slot), position, -1))


def copy_stream(kv: int, source: int, target: int) -> None:
    """Make ``target`` hold what ``source`` holds, every byte of its cells included, before the next call computes."""
    _seq_cp(kv, _sequence(source), _sequence(target), -1, -1)


def wipe(kv: int) -> None:
    """Empty every sequence and write zeros over all cells."""
    _memory_clear(kv, True)


# Batches.


class Batch:
    """The tokens or hidden states of one call.  The context's thread."""

    def __init__(self, context: int, n_positions: int) -> None:
        """Make an empty batch for positions 0 to ``n_positions - 1``."""
        self.handle: int = lib.llama_batch_ext_init(context)
        self._positions = np.arange(n_positions, dtype=np.int32)
        self._first_position: int = self._positions.ctypes.data

    def clear(self) -> None:
        """Take everything out."""
        _batch_clear(self.handle)

    def add_tokens(self, slot: int, position: int, tokens: Sequence[int], outputs: range) -> int:
        """Add tokens to a sequence, marking those numbered ``outputs`` for output.

        Returns:
            0, or llama.cpp's negative code; then the batch holds a part of them, and must be cleared.
        """
        handle, address = self.handle, self._first_position + 4 * position
        index: int = -1
        for token in tokens:
            index = _add_token(handle, slot, token)
            if index < 0:
                return index
            _set_pos(handle, index, address)
            address += 4
        return self._mark(index - len(tokens) + 1, outputs)

    def add_hidden(self, slot: int, position: int, states: npt.NDArray[np.float32], outputs: range) -> int:
        """Add hidden states (n, n_embd), as ``add_tokens`` does tokens."""
        handle, address = self.handle, self._first_position + 4 * position
        index: int = -1
        count, width = states.shape
        row = _Embedding(states.ctypes.data, 1, width)
        for _ in range(count):
            index = _add_embd(handle, slot, row)
            if index < 0:
                return index
            _set_pos(handle, index, address)
            address += 4
            row.data += 4 * width
        return self._mark(index - count + 1, outputs)

    def _mark(self, first: int, outputs: range) -> int:
        for i in outputs:
            _set_output(self.handle, first + i, True)
        return OK

    def close(self) -> None:
        """Give it back, before its context."""
        lib.llama_batch_ext_free(self.handle)


# Text.  Any thread, while the model is loaded.


def tokenize(model: int, text: bytes, *, add_special: bool, parse_special: bool) -> npt.NDArray[np.int32]:
    """Return the text's tokens, int32 (n,)."""
    vocab = lib.llama_model_get_vocab(model)
    size = len(text) + 16
    while True:
        buffer = (lib.llama_token * size)()
        count = lib.llama_tokenize(vocab, text, len(text), buffer, size, add_special, parse_special)
        if count >= 0:
            return np.array(buffer[:count], dtype=np.int32)
        size = -count


def piece(model: int, token: int, *, special: bool) -> bytes:
    """Return the bytes that a token stands for; ``special``: those of control tokens too."""
    vocab = lib.llama_model_get_vocab(model)
    size = 32
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = lib.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if length >= 0:
            return buffer.raw[:length]
        size = -length


def has_text(model: int) -> bool:
    """Say whether the model file holds a vocabulary."""
    return bool(lib.llama_vocab_type(lib.llama_model_get_vocab(model)) != lib.LLAMA_VOCAB_TYPE_NONE)


def is_end(model: int, token: int) -> bool:
    """Say whether a token ends a generation."""
    return bool(lib.llama_vocab_is_eog(lib.llama_model_get_vocab(model), token))


def chat_template(model: int) -> str | None:
    """Return the model file's own chat template; None: it has none."""
    template: bytes | None = lib.llama_model_chat_template(model, None)
    return None if template is None else template.decode(errors="replace")
