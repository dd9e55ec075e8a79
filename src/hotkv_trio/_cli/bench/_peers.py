"""Suite `peers`: whole sessions, a prompt and a generation each, beside what else serves them."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import trio

from hotkv_trio._cli.bench._findings import Bar, Curve, Findings, Spread, take_turns
from hotkv_trio._cli.bench._server import batched_bench, open_llama_server
from hotkv_trio._cli.bench._setting import Bench, decode_together, open_bench
from hotkv_trio._keys import SessionKey
from hotkv_trio.llama._engine import _processors
from hotkv_trio.llama._stock import StockLlama

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Setting

OURS, STOCK, SERVER, LIMIT = "hotkv-trio", "llama-cpp-python", "llama-server", "llama-batched-bench"
_INTERLEAVED = 4
"""Sessions that llama-cpp-python is given by turns."""
_TOGETHER = 512
"""Tokens of a prompt in one call: as many as all peers compute at once, unless told otherwise."""


async def measure_peers(setting: Setting) -> Findings:
    """Measure whole sessions by the runtime and by each peer, in turns; then decoding by turns."""
    sizes = setting.sizes
    setting.progress.begin("peers: whole sessions", sizes.few_rounds * (len(sizes.peer_sessions) + 1))
    rows: list[dict[str, Cell]] = []
    bars: list[Bar] = []
    points: dict[str, list[tuple[float, Spread]]] = {}
    for n in sizes.peer_sessions:
        samples = await _whole_sessions(setting, n)
        for name, taken in samples.items():
            speed = Spread.of(n * (sizes.peer_prompt + sizes.peer_tokens) / seconds for seconds in taken)
            points.setdefault(name, []).append((n, speed))
            ours = Spread.of_ratios(taken, samples[OURS])
            rows.append({"N": n, "who": name, "tok/s in all": speed, "hotkv-trio of it": ours})
            if name == SERVER and n >= 4:
                bars.append(Bar.at_least(f"N = {n}: of llama-server", ours.median, 1.0))
    samples = await _decoding_by_turns(setting)
    for name, taken in samples.items():
        speed = Spread.of(_INTERLEAVED * sizes.peer_tokens / seconds for seconds in taken)
        who = f"{name}, decoding" if name == OURS else f"{name}, decoding with saved states"
        ratio = Spread.of_ratios(taken, samples[OURS])
        rows.append({"N": _INTERLEAVED, "who": who, "tok/s in all": speed, "hotkv-trio of it": ratio})
        if name == STOCK:
            bars.append(Bar.at_least(f"N = {_INTERLEAVED}: of llama-cpp-python by turns", ratio.median, 8))
    return Findings(
        suite="peers",
        title=f"{sizes.peer_prompt} prompt + {sizes.peer_tokens} generated tokens a session",
        caption="Everybody with flash attention, f16 KV, as many threads, random prompts in calls of up to"
        f" {_TOGETHER} tokens, and the most likely token."
        " llama-cpp-python serves one session after the other; by turns it saves and loads its state.",
        rows=rows,
        bars=bars,
        curves=[Curve("peers", "Tokens a second in all", "sessions", "tok/s", points)],
    )


def _prompts(bench: Bench, n: int, setting: Setting) -> list[list[int]]:
    return [bench.tokens(setting.sizes.peer_prompt, seed=i).tolist() for i in range(n)]


async def _whole_sessions(setting: Setting, n: int) -> dict[str, list[float]]:
    sizes, threads = setting.sizes, setting.threads or _processors()
    room = sizes.peer_prompt + sizes.peer_tokens
    async with AsyncExitStack() as stack:
        bench = await stack.enter_async_context(open_bench(setting, n_slots=n, n_ctx=room, prefill_chunk=_TOGETHER))
        prompts = _prompts(bench, n, setting)

        async def ours() -> float:
            began = time.perf_counter()
            async with trio.open_nursery() as nursery:
                for i, prompt in enumerate(prompts):
                    nursery.start_soon(_serve, bench, i, prompt, sizes.peer_tokens)
            return time.perf_counter() - began

        arms: dict[str, Callable[[], Awaitable[float]]] = {OURS: ours}
        if n <= _INTERLEAVED:
            # Its speed is the same for any number.
            stock = StockLlama(setting.model, n_ctx=room, threads=threads)
            stack.callback(stock.close)

            async def one_after_the_other() -> float:
                await trio.lowlevel.checkpoint()
                return stock.one_after_the_other(prompts, sizes.peer_tokens)

            arms[STOCK] = one_after_the_other
        if setting.llama_server is not None:
            server = await stack.enter_async_context(
                open_llama_server(
                    setting.llama_server, setting.model, n_sessions=n, n_ctx=_padded(room), threads=threads
                )
            )

            async def served() -> float:
                return await server.generate(prompts, sizes.peer_tokens)

            arms[SERVER] = served
        if setting.llama_batched_bench is not None:
            program = setting.llama_batched_bench

            async def limit() -> float:
                speed = await batched_bench(
                    program,
                    setting.model,
                    n_sessions=n,
                    prompt=sizes.peer_prompt,
                    tokens=sizes.peer_tokens,
                    threads=threads,
                )
                return n * room / speed

            arms[LIMIT] = limit
        return await take_turns(arms, sizes.few_rounds, setting.progress.advance)


async def _serve(bench: Bench, i: int, prompt: Sequence[int], n_tokens: int) -> None:
    async with bench.runtime.open_session(SessionKey(f"peer-{i}", 0)) as session:
        token = int((await session.prefill(prompt)).output[0].argmax())
        for _ in range(n_tokens - 1):
            token = int((await session.decode(token)).output[0].argmax())


async def _decoding_by_turns(setting: Setting) -> dict[str, list[float]]:
    sizes, threads = setting.sizes, setting.threads or _processors()
    room = sizes.peer_prompt + sizes.peer_tokens
    async with open_bench(setting, n_slots=_INTERLEAVED, n_ctx=room) as bench:
        prompts = _prompts(bench, _INTERLEAVED, setting)
        sessions = await bench.sessions(_INTERLEAVED, start=0)
        for session, prompt in zip(sessions, prompts, strict=True):
            await session.prefill(prompt, output="none")
        stock = StockLlama(setting.model, n_ctx=room, threads=threads)

        async def ours() -> float:
            seconds, _ = await decode_together(sessions, [0] * _INTERLEAVED, sizes.peer_tokens)
            for session in sessions:
                await session.truncate(sizes.peer_prompt)
            return seconds

        async def by_turns() -> float:
            await trio.lowlevel.checkpoint()
            stock.keep(prompts)
            return stock.interleaved(sizes.peer_tokens)

        try:
            return await take_turns({OURS: ours, STOCK: by_turns}, sizes.few_rounds, setting.progress.advance)
        finally:
            stock.close()


def _padded(n_ctx: int) -> int:
    return -(-n_ctx // 256) * 256
