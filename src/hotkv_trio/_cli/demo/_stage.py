"""Stage: one runtime on which parts are played, and what is noted of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import attrs

from hotkv_trio._cli._recorder import Recorder
from hotkv_trio._cli.demo._facts import ModeFacts
from hotkv_trio._runtime import Runtime, open_runtime

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from hotkv_trio._cli._recorder import NativeCall
    from hotkv_trio._cli.demo._prompts import Prompt
    from hotkv_trio._engine import Engine

PREFILL_CHUNK = 64
"""Tokens: a long prompt takes several native calls, and attention kernels another path in those that are full."""


class Watcher(Protocol):
    """Is told how far the demo is."""

    def begin(self, title: str, n_tokens: int, /) -> None:
        """Note that something begins in which about ``n_tokens`` will be appended."""
        ...

    def advance(self, n_tokens: int, /) -> None:
        """Note that tokens were appended.  Called in the engine's thread."""
        ...


@attrs.frozen(eq=False)
class Setting:
    """What the demo is run on."""

    model: str
    """Its name."""
    make_engine: Callable[[], Engine]
    """Each engine has a slot for each prompt, and room in each slot for any of them and its decodes."""
    prompts: Sequence[Prompt]
    """One a session."""
    n_decodes: int
    to_text: Callable[[Sequence[int]], str] | None
    """Tokens to text; None: the model has no vocabulary."""


@attrs.define(eq=False)
class Stage:
    """An open runtime; ``facts`` once it is closed."""

    runtime: Runtime
    recorder: Recorder
    calls: list[NativeCall]
    """Every native call so far, oldest first."""
    before: int
    peak: int
    after: int = 0

    def facts(self, calls: Sequence[NativeCall]) -> ModeFacts:
        """Return what was found, with the speed of these calls."""
        return ModeFacts(
            prefill_tokens_per_second=_speed([call for call in calls if not call.is_decode]),
            decode_tokens_per_second=_speed([call for call in calls if call.is_decode]),
            native_calls=len(calls),
            kv_bytes_before=self.before,
            kv_bytes_peak=self.peak,
            kv_bytes_after=self.after,
            kv_bytes_budget=self.runtime.limiter.total_bytes,
            tokens_left=sum(self.recorder.left),
        )


@asynccontextmanager
async def open_stage(setting: Setting, watcher: Watcher, *, exact: bool) -> AsyncGenerator[Stage]:
    """Open a runtime on an engine of its own, for as long as the ``async with`` lasts."""
    stage: Stage | None = None
    calls: list[NativeCall] = []

    def note(call: NativeCall) -> None:
        calls.append(call)
        if stage is not None:
            stage.peak = max(stage.peak, stage.runtime.limiter.borrowed_bytes)
        watcher.advance(call.n_tokens)

    recorder = Recorder(setting.make_engine(), note)
    async with open_runtime(recorder, exact=exact, prefill_chunk=PREFILL_CHUNK, idle_ttl=None) as runtime:
        borrowed = runtime.limiter.borrowed_bytes
        stage = Stage(runtime, recorder, calls, before=borrowed, peak=borrowed)
        yield stage  # ruff: ignore[fallible-context-manager] - after an error there is nothing to note
        stage.after = runtime.limiter.borrowed_bytes


def _speed(calls: Sequence[NativeCall]) -> float:
    seconds = sum(call.seconds for call in calls)
    return sum(call.n_tokens for call in calls) / seconds if seconds else 0.0
