"""An engine that does nothing but count tokens: what is left is the core's own time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hotkv_trio._engine import EngineInfo
from hotkv_trio._recipe import CacheRecipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._engine import Append, Rows

_WIDTH = 8
_N_CTX = 1 << 30


class IdleEngine:
    """Holds lengths only; every row is the same array of zeros."""

    def __init__(self, n_slots: int) -> None:
        self._lengths = [0] * n_slots
        self._row: Rows = np.zeros((1, _WIDTH), dtype=np.float32)

    def open(self) -> EngineInfo:
        """See `hotkv_trio.Engine.open`."""
        n_slots = len(self._lengths)
        return EngineInfo(
            n_slots=n_slots,
            n_ctx_seq=_N_CTX,
            bytes_per_token=1,
            slot_bytes=_N_CTX,
            max_batch_tokens=max(512, n_slots),
            max_outputs=max(512, n_slots),
            n_vocab=_WIDTH,
            n_embd=0,
            n_output=_WIDTH,
            memory="attention",
            layers=(0, 1),
            layer_count=1,
            recipe=CacheRecipe(
                model_digest="idle",
                architecture="idle",
                layers=(0, 1),
                layer_count=1,
                engine="idle",
                type_k="f16",
                type_v="f16",
                flash_attention=True,
                kv_rotation=False,
                rope_freq_base=0.0,
                rope_freq_scale=0.0,
                yarn=(),
                n_swa=0,
                swa_full=True,
                layout="streams",
                n_ctx_seq=_N_CTX,
            ),
        )

    def process(self, group: Sequence[Append]) -> list[Rows]:
        """See `hotkv_trio.Engine.process`."""
        for append in group:
            self._lengths[append.slot] += len(append.data)
        return [self._row[: append.n_rows] for append in group]

    def truncate(self, slot: int, length: int) -> bool:
        """See `hotkv_trio.Engine.truncate`."""
        self._lengths[slot] = length
        return True

    def clear(self, slot: int) -> None:
        """See `hotkv_trio.Engine.clear`."""
        self._lengths[slot] = 0

    def move(self, source: int, target: int) -> None:
        """See `hotkv_trio.Engine.move`."""
        self._lengths[target], self._lengths[source] = self._lengths[source], 0

    def length(self, slot: int) -> int:
        """See `hotkv_trio.Engine.length`."""
        return self._lengths[slot]

    def close(self) -> None:
        """See `hotkv_trio.Engine.close`."""
