"""llama.cpp fails at every call of a program of four sessions, in every way that it can; nobody gets a wrong bit.

Each session goes on after a failure as a client does: it tries again where nothing was lost, and replays its own calls
where it went cold.  In the end every output of every session must be, bit for bit, that of its run alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from hotkv_trio import CacheMiss, EngineFailed, SessionKey, TruncateUnsupported, open_runtime
from hotkv_trio.llama import LlamaEngine, _ffi
from hotkv_trio.testing import InlineExecutor, StepInvariants, build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hotkv_trio import Session
    from hotkv_trio._engine import Rows
    from hotkv_trio.llama import KVType

Operation: TypeAlias = "tuple[str, int]"
"""``append`` so many tokens, or ``cut`` so many off."""

PROGRAMS: Final[tuple[tuple[Operation, ...], ...]] = (
    (("append", 6), ("append", 1), ("append", 1), ("cut", 2), ("append", 1)),
    (("append", 1), ("append", 9), ("cut", 3), ("append", 1), ("append", 1)),
    (("append", 3), ("cut", 1), ("append", 5), ("append", 1)),
    (("append", 1), ("append", 1), ("append", 1), ("append", 1), ("cut", 4), ("append", 2)),
)
CODES: Final = ((1, False), (-1, False), (-2, False), (-2, True), (-3, False), (-3, True), (2, False), (2, True))
"""llama.cpp's code, and whether it appended first all the same."""


def tokens(session: int, turn: int, n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng([session, turn, n]).integers(0, 512, n)]


@attrs.define(eq=False)
class Faults:
    """Counts native calls, and makes some of them fail."""

    process_at: int = 0
    """The call that fails, from 1; 0: none."""
    code: int = 0
    ran: bool = False
    removals: range = range(0)
    """The removals that fail, from 1."""
    lie: bool = False
    """Whether a failing removal says that it succeeded."""
    calls: int = 0
    removed: int = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        process, remove = _ffi.process, _ffi.remove_from

        def failing_process(context: int, batch: int) -> int:
            self.calls += 1
            if self.calls != self.process_at:
                return process(context, batch)
            if self.ran:
                process(context, batch)
            return self.code

        def failing_remove(kv: int, slot: int, position: int) -> bool:
            self.removed += 1
            return self.lie if self.removed in self.removals else remove(kv, slot, position)

        patch.setattr(_ffi, "process", failing_process)
        patch.setattr(_ffi, "remove_from", failing_remove)


class Client:
    """Runs one program to its end, whatever fails on the way."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.outputs: list[Rows] = []
        self.failures = 0

    async def run(self, session: Session) -> None:
        done: list[tuple[int, Operation]] = []
        length = 0
        for turn, operation in enumerate(PROGRAMS[self.number]):
            while True:
                try:
                    if session.length != length:
                        await self.replay(session, done)
                    rows = await self.perform(session, turn, operation)
                    break
                except (EngineFailed, TruncateUnsupported, CacheMiss):
                    self.failures += 1
                    assert self.failures < 9
            done.append((turn, operation))
            length = session.length
            self.outputs.append(rows)

    async def replay(self, session: Session, done: Sequence[tuple[int, Operation]]) -> None:
        if session.length:
            await session.truncate(0)
        for turn, operation in done:
            await self.perform(session, turn, operation)

    async def perform(self, session: Session, turn: int, operation: Operation) -> Rows:
        what, n = operation
        if what == "cut":
            await session.truncate(session.length - n)
            return np.empty((0, 0), np.float32)
        at = session.length
        result = await session.prefill(tokens(self.number, turn, n), at=at, output="all" if n > 1 else "last")
        assert (result.position, result.length) == (at, at + n)
        return result.output


@attrs.frozen
class Setting:
    path: Path
    kv: KVType
    exact: bool

    def run(self, clients: Sequence[Client]) -> None:
        """Run the clients side by side; every invariant is looked at after every step."""
        invariants = StepInvariants()

        async def main() -> None:
            engine = LlamaEngine(self.path, n_slots=4, n_ctx=256, type_k=self.kv, type_v=self.kv, threads=1)
            async with open_runtime(engine, exact=self.exact, prefill_chunk=4, executor=InlineExecutor()) as runtime:
                invariants.watch(runtime)

                async def serve(client: Client) -> None:
                    async with runtime.open_session(SessionKey(f"session {client.number}", 0)) as session:
                        await client.run(session)

                with trio.fail_after(1000):
                    async with trio.open_nursery() as nursery:
                        for client in clients:
                            nursery.start_soon(serve, client)
                    assert runtime.limiter.borrowed_bytes == 0
                    # Slots in quarantine are tried again meanwhile: capacity is never lost.
                    await trio.sleep(100)
                assert (runtime.statistics().free_slots, runtime.statistics().quarantined_slots) == (4, 0)
                assert [engine.length(slot) for slot in range(4)] == [0] * 4

        trio.run(main, clock=MockClock(autojump_threshold=0), instruments=[invariants])
        invariants.check()
        assert invariants.steps > 50


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Setting]:
    """Return exact mode, and grouped mode where the kernels do not care how many are in a call."""
    folder = tmp_path_factory.mktemp("injected")
    f32 = build_tiny_gguf(folder / "f32.gguf", n_layer=1)
    q8 = build_tiny_gguf(folder / "q8.gguf", n_layer=1, weights="q8_0")
    return {"exact": Setting(f32, "f16", exact=True), "grouped": Setting(q8, "q8_0", exact=False)}


@pytest.fixture(scope="module")
def solo(settings: dict[str, Setting]) -> dict[str, list[list[Rows]]]:
    """Return each session's outputs when nobody else is there and nothing fails."""
    found: dict[str, list[list[Rows]]] = {}
    for name, setting in settings.items():
        clients = [Client(number) for number in range(4)]
        for client in clients:
            setting.run([client])
        found[name] = [client.outputs for client in clients]
    return found


