"""Tokens a second: two shards of one thread each, one process of two threads, and llama.cpp's own RPC back end.

    python -m evidence.route.throughput MODEL [--sessions 4 8] [--rounds 5] [--cut 15] [--rpc-server PATH] [--json]

Every session has a prompt of 128 tokens and generates 32. The kinds take turns, and what counts is the median of the
ratios within a round. llama.cpp's RPC is driven by its own ``llama-batched-bench``, from the folder of the RPC server.
The latency of a hop is a decode of one session on the route less the same decode in one process of one thread, halved.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from evidence.route._servers import free_port, generate, options_of, running, whole_engine

from hotkv_trio import open_runtime
from hotkv_trio.route import open_route

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from hotkv_trio.route import Route

PROMPT, GENERATED = 128, 32
CHUNK = 32
"""Tokens of a prompt that go through a shard at a time: small, so that the second has work early."""
BAR_ONE, BAR_RPC = 0.85, 1.3
MODE = "grouped"


def prompts(n: int) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(1000, 40_000) for _ in range(PROMPT)] for _ in range(n)]


async def rate(route: Route, n: int) -> float:
    """Return the tokens a second of n sessions at once, prompt and generated together."""
    begun = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for prompt in prompts(n):
            # The last token is not appended: one more, so that as many are decoded as are counted.
            nursery.start_soon(generate, route, prompt, GENERATED + 1)
    return n * (PROMPT + GENERATED) / (time.perf_counter() - begun)


async def one_process(model: Path, n: int) -> float:
    async with (
        open_runtime(whole_engine(model, MODE, sessions=n, threads=2)) as runtime,
        open_route([runtime]) as route,
    ):
        await generate(route, prompts(1)[0], 4)
        return await rate(route, n)


@asynccontextmanager
async def two_shards(model: Path, n: int, cut: int) -> AsyncGenerator[Route]:
    options = options_of(MODE, sessions=n)
    async with (
        running(model, [f"0:{cut}", f"{cut}:"], options) as shards,
        open_route([shard.where for shard in shards], prefill_chunk=CHUNK) as route,
    ):
        yield route


async def rpc_rate(model: Path, server: Path, n: int) -> float:
    """Return what llama.cpp reaches over two RPC servers of one thread."""
    ports = [free_port(), free_port()]
    servers = [
        subprocess.Popen(  # noqa: ASYNC220
            [server, "-t", "1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for port in ports
    ]
    try:
        await trio.sleep(1)
        done = await trio.run_process(
            [
                *(str(server.with_name("llama-batched-bench")), "-m", str(model), "-ngl", "99", "-t", "1", "-fa", "on"),
                *("--rpc", ",".join(f"127.0.0.1:{port}" for port in ports), "-c", str(n * 256), "-b", "2048"),
                *("-ctk", "q8_0", "-ctv", "q8_0"),
                *("-ub", "512", "-npp", str(PROMPT), "-ntg", str(GENERATED), "-npl", str(n)),
            ],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        row = re.search(rf"\|\s*{PROMPT}\s*\|\s*{GENERATED}\s*\|\s*{n}\s*\|(.*)\|", done.stdout.decode())
        if row is None:
            raise RuntimeError(done.stderr.decode()[-2000:] or done.stdout.decode()[-2000:])
        return float(row[1].split("|")[-1])
    finally:
        for process in servers:
            process.kill()
            process.wait()


async def hop_latency(route: Route, model: Path, n_tokens: int = 100) -> tuple[float, float]:
    """Return the p50 of a decode on the route, and of one in this process, with one thread, in ms."""

    async def times(on: Route) -> float:
        found = []
        async with on.open_session() as session:
            await session.append(prompts(1)[0])
            for token in range(n_tokens):
                begun = time.perf_counter()
                await session.append([token + 100])
                found.append(time.perf_counter() - begun)
        return 1000 * statistics.median(found)

    remote = await times(route)
    async with open_runtime(whole_engine(model, MODE, sessions=1)) as runtime, open_route([runtime]) as local:
        return remote, await times(local)


def alone(model: Path, n: int) -> float:
    """Run the one process as a process of its own, so that both kinds begin alike."""
    command = [sys.executable, "-m", "evidence.route.throughput", str(model), "--one", str(n)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


async def compare(given: argparse.Namespace) -> int:
    report: dict[str, Any] = {"cut": given.cut, "rounds": given.rounds, "sessions": {}}
    shown = True
    for n in given.sessions:
        async with two_shards(given.model, n, given.cut) as route:
            await rate(route, n)
            rows: list[dict[str, float]] = []
            for number in range(given.rounds):
                row = {
                    "two shards": await rate(route, n),
                    "one process": await trio.to_thread.run_sync(alone, given.model, n),
                }
                if given.rpc_server is not None:
                    row["rpc"] = await rpc_rate(given.model, given.rpc_server, n)
                rows.append(row)
                told = ", ".join(f"{kind} {value:,.0f}" for kind, value in row.items())
                print(f"N={n}, round {number + 1} of {given.rounds}: {told} tokens/s", file=sys.stderr, flush=True)
            remote, local = await hop_latency(route, given.model)
        kinds = {kind: statistics.median(row[kind] for row in rows) for kind in rows[0]}
        ratios = {kind: statistics.median(row["two shards"] / row[kind] for row in rows) for kind in list(rows[0])[1:]}
        report["sessions"][n] = {"rows": rows, "ratios": ratios, "hop_ms": (remote - local) / 2}
        print(f"N={n}: " + ", ".join(f"{kind} {value:,.0f} tokens/s" for kind, value in kinds.items()))
        for kind, ratio in ratios.items():
            bar = BAR_ONE if kind == "one process" else BAR_RPC
            shown = shown and ratio >= bar
            print(f"N={n}: two shards / {kind} = {ratio:.2f} (at least {bar}): {'yes' if ratio >= bar else 'NO'}")
        print(
            f"N={n}: decode of one session p50 {remote:.2f} ms on the route, {local:.2f} ms in one process, one thread:"
            f" {remote - local:.2f} ms for two hops, {(remote - local) / 2:.2f} ms a hop"
        )
    if given.json:
        print(json.dumps(report))
    return 0 if shown else 1


def main() -> int:
    """Measure; exit 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sessions", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cut", type=int, default=15, help="the layer that the second shard begins with")
    parser.add_argument("--rpc-server", type=Path, help="llama.cpp's ggml-rpc-server")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(trio.run(one_process, given.model, given.one))
        return 0
    return trio.run(compare, given)


if __name__ == "__main__":
    sys.exit(main())
