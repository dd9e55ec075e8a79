"""Plan: which waiting work goes into the next native calls.

Pure state, no waiting.  A *round* is one decode step for every session that waits with a single token, then one
chunk of one prefill, round robin between the prefills.

Decodes are grouped: one native call serves the sessions of *consecutive* slots, because llama.cpp runs a batch over
streams with holes as one graph for each run of consecutive ids anyway; where all slots share a stream, any go
together.  In exact mode every call serves one session.
A prefill chunk always has a call of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import attrs

from hotkv_trio._engine import Append

if TYPE_CHECKING:
    from hotkv_trio._engine import Output, Rows
    from hotkv_trio._inputs import Hidden, Tokens


@attrs.define(eq=False)
class Work:
    """One append, from the moment it is queued to the moment its caller is answered."""

    slot: int
    start: int
    """The session's length before it."""
    data: Tokens | Hidden
    output: Output
    owner: Any
    """Who is told (opaque here)."""
    done: int = 0
    """Tokens appended so far."""
    rows: list[Rows] = attrs.field(factory=list)
    running: bool = False
    """A native call that names it is under way."""

    @property
    def left(self) -> int:
        """Tokens still to be appended."""
        return len(self.data) - self.done

    @property
    def is_single(self) -> bool:
        """Whether it is served as a decode: one token in all."""
        return len(self.data) == 1

    def piece(self, n_tokens: int) -> Append:
        """Return its next ``n_tokens`` as part of a native call."""
        end = self.done + n_tokens
        # Of an append cut into chunks, only the chunk with the last token owes the last row.
        output: Output = "none" if self.output == "last" and end < len(self.data) else self.output
        return Append(self.slot, self.start + self.done, self.data[self.done : end], output)


@attrs.define(eq=False)
class Call:
    """One native call to be made."""

    works: list[Work]
    n_tokens: int
    """From each."""

    @property
    def group(self) -> list[Append]:
        """The engine's view of it."""
        return [work.piece(self.n_tokens) for work in self.works]


@attrs.define(eq=False)
class Plan:
    """The queued work of all sessions."""

    prefill_chunk: int
    """Tokens of a prefill in one call, at most."""
    max_group: int
    """Sessions in one decode call, at most; 1 in exact mode."""
    scattered: bool = False
    """Whether one call takes any slots, as where all share one stream of cells."""
    arrivals: int = attrs.field(default=0, init=False)
    """Work queued so far, ever: two equal readings mean that nothing came between them."""
    _decodes: dict[int, Work] = attrs.field(factory=dict, init=False)
    _prefills: OrderedDict[int, Work] = attrs.field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        """Return how many works are queued."""
        return len(self._decodes) + len(self._prefills)

    def __contains__(self, slot: int) -> bool:
        """Return whether the slot has work queued."""
        return slot in self._decodes or slot in self._prefills

    def holds(self, work: Work) -> bool:
        """Return whether this very work is queued: its slot may have another tenant's by now."""
        return self._queue_of(work).get(work.slot) is work

    def add(self, work: Work) -> None:
        """Queue work, or what is left of it after a chunk, behind all other prefills."""
        self._queue_of(work)[work.slot] = work
        self.arrivals += 1

    def withdraw(self, work: Work) -> None:
        """Forget queued work."""
        if self.holds(work):
            del self._queue_of(work)[work.slot]

    def move(self, source: int, target: int) -> None:
        """Note that what is queued for one slot is for another now."""
        for queue in (self._decodes, self._prefills):
            if (work := queue.pop(source, None)) is not None:
                work.slot = target
                queue[target] = work

    @property
    def decoding(self) -> list[int]:
        """The slots that have a decode queued, in order."""
        return sorted(self._decodes)

    def decodes(self) -> list[Call]:
        """Return the decode calls of a round: groups of slots that can go together, one kind of data each."""
        calls: list[Call] = []
        for _, work in sorted(self._decodes.items()):
            last = calls[-1].works if calls else []
            if (
                last
                and len(last) < self.max_group
                and (self.scattered or last[-1].slot + 1 == work.slot)
                and last[-1].data.ndim == work.data.ndim
            ):
                last.append(work)
            else:
                calls.append(Call([work], 1))
        return calls

    def prefill(self) -> Call | None:
        """Return the prefill call of a round: one chunk of the prefill that has waited longest."""
        for work in self._prefills.values():
            return Call([work], min(work.left, self.prefill_chunk))
        return None

    def begin(self, call: Call) -> bool:
        """Take the call's work out of the queues; work withdrawn since the call was planned drops out of it.

        Returns:
            Whether anything is left to call for.
        """
        call.works = [work for work in call.works if self.holds(work)]
        for work in call.works:
            del self._queue_of(work)[work.slot]
            work.running = True
        return bool(call.works)

    def finish(self, call: Call, rows: list[Rows]) -> list[Work]:
        """Note that the call succeeded.

        Returns:
            The work now complete; what is left of the other has to be queued again with `add`.
        """
        for work, part in zip(call.works, rows, strict=True):
            work.running = False
            work.done += call.n_tokens
            if len(part):
                work.rows.append(part)
        return [work for work in call.works if not work.left]

    def _queue_of(self, work: Work) -> dict[int, Work]:
        return self._decodes if work.is_single else self._prefills
