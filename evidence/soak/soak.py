"""Many sessions come, work, are cancelled, evicted, superseded and go, for as long as asked, on one engine.

    python evidence/soak/soak.py [--minutes 30] [--seed 0] [--out README.md]

Held at the end: resident memory of the last tenth is that of the second tenth within 2 %; nothing is borrowed and every
slot is empty; and each session that lived to its own end got, bit for bit, what its calls give on a second engine where
nobody else is.  Beside the record, `memory.svg` shows the memory over time.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import trio

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "evidence"))

from record import stamp  # noqa: E402

from hotkv_trio import (  # noqa: E402
    Append,
    CacheMiss,
    HotKVError,
    Runtime,
    Session,
    SessionKey,
    StaleEpoch,
    open_runtime,
)
from hotkv_trio._owner import call  # noqa: E402
from hotkv_trio.llama import LlamaEngine  # noqa: E402
from hotkv_trio.testing import build_tiny_gguf  # noqa: E402

N_SLOTS, N_CTX, CHUNK = 6, 512, 64
CLIENTS = 10


class _Mallinfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = (("before", ctypes.c_size_t * 7), ("uordblks", ctypes.c_size_t), ("after", ctypes.c_size_t * 2))


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Mallinfo


@attrs.frozen
class Memory:
    """What this process holds, in bytes."""

    resident: int
    """In memory, as the system says."""
    in_use: int
    """Lent by the allocator of C, which keeps more than that; without what it maps apart."""

    @classmethod
    def now(cls) -> Memory:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), _mallinfo().uordblks)


@attrs.define
class Life:
    """What a session did, in order, and a digest of all that it got."""

    events: list[tuple[str, Any]] = attrs.field(factory=list)
    digest: Any = attrs.field(factory=hashlib.blake2b)

    def appended(self, tokens: list[int], output: np.ndarray[Any, Any]) -> None:
        self.events.append(("append", tokens))
        self.digest.update(output.tobytes())

    def restart(self) -> None:
        self.events.clear()
        self.digest = hashlib.blake2b()


@attrs.define
class Soak:
    runtime: Runtime
    engine: LlamaEngine
    alone: LlamaEngine
    until: float
    counts: Counter[str] = attrs.field(factory=Counter)
    epochs: Counter[str] = attrs.field(factory=Counter)

    async def client(self, number: int, seed: int) -> None:
        """Open one session after the other, of ids that other clients use too."""
        rng = random.Random(seed * 1000 + number)
        while time.monotonic() < self.until:
            name = f"route-{rng.randrange(CLIENTS)}"
            self.epochs[name] += rng.random() < 0.6
            key = SessionKey(name, self.epochs[name])
            life = Life()
            try:
                with trio.move_on_after(rng.choice([0.05, 0.5, 5, 30])) as scope:
                    async with self.runtime.open_session(key) as session:
                        self.counts["opened"] += 1
                        await self.work(session, life, rng)
                        self.counts["ended"] += 1
                        same = self.replay(life) == life.digest.digest()
                        self.counts["equal to the run alone" if same else "DIFFERENT"] += 1
                self.counts["cancelled"] += scope.cancelled_caught
            except StaleEpoch:
                self.counts["superseded"] += 1
            except HotKVError as exc:
                self.counts[exc.code] += 1
            # Somebody else's turn; the runtime's idle sessions grow older.
            await trio.sleep(rng.choice([0, 0, 0.001, 0.02]))

    async def work(self, session: Session, life: Life, rng: random.Random) -> None:
        for _ in range(rng.randint(1, 40)):
            n = rng.choice([1, 1, 1, 1, 1, 3, 40, 63, 64, 65, 150])
            if session.length + n > N_CTX or rng.random() < 0.1:
                length = rng.randint(0, session.length)
                if session.hot:
                    await self.tried(session, life, partial(session.truncate, length), ("cut", length), rng)
                continue
            tokens = [rng.randrange(512) for _ in range(n)]
            await self.tried(session, life, partial(session.prefill, tokens), ("append", tokens), rng)
            if rng.random() < 0.05:
                await trio.sleep(0.05)

    async def tried(
        self, session: Session, life: Life, operation: Any, event: tuple[str, Any], rng: random.Random
    ) -> None:
        """Do one thing, sometimes cancelled in the middle; after a miss start again."""
        before = session.length
        with trio.move_on_after(rng.choice([0.002, 0.01]) if rng.random() < 0.1 else 60) as scope:
            try:
                result = await operation()
            except CacheMiss as miss:
                self.counts[f"miss: {miss.reason}"] += 1
                life.restart()
                if event[0] == "cut":
                    return
                result = await session.prefill(event[1], at=0)
            if event[0] == "append":
                self.counts["decode" if len(event[1]) == 1 else "prefill"] += 1
                life.appended(event[1], result.output)
            else:
                self.counts["truncate"] += 1
                life.events.append(event)
            return
        if scope.cancelled_caught:
            self.counts["operation cancelled"] += 1
            if session.length != before or not session.hot:
                life.restart()

    def replay(self, life: Life) -> bytes:
        """Make the same calls where nobody else is; return the digest of what they give."""
        digest = hashlib.blake2b()
        self.alone.clear(0)
        for what, value in life.events:
            if what == "cut":
                self.alone.truncate(0, value)
                continue
            rows = None
            for at in range(0, len(value), CHUNK):
                data = np.array(value[at : at + CHUNK], np.int32)
                last = at + CHUNK >= len(value)
                (rows,) = self.alone.process([Append(0, self.alone.length(0), data, "last" if last else "none")])
            digest.update(b"" if rows is None else rows.tobytes())
        return digest.digest()


@attrs.frozen
class Outcome:
    counts: Counter[str]
    samples: list[Memory]
    """One a second."""
    borrowed: int
    tokens_left: int
    evicted: int
    native_calls: int
    quarantined: int

    @property
    def growth(self) -> float:
        """Resident memory of the last tenth over that of the second tenth, less 1."""
        tenth = max(1, len(self.samples) // 10)
        resident = [sample.resident for sample in self.samples]
        early, late = resident[tenth : 2 * tenth] or resident, resident[-tenth:]
        return statistics.median(late) / statistics.median(early) - 1

    @property
    def held(self) -> bool:
        clean = not (self.borrowed or self.tokens_left or self.quarantined or self.counts["DIFFERENT"])
        return clean and self.counts["equal to the run alone"] > 0 and abs(self.growth) <= 0.02


async def soak(path: Path, seconds: float, seed: int) -> Outcome:
    engine, alone = (LlamaEngine(path, n_slots=n, n_ctx=N_CTX, threads=1) for n in (N_SLOTS, 1))
    alone.open()
    samples: list[Memory] = []
    began = time.monotonic()
    async with open_runtime(engine, exact=True, prefill_chunk=CHUNK, idle_ttl=2) as runtime:
        it = Soak(runtime, engine, alone, began + seconds)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(it.client, number, seed)
            while time.monotonic() < it.until:
                await trio.sleep(1)
                samples.append(Memory.now())
                runtime.check_integrity()
                print(
                    f"\r{time.monotonic() - began:5.0f} s of {seconds:.0f}, {samples[-1].resident / 2**20:.1f} MiB,"
                    f" {it.counts['ended']} sessions ended, {it.counts['DIFFERENT']} different ",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
        print(file=sys.stderr)
        view = runtime.statistics()
        lengths = [await call(runtime._executor, partial(engine.length, slot)) for slot in range(N_SLOTS)]
    alone.close()
    return Outcome(
        it.counts,
        samples,
        runtime.limiter.borrowed_bytes,
        sum(lengths),
        view.evicted,
        view.native_calls,
        view.quarantined_slots,
    )


def report(outcome: Outcome, minutes: float, seed: int) -> str:
    happened = "\n".join(f"| {what} | {n:,} |" for what, n in sorted(outcome.counts.items()))
    tenths = [outcome.samples[i * len(outcome.samples) // 10] for i in range(10)] + outcome.samples[-1:]
    return f"""# Soak

