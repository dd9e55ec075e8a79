"""Suite `cancel`: how long a cancelled session's bytes are still held, under load."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np
import trio

from hotkv_trio._cli._recorder import Recorder
from hotkv_trio._cli.bench._findings import Bar, Findings
from hotkv_trio._cli.bench._setting import CHUNK, START, Bench
from hotkv_trio._errors import EngineFailed
from hotkv_trio._keys import SessionKey
from hotkv_trio._runtime import open_runtime
from hotkv_trio.llama import LlamaEngine

if TYPE_CHECKING:
    from hotkv_trio._cli._recorder import NativeCall
    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Setting
    from hotkv_trio._inputs import Tokens
    from hotkv_trio._session import Session

_NEIGHBOURS = 8
_ROOM = 512


async def measure_cancel(setting: Setting) -> Findings:
    """Cancel a session at any moment, again and again, while others decode; measure until its bytes are back."""
    sizes = setting.sizes
    setting.progress.begin("cancel: from cancel() to bytes back", 2 * sizes.cancels)
    engine = LlamaEngine(setting.model, n_slots=_NEIGHBOURS + 1, n_ctx=_ROOM, threads=setting.threads)
    times = _Times()
    rows: list[dict[str, Cell]] = []
    bars: list[Bar] = []
    async with (
        open_runtime(Recorder(engine, times.note), idle_ttl=None, prefill_chunk=CHUNK) as runtime,
        trio.open_nursery() as nursery,
    ):
        bench = Bench(engine, runtime)
        for session in await bench.sessions(_NEIGHBOURS):
            nursery.start_soon(_decode_for_ever, session)
        load = runtime.limiter.borrowed_bytes
        for doing in ("decoding", "prefilling"):
            times.forget()
            chance = random.Random(0)  # ruff: ignore[suspicious-non-cryptographic-random-usage]
            prompt = bench.tokens(_ROOM - START, seed=1)
            took = []
            for i in range(sizes.cancels):
                key = SessionKey(f"{doing}-{i}", 0)
                took.append(await _cancel_one(bench, key, prompt if doing == "prefilling" else None, times, chance))
                if runtime.limiter.borrowed_bytes != load:
                    raise EngineFailed(None, "a cancelled session's bytes were not back when its scope had ended")
                setting.progress.advance()
            # What a cancelled session may have to wait for is the native call that names it.
            step = times.median(decodes=doing == "decoding")
            p50, p99 = (float(x) for x in np.percentile(took, (50, 99)))
            rows.append({
                "cancelled while": doing,
                "step ms": step * 1e3,
                "p50 ms": p50 * 1e3,
                "p99 ms": p99 * 1e3,
                "p50 / step": p50 / step,
                "p99 / step": p99 / step,
                "n": len(took),
            })
            bars.append(Bar.at_most(f"{doing}: p99 in engine steps", p99 / step, 1.2))
        nursery.cancel_scope.cancel(reason="the suite is over")
    return Findings(
        suite="cancel",
        title=f"From cancel() to bytes back, beside {_NEIGHBOURS} sessions that decode",
        caption="At random moments. A step is the native call that a session may be in: one token of each session, or a"
        f" chunk of {CHUNK} of its own.",
        rows=rows,
        bars=bars,
    )


async def _cancel_one(
    bench: Bench, key: SessionKey, prompt: Tokens | None, times: _Times, chance: random.Random
) -> float:
    cancelled_at = 0.0
    step = times.median(decodes=prompt is None)

    async def cancel_soon(session: Session) -> None:
        nonlocal cancelled_at
        # Any moment of a few steps, the first of which is under way.
        await trio.sleep(chance.uniform(0, 3 * step))
        cancelled_at = time.perf_counter()
        session.cancel("measured")

    async with bench.runtime.open_session(key) as session:
        if prompt is None:
            await session.prefill(bench.tokens(4, seed=0))
        session.nursery.start_soon(cancel_soon, session)
        if prompt is None:
            await _decode_for_ever(session)
        else:
            await _prefill_for_ever(session, prompt)
    return time.perf_counter() - cancelled_at


async def _decode_for_ever(session: Session) -> None:
    token = 0
    while True:
        if session.length == _ROOM:
            await session.truncate(START)
        token = int((await session.decode(token)).output[0].argmax())


async def _prefill_for_ever(session: Session, prompt: Tokens) -> None:
    while True:
        await session.prefill(prompt, output="none")
        await session.truncate(0)


class _Times:
    """How long native calls take, of those that decode and of those that prefill."""

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}
        self._last: dict[bool, float] = {True: 0.0, False: 0.0}

    def note(self, call: NativeCall) -> None:
        self._seconds[call.is_decode].append(call.seconds)

    def forget(self) -> None:
        """Forget all times, but remember about how long each kind of call takes."""
        self._last = {kind: self.median(decodes=kind) for kind in self._seconds}
        self._seconds = {True: [], False: []}

    def median(self, *, decodes: bool) -> float:
        """Return the median of calls that decode, or of those that prefill."""
        seconds = self._seconds[decodes]
        return float(np.median(seconds)) if seconds else self._last[decodes]
