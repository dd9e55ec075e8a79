"""The gate: every value that reaches llama.cpp through an engine passes here first.

llama.cpp ends the process on some values and takes others without a word.  Each kind is closed at one place:

===================================================  ================================================================
what llama.cpp does with it                          closed by
===================================================  ================================================================
more tokens than ``n_batch``: abort                  `Gate.check_group`, ``max_batch_tokens``
more outputs than ``n_outputs_max``: abort           `Gate.check_group`, ``max_outputs``
a sequence id out of range: abort; -1: all of them   `Gate.check_slot`; ``_ffi`` refuses negative ids again
an entry without a sequence id: SIGSEGV              ``_ffi.Batch`` adds none
two threads on one context: SIGSEGV                  `Gate.check_thread`
``n_seq_max`` over ``n_batch`` or over 256: abort    `check_options`; the engine makes ``n_batch`` from ``n_slots``
a KV type that attention cannot use: abort, SIGFPE   `check_options`, ``type_k`` and ``type_v``
a forked process: its threads are not there; hangs   `Gate.check_thread`
more KV than memory: killed by the system            `check_memory`
a position past a learned table's end: abort         `Gate.check_group`, ``n_ctx_seq`` (which the engine lowers to it)
hidden states where the graph has no place: abort    `Gate.check_group`, ``n_embd`` 0
``seq_add``, ``seq_div``, partial ``seq_cp``,        never called
state of a sequence out of range
a NULL or freed context                              the engine has none to pass before ``open`` and after ``close``
two entries at one position, a hole, a replay,       `Gate.check_group`: a position is the slot's length, the rest
position -1, a first position that is not 0          follow from it; slots are distinct
NaN, Inf: poison the slot's next tenant              `Gate.check_group`; what overflows later, the engine's output check
a state shorter than its rows: read past its end     `Gate.check_group`, dtype, contiguity and width
an array that is not what it says: a bad token       `Gate.check_group`, plain arrays only
token and hidden state in one entry                  ``_ffi.Batch`` adds one or the other
hidden states under M-RoPE: misread positions        `Gate.check_group`, ``n_embd`` 0
hidden states in a pool that sessions share: one     `Gate.check_group`, ``n_embd`` 0; the engine refuses shards
that is not finite reaches everybody
a window in a shared pool: cells of others are taken the context refuses it
tokens on a shard that is not the first              `Gate.check_group`, ``n_vocab`` 0
===================================================  ================================================================
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final, final

import attrs
import numpy as np

from hotkv_trio._engine import OUTPUTS
from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy.typing as npt

    from hotkv_trio._engine import Append

HIDDEN_LIMIT: Final = 1e15
"""Largest magnitude in a hidden state.  Real ones stay below 1e7; the squares of these still add up in float32."""

LAYOUTS: Final = ("streams", "unified")
TAPS: Final = ("auto", "native", "python")

MAX_THREADS: Final = 512
"""Threads that ggml can use: ``GGML_MAX_N_THREADS``."""

_INT32: Final = np.dtype(np.int32)
_FLOAT32: Final = np.dtype(np.float32)
_MAX_POSITION: Final = 2**31 - 1


def check_options(
    *,
    layers: tuple[int, int] | None,
    n_slots: int,
    n_ctx: int,
    type_k: str,
    type_v: str,
    layout: str,
    threads: int | None,
    tap: str,
    max_slots: int,
    cell_pad: int,
    kv_types: Collection[str],
) -> None:
    """Refuse what no context can be made with, or what ends the process when one is made.

    Raises:
        InvalidInput: names the value and the limit.
    """
    if layers is not None and not _is_range(layers):
        raise InvalidInput(f"layers={layers!r}: the first layer and one past the last, two integers, or None for all")
    if not _is_integer(n_slots) or not 1 <= n_slots <= max_slots:
        raise InvalidInput(f"n_slots={n_slots!r}: 1 to {max_slots} sequences fit in one context")
    most = _MAX_POSITION // n_slots // cell_pad * cell_pad
    if not _is_integer(n_ctx) or not 1 <= n_ctx <= most:
        raise InvalidInput(f"n_ctx={n_ctx!r}: a session holds 1 to {most} tokens where there are {n_slots} slots")
    for name, kind in (("type_k", type_k), ("type_v", type_v)):
        if kind not in tuple(kv_types):
            raise InvalidInput(f"{name}={kind!r}: KV is stored as {', '.join(kv_types)}")
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout={layout!r}: 'streams', or 'unified' with its weaker promise")
    if threads is not None and (not _is_integer(threads) or not 1 <= threads <= MAX_THREADS):
        raise InvalidInput(f"threads={threads!r}: 1 to {MAX_THREADS}, or None for one a processor")
    if tap not in TAPS:
        raise InvalidInput(f"tap={tap!r}: 'auto', 'native' or 'python'")


def check_memory(n_bytes: int) -> None:
    """Refuse KV that can never fit: llama.cpp writes zeros over all of it, and the system would end the process.

    Raises:
        InvalidInput: names both figures.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if n_bytes > total:
        raise InvalidInput(f"KV for all slots would take {n_bytes} bytes; this machine has {total}")


def _is_range(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_is_integer, value)) and 0 <= value[0] < value[1]


def _is_integer(value: object) -> bool:
    return type(value) is int


@attrs.frozen(kw_only=True)
class Limits:
    """What one open context takes."""

    n_slots: int
    n_ctx_seq: int
    """Tokens in a slot; at most the trained length where positions are learned."""
    max_batch_tokens: int
    max_outputs: int
    n_vocab: int
    """Tokens are 0 to ``n_vocab - 1``; 0: no tokens are taken."""
    n_embd: int
    """Width of a hidden state; 0: none is taken."""


