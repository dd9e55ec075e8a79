"""``hotkv-trio plan``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest

from hotkv_trio.llama._planning import plan_shards
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.cli._shell import UNUSABLE, unusable

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli._shell import Shell


def rows(out: str) -> list[list[str]]:
    """Return the table's rows of whole figures: shard, layers, weights, KV per token, a session, ..."""
    found = (line.split() for line in out.splitlines())
    return [words for words in found if len(words) > 1 and ":" in words[1]]


def test_balanced_without_memory(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", n_layer=6)
    called = shell("plan", model, "--shards", 3, "--context", 1000)
    assert called.status == 0, called.err
    planned = plan_shards(model, 3, n_ctx=1000)
    assert rows(called.out) == [
        [
            str(number),
            "{}:{}".format(*shard.layers),
            f"{shard.weight_bytes:,}",
            f"{shard.kv_bytes_per_token:,}",
            f"{shard.slot_bytes:,}",
        ]
        for number, shard in enumerate(planned.shards)
    ]
    assert "One session has 1,024 tokens." in called.out


def test_with_memory_it_counts_sessions(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", n_layer=6)
    called = shell("plan", model, "--shards", 2, "--memory", "64MiB,128MiB", "--type-k", "q8_0", "--type-v", "q8_0")
    planned = plan_shards(model, 2, [64 << 20, 128 << 20], type_k="q8_0", type_v="q8_0")
    assert [row[-3:] for row in rows(called.out)] == [
        ["64.0", "MiB", f"{planned.shards[0].sessions:,}"],
        ["128.0", "MiB", f"{planned.shards[1].sessions:,}"],
    ]
    assert f"The route holds {planned.sessions:,} sessions of 4,096 tokens." in called.out


def test_a_table_of_large_figures_fits_a_terminal(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", n_layer=6)
    called = shell("plan", model, "--shards", 2, "--memory", "80GiB", "--context", 20_000_000)
    assert "…" not in called.out
    assert max(map(len, called.out.splitlines())) <= 80


def test_json_is_the_whole_plan(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", n_layer=6)
    document = shell("plan", model, "--shards", 2, "--memory", "1GiB", "--json").document
    planned = plan_shards(model, 2, [1 << 30])
    assert [shard["layers"] for shard in document["shards"]] == [list(shard.layers) for shard in planned.shards]
    assert document["sessions"] == planned.sessions
    assert set(document["shards"][0]) == set(attrs.asdict(planned.shards[0]))


@pytest.mark.parametrize(
    "options, what",
    [
        (["--shards", 9], "can be cut into 6 shards at most"),
        (["--shards", 2, "--memory", "1GiB,1GiB,1GiB"], "one size for all shards or one for each"),
        (["--shards", 2, "--memory", "plenty"], "'plenty' is no size in bytes: write 8GiB"),
        (["--shards", 2, "--memory", "10KiB"], "give it more, cut into more shards, or shorten the context"),
        (["--shards", 2, "--type-v", "q9"], "iq4_nl, not 'q9'"),
    ],
)
def test_what_cannot_be_is_refused(shell: Shell, tmp_path: Path, options: list[object], what: str) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf", n_layer=6)
    assert shell("plan", model, *options).is_refusal(what, "other --shards, --memory or --context")


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_whole_model_is_refused(shell: Shell, tmp_path: Path, kind: str) -> None:
    model = unusable(tmp_path, kind)
    assert shell("plan", model, "--shards", 2).is_refusal(str(model), "a whole GGUF file")
