"""ShardClient: the calls, errors and cancellation of a local session."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from hotkv_trio import (
    BudgetExceeded,
    CacheMiss,
    ContextFull,
    EngineFailed,
    HotKVError,
    InvalidInput,
    MissReason,
    PositionMismatch,
    RecipeMismatch,
    SessionExists,
    StaleEpoch,
    TruncateUnsupported,
)
from hotkv_trio.serve import ConnectionLost, LimitExceeded, ProtocolError, open_shard_client
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._codec import ServerEnd, encode_frame
from hotkv_trio.serve._tensors import Tensor
from hotkv_trio.testing import FakeEngine
from tests.core._rig import spawn
from tests.serve._rig import key, open_rig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hotkv_trio.serve import ShardClient

settled = trio.testing.wait_all_tasks_blocked

Opener = Any
"""A `Runtime` or a `ShardClient`: what follows holds for both."""


async def misses(shard: Opener) -> None:
    async with shard.open_session(key("a")) as session:
        await session.prefill([1, 2, 3])
        await session.decode(4, at=9)


async def mispositions(shard: Opener) -> None:
    async with shard.open_session(key("a")) as session:
        await session.prefill([1, 2, 3])
        await session.decode(4, at=1)


async def overfills(shard: Opener) -> None:
    async with shard.open_session(key("a")) as session:
        await session.prefill([1] * 60)
        await session.prefill([2] * 5)


async def truncates_too_far(shard: Opener) -> None:
    async with shard.open_session(key("a")) as session:
        await session.prefill([1] * 6)
        await session.truncate(7)


async def opens_twice(shard: Opener) -> None:
    async with shard.open_session(key("a")), shard.open_session(key("a")):
        pytest.fail("opened twice")


async def opens_older(shard: Opener) -> None:
    async with shard.open_session(key("a", 5)), shard.open_session(key("a", 4)):
        pytest.fail("opened")


async def wants_another_recipe(shard: Opener) -> None:
    recipe = attrs.evolve(shard.recipe, layers=(1, 2), yarn=(1.0, 2.0), lora=("x",))
    async with shard.open_session(key("a"), recipe=recipe):
        pytest.fail("opened")


def bad_input(*data: Any) -> Callable[[Opener], Awaitable[None]]:
    async def gives(shard: Opener) -> None:
        async with shard.open_session(key("a")) as session:
            await session.prefill(*data)

    return gives


def bad_call(method: str, *args: Any, **kwargs: Any) -> Callable[[Opener], Awaitable[None]]:
    async def calls(shard: Opener) -> None:
        async with shard.open_session(key("a")) as session:
            await session.prefill([1, 2])
            await getattr(session, method)(*args, **kwargs)

    return calls


async def told(shard: Opener, does: Callable[[Opener], Awaitable[None]]) -> tuple[type[Exception], str, Any]:
    with pytest.raises(HotKVError) as raised:
        await does(shard)
    error = raised.value
    return type(error), str(error), attrs.asdict(error)


@pytest.mark.parametrize(
    "does,expected",
    [
        (misses, CacheMiss),
        (mispositions, PositionMismatch),
        (overfills, ContextFull),
        (truncates_too_far, InvalidInput),
        (opens_twice, SessionExists),
        (opens_older, StaleEpoch),
        (wants_another_recipe, RecipeMismatch),
        (bad_input([]), InvalidInput),
        (bad_input([99]), InvalidInput),
        (bad_input([-1]), InvalidInput),
        (bad_input("text"), InvalidInput),
        (bad_input([1.5]), InvalidInput),
        (bad_input(np.zeros((1, 4), dtype=np.float32)), InvalidInput),
        (bad_call("decode", [1, 2]), InvalidInput),
        (bad_call("decode", 16), InvalidInput),
        (bad_call("decode", 1, at=-1), InvalidInput),
        (bad_call("decode", 1, at="x"), InvalidInput),
        (bad_call("prefill", [1], output="some"), InvalidInput),
        (bad_call("truncate", -1), InvalidInput),
        (bad_call("truncate", 1.5), InvalidInput),
    ],
)
async def test_errors_are_those_of_a_local_session(
    does: Callable[[Opener], Awaitable[None]], expected: type[Exception]
) -> None:
    async with open_rig() as rig, rig.connect() as client:
        local = await told(rig.runtime, does)
        remote = await told(client, does)
        assert issubclass(local[0], expected)
        assert local == remote
        await client.ping()


async def test_other_errors_of_the_shard() -> None:
    async with open_rig() as rig, rig.connect() as client:
        session = await client.start_session(key("a"))
        await session.prefill([1, 2])
        rig.engine.fail("process", EngineFailed(-3, "told to"))
        with pytest.raises(EngineFailed, match="told to") as failed:
            await session.decode(3)
        assert failed.value.native_code == -3
        assert rig.is_solo((await session.decode(3, at=2)).output, [1, 2, 3])
        rig.runtime.limiter.total_bytes = 1
        with pytest.raises(BudgetExceeded) as exceeded:
            await client.start_session(key("b"))
        assert (exceeded.value.requested, exceeded.value.total) == (640, 1)
        with pytest.raises(CacheMiss) as miss:
            await session.decode(4)
        assert miss.value.reason is MissReason.EVICTED
        assert session.length == 0
    async with open_rig(FakeEngine(memory="recurrent")) as rig, rig.connect() as client:
        session = await client.start_session(key("a"))
        await session.prefill([1, 2, 3])
        with pytest.raises(TruncateUnsupported) as unsupported:
            await session.truncate(2)
        assert (unsupported.value.key, unsupported.value.memory) == (key("a"), "recurrent")


async def test_would_block() -> None:
    async with (
        open_rig(FakeEngine(n_slots=1)) as rig,
        rig.connect() as client,
        client.open_session(key("a")) as session,
    ):
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.prefill, [1])
            await settled()
            with pytest.raises(trio.WouldBlock):
                await client.start_session(key("b"), wait=False)
            rig.executor.resume()


async def test_a_later_shard_takes_hidden_states() -> None:
    rng = np.random.default_rng(1)
    states = rng.standard_normal((5, 8)).astype(np.float32)
    async with open_rig(FakeEngine(n_vocab=0, n_embd=8)) as rig:
        async with rig.runtime.open_session(key("local")) as local:
            whole = await local.prefill(states, output="all")
            single = await local.decode(states[0])
        async with rig.connect() as client, client.open_session(key("a")) as session:
            result = await session.prefill(states, output="all")
            assert np.array_equal(result.output, whole.output)
            assert np.array_equal((await session.decode(states[0])).output, single.output)
            with pytest.raises(InvalidInput, match="tokens given"):
                await session.prefill([1])
        async with rig.connect(dtype="float16") as client, client.open_session(key("a")) as session:
            narrowed = states.astype(np.float16).astype(np.float32)
            async with rig.runtime.open_session(key("local")) as local:
                narrow = await local.prefill(narrowed, output="all")
            result = await session.prefill(states, output="all")
            # The last layer's rows are logits, which stay as they are.
            assert np.array_equal(result.output, narrow.output)


async def test_a_recipe_is_agreed_on_in_the_hello() -> None:
    async with open_rig() as rig:
        async with rig.connect(recipe=rig.runtime.recipe) as client:
            assert client.recipe == rig.runtime.recipe
            # What moving a slot costs is the server's own affair.
            assert client.info == attrs.evolve(rig.runtime.info, move_cost=math.inf)
        other = attrs.evolve(rig.runtime.recipe, type_k="q8_0")
        with pytest.raises(RecipeMismatch) as mismatch:
            async with rig.connect(recipe=other):
                pytest.fail("welcome")
        assert mismatch.value.fields == {"type_k": ("f16", "q8_0")}
        stream = rig.stream()
        await stream.send_all(encode_frame(m.Hello(version=1, recipe_digest="00", max_frame=1000)))
        data = bytes(await stream.receive_some())
        assert b"recipe_mismatch" in data
        assert rig.runtime.recipe.digest().encode() in data
        async with rig.connect() as client:
            with pytest.raises(InvalidInput, match="CacheRecipe"):
                await client.start_session(key("a"), recipe="x")  # type: ignore[arg-type]
            with pytest.raises(InvalidInput, match="SessionKey"):
                await client.start_session("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("state", ["running", "queued behind another call", "queued at the shard"])
async def test_a_cancelled_call_leaves_the_length_and_the_connection(state: str) -> None:
    async with open_rig(runtime={"prefill_chunk": 4}) as rig, rig.connect() as client:
        session, other = [await client.start_session(key(name)) for name in "ab"]
        await session.prefill([1, 2])
        rig.executor.hold()
        cancelled = trio.CancelScope()

        async def victim() -> None:
            with cancelled:
                await session.prefill([3] * 12)

        async with trio.open_nursery() as nursery:
            if state == "queued behind another call":
                nursery.start_soon(session.decode, 5)
            elif state == "queued at the shard":
                nursery.start_soon(other.prefill, [1] * 20)
            await settled()
            nursery.start_soon(victim)
            await settled()
            cancelled.cancel()
            await settled()
            rig.executor.resume()
        assert cancelled.cancelled_caught
        history = [1, 2, 5] if state == "queued behind another call" else [1, 2]
        assert session.length == len(history)
        result = await session.decode(6, at=len(history))
        assert rig.is_solo(result.output, [*history, 6])
        assert client._outstanding == client._outstanding_bytes == 0


async def test_a_call_cancelled_too_late_returns_what_it_did() -> None:
    """One chunk, and it runs: it cannot be cut short, and so it has happened."""
    async with open_rig() as rig, rig.connect() as client, client.open_session(key("a")) as session:
        scope = trio.CancelScope()
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.prefill, [1, 2], scope=scope)
            await settled()
            scope.cancel()
            await settled()
            assert not running.done
            rig.executor.resume()
        assert running.value.length == session.length == 2
        assert rig.is_solo(running.value.output, [1, 2])
        assert rig.is_solo((await session.decode(3)).output, [1, 2, 3])


async def test_a_cancelled_open_takes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with (
        open_rig(FakeEngine(n_slots=1)) as rig,
        rig.connect() as client,
        client.open_session(key("a")) as session,
    ):
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.prefill, [1])
            await settled()
            with trio.move_on_after(1) as scope:
                await client.start_session(key("b"))
            assert scope.cancelled_caught
            rig.executor.resume()
        assert rig.runtime.statistics().waiting == 0
        with pytest.raises(CacheMiss):
            await client.get(key("b"))
        await session.decode(2)


class ByHand:
    """A server that answers when the test says so."""

    def __init__(self, stream: Any, welcome: m.Welcome) -> None:
        self.stream = stream
        self.end = ServerEnd(max_frame=10_000)
        self.welcome = welcome

    async def request(self) -> Any:
        while not hasattr(event := self.end.next_event(), "message"):
            self.end.receive_data(await self.stream.receive_some())
        return event.message

    async def reply(self, message: Any, tensor: bytes = b"") -> None:
        await self.stream.send_all(self.end.send(message, tensor))

    async def greet(self) -> None:
        assert isinstance(await self.request(), m.Hello)
        await self.reply(self.welcome)


def by_hand(pair: Callable[[], Any] = trio.testing.memory_stream_pair, **changes: Any) -> tuple[Any, ByHand]:
    info = FakeEngine()._info
    welcome = m.Welcome(
        version=1,
        recipe=info.recipe,
        dtype="float32",
        facts=m.Facts(**{name: getattr(info, name) for name in m.Facts.__struct_fields__}),
        max_requests=2,
        max_queued_bytes=5000,
        silence_timeout=60.0,
        **{"max_frame": 5000, "recipe_digest": info.recipe.digest(), **changes},
    )
    ours, theirs = pair()
    return ours, ByHand(theirs, welcome)


NO_ROWS = Tensor("float32", (0, 16))


async def test_after_a_server_that_does_not_answer_a_position_must_be_said(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stream, server = by_hand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream, cancel_patience=5.0) as client:
            nursery.start_soon(client.start_session, key("a"))  # noqa: ASYNC111
            request = await server.request()
            assert isinstance(request, m.Open)
            await server.reply(m.Opened(id=request.id, length=0))
            await settled()
            session = await _get(client, server)
            began = trio.current_time()
            with trio.move_on_after(1) as scope:
                await session.prefill([1, 2])
            assert scope.cancelled_caught
            assert trio.current_time() == began + 6
            with pytest.raises(InvalidInput, match="at must be given"):
                await session.decode(3)
            request = await server.request()
            assert isinstance(request, m.Prefill)
            assert await server.request() == m.Cancel(id=request.id)
            await server.reply(m.Step(id=request.id, position=0, length=2, tensor=NO_ROWS))
            await settled()
            assert session.length == 2
            nursery.start_soon(session.decode, 3)
            decode = await server.request()
            await server.reply(m.Step(id=decode.id, position=2, length=3, tensor=NO_ROWS))
            await settled()
            assert session.length == 3
            nursery.start_soon(session.aclose)
            release = await server.request()
            await server.reply(m.Released(id=release.id, existed=True))


async def _get(client: ShardClient, server: ByHand) -> Any:
    found: list[Any] = []
    async with trio.open_nursery() as nursery:

        async def get() -> None:
            found.append(await client.get(key("a")))

        nursery.start_soon(get)
        request = await server.request()
        await server.reply(m.Opened(id=request.id, length=0))
    return found[0]


async def test_an_open_that_was_given_up_is_released_when_it_is_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    stream, server = by_hand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream, cancel_patience=5.0) as client:
            with trio.move_on_after(1):
                await client.start_session(key("a"))
            request = await server.request()
            assert await server.request() == m.Cancel(id=request.id)
            await server.reply(m.Opened(id=request.id, length=0))
            release = await server.request()
            assert isinstance(release, m.Release)
            await server.reply(m.Released(id=release.id, existed=True))


async def test_no_more_is_sent_than_the_server_takes() -> None:
    stream, server = by_hand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream) as client:
            for _ in range(5):
                nursery.start_soon(client.ping)  # noqa: ASYNC111
            await settled()
            first, second = await server.request(), await server.request()
            assert server.end.unanswered == 2
            third = spawn(nursery, server.request)
            await settled()
            assert not third.done
            await server.reply(m.Pong(id=second.id))
            await settled()
            fourth = spawn(nursery, server.request)
            await settled()
            assert not fourth.done
            await server.reply(m.Pong(id=first.id))
            await settled()
            for request in (third.value, fourth.value):
                await server.reply(m.Pong(id=request.id))
            fifth = await server.request()
            await server.reply(m.Pong(id=fifth.id))
            session = await _get(client, server)
            with pytest.raises(LimitExceeded, match="one request"):
                await session.prefill([1] * 3000)


@pytest.mark.parametrize("why", ["the server takes no more", "the server reads nothing"])
async def test_a_call_that_is_cancelled_before_it_is_sent_never_is(
    why: str, autojump_clock: trio.testing.MockClock
) -> None:
    if why == "the server takes no more":
        (stream, server), before = by_hand(), 2
    else:
        (stream, server), before = by_hand(trio.testing.lockstep_stream_pair), 1
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream) as client:
            for _ in range(before):
                nursery.start_soon(client.ping)  # noqa: ASYNC111
            await settled()
            asked = trio.current_time()
            with trio.move_on_after(1) as scope:
                await client.statistics()
            assert scope.cancelled_caught
            assert trio.current_time() == asked + 1, "there is nothing to wait for"
            for _ in range(before):
                await server.reply(m.Pong(id=(await server.request()).id))
            last = spawn(nursery, client.ping)
            request = await server.request()
            assert isinstance(request, m.Ping)
            await server.reply(m.Pong(id=request.id))
            await settled()
            assert last.done


@pytest.mark.parametrize(
    "last,what",
    [
        (b"", "closed the connection"),
        (b"\0\0\0", "within a frame"),
        (encode_frame(m.Pong(id=77)), "does not wait"),
        (encode_frame(m.Opened(id=1, length=3)), "another reply"),
        (encode_frame(m.Goodbye(reason="time to go")), "time to go"),
        (encode_frame(m.ProtocolErrorReply(id=0, what="never that")), "never that"),
    ],
)
async def test_a_lost_connection_is_said_to_every_call(last: bytes, what: str) -> None:
    stream, server = by_hand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream) as client:
            errors: list[ConnectionLost] = []

            async def ping() -> None:
                with pytest.raises(ConnectionLost, match=what) as lost:
                    await client.ping()
                errors.append(lost.value)

            for _ in range(4):
                nursery.start_soon(ping)
            await server.request()
            await settled()
            await server.stream.send_all(last)
            await server.stream.send_eof()
            await client.wait_lost()
            await settled()
            assert len(errors) == len(set(map(id, errors))) == 4
            assert client.lost
            assert "lost" in repr(client)
            with pytest.raises(ConnectionLost, match=what):
                await client.start_session(key("a"))


async def test_the_end_of_a_client_ends_its_calls() -> None:
    stream, server = by_hand()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        async with open_shard_client(stream) as client:

            async def ping() -> None:
                with pytest.raises(ConnectionLost, match="closed"):
                    await client.ping()

            nursery.start_soon(ping)
            await settled()


@pytest.mark.parametrize(
    "answer,error",
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError),
        (b"", ConnectionLost),
        (encode_frame(m.Goodbye(reason="full")), ConnectionLost),
        (encode_frame(m.Pong(id=1)), ProtocolError),
    ],
)
async def test_what_is_no_shard_server(answer: bytes, error: type[Exception]) -> None:
    stream, server = by_hand()
    await server.stream.send_all(answer)
    await server.stream.send_eof()
    with pytest.raises(error):
        async with open_shard_client(stream):
            pytest.fail("welcome")


async def test_a_digest_that_is_not_the_recipes_is_refused() -> None:
    stream, server = by_hand(recipe_digest="00")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.greet)
        with pytest.raises(ProtocolError, match="digest"):
            async with open_shard_client(stream):
                pytest.fail("welcome")


async def test_what_a_body_raises_leaves_bare() -> None:
    async with open_rig() as rig:
        with pytest.raises(KeyError):
            async with rig.connect() as client, client.open_session(key("a")):
                raise KeyError
        await settled()
        assert rig.lent == 0


async def test_every_call_checkpoints() -> None:
    async with open_rig() as rig, rig.connect() as client:
        session = await client.start_session(key("a"))
        for call in (
            lambda: session.prefill([1, 2]),
            lambda: session.decode(3),
            lambda: session.truncate(1),
            lambda: client.get(key("a")),
            client.ping,
            client.statistics,
            session.aclose,
            lambda: client.release(key("a")),
        ):
            with trio.testing.assert_checkpoints():
                await call()
