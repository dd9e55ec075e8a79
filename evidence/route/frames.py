"""Hostile frames: against both ends of the codec, and against a live server whose neighbours go on working.

    python -m evidence.route.frames codec [--frames 1000000] [--seed 0] [--json]
    python -m evidence.route.frames live [--frames 20000] [--seed 0] [--json]

Hypothesis draws bytes; half of the frames are such bytes as they are, after a length that fits or not, and half are
built from them with knowledge of the protocol: each message, right or with fields that are missing, unknown, twice, of
another type or at a limit, tensors that fit or not, and damage afterwards.

Held for the codec: nothing but events and `ProtocolError` comes out; a dead end stays dead; never more is buffered than
one frame; what was left right is understood. Held for the server: it lives and answers within 10 seconds, no memory
grows, nothing stays borrowed, and what neighbours generate meanwhile is, token for token, what they generate alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import hypothesis
import msgspec
import trio
from evidence.route._servers import Progress, Shard, generate, resident
from hypothesis import strategies as st

from hotkv_trio import HotKVError, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.route import ShardAddress, open_route
from hotkv_trio.serve import ProtocolError, open_shard_client
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._codec import CLOSED, NEED_DATA, PREFIX, ClientEnd, Frame, ServerEnd, State
from hotkv_trio.testing import FakeEngine, build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_FRAME = 20_000
FRAMES_A_DRAW = 100
PART = 250
MOST_OUTCOMES = 30
MAX_GROWTH = 0.05
"""Of memory, from a fifth of the run to its end."""
FLOOR = 8 * 2**20
"""Bytes of growth that are an allocator's noise."""


@attrs.define
class Bytes:
    """Decisions read from drawn bytes; zeros when they are used up."""

    data: bytes
    at: int = 0

    def take(self, n: int) -> bytes:
        self.at += n
        return self.data[self.at - n : self.at].ljust(n, b"\0")

    def below(self, n: int) -> int:
        return int.from_bytes(self.take(2), "big") % n

    def of(self, *choices: Any) -> Any:
        return choices[self.below(len(choices))]


def odd_value(r: Bytes, depth: int = 0) -> Any:
    """Return a value that is hardly ever right."""
    kind = r.below(16 if depth < 3 else 12)
    simple = (
        None, True, False, 0, -1, 2**31, 2**63 - 1, 2**64 - 1, -(2**63), float("nan"), "", "\0" * 3,
    )  # fmt: skip
    if kind < len(simple):
        return simple[kind]
    match kind:
        case 12:
            return [odd_value(r, depth + 1) for _ in range(r.below(5))]
        case 13:
            return {r.of("t", "id", "tensor", "x"): odd_value(r, depth + 1) for _ in range(r.below(4))}
        case 14:
            return msgspec.msgpack.Ext(r.below(128), r.take(r.below(9)))
        case _:
            return r.of("x" * 129, "x" * 70_000, r.take(5), "route-7f", "int32", "last")


def number(r: Bytes) -> int:
    return int(r.of(0, 1, 2, 3, 7, 255, 2**31 - 1, 2**63 - 1))


def tensor(r: Bytes) -> tuple[list[Any], bytes]:
    """Return a description and bytes; mostly they fit."""
    dtype = r.of("int32", "float32", "float16", "bfloat16")
    shape = [r.below(5) for _ in range(1 + r.below(2))]
    if not r.below(20):
        shape = r.of([2**31 - 1, 2**31 - 1], [2**40], [], [1, 1, 1], [-1])
    size = 1
    for extent in shape:
        size *= extent
    nbytes = max(0, min(size, 64)) * (2 if "16" in dtype else 4)
    return [dtype, shape], r.take(nbytes if r.below(10) else r.below(70))


def fields_of(r: Bytes, last_id: int) -> tuple[dict[str, Any], bytes]:
    """Return a message to a server that is right but for its values, and the tensor's bytes."""
    kind = r.of("hello", "ping", "stats", "open", "get", "prefill", "decode", "truncate", "release", "cancel")
    if kind == "hello":
        return {"t": kind, "version": 1, "max_frame": number(r)}, b""
    fields: dict[str, Any] = {"t": kind, "id": last_id + 1 if r.below(12) else number(r)}
    raw = b""
    if kind not in {"ping", "stats", "cancel"}:
        fields |= {"session": r.of("a", "b", "c", "\x7f", "é"), "epoch": r.below(4)}
    if kind == "open":
        fields |= {"kept": bool(r.below(2)), "wait": bool(r.below(2))}
    if kind in {"prefill", "decode"}:
        fields["tensor"], raw = tensor(r)
        fields["at"] = r.of(None, 0, 1, number(r))
    if kind == "prefill":
        fields["output"] = r.of("last", "all", "none")
    if kind == "truncate":
        fields["length"] = number(r)
    return fields, raw


