"""Ask the real library every hostile row, make many random hostile calls, list the tests of reports; write it down.

    python evidence/hostile/record.py [--calls N]

It runs the two commands that the tests in `tests/hostile` run, with more calls, and writes `README.md` beside itself.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "evidence")]

from record import stamp  # noqa: E402
from tests.hostile._ask import ask  # noqa: E402
from tests.hostile._rows import NEVER, ROWS  # noqa: E402
from tests.hostile.test_calls import attack  # noqa: E402
from tests.reports._reports import NOT_ON, REPORTS, citations  # noqa: E402

INJECTED = ("tests/hostile/test_injected.py", "tests/hostile/test_poison.py")

FRAME = """# Nothing that a client says kills, corrupts or outlives

Made by `python evidence/hostile/record.py`; nothing here is typed by hand but the words around the figures.

{stamp}

## What llama.cpp cannot take, asked of it

Each value was handed to a real engine on a tiny random model, all of them in **one** child process, which answered
every row and then ended by itself (exit status {status}).  *Unmoved* says that after the row the next 70 rows of a
neighbour in slot 0 were, bit for bit, what they were before the first row.

| llama.cpp | kind | value | typed error | unmoved |
|---|---|---|---|---|
{table}

The gate was then taken away, in processes of their own, for the rows marked † (a few that end the process on this
machine): {died} of {controls} died.

Closed because nothing says it; a test holds the source against these names:

{never}

## Random calls, most of them hostile

Two neighbours work meanwhile (prefill, decode, truncate, in exact mode; at the engine, one neighbour).  Their outputs
are compared with the same work done alone.

| where | calls | outcomes | anything else | neighbours' operations | unmoved | bytes left | tokens left |
|---|---|---|---|---|---|---|---|
{reports}

## llama.cpp fails, or is given poison

At every native call of a program of four sessions, each of its codes, with and without the tokens appended; at every
removal, one that refuses and one that lies; and both together.  NaN and both infinities in every element of a state of
40 rows; the same with the gate taken away; and huge finite values.  Every output of every session, neighbour and next
tenant is held against its run alone, and every invariant is looked at after every step of trio's scheduler.

`pytest -m "slow or not slow" {injected}`: {passed}

## Public reports of faults of this kind, and the tests of each

From the docstrings of the tests, in `tests/`; a test holds that none is missing.

| what ours shows | reported as | on FakeEngine | on a real tiny model |
|---|---|---|---|
{cited}
"""


def cited() -> str:
    """Return the table of public reports: a row for each kind, with the tests that cite it."""
    found = citations()
    rows = []
    for kind, reports in REPORTS.items():
        cells = []
        for engine in ("fake", "llama"):
            tests = [c.test for c in found if engine in c.engines and any(map(c.cites, reports))]
            where, why = NOT_ON.get(kind, ("", ""))
            cells.append(f"none: {why}" if where == engine else ", ".join(f"`{test}`" for test in tests))
        rows.append(f"| {kind} | {', '.join(reports)} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    """Write the record; exit 1 unless all of it is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked = ask(Path(folder), ROWS)
        controls = [row for row in ROWS if row.ungated]
        died = sum(ask(Path(folder), [row], ungated=True).status < 0 for row in controls)
        reports = [attack(Path(folder), where=where, calls=arguments.calls) for where in ("sessions", "engine")]
    answers = {answer.row: answer for answer in asked.answers}
    held = asked.status == 0 and died == len(controls)
    injected = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", *INJECTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    held = held and injected.returncode == 0
    table = []
    for row in ROWS:
        answer = answers.get(row.name)
        held = held and answer is not None and answer.error == row.error and answer.unmoved
        said = "NO ANSWER" if answer is None else answer.error or "none: made right, and served"
        unmoved = "yes" if answer is not None and answer.unmoved else "NO"
        table.append(f"| {row.does} | {row.kind}{' †' if row.ungated else ''} | {row.value} | {said} | {unmoved} |")
    lines = []
    for report in reports:
        outcomes = ", ".join(f"{name} {n:,}" for name, n in sorted(report["outcomes"].items(), key=lambda o: -o[1]))
        held = held and report["neighbours_unmoved"] and not report["unexpected"]
        held = held and not report["borrowed_bytes"] and not report["tokens_left"]
        lines.append(
            f"| {report['where']} | {report['calls']:,} | {outcomes} | {len(report['unexpected'])} |"
            f" {report['neighbour_operations']:,} | {'yes' if report['neighbours_unmoved'] else 'NO'} |"
            f" {report['borrowed_bytes']} | {report['tokens_left']} |"
        )
    text = FRAME.format(
        stamp=stamp().replace("`make evidence`", "`evidence/hostile/record.py`"),
        status=asked.status,
        table="\n".join(table),
        died=died,
        controls=len(controls),
        never="\n".join(f"- {kind}: {', '.join(f'`{name}`' for name in names)}" for kind, names in NEVER.items()),
        reports="\n".join(lines),
        injected=" ".join(INJECTED),
        passed=re.sub(r" in [0-9.]+s.*", "", (injected.stdout.splitlines() or ["nothing"])[-1]),
        cited=cited(),
    )
    Path(__file__).with_name("README.md").write_text(text, encoding="utf-8")
    print("\n".join(lines))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
