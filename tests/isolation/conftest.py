from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.isolation._programs import Case, build

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hotkv_trio.llama import KVType


@pytest.fixture(scope="session")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, KVType, int], Case]:
    """Return what makes a case of a tiny model, built once a session."""
    folder = tmp_path_factory.mktemp("isolation")
    built: dict[str, Path] = {}

    def make(weights: str, kv: KVType, n_slots: int) -> Case:
        if weights not in built:
            built[weights] = build(folder, weights)
        return Case(built[weights], kv, n_slots)

    return make
