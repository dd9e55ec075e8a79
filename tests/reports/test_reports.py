"""Every public report of a fault of this kind has tests that cite it, on every engine that it can be made on."""

from __future__ import annotations

import pytest

from tests.reports._reports import NOT_ON, REPORTS, citations

CITATIONS = citations()


@pytest.mark.parametrize("kind", REPORTS)
def test_a_test_cites_every_report_of_a_kind(kind: str) -> None:
    missing = [name for name in REPORTS[kind] if not any(citation.cites(name) for citation in CITATIONS)]
    assert missing == []


@pytest.mark.parametrize("kind", REPORTS)
def test_a_kind_is_tried_on_every_engine_that_it_can_be_made_on(kind: str) -> None:
    tried = {engine for citation in CITATIONS if any(map(citation.cites, REPORTS[kind])) for engine in citation.engines}
    assert tried == {"fake", "llama"} - {NOT_ON.get(kind, ("", ""))[0]}


def test_reports_are_named_once() -> None:
    names = [name for kind in REPORTS.values() for name in kind]
    assert len(names) == len(set(names)) >= 60
    assert set(NOT_ON) <= set(REPORTS)
