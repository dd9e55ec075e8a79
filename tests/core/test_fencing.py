"""A newer epoch fences the older off: at open, at any call, and for all work queued or under way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hotkv_trio import CacheMiss, EngineFailed, MissReason, RuntimeClosed, StaleEpoch
from hotkv_trio.testing import FakeEngine
from tests.core._rig import SLOT, Caught, StepwiseEngine, hold_open, key, native_failure, open_rig, spawn

if TYPE_CHECKING:
    from hotkv_trio import Session, StepResult
    from hotkv_trio.testing import InlineExecutor

OLD, NEW = key("a", 1), key("a", 2)
threaded_too = pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])


def assert_stale(caught: Caught) -> None:
    assert isinstance(caught.error, StaleEpoch)
    assert (caught.error.key, caught.error.current) == (OLD, 2)


async def test_open_of_a_lower_epoch_is_refused_also_after_the_newer_has_ended() -> None:
    async with open_rig() as rig:
        async with rig.runtime.open_session(NEW):
            with pytest.raises(StaleEpoch):
                await rig.runtime.start_session(OLD)
        for stale in (0, 1):
            with pytest.raises(StaleEpoch) as caught:
                async with rig.runtime.open_session(key("a", stale)):
                    pass
            assert caught.value.current == 2
        assert (rig.statistics.opened, rig.limiter.borrowed_bytes) == (1, 0)


async def test_a_newer_epoch_takes_over_and_the_older_knows_at_every_call() -> None:
    async with open_rig() as rig, rig.runtime.open_session(OLD) as old:
        await old.prefill([1, 2])
        async with rig.runtime.open_session(NEW) as new:
            assert new.length == 0
            for attempt in (old.decode(1), old.prefill([1], at=0), old.truncate(0), rig.runtime.release(OLD)):
                with pytest.raises(StaleEpoch):
                    await attempt
            with pytest.raises(StaleEpoch):
                rig.runtime.get(OLD)
            assert (old.hot, old.length, old.statistics().state) == (False, 0, "ended")
            result = await new.prefill([1, 2])
            assert rig.is_solo(result.output, [1, 2])
            assert rig.limiter.borrowed_bytes == SLOT
        assert rig.statistics.superseded == 1
    with pytest.raises(RuntimeClosed):
        await old.decode(1)


async def test_the_end_of_the_older_scope_does_not_end_the_newer_session() -> None:
    async with open_rig() as rig, trio.open_nursery() as nursery:
        async with rig.runtime.open_session(OLD):
            new: Session = await nursery.start(rig.runtime.serve_session, NEW)
            await new.prefill([1, 2])
        assert (new.hot, new.length) == (True, 2)
        assert rig.runtime.get(NEW) is new
        nursery.cancel_scope.cancel()


async def test_queued_work_of_the_superseded_makes_no_native_call() -> None:
    """mesh-llm #1570: queued work of a superseded owner still ran."""
    async with open_rig() as rig, rig.runtime.open_session(key("b")) as other, rig.runtime.open_session(OLD) as old:
        await other.prefill([7, 8])
        await old.prefill([1, 2])
        calls = rig.appended_to(1)
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            spawn(nursery, other.prefill, [5, 6])
            await wait_all_tasks_blocked()
            queued = spawn(nursery, old.prefill, [3, 4])
            await wait_all_tasks_blocked()
            waiting = spawn(nursery, old.decode, 5)
            truncate = spawn(nursery, old.truncate, 1)
            await wait_all_tasks_blocked()
            opener = spawn(nursery, hold_open, rig.runtime, NEW)
            await wait_all_tasks_blocked()
            assert_stale(queued)
            assert_stale(waiting)
            assert_stale(truncate)
            assert rig.appended_to(1) == calls
            rig.executor.resume()
            await wait_all_tasks_blocked()
            assert rig.appended_to(1) == calls
            assert not opener.done
            nursery.cancel_scope.cancel()


@threaded_too
async def test_running_work_of_the_superseded_is_waited_for_before_its_slot_is_lent(threaded: bool) -> None:
    """mesh-llm #1150: the slot is not lent before the native call has returned."""
    engine = FakeEngine(n_slots=1)
    async with open_rig(engine, threaded=threaded, prefill_chunk=4) as rig, rig.runtime.open_session(OLD) as old:
        await old.prefill([1, 2])
        stall, resume = (engine.stall, engine.resume) if threaded else (rig.executor.hold, rig.executor.resume)
        stall()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, old.prefill, [5] * 30)
            await wait_all_tasks_blocked(0.01)
            started: list[Session] = []

            async def take_over() -> None:
                async with rig.runtime.open_session(NEW) as new:
                    started.append(new)
                    result = await new.prefill([3, 4])
                    assert rig.is_solo(result.output, [3, 4])

            nursery.start_soon(take_over)
            await wait_all_tasks_blocked(0.01)
            assert (running.done, started, rig.statistics.free_slots) == (False, [], 0)
            resume()
        assert_stale(running)
        chunks = [group for group in engine.calls if group[0].data[0] == 5]
        assert len(chunks) == 1, "no chunk after the one that ran"
        assert rig.statistics.superseded == 1


