"""Isolation bit for bit, of the engine alone: no scheduler, no trio, the real library.

Three promises are told apart.  *Non-interference*: for the same calls, what the neighbours hold changes no bit.  *Own
calls*: calls of one slot alone give the same bits in any slot, whoever else is there.  *Reuse*: a cleared slot is as
new.  Where kernels choose their path by the shape of a call, unlike shapes are not compared.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hotkv_trio._engine import OUTPUTS
from hotkv_trio._errors import EngineFailed
from hotkv_trio.llama._embedding import EmbeddingTable
from hotkv_trio.llama._gate import Gate
from tests.llama.conftest import N_VOCAB, Opened, hidden, opened, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._engine import Output, Rows
    from tests.llama.conftest import Tiny

KINDS = [
    pytest.param("f32", "f16", id="f32 weights, f16 KV"),
    pytest.param("f32", "q8_0", id="f32 weights, q8_0 KV"),
    pytest.param("q8_0", "f16", id="q8_0 weights, f16 KV"),
    pytest.param("q8_0", "q8_0", id="q8_0 weights, q8_0 KV"),
]
"""Weights, and KV."""
LENGTHS = [30, 63, 64, 65, 511, 512, 513, 600]
"""Histories on both sides of 64 query tokens and of 512 cells, at which the kernels take other paths."""
ARCHITECTURES = ["llama", "gemma3", "qwen2", "qwen3moe", "mamba", "jamba"]


def _life(
    it: Opened, slot: int, seed: int, lengths: Sequence[int], *, n_vocab: int = N_VOCAB, output: Output = "all"
) -> list[Rows]:
    """Prefill and decode a few tokens, for each length; return the rows."""
    rows = []
    for turn, length in enumerate(lengths):
        rows.append(it.append(slot, tokens(length, seed=seed + turn, n_vocab=n_vocab), output))
        rows += [it.append(slot, tokens(1, seed=seed + 10 * i, n_vocab=n_vocab), output) for i in range(3)]
    return rows


def _same(left: Sequence[Rows], right: Sequence[Rows]) -> bool:
    return len(left) == len(right) and all(map(np.array_equal, left, right))


@pytest.mark.parametrize("weights, kind", KINDS)
def test_own_calls_are_as_alone_in_any_slot(tiny: Tiny, weights: str, kind: str) -> None:
    """llama.cpp #24962: logits differ when others share the context; mesh-llm #1551: a hard-coded sequence 0."""
    path = tiny(weights=weights, n_layer=2)
    options = {"n_ctx": 1024, "type_k": kind, "type_v": kind}
    for length in LENGTHS:
        with opened(path, n_slots=1, **options) as alone:
            expected = _life(alone, 0, 5, [min(length, 512)])
        with opened(path, n_slots=4, **options) as it:
            for slot in (0, 1, 3):
                it.append(slot, tokens(300, seed=slot), "none")
            between = [it.append(2, tokens(min(length, 512), seed=5), "all")]
            for i in range(3):
                for slot in (0, 1, 3):
                    it.append(slot, tokens(1 + slot, seed=i))
                between.append(it.append(2, tokens(1, seed=5 + 10 * i), "all"))
            assert _same(between, expected)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("slot", [0, 1, 3])
def test_own_calls_are_as_alone_on_every_memory(tiny: Tiny, arch: str, slot: int) -> None:
    path = tiny(arch)
    with opened(path, n_slots=1, n_ctx=512) as alone, opened(path, n_ctx=512) as it:
        for other in {0, 1, 2, 3} - {slot}:
            it.append(other, tokens(20 + other, seed=other))
        assert _same(_life(it, slot, 7, [40, 100]), _life(alone, 0, 7, [40, 100]))


