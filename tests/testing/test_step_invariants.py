"""Violations are found at the step at which they arise, and told with what led there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from hotkv_trio import SessionKey, open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor, ScheduleTape, StepInvariants

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotkv_trio import Runtime, Session

A, B = SessionKey("a", 1), SessionKey("b", 0)


def break_after(harm: Callable[[Runtime, Session], object]) -> StepInvariants:
    """Run a small program in which something is broken by hand."""
    invariants = StepInvariants()

    async def main() -> None:
        async with open_runtime(FakeEngine(n_slots=1), executor=InlineExecutor(), idle_ttl=5) as runtime:
            invariants.watch(runtime)
            session = await runtime.start_session(A)
            await session.prefill([1, 2, 3])
            invariants.note("prefilled a@1")
            harm(runtime, session)
            with trio.move_on_after(60):
                async with runtime.open_session(B) as other:
                    await other.decode(1)
                    for _ in range(10):
                        await trio.sleep(1)

    ScheduleTape().run(main, instruments=[invariants])
    return invariants


def test_nothing_is_found_where_nothing_is_broken() -> None:
    invariants = break_after(lambda runtime, session: None)
    assert invariants.violation is None
    assert invariants.steps > 20
    invariants.check()


def bytes_from_nowhere(runtime: Runtime, session: Session) -> None:
    runtime._ledger.borrowed_bytes += 1


def length_from_nowhere(runtime: Runtime, session: Session) -> None:
    session._length += 1


def eviction_forgotten(runtime: Runtime, session: Session) -> None:
    runtime._scheduler.make_room = lambda: None


def epoch_shrinks(runtime: Runtime, session: Session) -> None:
    runtime._directory._live["a"].key = SessionKey("a", 0)


def expiry_forgotten(runtime: Runtime, session: Session) -> None:
    runtime._directory.idle_ttl = 0.5
    runtime._nap = trio.CancelScope()  # the watcher of the clock sleeps in another one


@pytest.mark.parametrize(
    "harm, said",
    [
        (bytes_from_nowhere, "claims hold"),
        (length_from_nowhere, "the engine holds 3 tokens for it"),
        (eviction_forgotten, "evicting idle sessions"),
        (epoch_shrinks, "though epoch 1 was seen"),
        (expiry_forgotten, "TTL has passed"),
    ],
)
def test_the_first_violation_is_kept(harm: Callable[[Runtime, Session], object], said: str) -> None:
    invariants = break_after(harm)
    with pytest.raises(AssertionError, match=said) as caught:
        invariants.check()
    assert "prefilled a@1" in str(caught.value)
    assert "found after step" in str(caught.value)


def test_further_checks_can_be_added() -> None:
    def check() -> None:
        raise AssertionError("of one's own")

    invariants = StepInvariants(check)
    ScheduleTape().run(trio.sleep, 1, instruments=[invariants])
    with pytest.raises(AssertionError, match="of one's own"):
        invariants.check()
