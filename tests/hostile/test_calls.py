"""Random hostile calls beside neighbours at work, in a process that has to stay alive.

Every call ends in success, in a typed error, or cancelled; the neighbours' bits are those of their runs alone; in the
end nothing is borrowed and no slot holds a token.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.hostile._ask import ROOT, environment

if TYPE_CHECKING:
    from pathlib import Path

SLOW = pytest.mark.slow


def attack(folder: Path, *, where: str, calls: int, seed: int = 0) -> dict[str, Any]:
    """Run one process of attacks; return its report."""
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error", "-X", "dev", "-m", "tests.hostile._calls", str(folder)),
            *("--where", where, "--calls", str(calls), "--seed", str(seed)),
        ],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=110 if calls < 5000 else 1800,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("where", ["sessions", "engine"])
@pytest.mark.parametrize("calls", [400, pytest.param(20_000, marks=SLOW)])
def test_no_call_harms_anything(tmp_path: Path, where: str, calls: int) -> None:
    """LMCache #4385, mlx-lm #965, llama.cpp #10072, vllm PR 50283: whatever one client does, the others' bits stay."""
    report = attack(tmp_path, where=where, calls=calls)
    assert report["unexpected"] == []
    assert report["neighbours_unmoved"]
    assert (report["borrowed_bytes"], report["tokens_left"], report["quarantined"]) == (0, 0, 0)
    assert report["calls"] == calls
    assert report["neighbour_operations"] >= calls / 4
    assert min(report["outcomes"][outcome] for outcome in ("success", "InvalidInput")) > calls / 50
