"""How the next token is picked from a row of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Sampler: TypeAlias = Callable[[npt.NDArray[np.float32]], int]
"""Takes the logits of one position, float32 (n_vocab,); returns a token.

It is called once for each token, in order, also when shards are lost: one with a state of its own stays repeatable.
"""


def greedy(logits: npt.NDArray[np.float32]) -> int:
    """Return the most likely token; the lowest of several."""
    return int(np.argmax(logits))
