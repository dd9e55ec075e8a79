"""The kinds of faults from public reports that are about what the core does, on FakeEngine and on real tiny models."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from hotkv_trio import (
    CacheMiss,
    ContextFull,
    EngineFailed,
    InvalidInput,
    MissReason,
    OwnerThread,
    PositionMismatch,
    RuntimeClosed,
    SessionKey,
    StaleEpoch,
    TruncateUnsupported,
)
from hotkv_trio.serve import ShardServer, open_shard_client
from tests.core._rig import hold_open, spawn
from tests.reports._both import Engines, key, states, tokens

if TYPE_CHECKING:
    from pathlib import Path

    from trio.testing import MockClock

    from hotkv_trio._engine import Memory
    from tests.reports._both import Kind, Rig

DAY = 86_400


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("both")


@pytest.fixture(params=["fake", "llama"])
def both(request: pytest.FixtureRequest, models: Path) -> Engines:
    kind: Kind = request.param
    return Engines(kind, models)


# Isolation.


async def test_neighbours_in_a_batch(both: Engines) -> None:
    """llama.cpp #24962: logits differ when others share the batch.  Prefills of 8, 40, 300, and decoding past 512."""
    async with (
        both.open(n_ctx=768) as rig,
        rig.runtime.open_session(key("n")) as neighbour,
        rig.runtime.open_session(key("m")) as other,
    ):
        for n in (8, 40, 300):
            await neighbour.prefill(tokens(n, 9))
            async with rig.runtime.open_session(key(f"s{n}")) as session:
                assert rig.is_solo((await session.prefill(tokens(n))).output, tokens(n))
        history: list[Any] = [tokens(505, 1)]
        async with rig.runtime.open_session(key("long")) as session:
            await session.prefill(history[0])
            for turn in range(12):
                history.append(tokens(1, turn))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(neighbour.decode, turn)
                    nursery.start_soon(other.decode, turn)
                    output = (await session.decode(history[-1][0])).output
            assert rig.is_solo(output, *history)


async def test_a_full_session_among_others(both: Engines) -> None:
    """llama.cpp #23652, lemonade #3276: one full session ends every parallel one."""
    async with both.open() as rig:
        full, *others = [await rig.runtime.start_session(key(name)) for name in "abc"]
        await full.prefill(tokens(256))
        for other in others:
            await other.prefill(tokens(30))
        calls = len(rig.calls)
        with pytest.raises(ContextFull):
            await full.decode(1)
        assert len(rig.calls) == calls
        for other in others:
            assert rig.is_solo((await other.decode(7)).output, tokens(30), [7])
        assert (full.length, full.hot) == (256, True)
        for name in "abc":
            await rig.runtime.release(key(name))


async def test_a_value_that_is_not_finite(both: Engines) -> None:
    """Vllm PR 50283: a NaN request poisons reused blocks.  Refused; neighbour and next tenant are exact."""
    async with both.open(later=True) as rig, rig.runtime.open_session(key("n")) as neighbour:
        await neighbour.prefill(states(20))
        async with rig.runtime.open_session(key("hostile")) as hostile:
            calls = len(rig.calls)
            for place, value in ((0, np.nan), (700, np.inf), (40 * 128 - 1, -np.inf)):
                data = states(40, 1)
                data.flat[place] = value
                with pytest.raises(InvalidInput):
                    await hostile.prefill(data)
            assert (len(rig.calls), hostile.length) == (calls, 0)
        async with rig.runtime.open_session(key("tenant")) as tenant:
            assert rig.is_solo((await tenant.prefill(states(70, 2))).output, states(70, 2))
        assert rig.is_solo((await neighbour.decode(states(1, 3))).output, states(20), states(1, 3))


# Cancelling.


async def test_an_abort_while_queued(both: Engines) -> None:
    """SGLang #31765: an abort while queued leaves the session busy; llama.cpp #24496, #13262: its work is still run.

    ik_llama #1929: it stops another's decode.
    """
    async with (
        both.open() as rig,
        rig.runtime.open_session(key("a")) as running,
        rig.runtime.open_session(key("b")) as session,
    ):
        await running.prefill(tokens(5))
        await session.prefill(tokens(6))
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            work = spawn(nursery, running.decode, 1)
            await wait_all_tasks_blocked()
            queued = spawn(nursery, session.prefill, tokens(40, 3), scope=scope)
            behind = spawn(nursery, session.decode, 2)
            await wait_all_tasks_blocked()
            calls = len(rig.calls)
            scope.cancel()
            await wait_all_tasks_blocked()
            assert isinstance(queued.error, trio.Cancelled)
            rig.executor.resume()
        assert all(len(append.data) != 40 for group in rig.calls[calls:] for append in group)
        assert rig.is_solo(work.value.output, tokens(5), [1])
        assert rig.is_solo(behind.value.output, tokens(6), [2])
        assert rig.is_solo((await session.decode(3)).output, tokens(6), [2], [3])


