"""Directory: which session of which epoch is live, which are idle and since when, and why the others are gone.

Every transition of keys, epochs, LRU order, expiry and tombstones happens in this file.  Nothing here waits, wakes
or calls an engine.

- At most one epoch of an id is live: the newest one seen.  The newest epoch seen of an id only grows.
- A session that ends leaves a tombstone: its id, its epoch, and why.  Tombstones are bounded; the oldest go first.
  An id whose tombstone is gone is unknown again, and so is the fence that it held.
- Idle sessions stand in the order in which they became idle.  As the TTL is one for all, the one that has been idle
  longest is both the least recently used and the next to expire.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING, Generic, TypeVar

import attrs

from hotkv_trio._errors import CacheMiss, MissReason, SessionExists, StaleEpoch

if TYPE_CHECKING:
    from hotkv_trio._keys import SessionKey

SessionT = TypeVar("SessionT")


@attrs.define(eq=False)
class Entry(Generic[SessionT]):
    """What the directory knows of one live session."""

    key: SessionKey
    session: SessionT
    pinned: bool
    """Never evicted, never expired."""
    live: bool = True
    idle_since: float | None = None
    """Clock time in seconds; None while it works or holds nothing."""


@attrs.frozen
class Tombstone:
    """What is remembered of an id with no live session."""

    epoch: int
    """The newest epoch seen."""
    reason: MissReason
    """Why that epoch's session is gone."""


@attrs.define(eq=False)
class Directory(Generic[SessionT]):
    """The live sessions by id, the idle ones in LRU order, and the tombstones."""

    idle_ttl: float = math.inf
    """Seconds after which an idle session expires."""
    max_tombstones: int = 100_000
    _live: dict[str, Entry[SessionT]] = attrs.field(factory=dict, init=False)
    _idle: OrderedDict[Entry[SessionT], None] = attrs.field(factory=OrderedDict, init=False)
    _tombstones: OrderedDict[str, Tombstone] = attrs.field(factory=OrderedDict, init=False)

    @property
    def entries(self) -> list[Entry[SessionT]]:
        """The live sessions, oldest first."""
        return list(self._live.values())

    @property
    def tombstones(self) -> int:
        """How many ids are remembered without a live session."""
        return len(self._tombstones)

    @property
    def evictable(self) -> int:
        """How many sessions are idle and not pinned."""
        return len(self._idle)

    def newest_epoch(self, route_session_id: str) -> int | None:
        """Return the newest epoch seen of an id, or None if the id is unknown."""
        if entry := self._live.get(route_session_id):
            return entry.key.route_epoch
        tombstone = self._tombstones.get(route_session_id)
        return None if tombstone is None else tombstone.epoch

    def look_up(self, key: SessionKey) -> Entry[SessionT]:
        """Return the live session of exactly this key.

        Raises:
            StaleEpoch: a newer epoch was seen.
            CacheMiss: there is none; the reason says why.
        """
        self._refuse_stale(key)
        entry = self._live.get(key.route_session_id)
        if entry is not None and entry.key == key:
            return entry
        tombstone = self._tombstones.get(key.route_session_id)
        same = tombstone is not None and tombstone.epoch == key.route_epoch
        raise CacheMiss(key, tombstone.reason if tombstone is not None and same else MissReason.UNKNOWN)

    def refuse(self, key: SessionKey) -> None:
        """Return only if a session of this key may be opened.

        Raises:
            StaleEpoch: a newer epoch was seen.
            SessionExists: exactly this key is live.
        """
        self._refuse_stale(key)
        if (entry := self._live.get(key.route_session_id)) is not None and entry.key == key:
            raise SessionExists(key)

    def admit(self, key: SessionKey, session: SessionT, *, pinned: bool) -> tuple[Entry[SessionT], SessionT | None]:
        """Make the session the live one of its id; its epoch is the newest from now on.

        Returns:
            Its entry, and the session of a lower epoch that was live until now, which is fenced off.

        Raises:
            StaleEpoch: a newer epoch was seen.
            SessionExists: exactly this key is live.
        """
        self.refuse(key)
        older = self._live.pop(key.route_session_id, None)
        if older is not None:
            self._drop(older)
        self._tombstones.pop(key.route_session_id, None)
        entry = self._live[key.route_session_id] = Entry(key, session, pinned)
        return entry, None if older is None else older.session

    def end(self, entry: Entry[SessionT], reason: MissReason) -> None:
        """Bury a session; nothing happens if it was superseded or ended before."""
        if not entry.live:
            return
        del self._live[entry.key.route_session_id]
        self._drop(entry)
        self._tombstones[entry.key.route_session_id] = Tombstone(entry.key.route_epoch, reason)
        while len(self._tombstones) > self.max_tombstones:
            self._tombstones.popitem(last=False)

    def rest(self, entry: Entry[SessionT], now: float) -> None:
        """Note that a live session that holds a slot has no work from ``now`` (seconds) on."""
        if entry.live and not entry.pinned:
            entry.idle_since = now
            self._idle[entry] = None
            self._idle.move_to_end(entry)

    def stir(self, entry: Entry[SessionT]) -> None:
        """Note that a session works, or holds nothing: it can be neither evicted nor expire."""
        entry.idle_since = None
        self._idle.pop(entry, None)

    def victim(self) -> Entry[SessionT] | None:
        """Return the session to evict next: the least recently used idle one; None if none is idle."""
        return next(iter(self._idle), None)

    def next_expiry(self) -> float:
        """Return when the next session expires (clock time in seconds); infinity if none will."""
        first = self.victim()
        return math.inf if first is None or first.idle_since is None else first.idle_since + self.idle_ttl

    def expired(self, now: float) -> Entry[SessionT] | None:
        """Return a session whose time is up, or None."""
        return self.victim() if self.next_expiry() <= now else None

    def check_integrity(self) -> None:
        """Raise AssertionError unless the three tables agree.

        Raises:
            AssertionError: an id is live and buried, an idle session is not live, the order is wrong, or too many.
        """
        broken = [
            what
            for what, wrong in {
                "an id is both live and buried": self._live.keys() & self._tombstones.keys(),
                "an entry stands under another id": [
                    e for i, e in self._live.items() if e.key.route_session_id != i or not e.live
                ],
                "an idle session is not live": [e for e in self._idle if not e.live or e.idle_since is None],
                "a pinned session can be evicted": [e for e in self._idle if e.pinned],
                "too many tombstones": len(self._tombstones) > self.max_tombstones,
                "idle sessions are out of order": sorted(self._idle_times()) != self._idle_times(),
            }.items()
            if wrong
        ]
        if broken:
            raise AssertionError("; ".join(broken))

    def _idle_times(self) -> list[float]:
        return [entry.idle_since for entry in self._idle if entry.idle_since is not None]

    def _drop(self, entry: Entry[SessionT]) -> None:
        entry.live = False
        self.stir(entry)

    def _refuse_stale(self, key: SessionKey) -> None:
        newest = self.newest_epoch(key.route_session_id)
        if newest is not None and key.route_epoch < newest:
            raise StaleEpoch(key, newest)
