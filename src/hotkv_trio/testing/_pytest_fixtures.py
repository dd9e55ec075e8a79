"""The fixtures that the pytest plugin offers when it is asked to.  Needs ``pytest-trio``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import pytest_trio  # type: ignore[import-untyped]

from hotkv_trio._owner import InlineExecutor
from hotkv_trio._runtime import open_runtime
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from hotkv_trio.testing._fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from hotkv_trio._runtime import Runtime


class TinyGGUF(Protocol):
    """Builds a tiny model, once for the same arguments; see `build_tiny_gguf`."""

    def __call__(self, arch: str = "llama", seed: int = 0, **sizes: Any) -> Path:
        """Return the path of the model."""
        ...


@pytest.fixture
def hotkv_engine() -> FakeEngine:
    """Return a `FakeEngine` of 4 slots; override it to test with another engine."""
    return FakeEngine()


@pytest_trio.trio_fixture  # type: ignore[untyped-decorator]
async def hotkv_runtime(hotkv_engine: FakeEngine) -> AsyncGenerator[Runtime]:  # noqa: ASYNC900
    """Open a runtime on ``hotkv_engine`` whose native calls run in trio's thread; for trio tests."""
    async with open_runtime(hotkv_engine, executor=InlineExecutor()) as runtime:
        yield runtime  # noqa: ASYNC119 - pytest-trio closes it


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGGUF:
    """Return what builds tiny GGUF files in a folder of the test run."""
    folder = tmp_path_factory.mktemp("tiny_gguf")

    @functools.cache
    def build(arch: str = "llama", seed: int = 0, **sizes: Any) -> Path:
        parts = [arch, str(seed), *(f"{name}_{value}" for name, value in sorted(sizes.items()))]
        return build_tiny_gguf(folder / f"{'-'.join(parts)}.gguf", arch, seed, **sizes)

    return build
