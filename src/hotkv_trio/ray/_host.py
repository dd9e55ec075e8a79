"""The actors: a shard server in a process of Ray's, and the keeper, which knows what was deployed.

An actor's methods are called in threads of Ray's; trio runs in one of its own.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, final

import attrs
import trio

from hotkv_trio._errors import InvalidInput
from hotkv_trio._runtime import open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.ray import _edge
from hotkv_trio.ray._excerpt import Outline, Piece, outline, provide_model, read_piece
from hotkv_trio.ray._names import keeper_name
from hotkv_trio.ray._spec import Failed, Figures, Place
from hotkv_trio.serve import ShardServer

if TYPE_CHECKING:
    from hotkv_trio._runtime import Runtime
    from hotkv_trio.ray._spec import Order, Spec

logger = logging.getLogger("hotkv_trio")

_KEEPER_PATIENCE = 120.0
"""Seconds that a keeper may take to come back, or to read a piece."""
_REST = 1.0
"""Seconds before a process that could not serve ends, and Ray starts the next."""


@attrs.frozen
class _Open:
    """What is there while a shard serves."""

    runtime: Runtime
    server: ShardServer
    trio_token: trio.lowlevel.TrioToken


@final
class ShardHost:
    """Serves one replica of a shard on its node's address, from when it is made.

    What goes wrong at first is said by `place`.  What goes wrong later ends the process, so that Ray starts another.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._restarted = _edge.was_restarted()
        self._place: Future[Place | Failed] = Future()
        self._open: _Open | None = None
        threading.Thread(target=self._run, name="hotkv-trio", daemon=True).start()

    def place(self) -> Place | Failed:
        """Return where it serves, once it does, or why it could not."""
        place = self._place.result()
        if isinstance(place, Failed):
            return place
        return attrs.evolve(place, draining=self._open is None or self._open.server.draining.is_set())

    def figures(self) -> Figures | Failed:
        """Return what it holds, once it serves, or why it does not."""
        place = self.place()
        if isinstance(place, Failed):
            return place
        if (ours := self._open) is None:
            return Failed("it has drained")
        try:
            runtime = trio.from_thread.run_sync(ours.runtime.statistics, trio_token=ours.trio_token)
        except trio.RunFinishedError:
            return Failed("it has ended")
        server = ours.server.statistics()
        return Figures(
            place=place,
            hot=runtime.hot,
            slots=runtime.slots,
            borrowed_bytes=runtime.borrowed_bytes,
            total_bytes=runtime.total_bytes,
            connections=server.connections,
            refusals=server.refusals,
            tokens=runtime.tokens_prefilled + runtime.tokens_decoded,
        )

    def drain(self, patience: float) -> None:
        """Begin nothing new; return when what had begun has ended, or was cancelled after ``patience`` seconds."""
        self.place()
        if (ours := self._open) is None:
            return
        with suppress(trio.RunFinishedError):
            trio.from_thread.run(ours.server.drain, patience, trio_token=ours.trio_token)

    def _run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as error:  # noqa: ASYNC103 - nobody is above: this is the thread's first function
            logger.exception("%s of deployment %s ended", self._order.id, self._order.spec.name)
            if self._place.done() or self._restarted:
                time.sleep(_REST)
                os._exit(1)
            # As text: not every error can travel, and a group says nothing.
            self._place.set_result(Failed(_said(error)))

    async def _serve(self) -> None:
        order, serving = self._order, self._order.spec.serving
        node = _edge.here()
        file = await trio.to_thread.run_sync(_model_file, order)
        engine = LlamaEngine(
            file,
            layers=None if order.layers == (0, order.spec.n_layer) else order.layers,
            n_slots=serving.sessions,
            n_ctx=serving.n_ctx,
            type_k=serving.type_k,
            type_v=serving.type_v,
            threads=serving.threads,
        )
        async with open_runtime(
            engine, exact=serving.exact, prefill_chunk=serving.prefill_chunk, idle_ttl=serving.idle_ttl
        ) as runtime:
            server = ShardServer(runtime, tokens=[order.spec.token])
            host = serving.host or node.address
            host = f"[{host}]" if ":" in host else host
            async with trio.open_nursery() as nursery:
                (where,) = await nursery.start(
                    partial(
                        server.serve,
                        f"{host}:0",
                        ssl_context=_tls(serving.certificate),
                        insecure=serving.insecure,
                    )
                )
                self._open = _Open(runtime, server, trio.lowlevel.current_trio_token())
                self._place.set_result(Place(where=where, node=node.id, pid=os.getpid(), draining=False))
        self._open = None


@final
class Keeper:
    """Knows what was deployed, and reads the model for nodes that do not have it."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def spec(self) -> Spec:
        """Return what was deployed."""
        return self._spec

    def node(self) -> str:
        """Return the node that it runs on."""
        return _edge.here().id

    def outline(self, layers: tuple[int, int]) -> Outline | Failed:
        """Return what an excerpt of the model is made of, or why it cannot be made."""
        try:
            return outline(self._spec.model, layers, self._spec.n_layer)
        except (InvalidInput, OSError) as error:
            return Failed(str(error))

    def piece(self, piece: Piece) -> bytes | Failed:
        """Return a piece of the model, or why it cannot be read."""
        try:
            return read_piece(self._spec.model, piece)
        except (InvalidInput, OSError) as error:
            return Failed(str(error))


def _model_file(order: Order) -> Path:
    """Return a file to open on this node; what is missing comes from the keeper, by Ray's object store."""

    def ask(method: str, argument: object) -> object:
        keeper = _edge.find_actor(keeper_name(order.spec.name))
        if keeper is None:
            raise InvalidInput(f"{order.spec.model_on_nodes} is not on this node, and the keeper is gone")
        said: object = _edge.call(keeper, method, argument, patience=_KEEPER_PATIENCE)
        if isinstance(said, Failed):
            raise InvalidInput(f"{order.spec.model_on_nodes} is not on this node, and the keeper: {said.what}")
        return said

    def get_outline() -> Outline:
        what = ask("outline", order.layers)
        assert isinstance(what, Outline)  # noqa: S101 - the keeper is of this version
        return what

    def get_piece(piece: Piece) -> bytes:
        data = ask("piece", piece)
        assert isinstance(data, bytes)  # noqa: S101
        return data

    return provide_model(
        Path(order.spec.model_on_nodes),
        order.spec.digest,
        order.layers,
        get_outline=get_outline,
        get_piece=get_piece,
    )


def _said(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or repr(error)


def _tls(certificate: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context
