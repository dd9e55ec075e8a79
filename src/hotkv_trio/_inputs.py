"""What a caller may hand over: counts; and to an append, checked and copied here before anything is queued.

A copy, because work waits: an array that its owner changes meanwhile must not change what is appended.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hotkv_trio._engine import OUTPUTS, Output
from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from hotkv_trio._engine import EngineInfo

Tokens: TypeAlias = npt.NDArray[np.int32]
"""int32 (n,), C-contiguous."""
Hidden: TypeAlias = npt.NDArray[np.float32]
"""float32 (n, n_embd), C-contiguous, finite."""


def check_count(name: str, value: Any) -> int:
    """Return how many there are of something, at least one.

    Raises:
        InvalidInput: it is not an integer > 0.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise InvalidInput(f"{name} must be an integer > 0, not {value!r:.200}")
    return value


def check_append(info: EngineInfo, data: Any) -> Tokens | Hidden:
    """Return ``data`` as the engine takes it.

    Args:
        info: the engine's facts.
        data: tokens (integers, n >= 1), or hidden states, float32 (n, n_embd).

    Raises:
        InvalidInput: it is neither, it is empty, a token is out of range, a state is not finite, or this shard does
            not take this kind.
    """
    if isinstance(data, np.ndarray) and data.dtype.kind == "f":
        return _check_hidden(info, data)
    return _check_tokens(info, data)


def check_single(info: EngineInfo, data: Any) -> Tokens | Hidden:
    """Return one token, or one hidden state (n_embd,) or (1, n_embd), as `check_append` does.

    Raises:
        InvalidInput: as `check_append`, or it is not exactly one.
    """
    if isinstance(data, np.ndarray) and data.dtype.kind == "f":
        if data.ndim == 1:
            data = data[np.newaxis]
        hidden = _check_hidden(info, data)
        if len(hidden) != 1:
            raise InvalidInput(f"decode appends one hidden state, not {len(hidden)}; prefill takes many")
        return hidden
    # The way of every decode step: a plain integer.
    if type(data) is int and 0 <= data < info.n_vocab:
        return np.array((data,), dtype=np.int32)
    try:
        token = operator.index(data)
    except TypeError:
        raise InvalidInput(f"decode appends one token, an integer, not {_name(data)}; prefill takes many") from None
    return _check_tokens(info, [data if isinstance(data, bool) else token])


def check_at(at: Any) -> int | None:
    """Return the position that an append counts on.

    Raises:
        InvalidInput: it is neither None nor an integer >= 0.
    """
    if at is None:
        return None
    return _check_index("at", at)


def check_length(length: Any) -> int:
    """Return a length to truncate to.

    Raises:
        InvalidInput: it is not an integer >= 0.
    """
    return _check_index("length", length)


def check_output(output: Any) -> Output:
    """Return which rows are asked for.

    Raises:
        InvalidInput: it is not one of `OUTPUTS`.
    """
    if not isinstance(output, str) or output not in OUTPUTS:
        raise InvalidInput(f"output must be one of {', '.join(map(repr, OUTPUTS))}, not {output!r:.200}")
    return output


def _check_index(name: str, value: Any) -> int:
    try:
        index = operator.index(value)
    except TypeError:
        index = -1
    if index < 0 or isinstance(value, bool):
        raise InvalidInput(f"{name} must be an integer >= 0, not {value!r:.200}")
    return index


def _check_tokens(info: EngineInfo, data: Any) -> Tokens:
    if not info.takes_tokens:
        raise InvalidInput(
            f"tokens given to a shard of layers {info.layers[0]}:{info.layers[1]}, which takes hidden states,"
            f" float32 (n, {info.n_embd})"
        )
    try:
        tokens = np.asarray(data)
    except (TypeError, ValueError, OverflowError):
        tokens = np.empty(0, dtype=object)
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in "iu":
        raise InvalidInput(
            "tokens must be a non-empty flat sequence of integers, such as tokenize makes of text, not"
            f" {_name(data)}; hidden states must be a numpy array of float32"
        )
    # Compared as they are: cast first, an out of range token could wrap into range.
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= info.n_vocab:
        raise InvalidInput(f"tokens must be from 0 to {info.n_vocab - 1}, not {low if low < 0 else high}")
    return np.array(tokens, dtype=np.int32, order="C")


def _check_hidden(info: EngineInfo, data: npt.NDArray[Any]) -> Hidden:
    if not info.takes_hidden:
        raise InvalidInput(f"hidden states given to an engine that takes tokens only, 0 to {info.n_vocab - 1}")
    if data.dtype != np.float32 or data.ndim != 2 or len(data) == 0 or data.shape[1] != info.n_embd:
        raise InvalidInput(
            f"hidden states must be float32 (n, {info.n_embd}) with n >= 1, not {data.dtype} {data.shape}"
        )
    hidden = np.array(data, dtype=np.float32, order="C")
    if not np.isfinite(hidden).all():
        row = int(np.flatnonzero(~np.isfinite(hidden).all(axis=1))[0])
        raise InvalidInput(f"hidden states must be finite; row {row} holds NaN or infinity")
    return hidden


def _name(data: Any) -> str:
    if isinstance(data, np.ndarray):
        return f"an array of {data.dtype} {data.shape}"
    return f"{type(data).__name__} {data!r:.80}"