Together: TypeAlias = "Callable[[Faults], list[Client]]"


@pytest.fixture(params=["exact", "grouped"])
def together(
    request: pytest.FixtureRequest, settings: dict[str, Setting], solo: dict[str, list[list[Rows]]]
) -> Together:
    """Return what runs all four with faults, and holds every output against the run alone."""

    def run(faults: Faults) -> list[Client]:
        clients = [Client(number) for number in range(4)]
        with pytest.MonkeyPatch.context() as patch:
            faults.install(patch)
            settings[request.param].run(clients)
        for client, expected in zip(clients, solo[request.param], strict=True):
            assert len(client.outputs) == len(expected)
            assert all(map(np.array_equal, client.outputs, expected)), f"{client.number} under {faults}"
        return clients

    return run


STRIDES: Final = [pytest.param(3, id="some"), pytest.param(1, id="every", marks=pytest.mark.slow)]


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("number", range(len(CODES)), ids=[str(code) for code in CODES])
def test_a_native_code_at_every_call(together: Together, number: int, stride: int) -> None:
    """Ollama #10127: code 1 ended the process; omlx PR 3414: a retry wrote rows twice; mesh-llm #1514: the length."""
    code, ran = CODES[number]
    at = 1 + number % stride
    # How many calls there are depends on trio's schedule, where they are grouped.
    while True:
        clients = together(faults := Faults(process_at=at, code=code, ran=ran))
        if faults.calls < at:
            break
        assert sum(client.failures for client in clients) > 0
        at += stride
    assert at > 10


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("lie", [False, True], ids=["refuses", "lies"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_removal_fails_at_every_place(together: Together, times: int, lie: bool, stride: int) -> None:
    """mesh-llm #581: a failed reset lost the lane for ever; llama.cpp #23206: a refused one was ignored."""
    at = times
    while True:
        together(faults := Faults(removals=range(at, at + times), lie=lie))
        if faults.removed < at:
            break
        at += stride
    assert at > 8


@pytest.mark.parametrize("stride", STRIDES)
def test_a_call_fails_and_so_do_the_removals_that_would_mend_it(together: Together, stride: int) -> None:
    together(clean := Faults())
    tried = 0
    for at in range(1, clean.calls + 1, 2 * stride):
        together(counted := Faults(process_at=at, code=2, ran=True))
        for first in range(1, counted.removed + 1, 2 * stride):
            together(Faults(process_at=at, code=2, ran=True, removals=range(first, first + 2)))
            tried += 1
    assert tried > 4
