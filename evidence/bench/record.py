"""Make the record of a full run: results.json, the plots, and README.md from frame.md.

python evidence/bench/record.py --model FILE [--llama-server FILE] [--llama-batched-bench FILE] [--threads N]
python evidence/bench/record.py            # README.md again, from results.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hotkv_trio._cli.bench._findings import Spread, number

FOLDER = Path(__file__).resolve().parent


def measure(arguments: argparse.Namespace) -> None:
    """Run every suite, and write what they found."""
    command = [sys.executable, "-m", "hotkv_trio", "bench", "--json", "--plots", str(FOLDER)]
    for name in ("model", "llama_server", "llama_batched_bench", "threads"):
        if (value := getattr(arguments, name)) is not None:
            command += ["--" + name.replace("_", "-"), str(value)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    document = json.loads(done.stdout)
    git = ["git", "describe", "--always", "--abbrev=12", "--exclude=*"]
    described = subprocess.run(git, check=True, cwd=FOLDER, capture_output=True, text=True)
    document["on"]["commit"] = described.stdout.strip()
    text = json.dumps(document, ensure_ascii=False, indent=1)
    (FOLDER / "results.json").write_text(text + "\n", encoding="utf-8")


def stamp(on: dict[str, Any]) -> str:
    """Say on what, and with what, the record was made."""
    packages = ", ".join(
        f"{name} {on['packages'][name]}" for name in ("hotkv-trio", "llama-cpp-python", "trio", "numpy")
    )
    return "\n".join([
        f"- {on['date']}, commit {on['commit']}, model {on['model']}",
        f"- {on['processor']}, {on['processors']} processors, {on['memory_gib']:.0f} GiB, {on['system']}",
        f"- threads of a native call: {on['threads']}",
        f"- llama.cpp {on['llama_cpp_commit']} ({', '.join(on['features'])})",
        f"- Python {on['python']}, {packages}",
        f"- load average of the last minute: {on['load_before']:.1f} before, {on['load_after']:.1f} after",
    ])


def bars(suites: list[dict[str, Any]]) -> str:
    """Return the table of what was asked."""
    lines = ["| suite | what | asked | measured | |", "|---|---|---|---|---|"]
    for found in suites:
        for bar in found["bars"]:
            met = "met" if bar["met"] else "**short**"
            lines.append(f"| {found['suite']} | {bar['what']} | {bar['asked']} | {number(bar['measured'])} | {met} |")
    return "\n".join(lines)


def tables(suites: list[dict[str, Any]]) -> str:
    """Return a section a suite."""
    parts = []
    for found in suites:
        columns = list(found["rows"][0])
        lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in found["rows"]]
        plots = [f"![{curve['title']}]({curve['name']}.png)" for curve in found["curves"]]
        seconds = f"{found['seconds']:.0f} s."
        parts.append(
            "\n\n".join([
                f"### {found['suite']}: {found['title']}",
                f"{found['caption']} {seconds}",
                "\n".join(lines),
                *plots,
            ])
        )
    return "\n\n".join(parts)


def _cell(cell: Any) -> str:
    if isinstance(cell, dict):
        return str(Spread(**cell))
    if isinstance(cell, int | float):
        return number(cell)
    return cell or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--llama-server", "--llama-batched-bench"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if arguments.model is not None:
        measure(arguments)
    document = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))
    text = (FOLDER / "frame.md").read_text(encoding="utf-8")
    for mark, said in (
        ("<!-- stamp -->", stamp(document["on"])),
        ("<!-- bars -->", bars(document["suites"])),
        ("<!-- tables -->", tables(document["suites"])),
    ):
        text = text.replace(mark, said)
    (FOLDER / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
