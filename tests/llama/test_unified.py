"""The unified layout: what it promises holds, what it cannot hold is refused, and its room never runs out unseen."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio
from gguf import GGUFReader
from llama_cpp import llama_cpp

from hotkv_trio import CacheMiss, ContextFull, EngineFailed, InvalidInput, SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine, _ffi, _log
from hotkv_trio.testing import InlineExecutor, build_tiny_gguf
from tests.llama.conftest import Opened, hidden, opened, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from hotkv_trio._engine import Append, Rows
    from tests.llama.conftest import Tiny

UNIFIED: dict[str, Any] = {"layout": "unified"}


# Refused.


@pytest.mark.parametrize(
    "arch, why",
    [
        ("gemma3", "a sliding window, whose cells one session's prefill takes from another's"),
        ("mamba", "recurrent memory"),
        ("jamba", "hybrid memory"),
    ],
)
def test_memory_that_cannot_be_shared_is_refused(tiny: Tiny, arch: str, why: str) -> None:
    engine = LlamaEngine(tiny(arch), threads=1, **UNIFIED)
    with pytest.raises(InvalidInput, match=f"layout='unified'.*{why}.*layout='streams' serves it"):
        engine.open()
    assert engine.isolation is None
    with opened(tiny(arch)) as it:
        assert it.append(0, tokens(3)).shape[0] == 1


@pytest.mark.parametrize("layout", ["streams", "unified"])
def test_a_model_without_flash_attention_is_refused(tiny: Tiny, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As llama.cpp does for Grok, whatever it is asked."""
    off = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    monkeypatch.setattr(llama_cpp, "LLAMA_FLASH_ATTN_TYPE_ENABLED", off)
    with pytest.raises(InvalidInput, match=r"flash attention disabled .* reaches others, in either layout"):
        LlamaEngine(tiny(), threads=1, layout=layout).open()


@pytest.mark.parametrize("layers", [(0, 2), (2, 4)])
def test_a_range_of_layers_is_refused(tiny: Tiny, layers: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match=rf"layers {layers[0]}:{layers[1]}: a shard.*'streams' serves shards"):
        LlamaEngine(tiny(), layers=layers, threads=1, **UNIFIED).open()


def test_all_layers_by_number_are_the_whole_model(tiny: Tiny) -> None:
    with opened(tiny(), layers=(0, 4), **UNIFIED) as it:
        assert it.append(3, tokens(3)).shape[0] == 1


def test_hidden_states_are_refused(tiny: Tiny) -> None:
    """They are taken by the same model in streams; here one that is not finite would reach everybody."""
    with opened(tiny(), **UNIFIED) as it:
        assert it.info.n_embd == 0
        with pytest.raises(InvalidInput, match="takes tokens only"):
            it.append(0, hidden(3, 128))
        assert it.engine.length(0) == 0


async def test_exact_mode_is_refused(tiny: Tiny) -> None:
    engine = LlamaEngine(tiny(), threads=1, **UNIFIED)
    with pytest.raises(InvalidInput, match=r"exact=True: in the unified layout .* 'streams' is exact"):
        async with open_runtime(engine, exact=True, executor=InlineExecutor()):
            pytest.fail("opened")
    assert "not open" in repr(engine)


