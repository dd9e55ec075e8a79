"""``hotkv-trio demo`` on real models: sessions isolated bit for bit, their texts their own, all bytes given back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hotkv_trio._cli import main
from tests.real.conftest import GEMMA3, SMOLLM2

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.real_model


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
@pytest.mark.parametrize("n_sessions", [4, 16])
def test_all_sessions_are_as_alone(
    models: Path, capsys: pytest.CaptureFixture[str], name: str, n_sessions: int
) -> None:
    status = main(["demo", "--model", str(models / name), "--sessions", str(n_sessions), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert status == 0
    assert len(facts["sessions"]) == n_sessions
    assert all(session["equal_to_solo"] and session["unmoved"] for session in facts["sessions"])
    assert all(session["continuation"] for session in facts["sessions"])
    for mode in (facts["exact"], facts["grouped"]):
        assert mode["kv_bytes_after"] == mode["kv_bytes_before"] == 0 < mode["kv_bytes_peak"]
    assert all(facts["checks"].values())