async def _life(rig: Rig, number: int) -> None:
    async with rig.runtime.open_session(key(f"victim {number}")) as session:
        await session.prefill(tokens(100))
        await session.decode(1)
        await session.truncate(50)
        await session.decode(2)
    await rig.runtime.start_session(key(f"victim {number}", 1))
    await rig.runtime.release(key(f"victim {number}", 1))


async def test_a_cancel_at_every_step(both: Engines) -> None:
    """SGLang #22273, sglang #22790, petals #163: a cancel leaks the lock, the memory, or counts twice."""
    async with both.open(n_slots=2) as rig, rig.runtime.open_session(key("n"), pinned=True) as neighbour:
        await neighbour.prefill(tokens(5))
        slot = rig.limiter.borrowed_bytes
        history: list[Any] = [tokens(5)]
        for step in range(1000):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:

                    async def cancel(step: int = step, scope: trio.CancelScope = scope) -> None:
                        for _ in range(step):
                            await trio.lowlevel.checkpoint()
                        scope.cancel()

                    nursery.start_soon(cancel)
                    await _life(rig, step)
                    nursery.cancel_scope.cancel()
            await rig.runtime.release(key(f"victim {step}", 1))
            assert (rig.limiter.borrowed_bytes, rig.statistics.lent_slots) == (slot, 1)
            if not scope.cancelled_caught:
                break
            if step % 8 == 0 and neighbour.length < 250:
                history.append([step % 500])
                assert rig.is_solo((await neighbour.decode(step % 500)).output, *history)
        assert step > 20


async def test_a_cancel_and_then_silence(both: Engines) -> None:
    """LMCache #5006: an abort was cleaned up only by later traffic."""
    async with both.open() as rig:
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            victim = spawn(nursery, _life, rig, 0, scope=scope)
            await wait_all_tasks_blocked()
            assert rig.limiter.borrowed_bytes > 0
            scope.cancel()
            await wait_all_tasks_blocked()
            assert not victim.done, "the native call is waited for"
            rig.executor.resume()
        assert (rig.limiter.borrowed_bytes, rig.statistics.sessions, rig.statistics.free_slots) == (0, 0, 3)


async def test_a_slot_that_a_native_call_names_is_not_lent(both: Engines) -> None:
    """mesh-llm #1150: a lane was lent again while the timed-out worker still ran."""
    async with both.open(n_slots=1) as rig, trio.open_nursery() as nursery:
        rig.executor.hold()
        scope = trio.CancelScope()
        victim = spawn(nursery, _life, rig, 0, scope=scope)
        await wait_all_tasks_blocked()
        scope.cancel()
        newcomer = spawn(nursery, rig.runtime.start_session, key("newcomer"))
        await wait_all_tasks_blocked()
        assert (newcomer.done, rig.statistics.free_slots) == (False, 0)
        rig.executor.resume()
        await wait_all_tasks_blocked()
        assert victim.done
        assert rig.is_solo((await newcomer.value.prefill(tokens(9))).output, tokens(9))
        await rig.runtime.release(key("newcomer"))


