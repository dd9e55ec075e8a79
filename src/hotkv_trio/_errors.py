"""Every refusal and failure, each with a stable ``code``.

A *refusal* is raised where it is found, before anything is queued, and changes nothing.  A *failure* says what
became of the session.  ``code`` is what the wire and the logs carry; it never changes once released.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotkv_trio._keys import SessionKey


class MissReason(enum.StrEnum):
    """Why the KV that a call counts on is not there."""

    UNKNOWN = "unknown"
    """No session of this key was seen, or it was seen so long ago that its tombstone is gone."""
    RELEASED = "released"
    """The session ended: its scope was left, it was released, or the runtime is closing."""
    EXPIRED = "expired"
    """The session was idle for longer than the idle TTL."""
    EVICTED = "evicted"
    """The session was the least recently used idle one when room was needed."""
    FAILED = "failed"
    """The engine failed, and what the session held could not be kept."""
    BEYOND = "beyond"
    """The call's position lies beyond what is cached; the cached prefix is intact."""


@attrs.frozen(slots=False, eq=False)
class HotKVError(Exception):
    """The base of all errors of this library."""

    code: ClassVar[str] = "error"

    def __str__(self) -> str:
        """Say what was wrong, in words."""
        return self.code


@attrs.frozen(slots=False, eq=False)
class CacheMiss(HotKVError):
    """The KV that the call counts on is not cached: start again at ``resume_at``."""

    code: ClassVar[str] = "cache_miss"
    key: SessionKey
    reason: MissReason
    resume_at: int = 0
    """The first position to append again (tokens)."""

    def __str__(self) -> str:
        """Say which session missed, why, and where to start again."""
        return f"cache miss for {self.key}: {self.reason}; start again at position {self.resume_at}"


@attrs.frozen(slots=False, eq=False)
class StaleEpoch(HotKVError):
    """A newer epoch of this route session id was seen; this one is fenced off for good."""

    code: ClassVar[str] = "stale_epoch"
    key: SessionKey
    current: int
    """The newest epoch seen for the id."""

    def __str__(self) -> str:
        """Say which epoch is stale and which is current."""
        return f"stale epoch for {self.key}: the current epoch is {self.current}"


@attrs.frozen(slots=False, eq=False)
class RecipeMismatch(HotKVError):
    """The client's cache recipe differs from the runtime's."""

    code: ClassVar[str] = "recipe_mismatch"
    fields: Mapping[str, tuple[Any, Any]]
    """Name of each differing field -> (the runtime's value, the client's value)."""

    def __str__(self) -> str:
        """Name each differing field with both values."""
        said = "; ".join(f"{name}: ours {ours!r}, yours {theirs!r}" for name, (ours, theirs) in self.fields.items())
        return f"cache recipe mismatch: {said}"


@attrs.frozen(slots=False, eq=False)
class PositionMismatch(HotKVError):
    """``at`` lies inside what is cached already; truncate first, or append at ``length``."""

    code: ClassVar[str] = "position_mismatch"
    at: int
    length: int

    def __str__(self) -> str:
        """Say both positions."""
        return f"position mismatch: at={self.at}, but the session's length is {self.length}"


@attrs.frozen(slots=False, eq=False)
class BudgetExceeded(HotKVError):
    """The request is larger than the whole budget: it can never be met."""

    code: ClassVar[str] = "budget_exceeded"
    requested: int
    """Bytes asked for."""
    total: int
    """Bytes of the whole budget."""

    def __str__(self) -> str:
        """Say what was asked for and what there is."""
        return f"budget exceeded: {self.requested} bytes asked for, the whole budget is {self.total}"


@attrs.frozen(slots=False, eq=False)
class ContextFull(HotKVError):
    """The append passes the end of the session's slot."""

    code: ClassVar[str] = "context_full"
    length: int
    """Tokens cached."""
    limit: int
    """Tokens that fit."""
    appended: int = 1
    """Tokens that the call wanted to append."""

    def __str__(self) -> str:
        """Say what is cached, what was to come, and what fits."""
        return f"context full: {self.length} tokens cached + {self.appended} to append > {self.limit}"


@attrs.frozen(slots=False, eq=False)
class InvalidInput(HotKVError):
    """A value was refused before it could reach the engine."""

    code: ClassVar[str] = "invalid_input"
    what: str
    """What was wrong, and what would be right."""

    def __str__(self) -> str:
        """Say what was wrong."""
        return f"invalid input: {self.what}"


@attrs.frozen(slots=False, eq=False)
class TruncateUnsupported(HotKVError):
    """This kind of memory cannot keep the prefix asked for; the session went cold."""

    code: ClassVar[str] = "truncate_unsupported"
    key: SessionKey
    length: int
    """The length asked for."""
    memory: str
    """The kind of memory."""

    def __str__(self) -> str:
        """Say what could not be kept."""
        return f"{self.memory} memory cannot be cut back to {self.length} tokens; {self.key} is cold"


@attrs.frozen(slots=False, eq=False)
class SessionExists(HotKVError):
    """The same key is open already; that session is untouched."""

    code: ClassVar[str] = "session_exists"
    key: SessionKey

    def __str__(self) -> str:
        """Say which."""
        return f"{self.key} is open already"


@attrs.frozen(slots=False, eq=False)
class EngineFailed(HotKVError):
    """The engine refused or failed a native call; neighbours are untouched."""

    code: ClassVar[str] = "engine_failed"
    native_code: int | None
    """The native return code; None when an exception came instead of one."""
    what: str

    def __str__(self) -> str:
        """Say what failed, and with which code."""
        said = "" if self.native_code is None else f" (native code {self.native_code})"
        return f"engine failed: {self.what}{said}"


@attrs.frozen(slots=False, eq=False)
class RuntimeClosed(HotKVError):
    """The runtime has ended, or its owner thread died."""

    code: ClassVar[str] = "runtime_closed"
    what: str = "the runtime has ended"

    def __str__(self) -> str:
        """Say why."""
        return f"runtime closed: {self.what}"
