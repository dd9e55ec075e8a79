"""Tiny models made once a session, and engines on them."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest

from hotkv_trio._engine import Append, EngineInfo, Output, Rows
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

N_VOCAB = 300

Data = npt.NDArray[np.int32] | npt.NDArray[np.float32]


class Tiny(Protocol):
    """Builds a tiny model, or returns the path of the one that was built with the same arguments."""

    def __call__(self, arch: str = "llama", **sizes: Any) -> Path: ...


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")

    @functools.cache
    def build(arch: str = "llama", **sizes: Any) -> Path:
        name = "-".join([arch, *(f"{key}_{value}" for key, value in sorted(sizes.items()))])
        return build_tiny_gguf(folder / f"{name}.gguf", arch=arch, **({"n_vocab": N_VOCAB} | sizes))

    return build


@pytest.fixture(scope="session")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the slices of tiny models."""
    return tmp_path_factory.mktemp("slices")


def tokens(n: int, seed: int = 0, n_vocab: int = N_VOCAB) -> npt.NDArray[np.int32]:
    """Return random tokens."""
    return np.random.default_rng([seed, n]).integers(0, n_vocab, n, dtype=np.int32)


def hidden(n: int, n_embd: int, seed: int = 0) -> Rows:
    """Return random hidden states."""
    return np.random.default_rng([seed, n]).standard_normal((n, n_embd), dtype=np.float32)


class Opened:
    """An open engine, and how many tokens each slot should hold."""

    def __init__(self, engine: LlamaEngine, info: EngineInfo) -> None:
        self.engine = engine
        self.info = info

    def append(self, slot: int, data: Data, output: Output = "last") -> Rows:
        """Append to one slot, alone."""
        (rows,) = self.engine.process([self.member(slot, data, output)])
        return rows

    def group(self, members: Mapping[int, Data], output: Output = "last") -> dict[int, Rows]:
        """Append to several slots in one call."""
        rows = self.engine.process([self.member(slot, data, output) for slot, data in members.items()])
        return dict(zip(members, rows, strict=True))

    def member(self, slot: int, data: Data, output: Output = "last") -> Append:
        """Return an append at the slot's end."""
        return Append(slot, self.engine.length(slot), data, output)

    def chunks(self, slot: int, data: Data, chunk: int, output: Output = "last") -> list[Rows]:
        """Append in chunks, one call each."""
        return [self.append(slot, data[i : i + chunk], output) for i in range(0, len(data), chunk)]


@contextlib.contextmanager
def opened(path: Path, **options: Any) -> Generator[Opened]:
    """Open an engine with small defaults, and close it."""
    engine = LlamaEngine(path, **({"n_slots": 4, "n_ctx": 256, "threads": 1} | options))
    try:
        yield Opened(engine, engine.open())
    finally:
        engine.close()