async def test_a_connection_killed_in_the_middle_of_a_prefill(both: Engines) -> None:
    """mesh-llm #1523, llama.cpp #7378: buffers survive a disconnect.  Only that session goes, within the step."""
    async with both.open() as rig, trio.open_nursery() as nursery:
        server = ShardServer(rig.runtime)

        def stream() -> Any:
            ours, theirs = trio.testing.memory_stream_pair()
            nursery.start_soon(partial(server.serve_stream, theirs, principal=None))
            return ours

        dropped = trio.CancelScope()

        async def victim() -> None:
            with dropped:
                async with (
                    open_shard_client(stream(), cancel_patience=0.001) as client,
                    client.open_session(key("a")) as session,
                ):
                    await session.prefill(tokens(250))

        async with open_shard_client(stream()) as client, client.open_session(key("n")) as neighbour:
            await neighbour.prefill(tokens(7))
            calls = len(rig.calls)
            rig.executor.hold()
            nursery.start_soon(victim)
            await wait_all_tasks_blocked(0.01)
            assert (rig.statistics.lent_slots, len(rig.calls)) == (2, calls)
            dropped.cancel()
            await wait_all_tasks_blocked(0.01)
            rig.executor.resume()
            await wait_all_tasks_blocked(0.01)
            assert rig.statistics.lent_slots == 1
            assert len(rig.calls) <= calls + 1
            assert rig.is_solo((await neighbour.decode(4)).output, tokens(7), [4])
        nursery.cancel_scope.cancel()


# Waiting, bytes, eviction.


@pytest.mark.parametrize("seed", range(3))
async def test_random_churn(both: Engines, seed: int) -> None:
    """Petals #396, petals #487, LMCache #2942: allocator deadlock, drifting counters, busy loop."""
    rng = random.Random(seed)

    async def client(rig: Rig, number: int) -> None:
        for turn in range(8):
            with trio.CancelScope() as scope:
                async with rig.runtime.open_session(key(f"{number % 9}", turn * 20 + number)) as session:
                    for _ in range(rng.randint(1, 3)):
                        if rng.random() < 0.15:
                            scope.cancel()
                        await session.prefill(tokens(rng.choice([1, 5, 70])), at=0 if not session.hot else None)

    async def survives(rig: Rig, number: int) -> None:
        with suppress(StaleEpoch, CacheMiss):
            await client(rig, number)

    async with both.open(n_slots=3) as rig:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(survives, rig, number)
        assert (rig.limiter.borrowed_bytes, rig.statistics.waiting, rig.statistics.free_slots) == (0, 0, 3)
        rig.runtime.check_integrity()
        assert rig.statistics.opened == rig.statistics.released + rig.statistics.superseded > 12


async def test_waiters_deadlines_and_their_order(both: Engines, autojump_clock: MockClock) -> None:
    """Petals #434: a deadline started only after the others'; petals #53 review: a large waiter blocks, or starves."""
    async with both.open(n_slots=1, seconds=DAY) as rig:
        start = trio.current_time()
        left: list[tuple[int, int]] = []
        served: list[int] = []

        async def impatient(seconds: int) -> None:
            with trio.move_on_after(seconds):
                await rig.runtime.start_session(key(f"waits {seconds} s"))
            left.append((seconds, round(trio.current_time() - start)))

        async def patient(number: int) -> None:
            async with rig.runtime.open_session(key(f"patient {number}"), pinned=True) as session:
                served.append(number)
                await session.decode(number)

        async with trio.open_nursery() as outer, rig.runtime.open_session(key("x"), pinned=True):
            for number in range(5):
                outer.start_soon(patient, number)
                await wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                for seconds in (3, 1, 2):
                    nursery.start_soon(impatient, seconds)
        assert left == [(1, 1), (2, 2), (3, 3)]
        assert served == [0, 1, 2, 3, 4]


async def test_all_busy_and_full(both: Engines) -> None:
    """LMCache #2942: a busy loop where everything is taken.  It returns at all only if every task comes to rest."""
    async with both.open(n_slots=1) as rig, trio.open_nursery() as nursery:
        session = await rig.runtime.start_session(key("a"))
        rig.executor.hold()
        work = spawn(nursery, session.prefill, tokens(5))
        for number in range(5):
            spawn(nursery, hold_open, rig.runtime, key(f"waiter {number}"))
        await wait_all_tasks_blocked()
        assert (rig.statistics.waiting, work.done) == (5, False)
        rig.executor.resume()
        nursery.cancel_scope.cancel()


