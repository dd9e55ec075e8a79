"""What the pages say of errors, names, options and files is what the code says."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

import hotkv_trio
import hotkv_trio.serve
from hotkv_trio import HotKVError, MissReason, RuntimeStatistics
from hotkv_trio.llama._architectures import ARCHITECTURES

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def public(module: ModuleType) -> dict[str, Any]:
    """Return what a room offers: the names that it imports as themselves."""
    source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
    return {name: getattr(module, name) for name in re.findall(r"(?m)^from \S+ import (\w+) as \1$", source)}


def rows(page: str) -> list[list[str]]:
    """Return the cells of all tables of a page."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def errors(module: ModuleType) -> list[type[HotKVError]]:
    found = [thing for thing in public(module).values() if inspect.isclass(thing) and issubclass(thing, HotKVError)]
    return [error for error in found if error is not HotKVError]


@pytest.mark.parametrize("error", [*errors(hotkv_trio), *errors(hotkv_trio.serve)], ids=lambda error: error.__name__)
def test_error_table_has_code_and_fields(error: type[HotKVError]) -> None:
    (row,) = [row for row in rows("errors.md") if row[0].startswith(f"`{error.__name__}` ")]
    assert row[0] == f"`{error.__name__}` `{error.code}`"
    assert re.findall(r"\w+", row[1]) == [field.name for field in attrs.fields(error)]
    assert all(row[2:])


def test_every_reason_of_a_miss_is_told() -> None:
    told = [row[0] for row in rows("errors.md")]
    assert [reason for reason in MissReason if f"`{reason.value}`" not in told] == []


def test_figures_to_watch_are_those_of_the_runtime() -> None:
    table = [row[0] for row in rows("operations.md") if row[0].startswith("`")]
    figures = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    of_the_runtime = figures & {field.name for field in attrs.fields(RuntimeStatistics)}
    assert of_the_runtime > {"waiting", "evicted", "quarantined_slots"}
    assert figures - of_the_runtime == {"EngineFailed", "native_code"}


def test_architectures_are_those_that_can_be_cut() -> None:
    (told,) = re.findall(r"(?s)as GGUF names them: (.*?)\.\n", (DOCS / "design.md").read_text(encoding="utf-8"))
    assert re.findall(r"`(\S+?)`", told) == sorted(ARCHITECTURES)
    assert f"[{len(ARCHITECTURES)} architectures]" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_reference_of_the_core_has_every_public_name() -> None:
    page = (DOCS / "api" / "core.md").read_text(encoding="utf-8")
    documented = re.findall(r"(?m)^\.\. auto(?:class|function|exception):: (\w+)", page)
    assert sorted(documented) == sorted(public(hotkv_trio))


@pytest.mark.parametrize(
    "room", [p.parent.name for p in sorted(Path(hotkv_trio.__file__).parent.glob("[a-z]*/__init__.py"))]
)
def test_reference_has_every_room(room: str) -> None:
    page = (DOCS / "api" / f"{room}.md").read_text(encoding="utf-8")
    assert f".. automodule:: hotkv_trio.{room}\n   :imported-members:" in page
    assert public(importlib.import_module(f"hotkv_trio.{room}"))


def test_picture_is_what_its_script_draws() -> None:
    script = DOCS / "draw_life_of_a_session.py"
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.draw()


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "native" / "README.md"], ids=lambda page: page.parent.name)
def test_links_to_files_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