def frame(r: Bytes, last_id: int) -> tuple[bytes, bool]:
    """Return a frame, and whether nothing was done to it."""
    if r.below(2):
        header, raw = r.take(r.below(80)), r.take(r.below(20))
        lengths = (len(header), len(raw)) if r.below(4) else struct.unpack(">II", r.take(8))
        return PREFIX.pack(*lengths) + header + raw, False
    fields, raw = fields_of(r, last_id)
    harm = r.below(20)
    if harm == 1:
        fields[r.of(*fields)] = odd_value(r)
    elif harm == 2:
        del fields[r.of(*fields)]
    elif harm == 3:
        fields[r.of("x", "tensor", "recipe", "token", "reason")] = odd_value(r)
    header = msgspec.msgpack.encode(fields)
    if harm == 4:
        twice = r.of(*fields)
        header = bytes([header[0] + 1]) + header[1:] + msgspec.msgpack.encode(twice) + msgspec.msgpack.encode(0)
    data = bytearray(PREFIX.pack(len(header), len(raw)) + header + raw)
    if harm == 5:
        for _ in range(1 + r.below(4)):
            data[r.below(len(data))] = r.below(256)
    elif harm == 6:
        del data[r.below(len(data)) :]
    return bytes(data), harm not in range(1, 7)


def opened_server() -> ServerEnd:
    end = ServerEnd(max_frame=MAX_FRAME)
    end.receive_data(ClientEnd(max_frame=MAX_FRAME).hello(token=None, recipe=None, dtype="float32"))
    end.next_event()
    end.send(WELCOME)
    return end


def opened_client() -> ClientEnd:
    end = ClientEnd(max_frame=MAX_FRAME)
    end.hello(token=None, recipe=None, dtype="float32")
    end.receive_data(WELCOME_BYTES)
    end.next_event()
    for _ in range(3):
        end.send(m.Ping(id=end.next_id))
    return end


def _welcome() -> m.Welcome:
    info = FakeEngine()._info
    return m.Welcome(
        version=1,
        recipe=info.recipe,
        recipe_digest=info.recipe.digest(),
        dtype="float32",
        facts=m.Facts(**{name: getattr(info, name) for name in m.Facts.__struct_fields__}),
        max_frame=MAX_FRAME,
        max_requests=8,
        max_queued_bytes=MAX_FRAME,
        silence_timeout=60.0,
    )


WELCOME = _welcome()
_GREETED = ServerEnd(max_frame=MAX_FRAME)
_GREETED.receive_data(ClientEnd(max_frame=MAX_FRAME).hello(token=None, recipe=None, dtype="float32"))
_GREETED.next_event()
WELCOME_BYTES = _GREETED.send(WELCOME)
MAKE: tuple[Callable[[], Any], ...] = (
    lambda: ServerEnd(max_frame=MAX_FRAME),
    opened_server,
    opened_server,
    opened_client,
)


def feed(end: Any, data: bytes, r: Bytes, outcomes: Counter[str]) -> None:
    """Give an end a frame in pieces, and hold it to what an end may do."""
    cut = r.below(len(data) + 1) if r.below(3) == 0 else len(data)
    try:
        for piece in (data[:cut], data[cut:]):
            if not piece:
                continue
            end.receive_data(piece)
            while isinstance(event := end.next_event(), Frame):
                outcomes[f"understood: {event.message.__struct_config__.tag}"] += 1
            if event is not NEED_DATA and event is not CLOSED:
                raise AssertionError(f"an event of no kind: {event!r}")
    except ProtocolError as exc:
        outcomes[f"refused: {re.sub(r'[0-9]+', '#', exc.what.partition(':')[0])[:70]}"] += 1
        for again in (end.next_event, lambda: end.receive_data(b"x")):
            try:
                again()
            except ProtocolError:
                continue
            raise AssertionError("a dead end came back to life") from None
    # What it waits for, and what it was given at once.
    if len(end._buffer) > MAX_FRAME + len(data):
        raise AssertionError(f"{len(end._buffer)} bytes buffered")