async def test_who_goes_and_who_stays(both: Engines) -> None:
    """llama-server test_router: busy evicted, a waiter that left still costs, wrong LRU order."""
    async with both.open() as rig, trio.open_nursery() as nursery:
        for name in ("first", "second", "third"):
            await (await rig.runtime.start_session(key(name))).prefill(tokens(4))
        rig.executor.hold()
        busy = [spawn(nursery, rig.runtime.get(key(name)).decode, 1) for name in ("first", "second", "third")]
        await wait_all_tasks_blocked()
        leaves = trio.CancelScope()
        gone = spawn(nursery, hold_open, rig.runtime, key("gone"), scope=leaves)
        await wait_all_tasks_blocked()
        assert (rig.statistics.waiting, gone.done) == (1, False)
        leaves.cancel()
        await wait_all_tasks_blocked()
        assert gone.done
        rig.executor.resume()
        await wait_all_tasks_blocked()
        assert [work.value.length for work in busy] == [5] * 3
        assert rig.statistics.evicted == 0
        for name in ("second", "first"):
            await rig.runtime.get(key(name)).decode(2)
        await rig.runtime.start_session(key("new"))
        with pytest.raises(CacheMiss) as miss:
            rig.runtime.get(key("third"))
        assert miss.value.reason is MissReason.EVICTED
        assert rig.is_solo((await rig.runtime.get(key("first")).decode(3)).output, tokens(4), [1], [2], [3])
        for name in ("first", "second", "new"):
            await rig.runtime.release(key(name))


async def test_the_evictor_between_get_and_prefill(both: Engines) -> None:
    """LMCache #4133: eviction between look-up and use."""
    async with both.open(n_slots=1) as rig:
        await (await rig.runtime.start_session(key("a"))).prefill(tokens(4))
        found = rig.runtime.get(key("a"))
        async with rig.runtime.open_session(key("b")) as other:
            await other.prefill(tokens(5))
            calls = len(rig.calls)
            with pytest.raises(CacheMiss) as miss:
                await found.prefill(tokens(3), at=4)
            assert (miss.value.reason, len(rig.calls)) == (MissReason.EVICTED, calls)
            assert rig.is_solo((await other.decode(5)).output, tokens(5), [5])


async def test_ttl(both: Engines, autojump_clock: MockClock) -> None:
    """LMCache #4091: TTL ended long-running work.  Work refreshes it, and running work never expires."""
    async with both.open(idle_ttl=10, seconds=DAY) as rig:
        session = await rig.runtime.start_session(key("a"))
        for turn in range(5):
            await session.decode(turn)
            await trio.sleep(9)
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, session.decode, 5)
            await trio.sleep(1000)
            assert session.hot
            rig.executor.resume()
        assert rig.is_solo(running.value.output, *([turn] for turn in range(6)))
        await trio.sleep(11)
        assert (session.hot, rig.limiter.borrowed_bytes) == (False, 0)
    for ttl in (0, -1, float("nan")):
        with pytest.raises(InvalidInput, match="idle_ttl"):
            async with both.open(idle_ttl=ttl):
                pytest.fail("opened")


# Keys, positions, entry points.


async def test_an_append_begins_at_the_length(both: Engines) -> None:
    """mesh-llm #1544: the batch's start disagrees with the last position.  Refused before the native call."""
    async with both.open() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill(tokens(9))
        calls = len(rig.calls)
        for at, error in ((8, PositionMismatch), (10, CacheMiss)):
            with pytest.raises(error):
                await session.prefill(tokens(3), at=at)
        assert (len(rig.calls), session.length) == (calls, 9)
        assert rig.is_solo((await session.prefill(tokens(3), at=9)).output, tokens(9), tokens(3))


async def test_queued_work_of_a_superseded_owner(both: Engines) -> None:
    """mesh-llm #1570: queued work of a superseded owner still ran."""
    async with both.open() as rig, rig.runtime.open_session(key("n")) as neighbour:
        old = await rig.runtime.start_session(key("a", 1))
        await old.prefill(tokens(4))
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            spawn(nursery, neighbour.prefill, tokens(9))
            await wait_all_tasks_blocked()
            queued = spawn(nursery, old.prefill, tokens(33))
            newer = spawn(nursery, rig.runtime.start_session, key("a", 2))
            await wait_all_tasks_blocked()
            assert isinstance(queued.error, StaleEpoch)
            rig.executor.resume()
        assert all(len(append.data) != 33 for group in rig.calls for append in group)
        assert rig.is_solo((await newer.value.prefill(tokens(6))).output, tokens(6))
        await rig.runtime.release(key("a", 2))


