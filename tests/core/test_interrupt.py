"""KeyboardInterrupt at any line of the core: the run ends with it, nothing hangs, and everything is given back."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import hotkv_trio
from hotkv_trio import CacheMiss, KVLimiter, Runtime, SessionKey, StaleEpoch, open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor
from tests.core._rig import SLOT, key, native_failure

if TYPE_CHECKING:
    from collections.abc import Generator

CORE = str(Path(hotkv_trio.__file__).parent / "_")


class Interrupter:
    """Sends SIGINT before the n-th line that the core executes; 0: only counts them."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.lines = 0
        self.place = "nowhere"

    @contextmanager
    def tracing(self) -> Generator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, event: str, arg: object) -> Any:
        return self._trace if frame.f_code.co_filename.startswith(CORE) else None

    def _trace(self, frame: Any, event: str, arg: object) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return self._trace


class Scenario:
    """Something of everything: waiting, evicting, superseding, failing, cancelling, closing."""

    def __init__(self) -> None:
        self.engine = FakeEngine(n_slots=2)
        self.runtime: Runtime | None = None
        self.limiter: KVLimiter | None = None

    async def main(self) -> None:
        async with open_runtime(self.engine, executor=InlineExecutor(), prefill_chunk=3) as runtime:
            self.runtime = runtime
            self.limiter = runtime.limiter
            kept = await runtime.start_session(key("kept"))
            await kept.prefill([1, 2, 3, 4, 5])
            async with runtime.open_session(key("a", 1)) as session:
                session.nursery.start_soon(trio.sleep_forever)
                await session.prefill([1] * 8)
                await session.truncate(3)
                scope = trio.CancelScope()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.opens_and_waits, runtime, key("b"))
                    await session.prefill([1] * 8)
                    nursery.start_soon(self.cancels, scope)
                    with scope:
                        await session.prefill([2] * 20)
                self.engine.fail("process", native_failure())
                with pytest.raises(hotkv_trio.HotKVError):
                    await session.decode(3)
                async with runtime.open_session(key("a", 2)):
                    with pytest.raises(StaleEpoch):
                        await session.decode(3)
            with pytest.raises(CacheMiss):
                await kept.decode(1)
            runtime.limiter.total_bytes = SLOT
            await runtime.limiter.acquire(1)
            with trio.move_on_after(1):
                await runtime.start_session(key("c"))
            runtime.limiter.release()
            await runtime.release(key("b"))

    async def opens_and_waits(self, runtime: Runtime, which: SessionKey) -> None:
        async with runtime.open_session(which) as session:
            await session.prefill([3, 4])
            await session.decode(5)

    async def cancels(self, scope: trio.CancelScope) -> None:
        for _ in range(12):
            await trio.lowlevel.checkpoint()
        scope.cancel()

    def run(self, interrupter: Interrupter) -> None:
        with interrupter.tracing():
            trio.run(self.main, clock=MockClock(autojump_threshold=0))

    def check(self) -> None:
        assert self.engine.closed or not self.engine.opened
        assert self.engine.violations == []
        if self.runtime is not None:
            self.runtime.check_integrity()
            assert self.runtime.statistics().sessions == 0
            # What the body itself had borrowed is its own to give back.
            assert self.runtime.limiter.borrowed_bytes in {0, 1}
            assert self.runtime.statistics().free_slots == 2


def count_lines() -> int:
    counter = Interrupter()
    (scenario := Scenario()).run(counter)
    scenario.check()
    return counter.lines


def sweep(first: int, stride: int) -> None:
    places = set()
    for at in range(first, count_lines(), stride):
        interrupter = Interrupter(at)
        scenario = Scenario()
        try:
            scenario.run(interrupter)
        except BaseException as exc:  # noqa: ASYNC103 - no task
            group = exc if isinstance(exc, BaseExceptionGroup) else BaseExceptionGroup("one", [exc])
            others = group.split(KeyboardInterrupt)[1]
            if others is not None and others.split(Exception)[1] is not None:
                raise
            interrupted = group.split(KeyboardInterrupt)[0] is not None
        else:
            # trio's schedule is random: this run may have been shorter.
            interrupted = interrupter.lines < at
        assert interrupted, f"lost at {interrupter.place}"
        try:
            scenario.check()
        except AssertionError as exc:
            exc.add_note(f"interrupted at {interrupter.place}")
            raise
        places.add(interrupter.place)
    assert len(places) > 30


def test_an_interrupt_at_some_lines_of_the_core_loses_nothing() -> None:
    sweep(1, stride=29)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 7))
def test_an_interrupt_at_every_line_of_the_core_loses_nothing(first: int) -> None:
    sweep(first, stride=6)


@pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
def test_an_interrupt_in_a_native_call_does_not_end_the_native_side(threaded: bool) -> None:
    """It is raised in the main task, after the call: never in the engine, which would be an end of everything."""

    class Interrupted(FakeEngine):
        def process(self, group: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return super().process(group)

    engine = Interrupted()
    reached: list[str] = []

    async def main() -> None:
        async with open_runtime(engine, executor=None if threaded else InlineExecutor()) as runtime:
            session = await runtime.start_session(key("a"))
            try:
                await session.prefill([1, 2])
                await wait_all_tasks_blocked()
            finally:
                reached.append(f"{len(engine.calls)} call")

    with pytest.raises(KeyboardInterrupt):
        trio.run(main)
    assert reached == ["1 call"]
    assert engine.closed
    assert engine.violations == []
