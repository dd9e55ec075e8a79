"""The commands of the records: what they refuse, and what they leave behind when they fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from evidence import record
from evidence.mutants.faults import FAULTS

ROOT = Path(__file__).parents[1]
README = "- made once\n\n| 1 | one | shown |\n\n### 1. one\n\nold\n\n## Limits\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a record of criterion 1; criterion 2 is new."""
    listed = "".join(f'[[criterion]]\nid = "{n}"\ntitle = "one"\ncommands = ["true"]\n' for n in (1, 2))
    (tmp_path / "criteria.toml").write_text(listed, encoding="utf-8")
    (tmp_path / "README.md").write_text(README, encoding="utf-8")
    monkeypatch.setattr(record, "stamp", lambda: "- made again")
    monkeypatch.setattr(record, "_commit", lambda: "now")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr("sys.argv", ["record.py", *map(str, arguments)])
    return int(record.main())


def test_a_section_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, folder, "--only", "1") == 0
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert text.startswith("- made again\n\n| 1 | one | shown |\n\n### 1. one\n")
    assert "Exit status 0" in text
    assert "old" not in text
    assert text.endswith("## Limits\n")


@pytest.mark.parametrize("ids", [["3"], ["1", "3"], ["2"], []])
def test_a_record_is_not_stamped_for_what_it_does_not_hold(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ids: list[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, folder, "--only", *ids)
    assert stopped.value.code
    assert (folder / "README.md").read_text(encoding="utf-8") == README


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_has_its_place_in_the_source(fault: Any) -> None:
    source = ROOT / "src" / "hotkv_trio" / fault.file
    assert source.read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old


def test_no_fault_of_that_name_is_no_success() -> None:
    command = [sys.executable, str(ROOT / "evidence" / "mutants" / "run.py"), "no such fault"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no fault has a name that contains 'no such fault'" in done.stderr


async def test_a_server_that_does_not_start_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evidence.route import _servers

    async def fail(process: trio.Process, what: str) -> None:
        assert process.returncode is None, what
        await trio.lowlevel.checkpoint()
        raise trio.TooSlowError

    monkeypatch.setattr(_servers, "said_something", fail)
    shard = _servers.Shard(tmp_path / "absent.gguf", "0:4", [])
    with pytest.raises(trio.TooSlowError):
        await shard.start()
    assert shard.process.returncode == -9
