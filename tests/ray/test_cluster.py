"""Deployments on a Ray cluster of three nodes, each with its processes, on this machine."""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from hotkv_trio import InvalidInput, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.ray import (
    DeploymentFailed,
    DeploymentUnknown,
    ReplicaId,
    _edge,
    deploy,
    deployed_shards,
    discover,
    down,
    drain,
    scale,
    status,
)
from hotkv_trio.route import open_route
from hotkv_trio.testing import build_tiny_gguf
from tests.cli._shell import Shell
from tests.ray._cluster import N_SESSIONS, Machines, agree, generate_while

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from hotkv_trio.ray import Deployment, Replica

# Ray has warnings of its own.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]

PROMPTS = [[5 + number, 6, 7, 8 + number] for number in range(N_SESSIONS)]


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    started = Machines(3)
    _edge.connect(started.address)
    yield started
    started.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


async def do_nothing() -> None:
    await trio.lowlevel.checkpoint()


@pytest.fixture
async def expected(model: Path) -> list[list[int]]:
    engine = LlamaEngine(model, n_slots=N_SESSIONS, n_ctx=256, threads=1)
    async with open_runtime(engine, exact=True) as whole, open_route([whole]) as route:
        return (await generate_while(route, PROMPTS, do_nothing, after=88, pause=0))[0]


@asynccontextmanager
async def deployed(model: Path, **options: Any) -> AsyncGenerator[Deployment]:
    """Deploy three shards for as long as the block lasts."""
    given = {"sessions": N_SESSIONS, "n_ctx": 256, "exact": True, "host": "127.0.0.1", "cpus": 1, **options}
    with trio.fail_after(300):
        started = await deploy("tiny", model, 3, **given)
        try:
            yield started
        finally:
            with trio.CancelScope(shield=True):
                await down("tiny")


def route_of(shards: Any) -> Any:
    return open_route(shards, max_sessions=N_SESSIONS)


def pid_of(replica: Replica) -> int:
    assert replica.figures is not None
    return replica.figures.place.pid


def hot(found: Deployment) -> list[list[int]]:
    return [[one.figures.hot for one in shard if one.figures is not None] for shard in found.replicas]


def holding(folder: str, what: bytes) -> list[Path]:
    """Return the files of a folder that hold some bytes."""
    return [path for path in Path(folder).rglob("*") if path.is_file() and what in path.read_bytes()]


def left() -> tuple[list[str], list[str]]:
    """Return what Ray still has of us."""
    return _edge.actor_names(), [name for name in _edge.rooms() if name.startswith("hotkv:")]


async def test_three_shards_on_three_nodes_are_the_whole_model(
    machines: Machines, model: Path, expected: list[list[int]]
) -> None:
    async with deployed(model) as started:
        assert [[one.state for one in shard] for shard in started.replicas] == [["serving"]] * 3
        assert len({one.node for shard in started.replicas for one in shard}) == 3
        assert set(_edge.actor_names()) == {"hotkv:tiny:keeper", *(f"hotkv:tiny:{shard}:0" for shard in range(3))}
        assert await discover("tiny") == started
        seen: list[Deployment] = []

        async def look() -> None:
            seen.append(await status("tiny"))

        async with route_of(await deployed_shards("tiny")) as route:
            got, replays = await generate_while(route, PROMPTS, look)
        assert agree(got, expected)
        assert replays == [0] * N_SESSIONS
        assert hot(seen[0]) == [[N_SESSIONS]] * 3
        assert hot(await status("tiny")) == [[0]] * 3
        assert started.token not in repr(started)
        assert holding(machines.log_folder(), b"tiny")
        assert not holding(machines.log_folder(), started.token.encode())
    assert left() == ([], [])
    with pytest.raises(DeploymentUnknown):
        await discover("tiny")
    await down("tiny")


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("shard", [0, 1, 2])
async def test_a_shard_whose_process_is_killed_comes_back(model: Path, shard: int, expected: list[list[int]]) -> None:
    async with deployed(model) as started, route_of(await deployed_shards("tiny")) as route:

        async def kill() -> None:
            os.kill(pid_of((await status("tiny")).replicas[shard][0]), signal.SIGKILL)

        got, replays = await generate_while(route, PROMPTS, kill)
        assert agree(got, expected)
        assert replays == [1] * N_SESSIONS
        found = await discover("tiny")
        assert found.epoch == started.epoch
        assert found.replicas[shard][0].where != started.replicas[shard][0].where


