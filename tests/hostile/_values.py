"""Values that nobody should hand to anything, and some that are right, drawn from a seed."""

from __future__ import annotations

import decimal
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

N_VOCAB: Final = 512
N_EMBD: Final = 128


class Liar:
    """Says that it is a sequence, and is none."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        raise IndexError(index)


class Refuses:
    """An array that will not be one."""

    def __array__(self, *_: object, **__: object) -> Any:  # noqa: PLW3201 - numpy's
        raise ValueError("no")

    def __index__(self) -> int:
        raise TypeError("no")


def states(rng: random.Random, n: int, width: int = N_EMBD) -> np.ndarray[Any, Any]:
    return np.random.default_rng(rng.getrandbits(32)).standard_normal((n, width), dtype=np.float32)


def right_data(rng: random.Random, most: int = 90) -> Any:
    """Return tokens or hidden states that are as they should be."""
    n = rng.choice([1, 1, 2, 7, 40, 63, 64, 65, rng.randint(1, most)])
    if rng.random() < 0.3:
        return states(rng, n)
    return np.array([rng.randrange(N_VOCAB) for _ in range(n)], np.int32)


def _spoilt(rng: random.Random) -> Any:
    data = states(rng, rng.randint(1, 70))
    data.flat[rng.randrange(data.size)] = rng.choice([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e16])
    return data


def _huge(rng: random.Random) -> Any:
    """Return hidden states at the very limit: let through, and harmless to all others."""
    return states(rng, rng.randint(1, 70)) * np.float32(rng.choice([1e5, 1e12, 1e14]))


def wrong_data(rng: random.Random) -> Any:
    """Return what is neither tokens nor hidden states of this model, or only just."""
    n = rng.randint(1, 70)
    kinds: list[Callable[[], Any]] = [
        lambda: _spoilt(rng),
        lambda: _huge(rng),
        list,
        lambda: None,
        lambda: "tokens",
        lambda: b"tokens",
        lambda: {"tokens": [1]},
        lambda: [[1, 2], [3]],
        lambda: [1, None],
        lambda: [1.5, 2.0],
        lambda: [True, False],
        lambda: [-1],
        lambda: [N_VOCAB],
        lambda: [2**31],
        lambda: [2**63],
        lambda: [2**200],
        lambda: [-(2**63)],
        lambda: 2**64,
        lambda: -1,
        lambda: decimal.Decimal(3),
        lambda: 1 + 2j,
        lambda: iter([1, 2]),
        lambda: {1, 2},
        Liar,
        Refuses,
        lambda: np.uint64(2**63),
        lambda: np.array(5),
        lambda: np.array([], np.float32),
        lambda: np.array(["1"]),
        lambda: np.array([None]),
        lambda: np.array([1, 2], "datetime64[s]"),
        lambda: np.array([1, 2], np.complex64),
        lambda: np.array([(1, 2)], [("a", "i4"), ("b", "i4")]),
        lambda: np.zeros((2, 2), np.int32),
        lambda: np.zeros(n, ">f4"),
        lambda: np.zeros((n, N_EMBD), ">f4"),
        lambda: np.zeros((n, N_EMBD)),
        lambda: np.zeros((n, N_EMBD), np.float16),
        lambda: states(rng, n, N_EMBD - 1),
        lambda: states(rng, n, N_EMBD + 1),
        lambda: states(rng, n, 2 * N_EMBD)[:, ::2],
        lambda: np.zeros((0, N_EMBD), np.float32),
        lambda: np.zeros((n, N_EMBD, 1), np.float32),
        lambda: np.ma.masked_array(np.zeros(n, np.int32), True),
        lambda: np.arange(n, dtype=np.int32)[::-1],
        lambda: memoryview(bytes(n)),
        lambda: np.zeros(6000, np.int32),
        lambda: np.broadcast_to(np.int32(7), (n,)),
    ]
    return rng.choice(kinds)()


def count(rng: random.Random, near: int) -> Any:
    """Return a position or a length: right, near, or nothing of the kind."""
    return rng.choice([
        near,
        near,
        near + 1,
        near - 1,
        0,
        rng.randint(0, 300),
        None,
        -1,
        2**31,
        -(2**63),
        2**100,
        1.0,
        np.nan,
        True,
        "3",
        np.int64(near),
        np.array([near]),
        Refuses(),
    ])


def output(rng: random.Random) -> Any:
    return rng.choice(["last", "all", "none", "last", "first", "", None, 0, b"last", ["all"], "all\0"])
