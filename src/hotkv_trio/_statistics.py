"""What the runtime and its sessions tell about themselves: frozen views of a moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from hotkv_trio._keys import SessionKey


@attrs.frozen(kw_only=True)
class SessionStatistics:
    """A moment's view of a session."""

    key: SessionKey
    state: str
    """``waiting`` (for a slot), ``idle``, ``busy``, ``cold`` or ``ended``."""
    length: int
    """Tokens in its KV."""
    hot: bool
    """Whether it holds a slot."""
    pinned: bool
    """Whether it is neither evicted nor expires."""
    operations: int
    """Operations running or waiting for their turn."""
    tokens_appended: int
    """Tokens appended since it was opened, also those cut off or lost since."""
    idle_since: float | None
    """Clock time in seconds since which it is idle and could be evicted; None if it could not."""


@attrs.frozen(kw_only=True)
class RuntimeStatistics:
    """A moment's view of a runtime.  The counters count from its start."""

    sessions: int
    """Sessions that are open, hot or cold."""
    hot: int
    """Sessions that hold a slot."""
    waiting: int
    """Claims that wait for bytes, in FIFO order."""
    slots: int
    """All slots: free + lent + quarantined."""
    free_slots: int
    lent_slots: int
    clearing_slots: int
    """Of the lent ones, those being emptied after their session ended or went cold."""
    quarantined_slots: int
    """Slots that could not be proven clean: not lent, and tried again from time to time."""
    total_bytes: int
    """The KV byte budget."""
    borrowed_bytes: int
    tombstones: int
    """Ids remembered without a live session."""
    native_calls: int
    moves: int
    """Times that a session's KV was moved to another slot, so that working sessions' slots are consecutive."""
    tokens_prefilled: int
    tokens_decoded: int
    opened: int
    """Sessions admitted."""
    released: int
    """Sessions that ended with their scope or were released."""
    evicted: int
    """Times that a session lost its slot because room was needed."""
    expired: int
    """Times that a session lost its slot because it was idle for too long."""
    superseded: int
    """Sessions that a newer epoch replaced."""
    failed: int
    """Times that a session lost its slot because the engine failed or could not cut it back."""
