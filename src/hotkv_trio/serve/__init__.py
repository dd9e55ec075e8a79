"""A shard server and its client: sessions over the network, with the calls and errors of a local runtime.

Of its modules only ``_connection``, ``_server``, ``_client`` and ``_addresses`` do I/O; the protocol is in ``_codec``
and ``_messages``, and specified in ``docs/wire.md``.  `hotkv_trio.serve.metrics` needs an extra and is imported by
itself.
"""

from hotkv_trio.serve._client import RemoteSession as RemoteSession
from hotkv_trio.serve._client import ShardClient as ShardClient
from hotkv_trio.serve._client import open_shard_client as open_shard_client
from hotkv_trio.serve._errors import ConnectionLost as ConnectionLost
from hotkv_trio.serve._errors import LimitExceeded as LimitExceeded
from hotkv_trio.serve._errors import ProtocolError as ProtocolError
from hotkv_trio.serve._errors import ShardDraining as ShardDraining
from hotkv_trio.serve._errors import Unauthorised as Unauthorised
from hotkv_trio.serve._limits import Limits as Limits
from hotkv_trio.serve._logs import JSONFormatter as JSONFormatter
from hotkv_trio.serve._logs import TextFormatter as TextFormatter
from hotkv_trio.serve._messages import SessionView as SessionView
from hotkv_trio.serve._messages import Statistics as Statistics
from hotkv_trio.serve._principals import read_tokens as read_tokens
from hotkv_trio.serve._server import ServerStatistics as ServerStatistics
from hotkv_trio.serve._server import ShardServer as ShardServer
