"""Many machines: Ray places a model's shards, finds them, and brings them back.

Ray does no more than that.  Hidden states travel between shards and clients as always, over the wire of
`hotkv_trio.serve`.  Ray is an extra, ``ray``, and is imported when it is first needed.
"""

from hotkv_trio.llama._planning import PlannedShard as PlannedShard
from hotkv_trio.llama._planning import ShardPlan as ShardPlan
from hotkv_trio.llama._planning import plan_shards as plan_shards
from hotkv_trio.ray._deploy import deploy as deploy
from hotkv_trio.ray._deploy import down as down
from hotkv_trio.ray._deploy import drain as drain
from hotkv_trio.ray._deploy import scale as scale
from hotkv_trio.ray._discover import discover as discover
from hotkv_trio.ray._discover import status as status
from hotkv_trio.ray._errors import DeploymentFailed as DeploymentFailed
from hotkv_trio.ray._errors import DeploymentUnknown as DeploymentUnknown
from hotkv_trio.ray._names import ReplicaId as ReplicaId
from hotkv_trio.ray._shards import DeployedShard as DeployedShard
from hotkv_trio.ray._shards import deployed_shards as deployed_shards
from hotkv_trio.ray._spec import Deployment as Deployment
from hotkv_trio.ray._spec import Figures as Figures
from hotkv_trio.ray._spec import Place as Place
from hotkv_trio.ray._spec import Replica as Replica
from hotkv_trio.ray._spec import ReplicaState as ReplicaState
