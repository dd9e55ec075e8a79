"""llama-cpp-python as its own users use it, with one sequence: the peer that ``hotkv-trio bench`` measures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

import numpy as np
from llama_cpp import Llama

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence


@final
class StockLlama:
    """One ``llama_cpp.Llama``, whose single sequence is shared by saving and loading its state.  One thread.

    Args:
        path: a GGUF file.
        n_ctx: tokens that it holds.
        threads: of a call.
    """

    def __init__(self, path: str | os.PathLike[str], *, n_ctx: int, threads: int) -> None:
        self._llama: Any = Llama(
            str(path), n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
        )
        self._states: list[Any] = []
        self._next: list[int] = []

    def close(self) -> None:
        """Give the model back."""
        self._llama.close()

    def one_after_the_other(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> float:
        """Prefill each prompt and generate ``n_tokens`` after it; return the seconds that all took."""
        began = time.perf_counter()
        for prompt in prompts:
            self._llama.reset()
            self._llama.eval(prompt)
            for _ in range(n_tokens - 1):
                self._llama.eval([self._best()])
            self._best()
        return time.perf_counter() - began

    def keep(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill each prompt, and save the state after it."""
        self._states, self._next = [], []
        for prompt in prompts:
            self._llama.reset()
            self._llama.eval(prompt)
            self._states.append(self._llama.save_state())
            self._next.append(self._best())

    def interleaved(self, n_steps: int) -> float:
        """Decode ``n_steps`` tokens after each state kept, by turns; return the seconds that all took."""
        began = time.perf_counter()
        for _ in range(n_steps):
            for i, state in enumerate(self._states):
                self._llama.load_state(state)
                self._llama.eval([self._next[i]])
                self._next[i] = self._best()
                self._states[i] = self._llama.save_state()
        return time.perf_counter() - began

    def _best(self) -> int:
        return int(np.ctypeslib.as_array(self._llama._ctx.get_logits(), shape=(self._llama.n_vocab(),)).argmax())
