"""``hotkv-trio serve``: what it refuses, and that what it advises fits.  See tests/serve/test_processes.py too."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hotkv_trio._cli import _serve
from hotkv_trio.testing import build_tiny_gguf
from tests.cli._shell import tiny_shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cli._shell import Called, Shell


@pytest.fixture
def serve(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Called]:
    """Serve a file in a folder of the test's own, without a log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_serve, "_log", lambda form: None)
    build_tiny_gguf("m.gguf")

    def call(*arguments: object, where: str = "unix:s") -> Called:
        small = ("--context", "256", "--sessions", "1", "--threads", "1")
        return shell("serve", *arguments, "--listen", where, *small)

    return call


def test_a_port_in_use_is_named(serve: Callable[..., Called]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert serve("m.gguf", where=where).is_refusal(f"Address already in use: '{where}'", "another port")
        metrics = serve("m.gguf", "--metrics", where)
        assert metrics.is_refusal(f"Address already in use: '{where}'", "another --metrics")


@pytest.mark.parametrize("where", ["unix:absent/s", f"unix:{'x' * 200}"])
def test_an_address_that_cannot_be_had_is_named(serve: Callable[..., Called], where: str) -> None:
    assert serve("m.gguf", where=where).is_refusal(where, "unix:PATH in a folder that exists")


def test_what_is_not_safe_is_not_a_matter_of_ports(
    serve: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOTKV_TOKEN", raising=False)
    assert serve("m.gguf", where="0.0.0.0:0").is_refusal("there is no token", "--token-file and --certificate")


def test_a_shard_file_is_not_called_damaged(serve: Callable[..., Called], tmp_path: Path) -> None:
    shard = tiny_shard(tmp_path)
    called = serve(shard, "--layers", "1:3")
    assert called.is_refusal("is a shard (layers 1:3)", "the file that it was cut from")
    assert "damaged" not in called.err


@pytest.mark.parametrize("path", ["absent.gguf", "."])
def test_what_is_no_file_is_not_called_damaged(serve: Callable[..., Called], path: str) -> None:
    called = serve(path)
    assert called.is_refusal(f"{path}: ", "the path of a whole GGUF file")
    assert "damaged" not in called.err


def test_layers_that_cannot_be_cut_are_no_matter_of_memory(serve: Callable[..., Called]) -> None:
    assert serve("m.gguf", "--layers", "0:9").is_refusal("not a range", "hotkv-trio inspect m.gguf")
    unknown = Path("u.gguf")
    unknown.write_bytes(Path("m.gguf").read_bytes().replace(b"llama", b"lxxma"))
    assert serve(unknown, "--layers", "0:2").is_refusal("architecture 'lxxma'", "no --layers")
    assert serve(unknown).is_refusal("unknown model architecture: 'lxxma'", "another model")


def test_metrics_without_the_extra(serve: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.startswith(("hotkv_trio.serve.metrics", "hotkv_trio.serve._metrics", "prometheus_client")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    called = serve("m.gguf", "--metrics", "127.0.0.1:0")
    assert called.is_refusal("--metrics needs prometheus_client", "pip install '.[metrics]' in hotkv-trio's folder")


@pytest.mark.parametrize("option", ["--sessions", "--context", "--threads", "--prefill-chunk"])
def test_none_of_what_there_must_be_some_is_refused_by_its_option(shell: Shell, option: str) -> None:
    called = shell("serve", "m.gguf", "--listen", "unix:s", option, "0")
    assert called.status == 2
    assert f"for {option}. Must be > 0" in called.err
