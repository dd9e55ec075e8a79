"""Asks a child process rows, and returns its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.hostile._rows import Row

ROOT = Path(__file__).parents[2]


@attrs.frozen
class Answer:
    row: str
    error: str
    says: str
    unmoved: bool
    """Whether the neighbour's next rows are, bit for bit, what they were before the first row."""


@attrs.frozen
class Asked:
    answers: list[Answer]
    status: int
    """The child's exit status; negative: the signal that ended it."""


def environment() -> dict[str, str]:
    """What a child needs: this package and these tests, and native aborts that end at once."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path.rstrip(os.pathsep), "GGML_NO_BACKTRACE": "1"}


def ask(folder: Path, rows: Iterable[Row], *, ungated: bool = False) -> Asked:
    """Ask one child all of these rows."""
    command = [sys.executable, "-m", "tests.hostile._child", str(folder), *(["--ungated"] if ungated else [])]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        input="".join(f"{row.name}\n" for row in rows),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if ungated else None,
        text=True,
        timeout=100,
        check=False,
    )
    return Asked([Answer(**json.loads(line)) for line in done.stdout.splitlines()], done.returncode)
