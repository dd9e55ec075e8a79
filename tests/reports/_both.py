"""One runtime on either engine, with what its calls give where nobody else is: for tests of both."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import numpy as np
import trio

from hotkv_trio import Append, EngineFailed, SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import FakeEngine, InlineExecutor, StepInvariants, build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from pathlib import Path

    from hotkv_trio import Engine, KVLimiter, Runtime, RuntimeStatistics
    from hotkv_trio._engine import Memory, Rows

Kind: TypeAlias = Literal["fake", "llama"]
N_VOCAB, N_EMBD, CHUNK = 512, 128, 64
ARCHITECTURES: dict[Memory, str] = {"attention": "llama", "sliding": "gemma3", "recurrent": "mamba", "hybrid": "jamba"}


def key(name: str, epoch: int = 0) -> SessionKey:
    return SessionKey(name, epoch)


def tokens(n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng([seed, n]).integers(0, N_VOCAB, n)]


def states(n: int, seed: int = 0) -> Rows:
    return np.random.default_rng([seed, n]).standard_normal((n, N_EMBD), dtype=np.float32)


@attrs.frozen
class Engines:
    """Makes engines of a kind, alike in their sizes."""

    kind: Kind
    folder: Path

    def make(
        self,
        *,
        n_slots: int = 3,
        n_ctx: int = 256,
        memory: Memory = "attention",
        later: bool = False,
        **options: Any,
    ) -> Engine:
        """Make one; ``later``: of the later half of the layers, which takes hidden states."""
        if self.kind == "fake":
            return FakeEngine(
                n_slots=n_slots,
                n_ctx_seq=n_ctx,
                n_vocab=0 if later else N_VOCAB,
                n_embd=N_EMBD if later else 0,
                memory=memory,
                n_swa=32,
            )
        architecture = ARCHITECTURES[memory]
        path = self.folder / f"{architecture}.gguf"
        if not path.exists():
            build_tiny_gguf(path, architecture, n_layer=2)
        return LlamaEngine(
            path,
            layers=(1, 2) if later else None,
            n_slots=n_slots,
            n_ctx=n_ctx,
            threads=1,
            cache_dir=self.folder / "slices",
            **options,
        )

    @asynccontextmanager
    async def open(self, *, seconds: float = 60, executor: Any = None, **options: Any) -> AsyncGenerator[Rig]:
        """Open a runtime in exact mode; at the end nothing is left of any session, and nothing was done wrong."""
        sizes = {name: options.pop(name) for name in ("n_slots", "n_ctx", "memory", "later") if name in options}
        engine, alone = self.make(**sizes), self.make(**(sizes | {"n_slots": 1}))
        alone.open()
        inline = InlineExecutor()
        rig = Rig(engine, alone, inline)
        rig.watch()
        invariants = StepInvariants()
        trio.lowlevel.add_instrument(invariants)
        try:
            with trio.fail_after(seconds):
                async with open_runtime(
                    engine, executor=executor or inline, exact=True, prefill_chunk=CHUNK, **options
                ) as runtime:
                    if executor is None:
                        invariants.watch(runtime)
                    rig.runtime = runtime
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(_resume_when_cancelled, inline)
                        yield rig
                        inline.resume()
                        nursery.cancel_scope.cancel()
                    if not runtime.statistics().sessions and executor is None:
                        assert not any(engine.length(slot) for slot in range(runtime.info.n_slots))
        finally:
            trio.lowlevel.remove_instrument(invariants)
            alone.close()
        invariants.check()
        if isinstance(engine, FakeEngine):
            assert engine.violations == []
        assert runtime.limiter.borrowed_bytes == 0
        assert runtime.statistics().lent_slots == 0


async def _resume_when_cancelled(executor: InlineExecutor) -> None:
    """What a test that failed has left on hold would be waited for without end."""
    try:
        await trio.sleep_forever()
    finally:
        executor.resume()


@attrs.define(eq=False)
class Rig:
    engine: Engine
    alone: Engine
    executor: InlineExecutor
    runtime: Runtime = attrs.field(init=False)
    calls: list[list[Append]] = attrs.field(factory=list)
    """What reached the engine."""
    fails: Callable[[int], bool] = lambda _: False
    """Whether the call of this number, from 1, fails after it was made."""

    def watch(self) -> None:
        process = self.engine.process

        def watched(group: Sequence[Append]) -> list[Rows]:
            self.calls.append(list(group))
            number = len(self.calls)
            rows = process(group)
            if self.fails(number):
                raise EngineFailed(2, "told to fail")
            return rows

        self.engine.process = watched  # type: ignore[method-assign]

    @property
    def statistics(self) -> RuntimeStatistics:
        return self.runtime.statistics()

    @property
    def limiter(self) -> KVLimiter:
        return self.runtime.limiter

    def solo(self, *appends: Any) -> Rows:
        """Return the last row of these appends, made one after the other where nobody else is."""
        self.alone.clear(0)
        rows: list[Rows] = []
        for data in appends:
            typed = np.asarray(data) if isinstance(data, np.ndarray) else np.array(data, np.int32)
            for at in range(0, len(typed), CHUNK):
                rows = self.alone.process([Append(0, self.alone.length(0), typed[at : at + CHUNK], "last")])
        return rows[0]

    def is_solo(self, output: Rows, *appends: Any) -> bool:
        """Whether the last of the rows is, bit for bit, that of the appends made alone."""
        return len(output) > 0 and output[-1:].tobytes() == self.solo(*appends).tobytes()
