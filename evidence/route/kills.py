"""Kill shards at random moments, start them again: every route ends with the tokens of an undisturbed run.

    python -m evidence.route.kills MODEL --mode exact|grouped [--kills 50] [--tokens 40] [--seed 1]

Eight sessions generate over three server processes, again and again, until as many kills are done (SIGKILL, of any
shard, at any moment, its restart at once).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import trio
from evidence.route._servers import (
    MODES,
    Progress,
    Shard,
    generate,
    options_of,
    prompts_of,
    running,
    whole_engine,
)

from hotkv_trio import open_runtime
from hotkv_trio.route import Route, open_route

SESSIONS = 8
RANGES = ("0:10", "10:20", "20:30")


async def run(given: argparse.Namespace) -> int:
    rng = random.Random(given.seed)
    prompts = prompts_of(given.model, SESSIONS, given.seed)
    async with (
        open_runtime(whole_engine(given.model, given.mode, sessions=1), exact=True) as runtime,
        open_route([runtime]) as route,
    ):
        expected = [await generate(route, prompt, given.tokens) for prompt in prompts]
    counts: Counter[str] = Counter()
    delays: list[float] = []
    over, going_on = trio.Event(), trio.Event()
    progress = Progress(f"{given.mode}: kills", given.kills)

    async def one(route: Route, number: int) -> None:
        async with route.open_session() as session, session.generate(prompts[number], given.tokens) as tokens:
            got, last = [], time.monotonic()
            async for token in tokens:
                got.append(token)
                delays.append(time.monotonic() - last)
                going_on.set()
                last = time.monotonic()
            counts["replays"] += session.replays
        counts["sessions"] += 1
        counts["wrong"] += got != expected[number]

    async def havoc(shards: list[Shard]) -> None:
        nonlocal going_on
        while counts["kills"] < given.kills:
            # Half of the kills may hit routes that have not gone on since the last; if all did, none ever would.
            if rng.random() < 0.5:
                await going_on.wait()
            await trio.sleep(rng.uniform(0.0, 6.0))
            shard = rng.choice(shards)
            await shard.kill()
            counts["kills"] += 1
            counts[f"kills of layers {shard.layers}"] += 1
            await shard.start()
            going_on = trio.Event()
            progress(counts["kills"], f", {counts['sessions']} sessions ended, {counts['wrong']} wrong")
        over.set()

    async with running(given.model, RANGES, options_of(given.mode, sessions=SESSIONS)) as shards:
        addresses = [shard.where for shard in shards]
        async with open_route(addresses, replay=MODES[given.mode]["replay"]) as route, trio.open_nursery() as nursery:
            nursery.start_soon(havoc, shards)
            while not over.is_set():
                async with trio.open_nursery() as sessions:
                    for number in range(SESSIONS):
                        sessions.start_soon(one, route, number)
    kinds = ", ".join(f"{n} {what}" for what, n in sorted(counts.items()) if what.startswith("kills of"))
    print(f"{given.mode}, replay {MODES[given.mode]['replay']!r}: {counts['kills']} kills ({kinds})")
    print(
        f"{counts['sessions']} sessions of {given.tokens} tokens ended, {counts['replays']} replays,"
        f" {counts['wrong']} with other tokens than undisturbed; longest wait for a token {max(delays):.1f} s"
    )
    return 1 if counts["wrong"] or not counts["replays"] else 0


def main() -> int:
    """Run; exit 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--mode", choices=list(MODES), required=True)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    return trio.run(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
