"""Every public report of a fault of this kind has a test that cites it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.reports._reports import REPORTS

TESTS = Path(__file__).parents[1]


def cited() -> str:
    """Return the docstrings of all tests, and of their modules, with names that share a project spelt out."""
    found = []
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(tree := ast.parse(path.read_text(encoding="utf-8"))):
            if node is tree or (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_"):
                found.append(ast.get_docstring(node) or "")
    text = re.sub(r"\s+", " ", "\n".join(found)).lower()
    # "petals #396, #487" names two of petals.
    while (spelt := re.sub(r"([\w.-]+)( #\d+,? (?:and )?)(#\d+)", r"\1\2\1 \3", text)) != text:
        text = spelt
    return text


CITED = cited()


@pytest.mark.parametrize("kind", REPORTS)
def test_a_test_cites_every_report_of_a_kind(kind: str) -> None:
    missing = [name for name in REPORTS[kind] if not re.search(rf"{re.escape(name.lower())}(?!\d)", CITED)]
    assert missing == []


def test_reports_are_named_once() -> None:
    names = [name for kind in REPORTS.values() for name in kind]
    assert len(names) == len(set(names)) >= 60
