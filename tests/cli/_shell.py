"""A command called as from a shell, and files that no command can use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import attrs

from hotkv_trio._cli import main
from hotkv_trio.llama._slice import slice_gguf
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NOT_DONE = 2
"""Exit status of a command that could not do its work."""

UNUSABLE = ("absent", "foreign", "cut header", "cut weights")


def unusable(folder: Path, kind: str) -> Path:
    """Return a file that is no whole model, in one of the ways of ``UNUSABLE``."""
    path = folder / "bad[1].gguf"
    whole = build_tiny_gguf(folder / "whole.gguf").read_bytes()
    if kind == "foreign":
        path.write_bytes(b"%PDF-1.7 and so on")
    elif kind == "cut header":
        path.write_bytes(whole[:100])
    elif kind == "cut weights":
        path.write_bytes(whole[:-1000])
    else:
        assert kind == "absent"
    return path


def tiny_shard(folder: Path) -> Path:
    """Return a shard file: a model that cannot be cut again."""
    return slice_gguf(build_tiny_gguf(folder / "of.gguf"), (1, 3), folder / "shard.gguf")


@attrs.frozen
class Called:
    """What a command did."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Stdout as the one JSON document that it should be."""
        return json.loads(self.out)

    def fact(self, name: str) -> str:
        """Return what stdout says of a name, by its line."""
        lines = [line.strip() for line in self.out.splitlines()]
        (said,) = [line.removeprefix(name).strip() for line in lines if line.startswith(name)]
        return said

    def is_refusal(self, what: str, advice: str) -> bool:
        """Whether it said what was wrong and what to do next, on stderr alone, without a traceback."""
        first, _, rest = self.err.partition("\n")
        return (
            self.status == NOT_DONE
            and not self.out
            and first.startswith("hotkv-trio: ")
            and what in first
            and rest.startswith("Next: try ")
            and advice in rest
            and "Traceback" not in self.err
        )


class Shell:
    """Calls commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object) -> Called:
        """Call ``hotkv-trio`` with arguments."""
        self._capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Called(status, *self._capsys.readouterr())
