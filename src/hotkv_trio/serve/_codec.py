"""The protocol's two ends, without I/O: bytes in, events out; messages in, bytes out.  Every state is in this file.

A frame is ``header bytes (uint32) | tensor bytes (uint32) | header | tensor``, big-endian lengths.  Each end is used
like h11's: feed what was received to ``receive_data``, ask ``next_event`` until it says `NEED_DATA`, and send what
``send`` returns.  Once a `ProtocolError` was raised, the connection is over: every later call raises it again.

    server: HELLO -hello-> GREETED -welcome-> OPEN    client: HELLO -hello-> GREETED -welcome-> OPEN

Request ids grow from frame to frame, so that a frame that comes twice, or out of order, is no valid frame.
"""

from __future__ import annotations

import enum
import re
import struct
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

import attrs
import msgspec

from hotkv_trio._errors import HotKVError
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._errors import ProtocolError
from hotkv_trio.serve._limits import MAX_HELLO, MAX_REQUEST_HEADER
from hotkv_trio.serve._tensors import Array, Tensor, from_wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._recipe import CacheRecipe
    from hotkv_trio.serve._tensors import HiddenDtype

PREFIX = struct.Struct(">II")
"""Bytes of the header, bytes of the tensor."""
MAX_FRAME = 2**32 - 1
_TOGETHER = 65_536
"""Bytes up to which a copy costs less than another call of the system."""

_FOREIGN: Final = {
    "HTTP": re.compile(rb"HTTP/|(GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|PRI) "),
    "TLS": re.compile(rb"[\x15\x16]\x03"),
}
"""How what is often spoken by mistake begins: read as lengths, more than anybody sends."""


@final
class NeedData(enum.Enum):
    """The type of `NEED_DATA`."""

    NEED_DATA = enum.auto()


NEED_DATA: Final = NeedData.NEED_DATA
"""No whole frame is there yet."""


@final
class Closed(enum.Enum):
    """The type of `CLOSED`."""

    CLOSED = enum.auto()


CLOSED: Final = Closed.CLOSED
"""The peer sends no more, and ended between two frames."""


class State(enum.Enum):
    """How far a connection is."""

    HELLO = enum.auto()
    GREETED = enum.auto()
    OPEN = enum.auto()
    ERROR = enum.auto()


MessageT = TypeVar("MessageT", bound=m.Message)


@attrs.frozen(eq=False)
class Frame(Generic[MessageT]):
    """One frame received."""

    message: MessageT
    data: Array | None
    """The tensor after the header: int32 (n,) or float32 (n, width) or (width,)."""
    nbytes: int
    """Bytes on the wire."""


_ENCODER = msgspec.msgpack.Encoder()


def encode_frame(message: m.Message, tensor: bytes = b"") -> bytes:
    """Return the bytes of one frame; ``message.tensor`` describes ``tensor`` if there is one."""
    header = _ENCODER.encode(message)
    return b"".join((PREFIX.pack(len(header), len(tensor)), header, tensor))


def joined(frames: Sequence[bytes]) -> Sequence[bytes]:
    """Return what to send for frames that go out together: small ones as one, so that they arrive together."""
    return [b"".join(frames)] if len(frames) > 1 and sum(map(len, frames)) <= _TOGETHER else frames


