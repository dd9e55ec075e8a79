"""What a deployment's parts are called in Ray.  All state of a deployment that changes is in these names.

A replica is the actor ``hotkv:<deployment>:<shard>:<replica>``, and the *keeper*, which knows what was deployed, is
``hotkv:<deployment>:keeper``.  Room for replicas is reserved by placement groups, which say for whom:
``hotkv:<deployment>:room:<shard>.<replica>,...``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import attrs

from hotkv_trio._errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMESPACE: Final = "hotkv"
"""Of all names, in Ray's sense."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@attrs.frozen(order=True)
class ReplicaId:
    """Which replica of which shard.  A number is not used twice while anything of its first user is left."""

    shard: int
    replica: int

    def __str__(self) -> str:
        """As it is written: ``0.1``."""
        return f"{self.shard}.{self.replica}"


def check_name(name: str) -> str:
    """Return a deployment's name.

    Raises:
        InvalidInput: it is none.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"a deployment's name is 1-63 letters, digits, '.', '_' or '-', not {name!r:.200}")
    return name


def keeper_name(deployment: str) -> str:
    """Return the name of a deployment's keeper."""
    return f"hotkv:{deployment}:keeper"


def replica_name(deployment: str, replica: ReplicaId) -> str:
    """Return the name of a replica."""
    return f"hotkv:{deployment}:{replica.shard}:{replica.replica}"


def replicas_in(deployment: str, names: Iterable[str]) -> list[ReplicaId]:
    """Return a deployment's replicas among the names of actors, in order."""
    pattern = re.compile(rf"hotkv:{re.escape(deployment)}:(\d+):(\d+)")
    return sorted(ReplicaId(int(m[1]), int(m[2])) for m in map(pattern.fullmatch, names) if m is not None)


def room_name(deployment: str, replicas: Iterable[ReplicaId]) -> str:
    """Return the name of the placement group that holds room for replicas."""
    return f"hotkv:{deployment}:room:{','.join(map(str, replicas))}"


def tenants_of(deployment: str, room: str) -> list[ReplicaId]:
    """Return for whom a placement group holds room; nobody, if it is not this deployment's."""
    prefix = f"hotkv:{deployment}:room:"
    if not room.startswith(prefix):
        return []
    pairs = (part.split(".") for part in room.removeprefix(prefix).split(","))
    return [ReplicaId(int(shard), int(replica)) for shard, replica in pairs]
