"""Route: shards that together hold all layers of a model."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from itertools import count, pairwise
from typing import TYPE_CHECKING, final
from uuid import uuid4

import trio

from hotkv_trio._errors import InvalidInput
from hotkv_trio._inputs import check_count
from hotkv_trio._keys import SessionKey
from hotkv_trio._nursery import open_body_nursery
from hotkv_trio.route._hop import hop_of
from hotkv_trio.route._session import Policy, RouteSession
from hotkv_trio.route._turnstile import Turnstile

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from hotkv_trio._engine import EngineInfo
    from hotkv_trio.route._hop import Hop, Shard
    from hotkv_trio.route._session import Replay


@final
class Route:
    """Opens sessions on all shards; made by `open_route`.

    Sessions run side by side, in as many teams as there are shards: while one is at one shard, others are at the next.
    """

    def __init__(self, hops: Sequence[Hop], infos: Sequence[EngineInfo], policy: Policy, max_sessions: int) -> None:
        self._hops = hops
        self._infos = infos
        self._policy = policy
        self._places = trio.CapacityLimiter(max_sessions)
        self._numbers: set[int] = set()
        self._turnstiles = [Turnstile(self._team_of) for _ in hops]

    def __repr__(self) -> str:
        layers = ", ".join(f"{first}:{end}" for first, end in (info.layers for info in self._infos))
        return f"<hotkv_trio.route.Route at {id(self):#x}, layers {layers}, {self._places.borrowed_tokens} sessions>"

    @property
    def infos(self) -> tuple[EngineInfo, ...]:
        """The facts of each shard's engine, as they were when the route was opened."""
        return tuple(self._infos)

    @asynccontextmanager
    async def open_session(
        self, route_session_id: str | None = None, *, epoch: int = 0
    ) -> AsyncGenerator[RouteSession]:
        """Open a session for as long as the ``async with`` lasts.

        It waits until the shards have room for one more session of this route.  Shards are asked when the first
        tokens are appended.  When the body ends, the session is released at every shard that can be reached.

        Args:
            route_session_id: None: one that nobody else has.
            epoch: the first to use; higher than any that was used for this id.

        Raises:
            InvalidInput: the id or the epoch is none.
        """
        key = SessionKey(uuid4().hex if route_session_id is None else route_session_id, epoch)
        borrower = object()
        await self._places.acquire_on_behalf_of(borrower)
        number = next(number for number in count() if number not in self._numbers)
        self._numbers.add(number)
        session = RouteSession(self._hops, self._turnstiles, number, key, self._policy)
        try:
            yield session
        finally:
            try:
                await session._close()  # noqa: ASYNC102 - each shard's part is shielded, and bounded
            finally:
                self._numbers.discard(number)
                self._places.release_on_behalf_of(borrower)

    def _team_of(self, number: int) -> int:
        return number * len(self._hops) // (max(self._numbers, default=number) + 1)


@asynccontextmanager
async def open_route(
    shards: Sequence[Shard],
    *,
    replay: Replay = "exact",
    prefill_chunk: int = 128,
    max_sessions: int | None = None,
    max_attempts: int = 60,
    jitter: Callable[[], float] = random.random,  # noqa: S311
) -> AsyncGenerator[Route]:
    """Open a route for as long as the ``async with`` lasts.

    Args:
        shards: in the order of their layers, all of one model: runtimes, clients, or addresses.  Only addresses are
            called again when their connection is lost.  How they store KV, and how much, may differ.
        replay: how a history that a shard has lost is put back: ``"exact"``, call by call, or ``"fast"``, in bulk.
        prefill_chunk: tokens of a prompt that go through a shard at a time.
        max_sessions: sessions at once; None: as many as every shard has slots.
        max_attempts: how often in a row a step is tried before its error is raised; about 45 s with the default.
        jitter: a number from 0 to 1, to spread attempts.

    Raises:
        InvalidInput: the shards do not fit together, or an argument is not what it should be.
        ConnectionLost: a server cannot be reached.
    """
    if replay not in {"exact", "fast"}:
        raise InvalidInput(f"replay must be 'exact' or 'fast', not {replay!r:.200}")
    for name, value in (("prefill_chunk", prefill_chunk), ("max_attempts", max_attempts)):
        check_count(name, value)
    if not shards:
        raise InvalidInput("a route needs at least one shard")
    policy = Policy(replay=replay, prefill_chunk=prefill_chunk, max_attempts=max_attempts, jitter=jitter)
    async with open_body_nursery(trio.CancelScope()) as nursery:
        hops = [hop_of(shard, nursery) for shard in shards]
        infos = [await hop.info() for hop in hops]
        _check_route(infos)
        if max_sessions is None:
            max_sessions = min(info.n_slots for info in infos)
        yield Route(hops, infos, policy, check_count("max_sessions", max_sessions))


def _check_route(infos: Sequence[EngineInfo]) -> None:
    first, last = infos[0], infos[-1]
    if first.layers[0] != 0 or not first.takes_tokens:
        raise InvalidInput(f"a route begins with a shard that takes tokens, not with layers {_name(first)}")
    if last.layers[1] != last.layer_count:
        raise InvalidInput(f"a route ends with the last layer, not with layers {_name(last)} of {last.layer_count}")
    for one, other in pairwise(infos):
        if one.layers[1] != other.layers[0] or one.recipe.architecture != other.recipe.architecture:
            raise InvalidInput(
                f"layers {_name(one)} of {one.recipe.architecture} are not followed by {_name(other)} of"
                f" {other.recipe.architecture}"
            )
        if one.recipe.model_digest != other.recipe.model_digest:
            raise InvalidInput(
                f"layers {_name(one)} and {_name(other)} are of different models, by the digests"
                f" {one.recipe.model_digest:.12} and {other.recipe.model_digest:.12} of their tensors"
            )
        if one.n_output != other.n_embd:
            raise InvalidInput(f"layers {_name(one)} give {one.n_output} values, {_name(other)} take {other.n_embd}")


def _name(info: EngineInfo) -> str:
    return f"{info.layers[0]}:{info.layers[1]}"
