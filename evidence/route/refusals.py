"""What a server refuses, over TCP and TLS to a process of its own: each case, and the typed reply that it got.

    python -m evidence.route.refusals

Epoch fencing in every state of the older session; tokens and principals; frames that are repeated, out of order, too
large or too early; certificates.
"""

from __future__ import annotations

import ssl
import sys
import tempfile
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from evidence.route._servers import Shard

from hotkv_trio import CacheMiss, HotKVError, SessionKey, StaleEpoch
from hotkv_trio.serve import ConnectionLost, ProtocolError, Unauthorised, open_shard_client
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._codec import CLOSED, NEED_DATA, PREFIX, ClientEnd, encode_frame
from hotkv_trio.serve._refusals import error_of
from hotkv_trio.testing import build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

CERTIFICATES = Path(__file__).resolve().parents[2] / "tests" / "serve" / "certificates"
ALICE, BOB = "the-token-of-alice", "the-token-of-bob-1"
SLOTS = 2
LONG = [1, 2, 3] * 1000

failures = 0


def told(case: str, got: object, expected: type[Exception] | str, detail: str = "") -> None:
    """Print a case, and count it if it is not as it should be."""
    global failures  # noqa: PLW0603
    name = got if isinstance(got, str) else type(got).__name__
    good = name == (expected if isinstance(expected, str) else expected.__name__)
    failures += not good
    print(f"{'yes' if good else 'NO '}  {case}: {name}{f' ({detail})' if detail else ''}")


async def error_from(call: Callable[[], Awaitable[Any]]) -> Exception | str:
    try:
        with trio.fail_after(60):
            await call()
    except Exception as exc:  # noqa: BLE001 - it is what is asked
        error: Any = exc
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        return error if isinstance(error, Exception) else repr(error)
    return "no error"


def context(authority: str = "ca.pem", certificate: str | None = "client.pem") -> ssl.SSLContext:
    made = ssl.create_default_context(cafile=str(CERTIFICATES / authority))
    if certificate is not None:
        made.load_cert_chain(CERTIFICATES / certificate)
    return made


async def fencing(where: str, state: str) -> None:
    """Let a newer epoch meet an older one in a state."""
    connect = partial(open_shard_client, where, token=ALICE, ssl_context=context())
    old_key, new_key = SessionKey(f"route-{state}", 3), SessionKey(f"route-{state}", 4)
    ended: list[Exception | str] = []

    async def note(call: Callable[[], Awaitable[Any]]) -> None:
        ended.append(await error_from(call))

    async with connect() as older, connect() as newer, connect() as third, trio.open_nursery() as nursery:
        if state == "waiting for a slot":
            holders = [await third.start_session(SessionKey(f"holder-{n}", 0)) for n in range(SLOTS)]
            for holder in holders:
                nursery.start_soon(holder.prefill, LONG)
            await trio.sleep(0.2)
            nursery.start_soon(note, lambda: older.start_session(old_key))
            await trio.sleep(0.1)
        else:
            session = await older.start_session(old_key)
            await session.prefill([1, 2])
            if state in {"running", "queued"}:
                nursery.start_soon(note, lambda: session.prefill(LONG))
                await trio.sleep(0.02)  # tasks begin in any order, and this is to be the first
            if state == "queued":
                nursery.start_soon(note, lambda: session.prefill([5]))
                nursery.start_soon(note, lambda: session.truncate(1))
            await trio.sleep(0.1)
        replaced = trio.Event()

        async def replace() -> None:
            new = await newer.start_session(new_key)
            await new.prefill([7])
            replaced.set()

        nursery.start_soon(replace)
        with trio.fail_after(60):
            await replaced.wait()
            expected = {"idle": 0, "running": 1, "queued": 3, "waiting for a slot": 1}[state]
            while len(ended) < expected:  # noqa: ASYNC110
                await trio.sleep(0.01)
        if state != "waiting for a slot":
            ended += [await error_from(lambda: session.decode(1)), await error_from(lambda: session.truncate(0))]
        ended += [await error_from(lambda: older.start_session(old_key)), await error_from(lambda: older.get(old_key))]
        ended.append(await error_from(lambda: older.release(old_key)))
        wrong = [error for error in ended if not isinstance(error, StaleEpoch) or error.current != 4]
        told(f"older epoch, {state}", wrong[0] if wrong else StaleEpoch(old_key, 4), StaleEpoch, f"{len(ended)} calls")


