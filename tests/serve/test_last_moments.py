"""The last moments of a call, of a session, of a connection: nobody waits for ever, and nothing is left behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from hotkv_trio import CacheMiss, HotKVError, InvalidInput, MissReason
from hotkv_trio.route import open_route
from hotkv_trio.serve import ConnectionLost, Limits, open_shard_client
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._codec import encode_frame
from tests.serve._rig import key, open_rig, until
from tests.serve.test_client import _get, by_hand, settled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@pytest.mark.parametrize("ticks", range(6))
async def test_a_call_made_in_the_moment_of_the_clients_end_is_told_of_it(ticks: int) -> None:
    stream, server = by_hand()
    told = trio.Event()

    async def ping() -> None:
        with pytest.raises(ConnectionLost):
            await client.ping()
        told.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream) as client:
            await settled()
            nursery.start_soon(ping)
            for _ in range(ticks):
                await trio.lowlevel.checkpoint()
        with trio.fail_after(5):
            await told.wait()
        nursery.cancel_scope.cancel()


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "reply",
    [
        m.CancelledReply(id=0),
        m.WouldBlockReply(id=0),
        m.CancelledReply(id=1),
        m.CacheMissReply(id=1, session="", epoch=-1, reason=MissReason.UNKNOWN, resume_at=0),
        m.StaleEpochReply(id=0, session="", epoch=-1, current=0),
        m.RecipeMismatchReply(id=1, fields={"a": (_nested(400), 1)}),
    ],
    ids=lambda reply: f"{type(reply).__name__} {reply.id}",
)
async def test_a_reply_that_makes_no_sense_costs_the_connection_and_is_an_error_of_ours(reply: m.Reply) -> None:
    stream, server = by_hand()
    errors: list[Exception] = []

    async def ping() -> None:
        try:
            await client.ping()
        except Exception as exc:  # noqa: BLE001 - what kind it is, is what is tested
            errors.append(exc)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream) as client:
            nursery.start_soon(ping)
            await server.request()
            await server.stream.send_all(encode_frame(reply))
            await server.stream.send_eof()
            with trio.fail_after(5):
                await client.wait_lost()
            await settled()
    (error,) = errors
    assert isinstance(error, HotKVError | ConnectionLost)


async def test_a_release_that_is_waited_for_no_longer_is_not_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    stream, server = by_hand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream, cancel_patience=5.0) as client:
            session = await _get(client, server)
            began = trio.current_time()
            await session.aclose()
            assert trio.current_time() == began + 5
            assert isinstance(await server.request(), m.Release)
            with trio.move_on_after(1) as nothing_more:
                await server.request()
            assert nothing_more.cancelled_caught
        nursery.cancel_scope.cancel()


async def test_a_session_closed_behind_a_long_prefill_is_released_once_that_has_ended() -> None:
    async with open_rig(runtime={"prefill_chunk": 64}) as rig, rig.connect(cancel_patience=0.05) as client:
        session = await client.start_session(key("a"))
        rig.executor.hold()
        with trio.move_on_after(0.01):
            await session.prefill([3] * 12)
        await session.aclose()
        assert rig.lent == 1
        rig.executor.resume()
        await until(lambda: rig.lent == 0)


def _slowed(send: Callable[[], Awaitable[object]] | None) -> Callable[[], Awaitable[None]]:
    async def hook() -> None:
        if send is not None:
            await send()
        for _ in range(10):
            await trio.lowlevel.checkpoint()

    return hook


async def test_whoever_has_read_a_reply_may_ask_again_though_its_writer_has_not_gone_on() -> None:
    async with open_rig(limits=Limits(max_requests=1)) as rig:
        ours, theirs = trio.testing.memory_stream_pair()
        theirs.send_stream.send_all_hook = _slowed(theirs.send_stream.send_all_hook)
        rig.nursery.start_soon(rig.server.serve_stream, theirs)
        async with open_shard_client(ours) as client:
            for _ in range(5):
                await client.ping()
        assert rig.server.statistics().refusals == 0


async def test_a_route_session_whose_scope_was_left_misses_and_opens_nothing() -> None:
    async with open_rig() as rig, open_route([rig.runtime]) as route:
        async with route.open_session() as session:
            await session.append([1, 2])
        with pytest.raises(CacheMiss) as caught:
            await session.append([3])
        assert caught.value.reason is MissReason.RELEASED
        assert rig.lent == 0


@pytest.mark.parametrize(
    "wrong, what",
    [
        ({"max_requests": 2.5}, "max_requests must be an integer > 0"),
        ({"max_sessions": 0}, "max_sessions must be an integer > 0"),
        ({"max_frame": math.inf, "max_queued_bytes": math.inf}, "max_frame must be an integer > 0"),
        ({"max_queued_bytes": 5}, "max_queued_bytes must be at least max_frame"),
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidInput, match=what):
        Limits(**wrong)