class _End(Generic[MessageT]):
    """What both ends have in common: a buffer, and whole frames out of it."""

    _is: str
    """What the peer of this end is."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[MessageT], *, max_frame: int, max_header: int) -> None:
        self._decoder = decoder
        self._max_frame = max_frame
        self._max_header = max_header
        self._buffer = bytearray()
        self._ended = False
        self._error: ProtocolError | None = None
        self._state = State.HELLO

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.state.name}, {len(self._buffer)} bytes buffered>"

    @property
    def state(self) -> State:
        """How far the connection is."""
        return State.ERROR if self._error else self._state

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        """Take what was received; empty: the peer sends no more."""
        self._require_sound()
        if self._ended and data:
            raise self._fail("data after the end")
        self._ended = self._ended or not data
        self._buffer += data

    def next_event(self) -> Frame[MessageT] | NeedData | Closed:
        """Return the next frame, `NEED_DATA`, or `CLOSED`.

        Raises:
            ProtocolError: what was received is not what the protocol allows here.
        """
        self._require_sound()
        frame = self._next_frame()
        if isinstance(frame, Frame):
            try:
                self._accept(frame)
            except ProtocolError as exc:
                self._error = exc
                raise
        return frame

    def _accept(self, frame: Frame[MessageT]) -> None:
        """Take a frame into the state, or raise ProtocolError."""
        raise NotImplementedError

    def _next_frame(self) -> Frame[MessageT] | NeedData | Closed:
        if len(self._buffer) < PREFIX.size:
            return self._starve()
        n_header, n_tensor = PREFIX.unpack_from(self._buffer)
        total = PREFIX.size + n_header + n_tensor
        # Judged by its first eight bytes: what is too large is never gathered.
        if not n_header:
            raise self._fail("a frame without a header")
        if total > self._max_frame or n_header > self._max_header:
            raise self._fail(
                self._foreign()
                or f"a frame of {n_header} + {n_tensor} bytes; at most {self._max_header} of header,"
                f" {self._max_frame} in all"
            )
        if len(self._buffer) < total:
            return self._starve()
        with memoryview(self._buffer) as view:
            header = bytes(view[PREFIX.size : PREFIX.size + n_header])
            tensor = bytes(view[PREFIX.size + n_header : total])
        del self._buffer[:total]
        try:
            message = self._decoder.decode(header)
        except (ValueError, RecursionError, OverflowError, HotKVError) as exc:
            raise self._fail(f"a header that is no message: {str(exc)[:200]}") from None
        described: Tensor | None = getattr(message, "tensor", None)
        if described is None:
            if tensor:
                raise self._fail(f"{n_tensor} bytes after a {tag_of(message)}, which has no tensor")
            return Frame(message, None, total)
        try:
            return Frame(message, from_wire(described, tensor), total)
        except ProtocolError as exc:
            self._error = exc
            raise

    def _starve(self) -> NeedData | Closed:
        if not self._ended:
            return NEED_DATA
        if self._buffer:
            raise self._fail(self._foreign() or "the connection ended within a frame")
        return CLOSED

    def _foreign(self) -> str | None:
        """Return which other protocol is spoken, as far as can be told; None: it may be this one."""
        spoken = next((name for name, begin in _FOREIGN.items() if begin.match(self._buffer)), None)
        if spoken is None or self._state is State.OPEN:
            return None
        return f"the peer is no {self._is}, it speaks {spoken}"

    def _require_sound(self) -> None:
        if self._error is not None:
            raise attrs.evolve(self._error)

    def _fail(self, what: str) -> ProtocolError:
        self._error = ProtocolError(what)
        return self._error


@final
class ServerEnd(_End[m.ClientMessage]):
    """The server's end of a connection.

    Args:
        max_frame: bytes of a frame that is taken once the client is welcome.
    """

    _is = "client of shards"

    def __init__(self, *, max_frame: int) -> None:
        super().__init__(_CLIENT_MESSAGES, max_frame=MAX_HELLO, max_header=MAX_HELLO)
        self._open_max_frame = min(max_frame, MAX_FRAME)
        self._last_id = 0
        self._unanswered: set[int] = set()
        self.peer_max_frame: int = MAX_HELLO
        """Bytes of a frame that the client takes."""

    @property
    def unanswered(self) -> int:
        """Requests received and not answered."""
        return len(self._unanswered)

    def send(self, message: m.ServerMessage, tensor: bytes = b"") -> bytes:
        """Return the bytes of a message to the client."""
        if isinstance(message, m.Welcome):
            if self._state is not State.GREETED:
                raise RuntimeError(f"a welcome in state {self._state.name}")
            self._state = State.OPEN
            self._max_frame, self._max_header = self._open_max_frame, MAX_REQUEST_HEADER
        elif isinstance(message, m.Reply) and message.id:
            self._unanswered.remove(message.id)
        return encode_frame(message, tensor)

    def _accept(self, frame: Frame[m.ClientMessage]) -> None:
        message = frame.message
        if isinstance(message, m.Hello):
            if self._state is not State.HELLO:
                raise ProtocolError("a second hello")
            self._state = State.GREETED
            self.peer_max_frame = min(message.max_frame, MAX_FRAME)
        elif self._state is not State.OPEN:
            raise ProtocolError(f"a {tag_of(message)} before the welcome; the first frame is a hello, and waits for it")
        elif isinstance(message, m.Cancel):
            if message.id > self._last_id:
                raise ProtocolError(f"cancel of request {message.id}, which was not sent")
        else:
            if message.id <= self._last_id:
                raise ProtocolError(f"request {message.id} after request {self._last_id}: ids only grow")
            self._last_id = message.id
            self._unanswered.add(message.id)


@final
class ClientEnd(_End[m.ServerMessage]):
    """The client's end of a connection.

    Args:
        max_frame: bytes of a frame that is taken.
    """

    _is = "shard server"

    def __init__(self, *, max_frame: int) -> None:
        max_frame = min(max_frame, MAX_FRAME)
        super().__init__(_SERVER_MESSAGES, max_frame=max_frame, max_header=max_frame)
        self._last_id = 0
        self._unanswered: dict[int, type[m.Reply]] = {}
        self._cancelled: set[int] = set()
        self.peer_max_frame: int = MAX_HELLO
        """Bytes of a frame that the server takes."""

    @property
    def next_id(self) -> int:
        """The id for the next request."""
        return self._last_id + 1

    @property
    def max_frame(self) -> int:
        """Bytes of a frame that is taken."""
        return self._max_frame

    def hello(self, *, token: str | None, recipe: CacheRecipe | None, dtype: HiddenDtype) -> bytes:
        """Return the bytes of the first frame."""
        self._state = State.GREETED
        return encode_frame(
            m.Hello(
                version=m.PROTOCOL_VERSION,
                token=token,
                recipe=recipe,
                recipe_digest=None if recipe is None else recipe.digest(),
                dtype=dtype,
                max_frame=self._max_frame,
            )
        )

    def send(self, message: m.Request | m.Cancel, tensor: bytes = b"") -> bytes:
        """Return the bytes of a message to the server; a request's id is `next_id`."""
        if self._state is not State.OPEN:
            raise RuntimeError(f"a {tag_of(message)} in state {self._state.name}")
        if isinstance(message, m.Request):
            if message.id != self.next_id:
                raise RuntimeError(f"request {message.id} after request {self._last_id}")
            self._last_id = message.id
            self._unanswered[message.id] = m.ANSWERS[type(message)]
        elif message.id in self._unanswered:
            self._cancelled.add(message.id)
        return encode_frame(message, tensor)

    def _accept(self, frame: Frame[m.ServerMessage]) -> None:
        message = frame.message
        if isinstance(message, m.Goodbye):
            return
        if isinstance(message, m.Welcome):
            if self._state is not State.GREETED:
                raise ProtocolError(f"a welcome in state {self._state.name}")
            self._state = State.OPEN
            self.peer_max_frame = min(message.max_frame, MAX_FRAME)
            return
        if not message.id:
            if type(message) in {*m.ANSWERS.values(), m.CancelledReply, m.WouldBlockReply}:
                raise ProtocolError(f"a {tag_of(message)} that answers no request")
            return
        answer = self._unanswered.pop(message.id, None)
        if answer is None:
            raise ProtocolError(f"a {tag_of(message)} for request {message.id}, which does not wait for one")
        if isinstance(message, m.CancelledReply) and message.id not in self._cancelled:
            raise ProtocolError(f"request {message.id} is said to be cancelled, and was not")
        self._cancelled.discard(message.id)
        if type(message) in m.ANSWERS.values() and type(message) is not answer:
            raise ProtocolError(f"a {tag_of(message)} where request {message.id} waits for another reply")


def tag_of(message: m.Message) -> str:
    """Return what a message is called on the wire."""
    return str(message.__struct_config__.tag)


_CLIENT_MESSAGES: msgspec.msgpack.Decoder[m.ClientMessage] = msgspec.msgpack.Decoder(m.ClientMessage)
_SERVER_MESSAGES: msgspec.msgpack.Decoder[m.ServerMessage] = msgspec.msgpack.Decoder(m.ServerMessage)
