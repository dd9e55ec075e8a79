"""RuntimeMachine: Hypothesis's rule-based machine for the long-lived API.  Needs ``hypothesis``.

Sessions outlive the calls that start them (``runtime.start_session``), calls are left waiting while others are made,
time stands still between the rules.  The machine drives trio from outside, in guest mode, and lets everything come to
rest after each rule; so what it finds is the order of calls, while `run_program` finds the order of tasks.

Example::

    from hotkv_trio.testing.machine import RuntimeMachine

    TestRuntime = RuntimeMachine.TestCase
"""

from __future__ import annotations

import math
import queue
from functools import partial
from typing import TYPE_CHECKING, Any

import trio
import trio.testing
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotkv_trio._keys import SessionKey
from hotkv_trio.testing._run_program import Runner
from hotkv_trio.testing.programs import Close, Open, Operation, Program, Sleep, Stall
from hotkv_trio.testing.strategies import operations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import outcome

    from hotkv_trio._engine import Memory

_CLIENTS = 3
_MEMORIES: list[Memory] = ["attention", "sliding", "recurrent"]
_DRIVEN = operations(_CLIENTS).filter(lambda operation: not isinstance(operation, Open | Close | Sleep | Stall))


class RuntimeMachine(RuleBasedStateMachine):
    """A runtime on a `FakeEngine`, and what three clients do with it."""

    def __init__(self) -> None:
        """Prepare; `open_runtime` opens it."""
        super().__init__()
        self._ticks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._ended: outcome.Outcome[Any] | None = None
        self._resting = False
        self._clock = trio.testing.MockClock()
        self._scopes: list[tuple[trio.CancelScope, SessionKey | None]] = []

    @initialize(
        slots=st.integers(1, 3),
        memory=st.sampled_from(_MEMORIES),
        ttl=st.sampled_from([None, 5.0]),
        exact=st.booleans(),
    )
    def open_runtime(self, slots: int, memory: Memory, ttl: float | None, exact: bool) -> None:  # noqa: FBT001
        """Open it."""
        self._runner = Runner(Program(slots=slots, memory=memory, ttl=ttl, exact=exact))
        trio.lowlevel.start_guest_run(
            self._runner.run,
            self._body,
            run_sync_soon_threadsafe=self._ticks.put,
            done_callback=self._end,
            clock=self._clock,
            instruments=[self._runner.invariants],
        )
        self._rest()

    @rule(client=st.integers(0, _CLIENTS - 1), name=st.sampled_from("abcd"), epoch=st.integers(0, 2))
    def start(self, client: int, name: str, epoch: int) -> None:
        """Start a session; the client has it from then on."""
        operation = Open(name=name, epoch=epoch, how="start")
        self._do(partial(self._runner.start, client, operation), SessionKey(name, epoch))

    @rule(client=st.integers(0, _CLIENTS - 1), operation=_DRIVEN)
    def call(self, client: int, operation: Operation) -> None:
        """Do something with the client's session; the call may be left waiting."""
        self._do(partial(self._runner.perform, client, operation))

    @rule()
    def hold(self) -> None:
        """Let no native call end."""
        self._runner.executor.hold()

    @rule()
    def resume(self) -> None:
        """Let native calls end again."""
        self._do(self._resume)

    @precondition(lambda self: self._scopes)
    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        """Cancel one of the calls made so far, if it has not returned."""
        self._do(partial(self._cancel, *self._scopes.pop(which % len(self._scopes))))

    @rule(seconds=st.sampled_from([1.0, 6.0, 100.0]))
    def pass_time(self, seconds: float) -> None:
        """Let time pass, as far as native calls are not held up."""
        self._do(partial(self._sleep, seconds))

    @invariant()
    def all_is_well(self) -> None:
        """Nothing was found so far."""
        if hasattr(self, "_runner"):
            self._runner.invariants.check()

    def teardown(self) -> None:
        """Close the runtime, and judge what is left behind."""
        if not hasattr(self, "_runner"):
            return
        self._token.run_sync_soon(self._stop.set)
        while self._ended is None:
            self._tick()
        self._ended.unwrap()
        self._runner.invariants.check()
        problem = self._runner.judge_end()
        if problem is not None:
            raise AssertionError(problem)

    async def _body(self, nursery: trio.Nursery) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        self._nursery = nursery
        await self._report_rest()
        await self._stop.wait()
        self._runner.executor.resume()
        for scope, key in self._scopes:
            await self._cancel(scope, key)
        self._clock.autojump_threshold = 0

    async def _report_rest(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        self._resting = True

    def _do(self, call: Callable[[], Awaitable[None]], key: SessionKey | None = None) -> None:
        scope = trio.CancelScope()
        self._scopes.append((scope, key))

        async def cancellable() -> None:
            with scope:
                await call()

        def begin() -> None:
            self._nursery.start_soon(cancellable)
            self._nursery.start_soon(self._report_rest)

        self._token.run_sync_soon(begin)
        self._rest()

    def _rest(self) -> None:
        """Run trio until every task waits."""
        self._resting = False
        while not self._resting and self._ended is None:
            self._tick()

    def _tick(self) -> None:
        # Raises queue.Empty if trio is stuck.
        self._ticks.get(timeout=60)()

    async def _cancel(self, scope: trio.CancelScope, key: SessionKey | None) -> None:
        await trio.lowlevel.checkpoint()
        if key is not None:
            self._runner.expect_release(key)
        scope.cancel()

    async def _resume(self) -> None:
        await trio.lowlevel.checkpoint()
        self._runner.executor.resume()

    async def _sleep(self, seconds: float) -> None:
        self._clock.autojump_threshold = 0
        await trio.sleep(seconds)
        self._clock.autojump_threshold = math.inf

    def _end(self, result: outcome.Outcome[Any]) -> None:
        self._ended = result
