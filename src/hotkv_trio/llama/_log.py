"""llama.cpp's log, routed to ``logging.getLogger("hotkv_trio.llama")``.

llama.cpp logs through one callback for the whole process, from whichever thread it happens to run in.  A load's own
lines say things that no function does (the bytes of the KV buffers, whether KV is rotated), so that a thread can also
collect what it caused.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections import UserList
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

LOGGER: Final = logging.getLogger("hotkv_trio.llama")

# Who configures no logging gets none on stderr: what matters of a failure is in the error raised.
LOGGER.addHandler(logging.NullHandler())

_CONTINUED: Final = 5
_LEVELS: Final = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
"""ggml's levels; 5 continues the line before."""

_BUFFER: Final = re.compile(r"\b(KV|RS) buffer size = +([0-9.]+) MiB")
_FORESEEN: Final = re.compile(r"adding \d+ dummy tokens")
"""What llama.cpp warns of wherever a file has no vocabulary, as no shard's has."""


@final
class Lines(UserList[str]):
    """Lines of the log, in order."""

    first_error: str | None = None

    def take(self, line: str, level: int) -> None:
        """Add one."""
        if level >= logging.ERROR:
            self.first_error = self.first_error or line
        self.append(line)

    @property
    def why(self) -> str:
        """What went wrong, in llama.cpp's own words: its errors after the first only say that something did."""
        return self.first_error or "llama.cpp did not say why"


class _PerThread(threading.local):
    """One thread's unfinished line, and where it collects."""

    def __init__(self) -> None:
        self.level = logging.INFO
        self.text = ""
        self.collected: Lines | None = None


_thread = _PerThread()


def receive(level: int, text: bytes) -> None:
    """Take a piece of text from llama.cpp; log each line that it completes.

    Runs inside a native call, where nothing could catch an exception: it never raises.
    """
    with contextlib.suppress(BaseException):
        _receive(level, text.decode(errors="replace"))


def _receive(level: int, text: str) -> None:
    if level != _CONTINUED:
        if _thread.text:
            _finish(_thread.text)
        _thread.level, _thread.text = _LEVELS.get(level, logging.DEBUG), ""
    *lines, _thread.text = (_thread.text + text).split("\n")
    for line in lines:
        _finish(line)


def _finish(line: str) -> None:
    line = line.rstrip()
    if line.strip(" ."):
        if _thread.collected is not None:
            _thread.collected.take(line, _thread.level)
        LOGGER.log(logging.DEBUG if _FORESEEN.search(line) else _thread.level, "%s", line)


@contextlib.contextmanager
def collected_lines() -> Generator[Lines]:
    """Collect the lines that llama.cpp logs in this thread while the block runs."""
    before = _thread.collected
    lines = Lines()
    _thread.collected = lines
    try:
        yield lines
    finally:
        _thread.collected = before


def buffer_sizes(lines: Sequence[str], kind: str) -> list[float]:
    """Return the sizes (MiB, rounded to 2 decimals) of the buffers of a kind, ``KV`` or ``RS``, in a load's lines."""
    return [float(found[2]) for line in lines if (found := _BUFFER.search(line)) and found[1] == kind]


def value(lines: Sequence[str], name: str) -> str | None:
    """Return what the last line ``name = value`` says; None: no line does."""
    pattern = re.compile(rf"\b{re.escape(name)} += (\w+)")
    return next((found[1] for line in reversed(lines) if (found := pattern.search(line))), None)
