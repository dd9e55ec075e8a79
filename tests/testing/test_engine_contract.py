"""The contract of engines, held against FakeEngine and LlamaEngine of every memory kind, and against broken ones."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest

from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import EngineContract, FakeEngine, build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hotkv_trio import Append, Engine, EngineInfo
    from hotkv_trio._engine import Rows


@pytest.mark.parametrize("memory", ["attention", "sliding", "recurrent", "hybrid", "later shard"])
class TestFakeEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _choose(self, memory: Any) -> None:
        self._memory = memory

    def make_engine(self) -> Engine:
        if self._memory == "later shard":
            return FakeEngine(n_slots=3, n_vocab=0, n_embd=8)
        return FakeEngine(n_slots=3, memory=self._memory, n_swa=2)


MODELS = {
    "attention": ("llama", None),
    "unified": ("llama", None),
    "sliding": ("gemma3", None),
    "recurrent": ("mamba", None),
    "hybrid": ("jamba", None),
    "first shard": ("llama", (0, 1)),
    "last shard": ("llama", (1, 2)),
}


@pytest.mark.parametrize("kind", MODELS)
class TestLlamaEngine(EngineContract):
    @pytest.fixture(autouse=True)
    def _choose(self, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        architecture, self._layers = MODELS[kind]
        self._layout: Any = "unified" if kind == "unified" else "streams"
        self._folder: Path = tmp_path_factory.getbasetemp() / "contract"
        self._folder.mkdir(exist_ok=True)
        self._path = self._folder / f"{architecture}.gguf"
        if not self._path.exists():
            build_tiny_gguf(self._path, arch=architecture)

    def make_engine(self) -> Engine:
        return LlamaEngine(
            self._path,
            layers=self._layers,
            layout=self._layout,
            n_slots=3,
            n_ctx=256,
            threads=1,
            cache_dir=self._folder / "slices",
        )


class NoClear(FakeEngine):
    def clear(self, slot: int) -> None:
        """Forget to."""


class SwapsRows(FakeEngine):
    def process(self, group: Sequence[Append]) -> list[Rows]:
        return super().process(group)[::-1]


class ReusesItsBuffer(FakeEngine):
    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        if len(rows) == 1 and len(rows[0]) == 3:
            self._buffer: Rows = getattr(self, "_buffer", rows[0].copy())
            self._buffer[:] = rows[0]
            return [self._buffer]
        return rows


class CutsTooLittle(FakeEngine):
    def truncate(self, slot: int, length: int) -> bool:
        return super().truncate(slot, min(length + 1, self.length(slot)))


class SlotsDiffer(FakeEngine):
    def process(self, group: Sequence[Append]) -> list[Rows]:
        return [rows + np.float32(append.slot) for append, rows in zip(group, super().process(group), strict=True)]


class OpensDifferently(FakeEngine):
    bases = itertools.count(1)

    def open(self) -> EngineInfo:
        info = super().open()
        return attrs.evolve(info, recipe=attrs.evolve(info.recipe, rope_freq_base=float(next(self.bases))))


@pytest.mark.parametrize(
    "make, found_by",
    [
        (NoClear, "test_a_cleared_slot_is_as_new"),
        (SwapsRows, "test_a_group_is_appended_to_member_by_member"),
        (ReusesItsBuffer, "test_rows_are_never_written_to_again"),
        (CutsTooLittle, "test_a_slot_cut_back_is_as_if_nothing_had_followed"),
        (SlotsDiffer, "test_every_slot_gives_the_same_bits"),
        (OpensDifferently, "test_two_engines_give_the_same_bits"),
    ],
)
def test_a_broken_engine_is_found(make: Callable[[], Engine], found_by: str) -> None:
    contract = EngineContract()
    contract.make_engine = make  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        getattr(contract, found_by)()


def test_whoever_forgets_make_engine_is_told() -> None:
    with pytest.raises(NotImplementedError):
        EngineContract().test_slots_are_empty_at_first()
