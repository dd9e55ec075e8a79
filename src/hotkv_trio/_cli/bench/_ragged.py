"""Suite `ragged`: half of the hot sessions are active, wherever their slots lie."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hotkv_trio._cli.bench._findings import Bar, Findings, Spread, take_turns
from hotkv_trio._cli.bench._setting import START, decode_together, open_bench, truncate_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotkv_trio._cli.bench._findings import Cell
    from hotkv_trio._cli.bench._setting import Bench, Setting
    from hotkv_trio._session import Session

_LASTING_STEPS = 24
"""Steps of a turn: long enough for whatever is done about a choice that lasts to pay."""
_STAY = 4
"""Steps between two changes of who is active, where sessions join and leave."""

LASTING, CHANGING = "a lasting choice", "joining and leaving"


async def measure_ragged(setting: Setting) -> Findings:
    """Measure active sessions in consecutive slots, in a random choice of slots, and coming and going, in turns."""
    sizes = setting.sizes
    active = sizes.hot // 2
    steps = _LASTING_STEPS if sizes.rounds > 2 else _STAY
    rounds = max(1, sizes.rounds // 2)
    setting.progress.begin("ragged: some of the hot sessions active", rounds)
    # One slot more than hot sessions: somebody must be able to step aside.
    async with open_bench(setting, n_slots=sizes.hot + 1, n_ctx=START + steps) as bench:
        turns = _Turns(bench, await bench.sessions(sizes.hot), active, steps)
        consecutive = turns.in_a_row
        samples = await take_turns(
            {consecutive: turns.consecutive, LASTING: turns.lasting, CHANGING: turns.changing},
            rounds,
            setting.progress.advance,
        )
    rows: list[dict[str, Cell]] = []
    of_consecutive: dict[str, list[float]] = {}
    for name, taken in samples.items():
        ratios = of_consecutive[name] = [a / b for a, b in zip(samples[consecutive], taken, strict=True)]
        rows.append({
            "active": name,
            "tok/s": Spread.of(active * steps / seconds for seconds in taken),
            "of consecutive": Spread.of(ratios),
            "lowest": min(ratios),
            "native calls a step": Spread.of(turns.calls[name]),
            "moves a turn": Spread.of(turns.moves[name]),
        })
    bars = [
        Bar.at_least("lasting choice: of consecutive slots", Spread.of(of_consecutive[LASTING]).median, 0.90),
        Bar.at_least("joining and leaving: lowest, of consecutive slots", min(of_consecutive[CHANGING]), 0.80),
    ]
    return Findings(
        suite="ragged",
        title=f"{active} of {sizes.hot} hot sessions active",
        caption="There is one slot more than hot sessions, so that one can step aside; moves are in a turn's time."
        f" A choice lasts {steps} steps, and each turn makes another; where sessions join and leave, one does"
        f" every {_STAY} steps.",
        rows=rows,
        bars=bars,
    )


class _Turns:
    def __init__(self, bench: Bench, sessions: Sequence[Session], active: int, steps: int) -> None:
        self._bench = bench
        self._sessions = list(sessions)
        self._active = active
        self._steps = steps
        self.in_a_row = f"{active} consecutive slots"
        self._random = random.Random(0)  # ruff: ignore[suspicious-non-cryptographic-random-usage]
        self.calls: dict[str, list[float]] = {}
        """Native calls a step, of each turn."""
        self.moves: dict[str, list[float]] = {}

    async def consecutive(self) -> float:
        by_slot = sorted(self._sessions, key=lambda session: session._require_slot())
        windows = (by_slot[i : i + self._active] for i in range(len(by_slot)))
        chosen = next(w for w in windows if w[-1]._require_slot() - w[0]._require_slot() == self._active - 1)
        return await self._take(self.in_a_row, [chosen])

    async def lasting(self) -> float:
        return await self._take(LASTING, [self._random.sample(self._sessions, self._active)])

    async def changing(self) -> float:
        active = self._random.sample(self._sessions, self._active)
        choices = [list(active)]
        while len(choices) * _STAY < self._steps:
            active.pop(0)
            active.append(self._random.choice([s for s in self._sessions if s not in active]))
            choices.append(list(active))
        return await self._take(CHANGING, choices)

    async def _take(self, name: str, choices: Sequence[Sequence[Session]]) -> float:
        before = self._bench.runtime.statistics()
        tokens = [int(t) for t in self._bench.tokens(self._active, seed=1)]
        seconds = 0.0
        for sessions in choices:
            took, _ = await decode_together(sessions, tokens, self._steps // len(choices))
            seconds += took
        now = self._bench.runtime.statistics()
        made = self._steps // len(choices) * len(choices)
        self.calls.setdefault(name, []).append((now.native_calls - before.native_calls) / made)
        self.moves.setdefault(name, []).append(now.moves - before.moves)
        await truncate_all(self._sessions, START)
        return seconds
