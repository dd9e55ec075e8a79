"""Each value that ends llama.cpp's process, or that it takes and gets wrong, asked of a process that stays alive."""

from __future__ import annotations

import inspect
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import hotkv_trio.llama
from hotkv_trio.llama import _ffi
from tests.hostile._ask import Asked, ask
from tests.hostile._rows import NEVER, ROWS, Row

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return ask(tmp_path_factory.mktemp("hostile"), ROWS)


def test_one_child_has_answered_every_row_and_ended_by_itself(asked: Asked) -> None:
    """llama.cpp #24098, #16432, llama-cpp-python #2045, #2051: sizes and ids out of range abort."""
    assert [answer.row for answer in asked.answers] == [row.name for row in ROWS]
    assert asked.status == 0


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[row.name for row in ROWS])
def test_row(asked: Asked, number: int) -> None:
    row, answer = ROWS[number], asked.answers[number]
    assert (answer.row, answer.error) == (row.name, row.error), answer.says
    assert answer.unmoved, "the neighbour's bits"


@pytest.mark.parametrize("row", [row for row in ROWS if row.ungated], ids=lambda row: row.name)
def test_without_the_gate_the_child_dies(tmp_path: Path, row: Row) -> None:
    """The control: it is the gate that keeps the others alive."""
    asked = ask(tmp_path, [row], ungated=True)
    assert asked.answers == []
    assert asked.status in {-signal.SIGABRT, -signal.SIGSEGV}


def _code() -> Iterator[str]:
    for path in Path(hotkv_trio.llama.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        yield re.sub(r'""".*?"""', "", text, flags=re.DOTALL)


@pytest.mark.parametrize("kind", NEVER)
def test_what_is_never_said(kind: str) -> None:
    code = "\n".join(_code())
    assert "llama_memory_seq_rm" in code, "names of native functions can be found"
    assert [name for name in NEVER[kind] if name in code] == []


def test_streams_are_copied_whole() -> None:
    """A part of one, from one stream to another, ends the process."""
    assert set(inspect.signature(_ffi.copy_stream).parameters) == {"kv", "source", "target"}
    assert "_sequence(target), -1, -1)" in inspect.getsource(_ffi.copy_stream)
