"""Each kind of value that ends llama.cpp's process, or that it takes and gets wrong, stops at the gate.

The engine is real, so that what got through would do what it does; the process is alive and the neighbour unmoved.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hotkv_trio._engine import Append
from hotkv_trio._errors import InvalidInput
from hotkv_trio.llama import LlamaEngine, _ffi
from hotkv_trio.llama._gate import HIDDEN_LIMIT, check_memory
from tests.llama.conftest import N_VOCAB, Opened, hidden, opened, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from tests.llama.conftest import Tiny

N_EMBD = 128
Group = list[Append]


def _one(data: Any, **changes: Any) -> Group:
    return [Append(**({"slot": 0, "position": 3, "data": data, "output": "last"} | changes))]


def _at(value: float, row: int = 0, column: int = 0) -> np.ndarray[Any, Any]:
    states = hidden(3, N_EMBD)
    states[row, column] = value
    return states


def _misaligned() -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes(4 * 3 + 1), np.uint8)[1:].view(np.int32)


WRONG: dict[str, tuple[Callable[[], Group], str]] = {
    "no members": (list, "a group has at least one member"),
    "more tokens than a batch holds": (
        lambda: [Append(slot, 0, tokens(200, seed=slot), "none") for slot in (1, 2, 3)],
        "600 tokens in one call; 512 fit",
    ),
    "slot out of range": (lambda: _one(tokens(1), slot=4), "slot 4: there are slots 0 to 3"),
    "slot -1, which is all slots": (lambda: _one(tokens(1), slot=-1), "slot -1: there are slots 0 to 3"),
    "slot of another type": (lambda: _one(tokens(1), slot=0.0), "slot 0.0: there are"),
    "slot that is a truth": (lambda: _one(tokens(1), slot=True), "slot True: there are"),
    "slot twice": (lambda: 2 * _one(tokens(1)), "slot 0 is in the group twice"),
    "position -1": (lambda: _one(tokens(1), position=-1), "position -1: slot 0 goes on at 3"),
    "a hole": (lambda: _one(tokens(1), position=4), "position 4: slot 0 goes on at 3"),
    "a replay": (lambda: _one(tokens(1), position=2), "position 2: slot 0 goes on at 3"),
    "an empty slot not from 0": (lambda: _one(tokens(1), slot=1), "position 3: slot 1 goes on at 0"),
    "position of another type": (lambda: _one(tokens(1), position=3.0), "position 3.0: slot 0 goes on at 3"),
    "past the slot's end": (lambda: _one(tokens(254)), "slot 0 holds 3 of 256 tokens; 254 more do not fit"),
    "output unknown": (lambda: _one(tokens(1), output="first"), "output 'first': one of none, last, all"),
    "token -1": (lambda: _one(np.array([0, -1, 5], np.int32)), f"token -1: tokens are 0 to {N_VOCAB - 1}"),
    "token too large": (lambda: _one(np.array([N_VOCAB], np.int32)), f"token {N_VOCAB}: tokens are 0 to"),
    "no tokens": (lambda: _one(np.empty(0, np.int32)), "one row of at least one, not of shape (0,)"),
    "tokens in two dimensions": (lambda: _one(np.zeros((2, 2), np.int32)), "not of shape (2, 2)"),
    "one token without a dimension": (lambda: _one(np.array(5, np.int32)), "not of shape ()"),
    "a list": (lambda: _one([1, 2, 3]), "data is a numpy array, not list"),
    "an array that hides its elements": (
        lambda: _one(np.ma.masked_array(np.full(3, -1, np.int32), mask=True)),
        "data is a numpy array, not MaskedArray",
    ),
    "tokens of 8 bytes": (lambda: _one(np.zeros(3, np.int64)), "not <i8"),
    "tokens without a sign": (lambda: _one(np.zeros(3, np.uint32)), "not <u4"),
    "tokens of the other byte order": (lambda: _one(np.zeros(3, ">i4")), "not >i4"),
    "objects": (lambda: _one(np.array([None])), "not |O"),
    "tokens with gaps": (lambda: _one(tokens(6)[::2]), "C-contiguous and aligned"),
    "tokens backwards": (lambda: _one(tokens(6)[::-1]), "C-contiguous and aligned"),
    "tokens between bytes": (lambda: _one(_misaligned()), "C-contiguous and aligned"),
    "hidden states of 8 bytes": (lambda: _one(np.zeros((3, N_EMBD))), "not <f8"),
    "hidden states too narrow": (lambda: _one(hidden(3, N_EMBD - 1)), f"(at least 1, {N_EMBD}), not (3, 127)"),
    "hidden states too wide": (lambda: _one(hidden(3, N_EMBD + 1)), f"(at least 1, {N_EMBD}), not (3, 129)"),
    "one hidden state without rows": (lambda: _one(hidden(1, N_EMBD)[0]), f"not ({N_EMBD},)"),
    "no hidden states": (lambda: _one(np.empty((0, N_EMBD), np.float32)), f"not (0, {N_EMBD})"),
    "hidden states of a wider row": (lambda: _one(hidden(3, 2 * N_EMBD)[:, :N_EMBD]), "C-contiguous and aligned"),
    "hidden states turned round": (lambda: _one(np.asfortranarray(hidden(3, N_EMBD))), "C-contiguous and aligned"),
    "NaN": (lambda: _one(_at(np.nan, 2, 127)), "hidden state 2, element 127 is nan"),
    "Inf": (lambda: _one(_at(np.inf, 1, 5)), "hidden state 1, element 5 is inf"),
    "-Inf": (lambda: _one(_at(-np.inf)), "hidden state 0, element 0 is -inf"),
    "huge": (lambda: _one(_at(2 * HIDDEN_LIMIT)), "beyond ±1e+15"),
    "huge and negative": (lambda: _one(_at(-3e38)), "beyond ±1e+15"),
    "tokens and hidden states": (
        lambda: [*_one(tokens(1)), Append(1, 0, hidden(1, N_EMBD), "last")],
        "a group is all tokens or all hidden states",
    ),
    "the last of many members": (
        lambda: [*_one(tokens(1)), Append(1, 0, tokens(1), "last"), Append(2, 0, np.array([-2], np.int32), "last")],
        "token -2",
    ),
}


@pytest.fixture(scope="module")
def it(tiny: Tiny) -> Generator[Opened]:
    with opened(tiny(n_embd=N_EMBD)) as it:
        assert it.info.n_embd == N_EMBD
        it.append(0, tokens(3))
        yield it


@pytest.fixture(scope="module")
def next_row(tiny: Tiny) -> np.ndarray[Any, Any]:
    """Return what slot 0 answers next if nothing else ever reached llama.cpp."""
    with opened(tiny(n_embd=N_EMBD)) as it:
        it.append(0, tokens(3))
        return it.append(0, tokens(2), "all")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the native calls that change anything, as they are made."""
    made: list[str] = []

    def watch(name: str) -> None:
        inner = getattr(_ffi, name)

        def watched(*arguments: Any) -> Any:
            made.append(name)
            return inner(*arguments)

        monkeypatch.setattr(_ffi, name, watched)

    for name in ("process", "remove_from", "copy_stream", "wipe"):
        watch(name)
    return made


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_group_never_reaches_llama_cpp(
    it: Opened, next_row: np.ndarray[Any, Any], calls: list[str], wrong: str
) -> None:
    make, what = WRONG[wrong]
    with pytest.raises(InvalidInput) as caught:
        it.engine.process(make())
    assert what in caught.value.what
    assert calls == []
    assert [it.engine.length(slot) for slot in range(4)] == [3, 0, 0, 0]
    assert np.array_equal(it.append(0, tokens(2), "all"), next_row)
    assert it.engine.truncate(0, 3)


