"""A process with a runtime ends when it is told to, in whatever state: no hang, no noise, the engine closed."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.hostile._ask import ROOT, environment

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

STATES = ["loading", "idle", "waiting", "prefill", "closing", "llama_idle", "llama_prefill"]
NOISE = ("Exception ignored", "never awaited", "Warning", "Fatal", "TrioInternalError", "RuntimeClosed", "CacheMiss")


@contextmanager
def child(state: str, folder: Path, *options: str) -> Generator[subprocess.Popen[str]]:
    """Start a child that comes to a state; whatever the test does, it is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-X", "dev", *options, "-m", "tests.lifetime._child", state, str(folder)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Where the test waits for a line that never comes.
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        yield process
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line == "READY\n":
            return
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what else it printed, once it has ended by itself."""
    out, err = process.communicate(timeout=60)
    assert [noise for noise in NOISE if noise in err] == [], err
    return out, err


def was_interrupted(process: subprocess.Popen[str], err: str) -> bool:
    """Whether KeyboardInterrupt, and nothing else, ended it."""
    # Where it comes while a nursery waits for its tasks, trio raises it in a group.
    grouped = "Exception Group Traceback" in err
    raised = {line.strip(" |") for line in err.splitlines() if re.match(r"[ |]*\w+(Error|Interrupt|Exit)\b", line)}
    return process.returncode == (1 if grouped else -signal.SIGINT) and raised == {"KeyboardInterrupt"}


@pytest.mark.parametrize("state", STATES)
def test_interrupted(state: str, tmp_path: Path) -> None:
    """The engine is closed, on its own thread, and then KeyboardInterrupt ends the process as it should."""
    with child(state, tmp_path) as process:
        ready(process)
        process.send_signal(signal.SIGINT)
        out, err = ended(process)
        assert out.splitlines()[-1:] == ["CLOSED"]
        assert was_interrupted(process, err)


@pytest.mark.parametrize("state", ["prefill", "llama_prefill"])
def test_interrupted_twice(state: str, tmp_path: Path) -> None:
    """The impatient get the same."""
    with child(state, tmp_path) as process:
        ready(process)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        out, err = ended(process)
        assert "CLOSED" in out
        assert was_interrupted(process, err)


@pytest.mark.parametrize("state", STATES)
def test_terminated(state: str, tmp_path: Path) -> None:
    with child(state, tmp_path) as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        _, err = ended(process)
        assert process.returncode == -signal.SIGTERM
        assert err == ""


def test_an_engine_that_never_returns_is_named_and_can_be_ended(tmp_path: Path) -> None:
    with child("never_returns", tmp_path) as process:
        ready(process)
        assert process.stderr is not None
        assert process.stderr.readline() == "owner thread 'hotkv-stuck' still runs a native call; waiting for it\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == -signal.SIGTERM


def test_a_task_of_the_users_that_fails_ends_its_session_and_all_above(tmp_path: Path) -> None:
    with child("task_fails", tmp_path) as process:
        ready(process)
        out, err = ended(process)
        assert (process.returncode, out) == (1, "CLOSED\n")
        assert "ValueError: a task of the user's" in err


def test_a_task_of_a_kept_session_that_fails_ends_that_session_only(tmp_path: Path) -> None:
    with child("kept_task_fails", tmp_path) as process:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "then cache_miss\nREADY\nCLOSED\n"), err
        assert "a task of the kept session a@0 failed; the session has ended" in err


def test_sys_exit_in_the_body(tmp_path: Path) -> None:
    with child("system_exit", tmp_path) as process:
        ready(process)
        out, err = ended(process)
        assert (process.returncode, out, err) == (7, "CLOSED\n", "")


def test_the_interpreter_exits_with_a_runtime_open(tmp_path: Path) -> None:
    """Nobody waits for a native call that nobody wants: the owner thread is a daemon."""
    with child("abandoned", tmp_path) as process:
        out, err = ended(process)
        assert process.returncode == 0
        assert out == "READY\n"
        assert err == ""


def test_a_process_forked_after_the_runtime_was_opened_is_refused_with_the_reason(tmp_path: Path) -> None:
    with child("forks", tmp_path, "-W", "ignore") as process:
        out, err = process.communicate(timeout=60)
        lines = [line for line in out.splitlines() if line != "READY"]
        why = "runtime closed: this process was forked after the runtime was opened: open one in each process"
        assert [line.split(":")[0] for line in lines if why in line] == [
            *("release", "start_session", "serve_session", "open_session", "verify_isolation"),
            *("prefill", "decode", "truncate", "get"),
        ], (out, err)
        assert lines[-2:] == ["status 0", "CLOSED"]
        assert process.returncode == 0
