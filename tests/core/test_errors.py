"""The error table of the design, row by row: what raises it, and what is true of the session afterwards."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import hotkv_trio
from hotkv_trio import (
    BudgetExceeded,
    CacheMiss,
    ContextFull,
    EngineFailed,
    HotKVError,
    InvalidInput,
    MissReason,
    PositionMismatch,
    RecipeMismatch,
    RuntimeClosed,
    SessionExists,
    StaleEpoch,
    TruncateUnsupported,
)
from hotkv_trio.testing import FakeEngine
from tests.core._rig import SLOT, Rig, hold_open, hold_pinned, key, native_failure, open_rig, spawn

if TYPE_CHECKING:
    from hotkv_trio import Session
    from hotkv_trio._engine import Memory

EXAMPLES: list[HotKVError] = [
    CacheMiss(key("a"), MissReason.EVICTED, 7),
    StaleEpoch(key("a", 1), 2),
    RecipeMismatch({"n_swa": (0, 512)}),
    PositionMismatch(at=3, length=5),
    BudgetExceeded(requested=640, total=100),
    ContextFull(length=60, limit=64, appended=5),
    InvalidInput("tokens must be integers"),
    TruncateUnsupported(key("a"), 3, "recurrent"),
    SessionExists(key("a")),
    EngineFailed(2, "aborted"),
    RuntimeClosed(),
]
CODES = {
    "CacheMiss": "cache_miss",
    "StaleEpoch": "stale_epoch",
    "RecipeMismatch": "recipe_mismatch",
    "PositionMismatch": "position_mismatch",
    "BudgetExceeded": "budget_exceeded",
    "ContextFull": "context_full",
    "InvalidInput": "invalid_input",
    "TruncateUnsupported": "truncate_unsupported",
    "SessionExists": "session_exists",
    "EngineFailed": "engine_failed",
    "RuntimeClosed": "runtime_closed",
}


def test_every_error_has_its_stable_code() -> None:
    classes = [value for value in vars(hotkv_trio).values() if inspect.isclass(value)]
    errors = {one.__name__: one.code for one in classes if issubclass(one, HotKVError) and one is not HotKVError}
    assert errors == CODES
    assert sorted(type(example).__name__ for example in EXAMPLES) == sorted(CODES)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_every_error_has_plain_fields_and_says_them(error: HotKVError) -> None:
    said = str(error)
    for field in attrs.fields(type(error)):
        value = getattr(error, field.name)
        for part in [value] if not isinstance(value, dict) else [*value, *value["n_swa"]]:
            assert str(part) in said
    copy = attrs.evolve(error)
    assert copy is not error
    assert str(copy) == said


@pytest.mark.parametrize("reason", MissReason)
def test_miss_reasons_are_their_own_names_on_the_wire(reason: MissReason) -> None:
    assert str(reason) == reason.value == reason.name.lower()


async def still_works(rig: Rig, session: Session, history: list[int]) -> None:
    """Whether the session is exactly what its history says."""
    assert session.hot
    assert session.length == len(history)
    history.append(9)
    result = await session.decode(9, at=len(history) - 1)
    assert rig.is_solo(result.output, history)
    await session.truncate(len(history) - 1)
    history.pop()


async def assert_cold(session: Session, reason: MissReason) -> None:
    """Cold: it holds nothing, misses with the reason, and starts again at 0."""
    assert not session.hot
    assert session.length == 0
    for attempt in (session.decode(1), session.prefill([1, 2], at=2), session.truncate(0)):
        with pytest.raises(CacheMiss) as caught:
            await attempt
        assert (caught.value.key, caught.value.reason, caught.value.resume_at) == (session.key, reason, 0)


async def starts_again(rig: Rig, session: Session) -> None:
    result = await session.prefill([4, 5], at=0)
    assert (result.position, result.length) == (0, 2)
    assert rig.is_solo(result.output, [4, 5])


async def test_cache_miss_unknown() -> None:
    async with open_rig() as rig:
        with pytest.raises(CacheMiss) as caught:
            rig.runtime.get(key("never"))
        assert (caught.value.reason, caught.value.resume_at) == (MissReason.UNKNOWN, 0)


async def test_cache_miss_released() -> None:
    async with open_rig() as rig:
        async with rig.runtime.open_session(key("a")) as session:
            await session.prefill([1, 2])
        with pytest.raises(CacheMiss) as caught:
            rig.runtime.get(key("a"))
        assert caught.value.reason is MissReason.RELEASED
        await assert_cold(session, MissReason.RELEASED)


async def test_cache_miss_expired(autojump_clock: MockClock) -> None:
    async with open_rig(idle_ttl=10, seconds=1000) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        await trio.sleep(11)
        await assert_cold(session, MissReason.EXPIRED)
        await starts_again(rig, session)


async def test_cache_miss_evicted() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        async with rig.runtime.open_session(key("b")):
            await assert_cold(session, MissReason.EVICTED)
        await starts_again(rig, session)


async def test_cache_miss_failed() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.engine.fail("process", native_failure())
        rig.engine.fail("truncate", native_failure())
        with pytest.raises(EngineFailed):
            await session.decode(3)
        await assert_cold(session, MissReason.FAILED)
        await starts_again(rig, session)


async def test_cache_miss_beyond() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        with pytest.raises(CacheMiss) as caught:
            await session.prefill([1], at=3)
        assert (caught.value.reason, caught.value.resume_at) == (MissReason.BEYOND, 0)
        await session.prefill([1, 2])
        with pytest.raises(CacheMiss) as caught:
            await session.prefill([1], at=3)
        assert (caught.value.reason, caught.value.resume_at) == (MissReason.BEYOND, 2)
        await still_works(rig, session, [1, 2])


async def test_a_session_that_never_had_kv_starts_without_at_after_it_was_evicted() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.runtime.open_session(key("a")) as session:
        async with rig.runtime.open_session(key("b")):
            assert not session.hot
        with pytest.raises(CacheMiss) as caught:
            await session.prefill([1], at=1)
        assert caught.value.reason is MissReason.BEYOND
        result = await session.prefill([1, 2])
        assert rig.is_solo(result.output, [1, 2])


async def test_stale_epoch_at_open_at_any_call_and_for_work_under_way() -> None:
    """Each of these is in test_fencing.py with what must not happen natively; here the row of the table."""
    async with open_rig() as rig, rig.runtime.open_session(key("a", 1)) as old:
        await old.prefill([1, 2])
        rig.executor.hold()
        async with trio.open_nursery() as nursery:
            running = spawn(nursery, old.decode, 3)
            await wait_all_tasks_blocked()
            queued = spawn(nursery, old.decode, 4)
            await wait_all_tasks_blocked()
            opener = spawn(nursery, hold_open, rig.runtime, key("a", 2))
            await wait_all_tasks_blocked()
            rig.executor.resume()
            await wait_all_tasks_blocked()
            for caught in (running, queued):
                assert isinstance(caught.error, StaleEpoch)
                assert (caught.error.key, caught.error.current) == (key("a", 1), 2)
            assert not opener.done
            for attempt in (old.decode(1), old.truncate(0), rig.runtime.release(key("a", 1))):
                with pytest.raises(StaleEpoch):
                    await attempt
            with pytest.raises(StaleEpoch):
                async with rig.runtime.open_session(key("a", 1)):
                    pass
            assert (old.hot, old.length) == (False, 0)
            nursery.cancel_scope.cancel()


async def test_recipe_mismatch() -> None:
    async with open_rig() as rig:
        recipe = rig.runtime.recipe
        with pytest.raises(RecipeMismatch) as caught:
            async with rig.runtime.open_session(key("a"), recipe=attrs.evolve(recipe, type_k="q8_0", n_swa=4)):
                pass
        assert caught.value.fields == {"type_k": ("f16", "q8_0"), "n_swa": (0, 4)}
        assert (rig.statistics.opened, rig.limiter.borrowed_bytes) == (0, 0)
        with pytest.raises(CacheMiss) as missed:
            rig.runtime.get(key("a"))
        assert missed.value.reason is MissReason.UNKNOWN
        async with rig.runtime.open_session(key("a"), recipe=attrs.evolve(recipe)) as session:
            assert session.hot


async def test_a_recipe_that_is_none_is_refused() -> None:
    async with open_rig() as rig:
        digest: Any = rig.runtime.recipe.digest()
        with pytest.raises(InvalidInput, match="recipe"):
            await rig.runtime.start_session(key("a"), recipe=digest)


@pytest.mark.parametrize("at", [0, 1])
async def test_position_mismatch(at: int) -> None:
    """mesh-llm #1544: an append at length - 1, length, length + 1: only length, and refused before the native call."""
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        calls = len(rig.engine.calls)
        for attempt in (session.prefill([3, 4], at=at), session.decode(3, at=at)):
            with pytest.raises(PositionMismatch) as caught:
                await attempt
            assert (caught.value.at, caught.value.length) == (at, 2)
        assert len(rig.engine.calls) == calls
        await still_works(rig, session, [1, 2])


