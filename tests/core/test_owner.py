"""Where native calls run: one thread, one call at a time, in order, and joined."""

from __future__ import annotations

import logging
import threading
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import outcome
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from hotkv_trio import Executor, OwnerThread
from hotkv_trio._owner import call
from hotkv_trio.testing import InlineExecutor
from tests.core._rig import spawn, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

both = pytest.mark.parametrize("make", [OwnerThread, InlineExecutor])


@asynccontextmanager
async def serving(executor: Executor) -> AsyncGenerator[None]:
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            await nursery.start(executor.serve)
            try:
                yield
            finally:
                executor.stop()


@both
async def test_jobs_run_in_order_one_at_a_time(make: Callable[[], Executor]) -> None:
    executor, ran, inside = make(), list[int](), threading.Lock()

    def job(number: int) -> int:
        assert inside.acquire(blocking=False)
        ran.append(number)
        inside.release()
        return number

    done: list[outcome.Outcome[int]] = []
    async with serving(executor):
        for number in range(50):
            executor.submit(partial(job, number), done.append)
    assert ran == list(range(50))
    assert done == [outcome.Value(number) for number in range(50)]


@both
async def test_an_error_of_a_job_is_raised_to_its_caller_and_the_next_job_runs(make: Callable[[], Executor]) -> None:
    executor = make()

    def fail() -> None:
        raise LookupError("told to")

    def end() -> None:
        raise SystemExit(3)

    async with serving(executor):
        with pytest.raises(LookupError, match="told to"):
            await call(executor, fail)
        with pytest.raises(SystemExit):
            await call(executor, end)
        assert await call(executor, lambda: 5) == 5


@both
async def test_a_cancelled_caller_still_waits_for_its_job(make: Callable[[], Executor]) -> None:
    executor = make()
    async with serving(executor):
        with trio.CancelScope() as scope:
            scope.cancel()
            assert await call(executor, lambda: 5) == 5
        assert not scope.cancelled_caught


@both
async def test_jobs_submitted_before_stop_are_all_run(make: Callable[[], Executor]) -> None:
    executor = make()
    done: list[object] = []
    executor.submit(lambda: "early", done.append)
    executor.stop()
    with trio.fail_after(20):
        await executor.serve()
    assert done == [outcome.Value("early")]


async def test_the_owner_thread_is_one_thread_with_a_name_and_is_joined() -> None:
    """llama-cpp-python #471, #1367, #1995: two threads on one context crash or freeze."""
    before = threading.active_count()
    executor = OwnerThread("hotkv-here")
    async with serving(executor):
        threads = {await call(executor, threading.current_thread) for _ in range(20)}
        assert threading.current_thread() not in threads
        (thread,) = threads
        assert thread.name == "hotkv-here"
        assert thread.is_alive()
        assert thread.daemon, "an interpreter that exits must not wait for a native call"
    assert not thread.is_alive()
    assert threading.active_count() == before


async def test_a_native_call_that_does_not_return_is_waited_for_but_not_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = OwnerThread("hotkv-slow", grace=0.05)
    said = threading.Event()

    async def let_it_return() -> None:
        await until(lambda: "still runs a native call" in caplog.text)
        said.set()

    with caplog.at_level(logging.WARNING, logger="hotkv_trio"), trio.fail_after(10):
        async with trio.open_nursery() as nursery, serving(executor):
            nursery.start_soon(let_it_return)
            executor.submit(lambda: said.wait(10), lambda _: None)
    assert "hotkv-slow" in caplog.text


def test_an_owner_thread_left_behind_by_the_run_ends_by_itself() -> None:
    go = threading.Event()

    async def main() -> threading.Thread:
        executor = OwnerThread()
        async with trio.open_nursery() as nursery:
            await nursery.start(executor.serve)
            thread = await call(executor, threading.current_thread)
            executor.submit(go.wait, lambda _: None)
            # Nothing in this library does this: the service is shielded there.
            nursery.cancel_scope.cancel()
        return thread

    thread = trio.run(main)
    go.set()
    thread.join(10)
    assert not thread.is_alive()


async def test_the_inline_executor_runs_jobs_here_and_holds_them_when_told() -> None:
    executor = InlineExecutor()
    async with serving(executor):
        assert await call(executor, threading.current_thread) is threading.current_thread()
        executor.hold()
        async with trio.open_nursery() as nursery:
            caught = spawn(nursery, call, executor, lambda: 5)
            await wait_all_tasks_blocked()
            assert (executor.jobs, caught.done) == (1, False)
            executor.resume()
        assert (executor.jobs, caught.value) == (0, 5)
