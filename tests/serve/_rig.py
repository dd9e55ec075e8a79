"""A shard server on a FakeEngine, and clients of it over streams in memory."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import trio
import trio.testing

from hotkv_trio import SessionKey, open_runtime
from hotkv_trio.serve import ShardServer, open_shard_client
from hotkv_trio.testing import FakeEngine, InlineExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from hotkv_trio import Runtime
    from hotkv_trio._engine import Rows
    from hotkv_trio.serve import ShardClient

ALICE = "the-token-of-alice"
BOB = "the-token-of-bob-1"


def key(name: str, epoch: int = 0) -> SessionKey:
    return SessionKey(name, epoch)


async def until(condition: Callable[[], object]) -> None:
    """Return once it holds; only where what it waits for comes from outside trio."""
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110
            await trio.lowlevel.checkpoint()


@attrs.frozen(eq=False)
class Rig:
    runtime: Runtime
    engine: FakeEngine
    executor: InlineExecutor
    server: ShardServer
    nursery: trio.Nursery

    @property
    def lent(self) -> int:
        """Slots in use."""
        return self.runtime.statistics().lent_slots

    def is_solo(self, rows: Rows, history: Sequence[int]) -> bool:
        """Whether the rows are the last ones of a session of this history that is alone in the world."""
        return len(rows) > 0 and bool(np.array_equal(rows, self.engine.rows(history)[-len(rows) :]))

    def stream(self, principal: str | None = None) -> trio.StapledStream[Any, Any]:
        """Return a raw stream to the server."""
        ours, theirs = trio.testing.memory_stream_pair()
        self.nursery.start_soon(lambda: self.server.serve_stream(theirs, principal=principal))
        return ours

    @asynccontextmanager
    async def connect(self, **options: Any) -> AsyncGenerator[ShardClient]:
        async with open_shard_client(self.stream(), **options) as client:
            yield client


async def _resume_when_cancelled(executor: InlineExecutor) -> None:
    """What a test that failed has left on hold would be waited for without end."""
    try:
        await trio.sleep_forever()
    finally:
        executor.resume()


@asynccontextmanager
async def open_rig(
    engine: FakeEngine | None = None, *, runtime: dict[str, Any] | None = None, **options: Any
) -> AsyncGenerator[Rig]:
    """Open all of it; at the end nothing is left of any session, and the engine's contract was kept."""
    engine = engine or FakeEngine()
    executor = InlineExecutor()
    with trio.fail_after(100):
        async with open_runtime(engine, executor=executor, **(runtime or {})) as opened, trio.open_nursery() as nursery:
            rig = Rig(opened, engine, executor, ShardServer(opened, **options), nursery)
            nursery.start_soon(_resume_when_cancelled, executor)
            try:
                yield rig
            finally:
                executor.resume()
                nursery.cancel_scope.cancel()
    assert engine.violations == []
    assert rig.server.statistics().connections == 0
    opened.check_integrity()
    assert rig.lent == 0