async def test_every_entry_point_of_a_session_that_cannot_be_used(both: Engines) -> None:
    """mesh-llm #1853: one of several entry points forgot the check; LMCache #2878: one path forgot part of the key."""
    async with both.open(n_slots=2) as rig:
        gone: dict[str, Any] = {}
        for name in ("released", "stale", "evicted", "failed"):
            gone[name] = await rig.runtime.start_session(key(name, 1))
            await gone[name].prefill(tokens(4))
            if name == "released":
                await rig.runtime.release(key(name, 1))
            elif name == "stale":
                await rig.runtime.start_session(key(name, 2))
                await rig.runtime.release(key(name, 2))
            elif name == "evicted":
                for other in "xy":
                    await rig.runtime.start_session(key(other))
                for other in "xy":
                    await rig.runtime.release(key(other))
            else:
                rig.fails = lambda _: True
                rig.engine.truncate = lambda *_: False  # type: ignore[method-assign]
                with pytest.raises(EngineFailed):
                    await gone[name].decode(1)
                rig.fails = lambda _: False
                del rig.engine.truncate
        calls = len(rig.calls)
        for name, session in gone.items():
            for attempt in (
                partial(session.prefill, tokens(2)),
                partial(session.prefill, tokens(2), at=4),
                partial(session.decode, 1),
                partial(session.truncate, 2),
            ):
                with pytest.raises(StaleEpoch if name == "stale" else CacheMiss):
                    await attempt()
            for epoch in (0, 1):
                with pytest.raises(StaleEpoch if name == "stale" or epoch == 0 else CacheMiss):
                    rig.runtime.get(key(name, epoch))
        assert len(rig.calls) == calls
        assert rig.limiter.borrowed_bytes == 0


async def test_releasing_twice_or_with_the_wrong_epoch(both: Engines) -> None:
    """LMCache #5095: releasing twice released another's pin."""
    async with both.open(n_slots=1) as rig:
        await rig.runtime.start_session(key("a", 1))
        assert await rig.runtime.release(key("a", 1))
        other = await rig.runtime.start_session(key("b"), pinned=True)
        await other.prefill(tokens(4))
        assert not await rig.runtime.release(key("a", 1))
        assert not await rig.runtime.release(key("b", 7))
        assert not await rig.runtime.release(key("nobody"))
        assert rig.is_solo((await other.decode(1)).output, tokens(4), [1])
        assert await rig.runtime.release(key("b"))


async def test_a_runtime_closed_with_live_sessions(both: Engines) -> None:
    """Petals #154: old caches stayed after a re-shard."""
    async with both.open() as rig:
        sessions = [await rig.runtime.start_session(key(name)) for name in "abc"]
        for session in sessions:
            await session.prefill(tokens(9))
    assert rig.limiter.borrowed_bytes == 0
    for session in sessions:
        assert not session.hot
        with pytest.raises(RuntimeClosed):
            await session.decode(1)


# Going on after a loss.


async def test_a_shard_that_evicted_what_the_other_kept(both: Engines) -> None:
    """LMCache #1467, exo #1341: shards evict differently and then disagree.

    It takes no append at its old length, and a replay of everything under the next epoch mends both.
    """
    async with both.open(n_slots=1, later=True) as evicts, both.open(n_slots=1, later=True) as keeps:
        name = SessionKey("route", 1)
        for rig in (evicts, keeps):
            await (await rig.runtime.start_session(name)).prefill(states(6))
        await evicts.runtime.start_session(key("other"))
        with pytest.raises(CacheMiss) as miss:
            await evicts.runtime.get(name).decode(states(1, 2), at=6)
        assert miss.value.resume_at == 0
        for rig in (evicts, keeps):
            session = await rig.runtime.start_session(SessionKey("route", 2))
            await session.prefill(states(6), at=0)
            assert rig.is_solo((await session.decode(states(1, 2), at=6)).output, states(6), states(1, 2))
            await rig.runtime.release(SessionKey("route", 2))


async def test_a_replay_under_the_next_epoch(both: Engines) -> None:
    """Petals #587: the replacement server starts at 0, the client's history is long."""
    calls = [tokens(100), *([token] for token in tokens(20, 2)), tokens(30, 3)]
    async with both.open() as rig:
        session = await rig.runtime.start_session(key("a", 1))
        for data in calls:
            unbroken = (await session.prefill(data)).output
    async with both.open() as rig:
        with pytest.raises(CacheMiss):
            rig.runtime.get(key("a", 1))
        session = await rig.runtime.start_session(key("a", 2))
        with pytest.raises(CacheMiss):
            await session.prefill(calls[-1], at=120)
        for data in calls:
            replayed = (await session.prefill(data)).output
        assert replayed.tobytes() == unbroken.tobytes()
        await rig.runtime.release(key("a", 2))


