"""The model digest: what it covers, and when a kept one holds."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama import _digest
from hotkv_trio.llama._digest import model_digest
from hotkv_trio.llama._gguf import encode_header, read_gguf
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.llama._files import split_gguf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hotkv_trio.llama._digest import Progress
    from hotkv_trio.llama._gguf import GgufFile


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Count the times that a model is read whole; keep the user's cache out of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen: list[str] = []
    compute = _digest._compute

    def counted(file: GgufFile, progress: Progress | None) -> str:
        seen.append(file.path.name)
        return compute(file, progress)

    monkeypatch.setattr(_digest, "_compute", counted)
    return seen


def kept(path: Path) -> Path:
    return path.with_name(f".{path.name}.hotkv-digest")


def test_it_is_of_the_tensors_alone(tmp_path: Path, reads: list[str]) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf")
    digest = model_digest(path)
    assert len(bytes.fromhex(digest)) == 32
    assert model_digest(build_tiny_gguf(tmp_path / "b.gguf", n_ctx_train=128)) == digest
    assert model_digest(split_gguf(path, tmp_path / "parts", 3)[0]) == digest
    assert model_digest(build_tiny_gguf(tmp_path / "c.gguf", seed=1)) != digest
    assert len(reads) == 4


def test_names_types_shapes_and_bytes_all_count(tmp_path: Path, reads: list[str]) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf", n_layer=1)
    file = read_gguf(path)
    data = path.read_bytes()[next(iter(file.tensors.values())).offset :]
    entries = [(t.name, t.shape, t.type) for t in file.tensors.values()]
    kind = entries[0][2]
    name, shape, _ = entries[2]
    variants = {
        "same": entries,
        "name": [*entries[:2], ("other.weight", shape, kind), *entries[3:]],
        "shape": [*entries[:2], (name, shape[::-1], kind), *entries[3:]],
    }
    digests = {}
    for what, changed in variants.items():
        (tmp_path / what).write_bytes(encode_header(file.metadata, changed) + data)
        digests[what] = model_digest(tmp_path / what)
    (tmp_path / "byte").write_bytes(path.read_bytes()[:-1] + b"\1")
    digests["byte"] = model_digest(tmp_path / "byte")
    assert digests["same"] == model_digest(path)
    assert len(set(digests.values())) == 4


def test_it_is_kept_beside_the_file(tmp_path: Path, reads: list[str]) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf")
    progress: list[tuple[int, int]] = []
    digest = model_digest(path, lambda done, total: progress.append((done, total)))
    assert kept(path).exists()
    assert progress == sorted(progress)
    assert progress[-1][0] == progress[-1][1] == read_gguf(path).n_bytes
    assert model_digest(path) == digest
    assert len(reads) == 1


def test_size_and_time_undo_it(tmp_path: Path, reads: list[str]) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf")
    digest = model_digest(path)
    os.utime(path, ns=(1, 1))
    assert model_digest(path) == digest
    build_tiny_gguf(path, seed=1)
    assert model_digest(path) != digest
    assert len(reads) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda entry: entry[: len(entry) // 2],
        lambda entry: b"\xff\xfe" + entry,
        lambda _: b"[1, 2]",
        lambda _: b"null",
        lambda entry: entry.replace(json.loads(entry)[2].encode(), b"0" * 64),
    ],
)
def test_a_damaged_one_is_ignored_and_made_again(
    tmp_path: Path, reads: list[str], damage: Callable[[bytes], bytes]
) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf")
    digest = model_digest(path)
    kept(path).write_bytes(damage(kept(path).read_bytes()))
    assert model_digest(path) == digest
    assert len(reads) == 2
    assert model_digest(path) == digest
    assert len(reads) == 2


def test_the_users_cache_serves_where_the_folder_cannot(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf")
    keep = _digest._keep

    def refusing(place: Path, stamp: list[list[Any]], digest: str) -> None:
        if place.parent == path.parent:
            raise PermissionError
        keep(place, stamp, digest)

    monkeypatch.setattr(_digest, "_keep", refusing)
    digest = model_digest(path)
    assert not kept(path).exists()
    assert model_digest(path) == digest
    assert len(reads) == 1
    assert len(list((tmp_path / "cache" / "hotkv-trio" / "digests").iterdir())) == 1


def test_a_file_that_changes_under_the_reader_is_refused(tmp_path: Path, reads: list[str]) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf")

    def touch(done: int, total: int) -> None:
        os.utime(path, ns=(done, done))

    with pytest.raises(InvalidInput, match="changed while it was read"):
        model_digest(path, touch)
    assert not kept(path).exists()


def test_a_file_that_ends_under_the_reader_is_refused(tmp_path: Path, reads: list[str]) -> None:
    path = build_tiny_gguf(tmp_path / "a.gguf")

    def cut(done: int, total: int) -> None:
        os.truncate(path, 100_000)

    with pytest.raises(InvalidInput, match=r"truncated: \d+ bytes of tensor"):
        model_digest(path, cut)
    assert not kept(path).exists()
