"""ShardClient: the sessions of a shard in another process, with the calls and errors of a local one.

- The *writer* alone gives ids and writes, so a call that is cancelled never leaves half a frame behind.
- The *reader* alone reads, and hands each reply to the call that waits for it.
- A call waits while the server's limits are reached: more is not sent than the server takes.
- The *watch* pings, so that the server knows that this end is there, and gives the connection up when nothing comes
  back: a server that has vanished without a word is found out by that.
"""

from __future__ import annotations

import logging
import os
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import attrs
import trio

from hotkv_trio._engine import EngineInfo
from hotkv_trio._errors import CacheMiss, HotKVError, InvalidInput, RuntimeClosed, StaleEpoch
from hotkv_trio._inputs import check_append, check_at, check_length, check_output, check_single
from hotkv_trio._keys import SessionKey
from hotkv_trio._nursery import open_body_nursery
from hotkv_trio._recipe import CacheRecipe
from hotkv_trio._session import StepResult
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._addresses import connect, parse_address
from hotkv_trio.serve._channels import waiting
from hotkv_trio.serve._codec import CLOSED, NEED_DATA, ClientEnd, Frame, joined
from hotkv_trio.serve._errors import ConnectionLost, LimitExceeded, ProtocolError, ShardDraining
from hotkv_trio.serve._refusals import error_of
from hotkv_trio.serve._tensors import Array, HiddenDtype, to_wire

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from hotkv_trio._engine import Output, Rows

logger = logging.getLogger("hotkv_trio")

ReplyT = TypeVar("ReplyT", bound=m.Reply)

_RECEIVE = 262_144
_PIECE = 262_144
"""Bytes sent between two notes that the connection lives."""
_PINGS = 4
"""Pings in the time after which the server takes a silent client for gone."""
_FRAME_OVERHEAD = 1024
"""Bytes of a request's header, at most, for reckoning against the server's limits."""
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
"""What OpenSSL, of one version or another, calls an answer that is none of TLS."""


