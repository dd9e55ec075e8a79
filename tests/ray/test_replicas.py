"""A shard with several replicas, or one that moves, under a route; without Ray: where they are is said by the test."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, final

import attrs
import pytest
import trio

from hotkv_trio import RecipeMismatch, Runtime, open_runtime
from hotkv_trio.ray import DeployedShard, Deployment, DeploymentFailed, DeploymentUnknown, _replicas
from hotkv_trio.ray._replicas import ReplicaHop
from hotkv_trio.route import ShardAddress, open_route
from hotkv_trio.serve import ConnectionLost, ShardServer
from hotkv_trio.testing import FakeEngine, InlineExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

    from hotkv_trio.route import Hop, Route, RouteSession

TOKEN = "the-token-of-a-test"


class Replica:
    """A shard server that can be killed."""

    def __init__(self, where: str, engine: FakeEngine, tokens: Sequence[str]) -> None:
        self.where = where
        self.engine = engine
        self.tokens = tokens
        self.life = trio.CancelScope()
        self.dead = trio.Event()
        self.runtime: Runtime
        self.server: ShardServer

    async def live(self, *, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC114
        try:
            with self.life:
                async with (
                    open_runtime(self.engine, executor=InlineExecutor()) as self.runtime,
                    trio.open_nursery() as nursery,
                ):
                    self.server = ShardServer(self.runtime, tokens=self.tokens)
                    await nursery.start(self.server.serve, self.where)
                    task_status.started()
        finally:
            self.dead.set()

    async def kill(self) -> None:
        self.life.cancel()
        await self.dead.wait()

    @property
    def hot(self) -> int:
        return self.runtime.statistics().hot


@final
class Cluster:
    """Starts replicas, and says where they are."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.folder = folder
        self.nursery = nursery
        self.offered: list[Replica] = []
        self.looks = 0
        self._count = 0

    async def start(self, tokens: Sequence[str] = (TOKEN,), n_ctx_seq: int = 128) -> Replica:
        engine = FakeEngine(n_vocab=16, n_ctx_seq=n_ctx_seq, n_slots=8)
        self._count += 1
        replica = Replica(f"unix:{self.folder}/{self._count}.sock", engine, tokens)
        await self.nursery.start(replica.live)
        self.offered.append(replica)
        return replica

    async def find(self) -> list[ShardAddress]:
        await trio.lowlevel.checkpoint()
        self.looks += 1
        return [ShardAddress(where=replica.where, token=TOKEN) for replica in self.offered]

    def open_hop(self, nursery: trio.Nursery) -> Hop:
        return ReplicaHop("the shard", self.find, nursery)


@asynccontextmanager
async def clusters(folder: Path) -> AsyncGenerator[Cluster]:
    async with trio.open_nursery() as nursery:
        try:
            with trio.fail_after(20):  # noqa: ASYNC100 - the test does
                yield Cluster(folder, nursery)
        finally:
            nursery.cancel_scope.cancel()


@pytest.fixture
async def expected() -> list[int]:
    async with (
        open_runtime(FakeEngine(n_vocab=16, n_ctx_seq=128), executor=InlineExecutor()) as runtime,
        open_route([runtime]) as route,
        route.open_session() as session,
    ):
        return await take(session, 12)


async def take(session: RouteSession, count: int, prompt: Sequence[int] = (1, 2, 3)) -> list[int]:
    async with session.generate(prompt, count) as tokens:
        return [token async for token in tokens]


