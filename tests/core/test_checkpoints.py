"""The checkpoint law, for every public function: async means that it checkpoints, sync means that it never does."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest
import trio
from trio.testing import assert_checkpoints, assert_no_checkpoints, wait_all_tasks_blocked

import hotkv_trio
from hotkv_trio import KVLimiter, Runtime, Session, open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor
from tests.core._rig import Rig, key, open_rig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    State = tuple[Rig, Session]

NOT_A_CALLERS = {"Executor.serve", "OwnerThread.serve"}
"""Run by the runtime, which shields them."""


def is_async(function: Any) -> bool:
    # What contextlib and our own wrapper made of an async generator function.
    unwrapped = inspect.unwrap(function)
    return inspect.iscoroutinefunction(unwrapped) or inspect.isasyncgenfunction(unwrapped)


def public_functions() -> dict[str, Any]:
    functions: dict[str, Any] = {}
    for name, value in vars(hotkv_trio).items():
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isclass(value):
            members = inspect.getmembers(value, inspect.isfunction)
            functions |= {f"{name}.{member}": f for member, f in members if not member.startswith("_")}
        elif inspect.isfunction(value):
            functions[name] = value
    return functions


ASYNC = {name: function for name, function in public_functions().items() if is_async(function)}


async def prefill(state: State) -> None:
    await state[1].prefill([3, 4])


async def prefill_nothing_back(state: State) -> None:
    await state[1].prefill([3, 4], output="none")


async def decode(state: State) -> None:
    await state[1].decode(3)


async def truncate(state: State) -> None:
    await state[1].truncate(1)


async def truncate_to_where_it_is(state: State) -> None:
    await state[1].truncate(2)


async def aclose(state: State) -> None:
    await state[1].aclose()


async def aclose_twice(state: State) -> None:
    await state[1].aclose()
    with assert_checkpoints():
        await state[1].aclose()


async def release(state: State) -> None:
    assert await state[0].runtime.release(key("a"))


async def release_nothing(state: State) -> None:
    assert not await state[0].runtime.release(key("nobody"))


async def open_session(state: State) -> None:
    async with state[0].runtime.open_session(key("b")):
        pass


async def start_session(state: State) -> None:
    await state[0].runtime.start_session(key("b"))


async def serve_session(state: State) -> None:
    async with trio.open_nursery() as nursery:
        session: Session = await nursery.start(state[0].runtime.serve_session, key("b"))
        session.cancel()


async def verify_isolation(state: State) -> None:
    await state[0].runtime.verify_isolation()


async def open_a_runtime(state: State) -> None:
    async with open_runtime(FakeEngine(), executor=InlineExecutor()):
        pass


async def acquire(state: State) -> None:
    await state[0].limiter.acquire(1)
    state[0].limiter.release()


async def acquire_on_behalf_of(state: State) -> None:
    await state[0].limiter.acquire_on_behalf_of("x", 1)
    state[0].limiter.release_on_behalf_of("x")


CALLS: dict[str, list[Callable[[State], Awaitable[None]]]] = {
    "Session.prefill": [prefill, prefill_nothing_back],
    "Session.decode": [decode],
    "Session.truncate": [truncate, truncate_to_where_it_is],
    "Session.aclose": [aclose, aclose_twice],
    "Runtime.release": [release, release_nothing],
    "Runtime.open_session": [open_session],
    "Runtime.start_session": [start_session],
    "Runtime.serve_session": [serve_session],
    "Runtime.verify_isolation": [verify_isolation],
    "open_runtime": [open_a_runtime],
    "KVLimiter.acquire": [acquire],
    "KVLimiter.acquire_on_behalf_of": [acquire_on_behalf_of],
}


def test_every_public_async_function_is_in_the_table() -> None:
    assert CALLS.keys() == ASYNC.keys() - NOT_A_CALLERS


@pytest.mark.parametrize("call", [call for calls in CALLS.values() for call in calls], ids=lambda call: call.__name__)
async def test_async_checkpoints(call: Callable[[State], Awaitable[None]]) -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        with assert_checkpoints():
            await call((rig, session))


@pytest.mark.parametrize("call", [call for calls in CALLS.values() for call in calls], ids=lambda call: call.__name__)
async def test_async_is_a_cancellation_point_also_when_it_need_not_wait(
    call: Callable[[State], Awaitable[None]],
) -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session:
        await session.prefill([1, 2])
        before = len(rig.engine.calls)
        with trio.CancelScope() as scope:
            scope.cancel()
            await call((rig, session))
        assert scope.cancelled_caught
        assert len(rig.engine.calls) == before


@pytest.mark.parametrize("manager", ["session", "runtime"])
async def test_entering_and_leaving_a_block_both_checkpoint(manager: str) -> None:
    async with open_rig() as rig:
        block: AbstractAsyncContextManager[Any, Any]
        if manager == "session":
            block = rig.runtime.open_session(key("a"))
        else:
            block = open_runtime(FakeEngine(), executor=InlineExecutor())
        with assert_checkpoints():
            await block.__aenter__()  # noqa: PLC2801 - apart from its exit
        with assert_checkpoints():
            await block.__aexit__(None, None, None)


async def test_sync_never_checkpoints() -> None:
    async with open_rig() as rig:
        session = await rig.runtime.start_session(key("a"))
        await session.prefill([1, 2])
        with assert_no_checkpoints():
            rig.runtime.get(key("a"))
            rig.runtime.statistics()
            rig.runtime.check_integrity()
            session.statistics()
            rig.limiter.acquire_nowait(1)
            rig.limiter.release()
            rig.limiter.acquire_on_behalf_of_nowait("x", 1)
            rig.limiter.release_on_behalf_of("x")
            rig.limiter.statistics()
            rig.limiter.total_bytes -= 1
            session.cancel()
        await wait_all_tasks_blocked()


@pytest.mark.parametrize("name", ASYNC)
def test_every_async_docstring_says_what_is_true_after_cancelled(name: str) -> None:
    assert re.search(r"[Cc]ancel", inspect.getdoc(ASYNC[name]) or ""), name


@pytest.mark.parametrize("name", public_functions())
def test_every_public_function_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(public_functions()[name])


def test_what_only_the_runtime_makes_is_final() -> None:
    for made in (Runtime, Session, KVLimiter):
        assert getattr(made, "__final__", False), made