@attrs.define(eq=False)
class _Call:
    """A request from before it is sent until its reply has come."""

    make: Callable[[int], m.Request]
    tensor: bytes = b""
    settle: Callable[[m.Reply], None] | None = None
    """Called with the reply when it comes, also when nobody waits any more."""
    id: int | None = None
    abandoned: bool = False
    reply: Frame[Any] | None = None
    error: Exception | None = None
    done: trio.Event = attrs.field(factory=trio.Event)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, about."""
        return _FRAME_OVERHEAD + len(self.tensor)


@final
class ShardClient:
    """One connection to a shard server, shared by any number of sessions and tasks; made by `open_shard_client`."""

    def __init__(self, stream: trio.abc.Stream, welcome: m.Welcome, end: ClientEnd, *, cancel_patience: float) -> None:
        self._stream = stream
        self._end = end
        self._welcome = welcome
        self._cancel_patience = cancel_patience
        self._info = EngineInfo(
            recipe=welcome.recipe,
            **{name: getattr(welcome.facts, name) for name in welcome.facts.__struct_fields__},
        )
        self._outgoing, self._to_write = trio.open_memory_channel[_Call](0)
        self._calls: dict[int, _Call] = {}
        self._outstanding = 0
        self._outstanding_bytes = 0
        self._admission = trio.StrictFIFOLock()
        self._room = trio.lowlevel.ParkingLot()
        self._lost: ConnectionLost | None = None
        self._ended = trio.Event()
        self._last_words: str | None = None
        self._alive = True
        self._nursery: trio.Nursery

    def __repr__(self) -> str:
        state = "lost" if self._lost else "open"
        return f"<hotkv_trio.serve.ShardClient at {id(self):#x}, {state}, {len(self._calls)} requests under way>"

    @property
    def recipe(self) -> CacheRecipe:
        """What cached KV there depends on."""
        return self._info.recipe

    @property
    def info(self) -> EngineInfo:
        """The facts of the shard's engine."""
        return self._info

    @property
    def dtype(self) -> HiddenDtype:
        """What hidden states travel as."""
        return self._welcome.dtype

    @property
    def lost(self) -> bool:
        """Whether the connection is of no use any more."""
        return self._lost is not None

    @asynccontextmanager
    async def open_session(
        self, key: SessionKey, *, recipe: CacheRecipe | None = None, kept: bool = False, wait: bool = True
    ) -> AsyncGenerator[RemoteSession]:
        """Open a session for as long as the ``async with`` lasts, or, if ``kept``, for longer.

        When the body ends, a session that is not kept is released, and its bytes are back when the block is left,
        unless the connection was lost; the server sees to it then.  A kept one stays hot until it is released,
        evicted or expires, and is found again with `get`.

        Errors, and what is true after `trio.Cancelled`, are those of `hotkv_trio.Runtime.open_session`; moreover

        Raises:
            ConnectionLost: before or meanwhile.
            LimitExceeded: too many sessions on this connection.
            ShardDraining: the server begins nothing new.
        """
        session = await self.start_session(key, recipe=recipe, kept=kept, wait=wait)
        try:
            yield session
        finally:
            if not kept:
                await session.aclose()  # noqa: ASYNC102 - bounded

    async def start_session(
        self, key: SessionKey, *, recipe: CacheRecipe | None = None, kept: bool = False, wait: bool = True
    ) -> RemoteSession:
        """Open a session that lasts until `RemoteSession.aclose`, or, unless ``kept``, until the connection ends.

        For errors, and what is true after `trio.Cancelled`, see `open_session`.
        """
        if recipe is not None and not isinstance(recipe, CacheRecipe):
            raise InvalidInput(f"recipe must be a CacheRecipe or None, not {recipe!r:.200}")
        session = RemoteSession(self, _check_key(key))
        await session._open(recipe=recipe, kept=kept, wait=wait)
        return session

    async def get(self, key: SessionKey) -> RemoteSession:
        """Return the open session of exactly this key, also one that another connection of this principal opened.

        Raises:
            CacheMiss: there is none; ``reason`` says why.
            StaleEpoch: a newer epoch was seen.
            ConnectionLost: before or meanwhile.
        """
        session = RemoteSession(self, _check_key(key))
        await session._find()
        return session

    async def release(self, key: SessionKey) -> bool:
        """End the session of exactly this key; its bytes are back when this returns.

        Returns:
            Whether there was one.

        Raises:
            StaleEpoch: a newer epoch was seen; it is not touched.
            ConnectionLost: before or meanwhile.
        """
        _check_key(key)
        reply = await self._call(
            lambda request: m.Release(id=request, session=key.route_session_id, epoch=key.route_epoch), m.Released
        )
        return reply.existed

    async def statistics(self) -> m.Statistics:
        """Return the shard's totals, and this principal's sessions."""
        return await self._call(lambda request: m.Stats(id=request), m.Statistics)

    async def ping(self) -> None:
        """Return once the server has answered."""
        await self._call(lambda request: m.Ping(id=request), m.Pong)

    async def wait_lost(self) -> None:
        """Return once the connection is of no use any more."""
        await self._ended.wait()

    # From here on: for the modules of this package.

    async def _call(self, make: Callable[[int], m.Request], answer: type[ReplyT]) -> ReplyT:
        frame = await self._exchange(_Call(make))
        return _expect(frame, answer)

    async def _exchange(self, call: _Call) -> Frame[Any]:
        """Send a request and return its reply.

        Cancelled before it was sent, it never is.  Cancelled later, the server is told, and what it says is waited
        for: either the request was carried out after all and this returns, or it was not and `trio.Cancelled` is
        raised.  A server that says nothing for ``cancel_patience`` is left to answer later.
        """
        nbytes = call.nbytes
        if nbytes > self._end.peer_max_frame:
            raise LimitExceeded(f"{nbytes} bytes in one request", self._end.peer_max_frame)
        self._require_open()
        if self._admission.locked() or not self._has_room(nbytes):
            async with self._admission:
                while not self._has_room(nbytes):
                    await self._room.park()
                    self._require_open()
                self._reserve(nbytes)
        else:
            # No lock: calls of the same moment reach the writer together, which sends them together.
            self._reserve(nbytes)
        try:
            await self._outgoing.send(call)
        except trio.BrokenResourceError:
            self._left(call)
            self._require_open()
            raise
        except BaseException:
            self._left(call)
            raise
        try:
            await call.done.wait()
        except trio.Cancelled:  # noqa: ASYNC103 - what the server had done already is returned
            if call.id is None and not call.done.is_set():
                call.abandoned = True
                raise
            with trio.move_on_after(self._cancel_patience, shield=True):  # noqa: ASYNC912
                if not call.done.is_set():
                    with suppress(trio.BrokenResourceError):  # lost: then the call is done, with an error
                        await self._outgoing.send(call)
                    await call.done.wait()
            if call.reply is None or call.error is not None or isinstance(call.reply.message, m.CancelledReply):
                raise
        if call.error is not None:
            raise call.error
        if call.reply is None:
            raise RuntimeError("a call ended with neither reply nor error")
        return call.reply

    def _has_room(self, nbytes: int) -> bool:
        return self._outstanding < self._welcome.max_requests and (
            self._outstanding_bytes + nbytes <= self._welcome.max_queued_bytes or not self._outstanding
        )

    def _reserve(self, nbytes: int) -> None:
        self._outstanding += 1
        self._outstanding_bytes += nbytes

    def _left(self, call: _Call) -> None:
        """Count a call no longer."""
        self._outstanding -= 1
        self._outstanding_bytes -= call.nbytes
        self._room.unpark_all()

    def _require_open(self) -> None:
        if self._lost is not None:
            raise attrs.evolve(self._lost)

    async def _serve(self) -> None:  # noqa: ASYNC910
        """Read and write until the connection is lost; then every call is told."""
        what = "the client was closed"
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write)
                nursery.start_soon(self._watch)
                try:
                    what = await self._read()
                finally:
                    nursery.cancel_scope.cancel(reason="the connection was lost")
        except* (trio.BrokenResourceError, trio.ClosedResourceError) as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            what = f"the connection broke: {error.__cause__ or error}"
            logger.info("a connection to a shard broke", extra={"reason": what})
        except* ProtocolError as group:
            what = str(group.exceptions[0])
        finally:
            self._lose(what)

    def _lose(self, what: str) -> None:
        if self._lost is not None:
            return
        self._lost = ConnectionLost(what)
        self._to_write.close()
        for call in self._calls.values():
            self._fail(call, self._lost)
        self._calls.clear()
        self._room.unpark_all()
        self._ended.set()

    def _fail(self, call: _Call, lost: ConnectionLost) -> None:
        call.error = attrs.evolve(lost)
        call.done.set()
        self._left(call)

    async def _write(self) -> None:
        async for call in self._to_write:
            if self._lost is not None:
                # Handed over just before that, it was not among those that were told.
                if call.id is None:
                    self._fail(call, self._lost)
                return  # noqa: ASYNC910
            # What is asked for at the same time goes out in one piece, and so can become one native call.
            frames = [self._frame(each) for each in (call, *waiting(self._to_write))]
            for data in joined([frame for frame in frames if frame]):
                view = memoryview(data)
                for begin in range(0, len(view), _PIECE):
                    await self._stream.send_all(view[begin : begin + _PIECE])
                    # That a long request moves is a sign of life; a short one may lie in a buffer of the system's.
                    self._alive = self._alive or begin > 0

    def _frame(self, call: _Call) -> bytes:
        """Return what to send for a call; nothing if it needs nothing any more."""
        if call.id is not None:
            # It comes a second time: it was cancelled.
            return self._end.send(m.Cancel(id=call.id)) if call.id in self._calls else b""
        if call.abandoned:
            self._left(call)
            return b""
        call.id = self._end.next_id
        self._calls[call.id] = call
        return self._end.send(call.make(call.id), call.tensor)

    async def _watch(self) -> None:
        # It counts pings, not seconds: a process that was stopped for a while has not lost its peers by that.
        missed = 0
        while True:
            await trio.sleep(self._welcome.silence_timeout / _PINGS)
            missed = 0 if self._alive else missed + 1
            self._alive = False
            if missed >= _PINGS:
                raise trio.BrokenResourceError("nothing came from the server for too long")
            call = _Call(lambda request: m.Ping(id=request))
            # Not to wait for room, which may be long in coming; a writer that is busy shows life by itself.
            with suppress(trio.WouldBlock):
                self._outgoing.send_nowait(call)
                self._reserve(call.nbytes)

    async def _read(self) -> str:
        """Hand out replies; return why there will be no more."""
        while True:  # noqa: ASYNC913 - it reads whenever nothing is left to take
            event = self._end.next_event()
            if event is NEED_DATA:
                self._end.receive_data(await self._stream.receive_some(_RECEIVE))
                self._alive = True
            elif event is CLOSED:
                return self._last_words or "the server closed the connection"  # noqa: ASYNC910
            elif isinstance(event.message, m.Goodbye):
                # Nothing is asked that is not answered; and nothing more will be.
                return event.message.reason  # noqa: ASYNC910
            else:
                self._take(event)

    def _take(self, frame: Frame[Any]) -> None:
        message = frame.message
        is_refusal = not isinstance(message, m.CancelledReply) and type(message) not in m.ANSWERS.values()
        # First: it is no reply at all if it carries no error.
        error = error_of(message) if is_refusal else None
        if not message.id:
            self._last_words = f"the server refused the connection: {error}"
            return
        call = self._calls.pop(message.id, None)
        if call is None:
            return  # the client was closed meanwhile, and its calls told so
        self._left(call)
        call.reply, call.error = frame, error
        if call.settle is not None:
            call.settle(message)
        call.done.set()


