"""The protocol without I/O: what goes in comes out, and nothing that is not a message does any harm."""

from __future__ import annotations

import json
import re
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import attrs
import msgspec
import numpy as np
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

import hotkv_trio
from hotkv_trio import CacheMiss, HotKVError, MissReason, RecipeMismatch, SessionKey
from hotkv_trio.serve import ConnectionLost, LimitExceeded, ProtocolError, ShardDraining, Unauthorised
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._codec import CLOSED, NEED_DATA, PREFIX, ClientEnd, Frame, ServerEnd, State, encode_frame, tag_of
from hotkv_trio.serve._limits import MAX_HELLO
from hotkv_trio.serve._refusals import _REPLY_OF, error_of, refusal_of
from hotkv_trio.serve._tensors import HIDDEN_DTYPES, Tensor, from_wire, to_wire
from hotkv_trio.testing import FakeEngine

if TYPE_CHECKING:
    from hotkv_trio.serve._tensors import HiddenDtype

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
KEY = SessionKey("route-7f", 3)
MAX_FRAME = 100_000
RECIPE = FakeEngine()._info.recipe


def welcome(**changes: Any) -> m.Welcome:
    info = FakeEngine()._info
    return m.Welcome(
        version=1,
        recipe=RECIPE,
        recipe_digest=RECIPE.digest(),
        dtype="float32",
        facts=m.Facts(**{name: getattr(info, name) for name in m.Facts.__struct_fields__}),
        max_requests=8,
        max_queued_bytes=MAX_FRAME,
        silence_timeout=60.0,
        **{"max_frame": MAX_FRAME, **changes},
    )


def ends() -> tuple[ClientEnd, ServerEnd]:
    """Return two ends that have greeted each other."""
    client, server = ClientEnd(max_frame=MAX_FRAME), ServerEnd(max_frame=MAX_FRAME)
    server.receive_data(client.hello(token="t" * 20, recipe=RECIPE, dtype="float16"))
    hello = event(server)
    assert hello.message == m.Hello(
        version=1,
        token="t" * 20,
        recipe=RECIPE,
        recipe_digest=RECIPE.digest(),
        dtype="float16",
        max_frame=MAX_FRAME,
    )
    client.receive_data(server.send(welcome()))
    assert event(client).message == welcome()
    assert client.state is server.state is State.OPEN
    return client, server


def event(end: ClientEnd | ServerEnd) -> Frame[Any]:
    got = end.next_event()
    assert isinstance(got, Frame)
    return got


def events(end: ClientEnd | ServerEnd) -> list[Frame[Any]]:
    """Return every frame that is there."""
    got = []
    while isinstance(frame := end.next_event(), Frame):
        got.append(frame)
    return got


def refused(end: ClientEnd | ServerEnd, data: bytes, match: str) -> None:
    """Assert that the end refuses the bytes, says why, and takes nothing more."""
    end.receive_data(data)
    with pytest.raises(ProtocolError, match=match):
        end.next_event()
    assert end.state is State.ERROR
    with pytest.raises(ProtocolError, match=match):
        end.next_event()
    with pytest.raises(ProtocolError, match=match):
        end.receive_data(b"x")


@pytest.mark.parametrize(
    "begin,spoken",
    [
        (b"HTTP/1.1 400 Bad Request", "HTTP"),
        (b"GET / HTTP/1.1", "HTTP"),
        (b"PRI * HTTP/2.0", "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", "TLS"),
    ],
)
def test_other_protocols_are_told_apart(begin: bytes, spoken: str) -> None:
    client = ClientEnd(max_frame=MAX_FRAME)
    client.hello(token=None, recipe=None, dtype="float32")
    refused(client, begin, f"the peer is no shard server, it speaks {spoken}")
    refused(ServerEnd(max_frame=MAX_FRAME), begin, f"the peer is no client of shards, it speaks {spoken}")
    for end in ends():
        refused(end, begin, "a frame of")


