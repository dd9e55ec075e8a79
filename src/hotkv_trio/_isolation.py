"""A short proof of isolation, on the very engine that serves: what holds here, bit for bit, and what does not.

The proof is a generator that stops before each native call, so that others' work goes in between.  It knows nothing of
sessions: it is given slots that are free, and leaves them in any state.
"""

# ruff: noqa: B901 - each part is a generator whose answer is what it returns

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import attrs
import numpy as np

from hotkv_trio._engine import Append
from hotkv_trio._errors import EngineFailed, InvalidInput

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from hotkv_trio._engine import Engine, EngineInfo, Rows

MOST_SLOTS: Final = 4
"""Slots that the proof makes use of."""

_LIFE: Final = (5, 63, 64, 65, 1, 1, 128, 128, 60, 1, 1)
"""Tokens in each call of a session's life: on both sides of 64 queries in a call, and of 512 cells in a slot."""
_BRIEF_LIFE: Final = (5, 64, 1, 63, 128, 1)
"""The same in brief: two sessions together pass 512 cells."""
_CHUNKS: Final = (32, 63, 64, 128)
_TENANT: Final = 5
"""Calls of that life that show whether poison was left."""
_DECODES: Final = 4

_Data: TypeAlias = "np.ndarray[Any, Any]"
_Calls: TypeAlias = "Generator[None, None, list[Rows]]"

_WORDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "own_calls": (
        "calls that serve one session give the same bits in any slot, whoever else is there: exact mode is exact",
        "who else is there, or the slot, changes the bits of calls that serve one session: exact mode is NOT exact",
        "not tried",
    ),
    "neighbours_contents": (
        "what the neighbours hold changes no bit of a session that decodes with them",
        "what the neighbours hold CHANGES the bits of a session that decodes with them",
        "not tried: there was one slot",
    ),
    "slot_reuse": (
        "a slot that was used before is as a fresh one",
        "a slot that was used before is NOT as a fresh one: something of its last tenant is left",
        "",
    ),
    "poison": (
        "values that are not finite, or huge, harm neither the neighbour nor the slot's next tenant",
        "values that are not finite, or huge, REACH the neighbour or the slot's next tenant",
        "not tried: this engine takes no hidden states",
    ),
    "truncate": (
        "after a truncation it is as if nothing had ever followed",
        "after a truncation something of what followed is LEFT",
        "this memory keeps no prefix: a truncation ends in TruncateUnsupported, and the session is cold",
    ),
    "group_sizes": (
        "how many sessions decode together changes no bit: grouped mode is as exact as exact mode",
        "how many sessions decode together changes bits: kernels choose their path by shape",
        "not tried",
    ),
    "chunk_sizes": (
        "how a prompt is cut into chunks changes no bit",
        "how a prompt is cut into chunks changes bits: a replay repeats its calls, not just its tokens",
        "not tried",
    ),
}


_PROMISED: Final = ("own_calls", "neighbours_contents", "slot_reuse", "poison", "truncate")
_PROMISED_UNIFIED: Final = ("neighbours_contents", "slot_reuse", "truncate")


@attrs.frozen(kw_only=True)
class IsolationReport:
    """What holds on an engine, bit for bit: True, False, or None where it was not tried."""

    layout: str
    """How the slots share the context: it decides what is promised."""
    own_calls: bool | None
    """Calls that serve one session alone do not depend on neighbours or slot: what exact mode promises.

    Not promised where sessions share a pool of cells.
    """
    neighbours_contents: bool | None
    """In shared calls the neighbours' contents change nothing: what grouped mode promises."""
    slot_reuse: bool
    """A slot that was cleared is as new."""
    poison: bool | None
    """Values that are not finite, or huge, stay where they came from."""
    truncate: bool | None
    """A slot that was cut back is as if nothing had followed."""
    group_sizes: bool | None
    """The number of sessions in a call changes nothing.  Not promised: a property of the kernels."""
    chunk_sizes: bool | None
    """The number of tokens in a call changes nothing.  Not promised: a property of the kernels."""
    slots: int
    """Slots that it was tried on."""
    tokens: int
    """Tokens that a session held at the most."""

    @property
    def promised(self) -> tuple[str, ...]:
        """The findings that the layout promises, by name."""
        return _PROMISED_UNIFIED if self.layout == "unified" else _PROMISED

    @property
    def isolated(self) -> bool:
        """Whether all that the layout promises holds, as far as it could be tried."""
        return all(getattr(self, name) is not False for name in self.promised)

    @property
    def batch_invariant(self) -> bool:
        """Whether grouped mode is as exact as exact mode here."""
        return self.group_sizes is True and self.chunk_sizes is True

    def sentences(self) -> list[tuple[str, bool | None, str]]:
        """Return each finding: its name, whether it holds, and what that means in plain words."""
        found = []
        for name, words in _WORDS.items():
            held: bool | None = getattr(self, name)
            found.append((name.replace("_", " "), held, words[2 if held is None else 0 if held else 1]))
        return found


