"""Commands run as from a shell with a terminal's usual width, and with a cache directory of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cli._shell import Shell

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Shell(capsys)