@final
class Gate:
    """Checks all that goes into one open context; what it lets through, llama.cpp can take."""

    def __init__(self, limits: Limits) -> None:
        """Keep the limits, and the calling thread as the only one that may call."""
        self.limits = limits
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def __repr__(self) -> str:
        """Say the limits."""
        return f"<{type(self).__name__} {self.limits}>"

    def check_thread(self) -> None:
        """Refuse every thread but the one that opened the context, and its likeness in a forked process."""
        if os.getpid() != self._process:
            raise InvalidInput("called in a process that was forked after the engine was opened: open one in each")
        if threading.get_ident() != self._thread:
            raise InvalidInput("called from another thread than opened the engine: one context, one thread")

    def check_slot(self, slot: int) -> None:
        """Refuse what is not a slot's number."""
        if type(slot) is not int or not 0 <= slot < self.limits.n_slots:
            raise InvalidInput(f"slot {slot!r}: there are slots 0 to {self.limits.n_slots - 1}")

    def check_length(self, length: int, held: int) -> None:
        """Refuse to cut a slot that holds ``held`` tokens to anything but 0 to ``held``."""
        if type(length) is not int or not 0 <= length <= held:
            raise InvalidInput(f"length {length!r}: the slot holds {held} tokens, it can be cut to 0 to {held}")

    def check_group(self, group: Sequence[Append], held: Sequence[int], unsure: Collection[int]) -> None:
        """Refuse a group of appends unless every value of it can be taken.

        Args:
            group: what is to be appended.
            held: the tokens in each slot.
            unsure: slots whose contents mean nothing until they are cleared or cut back.

        Raises:
            InvalidInput: nothing reached llama.cpp; it names the value and what would be right.
        """
        self.check_thread()
        limits = self.limits
        if not group:
            raise InvalidInput("a group has at least one member")
        seen: set[int] = set()
        n_tokens = n_outputs = 0
        for member in group:
            slot, position = member.slot, member.position
            self.check_slot(slot)
            if slot in seen:
                raise InvalidInput(f"slot {slot} is in the group twice")
            seen.add(slot)
            if slot in unsure:
                raise InvalidInput(f"slot {slot} must be cleared or cut back first: a call that named it failed")
            if type(position) is not int or position != held[slot]:
                raise InvalidInput(f"position {position!r}: slot {slot} goes on at {held[slot]}")
            if member.output not in OUTPUTS:
                raise InvalidInput(f"output {member.output!r}: one of {', '.join(OUTPUTS)}")
            self._check_data(member)
            if member.data.dtype != group[0].data.dtype:
                raise InvalidInput("a group is all tokens or all hidden states")
            n_tokens += (length := len(member.data))
            n_outputs += member.n_rows
            if position + length > limits.n_ctx_seq:
                raise InvalidInput(
                    f"slot {slot} holds {position} of {limits.n_ctx_seq} tokens; {length} more do not fit"
                )
        if n_tokens > limits.max_batch_tokens:
            raise InvalidInput(f"{n_tokens} tokens in one call; {limits.max_batch_tokens} fit")
        if n_outputs > limits.max_outputs:
            raise InvalidInput(f"{n_outputs} output rows in one call; {limits.max_outputs} fit")

    def _check_data(self, member: Append) -> None:
        data: Any = member.data
        # No subclass: a masked array's least and greatest elements, say, are what it likes.
        if type(data) is not np.ndarray:
            raise InvalidInput(f"data is a numpy array, not {type(data).__name__}")
        if data.dtype == _INT32:
            self._check_tokens(data)
        elif data.dtype == _FLOAT32:
            self._check_hidden(data)
        else:
            raise InvalidInput(
                f"tokens are int32 and hidden states float32, of this machine's byte order, not {data.dtype.str}"
            )
        flags = data.flags
        if not flags.c_contiguous or not flags.aligned:
            raise InvalidInput("data must be C-contiguous and aligned")

    def _check_tokens(self, data: npt.NDArray[np.int32]) -> None:
        n_vocab = self.limits.n_vocab
        if not n_vocab:
            raise InvalidInput("tokens: this layer range takes hidden states only")
        if data.ndim != 1 or not data.size:
            raise InvalidInput(f"tokens are one row of at least one, not of shape {data.shape}")
        # One token at a time is the common case, and the cheap one.
        low, high = (data.item(),) * 2 if data.size == 1 else (data.min(), data.max())
        if low < 0 or high >= n_vocab:
            wrong = next(token for token in data.tolist() if not 0 <= token < n_vocab)
            raise InvalidInput(f"token {wrong}: tokens are 0 to {n_vocab - 1}")

    def _check_hidden(self, data: npt.NDArray[np.float32]) -> None:
        n_embd = self.limits.n_embd
        if not n_embd:
            raise InvalidInput("hidden states: this model takes tokens only")
        if data.ndim != 2 or data.shape[1] != n_embd or not data.size:
            raise InvalidInput(f"hidden states are of shape (at least 1, {n_embd}), not {data.shape}")
        # Written so that NaN, for which every comparison is false, is refused too.
        if not (data.max() <= HIDDEN_LIMIT and data.min() >= -HIDDEN_LIMIT):
            row, column = (int(i) for i in np.argwhere(~(np.abs(data) <= HIDDEN_LIMIT))[0])
            raise InvalidInput(f"hidden state {row}, element {column} is {data[row, column]}: beyond ±{HIDDEN_LIMIT:g}")
