"""Cancelling one session on llama.cpp: neighbours see no difference in any bit, and everything comes back."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from hotkv_trio import OwnerThread, SessionKey, open_runtime
from hotkv_trio._owner import call
from hotkv_trio.testing import InlineExecutor
from tests.isolation._programs import are_equal, perform, random_program, random_tokens, run_alone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hotkv_trio import Runtime, Session
    from hotkv_trio.llama import KVType, LlamaEngine
    from tests.isolation._programs import Case, Outputs


async def native_lengths(runtime: Runtime, engine: LlamaEngine) -> list[int]:
    return [await call(runtime._executor, partial(engine.length, slot)) for slot in range(runtime.info.n_slots)]


async def long_prefill(session: Session) -> None:
    await session.prefill(random_tokens(random.Random(1), 600))


async def endless_decode(session: Session) -> None:
    rng = random.Random(2)
    while True:
        if session.length > 500:
            await session.truncate(5)
        await session.decode(rng.randrange(512))


@pytest.mark.parametrize("executor", [InlineExecutor, OwnerThread])
@pytest.mark.parametrize("victims_work", [long_prefill, endless_decode])
@pytest.mark.parametrize("wait_calls", [0, 1, 2, 7])
async def test_cancelling_a_working_session(
    executor: Callable[[], InlineExecutor | OwnerThread],
    victims_work: Callable[[Session], Awaitable[None]],
    wait_calls: int,
    make_case: Callable[[str, KVType, int], Case],
) -> None:
    """llama.cpp #13262, ik_llama #1929: neighbours go on exactly, and the slot's next tenant finds it as new."""
    rng = random.Random(wait_calls)
    case = make_case("f32", "f16", 4)
    programs = [random_program(rng, first=rng.randint(1, 90), n_decodes=25) for _ in range(2)]
    outputs: list[Outputs] = [[], []]
    engine = case.engine()
    async with open_runtime(engine, exact=True, executor=executor()) as runtime:
        slot_bytes = runtime.info.slot_bytes

        async def neighbour(number: int, *, task_status: trio.TaskStatus[None]) -> None:
            async with runtime.open_session(SessionKey(f"neighbour-{number}", 0)) as session:
                task_status.started()
                outputs[number] = await perform(session, programs[number])
                await done.wait()

        async with trio.open_nursery() as nursery:
            done = trio.Event()
            for number in range(2):
                await nursery.start(neighbour, number)
            async with runtime.open_session(SessionKey("victim", 0)) as victim:
                assert runtime.limiter.borrowed_bytes == 3 * slot_bytes
                victim.nursery.start_soon(victims_work, victim)
                calls = runtime.statistics().native_calls + wait_calls
                while runtime.statistics().native_calls < calls:
                    await trio.lowlevel.checkpoint()
                victim.cancel("the test cancels it")
            # Before anything else ran:
            assert runtime.limiter.borrowed_bytes == 2 * slot_bytes
            assert runtime.statistics().free_slots == 2
            assert (await native_lengths(runtime, engine))[2:] == [0, 0]
            follower = random_program(rng, first=70, n_decodes=5)
            async with runtime.open_session(SessionKey("follower", 0)) as session:
                assert session._tenancy is not None
                assert session._tenancy.slot == 2
                assert are_equal(
                    await perform(session, follower), await run_alone(case.engine, follower, prefill_chunk=128)
                )
            done.set()
        assert runtime.limiter.borrowed_bytes == 0
        assert await native_lengths(runtime, engine) == [0, 0, 0, 0]
    for program, got in zip(programs, outputs, strict=True):
        assert are_equal(got, await run_alone(case.engine, program, prefill_chunk=128))


async def test_cancelling_a_session_that_waits_for_a_slot(make_case: Callable[[str, KVType, int], Case]) -> None:
    """Sglang #22273: nothing was taken, and the next in line gets the slot."""
    rng = random.Random(3)
    case = make_case("f32", "f16", 2)
    programs = [random_program(rng, first=rng.randint(1, 90), n_decodes=25) for _ in range(3)]
    outputs: dict[int, Outputs] = {}
    async with open_runtime(case.engine(), exact=True) as runtime:

        async def perform_one(number: int) -> None:
            async with runtime.open_session(SessionKey(f"session-{number}", 0), pinned=True) as session:
                outputs[number] = await perform(session, programs[number])
                await waiter_left.wait()

        async def wait(scope: trio.CancelScope) -> None:
            with scope:
                async with runtime.open_session(SessionKey("waiter", 0)):
                    pytest.fail("there was no slot")

        waiter_left = trio.Event()
        async with trio.open_nursery() as nursery:
            for number in range(2):
                nursery.start_soon(perform_one, number)
            while runtime.statistics().hot < 2:
                await trio.lowlevel.checkpoint()
            scope = trio.CancelScope()
            async with trio.open_nursery() as waiting:
                waiting.start_soon(wait, scope)
                while not runtime.statistics().waiting:
                    await trio.lowlevel.checkpoint()
                scope.cancel()
            assert scope.cancelled_caught
            assert runtime.statistics().opened == 3
            assert runtime.limiter.borrowed_bytes == 2 * runtime.info.slot_bytes
            assert runtime.statistics().waiting == 0
            waiter_left.set()
            nursery.start_soon(perform_one, 2)
        assert runtime.limiter.borrowed_bytes == 0
    assert len(outputs) == 3
    for number, got in outputs.items():
        assert are_equal(got, await run_alone(case.engine, programs[number], prefill_chunk=128))