CODEC_SETTINGS = hypothesis.settings(
    max_examples=PART,
    database=None,
    deadline=None,
    derandomize=False,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)


def run_codec(n_frames: int, seed: int) -> dict[str, Any]:
    """Feed frames; raise AssertionError if the codec does what it must not."""
    outcomes: Counter[str] = Counter()
    progress = Progress("codec", n_frames)
    memory: list[int] = []
    done = right = 0

    def draw(data: bytes) -> None:
        nonlocal done, right
        r = Bytes(data)
        end = MAKE[r.below(len(MAKE))]()
        for _ in range(FRAMES_A_DRAW):
            is_server = isinstance(end, ServerEnd)
            payload, whole = frame(r, end._last_id)
            before = sum(outcomes.values()) if whole else 0
            feed(end, payload, r, outcomes)
            if whole and is_server and end.state is State.OPEN and not end._buffer:
                right += 1
                if sum(outcomes.values()) == before:
                    raise AssertionError("a frame that was right was not understood")
            if end.state is State.ERROR or r.below(20) == 0:
                end = MAKE[r.below(len(MAKE))]()
            done += 1
            if r.at >= len(data):
                r = Bytes(data[::-1] if r.data is data else bytes(b ^ (done & 255) for b in data))
        progress(done)

    # Hypothesis remembers what it drew, some bytes for each: in parts, so that what grows is the codec's.
    while done < n_frames:
        hypothesis.seed(seed)(CODEC_SETTINGS(hypothesis.given(st.binary(min_size=2000, max_size=6000))(draw)))()
        seed += 1
        gc.collect()
        memory.append(resident(os.getpid()))
    return {
        "frames": done,
        "right": right,
        "outcomes": dict(outcomes.most_common()),
        **growth(memory),
    }


