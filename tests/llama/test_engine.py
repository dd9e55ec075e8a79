"""LlamaEngine keeps the engine protocol's contract, on tiny models and the real library."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
from llama_cpp import llama_cpp

from hotkv_trio._engine import OUTPUTS, Append
from hotkv_trio._errors import EngineFailed, InvalidInput
from hotkv_trio.llama import LlamaEngine, Vocabulary, _ffi, _log
from hotkv_trio.llama._facts import ModelFacts
from hotkv_trio.llama._gate import Gate
from hotkv_trio.llama._slice import slice_gguf
from tests.llama.conftest import N_VOCAB, Opened, hidden, opened, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.llama.conftest import Tiny

MEMORIES = {"llama": "attention", "gemma3": "sliding", "mamba": "recurrent", "jamba": "hybrid"}


# Sizes.


@pytest.mark.parametrize(
    "n_slots, n_ctx, n_ctx_seq, batch",
    [(1, 1, 256, 256), (3, 1000, 1024, 512), (8, 256, 256, 512), (2, 257, 512, 512), (256, 20, 256, 512)],
)
def test_sizes_are_what_llama_cpp_made(tiny: Tiny, n_slots: int, n_ctx: int, n_ctx_seq: int, batch: int) -> None:
    """Asking 256 tokens for 8 sequences must not give each of them 2048."""
    with opened(tiny(), n_slots=n_slots, n_ctx=n_ctx) as it:
        assert (it.info.n_slots, it.info.n_ctx_seq) == (n_slots, n_ctx_seq)
        assert it.info.max_batch_tokens == it.info.max_outputs == batch
        assert it.info.slot_bytes == n_ctx_seq * it.info.bytes_per_token
        last = n_slots - 1
        assert it.append(last, tokens(2)).shape == (1, N_VOCAB)


@pytest.mark.parametrize("arch", MEMORIES)
def test_the_memory_kind_is_probed(tiny: Tiny, arch: str) -> None:
    with opened(tiny(arch)) as it:
        assert it.info.memory == MEMORIES[arch]
        assert (it.info.bytes_per_token == 0) == (arch == "mamba")


@pytest.mark.parametrize("kind", _ffi.KV_TYPES)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_bytes_equal_llama_cpps_own(tiny: Tiny, arch: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "hotkv_trio.llama"),
        opened(tiny(arch), n_slots=2, n_ctx=1024, type_k=kind, type_v=kind) as it,
    ):
        said = sum(_log.buffer_sizes(caplog.messages, "KV"))
        assert said > 0
        assert abs(said - it.info.n_slots * it.info.slot_bytes / 2**20) < 0.011
        assert np.isfinite(it.append(1, tokens(80), "all")).all()


@pytest.mark.parametrize("type_k, type_v", [("f16", "q8_0"), ("q8_0", "f16"), ("f16", "bf16"), ("f32", "q4_0")])
def test_keys_and_values_of_different_types(tiny: Tiny, type_k: Any, type_v: Any) -> None:
    with opened(tiny(), n_ctx=768, type_k=type_k, type_v=type_v) as it:
        assert all(np.isfinite(rows).all() for rows in it.chunks(3, tokens(600), 199, "all"))


@pytest.mark.parametrize("arch", ["mamba", "jamba"])
def test_state_bytes_equal_llama_cpps_own(tiny: Tiny, arch: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hotkv_trio.llama"), opened(tiny(arch), n_slots=32, n_ctx=256) as it:
        state = sum(_log.buffer_sizes(caplog.messages, "RS"))
        cells = sum(_log.buffer_sizes(caplog.messages, "KV"))
        assert state > 0
        assert abs(state + cells - it.info.n_slots * it.info.slot_bytes / 2**20) < 0.011


def test_a_window_that_is_not_full_takes_less(tiny: Tiny) -> None:
    with opened(tiny("gemma3"), n_ctx=2048) as full, opened(tiny("gemma3"), n_ctx=2048, swa_full=False) as less:
        assert less.info.slot_bytes < full.info.slot_bytes
        assert less.info.bytes_per_token == full.info.bytes_per_token


def test_bytes_that_differ_are_an_error(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    true = ModelFacts.kv_bytes_per_token
    monkeypatch.setattr(ModelFacts, "kv_bytes_per_token", lambda *arguments: 2 * true(*arguments))
    engine = LlamaEngine(tiny(), n_slots=4, n_ctx=256, threads=1)
    with pytest.raises(EngineFailed, match=r"KV buffers: llama\.cpp says 1.00 MiB, our account is 2.00 MiB"):
        engine.open()
    monkeypatch.undo()
    assert engine.open().n_slots == 4
    engine.close()


def test_learned_positions_end_with_their_table(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotkv_trio.llama._engine.LEARNED_POSITIONS", {"llama"})
    with opened(tiny(n_ctx_train=100)) as it:
        assert it.info.n_ctx_seq == 100
        it.append(0, tokens(100))
        with pytest.raises(InvalidInput, match="holds 100 of 100 tokens"):
            it.append(0, tokens(1))


# Appending.


def test_rows_stay_as_they_were(tiny: Tiny) -> None:
    """Not views of llama.cpp's buffer, which the next call overwrites."""
    with opened(tiny()) as it:
        rows = it.append(0, tokens(5), "all")
        kept = rows.copy()
        it.append(1, tokens(7, seed=1), "all")
        it.engine.close()
        assert np.array_equal(rows, kept)


