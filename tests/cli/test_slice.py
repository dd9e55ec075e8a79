"""``hotkv-trio slice``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from hotkv_trio._cli import _output
from hotkv_trio.llama import _slice
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._slice import slice_gguf
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.cli._shell import UNUSABLE, tiny_shard, unusable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cli._shell import Shell


@pytest.mark.parametrize("written, layers", [("1:3", (1, 3)), (":2", (0, 2)), ("2:", (2, 4)), (" 0 : 4 ", (0, 4))])
def test_writes_the_shard(shell: Shell, tmp_path: Path, written: str, layers: tuple[int, int]) -> None:
    model, out = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "s.gguf"
    called = shell("slice", model, "--layers", written, "--out", out)
    assert called.status == 0, called.err
    assert out.read_bytes() == slice_gguf(model, layers, tmp_path / "t.gguf").read_bytes()
    first, end = layers
    assert called.out.startswith(f"{out}: layers {first}:{end} of 4, {out.stat().st_size:,} B (")
    assert called.err == f"layers {first}:{end} of m.gguf\n"


def test_json_is_one_document(shell: Shell, tmp_path: Path) -> None:
    model, out = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "s.gguf"
    called = shell("slice", model, "--layers", "1:3", "--out", out, "--json")
    assert called.document == {
        "path": str(out),
        "layers": [1, 3],
        "layer_count": 4,
        "file_bytes": out.stat().st_size,
    }


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_output, "Console", lambda **how: Console(force_terminal=True, width=100, **how))
    with _output.bar("slicing") as progress:
        for done in (0, 50, 100):
            progress(done << 20, 100 << 20)
    shown = capsys.readouterr()
    assert not shown.out
    assert "slicing" in shown.err
    assert "100.0/100.0 MiB" in shown.err


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_whole_model_is_refused(shell: Shell, tmp_path: Path, kind: str) -> None:
    model, out = unusable(tmp_path, kind), tmp_path / "s.gguf"
    called = shell("slice", model, "--layers", "0:2", "--out", out)
    assert called.is_refusal(str(model), "a whole GGUF file"), called
    assert not out.exists()


@pytest.mark.parametrize(
    "layers, what",
    [
        ("0:3", "the nearest valid cuts are 2 and 4"),
        ("0:9", "layers 0:9 are not a range of m.gguf, which has layers 0:6"),
        ("4:2", "layers 4:2 are not a range"),
        ("two", "'two' is no range of layers: write FIRST:END, as 0:6 for all of them"),
        ("-2:4", "no range of layers"),
    ],
)
def test_a_bad_cut_is_refused_with_the_nearest_good_ones(shell: Shell, tmp_path: Path, layers: str, what: str) -> None:
    model, out = build_tiny_gguf(tmp_path / "m.gguf", "jamba", n_layer=6), tmp_path / "s.gguf"
    called = shell("slice", model, f"--layers={layers}", "--out", out)
    assert called.is_refusal(what, f"hotkv-trio inspect {model}"), called
    assert not out.exists()


def test_a_shard_is_not_cut_again(shell: Shell, tmp_path: Path) -> None:
    called = shell("slice", tiny_shard(tmp_path), "--layers", "0:1", "--out", tmp_path / "s.gguf")
    assert called.is_refusal("shard.gguf is a shard (layers 1:3): give the whole model", "hotkv-trio inspect")


def test_a_folder_that_is_not_there_is_refused(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    called = shell("slice", model, "--layers", "0:2", "--out", tmp_path / "absent" / "s.gguf")
    assert called.is_refusal("No such file or directory", "another path for --out")


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "directory"])
def test_only_a_regular_file_is_replaced(shell: Shell, tmp_path: Path, kind: str) -> None:
    model, out = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "out"
    if kind == "directory":
        out.mkdir()
    else:
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "pipe").rename(out) if kind == "pipe" else out.symlink_to("pipe")
    before = out.lstat()
    called = shell("slice", model, "--layers", "0:2", "--out", out)
    what = "is a directory: name the file" if kind == "directory" else "is not a regular file"
    assert called.is_refusal(f"{out} {what}", "another path for --out"), called
    assert "free" not in called.err.partition("\n")[0]
    assert (out.lstat().st_ino, out.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_without_enough_free_space_nothing_is_written(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "s.gguf"
    out.write_bytes(b"as before")
    full = os.statvfs_result((4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    called = shell("slice", model, "--layers", "0:2", "--out", out)
    assert called.is_refusal("and 0 B are free", "free space there"), called
    assert out.read_bytes() == b"as before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "s.gguf"]


def test_an_interrupted_one_leaves_all_as_it_was(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> Iterator[bytes]:
        yield b"some bytes"
        raise KeyboardInterrupt

    model, out = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "s.gguf"
    monkeypatch.setattr(_slice, "tensor_chunks", interrupted)
    with pytest.raises(SystemExit) as ended:
        shell("slice", model, "--layers", "0:2", "--out", out)
    assert ended.value.code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_written_shard_knows_what_it_is(shell: Shell, tmp_path: Path) -> None:
    model, out = build_tiny_gguf(tmp_path / "m.gguf"), tmp_path / "s.gguf"
    assert shell("slice", model, "--layers", "1:3", "--out", out).status == 0
    assert read_model_facts(out).shard == (1, 3)
    assert shell("inspect", out).fact("shard") == "layers 1:3 of a model"
