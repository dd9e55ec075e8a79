"""Where this package touches Ray: its annotations are partial, so nothing else imports it.

Ray is imported when it is first needed.  Every function blocks, and is for a thread that may.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from hotkv_trio._errors import InvalidInput
from hotkv_trio.ray._names import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Actor: TypeAlias = Any
"""Ray's handle of an actor."""

FOREVER = -1
"""To Ray: as often as need be."""
Tick: TypeAlias = "Callable[[], None]"
"""Called while something is waited for; may raise."""

_TICK = 0.5
"""Seconds."""
CALLS_AT_ONCE = 16
"""Of one actor: some wait for minutes."""


class Unreachable(Exception):
    """An actor is gone, or is not back yet, or could not do what it was asked."""


@attrs.frozen(kw_only=True)
class Node:
    """A machine of the cluster."""

    id: str
    address: str
    alive: bool


def connect(address: str | None = None) -> None:
    """Join the cluster at an address, once a process; None: the one that this machine belongs to.

    Raises:
        InvalidInput: Ray is not installed.
        ConnectionError: there is no cluster.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            # Its warnings are of what is meant here: restartable actors in rooms of their own, and no main thread.
            logging_level=logging.ERROR,
        )


def here() -> Node:
    """Return the node that this process runs on."""
    ray = _ray()
    mine = ray.get_runtime_context().get_node_id()
    return next(node for node in nodes() if node.id == mine)


def was_restarted() -> bool:
    """Return whether Ray has brought the actor that asks back after its process had ended."""
    return bool(_ray().get_runtime_context().was_current_actor_reconstructed)


def nodes() -> list[Node]:
    """Return all nodes, also those that are gone."""
    return [Node(id=node["NodeID"], address=node["NodeManagerAddress"], alive=node["Alive"]) for node in _ray().nodes()]


# Actors.


def start_actor(
    kind: type,
    name: str,
    arguments: Sequence[Any],
    *,
    max_restarts: int,
    resources: Mapping[str, float] | None = None,
    room: tuple[str, int] | None = None,
    near: str | None = None,
) -> Actor:
    """Start an actor that outlives this process.

    Args:
        kind: its class.
        name: not used by another.
        arguments: of its constructor.
        max_restarts: how often Ray brings it back; ``FOREVER``.
        resources: what it takes: ``CPU``, ``memory`` and others; None: none.
        room: the placement group that holds them, and which of its bundles.
        near: the node where it starts, if that is possible.

    Raises:
        InvalidInput: the name is in use.
    """
    ray = _ray()
    taken = dict(resources or {})
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": max_restarts,
        "max_task_retries": FOREVER,
        "max_concurrency": CALLS_AT_ONCE,
        "num_cpus": taken.pop("CPU", 0),
        "memory": taken.pop("memory", None),
        "resources": taken,
    }
    from ray.util import scheduling_strategies as strategies

    if room is not None:
        options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(_group(room[0]), room[1])
    elif near is not None:
        options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(near, soft=True)
    try:
        return ray.remote(kind).options(**options).remote(*arguments)
    except ValueError as error:
        raise InvalidInput(f"{name} cannot be started: {error}") from None


def actor_names() -> list[str]:
    """Return the names of all actors in our name space."""
    listed = _ray().util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in listed if actor["namespace"] == NAMESPACE]


def find_actor(name: str) -> Actor | None:
    """Return an actor by its name; None: there is none."""
    try:
        return _ray().get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def kill(actor: Actor) -> None:
    """End an actor at once, for ever."""
    _ray().kill(actor, no_restart=True)


def call(actor: Actor, method: str, *arguments: Any, patience: float, tick: Tick | None = None) -> Any:
    """Return what a method of an actor returns; an actor that is being brought back is waited for.

    Raises:
        Unreachable: the actor is gone, has not answered within ``patience`` seconds, or has raised something.
    """
    ray = _ray()
    reference = getattr(actor, method).remote(*arguments)
    if tick is not None:
        _patiently(lambda seconds: ray.wait([reference], timeout=seconds)[0], patience, tick)
        patience = 0
    return _result(reference, patience)


def call_each(actors: Sequence[Actor], method: str, *arguments: Any, patience: float, grace: float) -> list[Any]:
    """Call a method of several actors at once; return what each returned, or `Unreachable`.

    Args:
        actors: whom.
        method: what.
        arguments: for each.
        patience: seconds for the first answer.
        grace: seconds, once there is one, for the others.
    """
    ray = _ray()
    asked = [getattr(actor, method).remote(*arguments) for actor in actors]
    if not asked:
        return []
    answered, others = ray.wait(asked, num_returns=1, timeout=patience)
    if answered and others:
        ray.wait(others, num_returns=len(others), timeout=grace)
    return [_outcome(reference) for reference in asked]


def _patiently(wait: Callable[[float], Any], patience: float, tick: Tick) -> Any:
    """Wait piece by piece; return what the wait returns once it is true, or what it returned last."""
    until = time.monotonic() + patience
    while True:
        tick()
        if (done := wait(min(_TICK, max(0.0, until - time.monotonic())))) or time.monotonic() >= until:
            return done


def _outcome(reference: Any) -> Any:
    try:
        return _result(reference, 0)
    except Unreachable as error:
        return error


def _result(reference: Any, patience: float) -> Any:
    ray = _ray()
    try:
        return ray.get(reference, timeout=patience)
    except ray.exceptions.RayError as error:
        # An error of the method itself comes with its traceback, whose last line says what it was.
        lines = str(error).strip().splitlines() or [""]
        last = lines[-1] if isinstance(error, ray.exceptions.RayTaskError) else lines[0]
        raise Unreachable(f"{type(error).__name__}: {last}") from None
    finally:
        # What is not wanted any more must not wait for an actor that never comes back.
        with suppress(ray.exceptions.RayError, ValueError, TypeError):
            if not ray.wait([reference], timeout=0)[0]:
                ray.cancel(reference)


# Room: placement groups.


def reserve(
    name: str, bundles: Sequence[Mapping[str, float]], *, avoid: Sequence[str], patience: float, tick: Tick
) -> bool:
    """Hold room for actors, spread over as many nodes as can be; return whether there was.

    Args:
        name: of the placement group.
        bundles: what each actor takes.
        avoid: nodes where nothing shall be.
        patience: seconds to wait for room.
        tick: called now and then; when it raises, nothing is held.
    """
    ray = _ray()
    selector = {"ray.io/node-id": f"!in({','.join(avoid)})"} if avoid else {}
    group = ray.util.placement_group(
        [dict(bundle) for bundle in bundles],
        strategy="SPREAD",
        name=name,
        lifetime="detached",
        bundle_label_selector=[selector] * len(bundles),
    )
    try:
        held = _patiently(lambda seconds: group.wait(timeout_seconds=seconds), patience, tick)
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    if not held:
        ray.util.remove_placement_group(group)
    return bool(held)


def rooms() -> list[str]:
    """Return the names of all placement groups that are not removed."""
    table = _ray().util.placement_group_table()
    return [group["name"] for group in table.values() if group["state"] != "REMOVED"]


def give_back(name: str) -> None:
    """Remove a placement group; what is left of its actors ends."""
    if (group := _group(name)) is not None:
        _ray().util.remove_placement_group(group)


def _group(name: str) -> Any:
    """Return a placement group.  Ray's own look-up by name knows those of the process's name space only."""
    table = _ray().util.placement_group_table()
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    for group_id, group in table.items():
        if group["name"] == name and group["state"] != "REMOVED":
            return PlacementGroup(PlacementGroupID.from_hex(group_id))
    return None


def wait_gone(names: Sequence[str], patience: float) -> None:
    """Return once no actor has one of these names, or after ``patience`` seconds."""
    until = time.monotonic() + patience
    while set(names) & set(actor_names()) and time.monotonic() < until:
        time.sleep(0.05)


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "ray":
            raise
        raise InvalidInput("Ray is not installed here: pip install '.[ray]' in hotkv-trio's folder") from None
    return ray
