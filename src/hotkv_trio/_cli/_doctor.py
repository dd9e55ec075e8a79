"""``hotkv-trio doctor``: whether what is installed here is what everything was proven with, and isolates a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._arguments import AsJson, OptionalModelFile  # ruff: ignore[typing-only-first-party-import]
from hotkv_trio._cli._output import new_console, plain, print_facts, print_json, yes_no
from hotkv_trio._cli._progress import Progress
from hotkv_trio._sizes import size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hotkv_trio._engine import EngineInfo
    from hotkv_trio._isolation import IsolationReport
    from hotkv_trio.llama import Layout
    from hotkv_trio.llama._installation import Installation


def doctor(
    *,
    model: OptionalModelFile = None,
    json_: AsJson = False,
) -> int:
    """Say what is installed, hold it against the pinned llama.cpp, and say which tap reads hidden states, and why.

    With a model, prove on it that sessions are isolated here, bit for bit, and say what holds in each layout: some
    hundred calls, with 25,000 tokens in all, which takes a large model a while.

    The last line is the verdict. Exit status 1 if something is not as it was proven.
    """
    from hotkv_trio.llama._architectures import ARCHITECTURES
    from hotkv_trio.llama._installation import read_installation

    found = read_installation()
    pinned = found.is_pinned_version and found.is_pinned_commit
    proven = None if model is None else _prove(model)
    as_proven = pinned and (proven is None or proven.streams.isolated)
    if json_:
        document = attrs.asdict(found) | {"as_proven": as_proven, "may_be_cut": sorted(ARCHITECTURES)}
        if proven is not None:
            unified = {"refused": proven.unified} if isinstance(proven.unified, str) else _findings(proven.unified)
            document |= {
                "model": attrs.asdict(proven.info),
                "isolation": _findings(proven.streams),
                "isolation_unified": unified,
            }
        print_json(document)
    else:
        rows = [*_rows(found), ("may be cut", "models of " + ", ".join(sorted(ARCHITECTURES)))]
        rows += () if proven is None else _model_rows(proven)
        print_facts([*rows, ("", ""), ("verdict", _verdict(proven, pinned=pinned))])
        if not pinned:
            new_console().print(f"\nNext: pip install llama-cpp-python=={found.pinned_version}", highlight=False)
    return 0 if as_proven else 1


@attrs.frozen
class Proven:
    """What holds of a model here."""

    info: EngineInfo
    streams: IsolationReport
    unified: IsolationReport | str
    """Or why that layout is refused."""


def _prove(model: Path) -> Proven:
    import trio

    from hotkv_trio import InvalidInput, open_runtime
    from hotkv_trio.llama import LlamaEngine
    from hotkv_trio.llama._facts import read_model_facts

    def engine(layout: Layout) -> LlamaEngine:
        return LlamaEngine(model, n_slots=4, n_ctx=1024, layout=layout)

    async def prove(progress: Progress) -> tuple[EngineInfo, IsolationReport]:
        progress.begin("opening the model", 1)
        async with open_runtime(engine("streams")) as runtime:
            progress.begin("layout streams: proving isolation; a large model takes minutes", 1)
            return runtime.info, await runtime.verify_isolation()

    def prove_unified() -> IsolationReport | str:
        shared = engine("unified")
        try:
            shared.open()
            report = shared.isolation
        except InvalidInput as exc:
            return exc.what
        finally:
            shared.close()
        assert report is not None  # noqa: S101 - as `LlamaEngine.open` promises
        return report

    with advising(A_WHOLE_MODEL):
        read_model_facts(model).require_model()
    with advising(A_WHOLE_MODEL), Progress(new_console(stderr=True), count="") as progress:
        info, streams = trio.run(prove, progress)
        progress.begin("layout unified: the same", 1)
        return Proven(info, streams, prove_unified())


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


def _model_rows(proven: Proven) -> Iterator[tuple[str, object]]:
    info = proven.info
    yield "", ""
    yield "architecture", info.recipe.architecture
    yield "memory", info.memory
    yield "a session's KV", f"{size(info.slot_bytes)} for {info.n_ctx_seq:,} tokens; llama.cpp's log says the same"
    yield "recipe", f"{info.recipe.digest()}, with as many tokens, f16 KV and streams"
    yield "", ""
    yield "layout streams", "the default: each session has cells of its own"
    yield from _report_rows("isolated", proven.streams)
    yield "", ""
    if isinstance(proven.unified, str):
        yield "layout unified", "refused: " + proven.unified.removeprefix("layout='unified': ")
        return
    yield "layout unified", "on request, for ragged loads: sessions take cells from one pool, and less is promised"
    yield from _report_rows("may be used", proven.unified)
    yield "  not promised", "who else is there, and when, changes the bits of a session; exact=True is refused"


def _verdict(proven: Proven | None, *, pinned: bool) -> str:
    if not pinned:
        return "NOT as it was proven: another llama.cpp than the pinned one"
    if proven is None:
        return "as it was proven: the pinned llama.cpp; --model FILE tries isolation on a model as well"
    if not proven.streams.isolated:
        return "NOT as it was proven: sessions of this model are not isolated here"
    return "as it was proven: the pinned llama.cpp, and sessions of this model are isolated here"


def _report_rows(verdict: str, report: IsolationReport) -> Iterator[tuple[str, object]]:
    tried = f", on {report.slots} slots, with {report.tokens:,} tokens in a session, f16 KV"
    yield f"  {verdict}", yes_no(report.isolated).append(tried, style="not bold default")
    for name, held, words in report.sentences():
        if held is not None or name.replace(" ", "_") in report.promised:
            yield f"  {name}", words
