"""`Runtime.verify_isolation`: what holds is said to hold, and each way of breaking it is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import trio

from hotkv_trio import CacheMiss, EngineFailed, IsolationReport, RuntimeClosed, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import FakeEngine, InlineExecutor, build_tiny_gguf
from tests.cli._engines import FailsInCompany, LeaksFirstInto, MixesUpMembers, RemembersLastTenant, SeesNeighbours
from tests.core._rig import SLOT, decode_on, key, open_rig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hotkv_trio import Append, Engine
    from hotkv_trio._engine import Rows

PROMISED = ("own_calls", "neighbours_contents", "slot_reuse", "poison", "truncate")


async def report_of(engine: Engine) -> IsolationReport:
    async with open_runtime(engine, executor=InlineExecutor()) as runtime:
        report = await runtime.verify_isolation()
        assert (runtime.limiter.borrowed_bytes, runtime.statistics().sessions) == (0, 0)
        return report


def findings(report: IsolationReport) -> dict[str, Any]:
    return {name: held for name, held in attrs.asdict(report).items() if name not in {"layout", "slots", "tokens"}}


async def test_an_engine_that_keeps_all_promises() -> None:
    report = await report_of(FakeEngine(n_slots=6))
    assert findings(report) == dict.fromkeys(findings(report), True) | {"poison": None}
    assert (report.slots, report.isolated, report.batch_invariant) == (4, True, True)
    sentences = report.sentences()
    assert [name.replace(" ", "_") for name, _, _ in sentences] == list(findings(report))
    assert all(words for _, _, words in sentences)


async def test_a_shard_that_takes_hidden_states() -> None:
    report = await report_of(FakeEngine(n_vocab=0, n_embd=8))
    assert findings(report) == dict.fromkeys(findings(report), True)


@pytest.mark.parametrize("memory", ["recurrent", "hybrid"])
async def test_memory_that_keeps_no_prefix(memory: Any) -> None:
    report = await report_of(FakeEngine(memory=memory))
    assert report.truncate is None
    assert report.isolated


async def test_one_free_slot_shows_less() -> None:
    report = await report_of(FakeEngine(n_slots=1))
    assert (report.own_calls, report.neighbours_contents, report.group_sizes) == (None, None, None)
    assert (report.slot_reuse, report.chunk_sizes, report.slots) == (True, True, 1)
    assert not report.batch_invariant


class TruncatesOneLess(FakeEngine):
    """It says that it cut, and has changed nothing but the length that it tells."""

    def truncate(self, slot: int, length: int) -> bool:
        states = self._slots[slot].states
        if 0 < length < len(states):
            states[length - 1] = states[-1]
        return super().truncate(slot, length)


class KeepsPoison(FakeEngine):
    """A value that is not finite stays in the slot for its next tenant."""

    poisoned: bool = False

    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        here = any(not np.isfinite(append.data).all() for append in group)
        if self.poisoned and not here:
            rows = [part + np.float32(1) for part in rows]
        self.poisoned = self.poisoned or here
        return rows


class CountsMembers(FakeEngine):
    """How many are in a call shows in its output, as it may in grouped mode; nothing else does."""

    def process(self, group: Sequence[Append]) -> list[Rows]:
        return [part + np.float32(len(group)) for part in super().process(group)]


class CountsTokens(FakeEngine):
    """How many tokens are in a call shows in its output."""

    def process(self, group: Sequence[Append]) -> list[Rows]:
        rows = super().process(group)
        return [part + np.float32(append.n_tokens) for part, append in zip(rows, group, strict=True)]


@pytest.mark.parametrize(
    "make, broken",
    [
        (SeesNeighbours, {"own_calls"}),
        (LeaksFirstInto, {"neighbours_contents", "group_sizes"}),
        (MixesUpMembers, {"neighbours_contents", "group_sizes"}),
        (RemembersLastTenant, {"slot_reuse", "own_calls"}),
        (TruncatesOneLess, {"truncate"}),
        (lambda **sizes: KeepsPoison(**(sizes | {"n_vocab": 0, "n_embd": 8})), {"poison"}),
    ],
    ids=["neighbours", "contents", "mix-up", "reuse", "truncate", "poison"],
)
async def test_each_broken_promise_is_found(make: Callable[..., Engine], broken: set[str]) -> None:
    report = await report_of(make(n_slots=4, n_ctx_seq=256, n_vocab=16))
    said = {name for name, held in findings(report).items() if held is False}
    assert broken & said, said
    assert not report.isolated
    words = {name.replace(" ", "_"): text for name, _, text in report.sentences()}
    assert all(any(word.isupper() and len(word) > 2 for word in words[name].split()) for name in said & set(PROMISED))


@pytest.mark.parametrize("make, varies", [(CountsMembers, {"group_sizes"}), (CountsTokens, {"chunk_sizes"})])
async def test_what_depends_on_the_shape_of_a_call_breaks_no_promise(
    make: Callable[..., Engine], varies: set[str]
) -> None:
    report = await report_of(make(n_ctx_seq=256))
    assert {name for name, held in findings(report).items() if held is False} == varies
    assert report.isolated
    assert not report.batch_invariant


async def test_a_neighbour_works_meanwhile() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a")) as session, trio.open_nursery() as nursery:
        await session.prefill([1, 2])
        nursery.start_soon(decode_on, session, rig, [1, 2], 40)
        report = await rig.runtime.verify_isolation()
        assert (report.isolated, report.slots) == (True, 3)
        assert rig.limiter.borrowed_bytes == SLOT


async def test_no_free_slot() -> None:
    async with open_rig(FakeEngine(n_slots=1)) as rig, rig.runtime.open_session(key("a")):
        with pytest.raises(trio.WouldBlock):
            await rig.runtime.verify_isolation()
        assert rig.limiter.borrowed_bytes == SLOT


async def test_a_budget_below_what_is_borrowed_has_no_room_for_it() -> None:
    async with open_rig() as rig, rig.runtime.open_session(key("a"), pinned=True):
        rig.limiter.total_bytes = 0
        with pytest.raises(trio.WouldBlock):
            await rig.runtime.verify_isolation()
        rig.limiter.total_bytes = 4 * SLOT
        assert (await rig.runtime.verify_isolation()).slots == 3


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("most", [4, 16, 64])
async def test_an_engine_that_takes_few_tokens_in_a_call(most: int, shard: bool) -> None:
    n_vocab, n_embd = (0, 8) if shard else (16, 0)
    report = await report_of(FakeEngine(n_ctx_seq=256, max_batch_tokens=most, n_vocab=n_vocab, n_embd=n_embd))
    assert findings(report) == dict.fromkeys(findings(report), True) | ({} if shard else {"poison": None})


@pytest.mark.parametrize("steps", range(0, 120, 7))
async def test_cancelled_at_any_step_it_gives_everything_back(steps: int) -> None:
    async with open_rig() as rig:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:

                async def cancel() -> None:
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()

                nursery.start_soon(cancel)
                await rig.runtime.verify_isolation()
        assert scope.cancelled_caught
        assert (rig.limiter.borrowed_bytes, rig.statistics.sessions) == (0, 0)
        assert (await rig.runtime.verify_isolation()).isolated


async def test_a_failing_call_is_raised() -> None:
    async with open_rig(FailsInCompany()) as rig:
        with pytest.raises(EngineFailed, match="the computation failed"):
            await rig.runtime.verify_isolation()
        assert (rig.limiter.borrowed_bytes, rig.statistics.sessions) == (0, 0)


async def test_its_slots_are_taken_away_meanwhile() -> None:
    async with open_rig() as rig, trio.open_nursery() as nursery:

        async def take() -> None:
            for _ in range(24):
                await trio.lowlevel.checkpoint()
            await rig.runtime.release(next(iter(rig.runtime._directory.entries)).key)

        nursery.start_soon(take)
        with pytest.raises(CacheMiss):
            await rig.runtime.verify_isolation()
        assert rig.limiter.borrowed_bytes == 0


async def test_of_a_closed_runtime() -> None:
    async with open_runtime(FakeEngine(), executor=InlineExecutor()) as runtime:
        pass
    with pytest.raises(RuntimeClosed):
        await runtime.verify_isolation()


@pytest.mark.parametrize(
    "arch, weights, kv, invariant",
    [("llama", "f32", "f16", False), ("llama", "q8_0", "q8_0", True), ("gemma3", "f32", "f16", False)],
)
async def test_on_llama_cpp(tmp_path: Path, arch: str, weights: Any, kv: Any, invariant: bool) -> None:
    path = build_tiny_gguf(tmp_path / "m.gguf", arch, n_layer=1, weights=weights)
    engine = LlamaEngine(path, n_slots=3, n_ctx=768, type_k=kv, type_v=kv, threads=1)
    report = await report_of(engine)
    assert {name: held for name, held in findings(report).items() if name in PROMISED} == dict.fromkeys(PROMISED, True)
    assert report.batch_invariant == invariant
    assert report.tokens > 512