def test_members_may_ask_for_different_rows(tiny: Tiny) -> None:
    with opened(tiny()) as it:
        group = [it.member(slot, tokens(3, seed=slot), output) for slot, output in enumerate(OUTPUTS)]
        none, last, every = it.engine.process(group)
        assert (none.shape, last.shape, every.shape) == ((0, N_VOCAB), (1, N_VOCAB), (3, N_VOCAB))


@pytest.mark.parametrize("order", [(0, 2, 3), (3, 1, 0), (2, 0, 1)])
def test_groups_of_any_shape(tiny: Tiny, order: tuple[int, ...]) -> None:
    """Slots with holes, in any order, with unequal counts: each member gets its own rows."""
    data = {slot: tokens(2 + slot, seed=slot) for slot in order}
    with opened(tiny(weights="q8_0"), type_k="q8_0", type_v="q8_0") as it:
        together = it.group(data, "all")
        for slot in order:
            it.engine.clear(slot)
            assert np.array_equal(together[slot], it.append(slot, data[slot], "all"))


def test_every_slot_may_ask_for_all_rows_at_once(tiny: Tiny) -> None:
    """llama.cpp #24967: all slots asking for outputs at once aborts."""
    with opened(tiny(), n_slots=8) as it:
        rows = it.group({slot: tokens(64, seed=slot) for slot in range(8)}, "all")
        assert all(own.shape == (64, N_VOCAB) for own in rows.values())


def test_hidden_states_of_a_whole_model(tiny: Tiny) -> None:
    """A token's embedding is as good as the token."""
    path = tiny()
    from gguf import GGUFReader

    (table,) = (tensor.data for tensor in GGUFReader(path).tensors if tensor.name == "token_embd.weight")
    numbers = tokens(9)
    with opened(path) as it:
        assert it.info.takes_tokens
        assert it.info.takes_hidden
        states = np.ascontiguousarray(table[numbers])
        assert np.array_equal(it.append(0, numbers, "all"), it.append(1, states, "all"))


def test_a_slot_filled_to_its_end(tiny: Tiny) -> None:
    with opened(tiny()) as it:
        it.chunks(0, tokens(256), 100)
        with pytest.raises(InvalidInput, match="slot 0 holds 256 of 256 tokens; 1 more do not fit"):
            it.append(0, tokens(1))
        assert it.engine.length(0) == 256
        assert it.append(1, tokens(1)).shape == (1, N_VOCAB)


