"""Make a record: run every criterion's commands, and write down what they printed.

    python evidence/record.py FOLDER [--only ID ...] [--models FOLDER]

In the folder `criteria.toml` lists the criteria; `frame.md` is the text around them; `README.md` is the result.  The
commands run in the project's root.  Those that need the files of real models get the folder in ``HOTKV_MODELS`` and are
left out, and named as left out, without one.  With ``--only`` the sections of these criteria, and what is said of the
machine, are made anew in the `README.md` that is there; each section says at which commit it was made.
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAST_LINES = 60


def stamp() -> str:
    """Say on what, with what and of what the record was made."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    packages = ("hotkv-trio", "trio", "llama-cpp-python", "numpy", "gguf", "attrs", "hypothesis", "pytest")
    return "\n".join([
        f"- made {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC by `make evidence`",
        f"- commit {_commit()}",
        (
            f"- {cpu[1] if cpu else platform.processor()}, {os.cpu_count()} processors,"
            f" {int(memory[1]) // 2**20 if memory else '?'} GiB, {platform.system()} {platform.machine()}"
        ),
        f"- Python {platform.python_version()}, "
        + ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages),
    ])


def run(command: str, environment: dict[str, str]) -> tuple[int, float, str]:
    """Run one command; return its exit status, its seconds, and what it printed."""
    began = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, time.monotonic() - began, _clean(done.stdout + done.stderr)


def section(criterion: dict[str, Any], models: str | None) -> tuple[str, bool]:
    """Run a criterion's commands; return its section, and whether all is shown."""
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", COLUMNS="120")
    # Passive: on a machine that others use too, OpenMP's spinning costs ten times what it gains.
    environment |= {"GGML_NO_BACKTRACE": "1", "NO_COLOR": "1", "OMP_WAIT_POLICY": "passive"}
    environment |= {"HOTKV_MODELS": models} if models else {}
    parts = [f"### {criterion['id']}. {criterion['title']}\n", criterion.get("text", "").strip() + "\n"]
    shown = True
    for command in criterion["commands"]:
        if "$HOTKV_MODELS" in command and not models:
            parts.append(f"`{command}`: left out, no models were given.\n")
            shown = False
            continue
        print(f"{criterion['id']}: {command}", flush=True)
        status, seconds, printed = run(command, environment)
        print(f"    exit {status}, {seconds:.0f} s", flush=True)
        shown = shown and status == 0
        parts.append(f"```console\n$ {command}\n{printed}\n```\n\nExit status {status}, {seconds:.0f} s.\n")
    parts.append(f"Made {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC at commit {_commit()}.\n")
    return "\n".join(parts), shown


def merged(text: str, criterion: dict[str, Any], body: str, row: str) -> str:
    """Return a record in which one criterion's section and row are these.

    Raises:
        SystemExit: it has no such section and row.
    """
    number = re.escape(criterion["id"])
    end = r"(?=^### |^## Limits|\Z)"
    text, n_bodies = re.subn(rf"^### {number}\. .*?{end}", lambda _: f"{body}\n", text, flags=re.MULTILINE | re.DOTALL)
    text, n_rows = re.subn(rf"^\| {number} \| .*$", lambda _: row, text, flags=re.MULTILINE)
    if (n_bodies, n_rows) != (1, 1):
        raise SystemExit(f"the record has no place for criterion {criterion['id']}: make it without --only")
    return text


def main() -> int:
    """Make the record; exit 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the record, as evidence/DGR-007")
    parser.add_argument("--only", nargs="+", metavar="ID", help="ids of criteria")
    parser.add_argument("--models", default=os.environ.get("HOTKV_MODELS"), help="folder of real models")
    arguments = parser.parse_args()
    criteria = tomllib.loads((arguments.folder / "criteria.toml").read_text(encoding="utf-8"))["criterion"]
    if unknown := set(arguments.only or ()) - {c["id"] for c in criteria}:
        parser.error(f"no criterion has the id {', '.join(sorted(unknown))}")
    chosen = [c for c in criteria if not arguments.only or c["id"] in arguments.only]
    sections = [section(criterion, arguments.models) for criterion in chosen]
    rows = [
        f"| {c['id']} | {c['title']} | {'shown' if shown else 'NOT SHOWN'} |"
        for c, (_, shown) in zip(chosen, sections, strict=True)
    ]
    target = arguments.folder / "README.md"
    if arguments.only:
        text = target.read_text(encoding="utf-8")
        text = re.sub(r"^- made .*?\n(?=\n)", lambda _: f"{stamp()}\n", text, flags=re.MULTILINE | re.DOTALL)
        for criterion, (body, _), row in zip(chosen, sections, rows, strict=True):
            text = merged(text, criterion, body, row)
    else:
        table = "\n".join(["| | criterion | |", "|---|---|---|", *rows])
        text = (arguments.folder / "frame.md").read_text(encoding="utf-8")
        text = text.replace("<!-- stamp -->", stamp()).replace("<!-- table -->", table)
        text = text.replace("<!-- sections -->", "\n".join(body for body, _ in sections))
    target.write_text(text, encoding="utf-8")
    print("\n".join(rows))
    return 0 if all(shown for _, shown in sections) else 1


def _clean(printed: str) -> str:
    """Return the end of what was printed, without trailing blanks, escapes, and this machine's paths."""
    printed = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed).replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    printed = printed.replace(sys.prefix, ".venv").replace(str(Path.home()), "~")
    lines = [line.rstrip() for line in printed.rstrip().splitlines()]
    left_out = len(lines) - LAST_LINES
    return "\n".join(([f"[{left_out} lines]"] if left_out > 0 else []) + lines[-LAST_LINES:])


def _commit() -> str:
    changed = _output(["git", "status", "--porcelain", "--untracked-files=no", "--", ":!evidence"])
    return _output(["git", "rev-parse", "--short=12", "HEAD"]) + (" with uncommitted changes" if changed else "")


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
