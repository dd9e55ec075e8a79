"""All sessions together in exact mode, with everything that may befall one while the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import trio

from hotkv_trio._cli.demo._play import Incident, Take, compare, play
from hotkv_trio._errors import CacheMiss, HotKVError, MissReason, StaleEpoch
from hotkv_trio._keys import SessionKey

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from hotkv_trio._cli._recorder import Held
    from hotkv_trio._cli.demo._play import Part
    from hotkv_trio._cli.demo._stage import Stage
    from hotkv_trio._session import Session


@attrs.frozen(eq=False)
class Verdict:
    """How one session fared."""

    equal: bool
    """Every logit of its takes is that of its run alone, and none is missing."""
    n_compared: int
    """Logits."""
    decoded: int
    """Tokens in its last take."""
    continuation: list[int]


@attrs.define(eq=False)
class Together:
    """One run of all parts at once."""

    stage: Stage
    solos: Sequence[Take]
    """Each part played alone, under the same settings."""
    takes: dict[str, list[Take]] = attrs.field(factory=dict, init=False)
    """By the part's name: a session that has to start again begins another take."""
    evicted_told: bool = attrs.field(default=False, init=False)
    superseded_refused: bool = attrs.field(default=False, init=False)
    visitor_equal: bool = attrs.field(default=False, init=False)
    cancelled_stopped: bool = attrs.field(default=False, init=False)
    _evicted: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def run(self) -> None:
        """Play all parts at once; it ends when the last has."""
        async with trio.open_nursery() as nursery:
            for solo in self.solos:
                nursery.start_soon(self._live, solo.part)

    def verdict(self, solo: Take) -> Verdict:
        """Compare all takes of a part with its run alone."""
        takes = self.takes[solo.part.name]
        last = takes[-1]
        complete = Incident.CANCELLED in solo.part.incidents or len(last.rows) == solo.part.n_calls
        return Verdict(
            equal=complete and all(compare(take.rows, solo.rows).equal for take in takes),
            n_compared=sum(row.size for take in takes for row in take.rows),
            decoded=len(last.decoded),
            continuation=last.continuation,
        )

    async def _live(self, part: Part) -> None:
        # Only the session that is to be evicted may be.
        pinned = Incident.EVICTED not in part.incidents
        async with self.stage.runtime.open_session(SessionKey(part.name, 0), pinned=pinned) as session:
            take = self._begin(part)
            await play(session, take, until=1 + part.n_decodes // 3)
            if Incident.EVICTED in part.incidents:
                take = await self._evict(session, take)
            await play(session, take, until=1 + 2 * part.n_decodes // 3)
            if Incident.SUPERSEDED in part.incidents:
                await self._supersede(session, take)
            else:
                await self._end(session, take)

    def _begin(self, part: Part) -> Take:
        take = Take(part)
        self.takes.setdefault(part.name, []).append(take)
        return take

    async def _evict(self, session: Session, take: Take) -> Take:
        """Open one session more than there is room for, and play the part again from its beginning."""
        solo, length = self.solos[0], session.length
        visit = Take(solo.part)
        async with self.stage.runtime.open_session(SessionKey("visitor", 0), pinned=True) as visitor:
            await play(visitor, visit, until=1)
            error = await _refusal(session.decode(take.next_token(), at=length))
        self.visitor_equal = compare(visit.rows, solo.rows).equal
        self.evicted_told = isinstance(error, CacheMiss) and error.reason is MissReason.EVICTED
        self._evicted.set()
        again = self._begin(take.part)
        await play(session, again, until=len(take.rows))
        return again

    async def _supersede(self, session: Session, take: Take) -> None:
        """Open the next epoch while this one is open, try to go on with this one, and play the part in the other."""
        await self._evicted.wait()
        async with self.stage.runtime.open_session(SessionKey(take.part.name, 1), pinned=True) as newer:
            errors = [await _refusal(session.decode(take.next_token())), await _refusal(self._reopen(session.key))]
            self.superseded_refused = all(isinstance(error, StaleEpoch) for error in errors)
            await self._end(newer, self._begin(take.part))

    async def _reopen(self, key: SessionKey) -> None:
        async with self.stage.runtime.open_session(key, pinned=True):
            pass

    async def _end(self, session: Session, take: Take) -> None:
        """Play the part to its end; or, if it is to be cancelled, until that happens."""
        if Incident.CANCELLED in take.part.incidents:
            await self._be_cancelled(session, take)
        await play(session, take)
        # The eviction needs a full house: nobody leaves before it.
        await self._evicted.wait()

    async def _be_cancelled(self, session: Session, take: Take) -> None:
        await self._evicted.wait()
        await play(session, take, until=1 + 5 * take.part.n_decodes // 6)
        session.nursery.start_soon(_cancel_during, session, self.stage.recorder.hold(_slot(session)))
        try:
            await play(session, take)
            await trio.sleep_forever()
        except trio.Cancelled:
            self.cancelled_stopped = len(take.rows) < take.part.n_calls
            raise


async def _cancel_during(session: Session, native_call: Held) -> None:
    try:
        await native_call.begun.wait()
        session.cancel("its client went away")
    finally:
        native_call.may_go_on.set()


def _slot(session: Session) -> int:
    if session._tenancy is None:
        raise RuntimeError(f"{session!r} is cold")
    return session._tenancy.slot


async def _refusal(call: Awaitable[object]) -> HotKVError | None:
    """Return the error that a call is refused with, or None."""
    await trio.lowlevel.checkpoint()
    try:
        await call
    except HotKVError as error:
        return error
    return None