# Native codes.


def _failing(code: int, before: Callable[..., int] | None = None) -> Callable[[int, int], int]:
    def process(context: int, batch: int) -> int:
        if before is not None:
            before(context, batch)
        return code

    return process


@pytest.mark.parametrize("code", [_ffi.NO_SLOT, _ffi.INVALID_BATCH])
@pytest.mark.parametrize("arch", MEMORIES)
def test_codes_that_leave_the_memory_as_it_was(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, arch: str, code: int
) -> None:
    with opened(tiny(arch)) as it, opened(tiny(arch)) as clean:
        it.append(1, tokens(6))
        clean.append(1, tokens(6))
        with monkeypatch.context() as patch:
            patch.setattr(_ffi, "process", _failing(code))
            with pytest.raises(EngineFailed) as caught:
                it.append(1, tokens(4))
        assert caught.value.native_code == code
        assert it.engine.length(1) == 6
        assert it.engine.truncate(1, 6)
        assert np.array_equal(it.append(1, tokens(4), "all"), clean.append(1, tokens(4), "all"))


@pytest.mark.parametrize("code", [_ffi.ABORTED, _ffi.FATAL, _ffi.COMPUTE_FAILED, -7])
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("arch", MEMORIES)
def test_codes_after_which_only_attention_can_be_cut_back(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, arch: str, ran: bool, code: int
) -> None:
    with opened(tiny(arch)) as it, opened(tiny(arch)) as clean:
        for one in (it, clean):
            one.append(1, tokens(6))
            one.append(2, tokens(5, seed=1))
        with monkeypatch.context() as patch:
            patch.setattr(_ffi, "process", _failing(code, _ffi.process if ran else None))
            with pytest.raises(EngineFailed) as caught:
                it.append(1, tokens(4))
        assert caught.value.native_code == code
        with pytest.raises(InvalidInput, match="slot 1 must be cleared or cut back"):
            it.engine.process([Append(1, 6, tokens(4), "last")])
        kept = it.engine.truncate(1, 6)
        assert kept == (arch == "llama")
        if not kept:
            it.engine.clear(1)
            it.append(1, tokens(6))
        assert np.array_equal(it.append(1, tokens(4), "all"), clean.append(1, tokens(4), "all"))
        assert np.array_equal(it.append(2, tokens(4), "all"), clean.append(2, tokens(4), "all"))


