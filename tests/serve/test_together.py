"""What happens together travels together, so that a group is answered, and asked for again, in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from hotkv_trio.serve import open_shard_client
from hotkv_trio.serve._codec import joined
from tests.serve._rig import key, open_rig

if TYPE_CHECKING:
    from hotkv_trio.serve import RemoteSession


@pytest.mark.parametrize(
    "sizes,pieces",
    [([], []), ([70_000], [70_000]), ([5, 7], [12]), ([5, 70_000], [5, 70_000]), ([65_530, 6], [65_536])],
)
def test_small_frames_are_joined(sizes: list[int], pieces: list[int]) -> None:
    frames = [bytes([n]) * size for n, size in enumerate(sizes)]
    assert b"".join(joined(frames)) == b"".join(frames)
    assert [len(piece) for piece in joined(frames)] == pieces


async def test_calls_of_one_moment_and_their_answers_go_out_in_one_piece() -> None:
    async with open_rig() as rig:
        ours, theirs = trio.testing.memory_stream_pair()
        pieces: dict[str, list[int]] = {"asked": [], "answered": []}
        for stream, name in ((ours, "asked"), (theirs, "answered")):
            _count(stream, pieces[name])
        rig.nursery.start_soon(rig.server.serve_stream, theirs)
        async with open_shard_client(ours) as client:
            sessions = [await client.start_session(key(name)) for name in "abc"]
            for session in sessions:
                await session.prefill([1, 2])
            for sent in pieces.values():
                sent.clear()
            calls = len(rig.engine.calls)
            async with trio.open_nursery() as nursery:
                for session in sessions:
                    nursery.start_soon(_decode, session)
            assert [len(sent) for sent in pieces.values()] == [1, 1]
            assert len(rig.engine.calls) == calls + 1


async def _decode(session: RemoteSession) -> None:
    await session.decode(3)


def _count(
    stream: trio.StapledStream[trio.testing.MemorySendStream, trio.testing.MemoryReceiveStream], into: list[int]
) -> None:
    send = stream.send_stream.send_all

    async def send_all(data: bytes | bytearray | memoryview) -> None:
        into.append(len(data))
        await send(data)

    stream.send_stream.send_all = send_all  # type: ignore[method-assign]
