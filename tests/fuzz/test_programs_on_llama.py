"""Whole programs on tiny llama.cpp models: every session's output equals, bit for bit, a replay of its calls alone."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings

from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import ReplayOracle, build_tiny_gguf, run_program
from hotkv_trio.testing.programs import Fail
from hotkv_trio.testing.strategies import programs
from tests.fuzz.test_programs import FUZZ

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio.testing import Program

MODELS = {"attention": "llama", "sliding": "gemma3", "recurrent": "mamba", "hybrid": "jamba"}


def fuzz(folder: Path, memory: Any, n: int) -> int:
    path = build_tiny_gguf(folder / "tiny.gguf", arch=MODELS[memory], n_layer=2, n_embd=64, n_head=1, n_ff=64)
    make = partial(LlamaEngine, path, n_ctx=256, threads=1)
    oracle = ReplayOracle(make(n_slots=1))
    native_calls = 0

    @settings(FUZZ, max_examples=n)
    @given(programs(memories=[memory], weights={Fail: 0}, exact=True))
    def run(program: Program) -> None:
        nonlocal native_calls
        native_calls += run_program(program, engine=make(n_slots=program.slots), oracle=oracle).native_calls

    try:
        run()
    finally:
        oracle.close()
    return native_calls


@pytest.mark.parametrize("memory", MODELS)
def test_outputs_are_those_of_a_session_alone(tmp_path: Path, memory: str) -> None:
    assert fuzz(tmp_path, memory, 30) > 30


@pytest.mark.slow  # minutes
@pytest.mark.parametrize("memory", MODELS)
def test_outputs_are_those_of_a_session_alone_at_length(tmp_path: Path, memory: str) -> None:
    assert fuzz(tmp_path, memory, 500) > 500
