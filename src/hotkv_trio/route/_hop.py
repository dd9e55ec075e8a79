"""One shard of a route: a local runtime, a client of the caller's own, or an address that is called again when lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final, runtime_checkable

import attrs
import trio

from hotkv_trio._errors import InvalidInput
from hotkv_trio._runtime import Runtime
from hotkv_trio.serve._client import ShardClient, open_shard_client
from hotkv_trio.serve._errors import ConnectionLost

if TYPE_CHECKING:
    import ssl

    from hotkv_trio._engine import EngineInfo, Output
    from hotkv_trio._keys import SessionKey
    from hotkv_trio._recipe import CacheRecipe
    from hotkv_trio._session import StepResult
    from hotkv_trio.serve._tensors import HiddenDtype


_PATIENCE = 10.0
"""Seconds from a call to its welcome."""


@attrs.frozen(kw_only=True)
class ShardAddress:
    """Where a shard server listens, and what to say to it: see `hotkv_trio.serve.open_shard_client`."""

    where: str
    token: str | None = attrs.field(default=None, repr=False)
    dtype: HiddenDtype = "float32"
    ssl_context: ssl.SSLContext | None = None
    insecure: bool = False


class HopSession(Protocol):
    """What a route needs of a session, local or remote."""

    async def prefill(self, data: Any, *, at: int | None = None, output: Output = "last") -> StepResult:
        """See `hotkv_trio.Session.prefill`."""
        ...

    async def decode(self, data: Any, *, at: int | None = None) -> StepResult:
        """See `hotkv_trio.Session.decode`."""
        ...

    async def aclose(self) -> None:
        """See `hotkv_trio.Session.aclose`."""
        ...


class Hop(Protocol):
    """One shard of a route."""

    async def info(self) -> EngineInfo:
        """Return the facts of its engine."""
        ...

    async def open(self, key: SessionKey) -> HopSession:
        """Open a session; `HopSession.aclose` ends it."""
        ...


@runtime_checkable
class HopSource(Protocol):
    """Whoever knows how to reach a shard, such as one that moves."""

    def open_hop(self, nursery: trio.Nursery) -> Hop:
        """Return a hop, whose tasks live in the route's nursery."""
        ...


Shard: TypeAlias = Runtime | ShardClient | ShardAddress | HopSource | str
"""What a route is made of; text is an address."""


def hop_of(shard: Shard, nursery: trio.Nursery) -> Hop:
    """Return the hop for a shard.

    Raises:
        InvalidInput: it is none.
    """
    if isinstance(shard, Runtime):
        return _LocalHop(shard, nursery)
    if isinstance(shard, ShardClient):
        return _ClientHop(shard)
    if isinstance(shard, str):
        shard = ShardAddress(where=shard)
    if isinstance(shard, ShardAddress):
        return _DialledHop(shard, nursery)
    if isinstance(shard, HopSource):
        return shard.open_hop(nursery)
    raise InvalidInput(
        f"a shard is a Runtime, a ShardClient, a ShardAddress, a HopSource or an address, not {shard!r:.200}"
    )


@final
class _LocalHop:
    def __init__(self, runtime: Runtime, nursery: trio.Nursery) -> None:
        self._runtime = runtime
        self._nursery = nursery

    async def info(self) -> EngineInfo:
        await trio.lowlevel.checkpoint()
        return self._runtime.info

    async def open(self, key: SessionKey) -> HopSession:
        session: HopSession = await self._nursery.start(self._runtime.serve_session, key)
        return session


@final
class _ClientHop:
    def __init__(self, client: ShardClient) -> None:
        self._client = client

    async def info(self) -> EngineInfo:
        await trio.lowlevel.checkpoint()
        return self._client.info

    async def open(self, key: SessionKey) -> HopSession:
        return await self._client.start_session(key)


@final
class _DialledHop:
    """Keeps one connection for all sessions of a route, and calls again when it is lost and needed."""

    def __init__(self, address: ShardAddress, nursery: trio.Nursery) -> None:
        self._address = address
        self._nursery = nursery
        self._client: ShardClient | None = None
        self._recipe: CacheRecipe | None = None
        self._dialling = trio.Lock()

    async def info(self) -> EngineInfo:
        return (await self._connected()).info

    async def open(self, key: SessionKey) -> HopSession:
        return await (await self._connected()).start_session(key)

    async def _connected(self) -> ShardClient:
        async with self._dialling:
            if self._client is None or self._client.lost:
                client: ShardClient | None = None
                # A machine that is gone, or a process that is stopped, does not even refuse.
                with trio.move_on_after(_PATIENCE):
                    client = await self._nursery.start(self._hold)
                if client is None:
                    raise ConnectionLost(f"{self._address.where} did not say welcome within {_PATIENCE:g} s")
                # What comes back in its place must mean the same by what it caches.
                self._client, self._recipe = client, client.recipe
            return self._client

    async def _hold(self, *, task_status: trio.TaskStatus[ShardClient]) -> None:  # noqa: ASYNC114
        async with open_shard_client(recipe=self._recipe, **_fields(self._address)) as client:
            task_status.started(client)
            await client.wait_lost()


def _fields(address: ShardAddress) -> dict[str, Any]:
    return {field.name: getattr(address, field.name) for field in attrs.fields(ShardAddress)}
