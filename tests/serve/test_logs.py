"""What is logged: structured, useful at night, and nothing of what clients send."""

from __future__ import annotations

import json
import logging
import sys
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import trio

from hotkv_trio import CacheMiss, InvalidInput
from hotkv_trio.route import open_route
from hotkv_trio.serve import JSONFormatter, Limits, TextFormatter, Unauthorised
from hotkv_trio.serve import _messages as m
from hotkv_trio.serve._client import _Call
from hotkv_trio.serve._codec import PREFIX
from hotkv_trio.serve._tensors import to_wire
from hotkv_trio.testing import FakeEngine
from tests.serve._rig import ALICE, BOB, key, open_rig

if TYPE_CHECKING:
    from collections.abc import Iterator

KNOWN = [31_337, 27_182, 16_180]
"""Tokens that appear nowhere else."""
VOCABULARY = 40_000
SECRET = "sesame-opens-nothing"


class Lines(logging.Handler):
    """Every record, as both formatters write it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.texts: list[str] = []
        self.documents: list[dict[str, Any]] = []
        self._text, self._json = TextFormatter(), JSONFormatter()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self._text.format(record))
        self.documents.append(json.loads(self._json.format(record)))


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("hotkv_trio")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def engine() -> FakeEngine:
    return FakeEngine(n_vocab=VOCABULARY, n_ctx_seq=32)


def frame_of(**fields: Any) -> bytes:
    header = msgspec.msgpack.encode(fields)
    return PREFIX.pack(len(header), 0) + header


async def test_nothing_that_clients_send_is_logged(lines: Lines) -> None:
    """Tokens of the model and of clients, session names, and pieces of broken frames stay out, at every level."""
    limits = Limits(max_frame=2000, max_queued_bytes=4000)
    async with open_rig(engine(), tokens=[ALICE, BOB], limits=limits) as rig:
        async with rig.connect(token=ALICE) as client, open_route([client]) as route:
            async with route.open_session(f"{SECRET}-route") as session, session.generate(KNOWN, 3) as tokens:
                generated = [token async for token in tokens]
            async with client.open_session(key(SECRET)) as remote:
                await remote.prefill(KNOWN)
                await client.release(key(SECRET))
                with pytest.raises(CacheMiss):
                    await remote.prefill(KNOWN)
                with pytest.raises(CacheMiss):
                    await remote.decode(KNOWN[0], at=KNOWN[1])
            async with client.open_session(key(SECRET, 1)) as remote:
                beyond = np.array([VOCABULARY + KNOWN[0]], dtype=np.int32)
                tensor, raw = to_wire(beyond)
                call = _Call(lambda request: m.Prefill(id=request, session=SECRET, epoch=1, tensor=tensor), raw)
                with pytest.raises(InvalidInput):
                    await client._exchange(call)
                assert remote.length == 0
        with pytest.raises(Unauthorised):
            async with rig.connect(token=SECRET):
                pytest.fail("welcome")
        for payload in (
            frame_of(t=SECRET),
            frame_of(t="hello", version=1, max_frame=1, dtype=SECRET),
            frame_of(t="hello", version=1, max_frame=1, **{SECRET: 1}),
            SECRET.encode() * 100,
        ):
            stream = rig.stream()
            await stream.send_all(payload)
            while await stream.receive_some():
                pass
        await trio.testing.wait_all_tasks_blocked()
    assert len(generated) == 3
    said = "\n".join(lines.texts) + "\n".join(map(str, lines.documents))
    messages = {document["message"] for document in lines.documents}
    assert {"a client connected", "a connection ended", "a client was refused", "a peer was disconnected"} <= messages
    # Short numbers stand in any log; those of five digits are no accident.
    numbers = [number for number in (*KNOWN, *generated, VOCABULARY + KNOWN[0]) if number >= 10_000]
    for secret in (ALICE, BOB, SECRET, *map(str, numbers)):
        assert secret not in said, f"{secret} was logged"


def test_lines_carry_their_fields_and_exceptions() -> None:
    record = logging.LogRecord("hotkv_trio", logging.WARNING, __file__, 1, "a client was %s", ("refused",), None)
    record.code, record.connection = "unauthorised", 7
    document = json.loads(JSONFormatter().format(record))
    assert document.pop("time").endswith("+00:00")
    assert document == {
        "level": "warning",
        "logger": "hotkv_trio",
        "message": "a client was refused",
        "code": "unauthorised",
        "connection": 7,
    }
    assert (
        TextFormatter()
        .format(record)
        .endswith(" WARNING hotkv_trio: a client was refused code=unauthorised connection=7")
    )
    try:
        raise ValueError("a defect\nin two lines")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "\n" not in JSONFormatter().format(record)
    assert json.loads(JSONFormatter().format(record))["exception"].endswith("ValueError: a defect\nin two lines")
    assert "Traceback" in TextFormatter().format(record)