def growth(memory: list[int]) -> dict[str, int]:
    """Return memory a fifth into the run and at its end."""
    early, late = memory[len(memory) // 5], max(memory[-max(1, len(memory) // 50) :])
    if late - early > max(MAX_GROWTH * early, FLOOR):
        raise AssertionError(f"memory grew from {early:,} to {late:,} bytes")
    return {"resident_early": early, "resident_late": late}


NEIGHBOURS = "neighbours' runs, exact"
TOKENS = {"neighbour": "the-token-of-the-neighbour", "attacker": "the-token-of-the-attacker"}


async def run_live(n_frames: int, seed: int) -> dict[str, Any]:
    """Attack a server process while neighbours work; raise AssertionError if they notice."""
    with tempfile.TemporaryDirectory() as folder:
        model = build_tiny_gguf(Path(folder, "tiny.gguf"))
        tokens = Path(folder, "tokens")
        tokens.write_text("\n".join(TOKENS.values()), encoding="utf-8")  # noqa: ASYNC240
        options = ["--context", "256", "--threads", "1", "--sessions", "6", "--exact", "--token-file", str(tokens)]
        shard = Shard(model, "0:4", options)
        await shard.start()
        try:
            return await _attack(shard, model, n_frames, seed)
        finally:
            await shard.kill()  # noqa: ASYNC102


async def _attack(shard: Shard, model: Path, n_frames: int, seed: int) -> dict[str, Any]:
    prompts = [[5 + n, 6, 7] for n in range(2)]
    async with (
        open_runtime(LlamaEngine(model, n_ctx=256, threads=1), exact=True) as alone,
        open_route([alone]) as route,
    ):
        expected = [await generate(route, prompt, 24) for prompt in prompts]
    counts: Counter[str] = Counter()
    memory: list[int] = []
    progress = Progress("live", n_frames)
    over = trio.Event()
    address = ShardAddress(where=shard.where, token=TOKENS["neighbour"])

    async def neighbour(route: Any, n: int) -> None:
        while not over.is_set():
            with trio.fail_after(60):
                if await generate(route, prompts[n], 24) != expected[n]:
                    raise AssertionError("a neighbour got other tokens")
            counts[NEIGHBOURS] += 1

    async def watch() -> None:
        async with open_shard_client(shard.where, token=TOKENS["neighbour"]) as client:
            while not over.is_set():
                begun = time.monotonic()
                with trio.fail_after(10):
                    await client.ping()
                counts["slowest answer, ms"] = max(counts["slowest answer, ms"], int(1000 * (time.monotonic() - begun)))
                memory.append(shard.resident())
                await trio.sleep(0.2)

    draws = _drawn(n_frames, seed)

    async def attacker() -> None:
        while counts["frames"] < n_frames:
            r = Bytes(draws[counts["connections"] % len(draws)])
            counts["connections"] += 1
            await _misbehave(shard.where, r, counts)
            progress(min(counts["frames"], n_frames), f", {counts[NEIGHBOURS]} runs of neighbours")

    async with open_route([address]) as route, trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        for n in range(len(prompts)):
            nursery.start_soon(neighbour, route, n)
        async with trio.open_nursery() as attackers:
            for _ in range(4):
                attackers.start_soon(attacker)
        over.set()
    async with open_shard_client(shard.where, token=TOKENS["attacker"]) as client:
        for view in (await client.statistics()).sessions:
            try:
                await client.release(_key(view))
            except HotKVError as exc:
                counts[f"release: {exc.code}"] += 1
        with trio.fail_after(30):
            while (left := (await client.statistics()).runtime).lent_slots:  # noqa: ASYNC110
                await trio.sleep(0.05)
    if left.borrowed_bytes:
        raise AssertionError(f"{left.borrowed_bytes} bytes stay borrowed")
    if not counts[NEIGHBOURS]:
        raise AssertionError("no neighbour came to its end")
    return {**counts, "borrowed_bytes": left.borrowed_bytes, **growth(memory)}


def _key(view: Any) -> Any:
    from hotkv_trio import SessionKey

    return SessionKey(view.session, view.epoch)


def _drawn(n_frames: int, seed: int) -> list[bytes]:
    drawn: list[bytes] = []

    @hypothesis.settings(
        max_examples=max(100, n_frames // 20),
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.seed(seed)
    @hypothesis.given(st.binary(min_size=1000, max_size=4000))
    def draw(data: bytes) -> None:
        drawn.append(data)

    draw()
    return drawn


async def _misbehave(where: str, r: Bytes, counts: Counter[str]) -> None:
    """Be one hostile client: from the connection to its end, by whomever."""
    host, _, port = where.partition(":")
    end = ClientEnd(max_frame=MAX_FRAME)
    async with await trio.open_tcp_stream(host, int(port)) as stream, trio.open_nursery() as nursery:

        async def read() -> None:
            try:
                async for piece in stream:
                    counts["bytes answered"] += len(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            nursery.cancel_scope.cancel()

        nursery.start_soon(read)
        try:
            if r.below(10):
                await stream.send_all(end.hello(token=TOKENS["attacker"], recipe=None, dtype="float32"))
                await trio.sleep(0.01)
            sent = 0
            while r.at < len(r.data):
                payload, whole = frame(r, sent)
                sent += whole
                await stream.send_all(payload)
                counts["frames"] += 1
                if r.below(8) == 0:
                    await trio.sleep(0.002)
            await trio.sleep(0.05)
        except trio.BrokenResourceError:
            counts["cut off"] += 1
        nursery.cancel_scope.cancel()


def main() -> int:
    """Fuzz, print what came of it; exit 1 if something was not held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=["codec", "live"])
    parser.add_argument("--frames", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    begun = time.monotonic()
    try:
        if given.target == "codec":
            report = run_codec(given.frames or 1_000_000, given.seed)
        else:
            report = trio.run(run_live, given.frames or 20_000, given.seed)
    except (AssertionError, trio.TooSlowError, BaseExceptionGroup) as exc:
        print(f"NOT HELD (seed {given.seed}): {exc!r}")
        return 1
    report |= {"target": given.target, "seed": given.seed, "seconds": round(time.monotonic() - begun)}
    if given.json:
        print(json.dumps(report, indent=2))
    else:
        for name, value in report.items():
            if isinstance(value, dict):
                print(f"{name}:")
                for what, count in list(value.items())[:MOST_OUTCOMES]:
                    print(f"  {count:>12,}  {what}")
            else:
                print(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
        print("held: no crash, no hang, no growth" + ("" if given.target == "codec" else ", neighbours exact"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
