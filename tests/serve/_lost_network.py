"""A server here, a client in a network namespace of its own, and a link between them that goes down.

    unshare --net --map-root-user python -m tests.serve._lost_network

Both ends run this file: with ``client`` it is the client, which waits on stdin until it has a network.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import trio

from hotkv_trio import open_runtime
from hotkv_trio.serve import ConnectionLost, Limits, ShardServer, open_shard_client
from hotkv_trio.testing import FakeEngine
from tests.serve._rig import ALICE, key

SERVER, CLIENT = "10.77.0.1", "10.77.0.2"


def namespace(process: int | str) -> Path:
    return Path(f"/proc/{process}/ns/net").readlink()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


async def serve() -> None:
    ip("link", "set", "lo", "up")
    command = ["unshare", "--net", sys.executable, "-m", "tests.serve._lost_network", "client"]
    client = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE)
    assert client.stdin is not None
    try:
        while namespace(client.pid) == namespace("self"):  # noqa: ASYNC110 - until it has left ours
            await trio.sleep(0.01)
        ip("link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(client.pid))
        ip("address", "add", f"{SERVER}/24", "dev", "here")
        ip("link", "set", "here", "up")
        async with open_runtime(FakeEngine()) as runtime, trio.open_nursery() as nursery:
            server = ShardServer(runtime, tokens=[ALICE], limits=Limits(silence_timeout=1.0))
            (where,) = await nursery.start(lambda **how: server.serve(f"{SERVER}:0", insecure=True, **how))
            await client.stdin.send_all(f"{where}\n".encode())
            while runtime.statistics().tokens_prefilled < 3:  # noqa: ASYNC110
                await trio.sleep(0.01)
            ip("link", "set", "here", "down")
            begun = trio.current_time()
            while runtime.statistics().lent_slots:  # noqa: ASYNC110
                await trio.sleep(0.01)
            print(f"bytes are back after {trio.current_time() - begun:.2f} s", runtime.limiter.borrowed_bytes)
            await server.drain()
            assert await client.wait() == 0
    finally:
        client.kill()
        await client.stdin.aclose()  # noqa: ASYNC102


async def use() -> None:
    where = await trio.to_thread.run_sync(sys.stdin.readline)
    ip("address", "add", f"{CLIENT}/24", "dev", "there")
    ip("link", "set", "there", "up")
    try:
        async with open_shard_client(where.strip(), token=ALICE, insecure=True, cancel_patience=0.1) as client:
            session = await client.start_session(key("a"))
            await session.prefill([1, 2, 3])
            await client.wait_lost()
            await session.decode(4)
    except ConnectionLost as exc:
        print("the client knows:", exc)


async def main() -> None:
    with trio.fail_after(30):
        await (use() if sys.argv[1:] == ["client"] else serve())


if __name__ == "__main__":
    trio.run(main)