async def test_work_superseded_between_two_chunks_goes_no_further() -> None:
    async with (
        open_rig(StepwiseEngine(), prefill_chunk=4) as rig,
        rig.runtime.open_session(key("b")) as other,
        rig.runtime.open_session(OLD) as old,
    ):
        await other.prefill([7, 8])
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            prefill = spawn(nursery, old.prefill, [5] * 30)
            await wait_all_tasks_blocked()
            spawn(nursery, other.decode, 9)
            await rig.one_call()
            assert rig.holds(1) == 4
            spawn(nursery, hold_open, rig.runtime, NEW)
            await wait_all_tasks_blocked()
            assert_stale(prefill)
            rig.all_calls()
            await wait_all_tasks_blocked()
            assert rig.holds(1) == 0
            assert rig.appended_to(1) == 1
            nursery.cancel_scope.cancel()


async def test_an_opener_that_waits_for_a_slot_is_superseded_at_once() -> None:
    async with (
        open_rig(FakeEngine(n_slots=1)) as rig,
        rig.runtime.open_session(key("holder"), pinned=True),
        trio.open_nursery() as nursery,
    ):
        waiting = spawn(nursery, hold_open, rig.runtime, OLD)
        await wait_all_tasks_blocked()
        newer = spawn(nursery, hold_open, rig.runtime, NEW)
        await wait_all_tasks_blocked()
        assert_stale(waiting)
        assert not newer.done
        assert rig.statistics.waiting == 1
        nursery.cancel_scope.cancel()


async def test_a_cold_session_that_waits_for_a_slot_to_start_again_is_superseded_at_once() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.runtime.open_session(OLD) as old:
        await old.prefill([1, 2])
        async with rig.runtime.open_session(key("holder"), pinned=True), trio.open_nursery() as nursery:
            restart = spawn(nursery, partial(old.prefill, [1, 2], at=0))
            behind = spawn(nursery, partial(old.prefill, [1, 2], at=0))
            await wait_all_tasks_blocked()
            assert rig.statistics.waiting == 1
            spawn(nursery, hold_open, rig.runtime, NEW)
            await wait_all_tasks_blocked()
            assert_stale(restart)
            assert_stale(behind)
            nursery.cancel_scope.cancel()


async def test_superseded_in_the_moment_of_the_grant_takes_nothing() -> None:
    """The slot is granted to the waiter, and before the waiter has run the newer epoch comes."""
    async with open_rig(FakeEngine(n_slots=1)) as rig, trio.open_nursery() as nursery:
        rig.limiter.acquire_on_behalf_of_nowait("somebody else", 1)
        rig.limiter.total_bytes = SLOT
        waiting = spawn(nursery, hold_open, rig.runtime, OLD)
        await wait_all_tasks_blocked()
        assert not waiting.done
        rig.limiter.release_on_behalf_of("somebody else")
        assert rig.limiter.borrowed_bytes == SLOT, "granted, but not yet running"
        async with rig.runtime.open_session(NEW) as new:
            assert_stale(waiting)
            result = await new.prefill([1, 2])
            assert rig.is_solo(result.output, [1, 2])


@pytest.mark.parametrize("ends", ["release", "cancel"])
async def test_ended_in_the_moment_of_the_grant_takes_nothing(ends: str) -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, trio.open_nursery() as nursery:
        rig.limiter.acquire_on_behalf_of_nowait("somebody else", 1)
        rig.limiter.total_bytes = SLOT
        scope = trio.CancelScope()
        waiting = spawn(nursery, hold_open, rig.runtime, OLD, scope=scope)
        await wait_all_tasks_blocked()
        rig.limiter.release_on_behalf_of("somebody else")
        if ends == "cancel":
            scope.cancel()
        else:
            assert await rig.runtime.release(OLD) is True
        await wait_all_tasks_blocked()
        if ends == "cancel":
            assert isinstance(waiting.error, trio.Cancelled)
        else:
            # Whichever ran first: it was refused, or it is in the body of a session that has ended.
            assert not waiting.done or isinstance(waiting.error, CacheMiss)
        assert (rig.limiter.borrowed_bytes, rig.statistics.free_slots, rig.statistics.waiting) == (0, 1, 0)
        nursery.cancel_scope.cancel()


async def test_the_epoch_counts_as_seen_also_when_the_open_was_cancelled(autojump_clock: MockClock) -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.runtime.open_session(key("holder"), pinned=True):
        with trio.move_on_after(1) as scope:
            await rig.runtime.start_session(NEW)
        assert scope.cancelled_caught
        with pytest.raises(StaleEpoch):
            rig.runtime.get(OLD)
        with pytest.raises(CacheMiss) as caught:
            rig.runtime.get(NEW)
        assert caught.value.reason is MissReason.RELEASED


