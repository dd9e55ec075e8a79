"""Eight route sessions at once over server processes: the text of each is that of the whole model.

    python -m evidence.route.texts MODEL [--tokens 32] [--ranges 0:15,15:30 0:10,10:20,20:30] [--modes exact grouped]

The whole model decodes each prompt alone, in this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import trio
from evidence.route._servers import MODES, Progress, generate, options_of, prompts_of, running, whole_engine

from hotkv_trio import open_runtime
from hotkv_trio.llama import Vocabulary
from hotkv_trio.route import Route, open_route

SESSIONS = 8


async def all_at_once(route: Route, prompts: list[list[int]], n_tokens: int, title: str) -> list[list[int]]:
    results: list[list[int]] = [[] for _ in prompts]
    progress = Progress(title, len(prompts))
    done = 0

    async def one(number: int) -> None:
        nonlocal done
        results[number] = await generate(route, prompts[number], n_tokens)
        done += 1
        progress(done)

    async with trio.open_nursery() as nursery:
        for number in range(len(prompts)):
            nursery.start_soon(one, number)
    return results


async def run(given: argparse.Namespace) -> int:
    prompts = prompts_of(given.model, SESSIONS)
    vocabulary = Vocabulary(given.model)
    differing = 0
    for mode in given.modes:
        async with (
            open_runtime(whole_engine(given.model, mode, sessions=1), exact=True) as runtime,
            open_route([runtime]) as route,
        ):
            expected = [await generate(route, prompt, given.tokens) for prompt in prompts]
        for ranges in given.ranges:
            begun = time.monotonic()
            layers = ranges.split(",")
            async with (
                running(given.model, layers, options_of(mode, sessions=SESSIONS)) as shards,
                open_route([shard.where for shard in shards], replay=MODES[mode]["replay"]) as route,
            ):
                got = await all_at_once(route, prompts, given.tokens, f"{mode} {ranges}")
            equal = sum(one == other for one, other in zip(got, expected, strict=True))
            differing += SESSIONS - equal
            kind = MODES[mode]["type"]
            print(
                f"{mode}, {kind} KV, {len(layers)} server processes ({ranges}): {equal} of {SESSIONS} sessions at once"
                f" are the whole model's, {given.tokens} tokens each, {time.monotonic() - begun:.0f} s"
            )
        for prompt, tokens in zip(prompts[:3], expected, strict=False):
            print("    " + repr(vocabulary.detokenize([*prompt, *tokens]).decode(errors="replace")))
    vocabulary.close()
    return 1 if differing else 0


def main() -> int:
    """Run; exit 1 if a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ranges", nargs="+", default=["0:15,15:30", "0:10,10:20,20:30"])
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    return trio.run(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
