"""Every Python block of the documentation and the README runs, page by page, in a folder of its own.

The blocks of a page are one program: later ones use the names of earlier ones.  A block that cannot run has a comment
above it, ``<!-- not run: why -->``.
"""

from __future__ import annotations

import os
import re
import types
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

BLOCK = re.compile(
    r"^(?P<mark><!-- not run: (?P<why>[^\n]+?) -->\n\n?)?^```(?P<language>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@attrs.frozen
class Block:
    """One fenced block."""

    line: int
    language: str
    code: str
    excluded: bool


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(text.count("\n", 0, match.start("code")) + 1, match["language"], match["code"], match["mark"] is not None)
        for match in BLOCK.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # An engine takes all processors unless it is told otherwise; on tiny models its threads only wait for each other.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    program = types.ModuleType("__main__")
    ran = 0
    for block in blocks_of(page):
        if block.language == "python" and not block.excluded:
            # Empty lines before it, so that a traceback shows the page's own lines.
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec", dont_inherit=True), vars(program))
            ran += 1
    assert ran


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_are_of_a_known_kind(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    kinds = {block.language for block in blocks_of(page)}
    assert len(re.findall(r"(?m)^```", text)) == 2 * len(blocks_of(page)), "a fence is not closed"
    known = {"python", "sh", "console", "text", "json", "ini", "dockerfile", "wire client", "wire server", ""}
    assert {kind for kind in kinds if not kind.startswith("{")} <= known
    assert text.count("<!-- not run:") == sum(block.excluded for block in blocks_of(page))
