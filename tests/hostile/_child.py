"""The process that has to stay alive: it asks each row that it is told to, and answers with a line of JSON.

    python -m tests.hostile._child FOLDER [--ungated]

It reads names of rows, one a line, from stdin.  ``--ungated`` takes the gate away: the control, which has to die.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from hotkv_trio.llama._gate import Gate
from tests.hostile._rows import ROWS, World


def take_the_gate_away() -> None:
    for check in ("check_group", "check_slot", "check_length", "check_thread"):
        setattr(Gate, check, lambda *_: None)


def main() -> None:
    rows = {row.name: row for row in ROWS}
    world = World(Path(sys.argv[1]))
    if "--ungated" in sys.argv:
        take_the_gate_away()
        world.engine._held += [0] * 4
    for line in sys.stdin:
        row = rows[line.rstrip("\n")]
        error, says = "", ""
        try:
            row.ask(world)
        except Exception as exc:  # noqa: BLE001 - what it is, is the answer
            error, says = type(exc).__name__, str(exc)
        unmoved = bool(np.array_equal(world.neighbours_row(), world.next_row))
        sys.stdout.write(json.dumps({"row": row.name, "error": error, "says": says, "unmoved": unmoved}) + "\n")
        sys.stdout.flush()
    world.close()


if __name__ == "__main__":
    main()