@asynccontextmanager
async def by_hand(where: str) -> AsyncGenerator[tuple[trio.SSLStream[trio.SocketStream], ClientEnd]]:
    """Greet, and go on by hand."""
    host, _, port = where.partition(":")
    stream = await trio.open_ssl_over_tcp_stream(host, int(port), ssl_context=context(), https_compatible=True)
    try:
        end = ClientEnd(max_frame=2**20)
        await stream.send_all(end.hello(token=BOB, recipe=None, dtype="float32"))
        await receive(stream, end)
        yield stream, end
    finally:
        await trio.aclose_forcefully(stream)


async def receive(stream: Any, end: ClientEnd) -> Any:
    with trio.fail_after(10):
        while (event := end.next_event()) is NEED_DATA:
            end.receive_data(await stream.receive_some())
    return event


async def frames(where: str, case: str, payload: bytes) -> None:
    async with by_hand(where) as (stream, end):
        await stream.send_all(end.send(m.Ping(id=1)) + end.send(m.Ping(id=2)))
        for _ in range(2):
            await receive(stream, end)
        await stream.send_all(payload)
        event = await receive(stream, end)
        refused = event is not CLOSED and isinstance(event.message, m.Reply)
        reply = error_of(event.message) if refused else "closed without a word"
        told(case, reply, ProtocolError, str(reply)[:90])


async def check(where: str) -> None:
    for state in ("idle", "running", "queued", "waiting for a slot"):
        await fencing(where, state)

    async def connects(**options: Any) -> None:
        async with open_shard_client(where, **{"token": ALICE, "ssl_context": context(), **options}) as client:
            await client.ping()

    for case, token in (("no token", None), ("a wrong token", "x" * 18), ("a token but for its end", ALICE[:-1] + "x")):
        told(case, await error_from(partial(connects, token=token)), Unauthorised)
    told("a server's certificate of an unknown authority", await error_from(
        partial(connects, ssl_context=context("stranger.pem"))), ConnectionLost)  # fmt: skip
    told("no client certificate", await error_from(
        partial(connects, ssl_context=context(certificate=None))), ConnectionLost)  # fmt: skip
    told("plain text to a TLS port", await error_from(partial(connects, ssl_context=None)), ConnectionLost)

    async with (
        open_shard_client(where, token=ALICE, ssl_context=context()) as alice,
        open_shard_client(where, token=BOB, ssl_context=context()) as bob,
        alice.open_session(SessionKey("hers", 1)) as session,
    ):
        await session.prefill([1, 2, 3])
        key = SessionKey("hers", 1)
        told("another principal's session, found", await error_from(lambda: bob.get(key)), CacheMiss)
        told("another principal's session, released", str(await bob.release(key)), "False")
        async with bob.open_session(SessionKey("hers", 9)) as same_name:
            told("the same id under a higher epoch of theirs", str(same_name.length), "0")
        told("and hers goes on", str((await session.decode(4)).length), "4")
        seen = [view.session for view in (await bob.statistics()).sessions]
        told("what another principal sees of it", str(seen), "[]")

    again = encode_frame(m.Ping(id=2))
    await frames(where, "a request repeated", again)
    await frames(where, "a request older than the last", encode_frame(m.Ping(id=1)))
    await frames(where, "two requests in the wrong order", encode_frame(m.Ping(id=4)) + encode_frame(m.Ping(id=3)))
    await frames(where, "a frame of 4 GiB, by its first eight bytes", PREFIX.pack(100, 2**32 - 200))
    await frames(where, "a header of 1 MiB, by its first eight bytes", PREFIX.pack(2**20, 0))
    await frames(where, "a hello again", end_hello())
    await frames(where, "nonsense", PREFIX.pack(9, 0) + b"nonsense!")


def end_hello() -> bytes:
    return ClientEnd(max_frame=1000).hello(token=ALICE, recipe=None, dtype="float32")


async def run() -> int:
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder, "tokens")
        tokens.write_text(f"{ALICE}\n{BOB}\n", encoding="utf-8")  # noqa: ASYNC240
        model = build_tiny_gguf(Path(folder, "tiny.gguf"))
        options = ["--context", "4096", "--threads", "1", "--sessions", str(SLOTS), "--prefill-chunk", "8"]
        options += ["--token-file", str(tokens), "--certificate", str(CERTIFICATES / "server.pem")]
        shard = Shard(model, "0:4", [*options, "--client-authority", str(CERTIFICATES / "ca.pem")])
        await shard.start()
        try:
            await check(shard.where)
        except HotKVError as exc:
            told("unexpected", exc, "nothing", str(exc))
        finally:
            await shard.kill()  # noqa: ASYNC102
    print(f"{failures} cases not as they should be")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(trio.run(run))
