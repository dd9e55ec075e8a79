"""A process with a runtime in one state, which says so and waits for what happens to it.

    python -m tests.lifetime._child STATE [FOLDER]

It prints READY once it is in that state, and CLOSED when the engine has been closed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from trio.testing import wait_all_tasks_blocked

from hotkv_trio import HotKVError, OwnerThread, RuntimeClosed, SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import FakeEngine, build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from hotkv_trio import Append, EngineInfo, Runtime, Session
    from hotkv_trio._engine import Rows

SLOW = 0.4
"""Seconds."""
A, B = SessionKey("a", 0), SessionKey("b", 0)
AT_WORK = threading.Event()
"""Native calls are made."""


def say(what: str) -> None:
    print(what, flush=True)


class SlowEngine(FakeEngine):
    """Takes its time in the method that it is told, and says when it is in there."""

    def __init__(self, slow: str = "", *, n_slots: int = 2) -> None:
        super().__init__(n_slots=n_slots, n_ctx_seq=256)
        self.slow = slow

    def _enter_slowly(self, method: str) -> None:
        if method == self.slow:
            say("READY")
            time.sleep(SLOW)

    def open(self) -> EngineInfo:
        self._enter_slowly("open")
        return super().open()

    def process(self, group: Sequence[Append]) -> list[Rows]:
        self._enter_slowly("process")
        if self.slow == "for ever":
            say("READY")
            threading.Event().wait()
        return super().process(group)

    def close(self) -> None:
        self._enter_slowly("close")
        super().close()
        say("CLOSED")


class ClosingEngine(LlamaEngine):  # type: ignore[misc] # final: nobody else may
    def close(self) -> None:
        super().close()
        say("CLOSED")


async def loading() -> None:
    async with open_runtime(SlowEngine("open")):
        await trio.sleep_forever()


async def idle() -> None:
    async with open_runtime(SlowEngine()) as runtime, runtime.open_session(A) as session:
        await session.prefill([1, 2, 3])
        await runtime.start_session(B)
        say("READY")
        await trio.sleep_forever()


async def waiting() -> None:
    async with (
        open_runtime(SlowEngine(n_slots=1)) as runtime,
        runtime.open_session(A, pinned=True),
        trio.open_nursery() as nursery,
    ):

        async def ready() -> None:
            await wait_all_tasks_blocked()
            say("READY")

        nursery.start_soon(ready)
        async with runtime.open_session(B):
            raise AssertionError("there was no slot")


async def prefill() -> None:
    async with open_runtime(SlowEngine("process"), prefill_chunk=4) as runtime, runtime.open_session(A) as session:
        await session.prefill([1] * 200)


async def closing() -> None:
    async with open_runtime(SlowEngine("close")) as runtime:
        await (await runtime.start_session(A)).prefill([1, 2])


@asynccontextmanager
async def llama_runtime() -> AsyncGenerator[Runtime]:
    path = build_tiny_gguf(Path(sys.argv[2]) / "tiny.gguf", n_layer=2)
    async with open_runtime(ClosingEngine(path, n_slots=2, n_ctx=4096, threads=1), prefill_chunk=500) as runtime:
        yield runtime


async def llama_idle() -> None:
    async with llama_runtime() as runtime, runtime.open_session(A) as session:
        await session.prefill([1, 2, 3])
        say("READY")
        await trio.sleep_forever()


async def llama_prefill() -> None:
    async with llama_runtime() as runtime, runtime.open_session(A) as session:
        session.nursery.start_soon(ready_after_a_call, runtime)
        while True:
            await session.prefill([1] * 4000)
            await session.truncate(0)


async def ready_after_a_call(runtime: Runtime) -> None:
    while not runtime.statistics().native_calls:  # noqa: ASYNC110 - the owner thread brings it about
        await trio.sleep(0.001)
    say("READY")
    AT_WORK.set()


async def never_returns() -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    owner = OwnerThread("hotkv-stuck", grace=0.2)
    async with open_runtime(SlowEngine("for ever"), executor=owner) as runtime, runtime.open_session(A) as session:
        with trio.move_on_after(0.1):
            session.nursery.start_soon(session.decode, 1)
            await trio.sleep_forever()


async def task_fails() -> None:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("a task of the user's")

    async with open_runtime(SlowEngine()) as runtime, runtime.open_session(A) as session:
        await session.prefill([1])
        say("READY")
        session.nursery.start_soon(fail)
        await trio.sleep_forever()


async def kept_task_fails() -> None:
    """The session ends; the runtime, and everybody else, goes on."""

    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("a task of the user's")

    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    async with open_runtime(SlowEngine()) as runtime, runtime.open_session(B) as other:
        session = await runtime.start_session(A)
        session.nursery.start_soon(fail)
        await wait_all_tasks_blocked()
        try:
            await session.decode(1)
        except HotKVError as exc:
            say(f"then {exc.code}")
        await other.decode(1)
        say("READY")


async def system_exit() -> None:
    async with open_runtime(SlowEngine()) as runtime, runtime.open_session(A):
        say("READY")
        sys.exit(7)


async def forks() -> None:
    """Every entry point, in a process forked while a native call runs, outside of trio, which does not survive it."""
    async with open_runtime(SlowEngine("process"), prefill_chunk=4) as runtime, runtime.open_session(A) as session:
        kept = await runtime.start_session(B)
        session.nursery.start_soon(session.prefill, [1] * 8)
        await trio.sleep(SLOW / 4)
        if not (child := os.fork()):
            in_the_forked_process(runtime, session, kept)
            os._exit(0)
        say(f"status {os.waitpid(child, 0)[1]}")  # noqa: ASYNC222 - nothing else is to happen meanwhile


def in_the_forked_process(runtime: Runtime, session: Session, kept: Session) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "release": lambda: runtime.release(A),
        "start_session": lambda: runtime.start_session(SessionKey("c", 0)),
        "serve_session": lambda: runtime.serve_session(SessionKey("c", 0)),
        "open_session": lambda: runtime.open_session(SessionKey("c", 0)).__aenter__(),  # noqa: PLC2801
        "verify_isolation": runtime.verify_isolation,
        "prefill": lambda: session.prefill([1]),
        "decode": lambda: kept.decode(1),
        "truncate": lambda: kept.truncate(0),
    }
    for name, call in calls.items():
        try:
            call().send(None)
        except RuntimeClosed as exc:
            say(f"{name}: {exc}")
    try:
        runtime.get(A)
    except RuntimeClosed as exc:
        say(f"get: {exc}")


def abandoned() -> None:
    """The interpreter exits while another thread's trio has a runtime open, and a native call runs."""
    threading.Thread(target=trio.run, args=(llama_prefill,), daemon=True).start()
    AT_WORK.wait()


def main() -> None:
    state = globals()[sys.argv[1]]
    if sys.argv[1] == "abandoned":
        state()
    else:
        trio.run(state)


if __name__ == "__main__":
    main()
