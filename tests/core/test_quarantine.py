"""A slot that cannot be emptied: neither lent nor forgotten.  mesh-llm #581: a failed reset lost the lane for ever."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hotkv_trio import open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor
from tests.core._rig import SLOT, hold_open, key, native_failure, open_rig, spawn


class CountsClears(FakeEngine):
    clears = 0

    def clear(self, slot: int) -> None:
        self.clears += 1
        super().clear(slot)


@pytest.mark.parametrize("failures", [1, 2, 5])
async def test_a_slot_that_fails_k_times_is_reported_tried_again_and_comes_back(
    failures: int, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    engine = CountsClears(n_slots=2)
    caplog.set_level(logging.INFO, logger="hotkv_trio")
    async with open_rig(engine, seconds=10_000) as rig:
        session = await rig.runtime.start_session(key("a"))
        await session.prefill([1, 2])
        engine.fail("clear", *[native_failure(-3)] * failures)
        assert await rig.runtime.release(key("a"))
        statistics = rig.statistics
        assert (statistics.quarantined_slots, statistics.free_slots, statistics.lent_slots) == (1, 1, 0)
        assert statistics.borrowed_bytes == 0
        errors = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert ["slot 0" in record.getMessage() and "native code -3" in record.getMessage() for record in errors] == [
            True
        ]
        # The other slot is lent meanwhile, and the quarantined one is not.
        async with rig.runtime.open_session(key("b")) as other:
            result = await other.prefill([3, 4])
            assert rig.is_solo(result.output, [3, 4])
            assert rig.holds(1) == 2
            await trio.sleep(2.0 ** (failures + 1))
            assert engine.clears == failures + 1
            assert (rig.statistics.quarantined_slots, rig.statistics.free_slots) == (0, 1)
            assert "slot 0 is clean again" in caplog.text
            async with rig.runtime.open_session(key("c")) as third:
                result = await third.prefill([5, 6])
                assert rig.is_solo(result.output, [5, 6])
                assert rig.holds(0) == 2


async def test_retries_come_ever_more_seldom_but_never_stop(autojump_clock: MockClock) -> None:
    engine = CountsClears(n_slots=1)
    async with open_rig(engine, seconds=1e6) as rig:
        await rig.runtime.start_session(key("a"))
        engine.fail("clear", *[native_failure()] * 1000)
        await rig.runtime.release(key("a"))
        await trio.sleep(60)
        assert 5 <= engine.clears <= 7, "after 1, 2, 4, 8, ... seconds"
        before = engine.clears
        await trio.sleep(600)
        assert 9 <= engine.clears - before <= 11, "each minute"
        engine._failures["clear"].clear()
        await trio.sleep(61)
        assert rig.statistics.quarantined_slots == 0


async def test_a_waiter_that_needs_the_slot_has_it_tried_at_once_and_gets_it(autojump_clock: MockClock) -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        await rig.runtime.start_session(key("a"))
        rig.engine.fail("clear", native_failure())
        await rig.runtime.release(key("a"))
        assert rig.statistics.quarantined_slots == 1
        asked = trio.current_time()
        session = await rig.runtime.start_session(key("b"))
        assert trio.current_time() == asked, "not at the retry's time"
        result = await session.prefill([1, 2])
        assert rig.is_solo(result.output, [1, 2])


async def test_a_waiter_whose_slot_stays_dirty_waits_and_gets_it_later(autojump_clock: MockClock) -> None:
    async with open_rig(FakeEngine(n_slots=1), seconds=1000) as rig, trio.open_nursery() as nursery:
        await rig.runtime.start_session(key("a"))
        rig.engine.fail("clear", *[native_failure()] * 4)
        waiter = spawn(nursery, rig.runtime.start_session, key("b"))
        await wait_all_tasks_blocked()
        assert (waiter.done, rig.statistics.quarantined_slots, rig.statistics.evicted) == (False, 1, 1)
        await trio.sleep(100)
        assert waiter.value.hot


async def test_a_waiter_does_not_have_a_dirty_slot_tried_at_each_step() -> None:
    engine = CountsClears(n_slots=2)
    async with open_rig(engine) as rig, trio.open_nursery() as nursery:
        busy = await rig.runtime.start_session(key("a"), pinned=True)
        await rig.runtime.start_session(key("b"))
        engine.fail("clear", *[native_failure()] * 100)
        await rig.runtime.release(key("b"))
        spawn(nursery, rig.runtime.start_session, key("c"))
        await wait_all_tasks_blocked()
        assert engine.clears == 2, "at the release, and for the waiter"
        for token in range(10):
            await busy.decode(token)
        assert engine.clears == 2
        engine._failures["clear"].clear()
        await rig.runtime.release(key("a"))


async def test_not_waiting_for_a_slot_that_stays_dirty_says_would_block() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        await rig.runtime.start_session(key("a"))
        rig.engine.fail("clear", *[native_failure()] * 3)
        with pytest.raises(trio.WouldBlock):
            await rig.runtime.start_session(key("b"), wait=False)
        assert (rig.statistics.waiting, rig.limiter.borrowed_bytes) == (0, 0)


async def test_a_slot_that_says_it_is_clean_and_is_not_is_quarantined_too() -> None:
    """llama_memory_seq_rm can say yes and leave tokens; the next session in that slot was wrong."""

    class Lies(FakeEngine):
        lying = True

        def clear(self, slot: int) -> None:
            if not self.lying:
                super().clear(slot)

    engine = Lies(n_slots=2)
    async with open_rig(engine) as rig:
        session = await rig.runtime.start_session(key("a"))
        await session.prefill([1, 2])
        await rig.runtime.release(key("a"))
        assert rig.statistics.quarantined_slots == 1
        async with rig.runtime.open_session(key("b")) as other:
            result = await other.prefill([3, 4])
            assert rig.is_solo(result.output, [3, 4])
            engine.lying = False


@pytest.mark.parametrize("error", [OSError("disk"), SystemExit(3)], ids=lambda error: type(error).__name__)
async def test_whatever_a_clear_raises_quarantines_the_slot_and_ends_nothing_else(error: BaseException) -> None:
    async with open_rig(FakeEngine(n_slots=2)) as rig, rig.runtime.open_session(key("b")) as other:
        await other.prefill([3, 4])
        await rig.runtime.start_session(key("a"))
        rig.engine.fail("clear", error)
        await rig.runtime.release(key("a"))
        assert rig.statistics.quarantined_slots == 1
        result = await other.decode(5)
        assert rig.is_solo(result.output, [3, 4, 5])


async def test_quarantine_at_the_end_of_the_runtime_does_not_hold_it_up_nor_touch_a_closed_engine(
    autojump_clock: MockClock,
) -> None:
    class ClosesSlowly(FakeEngine):
        """Passes the time of a retry while it is being closed."""

        def close(self) -> None:
            super().close()
            autojump_clock.jump(100)

    engine = ClosesSlowly(n_slots=2)
    async with open_runtime(engine, executor=InlineExecutor()) as runtime:
        for name in "ab":
            await runtime.start_session(key(name))
        engine.fail("clear", *[native_failure()] * 10)
        await runtime.release(key("a"))
    assert engine.closed
    assert engine.violations == []
    assert runtime.statistics().quarantined_slots == 2
    assert runtime.limiter.borrowed_bytes == 0


async def test_bytes_are_back_though_the_slot_is_not() -> None:
    async with open_rig(FakeEngine(n_slots=2), kv_budget=SLOT) as rig, trio.open_nursery() as nursery:
        await rig.runtime.start_session(key("a"), pinned=True)
        waiter = spawn(nursery, hold_open, rig.runtime, key("b"))
        await wait_all_tasks_blocked()
        rig.engine.fail("clear", native_failure())
        await rig.runtime.release(key("a"))
        await wait_all_tasks_blocked()
        assert not waiter.done
        assert rig.runtime.get(key("b")).hot
        assert (rig.limiter.borrowed_bytes, rig.statistics.quarantined_slots) == (SLOT, 1)
        nursery.cancel_scope.cancel()
