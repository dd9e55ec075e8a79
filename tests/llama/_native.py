"""A bare hand on llama.cpp for proofs about model files: no engine of ours in between.

Contexts are as the engine makes them: streams, flash attention on, full-size sliding-window cache.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Self

import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Rows = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]

N_BATCH = 512


LOG: list[str] = []
"""What llama.cpp logged."""
_keep = lib.llama_log_callback(lambda _level, text, _data: LOG.append(text.decode(errors="replace")))

_base = ctypes.CDLL(lib._lib._name)
_base.ggml_get_name.argtypes = [ctypes.c_void_p]
_base.ggml_get_name.restype = ctypes.c_char_p
_base.ggml_nbytes.argtypes = [ctypes.c_void_p]
_base.ggml_nbytes.restype = ctypes.c_size_t
_base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
_base.ggml_backend_tensor_get.restype = None


class Native:
    """One model and one context; appends to its sequences, one native call each."""

    def __init__(
        self,
        path: Path,
        *,
        n_seq: int = 1,
        n_ctx_seq: int = 512,
        type_k: int = 1,
        type_v: int = 1,
        tap: str | None = None,
    ) -> None:
        """Load the model; ``tap`` names the boundary tensor to read in place of logits."""
        # Each time: an engine that other tests opened meanwhile has routed the log to its own.
        lib.llama_log_set(_keep, None)
        lib.llama_backend_init()
        LOG.clear()
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise AssertionError("".join(LOG)[-1500:])
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.n_embd: int = lib.llama_model_n_embd_inp(self.model)
        self._tap = None if tap is None else tap.encode()
        self._tapped: Rows | None = None
        params = lib.llama_context_default_params()
        params.n_ctx = n_ctx_seq * n_seq
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_seq_max = n_seq
        params.n_outputs_max = N_BATCH
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = False
        params.swa_full = True
        params.type_k, params.type_v = type_k, type_v
        params.no_perf = True
        if tap is not None:
            self._callback = lib.ggml_backend_sched_eval_callback(self._read)
            params.cb_eval = self._callback
        self.context: Any = lib.llama_init_from_model(self.model, params)
        if not self.context:
            lib.llama_model_free(self.model)
            raise AssertionError("".join(LOG)[-1500:])
        self.log = "".join(LOG)
        self.memory: Any = lib.llama_get_memory(self.context)
        self.batch: Any = lib.llama_batch_ext_init(self.context)

    def _read(self, tensor: int, ask: bool, _data: object) -> bool:
        if _base.ggml_get_name(tensor) != self._tap:
            return not ask
        if not ask:
            rows = np.empty(_base.ggml_nbytes(tensor) // 4, np.float32)
            _base.ggml_backend_tensor_get(tensor, rows.ctypes.data, 0, rows.nbytes)
            self._tapped = rows.reshape(-1, self.n_embd)
        return True

    def append(self, *members: tuple[int, int, Tokens | Rows]) -> Rows:
        """Append each member's (sequence, position, tokens or hidden states) in one call; return every row."""
        lib.llama_batch_ext_clear(self.batch)
        n_rows = 0
        for sequence, position, data in members:
            for i, item in enumerate(data):
                if data.dtype == np.int32:
                    index = lib.llama_batch_ext_add_token(self.batch, sequence, int(item))
                else:
                    row = np.ascontiguousarray(item)
                    pointer = row.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
                    index = lib.llama_batch_ext_add_embd(self.batch, sequence, lib.llama_embd(pointer, 1, row.size))
                assert index == n_rows
                place = (lib.llama_pos * 1)(position + i)
                assert lib.llama_batch_ext_set_pos(self.batch, index, place)
                assert lib.llama_batch_ext_set_output_logits(self.batch, index, True)
                n_rows += 1
        code = lib.llama_process(self.context, lib.LLAMA_PROCESS_TYPE_DECODE, self.batch)
        assert code == 0, (code, "".join(LOG)[-800:])
        if self._tap is not None:
            assert self._tapped is not None
            rows, self._tapped = self._tapped, None
            assert len(rows) == n_rows
            return rows
        pointer = lib.llama_get_logits(self.context)
        return np.ctypeslib.as_array(pointer, shape=(n_rows, self.n_vocab)).copy()

    def truncate(self, sequence: int, length: int) -> bool:
        """Cut a sequence back; True where llama.cpp says that it could."""
        return bool(lib.llama_memory_seq_rm(self.memory, sequence, length, -1))

    def length(self, sequence: int) -> int:
        """Return the tokens in a sequence."""
        return int(lib.llama_memory_seq_pos_max(self.memory, sequence)) + 1

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        vocab = lib.llama_model_get_vocab(self.model)
        parts = []
        for token in tokens:
            buffer = ctypes.create_string_buffer(64)
            length = lib.llama_token_to_piece(vocab, int(token), buffer, 64, 0, True)
            parts.append(buffer.raw[:length])
        return b"".join(parts).decode(errors="replace")

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        encoded = text.encode()
        buffer = (lib.llama_token * 1024)()
        count = lib.llama_tokenize(
            lib.llama_model_get_vocab(self.model), encoded, len(encoded), buffer, 1024, True, True
        )
        assert count > 0
        return list(buffer[:count])

    def close(self) -> None:
        """Give everything back."""
        lib.llama_batch_ext_free(self.batch)
        lib.llama_free(self.context)
        lib.llama_model_free(self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
