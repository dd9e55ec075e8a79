"""What one connection may ask of a server."""

from __future__ import annotations

from typing import Any

import attrs

from hotkv_trio._errors import InvalidInput
from hotkv_trio._inputs import check_count

MAX_HELLO = 65_536
"""Bytes of a frame from a peer that has not been welcomed yet."""
MAX_REQUEST_HEADER = 65_536
"""Bytes of a request's header."""


def _check_count(_instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    check_count(attribute.name, value)


def _check_positive(_instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise InvalidInput(f"{attribute.name} must be a number > 0, not {value!r:.200}")


@attrs.frozen(kw_only=True)
class Limits:
    """Limits of a `ShardServer`.

    Raises:
        InvalidInput: one is not a number > 0, or not a whole one where things are counted, or the queue is smaller
            than a frame.
    """

    max_frame: int = attrs.field(default=64 * 2**20, validator=_check_count)
    """Bytes of a frame, in either direction."""
    max_requests: int = attrs.field(default=256, validator=_check_count)
    """Requests of one connection that are not answered yet."""
    max_queued_bytes: int = attrs.field(default=128 * 2**20, validator=_check_count)
    """Bytes of those requests."""
    max_sessions: int = attrs.field(default=256, validator=_check_count)
    """Sessions of one connection that end with it."""
    max_connections: int = attrs.field(default=1024, validator=_check_count)
    """Connections of one server; one more is closed at once."""
    hello_timeout: float = attrs.field(default=10.0, validator=_check_positive)
    """Seconds from the accept until a valid hello, TLS included."""
    silence_timeout: float = attrs.field(default=60.0, validator=_check_positive)
    """Seconds without a byte from a peer after which it counts as gone; clients ping several times in that time."""
    write_timeout: float = attrs.field(default=30.0, validator=_check_positive)
    """Seconds without progress after which a peer that does not read is disconnected."""

    def __attrs_post_init__(self) -> None:
        """Refuse a queue that could never take a frame."""
        if self.max_queued_bytes < self.max_frame:
            raise InvalidInput(
                f"max_queued_bytes must be at least max_frame ({self.max_frame}), not {self.max_queued_bytes}"
            )
