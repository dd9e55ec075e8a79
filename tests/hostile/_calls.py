"""Many random calls, most of them hostile, beside neighbours at work; in a process of its own, which must not die.

    python -m tests.hostile._calls FOLDER --calls N [--seed S] [--where sessions|engine]

It prints one JSON document: what came of the calls, whether each neighbour's bits equal its run alone, and what is
still borrowed at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
import trio

from hotkv_trio import Append, EngineFailed, HotKVError, InvalidInput, SessionKey, open_runtime
from hotkv_trio._owner import call
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import build_tiny_gguf
from tests.hostile import _values as values

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hotkv_trio import Runtime, Session

N_SLOTS: Final = 4
EPOCH: Final = 5
"""Of the neighbours."""
NEIGHBOURS: Final = ("north", "south")


@attrs.define
class Report:
    """What came of it."""

    where: str
    calls: int = 0
    outcomes: Counter[str] = attrs.field(factory=Counter)
    unexpected: list[str] = attrs.field(factory=list)
    """Outcomes that are no success and no typed error."""
    neighbour_operations: int = 0
    neighbours_unmoved: bool = False
    borrowed_bytes: int = -1
    tokens_left: int = -1
    quarantined: int = 0

    def count(self, outcome: str, *, expected: bool = True, what: str = "") -> None:
        self.calls += 1
        self.outcomes[outcome] += 1
        if not expected:
            self.unexpected.append(f"{outcome}: {what}")


def make_engine(path: Path) -> LlamaEngine:
    return LlamaEngine(path, n_slots=N_SLOTS, n_ctx=256, threads=1)


class Neighbour:
    """Works without end, and remembers what it did and a digest of all that it got."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = 0
        self.digest = hashlib.blake2b()

    async def work(self, session: Session, until: Callable[[], bool]) -> None:
        rng = random.Random(self.name)
        while not until():
            data = values.right_data(rng) if rng.random() < 0.4 else [rng.randrange(512)]
            if session.length + len(data) > 250:
                await session.truncate(rng.randint(0, 100))
            else:
                result = await session.prefill(data)
                self.digest.update(result.output.tobytes())
            self.done += 1


class Hostile:
    """A client that does all that it can think of, to sessions of its own and to keys of others."""

    def __init__(self, runtime: Runtime, rng: random.Random, report: Report) -> None:
        self.runtime = runtime
        self.rng = rng
        self.report = report
        self.sessions: list[Session] = []

    def key(self) -> Any:
        rng = self.rng
        wrong: Any
        if rng.random() < 0.1:
            return SessionKey(rng.choice(NEIGHBOURS), rng.randint(0, EPOCH - 1))
        if rng.random() < 0.1:
            return rng.choice(["a@1", None, ("a", 1), object(), b"a"])
        if rng.random() < 0.1:
            wrong = rng.choice(["", "x" * 129, "a\n", None, b"x", "\ud800", 3])
            return SessionKey(wrong, 1)
        if rng.random() < 0.1:
            wrong = rng.choice([-1, 2**64, 1.5, None, "1", True])
            return SessionKey("h", wrong)
        name = f"h{rng.randrange(5)}"
        newest = self.runtime._directory.newest_epoch(name) or 0
        return SessionKey(name, max(0, newest + rng.choice([-1, 0, 0, 0, 1, 1])))

    async def open(self) -> None:
        rng = self.rng
        recipe: Any = rng.choice([None, None, None, self.runtime.recipe, "recipe", {}])
        if rng.random() < 0.1:
            recipe = attrs.evolve(self.runtime.recipe, type_k="q8_0")
        key = SessionKey(rng.choice(NEIGHBOURS), EPOCH) if rng.random() < 0.05 else self.key()
        session = await self.runtime.start_session(key, recipe=recipe, wait=rng.random() < 0.5)
        self.sessions.append(session)

    async def use(self) -> None:
        rng = self.rng
        if not self.sessions:
            await self.open()
            return
        session = rng.choice(self.sessions if rng.random() < 0.1 else self.sessions[-2:])
        data = values.right_data(rng) if rng.random() < 0.4 else values.wrong_data(rng)
        at = values.count(rng, session.length) if rng.random() < 0.5 else rng.choice([None, 0])
        what = rng.randrange(10)
        if what < 5:
            await session.prefill(data, at=at, output=values.output(rng) if rng.random() < 0.5 else "all")
        elif what < 7:
            await session.decode(rng.choice([rng.randrange(512), data]), at=at)
        elif what < 9:
            await session.truncate(values.count(rng, session.length))
        elif rng.random() < 0.5:
            await session.aclose()
        else:
            await self.runtime.release(self.key())

    async def get(self) -> None:
        await trio.lowlevel.checkpoint()
        self.runtime.get(self.key())

    async def attack(self) -> None:
        rng = self.rng
        action: Callable[[], Awaitable[None]] = rng.choice([self.open, self.get, *[self.use] * 8])
        try:
            with trio.move_on_after(rng.choice([0, 0.0005, 0.002, 0.05, 0.05, 0.05])) as scope:
                await action()
        except (HotKVError, trio.WouldBlock) as exc:
            self.report.count(type(exc).__name__)
        except Exception as exc:  # noqa: BLE001 - the very thing that is looked for
            self.report.count(type(exc).__name__, expected=False, what=f"{action.__name__}: {exc}"[:300])
        else:
            self.report.count("Cancelled" if scope.cancelled_caught else "success")
        self.runtime.check_integrity()