@final
class RemoteSession:
    """A session of a shard in another process: calls, order and errors are those of `hotkv_trio.Session`.

    Every call may raise `ConnectionLost` as well.  Whether a call that was under way then took effect is not known,
    and does not matter: sessions that are not kept end with their connection.
    """

    def __init__(self, client: ShardClient, key: SessionKey) -> None:
        self._client = client
        self._key = key
        self._length = 0
        self._unanswered: set[int] = set()
        """Ids of cancelled calls that the server has not answered in time."""

    def __repr__(self) -> str:
        return f"<hotkv_trio.serve.RemoteSession {self._key}, length {self._length}>"

    @property
    def key(self) -> SessionKey:
        """The key."""
        return self._key

    @property
    def length(self) -> int:
        """Tokens in the session's KV, as the server said last."""
        return self._length

    async def prefill(self, data: Any, *, at: int | None = None, output: Output = "last") -> StepResult:
        """Append tokens or hidden states; see `hotkv_trio.Session.prefill`.

        After `trio.Cancelled` ``length`` is what it was.  Only if the server did not answer within the client's
        ``cancel_patience`` that is not known; until it answers, calls must say ``at``.

        Raises:
            ConnectionLost: before or meanwhile.
            LimitExceeded: the request, or the rows that would come back, are too large for one frame.
        """
        return await self._append(m.Prefill, check_append(self._client.info, data), at, output=check_output(output))

    async def decode(self, data: Any, *, at: int | None = None) -> StepResult:
        """Append one token or one hidden state, and return its row; see `prefill`."""
        return await self._append(m.Decode, check_single(self._client.info, data), at)

    async def truncate(self, length: int) -> None:
        """Cut the KV back to its first ``length`` tokens; see `hotkv_trio.Session.truncate`."""
        length = _bounded("length", check_length(length))

        def settle(reply: m.Reply) -> None:
            if isinstance(reply, m.Truncated):
                self._length = length

        await self._request(m.Truncate, m.Truncated, settle=settle, length=length)

    async def aclose(self) -> None:
        """End the session; its bytes are back when this returns.  Ending twice, or what is gone, does nothing.

        The server is told also after `trio.Cancelled`, and waited for no longer than ``cancel_patience``; what it
        could not end by then it ends as soon as it can.
        """
        if not self._client.lost:
            released = trio.Event()
            # A task of its own, since a request that is waited for no longer would be cancelled, which must not be.
            self._client._nursery.start_soon(self._release, released)
            with trio.move_on_after(self._client._cancel_patience, shield=True):  # noqa: ASYNC912
                await released.wait()
        self._length = 0
        await trio.lowlevel.checkpoint()

    # From here on: for the modules of this package.

    async def _open(self, *, recipe: CacheRecipe | None, kept: bool, wait: bool) -> None:
        given_up = False

        def settle(reply: m.Reply) -> None:
            if isinstance(reply, m.Opened) and given_up:
                # The caller's cancelled call took nothing, so this must not stay.
                self._client._nursery.start_soon(self.aclose)

        try:
            await self._request(m.Open, m.Opened, settle=settle, recipe=recipe, kept=kept, wait=wait)
        except trio.Cancelled:
            given_up = True
            raise

    async def _release(self, released: trio.Event) -> None:  # noqa: ASYNC910 - a request checkpoints
        try:
            await self._request(m.Release, m.Released)
        except (CacheMiss, StaleEpoch, RuntimeClosed, ConnectionLost, ShardDraining) as exc:
            logger.debug("nothing to release of %s: %s", self._key, exc.code)
        except HotKVError as exc:
            logger.warning("a session could not be released", extra={"code": exc.code})
        finally:
            released.set()

    async def _find(self) -> None:
        await self._request(m.Get, m.Opened)

    async def _append(self, kind: type[m.Prefill | m.Decode], data: Array, at: int | None, **fields: Any) -> StepResult:
        at = check_at(at)
        if at is None and self._unanswered:
            self._client._require_open()
            raise InvalidInput("at must be given: a cancelled call has not been answered yet, the length is not known")
        at = None if at is None else _bounded("at", at)
        tensor, raw = to_wire(data, self._client.dtype)
        frame = await self._request(kind, m.Step, raw, at=at, tensor=tensor, **fields)
        step = _expect(frame, m.Step)
        return StepResult(step.position, step.length, cast("Rows", frame.data))

    async def _request(
        self,
        kind: type[m.SessionRequest],
        answer: type[m.Reply],
        raw: bytes = b"",
        settle: Callable[[m.Reply], None] | None = None,
        **fields: Any,
    ) -> Frame[Any]:
        def note(reply: m.Reply) -> None:
            self._unanswered.discard(reply.id)
            self._length = _length_after(reply, self._length)
            if settle is not None:
                settle(reply)

        call = _Call(
            lambda request: kind(id=request, session=self._key.route_session_id, epoch=self._key.route_epoch, **fields),
            raw,
            note,
        )
        try:
            frame = await self._client._exchange(call)
        except trio.Cancelled:
            if call.id is not None and call.reply is None:
                self._unanswered.add(call.id)
            raise
        _expect(frame, answer)
        return frame


