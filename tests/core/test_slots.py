"""The ledger of bytes and slots: every rule in the head of `_slots.py`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from hotkv_trio import BudgetExceeded
from hotkv_trio._slots import Claim, Ledger

if TYPE_CHECKING:
    from collections.abc import Callable


def slot_claim(ledger: Ledger, borrower: str, nbytes: int = 10) -> Claim:
    return ledger.request(borrower, nbytes, with_slot=True)


def test_bytes_and_slot_are_granted_together_or_not_at_all() -> None:
    """Petals #396: half of a claim held while waiting for the other half is how an allocator deadlocks."""
    ledger = Ledger(100, n_slots=1)
    first = slot_claim(ledger, "a")
    second = slot_claim(ledger, "b")
    assert (first.granted, first.slot) == (True, 0)
    assert (second.granted, second.slot) == (False, None)
    assert ledger.borrowed_bytes == 10
    bytes_only = Ledger(15, n_slots=2)
    slot_claim(bytes_only, "a")
    short = slot_claim(bytes_only, "b")
    assert (short.granted, short.slot, bytes_only.free_slots) == (False, None, 1)


def test_nobody_overtakes_the_head_however_small() -> None:
    """Petals #53 review: strict FIFO, stated and tested."""
    ledger = Ledger(100)
    ledger.request("holder", 60)
    large = ledger.request("large", 90)
    small = ledger.request("small", 1)
    assert not large.granted
    assert not small.granted
    assert ledger.give_back("holder") == [large, small]


def test_a_claim_over_the_whole_budget_is_refused_at_once_and_leaves_nothing() -> None:
    ledger = Ledger(100)
    with pytest.raises(BudgetExceeded) as caught:
        ledger.request("a", 101)
    assert (caught.value.requested, caught.value.total) == (101, 100)
    assert ledger.request("a", 100).granted


@pytest.mark.parametrize("state", ["granted", "waiting"])
def test_a_borrower_has_one_claim_at_a_time(state: str) -> None:
    ledger = Ledger(100)
    if state == "waiting":
        ledger.request("other", 100)
    ledger.request("a", 10)
    with pytest.raises(RuntimeError, match="already holds or waits"):
        ledger.request("a", 10)


def test_the_lowest_free_slot_is_lent() -> None:
    ledger = Ledger(1000, n_slots=4)
    assert [slot_claim(ledger, name).slot for name in "abcd"] == [0, 1, 2, 3]
    ledger.give_back("c")
    ledger.give_back("a")
    assert [slot_claim(ledger, name).slot for name in "xy"] == [0, 2]


def test_withdrawing_the_head_lets_the_next_one_go() -> None:
    """Petals #434, llama-server's router: a waiter that left costs nothing."""
    ledger = Ledger(100)
    ledger.request("holder", 50)
    head = ledger.request("head", 60)
    next_one = ledger.request("next", 50)
    assert ledger.withdraw(head) == [next_one]
    assert not head.granted
    assert ledger.head is None


def test_withdrawing_a_granted_claim_gives_it_back() -> None:
    ledger = Ledger(100, n_slots=1)
    claim = slot_claim(ledger, "a", 100)
    waiter = slot_claim(ledger, "b", 100)
    assert ledger.withdraw(claim) == [waiter]
    assert waiter.slot == 0
    assert ledger.withdraw(claim) == []
    assert ledger.borrowed_bytes == 100


def test_a_claim_being_cleared_is_not_withdrawn_but_counts_as_good_as_free() -> None:
    """mesh-llm #1150: a slot is not lent before the native side is done with it."""
    ledger = Ledger(10, n_slots=1)
    claim = slot_claim(ledger, "a")
    waiter = slot_claim(ledger, "b")
    assert ledger.shortfall == (10, 1)
    ledger.begin_clearing(claim)
    assert ledger.shortfall == (0, 0)
    assert ledger.withdraw(claim) == []
    assert not waiter.granted
    assert ledger.give_back("a") == [waiter]


def test_a_quarantined_slot_is_not_lent_until_it_is_restored() -> None:
    """mesh-llm #581: a slot that cannot be emptied is neither lent nor forgotten."""
    ledger = Ledger(100, n_slots=1)
    slot_claim(ledger, "a")
    waiter = slot_claim(ledger, "b")
    assert ledger.give_back("a", quarantine=True) == []
    assert (ledger.quarantined, ledger.free_slots, ledger.lent_slots) == ({0}, 0, 0)
    assert ledger.borrowed_bytes == 0
    ledger.check_integrity()
    assert ledger.restore(0) == [waiter]
    assert waiter.slot == 0
    with pytest.raises(KeyError):
        ledger.restore(0)


def test_giving_back_what_is_not_held_is_refused() -> None:
    """LMCache #5095: releasing twice must not release another's."""
    ledger = Ledger(100, n_slots=2)
    slot_claim(ledger, "a")
    slot_claim(ledger, "b")
    ledger.give_back("a")
    with pytest.raises(RuntimeError, match="holds no KV bytes"):
        ledger.give_back("a")
    assert (ledger.borrowed_bytes, ledger.lent_slots) == (10, 1)


