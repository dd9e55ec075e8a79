"""A route: a model's layers on several shards, one after another, as one thing that generates tokens.

Shards are local runtimes or servers; a route's sessions keep their own history, and survive the loss of any shard.
"""

from hotkv_trio.route._hop import Hop as Hop
from hotkv_trio.route._hop import HopSession as HopSession
from hotkv_trio.route._hop import HopSource as HopSource
from hotkv_trio.route._hop import ShardAddress as ShardAddress
from hotkv_trio.route._route import Route as Route
from hotkv_trio.route._route import open_route as open_route
from hotkv_trio.route._sampling import Sampler as Sampler
from hotkv_trio.route._sampling import greedy as greedy
from hotkv_trio.route._session import Replay as Replay
from hotkv_trio.route._session import RouteSession as RouteSession
