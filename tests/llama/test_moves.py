"""Moving a session to another slot, on llama.cpp: no bit of it or of its neighbours changes."""

from __future__ import annotations

from itertools import pairwise, starmap
from typing import TYPE_CHECKING

import numpy as np
import pytest
import trio

from hotkv_trio import InvalidInput, SessionKey, open_runtime
from hotkv_trio._engine import Append
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import build_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio import Session
    from hotkv_trio._engine import Rows

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42], [90, 91, 92, 93]]


async def run(path: Path, moves: dict[int, list[tuple[int, int]]]) -> list[list[Rows]]:
    """Let three sessions decode in exact mode; before the steps given, move somebody to another slot."""
    rows: list[list[Rows]] = [[], [], []]
    async with open_runtime(LlamaEngine(path, n_slots=4, n_ctx=256, threads=1), exact=True) as runtime:
        sessions = [await runtime.start_session(SessionKey(f"s{i}", 0)) for i in range(3)]
        for session, prompt, mine in zip(sessions, PROMPTS, rows, strict=True):
            mine.append((await session.prefill(prompt)).output)
        for step in range(8):
            for source, target in moves.get(step, []):
                assert await runtime._move(source, target)
                runtime.check_integrity()
            for session, mine in zip(sessions, rows, strict=True):
                if step == 5:
                    await session.truncate(session.length - 2)
                mine.append((await session.decode(int(mine[-1].argmax()))).output)
        assert runtime.statistics().moves == sum(map(len, moves.values()))
        assert runtime.limiter.borrowed_bytes == 3 * runtime.info.slot_bytes
    return rows


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
async def test_a_move_changes_no_bit_in_exact_mode(arch: str, tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "tiny.gguf", arch)
    still = await run(path, {})
    moved = await run(path, {0: [(0, 3)], 2: [(2, 0), (1, 2), (3, 1)], 4: [(1, 3)], 6: [(2, 1), (3, 2)]})
    for a, b in zip(still, moved, strict=True):
        assert all(starmap(np.array_equal, zip(a, b, strict=True)))


async def test_sessions_with_holes_between_them_come_together(tmp_path: Path) -> None:
    """Grouped, on a model whose decode has the same bits in every group: as in exact mode, and where nobody moves."""
    path = build_tiny_gguf(tmp_path / "tiny.gguf", "llama", weights="q8_0")

    async def decode(session: Session, prompt: list[int], tokens: list[int]) -> None:
        row = (await session.prefill(prompt)).output
        for _ in range(12):
            tokens.append(int(row.argmax()))
            row = (await session.decode(tokens[-1])).output

    outcomes = []
    for exact in (True, False):
        tokens: list[list[int]] = [[], [], []]
        async with open_runtime(LlamaEngine(path, n_slots=6, n_ctx=256, threads=1), exact=exact) as runtime:
            sessions = [await runtime.start_session(SessionKey(f"s{i}", 0)) for i in range(5)]
            async with trio.open_nursery() as nursery:
                for i in range(3):
                    nursery.start_soon(decode, sessions[2 * i], PROMPTS[i], tokens[i])
            slots = sorted(sessions[2 * i]._require_slot() for i in range(3))
            assert all(b == a + 1 for a, b in pairwise(slots)) is not exact
            assert (runtime.statistics().moves > 0) is not exact
        outcomes.append(tokens)
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("arch", ["mamba", "jamba"])
def test_memory_without_positions_of_its_own_is_never_moved(arch: str, tmp_path: Path) -> None:
    engine = LlamaEngine(build_tiny_gguf(tmp_path / "tiny.gguf", arch), n_slots=2, n_ctx=256, threads=1)
    try:
        assert engine.open().move_cost == float("inf")
        with pytest.raises(InvalidInput, match="cannot be moved"):
            engine.move(0, 1)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "source, target, why",
    [
        (0, 0, "one is not clean, or not empty"),
        (0, 1, "one is not clean, or not empty"),
        (0, 4, "slot 4: there are slots 0 to 3"),
        (-1, 2, "slot -1: there are slots 0 to 3"),
    ],
)
def test_a_move_that_makes_no_sense_changes_nothing(source: int, target: int, why: str, tmp_path: Path) -> None:
    engine = LlamaEngine(build_tiny_gguf(tmp_path / "tiny.gguf", "llama"), n_slots=4, n_ctx=256, threads=1)
    try:
        engine.open()
        for slot in (0, 1):
            engine.process([Append(slot, 0, np.array([3, 4], np.int32), "none")])
        with pytest.raises(InvalidInput, match=why):
            engine.move(source, target)
        assert [engine.length(slot) for slot in range(4)] == [2, 2, 0, 0]
    finally:
        engine.close()
