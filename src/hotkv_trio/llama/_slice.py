"""Shard files: a range of a model's layers as a GGUF of its own, which the stock llama.cpp loads.

What a shard file is
    The blocks of its range, renumbered from 0; every value of the metadata that goes by layer cut to the range, and
    those that llama.cpp would derive from a layer's number or from their count written out.  No vocabulary: tokens are
    embedded outside (`EmbeddingTable`).  llama.cpp insists on a head and computes it, so a shard that is not the last
    gets one of a single row; in the last, the head stands where the embeddings would (a model whose head *is* its
    embedding table needs nothing more), since embeddings never read are still memory.

How a shard file is made
    Streamed by plain reads, a few megabytes at a time, into a temporary file in the folder of the result, synced, and
    renamed.  A cached one is named after what it follows from: the model digest, the range, and its own header.  Beside
    it lies its seal, written last: the size and modification time of the shard.  Without a seal that fits there is no
    shard, whatever a file of that name holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from gguf.constants import GGUFValueType

from hotkv_trio._errors import InvalidInput
from hotkv_trio._sizes import size
from hotkv_trio.llama._architectures import check_range
from hotkv_trio.llama._cache import replacing, user_cache_dir
from hotkv_trio.llama._digest import file_digest, file_stamp
from hotkv_trio.llama._facts import BLOCK_TENSOR, EMBEDDING, HEAD, SHARD_KEY, model_facts
from hotkv_trio.llama._gguf import MetaValue, encode_header, padded, read_gguf, tensor_chunks

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterator

    from hotkv_trio.llama._architectures import Architecture
    from hotkv_trio.llama._digest import Progress
    from hotkv_trio.llama._facts import ModelFacts
    from hotkv_trio.llama._gguf import GgufFile, TensorInfo

SLICE_VERSION: Final = 1
"""Of what a shard file is; part of its header."""

_BY_LAYER: Final = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.recurrent_layers",
    "attention.rope_pattern",
    "expert_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
"""Values that may be arrays of one item a layer."""


@attrs.frozen
class _Piece:
    """One tensor of a shard."""

    name: str
    """In the shard."""
    tensor: TensorInfo
    """Its bytes in the source; with fewer rows than there, the first of them."""


@attrs.frozen(eq=False)
class _Shard:
    """What a shard file will hold."""

    file: GgufFile
    """The source."""
    layers: tuple[int, int]
    header: bytes
    pieces: tuple[_Piece, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(padded(piece.tensor.n_bytes, self.file.alignment) for piece in self.pieces)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors, without padding."""
        return sum(piece.tensor.n_bytes for piece in self.pieces)


