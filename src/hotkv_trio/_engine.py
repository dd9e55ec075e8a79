"""The Engine protocol: what the core needs of whatever holds the KV, and what is true after each outcome.

The core calls an engine from one thread only, one call at a time, in this order: ``open`` once; then ``process``,
``truncate``, ``clear``, ``move`` and ``length`` in any order; then ``close`` once (also after a failed ``open``).  An
engine needs no lock.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._recipe import CacheRecipe

Output: TypeAlias = Literal["none", "last", "all"]
"""Which rows of an append come back: none, that of its last token, or one a token."""
OUTPUTS: tuple[Output, ...] = ("none", "last", "all")

Memory: TypeAlias = Literal["attention", "sliding", "recurrent", "hybrid"]
"""The kind of memory: only ``attention`` keeps every prefix; ``sliding`` keeps those inside its window."""

Rows: TypeAlias = npt.NDArray[np.float32]
"""float32 (rows, width)."""


@attrs.frozen(kw_only=True)
class EngineInfo:
    """The facts of an opened engine.  They do not change while it is open."""

    n_slots: int
    """Sequences that the engine holds side by side."""
    n_ctx_seq: int
    """Tokens that one slot holds."""
    bytes_per_token: int
    """KV bytes of one token in the layers owned (0 where memory does not grow with tokens)."""
    slot_bytes: int
    """KV bytes of one slot."""
    max_batch_tokens: int
    """Tokens in one call to ``process``."""
    max_outputs: int
    """Output rows in one call to ``process``."""
    n_vocab: int
    """Tokens are 0 to ``n_vocab - 1``; 0 where the engine takes no tokens."""
    n_embd: int
    """Width of a hidden state given to ``process``; 0 where the engine takes none."""
    n_output: int
    """Width of an output row: the model's vocabulary on a shard that owns the last layer, else its hidden width."""
    memory: Memory
    move_cost: float = math.inf
    """What ``move`` costs, in the time of one native call's fixed part; infinity: it is never called."""
    layers: tuple[int, int]
    """First layer owned, and one past the last."""
    layer_count: int
    """Layers of the whole model."""
    recipe: CacheRecipe

    @property
    def takes_tokens(self) -> bool:
        """Whether appends may be tokens."""
        return self.n_vocab > 0

    @property
    def takes_hidden(self) -> bool:
        """Whether appends may be hidden states."""
        return self.n_embd > 0


@attrs.frozen(eq=False)
class Append:
    """One slot's part of one native call."""

    slot: int
    position: int
    """Of the first token: the slot's length before the call."""
    data: npt.NDArray[np.int32] | npt.NDArray[np.float32]
    """Tokens, int32 (n,), or hidden states, float32 (n, n_embd); C-contiguous."""
    output: Output

    @property
    def n_tokens(self) -> int:
        """Tokens appended."""
        return len(self.data)

    @property
    def n_rows(self) -> int:
        """Rows that come back."""
        return {"none": 0, "last": 1, "all": self.n_tokens}[self.output]


class Engine(Protocol):
    """Holds KV in numbered slots.  ``LlamaEngine`` and ``testing.FakeEngine`` are two."""

    def open(self) -> EngineInfo:
        """Load the model and make every slot, all empty.  After an error nothing but ``close`` is called."""
        ...

    def process(self, group: Sequence[Append]) -> list[Rows]:
        """Append each member's data to its slot, in one native call.

        The caller sees to it that slots are distinct, that positions equal the slots' lengths, that all data is of
        one kind, and that ``max_batch_tokens``, ``max_outputs`` and ``n_ctx_seq`` are kept.

        Returns:
            For each member its rows, float32 (n_rows, n_output), in an array that nobody writes to again.
            Every member has been appended to.

        Raises:
            EngineFailed: any member's slot may hold none, some, or all of what was to be appended; all other slots
                are untouched.  ``length``, ``truncate`` and ``clear`` still work.
        """
        ...

    def truncate(self, slot: int, length: int) -> bool:
        """Cut the slot back to its first ``length`` tokens (0 <= length <= its length).

        Returns:
            True: it holds exactly the first ``length`` tokens, as if nothing had ever followed.  False: this memory
            cannot; the slot's contents mean nothing any more, and it must be cleared.

        Raises:
            EngineFailed: the slot's contents mean nothing any more.
        """
        ...

    def clear(self, slot: int) -> None:
        """Empty the slot, so that its next tenant finds it as new.

        Raises:
            EngineFailed: the slot is not clean; the core quarantines it, and tries again later.
        """
        ...

    def move(self, source: int, target: int) -> None:
        """Make the empty slot ``target`` hold exactly what ``source`` holds, and empty ``source``.

        Called only where ``move_cost`` is finite.  No later row depends on which of the two slots holds it.

        Raises:
            EngineFailed: both slots' contents mean nothing any more.
        """
        ...

    def length(self, slot: int) -> int:
        """Return the number of tokens that the slot holds."""
        ...

    def close(self) -> None:
        """Give everything back.  Called once, last, also after a failed ``open``."""
        ...