@pytest.mark.parametrize("weights, kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_neighbours_contents_change_no_bit(tiny: Tiny, arch: str, weights: str, kind: str) -> None:
    """llama.cpp #10072, LMCache #4385, mlx-lm #965: answers carry other sessions' content under load.

    Grouped calls: the same shapes with every other slot's tokens replaced.
    """

    def run(noise: int) -> list[Rows]:
        with opened(tiny(arch, weights=weights), n_ctx=768, type_k=kind, type_v=kind) as it:

            def step(n: int, turn: int) -> Rows:
                data = {slot: tokens(n, seed=turn if slot == 1 else noise + 100 * slot + turn) for slot in range(4)}
                return it.group(data, "all")[1]

            rows = [step(n, turn) for turn, n in enumerate((5, 63, 64, 65, 1, 1, 128, 128, 128, 1, 1))]
            assert it.engine.length(1) > 512
            return rows

    assert _same(run(1000), run(2000))


def test_grouped_is_as_alone_where_the_kernels_are_batch_invariant(tiny: Tiny) -> None:
    """q8_0 weights and KV: whoever decodes with a session, and in whatever chunks, its bits are the same."""
    path = tiny(weights="q8_0")
    options = {"n_ctx": 768, "type_k": "q8_0", "type_v": "q8_0"}
    data = {slot: tokens(600, seed=slot) for slot in range(4)}
    with opened(path, n_slots=1, **options) as alone:
        solo = {}
        for slot, own in data.items():
            alone.engine.clear(0)
            solo[slot] = np.concatenate(alone.chunks(0, own, 200, "all"))
    with opened(path, **options) as it:
        grouped: dict[int, list[Rows]] = {slot: [] for slot in data}
        done = 0
        for n in (1, 64, 65, 100, 1, 128, 128, 110, 1, 1, 1):
            for slot, rows in it.group({slot: own[done : done + n] for slot, own in data.items()}, "all").items():
                grouped[slot].append(rows)
            done += n
        assert done == 600
        for slot, parts in grouped.items():
            assert np.array_equal(np.concatenate(parts), solo[slot])


@pytest.mark.parametrize("weights, kind", KINDS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_cleared_slot_is_as_new(tiny: Tiny, arch: str, weights: str, kind: str) -> None:
    """llama.cpp #27148, #27422: another conversation's KV appears in a fresh slot."""
    with opened(tiny(arch, weights=weights), n_slots=3, n_ctx=768, type_k=kind, type_v=kind) as it:
        fresh = _life(it, 2, 3, [90, 500])
        for tenant in range(3):
            it.engine.clear(2)
            _life(it, 2, 50 + tenant, [150, 300 + tenant])
        it.engine.clear(2)
        assert _same(_life(it, 2, 3, [90, 500]), fresh)


def test_a_slot_cleared_below_its_window_is_as_new(tiny: Tiny) -> None:
    """A Gemma cut below its window says that it is empty while its base layers keep old tokens."""
    with opened(tiny("gemma3"), n_ctx=2048, swa_full=False) as it:
        fresh = _life(it, 1, 3, [90, 200])
        it.engine.clear(1)
        it.chunks(1, tokens(1500), 500)
        assert not it.engine.truncate(1, 40)
        it.engine.clear(1)
        assert _same(_life(it, 1, 3, [90, 200]), fresh)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_a_cut_on_either_side_of_512_cells_is_exact(tiny: Tiny, arch: str) -> None:
    with opened(tiny(arch), n_ctx=1024) as it, opened(tiny(arch), n_ctx=1024) as clean:
        for length in (63, 64, 200, 511, 512, 513, 700):
            for one in (it, clean):
                one.engine.clear(0)
                one.chunks(0, tokens(length), 256)
            it.append(0, tokens(250, seed=1))
            assert it.engine.truncate(0, length)
            assert _same(_life(it, 0, 9, [65]), _life(clean, 0, 9, [65]))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_chunks_of_the_same_sizes_give_the_same_bits(tiny: Tiny, kind: str) -> None:
    """node-llama-cpp #129: a prompt over the batch size ends the server."""
    with opened(tiny(), n_ctx=2048, type_k=kind, type_v=kind) as it:
        first = it.chunks(0, tokens(2000), 300)
        it.append(1, tokens(100, seed=1))
        assert _same(it.chunks(3, tokens(2000), 300), first)


@pytest.mark.parametrize("scale", [1e3, 1e6, 1e10, 9e14])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "olmo2", "phi3", "granite", "mamba"])
def test_overflow_is_a_failure_or_harmless(tiny: Tiny, arch: str, scale: float) -> None:
    """Huge finite values: whatever becomes of their own session, no neighbour and no next tenant sees a bit of it."""
    states = hidden(70, 128) * np.float32(scale)
    np.clip(states, -9e14, 9e14, out=states)
    with opened(tiny(arch), n_ctx=512) as it:
        fresh = _life(it, 0, 3, [80])
        neighbour = _life(it, 1, 4, [80, 40])
        it.engine.clear(0)
        it.engine.clear(1)
        first = _life(it, 1, 4, [80])
        with contextlib.suppress(EngineFailed):
            it.append(0, states, "none")
        rest = [
            it.append(1, tokens(40, seed=5), "all"),
            *(it.append(1, tokens(1, seed=4 + 10 * i), "all") for i in range(3)),
        ]
        assert _same(first + rest, neighbour)
        it.engine.clear(1)
        it.engine.clear(0)
        assert _same(_life(it, 0, 3, [80]), fresh)


# Layer ranges.


def _chain(shards: Sequence[Opened], slot: int, data: Any) -> Rows:
    """Append to one slot of every shard, handing the hidden states on; return the logits."""
    for shard in shards:
        data = shard.append(slot, data, "all")
    return data  # type: ignore[no-any-return]


@pytest.mark.parametrize("tap", ["auto", "python"])
@pytest.mark.parametrize("bounds", [(0, 2, 4), (0, 1, 3, 4)])
def test_a_chain_of_shards_is_the_whole_model(tiny: Tiny, slices: Path, bounds: tuple[int, ...], tap: str) -> None:
    path = tiny(n_layer=4)
    with contextlib.ExitStack() as stack:
        whole = stack.enter_context(opened(path, n_ctx=512))
        shards = [
            stack.enter_context(opened(path, layers=layers, n_ctx=512, tap=tap, cache_dir=slices))
            for layers in itertools.pairwise(bounds)
        ]
        assert sum(shard.info.bytes_per_token for shard in shards) == whole.info.bytes_per_token
        for slot in (0, 3, 1):
            for turn, n in enumerate((1, 8, 40, 300, 1, 1)):
                data = tokens(n, seed=10 * slot + turn)
                assert np.array_equal(_chain(shards, slot, data), whole.append(slot, data, "all"))
            for one in (whole, *shards):
                assert one.engine.truncate(slot, 33)
            assert np.array_equal(_chain(shards, slot, tokens(70)), whole.append(slot, tokens(70), "all"))


