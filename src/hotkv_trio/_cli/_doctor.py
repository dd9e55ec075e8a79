"""``hotkv-trio doctor``: whether what is installed here is what everything was proven with, and isolates a model."""

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
    from hotkv_trio._isolation import IsolationReport
    from hotkv_trio.llama._installation import Installation


def doctor(
    *,
    model: OptionalModelFile = None,
    json_: AsJson = False,
) -> int:
    """Say what is installed, hold it against the pinned llama.cpp, and say which tap reads hidden states, and why.

    With a model, prove on it that sessions are isolated here, bit for bit, and say what holds: some hundred calls, with
    20,000 tokens in all.

    Exit status 1 if something is not as it was proven.
    """
    from hotkv_trio.llama._installation import read_installation

    found = read_installation()
    pinned = found.is_pinned_version and found.is_pinned_commit
    opened = None if model is None else _prove(model)
    as_proven = pinned and (opened is None or opened[1].isolated)
    if json_:
        document = attrs.asdict(found) | {"as_proven": as_proven}
        if opened is not None:
            document |= {"model": attrs.asdict(opened[0]), "isolation": _findings(opened[1])}
        print_json(document)
    else:
        print_facts([*_rows(found), *(() if opened is None else _model_rows(*opened))])
        if not pinned:
            Console().print(f"\nNext: pip install llama-cpp-python=={found.pinned_version}", highlight=False)
    return 0 if as_proven else 1


def _prove(model: Path) -> tuple[EngineInfo, IsolationReport]:
    import trio

    from hotkv_trio import open_runtime
    from hotkv_trio.llama import LlamaEngine

    async def prove() -> tuple[EngineInfo, IsolationReport]:
        async with open_runtime(LlamaEngine(model, n_slots=4, n_ctx=1024)) as runtime:
            Console(stderr=True).print("proving isolation on this model …", style="dim")
            return runtime.info, await runtime.verify_isolation()

    with advising(A_WHOLE_MODEL):
        return trio.run(prove)


def _findings(report: IsolationReport) -> dict[str, object]:
    return attrs.asdict(report) | {"isolated": report.isolated, "batch_invariant": report.batch_invariant}


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


def _model_rows(info: EngineInfo, report: IsolationReport) -> Iterator[tuple[str, object]]:
    yield "", ""
    yield "architecture", info.recipe.architecture
    yield "memory", info.memory
    yield "a session's KV", f"{size(info.slot_bytes)} for {info.n_ctx_seq:,} tokens; llama.cpp's log says the same"
    yield "recipe", info.recipe.digest()
    yield "", ""
    proven = f"on {report.slots} slots, with {report.tokens:,} tokens in a session, f16 KV: "
    yield "sessions isolated", plain(proven).append_text(yes_no(report.isolated))
    for name, _, words in report.sentences():
        yield name, words