def slice_gguf(
    source: str | os.PathLike[str],
    layers: tuple[int, int],
    out: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """Write the shard of a range of layers, replacing ``out`` in one move at the very end, and return its path.

    Args:
        source: the whole model (any part of it, if it is split).
        layers: the first layer, and one past the last.
        out: where to write.
        progress: called with the bytes written and the bytes in all.

    Raises:
        InvalidInput: the source is missing, foreign, truncated or damaged, or may not be cut so; ``out`` cannot be
            written, or there is not enough free space: both figures are named.  ``out`` is as it was before.
    """
    target = Path(out)
    shard = _plan(read_gguf(source), layers)
    with _told(target):
        if target.is_dir():
            raise InvalidInput(f"{target} is a directory: name the file in it that is to be written")
        # A device or a pipe would be replaced, not written to.
        if target.exists() and not target.is_file():
            raise InvalidInput(f"{target} is not a regular file: write the shard elsewhere")
        if target.exists() and any(target.samefile(part) for part in shard.file.parts):
            raise InvalidInput(f"{target} is the model itself: write the shard elsewhere")
    _write(shard, target, progress)
    return target


def cached_slice(
    source: str | os.PathLike[str],
    layers: tuple[int, int],
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the shard of a range of layers from the cache, made first if it is missing or damaged.

    Processes that want the same shard at once make it once: a lock is waited for.  Blocking: not for a trio task.

    Args:
        source: as `slice_gguf`.
        layers: as `slice_gguf`.
        cache_dir: where shards are kept; None: under the user's cache directory.
        progress: called while the model digest is computed, and again while the shard is written.

    Raises:
        InvalidInput: as `slice_gguf`; the cache has no bad shard then.
    """
    file = read_gguf(source)
    shard = _plan(file, layers)
    folder = user_cache_dir() / "shards" if cache_dir is None else Path(cache_dir)
    first, end = shard.layers
    cause = hashlib.blake2b(shard.header, digest_size=8).hexdigest()
    target = folder / f"{file_digest(file, progress)}-{first}-{end}-{cause}.gguf"
    with _told(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if not _sealed(target, shard):
            _seal_path(target).unlink(missing_ok=True)
            _sweep(target)
            _write(shard, target, progress)
            with _told(folder):
                _seal(target)
    return target


def shard_weight_bytes(source: str | os.PathLike[str], layers: tuple[int, int] | None) -> int:
    """Return the bytes of the weights that a shard of a range of layers loads; None: those of the whole model.

    Raises:
        InvalidInput: as `slice_gguf`.
    """
    file = read_gguf(source)
    return file.n_bytes if layers is None else _plan(file, layers).weight_bytes


def _plan(file: GgufFile, layers: tuple[int, int]) -> _Shard:
    facts = model_facts(file)
    architecture = check_range(facts, layers)
    pieces = tuple(_pieces(file, facts, architecture, layers))
    metadata = _metadata(file, facts, architecture, layers)
    header = encode_header(metadata, ((p.name, p.tensor.shape, p.tensor.type) for p in pieces), file.alignment)
    return _Shard(file, layers, header, pieces)


def _pieces(file: GgufFile, facts: ModelFacts, architecture: Architecture, layers: tuple[int, int]) -> Iterator[_Piece]:
    first, end = layers
    yield from _heads(file, facts, architecture, last=end == facts.n_layer)
    for name, tensor in file.tensors.items():
        if (matched := BLOCK_TENSOR.match(name)) is not None:
            if first <= (layer := int(matched[1])) < end:
                yield _Piece(f"blk.{layer - first}.{matched[2]}", tensor)
        elif name not in {EMBEDDING, HEAD} and (end == facts.n_layer or not name.startswith("output.")):
            yield _Piece(name, tensor)


def _heads(file: GgufFile, facts: ModelFacts, architecture: Architecture, *, last: bool) -> Iterator[_Piece]:
    embedding, head = file.tensors[EMBEDDING], file.tensors.get(HEAD)
    one_row = (facts.n_embd, 1)
    if not last:
        embedding = attrs.evolve(embedding, shape=one_row)
        head = None if head is None else attrs.evolve(head, shape=one_row)
    if architecture.needs_head and head is not None:
        yield _Piece(EMBEDDING, embedding)
        yield _Piece(HEAD, head)
    else:
        yield _Piece(EMBEDDING, embedding if head is None else head)


def _metadata(
    file: GgufFile, facts: ModelFacts, architecture: Architecture, layers: tuple[int, int]
) -> dict[str, MetaValue]:
    first, end = layers
    arch = facts.architecture
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith(("tokenizer.", "split."))}
    for key in (f"{arch}.{name}" for name in _BY_LAYER):
        if (value := metadata.get(key)) is not None and value.is_array:
            metadata[key] = value.slice(first, end)
    values: dict[str, Any] = {"block_count": end - first, "vocab_size": facts.n_vocab if end == facts.n_layer else 1}
    if any(facts.sliding[first:end]):
        values["attention.sliding_window_pattern"] = list(facts.sliding[first:end])
    elif facts.n_swa:
        # llama.cpp ends the process over a window that no layer uses.
        values["attention.sliding_window"] = 0
    values |= {k: v for k, v in architecture.pinned(facts).items() if f"{arch}.{k}" not in metadata}
    if first:
        values |= architecture.later
    metadata |= {f"{arch}.{key}": MetaValue.guess(value) for key, value in values.items()}
    metadata["tokenizer.ggml.model"] = MetaValue.of(GGUFValueType.STRING, "none")
    metadata[SHARD_KEY] = MetaValue.of(GGUFValueType.UINT32, [first, end, facts.n_layer, SLICE_VERSION])
    return metadata


def _write(shard: _Shard, target: Path, progress: Progress | None) -> None:
    n_bytes = shard.n_bytes
    with _told(target):
        free = shutil.disk_usage(target.parent).free
    if free < n_bytes:
        raise InvalidInput(f"{target}: the shard takes {size(n_bytes)}, and {size(free)} are free")
    stamp = file_stamp(shard.file)
    with _told(target, f"the shard takes {size(n_bytes)}, and {size(free)} were free"), replacing(target) as out:
        done = out.write(shard.header)
        for piece in shard.pieces:
            for chunk in tensor_chunks(piece.tensor):
                done += out.write(chunk)
                if progress is not None:
                    progress(done, n_bytes)
            done += out.write(bytes(padded(done, shard.file.alignment) - done))
        if file_stamp(shard.file) != stamp:
            raise InvalidInput(f"{shard.file.path}: the file changed while it was read")
        if progress is not None:
            progress(done, n_bytes)


@contextlib.contextmanager
def _told(target: Path, more: str = "") -> Generator[None]:
    """Turn the system's refusals into ours."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{target}: {error.strerror or error}{more and f' ({more})'}") from error


@contextlib.contextmanager
def _locked(target: Path) -> Generator[None]:
    """Wait until no other process makes this shard.  The system unlocks when a process ends, however it ends."""
    with _told(target):
        lock = target.with_suffix(".lock").open("wb")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _seal_path(target: Path) -> Path:
    return target.with_suffix(".seal")


def _seal_text(target: Path) -> bytes:
    state = target.stat()
    return json.dumps([state.st_size, state.st_mtime_ns]).encode()


def _seal(target: Path) -> None:
    with replacing(_seal_path(target)) as out:
        out.write(_seal_text(target))


def _sealed(target: Path, shard: _Shard) -> bool:
    """Return whether the shard is there, whole, and as it was left."""
    try:
        with target.open("rb") as file:
            return (
                _seal_path(target).read_bytes() == _seal_text(target)
                and target.stat().st_size == shard.n_bytes
                and file.read(len(shard.header)) == shard.header
            )
    except OSError:
        return False


def _sweep(target: Path) -> None:
    """Remove what killed processes left; the lock is held, so nobody writes to it any more."""
    for left in target.parent.glob(f".{target.stem}*.part"):
        left.unlink(missing_ok=True)