def test_a_call_that_appended_nothing_is_a_failure(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """mesh-llm #1514: the position advanced though no KV was written."""
    with opened(tiny()) as it:
        with monkeypatch.context() as patch:
            patch.setattr(_ffi, "process", _failing(_ffi.OK))
            with pytest.raises(EngineFailed, match="slot 0 should hold 3 tokens; its last position is -1"):
                it.append(0, tokens(3), "none")
        assert it.engine.truncate(0, 0)
        assert it.append(0, tokens(3)).shape == (1, N_VOCAB)


def test_a_refused_entry_leaves_no_half_batch(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp keeps half an entry after a refused one: it must not be in the next call."""
    with opened(tiny()) as it, opened(tiny()) as clean:
        with monkeypatch.context() as patch:
            patch.setattr(Gate, "check_group", lambda *_: None)
            with pytest.raises(EngineFailed) as caught:
                it.append(0, np.array([5, 7, N_VOCAB + 1], np.int32))
        assert caught.value.native_code == -2
        assert it.engine.length(0) == 0
        assert np.array_equal(it.append(0, tokens(4), "all"), clean.append(0, tokens(4), "all"))


def test_an_exception_inside_a_call_leaves_the_slot_unsure(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no rows")

    with opened(tiny()) as it:
        it.append(0, tokens(3))
        with monkeypatch.context() as patch:
            patch.setattr(_ffi, "logits", broken)
            with pytest.raises(MemoryError):
                it.append(0, tokens(2))
        with pytest.raises(InvalidInput, match="must be cleared or cut back"):
            it.engine.process([Append(0, 3, tokens(1), "last")])
        assert it.engine.length(0) == 5
        assert it.engine.truncate(0, 3)


# Cutting back and clearing.


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2"])
def test_truncate_is_as_if_nothing_had_followed(tiny: Tiny, arch: str) -> None:
    """llama-cpp-python PR 2180, llama.rn #396: a sliding-window model fails on its second turn."""
    with opened(tiny(arch)) as it, opened(tiny(arch)) as clean:
        it.append(1, tokens(70))
        clean.append(1, tokens(70))
        for turn in range(30):
            length = 70 + turn
            it.append(1, tokens(11, seed=turn))
            assert it.engine.truncate(1, length)
            assert it.engine.length(1) == length
            same = tokens(1, seed=100 + turn)
            assert np.array_equal(it.append(1, same, "all"), clean.append(1, same, "all"))


@pytest.mark.parametrize("arch", ["mamba", "jamba"])
def test_recurrent_memory_cannot_be_cut(tiny: Tiny, arch: str) -> None:
    with opened(tiny(arch)) as it:
        it.append(0, tokens(8))
        assert it.engine.truncate(0, 8)
        assert not it.engine.truncate(0, 7)
        with pytest.raises(InvalidInput, match="must be cleared"):
            it.append(0, tokens(1))
        it.engine.clear(0)
        assert it.engine.length(0) == 0


def test_a_window_that_has_moved_on_cannot_be_cut(tiny: Tiny) -> None:
    """llama.cpp says True to this, and the logits are wrong afterwards."""
    with opened(tiny("gemma3"), n_ctx=2048, swa_full=False) as it:
        it.chunks(0, tokens(1500), 500)
        assert it.engine.truncate(0, 1499)
        assert not it.engine.truncate(0, 100)
        it.engine.clear(0)
        assert it.engine.length(0) == 0


@pytest.mark.parametrize("arch", MEMORIES)
def test_truncate_to_nothing_is_fresh(tiny: Tiny, arch: str) -> None:
    with opened(tiny(arch)) as it:
        fresh = it.append(3, tokens(20), "all")
        assert it.engine.truncate(3, 0)
        assert it.engine.length(3) == 0
        assert np.array_equal(it.append(3, tokens(20), "all"), fresh)


def test_a_truncation_that_lies_is_found_out(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny()) as it:
        it.append(0, tokens(9))
        with monkeypatch.context() as patch:
            patch.setattr(_ffi, "remove_from", lambda *_: True)
            assert not it.engine.truncate(0, 4)
            with pytest.raises(EngineFailed, match="slot 0 could not be emptied; its last position is 8"):
                it.engine.clear(0)
        with pytest.raises(InvalidInput, match="must be cleared"):
            it.engine.process([Append(0, 9, tokens(1), "last")])
        it.engine.clear(0)
        assert it.append(0, tokens(2)).shape == (1, N_VOCAB)


def test_a_removal_that_fails_leaves_the_slot_closed(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """mesh-llm #581: a failed reset lost the lane for ever."""
    with opened(tiny()) as it:
        fresh = it.append(2, tokens(9), "all")
        with monkeypatch.context() as patch:
            patch.setattr(_ffi, "remove_from", lambda *_: False)
            for _ in range(3):
                with pytest.raises(EngineFailed, match="slot 2 could not be emptied"):
                    it.engine.clear(2)
        it.engine.clear(2)
        assert np.array_equal(it.append(2, tokens(9), "all"), fresh)


def test_length_is_held_against_llama_cpp(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny()) as it:
        it.append(0, tokens(4))
        with monkeypatch.context() as patch:
            patch.setattr(_ffi, "position_max", lambda *_: 7)
            with pytest.raises(EngineFailed, match=r"slot 0 should hold 4 tokens; llama\.cpp says 8"):
                it.engine.length(0)
        it.engine.clear(0)
        assert it.engine.length(0) == 0


# Values that are not finite.


def _poison(it: Opened, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states = hidden(100, it.info.n_embd)
    states[90, 3] = np.nan
    with monkeypatch.context() as patch:
        patch.setattr(Gate, "_check_hidden", lambda *_: None)
        with pytest.raises(EngineFailed, match=rf"the output of slots \[{slot}\] is not finite"):
            it.append(slot, states, "none")


def test_an_output_that_is_not_finite_is_a_failure(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny()) as it:
        it.append(1, tokens(5))
        _poison(it, 1, monkeypatch)
        assert not it.engine.truncate(1, 5)
        it.engine.clear(1)
        assert it.engine.length(1) == 0


@pytest.mark.parametrize("n_slots, neighbour", [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_a_poisoned_slot_is_scrubbed_before_its_next_tenant(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, n_slots: int, neighbour: bool
) -> None:
    """Vllm PR 50283: a NaN request poisons reused blocks.  With 64 query tokens, flash attention reads masked cells."""
    with opened(tiny(), n_slots=n_slots) as it:
        it.append(0, hidden(100, it.info.n_embd))
        it.engine.clear(0)
        fresh = it.append(0, tokens(70), "all")
        it.engine.clear(0)
        if neighbour:
            it.append(1, tokens(30, seed=1))
        _poison(it, 0, monkeypatch)
        it.engine.clear(0)
        assert np.array_equal(it.append(0, tokens(70), "all"), fresh)
        if neighbour:
            own = it.append(1, tokens(8, seed=2), "all")
            it.engine.clear(1)
            it.append(1, tokens(30, seed=1))
            assert np.array_equal(it.append(1, tokens(8, seed=2), "all"), own)


def test_two_poisoned_slots_are_scrubbed_together(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tiny(), n_slots=2) as it:
        fresh = it.append(0, tokens(70), "all")
        it.engine.clear(0)
        _poison(it, 0, monkeypatch)
        _poison(it, 1, monkeypatch)
        with pytest.raises(EngineFailed, match="nothing to overwrite them with"):
            it.engine.clear(0)
        with pytest.raises(InvalidInput, match="must be cleared"):
            it.append(0, tokens(1))
        it.engine.clear(1)
        it.engine.clear(0)
        assert np.array_equal(it.append(0, tokens(70), "all"), fresh)
        assert np.array_equal(it.append(1, tokens(70), "all"), fresh)


@pytest.mark.parametrize("arch", ["mamba", "jamba"])
def test_a_poisoned_recurrent_slot_waits_for_the_others(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    with opened(tiny(arch), n_slots=2) as it:
        fresh = it.append(0, tokens(70), "all")
        it.engine.clear(0)
        it.append(1, tokens(5))
        _poison(it, 0, monkeypatch)
        with pytest.raises(EngineFailed, match="nothing to overwrite them with"):
            it.engine.clear(0)
        it.engine.clear(1)
        it.engine.clear(0)
        assert np.array_equal(it.append(0, tokens(70), "all"), fresh)


# Opening and closing.


def _memory() -> int:
    """Return the resident bytes, without those that the allocator keeps though nobody uses them (glibc)."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@attrs.define
class _Counts:
    made: int = 0
    freed: int = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> _Counts:
    """Count what llama.cpp made and what was given back: models, contexts, batches."""
    counts = _Counts()

    def count(name: str, field: str) -> None:
        inner = getattr(llama_cpp, name)

        def counted(*arguments: Any) -> Any:
            found = inner(*arguments)
            if field == "freed" or found:
                setattr(counts, field, getattr(counts, field) + 1)
            return found

        monkeypatch.setattr(llama_cpp, name, counted)

    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_batch_ext_init"):
        count(name, "made")
    for name in ("llama_model_free", "llama_free", "llama_batch_ext_free"):
        count(name, "freed")
    return counts


def test_close_gives_everything_back(tiny: Tiny, counts: _Counts) -> None:
    engine = LlamaEngine(tiny(), n_slots=2, n_ctx=256, threads=1)
    engine.close()
    for _ in range(2):
        engine.open()
        engine.process([Append(0, 0, tokens(3), "last")])
        engine.tokenize("text")
        engine.close()
        engine.close()
    assert counts.made == counts.freed == 2 * 4


def test_a_failed_open_leaves_nothing(tiny: Tiny, tmp_path: Path, counts: _Counts) -> None:
    whole = tiny().read_bytes()
    files = {"missing": None, "empty": b"", "foreign": b"not a model at all", "cut": whole[: len(whole) // 2]}
    for name, content in files.items():
        path = tmp_path / f"{name}.gguf"
        if content is not None:
            path.write_bytes(content)
        engine = LlamaEngine(path, n_slots=1, n_ctx=256, threads=1)
        with pytest.raises(InvalidInput, match=re.escape(str(path))):
            engine.open()
        engine.close()
    assert counts.made == counts.freed == 0


@pytest.mark.parametrize("step", ["memory", "n_batch", "Batch", "n_swa", "commit"])
def test_an_open_that_fails_at_any_step_leaves_nothing(
    tiny: Tiny, counts: _Counts, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def broken(*_: object) -> None:
        raise OSError(step)

    threads = threading.active_count()
    engine = LlamaEngine(tiny(), n_slots=2, n_ctx=256, threads=1)
    with monkeypatch.context() as patch:
        patch.setattr(_ffi, step, broken)
        with pytest.raises(OSError, match=step):
            engine.open()
    engine.close()
    assert counts.made == counts.freed
    assert threading.active_count() == threads
    assert engine.open().n_slots == 2
    engine.close()
    assert counts.made == counts.freed


def test_failed_opens_leave_no_memory(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    true = ModelFacts.kv_bytes_per_token
    monkeypatch.setattr(ModelFacts, "kv_bytes_per_token", lambda *arguments: 2 * true(*arguments))
    engine = LlamaEngine(tiny(), n_slots=8, n_ctx=2048, threads=1)

    def fail() -> None:
        with pytest.raises(EngineFailed):
            engine.open()

    for _ in range(3):
        fail()
    before = _memory()
    for _ in range(10):
        fail()
    # Ten contexts of 16 MiB of KV alone: one of them left behind would show.
    assert _memory() - before < 16 << 20


def test_what_can_never_fit_in_memory_is_refused(tiny: Tiny, counts: _Counts) -> None:
    """llama.cpp would write zeros over it until the system ends the process."""
    engine = LlamaEngine(tiny(), n_slots=64, n_ctx=32 << 19, threads=1)
    with pytest.raises(InvalidInput, match=r"KV for all slots would take 1099511627776 bytes; this machine has \d+"):
        engine.open()
    assert counts.made == counts.freed == 0


def test_a_context_that_llama_cpp_refuses_says_why(tiny: Tiny, counts: _Counts) -> None:
    engine = LlamaEngine(tiny(n_embd=64, n_head=4, n_head_kv=2), type_k="q8_0", n_slots=1, n_ctx=256, threads=1)
    with pytest.raises(EngineFailed, match=r"cannot make a context for .*block size 32 does not divide"):
        engine.open()
    engine.close()
    assert counts.made == counts.freed == 1


def test_calls_outside_of_open_and_close(tiny: Tiny) -> None:
    engine = LlamaEngine(tiny(), n_slots=2, n_ctx=256, threads=1)
    calls: list[Callable[[], object]] = [
        lambda: engine.process([Append(0, 0, tokens(1), "last")]),
        lambda: engine.truncate(0, 0),
        lambda: engine.clear(0),
        lambda: engine.length(0),
    ]
    for _ in range(2):
        for call in calls:
            with pytest.raises(InvalidInput, match="not open"):
                call()
        engine.open()
        with pytest.raises(InvalidInput, match="open already"):
            engine.open()
        assert engine.length(1) == 0
        engine.close()


def test_a_model_without_a_cache_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, counts: _Counts) -> None:
    monkeypatch.setattr(_ffi, "is_decoder", lambda _: False)
    with pytest.raises(InvalidInput, match="not a decoder"):
        LlamaEngine(tiny(), threads=1).open()
    assert counts.made == counts.freed == 1


def test_a_shard_file_is_refused_as_a_model(tiny: Tiny, tmp_path: Path) -> None:
    shard = slice_gguf(tiny("llama"), (1, 3), tmp_path / "shard.gguf")
    for layers in (None, (0, 2)):
        engine = LlamaEngine(shard, layers=layers, n_slots=1, n_ctx=256)
        with pytest.raises(InvalidInput, match=r"shard \(layers 1:3\): give the whole model"):
            engine.open()


def test_repr_says_the_state(tiny: Tiny) -> None:
    with opened(tiny("gemma3")) as it:
        assert re.fullmatch(r"<LlamaEngine gemma3\.gguf 0:\d, 4 slots x 256 tokens, sliding>", repr(it.engine))
    assert repr(it.engine) == "<LlamaEngine gemma3.gguf, not open>"


# Recipe.


def test_the_recipe_says_what_kv_depends_on(tiny: Tiny) -> None:
    with opened(tiny("gemma3")) as it:
        recipe = it.info.recipe
    assert recipe.architecture == "gemma3"
    assert (recipe.layers, recipe.layer_count) == (it.info.layers, it.info.layer_count)
    assert re.fullmatch(r"llama\.cpp [0-9a-f]{7,40}", recipe.engine)
    assert _ffi.PINNED_COMMIT.startswith(recipe.engine.removeprefix("llama.cpp "))
    assert (recipe.type_k, recipe.type_v, recipe.flash_attention, recipe.kv_rotation) == ("f16", "f16", True, False)
    assert (recipe.n_swa, recipe.swa_full, recipe.layout, recipe.n_ctx_seq) == (32, True, "streams", 256)
    assert recipe.rope_freq_base > 0


@pytest.mark.parametrize(
    "field, options",
    [
        ("type_k", {"type_k": "f32"}),
        ("type_v", {"type_v": "f32"}),
        ("n_ctx_seq", {"n_ctx": 512}),
        ("swa_full", {"swa_full": False}),
        ("kv_rotation", {"type_k": "q8_0"}),
    ],
)
def test_each_option_that_matters_changes_the_recipe(tiny: Tiny, field: str, options: dict[str, Any]) -> None:
    with opened(tiny()) as plain, opened(tiny(), **options) as other:
        assert field in plain.info.recipe.difference(other.info.recipe)


def test_options_that_do_not_matter_leave_the_recipe(tiny: Tiny) -> None:
    with opened(tiny(), n_slots=2, threads=1) as one, opened(tiny(), n_slots=3, threads=2) as other:
        assert one.info.recipe == other.info.recipe


# Log.


def test_the_log_goes_to_logging(
    tiny: Tiny, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, "hotkv_trio.llama"), opened(tiny("gemma3")):
        pass
    levels = {record.message: record.levelno for record in caplog.records}
    assert any("KV buffer size" in message for message, level in levels.items() if level == logging.INFO)
    assert any("full-size SWA" in message for message, level in levels.items() if level == logging.WARNING)
    assert capfd.readouterr() == ("", "")


def test_pieces_of_lines_become_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "hotkv_trio.llama"), _log.collected_lines() as lines:
        _log.receive(2, b"one ")
        _log.receive(5, b"line\nand ")
        _log.receive(5, b"another\n.")
        _log.receive(5, b"...\n")
        _log.receive(4, b"bad \xff bytes\n")
        _log.receive(3, b"unfinished")
        _log.receive(99, b"of no known level\n")
    assert lines == ["one line", "and another", "bad \ufffd bytes", "unfinished", "of no known level"]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "ERROR", "WARNING", "DEBUG"]


def test_why_a_file_cannot_be_loaded_is_said_in_llama_cpps_words(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "unknown.gguf"
    path.write_bytes(tiny().read_bytes().replace(b"llama", b"lxxma"))
    with pytest.raises(EngineFailed, match=r"cannot load .*: unknown model architecture: 'lxxma'"):
        LlamaEngine(path, threads=1).open()
    with pytest.raises(InvalidInput, match=r"no vocabulary: .*: unknown model architecture: 'lxxma'"):
        Vocabulary(path)


def test_what_llama_cpp_says_of_every_shard_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "hotkv_trio.llama"):
        _log.receive(3, b"load: adding 49152 dummy tokens\n")
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_the_log_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception in a callback from C has nowhere to go."""

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_log.LOGGER, "log", broken)
    with _log.collected_lines() as lines:
        _log.receive(2, b"text\n")
        _log.receive(2, None)  # type: ignore[arg-type]
    assert lines == ["text"]


def test_each_thread_collects_its_own_lines() -> None:
    def other() -> None:
        _log.receive(2, b"theirs\n")

    with _log.collected_lines() as lines:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        _log.receive(2, b"ours\n")
    assert lines == ["ours"]


# Text.


def test_text_goes_to_tokens_and_back(tiny: Tiny) -> None:
    engine = LlamaEngine(tiny(), threads=1)
    text = "a text with \N{GREEK SMALL LETTER ALPHA} and \N{SNOWMAN}"
    numbers = engine.tokenize(text)
    assert numbers.dtype == np.int32
    assert engine.detokenize(numbers).decode().strip() == text
    assert len(engine.tokenize(text, add_special=False)) == len(numbers) - 1
    assert [token for token in range(N_VOCAB) if engine.is_end(token)] == [2]
    assert not engine.is_end(-1)
    with pytest.raises(InvalidInput, match=f"token {N_VOCAB}: tokens are 0 to {N_VOCAB - 1}"):
        engine.detokenize([N_VOCAB])
    with pytest.raises(InvalidInput, match="not Unicode"):
        engine.tokenize("\ud800")
    assert engine.detokenize(number for number in numbers if not engine.is_end(number)).decode().strip() == text
    engine.close()


def test_a_model_without_a_vocabulary_has_no_text(tiny: Tiny) -> None:
    engine = LlamaEngine(tiny(n_vocab=64), threads=1)
    with pytest.raises(InvalidInput, match="no vocabulary"):
        engine.tokenize("text")


def test_a_vocabulary_that_nobody_closes_is_given_back(tiny: Tiny, counts: _Counts) -> None:
    engine = LlamaEngine(tiny(), threads=1)
    engine.tokenize("text")
    engine.close()
    assert engine.detokenize([2], special=True) == b"</s>"
    assert (counts.made, counts.freed) == (2, 1)
    del engine
    gc.collect()
    assert (counts.made, counts.freed) == (2, 2)


def test_text_from_several_threads_while_it_is_closed(tiny: Tiny) -> None:
    vocabulary = Vocabulary(tiny())
    expected = vocabulary.tokenize("some words to cut")
    outcomes: list[str] = []
    at_work = threading.Barrier(5, timeout=20)

    def cut() -> None:
        assert np.array_equal(vocabulary.tokenize("some words to cut"), expected)
        at_work.wait()
        try:
            while True:
                assert np.array_equal(vocabulary.tokenize("some words to cut"), expected)
        except InvalidInput as error:
            outcomes.append(error.what)

    threads = [threading.Thread(target=cut) for _ in range(4)]
    for thread in threads:
        thread.start()
    at_work.wait()
    vocabulary.close()
    for thread in threads:
        thread.join(timeout=20)
    assert len(outcomes) == 4
    assert all("closed" in what for what in outcomes)