@asynccontextmanager
async def open_shard_client(
    where: str | trio.abc.Stream,
    *,
    token: str | None = None,
    recipe: CacheRecipe | None = None,
    dtype: HiddenDtype = "float32",
    ssl_context: ssl.SSLContext | None = None,
    insecure: bool = False,
    max_frame: int = 256 * 2**20,
    cancel_patience: float = 10.0,
) -> AsyncGenerator[ShardClient]:
    """Connect to a shard server for as long as the ``async with`` lasts.

    When the body ends the connection is closed, and with it, at the server, every session that is not kept.  That is
    also what is true after `trio.Cancelled`.  A connection that is lost meanwhile cancels nothing here: every call
    then raises `ConnectionLost`.

    Args:
        where: ``HOST:PORT``, ``[IPV6]:PORT``, ``unix:PATH``, or a stream of the caller's own.
        token: to show to the server.
        recipe: what cached KV counts on; the connection is refused if it is not the shard's.
        dtype: what hidden states shall travel as; see `ShardClient.dtype` for what was agreed.
        ssl_context: for TLS to an address.
        insecure: allow a token to travel in plain text beyond loopback.
        max_frame: bytes of a reply that is taken.
        cancel_patience: seconds that a cancelled call waits for the server to say what became of it.

    Raises:
        ConnectionLost: nobody answers, or not in this protocol.
        Unauthorised: the token is missing or wrong.
        RecipeMismatch: the recipes differ.
        ProtocolError: the server speaks another version, or nonsense.
        InvalidInput: the address is none, or the token would travel in plain text.
    """
    if isinstance(where, str):
        address = parse_address(where)
        try:
            stream = await connect(address, has_token=token is not None, ssl_context=ssl_context, insecure=insecure)
        except (OSError, trio.BrokenResourceError) as exc:
            raise ConnectionLost(f"cannot connect to {address}: {_why(exc)}") from exc
    else:
        stream = where
    try:
        end = ClientEnd(max_frame=max_frame)
        welcome = await _greet(stream, end, end.hello(token=token, recipe=recipe, dtype=dtype))
        if recipe is not None:
            welcome.recipe.require(recipe)
        client = ShardClient(stream, welcome, end, cancel_patience=cancel_patience)
        async with open_body_nursery(trio.CancelScope()) as nursery:
            client._nursery = nursery
            nursery.start_soon(client._serve)  # noqa: ASYNC113
            try:
                yield client
            finally:
                client._lose("the client was closed")
    finally:
        await trio.aclose_forcefully(stream)  # noqa: ASYNC102 - it does not block


