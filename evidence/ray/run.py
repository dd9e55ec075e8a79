"""A real model as three shards on three Ray nodes: eight sessions, and what is done to the cluster meanwhile.

    python -m evidence.ray.run MODEL text | kill | node | drain | unplug | replicas [--times N]
    bash evidence/ray/namespaces.sh MODEL text kill node drain unplug

Every session's tokens are held against those of the whole model, undisturbed, in one process (q8_0 KV, grouped).  The
time to go on again is that of the longest pause of a session after the moment of the fault.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import signal
import statistics
import sys
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import trio
from evidence.ray._machines import Cluster, Namespaces, machines

from hotkv_trio import open_runtime
from hotkv_trio.llama import LlamaEngine, Vocabulary
from hotkv_trio.ray import Deployment, _edge, deploy, deployed_shards, discover, down, drain, status
from hotkv_trio.route import Route, open_route

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

N_TOKENS = 64
LEFT = 16
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "A good soup begins with",
    "def fibonacci(n):",
    "The lighthouse keeper wrote a line into his book every evening:",
    "Water boils at",
    "My favourite season is autumn, because",
)
QUANTISED: dict[str, Any] = {"type_k": "q8_0", "type_v": "q8_0"}
NAME = "evidence"
_OUT = sys.stdout


def say(text: str) -> None:
    """Print a line of what was found; Ray prints as well, of each process that ends."""
    _OUT.write(f"{text}\n")
    _OUT.flush()


@attrs.define(eq=False)
class Outcome:
    """What sessions made of it."""

    tokens: list[list[int]] = attrs.field(factory=lambda: [[] for _ in TEXTS])
    times: list[list[float]] = attrs.field(factory=lambda: [[] for _ in TEXTS])
    replays: list[int] = attrs.field(factory=lambda: [0] * len(TEXTS))
    at: float = 0.0
    """When it was done to them."""

    def pauses(self) -> list[float]:
        """Return the longest pause, in seconds, of each session that was interrupted."""
        return [
            max(end - max(begin, self.at) for begin, end in pairwise(times) if end > self.at)
            for times, replays in zip(self.times, self.replays, strict=True)
            if replays and times[-1] > self.at
        ]


Act: TypeAlias = "Callable[[Outcome], Awaitable[Any]]"
"""What is done to the cluster; it says in the outcome when."""


async def do_nothing(_outcome: Outcome) -> None:
    await trio.lowlevel.checkpoint()


async def generate(route: Route, prompts: list[list[int]], act: Act = do_nothing, delay: float = 0.0) -> Outcome:
    """Generate on all sessions at once; some seconds after each has tokens, do something to them.

    Nobody's last tokens are generated before that is done.
    """
    outcome = Outcome()
    begun, done = trio.Event(), trio.Event()

    async def run(number: int) -> None:
        async with route.open_session() as session:
            async with session.generate(prompts[number], N_TOKENS) as tokens:
                async for token in tokens:
                    outcome.tokens[number].append(token)
                    outcome.times[number].append(time.monotonic())
                    if all(outcome.tokens):
                        begun.set()
                    if len(outcome.tokens[number]) == N_TOKENS - LEFT:
                        await done.wait()
                        outcome.times[number][-1] = time.monotonic()
            outcome.replays[number] = session.replays

    async with trio.open_nursery() as nursery:
        for number in range(len(prompts)):
            nursery.start_soon(run, number)
        await begun.wait()
        await trio.sleep(delay)
        outcome.at = time.monotonic()
        await act(outcome)
        done.set()
    return outcome


async def kill(shard: int, replica: int, outcome: Outcome) -> None:
    """Kill the process of a replica."""
    found = (await status(NAME)).replicas[shard][replica]
    if found.figures is None:
        raise RuntimeError(f"{found.id} does not answer")
    outcome.at = time.monotonic()
    os.kill(found.figures.place.pid, signal.SIGKILL)


def movable(found: Deployment, head: str, turn: int) -> tuple[str, str]:
    """Return a node that is not the head, with shards of ours, and their numbers."""
    nodes = sorted({one.node for shard in found.replicas for one in shard if one.node not in {None, head}})
    node = nodes[turn % len(nodes)]
    return node, ", ".join(str(one.id) for shard in found.replicas for one in shard if one.node == node)


async def whole(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of the whole model, undisturbed."""
    engine = LlamaEngine(model, n_slots=len(prompts), n_ctx=256, threads=1, **QUANTISED)
    async with open_runtime(engine) as runtime, open_route([runtime], replay="fast") as route:
        return (await generate(route, prompts)).tokens


