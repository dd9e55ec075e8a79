"""What is deployed, and what is said of it: plain values, which travel between processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotkv_trio.llama import KVType
    from hotkv_trio.ray._names import ReplicaId

ReplicaState: TypeAlias = Literal["serving", "draining", "away"]
"""``away``: starting, or being brought back by Ray, or not to be reached."""


@attrs.frozen(kw_only=True)
class Serving:
    """How every shard of a deployment serves."""

    sessions: int
    """Hot sessions side by side, on each replica."""
    n_ctx: int
    """Tokens of one session."""
    type_k: KVType
    type_v: KVType
    threads: int
    exact: bool
    prefill_chunk: int
    idle_ttl: float | None
    host: str | None
    """What a replica listens on; None: its node's address."""
    certificate: str | None
    """PEM file of a certificate chain and its key, on each node."""
    insecure: bool
    """Whether plain TCP beyond loopback is allowed."""


@attrs.frozen(kw_only=True)
class Spec:
    """What was deployed; it does not change."""

    name: str
    epoch: int
    """Higher than that of any earlier deployment of this name: milliseconds of the Unix clock when it was made."""
    token: str = attrs.field(repr=False)
    """What clients show to the shards."""
    model: str
    """Path of the model file where it was deployed."""
    model_on_nodes: str
    """Path where each node looks for it."""
    digest: str
    """Of the model."""
    n_layer: int
    ranges: tuple[tuple[int, int], ...]
    """The layers of each shard."""
    bundles: tuple[Mapping[str, float], ...]
    """What a replica of each shard takes of its node, as Ray counts it."""
    max_restarts: int
    serving: Serving


@attrs.frozen(kw_only=True)
class Order:
    """What one shard host shall serve."""

    spec: Spec
    id: ReplicaId

    @property
    def layers(self) -> tuple[int, int]:
        """First layer, and one past the last."""
        return self.spec.ranges[self.id.shard]


@attrs.frozen(kw_only=True)
class Place:
    """Where a shard host serves."""

    where: str
    """Its address."""
    node: str
    """Ray's id of the node."""
    pid: int
    draining: bool


@attrs.frozen
class Failed:
    """Why a shard host does not serve."""

    what: str


@attrs.frozen(kw_only=True)
class Figures:
    """What a shard host holds and has done since its process began."""

    place: Place
    hot: int
    slots: int
    borrowed_bytes: int
    total_bytes: int
    connections: int
    refusals: int
    tokens: int
    """Appended."""


@attrs.frozen(kw_only=True)
class Replica:
    """One replica of a shard, as it is found."""

    id: ReplicaId
    layers: tuple[int, int]
    """First layer, and one past the last."""
    state: ReplicaState
    where: str | None
    """Its address; None: it is away."""
    node: str | None
    """Ray's id of its node; None: it is away."""
    figures: Figures | None = None
    """What it holds; only `status` asks."""


@attrs.frozen(kw_only=True)
class Deployment:
    """A deployment as it is found."""

    name: str
    epoch: int
    """Higher than that of any earlier deployment of this name."""
    token: str = attrs.field(repr=False)
    """What clients show to the shards."""
    insecure: bool
    """Whether the shards were allowed plain TCP beyond loopback."""
    replicas: tuple[tuple[Replica, ...], ...]
    """Of each shard, in the order of the layers."""
