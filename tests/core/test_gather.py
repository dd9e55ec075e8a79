"""How work becomes native calls: every session that is ready joins the step, and nobody waits long for a neighbour."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hotkv_trio.testing import FakeEngine
from tests.core._rig import Rig, StepwiseEngine, decode_on, key, open_all, open_rig, spawn

if TYPE_CHECKING:
    from hotkv_trio import Session

N_STEPS = 12
threaded_too = pytest.mark.parametrize("threaded", [False, True], ids=["inline", "threaded"])
sizes = pytest.mark.parametrize("n_sessions", [1, 2, 4, 16])


def decode_calls(rig: Rig) -> list[int]:
    """How many sessions each decode call served."""
    return [len(group) for group in rig.engine.calls if all(append.n_tokens == 1 for append in group)]


@threaded_too
@sizes
async def test_sessions_in_lock_step_make_one_native_call_a_step(threaded: bool, n_sessions: int) -> None:
    async with open_rig(FakeEngine(n_slots=16), threaded=threaded) as rig:
        sessions = await open_all(rig, n_sessions)
        async with trio.open_nursery() as nursery:
            for number, session in enumerate(sessions):
                nursery.start_soon(decode_on, session, rig, [number % 16, 3], N_STEPS)
        assert decode_calls(rig) == [n_sessions] * N_STEPS


@sizes
async def test_exact_mode_serves_one_session_a_call(n_sessions: int) -> None:
    async with open_rig(FakeEngine(n_slots=16), exact=True) as rig:
        sessions = await open_all(rig, n_sessions)
        async with trio.open_nursery() as nursery:
            for number, session in enumerate(sessions):
                nursery.start_soon(decode_on, session, rig, [number % 16, 3], N_STEPS)
        assert decode_calls(rig) == [1] * n_sessions * N_STEPS


@threaded_too
@sizes
async def test_results_handed_on_through_another_task_still_make_one_call_a_step(
    threaded: bool, n_sessions: int
) -> None:
    """A server's way: one task decodes, another samples and writes to the client, over channels without a buffer."""

    async def sampler(
        results: trio.MemoryReceiveChannel[tuple[int, float]], tokens: list[trio.MemorySendChannel[int]]
    ) -> None:
        async for number, top in results:
            await tokens[number].send(int(top) % 16)

    async def decoder(
        number: int,
        session: Session,
        results: trio.MemorySendChannel[tuple[int, float]],
        tokens: trio.MemoryReceiveChannel[int],
    ) -> None:
        history = [number % 16, 3]
        token = 5
        for _ in range(N_STEPS):
            history.append(token)
            result = await session.decode(token)
            assert rig.is_solo(result.output, history)
            await results.send((number, float(result.output.max())))
            token = await tokens.receive()

    async with open_rig(FakeEngine(n_slots=16), threaded=threaded) as rig:
        sessions = await open_all(rig, n_sessions)
        send_results, receive_results = trio.open_memory_channel[tuple[int, float]](0)
        channels = [trio.open_memory_channel[int](0) for _ in sessions]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(sampler, receive_results, [send for send, _ in channels])
            async with trio.open_nursery() as decoders:
                for number, session in enumerate(sessions):
                    decoders.start_soon(decoder, number, session, send_results, channels[number][1])
            nursery.cancel_scope.cancel()
        assert decode_calls(rig) == [n_sessions] * N_STEPS