async def test_shards_of_a_node_that_is_gone_come_back_on_others(
    machines: Machines, model: Path, expected: list[list[int]]
) -> None:
    async with deployed(model) as started, route_of(await deployed_shards("tiny")) as route:
        removable = {node.node_id for node in machines.nodes}
        lost = next(one for shard in started.replicas for one in shard if one.node in removable)
        off, where = lost.node, lost.where
        assert off is not None
        assert where is not None

        async def remove() -> None:
            await trio.to_thread.run_sync(machines.remove, off)
            # The shard's own process ends a moment after its node's.
            with suppress(OSError), trio.fail_after(60):
                while True:
                    await trio.aclose_forcefully(
                        await trio.open_tcp_stream(where.rpartition(":")[0], int(where.rpartition(":")[2]))
                    )
                    await trio.sleep(0.05)

        got, replays = await generate_while(route, PROMPTS, remove)
        assert agree(got, expected)
        assert replays == [1] * N_SESSIONS
        found = (await discover("tiny")).replicas[lost.id.shard][0]
        assert found.id == lost.id
        assert found.node not in {None, lost.node}
    machines.add()


async def test_a_node_is_added_and_another_drained(machines: Machines, model: Path, expected: list[list[int]]) -> None:
    async with deployed(model) as started, route_of(await deployed_shards("tiny")) as route:
        leaving = started.replicas[1][0].node
        assert leaving is not None

        async def move() -> None:
            machines.add()  # Ray wants the main thread for it
            await drain("tiny", node=leaving[:20])

        got, _ = await generate_while(route, PROMPTS, move)
        assert agree(got, expected)
        found = await discover("tiny")
        assert [[one.state for one in shard] for shard in found.replicas] == [["serving"]] * 3
        assert leaving not in {one.node for shard in found.replicas for one in shard}
        assert found.replicas[1][0].id == ReplicaId(1, 1)
    assert left() == ([], [])


