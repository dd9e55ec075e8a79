"""Exact mode: whoever else is there, a session's output is that of the same calls made alone, bit for bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from hotkv_trio import open_runtime
from tests.isolation._programs import are_equal, perform_all, random_program, run_alone

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotkv_trio.llama import KVType
    from tests.isolation._programs import Case


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize("weights", ["f32", "q8_0"])
@pytest.mark.parametrize("n_sessions", [2, 4, 8, 16])
async def test_every_logit_is_that_of_the_session_alone(
    n_sessions: int, weights: str, kv: KVType, make_case: Callable[[str, KVType, int], Case]
) -> None:
    """llama.cpp #24962: logits differ when others share the batch."""
    rng = random.Random(f"{n_sessions} {weights} {kv}")
    case = make_case(weights, kv, n_sessions)
    # Both sides of 64 (another path for the queries of one call) and of 512 (another for the cells attended to).
    lengths = [rng.randint(500, 515), rng.randint(60, 130), *(rng.randint(1, 90) for _ in range(n_sessions - 2))]
    programs = [random_program(rng, first=n, n_decodes=rng.randint(12, 24)) for n in lengths]
    prefill_chunk = rng.choice([16, 40, 64, 100, 300])
    async with open_runtime(case.engine(), prefill_chunk=prefill_chunk, exact=True) as runtime:
        together = await perform_all(runtime, programs, jitter=rng)
    for program, outputs in zip(programs, together, strict=True):
        assert are_equal(outputs, await run_alone(case.engine, program, prefill_chunk=prefill_chunk))


@pytest.mark.parametrize("n_tokens", [8, 40, 300])
async def test_a_long_decode_beside_neighbours(n_tokens: int, make_case: Callable[[str, KVType, int], Case]) -> None:
    """llama.cpp #24962: prefill of 8, 40 and 300 tokens, then decoding past 512."""
    rng = random.Random(n_tokens)
    case = make_case("f32", "f16", 3)
    long = random_program(rng, first=n_tokens, n_decodes=530 - n_tokens)
    neighbours = [random_program(rng, first=rng.randint(1, 90), n_decodes=60) for _ in range(2)]
    async with open_runtime(case.engine(), exact=True) as runtime:
        together = await perform_all(runtime, [*neighbours, long], jitter=rng)
    assert are_equal(together[-1], await run_alone(case.engine, long, prefill_chunk=128))