def test_a_lowered_budget_takes_nothing_back_lends_nothing_and_refuses_what_can_never_fit() -> None:
    ledger = Ledger(100)
    a = ledger.request("a", 40)
    ledger.request("b", 40)
    large = ledger.request("large", 60)
    small = ledger.request("small", 20)
    granted, refused = ledger.set_total(50)
    assert (granted, refused) == ([], [large])
    assert (ledger.borrowed_bytes, ledger.available_bytes) == (80, 0)
    assert (ledger.shortfall, ledger.excess) == ((50, 0), 30)
    ledger.begin_clearing(a)
    assert (ledger.shortfall, ledger.excess) == ((10, 0), 0)
    assert ledger.give_back("a") == []
    assert ledger.give_back("b") == [small]
    ledger.check_integrity()


def test_a_raised_budget_lets_those_go_who_fit_now() -> None:
    ledger = Ledger(100)
    ledger.request("a", 100)
    waiters = [ledger.request(name, 50) for name in "bcd"]
    assert ledger.set_total(200) == (waiters[:2], [])


def lose_a_slot(ledger: Ledger) -> None:
    ledger._free.pop()


def lend_a_slot_twice(ledger: Ledger) -> None:
    ledger.granted["b"].slot = ledger.granted["a"].slot


def lose_bytes(ledger: Ledger) -> None:
    ledger.borrowed_bytes -= 1


def forget_to_grant(ledger: Ledger) -> None:
    ledger.waiting["c"] = Claim("c", 1, with_slot=False)


def keep_a_granted_claim_waiting(ledger: Ledger) -> None:
    ledger.waiting["a"] = ledger.granted["a"]


def let_an_ungranted_claim_hold(ledger: Ledger) -> None:
    ledger.granted["a"].granted = False


@pytest.mark.parametrize(
    "damage, said",
    [
        (lose_a_slot, r"slots are \[0, 1\]"),
        (lend_a_slot_twice, r"slots are \[0, 0, 2\]"),
        (lose_bytes, "claims hold 20 bytes, borrowed are 19"),
        (forget_to_grant, "the head of the queue waits though it fits"),
        (keep_a_granted_claim_waiting, "a granted claim waits"),
        (let_an_ungranted_claim_hold, "an ungranted claim holds bytes"),
    ],
)
def test_check_integrity_finds(damage: Callable[[Ledger], None], said: str) -> None:
    ledger = Ledger(100, n_slots=3)
    slot_claim(ledger, "a")
    slot_claim(ledger, "b")
    ledger.check_integrity()
    damage(ledger)
    with pytest.raises(AssertionError, match=said):
        ledger.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_churn_conserves_everything_and_ends_with_exact_zeros(seed: int) -> None:
    """Petals #487, LMCache #2942: counters that drift."""
    rng = random.Random(seed)
    ledger = Ledger(200, n_slots=4)
    claims: dict[int, Claim] = {}
    order: list[Claim] = []

    def note(granted: list[Claim]) -> None:
        for claim in granted:
            assert order.pop(0) is claim, "granted out of turn"

    def ask(number: int) -> None:
        nbytes = rng.choice([10, 50, 120])
        if nbytes <= ledger.total_bytes:
            claims[number] = claim = ledger.request(number, nbytes, with_slot=rng.random() < 0.7)
            if not claim.granted:
                order.append(claim)

    def leave(claim: Claim) -> None:
        if claim in order:
            order.remove(claim)
        note(ledger.withdraw(claim))

    for number in range(300):
        action: Any = rng.choice(["ask", "ask", "give back", "withdraw", "clear", "total", "restore"])
        held = [claim for claim in ledger.granted.values() if not claim.clearing]
        if action == "ask":
            ask(number)
        elif action == "give back" and ledger.granted:
            claim = rng.choice(list(ledger.granted.values()))
            note(ledger.give_back(claim.borrower, quarantine=claim.with_slot and rng.random() < 0.2))
        elif action == "withdraw" and claims:
            leave(rng.choice(list(claims.values())))
        elif action == "clear" and held:
            ledger.begin_clearing(rng.choice(held))
        elif action == "total":
            granted, refused = ledger.set_total(rng.choice([60, 130, 200]))
            for claim in refused:
                order.remove(claim)
            note(granted)
        elif action == "restore" and ledger.quarantined:
            note(ledger.restore(rng.choice(sorted(ledger.quarantined))))
        ledger.check_integrity()
    for claim in list(ledger.waiting.values()):
        leave(claim)
    for borrower in list(ledger.granted):
        note(ledger.give_back(borrower))
    for slot in list(ledger.quarantined):
        note(ledger.restore(slot))
    ledger.check_integrity()
    assert (ledger.borrowed_bytes, ledger.free_slots, len(ledger.waiting)) == (0, 4, 0)
