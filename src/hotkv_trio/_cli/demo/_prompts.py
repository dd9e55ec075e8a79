"""What the sessions are given to begin with: English text where the model has a vocabulary, else random tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tokens: TypeAlias = npt.NDArray[np.int32]

TEXTS = (
    "Once upon a time, in a village by the sea, there lived",
    "The capital of France is",
    (
        "A cache is a promise: what was computed once need not be computed again. But a promise has to be kept for"
        " each reader alone. If two of them share a shelf, and one tears out a page, the other must not notice. So"
        " every shelf has a name, every name a number, and whoever comes with an old number is told so, politely, and"
        " sent back to the beginning. In short, the most important thing about a cache is"
    ),
    "Water boils at a temperature of",
    (
        "Dear colleague, thank you for your letter of last week about the behaviour of the new server under load. I"
        " have looked at it, and"
    ),
    "def fibonacci(n):\n    ",
    (
        "The old lighthouse keeper climbed the stairs each evening, counting every step aloud so that the gulls would"
        " know it was only him. One hundred and forty, one hundred and forty-one, and then the small iron door. He lit"
        " the lamp, wiped the glass, and wrote the weather in the book. Tonight, however, somebody had already written"
        " in it:"
    ),
    "My three favourite animals are the otter, the owl and",
)
"""Of unequal length, on both sides of 64 tokens: from there on the attention kernels take another path."""

LENGTHS = (12, 5, 97, 7, 31, 9, 72, 14)
"""Tokens of the prompts for a model without a vocabulary."""


@attrs.frozen(eq=False)
class Prompt:
    """What a session begins with."""

    tokens: Tokens
    """int32 (n,)."""
    text: str | None
    """None: the model has no vocabulary."""


def text_prompts(tokenize: Callable[[str], Tokens], count: int) -> list[Prompt]:
    """Return ``count`` different prompts of unequal length as text."""
    texts = [TEXTS[i] if i < len(TEXTS) else _another(i) for i in range(count)]
    return [Prompt(tokenize(text), text) for text in texts]


def random_prompts(n_vocab: int, count: int) -> list[Prompt]:
    """Return ``count`` different prompts of unequal length, of random tokens."""
    return [Prompt(random_tokens(n_vocab, LENGTHS[i % len(LENGTHS)], seed=i), None) for i in range(count)]


def random_tokens(n_vocab: int, count: int, *, seed: int | Sequence[int]) -> Tokens:
    """Return tokens, int32 (count,), the same for the same seed."""
    return np.random.default_rng(seed).integers(0, n_vocab, count, dtype=np.int32)


def _another(i: int) -> str:
    take, text = divmod(i, len(TEXTS))
    return f"Story {take + 1}. {TEXTS[text]}"
