"""Suite `prefill`: one prompt, against the bare loop with the same chunks."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from hotkv_trio._cli.bench._bare import BareLoop
from hotkv_trio._cli.bench._findings import Bar, Curve, Findings, Spread, take_turns
from hotkv_trio._cli.bench._setting import CHUNK, open_bench, slots_of

if TYPE_CHECKING:
    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Setting
    from hotkv_trio._inputs import Tokens
    from hotkv_trio._session import Session


async def measure_prefill(setting: Setting) -> Findings:
    """Measure a prompt's prefill by the runtime and by the bare loop, in turns."""
    sizes = setting.sizes
    rounds = [max(sizes.few_rounds, sizes.rounds * 128 // max(128, n)) for n in sizes.prompts]
    setting.progress.begin("prefill: a prompt against a bare loop", sum(rounds))
    rows: list[dict[str, Cell]] = []
    bars: list[Bar] = []
    points: list[tuple[float, Spread]] = []
    async with open_bench(setting, n_slots=1, n_ctx=max(sizes.prompts)) as bench:
        (session,) = await bench.sessions(1, start=0)
        (slot,) = slots_of([session])
        loop = BareLoop(bench)
        for n, turns in zip(sizes.prompts, rounds, strict=True):
            tokens = bench.tokens(n, seed=n)
            samples = await take_turns(
                {"runtime": partial(_prefill, session, tokens), "loop": partial(loop.prefill, slot, tokens, CHUNK)},
                turns,
                setting.progress.advance,
            )
            ratio = Spread.of_ratios(samples["loop"], samples["runtime"])
            points.append((n, ratio))
            rows.append({
                "tokens": n,
                "runtime tok/s": Spread.of(n / seconds for seconds in samples["runtime"]),
                "loop tok/s": Spread.of(n / seconds for seconds in samples["loop"]),
                "of the loop": ratio,
            })
            bars.append(Bar.at_least(f"{n} tokens: of the bare loop", ratio.median, 0.99))
    return Findings(
        suite="prefill",
        title="A prompt",
        caption=f"In chunks of {CHUNK} tokens, on one context; the last token's row is copied out.",
        rows=rows,
        bars=bars,
        curves=[Curve("prefill", "Prefill speed of the bare loop's", "tokens", "ratio", {"bare loop": points}, 0.99)],
    )


async def _prefill(session: Session, tokens: Tokens) -> float:
    began = time.perf_counter()
    await session.prefill(tokens)
    seconds = time.perf_counter() - began
    await session.truncate(0)
    return seconds
