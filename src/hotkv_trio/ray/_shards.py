"""A deployment as what a route is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import attrs

from hotkv_trio.ray._discover import discover, discover_shard
from hotkv_trio.ray._errors import DeploymentFailed, DeploymentUnknown
from hotkv_trio.ray._replicas import ReplicaHop
from hotkv_trio.route import Hop, ShardAddress
from hotkv_trio.serve import ConnectionLost

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    import trio

    from hotkv_trio.serve._tensors import HiddenDtype


@final
@attrs.frozen(kw_only=True)
class DeployedShard:
    """One shard of a deployment, wherever Ray has it; give all of them, in order, to `hotkv_trio.route.open_route`.

    It is looked up anew when a session needs it: one that was moved is found, and the session's history replayed there.
    """

    deployment: str
    shard: int
    dtype: HiddenDtype = "float32"
    ssl_context: ssl.SSLContext | None = None

    def open_hop(self, nursery: trio.Nursery) -> Hop:
        """Return the hop, whose connections live in the nursery."""
        return ReplicaHop(f"shard {self.shard} of {self.deployment}", self._find, nursery)

    async def _find(self) -> Sequence[ShardAddress]:
        try:
            found = await discover_shard(self.deployment, self.shard)
        except (DeploymentUnknown, DeploymentFailed) as error:
            raise ConnectionLost(str(error)) from None
        if self.shard >= len(found.replicas):
            raise ConnectionLost(f"{self.deployment} was deployed anew, without a shard {self.shard}")
        return [
            ShardAddress(
                where=replica.where,
                token=found.token,
                dtype=self.dtype,
                ssl_context=self.ssl_context,
                insecure=found.insecure,
            )
            for replica in found.replicas[self.shard]
            if replica.state == "serving" and replica.where is not None
        ]


async def deployed_shards(
    name: str,
    *,
    dtype: HiddenDtype = "float32",
    ssl_context: ssl.SSLContext | None = None,
    address: str | None = None,
) -> list[DeployedShard]:
    """Return the shards of a deployment, for a route that follows them.

    ``async with open_route(await deployed_shards("smol")) as route:`` is all that a client needs.

    Args:
        name: of the deployment.
        dtype: what hidden states shall travel as.
        ssl_context: for shards that were deployed with a certificate.
        address: of the Ray cluster, if this process has not joined it yet; None: the one that this machine is part of.

    Raises:
        DeploymentUnknown: there is none of this name.
        InvalidInput: the name is none, or Ray is not installed.
        OSError: there is no cluster.
    """
    found = await discover(name, address=address)
    return [
        DeployedShard(deployment=name, shard=shard, dtype=dtype, ssl_context=ssl_context)
        for shard in range(len(found.replicas))
    ]
