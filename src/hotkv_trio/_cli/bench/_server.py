"""``llama-server`` and ``llama-batched-bench``, driven as their own users do."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import trio

from hotkv_trio._errors import EngineFailed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path

_PATIENCE = 60.0
"""Seconds that a server may take to load its model."""


@attrs.define(eq=False)
class LlamaServer:
    """A ``llama-server`` on loopback."""

    _port: int

    async def generate(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> float:
        """Let all prompts be continued at once, by ``n_tokens`` each; return the seconds that all took."""
        bodies = [
            {"prompt": list(prompt), "n_predict": n_tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            for prompt in prompts
        ]
        answers: list[dict[str, Any]] = []

        async def ask(body: dict[str, Any]) -> None:
            answers.append(json.loads(await _request(self._port, "POST", "/completion", body)))

        began = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for body in bodies:
                nursery.start_soon(ask, body)
        seconds = time.perf_counter() - began
        done = [(answer["tokens_evaluated"], answer["tokens_predicted"]) for answer in answers]
        if sorted(done) != sorted((len(prompt), n_tokens) for prompt in prompts):
            raise EngineFailed(None, f"llama-server did other work than it was asked for: {done}")
        return seconds


@asynccontextmanager
async def open_llama_server(
    program: Path, model: Path, *, n_sessions: int, n_ctx: int, threads: int
) -> AsyncGenerator[LlamaServer]:
    """Run a server for ``n_sessions`` at once, each with ``n_ctx`` tokens, for as long as the ``async with`` lasts.

    Raises:
        EngineFailed: it did not come up.
    """
    port = await _free_port()
    command = [
        str(program),
        *("--model", str(model), "--parallel", str(n_sessions), "--ctx-size", str(n_sessions * n_ctx)),
        *("--threads", str(threads), "--flash-attn", "on", "--no-kv-unified", "--cache-ram", "0", "--no-ui"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        process: trio.Process = await nursery.start(partial(run, check=False))
        try:
            with trio.fail_after(_PATIENCE):
                await _up(process, port)
        except trio.TooSlowError:
            raise EngineFailed(None, f"llama-server was not ready after {_PATIENCE:.0f} s") from None
        yield LlamaServer(port)  # ruff: ignore[fallible-context-manager] - the nursery ends it
        nursery.cancel_scope.cancel(reason="the suite is over")


async def batched_bench(
    program: Path, model: Path, *, n_sessions: int, prompt: int, tokens: int, threads: int
) -> float:
    """Return the tokens a second that llama-batched-bench reaches in all.

    Raises:
        EngineFailed: it failed.
    """
    command = [
        str(program),
        *("--model", str(model), "--ctx-size", str(n_sessions * (prompt + tokens)), "--threads", str(threads)),
        *("--flash-attn", "on", "-npp", str(prompt), "-ntg", str(tokens), "-npl", str(n_sessions)),
        *("--no-kv-unified", "--output-format", "jsonl"),
    ]
    done = await trio.run_process(command, capture_stdout=True, stderr=subprocess.DEVNULL, check=False)
    lines = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise EngineFailed(done.returncode, "llama-batched-bench failed")
    return float(json.loads(lines[-1])["speed"])


async def _up(process: trio.Process, port: int) -> None:
    while True:
        if process.returncode is not None:
            raise EngineFailed(process.returncode, "llama-server ended before it was ready")
        try:
            await _request(port, "GET", "/health")
        except EngineFailed:
            await trio.sleep(0.1)
        else:
            return


async def _request(port: int, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    try:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(head.encode() + content)
            received = b"".join([piece async for piece in stream])
    except (OSError, trio.BrokenResourceError) as error:
        raise EngineFailed(None, f"llama-server did not answer {method} {path}: {error}") from error
    status, _, answer = received.partition(b"\r\n\r\n")
    if b" 200 " not in status.partition(b"\r\n")[0]:
        raise EngineFailed(None, f"llama-server answered {status[:64]!r} to {method} {path}")
    return answer


async def _free_port() -> int:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        return int(listener.socket.getsockname()[1])
