"""What a suite finds: figures with their spread, rows of a table, bars to be met, curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import numpy as np
import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence


@attrs.frozen
class Spread:
    """A median, and the quartiles around it."""

    median: float
    low: float
    high: float
    n: int
    """Samples."""

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """Return the spread of at least one sample."""
        values = list(samples)
        low, median, high = (float(x) for x in np.percentile(values, (25, 50, 75)))
        return cls(median, low, high, len(values))

    @classmethod
    def of_ratios(cls, above: Sequence[float], below: Sequence[float]) -> Spread:
        """Return the spread of ratios, each of two samples that were taken in the same round."""
        return cls.of(a / b for a, b in zip(above, below, strict=True))

    def __str__(self) -> str:
        """Return ``0.985 [0.972-0.991]``."""
        return f"{number(self.median)} [{number(self.low)}-{number(self.high)}]"


Cell: TypeAlias = str | int | float | Spread | None


@attrs.frozen
class Bar:
    """Something asked for, and what was measured."""

    what: str
    asked: str
    measured: float
    met: bool

    @classmethod
    def at_least(cls, what: str, measured: float, bound: float) -> Bar:
        """Return a bar for what should be large."""
        return cls(what, f">= {bound:g}", measured, measured >= bound)

    @classmethod
    def at_most(cls, what: str, measured: float, bound: float) -> Bar:
        """Return a bar for what should be small."""
        return cls(what, f"<= {bound:g}", measured, measured <= bound)


@attrs.frozen
class Curve:
    """Lines over one axis."""

    name: str
    """Of the file."""
    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, Spread]]]
    bound: float | None = None
    """A bar, drawn across."""
    logarithmic: bool = True
    """Whether x doubles from point to point."""


@attrs.frozen(kw_only=True)
class Findings:
    """What one suite found."""

    suite: str
    title: str
    caption: str
    """How the figures are to be read."""
    rows: Sequence[Mapping[str, Cell]]
    """One table: every row has the same columns."""
    bars: Sequence[Bar] = ()
    curves: Sequence[Curve] = ()
    seconds: float = 0.0
    """That the suite took."""

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as what JSON holds."""
        return attrs.asdict(self)


def number(value: float) -> str:
    """Return a number with three digits that count, or four before the point; and three decimals at most."""
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 3 if not value or not math.isfinite(value) else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 3)}f}"


async def take_turns(
    arms: Mapping[str, Callable[[], Awaitable[float]]], rounds: int, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Measure each arm once in each round, in one order and then in the other; return each arm's samples."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    await trio.lowlevel.checkpoint()
    for i in range(rounds):
        for name in list(arms)[:: 1 if i % 2 else -1]:
            samples[name].append(await arms[name]())
        advance()
    return samples
