"""``hotkv-trio doctor``: whether what is installed here is what everything was proven with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from rich.console import Console

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._arguments import AsJson, OptionalModelFile  # ruff: ignore[typing-only-first-party-import]
from hotkv_trio._cli._output import plain, print_facts, print_json, size, yes_no

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hotkv_trio._engine import EngineInfo
    from hotkv_trio.llama._installation import Installation


def doctor(
    *,
    model: OptionalModelFile = None,
    json_: AsJson = False,
) -> int:
    """Say what is installed, hold it against the pinned llama.cpp, and say which tap reads hidden states, and why.

    Exit status 1 if something is not as it was proven.
    """
    from hotkv_trio.llama._installation import read_installation

    found = read_installation()
    opened = None if model is None else _open(model)
    as_proven = found.is_pinned_version and found.is_pinned_commit
    if json_:
        document = attrs.asdict(found) | {"as_proven": as_proven}
        print_json(document if opened is None else document | {"model": attrs.asdict(opened)})
    else:
        print_facts([*_rows(found), *(() if opened is None else _model_rows(opened))])
        if not as_proven:
            Console().print(f"\nNext: pip install llama-cpp-python=={found.pinned_version}", highlight=False)
    return 0 if as_proven else 1


def _open(model: Path) -> EngineInfo:
    from hotkv_trio.llama import LlamaEngine

    with advising(A_WHOLE_MODEL):
        engine = LlamaEngine(model, n_slots=2, n_ctx=1024)
        try:
            return engine.open()
        finally:
            engine.close()


def _rows(found: Installation) -> Iterator[tuple[str, object]]:
    for name in ("hotkv-trio", "trio", "numpy", "gguf"):
        yield name, found.packages[name]
    yield "Python", f"{found.python}, {found.system}"
    for name, ours, pinned, held in (
        ("llama-cpp-python", found.packages["llama-cpp-python"], found.pinned_version, found.is_pinned_version),
        ("llama.cpp", found.llama_cpp_commit, found.pinned_commit[:9], found.is_pinned_commit),
    ):
        yield name, plain(f"{ours}; pinned: {pinned}; the same: ").append_text(yes_no(held))
    yield "tap", f"{found.tap}: {found.tap_reason}"
    yield "processor", found.processor
    yield "used of it", ", ".join(found.features)
    yield "threads", f"{found.processors} by default: the processors that this process may use"


def _model_rows(info: EngineInfo) -> Iterator[tuple[str, object]]:
    yield "", ""
    yield "architecture", info.recipe.architecture
    yield "memory", info.memory
    yield "a session's KV", f"{size(info.slot_bytes)} for {info.n_ctx_seq:,} tokens; llama.cpp's log says the same"
    yield "recipe", info.recipe.digest()