@threaded_too
async def test_sessions_each_with_a_task_between_make_one_call_a_step(threaded: bool) -> None:
    async def relay(source: trio.MemoryReceiveChannel[int], target: trio.MemorySendChannel[int]) -> None:
        async for token in source:
            await target.send(token)

    async def client(session: Session, history: list[int]) -> None:
        send, relayed = trio.open_memory_channel[int](0)
        resend, receive = trio.open_memory_channel[int](0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(relay, relayed, resend)
            for token in range(N_STEPS):
                history.append(token)
                result = await session.decode(token)
                assert rig.is_solo(result.output, history)
                async with trio.open_nursery() as hops:
                    hops.start_soon(send.send, token)
                    assert await receive.receive() == token
            nursery.cancel_scope.cancel()

    async with open_rig(FakeEngine(n_slots=8), threaded=threaded) as rig:
        sessions = await open_all(rig, 8)
        async with trio.open_nursery() as nursery:
            for number, session in enumerate(sessions):
                nursery.start_soon(client, session, [number, 3])
        assert decode_calls(rig) == [8] * N_STEPS


async def test_an_idle_neighbour_holds_nobody_up() -> None:
    async with open_rig() as rig:
        sessions = await open_all(rig, 4)
        await decode_on(sessions[1], rig, [1, 3], N_STEPS)
        assert decode_calls(rig) == [1] * N_STEPS


async def test_a_neighbour_that_ends_holds_nobody_up() -> None:
    async with open_rig() as rig:
        sessions = await open_all(rig, 3)
        async with trio.open_nursery() as nursery:
            for number, session in enumerate(sessions):
                nursery.start_soon(decode_on, session, rig, [number, 3], 3 * (number + 1))
        assert sorted(decode_calls(rig), reverse=True) == [3] * 3 + [2] * 3 + [1] * 3


async def test_slots_with_holes_between_are_called_for_apart() -> None:
    async with open_rig(FakeEngine(n_slots=6)) as rig:
        sessions = await open_all(rig, 6)
        busy = [0, 1, 3, 5]
        async with trio.open_nursery() as nursery:
            for number in busy:
                nursery.start_soon(decode_on, sessions[number], rig, [number, 3], 4)
        groups = [[append.slot for append in group] for group in rig.engine.calls if group[0].position > 1]
        assert groups == [[0, 1], [3], [5]] * 4


async def test_a_group_is_no_larger_than_a_call_takes() -> None:
    async with open_rig(FakeEngine(n_slots=5, max_batch_tokens=2)) as rig:
        sessions = await open_all(rig, 5)
        async with trio.open_nursery() as nursery:
            for number, session in enumerate(sessions):
                nursery.start_soon(decode_on, session, rig, [number, 3], 3)
        assert decode_calls(rig) == [2, 2, 1] * 3


async def test_prefills_take_turns_chunk_by_chunk() -> None:
    async with open_rig(prefill_chunk=4) as rig:
        rig.executor.hold()
        sessions = [await rig.runtime.start_session(key(name)) for name in "abc"]
        async with trio.open_nursery() as nursery:
            for session in sessions:
                spawn(nursery, session.prefill, [1] * 12)
                await wait_all_tasks_blocked()
            rig.executor.resume()
        assert [(group[0].slot, group[0].n_tokens) for group in rig.engine.calls] == [(0, 4), (1, 4), (2, 4)] * 3


async def test_a_short_prefill_does_not_wait_for_a_long_one() -> None:
    async with open_rig(FakeEngine(n_ctx_seq=500), prefill_chunk=4) as rig:
        long, short = [await rig.runtime.start_session(key(name)) for name in ("long", "short")]
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            waiting = spawn(nursery, long.prefill, [1] * 400)
            await wait_all_tasks_blocked()
            nursery.start_soon(short.prefill, [2, 3])
            await wait_all_tasks_blocked()
            rig.executor.resume()
        assert [group[0].slot for group in rig.engine.calls[:3]] == [0, 1, 0]
        assert waiting.value.length == 400


@threaded_too
async def test_a_decode_is_never_delayed_by_more_than_one_chunk(threaded: bool) -> None:
    async with open_rig(FakeEngine(n_slots=3, n_ctx_seq=500), threaded=threaded, prefill_chunk=4) as rig:
        decoder, *prefillers = [await rig.runtime.start_session(key(name)) for name in ("d", "p", "q")]
        await decoder.prefill([1, 2])
        async with trio.open_nursery() as nursery:
            for session in prefillers:
                nursery.start_soon(session.prefill, [3] * 400)
            await decode_on(decoder, rig, [1, 2], 30)
        slots = [group[0].slot for group in rig.engine.calls]
        first, last = slots.index(0, 1), len(slots) - 1 - slots[::-1].index(0)
        between = [step for step in "".join(map(str, slots[first : last + 1])).split("0") if step]
        assert len(between) >= 25, "prefills went on meanwhile"
        assert {len(chunks) for chunks in between} == {1}


async def test_decodes_go_before_prefills_that_came_earlier() -> None:
    async with open_rig(StepwiseEngine(), prefill_chunk=4) as rig:
        sessions = await open_all(rig, 3)
        made = len(rig.engine.calls)
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            spawn(nursery, sessions[0].prefill, [1] * 8)
            await wait_all_tasks_blocked()
            spawn(nursery, sessions[1].prefill, [1] * 8)
            await wait_all_tasks_blocked()
            spawn(nursery, sessions[2].decode, 5)
            await wait_all_tasks_blocked()
            rig.all_calls()
        assert [group[0].slot for group in rig.engine.calls[made:]] == [0, 2, 1, 0, 1]


async def test_one_failed_group_leaves_the_other_groups_of_the_step() -> None:
    async with open_rig(FakeEngine(n_slots=4, move_cost=math.inf)) as rig:
        sessions = await open_all(rig, 4)
        await sessions[2].aclose()
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            ended = [spawn(nursery, sessions[number].decode, 5) for number in (0, 1, 3)]
            await wait_all_tasks_blocked()
            rig.engine.fail("process", LookupError("once"))
            rig.executor.resume()
        assert [type(caught.error).__name__ for caught in ended] == ["EngineFailed", "EngineFailed", "NoneType"]
        assert rig.is_solo(ended[2].value.output, [3, 3, 5])


async def test_who_leaves_a_planned_call_is_left_out_of_it() -> None:
    """Its step was planned with three groups; the third is withdrawn while the first runs."""
    async with open_rig(StepwiseEngine(), exact=True) as rig:
        sessions = await open_all(rig, 3)
        made = len(rig.engine.calls)
        rig.executor.hold()
        scope = trio.CancelScope()
        async with trio.open_nursery() as nursery:
            first = spawn(nursery, sessions[0].decode, 5)
            second = spawn(nursery, sessions[1].decode, 5)
            third = spawn(nursery, sessions[2].decode, 5, scope=scope)
            await wait_all_tasks_blocked()
            await rig.one_call()
            scope.cancel()
            await wait_all_tasks_blocked()
            assert isinstance(third.error, trio.Cancelled)
            rig.all_calls()
        assert first.error is second.error is None
        assert [group[0].slot for group in rig.engine.calls[made:]] == [0, 1]
        await decode_on(sessions[2], rig, [2, 3], 1)
