"""EngineContract: what every engine must do, as a suite of tests that anybody's engine can be held to."""

# ruff: noqa: S101 - these are tests

from __future__ import annotations

import itertools
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hotkv_trio._engine import Append, EngineInfo

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hotkv_trio._engine import Engine, Output, Rows


class EngineContract:
    """Tests for an implementation of `hotkv_trio.Engine`; they need nothing but ``make_engine``.

    Bits are compared only between calls of the same shapes, as kernels may choose their path by shape.

    Example::

        class TestMyEngine(EngineContract):
            def make_engine(self) -> Engine:
                return MyEngine("model.bin", n_slots=3)
    """

    def make_engine(self) -> Engine:
        """Return a new engine, not opened, of two slots at least and 8 tokens a slot at least."""
        raise NotImplementedError

    def make_data(self, info: EngineInfo, n: int, seed: int = 0) -> Any:
        """Return ``n`` tokens or hidden states that the engine takes; override it if yours is choosy."""
        rng = np.random.default_rng([seed, n])
        if info.takes_tokens:
            return rng.integers(0, info.n_vocab, n, dtype=np.int32)
        return rng.standard_normal((n, info.n_embd), dtype=np.float32)

    @contextmanager
    def opened(self) -> Generator[_Bench]:
        """Open an engine, and close it in the end."""
        engine = self.make_engine()
        try:
            yield _Bench(self, engine, engine.open())
        finally:
            engine.close()

    def test_facts_agree_with_each_other(self) -> None:
        with self.opened() as bench:
            info = bench.info
            assert info.n_slots >= 2
            assert info.n_ctx_seq >= 8
            assert info.takes_tokens or info.takes_hidden
            assert info.n_output > 0
            assert info.slot_bytes > 0
            assert info.slot_bytes >= info.bytes_per_token * info.n_ctx_seq
            assert info.max_batch_tokens >= 1
            assert info.max_outputs >= 1
            assert 0 <= info.layers[0] < info.layers[1] <= info.layer_count
            assert info.recipe.layers == info.layers
            assert info.recipe.layer_count == info.layer_count
            assert info.recipe.n_ctx_seq == info.n_ctx_seq

    def test_slots_are_empty_at_first(self) -> None:
        with self.opened() as bench:
            assert [bench.engine.length(slot) for slot in bench.slots] == [0] * bench.info.n_slots

    def test_rows_are_what_was_asked_for(self) -> None:
        with self.opened() as bench:
            kinds: list[tuple[Output, int]] = [("none", 0), ("last", 1), ("all", 3)]
            for slot, (output, n_rows) in zip([0, 1, 0], kinds, strict=True):
                before = bench.engine.length(slot)
                rows = bench.append(slot, 3, output=output)
                assert rows.shape == (n_rows, bench.info.n_output)
                assert rows.dtype == np.float32
                assert np.isfinite(rows).all()
                assert bench.engine.length(slot) == before + 3

    def test_rows_are_never_written_to_again(self) -> None:
        with self.opened() as bench:
            rows = bench.append(0, 3, output="all")
            copy = rows.copy()
            bench.append(0, 3, output="all", seed=1)
            bench.append(1, 3, output="all", seed=2)
            assert np.array_equal(rows, copy)

    def test_the_last_row_is_that_of_the_last_token(self) -> None:
        with self.opened() as bench:
            last = bench.append(0, 4)
            every = bench.append(1, 4, output="all")
            # Not bit for bit: the head works on another number of rows.
            assert np.allclose(last[0], every[-1], rtol=1e-2, atol=1e-2)

    def test_every_slot_gives_the_same_bits(self) -> None:
        with self.opened() as bench:
            first = bench.story(0)
            for slot in reversed(bench.slots[1:]):
                assert _same(first, bench.story(slot))

    def test_rows_depend_on_all_that_the_slot_holds(self) -> None:
        with self.opened() as bench:
            bench.append(0, 3, seed=0)
            bench.append(1, 3, seed=7)
            assert not np.array_equal(bench.append(0, 1, seed=3), bench.append(1, 1, seed=3))

    def test_what_a_neighbour_holds_changes_no_bit(self) -> None:
        stories = []
        for seed in (1, 2):
            with self.opened() as bench:
                bench.append(0, 5, seed=seed)
                rows = [bench.append(1, 4)]
                bench.append(0, 1, seed=seed)
                rows.append(bench.append(1, 1, seed=5))
                bench.engine.clear(0)
                rows.append(bench.append(1, 1, seed=6))
                stories.append(rows)
        assert _same(*stories)

    def test_a_group_is_appended_to_member_by_member(self) -> None:
        with self.opened() as bench:
            for slot in (0, 1):
                bench.append(slot, 3, seed=slot)
            grouped = bench.process([bench.part(slot, 1, seed=10 + slot) for slot in (0, 1)])
            assert [rows.shape for rows in grouped] == [(1, bench.info.n_output)] * 2
            assert [bench.engine.length(slot) for slot in (0, 1)] == [4, 4]
        with self.opened() as bench:
            for slot in (0, 1):
                bench.append(slot, 3, seed=slot)
            alone = [bench.append(slot, 1, seed=10 + slot) for slot in (0, 1)]
        for mine, theirs, other in zip(grouped, alone, reversed(alone), strict=True):
            assert np.allclose(mine, theirs, rtol=1e-2, atol=1e-2)
            assert not np.allclose(mine, other, rtol=1e-2, atol=1e-2)

    def test_a_cleared_slot_is_as_new(self) -> None:
        with self.opened() as bench:
            as_new = bench.story(0)
            bench.append(0, 5, seed=9)
            bench.engine.clear(0)
            assert bench.engine.length(0) == 0
            assert _same(as_new, bench.story(0))
            bench.engine.clear(0)
            bench.engine.clear(0)
            assert bench.engine.length(0) == 0

    def test_a_slot_cut_back_is_as_if_nothing_had_followed(self) -> None:
        with self.opened() as bench:
            bench.append(0, 4)
            bench.append(0, 3, seed=1)
            if not bench.engine.truncate(0, 4):
                assert bench.info.memory != "attention"
                bench.engine.clear(0)
                assert bench.engine.length(0) == 0
                return
            assert bench.engine.length(0) == 4
            cut = [bench.append(0, 1, seed=5), bench.append(0, 1, seed=6)]
            bench.append(1, 4)
            assert _same(cut, [bench.append(1, 1, seed=5), bench.append(1, 1, seed=6)])

    def test_cutting_nothing_off_changes_nothing(self) -> None:
        with self.opened() as bench:
            bench.append(0, 4)
            bench.append(1, 4)
            assert bench.engine.truncate(0, 4)
            assert bench.engine.length(0) == 4
            assert np.array_equal(bench.append(0, 1, seed=5), bench.append(1, 1, seed=5))

    def test_cutting_one_slot_leaves_the_others_alone(self) -> None:
        with self.opened() as bench:
            bench.append(0, 4)
            bench.append(1, 4)
            if not bench.engine.truncate(0, 2):
                bench.engine.clear(0)
            assert bench.engine.length(1) == 4
            after = bench.append(1, 1, seed=5)
            bench.engine.clear(0)
            bench.append(0, 4)
            again = bench.append(0, 1, seed=5)
            if bench.info.recipe.layout == "unified":
                # Where slots share cells, those that one gives up are the other's next, and sums go in another order.
                assert np.allclose(after, again, rtol=1e-2, atol=1e-2)
            else:
                assert np.array_equal(after, again)

    def test_a_move_changes_no_bit(self) -> None:
        with self.opened() as bench:
            if math.isinf(bench.info.move_cost):
                return
            first, last = bench.slots[0], bench.slots[-1]
            stories = []
            for moves in (False, True):
                rows = [bench.append(first, 4)]
                if moves:
                    bench.engine.move(first, last)
                held = last if moves else first
                rows += [bench.append(held, 1, seed=5), bench.append(held, 3, seed=6, output="all")]
                if moves:
                    bench.engine.move(last, first)
                assert [bench.engine.length(slot) for slot in (first, last)] == [8, 0]
                rows.append(bench.append(first, 1, seed=7))
                bench.engine.clear(first)
                stories.append(rows)
            assert _same(*stories)

    def test_a_move_leaves_nothing_behind_and_its_neighbours_alone(self) -> None:
        with self.opened() as bench:
            if math.isinf(bench.info.move_cost) or bench.info.n_slots < 3:
                return
            as_new = bench.story(0)
            bench.append(1, 4, seed=1)
            bench.append(0, 4)
            bench.engine.move(0, 2)
            # The new tenant writes to its cells before the mover's next call.
            assert _same(as_new, bench.story(0))
            moved, neighbour = bench.append(2, 1, seed=5), bench.append(1, 1, seed=5)
            bench.engine.clear(1)
            bench.engine.clear(2)
            bench.append(1, 4)
            bench.append(2, 4, seed=1)
            assert np.array_equal(moved, bench.append(1, 1, seed=5))
            assert np.array_equal(neighbour, bench.append(2, 1, seed=5))

    def test_a_slot_takes_all_the_tokens_that_it_says(self) -> None:
        with self.opened() as bench:
            full = bench.info.n_ctx_seq
            while (held := bench.engine.length(1)) < full:
                bench.append(1, min(bench.info.max_batch_tokens, full - held), output="none")
            assert bench.engine.length(1) == full
            assert bench.engine.length(0) == 0
            assert bench.append(0, 1).shape == (1, bench.info.n_output)

    def test_two_engines_give_the_same_bits(self) -> None:
        stories, digests = [], set()
        for _ in range(2):
            with self.opened() as bench:
                stories.append(bench.story(1))
                digests.add(bench.info.recipe.digest())
        assert _same(*stories)
        assert len(digests) == 1


class _Bench:
    """An opened engine, and short words for what tests do with it."""

    def __init__(self, contract: EngineContract, engine: Engine, info: EngineInfo) -> None:
        self.contract = contract
        self.engine = engine
        self.info = info
        self.slots = list(range(info.n_slots))

    def part(self, slot: int, n: int, *, output: Output = "last", seed: int = 0) -> Append:
        data = self.contract.make_data(self.info, n, seed)
        return Append(slot, self.engine.length(slot), data, output)

    def process(self, group: Sequence[Append]) -> list[Rows]:
        return self.engine.process(group)

    def append(self, slot: int, n: int, *, output: Output = "last", seed: int = 0) -> Rows:
        (rows,) = self.process([self.part(slot, n, output=output, seed=seed)])
        return rows

    def story(self, slot: int) -> list[Rows]:
        """Append a few times to an empty slot, and empty it."""
        rows = [self.append(slot, 3, output="all"), self.append(slot, 1, seed=1), self.append(slot, 2, seed=2)]
        self.engine.clear(slot)
        return rows


def _same(ones: Sequence[Rows], others: Sequence[Rows]) -> bool:
    return all(itertools.starmap(np.array_equal, zip(ones, others, strict=True)))