def test_an_alert_of_tls_is_told_apart_though_it_is_shorter_than_a_prefix() -> None:
    client = ClientEnd(max_frame=MAX_FRAME)
    client.hello(token=None, recipe=None, dtype="float32")
    client.receive_data(b"\x15\x03\x03\x00\x02\x02\x46")
    assert client.next_event() is NEED_DATA
    refused(client, b"", "it speaks TLS")


names = st.text("ab-é字 ", min_size=1, max_size=128)
counts = st.integers(0, m.MAX_INT)
RAW = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32)
tensors = st.one_of(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(lambda tokens: np.array(tokens, dtype=np.int32)),
    st.tuples(st.integers(0, 5), st.integers(1, 5)).map(lambda shape: RAW[: shape[0], : shape[1]]),
)
REQUESTS: list[type[m.Request]] = list(m.ANSWERS)


@st.composite
def requests(draw: st.DrawFn, request_id: int) -> tuple[m.Request, bytes]:
    kind = draw(st.sampled_from(REQUESTS))
    fields: dict[str, Any] = {"id": request_id}
    raw = b""
    for name in kind.__struct_fields__[1:]:
        if name == "tensor":
            fields[name], raw = to_wire(draw(tensors))
        else:
            fields[name] = draw(
                {
                    "session": names,
                    "epoch": counts,
                    "at": st.none() | counts,
                    "length": counts,
                    "output": st.sampled_from(["last", "all", "none"]),
                    "recipe": st.sampled_from([None, RECIPE]),
                    "kept": st.booleans(),
                    "wait": st.booleans(),
                }[name]
            )
    return kind(**fields), raw


@settings(max_examples=60)
@given(data=st.data(), n=st.integers(1, 5))
def test_requests_come_out_as_they_went_in_however_they_are_cut(data: st.DataObject, n: int) -> None:
    client, server = ends()
    sent = [data.draw(requests(client.next_id + i)) for i in range(n)]
    stream = b"".join(starmap(client.send, sent))
    got: list[Frame[Any]] = []
    while stream:
        cut = data.draw(st.integers(1, 300))
        server.receive_data(stream[:cut])
        stream = stream[cut:]
        while isinstance(frame := server.next_event(), Frame):
            got.append(frame)
    assert [frame.message for frame in got] == [request for request, _ in sent]
    for frame, (request, raw) in zip(got, sent, strict=True):
        assert (b"" if frame.data is None else frame.data.tobytes()) == raw
        assert frame.nbytes == len(encode_frame(request, raw))
    assert server.unanswered == n
    server.receive_data(b"")
    assert server.next_event() is CLOSED


ERRORS: list[HotKVError] = [
    *(CacheMiss(KEY, reason, 7) for reason in MissReason),
    hotkv_trio.StaleEpoch(KEY, 9),
    RecipeMismatch({"layers": ((0, 2), (2, 4)), "rope_freq_base": (1.5, 2.5), "lora": ((), ("a",))}),
    hotkv_trio.PositionMismatch(3, 5),
    hotkv_trio.BudgetExceeded(10, 5),
    hotkv_trio.ContextFull(60, 64, 5),
    hotkv_trio.InvalidInput("nonsense"),
    hotkv_trio.TruncateUnsupported(KEY, 3, "recurrent"),
    hotkv_trio.SessionExists(KEY),
    hotkv_trio.EngineFailed(None, "an exception"),
    hotkv_trio.EngineFailed(-3, "a code"),
    hotkv_trio.RuntimeClosed("it ended"),
    ProtocolError("garbage"),
    Unauthorised(),
    LimitExceeded("sessions", 3),
    ShardDraining(),
]


@pytest.mark.parametrize("error", ERRORS, ids=str)
def test_every_error_travels_one_to_one(error: HotKVError) -> None:
    client, server = ends()
    server.receive_data(client.send(m.Ping(id=1)))
    event(server)
    client.receive_data(server.send(refusal_of(error, 1)))
    reply = event(client).message
    assert tag_of(reply) == error.code
    back = error_of(reply)
    assert type(back) is type(error)
    assert attrs.asdict(back) == attrs.asdict(error)
    assert str(back) == str(error)


