"""Refusals and failures that only exist between two processes, each with a stable ``code``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from hotkv_trio._errors import HotKVError


@attrs.frozen(slots=False, eq=False)
class ProtocolError(HotKVError):
    """The peer sent what the protocol does not allow; the connection is of no use any more."""

    code: ClassVar[str] = "protocol_error"
    what: str
    """What was wrong, and what would be right."""

    def __str__(self) -> str:
        """Say what was wrong."""
        return f"protocol error: {self.what}"


@attrs.frozen(slots=False, eq=False)
class Unauthorised(HotKVError):
    """The token is missing or wrong."""

    code: ClassVar[str] = "unauthorised"

    def __str__(self) -> str:
        """Say no more than that."""
        return "unauthorised: this server needs a valid token"


@attrs.frozen(slots=False, eq=False)
class LimitExceeded(HotKVError):
    """A limit of this connection was reached; the request was not begun."""

    code: ClassVar[str] = "limit_exceeded"
    what: str
    """What there was too much of."""
    limit: int

    def __str__(self) -> str:
        """Say which limit."""
        return f"limit exceeded: {self.what}, at most {self.limit}"


@attrs.frozen(slots=False, eq=False)
class ShardDraining(HotKVError):
    """The server is about to stop: it finishes what it has begun, and begins nothing."""

    code: ClassVar[str] = "shard_draining"

    def __str__(self) -> str:
        """Say so."""
        return "the shard server is draining"


@attrs.frozen(slots=False, eq=False)
class ConnectionLost(HotKVError):
    """The connection broke or was closed: whether a call that was under way took effect is not known."""

    code: ClassVar[str] = "connection_lost"
    what: str

    def __str__(self) -> str:
        """Say how."""
        return f"connection lost: {self.what}"
