"""The command: its arguments, the suites they name, and what becomes of the findings."""

from __future__ import annotations

import datetime as dt
import importlib.util
import os
import re
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import attrs
import trio
from cyclopts import Parameter, validators

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._arguments import AsJson, to_path
from hotkv_trio._cli._output import new_console, print_json
from hotkv_trio._cli._progress import Progress
from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from hotkv_trio._cli.bench._findings import Findings
    from hotkv_trio._cli.bench._setting import Setting

Suite: TypeAlias = Literal["core", "overhead", "prefill", "ragged", "mixed", "cancel", "memory", "peers"]


async def bench(
    *,
    suite: Annotated[
        list[Suite] | None, Parameter(consume_multiple=True, negative=(), help="Suites to run; else all.")
    ] = None,
    model: Annotated[
        Path | None,
        Parameter(converter=to_path, help="A GGUF file; without one a tiny random model is built, which shows little."),
    ] = None,
    plots: Annotated[Path | None, Parameter(help="A folder for plots (PNG); needs the extra bench.")] = None,
    llama_server: Annotated[Path | None, Parameter(help="The program, for the suite peers.")] = None,
    llama_batched_bench: Annotated[Path | None, Parameter(help="The program, for the suite peers.")] = None,
    threads: Annotated[
        int | None, Parameter(validator=validators.Number(gte=1), help="Of a native call; else one a processor.")
    ] = None,
    quick: Annotated[bool, Parameter(negative=(), help="Measure next to nothing, to see that it works.")] = False,
    json_: AsJson = False,
) -> None:
    """Measure what the runtime costs: ratios to llama.cpp driven by hand, in one run, by turns.

    Run it on a machine that does nothing else. With --model, and without --quick, the figures are held against what is
    asked of SmolLM2-135M. These are targets, not checks: the exit status is 0 whether they are met or not.
    """
    from hotkv_trio._cli.bench._setting import QUICK, Setting, Sizes
    from hotkv_trio._cli.bench._show import draw, show_all
    from hotkv_trio.llama._facts import read_model_facts

    # Suites take many minutes: what the last of them would refuse is refused before the first.
    if plots is not None:
        _check_plots(plots)
    if model is not None:
        with advising(A_WHOLE_MODEL):
            read_model_facts(model).require_model()
    with advising("the path of the program, as llama.cpp's build leaves it in bin"):
        for program in filter(None, (llama_server, llama_batched_bench)):
            if shutil.which(program) is None:
                raise InvalidInput(f"{program} is no program that can be run here")
    await trio.lowlevel.checkpoint()
    measured: list[Findings] = []
    with_bars = model is not None and not quick
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(new_console(stderr=True)))
        name = "tiny random model"
        if model is None:
            from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hotkv-trio-"))
            model = build_tiny_gguf(Path(folder) / "tiny.gguf", n_ctx_train=2048)
            # There is less to compute in a call than threads lose in waiting for each other.
            threads = threads or 1
        else:
            name = model.name
        setting = Setting(
            model=model,
            threads=threads,
            sizes=QUICK if quick else Sizes(),
            progress=progress,
            llama_server=llama_server,
            llama_batched_bench=llama_batched_bench,
        )
        before = _load()
        for chosen, measure in _suites().items():
            if suite is None or chosen in suite:
                began = time.monotonic()
                found = await measure(setting)
                measured.append(attrs.evolve(found, seconds=time.monotonic() - began))
    if plots is not None:
        for curve in [curve for found in measured for curve in found.curves]:
            draw(curve, plots)
    if json_:
        print_json({"on": _machine(name, threads, before), "suites": [found.as_dict() for found in measured]})
    else:
        show_all(measured, new_console(), with_bars=with_bars)


def _suites() -> Mapping[Suite, Callable[[Setting], Awaitable[Findings]]]:
    from hotkv_trio._cli.bench._cancel import measure_cancel
    from hotkv_trio._cli.bench._core import measure_core
    from hotkv_trio._cli.bench._memory import measure_memory
    from hotkv_trio._cli.bench._mixed import measure_mixed
    from hotkv_trio._cli.bench._overhead import measure_overhead
    from hotkv_trio._cli.bench._peers import measure_peers
    from hotkv_trio._cli.bench._prefill import measure_prefill
    from hotkv_trio._cli.bench._ragged import measure_ragged

    return {
        "core": measure_core,
        "overhead": measure_overhead,
        "prefill": measure_prefill,
        "ragged": measure_ragged,
        "mixed": measure_mixed,
        "cancel": measure_cancel,
        "memory": measure_memory,
        "peers": measure_peers,
    }


def _check_plots(folder: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        error = InvalidInput("plots need matplotlib, which is not installed")
        error.add_note("pip install '.[cli,bench]' in hotkv-trio's folder, or leave --plots out")
        raise error
    folder.mkdir(parents=True, exist_ok=True)


def _machine(model: str, threads: int | None, load_before: float) -> dict[str, Any]:
    """Return what everything was measured on."""
    from hotkv_trio.llama._installation import read_installation

    found = read_installation()
    try:
        memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        memory = None
    return {
        "date": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC",
        "model": model,
        "threads": threads or found.processors,
        "processor": found.processor,
        "processors": found.processors,
        "features": found.features,
        "memory_gib": int(memory[1]) / 2**20 if memory else None,
        "system": found.system,
        "python": found.python,
        "packages": dict(found.packages),
        "llama_cpp_commit": found.llama_cpp_commit,
        "load_before": load_before,
        "load_after": _load(),
    }


def _load() -> float:
    return os.getloadavg()[0]
