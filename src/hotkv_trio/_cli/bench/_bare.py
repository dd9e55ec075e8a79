"""The bare loop: what one would write by hand with llama.cpp's own functions, on the engine's own context.

It runs in the owner thread while the runtime has nothing to do, on the same slots at the same positions, and leaves
the context as it found it.  So both compute the same, over the same memory, with the same team of threads.
"""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hotkv_trio._errors import EngineFailed
from hotkv_trio._owner import call
from hotkv_trio.llama import _ffi

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._cli.bench._setting import Bench
    from hotkv_trio._inputs import Tokens
    from hotkv_trio.llama._context import Context


class BareLoop:
    """Drives an open engine's context without the runtime and without the engine."""

    def __init__(self, bench: Bench) -> None:
        self._executor = bench.runtime._executor
        self._context, _ = bench.engine._open_context()

    async def decode(
        self, slots: Sequence[int], position: int, tokens: Sequence[int], n_steps: int, *, copy: bool
    ) -> tuple[float, list[int]]:
        """Decode ``n_steps`` tokens on each slot, all slots in one call, each the most likely after the one before.

        Args:
            slots: consecutive ones that hold ``position`` tokens, and will afterwards.
            position: of the first token.
            tokens: the first of each slot.
            n_steps: how many on each slot.
            copy: whether each step's logits are copied, as they must be if they are to outlive the step.

        Returns:
            Seconds, and the token of each slot that would be next.
        """
        return await call(self._executor, partial(_decode, self._context, slots, position, tokens, n_steps, copy=copy))

    async def prefill(self, slot: int, tokens: Tokens, chunk: int) -> float:
        """Prefill an empty slot in calls of ``chunk`` tokens, and copy the last row; return the seconds it took."""
        return await call(self._executor, partial(_prefill, self._context, slot, tokens, chunk))


def _decode(
    context: Context, slots: Sequence[int], position: int, tokens: Sequence[int], n_steps: int, *, copy: bool
) -> tuple[float, list[int]]:
    first = range(1)
    began = time.perf_counter()
    for at in range(position, position + n_steps):
        for slot, token in zip(slots, tokens, strict=True):
            context.batch.add_tokens(slot, at, (token,), first)
        _process(context)
        rows = _rows(context, len(slots), copy=copy)
        tokens = rows.argmax(axis=1).tolist()
    seconds = time.perf_counter() - began
    for slot in slots:
        _ffi.remove_from(context.memory, slot, position)
    return seconds, list(tokens)


def _prefill(context: Context, slot: int, tokens: Tokens, chunk: int) -> float:
    began = time.perf_counter()
    for first in range(0, len(tokens), chunk):
        piece = tokens[first : first + chunk].tolist()
        last = first + chunk >= len(tokens)
        context.batch.add_tokens(slot, first, piece, range(len(piece) - 1, len(piece)) if last else range(0))
        _process(context)
    _rows(context, 1, copy=True)
    seconds = time.perf_counter() - began
    _ffi.remove_from(context.memory, slot, 0)
    return seconds


def _process(context: Context) -> None:
    code = _ffi.process(context.handle, context.batch.handle)
    context.batch.clear()
    if code != _ffi.OK:
        raise EngineFailed(code, "the bare loop's call failed")


def _rows(context: Context, n_rows: int, *, copy: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    if copy:
        rows = _ffi.logits(context.handle, n_rows, context.n_vocab)
        if rows is None:
            raise EngineFailed(None, "the bare loop got no output")
        return rows
    address = _ffi._get_logits(context.handle)
    return np.ctypeslib.as_array((ctypes.c_float * (n_rows * context.n_vocab)).from_address(address)).reshape(
        n_rows, context.n_vocab
    )
