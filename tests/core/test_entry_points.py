"""Every entry point against every state that a session can be in: the right typed answer, and nothing native.

mesh-llm #1853 review: one of several entry points forgot the check that the others make.
"""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hotkv_trio import CacheMiss, EngineFailed, MissReason, RuntimeClosed, SessionExists, SessionKey, StaleEpoch
from hotkv_trio.testing import FakeEngine
from tests.core._rig import Rig, key, native_failure, open_rig

if TYPE_CHECKING:
    from hotkv_trio import Session

HISTORY = [1, 2, 3]
KEY = key("a", 1)


# How a session came to be what it is.  Each returns it; in a scope of the test's, or kept by the runtime.


async def stale(rig: Rig, session: Session) -> None:
    await rig.runtime.start_session(key("a", 2), pinned=True)


async def stale_and_gone(rig: Rig, session: Session) -> None:
    await rig.runtime.start_session(key("a", 2))
    await rig.runtime.release(key("a", 2))


async def released(rig: Rig, session: Session) -> None:
    await rig.runtime.release(KEY)


async def closed_by_itself(rig: Rig, session: Session) -> None:
    await session.aclose()


async def evicted(rig: Rig, session: Session) -> None:
    await rig.runtime.start_session(key("b"), pinned=True)
    await rig.runtime.start_session(key("c"), pinned=True)


async def expired(rig: Rig, session: Session) -> None:
    await trio.sleep(11)


async def failed(rig: Rig, session: Session) -> None:
    rig.engine.fail("process", native_failure())
    rig.engine.fail("truncate", native_failure())
    with pytest.raises(EngineFailed):
        await session.decode(5)
    await wait_all_tasks_blocked()


async def closed(rig: Rig, session: Session) -> None:
    """The runtime, by the test."""


# The entry points.


async def decode(rig: Rig, session: Session) -> None:
    await session.decode(5)


async def decode_at_the_end(rig: Rig, session: Session) -> None:
    await session.decode(5, at=len(HISTORY))


async def decode_at_the_start(rig: Rig, session: Session) -> None:
    await session.decode(5, at=0)


async def prefill(rig: Rig, session: Session) -> None:
    await session.prefill([5, 6])


async def prefill_at_the_end(rig: Rig, session: Session) -> None:
    await session.prefill([5, 6], at=len(HISTORY))


async def prefill_in_the_middle(rig: Rig, session: Session) -> None:
    await session.prefill([5, 6], at=1)


async def prefill_at_the_start(rig: Rig, session: Session) -> None:
    await session.prefill([5, 6], at=0)


async def truncate(rig: Rig, session: Session) -> None:
    await session.truncate(1)


async def truncate_to_nothing(rig: Rig, session: Session) -> None:
    await session.truncate(0)


async def get(rig: Rig, session: Session) -> None:  # noqa: RUF029 - as the others are
    assert rig.runtime.get(KEY) is session


async def release(rig: Rig, session: Session) -> None:
    if not await rig.runtime.release(KEY):
        raise ReleasedNothing


async def open_session(rig: Rig, session: Session) -> None:
    async with rig.runtime.open_session(KEY, pinned=True, wait=False):
        pass


async def start_session(rig: Rig, session: Session) -> None:
    await rig.runtime.start_session(KEY, wait=False)


async def serve_session(rig: Rig, session: Session) -> None:
    with trio.CancelScope() as scope:
        await rig.runtime.serve_session(KEY, wait=False, task_status=EndsAtOnce(scope))


@attrs.frozen
class EndsAtOnce(trio.TaskStatus["Session"]):
    scope: trio.CancelScope

    def started(self, value: Session | None = None) -> None:
        assert value is not None
        assert value.hot
        self.scope.cancel()


class ReleasedNothing(Exception):
    """Said by the test where `release` returned False."""


class Works(Exception):
    """Said by the test where the call did what it does on a live session."""


