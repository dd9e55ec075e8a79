"""Tiny models are reproducible to the byte, load in llama.cpp, and tell contexts apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._tiny_gguf import TINY_ARCHITECTURES, build_tiny_gguf
from tests.llama._native import Native

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio.llama._tiny_gguf import Weights


def test_same_arguments_give_the_same_bytes_everywhere(tmp_path: Path) -> None:
    digests = {
        weights: hashlib.blake2b(
            build_tiny_gguf(tmp_path / "m", weights=weights).read_bytes(), digest_size=8
        ).hexdigest()
        for weights in ("f32", "f16", "q8_0")
    }
    assert digests == {"f32": "6360611060f219a1", "f16": "35fadd03e9308fc0", "q8_0": "406fedf01f2c61df"}


def test_seed_changes_the_weights_only(tmp_path: Path) -> None:
    first = build_tiny_gguf(tmp_path / "a", seed=1).read_bytes()
    other = build_tiny_gguf(tmp_path / "b", seed=2).read_bytes()
    assert len(first) == len(other)
    assert first != other
    assert first[:8192] == other[:8192]


@pytest.mark.parametrize("weights", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("arch", TINY_ARCHITECTURES)
def test_llama_cpp_loads_it_and_logits_tell_contexts_apart(tmp_path: Path, arch: str, weights: Weights) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", arch, weights=weights)
    tokens = np.random.default_rng(0).integers(3, 512, 24).astype(np.int32)
    other = tokens.copy()
    other[0] = 5
    with Native(path, n_seq=2) as model:
        rows = model.append((0, 0, tokens))
        moved = model.append((1, 0, other))
        last = rows
        chosen = [int(last[-1].argmax())]
        while len(chosen) < 40:
            last = model.append((0, 23 + len(chosen), np.array(chosen[-1:], np.int32)))
            chosen.append(int(last[-1].argmax()))
    assert np.isfinite(rows).all()
    assert np.isfinite(last).all()
    assert not np.array_equal(moved[-1], rows[-1])
    assert len(set(chosen)) >= 5


def test_any_text_survives_the_vocabulary(tmp_path: Path) -> None:
    text = "A shard, déjà vu: 日本語 🙂\n"
    with Native(build_tiny_gguf(tmp_path / "m.gguf")) as model:
        tokens = model.tokenize(text)
        assert model.text(tokens[1:]) == " " + text
        assert max(tokens) < model.n_vocab == 512


def test_a_small_vocabulary_has_no_text(tmp_path: Path) -> None:
    with Native(build_tiny_gguf(tmp_path / "m.gguf", n_vocab=64)) as model:
        assert model.n_vocab == 64
        assert model.append((0, 0, np.array([63], np.int32))).shape == (1, 64)


@pytest.mark.parametrize(
    "arch, sizes, what",
    [
        ("gpt9", {}, "no tiny model of architecture 'gpt9'; there are llama"),
        ("llama", {"weights": "q3"}, "weights are f32, f16, q8_0, not 'q3'"),
        ("llama", {"n_embd": 100, "n_head": 3}, "must be a multiple of n_head 3"),
        ("llama", {"n_layer": 0}, "0 layers"),
    ],
)
def test_what_fits_nothing_is_refused(tmp_path: Path, arch: str, sizes: dict[str, int], what: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        build_tiny_gguf(tmp_path / "m.gguf", arch, **sizes)  # type: ignore[arg-type]
    assert what in refusal.value.what
    assert not (tmp_path / "m.gguf").exists()
