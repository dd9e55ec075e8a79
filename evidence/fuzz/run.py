"""The long runs: whole programs under drawn schedules, far more than the test suite runs by default.

Run from anywhere, with the package's test requirements installed::

    python evidence/fuzz/run.py fake --programs 100000 --seed 0
    python evidence/fuzz/run.py llama --programs 2000 --seed 0

``fake`` holds `FakeEngine` of three kinds of memory to the model; ``llama`` holds `LlamaEngine` with tiny models of
four kinds of memory, in exact mode, to a replay of each session's calls on an engine of its own, bit for bit.  Writes
``KIND-SEED.json`` beside itself: programs, distinct schedules, operations by outcome, seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import Program, ReplayOracle, build_tiny_gguf, run_program
from hotkv_trio.testing.programs import Fail
from hotkv_trio.testing.strategies import moving_programs, programs

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from hotkv_trio import Engine
    from hotkv_trio.testing import ProgramRun

MODELS = {"attention": "llama", "sliding": "gemma3", "recurrent": "mamba", "hybrid": "jamba"}
PART = 1000
"""Programs that one Hypothesis run draws: it slows down as it remembers more."""


class Tally:
    """What the programs came to."""

    def __init__(self) -> None:
        self.programs = self.steps = self.native_calls = 0
        self.schedules: set[bytes] = set()
        self.outcomes: Counter[str] = Counter()

    def add(self, run: ProgramRun) -> None:
        """Count one."""
        self.programs += 1
        self.steps += run.steps
        self.native_calls += run.native_calls
        self.schedules.add(hashlib.blake2b(repr(run.schedule).encode(), digest_size=12).digest())
        self.outcomes.update(run.outcomes)


def fuzz(
    strategy: SearchStrategy[Program], run: Callable[[Program], ProgramRun], n: int, first_seed: int, tally: Tally
) -> None:
    """Run ``n`` programs, in parts."""
    for part, begin in enumerate(range(0, n, PART)):

        @seed(first_seed * 1_000_003 + part)
        @settings(
            max_examples=min(PART, n - begin),
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def test(program: Program) -> None:
            tally.add(run(program))

        test()
        print(f"{tally.programs} programs, {len(tally.schedules)} schedules", flush=True)


def fuzz_llama(n: int, first_seed: int, tally: Tally) -> None:
    """Run ``n`` programs on tiny models, as many of each kind of memory."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (memory, architecture) in enumerate(MODELS.items()):
            path = build_tiny_gguf(
                Path(folder, f"{architecture}.gguf"), arch=architecture, n_layer=2, n_embd=64, n_head=1, n_ff=64
            )
            make = partial(LlamaEngine, path, n_ctx=256, threads=1)
            oracle = ReplayOracle(make(n_slots=1))

            def run(program: Program, make: Callable[..., Engine] = make, oracle: Any = oracle) -> ProgramRun:
                return run_program(program, engine=make(n_slots=program.slots), oracle=oracle)

            strategy = programs(memories=[memory], weights={Fail: 0}, exact=True)  # type: ignore[list-item]
            fuzz(strategy, run, n // len(MODELS), len(MODELS) * first_seed + number, tally)
            oracle.close()


def main() -> None:
    """Run one kind; what is written is of runs in which nothing failed, as a failure ends this."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["fake", "llama"])
    parser.add_argument("--programs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    os.environ["GGML_NO_BACKTRACE"] = "1"
    logging.disable(logging.CRITICAL)
    tally, start = Tally(), time.perf_counter()
    if asked.kind == "fake":
        moving = asked.programs // 10
        fuzz(programs(), run_program, asked.programs - moving, asked.seed, tally)
        fuzz(moving_programs(), run_program, moving, asked.seed, tally)
    else:
        fuzz_llama(asked.programs, asked.seed, tally)
    result = {
        "command": f"python evidence/fuzz/run.py {asked.kind} --programs {asked.programs} --seed {asked.seed}",
        "programs": tally.programs,
        "distinct_schedules": len(tally.schedules),
        "scheduler_steps": tally.steps,
        "native_calls": tally.native_calls,
        "seconds": round(time.perf_counter() - start),
        "outcomes": dict(sorted(tally.outcomes.items())),
    }
    path = Path(__file__).with_name(f"{asked.kind}-{asked.seed}.json")
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