@pytest.mark.usefixtures("machines")
async def test_replicas_balance_and_the_death_of_one_moves_its_sessions_only(
    model: Path, expected: list[list[int]]
) -> None:
    async with deployed(model, replicas=[2, 1, 1]), route_of(await deployed_shards("tiny")) as route:
        seen: list[Deployment] = []

        async def kill() -> None:
            seen.append(await status("tiny"))
            os.kill(pid_of(seen[0].replicas[0][1]), signal.SIGKILL)

        got, replays = await generate_while(route, PROMPTS, kill)
        assert hot(seen[0]) == [[N_SESSIONS // 2] * 2, [N_SESSIONS], [N_SESSIONS]]
        assert agree(got, expected)
        assert sorted(replays) == [0] * (N_SESSIONS // 2) + [1] * (N_SESSIONS // 2)


@pytest.mark.usefixtures("machines")
async def test_scaled_up_and_down(model: Path, expected: list[list[int]]) -> None:
    async with deployed(model), route_of(await deployed_shards("tiny")) as route:

        async def grow_and_shrink() -> None:
            assert len((await scale("tiny", 0, 3)).replicas[0]) == 3
            assert [one.id.replica for one in (await scale("tiny", 0, 1)).replicas[0]] == [0]

        got, _ = await generate_while(route, PROMPTS, grow_and_shrink)
        assert agree(got, expected)
        assert len(left()[1]) == 1
        with pytest.raises(InvalidInput, match="shards 0 to 2"):
            await scale("tiny", 3, 1)


@pytest.mark.usefixtures("machines")
async def test_nodes_without_the_model_are_sent_what_they_serve(model: Path, expected: list[list[int]]) -> None:
    elsewhere = model.with_name("not there.gguf")
    async with deployed(model, model_on_nodes=elsewhere), route_of(await deployed_shards("tiny")) as route:
        keeper = _edge.find_actor("hotkv:tiny:keeper")
        assert _edge.call(keeper, "node", patience=10) == _edge.here().id
        assert agree((await generate_while(route, PROMPTS, do_nothing))[0], expected)


@pytest.mark.usefixtures("machines")
async def test_what_cannot_be_deployed_leaves_nothing(model: Path) -> None:
    with pytest.raises(DeploymentFailed, match="no room for"):
        await deploy("tiny", model, 2, resources={"unobtainium": 1}, patience=1)
    with pytest.raises(DeploymentFailed, match=r"replica 0\.0 does not start: .*beyond loopback"):
        await deploy("tiny", model, 2, host="0.0.0.0", n_ctx=256)
    with pytest.raises(InvalidInput, match="replicas must be"):
        await deploy("tiny", model, 2, replicas=[1, 0])
    with pytest.raises(InvalidInput, match="replicas must be"):
        await deploy("tiny", model, 2, replicas=2.5)  # type: ignore[arg-type]
    with trio.move_on_after(1) as scope:
        await deploy("tiny", model, 2, resources={"unobtainium": 1})
    assert scope.cancelled_caught
    assert left() == ([], [])


@pytest.mark.usefixtures("machines")
async def test_what_serves_and_then_cannot_be_looked_at_is_ended_again(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeploymentFailed("tiny", "its keeper does not answer")

    monkeypatch.setattr("hotkv_trio.ray._deploy.look", fail)
    with pytest.raises(DeploymentFailed, match="keeper"):
        await deploy("tiny", model, 1, n_ctx=256, host="127.0.0.1")
    assert left() == ([], [])


@pytest.mark.usefixtures("machines")
async def test_a_name_is_used_once_and_epochs_grow(model: Path) -> None:
    async with deployed(model) as first:
        with pytest.raises(InvalidInput, match="already"):
            await deploy("tiny", model, 1, n_ctx=256)
        with pytest.raises(InvalidInput, match="no replica"):
            await drain("tiny", replica=ReplicaId(0, 5))
        with pytest.raises(InvalidInput, match="0 nodes"):
            await drain("tiny", node="nowhere")
    async with deployed(model) as second:
        assert second.epoch > first.epoch
        assert second.token != first.token


@pytest.mark.usefixtures("machines")
def test_the_commands(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shell = Shell(capsys)
    up = ("cluster", "up", model, "--name", "tiny", "--shards", 2, "--context", 256, "--host", "127.0.0.1")
    try:
        called = shell(*up, "--replicas", "2,1")
        assert called.status == 0, called.err
        assert "…" not in called.out
        assert [line.split()[0] for line in called.out.splitlines() if "serving" in line] == ["0.0", "0.1", "1.0"]
        assert shell(*up).is_refusal("already", "status NAME")
        document = shell("cluster", "status", "tiny", "--json").document
        assert [one["state"] for one in document["replicas"]] == ["serving"] * 3
        assert "token" not in document
        table = shell("cluster", "status", "tiny")
        assert table.status == 0
        assert "0/4" in table.out
        moved = shell("cluster", "drain", "tiny", "--replica", "0.1", "--json")
        assert [one["replica"] for one in moved.document["replicas"]] == ["0.0", "0.2", "1.0"]
        assert shell("cluster", "drain", "tiny", "--replica", "x").is_refusal("no replica", "status NAME")
    finally:
        assert shell("cluster", "down", "tiny").status == 0
    assert shell("cluster", "status", "tiny").is_refusal("no deployment named tiny", "cluster up")
    assert left() == ([], [])
