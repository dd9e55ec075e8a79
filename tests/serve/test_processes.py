"""Shard servers as processes of their own: killed as the system kills them, and the commands that talk to them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from hotkv_trio import open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.route import open_route
from hotkv_trio.serve import open_shard_client
from hotkv_trio.testing import build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from hotkv_trio.route import Route

COMMAND = [sys.executable, "-m", "hotkv_trio"]
TOKEN = "the-token-of-a-test"
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_tiny_gguf(tmp_path / "tiny.gguf")


async def start(model: Path, layers: str, *options: str) -> trio.Process:
    """Start a server; it accepts clients when this returns."""
    process = await trio.lowlevel.open_process(
        [*COMMAND, "serve", str(model), "--layers", layers, "--context", "256", "--threads", "1", "--exact", *options],
        stdout=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    said = b""
    with trio.fail_after(60):
        while b"\n" not in said:
            received = await process.stdout.receive_some()
            assert received, "the server ended"
            said += received
    assert said.startswith(f"serving layers {layers} of tiny.gguf on ".encode())
    return process


@asynccontextmanager
async def servers(model: Path) -> AsyncGenerator[tuple[list[str], list[trio.Process]]]:
    sockets = [f"unix:{model.parent / name}" for name in ("0.sock", "1.sock")]
    processes: list[trio.Process] = []
    try:
        for layers, where in zip(("0:2", "2:4"), sockets, strict=True):
            processes.append(await start(model, layers, "--listen", where))
        yield sockets, processes
    finally:
        for process in processes:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
            if process.stdout is not None:
                await process.stdout.aclose()


async def generate(route: Route, n_tokens: int) -> list[int]:
    async with route.open_session() as session, session.generate(PROMPT, n_tokens) as tokens:
        return [token async for token in tokens]


async def test_a_shard_killed_by_the_system_and_started_again_costs_no_token(model: Path) -> None:
    async with (
        open_runtime(LlamaEngine(model, n_ctx=256, threads=1), exact=True) as whole,
        open_route([whole]) as route,
    ):
        expected = await generate(route, 12)
    async with servers(model) as (sockets, processes), open_route(sockets) as route:
        async with route.open_session() as session, session.generate(PROMPT, 12) as tokens:
            got = [await anext(aiter(tokens)) for _ in range(4)]
            processes[1].send_signal(signal.SIGKILL)
            await processes[1].wait()
            processes.append(await start(model, "2:4", "--listen", sockets[1]))
            got += [token async for token in tokens]
        assert session.replays == 1
        assert got == expected


async def call(*arguments: str, **environment: str) -> Any:
    return await trio.run_process(
        [*COMMAND, *arguments],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


async def test_the_commands(model: Path) -> None:
    async with servers(model) as (sockets, processes):
        prompt = ("--model", str(model), "--prompt", "ab")
        generated = await call("generate", "--route", *sockets, *prompt, "--tokens", "5")
        assert generated.returncode == 0, generated.stderr
        assert generated.stdout.endswith(b"\n")
        shown = await call("top", "--connect", *sockets, "--looks", "1")
        assert shown.returncode == 0, shown.stderr
        assert b"0/4" in shown.stdout
        narrow = await call("top", "--connect", *sockets, "--looks", "1", COLUMNS="80")
        lines = narrow.stdout.decode().splitlines(keepends=True)
        assert narrow.stdout.decode().replace("\n", "").startswith(f"shard 0: {sockets[0]}shard 1: {sockets[1]}")
        header = ["shard", "layers", "hot", "waiting", "KV", "tokens/s", "evicted", "expired", "refused"]
        assert header in map(str.split, lines)
        assert [line.split()[:2] for line in lines if "/4" in line] == [["0", "0:2"], ["1", "2:4"]]
        assert lines[-1] == "no sessions of clients without a token\n"
        looks = await call("top", "--connect", *sockets, "--looks", "2", "--interval", "0.01")
        assert looks.stdout.count(b"tokens/s") == 2
        wrong = await call("generate", "--route", *reversed(sockets), *prompt)
        assert wrong.returncode == 2
        assert b"a route begins with" in wrong.stderr
        assert b"Next: try" in wrong.stderr
        processes[0].send_signal(signal.SIGTERM)
        with trio.fail_after(30):
            assert await processes[0].wait() == 0
        gone = await call("top", "--connect", sockets[0], "--looks", "1")
        assert gone.returncode == 2
        assert b"cannot connect" in gone.stderr


async def test_generate_advises_what_fits(model: Path) -> None:
    async with servers(model) as (sockets, _):
        route = ("generate", "--route", *sockets)
        long = await call(*route, "--model", str(model), "--prompt", "?" * 1000)
        said = rb"the prompt has \d+ tokens; a session on these shards holds 256\nNext: try a shorter --prompt"
        assert re.search(said, long.stderr), long.stderr
        full = await call(*route, "--model", str(model), "--prompt", "?" * 200, "--tokens", "200")
        assert re.search(rb"context full: .*\nNext: try a shorter --prompt, fewer --tokens", full.stderr), full.stderr
        assert len(full.stdout) > 1
        assert full.stdout.endswith(b"\n")
        larger = build_tiny_gguf(model.parent / "larger.gguf", n_vocab=2000)
        smaller = build_tiny_gguf(model.parent / "smaller.gguf", n_vocab=259)
        for other, size in ((larger, b"2,000"), (smaller, b"259")):
            foreign = await call(*route, "--model", str(other), "--prompt", "ab")
            assert b"the vocabulary of --model has %b tokens, that of the shards 512" % size in foreign.stderr
            assert b"Next: try the --model that the servers were given" in foreign.stderr


async def test_figures_and_logs_of_the_command(model: Path) -> None:
    where = f"unix:{model.parent / 'metrics.sock'}"
    process = await trio.lowlevel.open_process(
        [
            *COMMAND,
            "serve",
            str(model),
            *("--listen", "127.0.0.1:0", "--context", "256", "--threads", "1", "--log", "json", "--metrics", where),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        with trio.fail_after(60):
            address = (await process.stdout.receive_some()).decode().split()[-1]
            async with open_shard_client(address) as client:
                await client.ping()
                async with await trio.open_unix_socket(where.removeprefix("unix:")) as stream:
                    await stream.send_all(b"GET /metrics HTTP/1.0\r\n\r\n")
                    said = b"".join([bytes(piece) async for piece in stream])
            assert b"hotkv_ready 1.0\nhotkv" in re.sub(rb"#.*\n", b"", said)
            assert b"hotkv_connections 1.0\n" in said
            process.send_signal(signal.SIGTERM)
            logged = b"".join([bytes(piece) async for piece in process.stderr])
            assert await process.wait() == 0
        messages = [json.loads(line)["message"] for line in logged.splitlines()]
        # The signal may overtake the client's end.
        assert messages[:2] == ["figures are served", "a client connected"]
        assert sorted(messages[2:]) == ["a connection ended", "the server drains"]
    finally:
        process.kill()
        await process.stdout.aclose()  # noqa: ASYNC102
        await process.stderr.aclose()  # noqa: ASYNC102


async def test_commands_show_their_certificate(model: Path) -> None:
    certificates = Path(__file__).parent / "certificates"
    authority = str(certificates / "ca.pem")
    process = await trio.lowlevel.open_process(
        [
            *(*COMMAND, "serve", str(model), "--listen", "127.0.0.1:0", "--context", "256", "--threads", "1"),
            *("--certificate", str(certificates / "server.pem"), "--client-authority", authority),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert process.stdout is not None
    try:
        with trio.fail_after(60):
            where = (await process.stdout.receive_some()).decode().split()[-1]
            shown = ("--authority", authority, "--certificate", str(certificates / "client.pem"))
            assert (await call("top", "--connect", where, "--looks", "1", *shown)).returncode == 0
            assert (await call("top", "--connect", where, "--looks", "1", *shown[:2])).returncode == 2
            prompt = ("--model", str(model), "--prompt", "ab", "--tokens", "2")
            assert (await call("generate", "--route", where, *prompt, *shown)).returncode == 0
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            await process.stdout.aclose()


async def test_serve_refuses_a_budget_that_holds_no_session(model: Path) -> None:
    refused = await call("serve", str(model), "--listen", "127.0.0.1:0", "--context", "256", "--budget", "100")
    assert refused.returncode == 2
    assert "--budget 100 B: one session of 256 tokens takes" in refused.stderr.decode()


async def test_serve_refuses_what_is_not_safe(model: Path) -> None:
    refused = await call("serve", str(model), "--listen", "0.0.0.0:0", "--context", "256", HOTKV_TOKEN="")
    assert refused.returncode == 2
    assert b"there is no token" in refused.stderr
    refused = await call("serve", str(model), "--listen", "0.0.0.0:0", "--context", "256", HOTKV_TOKEN=TOKEN)
    assert refused.returncode == 2
    assert b"without TLS" in refused.stderr
    assert TOKEN.encode() not in refused.stderr
