"""All sessions together in grouped mode: runs of one schedule, in which some sessions' tokens are exchanged.

Every run feeds a session the tokens that it had alone, so that its logits can be compared call by call however far
they drift.  The sessions go in rounds: in each one another session prefills its prompt, while those before it decode.
So the native calls are the same in every run, whatever the machine's load; they are compared to prove it.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import attrs
import trio

from hotkv_trio._cli.demo._play import Take, play
from hotkv_trio._cli.demo._prompts import Prompt, random_tokens
from hotkv_trio._keys import SessionKey

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotkv_trio._cli._recorder import Member, NativeCall
    from hotkv_trio._cli.demo._stage import Stage
    from hotkv_trio._session import Session


@attrs.frozen(eq=False)
class Run:
    """One run: a take of each part, and the native calls made."""

    takes: list[Take]
    calls: list[NativeCall]

    @property
    def schedule(self) -> list[tuple[Member, ...]]:
        """The native calls without contents and times."""
        return [call.members for call in self.calls]


@attrs.define(eq=False)
class Rounds:
    """A barrier: nobody begins a round before everybody has finished the one before."""

    parties: int
    _here: int = attrs.field(default=0, init=False)
    _begun: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def begin(self) -> None:
        """Wait until everybody is here."""
        begun = self._begun
        self._here += 1
        if self._here == self.parties:
            self._here, self._begun = 0, trio.Event()
            begun.set()
        await begun.wait()


async def play_grouped(stage: Stage, takes: Sequence[Take]) -> Run:
    """Play all takes at once, each in the slot of its number."""
    begun = len(stage.calls)
    rounds = Rounds(len(takes))
    n_rounds = len(takes) + max(take.part.n_decodes for take in takes)

    async def play_in_rounds(session: Session, number: int) -> None:
        take = takes[number]
        await trio.lowlevel.checkpoint()
        for current in range(n_rounds):
            await rounds.begin()
            await play(session, take, until=min(current - number + 1, take.part.n_calls))

    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(stage.runtime.open_session(SessionKey(take.part.name, 0))) for take in takes
        ]
        async with trio.open_nursery() as nursery:
            for number, session in enumerate(sessions):
                nursery.start_soon(play_in_rounds, session, number)
    return Run(list(takes), stage.calls[begun:])


def repeated(solo: Take) -> Take:
    """Return a take of the same part that makes the same calls."""
    return Take(solo.part, script=solo.decoded)


def exchanged(solo: Take, n_vocab: int, seed: Sequence[int]) -> Take:
    """Return a take that makes calls of the same shape, with other tokens."""
    n_prompt = len(solo.part.prompt.tokens)
    tokens = random_tokens(n_vocab, n_prompt + len(solo.decoded), seed=seed)
    part = attrs.evolve(solo.part, prompt=Prompt(tokens[:n_prompt], None))
    return Take(part, script=tokens[n_prompt:].tolist())


def exchanges(count: int) -> Iterator[frozenset[int]]:
    """Yield who keeps its tokens, run by run: of any two sessions each keeps them once while the other's change.

    That takes two runs for each binary digit of the sessions' numbers.
    """
    for digit in range((count - 1).bit_length()):
        for value in (0, 1):
            yield frozenset(i for i in range(count) if i >> digit & 1 == value)
