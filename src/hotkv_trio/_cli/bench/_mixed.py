"""Suite `mixed`: a long prefill beside sessions that decode."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import numpy as np
import trio

from hotkv_trio._cli.bench._findings import Bar, Curve, Findings, Spread, take_turns
from hotkv_trio._cli.bench._setting import CHUNK, START, decode_together, open_bench, truncate_all

if TYPE_CHECKING:
    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Bench, Setting
    from hotkv_trio._inputs import Tokens
    from hotkv_trio._session import Session


async def measure_mixed(setting: Setting) -> Findings:
    """Measure decoders' inter-token times beside a prefill, by its chunk, and both one after the other, in turns."""
    sizes = setting.sizes
    cases = [(n, chunk) for n in sizes.mixed_decoders for chunk in sizes.mixed_chunks]
    setting.progress.begin("mixed: a long prefill beside decoders", sizes.few_rounds * len(cases))
    await trio.lowlevel.checkpoint()
    rows: list[dict[str, Cell]] = []
    bars: list[Bar] = []
    waits: dict[str, list[tuple[float, Spread]]] = {f"{n} decoders": [] for n in sizes.mixed_decoders}
    for n, chunk in cases:
        n_ctx = max(sizes.mixed_prefill, START + -(-sizes.mixed_prefill // chunk))
        async with open_bench(setting, n_slots=n + 1, n_ctx=n_ctx, prefill_chunk=chunk) as bench:
            turns = await _Turns.begin(bench, n, sizes.mixed_prefill, chunk)
            samples = await take_turns(
                {"mixed": turns.mixed, "apart": turns.apart}, sizes.few_rounds, setting.progress.advance
            )
        p50, p95, p99 = (float(x) for x in np.percentile(turns.gaps, (50, 95, 99)))
        step, piece = np.median(turns.step_seconds), np.median(turns.chunk_seconds)
        unit = float(step + piece)
        total = Spread.of_ratios(samples["apart"], samples["mixed"])
        waits[f"{n} decoders"].append((chunk, Spread.of([gap * 1e3 for gap in turns.gaps])))
        rows.append({
            "decoders": n,
            "chunk": chunk,
            "step ms": float(step) * 1e3,
            "chunk ms": float(piece) * 1e3,
            "p50 ms": p50 * 1e3,
            "p95 ms": p95 * 1e3,
            "p99 ms": p99 * 1e3,
            "p99 / (step + chunk)": p99 / unit,
            "tok/s": Spread.of(turns.n_tokens / seconds for seconds in samples["mixed"]),
            "of one after the other": total,
        })
        if n == max(sizes.mixed_decoders):
            bars += [
                Bar.at_most(f"{n} decoders, chunk {chunk}: p99 / (step + chunk)", p99 / unit, 1.3),
                Bar.at_least(f"{n} decoders, chunk {chunk}: of one after the other", total.median, 0.95),
            ]
    return Findings(
        suite="mixed",
        title=f"A prefill of {sizes.mixed_prefill} tokens beside decoders",
        caption="p50, p95, p99: of the time between two tokens of a decoder, while the prefill lasts. step: of all"
        " decoders alone; chunk: the prefill's, alone, on average. As many steps are decoded as there are chunks."
        f" The runtime's chunk is {CHUNK} by default.",
        rows=rows,
        bars=bars,
        curves=[Curve("mixed", "Between two tokens of a decoder", "tokens in a chunk", "ms", waits)],
    )


@attrs.define(eq=False)
class _Turns:
    sessions: list[Session]
    prompter: Session
    tokens: list[int]
    prompt: Tokens
    n_chunks: int
    gaps: list[float] = attrs.field(factory=list)
    """Seconds between two tokens of a decoder."""
    step_seconds: list[float] = attrs.field(factory=list)
    chunk_seconds: list[float] = attrs.field(factory=list)

    @classmethod
    async def begin(cls, bench: Bench, n: int, n_prompt: int, chunk: int) -> _Turns:
        sessions = await bench.sessions(n)
        (prompter,) = await bench.sessions(1, start=0)
        tokens = [int(t) for t in bench.tokens(n, seed=n)]
        return cls(sessions, prompter, tokens, bench.tokens(n_prompt, seed=n_prompt), -(-n_prompt // chunk))

    @property
    def n_tokens(self) -> int:
        return len(self.prompt) + len(self.sessions) * self.n_chunks

    async def mixed(self) -> float:
        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for session, token in zip(self.sessions, self.tokens, strict=True):
                nursery.start_soon(self._decode, session, token)
            nursery.start_soon(self.prompter.prefill, self.prompt)
        seconds = time.perf_counter() - began
        await self._back()
        return seconds

    async def apart(self) -> float:
        began = time.perf_counter()
        await self.prompter.prefill(self.prompt)
        prefilled = time.perf_counter() - began
        decoded, _ = await decode_together(self.sessions, self.tokens, self.n_chunks)
        self.chunk_seconds.append(prefilled / self.n_chunks)
        self.step_seconds.append(decoded / self.n_chunks)
        await self._back()
        return prefilled + decoded

    async def _decode(self, session: Session, token: int) -> None:
        last = time.perf_counter()
        await trio.lowlevel.checkpoint()
        for _ in range(self.n_chunks):
            result = await session.decode(token)
            token = int(result.output[0].argmax())
            now = time.perf_counter()
            self.gaps.append(now - last)
            last = now

    async def _back(self) -> None:
        await truncate_all(self.sessions, START)
        await self.prompter.truncate(0)
