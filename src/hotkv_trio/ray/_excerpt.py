"""An excerpt: a copy of a model file that has the bytes of one range of layers, and holes where the others are.

To an engine of that range it is the whole model: the header is the same, the model digest is kept beside it, and
nothing reads the holes.  It takes the space and the traffic of the range alone, and comes piece by piece, so that
neither side ever has it in memory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._cache import user_cache_dir
from hotkv_trio.llama._digest import _keep, _places, file_digest, file_stamp, model_digest
from hotkv_trio.llama._facts import EMBEDDING
from hotkv_trio.llama._gguf import read_gguf
from hotkv_trio.llama._slice import _plan as plan_slice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIECE: Final = 16 * 2**20
"""Bytes that travel at a time."""

Layers = tuple[int, int]


@attrs.frozen
class Piece:
    """Bytes of one part of a model file."""

    part: str
    """Its name."""
    offset: int
    length: int


@attrs.frozen
class Outline:
    """What an excerpt is made of."""

    digest: str
    """Of the whole model."""
    layers: Layers
    parts: tuple[tuple[str, int], ...]
    """Of each part of the file, the first of which is to be opened: its name, and its bytes."""
    pieces: tuple[Piece, ...]


def outline(path: str | os.PathLike[str], layers: Layers, n_layer: int) -> Outline:
    """Return what an excerpt of a range of layers is made of.

    Raises:
        InvalidInput: the file is missing, foreign or damaged, or may not be cut so.
    """
    file = read_gguf(path)
    sizes = {part: part.stat().st_size for part in file.parts}
    runs: list[Piece]
    if layers == (0, n_layer):
        runs = [Piece(part.name, 0, size) for part, size in sizes.items()]
    else:
        # A part that no tensor begins in is all header.
        ends = sizes.copy()
        for tensor in file.tensors.values():
            ends[tensor.path] = min(ends[tensor.path], tensor.offset)
        wanted = {piece.tensor.name for piece in plan_slice(file, layers).pieces}
        if layers[0] == 0:
            wanted.add(EMBEDDING)
        tensors = [file.tensors[name] for name in wanted]
        runs = [Piece(part.name, 0, end) for part, end in ends.items()]
        runs += [Piece(tensor.path.name, tensor.offset, tensor.n_bytes) for tensor in tensors]
    return Outline(
        digest=file_digest(file),
        layers=layers,
        parts=tuple((part.name, size) for part, size in sizes.items()),
        pieces=tuple(piece for run in runs for piece in _split(run)),
    )


def _split(run: Piece) -> Iterator[Piece]:
    for begin in range(0, run.length, PIECE):
        yield Piece(run.part, run.offset + begin, min(PIECE, run.length - begin))


def read_piece(path: str | os.PathLike[str], piece: Piece) -> bytes:
    """Return a piece's bytes.

    Raises:
        InvalidInput: the file is not what it was.
    """
    with Path(path).with_name(piece.part).open("rb") as file:
        file.seek(piece.offset)
        read = file.read(piece.length)
    if len(read) != piece.length:
        raise InvalidInput(f"{path}: the file changed while it was read")
    return read


def provide_model(
    path: Path,
    digest: str,
    layers: Layers,
    *,
    get_outline: Callable[[], Outline],
    get_piece: Callable[[Piece], bytes],
) -> Path:
    """Return a file that an engine of a range of layers can open: the model if it is here, else an excerpt.

    Blocking.  An excerpt is kept in the user's cache directory, and made once for all processes that want it.

    Args:
        path: where the model may be.
        digest: of the model.
        layers: the range.
        get_outline: gets the outline of the excerpt.
        get_piece: gets a piece of it.

    Raises:
        InvalidInput: what came is another model's.
        OSError: it cannot be written.
    """
    if _is_model(path, digest):
        return path
    folder = user_cache_dir() / "excerpts" / f"{digest}-{layers[0]}-{layers[1]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("wb") as lock:
        # The system unlocks when a process ends, however it ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (kept := _kept(folder, digest)) is not None:
            return kept
        what = get_outline()
        if (what.digest, what.layers) != (digest, layers):
            raise InvalidInput(f"the excerpt is of the model {what.digest}, not of {digest}")
        return _write(folder, what, get_piece)


def _kept(folder: Path, digest: str) -> Path | None:
    """Return the excerpt's file to open; None: there is none, or somebody has touched what was kept."""
    if not folder.exists():
        return None
    files = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return next((file for file in files if _is_model(file, digest)), None)


def _is_model(path: Path, digest: str) -> bool:
    try:
        return path.is_file() and model_digest(path) == digest
    except InvalidInput:
        return False


def _write(folder: Path, what: Outline, get_piece: Callable[[Piece], bytes]) -> Path:
    """Write an excerpt under another name, and rename it when it is whole; return the file to open."""
    unfinished = folder.with_suffix(".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for name, size in what.parts:
        with (unfinished / Path(name).name).open("wb") as out:
            out.truncate(size)
            for piece in what.pieces:
                if piece.part == name:
                    out.seek(piece.offset)
                    out.write(get_piece(piece))
            out.flush()
            os.fsync(out.fileno())
    first = Path(what.parts[0][0]).name
    file = read_gguf(unfinished / first)
    # By its bytes it would be another model, which it is to nobody but an engine of another range.
    _keep(_places(file)[0], file_stamp(file), what.digest)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return folder / first
