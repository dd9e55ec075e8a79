"""ShardServer: isolation of principals and connections, fencing, limits, drain, and peers that misbehave."""

from __future__ import annotations

import random
import struct
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.lowlevel
import trio.testing

from hotkv_trio import (
    CacheMiss,
    EngineFailed,
    InvalidInput,
    MissReason,
    RuntimeClosed,
    Session,
    SessionExists,
    StaleEpoch,
)
from hotkv_trio.serve import (
    ConnectionLost,
    LimitExceeded,
    Limits,
    ShardDraining,
    ShardServer,
    Unauthorised,
    open_shard_client,
    read_tokens,
)
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._codec import ClientEnd, Frame, encode_frame
from hotkv_trio.serve._principals import Principals
from hotkv_trio.serve._tensors import Tensor
from hotkv_trio.testing import FakeEngine
from tests.serve._rig import ALICE, BOB, key, open_rig, until

if TYPE_CHECKING:
    from pathlib import Path


settled = trio.testing.wait_all_tasks_blocked


async def greet(stream: Any, **hello: Any) -> ClientEnd:
    """Greet a server by hand."""
    end = ClientEnd(max_frame=hello.pop("max_frame", 2**20))
    await stream.send_all(end.hello(**{"token": None, "recipe": None, "dtype": "float32", **hello}))
    frame = await receive(stream, end)
    assert isinstance(frame.message, m.Welcome)
    return end


async def receive(stream: Any, end: ClientEnd) -> Frame[Any]:
    while not isinstance(event := end.next_event(), Frame):
        end.receive_data(await stream.receive_some())
    return event


async def test_a_disconnect_in_the_middle_of_a_prefill_releases_within_the_step() -> None:
    async with (
        open_rig(runtime={"prefill_chunk": 4}) as rig,
        rig.connect() as client,
        client.open_session(key("n")) as neighbour,
    ):
        await neighbour.prefill([1, 2, 3])
        stream = rig.stream()
        end = await greet(stream)
        await stream.send_all(end.send(m.Open(id=1, session="a", epoch=0)))
        await receive(stream, end)
        rig.executor.hold()
        calls = len(rig.engine.calls)
        prefill = m.Prefill(id=2, session="a", epoch=0, tensor=Tensor("int32", (48,)))
        await stream.send_all(end.send(prefill, bytes(4 * 48)))
        await settled()
        await trio.aclose_forcefully(stream)
        await settled()
        assert rig.lent == 2, "the native call is waited for"
        rig.executor.resume()
        await settled()
        assert (rig.lent, len(rig.engine.calls)) == (1, calls + 1)
        result = await neighbour.decode(4)
        assert rig.is_solo(result.output, [1, 2, 3, 4])


async def test_a_kept_session_outlives_its_connection_and_is_found_by_its_principal_only() -> None:
    async with open_rig(tokens=[ALICE, BOB]) as rig:
        async with rig.connect(token=ALICE) as client:
            async with client.open_session(key("a"), kept=True) as session:
                await session.prefill([1, 2, 3])
            async with client.open_session(key("b")) as other:
                await other.prefill([9])
        await settled()
        assert rig.lent == 1
        async with rig.connect(token=BOB) as bob:
            with pytest.raises(CacheMiss) as miss:
                await bob.get(key("a"))
            assert miss.value.reason is MissReason.UNKNOWN
            assert not await bob.release(key("a"))
            async with bob.open_session(key("a", 7)) as session:
                assert session.length == 0
                await session.prefill([5])
                (view,) = (await bob.statistics()).sessions
                assert (view.session, view.epoch, view.length) == ("a", 7, 1)
            with pytest.raises(CacheMiss):
                await bob.get(key("a", 7))
        async with rig.connect(token=ALICE) as client:
            session = await client.get(key("a"))
            assert session.length == 3
            assert rig.is_solo((await session.decode(4)).output, [1, 2, 3, 4])
            views = (await client.statistics()).sessions
            assert [(view.session, view.kept, view.length) for view in views] == [("a", True, 4)]
            with pytest.raises(CacheMiss) as miss:
                await client.get(key("b"))
            assert miss.value.reason is MissReason.RELEASED
            assert await client.release(key("a"))
            assert rig.lent == 0


