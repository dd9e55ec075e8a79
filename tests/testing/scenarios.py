"""Every public async function of the core, in each state in which it can wait: the material of the cancel sweep.

A scenario is given a runtime of two slots in which ``neighbour`` holds one of them, and lets the victim live once.
What has to hold afterwards, wherever the victim was cancelled, is checked in `sweep`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from hotkv_trio import CacheMiss, MissReason, Session, SessionKey, StaleEpoch, TruncateUnsupported, open_runtime
from hotkv_trio.testing import CancelSweep, FakeEngine, InlineExecutor, StepInvariants, Victim, cancel_at_every_step

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hotkv_trio import Engine, Runtime

A, NEXT_A, B, C = SessionKey("a", 0), SessionKey("a", 1), SessionKey("b", 0), SessionKey("c", 0)
PROMPT = [1, 2, 3, 4, 5]


@attrs.define(eq=False)
class Room:
    """What a scenario finds."""

    runtime: Runtime
    engine: Engine
    executor: InlineExecutor
    victim: Victim
    neighbour: Session
    history: list[int] = attrs.field(factory=list)
    """The neighbour's tokens."""

    async def work(self, *tokens: int) -> None:
        """Let the neighbour append, and hold its answer against what it must be."""
        result = await self.neighbour.prefill(list(tokens))
        self.history += tokens
        assert result.length == len(self.history)
        if isinstance(self.engine, FakeEngine):
            assert np.array_equal(result.output, self.engine.rows(self.history)[-1:])

    async def stall(self, seconds: float) -> None:
        """Let native calls take this long."""
        self.executor.hold()
        try:
            await trio.sleep(seconds)
        finally:
            self.executor.resume()


SCENARIOS: dict[str, Callable[[Room], Awaitable[None]]] = {}


def scenario(function: Callable[[Room], Awaitable[None]]) -> Callable[[Room], Awaitable[None]]:
    """Enter a scenario into the table."""
    SCENARIOS[function.__name__] = function
    return function


async def started() -> None:
    """Let tasks started before come to their first wait."""
    for _ in range(2):
        await trio.lowlevel.checkpoint()


async def unchanged(session: Session, length: int, victim: Victim, after: int) -> None:
    """Hold a session to the contract of a cancelled call: as before, as after, or cold where memory cannot be cut."""
    if not session.hot:
        assert session._runtime.info.memory != "attention"
        assert session.length == 0
        with pytest.raises(CacheMiss) as caught:
            await session.decode(1)
        assert caught.value.reason is MissReason.FAILED
        return
    assert session.length == (length if victim.cancelled else after)
    result = await session.decode(7)
    assert result.position == (length if victim.cancelled else after)


async def work_until_released(session: Session) -> None:
    with contextlib.suppress(CacheMiss):
        await session.prefill(PROMPT)


@scenario
async def open_session_with_a_free_slot(room: Room) -> None:
    with room.victim:
        async with room.runtime.open_session(A) as session:
            await session.prefill(PROMPT)


@scenario
async def open_session_waiting_for_a_busy_slot(room: Room) -> None:
    async with room.runtime.open_session(B) as other, trio.open_nursery() as nursery:
        nursery.start_soon(room.stall, 5)
        nursery.start_soon(room.work, 1, 2, 3)
        nursery.start_soon(work_until_released, other)
        with room.victim:
            async with room.runtime.open_session(A) as session:
                await session.decode(1)


@scenario
async def open_session_waiting_for_an_idle_one_to_be_evicted(room: Room) -> None:
    async with room.runtime.open_session(B) as other:
        await other.decode(1)
        with room.victim:
            async with room.runtime.open_session(A) as session:
                assert (await session.decode(1)).position == 0
        if not room.victim.cancelled:
            assert not other.hot


@scenario
async def open_session_without_waiting(room: Room) -> None:
    async with room.runtime.open_session(B):
        with room.victim:
            async with room.runtime.open_session(A, wait=False) as session:
                await session.decode(1)


@scenario
async def open_session_over_a_busy_epoch(room: Room) -> None:
    async with trio.open_nursery() as nursery:
        older = await nursery.start(room.runtime.serve_session, A)

        async def work() -> None:
            with contextlib.suppress(StaleEpoch):
                await older.prefill(PROMPT)

        nursery.start_soon(work)
        await started()
        with room.victim:
            async with room.runtime.open_session(NEXT_A) as session:
                await session.decode(1)
        await older.aclose()


@scenario
async def open_session_with_one_behind_that_fits(room: Room) -> None:
    async def behind() -> None:
        async with room.runtime.open_session(C) as session:
            assert (await session.decode(1)).length == 1

    async with trio.open_nursery() as nursery, room.runtime.open_session(B) as other:
        nursery.start_soon(room.stall, 3)
        nursery.start_soon(work_until_released, other)
        await started()
        nursery.start_soon(behind)
        with room.victim:
            async with room.runtime.open_session(A) as session:
                await session.decode(1)


