"""Peers that vanish without a word: no FIN, no reset, and every system on the way still answers for them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.testing

from hotkv_trio.route import ShardAddress, _hop, open_route
from hotkv_trio.serve import ConnectionLost, Limits, open_shard_client
from hotkv_trio.testing import FakeEngine
from tests.serve._rig import key, open_rig, until
from tests.serve._swallowing_proxy import SwallowingProxy

if TYPE_CHECKING:
    from collections.abc import Callable


def counted(calls: list[float]) -> Callable[[], float]:
    def jitter() -> float:
        calls.append(trio.current_time())
        return 0.0

    return jitter


async def test_a_client_behind_a_proxy_that_stops_forwarding_gives_its_bytes_back() -> None:
    async with open_rig(limits=Limits(silence_timeout=0.8)) as rig:
        (where,) = await rig.nursery.start(rig.server.serve, "127.0.0.1:0")
        proxy = SwallowingProxy(where)
        through = await rig.nursery.start(proxy.serve)
        async with rig.connect() as near, near.open_session(key("near")) as neighbour:
            await neighbour.prefill([1, 2])
            async with _client(through) as client:
                session = await client.start_session(key("far"))
                await session.prefill([1, 2, 3])
                assert rig.lent == 2
                # Silent for longer than the limit, and there all the same: it pings.
                await trio.sleep(1.6)
                assert not client.lost
                proxy.cut = True
                await until(lambda: rig.lent == 1)
                assert rig.runtime.limiter.borrowed_bytes == rig.runtime.info.slot_bytes
                await client.wait_lost()
                with pytest.raises(ConnectionLost, match="nothing came from the server for too long"):
                    await session.decode(4)
            assert rig.is_solo((await neighbour.decode(3)).output, [1, 2, 3])
        await until(lambda: rig.server.statistics().connections == 0)
        assert rig.server.statistics().dropped == 1
        rig.nursery.cancel_scope.cancel()


def _client(where: str) -> Any:
    return open_shard_client(where, cancel_patience=0.1)


async def test_a_route_leaves_a_server_that_vanished_and_goes_on_elsewhere() -> None:
    """The way to the shard dies in the middle of a step; a new connection takes another way."""
    waits: list[float] = []
    async with open_rig(limits=Limits(silence_timeout=0.4)) as rig:
        (where,) = await rig.nursery.start(rig.server.serve, "127.0.0.1:0")
        async with (
            open_route([where]) as route,
            route.open_session() as session,
            session.generate([1, 2, 3], 8) as tokens,
        ):
            expected = [token async for token in tokens]
        first, second = SwallowingProxy(where), SwallowingProxy(where)
        ways = [await rig.nursery.start(proxy.serve) for proxy in (first, second)]
        got = []
        async with open_route([ways[0]], jitter=counted(waits)) as route, route.open_session() as session:
            async with session.generate([1, 2, 3], 8) as tokens:
                async for token in tokens:
                    got.append(token)
                    if len(got) == 4:
                        first.cut = True
                        route._hops[0]._address = ShardAddress(where=ways[1])  # type: ignore[attr-defined]
            assert session.replays == 1
        assert got == expected
        assert len(waits) == 1
        await until(lambda: rig.server.statistics().connections == 0)
        rig.nursery.cancel_scope.cancel()


async def test_a_route_does_not_wait_for_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is there, its system answers for it, and it is stopped: as one in a debugger, or behind a dead way."""
    monkeypatch.setattr(_hop, "_PATIENCE", 0.2)
    async with open_rig() as rig:
        (where,) = await rig.nursery.start(rig.server.serve, "127.0.0.1:0")
        proxy = SwallowingProxy(where)
        proxy.cut = True
        through = await rig.nursery.start(proxy.serve)
        with pytest.raises(ConnectionLost, match=f"{through} did not say welcome within 0.2 s"):
            async with open_route([through]):
                pytest.fail("welcome")
        async with open_route([where]) as route, route.open_session() as session:
            await session.append([1, 2])
        rig.nursery.cancel_scope.cancel()


async def test_a_peer_that_never_pings_is_gone_after_the_limit(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig, rig.connect() as client:
        client._welcome = _without_pings(client._welcome)
        session = await client.start_session(key("a"))
        await session.prefill([1])
        await trio.sleep(14)  # what it pings by until it is told otherwise
        await trio.sleep(61)
        assert rig.lent == 0
        assert rig.server.statistics().connections == 0
        with pytest.raises(ConnectionLost):
            await session.decode(2)


def _without_pings(welcome: Any) -> Any:
    return msgspec.structs.replace(welcome, silence_timeout=1e9)


async def test_a_silent_peer_with_work_under_way_pings_and_stays(autojump_clock: trio.testing.MockClock) -> None:
    """Waiting for a slot for ever is no silence, whatever the limit."""
    async with (
        open_rig(FakeEngine(n_slots=1), limits=Limits(silence_timeout=5.0)) as rig,
        rig.connect() as holder,
        rig.connect() as client,
        trio.open_nursery() as nursery,
    ):
        session = await holder.start_session(key("holder"))
        rig.executor.hold()
        nursery.start_soon(session.prefill, [1])
        await trio.testing.wait_all_tasks_blocked()
        with trio.move_on_after(50) as scope:
            await client.start_session(key("late"))
        assert scope.cancelled_caught
        assert not client.lost
        assert not holder.lost
        rig.executor.resume()
        await client.ping()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None or shutil.which("ip") is None, reason="needs unshare and ip")
def test_a_machine_that_loses_its_network() -> None:
    """A client in a network namespace whose link goes down: not a packet leaves it any more."""
    done = subprocess.run(
        ["unshare", "--net", "--map-root-user", sys.executable, "-m", "tests.serve._lost_network"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bytes are back" in done.stdout


async def test_the_system_is_told_to_look_for_peers_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system can: keep-alive for a silent connection, a user timeout for bytes that nobody acknowledges."""
    options: set[tuple[int, int, int]] = set()
    monkeypatch.setattr(trio.SocketStream, "setsockopt", lambda _, *option: options.add(option))
    async with open_rig() as rig:
        (where,) = await rig.nursery.start(rig.server.serve, "127.0.0.1:0")
        async with _client(where) as client:
            await client.ping()
    assert (trio.socket.SOL_SOCKET, trio.socket.SO_KEEPALIVE, 1) in options
    if hasattr(trio.socket, "TCP_USER_TIMEOUT"):
        assert (trio.socket.IPPROTO_TCP, trio.socket.TCP_USER_TIMEOUT, 30_000) in options
