"""Figures, liveness and readiness over HTTP: what they say, and that bad clients cost only their own connection."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import attrs
import pytest
import trio
import trio.testing
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from hotkv_trio import InvalidInput, RuntimeStatistics, open_runtime
from hotkv_trio.serve import ServerStatistics, ShardServer
from hotkv_trio.serve.metrics import MetricsServer, ShardCollector
from hotkv_trio.testing import FakeEngine, InlineExecutor
from tests.serve._rig import key, open_rig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.serve._rig import Rig

GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"


async def ask(where: str, request: bytes) -> tuple[int, bytes]:
    """Send bytes; return the status and the body of the answer, (0, b"") if there is none."""
    host, _, port = where.partition(":")
    answer = b""
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        try:
            await stream.send_all(request)
            async for piece in stream:
                answer += bytes(piece)
        except trio.BrokenResourceError:
            pass
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


async def get(where: str, path: str) -> tuple[int, bytes]:
    return await ask(where, GET % path.encode())


async def figures(where: str) -> dict[str, float]:
    status, text = await get(where, "/metrics")
    assert status == 200
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values() if sample.name != "hotkv_shard_info"): (
            sample.value
        )
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@asynccontextmanager
async def answering() -> AsyncGenerator[tuple[Rig, str]]:
    async with open_rig() as rig:
        yield rig, await rig.nursery.start(MetricsServer(rig.server).serve, "127.0.0.1:0")


async def test_figures_are_those_of_the_statistics() -> None:
    async with answering() as (rig, where), rig.connect() as client:
        await client.start_session(key("a"))
        session = await client.start_session(key("b"))
        await session.prefill([1, 2, 3])
        await session.decode(4)
        with pytest.raises(InvalidInput):
            await session.truncate(77)
        await client.release(key("a"))
        said, runtime, server = await figures(where), rig.runtime.statistics(), rig.server.statistics()
        assert said == {
            "hotkv_ready": 0,
            "hotkv_shard_info": 1,
            "hotkv_sessions": 1,
            "hotkv_sessions_hot": 1,
            "hotkv_claims_waiting": 0,
            "hotkv_slots_clearing": 0,
            "hotkv_kv_budget_bytes": runtime.total_bytes,
            "hotkv_kv_borrowed_bytes": rig.runtime.info.slot_bytes,
            "hotkv_tombstones": runtime.tombstones,
            "hotkv_connections": 1,
            "hotkv_slots[free]": runtime.free_slots,
            "hotkv_slots[lent]": 1,
            "hotkv_slots[quarantined]": 0,
            "hotkv_tokens_total[prefill]": 3,
            "hotkv_tokens_total[decode]": 1,
            "hotkv_engine_calls_total": 2,
            "hotkv_moves_total": 0,
            "hotkv_sessions_opened_total": 2,
            "hotkv_sessions_released_total": 1,
            "hotkv_evictions_total": 0,
            "hotkv_expirations_total": 0,
            "hotkv_supersessions_total": 0,
            "hotkv_session_failures_total": 0,
            "hotkv_requests_total": server.requests,
            "hotkv_refusals_total": 1,
            "hotkv_connections_dropped_total": 0,
        }


async def test_every_counter_has_a_figure() -> None:
    async with open_rig() as rig:
        # Each field gets a value of its own, and every value must come out.
        fields = [f.name for f in attrs.fields(RuntimeStatistics) if f.name != "slots"]
        runtime = attrs.evolve(rig.runtime.statistics(), **{name: 1000 + n for n, name in enumerate(fields)})
        server = ServerStatistics(connections=2001, requests=2002, refusals=2003, dropped=2004)
        collector = ShardCollector(rig.server)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(rig.runtime), "statistics", lambda self: runtime)
            patch.setattr(type(rig.server), "statistics", lambda self: server)
            told = {sample.value for metric in collector.collect() for sample in metric.samples}
        assert {1000 + n for n in range(len(fields))} | {2001, 2002, 2003, 2004} <= told


async def test_readiness_from_before_the_model_to_the_drain() -> None:
    async with trio.open_nursery() as nursery:
        answering = MetricsServer()
        where = await nursery.start(answering.serve, "127.0.0.1:0")
        assert await get(where, "/readyz") == (503, b"not listening yet\n")
        assert await get(where, "/healthz") == (200, b"alive\n")
        assert await figures(where) == {"hotkv_ready": 0}
        async with open_runtime(FakeEngine(), executor=InlineExecutor()) as runtime:
            server = answering.collector.shard = ShardServer(runtime)
            assert await get(where, "/readyz") == (503, b"not listening yet\n")
            await nursery.start(server.serve, "127.0.0.1:0")
            assert await get(where, "/readyz") == (200, b"ready\n")
            assert (await figures(where))["hotkv_ready"] == 1
            nursery.start_soon(server.drain)
            await trio.testing.wait_all_tasks_blocked()
            assert await get(where, "/readyz") == (503, b"draining\n")
            assert await get(where, "/healthz") == (200, b"alive\n")
        assert await get(where, "/healthz") == (503, b"the runtime has ended\n")
        assert (await get(where, "/readyz"))[0] == 503
        nursery.cancel_scope.cancel()


async def test_a_runtime_that_ended_is_not_ready() -> None:
    async with trio.open_nursery() as nursery:
        async with open_runtime(FakeEngine(), executor=InlineExecutor()) as runtime:
            server = ShardServer(runtime)
            await nursery.start(server.serve, "127.0.0.1:0")
            readiness = [server.ready]
        readiness.append(server.ready)
        assert readiness == [True, False]
        nursery.cancel_scope.cancel()


async def test_the_callers_own_registry_and_figures() -> None:
    async with answering() as (rig, _):
        answering_too = MetricsServer(rig.server)
        Gauge("mine", "Of the embedding program.", registry=answering_too.registry).set(7)
        where = await rig.nursery.start(answering_too.serve, "127.0.0.1:0")
        assert (await figures(where))["mine"] == 7
        registry = CollectorRegistry()
        registry.register(ShardCollector(rig.server))
        assert registry.get_sample_value("hotkv_sessions") == 0


async def test_a_figure_that_fails_ends_its_request_only() -> None:
    async with open_rig() as rig:
        answering_too = MetricsServer(rig.server)
        Gauge("broken", "It fails.", registry=answering_too.registry).set_function(lambda: 1 / 0)
        where = await rig.nursery.start(answering_too.serve, "127.0.0.1:0")
        assert await get(where, "/metrics") == (0, b"")
        assert await get(where, "/healthz") == (200, b"alive\n")


@pytest.mark.parametrize(
    "request_,status",
    [
        (GET % b"/", 404),
        (GET % b"/metrics/", 404),
        (GET % b"/healthz?verbose", 200),
        (b"HEAD /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET /healthz HTTP/1.0\r\n\r\n", 200),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 this is TLS\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * 20_000, 431),
        (GET % b"/healthz" + GET % b"/readyz" + b"and more" * 5000, 200),
        (b"GET /heal", 0),
        (b"", 0),
    ],
)
async def test_requests_of_all_kinds(request_: bytes, status: int) -> None:
    async with answering() as (_, where):
        host, _, port = where.partition(":")
        if not status:
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(request_)
                await stream.send_eof()
                assert bytes(await stream.receive_some()).partition(b"\r\n")[0] in {b"", b"HTTP/1.1 400 Bad Request"}
        else:
            got, body = await ask(where, request_)
            assert got == status
            assert bool(body) is not request_.startswith(b"HEAD")
        assert await get(where, "/healthz") == (200, b"alive\n")


async def test_random_bytes_do_no_harm() -> None:
    rng = random.Random(3)
    async with answering() as (_, where):
        for _ in range(50):
            await ask(where, rng.randbytes(rng.randrange(1, 3000)) + b"\r\n\r\n")
        assert await get(where, "/healthz") == (200, b"alive\n")


async def test_slow_clients_are_bounded_and_let_go(autojump_clock: trio.testing.MockClock) -> None:
    # Over streams in memory: a mock clock does not wait for sockets.
    async with open_rig() as rig:
        answering = MetricsServer(rig.server)
        streams = []
        for n in range(40):
            ours, theirs = trio.testing.memory_stream_pair()
            rig.nursery.start_soon(answering._answer, theirs)
            await ours.send_all(GET[: n % 20])
            streams.append(ours)
        await trio.testing.wait_all_tasks_blocked()
        assert answering._connections == 32
        await trio.sleep(6)
        assert answering._connections == 0
        ours, theirs = trio.testing.memory_stream_pair()
        rig.nursery.start_soon(answering._answer, theirs)
        await ours.send_all(GET % b"/healthz")
        assert bytes(await ours.receive_some()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_client_that_reads_nothing_is_let_go(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig() as rig:
        answering = MetricsServer(rig.server)
        # Without a buffer: what is not read has not been sent.
        ours, theirs = trio.testing.lockstep_stream_pair()
        rig.nursery.start_soon(answering._answer, theirs)
        await ours.send_all(GET % b"/metrics")
        await trio.testing.wait_all_tasks_blocked()
        assert answering._connections == 1
        await trio.sleep(6)
        assert answering._connections == 0


async def test_an_address_in_use_is_said() -> None:
    async with answering() as (rig, where):
        with pytest.raises(OSError, match="in use"):
            await MetricsServer(rig.server).serve(where)
