"""Suite `memory`: KV bytes as accounted, as llama.cpp reports them, and resident."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import TYPE_CHECKING

import trio

from hotkv_trio._cli.bench._findings import Bar, Findings
from hotkv_trio._errors import EngineFailed, InvalidInput
from hotkv_trio.llama._architectures import valid_cuts
from hotkv_trio.llama._facts import read_model_facts

if TYPE_CHECKING:
    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Setting
    from hotkv_trio.llama._facts import ModelFacts

_N_CTX = 2048
_MIB = 1 << 20


async def measure_memory(setting: Setting) -> Findings:
    """Open engines of several layer ranges and numbers of slots, each in a process of its own."""
    facts = read_model_facts(setting.model)
    cases = [(layers, slots) for layers in _ranges(facts) for slots in setting.sizes.memory_slots]
    setting.progress.begin("memory: bytes by layers and slots", len(cases))
    rows: list[dict[str, Cell]] = []
    off = 0.0
    first: tuple[tuple[int, int], int, float, float] | None = None
    await trio.lowlevel.checkpoint()
    with tempfile.TemporaryDirectory(prefix="hotkv-trio-") as folder:
        for layers, slots in cases:
            arguments = [setting.model, *layers, slots, _N_CTX, folder]
            command = [sys.executable, "-m", "hotkv_trio._cli.bench._resident", *map(str, arguments)]
            done = await trio.run_process(command, capture_stdout=True, check=False)
            if done.returncode:
                raise EngineFailed(done.returncode, f"the process that opens layers {layers[0]}:{layers[1]} failed")
            found = json.loads(done.stdout)
            accounted, reported, resident = (found[name] / _MIB for name in ("accounted", "reported", "resident"))
            off = max(off, abs(accounted - reported))
            first = first if first and first[0] == layers else (layers, slots, accounted, resident)
            more = slots - first[1]
            rows.append({
                "layers": "{}:{}".format(*layers),
                "slots": slots,
                "accounted MiB": accounted,
                "llama.cpp's log MiB": reported,
                "resident MiB": resident,
                "a slot more, accounted": (accounted - first[2]) / more if more else None,
                "a slot more, resident": (resident - first[3]) / more if more else None,
            })
            setting.progress.advance()
    return Findings(
        suite="memory",
        title=f"KV bytes, {_N_CTX} tokens a session",
        caption="resident: by how much the process's own memory grew when the engine was opened, with weights that are"
        " not mapped from the file, and what llama.cpp computes in; a slot more: than with the fewest slots, for each.",
        rows=rows,
        bars=[Bar.at_most("accounted and reported differ by MiB at most", off, 0.01)],
    )


def _ranges(facts: ModelFacts) -> list[tuple[int, int]]:
    """Return all layers; and two halves, as near as may be, of a model that can be cut."""
    whole = (0, facts.n_layer)
    try:
        cuts = valid_cuts(facts)
    except InvalidInput:
        cuts = ()
    if not cuts:
        return [whole]
    half = min(cuts, key=lambda cut: abs(cut - facts.n_layer // 2))
    return [whole, (0, half), (half, facts.n_layer)]
