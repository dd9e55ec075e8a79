"""What a model is, and how its layers may be spread over machines: the answers behind ``inspect`` and ``plan``.

All figures are of weights and KV.  llama.cpp's compute buffers come on top, a few hundred megabytes on large models.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Final

import attrs

from hotkv_trio._errors import InvalidInput
from hotkv_trio._sizes import size
from hotkv_trio.llama._architectures import check_range, uncut_reason, valid_cuts
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._ffi import CELL_PAD
from hotkv_trio.llama._gguf import padded
from hotkv_trio.llama._slice import shard_weight_bytes

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from hotkv_trio._engine import Memory
    from hotkv_trio.llama._facts import ModelFacts

_UNITS: Final = {"": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("i", 1024), ("iB", 1024), ("B", 1000))
}


@attrs.frozen(kw_only=True)
class ModelReport:
    """What ``inspect`` shows."""

    architecture: str
    name: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    tokenizer: str
    memory: Memory
    n_swa: int
    """Width of the sliding window in tokens; 0: none."""
    file_bytes: int
    shard: tuple[int, int] | None
    """In a shard file: the layers of the whole model that it holds."""
    valid_cuts: tuple[int, ...]
    """Layers at which the model may be cut."""
    uncut_reason: str | None
    """Why it may not be cut at all, if it may not."""
    layers: tuple[int, int]
    """The range that the next figures are of."""
    weight_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    """Of one session, whatever its length."""
    whole_kv_bytes_per_token: int
    """Of all layers."""
    type_k: str
    type_v: str


@attrs.frozen(kw_only=True)
class PlannedShard:
    """One shard of a plan."""

    layers: tuple[int, int]
    weight_bytes: int
    kv_bytes_per_token: int
    slot_bytes: int
    """Of one session with the plan's context."""
    memory: int | None
    """Bytes that it may use; None: not said."""
    sessions: int | None
    """Sessions that fit beside the weights; None: memory was not said, or sessions take none."""


@attrs.frozen(kw_only=True)
class ShardPlan:
    """What ``plan`` shows."""

    shards: tuple[PlannedShard, ...]
    n_ctx_seq: int
    """Tokens of one session, as llama.cpp rounds them."""
    sessions: int | None
    """Sessions that fit on every shard; None: memory was not said."""


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as ``8GiB``, ``512M`` (both binary), ``16GB`` (decimal) or ``1000``.

    Raises:
        InvalidInput: it says no size.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = "" if matched is None else matched[2]
    unit = unit[:1].upper() + unit[1:].lower().replace("b", "B")
    factor = _UNITS.get("" if unit == "B" else unit)
    if matched is None or factor is None:
        raise InvalidInput(f"{text!r} is no size in bytes: write 8GiB, 512MiB or 16GB")
    return int(float(matched[1]) * factor)


def inspect_model(
    path: str | os.PathLike[str], layers: tuple[int, int] | None = None, type_k: str = "f16", type_v: str = "f16"
) -> ModelReport:
    """Report what a model is, and what a range of its layers takes.

    Args:
        path: the GGUF file, or a part of a split one.
        layers: first layer, and one past the last; None: all.
        type_k: type of cached keys.
        type_v: type of cached values.

    Raises:
        InvalidInput: the file, the range or a type is not valid; or the range may not be a shard.
    """
    facts = read_model_facts(path)
    why = uncut_reason(facts)
    if layers is not None:
        check_range(facts, layers)
    owned = facts.check_layers(layers)
    return ModelReport(
        architecture=facts.architecture,
        name=facts.name,
        n_layer=facts.n_layer,
        n_embd=facts.n_embd,
        n_vocab=facts.n_vocab,
        n_ctx_train=facts.n_ctx_train,
        tokenizer=facts.tokenizer,
        memory=facts.memory,
        n_swa=facts.n_swa,
        file_bytes=facts.file_bytes,
        shard=facts.shard,
        valid_cuts=() if why else valid_cuts(facts),
        uncut_reason=why,
        layers=owned,
        weight_bytes=shard_weight_bytes(path, layers),
        kv_bytes_per_token=facts.kv_bytes_per_token(owned, type_k, type_v),
        state_bytes=facts.state_bytes(owned),
        whole_kv_bytes_per_token=facts.kv_bytes_per_token(None, type_k, type_v),
        type_k=type_k,
        type_v=type_v,
    )


