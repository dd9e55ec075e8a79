"""ReplayOracle: what a session that lived alone would have been given, from an engine that serves nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from hotkv_trio._plan import Work
from hotkv_trio.testing._model import Appended

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._engine import Engine, Rows
    from hotkv_trio.testing._model import Cut


@final
class ReplayOracle:
    """An `Oracle` that replays a session's calls, of the same shapes, in a slot of its own.

    Its rows equal those of a session in exact mode bit for bit.

    Args:
        engine: not opened yet; closed by `close`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._info = engine.open()
        self._held: list[Appended | Cut] = []

    def __call__(self, events: Sequence[Appended | Cut], chunk: int) -> Rows:
        """See `Oracle`."""
        todo = list(events)
        if todo[: len(self._held)] == self._held and len(todo) > len(self._held):
            todo = todo[len(self._held) :]
        else:
            self._engine.clear(0)
        rows: list[Rows] = []
        for event in todo:
            rows = []
            if isinstance(event, Appended):
                work = Work(0, self._engine.length(0), np.array(event.tokens, np.int32), event.output, owner=None)
                while work.left:
                    n = min(chunk, work.left)
                    rows += self._engine.process([work.piece(n)])
                    work.done += n
            elif not self._engine.truncate(0, event.length):
                raise RuntimeError(f"the oracle's engine cannot be cut back to {event.length} tokens")
        self._held = list(events)
        return np.concatenate(rows) if rows else np.empty((0, self._info.n_output), np.float32)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()
