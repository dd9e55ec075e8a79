"""Two hundred clients killed, stalled and half-open at once: their bytes come back, their neighbours notice nothing.

    python -m evidence.route.clients [--clients 200] [--rounds 5] [--silence 3]

A server process with a tiny random model in exact mode; two neighbours generate all the time.  In each round three
processes hold a third of the clients each, every one with a session that is hot and at work: one is killed (SIGKILL),
one is stopped (SIGSTOP: it reads nothing and says nothing), and the third works through a proxy that stops forwarding,
and closes nothing.  Killed clients must be gone within a second; the others within the server's limit of silence and a
second.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import trio
from evidence.route._servers import Progress, Shard, generate, kill, said_something
from tests.serve._swallowing_proxy import SwallowingProxy

from hotkv_trio import SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.route import open_route
from hotkv_trio.serve import ConnectionLost, open_shard_client
from hotkv_trio.testing import build_tiny_gguf

NEIGHBOURS = 2
SLACK = 1.0
"""Seconds for a step and the scheduling of a disconnect, on a machine with other things to do."""
MAX_GROWTH, FLOOR = 0.05, 8 * 2**20


async def hold(where: str, n: int, first: int) -> None:
    """Be n clients, each with a session at work, until the end of this process."""
    ready = 0

    async def one(number: int) -> None:
        nonlocal ready
        async with open_shard_client(where) as client:
            session = await client.start_session(SessionKey(f"client-{number}", 0))
            await session.prefill([number % 100, 1, 2])
            ready += 1
            if ready == n:
                print("ready", flush=True)
            try:
                while True:
                    await session.decode(3)
                    await session.truncate(3)
                    await trio.sleep(1)
            except ConnectionLost:
                return

    async with trio.open_nursery() as nursery:
        for number in range(n):
            nursery.start_soon(one, first + number)


async def start_clients(where: str, n: int, first: int) -> trio.Process:
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "evidence.route.clients", "--hold", where, str(n), str(first)], stdout=subprocess.PIPE
    )
    try:
        await said_something(process, f"{n} clients")
    except BaseException:
        await kill(process)  # noqa: ASYNC102, ASYNC120
        raise
    return process


async def lent(client: Any) -> int:
    return int((await client.statistics()).runtime.lent_slots)


async def back(client: Any, most: int, limit: float) -> float:
    """Return the seconds until no more than so many slots are lent."""
    begun = time.monotonic()
    with trio.fail_after(limit):
        while await lent(client) > most:  # noqa: ASYNC110 - it is another process
            await trio.sleep(0.005)
    return time.monotonic() - begun


async def run(given: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_gguf(Path(folder, "tiny.gguf"))
        slots = given.clients + NEIGHBOURS
        options = ["--context", "256", "--threads", "1", "--sessions", str(slots), "--exact"]
        shard = Shard(model, "0:4", [*options, "--silence", str(given.silence)])
        await shard.start()
        try:
            return await _rounds(shard, model, given)
        finally:
            await shard.kill()  # noqa: ASYNC102


async def _rounds(shard: Shard, model: Path, given: argparse.Namespace) -> int:
    prompts = [[5 + n, 6, 7] for n in range(NEIGHBOURS)]
    async with (
        open_runtime(LlamaEngine(model, n_ctx=256, threads=1), exact=True) as alone,
        open_route([alone]) as route,
    ):
        expected = [await generate(route, prompt, 100) for prompt in prompts]
    over = trio.Event()
    runs = 0

    async def neighbour(n: int) -> None:
        nonlocal runs
        async with open_route([shard.where]) as route:
            while not over.is_set():
                async with route.open_session() as session, session.generate(prompts[n], 100) as tokens:
                    if [token async for token in tokens] != expected[n]:
                        raise AssertionError("a neighbour got other tokens")
                    if session.replays:
                        raise AssertionError("a neighbour lost its KV")
                runs += 1

    third = given.clients // 3
    sizes = (third, third, given.clients - 2 * third)
    memory: list[int] = []
    slowest_kill = slowest_silence = 0.0
    progress = Progress("clients: rounds", given.rounds, every=0)
    async with open_shard_client(shard.where) as client, trio.open_nursery() as nursery:
        for n in range(NEIGHBOURS):
            nursery.start_soon(neighbour, n)
        for number in range(given.rounds):
            proxy = SwallowingProxy(shard.where)
            async with AsyncExitStack() as stack, trio.open_nursery() as proxies:
                through = await proxies.start(proxy.serve)
                processes = []
                for where, n, first in zip(
                    (shard.where, shard.where, through), sizes, (0, third, 2 * third), strict=True
                ):
                    processes.append(await start_clients(where, n, first))
                    # One that was stopped would never end by itself.
                    stack.push_async_callback(kill, processes[-1])
                at_work = await lent(client)
                if at_work < given.clients:
                    raise AssertionError(f"only {at_work} sessions are hot")
                processes[1].send_signal(signal.SIGSTOP)
                proxy.cut = True
                silent = time.monotonic()
                processes[0].send_signal(signal.SIGKILL)
                seconds = await back(client, NEIGHBOURS + sizes[1] + sizes[2], SLACK)
                slowest_kill = max(slowest_kill, seconds)
                await back(client, NEIGHBOURS, given.silence + SLACK)
                slowest_silence = max(slowest_silence, time.monotonic() - silent)
                proxies.cancel_scope.cancel()
            memory.append(shard.resident())
            progress(number + 1, f", {runs} runs of neighbours, {memory[-1] / 2**20:.1f} MiB")
        over.set()
    async with open_shard_client(shard.where) as client:
        await back(client, 0, 10)
        borrowed = (await client.statistics()).runtime.borrowed_bytes
    early, late = memory[min(1, len(memory) - 1)], memory[-1]
    grown = late - early > max(MAX_GROWTH * early, FLOOR)
    print(f"{given.rounds} rounds of {sizes[0]} killed, {sizes[1]} stalled and {sizes[2]} half-open clients at once")
    print(f"bytes back after at most {slowest_kill:.2f} s of a kill (limit {SLACK} s)")
    print(
        f"after at most {slowest_silence:.2f} s of silence (limit {given.silence} + {SLACK} s); borrowed at the end:"
        f" {borrowed} bytes"
    )
    print(f"{runs} runs of 100 tokens of neighbours meanwhile, every one exact, none replayed")
    print(
        f"memory of the server: {early / 2**20:.1f} MiB after round {min(2, len(memory))},"
        f" {late / 2**20:.1f} MiB at the end"
    )
    return 1 if borrowed or grown or not runs else 0


def main() -> int:
    """Run; exit 1 if something was not held."""
    if sys.argv[1:2] == ["--hold"]:
        trio.run(hold, sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--silence", type=float, default=3.0)
    given = parser.parse_args()
    try:
        return trio.run(run, given)
    except (AssertionError, trio.TooSlowError, BaseExceptionGroup) as exc:
        print(f"NOT HELD: {exc!r}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