def test_a_shard_gives_the_rows_asked_for(tiny: Tiny, slices: Path) -> None:
    """A tap takes every row of the graph; each member gets its own, whatever the group's shape."""
    with opened(tiny(), layers=(0, 2), cache_dir=slices) as it:
        assert (it.info.n_vocab, it.info.n_embd, it.info.n_output) == (N_VOCAB, 128, 128)
        every = {slot: it.append(slot, tokens(5, seed=slot), "all") for slot in range(4)}
        for slot in range(4):
            it.engine.clear(slot)
        for order in ([0, 1, 2], [3]), ([2, 0], [3, 1]):
            for group in order:
                members = [it.member(slot, tokens(5, seed=slot), OUTPUTS[slot % 3]) for slot in group]
                for slot, rows in zip(group, it.engine.process(members), strict=True):
                    expected = {"none": every[slot][:0], "last": every[slot][-1:], "all": every[slot]}
                    assert rows.shape == expected[OUTPUTS[slot % 3]].shape
                    assert np.allclose(rows, expected[OUTPUTS[slot % 3]], atol=1e-3)
            for slot in range(4):
                it.engine.clear(slot)


def test_embeddings_are_as_good_as_tokens_on_a_first_shard(tiny: Tiny, slices: Path) -> None:
    with opened(tiny(), layers=(0, 2), cache_dir=slices) as it:
        states = EmbeddingTable(it.engine.path).rows(tokens(6))
        assert np.array_equal(it.append(0, tokens(6), "all"), it.append(1, states, "all"))


def test_poison_in_a_shard_goes_no_further(tiny: Tiny, slices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny(), layers=(1, 3), cache_dir=slices, n_ctx=512) as it:
        fresh = it.append(0, hidden(80, 128), "all")
        it.engine.clear(0)
        it.append(1, hidden(5, 128))
        states = hidden(80, 128, seed=1)
        states[70] = np.inf
        with monkeypatch.context() as patch:
            patch.setattr(Gate, "_check_hidden", lambda *_: None)
            with pytest.raises(EngineFailed, match=r"the output of slots \[0\] is not finite"):
                it.append(0, states, "none")
        it.engine.clear(0)
        assert np.array_equal(it.append(0, hidden(80, 128), "all"), fresh)


# Real models.


def _real(name: str) -> Path:
    folder = os.environ.get("HOTKV_MODELS")
    if folder is None or not (path := Path(folder) / name).exists():
        pytest.fail(f"HOTKV_MODELS must name a folder with {name}")
    return path


@pytest.mark.real_model
@pytest.mark.parametrize("name, cut", [("SmolLM2-135M-Instruct.Q4_1.gguf", 15), ("gemma3-270m.gguf", 6)])
def test_a_real_model(name: str, cut: int, slices: Path) -> None:
    path = _real(name)
    with opened(path, n_slots=1, n_ctx=1024) as alone, opened(path, n_ctx=1024) as it:
        life: dict[str, Any] = {"seed": 3, "lengths": [60, 480], "n_vocab": it.info.n_vocab, "output": "last"}
        expected = _life(alone, 0, **life)
        for slot in (0, 1, 3):
            it.append(slot, tokens(100, seed=slot, n_vocab=it.info.n_vocab), "none")
        assert _same(_life(it, 2, **life), expected)
        it.engine.clear(1)
        assert _same(_life(it, 1, **life), expected)
        it.engine.clear(2)
        alone.engine.clear(0)
        prompt = it.engine.tokenize("The capital of France is")
        said = _continue(it, 2, prompt)
        assert said == _continue(alone, 0, prompt)
        assert "Paris" in said or "France" in said
        with (
            opened(path, layers=(0, cut), n_ctx=1024, cache_dir=slices) as first,
            opened(path, layers=(cut, it.info.layer_count), n_ctx=1024, cache_dir=slices) as last,
        ):
            alone.engine.clear(0)
            for n in (1, 8, 40, 300, 1, 1):
                data = tokens(n, seed=n, n_vocab=it.info.n_vocab)
                states = first.append(3, data, "all")
                assert np.array_equal(last.append(3, states), alone.append(0, data))


def _continue(it: Opened, slot: int, prompt: Any) -> str:
    """Return the text of 12 tokens, each the likeliest."""
    row, said = it.append(slot, prompt), []
    for _ in range(12):
        said.append(int(row[0].argmax()))
        row = it.append(slot, np.array(said[-1:], np.int32))
    return it.engine.detokenize(said).decode()