async def opened(route: Route, count: int, nursery: trio.Nursery) -> list[RouteSession]:
    """Open sessions side by side that have generated four tokens each."""
    sessions: list[RouteSession] = []

    async def hold(*, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC114
        async with route.open_session() as session:
            await take(session, 4)
            sessions.append(session)
            task_status.started()
            await trio.sleep_forever()

    async with trio.open_nursery() as starting:
        for _ in range(count):
            starting.start_soon(nursery.start, hold)
    return sessions


def options() -> dict[str, Any]:
    return {"jitter": lambda: 0.0}


async def test_sessions_balance_by_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with clusters(tmp_path) as cluster:
        replicas = [await cluster.start(), await cluster.start()]
        async with open_route([cluster], **options()) as route, trio.open_nursery() as nursery:
            await opened(route, 6, nursery)
            assert [replica.hot for replica in replicas] == [3, 3]
            replicas.append(await cluster.start())
            monkeypatch.setattr(_replicas, "_FRESH", 0.0)
            await opened(route, 3, nursery)
            assert [replica.hot for replica in replicas] == [3, 3, 3]
            nursery.cancel_scope.cancel()


async def test_the_death_of_one_moves_its_sessions_only(tmp_path: Path, expected: list[int]) -> None:
    async with clusters(tmp_path) as cluster:
        first, second = await cluster.start(), await cluster.start()
        async with open_route([cluster], **options()) as route, trio.open_nursery() as nursery:
            sessions = await opened(route, 4, nursery)
            await first.kill()
            cluster.offered.remove(first)
            got = [await take(session, 8, prompt=()) for session in sessions]
            assert got == [expected[4:]] * 4
            assert Counter(session.replays for session in sessions) == {0: 2, 1: 2}
            assert second.hot == 4
            nursery.cancel_scope.cancel()


async def test_a_shard_that_moved_is_looked_up_again(tmp_path: Path, expected: list[int]) -> None:
    async with clusters(tmp_path) as cluster:
        first = await cluster.start()
        async with open_route([cluster], **options()) as route, route.open_session() as session:
            got = await take(session, 5)
            await first.kill()
            cluster.offered.remove(first)
            cluster.nursery.start_soon(cluster.start)
            got += await take(session, 7, prompt=())
            assert got == expected
            assert session.replays == 1


async def test_a_replica_that_drains_hands_its_sessions_over(tmp_path: Path, expected: list[int]) -> None:
    async with clusters(tmp_path) as cluster:
        first = await cluster.start()
        async with open_route([cluster], **options()) as route, route.open_session() as session:
            got = await take(session, 5)
            second = await cluster.start()
            cluster.offered.remove(first)
            await first.server.drain(1)
            got += await take(session, 7, prompt=())
            assert got == expected
            assert second.hot == 1


class Cable:
    """Between a route and a replica; cut, it swallows everything without a word."""

    def __init__(self, where: str, to: str) -> None:
        self.where = where
        self.cut = False
        self._to = to

    async def run(self, listening: trio.Event) -> None:
        with trio.socket.socket(trio.socket.AF_UNIX) as sock:
            await sock.bind(self.where.removeprefix("unix:"))
            sock.listen()
            listening.set()
            await trio.serve_listeners(self._carry, [trio.SocketListener(sock)])

    async def _carry(self, near: trio.abc.Stream) -> None:
        async with await trio.open_unix_socket(self._to.removeprefix("unix:")) as far, trio.open_nursery() as nursery:
            nursery.start_soon(self._pass, near, far)
            nursery.start_soon(self._pass, far, near)

    async def _pass(self, source: trio.abc.Stream, sink: trio.abc.Stream) -> None:
        with suppress(trio.BrokenResourceError):
            while data := await source.receive_some(65_536):
                if not self.cut:
                    await sink.send_all(data)


async def test_a_replica_that_says_nothing_any_more_is_given_up(
    tmp_path: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_replicas, "_PING_EVERY", 0.05)
    monkeypatch.setattr(_replicas, "_PONG_PATIENCE", 0.1)
    async with clusters(tmp_path) as cluster:
        first = await cluster.start()
        cable = Cable(f"unix:{tmp_path}/cable.sock", first.where)
        listening = trio.Event()
        cluster.nursery.start_soon(cable.run, listening)
        await listening.wait()
        first.where = cable.where
        async with open_route([cluster], **options()) as route, route.open_session() as session:
            got = await take(session, 5)
            cable.cut = True
            cluster.offered.remove(first)
            await cluster.start()
            got += await take(session, 7, prompt=())
            assert got == expected
            assert session.replays == 1


async def test_while_nobody_is_there_it_is_a_lost_connection(tmp_path: Path) -> None:
    async with clusters(tmp_path) as cluster:
        with pytest.raises(ConnectionLost, match="no replica of the shard"):
            async with open_route([cluster]):
                pytest.fail("there is no shard")


async def test_who_does_not_know_the_token_is_somebody_else(tmp_path: Path) -> None:
    async with clusters(tmp_path) as cluster:
        await cluster.start(tokens=["the-token-of-somebody-else"])
        ours = await cluster.start()
        async with open_route([cluster]) as route, route.open_session() as session:
            await take(session, 2)
            assert ours.hot == 1


async def test_what_comes_back_must_mean_the_same(tmp_path: Path) -> None:
    async with clusters(tmp_path) as cluster:
        first = await cluster.start()
        async with open_route([cluster], **options()) as route, route.open_session() as session:
            await take(session, 2)
            await first.kill()
            cluster.offered.remove(first)
            await cluster.start(n_ctx_seq=64)
            with pytest.raises(RecipeMismatch):
                await take(session, 2, prompt=())


async def test_all_slots_together_bound_the_route(tmp_path: Path) -> None:
    async with clusters(tmp_path) as cluster:
        await cluster.start()
        await cluster.start()
        async with open_route([cluster]) as route:
            assert [info.n_slots for info in route.infos] == [16]


async def test_where_a_session_was_is_forgotten_when_it_ends(tmp_path: Path) -> None:
    async with clusters(tmp_path) as cluster:
        await cluster.start()
        hops: list[Any] = []

        @attrs.frozen
        class Noting:
            def open_hop(self, nursery: trio.Nursery) -> Hop:
                hops.append(cluster.open_hop(nursery))
                return hops[-1]  # type: ignore[no-any-return]

        async with open_route([Noting()]) as route:
            async with route.open_session() as session:
                await take(session, 2)
                assert len(hops[0]._homes) == 1
            assert hops[0]._homes == {}


@pytest.mark.parametrize(
    "found",
    [
        DeploymentUnknown("tiny"),
        DeploymentFailed("tiny", "its keeper does not answer"),
        Deployment(name="tiny", epoch=1, token=TOKEN, insecure=False, replicas=((), ())),
    ],
    ids=["unknown", "its keeper silent", "with fewer shards"],
)
async def test_a_deployment_that_is_not_there_may_come_back(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    async def discover(_name: str, _shard: int) -> object:
        await trio.lowlevel.checkpoint()
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("hotkv_trio.ray._shards.discover_shard", discover)
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConnectionLost, match="tiny"):
            await DeployedShard(deployment="tiny", shard=2).open_hop(nursery).info()
