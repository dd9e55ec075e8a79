"""The directory of keys: epochs, LRU order, expiry, tombstones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from hotkv_trio import CacheMiss, MissReason, SessionExists, StaleEpoch
from hotkv_trio._directory import Directory, Entry
from tests.core._rig import key

if TYPE_CHECKING:
    from collections.abc import Callable


def admit(directory: Directory[str], name: str, epoch: int = 0, *, pinned: bool = False) -> Entry[str]:
    return directory.admit(key(name, epoch), f"session of {name}@{epoch}", pinned=pinned)[0]


def miss_reason(directory: Directory[str], name: str, epoch: int = 0) -> MissReason:
    with pytest.raises(CacheMiss) as caught:
        directory.look_up(key(name, epoch))
    return caught.value.reason


def test_a_higher_epoch_replaces_the_lower_and_fences_it_off() -> None:
    directory: Directory[str] = Directory()
    admit(directory, "a", 3)
    entry, older = directory.admit(key("a", 5), "new", pinned=False)
    assert older == "session of a@3"
    assert directory.look_up(key("a", 5)) is entry
    for stale in (0, 3, 4):
        with pytest.raises(StaleEpoch) as caught:
            directory.look_up(key("a", stale))
        assert caught.value.current == 5
        with pytest.raises(StaleEpoch):
            directory.admit(key("a", stale), "old", pinned=False)
    directory.check_integrity()


def test_the_newest_epoch_only_grows_also_over_the_end_of_its_session() -> None:
    directory: Directory[str] = Directory()
    old = admit(directory, "a", 3)
    new = admit(directory, "a", 7)
    directory.end(old, MissReason.RELEASED)
    assert directory.newest_epoch("a") == 7
    directory.end(new, MissReason.RELEASED)
    assert directory.newest_epoch("a") == 7
    with pytest.raises(StaleEpoch):
        directory.refuse(key("a", 6))
    directory.refuse(key("a", 7))
    admit(directory, "a", 7)
    assert directory.newest_epoch("a") == 7


def test_the_same_key_twice_is_refused_and_changes_nothing() -> None:
    directory: Directory[str] = Directory()
    entry = admit(directory, "a")
    with pytest.raises(SessionExists):
        directory.admit(key("a"), "second", pinned=False)
    with pytest.raises(SessionExists):
        directory.refuse(key("a"))
    assert directory.look_up(key("a")) is entry
    assert directory.entries == [entry]


@pytest.mark.parametrize("reason", [MissReason.RELEASED, MissReason.EXPIRED, MissReason.EVICTED, MissReason.FAILED])
def test_a_tombstone_remembers_why(reason: MissReason) -> None:
    directory: Directory[str] = Directory()
    directory.end(admit(directory, "a", 2), reason)
    assert miss_reason(directory, "a", 2) is reason
    assert miss_reason(directory, "a", 3) is MissReason.UNKNOWN
    assert miss_reason(directory, "b") is MissReason.UNKNOWN
    assert directory.tombstones == 1


def test_tombstones_are_bounded_and_the_oldest_go_first() -> None:
    directory: Directory[str] = Directory(max_tombstones=3)
    for name in "abcd":
        directory.end(admit(directory, name, 1), MissReason.RELEASED)
    assert directory.tombstones == 3
    assert directory.newest_epoch("a") is None
    directory.end(admit(directory, "b", 2), MissReason.EVICTED)
    directory.end(admit(directory, "e"), MissReason.RELEASED)
    assert directory.newest_epoch("c") is None
    assert miss_reason(directory, "b", 2) is MissReason.EVICTED
    directory.check_integrity()


def test_ending_twice_or_after_being_superseded_changes_nothing() -> None:
    """LMCache #5095: the end of a superseded session must not end its successor."""
    directory: Directory[str] = Directory()
    old = admit(directory, "a", 1)
    new = admit(directory, "a", 2)
    directory.end(old, MissReason.RELEASED)
    assert directory.look_up(key("a", 2)) is new
    directory.end(new, MissReason.EVICTED)
    directory.end(new, MissReason.RELEASED)
    assert miss_reason(directory, "a", 2) is MissReason.EVICTED


def test_the_victim_is_the_least_recently_used_idle_one() -> None:
    """llama-server's router: LRU order, oldest idle first; busy and pinned ones never."""
    directory: Directory[str] = Directory(idle_ttl=100)
    a, b, c = (admit(directory, name) for name in "abc")
    pinned = admit(directory, "p", pinned=True)
    for now, entry in enumerate([a, b, c, pinned]):
        directory.rest(entry, now)
    assert directory.evictable == 3
    assert directory.victim() is a
    directory.stir(a)
    assert directory.victim() is b
    directory.rest(a, 10)
    directory.stir(b)
    assert directory.victim() is c
    directory.end(c, MissReason.EVICTED)
    assert directory.victim() is a
    assert (a.idle_since, b.idle_since, pinned.idle_since) == (10, None, None)
    directory.check_integrity()


def test_expiry_follows_the_time_of_rest() -> None:
    directory: Directory[str] = Directory(idle_ttl=100)
    assert directory.next_expiry() == math.inf
    a, b = admit(directory, "a"), admit(directory, "b")
    directory.rest(a, 5)
    directory.rest(b, 6)
    assert directory.next_expiry() == 105
    assert directory.expired(104.9) is None
    assert directory.expired(105) is a
    directory.stir(a)
    assert directory.next_expiry() == 106
    directory.rest(a, 7)
    directory.end(b, MissReason.EXPIRED)
    assert directory.next_expiry() == 107


def test_without_a_ttl_nothing_expires() -> None:
    directory: Directory[str] = Directory()
    directory.rest(admit(directory, "a"), 0)
    assert directory.expired(1e300) is None


def test_a_session_that_ended_cannot_rest() -> None:
    directory: Directory[str] = Directory(idle_ttl=1)
    entry = admit(directory, "a")
    directory.end(entry, MissReason.RELEASED)
    directory.rest(entry, 0)
    assert directory.victim() is None
    directory.check_integrity()


def bury_a_live_one(directory: Directory[str]) -> None:
    directory.end(directory.look_up(key("a")), MissReason.RELEASED)
    directory._live["a"] = Entry(key("a"), "again", pinned=False)


def misfile(directory: Directory[str]) -> None:
    directory._live["b"] = directory._live.pop("a")


def keep_a_dead_one_idle(directory: Directory[str]) -> None:
    directory.look_up(key("a")).live = False


def let_a_pinned_one_be_evicted(directory: Directory[str]) -> None:
    directory.look_up(key("a")).pinned = True


def disorder(directory: Directory[str]) -> None:
    directory.look_up(key("a")).idle_since = 99


def overfill(directory: Directory[str]) -> None:
    directory.max_tombstones = 0


@pytest.mark.parametrize(
    "damage, said",
    [
        (bury_a_live_one, "an id is both live and buried"),
        (misfile, "an entry stands under another id"),
        (keep_a_dead_one_idle, "an idle session is not live"),
        (let_a_pinned_one_be_evicted, "a pinned session can be evicted"),
        (disorder, "idle sessions are out of order"),
        (overfill, "too many tombstones"),
    ],
)
def test_check_integrity_finds(damage: Callable[[Directory[str]], None], said: str) -> None:
    directory: Directory[str] = Directory()
    directory.rest(admit(directory, "a"), 1)
    directory.rest(admit(directory, "c"), 2)
    directory.end(admit(directory, "gone"), MissReason.RELEASED)
    directory.check_integrity()
    damage(directory)
    with pytest.raises(AssertionError, match=said):
        directory.check_integrity()