async def test_a_kept_session_expires(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(runtime={"idle_ttl": 10.0}) as rig, rig.connect() as client:
        session = await client.start_session(key("a"), kept=True)
        await session.prefill([1])
        await trio.sleep(9)
        await session.decode(2)
        await trio.sleep(11)
        with pytest.raises(CacheMiss) as miss:
            await session.decode(3)
        assert miss.value.reason is MissReason.EXPIRED
        assert session.length == 0


async def outcome_of(call: Any, into: list[Any]) -> None:
    try:
        into.append(await call)
    except Exception as exc:  # noqa: BLE001 - compared by the test
        into.append(exc)


@pytest.mark.parametrize("state", ["idle", "running", "queued", "waiting for a slot"])
async def test_a_newer_epoch_fences_off_the_older_one_on_another_connection(state: str) -> None:
    async with (
        open_rig(FakeEngine(n_slots=2)) as rig,
        rig.connect() as old,
        rig.connect() as new,
        trio.open_nursery() as nursery,
    ):
        outcomes: list[Any] = []
        if state == "waiting for a slot":
            busy = [await old.start_session(key(name)) for name in "xy"]
            rig.executor.hold()
            for session in busy:
                nursery.start_soon(session.prefill, [1])
            await settled()
            nursery.start_soon(outcome_of, old.start_session(key("a")), outcomes)
        else:
            older = await old.start_session(key("a"))
            await older.prefill([1, 2])
            rig.executor.hold()
            if state != "idle":
                nursery.start_soon(outcome_of, older.decode(3), outcomes)
            await settled()
            if state == "queued":
                nursery.start_soon(outcome_of, older.decode(4), outcomes)
        await settled()
        opened: list[Any] = []
        nursery.start_soon(outcome_of, new.start_session(key("a", 1)), opened)
        await settled()
        rig.executor.resume()
        await settled()
        if state == "idle":
            await outcome_of(older.decode(3), outcomes)
        assert outcomes
        for outcome in outcomes:
            assert isinstance(outcome, StaleEpoch)
            assert (outcome.key, outcome.current) == (key("a"), 1)
        for call in (old.get(key("a")), old.start_session(key("a")), old.release(key("a"))):
            with pytest.raises(StaleEpoch):
                await call
        await until(lambda: opened)
        (session,) = opened
        assert rig.is_solo((await session.prefill([7])).output, [7])


@pytest.mark.parametrize("token", [None, "", "wrong", ALICE[:-1], ALICE + "x", ALICE.upper()])
async def test_a_wrong_token_is_refused_and_nothing_else_is_said(token: str | None) -> None:
    async with open_rig(tokens=[ALICE, BOB]) as rig:
        with pytest.raises(Unauthorised) as refused:
            async with rig.connect(token=token):
                pytest.fail("welcome")
        assert "alice" not in str(refused.value)
        async with rig.connect(token=BOB) as client:
            await client.ping()


def test_the_token_check_compares_digests_of_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("hotkv_trio.serve._principals.hmac.compare_digest", compare)
    principals = Principals([ALICE, BOB])
    assert principals.authenticate(ALICE) == principals.authenticate(ALICE) != principals.authenticate(BOB)
    assert (
        principals.authenticate("x") is principals.authenticate("x" * 100_000) is principals.authenticate(None) is None
    )
    assert compared == [(32, 32)] * 12


def test_no_two_principals_share_a_name() -> None:
    principals = Principals([ALICE])
    names = {
        principals.inner_key(principal, key(name)).route_session_id
        for principal in ("", "a", "ab", "a\0", "1")
        for name in ("a", "ab", "b", "1a", "字" * 128)
    }
    assert len(names) == 25
    assert principals.inner_key("a", key("b", 3)) == principals.inner_key("a", key("b", 3))
    assert principals.inner_key("a", key("b")) != Principals([ALICE]).inner_key("a", key("b"))


def test_tokens_come_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# people\n{ALICE}\n\n  {BOB} \n", encoding="utf-8")
    assert read_tokens(path) == [ALICE, BOB]
    monkeypatch.delenv("HOTKV_TOKEN", raising=False)
    assert read_tokens() == []
    monkeypatch.setenv("HOTKV_TOKEN", ALICE)
    assert read_tokens() == [ALICE]
    monkeypatch.setenv("HOTKV_TOKEN", "short")
    with pytest.raises(InvalidInput, match=r"line 1 of HOTKV_TOKEN: .* at least 16"):
        read_tokens()
    path.write_text(f"# people\n{ALICE}\n\nmellon\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"line 4 of .*tokens: .* at least 16") as refused:
        read_tokens(path)
    assert "mellon" not in str(refused.value)
    path.write_text("# nobody yet\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match="holds no tokens"):
        read_tokens(path)


async def test_a_principal_given_by_the_embedding_server_needs_no_token() -> None:
    async with (
        open_rig(tokens=[ALICE]) as rig,
        open_shard_client(rig.stream("carol")) as carol,
        open_shard_client(rig.stream("dave")) as dave,
        carol.open_session(key("a")),
    ):
        assert (await dave.statistics()).sessions == ()
        await carol.get(key("a"))


async def test_a_reader_that_stops_stalls_itself_only(autojump_clock: trio.testing.MockClock) -> None:
    limits = Limits(write_timeout=30.0)
    async with open_rig(FakeEngine(n_slots=2), limits=limits) as rig, rig.connect() as client:
        stalled, theirs = trio.testing.lockstep_stream_pair()
        rig.nursery.start_soon(rig.server.serve_stream, theirs)
        end = await greet(stalled)
        await stalled.send_all(end.send(m.Open(id=1, session="s", epoch=0)))
        await receive(stalled, end)
        for request in range(2, 12):
            tokens, raw = Tensor("int32", (1,)), struct.pack("<i", request)
            await stalled.send_all(end.send(m.Decode(id=request, session="s", epoch=0, tensor=tokens), raw))
        await settled()
        # It stopped reading; one reply is being written, one waits, and the session rests meanwhile.
        appended = sum(len(group) for group in rig.engine.calls)
        assert appended == 2
        began = trio.current_time()
        async with client.open_session(key("a")) as first, client.open_session(key("b")) as second:
            # The stalled peer's session is idle, not busy: its slot can be had.
            assert rig.is_solo((await first.prefill([1, 2])).output, [1, 2])
            assert rig.is_solo((await second.prefill([3])).output, [3])
            assert trio.current_time() == began
        await trio.sleep(40)
        assert rig.server.statistics().connections == 1
        assert rig.server.statistics().dropped == 1
        assert rig.lent == 0


async def test_a_silent_peer_is_disconnected(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(limits=Limits(hello_timeout=10.0)) as rig:
        silent = rig.stream()
        dripping = rig.stream()
        await dripping.send_all(b"\0\0")
        await trio.sleep(9)
        assert rig.server.statistics().connections == 2
        await trio.sleep(2)
        assert rig.server.statistics().connections == 0
        assert await silent.receive_some() == b""


async def test_a_peer_that_leaves_before_its_hello_has_done_no_wrong(caplog: pytest.LogCaptureFixture) -> None:
    async with open_rig() as rig:
        stream = rig.stream()
        await stream.send_eof()
        assert await stream.receive_some() == b""
        await settled()
        assert (rig.server.statistics().connections, rig.server.statistics().dropped) == (0, 0)
    assert caplog.records == []


async def test_hostile_peers_cost_their_own_connection_only() -> None:
    rng = random.Random(7)
    async with open_rig() as rig, rig.connect() as client, client.open_session(key("n")) as neighbour:
        history: list[int] = []

        async def attack(payload: bytes, *, after_hello: bool) -> None:
            stream = rig.stream()
            if after_hello:
                await greet(stream)
            await stream.send_all(payload)
            await stream.send_eof()
            with trio.fail_after(5):
                while await stream.receive_some():
                    pass

        good = encode_frame(m.Open(id=1, session="x", epoch=0)) + encode_frame(m.Stats(id=2))
        for number in range(150):
            kind = number % 5
            payload = rng.randbytes(rng.randrange(1, 300))
            if kind == 1:
                payload = struct.pack(">II", len(payload), 0) + payload
            elif kind == 2:
                damaged = bytearray(good)
                damaged[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
                payload = bytes(damaged)
            elif kind == 3:
                header = msgspec.msgpack.encode({"t": "open", "id": 1, "session": "\n" * number, "epoch": -number})
                payload = struct.pack(">II", len(header), 0) + header
            elif kind == 4:
                payload = good[: rng.randrange(len(good))]
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(attack, payload, after_hello=number % 2 == 1))
                history.append(number % 16)
                result = await neighbour.decode(history[-1])
            assert rig.is_solo(result.output, history)
            if len(history) == 60:
                await neighbour.truncate(0)
                history.clear()
        await settled()
        assert rig.server.statistics().connections == 1
        assert rig.lent == 1


@pytest.mark.parametrize(
    "payload,code",
    [
        (struct.pack(">II", 70_000, 0), "protocol_error"),
        (encode_frame(m.Ping(id=1)) + encode_frame(m.Ping(id=1)), "protocol_error"),
        (b"GET / HTTP/1.1\r\n\r\n", "protocol_error"),
    ],
)
async def test_who_breaks_the_protocol_is_told_why(payload: bytes, code: str) -> None:
    async with open_rig() as rig:
        stream = rig.stream()
        end = await greet(stream)
        await stream.send_all(payload)
        while (reply := (await receive(stream, end)).message).id:
            pass
        assert msgspec.to_builtins(reply)["t"] == code
        await stream.send_eof()
        assert await stream.receive_some() == b""


async def test_another_version_is_refused_in_this_ones_words() -> None:
    async with open_rig() as rig:
        stream = rig.stream()
        await stream.send_all(encode_frame(m.Hello(version=2, max_frame=1000)))
        end = ClientEnd(max_frame=1000)
        assert "speaks version 1" in (await receive(stream, end)).message.what


async def test_limits_of_a_connection() -> None:
    limits = Limits(max_requests=3, max_sessions=2, max_connections=2, max_frame=2000, max_queued_bytes=2000)
    async with open_rig(FakeEngine(n_ctx_seq=1000), limits=limits) as rig, rig.connect() as client:
        stream = rig.stream()
        end = await greet(stream)
        for request in range(1, 5):
            await stream.send_all(end.send(m.Open(id=request, session=f"s{request}", epoch=0)))
        replies = [(await receive(stream, end)).message for _ in range(4)]
        opened = [f"s{reply.id}" for reply in replies if isinstance(reply, m.Opened)]
        refused = [(reply.what, reply.limit) for reply in replies if isinstance(reply, m.LimitExceededReply)]
        assert (len(opened), refused) == (2, [("sessions of one connection", 2)] * 2)
        rig.executor.hold()
        raw = bytes(4 * 350)
        for request, session in ((5, opened[0]), (6, opened[1])):
            tensor = Tensor("int32", (350,))
            await stream.send_all(end.send(m.Prefill(id=request, session=session, epoch=0, tensor=tensor), raw))
        with trio.fail_after(5):
            reply = (await receive(stream, end)).message
        assert (reply.id, reply.limit) == (6, 2000)
        assert "bytes of requests" in reply.what
        with pytest.raises(ConnectionLost):
            async with rig.connect():
                pytest.fail("a third connection")
        rig.executor.resume()
        assert (await receive(stream, end)).message.length == 350
        await client.ping()


async def test_too_many_requests_are_refused_not_gathered() -> None:
    async with open_rig(limits=Limits(max_requests=3)) as rig:
        stream = rig.stream()
        end = await greet(stream)
        await stream.send_all(end.send(m.Open(id=1, session="a", epoch=0)))
        await receive(stream, end)
        rig.executor.hold()
        for request in range(2, 7):
            message = m.Decode(id=request, session="a", epoch=0, tensor=Tensor("int32", (1,)))
            await stream.send_all(end.send(message, b"\1\0\0\0"))
        for request in (5, 6):
            reply = (await receive(stream, end)).message
            assert (reply.id, reply.limit) == (request, 3)
        rig.executor.resume()
        replies = [(await receive(stream, end)).message for _ in range(3)]
        assert [(reply.id, reply.position) for reply in replies] == [(2, 0), (3, 1), (4, 2)]


@pytest.mark.parametrize("n_tokens", [0, 2])
async def test_a_decode_of_other_than_one_token_is_refused_here_too(n_tokens: int) -> None:
    async with open_rig() as rig:
        stream = rig.stream()
        end = await greet(stream)
        await stream.send_all(end.send(m.Open(id=1, session="a", epoch=0)))
        await receive(stream, end)
        decode = m.Decode(id=2, session="a", epoch=0, tensor=Tensor("int32", (n_tokens,)))
        await stream.send_all(end.send(decode, bytes(4 * n_tokens)))
        reply = (await receive(stream, end)).message
        assert isinstance(reply, m.InvalidInputReply)
        assert f"one token, not {n_tokens}" in reply.what
        assert rig.engine.calls == []


async def test_rows_too_large_for_the_client_are_refused_before_anything_is_appended() -> None:
    async with open_rig() as rig, rig.connect(max_frame=3000) as client, client.open_session(key("a")) as session:
        with pytest.raises(LimitExceeded, match="rows"):
            await session.prefill([1] * 40, output="all")
        assert rig.engine.calls == []
        await session.prefill([1] * 20, output="all")


async def test_requests_of_one_session_keep_their_order_and_sessions_run_side_by_side() -> None:
    async with open_rig() as rig, rig.connect() as client:
        a, b = [await client.start_session(key(name)) for name in "ab"]
        done: list[tuple[str, int]] = []

        async def decode(name: str, session: Any, token: int) -> None:
            done.append((name, (await session.decode(token)).position))

        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            for token in range(8):
                nursery.start_soon(decode, "a", a, token)
                nursery.start_soon(decode, "b", b, token)
            await settled()
            rig.executor.resume()
        assert [position for name, position in done if name == "a"] == list(range(8))
        assert [position for name, position in done if name == "b"] == list(range(8))
        # Both decoded in the same native calls.
        assert max(len(group) for group in rig.engine.calls) == 2


async def test_two_hundred_clients_at_once_half_of_them_killed() -> None:
    rng = random.Random(3)
    async with open_rig(FakeEngine(n_slots=200), limits=Limits(max_connections=300)) as rig:
        finished = 0

        async def work(number: int) -> None:
            nonlocal finished
            history = [number % 16, number % 7]
            async with rig.connect() as client, client.open_session(key(f"s{number}")) as session:
                assert rig.is_solo((await session.prefill(history)).output, history)
                for token in range(6):
                    history.append((number + token) % 16)
                    assert rig.is_solo((await session.decode(history[-1])).output, history)
            finished += 1

        async def killed(number: int, steps: int) -> None:
            stream = rig.stream()
            end = await greet(stream)
            await stream.send_all(end.send(m.Open(id=1, session=f"k{number}", epoch=0)))
            for request in range(2, 8):
                message = m.Decode(id=request, session=f"k{number}", epoch=0, tensor=Tensor("int32", (1,)))
                await stream.send_all(end.send(message, b"\1\0\0\0"))
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            await trio.aclose_forcefully(stream)

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(100):
                    nursery.start_soon(work, number)
                    nursery.start_soon(killed, number, rng.randrange(40))
        await settled()
        assert finished == 100
        assert rig.server.statistics().connections == 0
        assert rig.lent == 0


async def test_drain_lets_running_requests_finish_and_begins_nothing_new() -> None:
    async with open_rig() as rig, trio.open_nursery() as nursery:
        (where,) = await nursery.start(rig.server.serve, "127.0.0.1:0")
        async with open_shard_client(where) as client, open_shard_client(where) as idle:
            session = await client.start_session(key("a"))
            await idle.start_session(key("b"))
            rig.executor.hold()
            results: list[Any] = []
            nursery.start_soon(outcome_of, session.prefill([1, 2]), results)
            await until(lambda: rig.executor.jobs)
            drained = trio.Event()

            async def drain() -> None:
                await rig.server.drain(30)
                drained.set()

            nursery.start_soon(drain)
            await idle.wait_lost()
            with pytest.raises(ShardDraining):
                await client.ping()
            with pytest.raises(ConnectionLost):
                async with open_shard_client(where):
                    pytest.fail("welcome")
            assert not results
            rig.executor.resume()
            await client.wait_lost()
            assert rig.is_solo(results[0].output, [1, 2])
            with pytest.raises(ConnectionLost, match="draining"):
                await client.ping()
        await drained.wait()
        assert "draining" in repr(rig.server)


async def test_who_drains_does_not_begin_to_listen() -> None:
    async with open_rig() as rig:
        await rig.server.drain()
        with trio.fail_after(5):
            await rig.server.serve("127.0.0.1:0")
        assert not rig.server.ready


async def test_drain_ends_what_does_not_end_in_time(autojump_clock: trio.testing.MockClock) -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.connect() as client, trio.open_nursery() as nursery:
        results: list[Any] = []
        await client.start_session(key("a"))
        rig.executor.hold()
        nursery.start_soon(outcome_of, (await client.get(key("a"))).decode(1), results)
        nursery.start_soon(outcome_of, client.start_session(key("b")), results)
        await settled()
        began = trio.current_time()
        nursery.start_soon(rig.server.drain, 5)
        await trio.sleep(6)
        rig.executor.resume()
        await client.wait_lost()
        await settled()
        assert trio.current_time() - began < 7
        assert [type(result) for result in results] == [ConnectionLost] * 2


async def test_a_runtime_that_ends_is_said_so() -> None:
    async with open_rig(FakeEngine()) as rig, rig.connect() as client, client.open_session(key("a")) as session:
        await session.prefill([1])
        rig.runtime._end_all(RuntimeClosed("gone"))
        with pytest.raises(RuntimeClosed, match="gone"):
            await session.decode(2)
        with pytest.raises(RuntimeClosed, match="gone"):
            await client.start_session(key("b"))


async def test_a_defect_of_the_server_is_told_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Session, length: int) -> None:  # noqa: RUF029
        raise ZeroDivisionError

    monkeypatch.setattr(Session, "truncate", broken)
    async with open_rig() as rig, rig.connect() as client, client.open_session(key("a")) as session:
        await session.prefill([1])
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            await session.truncate(0)
        await session.decode(2)


async def test_sessions_of_one_connection_end_with_it_in_the_middle_of_anything() -> None:
    async with open_rig(FakeEngine(n_slots=3)) as rig:
        stream = rig.stream()
        end = await greet(stream)
        for request in range(1, 6):
            await stream.send_all(end.send(m.Open(id=request, session=f"s{request}", epoch=0)))
        for _ in range(3):
            await receive(stream, end)
        await settled()
        assert rig.lent == 3
        await trio.aclose_forcefully(stream)
        await settled()
        assert rig.lent == 0
        assert rig.runtime.statistics().waiting == 0


async def test_session_exists_on_any_connection_of_the_principal() -> None:
    async with open_rig() as rig, rig.connect() as one, rig.connect() as two, one.open_session(key("a")) as session:
        with pytest.raises(SessionExists):
            await two.start_session(key("a"))
        await session.prefill([1])
        assert (await two.get(key("a"))).length == 1


async def test_unknown_dtypes_are_refused_and_others_agreed() -> None:
    async with open_rig(FakeEngine(n_vocab=0, n_embd=4), dtypes=["float16"]) as rig:
        async with rig.connect(dtype="bfloat16") as client:
            assert client.dtype == "float32"
        async with rig.connect(dtype="float16") as client:
            assert client.dtype == "float16"
        with pytest.raises(InvalidInput, match="dtypes"):
            ShardServer(rig.runtime, dtypes=["int8"])  # type: ignore[list-item]
