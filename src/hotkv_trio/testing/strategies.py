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
    from collections.abc import Sequence

    from hotkv_trio._engine import Memory

_LATER = st.sampled_from([*[None] * 26, *range(13)])
"""When to cancel; simplest: not at all."""

_MUCH_LATER = st.sampled_from([*[None] * 14, 0, 3, 8, 14, 20, 30])
_NAMES = st.sampled_from("abcdefgh")
"""Few enough for clients to meet, and many enough for them to get something done."""
_EPOCHS = st.sampled_from([0, 0, 0, 0, 1, 2])


@st.composite
def tapes(draw: st.DrawFn, *, max_size: int = 256) -> tuple[int, ...]:
    """Draw the choices of a `ScheduleTape`: simplest is none, which runs tasks in order."""
    # Bytes are one choice for Hypothesis, however many: quick to draw, and zeros at the end shrink away.
    size = draw(st.sampled_from([size for size in (0, 16, 64, 64, 256) if size <= max_size]))
    drawn = draw(st.binary(min_size=size, max_size=size)).rstrip(b"\0")
    return tuple(drawn)


def operations(n_clients: int, *, failures: bool = True, budgets: bool = True) -> st.SearchStrategy[Operation]:
    """Draw one operation of a client among ``n_clients``."""
    of = st.sampled_from([*[None] * 2 * n_clients, *range(n_clients)])
    small = st.integers(1, 6)
    kinds: list[tuple[int, st.SearchStrategy[Any]]] = [
        (
            3,
            st.builds(
                Open,
                name=_NAMES,
                epoch=_EPOCHS,
                how=st.sampled_from(["scope", "serve", "start"]),
                pinned=st.sampled_from([False, False, False, True]),
                wait=st.sampled_from([True, True, True, False]),
                cancel_after=_LATER,
                hang_up=_MUCH_LATER,
            ),
        ),
        (
            6,
            st.builds(
                Prefill,
                n=small,
                at=st.sampled_from([None, None, None, 0, 0, 1, -1]),
                output=st.sampled_from(["last", "all", "none"]),
                of=of,
                cancel_after=_LATER,
            ),
        ),
        (8, st.builds(Decode, at=st.sampled_from([None, None, None, 0, 0, 1, -1]), of=of, cancel_after=_LATER)),
        (4, st.builds(Restart, n=small, cancel_after=_LATER)),
        (3, st.builds(Truncate, drop=st.integers(-1, 6), of=of, cancel_after=_LATER)),
        (1, st.builds(Release, of=of, cancel_after=_LATER)),
        (1, st.builds(Aclose, of=of, cancel_after=_LATER)),
        (1, st.builds(CancelSession, of=of)),
        (1, st.just(Close())),
        (3, st.builds(Sleep, seconds=st.sampled_from([1.0, 3.0, 10.0]))),
        (1, st.builds(Pause, checkpoints=st.integers(1, 8))),
        (2, st.builds(Stall, seconds=st.sampled_from([1.0, 5.0]))),
    ]
    if budgets:
        kinds.append((3, st.builds(SetBudget, slots=st.sampled_from([2, 1, 0, 3, 1, 0]))))
    if failures:
        method = st.sampled_from(["process", "truncate", "clear"])
        kinds.append((1, st.builds(Fail, method=method, times=st.integers(1, 2))))
    # Not one_of, which takes equal strategies for one.
    return st.sampled_from([kind for weight, kind in kinds for _ in range(weight)]).flatmap(lambda kind: kind)


@st.composite
def programs(
    draw: st.DrawFn,
    *,
    memories: Sequence[Memory] = ("attention", "attention", "sliding", "recurrent"),
    slots: Sequence[int] = (1, 2, 3),
    max_clients: int = 4,
    max_operations: int = 10,
    failures: bool = True,
    budgets: bool = True,
    exact: bool | None = None,
) -> Program:
    """Draw a whole program.

    Args:
        draw: Hypothesis's.
        memories: kinds of memory to choose from.
        slots: numbers of slots to choose from.
        max_clients: clients at most.
        max_operations: operations of one client at most.
        failures: whether the engine may fail.
        budgets: whether the budget may change.
        exact: the runtime's mode; None: either.
    """
    n_clients = draw(st.integers(1, max_clients))
    client = _client(n_clients, max_operations, failures=failures, budgets=budgets)
    clients = tuple((draw(_OPENINGS), *draw(client)) for _ in range(n_clients))
    return Program(
        clients=clients,
        tape=draw(tapes()),
        slots=draw(st.sampled_from(slots)),
        memory=draw(st.sampled_from(memories)),
        chunk=draw(st.integers(1, 4)),
        ttl=draw(st.sampled_from([None, 2.0])),
        exact=draw(st.booleans()) if exact is None else exact,
    )


@functools.cache
def _client(n_clients: int, most: int, *, failures: bool, budgets: bool) -> st.SearchStrategy[list[Operation]]:
    """Return what a client may do after it has opened its first session; made once, since that takes long."""
    operation = operations(n_clients, failures=failures, budgets=budgets)
    # Left to itself, Hypothesis prefers short lists.
    return st.integers(0, most).flatmap(functools.cache(lambda n: st.lists(operation, min_size=n, max_size=n)))


_OPENINGS = st.builds(
    Open, name=_NAMES, epoch=_EPOCHS, how=st.sampled_from(["scope", "serve", "start"]), hang_up=_MUCH_LATER
)