async def _greet(stream: trio.abc.Stream, end: ClientEnd, hello: bytes) -> m.Welcome:
    try:
        await stream.send_all(hello)
        while (event := end.next_event()) is NEED_DATA:
            end.receive_data(await stream.receive_some(_RECEIVE))
    except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
        raise ConnectionLost(f"no welcome: {exc.__cause__ or exc}") from exc
    if event is CLOSED:
        # Of a handshake that fails at its end, an end may be all that is seen at this one.
        may_want = "a certificate of the client's" if isinstance(stream, trio.SSLStream) else "TLS"
        raise ConnectionLost(f"the server closed the connection without a welcome; it may want {may_want}")
    message = event.message
    if not isinstance(message, m.Welcome):
        if isinstance(message, m.Reply):
            raise error_of(message)
        raise ConnectionLost(message.reason)
    if message.recipe_digest != message.recipe.digest():
        raise ProtocolError("the server's digest is not that of its recipe")
    return message


def _why(error: BaseException) -> str:
    """Return why there is no connection, in a few words."""
    cause = error.__cause__ or error
    if isinstance(cause, BaseExceptionGroup):
        # One for each address that the name stands for.
        return ", ".join(dict.fromkeys(map(_why, cause.exceptions)))
    if isinstance(cause, ssl.SSLError):
        return f"it does not speak TLS: {cause}" if cause.reason in _NO_TLS else str(cause)
    # trio's text names the address once more; what is no number of the system's, as a resolver's, has a text alone.
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number) if number and number > 0 else str(cause)


def _length_after(reply: m.Reply, length: int) -> int:
    """Return a session's length after what the server said."""
    match reply:
        case m.Step() | m.Opened() | m.PositionMismatchReply() | m.ContextFullReply():
            return reply.length
        case m.CacheMissReply():
            return reply.resume_at
        case m.StaleEpochReply() | m.TruncateUnsupportedReply() | m.RuntimeClosedReply() | m.Released():
            return 0
        case _:
            return length


def _expect(frame: Frame[Any], answer: type[ReplyT]) -> ReplyT:
    if not isinstance(frame.message, answer):
        raise TypeError(f"{frame.message!r} where {answer.__name__} was due")
    return frame.message


def _bounded(name: str, value: int) -> int:
    if value > m.MAX_INT:
        raise InvalidInput(f"{name} must be at most {m.MAX_INT}, not {value}")
    return value


def _check_key(key: Any) -> SessionKey:
    if not isinstance(key, SessionKey):
        raise InvalidInput(f"key must be a SessionKey (route session id, route epoch), not {key!r:.200}")
    return key
