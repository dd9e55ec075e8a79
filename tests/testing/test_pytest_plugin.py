"""The pytest plugin does nothing unless asked; then its fixtures work."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PLUGINS = ("-p", "pytest_trio.plugin", "-p", "hotkv_trio._pytest_plugin", "-p", "no:cacheprovider")

TESTS = """
import pytest
from hotkv_trio import SessionKey
from hotkv_trio.testing import FakeEngine

@pytest.mark.trio
async def test_runtime(hotkv_engine, hotkv_runtime):
    async with hotkv_runtime.open_session(SessionKey("a", 0)) as session:
        result = await session.prefill([1, 2, 3])
    assert isinstance(hotkv_engine, FakeEngine)
    assert (result.output == hotkv_engine.rows([1, 2, 3])[-1:]).all()

def test_tiny_gguf(tiny_gguf):
    path = tiny_gguf("mamba", n_layer=1)
    assert path.read_bytes()[:4] == b"GGUF"
    assert tiny_gguf("mamba", n_layer=1) is path
    assert tiny_gguf("mamba", n_layer=2) != path
"""


@pytest.fixture
def inner(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    # As if installed by entry point, wherever these tests run from.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(TESTS)
    return pytester


def test_the_fixtures_work_when_asked_for(inner: pytest.Pytester) -> None:
    inner.makeini("[pytest]\nhotkv_trio = true\n")
    inner.runpytest_subprocess(*PLUGINS).assert_outcomes(passed=2)


def test_nothing_is_offered_unless_asked_for(inner: pytest.Pytester) -> None:
    result = inner.runpytest_subprocess(*PLUGINS)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(["*fixture 'tiny_gguf' not found*"])


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"hotkv_trio": "hotkv_trio._pytest_plugin"}
