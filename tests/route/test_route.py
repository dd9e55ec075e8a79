"""A route of shards: the same tokens, whatever happens to the shards meanwhile."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from hotkv_trio import (
    EngineFailed,
    InvalidInput,
    RecipeMismatch,
    Runtime,
    SessionKey,
    StaleEpoch,
    open_runtime,
)
from hotkv_trio.route import ShardAddress, greedy, open_route
from hotkv_trio.serve import ConnectionLost, ShardServer, open_shard_client
from hotkv_trio.testing import FakeEngine, InlineExecutor

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from hotkv_trio.route import Route, RouteSession

WIDTH = 16


def first_engine(**options: Any) -> FakeEngine:
    return FakeEngine(n_vocab=WIDTH, n_ctx_seq=128, **options)


def second_engine(**options: Any) -> FakeEngine:
    return FakeEngine(n_vocab=0, n_embd=WIDTH, n_ctx_seq=128, **options)


def of_another_model() -> FakeEngine:
    engine = second_engine()
    recipe = attrs.evolve(engine._info.recipe, model_digest="74ccf82e")
    engine._info = attrs.evolve(engine._info, recipe=recipe)
    return engine


class Shard:
    """A shard server on a Unix socket that can be killed, with all it remembers, and started again."""

    def __init__(self, engine: Any, path: Any, nursery: trio.Nursery) -> None:
        self.make_engine = engine
        self.where = f"unix:{path}"
        self.nursery = nursery
        self.life = trio.CancelScope()
        self.dead = trio.Event()
        self.runtime: Runtime
        self.engines: list[FakeEngine] = []

    async def start(self) -> None:
        self.life, self.dead = trio.CancelScope(), trio.Event()
        await self.nursery.start(self._live)

    async def _live(self, *, task_status: trio.TaskStatus[None]) -> None:  # noqa: ASYNC114
        self.engines.append(self.make_engine())
        try:
            with self.life:
                async with (
                    open_runtime(self.engines[-1], executor=InlineExecutor()) as self.runtime,
                    trio.open_nursery() as nursery,
                ):
                    await nursery.start(ShardServer(self.runtime).serve, self.where)
                    task_status.started()
        finally:
            self.dead.set()

    async def kill(self) -> None:
        self.life.cancel()
        await self.dead.wait()


@attrs.frozen(eq=False)
class Rig:
    shards: list[Shard]
    nursery: trio.Nursery

    def route(self, **options: Any) -> Any:
        return open_route([shard.where for shard in self.shards], **{"jitter": lambda: 0.0, **options})


@asynccontextmanager
async def open_rig(path: Any, *engines: Any) -> AsyncGenerator[Rig]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            engines = engines or (first_engine, second_engine)
            shards = [Shard(engine, path / f"{i}.sock", nursery) for i, engine in enumerate(engines)]
            for shard in shards:
                await shard.start()
            try:
                yield Rig(shards, nursery)
            finally:
                nursery.cancel_scope.cancel()
    for shard in shards:
        shard.runtime.check_integrity()
        assert shard.runtime.statistics().lent_slots == 0
        for engine in shard.engines:
            assert engine.violations == []


async def undisturbed(prompt: Sequence[int], n: int, *, replay: Any = "exact") -> list[int]:
    """Return what a route of two runtimes in this process generates when nothing happens."""
    async with AsyncExitStack() as stack:
        runtimes = [
            await stack.enter_async_context(open_runtime(engine, executor=InlineExecutor()))
            for engine in (first_engine(), second_engine())
        ]
        route = await stack.enter_async_context(open_route(runtimes, replay=replay))
        session = await stack.enter_async_context(route.open_session())
        return await collect(session, prompt, n)


async def collect(session: RouteSession, prompt: Sequence[int], n: int, **options: Any) -> list[int]:
    async with session.generate(prompt, n, **options) as tokens:
        return [token async for token in tokens]


async def test_a_route_is_the_model() -> None:
    prompt = [1, 2, 3, 4, 5]
    async with AsyncExitStack() as stack:
        executor = InlineExecutor
        first, second = [
            await stack.enter_async_context(open_runtime(engine, executor=executor()))
            for engine in (first_engine(), second_engine())
        ]
        route = await stack.enter_async_context(open_route([first, second], prefill_chunk=2))
        session = await stack.enter_async_context(route.open_session("a", epoch=4))
        got = await collect(session, prompt, 6)
        assert first.statistics().hot == second.statistics().hot == 1

        one = await stack.enter_async_context(first.open_session(SessionKey("by hand", 0)))
        two = await stack.enter_async_context(second.open_session(SessionKey("by hand", 0)))
        tokens, expected = prompt, []
        for _ in range(6):
            hidden = await one.prefill(tokens, output="all")
            expected.append(greedy((await two.prefill(hidden.output)).output[0]))
            tokens = [expected[-1]]
        assert got == expected
        assert session.history == (*prompt, *got[:-1])
        assert session.key == SessionKey("a", 4)
        assert session.replays == 0
        assert "layers 0:2, 2:4" in repr(route)
        # A further prompt goes on from there, with the last token before it.
        more = await collect(session, [7], 2)
        hidden = await one.prefill([got[-1], 7], output="all")
        assert more[0] == greedy((await two.prefill(hidden.output)).output[0])


async def test_sessions_end_with_their_scope_and_stop_tokens_stop(tmp_path: Any) -> None:
    async with open_rig(tmp_path) as rig, rig.route() as route:
        async with route.open_session() as session:
            whole = await collect(session, [1, 2], 8)
        async with route.open_session() as session:
            index = whole.index(whole[2])
            assert await collect(session, [1, 2], 8, stop=[whole[2]]) == whole[: index + 1]
            assert await collect(session, [], 8 - index - 1) == whole[index + 1 :]
        assert [shard.runtime.statistics().lent_slots for shard in rig.shards] == [0, 0]


@pytest.mark.parametrize("replay", ["exact", "fast"])
@pytest.mark.parametrize("killed", [0, 1])
async def test_a_killed_and_restarted_shard_costs_no_token(tmp_path: Any, replay: Any, killed: int) -> None:
    prompt = [3, 1, 4, 1, 5]
    expected = await undisturbed(prompt, 12)
    async with open_rig(tmp_path) as rig, rig.route(replay=replay) as route, route.open_session() as session:
        got = []
        async with session.generate(prompt, 12) as tokens:
            async for token in tokens:
                got.append(token)
                if len(got) in {1, 5, 11}:
                    await rig.shards[killed].kill()
                    await rig.shards[killed].start()
        assert got == expected
        assert session.replays == 3
        assert session.key.route_epoch == 3
        last = rig.shards[killed].engines[-1]
        shapes = [append.n_tokens for group in last.calls for append in group]
        assert shapes == ([5, *[1] * 11] if replay == "exact" else [15, 1])


async def test_a_shard_that_stays_away_for_a_while(tmp_path: Any) -> None:
    expected = await undisturbed([1, 2], 6)
    missed = 0

    def jitter() -> float:
        nonlocal missed
        missed += 1
        if missed == 3:
            rig.nursery.start_soon(rig.shards[1].start)
        return 0.0

    async with open_rig(tmp_path) as rig, rig.route(jitter=jitter) as route, route.open_session() as session:
        got = await collect(session, [1, 2], 3)
        await rig.shards[1].kill()
        got += await collect(session, [], 3)
        assert got == expected
        assert missed >= 3


async def test_a_shard_that_stays_away_for_good(tmp_path: Any) -> None:
    async with open_rig(tmp_path) as rig:
        async with rig.route(max_attempts=3) as route, route.open_session() as session:
            got = await collect(session, [1, 2], 3)
            history = session.history
            await rig.shards[1].kill()
            with pytest.raises(ConnectionLost):
                await session.append([5])
            assert session.history == history
            await rig.shards[1].start()
            got += await collect(session, [], 3)
        assert got == await undisturbed([1, 2], 6)
        assert [shard.runtime.statistics().lent_slots for shard in rig.shards] == [0, 0]


async def test_another_model_in_a_shards_place_is_refused(tmp_path: Any) -> None:
    async with open_rig(tmp_path) as rig, rig.route() as route, route.open_session() as session:
        await collect(session, [1, 2], 2)
        await rig.shards[1].kill()
        rig.shards[1].make_engine = lambda: FakeEngine(n_vocab=0, n_embd=WIDTH, n_ctx_seq=64)
        await rig.shards[1].start()
        with pytest.raises(RecipeMismatch, match="n_ctx_seq"):
            await session.append([1])


async def test_an_eviction_anywhere_is_made_good(tmp_path: Any) -> None:
    expected = await undisturbed([1, 2], 6)
    async with open_rig(tmp_path) as rig, rig.route() as route, route.open_session() as session:
        got = await collect(session, [1, 2], 3)
        limiter = rig.shards[0].runtime.limiter
        total, limiter.total_bytes = limiter.total_bytes, 1
        await trio.testing.wait_all_tasks_blocked()
        limiter.total_bytes = total
        got += await collect(session, [], 3)
        assert got == expected
        assert session.replays == 1


async def test_many_sessions_while_shards_are_killed_at_random(tmp_path: Any) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(WIDTH) for _ in range(rng.randrange(1, 9))] for _ in range(8)]
    expected = [await undisturbed(prompt, 20) for prompt in prompts]
    makers = (partial(first_engine, n_slots=4), partial(second_engine, n_slots=6))
    async with open_rig(tmp_path, *makers) as rig, rig.route() as route:
        got: dict[int, list[int]] = {}
        done = trio.Event()

        async def work(number: int) -> None:
            async with route.open_session() as session:
                got[number] = await collect(session, prompts[number], 20)

        async def havoc() -> None:
            for _ in range(6):
                for _ in range(rng.randrange(100, 400)):
                    await trio.lowlevel.checkpoint()
                if done.is_set():
                    break
                shard = rng.choice(rig.shards)
                await shard.kill()
                await shard.start()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(havoc)
            async with trio.open_nursery() as workers:
                for number in range(len(prompts)):
                    workers.start_soon(work, number)
            done.set()
        assert [got[number] for number in range(len(prompts))] == expected
        engines = [engine for shard in rig.shards for engine in shard.engines]
        assert len(engines) > 2, "some were killed"
        assert max(len(group) for engine in engines for group in engine.calls) > 1


async def test_who_takes_over_an_id_fences_the_other_off_for_good(tmp_path: Any) -> None:
    async with (
        open_rig(tmp_path) as rig,
        rig.route() as route,
        route.open_session("shared") as old,
        route.open_session("shared", epoch=5) as new,
    ):
        await collect(old, [1, 2], 2)
        got = await collect(new, [1, 2], 2)
        with pytest.raises(StaleEpoch) as stale:
            await old.append([3])
        assert stale.value.current == 5
        assert got + await collect(new, [], 2) == await undisturbed([1, 2], 4)


async def test_a_cancelled_step_leaves_the_history(tmp_path: Any) -> None:
    async with open_rig(tmp_path) as rig, rig.route() as route, route.open_session() as session:
        got = await collect(session, [1, 2], 3)
        history = session.history
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.append([9])
        assert session.history == history
        got += await collect(session, [], 3)
        assert got == await undisturbed([1, 2], 6)


async def test_an_engines_failure_is_raised_and_the_next_call_goes_on(tmp_path: Any) -> None:
    async with open_rig(tmp_path) as rig, rig.route() as route, route.open_session() as session:
        got = await collect(session, [1, 2], 3)
        rig.shards[1].engines[-1].fail("process", EngineFailed(-3, "told to"))
        with pytest.raises(EngineFailed, match="told to"):
            await collect(session, [], 3)
        got += await collect(session, [], 3)
        assert got == await undisturbed([1, 2], 6)


async def test_a_client_of_the_callers_own_is_not_called_again(tmp_path: Any) -> None:
    async with open_rig(tmp_path) as rig, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(open_shard_client(shard.where)) for shard in rig.shards]
        route: Route = await stack.enter_async_context(open_route(clients, max_attempts=2, jitter=lambda: 0.0))
        session = await stack.enter_async_context(route.open_session())
        assert await collect(session, [1, 2], 3) == await undisturbed([1, 2], 3)
        await rig.shards[0].kill()
        await rig.shards[0].start()
        with pytest.raises(ConnectionLost):
            await session.append([1])


async def test_a_route_waits_for_room_for_its_own_sessions(tmp_path: Any) -> None:
    engines = (partial(first_engine, n_slots=2), second_engine)
    async with open_rig(tmp_path, *engines) as rig, rig.route() as route:
        async with route.open_session(), route.open_session():
            with trio.move_on_after(0.01) as scope:
                async with route.open_session():
                    pytest.fail("a third session on two slots")
            assert scope.cancelled_caught
        async with route.open_session() as session:
            await session.append([1])


async def test_a_samplers_state_is_used_once_for_each_token(tmp_path: Any) -> None:
    def seeded() -> Any:
        rng = np.random.default_rng(1)

        def sample(logits: Any) -> int:
            return int(rng.choice(WIDTH, p=logits / logits.sum(dtype=np.float64)))

        return sample

    async with open_rig(tmp_path) as rig, rig.route() as route:
        async with route.open_session() as session:
            expected = await collect(session, [1, 2], 8, sampler=seeded())
        async with route.open_session() as session:
            got = []
            async with session.generate([1, 2], 8, sampler=seeded()) as tokens:
                async for token in tokens:
                    got.append(token)
                    if len(got) == 4:
                        await rig.shards[1].kill()
                        await rig.shards[1].start()
        assert got == expected


async def test_shards_that_do_not_fit_together_are_refused() -> None:
    async with AsyncExitStack() as stack:
        runtimes = [
            await stack.enter_async_context(open_runtime(engine, executor=InlineExecutor()))
            for engine in (FakeEngine(), FakeEngine(n_vocab=0, n_embd=8), second_engine(), of_another_model())
        ]
        first, narrow, second, other = runtimes
        refused: list[tuple[list[Any], str]] = [
            ([], "at least one"),
            ([second], "begins with"),
            ([first, narrow], "give 16 values, 2:4 take 8"),
            ([first, second, second], "not followed by"),
            ([first, other], "0:2 and 2:4 are of different models, by the digests fake and 74ccf82e"),
            ([first, 3], "a shard is"),
            ([first, "nowhere"], "HOST:PORT"),
        ]
        for shards, match in refused:
            with pytest.raises(InvalidInput, match=match):
                async with open_route(shards):
                    pytest.fail("opened")
        for options, match in (
            ({"replay": "slow"}, "replay"),
            ({"prefill_chunk": 0}, "prefill_chunk"),
            ({"max_sessions": 0}, "max_sessions"),
        ):
            with pytest.raises(InvalidInput, match=match):
                async with open_route([first], **options):
                    pytest.fail("opened")
        async with open_route([first]) as route, route.open_session() as session:
            with pytest.raises(InvalidInput, match="at least one token"):
                await session.append([])
            with pytest.raises(InvalidInput, match="from 0 to 15"):
                await session.append([99])
            assert len(await session.append([1])) == WIDTH
        with pytest.raises(ConnectionLost):
            async with open_route([ShardAddress(where="unix:/nowhere/at/all", token="t" * 16)]):
                pytest.fail("opened")
    assert "tttt" not in repr(ShardAddress(where="unix:/x", token="t" * 16))
