"""What the demo found out: plain values, which the table and ``--json`` show."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.frozen(kw_only=True)
class SessionFacts:
    """One session."""

    name: str
    prompt_tokens: int
    generated_tokens: int
    """Also those cut off later."""
    prompt: str | None
    """None: the model has no vocabulary."""
    continuation: str | None
    """What it made of the prompt, up to the model's own end."""
    equal_to_solo: bool
    """In exact mode, beside its neighbours and after whatever befell it: every logit is that of its run alone."""
    logits_compared: int
    """Over all its takes."""
    unmoved: bool | None
    """In grouped mode: no bit changed when its neighbours' tokens did; None: it had no neighbours."""
    max_difference_to_solo: float
    """In grouped mode: the largest difference of a logit."""
    same_top_as_solo: float
    """In grouped mode: share of calls after which the best token was the same, 0 to 1."""
    ended: str


@attrs.frozen(kw_only=True)
class ModeFacts:
    """One run of all sessions together, and the bytes over the whole life of its runtime."""

    prefill_tokens_per_second: float
    """In native calls: tokens appended by the time that the calls took."""
    decode_tokens_per_second: float
    native_calls: int
    kv_bytes_before: int
    """Borrowed when no session was open yet."""
    kv_bytes_peak: int
    kv_bytes_after: int
    """Borrowed when the last session had ended."""
    kv_bytes_budget: int
    tokens_left: int
    """Tokens that llama.cpp's sequences still held when the engine was closed."""

    @property
    def clean(self) -> bool:
        """Whether everything was given back."""
        return self.kv_bytes_after == self.kv_bytes_before == 0 and self.tokens_left == 0


@attrs.frozen(kw_only=True)
class Checks:
    """What was expected besides equal logits; every one has to be true."""

    superseded_refused: bool
    """A call of the superseded epoch, and opening it again, raised `StaleEpoch`."""
    evicted_told: bool
    """The next call of the evicted session raised `CacheMiss`, reason ``evicted``."""
    visitor_equal_to_solo: bool
    """The session that the evicted one had to make room for got the logits of a run alone."""
    cancelled_stopped: bool
    """The cancelled session got no further, and its scope ended."""
    same_schedule: bool
    """In grouped mode all runs made the same native calls; else they could not be compared."""
    everything_given_back: bool
    """Bytes are as at the start, and all native sequences empty, in both modes."""


@attrs.frozen(kw_only=True)
class DemoFacts:
    """The whole demo."""

    model: str
    architecture: str
    memory: str
    n_vocab: int
    context_tokens: int
    """That one session's slot holds."""
    sessions: tuple[SessionFacts, ...]
    exact: ModeFacts
    grouped: ModeFacts
    exchanged_runs: int
    """Runs in grouped mode with other neighbours, after the first."""
    truncation_shown: bool
    """False: this kind of memory cannot be cut back."""
    checks: Checks

    @property
    def ok(self) -> bool:
        """Whether all is as it should be."""
        return all(attrs.astuple(self.checks)) and all(
            session.equal_to_solo and session.unmoved is not False for session in self.sessions
        )

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        return {"ok": self.ok} | attrs.asdict(self)