@pytest.mark.parametrize("slot", [-1, 4, 2**31, 2**40, 0.0, None, "0", True])
def test_a_wrong_slot_never_reaches_llama_cpp(it: Opened, calls: list[str], slot: Any) -> None:
    """An id out of range ends the process in every ``llama_memory_seq_*`` call; -1 means all sequences."""
    for call in (it.engine.clear, it.engine.length, lambda slot: it.engine.truncate(slot, 0)):
        with pytest.raises(InvalidInput, match="there are slots 0 to 3"):
            call(slot)
    assert calls == []
    assert it.engine.length(0) == 3


@pytest.mark.parametrize("length", [-1, 4, 2**31, 1.0, None, True])
def test_a_wrong_length_never_reaches_llama_cpp(it: Opened, calls: list[str], length: Any) -> None:
    with pytest.raises(InvalidInput, match="the slot holds 3 tokens, it can be cut to 0 to 3"):
        it.engine.truncate(0, length)
    assert calls == []
    assert it.engine.length(0) == 3


def test_another_thread_never_reaches_llama_cpp(it: Opened, calls: list[str]) -> None:
    """Two threads on one context are a SIGSEGV."""
    caught: list[str] = []

    def call() -> None:
        for refused in (
            lambda: it.engine.process(_one(tokens(1))),
            lambda: it.engine.truncate(0, 0),
            lambda: it.engine.clear(0),
            lambda: it.engine.length(0),
        ):
            with pytest.raises(InvalidInput) as error:
                refused()
            caught.append(error.value.what)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(caught) == 4
    assert all("one context, one thread" in what for what in caught)
    assert calls == []