async def test_replay_of_the_whole_history_under_the_next_epoch_equals_the_unbroken_run() -> None:
    """Petals #587: the replacement starts at 0 while the client's history is long."""
    async with open_rig() as rig:
        history = [1, 2, 3, 4, 5]
        old = await rig.runtime.start_session(OLD)
        await old.prefill(history)
        new = await rig.runtime.start_session(NEW)
        with pytest.raises(CacheMiss) as caught:
            await new.decode(6, at=5)
        assert (caught.value.reason, caught.value.resume_at) == (MissReason.BEYOND, 0)
        await new.prefill(history, at=0)
        result = await new.decode(6, at=5)
        assert rig.is_solo(result.output, [*history, 6])
        await wait_all_tasks_blocked()
        assert rig.statistics.sessions == 1


async def test_a_chain_of_epochs_leaves_one_session_and_its_bytes() -> None:
    async with open_rig(FakeEngine(n_slots=2)) as rig, trio.open_nursery() as nursery:
        ended = [spawn(nursery, hold_open, rig.runtime, key("a", 0))]
        for epoch in range(1, 30):
            await trio.lowlevel.checkpoint()
            ended.append(spawn(nursery, hold_open, rig.runtime, key("a", epoch)))
        await wait_all_tasks_blocked()
        # Tasks run in any order, so some may have come after a newer one.
        assert rig.runtime.get(key("a", 29)).hot
        assert rig.limiter.borrowed_bytes == SLOT
        assert (rig.statistics.sessions, rig.statistics.waiting) == (1, 0)
        assert all(isinstance(one.error, StaleEpoch) or not one.done for one in ended[:-1])
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ends", ["superseded", "released"])
async def test_a_truncate_under_way_when_its_session_ends_says_so_and_harms_no_successor(ends: str) -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, trio.open_nursery() as nursery:
        old = await rig.runtime.start_session(OLD)
        await old.prefill([1, 2, 3])
        rig.executor.hold()
        truncate = spawn(nursery, old.truncate, 1)
        await wait_all_tasks_blocked()
        if ends == "superseded":
            spawn(nursery, hold_open, rig.runtime, NEW)
        else:
            spawn(nursery, rig.runtime.release, OLD)
        await wait_all_tasks_blocked()
        assert not truncate.done
        rig.executor.resume()
        await wait_all_tasks_blocked()
        assert isinstance(truncate.error, StaleEpoch if ends == "superseded" else CacheMiss)
        assert (old.hot, old.length, rig.holds(0)) == (False, 0, 0)
        assert rig.statistics.failed == 0
        async with rig.runtime.open_session(key("a", 3)) as successor:
            result = await successor.prefill([4, 5])
            assert rig.is_solo(result.output, [4, 5])
        nursery.cancel_scope.cancel()


async def test_superseded_while_a_cancelled_prefill_is_cut_back_it_is_not_counted_as_failed_too() -> None:
    async with (
        open_rig(StepwiseEngine(), prefill_chunk=4) as rig,
        rig.runtime.open_session(OLD) as old,
        trio.open_nursery() as nursery,
    ):
        rig.executor.hold()
        scope = trio.CancelScope()
        prefill = spawn(nursery, old.prefill, [5] * 30, scope=scope)
        await wait_all_tasks_blocked()
        scope.cancel()
        await rig.one_call()
        assert (prefill.done, rig.executor.jobs) == (False, 1), "the cut is waited for"
        spawn(nursery, hold_open, rig.runtime, NEW)
        await wait_all_tasks_blocked()
        rig.engine.fail("truncate", LookupError("cannot"))
        rig.all_calls()
        await wait_all_tasks_blocked()
        assert isinstance(prefill.error, trio.Cancelled)
        assert (rig.statistics.failed, rig.statistics.superseded) == (0, 1)
        assert rig.holds(0) == 0
        nursery.cancel_scope.cancel()


class HoldingAfterClear(FakeEngine):
    """Holds the executor once it has emptied a slot, for the first time: nothing else comes before the next tenant."""

    executor: InlineExecutor
    held = False

    def clear(self, slot: int) -> None:
        super().clear(slot)
        if not self.held:
            self.held = True
            self.executor.hold()


async def test_a_call_that_failed_hears_nothing_of_what_the_next_tenant_of_its_slot_has_queued() -> None:
    engine = HoldingAfterClear(n_slots=2, memory="recurrent")
    async with (
        open_rig(engine) as rig,
        rig.runtime.open_session(key("idle"), pinned=True),
        rig.runtime.open_session(OLD, pinned=True) as old,
        trio.open_nursery() as nursery,
    ):
        engine.executor = rig.executor
        await old.prefill([1, 2])

        async def move_in() -> StepResult:
            async with rig.runtime.open_session(key("tenant")) as tenant:
                # The failed call still waits, behind the emptying of its slot, when its session is superseded.
                nursery.start_soon(hold_open, rig.runtime, NEW)
                return await tenant.prefill([3, 4])

        tenant = spawn(nursery, move_in)
        await wait_all_tasks_blocked()
        engine.fail("process", native_failure())
        failed = spawn(nursery, old.decode, 5)
        await wait_all_tasks_blocked()
        waited = engine.held and not failed.done
        rig.executor.resume()
        await wait_all_tasks_blocked()
        assert waited
        assert isinstance(failed.error, EngineFailed)
        assert rig.is_solo(tenant.value.output, [3, 4])
        nursery.cancel_scope.cancel()
