"""Where a deployment's shards are now: read from Ray each time, never remembered."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from hotkv_trio.ray import _edge
from hotkv_trio.ray._errors import DeploymentFailed, DeploymentUnknown
from hotkv_trio.ray._names import check_name, keeper_name, replica_name, replicas_in
from hotkv_trio.ray._spec import Deployment, Failed, Figures, Place, Replica, Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotkv_trio.ray._names import ReplicaId

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for the first replica to say where it is."""
_GRACE = 0.25
"""Seconds, from then on, for the others."""
_STATUS_GRACE = 2.0
_KEEPER_PATIENCE = 60.0


async def discover(name: str, *, address: str | None = None) -> Deployment:
    """Return where the replicas of a deployment serve now; those that do not answer at once are ``away``.

    After `trio.Cancelled` nothing has changed.

    Args:
        name: of the deployment.
        address: of the Ray cluster, if this process has not joined it yet; None: the one that this machine is part of.

    Raises:
        DeploymentUnknown: there is none of this name.
        InvalidInput: the name is none, or Ray is not installed.
        OSError: there is no cluster.
    """
    return await in_thread(partial(look, check_name(name), address=address, method="place", grace=_GRACE))


async def status(name: str, *, address: str | None = None) -> Deployment:
    """Return what `discover` does, with what each replica holds and has done."""
    return await in_thread(partial(look, check_name(name), address=address, method="figures", grace=_STATUS_GRACE))


async def discover_shard(name: str, shard: int) -> Deployment:
    """Return what `discover` does, of one shard; if it is being brought back, that is waited for some seconds."""
    return await in_thread(partial(look, name, address=None, method="place", grace=_GRACE, only=shard))


async def in_thread(work: Callable[[], T]) -> T:
    """Run what only looks; after `trio.Cancelled` it may go on in its thread."""
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)


def spec_of(name: str) -> Spec:
    """Return what was deployed under a name.  Blocking.

    Raises:
        DeploymentUnknown: nothing.
        DeploymentFailed: who knows it does not answer.
    """
    keeper = _edge.find_actor(keeper_name(name))
    if keeper is None:
        raise DeploymentUnknown(name)
    return ask_keeper(name, keeper)


def ask_keeper(name: str, keeper: _edge.Actor, tick: _edge.Tick | None = None) -> Spec:
    """Return what a keeper knows, once it has started.  Blocking.

    Raises:
        DeploymentFailed: it says nothing.
    """
    try:
        spec = _edge.call(keeper, "spec", patience=_KEEPER_PATIENCE, tick=tick)
    except _edge.Unreachable as error:
        raise DeploymentFailed(name, f"its keeper does not answer ({error})") from None
    assert isinstance(spec, Spec)  # noqa: S101 - the keeper is of this version
    return spec


def look(name: str, *, address: str | None, method: str, grace: float, only: int | None = None) -> Deployment:
    """Ask all replicas of a deployment, or those of one shard only, at once.  Blocking."""
    _edge.connect(address)
    spec = spec_of(name)
    ids = [one for one in replicas_in(name, _edge.actor_names()) if only in {None, one.shard}]
    found = ask(spec, ids, method, grace)
    return Deployment(
        name=name,
        epoch=spec.epoch,
        token=spec.token,
        insecure=spec.serving.insecure,
        replicas=tuple(
            tuple(replica for replica in found if replica.id.shard == shard) for shard in range(len(spec.ranges))
        ),
    )


def ask(spec: Spec, ids: Sequence[ReplicaId], method: str, grace: float) -> list[Replica]:
    """Ask replicas for their ``place`` or their ``figures``.  Blocking."""
    actors = [(replica, _edge.find_actor(replica_name(spec.name, replica))) for replica in ids]
    present = [(replica, actor) for replica, actor in actors if actor is not None]
    said = _edge.call_each([actor for _, actor in present], method, patience=_PATIENCE, grace=grace)
    return [_replica(spec, replica, answer) for (replica, _), answer in zip(present, said, strict=True)]


def _replica(spec: Spec, replica: ReplicaId, said: object) -> Replica:
    layers = spec.ranges[replica.shard]
    if isinstance(said, Failed | _edge.Unreachable):
        return Replica(id=replica, layers=layers, state="away", where=None, node=None)
    place = said.place if isinstance(said, Figures) else said
    assert isinstance(place, Place)  # noqa: S101 - the host is of this version
    return Replica(
        id=replica,
        layers=layers,
        state="draining" if place.draining else "serving",
        where=place.where,
        node=place.node,
        figures=said if isinstance(said, Figures) else None,
    )
