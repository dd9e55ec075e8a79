"""Programs as data: what many clients do with one runtime, under one schedule, as values to paste into a test.

A program has a few *clients*, tasks that run their operations one after the other; a client has at most one session at
a time, and ends it at the end.  The names of sessions are few, so that clients get into each other's way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

if TYPE_CHECKING:
    from hotkv_trio._engine import Memory, Output
    from hotkv_trio.testing._fake_engine import Method


class _Operation:
    """Shows what differs from the defaults."""

    __slots__ = ()

    def __repr__(self) -> str:
        fields: Any = attrs.fields(type(self))  # type: ignore[arg-type]
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"


@attrs.frozen(repr=False)
class Open(_Operation):
    """Open a session, after ending the one that the client has."""

    name: str = "a"
    epoch: int = 0
    how: Literal["scope", "serve", "start"] = "scope"
    """``open_session``, ``serve_session`` in the client's nursery, or ``start_session``."""
    pinned: bool = False
    wait: bool = True
    cancel_after: int | None = None
    """Cancel the call after this many checkpoints of another task, if it has not returned by then."""
    hang_up: int | None = None
    """Cancel all that the client does with the session after so many checkpoints since it was opened."""


@attrs.frozen(repr=False)
class Prefill(_Operation):
    """Append tokens."""

    n: int = 1
    at: int | None = None
    """``at`` of the call, counted from the session's length; None: none."""
    output: Output = "last"
    of: int | None = None
    """Whose session: the number of a client; None: one's own.  Not done by a client whose own session is pinned."""
    cancel_after: int | None = None


@attrs.frozen(repr=False)
class Decode(_Operation):
    """Append a token."""

    at: int | None = None
    of: int | None = None
    cancel_after: int | None = None


@attrs.frozen(repr=False)
class Restart(_Operation):
    """Append tokens at position 0, as a client does after a miss."""

    n: int = 1
    cancel_after: int | None = None


@attrs.frozen(repr=False)
class Truncate(_Operation):
    """Cut tokens off the end; a negative number asks for more than there are."""

    drop: int = 1
    of: int | None = None
    cancel_after: int | None = None


@attrs.frozen(repr=False)
class Release(_Operation):
    """Call ``runtime.release``."""

    of: int | None = None
    cancel_after: int | None = None


@attrs.frozen(repr=False)
class Aclose(_Operation):
    """Call ``session.aclose``."""

    of: int | None = None
    cancel_after: int | None = None


@attrs.frozen(repr=False)
class CancelSession(_Operation):
    """Call ``session.cancel``."""

    of: int | None = None


@attrs.frozen(repr=False)
class Close(_Operation):
    """Leave the session's scope; a session that was not opened with one is released."""


@attrs.frozen(repr=False)
class Sleep(_Operation):
    """Let time pass."""

    seconds: float = 1.0


@attrs.frozen(repr=False)
class Pause(_Operation):
    """Let the other tasks run."""

    checkpoints: int = 1


@attrs.frozen(repr=False)
class SetBudget(_Operation):
    """Change the budget to this many slots' bytes."""

    slots: int = 1


@attrs.frozen(repr=False)
class Fail(_Operation):
    """Make the engine's next calls fail."""

    method: Method = "process"
    times: int = 1
    after: int = 0
    """Calls of the method that succeed before."""


@attrs.frozen(repr=False)
class Stall(_Operation):
    """Let no native call end for a while."""

    seconds: float = 1.0


Operation: TypeAlias = (
    Open
    | Prefill
    | Decode
    | Restart
    | Truncate
    | Release
    | Aclose
    | CancelSession
    | Close
    | Sleep
    | Pause
    | SetBudget
    | Fail
    | Stall
)


@attrs.frozen(repr=False)
class Program(_Operation):
    """What many clients do with one runtime."""

    clients: tuple[tuple[Operation, ...], ...] = ()
    tape: tuple[int, ...] = ()
    """The schedule; see `ScheduleTape`."""
    slots: int = 2
    n_ctx: int = 12
    """Tokens that a slot holds."""
    memory: Memory = "attention"
    chunk: int = 2
    """``prefill_chunk``."""
    budget: int | None = None
    """Slots' bytes; None: all."""
    ttl: float | None = None
    exact: bool = False

    def __str__(self) -> str:
        """Write it down as code."""
        lines = ["Program(", "    clients=("]
        for client in self.clients:
            inner = ", ".join(map(repr, client))
            lines.append(f"        ({inner}{',' if len(client) == 1 else ''}),")
        lines.append("    ),")
        for field in attrs.fields(Program)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                lines.append(f"    {field.name}={value!r},")
        return "\n".join([*lines, ")"])
