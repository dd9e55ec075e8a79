"""Plants known faults in a copy of the package, one at a time, and shows what finds each.

Run from anywhere, with the package's test requirements installed::

    python evidence/mutants/run.py            # all faults
    python evidence/mutants/run.py wake-up    # again those whose name contains this

Writes ``table.json`` and ``table.md`` beside itself.  The last line of the table is the package as it is: nothing may
be found in it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from faults import FAULTS, Fault

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AS_IT_IS = Fault("none: the package as it is", "__init__.py", "", "")


def plant(fault: Fault, package: Path) -> None:
    """Change the source of the copy.

    Raises:
        SystemExit: the source has moved on, and the fault no longer applies.
    """
    if fault is AS_IT_IS:
        return
    path = package / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name!r}: {fault.file} holds its text {text.count(fault.old)} times, not once")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def hunt(fault: Fault, snapshot: Path) -> dict[str, Any]:
    """Plant a fault, and return what found it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(snapshot, folder, dirs_exist_ok=True)
        plant(fault, Path(folder, "hotkv_trio"))
        environment = os.environ | {"PYTHONPATH": folder, "HOTKV_FUZZ_NO_SHRINK": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "hunt.py"],
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=1800,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"fault": fault.name, "found_by": None, "said": "the hunt itself hung"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"fault": fault.name, "found_by": "crash", "said": (done.stderr.splitlines() or ["?"])[-1]}
    return {"fault": fault.name, **json.loads(lines[-1])}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as Markdown."""
    planted = [row for row in rows if row["fault"] != AS_IT_IS.name]
    found = sum(row["found_by"] is not None for row in planted)
    lines = [
        "# Planted faults, and what finds them",
        "",
        f"{found} of {len(planted)} found by what the test suite runs by default. Written by `run.py`.",
        "",
        "*Runs*: how many of the fuzz's 1,550 programs it took, or, where they find nothing, of the cancel sweeps.",
        "",
        "| fault | found by | runs | seconds | first words |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        said = row.get("said", "").replace("|", "/").replace("<", "&lt;")
        lines.append(
            f"| {row['fault']} | {row['found_by'] or '—'} | {row.get('examples') or ''} | {row.get('seconds', '')} |"
            f" {said[:110]} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Hunt all, or those that are named."""
    wanted = sys.argv[1:]
    chosen = [fault for fault in [*FAULTS, AS_IT_IS] if not wanted or any(word in fault.name for word in wanted)]
    if not chosen:
        raise SystemExit(f"no fault has a name that contains {' or '.join(map(repr, wanted))}")
    with tempfile.TemporaryDirectory() as folder:
        # All faults are planted in the same package, also if somebody works on it meanwhile.
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "src" / "hotkv_trio", Path(folder, "hotkv_trio"), ignore=ignore)
        shutil.copytree(ROOT / "tests", Path(folder, "tests"), ignore=ignore)
        shutil.copy(HERE / "hunt.py", folder)
        rows = run_all(chosen, Path(folder))
    missed = [row["fault"] for row in rows if (row["found_by"] is None) != (row["fault"] == AS_IT_IS.name)]
    if missed:
        raise SystemExit(f"not as it should be: {missed}")


def run_all(faults: list[Fault], snapshot: Path) -> list[dict[str, Any]]:
    """Hunt one after the other; enter each into the table, in place of what it says of that fault."""
    path = HERE / "table.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    entered = {row["fault"]: row for row in before}
    rows: list[dict[str, Any]] = []
    for fault in faults:
        row = hunt(fault, snapshot)
        rows.append(row)
        print(f"{row['fault']}: {row['found_by']} after {row.get('examples')} ({row.get('seconds')} s)", flush=True)
        entered[fault.name] = row
        ordered = [entered[known.name] for known in [*FAULTS, AS_IT_IS] if known.name in entered]
        path.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
        (HERE / "table.md").write_text(table(ordered), encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