async def test_budget_exceeded_at_open() -> None:
    async with open_rig(kv_budget=SLOT - 1) as rig:
        with pytest.raises(BudgetExceeded) as caught:
            async with rig.runtime.open_session(key("a")):
                pass
        assert (caught.value.requested, caught.value.total) == (SLOT, SLOT - 1)
        assert rig.statistics.opened == 0


async def test_budget_exceeded_by_a_cold_session_that_starts_again() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.limiter.total_bytes = SLOT - 1
        await wait_all_tasks_blocked()
        await assert_cold(session, MissReason.EVICTED)
        with pytest.raises(BudgetExceeded):
            await session.prefill([1, 2], at=0)
        rig.limiter.total_bytes = SLOT
        await starts_again(rig, session)


async def test_context_full() -> None:
    """llama.cpp #23652, lemonade #3276: one full session must not end the others."""
    async with open_rig() as rig, rig.runtime.open_session(key("b")) as other:
        history = [1] * 60
        async with rig.runtime.open_session(key("a")) as session:
            await session.prefill(history)
            with pytest.raises(ContextFull) as caught:
                await session.prefill([2] * 5)
            assert (caught.value.length, caught.value.limit, caught.value.appended) == (60, 64, 5)
            await still_works(rig, session, history)
            await session.prefill([2] * 4)
            with pytest.raises(ContextFull):
                await session.decode(1)
            assert session.length == 64
            await session.truncate(60)
            await still_works(rig, session, history)
        await other.prefill([3, 4])
        await still_works(rig, other, [3, 4])