def plan_shards(
    path: str | os.PathLike[str],
    n_shards: int,
    memory: Sequence[int] = (),
    *,
    n_ctx: int = 4096,
    type_k: str = "f16",
    type_v: str = "f16",
) -> ShardPlan:
    """Cut a model into shards: the heaviest as light as may be, or, where memory is said, the most sessions on all.

    Args:
        path: the GGUF file, or a part of a split one.
        n_shards: how many.
        memory: bytes that each shard may use, in the order of the layers; one figure holds for all; none: not said.
        n_ctx: tokens of one session.
        type_k: type of cached keys.
        type_v: type of cached values.

    Raises:
        InvalidInput: the model cannot be cut into so many, or does not fit into the memory; it says by how much.
    """
    facts = read_model_facts(path)
    if n_shards < 1 or n_ctx < 1 or len(memory) not in {0, 1, n_shards}:
        raise InvalidInput(
            f"{n_shards} shards, context of {n_ctx}, {len(memory)} memory sizes: at least 1 shard, at least 1 token,"
            " and one size for all shards or one for each"
        )
    cuts = valid_cuts(facts) if n_shards > 1 else ()
    if len(cuts) < n_shards - 1:
        raise InvalidInput(f"{facts.path.name} can be cut into {len(cuts) + 1} shards at most, at {list(cuts)}")
    sizes = tuple(memory) * (n_shards if len(memory) == 1 else 1)
    n_ctx_seq = padded(n_ctx, CELL_PAD)

    def slot(layers: tuple[int, int]) -> int:
        return facts.kv_bytes_per_token(layers, type_k, type_v) * n_ctx_seq + facts.state_bytes(layers)

    def merit(number: int, layers: tuple[int, int]) -> tuple[float, float]:
        weight = _weight(facts, layers)
        room = (sizes[number] - weight) / max(1, slot(layers)) if sizes else 0.0
        return room, -weight

    ranges = _best(facts.n_layer, cuts, n_shards, merit)
    shards = tuple(_planned(facts, layers, slot(layers), n, sizes, (type_k, type_v)) for n, layers in enumerate(ranges))
    counted = [shard.sessions for shard in shards if shard.sessions is not None]
    return ShardPlan(shards=shards, n_ctx_seq=n_ctx_seq, sessions=min(counted, default=None))


def _planned(
    facts: ModelFacts, layers: tuple[int, int], slot: int, number: int, sizes: Sequence[int], types: tuple[str, str]
) -> PlannedShard:
    whole = layers == (0, facts.n_layer)
    weight = shard_weight_bytes(facts.path, None if whole else layers)
    memory = sizes[number] if sizes else None
    if memory is not None and memory < weight + slot:
        raise InvalidInput(
            f"layers {layers[0]}:{layers[1]} of {facts.path.name} take {size(weight)} for weights and {size(slot)} for"
            f" one session, and shard {number} may use {size(memory)}: give it more, cut into more shards, or shorten"
            " the context"
        )
    return PlannedShard(
        layers=layers,
        weight_bytes=weight,
        kv_bytes_per_token=facts.kv_bytes_per_token(layers, *types),
        slot_bytes=slot,
        memory=memory,
        sessions=None if memory is None or not slot else (memory - weight) // slot,
    )


def _weight(facts: ModelFacts, layers: tuple[int, int]) -> int:
    head = facts.head_bytes if layers[1] == facts.n_layer else 0
    return facts.shared_bytes + sum(facts.layer_bytes[layers[0] : layers[1]]) + head


def _best(
    n_layer: int,
    cuts: tuple[int, ...],
    n_shards: int,
    merit: Callable[[int, tuple[int, int]], tuple[float, float]],
) -> list[tuple[int, int]]:
    """Return the ranges whose least merit is greatest (first by the first figure, then by the second)."""
    best: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {0: ((float("inf"), float("inf")), (0,))}
    for number in range(n_shards):
        ends = (n_layer,) if number == n_shards - 1 else cuts
        reached: dict[int, tuple[tuple[float, float], tuple[int, ...]]] = {}
        for end in ends:
            for start, (least, path) in best.items():
                if start < end:
                    room, lightness = merit(number, (start, end))
                    found = (min(least[0], room), min(least[1], lightness)), (*path, end)
                    reached[end] = max(reached.get(end, found), found)
        best = reached
    return list(itertools.pairwise(best[n_layer][1]))