async def attack_sessions(path: Path, n_calls: int, seed: int) -> Report:
    report = Report("sessions")
    engine = make_engine(path)
    neighbours = [Neighbour(name) for name in NEIGHBOURS]
    async with open_runtime(engine, exact=True, prefill_chunk=64) as runtime:

        async def work(neighbour: Neighbour, *, task_status: trio.TaskStatus[None]) -> None:
            async with runtime.open_session(SessionKey(neighbour.name, EPOCH), pinned=True) as session:
                task_status.started()
                await neighbour.work(session, lambda: report.calls >= n_calls)

        async with trio.open_nursery() as nursery:
            for neighbour in neighbours:
                await nursery.start(work, neighbour)
            hostile = Hostile(runtime, random.Random(seed), report)
            while report.calls < n_calls:
                await hostile.attack()
                while 4 * sum(neighbour.done for neighbour in neighbours) < report.calls:  # noqa: ASYNC110 - at work
                    await trio.lowlevel.checkpoint()
            for session in hostile.sessions:
                await session.aclose()
        for entry in list(runtime._directory.entries):
            await runtime.release(entry.key)
        report.borrowed_bytes = runtime.limiter.borrowed_bytes
        report.quarantined = runtime.statistics().quarantined_slots
        lengths = [await call(runtime._executor, partial(engine.length, slot)) for slot in range(N_SLOTS)]
        report.tokens_left = sum(lengths)
    report.neighbour_operations = sum(neighbour.done for neighbour in neighbours)
    report.neighbours_unmoved = all([await is_as_alone(path, neighbour) for neighbour in neighbours])
    return report


async def is_as_alone(path: Path, neighbour: Neighbour) -> bool:
    """Run the same work with nobody else there; return whether every bit is the same."""
    alone = Neighbour(neighbour.name)
    async with (
        open_runtime(make_engine(path), exact=True, prefill_chunk=64) as runtime,
        runtime.open_session(SessionKey(neighbour.name, EPOCH)) as session,
    ):
        await alone.work(session, lambda: alone.done >= neighbour.done)
    return alone.done == neighbour.done and alone.digest.digest() == neighbour.digest.digest()


def attack_engine(path: Path, n_calls: int, seed: int) -> Report:
    """The same at the engine itself, whose slot 0 is the neighbour."""
    report = Report("engine")
    rng, own = random.Random(seed), random.Random("neighbour")
    it, alone = make_engine(path), make_engine(path)
    it.open()
    alone.open()
    report.neighbours_unmoved = True

    def neighbour() -> None:
        data = values.right_data(own, most=20)
        if alone.length(0) + len(data) > 250:
            for engine in (it, alone):
                engine.clear(0)
        group = [Append(0, alone.length(0), data, "last")]
        (here,), (there,) = it.process(group), alone.process(group)
        report.neighbours_unmoved &= bool(np.array_equal(here, there))
        report.neighbour_operations += 1

    def member(slot: Any) -> Append:
        held = it.length(slot) if isinstance(slot, int) and 0 < slot < N_SLOTS else 0
        at = held if rng.random() < 0.7 else values.count(rng, held)
        data = values.right_data(rng) if rng.random() < 0.5 else values.wrong_data(rng)
        return Append(slot, at, data, "all" if rng.random() < 0.5 else values.output(rng))

    def attack() -> None:
        slot: Any = rng.randint(1, 3) if rng.random() < 0.8 else rng.choice([4, -1, 2**31, None, "1", 1.0, True, 2**70])
        what = rng.randrange(10)
        if what < 7:
            slots = [slot, *rng.sample([1, 2, 3, -1, 4], rng.choice([0, 0, 0, 1, 2]))]
            it.process([member(slot) for slot in slots])
        elif what == 7:
            it.length(slot)
        elif what == 8:
            it.clear(slot)
        else:
            it.truncate(slot, values.count(rng, 10))

    while report.calls < n_calls:
        try:
            attack()
        except (InvalidInput, EngineFailed) as exc:
            report.count(type(exc).__name__)
        except Exception as exc:  # noqa: BLE001
            report.count(type(exc).__name__, expected=False, what=str(exc)[:300])
        else:
            report.count("success")
        if report.calls % 4 == 0:
            neighbour()
    for slot in range(N_SLOTS):
        it.clear(slot)
    report.tokens_left = sum(it.length(slot) for slot in range(N_SLOTS))
    report.borrowed_bytes = 0
    it.close()
    alone.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calls", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--where", choices=["sessions", "engine"], default="sessions")
    arguments = parser.parse_args()
    path = build_tiny_gguf(arguments.folder / "hostile.gguf", n_layer=2)
    if arguments.where == "sessions":
        report = trio.run(attack_sessions, path, arguments.calls, arguments.seed)
    else:
        report = attack_engine(path, arguments.calls, arguments.seed)
    print(json.dumps(attrs.asdict(report)))


if __name__ == "__main__":
    main()