def test_no_error_is_left_out() -> None:
    every = {value for value in vars(hotkv_trio).values() if isinstance(value, type) and issubclass(value, HotKVError)}
    assert every - {HotKVError} <= set(_REPLY_OF)
    assert {type(error) for error in ERRORS} == set(_REPLY_OF)
    # Said by the client to its caller, never by the server.
    assert ConnectionLost not in _REPLY_OF


def test_refusals_carry_the_clients_name_of_a_session_not_the_runtimes() -> None:
    reply = refusal_of(CacheMiss(SessionKey("hidden", 3), MissReason.EVICTED), 4, KEY)
    assert reply == m.CacheMissReply(id=4, session="route-7f", epoch=3, reason=MissReason.EVICTED, resume_at=0)
    assert isinstance(error_of(m.WouldBlockReply(id=1)), trio.WouldBlock)


@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
@given(values=st.lists(st.floats(-60_000, 60_000, width=32), min_size=1, max_size=20))
def test_hidden_states_are_rounded_to_nearest_even(dtype: HiddenDtype, values: list[float]) -> None:
    array = np.array([values], dtype=np.float32)
    tensor, raw = to_wire(array, dtype)
    back = from_wire(tensor, raw)
    assert back.dtype == np.float32
    assert tensor == Tensor(dtype, array.shape)
    assert len(raw) == array.size * (4 if dtype == "float32" else 2)
    eps = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
    half_of_smallest = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 2.0**-134}[dtype]
    wide, exact = back.astype(np.float64), array.astype(np.float64)
    assert (np.abs(wide - exact) <= np.abs(exact) * eps + half_of_smallest).all()
    assert to_wire(back, dtype)[1] == raw


@pytest.mark.parametrize("dtype", HIDDEN_DTYPES)
def test_what_does_not_fit_a_narrow_dtype_travels_wide(dtype: HiddenDtype) -> None:
    array = np.array([[1.0, np.finfo(np.float32).max]], dtype=np.float32)
    tensor, raw = to_wire(array, dtype)
    assert tensor.dtype == "float32"
    assert (from_wire(tensor, raw) == array).all()


def test_bfloat16_is_the_upper_half_of_float32() -> None:
    tensor, raw = to_wire(np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, -2.5], dtype=np.float32), "bfloat16")
    assert raw == bytes.fromhex("803f 803f 823f 20c0")
    assert tensor.shape == (4,)


def test_only_int32_and_float32_travel() -> None:
    with pytest.raises(TypeError, match="float64"):
        to_wire(np.zeros(3))  # type: ignore[arg-type]