async def scenario(what: str, times: int, given: argparse.Namespace, cluster: Cluster) -> bool:
    """Run one kind of fault, so many times; print what became of it, and return whether all is as it should be."""
    draw = random.Random(9)
    vocabulary = Vocabulary(given.model)
    prompts = [vocabulary.tokenize(text).tolist() for text in TEXTS]
    expected = await whole(given.model, prompts)
    _edge.connect(cluster.address)
    head = _edge.here().id
    where: dict[str, Any] = {"insecure": True}
    replicas = [2, 1, 1] if what == "replicas" else 1
    sessions = len(TEXTS)
    try:
        found = await deploy(
            NAME, given.model, 3, replicas=replicas, sessions=sessions, n_ctx=256, **QUANTISED, **where
        )
        say(f"{what}: {_layout(found)}, {sessions} sessions x {N_TOKENS} tokens")
        good = True
        pauses: list[float] = []
        async with open_route(await deployed_shards(NAME), replay="fast", max_sessions=sessions) as route:
            for turn in range(times):
                found = await discover(NAME)
                while any(one.state != "serving" for shard in found.replicas for one in shard):
                    await trio.sleep(0.2)
                    found = await discover(NAME)
                said, act = _act(what, turn, found, head, cluster)
                outcome = await generate(route, prompts, act, 0.0 if what == "text" else draw.uniform(0.0, 1.5))
                equal = sum(map(list.__eq__, outcome.tokens, expected))
                good = good and equal == sessions
                pauses += outcome.pauses()
                interrupted = sum(map(bool, outcome.replays))
                say(f"    {said}: {equal} of {sessions} routes have the whole model's tokens, {interrupted} replayed")
                if what == "replicas":
                    good = good and interrupted == sessions // 2
        if what == "text":
            for tokens, text in zip(outcome.tokens, TEXTS, strict=True):
                say(f"    {text!r} -> {vocabulary.detokenize(tokens).decode(errors='replace')[:70]!r}")
            if isinstance(cluster, Namespaces) and given.hidden:
                say(f"    bytes of the model that nodes without it were sent: {cluster.sent()}")
        if pauses:
            say(
                f"    time to go on again, of {len(pauses)} interrupted sessions: p50"
                f" {statistics.median(pauses):.2f} s, worst {max(pauses):.2f} s"
            )
        return good
    finally:
        with trio.CancelScope(shield=True):
            await down(NAME)
        vocabulary.close()


def _act(what: str, turn: int, found: Deployment, head: str, cluster: Cluster) -> tuple[str, Act]:
    if what == "text":
        return "undisturbed", do_nothing
    if what == "kill":
        return f"process of shard {turn % 3} killed", partial(kill, turn % 3, 0)
    if what == "replicas":

        async def look_and_kill(outcome: Outcome) -> None:
            hot = [one.figures.hot for one in (await status(NAME)).replicas[0] if one.figures is not None]
            say(f"    sessions on the replicas of shard 0: {hot}")
            await kill(0, turn % 2, outcome)

        return f"replica 0.{turn % 2} killed", look_and_kill
    node, shards = movable(found, head, turn)

    async def add_and_take_off(outcome: Outcome) -> None:
        cluster.add()
        outcome.at = time.monotonic()
        if what == "drain":
            await drain(NAME, node=node)
        elif what == "unplug" and isinstance(cluster, Namespaces):
            cluster.unplug(node)
        else:
            await trio.to_thread.run_sync(cluster.remove, node)

    done = {"drain": "drained", "unplug": "unplugged", "node": "removed"}[what]
    return f"a node added, the node of {shards} {done}", add_and_take_off


def _layout(found: Deployment) -> str:
    nodes = [one.node for shard in found.replicas for one in shard]
    names = {node: f"node {number}" for number, node in enumerate(dict.fromkeys(nodes))}
    return "; ".join(
        f"layers {one.layers[0]}:{one.layers[1]} on {names[one.node]}" for shard in found.replicas for one in shard
    )


def main() -> int:
    """Run; exit 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("scenarios", nargs="+", choices=("text", "kill", "node", "drain", "unplug", "replicas"))
    parser.add_argument("--times", type=int, default=3, help="how often each is done (text: once)")
    parser.add_argument("--machines", choices=("cluster", "namespaces"), default="cluster")
    parser.add_argument("--hidden", action="store_true", help="only the head sees the model's folder")
    given = parser.parse_args()
    given.model = given.model.absolute()
    sys.stdout = io.StringIO()
    cluster = machines(given.machines, given.model.parent if given.hidden else None)
    try:
        done = [
            trio.run(scenario, what, 1 if what == "text" else given.times, given, cluster) for what in given.scenarios
        ]
    finally:
        cluster.stop()
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
