"""Hidden states that are not finite, or overflow: refused or harmless, for the neighbour and for the next tenant."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio

from hotkv_trio import Append, EngineFailed, InvalidInput, SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.llama._gate import Gate
from hotkv_trio.testing import InlineExecutor, build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from trio.testing import MockClock

    from hotkv_trio import Runtime, Session
    from hotkv_trio._engine import Rows

N_ROWS, N_EMBD = 40, 128
POISONS = [np.nan, np.inf, -np.inf]


def states(n: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, n]).standard_normal((n, N_EMBD), dtype=np.float32)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LlamaEngine]:
    """Return what makes an engine that takes hidden states: the later half of a llama, or another model as a whole."""
    folder = tmp_path_factory.mktemp("poison")

    def make(arch: str, **options: Any) -> LlamaEngine:
        path = folder / f"{arch}.gguf"
        if not path.exists():
            build_tiny_gguf(path, arch, n_layer=2)
        layers = (1, 2) if arch == "llama" else None
        return LlamaEngine(path, layers=layers, n_ctx=256, threads=1, cache_dir=folder, **({"n_slots": 3} | options))

    return make


@attrs.frozen(eq=False)
class Beside:
    """A neighbour at work, the same one with nobody beside it, and what a fresh slot answers."""

    runtime: Runtime
    neighbour: Session
    alone: LlamaEngine
    fresh: Rows

    async def check_neighbour(self, seed: int) -> None:
        data = states(1, seed)
        got = await self.neighbour.decode(data)
        (expected,) = self.alone.process([Append(0, got.position, data, "last")])
        assert np.array_equal(got.output, expected)
        if got.length > 200:
            await self.neighbour.truncate(50)
            assert self.alone.truncate(0, 50)

    async def check_next_tenant(self, name: str) -> None:
        """The next session in the slot that the poisoned one leaves."""
        async with self.runtime.open_session(SessionKey(f"after {name}", 0)) as tenant:
            assert tenant._tenancy is not None
            assert tenant._tenancy.slot == 1
            assert np.array_equal((await tenant.prefill(states(70, 2), output="all")).output, self.fresh)


@asynccontextmanager
async def beside(make: Callable[..., LlamaEngine], arch: str) -> AsyncGenerator[Beside]:
    alone = make(arch, n_slots=2)
    alone.open()
    try:
        alone.process([Append(0, 0, states(50, 1), "last")])
        (fresh,) = alone.process([Append(1, 0, states(70, 2), "all")])
        async with open_runtime(make(arch), exact=True, executor=InlineExecutor()) as runtime:
            async with runtime.open_session(SessionKey("neighbour", 0)) as neighbour:
                await neighbour.prefill(states(50, 1))
                yield Beside(runtime, neighbour, alone, fresh)
            assert runtime.limiter.borrowed_bytes == 0
            assert runtime.statistics().quarantined_slots == 0
    finally:
        alone.close()


async def test_every_place_of_a_state_one_at_a_time(make: Callable[..., LlamaEngine]) -> None:
    """Vllm PR 50283: a NaN request poisons reused blocks.  NaN and both infinities are refused in every element."""
    async with beside(make, "llama") as it:
        async with it.runtime.open_session(SessionKey("hostile", 0)) as hostile:
            calls = it.runtime.statistics().native_calls
            data = states(N_ROWS, 3)
            for place in range(data.size):
                kept = data.flat[place]
                for poison in POISONS:
                    data.flat[place] = poison
                    with pytest.raises(InvalidInput, match=f"row {place // N_EMBD} holds NaN or infinity"):
                        await hostile.prefill(data, output="all")
                data.flat[place] = kept
            assert it.runtime.statistics().native_calls == calls
            assert hostile.length == 0
            await it.check_neighbour(0)
        await it.check_next_tenant("hostile")


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
async def test_poison_that_reached_llama_cpp_stays_in_its_slot(
    make: Callable[..., LlamaEngine], arch: str, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if both checks had a hole: the output check finds it in every row, and the slot is scrubbed."""
    monkeypatch.setattr("hotkv_trio._session.check_append", lambda _, data: data)
    monkeypatch.setattr(Gate, "_check_hidden", lambda *_: None)
    async with beside(make, arch) as it:
        for row in range(N_ROWS):
            async with it.runtime.open_session(SessionKey(f"hostile {row}", 0)) as hostile:
                data = states(N_ROWS, row)
                data[row, 3 * row] = poison
                before = row % 2
                if before:
                    await hostile.prefill(states(5, 1))
                with pytest.raises(EngineFailed, match=r"the output of slots \[1\] is not finite"):
                    await hostile.prefill(data, output="last")
                # A slot that holds poison cannot be cut back, only emptied.
                assert (hostile.hot, hostile.length) == (not before, 0)
                await it.check_neighbour(row)
            if row % 8 == 0:
                await it.check_next_tenant(f"row {row}")


