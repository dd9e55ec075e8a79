"""Engines that break the promise of isolation, each in a way of its own, for a demo that has to notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hotkv_trio import EngineFailed
from hotkv_trio._cli.demo._prompts import random_prompts
from hotkv_trio._cli.demo._stage import Setting
from hotkv_trio.testing import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotkv_trio import Append, Engine
    from hotkv_trio._engine import Rows

N_VOCAB = 16


def fake_setting(make: Callable[..., Engine] = FakeEngine, *, sessions: int = 4, tokens: int = 12) -> Setting:
    """Return the demo's setting on an engine without a model."""
    prompts = random_prompts(N_VOCAB, sessions)
    n_ctx_seq = max(len(prompt.tokens) for prompt in prompts) + tokens
    return Setting(
        model="fake",
        make_engine=lambda: make(n_slots=sessions, n_ctx_seq=n_ctx_seq, n_vocab=N_VOCAB),
        prompts=prompts,
        n_decodes=tokens,
        to_text=None,
    )


def _next_up(rows: Rows) -> Rows:
    return np.nextafter(rows, np.float32(np.inf), dtype=np.float32)


class SeesNeighbours(FakeEngine):
    """The last bit depends on whether any other slot holds something."""

    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        members = {append.slot for append in group}
        beside = any(self.length(slot) for slot in range(self._info.n_slots) if slot not in members)
        return [_next_up(part) if beside else part for part in rows]


class MixesUpMembers(FakeEngine):
    """The last two members of a shared call get each other's rows."""

    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        return [*rows[:-2], rows[-1], rows[-2]] if len(rows) > 1 else rows


class LeaksFirstInto(FakeEngine):
    """The last bit of one member of a shared call depends on the token of the first."""

    victim = 2

    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        odd = bool(group[0].data[0] % 2)
        return [
            _next_up(part) if odd and append.slot == self.victim != group[0].slot else part
            for append, part in zip(group, rows, strict=True)
        ]


class RemembersLastTenant(FakeEngine):
    """A slot that was used before is one bit off."""

    def __init__(self, *, n_slots: int, n_ctx_seq: int, n_vocab: int) -> None:
        super().__init__(n_slots=n_slots, n_ctx_seq=n_ctx_seq, n_vocab=n_vocab)
        self._used: set[int] = set()

    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        return [_next_up(part) if append.slot in self._used else part for append, part in zip(group, rows, strict=True)]

    def clear(self, slot: int) -> None:
        super().clear(slot)
        # The runs alone use the first slot, one after the other: they would agree with each other.
        self._used |= {slot} - {0}


class FailsInCompany(FakeEngine):
    """It fails as soon as two slots hold something."""

    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        if sum(bool(self.length(slot)) for slot in range(self._info.n_slots)) > 1:
            raise EngineFailed(-3, "the computation failed")
        return rows
