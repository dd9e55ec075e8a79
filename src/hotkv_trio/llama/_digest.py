"""The model digest: what makes two files the same model, whatever else their metadata says.

It covers each tensor's name, type, shape and bytes, in the order of the names, so a split file and a whole one of the
same model agree.  Reading a large file takes a second a gigabyte, so the digest is kept beside the file, and holds as
long as the size and the modification time of each part do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._cache import replacing, user_cache_dir
from hotkv_trio.llama._gguf import read_gguf, tensor_chunks

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from hotkv_trio.llama._gguf import GgufFile

Progress: TypeAlias = "Callable[[int, int], None]"
"""Called with the bytes done and the bytes in all, now and then and at the end."""

DIGEST_SIZE: Final = 32
_ENTRY_VERSION: Final = 1


def model_digest(path: str | os.PathLike[str], progress: Progress | None = None) -> str:
    """Return the digest of a model's tensors, hexadecimal, from the cache or by reading all of them.

    Args:
        path: the GGUF file, or a part of a split one.
        progress: called while the file is read; not when the digest was cached.

    Raises:
        InvalidInput: the file is missing, foreign, truncated or damaged, or changed while it was read.
    """
    return file_digest(read_gguf(path), progress)


def file_digest(file: GgufFile, progress: Progress | None = None) -> str:
    """Return the digest of a file whose header was read, as `model_digest` does.

    Raises:
        InvalidInput: as `model_digest`.
    """
    stamp = file_stamp(file)
    places = _places(file)
    for place in places:
        if (digest := _cached(place, stamp)) is not None:
            return digest
    digest = _compute(file, progress)
    if file_stamp(file) != stamp:
        raise InvalidInput(f"{file.path}: the file changed while it was read")
    for place in places:
        with contextlib.suppress(OSError):
            _keep(place, stamp, digest)
            break
    return digest


def _compute(file: GgufFile, progress: Progress | None) -> str:
    hasher = hashlib.blake2b(digest_size=DIGEST_SIZE)
    total, done = file.n_bytes, 0
    for name in sorted(file.tensors):
        tensor = file.tensors[name]
        described = json.dumps([name, tensor.type.name, tensor.shape]).encode()
        hasher.update(struct.pack("<QQ", len(described), tensor.n_bytes) + described)
        for chunk in tensor_chunks(tensor):
            hasher.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    return hasher.hexdigest()


def file_stamp(file: GgufFile) -> list[list[Any]]:
    """Return what must not change for a file to be the same: name, size and modification time of each part.

    Raises:
        InvalidInput: a part is gone.
    """
    try:
        states = [(part.name, part.stat()) for part in file.parts]
    except OSError as error:
        raise InvalidInput(f"{file.path}: {error.strerror or error}") from error
    return [[name, state.st_size, state.st_mtime_ns] for name, state in states]


def _places(file: GgufFile) -> tuple[Path, Path]:
    """Return where the digest may be kept, the better place first."""
    first = file.parts[0].absolute()
    elsewhere = hashlib.blake2b(str(first).encode(errors="surrogateescape"), digest_size=16).hexdigest()
    beside = first.with_name(f".{first.name}.hotkv-digest")
    return beside, user_cache_dir() / "digests" / f"{elsewhere}.hotkv-digest"


def _keep(place: Path, stamp: list[list[Any]], digest: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    entry = [_ENTRY_VERSION, stamp, digest]
    with replacing(place) as file:
        file.write(json.dumps([*entry, _checksum(entry)]).encode())


def _cached(place: Path, stamp: list[list[Any]]) -> str | None:
    """Return the digest kept for this stamp; None where there is none, or what is there is damaged."""
    try:
        version, kept, digest, checksum = json.loads(place.read_bytes())
    except (OSError, ValueError, TypeError):
        return None
    entry = [version, kept, digest]
    if checksum != _checksum(entry) or version != _ENTRY_VERSION or kept != stamp:
        return None
    return str(digest)


def _checksum(entry: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(entry).encode(), digest_size=8).hexdigest()
