"""What must happen in a program: a small pure model of sessions, against which every outcome is judged.

The model does not foretell the schedule.  It knows what each session has appended and which epochs were seen, and says
of each outcome of an operation whether the contract allows it, given what was asked for and what happened meanwhile.
Why a session went cold is judged by the observer in `_run_program`, at the step at which it happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from hotkv_trio._errors import (
    BudgetExceeded,
    CacheMiss,
    ContextFull,
    EngineFailed,
    HotKVError,
    InvalidInput,
    MissReason,
    PositionMismatch,
    SessionExists,
    StaleEpoch,
    TruncateUnsupported,
)

if TYPE_CHECKING:
    from hotkv_trio._engine import Memory, Output
    from hotkv_trio._keys import SessionKey


@attrs.frozen
class Appended:
    """An append that succeeded."""

    tokens: tuple[int, ...]
    output: Output = "last"


@attrs.frozen
class Cut:
    """A truncation that succeeded."""

    length: int


@attrs.define(eq=False)
class SessionModel:
    """One session, as its clients know it."""

    key: SessionKey
    events: list[Appended | Cut] = attrs.field(factory=list)
    """What is in its KV, in the order in which it came there."""
    history: list[int] = attrs.field(factory=list)
    """The tokens in its KV."""
    had_kv: bool = False
    lost: bool = False
    """It has gone cold since it was appended to: only a start at 0 may follow."""
    ending: bool = False
    """Somebody asked for its end."""
    ended: bool = False
    """Its end was asked for, and the call has returned."""
    cold: set[MissReason] = attrs.field(factory=set)
    """Why it has gone cold, whenever it did."""
    colds: int = 0
    """How often it has gone cold."""
    in_flight: int = 0
    """Operations that have not returned."""

    def append(self, tokens: tuple[int, ...], output: Output) -> None:
        """Note a success."""
        self.had_kv, self.lost = True, False
        self.history.extend(tokens)
        self.events.append(Appended(tokens, output))

    def cut(self, length: int) -> None:
        """Note a success."""
        if length < len(self.history):
            del self.history[length:]
            self.events.append(Cut(length))

    def go_cold(self, reason: MissReason) -> None:
        """Note that its KV is gone."""
        self.cold.add(reason)
        self.lost = self.had_kv
        self.colds += 1
        self.history.clear()
        self.events.clear()


@attrs.define
class Model:
    """All sessions of a program."""

    n_ctx: int
    memory: Memory
    newest: dict[str, int] = attrs.field(factory=dict)
    """The newest epoch seen of each name."""
    failures: int = 0
    """Failures that the engine was told to have."""
    smallest_budget: int = 1
    """The fewest slots that the budget ever had room for."""

    def is_stale(self, key: SessionKey) -> bool:
        """Return whether a newer epoch was seen."""
        return self.newest.get(key.route_session_id, -1) > key.route_epoch

    def judge_append(
        self, session: SessionModel, n: int, at: int | None, outcome: tuple[int, int] | Exception
    ) -> str | None:
        """Return what is wrong with the outcome of an append, (position, length) or an error; None if nothing is."""
        held = len(session.history)
        if isinstance(outcome, tuple):
            position, length = outcome
            wrong = {
                "though a newer epoch had been seen": self.is_stale(session.key),
                "though the session had ended": session.ended,
                f"at {position}, though the session held {held} tokens": position != held,
                f"to length {length}": length != position + n,
                f"though at={at}": at is not None and at != position,
                "past the end of its slot": length > self.n_ctx,
                "though the session had gone cold and the call did not say at=0": session.lost and at is None,
            }
            return next((f"appended {what}" for what, is_so in wrong.items() if is_so), None)
        if isinstance(outcome, PositionMismatch):
            fits = outcome.at == at and outcome.length == held > outcome.at
        elif isinstance(outcome, ContextFull):
            fits = outcome.length == held and held + n > self.n_ctx
        elif isinstance(outcome, CacheMiss) and outcome.reason is MissReason.BEYOND:
            fits = at is not None and at > held == outcome.resume_at
        elif isinstance(outcome, BudgetExceeded):
            fits = self.smallest_budget < 1 and not held
        else:
            fits = self._allows(session, outcome)
        return None if fits else f"refused without cause (it held {held} tokens, at={at}): {outcome!r}"

    def judge_truncate(self, session: SessionModel, length: int, outcome: Exception | None) -> str | None:
        """Return what is wrong with the outcome of a truncation; None if nothing is."""
        held = len(session.history)
        if outcome is None:
            if self.is_stale(session.key) or session.ended:
                return "truncated a session that had ended"
            return None if length <= held else f"truncated {held} tokens to {length}"
        if isinstance(outcome, InvalidInput):
            fits = length > held
        elif isinstance(outcome, TruncateUnsupported):
            fits = outcome.length == length and self.memory != "attention"
        else:
            fits = self._allows(session, outcome)
        return None if fits else f"refused without cause (it held {held} tokens): {outcome!r}"

    def judge_open(self, key: SessionKey, *, wait: bool, live: bool, free: bool, outcome: Exception) -> str | None:
        """Return what is wrong with a refusal to open; None if nothing is.

        Args:
            key: of the session.
            wait: whether the call could wait.
            live: whether a session of this key was live when the call was made.
            free: whether it could have been had at once.
            outcome: the refusal.
        """
        if isinstance(outcome, StaleEpoch):
            fits = self.is_stale(key) and outcome.key == key
        elif isinstance(outcome, SessionExists):
            fits = live
        elif isinstance(outcome, BudgetExceeded):
            fits = self.smallest_budget < 1
        elif isinstance(outcome, CacheMiss):
            fits = outcome.reason is MissReason.RELEASED
        else:
            fits = not isinstance(outcome, HotKVError) and not wait and not free
        return None if fits else f"not opened without cause: {outcome!r}"

    def _allows(self, session: SessionModel, outcome: Exception) -> bool:
        if isinstance(outcome, StaleEpoch):
            return self.is_stale(session.key) and outcome.key == session.key
        if isinstance(outcome, EngineFailed):
            return self.failures > 0
        if isinstance(outcome, CacheMiss) and outcome.key == session.key and not outcome.resume_at:
            return outcome.reason in session.cold or (outcome.reason is MissReason.RELEASED and session.ending)
        return False
