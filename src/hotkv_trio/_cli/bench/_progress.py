"""How far the bench is: a bar for each suite on a terminal, a line for each elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import rich.progress

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console


class Progress:
    """Shows a suite's turns as they are taken."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = rich.progress.Progress(
            rich.progress.SpinnerColumn(finished_text="[green]✓[/]"),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=30),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._current: rich.progress.TaskID | None = None

    def __enter__(self) -> Self:
        """Begin to show."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the bars away."""
        self._bars.stop()

    def begin(self, title: str, n_turns: int) -> None:
        """Note that a suite begins, which takes about so many turns."""
        if not self._console.is_terminal:
            self._console.print(title, highlight=False)
        self._current = self._bars.add_task(title, total=n_turns)

    def advance(self) -> None:
        """Note that a turn was taken."""
        if self._current is not None:
            self._bars.advance(self._current)