async def test_context_full_of_a_session_that_is_empty() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        with pytest.raises(ContextFull):
            await session.prefill([1] * 65)
        assert rig.engine.calls == []
        assert session.hot


async def test_invalid_input() -> None:
    """Every kind of it is in test_inputs.py."""
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        calls = len(rig.engine.calls)
        output: Any = "first"
        for attempt in (
            session.prefill([]),
            session.prefill([99]),
            session.decode(99),
            session.prefill([1], at=-1),
            session.prefill([1], output=output),
            session.truncate(-1),
            session.truncate(3),
        ):
            with pytest.raises(InvalidInput):
                await attempt
        assert len(rig.engine.calls) == calls
        await still_works(rig, session, [1, 2])


@pytest.mark.parametrize("memory, n_swa, kept", [("recurrent", 0, 3), ("hybrid", 0, 3), ("sliding", 4, 3)])
async def test_truncate_unsupported(memory: Memory, n_swa: int, kept: int) -> None:
    """llama.cpp PR 28007, #23206, llama-cpp-python #2140: a refused rollback ignored is garbage later."""
    async with (
        open_rig(FakeEngine(memory=memory, n_swa=n_swa)) as rig,
        rig.runtime.open_session(key("a")) as session,
    ):
        await session.prefill([1] * 10)
        await session.truncate(10)
        assert session.length == 10
        with pytest.raises(TruncateUnsupported) as caught:
            await session.truncate(kept)
        assert (caught.value.key, caught.value.length, caught.value.memory) == (key("a"), kept, memory)
        await assert_cold(session, MissReason.FAILED)
        await starts_again(rig, session)
        await session.truncate(0)
        assert (session.hot, session.length) == (True, 0)
        await starts_again(rig, session)