@pytest.mark.parametrize("held", ["neighbours_contents", "slot_reuse", "truncate"])
def test_a_machine_on_which_it_does_not_hold_is_refused(tiny: Tiny, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each promise broken in the library's place: the proof on opening says which, in its own words."""
    process, remove = LlamaEngine.process, _ffi.remove_from
    first: dict[int, int] = {}
    cleared = cut = 0

    def counting(kv: int, slot: int, position: int) -> bool:
        nonlocal cleared, cut
        cleared, cut = cleared + (position == 0), cut + (position > 0)
        return remove(kv, slot, position)

    def broken(self: LlamaEngine, group: Sequence[Append]) -> list[Rows]:
        rows = process(self, group)
        for append in group:
            if append.position == 0:
                first[append.slot] = int(append.data[0])
        seen = {"neighbours_contents": first.get(1, 0), "slot_reuse": cleared > 2, "truncate": cut}[held]
        return [part + np.float32(seen) if append.slot == 0 else part for part, append in zip(rows, group, strict=True)]

    monkeypatch.setattr(_ffi, "remove_from", counting)
    monkeypatch.setattr(LlamaEngine, "process", broken)
    words = {"neighbours_contents": "CHANGES the bits", "slot_reuse": "NOT as a fresh one", "truncate": "is LEFT"}
    engine = LlamaEngine(tiny(), n_slots=2, n_ctx=512, threads=1, **UNIFIED)
    with pytest.raises(InvalidInput, match=rf"layout='unified' does not hold here: .*{words[held]}.*'streams' may"):
        engine.open()
    assert "not open" in repr(engine)


# What is promised.


def test_the_proof_on_opening_is_short(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    process = LlamaEngine.process
    sizes: list[int] = []

    def counted(self: LlamaEngine, group: Sequence[Append]) -> list[Rows]:
        sizes.append(sum(append.n_tokens for append in group))
        return process(self, group)

    monkeypatch.setattr(LlamaEngine, "process", counted)
    with opened(tiny(), n_ctx=1024, **UNIFIED) as it:
        report = it.engine.isolation
        assert report is not None
        assert (report.layout, report.isolated, report.neighbours_contents) == ("unified", True, True)
        assert (report.own_calls, report.poison, report.batch_invariant) == (None, None, False)
        assert [it.engine.length(slot) for slot in range(4)] == [0] * 4
    assert it.engine.isolation is None
    assert len(sizes) < 100
    assert 2000 < sum(sizes) < 3000
    # Past 512 cells, and on both sides of 64 queries.
    assert report.tokens * report.slots > 512
    assert {63, 64} <= set(sizes)


@pytest.mark.parametrize("n_slots, n_ctx", [(1, 256), (2, 256), (16, 300)])
def test_pools_of_any_size_open(tiny: Tiny, n_slots: int, n_ctx: int) -> None:
    with opened(tiny(), n_slots=n_slots, n_ctx=n_ctx, **UNIFIED) as it:
        assert it.engine.isolation is not None
        assert it.engine.isolation.isolated
        assert np.isfinite(it.append(n_slots - 1, tokens(70))).all()


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_bytes_are_those_of_streams_and_of_llama_cpps_own_log(
    tiny: Tiny, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tiny(), n_slots=3, n_ctx=1000, type_k=kind, type_v=kind) as apart:
        streams = apart.info
    with caplog.at_level("INFO", "hotkv_trio.llama"):
        caplog.clear()
        with opened(tiny(), n_slots=3, n_ctx=1000, type_k=kind, type_v=kind, **UNIFIED) as it:
            assert (it.info.slot_bytes, it.info.n_ctx_seq, it.info.n_slots) == (streams.slot_bytes, 1024, 3)
            assert it.info.recipe.difference(streams.recipe) == {"layout": ("unified", "streams")}
            said = sum(_log.buffer_sizes(caplog.messages, "KV"))
            assert abs(said - 3 * it.info.slot_bytes / 2**20) < 0.011
            assert _log.value(caplog.messages, "kv_unified") == "true"


@pytest.mark.parametrize("seed", range(3))
def test_room_never_runs_out(tiny: Tiny, seed: int) -> None:
    """Llama.cpp #23652, ollama #10127: however fragmented the pool, each slot takes all that it says."""
    rng = random.Random(seed)
    with opened(tiny(n_layer=1), n_slots=5, n_ctx=256, **UNIFIED) as it:
        for turn in range(300):
            slot = rng.randrange(5)
            held = it.engine.length(slot)
            if rng.random() < 0.15:
                it.engine.clear(slot)
            elif held and rng.random() < 0.2:
                assert it.engine.truncate(slot, rng.randint(0, held))
            elif room := 256 - held:
                it.append(slot, tokens(min(room, rng.choice([1, 1, 7, 64, 150])), seed=turn))
        for slot in rng.sample(range(5), 5):
            while room := 256 - it.engine.length(slot):
                it.append(slot, tokens(min(room, 33), seed=slot))
        assert [it.engine.length(slot) for slot in range(5)] == [256] * 5
        for slot in range(5):
            with pytest.raises(InvalidInput, match="holds 256 of 256 tokens"):
                it.append(slot, tokens(1))
        # Every cell is taken; one cut makes room for as much, and for that slot only.
        assert it.engine.truncate(2, 200)
        assert np.isfinite(it.append(2, tokens(56, seed=9), "all")).all()


def test_a_group_of_any_shape_is_one_native_call(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    process = _ffi.process

    def counted(context: int, batch: int) -> int:
        nonlocal calls
        calls += 1
        return process(context, batch)

    monkeypatch.setattr(_ffi, "process", counted)
    data = {3: tokens(2, seed=3), 0: tokens(5, seed=0), 2: tokens(1, seed=2)}
    with opened(tiny(), **UNIFIED) as it, opened(tiny()) as apart:
        calls = 0
        together = it.group(data, "all")
        assert calls == 1
        # Rows go back to whom they belong to: not bit for bit, the calls are of another shape.
        for slot, rows in together.items():
            assert np.allclose(rows, apart.append(slot, data[slot], "all"), rtol=1e-2, atol=1e-2)


def _ragged(path: Path, program: Sequence[tuple[str, dict[int, int]]], seeds: Sequence[int], **kind: Any) -> list[Rows]:
    """Run calls of any shape, each slot with tokens of its own; return the rows of slot 1."""
    rows: list[Rows] = []
    with opened(path, n_slots=4, n_ctx=512, **kind, **UNIFIED) as it:
        for turn, (what, sizes) in enumerate(program):
            if what == "append":
                got = it.group({slot: tokens(n, seed=seeds[slot] + turn) for slot, n in sizes.items()}, "all")
                rows += [got[1]] if 1 in got else []
            else:
                for slot, length in sizes.items():
                    assert it.engine.truncate(slot, length)
    return rows


@pytest.mark.parametrize("weights, kind", [("f32", "f16"), ("q8_0", "q8_0"), ("f32", "f32")])
def test_what_the_others_hold_or_held_changes_no_bit(tiny: Tiny, weights: str, kind: str) -> None:
    """LMCache #4385, mlx-lm #965, llama.cpp #10072: answers carry other sessions' content.

    Ragged groups, cuts and clears, so that cells of all lie mixed, and cells of former tenants between them.
    """
    rng = random.Random(f"{weights} {kind}")
    held = [0] * 4
    program: list[tuple[str, dict[int, int]]] = []
    for _ in range(60):
        if rng.random() < 0.25:
            slot = rng.randrange(4)
            held[slot] = rng.choice([0, rng.randint(0, held[slot])])
            program.append(("cut", {slot: held[slot]}))
            continue
        members = rng.sample(range(4), rng.randint(1, 4))
        sizes = {slot: n for slot in members if (n := min(512 - held[slot], rng.choice([1, 1, 5, 63, 64, 65, 120])))}
        for slot, n in sizes.items():
            held[slot] += n
        if sizes:
            program.append(("append", sizes))
    path = tiny(weights=weights, n_layer=2)
    runs = [
        _ragged(path, program, [noise, 7, 2 * noise, 3 * noise], type_k=kind, type_v=kind) for noise in (1000, 50_000)
    ]
    assert len(runs[0]) > 10
    assert all(map(np.array_equal, *runs))


# A value that is not finite.


N_VOCAB = 4096


@attrs.frozen
class Damaged:
    """A model one of whose embeddings is not a number."""

    path: Path
    token: int
    """The one; the proof on opening makes no use of it."""

    def safe(self, n: int, seed: int = 0) -> npt.NDArray[np.int32]:
        chosen = tokens(n, seed=seed, n_vocab=N_VOCAB)
        chosen[chosen == self.token] = 0
        return chosen


@pytest.fixture
def damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Damaged:
    path = build_tiny_gguf(tmp_path / "damaged.gguf", n_layer=2, n_vocab=N_VOCAB)
    used: set[int] = set()
    process = LlamaEngine.process

    def noted(self: LlamaEngine, group: Sequence[Append]) -> list[Rows]:
        used.update(*(append.data.tolist() for append in group))
        return process(self, group)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaEngine, "process", noted)
        with opened(path, n_slots=3, **UNIFIED):
            token = min(set(range(N_VOCAB)) - used)
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    row = int(tensor.n_bytes) // N_VOCAB
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + token * row)
        file.write(np.full(row // 4, np.nan, np.float32).tobytes())
    return Damaged(path, token)


def test_a_model_whose_damage_the_proof_meets_is_not_opened(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "default_rng", lambda _: _Constant(damaged.token))
    with pytest.raises(EngineFailed, match="is not finite"):
        LlamaEngine(damaged.path, n_slots=3, n_ctx=256, threads=1, **UNIFIED).open()


@attrs.frozen
class _Constant:
    token: int

    def integers(self, _low: int, _high: int, n: int, dtype: Any) -> Any:
        return np.full(n, self.token, dtype)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_damaged_model_closes_the_pool_until_it_is_wiped(damaged: Damaged, grouped: bool) -> None:
    """Vllm PR 50283: a NaN poisons reused blocks.  Nobody is served a bit from a pool that holds one."""
    with opened(damaged.path, n_slots=3, **UNIFIED) as it:
        fresh = it.append(0, damaged.safe(70), "all")
        it.append(1, damaged.safe(20))
        bad = np.array([11, damaged.token, 12], np.int32)
        with pytest.raises(EngineFailed, match=r"the output of slots \[.*2\] is not finite"):
            it.group({0: damaged.safe(70), 2: bad} if grouped else {2: bad})
        for slot in range(3):
            with pytest.raises(EngineFailed, match="the pool holds values that are not finite"):
                it.append(slot, damaged.safe(1))
        assert not it.engine.truncate(1, 20)
        for slot in (2, 0):
            with pytest.raises(EngineFailed, match="nothing to overwrite them with"):
                it.engine.clear(slot)
        it.engine.clear(1)
        for slot in (0, 2, 1):
            it.engine.clear(slot)
        assert np.array_equal(it.append(0, damaged.safe(70), "all"), fresh)


async def test_sessions_on_a_damaged_model_end_in_misses_and_the_pool_serves_again(damaged: Damaged) -> None:
    engine = LlamaEngine(damaged.path, n_slots=3, n_ctx=256, threads=1, **UNIFIED)
    async with open_runtime(engine, executor=InlineExecutor()) as runtime:
        neighbour = await runtime.start_session(SessionKey("neighbour", 0))
        before = (await neighbour.prefill(damaged.safe(80))).output
        hostile = await runtime.start_session(SessionKey("hostile", 0))
        with pytest.raises(EngineFailed, match="is not finite"):
            await hostile.prefill([damaged.token])
        with pytest.raises(EngineFailed, match="holds values that are not finite"):
            await neighbour.decode(0)
        with pytest.raises(CacheMiss):
            await neighbour.decode(0, at=80)
        await runtime.release(hostile.key)
        await runtime.release(neighbour.key)
        for name in "abc":
            session = await runtime.start_session(SessionKey(name, 0))
            with trio.fail_after(60):
                assert (await session.prefill(damaged.safe(80))).length == 80
        assert runtime.statistics().quarantined_slots == 0
        for name in "abc":
            await runtime.release(SessionKey(name, 0))
        again = await runtime.start_session(SessionKey("again", 0))
        assert np.array_equal((await again.prefill(damaged.safe(80))).output, before)


# Through a runtime.


async def test_sessions_side_by_side(tiny: Tiny) -> None:
    """llama.cpp #23652, lemonade #3276: a full session ends itself only; slots with gaps between them share a call."""
    engine = LlamaEngine(tiny(), n_slots=4, n_ctx=256, threads=1, **UNIFIED)
    async with open_runtime(engine, executor=InlineExecutor()) as runtime:
        sessions = [await runtime.start_session(SessionKey(f"s{i}", 0)) for i in range(4)]
        await sessions[0].prefill(tokens(256))
        for session in sessions[1:]:
            await session.prefill(tokens(40))
        with pytest.raises(ContextFull):
            await sessions[0].decode(1)
        await runtime.release(sessions[2].key)
        calls = runtime.statistics().native_calls
        async with trio.open_nursery() as nursery:
            for session in (sessions[1], sessions[3]):
                nursery.start_soon(session.decode, 5)
        assert runtime.statistics().native_calls == calls + 1
        assert [session.length for session in (sessions[1], sessions[3])] == [41, 41]


async def test_verify_isolation_needs_the_pool_for_itself(tiny: Tiny) -> None:
    engine = LlamaEngine(tiny(), n_slots=4, n_ctx=1024, threads=1, **UNIFIED)
    async with open_runtime(engine, executor=InlineExecutor()) as runtime:
        report = await runtime.verify_isolation()
        assert (report.layout, report.isolated, report.slots) == ("unified", True, 4)
        # The very thing that the layout does not promise, on this kind of KV.
        assert report.own_calls is False
        async with runtime.open_session(SessionKey("other", 0)):
            with pytest.raises(InvalidInput, match=r"needs the pool for itself, and has 3 of 4 slots"):
                await runtime.verify_isolation()
        assert runtime.limiter.borrowed_bytes == 0


def test_opened_engines_say_what_they_are(tiny: Tiny) -> None:
    with opened(tiny(), **UNIFIED) as it:
        assert isinstance(it, Opened)
        assert "4 slots x 256 tokens, attention, unified" in repr(it.engine)
    with opened(tiny()) as apart:
        assert repr(apart.engine).endswith("attention>")
