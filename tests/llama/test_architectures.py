"""Which models may be cut, where, and what is said of those that may not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._architectures import (
    ARCHITECTURES,
    REFUSED,
    architecture_of,
    check_range,
    embedding_factor,
    uncut_reason,
    valid_cuts,
)
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._tiny_gguf import TINY_ARCHITECTURES, build_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio.llama._facts import ModelFacts


def facts_of(tmp_path: Path, arch: str = "llama", n_layer: int = 4) -> ModelFacts:
    return read_model_facts(build_tiny_gguf(tmp_path / "m.gguf", arch, n_layer=n_layer))


def test_every_supported_one_can_be_built_and_so_is_proven() -> None:
    assert set(ARCHITECTURES) == set(TINY_ARCHITECTURES)
    assert not set(ARCHITECTURES) & set(REFUSED)


def test_most_may_be_cut_anywhere(tmp_path: Path) -> None:
    assert valid_cuts(facts_of(tmp_path, "gemma3", 7)) == (1, 2, 3, 4, 5, 6)
    assert valid_cuts(facts_of(tmp_path, n_layer=1)) == ()


def test_each_shard_of_a_hybrid_needs_both_kinds(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "jamba", 7)
    assert valid_cuts(facts) == (2, 4)
    irregular = attrs.evolve(facts, n_layer=8, recurrent=(True, True, False, True, False, True, True, False))
    assert valid_cuts(irregular) == (3, 6)
    assert valid_cuts(attrs.evolve(facts, recurrent=(True,) * 6 + (False,))) == ()


@pytest.mark.parametrize(
    "layers, what",
    [
        ((0, 3), "cannot be cut at layer 3"),
        ((3, 6), "cannot be cut at layer 3"),
        ((2, 3), "the nearest valid cuts are 2 and 4"),
        ((0, 5), "the nearest valid cuts are 4 and 6"),
        ((1, 6), "the nearest valid cuts are 0 and 2"),
        ((0, 1), "each shard needs layers that attend and layers that keep a state"),
        ((0, 7), "not a range of m.gguf, which has layers 0:6"),
        ((4, 4), "not a range of m.gguf"),
    ],
)
def test_a_bad_cut_names_the_nearest_good_ones(tmp_path: Path, layers: tuple[int, int], what: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        check_range(facts_of(tmp_path, "jamba", 6), layers)
    assert what in refusal.value.what


def test_a_shard_without_a_window_where_llama_cpp_wants_one_is_refused(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "gpt-oss", 6)
    assert valid_cuts(facts) == (2, 4)
    with pytest.raises(InvalidInput, match="each shard needs a layer with a sliding window"):
        check_range(facts, (3, 6))
    assert valid_cuts(facts_of(tmp_path, "cohere2", 9)) == (2, 4, 6, 8)
    assert valid_cuts(attrs.evolve(facts, sliding=(False,) * 6, n_swa=0)) == (1, 2, 3, 4, 5)


def test_positions_that_go_by_layer_allow_multiples_only(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "smollm3", 12)
    assert valid_cuts(facts) == (4, 8)
    with pytest.raises(InvalidInput, match=r"every fourth layer .* the nearest valid cuts are 4 and 8"):
        check_range(facts, (0, 5))


def test_good_ranges_pass(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, "jamba", 6)
    for layers in [(0, 2), (2, 4), (0, 4), (2, 6), (0, 6)]:
        assert check_range(facts, layers) == ARCHITECTURES["jamba"]


@pytest.mark.parametrize("arch", [*REFUSED, "brand-new"])
def test_an_unsupported_one_is_refused_by_name_with_a_way_out(tmp_path: Path, arch: str) -> None:
    facts = attrs.evolve(facts_of(tmp_path), architecture=arch)
    with pytest.raises(InvalidInput) as refusal:
        valid_cuts(facts)
    why = REFUSED.get(arch, "no test has shown its shards to be exact")
    assert f"architecture {arch!r}: {why}.  Serve all its layers together, or a model of one of: " in (
        refusal.value.what
    )
    assert uncut_reason(facts) == f"architecture {arch!r}: {why}"


def test_models_of_a_supported_one_may_still_be_refused(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    for changed, why in (
        (attrs.evolve(facts, architecture="gemma3", n_layer=62), "tells the 27B's attention scale by its 62 layers"),
        (attrs.evolve(facts, architecture="granite", n_deepstack=2), "deepstack"),
        (attrs.evolve(facts, architecture="command-r", n_layer=64), "normalised by its 64 layers"),
        (attrs.evolve(facts, n_layer_nextn=1), "multi-token prediction"),
        (attrs.evolve(facts, shard=(2, 4)), r"m\.gguf is a shard \(layers 2:4\): give the whole model"),
    ):
        with pytest.raises(InvalidInput, match=why):
            architecture_of(changed)


def test_embeddings_are_scaled_as_the_architecture_says(tmp_path: Path) -> None:
    assert embedding_factor(facts_of(tmp_path)) == 1
    assert embedding_factor(facts_of(tmp_path, "gemma3")) == np.sqrt(np.float32(128))
