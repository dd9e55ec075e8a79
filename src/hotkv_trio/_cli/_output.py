"""How answers look: sizes, tables of facts, one JSON document, and a bar on stderr for what takes long."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

import rich.progress
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotkv_trio._sizes import rounded_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def size_cell(n_bytes: int) -> str:
    """Return bytes to the byte, and rounded, as two lines."""
    return f"{n_bytes:,}\n{rounded_size(n_bytes)}"


def spans(numbers: Sequence[int]) -> str:
    """Return ascending numbers with runs drawn together: ``1-3, 6, 12``."""
    parts = []
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 2 else ", ".join(map(str, members)))
    return ", ".join(parts)


def plain(text: object) -> Text:
    """Return text without markup and control characters: what a file says must not steer the terminal."""
    return Text("".join(char if char.isprintable() else "·" for char in str(text)))


def new_console(*, stderr: bool = False) -> Console:
    """Return a console that shows text as it is: ``:x:`` in a path or an error is no emoji."""
    return Console(stderr=stderr, emoji=False)


def print_facts(rows: Iterable[tuple[str, object]]) -> None:
    """Print names and what there is to say of each, a line for each: a digest or a path is never broken."""
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    console = new_console()
    for name, said in listed:
        text = said if isinstance(said, Text) else plain(said)
        console.print(Text.assemble((name.ljust(width), "dim"), "  ", text) if name else "", soft_wrap=True)


def columns_table(*names: str) -> Table:
    """Return an empty table whose columns are figures."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def yes_no(held: bool) -> Text:  # ruff: ignore[boolean-type-hint-positional-argument]
    """Return yes in green, or NO in red."""
    return Text("yes", style="green") if held else Text("NO", style="bold red")


@contextlib.contextmanager
def bar(title: str) -> Generator[Callable[[int, int], None]]:
    """Show a bar on stderr while the block runs: call what it gives with the bytes done and the bytes in all.

    Nothing is shown before the first call; where stderr is no terminal, one line says what is being done.
    """
    console = new_console(stderr=True)
    bars = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}", markup=False),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bars.add_task(title, total=None, visible=False)

    def advance(done: int, total: int) -> None:
        if not bars.tasks[task].visible and not console.is_terminal:
            console.print(title, markup=False, highlight=False, soft_wrap=True)
        bars.update(task, completed=done, total=total, visible=True)

    with bars:
        yield advance
