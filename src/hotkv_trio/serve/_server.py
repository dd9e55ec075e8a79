"""ShardServer: one runtime's sessions, for whoever may connect."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import TYPE_CHECKING, final
from weakref import WeakKeyDictionary

import attrs
import trio

from hotkv_trio._errors import InvalidInput
from hotkv_trio.serve._addresses import name_of, open_listeners, parse_address, tune
from hotkv_trio.serve._connection import Connection, Owned
from hotkv_trio.serve._limits import Limits
from hotkv_trio.serve._principals import Principals
from hotkv_trio.serve._tensors import HIDDEN_DTYPES, HiddenDtype

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Sequence

    from hotkv_trio._runtime import Runtime
    from hotkv_trio._session import Session

logger = logging.getLogger("hotkv_trio")


@attrs.frozen(kw_only=True)
class ServerStatistics:
    """A moment's view of a server.  The counters count from its start."""

    connections: int
    requests: int
    refusals: int
    """Requests answered by a refusal."""
    dropped: int
    """Connections ended because of what the peer did or did not do."""


@final
class ShardServer:
    """Serves a runtime's sessions to other processes.

    ``await nursery.start(server.serve, "127.0.0.1:0")`` returns where it listens, once it does.  It also serves what
    the caller's own server has accepted: `serve_stream`.

    A session belongs to the principal that opened it: to who holds the same token, or, without tokens, to anybody who
    can reach a loopback listener.  One that was not opened as *kept* ends with its connection.  What a peer does or
    does not do ends its own connection at most.

    Args:
        runtime: open for as long as the server serves.
        tokens: what clients must show one of; none: loopback only.
        limits: what one connection may ask for.
        dtypes: what hidden states may travel as, at a client's wish.

    Raises:
        InvalidInput: a token is too short, or a dtype is not one of the wire's.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        tokens: Iterable[str] = (),
        limits: Limits | None = None,
        dtypes: Sequence[HiddenDtype] = HIDDEN_DTYPES,
    ) -> None:
        if unknown := set(dtypes) - set(HIDDEN_DTYPES):
            raise InvalidInput(f"dtypes must be among {', '.join(HIDDEN_DTYPES)}, not {sorted(unknown)}")
        self.runtime = runtime
        self.limits: Limits = limits or Limits()
        self.principals: Principals = Principals(tokens)
        self.dtypes: frozenset[HiddenDtype] = frozenset(dtypes) | {"float32"}
        self.owners: WeakKeyDictionary[Session, Owned] = WeakKeyDictionary()
        self.requests: int = 0
        self.refusals: int = 0
        self.dropped: int = 0
        self._numbers = 0
        self._connections: dict[Connection, trio.CancelScope] = {}
        self._accepting: set[trio.CancelScope] = set()
        self._listening: set[trio.CancelScope] = set()
        self._draining = trio.Event()
        self._quiet = trio.Event()
        self._quiet.set()

    def __repr__(self) -> str:
        state = "draining" if self._draining.is_set() else "serving" if self._accepting else "idle"
        return f"<hotkv_trio.serve.ShardServer at {id(self):#x}, {state}, {len(self._connections)} connections>"

    @property
    def ready(self) -> bool:
        """Whether it takes new clients: once it listens, and until it drains or its runtime ends."""
        return bool(self._listening) and not self._draining.is_set() and self.runtime._closed is None

    @property
    def draining(self) -> trio.Event:
        """Set once the server begins nothing new."""
        return self._draining

    def statistics(self) -> ServerStatistics:
        """Return a moment's view."""
        return ServerStatistics(
            connections=len(self._connections),
            requests=self.requests,
            refusals=self.refusals,
            dropped=self.dropped,
        )

    async def serve(  # noqa: ASYNC128 - serve_listeners calls it
        self,
        *where: str | trio.abc.Listener[trio.abc.Stream],
        ssl_context: ssl.SSLContext | None = None,
        insecure: bool = False,
        task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen and serve until cancelled or drained; ``started`` carries the addresses, once connections are taken.

        After `trio.Cancelled` every connection is closed, and the sessions that ended with them are released.  The file
        of a Unix socket is gone when this ends, unless another's has come in its place.

        Args:
            where: addresses ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``; or listeners of the caller's own, who
                answers for who can reach them.
            ssl_context: for TLS on the addresses; with ``verify_mode`` set, clients need certificates.
            insecure: allow plain TCP beyond loopback.
            task_status: for ``nursery.start``.

        Raises:
            InvalidInput: an address is none, or must not be listened on; says why.
            OSError: an address cannot be had.
        """
        listeners: list[trio.abc.Listener[trio.abc.Stream]] = []
        try:
            for place in where:
                if isinstance(place, str):
                    listeners += await open_listeners(
                        parse_address(place),
                        has_token=self.principals.has_token,
                        ssl_context=ssl_context,
                        insecure=insecure,
                    )
                else:
                    listeners.append(place)
            if not listeners:
                raise InvalidInput("serve needs an address or a listener")
        except BaseException:
            for listener in listeners:
                await trio.aclose_forcefully(listener)
            raise
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as accepting:
                self._accepting.add(accepting)
                try:
                    if self._draining.is_set():
                        accepting.cancel(reason="the server is draining")
                    await trio.serve_listeners(
                        self.serve_stream,
                        listeners,
                        handler_nursery=nursery,
                        task_status=_Started(
                            task_status, list(map(name_of, listeners)), partial(self._listening.add, accepting)
                        ),
                    )
                finally:
                    self._accepting.discard(accepting)
                    self._listening.discard(accepting)

    async def serve_stream(self, stream: trio.abc.Stream, *, principal: str | None = None) -> None:
        """Serve one connection until it ends, and close it.

        Its end is no error, whatever the peer did.  After `trio.Cancelled` it is closed, and the sessions that ended
        with it are released.

        Args:
            stream: any transport of bytes, in order.
            principal: whose it is, where the caller has found that out already; no token is asked for then.
        """
        if self._draining.is_set() or len(self._connections) >= self.limits.max_connections:
            self.dropped += 1
            logger.warning("a connection was not taken", extra={"connections": len(self._connections)})
            await trio.aclose_forcefully(stream)
            return
        self._numbers += 1
        connection = Connection(self, stream, principal, self._numbers)
        tune(stream)
        with trio.CancelScope() as scope:
            self._connections[connection] = scope
            self._quiet = trio.Event() if self._quiet.is_set() else self._quiet
            try:
                await connection.run()
            finally:
                del self._connections[connection]
                if not self._connections:
                    self._quiet.set()
                await trio.aclose_forcefully(stream)  # noqa: ASYNC102 - it does not block

    async def drain(self, patience: float = math.inf) -> None:
        """Begin nothing new, let what has begun end, and close every connection; `serve` returns then.

        Requests that were received are answered, later ones are refused with `ShardDraining`.  What has not ended
        after ``patience`` seconds is cancelled.  After `trio.Cancelled` the server still drains, without end.
        """
        if not self._draining.is_set():
            logger.info("the server drains", extra={"connections": len(self._connections)})
        self._draining.set()
        for accepting in self._accepting:
            accepting.cancel(reason="the server is draining")
        with trio.move_on_after(patience):
            await self._quiet.wait()
        for scope in self._connections.values():
            scope.cancel(reason="the server has drained for long enough")
        await self._quiet.wait()


@final
class _Started(trio.TaskStatus[list[trio.abc.Listener[trio.abc.Stream]]]):
    """Says the listeners' names where trio says the listeners, and notes that they are served."""

    def __init__(self, status: trio.TaskStatus[list[str]], names: list[str], note: Callable[[], None]) -> None:
        self._status = status
        self._names = names
        self._note = note

    def started(self, value: object = None) -> None:  # noqa: ARG002 - trio says it
        self._note()
        self._status.started(self._names)
