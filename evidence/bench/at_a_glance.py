"""Draw ``at-a-glance.svg``: sessions in their slots, bytes in their budget, and whole sessions beside peers.

The first two are one run, made here on a tiny model: sixteen sessions on four slots, with a budget of three for a
while, and some cancelled at work.  Every logit is compared with the same calls made alone.  The third is what
``results.json`` holds of the suite `peers`.

python evidence/bench/at_a_glance.py
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import trio

from hotkv_trio import Runtime, SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import build_tiny_gguf

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "hotkv-trio"
from matplotlib import pyplot as plt  # noqa: E402

FOLDER = Path(__file__).resolve().parent
N_SESSIONS, N_SLOTS, N_LOW = 16, 4, 3
STEPS = 24
CANCELLED = {2: 6, 5: 10, 9: 4, 12: 8}
"""Session -> the step in which its scope is cancelled."""


class Run:
    """What happened, with the time of each event."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.began = time.perf_counter()
        self.stays: list[tuple[int, int, float, float, bool]] = []
        """Session, slot, from, to, cancelled."""
        self.bytes: list[tuple[float, int, int]] = []
        """When, bytes borrowed, budget."""
        self.rows: dict[int, list[Any]] = {}

    def now(self) -> float:
        """Return milliseconds since the start."""
        return (time.perf_counter() - self.began) * 1e3

    def note_bytes(self) -> None:
        """Note what is borrowed."""
        self.bytes.append((self.now(), self.runtime.limiter.borrowed_bytes, self.runtime.limiter.total_bytes))

    async def session(self, number: int) -> None:
        """Open a session, prefill it, decode, and leave it, or be cancelled."""
        with trio.CancelScope() as scope:
            slot, since = -1, 0.0
            try:
                async with self.runtime.open_session(SessionKey(f"session-{number}", 0)) as session:
                    slot, since = session._require_slot(), self.now()
                    self.note_bytes()
                    rows = self.rows[number] = [(await session.prefill(prompt(number))).output]
                    for step in range(STEPS):
                        if CANCELLED.get(number) == step:
                            scope.cancel(reason="as planned")
                        rows.append((await session.decode(int(rows[-1].argmax()))).output)
            finally:
                self.stays.append((number, slot, since, self.now(), scope.cancel_called))
                self.note_bytes()


def prompt(number: int) -> list[int]:
    """Return a session's own prompt."""
    return [int(token) for token in np.random.default_rng(number).integers(3, 500, 40)]


async def together(path: Path) -> Run:
    """Run all sessions at once."""
    async with open_runtime(LlamaEngine(path, n_slots=N_SLOTS, n_ctx=256, threads=1), exact=True) as runtime:
        run = Run(runtime)
        async with trio.open_nursery() as nursery:
            for number in range(N_SESSIONS):
                nursery.start_soon(run.session, number)
            while len(run.stays) < N_SESSIONS:
                runtime.limiter.total_bytes = (N_LOW if 5 <= len(run.stays) < 10 else N_SLOTS) * runtime.info.slot_bytes
                run.note_bytes()
                await trio.sleep(0.0005)
        run.note_bytes()
        return run


async def alone(path: Path, run: Run) -> int:
    """Make each session's calls again, alone; return how many logits were compared, all equal."""
    compared = 0
    async with open_runtime(LlamaEngine(path, n_slots=1, n_ctx=256, threads=1), exact=True) as runtime:
        for number, rows in run.rows.items():
            async with runtime.open_session(SessionKey(f"alone-{number}", 0)) as session:
                mine = (await session.prefill(prompt(number))).output
                for theirs in rows:
                    assert np.array_equal(mine, theirs), f"session {number} differs"
                    compared += mine.size
                    mine = (await session.decode(int(theirs.argmax()))).output
    return compared


def draw(run: Run, compared: int, peers: list[dict[str, Any]]) -> None:
    """Write the picture."""
    figure = plt.figure(figsize=(11, 4.4), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.5, 1), height_ratios=(1.7, 1))
    slots, budget, speed = (figure.add_subplot(cell) for cell in (grid[0, 0], grid[1, 0], grid[:, 1]))
    colours = plt.get_cmap("tab20")
    for number, slot, since, until, cancelled in run.stays:
        slots.broken_barh([(since, until - since)], (slot - 0.4, 0.8), facecolors=colours(number % 20))
        slots.text((since + until) / 2, slot, str(number), ha="center", va="center", fontsize=8)
        if cancelled:
            slots.plot([until], [slot], marker="x", color="black", markersize=8, markeredgewidth=2)
    slots.set_yticks(range(N_SLOTS), [f"slot {slot}" for slot in range(N_SLOTS)])
    slots.invert_yaxis()
    slots.set_title(
        f"{N_SESSIONS} sessions, {len(CANCELLED)} cancelled at work (x)\n"
        f"{compared:,} logits: every one as in the same calls made alone",
        fontsize=10,
    )
    slots.tick_params(labelbottom=False)
    when, borrowed, total = (np.array(column) for column in zip(*run.bytes, strict=True))
    budget.fill_between(when, borrowed / 2**20, step="post", color="tab:green", alpha=0.5, label="borrowed")
    budget.step(when, total / 2**20, where="post", color="tab:red", label="budget")
    budget.set_xlabel("milliseconds")
    budget.set_ylabel("KV MiB")
    budget.set_ylim(0, max(total) / 2**20 * 1.4)
    budget.legend(loc="upper right", ncols=2, fontsize=8)
    slots.sharex(budget)
    for who in dict.fromkeys(row["who"] for row in peers):
        mine = [(row["N"], row["tok/s in all"]) for row in peers if row["who"] == who]
        if "decoding" in who or len(mine) < 2:
            continue
        n, spread = zip(*mine, strict=True)
        middle = [s["median"] for s in spread]
        off = [[s["median"] - s["low"] for s in spread], [s["high"] - s["median"] for s in spread]]
        speed.errorbar(n, middle, yerr=off, marker="o", capsize=3, label=who)
    speed.set_ylim(bottom=0)
    speed.set_xlabel("sessions at once")
    speed.set_ylabel("tokens/s in all")
    speed.set_title("SmolLM2-135M, 256 prompt + 64 generated", fontsize=10)
    speed.legend(fontsize=8, loc="lower right")
    target = FOLDER / "at-a-glance.svg"
    figure.savefig(target, metadata={"Date": None})
    # matplotlib ends lines with blanks, which git diff --check does not want.
    lines = target.read_text(encoding="utf-8").splitlines()
    target.write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Make the run, compare, and draw."""
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_gguf(Path(folder, "tiny.gguf"))
        run = trio.run(together, path)
        compared = trio.run(alone, path, run)
    suites = json.loads((FOLDER / "results.json").read_text(encoding="utf-8"))["suites"]
    peers = [row for found in suites if found["suite"] == "peers" for row in found["rows"]]
    draw(run, compared, peers)


if __name__ == "__main__":
    main()
