"""The checks themselves: damage to the state is found, and a core that breaks the engine's contract is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hotkv_trio import Append, EngineFailed, open_runtime
from hotkv_trio.testing import FakeEngine, InlineExecutor
from tests.core._rig import key

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotkv_trio import Runtime, Session


def forget_a_tenancy(runtime: Runtime, session: Session) -> None:
    session._tenancy = None


def let_a_cold_session_have_a_length(runtime: Runtime, session: Session) -> None:
    runtime._clearing.add(session._tenancy)  # type: ignore[arg-type]
    session._tenancy = None
    session._length = 5


def lend_a_slot_for_too_little(runtime: Runtime, session: Session) -> None:
    (claim,) = runtime._ledger.granted.values()
    claim.nbytes -= 1
    runtime._ledger.borrowed_bytes -= 1


def lose_bytes(runtime: Runtime, session: Session) -> None:
    runtime._ledger.borrowed_bytes += 1


def list_a_session_twice(runtime: Runtime, session: Session) -> None:
    runtime._directory._live["another"] = session._entry


@pytest.mark.parametrize(
    "damage, said",
    [
        (forget_a_tenancy, "sessions hold set"),
        (let_a_cold_session_have_a_length, "a cold session has a length"),
        (lend_a_slot_for_too_little, "1 slots lent for 639 bytes"),
        (lose_bytes, "claims hold 640 bytes, borrowed are 641"),
        (list_a_session_twice, "an entry stands under another id"),
    ],
)
async def test_check_integrity_finds(damage: Callable[[Runtime, Session], None], said: str) -> None:
    async with open_runtime(FakeEngine(), executor=InlineExecutor()) as runtime:
        session = await runtime.start_session(key("a"))
        await session.prefill([1, 2])
        runtime.check_integrity()
        ledger, directory = runtime._ledger, runtime._directory
        (claim,) = ledger.granted.values()
        tenancy, borrowed, nbytes = session._tenancy, ledger.borrowed_bytes, claim.nbytes
        damage(runtime, session)
        with pytest.raises(AssertionError, match=said):
            runtime.check_integrity()
        session._tenancy, ledger.borrowed_bytes, claim.nbytes = tenancy, borrowed, nbytes
        runtime._clearing.clear()
        directory._live.pop("another", None)
        runtime.check_integrity()


def append(slot: int, position: int, *tokens: int) -> Append:
    return Append(slot, position, np.array(tokens, np.int32), "last")


HIDDEN: Any = np.zeros((1, 16), np.float32)


@pytest.mark.parametrize(
    "group",
    [
        [],
        [append(0, 2, 1), append(0, 3, 1)],
        [append(0, 1, 1)],
        [append(0, 3, 1)],
        [append(1, 1, 1)],
        [append(4, 0, 1)],
        [append(-1, 0, 1)],
        [append(1, 0, *[1] * 9)],
        [append(1, 0, *[1] * 5), append(2, 0, *[1] * 5)],
        [append(0, 2, 1), Append(1, 0, HIDDEN, "last")],
    ],
    ids=repr,
)
def test_the_fake_engine_notices_a_call_that_breaks_its_contract(group: list[Append]) -> None:
    engine = FakeEngine(n_ctx_seq=8, max_batch_tokens=9)
    engine.open()
    engine.process([append(0, 0, 1, 2)])
    with pytest.raises(EngineFailed, match="broke the engine's contract"):
        engine.process(group)
    assert len(engine.violations) == 1
    assert [engine.length(slot) for slot in range(4)] == [2, 0, 0, 0]


def test_the_fake_engine_notices_what_comes_after_its_end() -> None:
    engine = FakeEngine()
    engine.open()
    engine.close()
    for late in (engine.close, engine.open, lambda: engine.clear(0), lambda: engine.process([append(0, 0, 1)])):
        with pytest.raises(EngineFailed, match="after close"):
            late()
    assert len(engine.violations) == 4


def test_the_fake_engine_notices_a_truncation_beyond_what_it_holds() -> None:
    engine = FakeEngine()
    engine.open()
    with pytest.raises(EngineFailed, match="truncated to 1"):
        engine.truncate(0, 1)
    assert len(engine.violations) == 1


def test_the_fake_engine_tells_every_history_apart() -> None:
    engine = FakeEngine()
    engine.open()
    histories = [[1], [2], [1, 1], [1, 2], [2, 1], [0, 1], [1, 0]]
    rows = {engine.rows(history)[-1].tobytes() for history in histories}
    assert len(rows) == len(histories)
