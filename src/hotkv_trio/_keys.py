"""SessionKey: the pair that names one session's KV.  Every operation takes the pair, none takes the id alone."""

from __future__ import annotations

from typing import Any

import attrs

from hotkv_trio._errors import InvalidInput

MAX_ROUTE_SESSION_ID = 128
"""Characters."""
MAX_ROUTE_EPOCH = 2**63 - 1
"""So that an epoch always fits a signed 64-bit integer on the wire."""


def _check_id(_instance: object, _attribute: object, value: Any) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_ROUTE_SESSION_ID or not value.isprintable():
        raise InvalidInput(
            f"route_session_id must be 1 to {MAX_ROUTE_SESSION_ID} printable characters, not {value!r:.200}"
        )


def _check_epoch(_instance: object, _attribute: object, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ROUTE_EPOCH:
        raise InvalidInput(f"route_epoch must be an integer from 0 to {MAX_ROUTE_EPOCH}, not {value!r:.200}")


@attrs.frozen
class SessionKey:
    """``(route session id, route epoch)``: names one isolated KV sequence.

    Raises:
        InvalidInput: the id is not 1 to 128 printable characters, or the epoch is not an integer >= 0.
    """

    route_session_id: str = attrs.field(validator=_check_id)
    """Opaque text chosen by the client."""
    route_epoch: int = attrs.field(validator=_check_epoch)
    """A higher epoch of the same id replaces the lower one and fences it off."""

    def __str__(self) -> str:
        """Say both parts, as ``id@epoch``."""
        return f"{self.route_session_id}@{self.route_epoch}"