async def test_a_window_is_cut_inside_and_not_below_it() -> None:
    async with (
        open_rig(FakeEngine(memory="sliding", n_swa=4)) as rig,
        rig.runtime.open_session(key("a")) as session,
    ):
        await session.prefill([1] * 10)
        await session.truncate(6)
        await still_works(rig, session, [1] * 6)


async def test_session_exists() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a", 1)) as session:
        await session.prefill([1, 2])
        with pytest.raises(SessionExists) as caught:
            async with rig.runtime.open_session(key("a", 1)):
                pass
        assert caught.value.key == key("a", 1)
        with pytest.raises(SessionExists):
            await rig.runtime.start_session(key("a", 1))
        await still_works(rig, session, [1, 2])
        assert rig.statistics.opened == 1


async def test_session_exists_also_while_the_first_still_waits() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, trio.open_nursery() as nursery:
        spawn(nursery, hold_pinned, rig, "holder")
        await wait_all_tasks_blocked()
        first = spawn(nursery, hold_open, rig.runtime, key("a"))
        await wait_all_tasks_blocked()
        with pytest.raises(SessionExists):
            await rig.runtime.start_session(key("a"))
        assert not first.done
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("code", [1, -1, -2, 2, -3])
async def test_engine_failed_leaves_the_session_as_it_was(code: int) -> None:
    """Ollama #10127: "no KV slot" must not end the process.  mesh-llm #1514: length moves only after success."""
    async with open_rig(prefill_chunk=2) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        for attempt in (session.decode, session.prefill):
            rig.engine.fail("process", native_failure(code))
            data: Any = 3 if attempt == session.decode else [3, 4, 5, 6, 7]
            with pytest.raises(EngineFailed) as caught:
                await attempt(data)
            assert (caught.value.native_code, caught.value.what) == (code, "told to fail")
            await still_works(rig, session, [1, 2])


async def test_engine_failed_in_the_middle_of_a_chunked_prefill_then_retried() -> None:
    """PR 3414 of omlx: a retry after a pause must not write rows twice."""
    tokens = list(range(1, 11))

    class FailsThird(FakeEngine):
        def process(self, group: Any) -> Any:
            if len(self.calls) == 2:
                self.fail("process", native_failure())
            return super().process(group)

    async with open_rig(FailsThird(), prefill_chunk=3) as rig, rig.runtime.open_session(key("a")) as session:
        with pytest.raises(EngineFailed):
            await session.prefill(tokens)
        assert (session.length, rig.holds(0)) == (0, 0)
        result = await session.prefill(tokens, output="all")
        assert len(result.output) == 10
        assert rig.is_solo(result.output, tokens)


async def test_engine_failed_leaves_neighbours_untouched_and_cuts_members_back() -> None:
    async with open_rig() as rig:
        runtime = rig.runtime
        async with (
            runtime.open_session(key("a")) as a,
            runtime.open_session(key("b")) as b,
            runtime.open_session(key("c")) as c,
        ):
            for number, session in enumerate([a, b, c]):
                await session.prefill([number + 1, 5])
            rig.engine.fail("process", native_failure())
            async with trio.open_nursery() as nursery:
                ended = [spawn(nursery, session.decode, 7) for session in (a, b)]
            assert len(rig.engine.calls[-1]) == 2, "both were in the one call that failed"
            errors = [caught.error for caught in ended]
            assert all(isinstance(error, EngineFailed) for error in errors)
            assert errors[0] is not errors[1], "one error in two tasks would gather both tracebacks"
            for number, session in enumerate([a, b, c]):
                await still_works(rig, session, [number + 1, 5])


