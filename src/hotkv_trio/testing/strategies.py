"""Hypothesis strategies for whole programs and for schedules.  Needs ``hypothesis``.

Example::

    from hypothesis import given
    from hotkv_trio.testing import run_program
    from hotkv_trio.testing.strategies import programs


    @given(programs())
    def test_every_program(program):
        run_program(program)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from hotkv_trio.testing.programs import (
    Aclose,
    CancelSession,
    Close,
    Decode,
    Fail,
    Open,
    Operation,
    Pause,
    Prefill,
    Program,
    Release,
    Restart,
    SetBudget,
    Sleep,
    Stall,
    Truncate,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotkv_trio._engine import Memory

_LATER = st.sampled_from([*[None] * 26, *range(13)])
"""When to cancel; simplest: not at all."""

_MUCH_LATER = st.sampled_from([*[None] * 14, 0, 3, 8, 14, 20, 30])
NAMES = "abcdefgh"
"""Names of sessions, one letter each: few enough for clients to meet, many enough for them to get something done."""
_HOW = st.sampled_from(["scope", "serve", "start"])
_EPOCHS = st.sampled_from([0, 0, 0, 0, 1, 2])


@st.composite
def tapes(draw: st.DrawFn, *, max_size: int = 256) -> tuple[int, ...]:
    """Draw the choices of a `ScheduleTape`: simplest is none, which runs tasks in order."""
    # Bytes are one choice for Hypothesis, however many: quick to draw, and zeros at the end shrink away.
    size = draw(st.sampled_from([size for size in (0, 16, 64, 64, 256) if size <= max_size]))
    drawn = draw(st.binary(min_size=size, max_size=size)).rstrip(b"\0")
    return tuple(drawn)


WEIGHTS: Mapping[type[Any], int] = {
    Open: 3,
    Prefill: 6,
    Decode: 8,
    Restart: 4,
    Truncate: 3,
    Release: 1,
    Aclose: 1,
    CancelSession: 1,
    Close: 1,
    Sleep: 3,
    Pause: 1,
    Stall: 2,
    SetBudget: 3,
    Fail: 1,
}
"""How often each operation is drawn, relative to the others."""


def operations(
    n_clients: int, *, names: str = NAMES, weights: Mapping[type[Any], int] | None = None
) -> st.SearchStrategy[Operation]:
    """Draw one operation of a client among ``n_clients``; see `programs`."""
    of = st.sampled_from([*[None] * 2 * n_clients, *range(n_clients)])
    at = st.sampled_from([None, None, None, 0, 0, 1, -1])
    kinds: dict[type[Any], st.SearchStrategy[Any]] = {
        Open: st.builds(
            Open,
            name=st.sampled_from(names),
            epoch=_EPOCHS,
            how=_HOW,
            pinned=st.sampled_from([False, False, False, True]),
            wait=st.sampled_from([True, True, True, False]),
            cancel_after=_LATER,
            hang_up=_MUCH_LATER,
        ),
        Prefill: st.builds(
            Prefill,
            n=st.integers(1, 6),
            at=at,
            output=st.sampled_from(["last", "all", "none"]),
            of=of,
            cancel_after=_LATER,
        ),
        Decode: st.builds(Decode, at=at, of=of, cancel_after=_LATER),
        Restart: st.builds(Restart, n=st.integers(1, 6), cancel_after=_LATER),
        Truncate: st.builds(Truncate, drop=st.integers(-1, 6), of=of, cancel_after=_LATER),
        Release: st.builds(Release, of=of, cancel_after=_LATER),
        Aclose: st.builds(Aclose, of=of, cancel_after=_LATER),
        CancelSession: st.builds(CancelSession, of=of),
        Close: st.just(Close()),
        Sleep: st.builds(Sleep, seconds=st.sampled_from([1.0, 3.0, 10.0])),
        Pause: st.builds(Pause, checkpoints=st.integers(1, 8)),
        Stall: st.builds(Stall, seconds=st.sampled_from([1.0, 5.0])),
        SetBudget: st.builds(SetBudget, slots=st.sampled_from([2, 1, 0, 3, 1, 0])),
        Fail: st.builds(
            Fail,
            method=st.sampled_from(["process", "process", "truncate", "clear", "move"]),
            times=st.integers(1, 2),
            after=st.integers(0, 3),
        ),
    }
    chosen = {**WEIGHTS, **(weights or {})}
    # Not one_of, which takes equal strategies for one.
    return st.sampled_from([kind for name, kind in kinds.items() for _ in range(chosen[name])]).flatmap(
        lambda kind: kind
    )


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    memories: Sequence[Memory] = ("attention", "attention", "sliding", "recurrent"),
    slots: Sequence[int] = (1, 2, 3, 5),
    max_clients: int = 4,
    max_operations: int = 10,
    exact: bool | None = None,
    names: str = NAMES,
    weights: Mapping[type[Any], int] | None = None,
) -> Program:
    """Draw a whole program.

    Args:
        draw: Hypothesis's.
        memories: kinds of memory to choose from.
        slots: numbers of slots to choose from.
        max_clients: clients at most.
        max_operations: operations of one client at most.
        exact: the runtime's mode; None: either.
        names: one letter for each session name: with few of them, clients are at each other's sessions.
        weights: how often operations are drawn, where it is not as in `WEIGHTS`; 0: never.
    """
    n_clients = draw(st.integers(1, max_clients))
    opening, rest = _client(n_clients, max_operations, names, tuple((weights or {}).items()))
    clients = tuple((draw(opening), *draw(rest)) for _ in range(n_clients))
    return Program(
        clients=clients,
        tape=draw(tapes()),
        slots=draw(st.sampled_from(slots)),
        memory=draw(st.sampled_from(memories)),
        chunk=draw(st.integers(1, 4)),
        ttl=draw(st.sampled_from([None, 2.0])),
        exact=draw(st.booleans()) if exact is None else exact,
    )


def moving_programs() -> st.SearchStrategy[Program]:
    """Draw programs in which sessions are moved to other slots, which is rare among all programs."""
    never = dict.fromkeys((SetBudget, Truncate, Restart, Sleep, Pause, Aclose), 0)
    return programs(
        slots=[5], names="abcd", memories=["attention"], exact=False, weights={**never, Decode: 30, Open: 1, Fail: 4}
    )


@functools.cache
def _client(
    n_clients: int, most: int, names: str, weights: tuple[tuple[type[Any], int], ...]
) -> tuple[st.SearchStrategy[Open], st.SearchStrategy[list[Operation]]]:
    """Return how a client begins, and what it may do then; made once, since that takes long."""
    opening = st.builds(Open, name=st.sampled_from(names), epoch=_EPOCHS, how=_HOW, hang_up=_MUCH_LATER)
    operation = operations(n_clients, names=names, weights=dict(weights))
    # Left to itself, Hypothesis prefers short lists.
    rest = st.integers(0, most).flatmap(functools.cache(lambda n: st.lists(operation, min_size=n, max_size=n)))
    return opening, rest
