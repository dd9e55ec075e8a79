"""The GGUF container: headers read strictly and without touching tensor data, headers written byte for byte.

The reader is our own because a file from elsewhere may be anything: each field is bounded by what is left of the
file before it is read, string arrays (vocabularies of 256,000 entries) stay undecoded bytes, and whatever is wrong
becomes one `InvalidInput` that says so.  It accepts what llama.cpp's own reader accepts, and nothing else.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import attrs
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAGIC: Final = b"GGUF"
VERSION: Final = 3
DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4
MAX_TENSOR_NAME: Final = 63
MAX_COUNT: Final = 1 << 30
"""Entries in an array, and bytes in a string: llama.cpp's own limits."""
CHUNK: Final = 4 << 20
"""Bytes of a tensor read at once."""
ALIGNMENT_KEY: Final = "general.alignment"

_SCALARS: Final[Mapping[GGUFValueType, str]] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_SPLIT_NAME: Final = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@attrs.frozen
class MetaValue:
    """One metadata value, kept as the bytes of the file."""

    type: GGUFValueType
    """Of the value, or of an array's items."""
    count: int | None
    """Items of an array; None: not an array."""
    raw: bytes = attrs.field(repr=False)
    """The encoded value, or an array's encoded items one after the other."""

    @classmethod
    def of(cls, kind: GGUFValueType, value: Any) -> MetaValue:
        """Encode a scalar, a string, or a list or tuple of them."""
        if isinstance(value, list | tuple):
            return cls(kind, len(value), b"".join(_encode(kind, item) for item in value))
        return cls(kind, None, _encode(kind, value))

    @classmethod
    def guess(cls, value: Any) -> MetaValue:
        """Encode as the type that llama.cpp expects of a Python value: uint32 of an int, float32 of a float."""
        item = value[0] if isinstance(value, list | tuple) else value
        kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
        return cls.of(kinds.get(type(item), GGUFValueType.STRING), value)

    @property
    def is_array(self) -> bool:
        """Whether the value is an array."""
        return self.count is not None

    def decode(self) -> Any:
        """Return an int, float, bool or str, or a list of them."""
        items = _decode(self.type, self.raw, 1 if self.count is None else self.count)
        return items if self.is_array else items[0]

    def slice(self, first: int, end: int) -> MetaValue:
        """Return the array of items ``first`` to ``end - 1``."""
        return MetaValue.of(self.type, self.decode()[first:end])

    def encode(self) -> bytes:
        """Return the value as it stands in a file, its type first."""
        if self.count is None:
            return struct.pack("<I", self.type) + self.raw
        return struct.pack("<IIQ", GGUFValueType.ARRAY, self.type, self.count) + self.raw


def _encode(kind: GGUFValueType, value: Any) -> bytes:
    if kind == GGUFValueType.STRING:
        return _encode_string(value)
    return struct.pack(f"<{_SCALARS[kind]}", value)


def _encode_string(text: str) -> bytes:
    encoded = text.encode(errors="surrogateescape")
    return struct.pack("<Q", len(encoded)) + encoded


def _decode(kind: GGUFValueType, raw: bytes, count: int) -> list[Any]:
    if kind != GGUFValueType.STRING:
        return list(struct.unpack(f"<{count}{_SCALARS[kind]}", raw))
    strings, offset = [], 0
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", raw, offset)
        offset += 8
        strings.append(raw[offset : offset + length].decode(errors="surrogateescape"))
        offset += length
    return strings


@attrs.frozen
class TensorInfo:
    """Where one tensor lies, and what it is."""

    name: str
    shape: tuple[int, ...]
    """Elements in each dimension, ggml's order: the row length first."""
    type: GGMLQuantizationType
    path: Path
    """The file that holds it."""
    offset: int
    """Of its first byte in that file."""

    @property
    def n_rows(self) -> int:
        """Rows in all dimensions but the first."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return row_bytes(self.type, self.shape[0])

    @property
    def n_bytes(self) -> int:
        """Bytes in all, without padding."""
        return self.row_bytes * self.n_rows


@attrs.frozen(eq=False)
class GgufFile:
    """The header of a GGUF file, or of all the parts of a split one."""

    path: Path
    """The file that was asked for."""
    parts: tuple[Path, ...]
    """Every file, in order."""
    metadata: Mapping[str, MetaValue]
    """Of the first part."""
    tensors: Mapping[str, TensorInfo]
    """Of all parts, in file order."""
    alignment: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensors, without padding."""
        return sum(tensor.n_bytes for tensor in self.tensors.values())