@pytest.mark.parametrize("memory", ["recurrent", "hybrid"])
async def test_engine_failed_makes_a_member_cold_whose_memory_cannot_be_cut_back(memory: Memory) -> None:
    async with open_rig(FakeEngine(memory=memory)) as rig, rig.runtime.open_session(key("b")) as other:
        await other.prefill([3, 4])
        async with rig.runtime.open_session(key("a")) as session:
            await session.prefill([1, 2])
            rig.engine.fail("process", native_failure())
            with pytest.raises(EngineFailed):
                await session.decode(3)
            await assert_cold(session, MissReason.FAILED)
            assert rig.limiter.borrowed_bytes == SLOT
            await starts_again(rig, session)
        result = await other.decode(9, at=2)
        assert rig.is_solo(result.output, [3, 4, 9])


@pytest.mark.parametrize("memory", ["attention", "recurrent"])
async def test_engine_failed_on_a_first_prefill_leaves_an_empty_session(memory: Memory) -> None:
    async with open_rig(FakeEngine(memory=memory)) as rig, rig.runtime.open_session(key("a")) as session:
        rig.engine.fail("process", native_failure())
        with pytest.raises(EngineFailed):
            await session.prefill([1, 2, 3])
        assert (session.hot, session.length) == (True, 0)
        result = await session.prefill([1, 2, 3])
        assert rig.is_solo(result.output, [1, 2, 3])


async def test_engine_failed_in_truncate_makes_the_session_cold() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2, 3])
        rig.engine.fail("truncate", native_failure(-3))
        with pytest.raises(EngineFailed) as caught:
            await session.truncate(1)
        assert caught.value.native_code == -3
        await assert_cold(session, MissReason.FAILED)
        await starts_again(rig, session)


async def test_whatever_an_engine_raises_becomes_engine_failed() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        rig.engine.fail("process", OSError("disk on fire"))
        with pytest.raises(EngineFailed) as caught:
            await session.decode(3)
        assert (caught.value.native_code, caught.value.what) == (None, "OSError: disk on fire")
        await still_works(rig, session, [1, 2])
        rig.engine.fail("truncate", ZeroDivisionError("by zero"))
        with pytest.raises(EngineFailed, match="ZeroDivisionError: by zero"):
            await session.truncate(1)
        await assert_cold(session, MissReason.FAILED)


@pytest.mark.parametrize("wrong", [[], [0], [2, 1]])
async def test_rows_that_were_not_asked_for_are_a_failure_of_the_engine(wrong: list[int]) -> None:
    """An engine that miscounts must not leave its callers waiting, nor hand one's rows to another."""

    class Miscounts(FakeEngine):
        miscounting = False

        def process(self, group: Any) -> Any:
            rows = super().process(group)
            return [rows[0][[0] * count] for count in wrong] if self.miscounting else rows

    engine = Miscounts()
    async with open_rig(engine) as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        engine.miscounting = True
        with pytest.raises(EngineFailed, match="other rows than were asked for"):
            await session.decode(3)
        engine.miscounting = False
        await still_works(rig, session, [1, 2])


async def test_runtime_closed_after_the_end() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
    for attempt in (session.decode(1), session.truncate(0), rig.runtime.release(key("a"))):
        with pytest.raises(RuntimeClosed):
            await attempt
    with pytest.raises(RuntimeClosed):
        rig.runtime.get(key("a"))
    with pytest.raises(RuntimeClosed):
        async with rig.runtime.open_session(key("b")):
            pass
    assert (session.hot, session.length) == (False, 0)


async def test_waiting_for_a_slot_is_not_an_error_but_not_waiting_says_so() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig:
        async with rig.runtime.open_session(key("a"), pinned=True):
            with pytest.raises(trio.WouldBlock):
                async with rig.runtime.open_session(key("b"), wait=False):
                    pass
            assert rig.statistics.waiting == 0
        async with rig.runtime.open_session(key("b"), wait=False) as session:
            assert session.hot
