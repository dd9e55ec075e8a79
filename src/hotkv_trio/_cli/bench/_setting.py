"""What the suites run on: a model, how much of everything, and a runtime with sessions that hold a first few tokens."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import numpy as np
import trio

from hotkv_trio._keys import SessionKey
from hotkv_trio._runtime import Runtime, open_runtime
from hotkv_trio.llama import LlamaEngine

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

    from hotkv_trio._cli._progress import Progress
    from hotkv_trio._inputs import Tokens
    from hotkv_trio._session import Session

CHUNK = 128
"""Tokens of a prefill in one native call, where a suite does not vary it: the runtime's own default."""
START = 64
"""Tokens that a session holds before it decodes."""


@attrs.frozen(kw_only=True)
class Sizes:
    """How much of everything is measured."""

    rounds: int = 24
    """Turns of each arm where a turn takes a fraction of a second."""
    few_rounds: int = 3
    """The same where it takes seconds."""
    sessions: tuple[int, ...] = (1, 2, 4, 8, 16)
    """That decode together."""
    turn_tokens: int = 96
    """Tokens decoded in a turn, by all sessions together, unless each would decode fewer than 8."""
    prompts: tuple[int, ...] = (64, 256, 1024)
    hot: int = 16
    """Hot sessions in the suite `ragged`; half of them are active."""
    mixed_decoders: tuple[int, ...] = (4, 8)
    mixed_prefill: int = 1024
    mixed_chunks: tuple[int, ...] = (32, 64, 128, 256)
    cancels: int = 120
    core_sessions: tuple[int, ...] = (1, 16, 64, 256)
    core_steps: int = 4096
    """Session-steps in a turn."""
    tombstones: int = 100_000
    waiters: int = 10_000
    peer_sessions: tuple[int, ...] = (1, 4, 8, 16)
    peer_prompt: int = 256
    peer_tokens: int = 64
    memory_slots: tuple[int, ...] = (1, 4, 16)


QUICK = Sizes(
    rounds=2,
    few_rounds=1,
    sessions=(1, 2),
    turn_tokens=4,
    prompts=(64,),
    hot=4,
    mixed_decoders=(2,),
    mixed_prefill=96,
    mixed_chunks=(32,),
    cancels=3,
    core_sessions=(1, 64, 256),
    core_steps=512,
    tombstones=1000,
    waiters=100,
    peer_sessions=(1, 4),
    peer_prompt=32,
    peer_tokens=4,
    memory_slots=(1, 2),
)
"""So little that only the working of the suites shows, not the figures."""


@attrs.frozen(kw_only=True, eq=False)
class Setting:
    """What the suites run on."""

    model: Path
    threads: int | None
    """Of a native call; None: the engine's own choice."""
    sizes: Sizes
    progress: Progress
    llama_server: Path | None = None
    llama_batched_bench: Path | None = None


@attrs.define(eq=False)
class Bench:
    """An open runtime on llama.cpp."""

    engine: LlamaEngine
    runtime: Runtime
    _opened: int = attrs.field(default=0, init=False)

    async def sessions(self, n: int, *, start: int = START) -> list[Session]:
        """Open sessions in the next ``n`` slots, each with ``start`` tokens of its own."""
        await trio.lowlevel.checkpoint()
        opened = []
        for _ in range(n):
            session = await self.runtime.start_session(SessionKey(f"bench-{self._opened}", 0), pinned=True)
            if start:
                await session.prefill(self.tokens(start, seed=self._opened), output="none")
            self._opened += 1
            opened.append(session)
        return opened

    def tokens(self, n: int, *, seed: int) -> Tokens:
        """Return ``n`` tokens, the same ones for the same seed."""
        return np.random.default_rng(seed).integers(0, self.runtime.info.n_vocab, n, dtype=np.int32)


@asynccontextmanager
async def open_bench(
    setting: Setting, *, n_slots: int, n_ctx: int, prefill_chunk: int = CHUNK
) -> AsyncGenerator[Bench]:
    """Open a runtime on the setting's model, for as long as the ``async with`` lasts."""
    engine = LlamaEngine(setting.model, n_slots=n_slots, n_ctx=n_ctx, threads=setting.threads)
    async with open_runtime(engine, idle_ttl=None, prefill_chunk=prefill_chunk) as runtime:
        yield Bench(engine, runtime)


def slots_of(sessions: Sequence[Session]) -> list[int]:
    """Return the slots of hot sessions."""
    return [session._tenancy.slot for session in sessions if session._tenancy is not None]


async def decode_together(
    sessions: Sequence[Session], tokens: Sequence[int], n_steps: int, tick: Callable[[], object] | None = None
) -> tuple[float, list[int]]:
    """Let each session decode ``n_steps`` tokens in a task of its own, each the most likely after the one before.

    Args:
        sessions: hot ones.
        tokens: the first of each.
        n_steps: how many each decodes.
        tick: called after each token of each session.

    Returns:
        Seconds from the moment when all were ready to begin, and the token that each would decode next.
    """
    ended = list(tokens)
    go = trio.Event()

    async def play(i: int, session: Session, token: int) -> None:
        await go.wait()
        for _ in range(n_steps):
            result = await session.decode(token)
            token = int(result.output[0].argmax())
            if tick is not None:
                tick()
        ended[i] = token

    async with trio.open_nursery() as nursery:
        for i, (session, token) in enumerate(zip(sessions, tokens, strict=True)):
            nursery.start_soon(play, i, session, token)
        # All of them stand before their first step.
        for _ in range(3):
            await trio.lowlevel.checkpoint()
        began = time.perf_counter()
        go.set()
    return time.perf_counter() - began, ended


async def truncate_all(sessions: Sequence[Session], length: int) -> None:
    """Cut every session back to ``length`` tokens."""
    await trio.lowlevel.checkpoint()
    for session in sessions:
        await session.truncate(length)