@scenario
async def serve_session(room: Room) -> None:
    with room.victim:
        async with trio.open_nursery() as nursery:
            session = await nursery.start(room.runtime.serve_session, A)
            await session.prefill(PROMPT)
            await room.runtime.release(A)


@scenario
async def serve_session_waiting_for_a_slot(room: Room) -> None:
    async with room.runtime.open_session(B) as other, trio.open_nursery() as outer:
        outer.start_soon(room.stall, 2)
        outer.start_soon(work_until_released, other)
        outer.start_soon(room.work, 4)
        with room.victim:
            async with trio.open_nursery() as nursery:
                session = await nursery.start(room.runtime.serve_session, A)
                await session.aclose()


@scenario
async def start_session(room: Room) -> None:
    with room.victim:
        session = await room.runtime.start_session(A)
        await session.decode(1)
    await room.runtime.release(A)


@scenario
async def start_session_waiting_for_a_slot(room: Room) -> None:
    async with room.runtime.open_session(B) as other, trio.open_nursery() as nursery:
        nursery.start_soon(room.stall, 2)
        nursery.start_soon(work_until_released, other)
        nursery.start_soon(room.work, 4)
        with room.victim:
            await room.runtime.start_session(A)
    await room.runtime.release(A)


@scenario
async def prefill_in_chunks(room: Room) -> None:
    async with room.runtime.open_session(A) as session:
        await session.decode(1)
        with room.victim:
            await session.prefill(PROMPT)
        await unchanged(session, 1, room.victim, 6)


@scenario
async def prefill_queued_behind_a_neighbour(room: Room) -> None:
    async with room.runtime.open_session(A) as session, trio.open_nursery() as nursery:
        nursery.start_soon(room.stall, 1)
        nursery.start_soon(room.work, *PROMPT)
        await started()
        with room.victim:
            await session.prefill(PROMPT)
        await unchanged(session, 0, room.victim, 5)


@scenario
async def prefill_waiting_for_its_turn(room: Room) -> None:
    async with room.runtime.open_session(A) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.prefill, [1, 2, 3])
        await started()
        with room.victim:
            await session.prefill(PROMPT)
        await trio.testing.wait_all_tasks_blocked()
        await unchanged(session, 3, room.victim, 8)


@scenario
async def decode_waiting_for_a_turn_that_is_wanted_again_at_once(room: Room) -> None:
    async def wait_for_a_turn() -> None:
        with room.victim:
            await session.decode(4)

    async with room.runtime.open_session(A) as session:
        # The victim's task is the younger one, and runs later in a batch.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_a_turn)
            for token in (1, 2, 3):
                await session.decode(token)
        await unchanged(session, 3, room.victim, 4)


@scenario
async def prefill_of_a_cold_session_waiting_for_a_slot(room: Room) -> None:
    async with room.runtime.open_session(A) as session:
        await session.decode(1)
        async with room.runtime.open_session(B) as other, trio.open_nursery() as nursery:
            assert not session.hot
            nursery.start_soon(room.stall, 2)
            nursery.start_soon(work_until_released, other)
            with room.victim:
                await session.prefill(PROMPT, at=0)
            if room.victim.cancelled:
                assert session.length == 0
            else:
                assert session.length == 5


@scenario
async def decode_in_a_group(room: Room) -> None:
    async with room.runtime.open_session(A) as session, trio.open_nursery() as nursery:
        await session.prefill(PROMPT)
        nursery.start_soon(room.work, 6)
        with room.victim:
            await session.decode(1)
        await unchanged(session, 5, room.victim, 6)


@scenario
async def decode_in_a_stalled_call(room: Room) -> None:
    async with room.runtime.open_session(A) as session, trio.open_nursery() as nursery:
        await session.prefill(PROMPT)
        nursery.start_soon(room.stall, 2)
        with room.victim:
            await session.decode(1)
        await unchanged(session, 5, room.victim, 6)


@scenario
async def truncate(room: Room) -> None:
    async with room.runtime.open_session(A) as session:
        await session.prefill(PROMPT)
        with room.victim:
            try:
                await session.truncate(3)
            except TruncateUnsupported:
                assert not session.hot
        if session.hot:
            assert session.length in ({3, 5} if room.victim.cancelled else {3})
            assert (await session.decode(1)).position in {3, 5}


@scenario
async def truncate_waiting_for_its_turn(room: Room) -> None:
    async with room.runtime.open_session(A) as session, trio.open_nursery() as nursery:
        await session.prefill([1])
        nursery.start_soon(session.prefill, [2, 3, 4])
        await started()
        with room.victim:
            try:
                await session.truncate(3)
            except TruncateUnsupported:
                assert not session.hot


@scenario
async def aclose_of_an_idle_session(room: Room) -> None:
    async with room.runtime.open_session(A) as session:
        await session.prefill(PROMPT)
        with room.victim:
            await session.aclose()
        assert room.runtime.limiter.borrowed_bytes == room.runtime.info.slot_bytes
        assert session.statistics().state == "ended"


