"""How far a long command is: a bar for each of its parts on a terminal, a line for each elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import rich.progress

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console


class Progress:
    """Shows one part after the other.

    Args:
        console: where.
        count: how far a part is, as rich formats a ``task``.
    """

    def __init__(self, console: Console, count: str = "{task.completed:.0f}/{task.total:.0f}") -> None:
        self._console = console
        self._bars = rich.progress.Progress(
            rich.progress.SpinnerColumn(finished_text="[green]✓[/]"),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=20),
            rich.progress.TextColumn(count, style="dim"),
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

    def begin(self, title: str, about: int, /) -> None:
        """Note that a part begins, of about so many steps, and that the one before is done."""
        if not self._console.is_terminal:
            self._console.print(title, highlight=False)
        if self._current is not None:
            # However many steps were foreseen, what is done is done.
            self._bars.update(self._current, total=self._bars.tasks[self._current].completed)
        self._current = self._bars.add_task(title, total=about)

    def advance(self, steps: int = 1, /) -> None:
        """Note that steps were taken."""
        if self._current is not None:
            self._bars.advance(self._current, steps)
