"""What the runtime and its sessions tell about themselves."""

from __future__ import annotations

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from hotkv_trio import RuntimeStatistics, SessionStatistics, TruncateUnsupported
from hotkv_trio.testing import FakeEngine
from tests.core._rig import SLOT, hold_open, key, open_rig, spawn


async def test_session_statistics_and_repr_in_each_state(autojump_clock: MockClock) -> None:
    async with open_rig(FakeEngine(n_slots=1), seconds=1000) as rig:
        async with rig.runtime.open_session(key("a", 7)) as session:
            await trio.sleep(5)
            await session.prefill([1, 2, 3])
            now = trio.current_time()
            idle = SessionStatistics(
                key=key("a", 7),
                state="idle",
                length=3,
                hot=True,
                pinned=False,
                operations=0,
                tokens_appended=3,
                idle_since=now,
            )
            assert session.statistics() == idle
            assert repr(session) == "<hotkv_trio.Session a@7, idle, length 3>"
            rig.executor.hold()
            async with trio.open_nursery() as nursery:
                spawn(nursery, session.decode, 4)
                spawn(nursery, session.truncate, 1)
                await wait_all_tasks_blocked()
                assert session.statistics() == attrs.evolve(idle, state="busy", operations=2, idle_since=None)
                assert repr(session) == "<hotkv_trio.Session a@7, busy, length 3>"
                rig.executor.resume()
            async with rig.runtime.open_session(key("b")):
                assert session.statistics().state == "cold"
                assert repr(session) == "<hotkv_trio.Session a@7, cold, length 0>"
            async with rig.runtime.open_session(key("c"), pinned=True) as pinned, trio.open_nursery() as nursery:
                assert pinned.statistics().pinned
                assert pinned.statistics().idle_since is None

                async def restart() -> None:
                    await session.prefill([1], at=0)

                nursery.start_soon(restart)
                await wait_all_tasks_blocked()
                assert repr(session) == "<hotkv_trio.Session a@7, waiting, length 0>"
                assert not session.hot
                nursery.cancel_scope.cancel()
        assert repr(session) == "<hotkv_trio.Session a@7, ended, length 0>"
        assert session.statistics().tokens_appended == 4


async def test_runtime_statistics_count_everything() -> None:
    async with open_rig(FakeEngine(n_slots=2), prefill_chunk=4) as rig:
        assert rig.statistics == RuntimeStatistics(
            sessions=0,
            hot=0,
            waiting=0,
            slots=2,
            free_slots=2,
            lent_slots=0,
            clearing_slots=0,
            quarantined_slots=0,
            total_bytes=2 * SLOT,
            borrowed_bytes=0,
            tombstones=0,
            native_calls=0,
            moves=0,
            tokens_prefilled=0,
            tokens_decoded=0,
            opened=0,
            released=0,
            evicted=0,
            expired=0,
            superseded=0,
            failed=0,
        )
        async with rig.runtime.open_session(key("a")) as a, rig.runtime.open_session(key("b")) as b:
            await a.prefill([1] * 10)
            await b.decode(1)
            assert rig.statistics.native_calls == len(rig.engine.calls) == 4
            assert (rig.statistics.tokens_prefilled, rig.statistics.tokens_decoded) == (10, 1)
            async with rig.runtime.open_session(key("b", 1)):
                async with rig.runtime.open_session(key("c")):
                    statistics = rig.statistics
                    assert (statistics.sessions, statistics.hot, statistics.lent_slots) == (3, 2, 2)
                    assert (statistics.superseded, statistics.evicted) == (1, 1)
                    assert statistics.borrowed_bytes == 2 * SLOT
                assert rig.statistics.released == 1
        statistics = rig.statistics
        assert (statistics.opened, statistics.released, statistics.superseded, statistics.tombstones) == (4, 3, 1, 3)
        assert (statistics.sessions, statistics.borrowed_bytes, statistics.free_slots) == (0, 0, 2)


async def test_waiting_and_clearing_are_told() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, trio.open_nursery() as nursery:
        await rig.runtime.start_session(key("a"))
        rig.executor.hold()
        release = spawn(nursery, rig.runtime.release, key("a"))
        await wait_all_tasks_blocked()
        waiter = spawn(nursery, hold_open, rig.runtime, key("b"))
        await wait_all_tasks_blocked()
        statistics = rig.statistics
        assert (statistics.clearing_slots, statistics.lent_slots, statistics.waiting, statistics.hot) == (1, 1, 1, 0)
        assert statistics.borrowed_bytes == SLOT
        assert not release.done
        rig.executor.resume()
        await wait_all_tasks_blocked()
        assert not waiter.done
        assert (rig.statistics.clearing_slots, rig.statistics.hot) == (0, 1)
        nursery.cancel_scope.cancel()


async def test_a_failure_is_counted() -> None:
    async with open_rig(FakeEngine(memory="recurrent")) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2, 3])
        with pytest.raises(TruncateUnsupported):
            await session.truncate(1)
        assert rig.statistics.failed == 1


@pytest.mark.parametrize("exact, mode", [(False, "grouped"), (True, "exact")])
async def test_the_runtimes_repr_says_its_state(exact: bool, mode: str) -> None:
    async with open_rig(exact=exact) as rig:
        runtime = rig.runtime
        assert repr(runtime) == (
            f"<hotkv_trio.Runtime at {id(runtime):#x}, {mode}, layers 0:2, 0/4 slots lent with 0 waiting>"
        )
        await runtime.start_session(key("a"))
        assert "1/4 slots lent" in repr(runtime)
    assert ", closed, " in repr(runtime)


async def test_the_runtime_tells_the_facts_of_its_engine() -> None:
    async with open_rig() as rig:
        assert rig.runtime.info.slot_bytes == SLOT
        assert rig.runtime.recipe is rig.runtime.info.recipe
        assert rig.runtime.limiter.total_bytes == 4 * SLOT


async def test_statistics_are_a_view_of_a_moment() -> None:
    async with open_rig() as rig:
        before = rig.statistics
        await rig.runtime.start_session(key("a"))
        assert before.opened == 0
        with pytest.raises(AttributeError):
            before.opened = 1  # type: ignore[misc]