@scenario
async def aclose_during_a_native_call(room: Room) -> None:
    async with trio.open_nursery() as nursery:
        session = await nursery.start(room.runtime.serve_session, A)
        nursery.start_soon(room.stall, 2)
        nursery.start_soon(work_until_released, session)
        await started()
        with room.victim:
            await session.aclose()
        assert room.runtime.limiter.borrowed_bytes == room.runtime.info.slot_bytes


@scenario
async def release_of_an_idle_session(room: Room) -> None:
    await room.runtime.start_session(A)
    with room.victim:
        assert await room.runtime.release(A)
        assert not await room.runtime.release(A)
    await room.runtime.release(A)


@scenario
async def release_during_a_native_call(room: Room) -> None:
    async with trio.open_nursery() as nursery:
        session = await room.runtime.start_session(A)
        nursery.start_soon(room.stall, 2)
        nursery.start_soon(work_until_released, session)
        await started()
        with room.victim:
            assert await room.runtime.release(A)
        await room.runtime.release(A)


@scenario
async def the_session_s_own_scope(room: Room) -> None:
    async with room.runtime.open_session(A) as session:
        with room.victim.by(session.cancel):
            await session.prefill(PROMPT)
            await session.decode(1)
    assert room.runtime.limiter.borrowed_bytes == room.runtime.info.slot_bytes


@scenario
async def verify_isolation(room: Room) -> None:
    with room.victim:
        await room.runtime.verify_isolation()


@scenario
async def limiter_acquire(room: Room) -> None:
    limiter = room.runtime.limiter
    taken = False
    with room.victim:
        await limiter.acquire(limiter.available_bytes)
        taken = True
    if taken:
        limiter.release()


@scenario
async def limiter_acquire_with_one_behind_that_fits(room: Room) -> None:
    limiter = room.runtime.limiter
    half = limiter.available_bytes // 2
    limiter.acquire_on_behalf_of_nowait("first", half + 1)
    taken = []

    async def behind() -> None:
        await limiter.acquire_on_behalf_of("behind", 1)
        limiter.release_on_behalf_of("behind")

    async def give_back() -> None:
        await trio.sleep(1)
        limiter.release_on_behalf_of("first")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_back)
        nursery.start_soon(trio.lowlevel.checkpoint)
        with room.victim:
            nursery.start_soon(behind)
            await limiter.acquire_on_behalf_of("victim", half + 1)
            taken.append("victim")
    for borrower in taken:
        limiter.release_on_behalf_of(borrower)


def sweep(
    name: str,
    make_engine: Callable[[], Engine],
    *,
    n_slots: int,
    tape: Sequence[int] = (),
    exact: bool = False,
) -> CancelSweep:
    """Cancel the victim of a scenario at every step; hold everything to what must be true afterwards."""
    invariants = StepInvariants()

    def instruments() -> list[StepInvariants]:
        nonlocal invariants
        invariants = StepInvariants()
        return [invariants]

    async def program(victim: Victim) -> None:
        engine, executor = make_engine(), InlineExecutor()
        async with open_runtime(engine, executor=executor, prefill_chunk=2, exact=exact) as runtime:
            invariants.watch(runtime)
            async with runtime.open_session(SessionKey("neighbour", 0), pinned=True) as neighbour:
                room = Room(runtime, engine, executor, victim, neighbour)
                await room.work(9, 8)
                await SCENARIOS[name](room)
                await room.work(7)
                await room.work(6, 5, 4)
            assert runtime.limiter.borrowed_bytes == 0
            assert runtime.statistics().free_slots == n_slots
            async with contextlib.AsyncExitStack() as stack:
                # All slots can be had at once, and each is as new.
                for number in range(n_slots):
                    key = SessionKey(f"check {number}", 0)
                    session = await stack.enter_async_context(runtime.open_session(key, wait=False))
                    assert (await session.decode(3)).position == 0
        if isinstance(engine, FakeEngine):
            assert engine.violations == []
            assert engine.closed

    def check(_: Any) -> None:
        invariants.check()

    return cancel_at_every_step(program, check, tape=tape, instruments=instruments)


def sweep_runtime(make_engine: Callable[[], Engine]) -> CancelSweep:
    """Cancel a whole runtime at every step, from its opening to its close."""

    async def program(victim: Victim) -> Engine:
        engine = make_engine()
        with victim:
            async with open_runtime(engine, executor=InlineExecutor(), prefill_chunk=2) as runtime:
                kept = await runtime.start_session(C)
                async with runtime.open_session(A) as session, trio.open_nursery() as nursery:
                    nursery.start_soon(kept.prefill, PROMPT)
                    await session.prefill(PROMPT)
                    await session.decode(1)
        return engine

    def check(engine: Engine) -> None:
        if isinstance(engine, FakeEngine):
            assert engine.closed
            assert engine.violations == []

    return cancel_at_every_step(program, check)