APPENDS = [
    decode,
    decode_at_the_end,
    decode_at_the_start,
    prefill,
    prefill_at_the_end,
    prefill_in_the_middle,
    prefill_at_the_start,
]
RESTARTS = [decode_at_the_start, prefill_at_the_start]
USES = [*APPENDS, truncate, truncate_to_nothing]
LOOKS = [get]
OPENS = [open_session, start_session, serve_session]
ENTRY_POINTS = [*USES, *LOOKS, release, *OPENS]
STATES = [stale, stale_and_gone, released, closed_by_itself, evicted, expired, failed, closed]

REASONS = {
    released: MissReason.RELEASED,
    closed_by_itself: MissReason.RELEASED,
    evicted: MissReason.EVICTED,
    expired: MissReason.EXPIRED,
    failed: MissReason.FAILED,
}


def expected(state: Any, entry: Any, *, kept: bool) -> tuple[type[BaseException], MissReason | None]:
    """The table."""
    if state is closed:
        return RuntimeClosed, None
    if state in {stale, stale_and_gone}:
        return StaleEpoch, None
    ended = kept or state in {released, closed_by_itself}
    if entry in USES:
        # A cold session in a scope of the caller's starts again at 0; one that has ended does not.
        return (CacheMiss, REASONS[state]) if ended or entry not in RESTARTS else (Works, None)
    if ended:
        if entry is get:
            return CacheMiss, REASONS[state]
        if entry is release:
            return ReleasedNothing, None
        return (trio.WouldBlock if state is evicted else Works), None
    if entry in OPENS:
        return SessionExists, None
    return Works, None


@pytest.mark.parametrize(
    "state, entry, kept",
    list(itertools.product(STATES, ENTRY_POINTS, [False, True])),
    ids=lambda value: getattr(value, "__name__", {False: "in a scope", True: "kept"}.get(value)),
)
async def test_answer_of(state: Any, entry: Any, kept: bool, autojump_clock: MockClock) -> None:
    engine = FakeEngine(n_slots=2)
    error, reason = expected(state, entry, kept=kept)
    async with AsyncExitStack() as stack:
        rig = await stack.enter_async_context(open_rig(engine, idle_ttl=10, seconds=1000))
        if kept:
            session = await rig.runtime.start_session(KEY)
        else:
            session = await stack.enter_async_context(rig.runtime.open_session(KEY))
        await session.prefill(HISTORY)
        await state(rig, session)
        if state is closed:
            await stack.aclose()
        elif state in {expired, evicted, failed}:
            assert not session.hot
        if state is evicted and entry in RESTARTS and not kept:
            # So that there is room to start again in.
            await rig.runtime.release(key("b"))
        calls = len(engine.calls)

        async def call() -> None:
            await entry(rig, session)
            raise Works

        with pytest.raises(error) as caught:
            await call()
        if isinstance(caught.value, CacheMiss):
            assert (caught.value.key, caught.value.reason, caught.value.resume_at) == (KEY, reason, 0)
        if isinstance(caught.value, StaleEpoch):
            assert (caught.value.key, caught.value.current) == (KEY, 2)
        if not isinstance(caught.value, Works):
            assert len(engine.calls) == calls, "refused before the native call"
            assert (session.length, session.hot) == (0, False)


@pytest.mark.parametrize("epoch", [0, 2])
async def test_another_epoch_is_never_taken_for_the_live_one(epoch: int) -> None:
    """LMCache #2878, #4825, #3770: one call path forgot part of the key."""
    async with open_rig() as rig:
        session = await rig.runtime.start_session(KEY)
        other = SessionKey("a", epoch)
        if epoch == 0:
            with pytest.raises(StaleEpoch):
                rig.runtime.get(other)
            with pytest.raises(StaleEpoch):
                await rig.runtime.release(other)
        else:
            with pytest.raises(CacheMiss):
                rig.runtime.get(other)
            assert await rig.runtime.release(other) is False
        assert session.hot


@pytest.mark.parametrize("entry", [*USES, get], ids=lambda entry: entry.__name__)
async def test_a_live_session_answers_every_entry_point(entry: Any) -> None:
    """So that the table above does not pass because a call is wrong in itself."""
    async with open_rig() as rig, rig.runtime.open_session(KEY) as session:
        if entry not in {decode_at_the_start, prefill_at_the_start}:
            await session.prefill(HISTORY)
        if entry is prefill_in_the_middle:
            await session.truncate(1)
        await entry(rig, session)