@pytest.mark.parametrize("failing", range(1, 5))
async def test_a_prefill_that_fails_after_a_chunk_is_tried_again(both: Engines, failing: int) -> None:
    """Omlx PR 3414: a retry after a pause wrote rows twice; mesh-llm #1514: the position advanced all the same."""
    async with both.open() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill(tokens(3))
        rig.fails = lambda number: number == 1 + failing
        with pytest.raises(EngineFailed):
            await session.prefill(tokens(230))
        assert (session.length, session.hot) == (3, True)
        assert rig.is_solo((await session.prefill(tokens(230))).output, tokens(3), tokens(230))
        assert session.length == 233


@pytest.mark.parametrize("memory", ["recurrent", "hybrid"])
async def test_a_rollback_that_memory_refuses(both: Engines, memory: Memory) -> None:
    """llama.cpp PR 28007, llama.cpp #23206, llama-cpp-python #2140: a refused rollback was ignored."""
    async with both.open(memory=memory) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill(tokens(20))
        with pytest.raises(TruncateUnsupported):
            await session.truncate(10)
        for attempt in (partial(session.decode, 1, at=10), partial(session.truncate, 5)):
            with pytest.raises(CacheMiss) as miss:
                await attempt()
            assert miss.value.resume_at == 0
        assert rig.limiter.borrowed_bytes == 0
        assert rig.is_solo((await session.prefill(tokens(10), at=0)).output, tokens(10))


async def test_thirty_rounds_of_a_sliding_window(both: Engines) -> None:
    """llama-cpp-python PR 2180, llama.rn #396: a sliding-window model fails on its second turn."""
    rng = random.Random(0)
    async with both.open(memory="sliding") as rig, rig.runtime.open_session(key("a")) as session:
        history: list[list[int]] = []
        for turn in range(30):
            while session.length > 150 or (history and rng.random() < 0.4):
                cut = history.pop()
                try:
                    await session.truncate(session.length - len(cut))
                except TruncateUnsupported:
                    for data in history:
                        await session.prefill(data, at=session.length)
            history.append(tokens(rng.choice([1, 5, 20, 70]), turn))
            assert rig.is_solo((await session.prefill(history[-1], at=session.length)).output, *history)


# Sizes and threads.


async def test_a_prompt_of_ten_times_the_largest_call(both: Engines) -> None:
    """node-llama-cpp #129: a prompt over ``n_batch`` ends the server."""
    async with both.open(n_slots=1, n_ctx=5120) as rig, rig.runtime.open_session(key("a")) as session:
        n = 10 * rig.runtime.info.max_batch_tokens
        result = await session.prefill(tokens(n))
        assert (result.length, len(rig.calls)) == (5120, 5120 // 64)
        assert rig.is_solo(result.output, tokens(n))


async def test_all_slots_ask_for_all_rows(both: Engines) -> None:
    """llama.cpp #24967: all slots asking for outputs at once aborts."""
    async with both.open() as rig:
        sessions = [await rig.runtime.start_session(key(name)) for name in "abc"]
        async with trio.open_nursery() as nursery:
            found = [
                spawn(nursery, partial(session.prefill, output="all"), tokens(200, i))
                for i, session in enumerate(sessions)
            ]
        assert [len(caught.value.output) for caught in found] == [200] * 3
        for name in "abc":
            await rig.runtime.release(key(name))


async def test_fifty_tasks_and_one_thread(both: Engines) -> None:
    """llama-cpp-python #471, llama-cpp-python #1367, llama-cpp-python #1995: two threads crash or freeze."""
    async with both.open(executor=OwnerThread()) as rig:
        threads: set[int] = set()
        process = rig.engine.process

        def noted(group: Any) -> Any:
            threads.add(threading.get_ident())
            return process(group)

        rig.engine.process = noted  # type: ignore[method-assign]

        async def client(number: int) -> None:
            async with rig.runtime.open_session(key(f"s{number}")) as session:
                result = await session.prefill(tokens(5, number), at=0)
                assert result.length == 5

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(client, number)
        assert len(threads) == 1
        assert threading.get_ident() not in threads