Made by `python evidence/soak/soak.py --minutes {minutes:g} --seed {seed}`.

{stamp().replace("`make evidence`", "`evidence/soak/soak.py`")}

{CLIENTS} clients on {N_SLOTS} slots of {N_CTX} tokens of a tiny random model, in exact mode.

| | |
|---|---|
| resident memory, last tenth over second tenth | {outcome.growth:+.2%} (at most 2 %) |
| resident memory at each tenth, MiB | {", ".join(f"{sample.resident / 2**20:.1f}" for sample in tenths)} |
| of these, lent by the allocator | {", ".join(f"{sample.in_use / 2**20:.1f}" for sample in tenths)} |
| bytes borrowed at the end | {outcome.borrowed} |
| tokens left in all slots | {outcome.tokens_left} |
| slots in quarantine | {outcome.quarantined} |
| sessions that lived to their end, each compared with its calls alone | {outcome.counts["ended"]:,} |
| of these, different in any bit | {outcome.counts["DIFFERENT"]} |
| native calls | {outcome.native_calls:,} |
| evicted | {outcome.evicted:,} |

| what happened | how often |
|---|---|
{happened}

![resident memory over time](memory.svg)

All held: {"yes" if outcome.held else "NO"}.
"""


def draw(outcome: Outcome, path: Path) -> None:
    """Draw memory over time, with the 2 % around the second tenth."""
    from matplotlib.figure import Figure

    tenth = max(1, len(outcome.samples) // 10)
    minutes = [number / 60 for number in range(1, len(outcome.samples) + 1)]
    resident = [sample.resident / 2**20 for sample in outcome.samples]
    early = statistics.median(resident[tenth : 2 * tenth] or resident)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.axhspan(0.98 * early, 1.02 * early, color="tab:green", alpha=0.15, label="2 % around the second tenth")
    axes.plot(minutes, resident, label="resident")
    axes.plot(minutes, [sample.in_use / 2**20 for sample in outcome.samples], label="lent by the allocator")
    axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, 1.2 * max(resident)), xlim=(0, minutes[-1]))
    axes.legend(loc="center right", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    # matplotlib ends lines with blanks, which git diff --check does not want.
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("".join(line.rstrip() + "\n" for line in lines), encoding="utf-8")


def main() -> int:
    """Soak; exit 1 unless all held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("README.md"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny_gguf(Path(folder) / "soak.gguf", n_layer=2)
        outcome = trio.run(soak, path, 60 * arguments.minutes, arguments.seed)
    text = report(outcome, arguments.minutes, arguments.seed)
    print(text)
    arguments.out.write_text(text, encoding="utf-8")
    draw(outcome, arguments.out.with_name("memory.svg"))
    return 0 if outcome.held else 1


if __name__ == "__main__":
    sys.exit(main())
