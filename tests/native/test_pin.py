"""The installed llama.cpp is the one that ``native/pin.toml`` names."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pin() -> dict[str, Any]:
    return tomllib.loads((ROOT / "native" / "pin.toml").read_text(encoding="utf-8"))


def test_installed_version(pin: dict[str, Any]) -> None:
    assert importlib.metadata.version("llama-cpp-python") == pin["llama_cpp_python"]


def test_installed_library_was_built_from_the_pinned_commit(pin: dict[str, Any]) -> None:
    commit = lib._lib.ggml_commit
    commit.restype = ctypes.c_char_p
    said = commit().decode().removesuffix("-dirty")
    assert len(said) >= 7
    assert pin["llama_cpp_commit"].startswith(said)


def test_constraints_and_requirement_agree(pin: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"llama-cpp-python=={pin['llama_cpp_python']}" in lines
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirement = next(r for r in map(Requirement, project["dependencies"]) if r.name == "llama-cpp-python")
    assert pin["llama_cpp_python"] in requirement.specifier


def test_readme_says_the_same(pin: dict[str, Any]) -> None:
    readme = (ROOT / "native" / "README.md").read_text(encoding="utf-8")
    for key in ("llama_cpp_python", "llama_cpp_commit", "sdist", "sdist_sha256"):
        assert str(pin[key]) in readme
    assert pin["patches"] == []
    assert "patch stack is empty" in readme


def test_header_and_loader_agree() -> None:
    from hotkv_trio.llama import _tap

    header = (ROOT / "native" / "include" / "hotkv_tap.h").read_text(encoding="utf-8")
    defined = {name: int(value) for name, value in re.findall(r"#define HOTKV_TAP_(\w+) (\d+)", header)}
    assert (defined["ABI"], defined["MAX_NAME"]) == (_tap.ABI, _tap.MAX_NAME)
    codes = {name: int(value) for name, value in re.findall(r"HOTKV_TAP_(\w+) = (\d+)", header)}
    assert codes == {"OK": _tap._OK, "TOO_SMALL": _tap._TOO_SMALL, "NOT_ROWS": _tap._NOT_ROWS}
