"""Suite `core`: the runtime's own time, on an engine that does nothing."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from hotkv_trio._cli.bench._findings import Bar, Curve, Findings, Spread, take_turns
from hotkv_trio._cli.bench._idle_engine import IdleEngine
from hotkv_trio._cli.bench._setting import decode_together
from hotkv_trio._errors import MissReason
from hotkv_trio._keys import SessionKey
from hotkv_trio._owner import InlineExecutor, OwnerThread
from hotkv_trio._runtime import Runtime, open_runtime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Setting
    from hotkv_trio._session import Session

_HELD = 16
"""Sessions that hold a slot beside tombstones, or waiters, or neither."""
_OPENINGS = 64
"""Sessions opened and released in a turn."""
_LOOK_UPS = 1024
_TURNS_OF_WAITERS = 200
_NO_GROWTH = 1.2
"""What noise may make of a ratio that should be 1."""


async def measure_core(setting: Setting) -> Findings:
    """Measure steps by the number of sessions; then every operation beside tombstones and waiters, and without."""
    sizes = setting.sizes
    setting.progress.begin("core: an engine that does nothing", 3 * sizes.rounds + sizes.few_rounds)
    steps, curve = await _steps(setting)
    others, bars = await _others(setting)
    by_n = {row["N"]: row["owner thread"] for row in steps}
    bars = [
        Bar.at_most("N = 64: us a session-step", by_n[64].median, 25),
        Bar.at_most("N = 256: of that at 64", by_n[256].median / by_n[64].median, 1.2),
        *bars,
    ]
    rows: list[dict[str, Cell]] = [
        *(
            {"us each": f"session-step, N = {row['N']}", "owner thread": row["owner thread"], "inline": row["inline"]}
            for row in steps
        ),
        *others,
    ]
    return Findings(
        suite="core",
        title="The core, on an engine that does nothing",
        caption="Microseconds each. owner thread: as in use; inline: native calls in the trio thread. A session-step is"
        " one token of one session, with its caller's own loop.",
        rows=rows,
        bars=bars,
        curves=[curve],
    )


async def _steps(setting: Setting) -> tuple[list[dict[str, Any]], Curve]:
    sizes = setting.sizes
    arms: dict[str, Callable[[], Awaitable[float]]] = {}
    await trio.lowlevel.checkpoint()
    async with AsyncExitStack() as stack:
        for n in sizes.core_sessions:
            for name, make in (("owner thread", OwnerThread), ("inline", InlineExecutor)):
                runtime = await stack.enter_async_context(open_runtime(IdleEngine(n), idle_ttl=None, executor=make()))
                sessions = [await runtime.start_session(SessionKey(f"s{i}", 0), pinned=True) for i in range(n)]
                arms[f"{n}, {name}"] = partial(_decode, sessions, max(8, sizes.core_steps // n))
        samples = await take_turns(arms, sizes.rounds, setting.progress.advance)
    rows: list[dict[str, Any]] = [
        {"N": n, **{name: Spread.of(samples[f"{n}, {name}"]) for name in ("owner thread", "inline")}}
        for n in sizes.core_sessions
    ]
    lines = {name: [(row["N"], row[name]) for row in rows] for name in ("owner thread", "inline")}
    return rows, Curve("core", "A session-step of the core", "sessions", "us", lines, 25)


async def _decode(sessions: list[Session], n_steps: int) -> float:
    seconds, _ = await decode_together(sessions, [0] * len(sessions), n_steps)
    return seconds / (n_steps * len(sessions)) * 1e6


async def _others(setting: Setting) -> tuple[list[dict[str, Cell]], list[Bar]]:
    sizes = setting.sizes
    plain, buried, crowded = "plain", "tombstones", "waiters"
    many = {buried: f"beside {sizes.tombstones:,} tombstones", crowded: f"beside {sizes.waiters:,} waiters"}
    rows: list[dict[str, Cell]] = []
    bars: list[Bar] = []
    async with AsyncExitStack() as stack:
        sides = {}
        for name in (plain, buried, crowded):
            # One slot is left for opening and releasing, where nobody waits for it.
            n_slots = _HELD if name == crowded else _HELD + 1
            runtime = await stack.enter_async_context(open_runtime(IdleEngine(n_slots), idle_ttl=None))
            held = [await runtime.start_session(SessionKey(f"s{i}", 0), pinned=True) for i in range(_HELD)]
            sides[name] = _Side(runtime, held)
        _bury(sides[buried].runtime, sizes.tombstones)
        nursery = await stack.enter_async_context(trio.open_nursery())
        await _crowd(sides[crowded].runtime, sizes.waiters, nursery)
        for operation, sides_of_it in (
            ("step", (plain, buried, crowded)),
            ("truncate", (plain, buried, crowded)),
            ("get", (plain, buried, crowded)),
            # Nobody overtakes a waiter: beside these a session is opened in its turn only; see below.
            ("open_release", (plain, buried)),
        ):
            samples = await take_turns(
                {name: getattr(sides[name], operation) for name in sides_of_it},
                max(1, sizes.rounds // 2),
                setting.progress.advance,
            )
            said = operation.replace("_", " and ")
            for name in sides_of_it:
                what = f"{said} {many.get(name, '')}".strip()
                rows.append({"us each": what, "owner thread": Spread.of(samples[name]), "inline": None})
                if name != plain:
                    ratio = Spread.of_ratios(samples[name], samples[plain]).median
                    bars.append(Bar.at_most(f"{what}: of that without", ratio, _NO_GROWTH))
            if operation == "open_release":
                bars.insert(0, Bar.at_most("open and release: us", Spread.of(samples[plain]).median, 250))
        nursery.cancel_scope.cancel(reason="the suite is over")
    few, many_waiting = max(10, sizes.waiters // 100), sizes.waiters
    handed = await take_turns(
        {str(n): partial(_hand_over, n) for n in (few, many_waiting)},
        sizes.few_rounds,
        setting.progress.advance,
    )
    for n in (few, many_waiting):
        what = f"a waiter's turn: open and release, {n:,} behind it"
        rows.append({"us each": what, "owner thread": Spread.of(handed[str(n)]), "inline": None})
    ratio = Spread.of_ratios(handed[str(many_waiting)], handed[str(few)]).median
    bars.append(Bar.at_most(f"a waiter's turn, {many_waiting:,} behind it: of that with {few:,}", ratio, _NO_GROWTH))
    return rows, bars


@attrs.define(eq=False)
class _Side:
    """A runtime with something beside its sessions, or nothing.  Each method returns microseconds each."""

    runtime: Runtime
    sessions: list[Session]
    _opened: int = 0

    async def step(self) -> float:
        return await _decode(self.sessions, 64)

    async def truncate(self) -> float:
        (session, *_) = self.sessions
        await session.prefill([0] * _LOOK_UPS, output="none")
        length = session.length
        began = time.perf_counter()
        for i in range(_OPENINGS):
            await session.truncate(length - i - 1)
        return (time.perf_counter() - began) / _OPENINGS * 1e6

    async def get(self) -> float:
        await trio.lowlevel.checkpoint()
        key = self.sessions[0].key
        began = time.perf_counter()
        for _ in range(_LOOK_UPS):
            self.runtime.get(key)
        return (time.perf_counter() - began) / _LOOK_UPS * 1e6

    async def open_release(self) -> float:
        keys = [SessionKey(f"o{self._opened + i}", 0) for i in range(_OPENINGS)]
        self._opened += _OPENINGS
        await trio.lowlevel.checkpoint()
        began = time.perf_counter()
        for key in keys:
            async with self.runtime.open_session(key):
                pass
        return (time.perf_counter() - began) / _OPENINGS * 1e6


def _bury(runtime: Runtime, n: int) -> None:
    """Leave tombstones, as many sessions that have ended do."""
    directory: Any = runtime._directory
    for i in range(n):
        entry, _ = directory.admit(SessionKey(f"t{i}", 0), None, pinned=False)
        directory.end(entry, MissReason.RELEASED)


async def _crowd(runtime: Runtime, n: int, nursery: trio.Nursery, had_turn: Callable[[], object] | None = None) -> None:
    """Let ``n`` tasks wait for a slot; each opens and releases a session when its turn comes, and says so."""

    async def wait(i: int) -> None:
        async with runtime.open_session(SessionKey(f"w{i}", 0)):
            pass
        if had_turn is not None:
            had_turn()

    await trio.lowlevel.checkpoint()
    for i in range(n):
        nursery.start_soon(wait, i)
    while runtime.statistics().waiting < n:  # noqa: ASYNC110 - waiters tell nobody that they wait
        await trio.lowlevel.checkpoint()


async def _hand_over(n: int) -> float:
    """Return microseconds for each of the first waiters to have its turn, with at least ``n`` behind it."""
    turns = 0
    ended = 0.0

    def had_turn() -> None:
        nonlocal turns, ended
        turns += 1
        if turns == _TURNS_OF_WAITERS:
            ended = time.perf_counter()
            nursery.cancel_scope.cancel(reason="enough have had their turn")

    async with open_runtime(IdleEngine(1), idle_ttl=None) as runtime, trio.open_nursery() as nursery:
        async with runtime.open_session(SessionKey("first", 0)):
            await _crowd(runtime, n + _TURNS_OF_WAITERS, nursery, had_turn)
        began = time.perf_counter()
    return (ended - began) / _TURNS_OF_WAITERS * 1e6
