"""Turnstile: teams in turn, team mates together, nobody left behind; and what it does for a route."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from hotkv_trio import StepResult
from hotkv_trio.route import open_route
from hotkv_trio.route._turnstile import Turnstile
from hotkv_trio.testing import FakeEngine
from tests.route.test_route import WIDTH, collect

if TYPE_CHECKING:
    from hotkv_trio import EngineInfo, SessionKey
    from hotkv_trio._engine import Output
    from hotkv_trio.route import Route

settled = trio.testing.wait_all_tasks_blocked


class Gate:
    """A turnstile for teams of two, whose steps end when they are told."""

    def __init__(self) -> None:
        self.turnstile = Turnstile(lambda number: number // 2)
        self.inside: dict[int, trio.Event] = {}
        self.out: list[int] = []

    async def go(self, number: int, *, fail: bool = False) -> None:
        async def step() -> int:
            self.inside[number] = trio.Event()
            try:
                await self.inside[number].wait()
            finally:
                del self.inside[number]
            if fail:
                raise ValueError
            return number

        try:
            self.out.append(await self.turnstile.run(number, step))
        except ValueError:
            self.out.append(-number)


async def test_teams_take_turns_and_come_out_together() -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        for number in (0, 1, 2, 5, 3):
            nursery.start_soon(gate.go, number)
            await settled()
        assert list(gate.inside) == [0, 1]
        gate.inside[0].set()
        await settled()
        assert gate.out == []
        assert repr(gate.turnstile) == "<Turnstile, 1 inside, 3 waiting>"
        gate.inside[1].set()
        await settled()
        assert sorted(gate.out) == [0, 1]
        # Who has waited for longest chooses the team; its mate, who came after another's, goes with it.
        assert sorted(gate.inside) == [2, 3]
        for number in (2, 3):
            gate.inside[number].set()
        await settled()
        assert list(gate.inside) == [5]
        gate.inside[5].set()
    assert sorted(gate.out) == [0, 1, 2, 3, 5]
    assert repr(gate.turnstile) == "<Turnstile, 0 inside, 0 waiting>"


async def test_a_wave_that_somebody_has_left_takes_nobody_in() -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        for number in (0, 1):
            nursery.start_soon(gate.go, number)
        await settled()
        gate.inside[0].set()
        await settled()
        nursery.start_soon(gate.go, 0)
        await settled()
        assert list(gate.inside) == [1]
        gate.inside[1].set()
        await settled()
        assert list(gate.inside) == [0]
        gate.inside[0].set()
    assert sorted(gate.out) == [0, 0, 1]


async def test_a_step_that_fails_keeps_nobody_waiting() -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: gate.go(1, fail=True))
        await settled()
        for number in (0, 2):
            nursery.start_soon(gate.go, number)
            await settled()
        for number in (1, 0):
            gate.inside[number].set()
            await settled()
        assert list(gate.inside) == [2]
        gate.inside[2].set()
    assert sorted(gate.out) == [-1, 0, 2]


@pytest.mark.parametrize("state", ["waiting", "inside", "waiting for the wave", "admitted and cancelled at once"])
async def test_a_cancelled_step_keeps_nobody_waiting(state: str) -> None:
    gate = Gate()
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def victim() -> None:
            with scope:
                await gate.go(2 if state.startswith(("waiting", "admitted")) and "wave" not in state else 1)

        nursery.start_soon(gate.go, 0)
        await settled()
        nursery.start_soon(victim)
        await settled()
        nursery.start_soon(gate.go, 3)
        await settled()
        if "wave" in state:
            gate.inside[1].set()
            await settled()
        if "admitted" in state:
            gate.inside[0].set()
            while gate.turnstile._wave is not None and gate.turnstile._wave.team == 0:  # noqa: ASYNC110
                await trio.lowlevel.checkpoint()
        scope.cancel()
        await settled()
        if 0 in gate.inside:
            gate.inside[0].set()
            await settled()
        assert list(gate.inside) == [3]
        gate.inside[3].set()
    assert gate.out == [0, 3]
    assert gate.turnstile._wave is None


async def test_random_steps_all_end(autojump_clock: trio.testing.MockClock) -> None:
    rng, ended = random.Random(5), 0
    turnstile = Turnstile(lambda number: number % 3)
    inside: list[int] = []

    async def live(number: int) -> None:
        nonlocal ended

        async def step() -> None:
            inside.append(number % 3)
            try:
                assert len(set(inside)) == 1
                await trio.sleep(rng.choice([0, 0.1, 0.2]))
            finally:
                inside.remove(number % 3)

        for _ in range(50):
            with trio.move_on_after(rng.choice([0.1, 0.5, 100])):
                await turnstile.run(number, step)
            await trio.sleep(rng.choice([0, 0.1]))
        ended += 1

    with trio.fail_after(10_000):
        async with trio.open_nursery() as nursery:
            for number in range(9):
                nursery.start_soon(live, number)
    assert ended == 9
    assert turnstile._wave is None


class SlowShard:
    """A shard that takes all that waits into one call, which lasts a second and a tenth more for each session."""

    def __init__(self, layers: tuple[int, int]) -> None:
        options: dict[str, Any] = {"n_vocab": WIDTH} if layers[0] == 0 else {"n_vocab": 0, "n_embd": WIDTH}
        self.facts = attrs.evolve(FakeEngine(n_ctx_seq=128, n_slots=16, **options)._info, layers=layers, layer_count=4)
        self.calls: list[int] = []
        self.arrivals: list[trio.Event] = []

    def open_hop(self, nursery: trio.Nursery) -> SlowShard:
        nursery.start_soon(self._run)
        return self

    async def info(self) -> EngineInfo:
        await trio.lowlevel.checkpoint()
        return self.facts

    async def open(self, key: SessionKey) -> SlowShard:
        await trio.lowlevel.checkpoint()
        return self

    async def prefill(self, data: Any, *, at: int | None = None, output: Output = "last") -> StepResult:
        return await self.decode(data, at=at)

    async def decode(self, data: Any, *, at: int | None = None) -> StepResult:
        self.arrivals.append(done := trio.Event())
        await done.wait()
        return StepResult(at or 0, (at or 0) + 1, np.zeros((1, WIDTH), dtype=np.float32))

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()

    async def _run(self) -> None:
        while True:
            await trio.sleep(0.01)
            if self.arrivals:
                taken, self.arrivals = self.arrivals, []
                await trio.sleep(1 + 0.1 * len(taken))
                self.calls.append(len(taken))
                for done in taken:
                    done.set()


@pytest.mark.parametrize("n_sessions", [2, 4, 8, 16])
async def test_sessions_keep_both_shards_busy(n_sessions: int, autojump_clock: trio.testing.MockClock) -> None:
    """Half of them at each: neither all at one, which would take twice as long, nor one by one."""
    shards = [SlowShard((0, 2)), SlowShard((2, 4))]
    n_tokens = 40
    begun = trio.current_time()
    async with open_route(shards) as route, trio.open_nursery() as nursery:
        for _ in range(n_sessions):
            nursery.start_soon(_generate, route, n_tokens)
    each = 1 + 0.1 * n_sessions / 2
    assert trio.current_time() - begun < 1.1 * 2 * each * (n_tokens + 1)
    for shard in shards:
        assert shard.calls.count(n_sessions // 2) > 0.9 * len(shard.calls)


async def _generate(route: Route, n_tokens: int) -> None:
    async with route.open_session() as session:
        assert len(await collect(session, [1, 2, 3], n_tokens)) == n_tokens
