"""One connection of a `ShardServer`: what comes in is carried out, session by session, and answered.

- The *reader* hands each request to the *lane* of its session: one task that carries out one after another.  Lanes run
  side by side.  It answers itself what needs no session, and what it refuses.
- The *writer* takes one reply at a time.  A peer that does not read stops its writer, then its lanes at their next
  reply, then its reader at its next refusal; no step is held by that, since each has ended before its reply waits.
- A request counts against the limits until the writer has its reply: a peer that has read one may ask again.
- When the connection ends, its nursery is cancelled: requests under way and sessions that are not kept end with it.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, final

import attrs
import numpy as np
import trio

from hotkv_trio._errors import EngineFailed, HotKVError, InvalidInput, RecipeMismatch
from hotkv_trio._keys import SessionKey
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._channels import waiting
from hotkv_trio.serve._codec import CLOSED, NEED_DATA, Frame, ServerEnd, joined
from hotkv_trio.serve._errors import LimitExceeded, ProtocolError, ShardDraining, Unauthorised
from hotkv_trio.serve._logs import Log
from hotkv_trio.serve._refusals import refusal_of
from hotkv_trio.serve._tensors import Array, HiddenDtype, to_wire

if TYPE_CHECKING:
    from hotkv_trio._engine import EngineInfo, Output
    from hotkv_trio._session import Session, StepResult
    from hotkv_trio.serve._server import ShardServer

logger = logging.getLogger("hotkv_trio")

_RECEIVE = 65_536
"""Bytes asked for at a time."""
_PIECE = 262_144
"""Bytes sent between two looks at the clock."""
_LINGER = 1.0
"""Seconds that a refused peer gets to read why."""
_SHOWN = 8
"""Characters of a principal in the log: enough to tell one from another."""


@attrs.frozen(eq=False)
class Owned:
    """Whose a session is, and what they call it."""

    principal: str
    key: SessionKey
    since: float
    kept: bool


@attrs.define(eq=False)
class Job:
    """A request under way."""

    frame: Frame[Any]
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)

    @property
    def request(self) -> Any:
        """The message."""
        return self.frame.message


@attrs.frozen(eq=False)
class Answer:
    """A reply on its way to the writer."""

    message: m.ServerMessage
    tensor: bytes = b""
    job: Job | None = None


@final
class Connection:
    """Serves one stream; made by `ShardServer.serve_stream`."""

    def __init__(self, server: ShardServer, stream: trio.abc.Stream, principal: str | None, number: int) -> None:
        self._log = Log(logger, {"connection": number})
        self._server = server
        self._runtime = server.runtime
        self._limits = server.limits
        self._stream = stream
        self._given = principal
        self._principal = ""
        self._end = ServerEnd(max_frame=server.limits.max_frame)
        self._dtype: HiddenDtype = "float32"
        # Only what leaves this shard for another one is hidden states; logits stay as they are.
        self._output_is_hidden = server.runtime.info.layers[1] < server.runtime.info.layer_count
        self._lanes: dict[SessionKey, deque[Job]] = {}
        self._jobs: dict[int, Job] = {}
        self._queued_bytes = 0
        self._owned = 0
        self._idle = trio.Event()
        self._within_frame = False
        self._said_goodbye = False
        self._answers: trio.MemorySendChannel[Answer]
        self._nursery: trio.Nursery

    async def run(self) -> None:  # noqa: ASYNC910
        """Serve until the connection ends; whatever the peer does, it is no error of the server's."""
        try:
            await self._serve()
        except* (trio.BrokenResourceError, trio.ClosedResourceError) as group:
            self._server.dropped += 1
            error = _first(group)
            self._log.info("a connection broke", extra={"reason": str(error.__cause__ or error) or "reset by the peer"})
        except* ProtocolError as group:
            self._server.dropped += 1
            error = _first(group)
            if isinstance(error, ProtocolError):
                # Behind a colon may stand what the peer sent, which is not for the log.
                self._log.warning("a peer was disconnected", extra={"reason": error.what.partition(":")[0]})
                await self._refuse(error)
        except* Exception:  # noqa: BLE001 - it is logged
            self._server.dropped += 1
            self._log.exception("a connection failed; the server goes on")

    async def _serve(self) -> None:
        if not await self._greet():
            return
        begun = trio.current_time()
        self._log.info("a client connected", extra={"principal": self._principal[:_SHOWN], "dtype": self._dtype})
        try:
            await self._converse()
        finally:
            self._log.info("a connection ended", extra={"seconds": round(trio.current_time() - begun, 3)})

    async def _converse(self) -> None:
        self._answers, answers = trio.open_memory_channel[Answer](0)
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._write, answers)
            self._nursery.start_soon(self._drain)
            await self._read()
            self._nursery.cancel_scope.cancel(reason="the peer closed the connection")
        if self._said_goodbye:
            await self._linger()

    async def _greet(self) -> bool:
        """Exchange hello and welcome; return whether the client is welcome."""
        with trio.move_on_after(self._limits.hello_timeout):
            frame = await self._receive()
            if frame is None:
                return False
            try:
                welcome = self._judge(frame.message)
            except HotKVError as exc:
                self._server.refusals += 1
                self._server.dropped += 1
                self._log.warning("a client was refused", extra={"code": exc.code})
                await self._refuse(exc)
                return False
            await self._stream.send_all(self._end.send(welcome))
            return True
        self._server.dropped += 1
        self._log.warning("a peer said no hello in time", extra={"seconds": self._limits.hello_timeout})
        return False

    def _judge(self, hello: m.ClientMessage) -> m.Welcome:
        if not isinstance(hello, m.Hello):
            raise ProtocolError("the first frame is a hello")
        if hello.version != m.PROTOCOL_VERSION:
            raise ProtocolError(f"this server speaks version {m.PROTOCOL_VERSION}, not {hello.version}")
        principal = self._given if self._given is not None else self._server.principals.authenticate(hello.token)
        if principal is None:
            raise Unauthorised
        self._principal = principal
        ours = self._runtime.recipe
        if hello.recipe is not None:
            ours.require(hello.recipe)
        if hello.recipe_digest not in {None, ours.digest()}:
            raise RecipeMismatch({"digest": (ours.digest(), hello.recipe_digest)})
        if hello.dtype in self._server.dtypes:
            self._dtype = hello.dtype
        return m.Welcome(
            version=m.PROTOCOL_VERSION,
            recipe=ours,
            recipe_digest=ours.digest(),
            dtype=self._dtype,
            facts=_facts(self._runtime.info),
            max_frame=self._limits.max_frame,
            max_requests=self._limits.max_requests,
            max_queued_bytes=self._limits.max_queued_bytes,
            silence_timeout=self._limits.silence_timeout,
        )

    async def _receive(self) -> Frame[m.ClientMessage] | None:
        """Return the next frame; None: the peer sends no more."""
        while True:
            event = self._end.next_event()
            if event is CLOSED:
                await trio.lowlevel.checkpoint()
                return None
            if event is not NEED_DATA:
                await trio.lowlevel.checkpoint()
                return event
            with trio.move_on_after(self._limits.silence_timeout) as silence:
                self._end.receive_data(await self._stream.receive_some(_RECEIVE))
            if silence.cancelled_caught:
                raise trio.BrokenResourceError("nothing came from the peer for too long")

    async def _read(self) -> None:
        while (frame := await self._receive()) is not None:
            message = frame.message
            if isinstance(message, m.Cancel):
                if (job := self._jobs.get(message.id)) is not None:
                    job.scope.cancel(reason="the client cancelled the request")
                continue
            self._server.requests += 1
            job = Job(frame)
            try:
                self._admit(job)
            except HotKVError as exc:
                await self._refuse_request(job, exc)

    def _admit(self, job: Job) -> None:
        request = job.request
        if self._server.draining.is_set():
            raise ShardDraining
        if len(self._jobs) >= self._limits.max_requests:
            raise LimitExceeded("requests that wait for their reply", self._limits.max_requests)
        if self._queued_bytes + job.frame.nbytes > self._limits.max_queued_bytes:
            raise LimitExceeded("bytes of requests that wait for their reply", self._limits.max_queued_bytes)
        if isinstance(request, m.SessionRequest):
            key = SessionKey(request.session, request.epoch)
            self._take(job)
            if (lane := self._lanes.get(key)) is not None:
                lane.append(job)
            else:
                self._lanes[key] = deque([job])
                self._nursery.start_soon(self._run_lane, key)
        else:
            self._take(job)
            self._nursery.start_soon(self._answer_at_once, job)

    def _take(self, job: Job) -> None:
        self._jobs[job.request.id] = job
        self._queued_bytes += job.frame.nbytes

    async def _answer_at_once(self, job: Job) -> None:
        request = job.request
        reply = m.Pong(id=request.id) if isinstance(request, m.Ping) else self._statistics(request.id)
        await self._answers.send(Answer(reply, job=job))

    async def _run_lane(self, key: SessionKey) -> None:  # noqa: ASYNC910
        """Carry out a session's requests, one after another."""
        lane = self._lanes[key]
        while lane:
            await self._carry_out(key, lane.popleft())
        del self._lanes[key]

    async def _carry_out(self, key: SessionKey, job: Job) -> None:
        answer: Answer | None = None
        try:
            with job.scope:
                answer = await self._perform(key, job)
        except HotKVError as exc:
            await self._refuse_request(job, exc, key)
        except trio.WouldBlock:
            self._server.refusals += 1
            await self._answers.send(Answer(m.WouldBlockReply(id=job.request.id), job=job))
        except Exception as exc:  # noqa: BLE001 - it is logged
            # A defect of ours: the client is told, its other sessions go on.
            self._log.exception("a request failed")
            await self._refuse_request(job, EngineFailed(None, f"the server failed: {type(exc).__name__}"), key)
        else:
            await self._answers.send(answer or Answer(m.CancelledReply(id=job.request.id), job=job))

    async def _perform(self, key: SessionKey, job: Job) -> Answer:
        request = job.request
        inner = self._server.principals.inner_key(self._principal, key)
        reply: m.ServerMessage
        if isinstance(request, m.Open):
            session = await self._open(key, inner, request)
            return Answer(m.Opened(id=request.id, length=session.length), job=job)
        if isinstance(request, m.Release):
            existed = await self._runtime.release(inner)
            return Answer(m.Released(id=request.id, existed=existed), job=job)
        session = self._runtime.get(inner)
        if isinstance(request, m.Get):
            await trio.lowlevel.checkpoint()
            reply = m.Opened(id=request.id, length=session.length)
        elif isinstance(request, m.Truncate):
            await session.truncate(request.length)
            reply = m.Truncated(id=request.id)
        elif isinstance(request, m.Prefill):
            self._require_room(job.frame.data, request.output)
            return self._step(job, await session.prefill(job.frame.data, at=request.at, output=request.output))
        else:
            self._require_room(job.frame.data, "last")
            return self._step(job, await session.decode(_single(job.frame.data), at=request.at))
        return Answer(reply, job=job)

    async def _open(self, key: SessionKey, inner: SessionKey, request: m.Open) -> Session:
        if request.kept:
            session = await self._runtime.start_session(inner, recipe=request.recipe, wait=request.wait)
        else:
            if self._owned >= self._limits.max_sessions:
                raise LimitExceeded("sessions of one connection", self._limits.max_sessions)
            self._owned += 1
            session = await self._nursery.start(
                partial(self._own, inner, recipe=request.recipe, wait=request.wait), name=f"session {inner}"
            )
        self._server.owners[session] = Owned(self._principal, key, trio.current_time(), request.kept)
        return session

    async def _own(  # noqa: ASYNC114, ASYNC128
        self, inner: SessionKey, *, recipe: Any, wait: bool, task_status: trio.TaskStatus[Session]
    ) -> None:
        """Hold a session that ends with this connection."""
        try:
            await self._runtime.serve_session(inner, recipe=recipe, wait=wait, task_status=task_status)
        finally:
            self._owned -= 1

    def _require_room(self, data: Array | None, output: Output) -> None:
        """Refuse, before anything is appended, a step whose rows the client could not take."""
        n_rows = {"none": 0, "last": 1, "all": 0 if data is None else len(data)}[output]
        if (nbytes := n_rows * self._runtime.info.n_output * 4) + 1024 > self._end.peer_max_frame:
            raise LimitExceeded(f"{nbytes} bytes of rows in one frame", self._end.peer_max_frame)

    def _step(self, job: Job, result: StepResult) -> Answer:
        tensor, data = to_wire(result.output, self._dtype if self._output_is_hidden else "float32")
        reply = m.Step(id=job.request.id, position=result.position, length=result.length, tensor=tensor)
        return Answer(reply, data, job)

    def _statistics(self, request: int) -> m.Statistics:
        now = trio.current_time()
        mine = [
            (owned, session.statistics())
            for session, owned in list(self._server.owners.items())
            if owned.principal == self._principal and session._gone is None
        ]
        return m.Statistics(
            id=request,
            runtime=self._runtime.statistics(),
            sessions=tuple(
                m.SessionView(
                    session=owned.key.route_session_id,
                    epoch=owned.key.route_epoch,
                    state=session.state,
                    length=session.length,
                    hot=session.hot,
                    kept=owned.kept,
                    operations=session.operations,
                    tokens_appended=session.tokens_appended,
                    age=now - owned.since,
                    idle=None if session.idle_since is None else now - session.idle_since,
                )
                for owned, session in mine
            ),
            connections=self._server.statistics().connections,
            refusals=self._server.refusals,
        )

    async def _refuse_request(self, job: Job, error: HotKVError, key: SessionKey | None = None) -> None:
        self._server.refusals += 1
        self._log.debug("a request was refused", extra={"code": error.code})
        await self._answers.send(Answer(refusal_of(error, job.request.id, key), job=job))

    async def _write(self, answers: trio.MemoryReceiveChannel[Answer]) -> None:
        async for answer in answers:
            # Sessions of one native call are answered in one piece: the peer's next requests then come together too.
            batch = [answer, *waiting(answers)]
            for each in batch:
                self._discount(each.job)
            for data in joined([self._end.send(each.message, each.tensor) for each in batch]):
                await self._send(data)
            if any(isinstance(each.message, m.Goodbye) for each in batch):
                self._said_goodbye = True
                self._nursery.cancel_scope.cancel(reason="the server said goodbye")

    def _discount(self, job: Job | None) -> None:
        # One that was refused was never counted.
        if job is not None and self._jobs.pop(job.request.id, None) is job:
            self._queued_bytes -= job.frame.nbytes
            if not self._jobs:
                self._idle.set()

    async def _send(self, data: bytes) -> None:  # noqa: ASYNC910
        self._within_frame = True
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE):
            with trio.move_on_after(self._limits.write_timeout) as scope:
                await self._stream.send_all(view[begin : begin + _PIECE])
            if scope.cancelled_caught:
                raise trio.BrokenResourceError("the peer does not read")
        self._within_frame = False

    async def _drain(self) -> None:
        await self._server.draining.wait()
        while self._jobs:
            self._idle = trio.Event()
            await self._idle.wait()
        await self._answers.send(Answer(m.Goodbye(reason="the server is draining")))

    async def _refuse(self, error: HotKVError) -> None:  # noqa: ASYNC910
        """Tell the peer why its connection ends."""
        if not self._within_frame:
            await self._linger(self._end.send(refusal_of(error, 0)))

    async def _linger(  # noqa: ASYNC910
        self, last_words: bytes = b""
    ) -> None:
        """Give the peer a moment to read what it was sent last: TCP takes that back if bytes are unread at the end."""
        with trio.move_on_after(_LINGER):
            try:
                await self._stream.send_all(last_words)
                if isinstance(self._stream, trio.abc.HalfCloseableStream):
                    await self._stream.send_eof()
                    while await self._stream.receive_some(_RECEIVE):
                        pass
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                await trio.lowlevel.checkpoint()


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _single(data: Array | None) -> Any:
    """Return a decode's token as an integer, its hidden state as it is."""
    if data is None or data.dtype != np.int32:
        return data
    if data.size != 1:
        raise InvalidInput(f"decode appends one token, not {data.size}; prefill takes many")
    return data.item()


def _facts(info: EngineInfo) -> m.Facts:
    return m.Facts(**{name: getattr(info, name) for name in m.Facts.__struct_fields__})
