"""Grouped mode: for one schedule, what the neighbours hold changes not one bit of a session's output."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Literal

import attrs
import pytest

from hotkv_trio import open_runtime
from hotkv_trio.testing import InlineExecutor, ScheduleTape
from tests.isolation._programs import are_equal, perform_all, random_program, run_alone, with_other_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotkv_trio import Append
    from hotkv_trio._engine import Rows
    from hotkv_trio.llama import KVType, LlamaEngine
    from tests.isolation._programs import Case, Outputs, Program


def run_grouped(
    case: Case, programs: Sequence[Program], schedule: Sequence[int], *, prefill_chunk: int
) -> tuple[list[Outputs], list[tuple[tuple[int, int], ...]]]:
    """Run programs all at once under one schedule.

    Returns:
        Their outputs, and each native call as its members' slots and numbers of tokens.
    """
    engine = case.engine()
    calls: list[tuple[tuple[int, int], ...]] = []
    process = engine.process

    def record(_: LlamaEngine, group: Sequence[Append]) -> list[Rows]:
        calls.append(tuple((append.slot, append.n_tokens) for append in group))
        return process(group)

    async def main() -> list[Outputs]:
        async with open_runtime(engine, prefill_chunk=prefill_chunk, executor=InlineExecutor()) as runtime:
            return await perform_all(runtime, programs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(engine), "process", record)
        return ScheduleTape(schedule).run(main), calls


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("weights", ["f32", "q8_0"])
@pytest.mark.parametrize("n_sessions", [2, 4, 8, 16])
def test_the_neighbours_tokens_move_no_bit(
    n_sessions: int, weights: str, kv: KVType, make_case: Callable[[str, KVType, int], Case]
) -> None:
    """LMCache #4385, mlx-lm #965: answers carry other sessions' content.

    With weights and KV in q8_0, where the CPU kernels are batch-invariant, each output is also that of the session
    alone, bit for bit, without exact mode.
    """
    rng = random.Random(f"{n_sessions} {weights} {kv}")
    case = make_case(weights, kv, n_sessions)
    lengths = [rng.randint(500, 515), rng.randint(60, 130), *(rng.randint(1, 90) for _ in range(n_sessions - 2))]
    programs = [random_program(rng, first=n, n_decodes=rng.randint(12, 24)) for n in lengths]
    schedule = [rng.randrange(50) for _ in range(200)]
    prefill_chunk = rng.choice([16, 40, 64, 100, 300])
    outputs, calls = run_grouped(case, programs, schedule, prefill_chunk=prefill_chunk)
    assert max(map(len, calls)) > 1
    for kept in rng.sample(range(n_sessions), 2):
        others = [p if i == kept else with_other_tokens(p, rng) for i, p in enumerate(programs)]
        moved, same_calls = run_grouped(case, others, schedule, prefill_chunk=prefill_chunk)
        assert same_calls == calls
        assert are_equal(moved[kept], outputs[kept])
        assert not any(are_equal(moved[i], outputs[i]) for i in range(n_sessions) if i != kept)
    if weights == kv == "q8_0":
        for program, got in zip(programs, outputs, strict=True):
            assert are_equal(got, ScheduleTape().run(_alone, case, program, prefill_chunk))


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("n_sessions", [4, 16])
def test_the_neighbours_tokens_move_no_bit_in_a_shared_pool(
    n_sessions: int, kind: Literal["f16", "q8_0"], make_case: Callable[[str, KVType, int], Case]
) -> None:
    """LMCache #4385, mlx-lm #965: what the unified layout promises, for one schedule; slots need not be consecutive."""
    rng = random.Random(f"unified {n_sessions} {kind}")
    case = attrs.evolve(make_case(kind, kind, n_sessions), layout="unified")
    programs = [random_program(rng, first=rng.randint(1, 200), n_decodes=rng.randint(8, 24)) for _ in range(n_sessions)]
    schedule = [rng.randrange(50) for _ in range(200)]
    outputs, calls = run_grouped(case, programs, schedule, prefill_chunk=64)
    slots = [[slot for slot, _ in call] for call in calls]
    assert any(b - a > 1 for call in slots for a, b in itertools.pairwise(call)), "slots with a hole share a call"
    for kept in rng.sample(range(n_sessions), 2):
        others = [p if i == kept else with_other_tokens(p, rng) for i, p in enumerate(programs)]
        moved, same_calls = run_grouped(case, others, schedule, prefill_chunk=64)
        assert same_calls == calls
        assert are_equal(moved[kept], outputs[kept])
        assert not any(are_equal(moved[i], outputs[i]) for i in range(n_sessions) if i != kept)


async def _alone(case: Case, program: Program, prefill_chunk: int) -> Outputs:
    return await run_alone(case.engine, program, prefill_chunk=prefill_chunk, executor=InlineExecutor())
