"""Kinds of faults from public reports that no other room of the tests is about."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from llama_cpp import llama_cpp

from hotkv_trio import Append, SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import FakeEngine, InlineExecutor, build_tiny_gguf
from tests.reports._both import tokens

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio import Engine
    from hotkv_trio._engine import Rows


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
async def test_quantised_keys_over_fifty_turns(tmp_path: Path, arch: str) -> None:
    """Llama.cpp #9383, llama.cpp #7230: context shift with quantised K crashes.  We never shift.

    A client that runs out of room cuts back, and its bits are those of a fresh replay of what is left.
    """
    path = build_tiny_gguf(tmp_path / "m.gguf", arch, n_layer=2, weights="q8_0")

    def make() -> LlamaEngine:
        return LlamaEngine(path, n_slots=3, n_ctx=256, type_k="q8_0", type_v="q8_0", threads=1)

    async with open_runtime(make(), exact=True, executor=InlineExecutor()) as runtime:
        async with (
            runtime.open_session(SessionKey("neighbour", 0)),
            runtime.open_session(SessionKey("turns", 0)) as session,
        ):
            kept: list[tuple[int, int]] = []
            for turn in range(50):
                n = 3 + turn % 17
                while session.length + n > 250:
                    cut, _ = kept.pop()
                    await session.truncate(session.length - cut)
                kept.append((n, turn))
                last = await session.prefill(tokens(n, turn))
        async with runtime.open_session(SessionKey("fresh", 0)) as fresh:
            for n, turn in kept:
                replayed = await fresh.prefill(tokens(n, turn))
            assert np.array_equal(replayed.output, last.output)
            assert replayed.length == last.length


def saved_state(engine: LlamaEngine, slot: int) -> bytes:
    """Return one slot's KV as llama.cpp itself would save it."""
    assert engine._context is not None
    handle = engine._context.handle
    size = llama_cpp.llama_state_seq_get_size(handle, slot)
    buffer = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(handle, buffer, size, slot) == size
    return bytes(buffer)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba", "jamba"])
@pytest.mark.parametrize("removed", [0, 2])
def test_removing_one_slot_leaves_anothers_state_byte_for_byte(tmp_path: Path, arch: str, removed: int) -> None:
    """llama.cpp test-save-load-state: the KV of sequence 1 is the same bytes after sequence 0 was removed."""
    engine = LlamaEngine(build_tiny_gguf(tmp_path / "m.gguf", arch, n_layer=2), n_slots=3, n_ctx=256, threads=1)
    engine.open()
    try:
        for slot in range(3):
            engine.process([Append(slot, 0, np.array(tokens(30, slot), np.int32), "last")])
        before = saved_state(engine, 1)
        assert len(before) > 1000
        engine.clear(removed)
        assert saved_state(engine, 1) == before
        engine.process([Append(removed, 0, np.array(tokens(70, 9), np.int32), "last")])
        assert saved_state(engine, 1) == before
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["fake", "llama"])
async def test_a_prefix_that_another_session_holds_is_not_cheaper(tmp_path: Path, kind: str) -> None:
    """Vllm CVE-2025-46570: shared prefixes leak through timing.  The same prompt is the same calls, known or not."""
    computed: list[int] = []
    prompt = tokens(60, 0) if kind == "llama" else [3] * 60

    def counted(engine: Any) -> Engine:
        process = engine.process

        def watched(group: list[Append]) -> list[Rows]:
            computed.append(sum(append.n_tokens for append in group))
            rows: list[Rows] = process(group)
            return rows

        engine.process = watched
        made: Engine = engine
        return made

    if kind == "llama":
        path = build_tiny_gguf(tmp_path / "m.gguf", n_layer=1)
        engine = counted(LlamaEngine(path, n_slots=3, n_ctx=256, threads=1))
    else:
        engine = counted(FakeEngine(n_slots=3))
    async with open_runtime(engine, prefill_chunk=16, executor=InlineExecutor()) as runtime:
        costs = []
        for name in ("first", "second", "third"):
            session = await runtime.start_session(SessionKey(name, 0))
            before = len(computed)
            await session.prefill(prompt)
            costs.append(computed[before:])
            assert sum(costs[-1]) == 60
        await runtime.release(SessionKey("first", 0))
        session = await runtime.start_session(SessionKey("first", 1))
        before = len(computed)
        await session.prefill(prompt)
        assert [*costs, computed[before:]] == [[16, 16, 16, 12]] * 4
