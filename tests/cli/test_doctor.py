"""``hotkv-trio doctor``."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest

from hotkv_trio import Runtime
from hotkv_trio.llama import _ffi, _installation, _tap
from hotkv_trio.llama._architectures import ARCHITECTURES
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.cli._shell import UNUSABLE, unusable

if TYPE_CHECKING:
    from hotkv_trio import IsolationReport
    from tests.cli._shell import Shell

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models gain nothing by more, and lose much where the machine is busy."""
    monkeypatch.setattr("hotkv_trio.llama._engine._processors", lambda: 1)


def test_the_pin_is_the_one_of_the_native_part() -> None:
    pin = tomllib.loads((ROOT / "native" / "pin.toml").read_text(encoding="utf-8"))
    assert pin["llama_cpp_python"] == _installation.PINNED_VERSION
    assert pin["llama_cpp_commit"] == _ffi.PINNED_COMMIT


def test_says_what_is_installed(shell: Shell) -> None:
    called = shell("doctor")
    assert called.status == 0, called.out
    assert called.fact("trio") == importlib.metadata.version("trio")
    assert called.fact("llama-cpp-python").endswith("the same: yes")
    assert called.fact("llama.cpp").startswith(f"{_ffi.commit()}; pinned: {_ffi.PINNED_COMMIT[:9]}")
    assert called.fact("threads").split()[0].isdigit()
    assert called.fact("used of it")
    assert called.fact("may be cut") == "models of " + ", ".join(sorted(ARCHITECTURES))
    assert called.out.splitlines()[-1].startswith("verdict ")
    assert called.fact("verdict").startswith("as it was proven: the pinned llama.cpp;")


def test_says_which_tap_runs_and_where_it_lies(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_tap, "_native_library", lambda: None)
    monkeypatch.setattr(_tap, "native_path", lambda: tmp_path / "libhotkv_tap.so")
    assert shell("doctor").fact("tap") == f"native: {tmp_path / 'libhotkv_tap.so'}"


def test_says_why_the_native_tap_does_not_run(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise OSError("the native tap was not built")

    monkeypatch.setattr(_tap, "_native_library", missing)
    called = shell("doctor")
    assert called.status == 0
    assert called.fact("tap") == "python: the native tap was not built"


@pytest.mark.parametrize("other", ["version", "commit"])
def test_another_llama_cpp_than_the_pinned_one_is_said(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    if other == "version":
        monkeypatch.setattr(_installation, "PINNED_VERSION", "0.3.99")
    else:
        monkeypatch.setattr(_ffi, "commit", lambda: "deadbee")
    called = shell("doctor")
    assert called.status == 1
    assert f"Next: pip install llama-cpp-python=={_installation.PINNED_VERSION}" in called.out
    assert called.out.count("the same: NO") == 1
    assert called.fact("verdict") == "NOT as it was proven: another llama.cpp than the pinned one"
    assert shell("doctor", "--json").document["as_proven"] is False


def test_opens_a_model(shell: Shell, tmp_path: Path) -> None:
    called = shell("doctor", "--model", build_tiny_gguf(tmp_path / "m.gguf", "gemma3"))
    assert called.status == 0, called.err
    assert called.fact("architecture") == "gemma3"
    assert called.fact("memory") == "sliding"
    assert called.fact("a session's KV").startswith("1,048,576 B (1.0 MiB) for 1,024 tokens")
    assert called.fact("layout streams").startswith("the default")
    assert called.fact("isolated") == "yes, on 4 slots, with 517 tokens in a session, f16 KV"
    assert called.fact("own calls").endswith("exact mode is exact")
    assert called.fact("poison").startswith("values that are not finite, or huge, harm neither")
    assert called.fact("layout unified").startswith("refused: m.gguf has a sliding window")
    assert called.fact("layout unified").endswith("layout='streams' serves it")
    assert [line.partition(":")[0] for line in called.err.splitlines()] == [
        "opening the model",
        "layout streams",
        "layout unified",
    ]
    assert called.out.splitlines()[-1].startswith("verdict ")
    assert called.fact("verdict").startswith("as it was proven: the pinned llama.cpp, and sessions")


def test_says_for_both_layouts_what_holds(shell: Shell, tmp_path: Path) -> None:
    called = shell("doctor", "--model", build_tiny_gguf(tmp_path / "m.gguf", n_layer=1))
    assert called.status == 0, called.err
    assert called.fact("isolated").startswith("yes, on 4 slots")
    assert called.fact("may be used") == "yes, on 2 slots, with 262 tokens in a session, f16 KV"
    assert "exact=True is refused" in called.fact("not promised")
    _, _, unified = called.out.partition("layout unified")
    assert "neighbours contents" in unified
    assert "own calls" not in unified
    assert "not tried" not in called.out


def test_a_model_that_is_not_isolated_is_said(shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true = Runtime.verify_isolation

    async def broken(runtime: Runtime) -> IsolationReport:
        return attrs.evolve(await true(runtime), slot_reuse=False)

    monkeypatch.setattr(Runtime, "verify_isolation", broken)
    called = shell("doctor", "--model", build_tiny_gguf(tmp_path / "m.gguf", n_layer=1))
    assert called.status == 1
    assert called.fact("isolated").startswith("NO, on 4 slots")
    streams, _, unified = called.out.partition("layout unified")
    assert "is NOT as a fresh one" in streams
    assert "is NOT as a fresh one" not in unified
    assert "Next: pip install" not in called.out
    assert called.fact("verdict") == "NOT as it was proven: sessions of this model are not isolated here"


def test_json_is_one_document(shell: Shell, tmp_path: Path) -> None:
    document = shell("doctor", "--json").document
    assert set(document) == {*attrs.asdict(_installation.read_installation()), "as_proven", "may_be_cut"}
    with_model = shell("doctor", "--json", "--model", build_tiny_gguf(tmp_path / "m.gguf")).document
    assert with_model["model"]["recipe"]["architecture"] == "llama"
    assert with_model["isolation"]["isolated"] is True
    assert with_model["isolation_unified"]["layout"] == "unified"
    assert with_model["isolation_unified"]["own_calls"] is None
    sliding = shell("doctor", "--json", "--model", build_tiny_gguf(tmp_path / "s.gguf", "gemma3")).document
    assert "a sliding window" in sliding["isolation_unified"]["refused"]
    assert with_model["as_proven"] is True


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_model_that_is_no_whole_one_is_refused(shell: Shell, tmp_path: Path, kind: str) -> None:
    model = unusable(tmp_path, kind)
    assert shell("doctor", "--model", model).is_refusal(str(model), "a whole GGUF file")