def prove(engine: Engine, info: EngineInfo, slots: Sequence[int]) -> Generator[None, None, IsolationReport]:
    """Prove what holds; each step makes at most one native call, on the engine's own thread.

    Args:
        engine: open.
        info: its facts.
        slots: empty ones, at least one, which nobody else names meanwhile.

    Raises:
        InvalidInput: the slots share a pool of cells with others, whose coming and going would be taken for a fault.
        EngineFailed: a call failed that should not have.
    """
    if info.recipe.layout == "unified" and len(slots) < info.n_slots:
        raise InvalidInput(
            f"in the unified layout the proof needs the pool for itself, and has {len(slots)} of {info.n_slots} slots;"
            " the engine's `isolation` is what was found when it was opened"
        )
    proof = _Proof(engine, info, slots, _LIFE)
    fresh = yield from proof.life(proof.slots[0])
    slot_reuse = yield from proof.is_reused_as_new(fresh)
    several = len(slots) > 1
    return IsolationReport(
        layout=info.recipe.layout,
        own_calls=(yield from proof.are_own_calls_as_alone(fresh)) if several else None,
        neighbours_contents=(yield from proof.are_contents_unseen()) if several else None,
        slot_reuse=slot_reuse,
        poison=(yield from proof.is_poison_harmless(fresh)) if info.takes_hidden else None,
        truncate=(yield from proof.is_truncate_exact()),
        group_sizes=(yield from proof.are_group_sizes_alike()) if several else None,
        chunk_sizes=(yield from proof.are_chunk_sizes_alike()),
        slots=len(slots),
        tokens=sum(proof.sizes),
    )


def prove_briefly(engine: Engine, info: EngineInfo) -> IsolationReport:
    """Prove, on the first two slots, what the unified layout promises; all slots are empty before.

    Raises:
        EngineFailed: a call failed that should not have.
    """

    def proof() -> Generator[None, None, IsolationReport]:
        slots = range(min(2, info.n_slots))
        it = _Proof(engine, info, slots, _BRIEF_LIFE)
        fresh = yield from it.life(0)
        contents = (yield from it.are_contents_unseen()) if len(slots) > 1 else None
        yield from it.empty(slots)
        return IsolationReport(
            layout=info.recipe.layout,
            own_calls=None,
            neighbours_contents=contents,
            slot_reuse=_same((yield from it.life(0)), fresh),
            poison=None,
            truncate=(yield from it.is_truncate_exact()),
            group_sizes=None,
            chunk_sizes=None,
            slots=len(slots),
            tokens=sum(it.sizes),
        )

    steps = proof()
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            report: IsolationReport = stop.value
            return report


