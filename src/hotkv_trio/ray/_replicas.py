"""One shard of a route that has several replicas, or moves: looked up anew whenever a session needs one.

A session goes where the most KV bytes are free, and stays there while that lives; then it is given another.  Nothing
here knows of Ray: whoever can say where a shard's replicas are may use it.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias, final

import attrs
import trio

from hotkv_trio._errors import HotKVError
from hotkv_trio.serve._client import ShardClient, open_shard_client
from hotkv_trio.serve._errors import ConnectionLost, ProtocolError, Unauthorised

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hotkv_trio._engine import EngineInfo, Output
    from hotkv_trio._keys import SessionKey
    from hotkv_trio._recipe import CacheRecipe
    from hotkv_trio._session import StepResult
    from hotkv_trio.route import HopSession, ShardAddress

logger = logging.getLogger("hotkv_trio")

Find: TypeAlias = "Callable[[], Awaitable[Sequence[ShardAddress]]]"
"""Says where the replicas are now; those that cannot take a session are left out."""

_FRESH = 1.0
"""Seconds for which what `Find` said holds, as long as there is anybody."""
_CONNECT_PATIENCE = 5.0
_PING_EVERY = 2.0
_PONG_PATIENCE = 5.0
"""Seconds.  A node that is gone without a word answers nothing, and TCP alone may wait for minutes."""


@final
class ReplicaHop:
    """A hop of a route; its connections live in the route's nursery."""

    def __init__(self, what: str, find: Find, nursery: trio.Nursery) -> None:
        self._what = what
        self._find = find
        self._nursery = nursery
        self._clients: dict[str, ShardClient] = {}
        """By address."""
        self._offered: list[str] = []
        """Addresses that new sessions may go to, as `Find` said last."""
        self._looked = float("-inf")
        self._homes: dict[str, ShardClient] = {}
        """Where each route session is."""
        self._recipe: CacheRecipe | None = None
        self._choosing = trio.Lock()

    async def info(self) -> EngineInfo:
        """Return the facts of the replicas' engines: alike, but all slots together."""
        async with self._choosing:
            clients = await self._present()
        return attrs.evolve(clients[0].info, n_slots=sum(client.info.n_slots for client in clients))

    async def open(self, key: SessionKey) -> HopSession:
        """Open a session where its last epoch was, or else where the most bytes are free."""
        name = key.route_session_id
        await trio.lowlevel.checkpoint_if_cancelled()
        home = self._homes.get(name)
        if home is None or home.lost:
            async with self._choosing:
                home = self._homes[name] = await self._roomiest(await self._present())
        try:
            session = await home.start_session(key)
        except BaseException:
            self._homes.pop(name, None)
            raise
        return _Homed(session, self, name)

    def leave(self, name: str) -> None:
        """Forget where a session was."""
        self._homes.pop(name, None)

    async def _roomiest(self, clients: Sequence[ShardClient]) -> ShardClient:
        """Return the client of the replica with the most free bytes."""
        best: tuple[tuple[int, int], ShardClient] | None = None
        for client in clients:
            try:
                said = (await client.statistics()).runtime
            except ConnectionLost:
                continue
            ours = sum(home is client for home in self._homes.values()) * client.info.slot_bytes
            # Sessions that were sent there a moment ago are not in its figures yet, or they are.
            merit = said.total_bytes - max(said.borrowed_bytes, ours), -said.waiting
            if best is None or merit > best[0]:
                best = merit, client
        if best is None:
            raise ConnectionLost(f"every replica of {self._what} was lost")
        return best[1]  # noqa: ASYNC910

    async def _present(self) -> list[ShardClient]:
        """Return clients of all replicas that can be reached and take sessions; there is one at least."""
        present = self._living()
        if not present or trio.current_time() - self._looked > _FRESH:
            addresses = await self._find()
            self._looked, self._offered = trio.current_time(), [address.where for address in addresses]
            for address in addresses:
                if self._clients.get(address.where) is None:
                    await self._connect(address)
            present = self._living()
        if not present:
            raise ConnectionLost(f"no replica of {self._what} can be reached")
        return present  # noqa: ASYNC910

    def _living(self) -> list[ShardClient]:
        clients = (self._clients.get(where) for where in self._offered)
        return [client for client in clients if client is not None and not client.lost]

    async def _connect(self, address: ShardAddress) -> None:  # noqa: ASYNC910 - a refusal ends it at once
        try:
            with trio.move_on_after(_CONNECT_PATIENCE):
                client: ShardClient = await self._nursery.start(self._hold, address)
                # All replicas, and what comes back in their place, must mean the same by what they cache.
                self._recipe = client.recipe
        except (ConnectionLost, ProtocolError, Unauthorised) as error:
            # Where it was somebody else may listen by now, who does not know the token, or speaks something else.
            logger.info("a replica of %s is not there: %s", self._what, error)

    async def _hold(self, address: ShardAddress, *, task_status: trio.TaskStatus[ShardClient]) -> None:  # noqa: ASYNC114
        """Keep a connection for all sessions of the route, until it is lost or its peer is silent."""
        async with open_shard_client(
            address.where,
            token=address.token,
            dtype=address.dtype,
            ssl_context=address.ssl_context,
            insecure=address.insecure,
            recipe=self._recipe,
        ) as client:
            self._clients[address.where] = client
            try:
                task_status.started(client)
                while not client.lost:
                    with trio.move_on_after(_PING_EVERY):
                        await client.wait_lost()
                    await _ping(client)
            finally:
                del self._clients[address.where]


async def _ping(client: ShardClient) -> None:
    """Give the client up, and every call with it, if its peer says nothing."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_give_up, client)
        with suppress(HotKVError):
            await client.ping()
        nursery.cancel_scope.cancel(reason="the shard has answered, or is lost")


async def _give_up(client: ShardClient) -> None:
    await trio.sleep(_PONG_PATIENCE)
    client._lose(f"the shard has not answered for {_PONG_PATIENCE:g} s")


@final
class _Homed:
    """A session of a replica, which the hop forgets when it ends."""

    def __init__(self, session: HopSession, hop: ReplicaHop, name: str) -> None:
        self._session = session
        self._hop = hop
        self._name = name

    async def prefill(self, data: Any, *, at: int | None = None, output: Output = "last") -> StepResult:
        return await self._session.prefill(data, at=at, output=output)

    async def decode(self, data: Any, *, at: int | None = None) -> StepResult:
        return await self._session.decode(data, at=at)

    async def aclose(self) -> None:
        self._hop.leave(self._name)
        await self._session.aclose()