def test_a_forked_process_never_reaches_llama_cpp(
    it: Opened, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads are not there: the call would wait for them for ever."""
    monkeypatch.setattr("os.getpid", lambda: -1)
    for refused in (lambda: it.engine.process(_one(tokens(1))), lambda: it.engine.truncate(0, 0)):
        with pytest.raises(InvalidInput, match="forked after the engine was opened"):
            refused()
    assert calls == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float32(1.1e15)])
def test_every_place_of_a_hidden_state_is_looked_at(it: Opened, calls: list[str], value: float) -> None:
    """NaN and Inf, one at a time at every position of a 40-row state."""
    states = hidden(40, N_EMBD)
    for place in range(0, states.size, 7):
        before = states.flat[place]
        states.flat[place] = value
        with pytest.raises(InvalidInput, match=f"hidden state {place // N_EMBD}, element {place % N_EMBD} is"):
            it.engine.process(_one(states))
        states.flat[place] = before
    assert calls == []


@pytest.mark.parametrize("scale", [1e4, 1e9, 9e14])
def test_large_finite_states_are_harmless(tiny: Tiny, scale: float) -> None:
    """What the gate lets through overflows nowhere that a neighbour or a next tenant could see."""
    states = hidden(70, N_EMBD)
    states *= np.float32(scale) / np.abs(states).max()
    with opened(tiny(n_embd=N_EMBD)) as it:
        fresh = it.append(0, tokens(70), "all")
        neighbour = it.append(1, tokens(70), "all")
        for slot in (0, 1):
            it.engine.clear(slot)
        assert np.isfinite(it.append(0, states, "all")).all()
        it.engine.clear(0)
        assert np.array_equal(it.append(0, tokens(70), "all"), fresh)
        assert np.array_equal(it.append(1, tokens(70), "all"), neighbour)


def test_tokens_on_a_shard_that_is_not_the_first(tiny: Tiny, slices: Path, calls: list[str]) -> None:
    """llama.cpp accepts token 0 there: a slice has a vocabulary of one."""
    with opened(tiny(n_embd=N_EMBD), layers=(2, 4), cache_dir=slices) as it:
        assert it.info.n_vocab == 0
        with pytest.raises(InvalidInput, match="takes hidden states only"):
            it.engine.process(_one(np.zeros(1, np.int32), position=0))
        assert calls == []


def test_hidden_states_where_the_graph_has_no_place(
    tiny: Tiny, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding batch ends the process on some architectures: only those proven to take one do."""
    monkeypatch.setattr("hotkv_trio.llama._engine.ARCHITECTURES", {})
    with opened(tiny(n_embd=N_EMBD)) as it:
        assert it.info.n_embd == 0
        with pytest.raises(InvalidInput, match="takes tokens only"):
            it.engine.process(_one(hidden(1, N_EMBD), position=0))
        assert calls == []


def test_negative_ids_stop_at_the_library_too() -> None:
    for call in (_ffi.position_min, _ffi.position_max):
        with pytest.raises(ValueError, match="means all sequences"):
            call(0, -1)
    with pytest.raises(ValueError, match="means all sequences"):
        _ffi.remove_from(0, -1, 0)
    for source, target in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match="means all sequences"):
            _ffi.copy_stream(0, source, target)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"n_slots": 0}, "n_slots=0: 1 to 256 sequences"),
        ({"n_slots": 257}, "n_slots=257: 1 to 256 sequences"),
        ({"n_slots": 4.0}, "n_slots=4.0"),
        ({"n_slots": True}, "n_slots=True"),
        ({"n_ctx": 0}, "n_ctx=0: a session holds 1 to"),
        ({"n_ctx": -5}, "n_ctx=-5"),
        ({"n_ctx": 2**31}, "n_ctx=2147483648: a session holds 1 to 536870656 tokens where there are 4 slots"),
        ({"n_slots": 256, "n_ctx": 2**23}, "1 to 8388352 tokens where there are 256 slots"),
        ({"type_k": "q6_K"}, "type_k='q6_K': KV is stored as f32, f16, bf16, q8_0"),
        ({"type_k": "i32"}, "type_k='i32'"),
        ({"type_v": 999}, "type_v=999"),
        ({"type_v": ["f16"]}, "type_v=['f16']"),
        ({"layout": "pages"}, "layout='pages': 'streams', or 'unified'"),
        ({"layout": ["streams"]}, "layout=['streams']"),
        ({"threads": 0}, "threads=0: 1 to 512"),
        ({"threads": 513}, "threads=513: 1 to 512"),
        ({"tap": "none"}, "tap='none': 'auto', 'native' or 'python'"),
        ({"layers": (2, 2)}, "layers=(2, 2)"),
        ({"layers": (-1, 2)}, "layers=(-1, 2)"),
        ({"layers": (0.5, 2)}, "layers=(0.5, 2)"),
        ({"layers": 3}, "layers=3"),
    ],
)
def test_options_are_refused_with_their_limit(options: dict[str, Any], what: str) -> None:
    """llama.cpp #24098, #16432: sizes out of range abort."""
    with pytest.raises(InvalidInput) as caught:
        LlamaEngine("no file is looked at", **options)
    assert what in caught.value.what


def test_memory_that_no_machine_has() -> None:
    check_memory(1 << 20)
    with pytest.raises(InvalidInput, match="would take 1152921504606846976 bytes; this machine has"):
        check_memory(1 << 60)
