"""Suite `overhead`: sessions that decode together, against the bare loop; and what exact mode costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from hotkv_trio._cli.bench._bare import BareLoop
from hotkv_trio._cli.bench._findings import Bar, Curve, Findings, Spread, take_turns
from hotkv_trio._cli.bench._setting import START, decode_together, open_bench, slots_of, truncate_all
from hotkv_trio._errors import EngineFailed

if TYPE_CHECKING:
    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Bench, Setting

RUNTIME, EXACT, COPYING, VIEWING = "runtime", "exact", "copying loop", "viewing loop"


async def measure_overhead(setting: Setting) -> Findings:
    """Measure N sessions that decode together, in grouped and in exact mode, and the bare loop, in turns."""
    sizes = setting.sizes
    setting.progress.begin("overhead: decoding against a bare loop", sizes.rounds * len(sizes.sessions))
    await trio.lowlevel.checkpoint()
    rows: list[dict[str, Cell]] = []
    bars: list[Bar] = []
    ratios: dict[str, list[tuple[float, Spread]]] = {COPYING: [], VIEWING: []}
    for n in sizes.sessions:
        steps = max(8, sizes.turn_tokens // n)
        async with open_bench(setting, n_slots=n, n_ctx=START + steps) as bench:
            samples, same = await _turns(setting, bench, n, steps)
        copying = Spread.of_ratios(samples[COPYING], samples[RUNTIME])
        viewing = Spread.of_ratios(samples[VIEWING], samples[RUNTIME])
        ratios[COPYING].append((n, copying))
        ratios[VIEWING].append((n, viewing))
        rows.append({
            "N": n,
            "runtime tok/s": Spread.of(n * steps / seconds for seconds in samples[RUNTIME]),
            "loop tok/s": Spread.of(n * steps / seconds for seconds in samples[COPYING]),
            "of the loop": copying,
            "of one without copies": viewing,
            "exact, of grouped": Spread.of_ratios(samples[RUNTIME], samples[EXACT]),
            "same tokens when exact": "yes" if same else "no",
        })
        bars.append(Bar.at_least(f"N = {n}: of the bare loop", copying.median, 0.98 if n >= 4 else 0.97))
    return Findings(
        suite="overhead",
        title="Sessions that decode together",
        caption="The bare loop runs in the owner thread, on the same context, slots and positions, and decodes the same"
        " tokens. It copies each step's logits, as the runtime does for its callers; the one without copies"
        " reads them where llama.cpp left them.",
        rows=rows,
        bars=bars,
        curves=[Curve("overhead", "Decode speed of the bare loop's", "sessions", "ratio", ratios, 0.98)],
    )


async def _turns(setting: Setting, bench: Bench, n: int, steps: int) -> tuple[dict[str, list[float]], bool]:
    sessions = await bench.sessions(n)
    slots, tokens, loop = slots_of(sessions), [int(t) for t in bench.tokens(n, seed=n)], BareLoop(bench)
    plan = bench.runtime._scheduler.plan
    grouped = plan.max_group
    ended: dict[str, list[int]] = {}

    async def with_runtime(name: str, max_group: int) -> float:
        plan.max_group = max_group
        seconds, ended[name] = await decode_together(sessions, tokens, steps)
        await truncate_all(sessions, START)
        return seconds

    async def by_hand(name: str, *, copy: bool) -> float:
        seconds, ended[name] = await loop.decode(slots, START, tokens, steps, copy=copy)
        return seconds

    samples = await take_turns(
        {
            RUNTIME: lambda: with_runtime(RUNTIME, grouped),
            COPYING: lambda: by_hand(COPYING, copy=True),
            VIEWING: lambda: by_hand(VIEWING, copy=False),
            EXACT: lambda: with_runtime(EXACT, 1),
        },
        setting.sizes.rounds,
        setting.progress.advance,
    )
    if not ended[RUNTIME] == ended[COPYING] == ended[VIEWING]:
        raise EngineFailed(None, f"the runtime decoded other tokens than the bare loop: {ended}")
    return samples, ended[EXACT] == ended[RUNTIME]
