"""What trio's tasks wait for, in words: for the reports of the tools here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator


_SKIPPED = ("trio.", "contextlib", "hotkv_trio.testing.")


def where(task: trio.lowlevel.Task) -> str:
    """Return the call chain in which a task waits, innermost last, without the frames of trio and of these tools."""
    frames = [
        f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{line})"
        for frame, line in task.iter_await_frames()
        if not frame.f_globals.get("__name__", "").startswith(_SKIPPED)
    ]
    return " > ".join(frames) or "its end"


def all_tasks() -> Iterator[trio.lowlevel.Task]:
    """Yield every task of the running trio loop, parents first."""
    root = trio.lowlevel.current_root_task()
    todo = [] if root is None else [root]
    while todo:
        task = todo.pop()
        yield task
        for nursery in task.child_nurseries:
            todo.extend(sorted(nursery.child_tasks, key=lambda child: child.name))