class _Proof:
    """The parts of it.  Each begins by emptying what it uses."""

    def __init__(self, engine: Engine, info: EngineInfo, slots: Sequence[int], life: Sequence[int]) -> None:
        self.engine = engine
        self.info = info
        self.slots = sorted(slots)
        self.most = min(info.max_batch_tokens, info.max_outputs)
        self.sizes: list[int] = []
        for n in life:
            if n <= self.most and sum(self.sizes) + n + _DECODES <= info.n_ctx_seq:
                self.sizes.append(n)

    def data(self, n: int, seed: int) -> _Data:
        rng = np.random.default_rng([seed, n])
        if self.info.takes_tokens:
            return rng.integers(0, self.info.n_vocab, n, dtype=np.int32)
        return rng.standard_normal((n, self.info.n_embd), dtype=np.float32)

    def call(self, members: Mapping[int, _Data]) -> _Calls:
        """Append to several slots in one call; return each member's last row."""
        yield
        return self.engine.process([
            Append(slot, self.engine.length(slot), data, "last") for slot, data in sorted(members.items())
        ])

    def empty(self, slots: Sequence[int]) -> Generator[None]:
        for slot in slots:
            yield
            self.engine.clear(slot)

    def life(self, slot: int, *, seed: int = 0, beside: Sequence[int] = (), turns: int | None = None) -> _Calls:
        """Empty a slot and live a session's life in it, or its first turns, with the neighbours' calls in between."""
        yield from self.empty([slot, *beside])
        rows = []
        for turn, n in enumerate(self.sizes[:turns]):
            for number, other in enumerate(beside):
                yield from self.call({other: self.data(n if turn == number else 1, 1000 + 10 * turn + number)})
            rows += yield from self.call({slot: self.data(n, seed + turn)})
        return rows

    def is_reused_as_new(self, fresh: list[Rows]) -> Generator[None, None, bool]:
        yield from self.life(self.slots[0], seed=100)
        again = yield from self.life(self.slots[0])
        return _same(again, fresh)

    def are_own_calls_as_alone(self, fresh: list[Rows]) -> Generator[None, None, bool]:
        for slot in {self.slots[0], self.slots[-1]}:
            among = yield from self.life(slot, beside=[other for other in self.slots if other != slot])
            if not _same(among, fresh):
                return False
        return True

    def decoded_together(
        self, slots: Sequence[int], *, noise: int = 0, own: int | None = None
    ) -> Generator[None, None, dict[int, list[Rows]]]:
        """Prefill the slots in turns, then decode in shared calls; return each slot's rows.

        Every slot has data of its own; ``noise`` changes it for all slots but ``own``.
        """
        yield from self.empty(self.slots)
        seeds = {slot: 100 * slot + (0 if slot == own else noise) for slot in slots}
        rows: dict[int, list[Rows]] = {slot: [] for slot in slots}
        for turn, n in enumerate(self.sizes):
            for slot, seed in seeds.items():
                rows[slot] += yield from self.call({slot: self.data(n, seed + turn)})
        for turn in range(_DECODES):
            together = yield from self.call({slot: self.data(1, seed + 50 + turn) for slot, seed in seeds.items()})
            for slot, row in zip(sorted(slots), together, strict=True):
                rows[slot].append(row)
        return rows

    def are_contents_unseen(self) -> Generator[None, None, bool]:
        before = yield from self.decoded_together(self.slots)
        for own in self.slots:
            after = yield from self.decoded_together(self.slots, noise=50_000, own=own)
            if not _same(after[own], before[own]):
                return False
        return True

    def are_group_sizes_alike(self) -> Generator[None, None, bool]:
        own = self.slots[-1]
        alone = yield from self.decoded_together([own])
        for n in sorted({2, len(self.slots)}):
            together = yield from self.decoded_together(self.slots[-n:])
            if not _same(together[own], alone[own]):
                return False
        return True

    def are_chunk_sizes_alike(self) -> Generator[None, None, bool]:
        slot = self.slots[0]
        n = sum(self.sizes)
        data = self.data(n, 7)
        found: list[list[Rows]] = []
        for chunk in [self.most, *_CHUNKS]:
            if chunk > self.most:
                continue
            yield from self.empty([slot])
            for at in range(0, n, chunk):
                rows = yield from self.call({slot: data[at : at + chunk]})
            found.append(rows + (yield from self.call({slot: self.data(1, 8)})))
        return all(_same(rows, found[0]) for rows in found)

    def is_truncate_exact(self) -> Generator[None, None, bool | None]:
        slot = self.slots[0]
        kept = None
        for length, more in ((3, 1), (20, 30), (70, 2), (70, sum(self.sizes) - 70)):
            if length > self.most or not 0 < more <= self.info.n_ctx_seq - length - 3:
                continue
            head, tail, after = self.data(length, 1), self.data(more, 2), self.data(3, 3)
            yield from self.empty(self.slots)
            yield from self.call({slot: head})
            expected = yield from self.call({slot: after})
            yield from self.empty([slot])
            yield from self.call({slot: head})
            for at in range(0, more, self.most):
                yield from self.call({slot: tail[at : at + self.most]})
            yield
            if not self.engine.truncate(slot, length):
                continue
            kept = _same((yield from self.call({slot: after})), expected)
            if not kept:
                return False
        return kept

    def is_poison_harmless(self, fresh: list[Rows]) -> Generator[None, None, bool]:
        slot, *others = self.slots
        neighbour = others[:1]
        held = min(20, self.most)
        expected = []
        yield from self.empty(self.slots)
        for other in neighbour:
            yield from self.call({other: self.data(held, 4)})
            expected += yield from self.call({other: self.data(1, 5)})
        for value in (np.nan, np.inf, -np.inf, 3e38, 1e15, 1e8):
            yield from self.empty([slot, *neighbour])
            for other in neighbour:
                yield from self.call({other: self.data(held, 4)})
            poison = np.random.default_rng(6).standard_normal((min(40, self.most), self.info.n_embd), dtype=np.float32)
            poison[len(poison) // 2, 0] = value
            yield
            with suppress(InvalidInput, EngineFailed):
                self.engine.process([Append(slot, 0, poison, "last")])
            found = []
            for other in neighbour:
                found += yield from self.call({other: self.data(1, 5)})
            tenant = yield from self.life(slot, turns=_TENANT)
            if not (_same(found, expected) and _same(tenant, fresh[:_TENANT])):
                return False
        return True


def _same(one: Sequence[Rows], other: Sequence[Rows]) -> bool:
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