def frame(header: Any, tensor: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return PREFIX.pack(len(raw), len(tensor)) + raw + tensor


PREFILL = {"t": "prefill", "id": 1, "session": "a", "epoch": 0, "tensor": ["int32", [2]]}


@pytest.mark.parametrize(
    "data,match",
    [
        pytest.param(PREFIX.pack(0, 5), "without a header", id="no header"),
        pytest.param(PREFIX.pack(100, MAX_FRAME), "at most 65536 of header, 100000 in all", id="too large"),
        pytest.param(PREFIX.pack(70_000, 0), "at most 65536 of header", id="header too large"),
        pytest.param(PREFIX.pack(2**32 - 1, 2**32 - 1), "at most", id="largest"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", "at most", id="http"),
        pytest.param(frame(b"\xc1"), "no message", id="no msgpack"),
        pytest.param(frame(b"\x91" * 60_000), "no message", id="deep"),
        pytest.param(frame(b"\xdd\xff\xff\xff\xff"), "no message", id="huge array"),
        pytest.param(frame([1, 2]), "no message", id="no map"),
        pytest.param(frame({}), "t", id="no tag"),
        pytest.param(frame({"t": "shout", "id": 1}), "shout", id="unknown message"),
        pytest.param(frame({"t": "ping"}), "id", id="field missing"),
        pytest.param(frame({"t": "ping", "id": 1, "x": 2}), "x", id="unknown field"),
        pytest.param(frame({"t": "ping", "id": "1"}), "int", id="wrong type"),
        pytest.param(frame({"t": "ping", "id": 0}), ">= 1", id="id 0"),
        pytest.param(frame({"t": "ping", "id": 2**63}), "no message", id="id too large"),
        pytest.param(frame({"t": "ping", "id": 1}) + frame({"t": "ping", "id": 1}), "ids only grow", id="replayed"),
        pytest.param(frame({"t": "ping", "id": 5}) + frame({"t": "ping", "id": 4}), "ids only grow", id="reordered"),
        pytest.param(frame({"t": "cancel", "id": 7}), "was not sent", id="cancel too early"),
        pytest.param(frame({"t": "hello", "version": 1, "max_frame": 1}), "second hello", id="second hello"),
        pytest.param(frame({"t": "pong", "id": 1}), "pong", id="reply from a client"),
        pytest.param(frame({"t": "ping", "id": 1}, b"xy"), "2 bytes after a ping", id="tensor where none is"),
        pytest.param(frame(PREFILL, b"1234567"), "has 8 bytes, not 7", id="tensor too short"),
        pytest.param(frame(PREFILL), "has 8 bytes, not 0", id="tensor missing"),
        pytest.param(frame({**PREFILL, "tensor": ["int64", [1]]}, b"12345678"), "int64", id="dtype"),
        pytest.param(frame({**PREFILL, "tensor": ["int32", []]}, b""), "no message", id="no extent"),
        pytest.param(frame({**PREFILL, "tensor": ["int32", [1, 1, 1]]}, b"1234"), "no message", id="three extents"),
        pytest.param(frame({**PREFILL, "tensor": ["int32", [-1]]}, b"1234"), "no message", id="negative extent"),
        pytest.param(frame({**PREFILL, "at": -1}, b"12345678"), "no message", id="negative position"),
        pytest.param(frame({**PREFILL, "output": "some"}, b"12345678"), "some", id="output"),
    ],
)
def test_server_refuses(data: bytes, match: str) -> None:
    _, server = ends()
    server.receive_data(data)
    with pytest.raises(ProtocolError, match=match):
        events(server)
    assert server.state is State.ERROR


def test_server_takes_a_hello_first_and_nothing_before_its_welcome() -> None:
    refused(ServerEnd(max_frame=MAX_FRAME), frame({"t": "ping", "id": 1}), "before the welcome")
    server = ServerEnd(max_frame=10 * MAX_HELLO)
    refused(server, PREFIX.pack(10, MAX_HELLO), "at most")
    server = ServerEnd(max_frame=MAX_FRAME)
    hello = frame({"t": "hello", "version": 1, "max_frame": 2**40})
    server.receive_data(hello)
    event(server)
    assert server.peer_max_frame == 2**32 - 1
    refused(server, frame({"t": "ping", "id": 1}), "before the welcome")


def test_an_end_within_a_frame_is_an_error_and_between_frames_is_none() -> None:
    client, server = ends()
    data = client.send(m.Ping(id=1))
    server.receive_data(data[:-1])
    assert server.next_event() is NEED_DATA
    server.receive_data(b"")
    with pytest.raises(ProtocolError, match="within a frame"):
        server.next_event()
    client, server = ends()
    server.receive_data(b"")
    assert server.next_event() is CLOSED
    with pytest.raises(ProtocolError, match="after the end"):
        server.receive_data(b"x")


@pytest.mark.parametrize(
    "data,match",
    [
        (encode_frame(m.Pong(id=5)), "does not wait"),
        (encode_frame(m.Opened(id=1, length=0)), "another reply"),
        (encode_frame(m.Pong(id=0)), "answers no request"),
        (encode_frame(welcome()), "welcome in state OPEN"),
        (encode_frame(m.Ping(id=1)), "ping"),
        (encode_frame(m.Pong(id=1)) * 2, "does not wait"),
    ],
)
def test_client_refuses(data: bytes, match: str) -> None:
    client, _ = ends()
    client.send(m.Ping(id=1))
    client.receive_data(data)
    with pytest.raises(ProtocolError, match=match):
        events(client)


def test_client_takes_refusals_of_the_connection_and_a_goodbye() -> None:
    client, _ = ends()
    client.receive_data(encode_frame(m.Goodbye(reason="drained")) + encode_frame(m.ProtocolErrorReply(id=0, what="x")))
    assert event(client).message == m.Goodbye(reason="drained")
    assert event(client).message == m.ProtocolErrorReply(id=0, what="x")


def test_own_mistakes_are_no_protocol_errors() -> None:
    client, server = ends()
    with pytest.raises(RuntimeError, match="request 5"):
        client.send(m.Ping(id=5))
    with pytest.raises(RuntimeError, match="welcome in state"):
        server.send(welcome())
    with pytest.raises(RuntimeError, match="in state HELLO"):
        ClientEnd(max_frame=MAX_FRAME).send(m.Ping(id=1))
    assert "OPEN" in repr(client)


def feed(end: ClientEnd | ServerEnd, data: bytes, size: int) -> None:
    """Feed bytes in pieces; whatever they are, the end answers with events or one ProtocolError."""
    try:
        for begin in range(0, len(data), size):
            end.receive_data(data[begin : begin + size])
            while isinstance(end.next_event(), Frame):
                pass
            assert len(end._buffer) <= end._max_frame + size
    except ProtocolError:
        assert end.state is State.ERROR


@given(data=st.binary(max_size=200), size=st.integers(1, 50))
def test_random_bytes_do_no_harm(data: bytes, size: int) -> None:
    for end in ends():
        feed(end, data, size)
    feed(ServerEnd(max_frame=MAX_FRAME), data, size)
    for end in ends():
        feed(end, frame(data or b"\x80"), size)


@given(data=st.data(), size=st.integers(1, 200))
def test_damaged_frames_do_no_harm(data: st.DataObject, size: int) -> None:
    client, server = ends()
    stream = bytearray()
    for _ in range(3):
        stream += client.send(*data.draw(requests(client.next_id)))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(stream) - 1))
        stream[position] = data.draw(st.integers(0, 255))
    feed(server, bytes(stream), size)


