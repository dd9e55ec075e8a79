"""A shard's figures for Prometheus, and whether it is alive and ready, over HTTP.

Figures only: neither a session's name nor anything of what clients send is among them.  The HTTP is h11's and the text
is prometheus_client's; here is what they say.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, final

import h11
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from hotkv_trio.serve._addresses import name_of, open_listeners, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.core import Metric

    from hotkv_trio.serve._server import ShardServer

logger = logging.getLogger("hotkv_trio")

_MAX_HEAD = 8192
"""Bytes of a request before its body."""
_MAX_CONNECTIONS = 32
_PATIENCE = 5.0
"""Seconds for one request, from the accept to the last byte of the answer."""
_RECEIVE = 4096


@final
class ShardCollector(Collector):
    """A shard server's figures, for a `prometheus_client.CollectorRegistry` of the caller's own.

    Args:
        shard: None: not there yet, as while its model is loaded; ``hotkv_ready`` is 0 then, and all there is.
    """

    def __init__(self, shard: ShardServer | None = None) -> None:
        self.shard = shard

    def describe(self) -> Iterable[Metric]:
        """Return nothing: figures are named when they are collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of this moment."""
        shard = self.shard
        yield GaugeMetricFamily(
            "hotkv_ready", "1 while new clients are taken, else 0.", value=float(shard is not None and shard.ready)
        )
        if shard is None:
            return
        info = shard.runtime.info
        yield InfoMetricFamily(
            "hotkv_shard",
            "What is served.",
            value={
                "architecture": info.recipe.architecture,
                "layers": f"{info.layers[0]}:{info.layers[1]}",
                "layer_count": str(info.layer_count),
                "recipe_digest": info.recipe.digest(),
            },
        )
        runtime, server = shard.runtime.statistics(), shard.statistics()
        gauges = (
            ("sessions", "Sessions that are open, hot or cold.", runtime.sessions),
            ("sessions_hot", "Sessions that hold a slot.", runtime.hot),
            ("claims_waiting", "Claims that wait for a slot or bytes.", runtime.waiting),
            ("slots_clearing", "Of the slots lent, those being emptied.", runtime.clearing_slots),
            ("kv_budget_bytes", "The KV byte budget.", runtime.total_bytes),
            ("kv_borrowed_bytes", "KV bytes that are lent.", runtime.borrowed_bytes),
            ("tombstones", "Route session ids remembered without a live session.", runtime.tombstones),
            ("connections", "Connections of clients.", server.connections),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"hotkv_{name}", text, value=value)
        slots = GaugeMetricFamily("hotkv_slots", "Slots, each in one state.", labels=["state"])
        for state in ("free", "lent", "quarantined"):
            slots.add_metric([state], getattr(runtime, f"{state}_slots"))
        yield slots
        tokens = CounterMetricFamily("hotkv_tokens", "Tokens appended.", labels=["kind"])
        tokens.add_metric(["prefill"], runtime.tokens_prefilled)
        tokens.add_metric(["decode"], runtime.tokens_decoded)
        yield tokens
        counters = (
            ("engine_calls", "Native calls that appended tokens.", runtime.native_calls),
            ("moves", "Times that a session was moved next to others that work.", runtime.moves),
            ("sessions_opened", "Sessions admitted.", runtime.opened),
            ("sessions_released", "Sessions that ended or were released.", runtime.released),
            ("evictions", "Times that a session lost its slot because room was needed.", runtime.evicted),
            ("expirations", "Times that a session lost its slot because it was idle.", runtime.expired),
            ("supersessions", "Sessions that a newer epoch replaced.", runtime.superseded),
            ("session_failures", "Times that a session lost its slot because the engine failed.", runtime.failed),
            ("requests", "Requests received.", server.requests),
            ("refusals", "Requests answered by a refusal.", server.refusals),
            ("connections_dropped", "Connections ended because of what the peer did.", server.dropped),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(f"hotkv_{name}", text, value=value)


@final
class MetricsServer:
    """Answers ``GET`` and ``HEAD`` of ``/metrics``, ``/healthz`` and ``/readyz`` over plain HTTP.

    ``/healthz`` is 200 unless the shard's runtime has ended; ``/readyz`` is 200 while the shard takes new clients: not
    before it listens, and not while it drains.  It may be started before there is a shard, and told of it later by
    ``collector.shard``.  Whoever reaches the address may read: choose it accordingly.

    One request a connection, in few seconds and few bytes: a client that is slow, or sends nonsense, costs its own
    connection only.

    Args:
        shard: what to tell of; None: not there yet.
    """

    def __init__(self, shard: ShardServer | None = None) -> None:
        self.collector: ShardCollector = ShardCollector(shard)
        self.registry: CollectorRegistry = CollectorRegistry()
        """What ``/metrics`` shows: the embedding program may register more."""
        self.registry.register(self.collector)
        self._connections = 0

    async def serve(  # noqa: ASYNC128 - serve_listeners calls it
        self, where: str, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen and answer until cancelled; ``started`` carries the address.

        Args:
            where: ``HOST:PORT``, ``[IPV6]:PORT`` or ``unix:PATH``.
            task_status: for ``nursery.start``.

        Raises:
            InvalidInput: it is no address.
            OSError: it cannot be had.
        """
        # Figures need no token and no TLS: the address is the operator's choice.
        listeners = await open_listeners(parse_address(where), has_token=True, ssl_context=None, insecure=True)
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._answer, list(listeners))
            task_status.started(name_of(listeners[0]))

    async def _answer(self, stream: trio.abc.Stream) -> None:  # noqa: ASYNC910 - serve_listeners closes the stream
        if self._connections >= _MAX_CONNECTIONS:
            await trio.lowlevel.checkpoint()
            return
        self._connections += 1
        try:
            with trio.move_on_after(_PATIENCE):
                await self._exchange(stream)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            logger.debug("an HTTP client went away")
        except Exception:
            # A registered collector of the embedding program's, say: the shard goes on.
            logger.exception("an HTTP request failed")
        finally:
            self._connections -= 1

    async def _exchange(self, stream: trio.abc.Stream) -> None:
        http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
        kind, event = "text/plain; charset=utf-8", None
        try:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(bytes(await stream.receive_some(_RECEIVE)))
            if not isinstance(event, h11.Request):
                await trio.lowlevel.checkpoint()
                return
            status, kind, text = self._look_up(event)
        except h11.RemoteProtocolError as exc:
            status, text = HTTPStatus(exc.error_status_hint), b"this is no HTTP request\n"
        headers = [("content-type", kind), ("content-length", str(len(text))), ("connection", "close")]
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            headers.append(("allow", "GET, HEAD"))
        answer = http.send(h11.Response(status_code=status, reason=status.phrase, headers=headers)) or b""
        if not (isinstance(event, h11.Request) and event.method == b"HEAD"):
            answer += http.send(h11.Data(data=text)) or b""
        answer += http.send(h11.EndOfMessage()) or b""
        await stream.send_all(answer)
        if isinstance(stream, trio.abc.HalfCloseableStream):
            # TCP takes an answer back whose request was not read to its end.
            await stream.send_eof()
            while await stream.receive_some(_RECEIVE):
                pass

    def _look_up(self, request: h11.Request) -> tuple[HTTPStatus, str, bytes]:
        kind, shard = "text/plain; charset=utf-8", self.collector.shard
        if request.method not in {b"GET", b"HEAD"}:
            return HTTPStatus.METHOD_NOT_ALLOWED, kind, b"GET or HEAD\n"
        match request.target.partition(b"?")[0]:
            case b"/metrics":
                return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self.registry)
            case b"/healthz" if shard is not None and shard.runtime._closed is not None:
                return HTTPStatus.SERVICE_UNAVAILABLE, kind, b"the runtime has ended\n"
            case b"/healthz":
                return HTTPStatus.OK, kind, b"alive\n"
            case b"/readyz" if shard is not None and shard.ready:
                return HTTPStatus.OK, kind, b"ready\n"
            case b"/readyz":
                draining = shard is not None and shard.draining.is_set()
                return HTTPStatus.SERVICE_UNAVAILABLE, kind, b"draining\n" if draining else b"not listening yet\n"
            case _:
                return HTTPStatus.NOT_FOUND, kind, b"/metrics, /healthz or /readyz\n"
