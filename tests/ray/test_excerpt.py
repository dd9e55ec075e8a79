"""An excerpt of a model file is, to an engine of its range, the model."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hotkv_trio import InvalidInput
from hotkv_trio._engine import Append
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.llama._digest import model_digest
from hotkv_trio.ray._excerpt import Outline, outline, provide_model, read_piece
from hotkv_trio.testing import build_tiny_gguf
from tests.llama._files import split_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio._engine import EngineInfo, Rows
    from hotkv_trio.ray._excerpt import Layers, Piece

N_LAYER = 4


class Sender:
    """Hands out pieces, and counts their bytes."""

    def __init__(self, path: Path, layers: Layers) -> None:
        self.path = path
        self.layers = layers
        self.sent = 0

    def outline(self) -> Outline:
        return outline(self.path, self.layers, N_LAYER)

    def piece(self, piece: Piece) -> bytes:
        self.sent += piece.length
        return read_piece(self.path, piece)

    def provide(self, where: Path) -> Path:
        return provide_model(
            where, model_digest(self.path), self.layers, get_outline=self.outline, get_piece=self.piece
        )


def compute(path: Path, layers: Layers) -> tuple[EngineInfo, Rows]:
    engine = LlamaEngine(path, layers=None if layers == (0, N_LAYER) else layers, n_slots=1, n_ctx=256, threads=1)
    try:
        info = engine.open()
        given = np.arange(5, dtype=np.int32) if info.takes_tokens else np.ones((5, info.n_embd), np.float32)
        return info, engine.process([Append(0, 0, given, "all")])[0]
    finally:
        engine.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("layers", [(0, 2), (1, 3), (2, 4), (0, 4)], ids=str)
@pytest.mark.parametrize("parts", [1, 3])
def test_it_computes_the_same_bits_under_the_same_recipe(tmp_path: Path, layers: Layers, parts: int) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", n_layer=N_LAYER)
    if parts > 1:
        model = split_gguf(model, tmp_path / "parts", parts)[0]
    excerpt = Sender(model, layers).provide(tmp_path / "not there.gguf")
    assert excerpt != model
    (info, rows), (theirs, expected) = compute(excerpt, layers), compute(model, layers)
    assert info == theirs
    assert np.array_equal(rows, expected)


def test_only_what_the_range_needs_is_sent_and_once(tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", n_layer=N_LAYER)
    sender = Sender(model, (1, 2))
    first = sender.provide(tmp_path / "not there.gguf")
    assert 0 < sender.sent < model.stat().st_size / 3
    sent = sender.sent
    assert sender.provide(tmp_path / "not there.gguf") == first
    assert sender.sent == sent


def test_a_node_that_has_the_model_is_sent_nothing(tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", n_layer=N_LAYER)
    sender = Sender(model, (1, 2))
    assert sender.provide(model) == model
    assert sender.sent == 0


def test_another_model_at_that_path_is_not_taken_for_it(tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", n_layer=N_LAYER)
    other = build_tiny_gguf(tmp_path / "other.gguf", n_layer=N_LAYER, seed=7)
    sender = Sender(model, (1, 2))
    assert sender.provide(other) != other
    assert sender.sent


def test_what_was_cut_off_on_the_way_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", n_layer=N_LAYER)
    sender = Sender(model, (1, 2))
    broken = Sender(model, (1, 2))

    def break_off(piece: Piece) -> bytes:
        if broken.sent:
            raise OSError("the node is gone")
        return Sender.piece(broken, piece)

    monkeypatch.setattr(broken, "piece", break_off)
    with pytest.raises(OSError, match="gone"):
        broken.provide(tmp_path / "not there.gguf")
    excerpt = sender.provide(tmp_path / "not there.gguf")
    assert np.array_equal(compute(excerpt, (1, 2))[1], compute(model, (1, 2))[1])


@pytest.mark.parametrize("what", ["touched", "its digest gone", "emptied"])
def test_a_kept_excerpt_that_is_not_what_it_was_is_made_anew(tmp_path: Path, what: str) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", n_layer=N_LAYER)
    sender = Sender(model, (1, 2))
    excerpt = sender.provide(tmp_path / "not there.gguf")
    sent = sender.sent
    if what == "touched":
        os.utime(excerpt, (1, 1))
    elif what == "emptied":
        excerpt.unlink()
    else:
        for file in excerpt.parent.glob(".*"):
            file.unlink()
    assert sender.provide(tmp_path / "not there.gguf") == excerpt
    assert sender.sent == 2 * sent
    assert np.array_equal(compute(excerpt, (1, 2))[1], compute(model, (1, 2))[1])


def test_what_comes_must_be_of_the_model_that_was_deployed(tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "tiny.gguf", n_layer=N_LAYER)
    other = Sender(build_tiny_gguf(tmp_path / "other.gguf", n_layer=N_LAYER, seed=7), (1, 2))
    with pytest.raises(InvalidInput, match="excerpt is of the model"):
        provide_model(tmp_path / "no", model_digest(model), (1, 2), get_outline=other.outline, get_piece=other.piece)