EXAMPLES = re.findall(r"(?ms)^```wire (client|server)\n(.*?)^```\n```json\n(.*?)^```", DOCUMENT)


@pytest.mark.parametrize("side,block,meaning", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_documents_examples_mean_what_they_say(side: str, block: str, meaning: str) -> None:
    raw = bytes.fromhex("".join(re.sub(r" {3,}\S.*$", "", line.strip()) for line in block.splitlines()))
    expected = json.loads(meaning)
    data = expected.pop("data", None)
    header_length, tensor_length = PREFIX.unpack_from(raw)
    assert PREFIX.size + header_length + tensor_length == len(raw)
    union: Any = m.ClientMessage if side == "client" else m.ServerMessage
    message = msgspec.msgpack.decode(raw[PREFIX.size : PREFIX.size + header_length], type=union)
    assert json.loads(msgspec.json.encode(message)) == expected
    tensor = raw[PREFIX.size + header_length :]
    assert encode_frame(message, tensor) == raw
    if data is not None:
        assert from_wire(message.tensor, tensor).tolist() == data


def test_the_document_names_every_message_and_field() -> None:
    assert len(EXAMPLES) >= 6
    for message in {*get_args(m.ClientMessage), *get_args(m.ServerMessage)}:
        missing = [n for n in (message.__struct_config__.tag, *message.__struct_fields__) if f"`{n}`" not in DOCUMENT]
        assert missing == []
