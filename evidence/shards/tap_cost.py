"""What reading the boundary costs: the median decode step of a shard without a tap, with the native one, in Python.

The three take turns in random order, on the same hidden states, so that a busy machine troubles all alike; each step
is compared with its own neighbour in time.  Two contexts without a tap already differ by half a per cent, by where in
memory they happen to lie: so the contexts are made anew several times.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hotkv_trio.llama import _ffi
from hotkv_trio.llama._context import Context, ContextOptions
from hotkv_trio.llama._facts import read_model_facts
from hotkv_trio.llama._slice import slice_gguf

if TYPE_CHECKING:
    from hotkv_trio._engine import Rows
    from hotkv_trio.llama._tap import TapKind

KINDS: tuple[TapKind | None, ...] = (None, "native", "python")
LIMIT = 0.015
"""Of a decode step: what the native tap may cost."""
FEWEST = 30
"""Steps, however long they take."""
PLACEMENTS = 12
"""How often the contexts are made anew."""
START, LENGTH = 64, 256
"""Tokens cached before the first timed step, and when the sequence is begun again."""


def step(context: Context, position: int, states: Rows) -> float:
    """Append hidden states and read the rows that leave; return the seconds that took."""
    context.batch.clear()
    assert context.batch.add_hidden(0, position, states, range(len(states))) == _ffi.OK
    begun = time.perf_counter()
    if context.tap is not None:
        context.tap.begin(len(states))
    assert _ffi.process(context.handle, context.batch.handle) == _ffi.OK
    if context.tap is not None:
        context.tap.rows()
    return time.perf_counter() - begun


def confidence(ordered: list[float]) -> tuple[float, float]:
    """Return between what the median lies, with 95 % confidence: two order statistics, whatever the distribution."""
    n = len(ordered)
    off = round(1.96 * n**0.5 / 2)
    return ordered[max(0, n // 2 - off)], ordered[min(n - 1, n // 2 + off)]


def take_turns(
    contexts: dict[TapKind | None, Context], states: Rows, seconds: float
) -> dict[TapKind | None, list[float]]:
    """Let the contexts take decode steps in turns; return what each took."""
    took: dict[TapKind | None, list[float]] = {kind: [] for kind in KINDS}
    order = list(KINDS)
    ends = time.monotonic() + seconds
    for i in itertools.count():
        if i >= FEWEST and time.monotonic() > ends:
            return took
        position = START + i % (LENGTH - START)
        for context in contexts.values():
            if position == START:
                _ffi.remove_from(context.memory, 0, 0)
                step(context, 0, states)
        random.shuffle(order)
        for kind in order:
            took[kind].append(step(contexts[kind], position, states[i % START : i % START + 1]))
    raise AssertionError


def main() -> int:
    """Measure and print; exit 1 unless the native tap surely costs no more than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("layers", help="first:end, as 0:15")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    first, end = map(int, given.layers.split(":"))
    options = ContextOptions(n_slots=1, n_ctx=LENGTH, type_k="f16", type_v="f16", swa_full=True, threads=given.threads)
    width = read_model_facts(given.model).n_embd
    states = np.random.default_rng(0).standard_normal((START, width)).astype(np.float32)
    took: dict[TapKind | None, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        shard = slice_gguf(given.model, (first, end), Path(folder, "shard.gguf"))
        for _ in range(PLACEMENTS):
            contexts = {
                kind: Context(shard, options, tap_tensor=kind and f"l_out-{end - first - 1}", tap_kind=kind or "auto")
                for kind in random.sample(KINDS, len(KINDS))
            }
            for kind, seconds in take_turns(contexts, states, given.seconds / PLACEMENTS).items():
                took[kind] += seconds
            for context in contexts.values():
                context.close()
    base = statistics.median(took[None])
    print(f"{Path(given.model).name} layers {given.layers}, {given.threads} threads, {len(took[None])} decode steps")
    print(f"without a tap: {base * 1e3:.3f} ms a step")
    intervals = {}
    for kind in KINDS[1:]:
        differences = sorted((b - a) / base for a, b in zip(took[None], took[kind], strict=True))
        low, high = intervals[kind] = confidence(differences)
        middle = statistics.median(differences)
        print(f"{kind} tap: {middle * base * 1e6:+.1f} us a step, {middle:+.2%} (95 %: {low:+.2%} to {high:+.2%})")
    low, high = intervals["native"]
    verdict = "yes" if high <= LIMIT else "NO" if low > LIMIT else "cannot be told on so busy a machine"
    print(f"native within {LIMIT:.1%}: {verdict}")
    return 0 if high <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
