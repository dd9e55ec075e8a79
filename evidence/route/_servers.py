"""Shard servers as processes of their own, for the commands beside this file."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import trio

from hotkv_trio.llama import LlamaEngine, Vocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from hotkv_trio.route import Route

CONTEXT = 256

MODES: dict[str, dict[str, Any]] = {
    "exact": {"type": "f16", "exact": True, "replay": "exact"},
    "grouped": {"type": "q8_0", "exact": False, "replay": "fast"},
}
"""What the claims are made for: exact mode, and grouped decoding where the kernels are batch-invariant."""

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a fox who",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of motion are",
    "My favourite book is about",
    "To bake a loaf of bread you need",
    "The moon is",
)


@attrs.define(eq=False)
class Shard:
    """A server process that can be killed and started again at the same address."""

    model: Path
    layers: str
    options: Sequence[str]
    where: str = attrs.field(factory=lambda: f"127.0.0.1:{free_port()}")
    process: trio.Process = attrs.field(init=False)

    async def start(self) -> None:
        """Start it; it accepts clients when this returns, and is killed again if that fails or is cancelled."""
        self.process = await trio.lowlevel.open_process(
            [
                *(sys.executable, "-m", "hotkv_trio", "serve", str(self.model), "--layers", self.layers),
                *("--listen", self.where, *self.options),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "COLUMNS": "200"},
        )
        try:
            await said_something(self.process, f"the server of layers {self.layers}")
        except BaseException:
            await self.kill()  # noqa: ASYNC102, ASYNC120
            raise

    async def kill(self) -> None:
        """Kill it as the system does, and wait until it is gone."""
        await kill(self.process)

    def resident(self) -> int:
        """Return the bytes of it that are in memory."""
        return resident(self.process.pid)


async def said_something(process: trio.Process, what: str) -> None:
    """Return once a process has printed something.

    Raises:
        RuntimeError: it has ended without.
        trio.TooSlowError: it says nothing.
    """
    assert process.stdout is not None
    with trio.fail_after(120):
        if not await process.stdout.receive_some():
            raise RuntimeError(f"{what} did not start")


async def kill(process: trio.Process) -> None:
    """Kill a process as the system does, and wait until it is gone."""
    process.send_signal(signal.SIGKILL)
    with trio.CancelScope(shield=True):
        await process.wait()
        if process.stdout is not None:
            await process.stdout.aclose()


def resident(pid: int) -> int:
    """Return the bytes of a process that are in memory."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def options_of(mode: str, *, sessions: int, threads: int = 1) -> list[str]:
    """Return the server's options for a mode."""
    chosen = MODES[mode]
    listed = ["--sessions", str(sessions), "--context", str(CONTEXT), "--threads", str(threads)]
    return [*listed, "--type-k", chosen["type"], "--type-v", chosen["type"], *(["--exact"] if chosen["exact"] else [])]


def whole_engine(model: Path, mode: str, *, sessions: int, threads: int = 1) -> LlamaEngine:
    """Return an engine of the whole model, as the shards of a mode are."""
    kind = MODES[mode]["type"]
    return LlamaEngine(model, n_slots=sessions, n_ctx=CONTEXT, threads=threads, type_k=kind, type_v=kind)


@asynccontextmanager
async def running(model: Path, ranges: Sequence[str], options: Sequence[str]) -> AsyncGenerator[list[Shard]]:
    """Run a server for each range of layers."""
    shards: list[Shard] = []
    try:
        for layers in ranges:
            shard = Shard(model, layers, options)
            await shard.start()
            shards.append(shard)
        yield shards
    finally:
        for shard in shards:
            await shard.kill()  # noqa: ASYNC102


async def generate(route: Route, prompt: Sequence[int], n_tokens: int) -> list[int]:
    async with route.open_session() as session, session.generate(prompt, n_tokens) as tokens:
        return [token async for token in tokens]


def prompts_of(model: Path, n: int, seed: int = 0) -> list[list[int]]:
    """Return n prompts: texts, and after them words drawn at random, so that no two are alike."""
    vocabulary, rng = Vocabulary(model), random.Random(seed)
    try:
        prompts = [[int(t) for t in vocabulary.tokenize(TEXTS[i % len(TEXTS)])] for i in range(n)]
    finally:
        vocabulary.close()
    return [prompt + [rng.randrange(100, 200) for _ in range(i // len(TEXTS))] for i, prompt in enumerate(prompts)]


@attrs.define
class Progress:
    """Says on stderr how far it is, every few seconds."""

    title: str
    total: int
    every: float = 5.0
    begun: float = attrs.field(factory=time.monotonic)
    said: float = attrs.field(factory=time.monotonic)

    def __call__(self, done: int, more: str = "") -> None:
        now = time.monotonic()
        if now - self.said >= self.every or done >= self.total:
            self.said = now
            left = (now - self.begun) / max(done, 1) * (self.total - done)
            print(f"{self.title}: {done:,}/{self.total:,}{more}, {left:,.0f} s left", file=sys.stderr, flush=True)
