"""What ``inspect`` and ``plan`` answer."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama._planning import inspect_model, parse_bytes, plan_shards
from hotkv_trio.llama._slice import shard_weight_bytes, slice_gguf
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


@pytest.mark.parametrize(
    "text, size",
    [
        ("1000", 1000),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("1.5MiB", 3 << 19),
        ("16GB", 16 * 10**9),
        ("2k", 2048),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 apples", "1e9", "8GiBs", "0x10", "8iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="no size in bytes"):
        parse_bytes(text)


def test_a_report_of_all_layers_and_of_some(tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", "gemma3", n_layer=7)
    whole, some = inspect_model(path), inspect_model(path, (2, 5), "q8_0", "q8_0")
    assert (whole.architecture, whole.memory, whole.n_swa, whole.n_vocab) == ("gemma3", "sliding", 32, 512)
    assert (whole.layers, whole.valid_cuts, whole.uncut_reason) == ((0, 7), (1, 2, 3, 4, 5, 6), None)
    assert whole.kv_bytes_per_token == whole.whole_kv_bytes_per_token == 7 * 2 * 64 * 2
    assert some.kv_bytes_per_token == 3 * 2 * (64 // 32 * 34)
    assert some.whole_kv_bytes_per_token == 7 * 2 * (64 // 32 * 34)
    assert some.weight_bytes == shard_weight_bytes(path, (2, 5)) < whole.weight_bytes
    assert whole.file_bytes == path.stat().st_size


def test_a_report_says_why_a_model_is_not_to_be_cut(tmp_path: Path) -> None:
    shard = slice_gguf(build_tiny_gguf(tmp_path / "m.gguf"), (1, 3), tmp_path / "s.gguf")
    report = inspect_model(shard)
    assert report.valid_cuts == ()
    assert report.shard == (1, 3)
    assert report.uncut_reason == "it is a shard (layers 1:3)"
    with pytest.raises(InvalidInput, match="give the whole model"):
        inspect_model(shard, (0, 1))


def test_without_memory_the_heaviest_shard_is_as_light_as_may_be(tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", n_layer=8, n_vocab=5000)
    plan = plan_shards(path, 3, n_ctx=1000)
    assert [shard.layers[0] for shard in plan.shards[1:]] == [shard.layers[1] for shard in plan.shards[:-1]]
    heaviest = max(shard.weight_bytes for shard in plan.shards)
    every = [
        max(shard_weight_bytes(path, layers) for layers in itertools.pairwise((0, *cuts, 8)))
        for cuts in itertools.combinations(range(1, 8), 2)
    ]
    assert heaviest == min(every)
    assert plan.n_ctx_seq == 1024
    assert plan.sessions is None
    assert plan.shards[0].slot_bytes == 1024 * plan.shards[0].kv_bytes_per_token


def test_with_memory_the_most_sessions_fit_on_every_shard(tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", n_layer=8)
    sizes = (4 * MIB, 12 * MIB)
    plan = plan_shards(path, 2, sizes, n_ctx=256)
    slot = 256 * 256
    possible = [
        min(
            (size - shard_weight_bytes(path, (a, b))) // ((b - a) * slot)
            for size, (a, b) in zip(sizes, ranges, strict=True)
        )
        for ranges in (((0, cut), (cut, 8)) for cut in range(1, 8))
    ]
    assert plan.sessions == max(possible) == min(shard.sessions or 0 for shard in plan.shards)
    assert [shard.memory for shard in plan.shards] == list(sizes)
    assert plan.shards[0].layers[1] < 4


def test_one_size_holds_for_all_and_one_shard_is_the_model(tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf")
    assert [shard.memory for shard in plan_shards(path, 2, [8 * MIB]).shards] == [8 * MIB] * 2
    (only,) = plan_shards(path, 1, [8 * MIB]).shards
    assert (only.layers, only.weight_bytes) == ((0, 4), shard_weight_bytes(path, None))


def test_a_hybrid_is_cut_at_valid_places_and_its_states_count(tmp_path: Path) -> None:
    plan = plan_shards(build_tiny_gguf(tmp_path / "m.gguf", "jamba", n_layer=8), 3, n_ctx=256)
    assert all(cut % 2 == 0 for shard in plan.shards for cut in shard.layers)
    for shard in plan.shards:
        assert shard.slot_bytes > 256 * shard.kv_bytes_per_token


@pytest.mark.parametrize(
    "n_shards, memory, what",
    [
        (5, (), r"can be cut into 4 shards at most, at \[1, 2, 3\]"),
        (0, (), "at least 1 shard"),
        (2, (1, 2, 3), "one size for all shards or one for each"),
        (
            2,
            (MIB,),
            r"take [\d,]+ B \([\d.]+ KiB\) for weights and .+ one session, and shard 0 may use [\d,]+ B \(1\.0 MiB\)",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, n_shards: int, memory: tuple[int, ...], what: str) -> None:
    with pytest.raises(InvalidInput, match=what):
        plan_shards(build_tiny_gguf(tmp_path / "m.gguf"), n_shards, memory)
