"""Placing shards, and moving them: what changes a deployment.

Each change first reserves room for what it adds, spread over the nodes, then starts it and waits until it serves, and
only then ends what it replaces.  What fails on the way is taken back.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from hotkv_trio._errors import InvalidInput
from hotkv_trio._inputs import check_count
from hotkv_trio.llama._digest import model_digest
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._planning import ShardPlan, plan_shards
from hotkv_trio.ray import _edge
from hotkv_trio.ray._discover import ask, ask_keeper, look, spec_of
from hotkv_trio.ray._errors import DeploymentFailed
from hotkv_trio.ray._host import Keeper, ShardHost
from hotkv_trio.ray._names import (
    ReplicaId,
    check_name,
    keeper_name,
    replica_name,
    replicas_in,
    room_name,
    tenants_of,
)
from hotkv_trio.ray._spec import Failed, Order, Place, Serving, Spec

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    from hotkv_trio.llama import KVType
    from hotkv_trio.ray._spec import Deployment

logger = logging.getLogger("hotkv_trio")

_OVERHEAD = 256 * 2**20
"""Bytes of a replica's process beside weights and KV: Python, llama.cpp's buffers."""
_KEEPER_BYTES = 128 * 2**20
_GRACE = 0.25
_END_PATIENCE = 30.0


def _ignore(_done: int, _total: int) -> None:
    """Tell nobody."""


async def deploy(
    name: str,
    model: str | os.PathLike[str],
    plan: ShardPlan | int,
    *,
    replicas: int | Sequence[int] = 1,
    sessions: int = 4,
    n_ctx: int = 4096,
    type_k: KVType = "f16",
    type_v: KVType = "f16",
    threads: int = 1,
    exact: bool = False,
    prefill_chunk: int = 128,
    idle_ttl: float | None = 600.0,
    cpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    model_on_nodes: str | os.PathLike[str] | None = None,
    max_restarts: int = _edge.FOREVER,
    host: str | None = None,
    certificate: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    patience: float = 300.0,
    address: str | None = None,
    progress: Callable[[int, int], None] = _ignore,
) -> Deployment:
    """Start a model's shards on a Ray cluster; they serve when this returns, and go on until `down`.

    Each replica of a shard is an actor, ``hotkv:NAME:SHARD:REPLICA``, spread over the nodes, that Ray brings back when
    its process or its node is lost.  It serves on its node's address, to clients with a token made for this
    deployment.  A node that does not have the model gets the bytes of its layers by Ray's object store, and keeps them.

    If it fails or is cancelled, what was started is ended again.

    Args:
        name: of the deployment; not in use.
        model: the GGUF file on this node, which must be one of the cluster; of a split one, any part.
        plan: into how many shards to cut, or the plan of `plan_shards`.
        replicas: of each shard.
        sessions: hot sessions side by side, on each replica.
        n_ctx: tokens of one session.
        type_k: how keys are stored.
        type_v: how values are stored.
        threads: CPU threads of a replica.
        exact: whether every native call serves one session.
        prefill_chunk: tokens of a prefill in one native call.
        idle_ttl: seconds after which an idle session loses its KV.
        cpus: what Ray counts a replica as; None: its threads.
        resources: more that a replica takes of its node, by Ray's names.
        model_on_nodes: path where nodes look for the model; None: the same as here.
        max_restarts: how often Ray brings a replica back; -1: always.
        host: what replicas listen on, on every node; None: the node's address.  For a cluster of one machine,
            ``127.0.0.1`` needs neither a certificate nor ``insecure``.
        certificate: PEM file of a certificate chain and its key, on every node: TLS.
        insecure: allow plain TCP beyond loopback, where others on the way can read all.
        patience: seconds until everything serves.
        address: of the Ray cluster, if this process has not joined it yet; None: the one that this machine is part of.
        progress: called in another thread with the number of replicas that serve, and of all.

    Raises:
        InvalidInput: an argument is not what it should be.
        DeploymentFailed: the cluster has no room, or not everything came to serve; it says why.
        OSError: there is no cluster.
    """
    serving = Serving(
        sessions=sessions,
        n_ctx=n_ctx,
        type_k=type_k,
        type_v=type_v,
        threads=threads,
        exact=exact,
        prefill_chunk=prefill_chunk,
        idle_ttl=idle_ttl,
        host=host,
        certificate=None if certificate is None else str(certificate),
        insecure=insecure,
    )
    more = dict(resources or {})
    if unknown := {"CPU", "memory"} & set(more):
        raise InvalidInput(f"{', '.join(sorted(unknown))} of a replica is reckoned from its threads, or from the plan")

    def make_spec() -> Spec:
        path = Path(model).absolute()
        facts = read_model_facts(path)
        planned = plan_shards(path, plan, n_ctx=n_ctx, type_k=type_k, type_v=type_v) if isinstance(plan, int) else plan
        return Spec(
            name=check_name(name),
            epoch=time.time_ns() // 10**6,
            token=secrets.token_urlsafe(32),
            model=str(path),
            model_on_nodes=str(model_on_nodes or path),
            digest=model_digest(path),
            n_layer=facts.n_layer,
            ranges=tuple(shard.layers for shard in planned.shards),
            bundles=tuple(
                {
                    "CPU": float(threads if cpus is None else cpus),
                    "memory": float(shard.memory or shard.weight_bytes + sessions * shard.slot_bytes + _OVERHEAD),
                }
                | more
                for shard in planned.shards
            ),
            max_restarts=max_restarts,
            serving=serving,
        )

    def work() -> Deployment:
        spec = make_spec()
        counts = list(replicas) if isinstance(replicas, Sequence) else [replicas] * len(spec.ranges)
        if len(counts) != len(spec.ranges):
            raise InvalidInput(f"replicas must be a number, or one for each of {len(spec.ranges)} shards")
        for count in counts:
            check_count("replicas", count)
        _edge.connect(address)
        if _edge.find_actor(keeper_name(name)) is not None:
            raise InvalidInput(f"there is a deployment named {name} already: choose another name, or end it first")
        keeper = _edge.start_actor(
            Keeper,
            keeper_name(name),
            [spec],
            max_restarts=_edge.FOREVER,
            # Where an actor that takes nothing starts Ray does not care.
            resources={"memory": _KEEPER_BYTES},
            near=_edge.here().id,
        )
        try:
            ask_keeper(name, keeper, trio.from_thread.check_cancelled)
            wanted = [ReplicaId(shard, number) for shard, count in enumerate(counts) for number in range(count)]
            _grow(spec, wanted, (), patience, progress)
            return look(name, address=None, method="place", grace=_GRACE)
        except BaseException:
            _take_down(name)
            raise

    return await trio.to_thread.run_sync(work)


async def scale(
    name: str,
    shard: int,
    replicas: int,
    *,
    patience: float = 300.0,
    grace: float = 30.0,
    address: str | None = None,
    progress: Callable[[int, int], None] = _ignore,
) -> Deployment:
    """Change the number of a shard's replicas: new ones serve when this returns, and those too many have drained.

    Sessions of a replica that drains go on at another one.

    Args:
        name: of the deployment.
        shard: its number.
        replicas: how many there shall be.
        patience: seconds until the new ones serve.
        grace: seconds for what a draining one has begun.
        address: as `deploy`.
        progress: as `deploy`.

    Raises:
        DeploymentUnknown: there is none of this name.
        DeploymentFailed: the cluster has no room, or not all new ones came to serve; they are ended again.
        InvalidInput: no such shard, or not a number > 0.
        OSError: there is no cluster.
    """
    check_name(name)

    def work() -> Deployment:
        _edge.connect(address)
        spec = spec_of(name)
        check_count("replicas", replicas)
        if not 0 <= shard < len(spec.ranges):
            raise InvalidInput(f"{name} has shards 0 to {len(spec.ranges) - 1}, not {shard!r:.200}")
        living = _living(name)
        mine = [replica for replica in living if replica.shard == shard]
        if replicas > len(mine):
            _grow(spec, _fresh(name, [shard] * (replicas - len(mine))), (), patience, progress)
        _end(spec, mine[replicas:], grace)
        return look(name, address=None, method="place", grace=_GRACE)

    return await trio.to_thread.run_sync(work)


async def drain(
    name: str,
    *,
    node: str | None = None,
    replica: ReplicaId | None = None,
    patience: float = 300.0,
    grace: float = 30.0,
    address: str | None = None,
    progress: Callable[[int, int], None] = _ignore,
) -> Deployment:
    """Move a deployment off a node, or put another replica in the place of one: it has drained when this returns.

    What takes its place serves before anything ends; its sessions go on there, or at another replica.

    Args:
        name: of the deployment.
        node: Ray's id of the node, or its beginning, or the node's address.
        replica: which one; another may come to serve on the same node.
        patience: seconds until what takes its place serves.
        grace: seconds for what a draining one has begun.
        address: as `deploy`.
        progress: as `deploy`.

    Raises:
        DeploymentUnknown: there is none of this name.
        DeploymentFailed: there is no room for what takes the place, or it did not come to serve.
        InvalidInput: no such node or replica, or not one of both.
        OSError: there is no cluster.
    """
    check_name(name)
    if (node is None) == (replica is None):
        raise InvalidInput("either a node or a replica is drained")

    def work() -> Deployment:
        _edge.connect(address)
        spec = spec_of(name)
        found = ask(spec, _living(name), "place", _GRACE)
        if node is not None:
            avoid = [_node(node)]
            leaving = [one for one in found if one.node in avoid]
        else:
            avoid = []
            leaving = [one for one in found if one.id == replica]
            if not leaving:
                raise InvalidInput(f"{name} has no replica {replica}")
        if leaving:
            _grow(spec, _fresh(name, [one.id.shard for one in leaving]), avoid, patience, progress)
            _end(spec, [one.id for one in leaving], grace)
        return look(name, address=None, method="place", grace=_GRACE)

    return await trio.to_thread.run_sync(work)


async def down(name: str, *, address: str | None = None) -> None:
    """End a deployment at once: its shards, its keeper, and its room.  Ending what is not there does nothing.

    Args:
        name: of the deployment.
        address: as `deploy`.

    Raises:
        InvalidInput: the name is none, or Ray is not installed.
        OSError: there is no cluster.
    """
    check_name(name)

    def work() -> None:
        _edge.connect(address)
        _take_down(name)

    await trio.to_thread.run_sync(work)


def _take_down(name: str) -> None:
    _kill(name, _living(name))
    for room in _edge.rooms():
        if tenants_of(name, room):
            _edge.give_back(room)
    # Last: while there is a keeper the name is in use.
    if (keeper := _edge.find_actor(keeper_name(name))) is not None:
        _edge.kill(keeper)
        _edge.wait_gone([keeper_name(name)], _END_PATIENCE)


def _grow(
    spec: Spec, wanted: Sequence[ReplicaId], avoid: Sequence[str], patience: float, progress: Callable[[int, int], None]
) -> None:
    """Start replicas; return once they serve, or end them again."""
    until = time.monotonic() + patience
    room = room_name(spec.name, wanted)
    progress(0, len(wanted))
    check = trio.from_thread.check_cancelled
    if not _edge.reserve(room, [spec.bundles[one.shard] for one in wanted], avoid=avoid, patience=patience, tick=check):
        needs = "; ".join(f"{one}: {_show(spec.bundles[one.shard])}" for one in wanted)
        raise DeploymentFailed(spec.name, f"after {patience:g} s the cluster had no room for {needs}")
    try:
        actors = [
            _edge.start_actor(
                ShardHost,
                replica_name(spec.name, one),
                [Order(spec=spec, id=one)],
                max_restarts=spec.max_restarts,
                resources=spec.bundles[one.shard],
                room=(room, number),
            )
            for number, one in enumerate(wanted)
        ]
        for number, (one, actor) in enumerate(zip(wanted, actors, strict=True)):
            try:
                place = _edge.call(actor, "place", patience=max(0.0, until - time.monotonic()), tick=check)
            except _edge.Unreachable as error:
                raise DeploymentFailed(
                    spec.name, f"replica {one} does not serve after {patience:g} s ({error}); Ray's logs say why"
                ) from None
            if isinstance(place, Failed):
                raise DeploymentFailed(spec.name, f"replica {one} does not start: {place.what}")
            assert isinstance(place, Place)  # noqa: S101 - the host is of this version
            logger.info("replica %s of %s serves on %s", one, spec.name, place.where)
            progress(number + 1, len(wanted))
    except BaseException:
        _kill(spec.name, wanted)
        _edge.give_back(room)
        raise


def _end(spec: Spec, leaving: Sequence[ReplicaId], grace: float) -> None:
    """Drain replicas and end them."""
    actors = [actor for one in leaving if (actor := _edge.find_actor(replica_name(spec.name, one))) is not None]
    for said in _edge.call_each(actors, "drain", grace, patience=grace + _END_PATIENCE, grace=grace + _END_PATIENCE):
        if isinstance(said, _edge.Unreachable):
            logger.warning("a replica of %s was not there to be drained: %r", spec.name, said)
    _kill(spec.name, leaving)
    living = set(_living(spec.name))
    for room in _edge.rooms():
        tenants = tenants_of(spec.name, room)
        if tenants and not living & set(tenants):
            _edge.give_back(room)


def _kill(name: str, leaving: Iterable[ReplicaId]) -> None:
    names = [replica_name(name, one) for one in leaving]
    for actor in filter(None, map(_edge.find_actor, names)):
        _edge.kill(actor)
    _edge.wait_gone(names, _END_PATIENCE)


def _living(name: str) -> list[ReplicaId]:
    return replicas_in(name, _edge.actor_names())


def _fresh(name: str, shards: Sequence[int]) -> list[ReplicaId]:
    """Return new ids for replicas of shards: numbers that nobody has, not even by the name of a room."""
    taken = set(_living(name)).union(*(tenants_of(name, room) for room in _edge.rooms()))
    found: list[ReplicaId] = []
    for shard in shards:
        found.append(ReplicaId(shard, 1 + max((one.replica for one in taken if one.shard == shard), default=-1)))
        taken.add(found[-1])
    return found


def _node(text: str) -> str:
    matching = {node.id for node in _edge.nodes() if node.alive and (node.id.startswith(text) or node.address == text)}
    if len(matching) != 1 or not text:
        raise InvalidInput(
            f"{len(matching)} nodes of the cluster have an id that begins with {text!r:.200}, or that address"
        )
    return matching.pop()


def _show(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:,.15g}" for name, amount in bundle.items())