def row_bytes(kind: GGMLQuantizationType, length: int) -> int:
    """Return the bytes of a row of ``length`` elements.

    Raises:
        InvalidInput: the type stores blocks, and ``length`` is not a whole number of them.
    """
    block, size = GGML_QUANT_SIZES[kind]
    if length % block:
        raise InvalidInput(f"a row of {length} elements is not a whole number of {kind.name} blocks of {block}")
    return int(length // block * size)


def padded(n_bytes: int, alignment: int) -> int:
    """Return ``n_bytes`` rounded up to a multiple of ``alignment``."""
    return -(-n_bytes // alignment) * alignment


def encode_header(
    metadata: Mapping[str, MetaValue],
    tensors: Iterable[tuple[str, tuple[int, ...], GGMLQuantizationType]],
    alignment: int = DEFAULT_ALIGNMENT,
) -> bytes:
    """Return the bytes before the first tensor's, padded; each tensor's own bytes follow padded to ``alignment``."""
    entries = list(tensors)
    out = io.BytesIO()
    out.write(MAGIC + struct.pack("<IQQ", VERSION, len(entries), len(metadata)))
    for key, value in metadata.items():
        out.write(_encode_string(key) + value.encode())
    offset = 0
    for name, shape, kind in entries:
        out.write(_encode_string(name))
        out.write(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
        offset += padded(row_bytes(kind, shape[0]) * math.prod(shape[1:]), alignment)
    out.write(bytes(padded(out.tell(), alignment) - out.tell()))
    return out.getvalue()


def tensor_chunks(tensor: TensorInfo) -> Iterator[bytes]:
    """Yield a tensor's bytes, a few megabytes at a time, by plain reads: memory stays flat, and so does its account.

    Raises:
        InvalidInput: the file ends before the tensor does, or cannot be read.
    """
    try:
        yield from _chunks(tensor)
    except OSError as error:
        raise InvalidInput(f"{tensor.path}: {error.strerror or error}") from error


def _chunks(tensor: TensorInfo) -> Iterator[bytes]:
    left = tensor.n_bytes
    with tensor.path.open("rb", buffering=0) as file:
        file.seek(tensor.offset)
        while left:
            chunk = file.read(min(left, CHUNK))
            if not chunk:
                raise InvalidInput(f"{tensor.path}: truncated: {left} bytes of tensor {tensor.name!r} are missing")
            left -= len(chunk)
            yield chunk


def read_gguf(path: str | os.PathLike[str]) -> GgufFile:
    """Read the header of a GGUF file; of a split one (``…-00001-of-0000N.gguf``) the headers of all its parts.

    No tensor data is read.

    Raises:
        InvalidInput: the file is missing, unreadable, not GGUF, truncated, or damaged; it says which and where.
    """
    asked = Path(path)
    first = _read_part(asked)
    count = first.metadata.get("split.count")
    n_parts = count.decode() if count is not None else 1
    if not isinstance(n_parts, int) or n_parts <= 1:
        return first
    matched = _SPLIT_NAME.match(asked.name)
    if matched is None or int(matched["count"]) != n_parts:
        raise InvalidInput(f"{asked}: one of {n_parts} parts must be named …-00001-of-{n_parts:05d}.gguf")
    paths = tuple(asked.with_name(f"{matched['stem']}-{i + 1:05d}-of-{n_parts:05d}.gguf") for i in range(n_parts))
    for missing in (part for part in paths if not part.exists()):
        raise InvalidInput(f"{asked}: part {missing.name} of the split file is missing")
    parts = [first if part == asked else _read_part(part) for part in paths]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        marked = part.metadata.get("split.no")
        if marked is None or marked.decode() != number:
            raise InvalidInput(f"{part.path}: split.no does not say that this is part {number + 1} of {n_parts}")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise InvalidInput(f"{part.path}: tensor {name!r} is in {tensors[name].path.name} too")
            tensors[name] = tensor
    total = parts[0].metadata.get("split.tensors.count")
    if total is not None and total.decode() != len(tensors):
        raise InvalidInput(f"{asked}: the parts hold {len(tensors)} tensors, not {total.decode()}")
    return GgufFile(asked, paths, parts[0].metadata, tensors, parts[0].alignment)


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb", buffering=1 << 18) as file:
            return _Header(path, file, os.fstat(file.fileno()).st_size).read()
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror or error}") from error


class _Header:
    """Reads one file's header; every field is checked against what is left of the file first."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size

    def fail(self, what: str) -> InvalidInput:
        return InvalidInput(f"{self.path}: {what}")

    def take(self, n_bytes: int, what: str) -> bytes:
        offset = self.file.tell()
        if n_bytes > self.size - offset:
            raise self.fail(
                f"truncated or damaged: {what} at byte {offset} needs {n_bytes}, the file ends at {self.size}"
            )
        data = self.file.read(n_bytes)
        if len(data) != n_bytes:
            raise self.fail(f"truncated while it was read, in {what} at byte {offset}")
        return data

    def number(self, code: str, what: str) -> int:
        value: int = struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0]
        return value

    def string(self, what: str) -> bytes:
        length = self.number("Q", what)
        if length > MAX_COUNT:
            raise self.fail(f"damaged: {what} would be {length} bytes long")
        return self.take(length, what)

    def kind(self, what: str) -> GGUFValueType:
        number = self.number("I", what)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self.fail(f"damaged: {what} has the unknown type {number}") from None

    def value(self, key: str) -> MetaValue:
        what = f"the value of {key!r}"
        kind = self.kind(what)
        count: int | None = None
        if kind == GGUFValueType.ARRAY:
            kind, count = self.kind(what), self.number("Q", what)
            if kind == GGUFValueType.ARRAY:
                raise self.fail(f"{what} is an array of arrays, which llama.cpp does not read")
            if count > MAX_COUNT:
                raise self.fail(f"damaged: {what} would have {count} items")
        items = 1 if count is None else count
        if kind != GGUFValueType.STRING:
            return MetaValue(kind, count, self.take(items * struct.calcsize(_SCALARS[kind]), what))
        return MetaValue(kind, count, self.strings(items, what))

    def strings(self, count: int, what: str) -> bytes:
        """Return encoded strings one after the other: a vocabulary has 256,000, so the loop is bare."""
        read, left = self.file.read, self.size - self.file.tell()
        pieces: list[bytes] = []
        for i in range(count):
            prefix = read(8)
            length = int.from_bytes(prefix, "little")
            left -= 8 + length
            if left < 0:
                raise self.fail(f"truncated or damaged: string {i} of {what} would end {-left} bytes beyond the file")
            pieces += (prefix, read(length))
        return b"".join(pieces)

    def read(self) -> GgufFile:
        if self.size < len(MAGIC) or self.take(len(MAGIC), "the magic") != MAGIC:
            raise self.fail("not a GGUF file (it does not begin with GGUF)")
        version = self.number("I", "the version")
        if version not in {2, VERSION}:
            order = ": of the other byte order" if version & 0xFFFF == 0 else ""
            raise self.fail(f"GGUF version {version} is not supported{order}; versions 2 and 3 are")
        n_tensors = self.number("Q", "the number of tensors")
        n_values = self.number("Q", "the number of values")
        metadata = self.metadata(n_values)
        alignment = DEFAULT_ALIGNMENT
        if (stated := metadata.get(ALIGNMENT_KEY)) is not None:
            alignment = stated.decode()
            if stated.type != GGUFValueType.UINT32 or stated.is_array or alignment.bit_count() != 1:
                raise self.fail(f"{ALIGNMENT_KEY} is {alignment}, not a power of two of type uint32")
        return GgufFile(self.path, (self.path,), metadata, self.tensors(n_tensors, alignment), alignment)

    def metadata(self, n_values: int) -> dict[str, MetaValue]:
        metadata: dict[str, MetaValue] = {}
        for i in range(n_values):
            key = self.string(f"key {i}").decode(errors="surrogateescape")
            if not key or key in metadata:
                raise self.fail(f"damaged: key {i} ({key!r}) is {'there twice' if key else 'empty'}")
            metadata[key] = self.value(key)
        return metadata

    def tensors(self, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        entries: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for i in range(n_tensors):
            name = self.string(f"the name of tensor {i}").decode(errors="surrogateescape")
            if not name or len(name) > MAX_TENSOR_NAME or name in entries:
                raise self.fail(f"damaged: the name of tensor {i}, {name[:80]!r}, is empty, too long or there twice")
            entries[name] = self.tensor(name)
        start = padded(self.file.tell(), alignment)
        tensors: dict[str, TensorInfo] = {}
        expected = 0
        for name, (shape, kind, offset) in entries.items():
            if offset != expected:
                raise self.fail(f"damaged: tensor {name!r} is at offset {offset}, not {expected}")
            try:
                tensor = TensorInfo(name, shape, kind, self.path, start + offset)
                n_bytes = tensor.n_bytes
            except InvalidInput as error:
                raise self.fail(f"damaged: tensor {name!r}: {error.what}") from None
            if start + offset + n_bytes > self.size:
                raise self.fail(
                    f"truncated: tensor {name!r} ends at byte {start + offset + n_bytes}, the file at {self.size}"
                )
            expected += padded(n_bytes, alignment)
            tensors[name] = tensor
        return tensors

    def tensor(self, name: str) -> tuple[tuple[int, ...], GGMLQuantizationType, int]:
        what = f"tensor {name!r}"
        n_dims = self.number("I", what)
        if n_dims > MAX_DIMS:
            raise self.fail(f"damaged: {what} has {n_dims} dimensions")
        shape = struct.unpack(f"<{n_dims}Q", self.take(8 * n_dims, what)) or (1,)
        if math.prod(shape) >= 1 << 63 or 0 in shape:
            raise self.fail(f"damaged: {what} has the shape {shape}")
        number = self.number("I", what)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.fail(f"{what} has type {number}, which the installed gguf package does not know") from None
        return shape, kind, self.number("Q", what)
