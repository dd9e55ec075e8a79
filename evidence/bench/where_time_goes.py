"""Where a step's time goes: the parts of a decode on a model, and a profile of the core on an engine that does nothing.

python evidence/bench/where_time_goes.py [MODEL] > evidence/bench/profile.txt
"""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from rich.console import Console

from hotkv_trio import SessionKey, open_runtime
from hotkv_trio._cli._progress import Progress
from hotkv_trio._cli.bench._idle_engine import IdleEngine
from hotkv_trio._cli.bench._setting import START, Setting, Sizes, decode_together, open_bench, truncate_all
from hotkv_trio._owner import InlineExecutor
from hotkv_trio.llama import LlamaEngine, _ffi
from hotkv_trio.llama._gate import Gate

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, ROUNDS, CORE_SESSIONS = 32, 6, 64


class Stopwatch:
    """Adds up what is spent inside functions that it is put around."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def around(self, holder: Any, name: str, said: str) -> None:
        inner: Callable[..., Any] = getattr(holder, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[said] += time.perf_counter() - began

        setattr(holder, name, timed)


async def parts_of_a_step(model: Path) -> None:
    """Print microseconds of a step by part, for several numbers of sessions."""
    watch = Stopwatch()
    watch.around(LlamaEngine, "process", "engine")
    watch.around(_ffi, "process", "llama.cpp")
    watch.around(_ffi, "logits", "copy of the rows")
    watch.around(LlamaEngine, "_split", "are they finite")
    watch.around(Gate, "check_group", "gate")
    setting = Setting(model=model, threads=None, sizes=Sizes(), progress=Progress(Console(stderr=True)))
    print("Microseconds of a decode step, medians of rounds; the stopwatch itself costs about 1 us a part.\n")
    names = ("step", "llama.cpp", "copy", "finite", "gate", "engine, rest", "core and caller")
    print("  N" + "".join(f"{name:>17}" for name in names))
    for n in (1, 2, 4, 8, 16):
        async with open_bench(setting, n_slots=n, n_ctx=START + STEPS) as bench:
            sessions = await bench.sessions(n)
            rounds: list[tuple[float, ...]] = []
            for _ in range(ROUNDS + 1):
                watch.seconds.clear()
                whole, _ = await decode_together(sessions, [1] * n, STEPS)
                found = watch.seconds
                inside = [found[part] for part in ("llama.cpp", "copy of the rows", "are they finite", "gate")]
                rest = found["engine"] - sum(inside)
                rounds.append(tuple(x / STEPS * 1e6 for x in (whole, *inside, rest, whole - found["engine"])))
                await truncate_all(sessions, START)
        medians = [statistics.median(x) for x in zip(*rounds[1:], strict=True)]
        print(f"{n:>3}" + "".join(f"{x:>17.0f}" for x in medians))


async def core_alone() -> None:
    """Print what Python does in the core, by function."""
    async with open_runtime(IdleEngine(CORE_SESSIONS), idle_ttl=None, executor=InlineExecutor()) as runtime:
        sessions = [await runtime.start_session(SessionKey(f"s{i}", 0), pinned=True) for i in range(CORE_SESSIONS)]
        await decode_together(sessions, [0] * CORE_SESSIONS, 64)
        profile = cProfile.Profile()
        profile.enable()
        await decode_together(sessions, [0] * CORE_SESSIONS, 512)
        profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(30)
    print(f"\nThe core: {512 * CORE_SESSIONS:,} session-steps of {CORE_SESSIONS} sessions, under a profiler that makes")
    print("everything several times slower, most of all what calls much.\n")
    print("\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip()))


async def main() -> None:
    if len(sys.argv) > 1:
        await parts_of_a_step(Path(sys.argv[1]))
    await core_alone()


if __name__ == "__main__":
    trio.run(main)
