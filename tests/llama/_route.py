"""A model cut into shard files and joined again, and a program of calls to compare it with the uncut one."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hotkv_trio.llama._architectures import architecture_of, valid_cuts
from hotkv_trio.llama._embedding import EmbeddingTable
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._slice import slice_gguf
from tests.llama._native import Native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.llama._native import Rows, Tokens

    Member = tuple[int, int, Tokens]
    """A sequence, the position of its first token, its tokens."""
    Append = Callable[[list[Member]], Rows]
    Truncate = Callable[[int, int], bool]


class Shards:
    """Every shard of one model, sliced and loaded once, joined to routes on demand."""

    def __init__(self, source: Path, folder: Path, *, kv_type: int = 1, n_seq: int = 4, n_ctx_seq: int = 768) -> None:
        self.source, self.folder = source, folder
        self.facts = read_model_facts(source)
        self.table = EmbeddingTable(source)
        self.options: dict[str, Any] = {"n_seq": n_seq, "n_ctx_seq": n_ctx_seq, "type_k": kv_type, "type_v": kv_type}
        self.loaded: dict[tuple[int, int], Native] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def routes(self, *n_shards: int) -> Iterator[tuple[tuple[int, int], ...]]:
        """Yield each way to cut the model into so many shards at valid places."""
        for count in n_shards:
            for cuts in itertools.combinations(valid_cuts(self.facts), count - 1):
                yield tuple(itertools.pairwise((0, *cuts, self.facts.n_layer)))

    def shard(self, layers: tuple[int, int]) -> Native:
        if layers not in self.loaded:
            first, end = layers
            path = slice_gguf(self.source, layers, self.folder / f"{first}-{end}.gguf")
            last = end == self.facts.n_layer
            tap = None if last else architecture_of(self.facts).boundary.format(layer=end - first - 1)
            self.loaded[layers] = self._stack.enter_context(Native(path, tap=tap, **self.options))
        return self.loaded[layers]

    def run(self, route: tuple[tuple[int, int], ...]) -> list[Rows]:
        """Run the program over a route of shards; leave them empty."""
        shards = [self.shard(layers) for layers in route]

        def append(members: list[Member]) -> Rows:
            lengths = [len(tokens) for _, _, tokens in members]
            states = self.table.rows(np.concatenate([tokens for _, _, tokens in members]))
            for shard in shards:
                parts = np.split(states, np.cumsum(lengths)[:-1])
                states = shard.append(*((slot, at, part) for (slot, at, _), part in zip(members, parts, strict=True)))
            return states

        def truncate(slot: int, length: int) -> bool:
            results = [shard.truncate(slot, length) for shard in shards]
            return all(results)

        return program(append, truncate, self.facts.n_vocab)

    def run_uncut(self) -> list[Rows]:
        """Run the program over the whole model."""
        with Native(self.source, **self.options) as model:
            return program(lambda members: model.append(*members), model.truncate, self.facts.n_vocab)


def program(append: Append, truncate: Truncate, n_vocab: int) -> list[Rows]:
    """Four sessions: prefill of 1, 8, 40 and 300 tokens, decode, truncate and continue; return every call's rows."""
    draw = np.random.default_rng(7)
    lengths = [0, 0, 0, 0]

    def step(*sizes: tuple[int, int]) -> Rows:
        members = [(slot, lengths[slot], draw.integers(0, n_vocab, size).astype(np.int32)) for slot, size in sizes]
        rows = append(members)
        for slot, size in sizes:
            lengths[slot] += size
        return rows

    def cut(slot: int, length: int) -> None:
        lengths[slot] = length if truncate(slot, length) else 0
        if not lengths[slot]:
            assert truncate(slot, 0)

    together = tuple((slot, 1) for slot in range(4))
    out = [step((0, 1)), step((2, 40)), step((1, 8)), step((3, 300))]
    out += [step(*together) for _ in range(3)]
    cut(2, 31)
    cut(3, 299)
    out += [step((2, 5)), step((3, 70)), step((0, 100)), *(step(*together) for _ in range(2))]
    out += [step((1, 2), (2, 2)), step((3, 1))]
    for slot in range(4):
        assert truncate(slot, 0)
    return out


def same(some: list[Rows], others: list[Rows]) -> bool:
    """Whether every bit of every call's rows is the same."""
    return len(some) == len(others) and all(itertools.starmap(np.array_equal, zip(some, others, strict=True)))
