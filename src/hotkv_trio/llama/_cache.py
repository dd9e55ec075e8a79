"""Where derived files live, and how one is put in place: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator


def user_cache_dir() -> Path:
    """Return this user's directory for what can be made again; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hotkv-trio"


@contextlib.contextmanager
def replacing(target: Path) -> Generator[IO[bytes]]:
    """Write a file under a temporary name in the same folder; when the body ends well, sync it and rename it.

    Any end of the process leaves the old file or the new one, never a part; after an exception the temporary file is
    gone too.  One left by a killed process ends in ``.part``.

    Raises:
        OSError: the folder cannot be written to, or is full.
    """
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
