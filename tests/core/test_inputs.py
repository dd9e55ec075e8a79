"""What may be appended: everything else is refused before it is queued, and nothing reaches the engine."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from hotkv_trio import InvalidInput
from hotkv_trio._inputs import check_append, check_at, check_length, check_output, check_single
from hotkv_trio.testing import FakeEngine
from tests.core._rig import key, open_rig

TOKENS = FakeEngine(n_vocab=16).open()
HIDDEN = FakeEngine(n_vocab=0, n_embd=3).open()

good_tokens = pytest.mark.parametrize(
    "data",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        np.array([1, 9, 2, 9, 3, 9])[::2],
        memoryview(b"\x01\x02\x03"),
        [np.int64(1), np.int32(2), 3],
    ],
    ids=repr,
)
bad_tokens = pytest.mark.parametrize(
    "data",
    [
        [],
        [-1],
        [16],
        [2**31],
        [2**32],
        [2**32 + 1],
        [-(2**32) + 1],
        [2**63],
        [2**64],
        [2**100],
        np.array([2**64 - 1], dtype=np.uint64),
        np.array([2**32], dtype=np.int64),
        [1.0],
        [1.5],
        [True],
        [None],
        ["1"],
        "123",
        b"123",
        1,
        None,
        {1: 2},
        {1, 2},
        object(),
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        np.zeros((2, 2), dtype=np.int32),
        np.array(1),
        np.array([], dtype=np.int32),
        np.array([1 + 1j]),
        np.array([1], dtype=object),
        np.array(["1"]),
        np.array([True]),
        iter([1, 2]),
        deque([[1]]),
    ],
    ids=lambda data: f"{type(data).__name__} {data!r:.40}",
)
bad_hidden = pytest.mark.parametrize(
    "data",
    [
        np.zeros((0, 3), np.float32),
        np.zeros((1, 2), np.float32),
        np.zeros((1, 4), np.float32),
        np.zeros((1, 1, 3), np.float32),
        np.zeros((1, 3), np.float64),
        np.zeros((1, 3), np.float16),
        np.zeros((1, 3), ">f4"),
        np.array(0.0, np.float32),
        np.array([[0, np.nan, 0]], np.float32),
        np.array([[0, 0, 0], [0, 0, np.inf]], np.float32),
        np.array([[0, -np.inf, 0]], np.float32),
        [[0.0, 0.0, 0.0]],
        [1, 2, 3],
        np.zeros((1, 3), np.int32),
    ],
    ids=lambda data: f"{type(data).__name__} {data!r:.60}".replace("\n", " "),
)


@good_tokens
def test_tokens_are_taken_from_any_flat_sequence_of_integers(data: Any) -> None:
    tokens = check_append(TOKENS, data)
    assert tokens.tolist() == [1, 2, 3]
    assert tokens.dtype == np.int32
    assert tokens.flags.c_contiguous


@bad_tokens
def test_what_is_no_flat_sequence_of_tokens_in_range_is_refused(data: Any) -> None:
    with pytest.raises(InvalidInput):
        check_append(TOKENS, data)


@bad_hidden
def test_what_is_no_finite_float32_matrix_of_the_right_width_is_refused(data: Any) -> None:
    """PR 50283 of vllm: a NaN request must not reach blocks that others use again."""
    with pytest.raises(InvalidInput):
        check_append(HIDDEN, data)


@pytest.mark.parametrize("data", [5, np.int64(5), np.uint8(5), np.array(5)])
def test_a_single_token_is_an_integer(data: Any) -> None:
    tokens = check_single(TOKENS, data)
    assert tokens.tolist() == [5]
    assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    "data", [-1, 16, 2**32, 2**70, True, 1.0, None, "1", [1], [1, 2], np.array([1]), np.float32(1), np.array(True)]
)
def test_what_is_no_single_token_in_range_is_refused(data: Any) -> None:
    with pytest.raises(InvalidInput):
        check_single(TOKENS, data)


@pytest.mark.parametrize("shape", [(3,), (1, 3)])
def test_a_single_hidden_state_may_be_flat(shape: tuple[int, ...]) -> None:
    hidden = check_single(HIDDEN, np.arange(3, dtype=np.float32).reshape(shape))
    assert hidden.tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    "data", [np.zeros((2, 3), np.float32), np.zeros(2, np.float32), np.zeros(3), np.full(3, np.nan, np.float32), 5]
)
def test_what_is_no_single_hidden_state_is_refused(data: Any) -> None:
    with pytest.raises(InvalidInput):
        check_single(HIDDEN, data)


def test_each_shard_takes_its_own_kind_only() -> None:
    with pytest.raises(InvalidInput, match="tokens only"):
        check_append(TOKENS, np.zeros((1, 3), np.float32))
    with pytest.raises(InvalidInput, match="layers 2:4, which takes hidden states"):
        check_append(HIDDEN, [1])


def test_data_is_copied_because_work_waits() -> None:
    tokens = np.array([1, 2], np.int32)
    hidden = np.zeros((2, 3), np.float32)
    taken = check_append(TOKENS, tokens), check_append(HIDDEN, hidden)
    tokens[:] = 9
    hidden[:] = 9
    assert taken[0].tolist() == [1, 2]
    assert not taken[1].any()


@pytest.mark.parametrize("given, taken", [(None, None), (0, 0), (7, 7), (np.int64(7), 7)])
def test_at_is_a_position_or_none(given: Any, taken: int | None) -> None:
    assert check_at(given) == taken


@pytest.mark.parametrize("value", [-1, 1.0, True, "1", [1], np.float64(1)])
def test_what_is_no_position_or_length_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="at must be an integer >= 0"):
        check_at(value)
    with pytest.raises(InvalidInput, match="length must be an integer >= 0"):
        check_length(value)


def test_a_length_is_not_none() -> None:
    with pytest.raises(InvalidInput):
        check_length(None)


@pytest.mark.parametrize("value", ["LAST", "", None, 1, b"last", ["last"]])
def test_an_unknown_output_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="'none', 'last', 'all'"):
        check_output(value)


@bad_tokens
async def test_refused_input_changes_nothing_and_never_reaches_the_engine(data: Any) -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        calls = len(rig.engine.calls)
        with pytest.raises(InvalidInput):
            await session.prefill(data)
        assert (session.length, len(rig.engine.calls)) == (2, calls)
        result = await session.decode(3, at=2)
        assert rig.is_solo(result.output, [1, 2, 3])


async def test_hidden_states_on_a_later_shard() -> None:
    async with open_rig(FakeEngine(n_vocab=0, n_embd=3)) as rig, rig.runtime.open_session(key("a")) as session:
        first = await session.prefill(np.ones((4, 3), np.float32), output="all")
        assert first.output.shape == (4, 3)
        result = await session.decode(np.ones(3, np.float32))
        assert (result.position, result.length, result.output.shape) == (4, 5, (1, 3))
        with pytest.raises(InvalidInput):
            await session.decode(np.full(3, np.nan, np.float32))
        assert session.length == 5


def test_text_is_refused_with_what_makes_tokens_of_it() -> None:
    with pytest.raises(InvalidInput, match=r"such as tokenize makes of text, not str 'hello';"):
        check_append(TOKENS, "hello")
