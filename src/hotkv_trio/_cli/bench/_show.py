"""How the findings look: a table a suite, one of the bars, and plots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from hotkv_trio._cli._output import columns_table, yes_no
from hotkv_trio._cli.bench._findings import Spread, number

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console, RenderableType
    from rich.table import Table

    from hotkv_trio._cli.bench._findings import Cell, Curve, Findings


def show(found: Findings) -> RenderableType:
    """Return one suite's table, with what is to be said of it."""
    table = columns_table(*found.rows[0])
    for column in table.columns:
        column.overflow, column.no_wrap = "fold", False
    table.columns[0].justify = "left"
    for row in found.rows:
        table.add_row(*map(_cell, row.values()))
    title = Text(f"\n{found.suite}: {found.title}", style="bold")
    return Group(title, table, Text(found.caption, style="dim"))


def show_bars(findings: Sequence[Findings]) -> Table:
    """Return a table of what was asked and what was measured."""
    table = columns_table("suite", "what", "asked", "measured", "met")
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for found in findings:
        for bar in found.bars:
            table.add_row(found.suite, bar.what, bar.asked, number(bar.measured), yes_no(bar.met))
    return table


def show_all(findings: Sequence[Findings], console: Console, *, with_bars: bool) -> None:
    """Print every suite's table; and the bars, if the figures may be held against them."""
    for found in findings:
        console.print(show(found))
    if with_bars:
        console.print(Text("\nWhat is asked of SmolLM2-135M, and what was measured here", style="bold"))
        console.print(show_bars(findings))


def draw(curve: Curve, folder: Path) -> Path:
    """Write a curve as a PNG; return its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curve.lines.items():
        xs = [x for x, _ in points]
        axes.plot(xs, [spread.median for _, spread in points], marker="o", label=name)
        axes.fill_between(xs, [s.low for _, s in points], [s.high for _, s in points], alpha=0.2)
    if curve.bound is not None:
        axes.axhline(curve.bound, color="grey", linestyle="--", linewidth=1)
    if curve.logarithmic:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set(title=curve.title, xlabel=curve.x, ylabel=curve.y)
    axes.grid(alpha=0.3)
    axes.legend()
    path = folder / f"{curve.name}.png"
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return path


def _cell(cell: Cell) -> str:
    if cell is None:
        return ""
    return number(cell) if isinstance(cell, int | float) else str(cell) if isinstance(cell, Spread) else cell
