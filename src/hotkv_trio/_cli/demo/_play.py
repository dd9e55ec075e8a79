"""What one session does, and how two runs of it are compared.

A part is a prompt and a number of decodes, each of the token with the highest logit; a part with a cut goes back once,
and takes the second-best token there, so that what was cut off would show in what follows.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._cli.demo._prompts import Prompt
    from hotkv_trio._session import Session

Logits: TypeAlias = npt.NDArray[np.float32]
"""float32 (n_vocab,)."""


class Incident(enum.StrEnum):
    """What may befall a session, in the order in which it does where several befall one."""

    EVICTED = "evicted and restarted"
    TRUNCATED = "truncated and continued"
    SUPERSEDED = "superseded by epoch 1"
    CANCELLED = "cancelled"


@attrs.frozen
class Cut:
    """After ``after`` decodes, all but the first ``keep`` of them are cut off."""

    after: int
    keep: int


@attrs.frozen(eq=False)
class Part:
    """What one session does."""

    name: str
    prompt: Prompt
    n_decodes: int
    incidents: frozenset[Incident] = frozenset()

    @property
    def n_calls(self) -> int:
        """Calls that return logits: one prefill, then the decodes."""
        return 1 + self.n_decodes

    @property
    def cut(self) -> Cut | None:
        """Where it goes back, if it does."""
        if Incident.TRUNCATED not in self.incidents:
            return None
        return Cut(after=self.n_decodes // 2, keep=self.n_decodes // 4)


@attrs.define(eq=False)
class Take:
    """One run of a part, as far as it got."""

    part: Part
    script: Sequence[int] | None = None
    """The tokens to decode, one a decode; None: it chooses itself."""
    rows: list[Logits] = attrs.field(factory=list, init=False)
    """The last token's logits after each call."""
    decoded: list[int] = attrs.field(factory=list, init=False)
    """The token of each decode."""

    @property
    def continuation(self) -> list[int]:
        """The tokens that follow the prompt, without those cut off."""
        cut = self.part.cut
        if cut is None or len(self.decoded) < cut.after:
            return self.decoded
        return self.decoded[: cut.keep] + self.decoded[cut.after :]

    def next_token(self) -> int:
        """Return the token of the next decode."""
        if self.script is not None:
            return self.script[len(self.decoded)]
        cut = self.part.cut
        if cut is not None and len(self.decoded) == cut.after:
            return int(self.rows[cut.keep].argsort()[-2])
        return int(self.rows[-1].argmax())


@attrs.frozen
class Difference:
    """How a take differs from another, over the calls that both made."""

    equal: bool
    """Every logit, bit for bit."""
    max_abs: float
    """The largest difference of two logits."""
    same_top: float
    """The share of calls after which both had the same best token."""


async def play(session: Session, take: Take, *, until: int | None = None) -> None:
    """Go on with a take until it has made ``until`` calls; None: all."""
    await trio.lowlevel.checkpoint()
    part, cut = take.part, take.part.cut
    while len(take.rows) < (part.n_calls if until is None else until):
        if take.rows:
            token = take.next_token()
            result = await session.decode(token)
            take.decoded.append(token)
        else:
            result = await session.prefill(part.prompt.tokens, at=0)
        take.rows.append(result.output[-1])
        if cut is not None and len(take.decoded) == cut.after:
            await session.truncate(len(part.prompt.tokens) + cut.keep)


def compare(rows: Sequence[Logits], reference: Sequence[Logits]) -> Difference:
    """Compare the logits of one take with those of another that may have got further."""
    pairs = list(zip(rows, reference, strict=False))
    return Difference(
        equal=len(pairs) == len(rows) and all(np.array_equal(_bits(ours), _bits(theirs)) for ours, theirs in pairs),
        max_abs=max((float(np.abs(ours - theirs).max()) for ours, theirs in pairs), default=0.0),
        same_top=sum(int(ours.argmax() == theirs.argmax()) for ours, theirs in pairs) / max(1, len(pairs)),
    )


def _bits(logits: Logits) -> npt.NDArray[np.uint32]:
    # As numbers, 0.0 and -0.0 are equal.
    return np.ascontiguousarray(logits).view(np.uint32)