async def test_poison_in_a_recurrent_state_is_shut_away_until_it_can_be_wiped(
    make: Callable[..., LlamaEngine], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """llama.cpp starts a recurrent state as 0 times what lies there, wherever that is, and wiping takes everybody's.

    So until all are gone a newcomer may be refused; it is never served a wrong bit, and who is there is not harmed.
    """
    monkeypatch.setattr("hotkv_trio._session.check_append", lambda _, data: data)
    monkeypatch.setattr(Gate, "_check_hidden", lambda *_: None)
    fresh_engine = make("mamba")
    fresh_engine.open()
    (fresh,) = fresh_engine.process([Append(0, 0, states(70, 2), "all")])
    fresh_engine.process([Append(1, 0, states(50, 1), "last")])
    (next_row,) = fresh_engine.process([Append(1, 50, states(1, 4), "last")])
    fresh_engine.close()
    async with open_runtime(make("mamba"), exact=True, executor=InlineExecutor()) as runtime:
        async with runtime.open_session(SessionKey("neighbour", 0)) as neighbour:
            await neighbour.prefill(states(50, 1))
            async with runtime.open_session(SessionKey("hostile", 0)) as hostile:
                data = states(N_ROWS, 1)
                data[20, 3] = np.nan
                with pytest.raises(EngineFailed, match=r"the output of slots \[1\] is not finite"):
                    await hostile.prefill(data)
            assert runtime.statistics().quarantined_slots == 1
            async with runtime.open_session(SessionKey("other", 0)) as other:
                with suppress(EngineFailed):
                    assert np.array_equal((await other.prefill(states(70, 2), output="all")).output, fresh)
            assert np.array_equal((await neighbour.decode(states(1, 4))).output, next_row)
        await trio.sleep(200)
        assert runtime.statistics().quarantined_slots == 0
        async with AsyncExitStack() as stack:
            for name in "abc":
                session = await stack.enter_async_context(runtime.open_session(SessionKey(name, 0)))
                assert np.array_equal((await session.prefill(states(70, 2), output="all")).output, fresh)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2", "stablelm", "mamba", "jamba"])
async def test_huge_finite_states_are_refused_or_harmless(make: Callable[..., LlamaEngine], arch: str) -> None:
    """Values whose squares no longer add up in float32, and all below them, in one element, one row, and everywhere."""
    async with beside(make, arch) as it:
        refused = served = 0
        for number, exponent in enumerate([4, 8, 12, 14, 14.9, 15.1, 18, 19.5, 30, 38.5]):
            for where in (np.s_[7, 5], np.s_[20], np.s_[:]):
                async with it.runtime.open_session(SessionKey(f"{exponent} {where}", 0)) as hostile:
                    data = states(N_ROWS, 3)
                    data[where] = np.float32(10**exponent) * np.sign(data[where])
                    try:
                        await hostile.prefill(data, output="last")
                        served += 1
                    except (InvalidInput, EngineFailed):
                        refused += 1
                    await it.check_neighbour(number)
                await it.check_next_tenant(f"{exponent} {where}")
        assert min(refused, served) >= 9
