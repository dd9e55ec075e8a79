"""The project keeps to its own lay-out: what lies where, who may import whom, what is pinned, what a wheel holds."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hotkv_trio.llama._cache import user_cache_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hotkv_trio"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

FOLDERS = {"src", "tests", "native", "evidence", "docs", ".ci"}
SMALL_FILES = {
    ".editorconfig",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
}

STATE = {"_directory", "_engine", "_errors", "_inputs", "_keys", "_plan", "_recipe", "_slots"}
"""Pure state and values: every transition is a plain function call."""

NATIVE = ("llama_cpp", "gguf")
OURS_OUTSIDE_CORE = tuple(f"hotkv_trio.{room}" for room in ("llama", "serve", "route", "ray", "testing", "_cli"))
FORBIDDEN = {
    "state": ("trio", *NATIVE, *OURS_OUTSIDE_CORE),
    "core": (*NATIVE, *OURS_OUTSIDE_CORE),
    "llama": tuple(
        f"hotkv_trio.{room}" for room in ("serve", "route", "ray", "testing", "_cli", "_runtime", "_session")
    ),
    "serve": (*NATIVE, "hotkv_trio.ray", "hotkv_trio.testing", "hotkv_trio._cli"),
    "route": (*NATIVE, "hotkv_trio.ray", "hotkv_trio.testing", "hotkv_trio._cli"),
    "ray": (*NATIVE, "hotkv_trio.testing", "hotkv_trio._cli"),
    "testing": (*NATIVE, "hotkv_trio._cli"),
    "_cli": NATIVE,
    "__main__": NATIVE,
    "_pytest_plugin": (*NATIVE, "hotkv_trio._cli"),
}


def room_of(path: Path) -> str:
    """Return the room that a module belongs to."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if first in STATE:
        return "state"
    return first if first in FORBIDDEN else "core"


def imports_of(path: Path) -> Iterator[str]:
    """Yield the full name of everything that a module imports, anywhere in it, also for type checking only."""
    package = ["hotkv_trio", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_top_level_holds_what_it_should() -> None:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        tracked = {path.name for path in ROOT.iterdir()} & (FOLDERS | SMALL_FILES)
    else:
        listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        tracked = {name.split("/")[0] for name in listed.split("\0") if name}
    assert tracked - FOLDERS - SMALL_FILES == set()
    assert {"src", "tests", "native", "docs"} | SMALL_FILES <= tracked


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_what_its_room_may(path: Path) -> None:
    forbidden = FORBIDDEN[room_of(path)]
    found = {name for name in imports_of(path) if any(name == f or name.startswith(f"{f}.") for f in forbidden)}
    assert found == set()


@pytest.mark.parametrize("name", sorted(STATE))
def test_state_imports_state_only(name: str) -> None:
    ours = {i.split(".")[1] for i in imports_of(PACKAGE / f"{name}.py") if i.startswith("hotkv_trio.")}
    assert ours <= STATE


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_importing_the_package_is_light() -> None:
    code = "import json, sys; import hotkv_trio; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    loaded = set(json.loads(done.stdout))
    assert "hotkv_trio" in loaded
    heavy = {"llama_cpp", "gguf", "hypothesis", "pytest", "cyclopts", "rich", "matplotlib", "ray", *OURS_OUTSIDE_CORE}
    assert loaded & heavy == set()


def constraints() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def test_constraints_are_plain_pins_in_order() -> None:
    lines = constraints()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []
    names = [canonicalize_name(line.split("==")[0]) for line in lines]
    assert names == sorted(set(names))


def test_everything_required_is_pinned_within_its_requirement() -> None:
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in constraints())}
    extras = PROJECT["optional-dependencies"]
    listed = [*PROJECT["dependencies"], *(requirement for extra in extras.values() for requirement in extra)]
    for requirement in map(Requirement, listed):
        assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_continuous_integration_runs_what_the_readme_names() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make demo", "make test"):
        assert command in readme
        assert re.search(rf"(?m)^{command.split()[1]}:", makefile)
    assert re.search(r"(?m)^make test$", script)


@pytest.mark.slow  # builds a wheel
def test_wheel_holds_the_package_and_the_native_library(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT],
        check=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("hotkv_trio-*.whl")
    assert "-py3-none-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in MODULES}
    assert sources <= names
    assert "hotkv_trio/py.typed" in names
    assert any(name.startswith("hotkv_trio/llama/_native/libhotkv_tap.") for name in names)
    assert {name.split("/")[0] for name in names} == {"hotkv_trio", f"hotkv_trio-{PROJECT['version']}.dist-info"}


def test_the_users_cache_is_left_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    assert user_cache_dir().is_relative_to(tmp_path_factory.getbasetemp())
