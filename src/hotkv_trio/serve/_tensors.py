"""Arrays as bytes on the wire: little-endian, C order, no padding."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from hotkv_trio.serve._errors import ProtocolError

HiddenDtype: TypeAlias = Literal["float32", "float16", "bfloat16"]
HIDDEN_DTYPES: tuple[HiddenDtype, ...] = ("float32", "float16", "bfloat16")
"""What hidden states may travel as."""

Array: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.float32]
"""Tokens, int32 (n,), or rows, float32 (n, width)."""

_WIRE: dict[str, np.dtype[Any]] = {
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}

Extent: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class Tensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the bytes after the header are."""

    dtype: Literal["int32", "float32", "float16", "bfloat16"]
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(min_length=1, max_length=2)]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return math.prod(self.shape) * int(_WIRE[self.dtype].itemsize)


def to_wire(array: Array, hidden_dtype: HiddenDtype = "float32") -> tuple[Tensor, bytes]:
    """Return an array's description and bytes.

    float32 travels as ``hidden_dtype``, rounded to nearest even; but as float32 if a finite value would become
    infinite by that.
    """
    if array.dtype == np.int32:
        return Tensor("int32", array.shape), array.astype("<i4", copy=False).tobytes()
    if array.dtype != np.float32:
        raise TypeError(f"only int32 and float32 travel, not {array.dtype}")
    narrow: npt.NDArray[Any] | None = None
    if hidden_dtype == "float16":
        with np.errstate(over="ignore", under="ignore"):
            narrow = array.astype("<f2")
        if not np.array_equal(np.isfinite(narrow), np.isfinite(array)):
            narrow = None
    elif hidden_dtype == "bfloat16":
        narrow = _to_bfloat16(cast("npt.NDArray[np.float32]", array))
    if narrow is None:
        return Tensor("float32", array.shape), array.astype("<f4", copy=False).tobytes()
    return Tensor(hidden_dtype, array.shape), narrow.tobytes()


def from_wire(tensor: Tensor, data: bytes) -> Array:
    """Return the array: int32, or float32 whatever it travelled as.

    Raises:
        ProtocolError: the bytes are not as many as the description says.
    """
    if len(data) != tensor.nbytes:
        raise ProtocolError(f"a tensor of {tensor.dtype} {tensor.shape} has {tensor.nbytes} bytes, not {len(data)}")
    raw: npt.NDArray[Any] = np.frombuffer(data, dtype=_WIRE[tensor.dtype]).reshape(tensor.shape)
    if tensor.dtype == "int32":
        return cast("Array", raw.astype(np.int32, copy=False))
    if tensor.dtype == "bfloat16":
        return cast("Array", (raw.astype(np.uint32) << 16).view(np.float32))
    return cast("Array", raw.astype(np.float32, copy=False))


def _to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16] | None:
    """Round to bfloat16, as its 16 bits; None if a finite value would become infinite, or a NaN could be lost."""
    if not np.isfinite(array).all():
        return None
    bits = np.ascontiguousarray(array).view(np.uint32)
    high = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    if ((high & 0x7F80) == 0x7F80).any():
        return None
    return high.astype("<u2")
