"""``hotkv-trio demo``: it shows what is so, and notices whatever is not."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
import trio
from rich.console import Console

from hotkv_trio import Append, EngineFailed
from hotkv_trio._cli._progress import Progress
from hotkv_trio._cli._recorder import Recorder
from hotkv_trio._cli.demo import _command
from hotkv_trio._cli.demo._grouped import exchanges
from hotkv_trio._cli.demo._play import Incident, Part, Take, compare
from hotkv_trio._cli.demo._prompts import TEXTS, random_prompts, text_prompts
from hotkv_trio._cli.demo._stages import cast_parts, run_demo
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from hotkv_trio.testing import FakeEngine
from tests.cli._engines import (
    FailsInCompany,
    LeaksFirstInto,
    MixesUpMembers,
    RemembersLastTenant,
    SeesNeighbours,
    fake_setting,
)
from tests.cli._shell import UNUSABLE, unusable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hotkv_trio._cli._recorder import NativeCall
    from hotkv_trio._cli.demo._facts import DemoFacts
    from tests.cli._shell import Shell


class Silent:
    """A watcher that only counts."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.n_tokens = 0

    def begin(self, title: str, n_tokens: int) -> None:
        self.titles.append(title)

    def advance(self, n_tokens: int) -> None:
        self.n_tokens += n_tokens


def demo_on(make: Callable[..., FakeEngine] = FakeEngine, *, sessions: int = 4) -> DemoFacts:
    return trio.run(run_demo, fake_setting(make, sessions=sessions), Silent())


@pytest.fixture
def on_fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., FakeEngine]], None]:
    """Let the command run on a fake engine instead of llama.cpp."""

    def use(make: Callable[..., FakeEngine]) -> None:
        monkeypatch.setattr(_command, "llama_setting", lambda *_, **__: fake_setting(make))

    return use


# On llama.cpp.


def test_tiny_model_as_json(shell: Shell) -> None:
    called = shell("demo", "--json")
    assert called.status == 0, called
    facts = called.document
    assert facts["ok"] is True
    assert all(facts["checks"].values())
    assert facts["architecture"] == "llama"
    assert facts["truncation_shown"] is True
    assert facts["exchanged_runs"] == 4
    sessions = facts["sessions"]
    assert [session["name"] for session in sessions] == ["1", "2", "3", "4"]
    assert [session["prompt"] for session in sessions] == list(TEXTS[:4])
    assert all(session["equal_to_solo"] and session["unmoved"] and session["continuation"] for session in sessions)
    lengths = [session["prompt_tokens"] for session in sessions]
    assert min(lengths) < 64 < max(lengths)
    assert len(set(lengths)) == 4
    # All of the last take; of the evicted and the superseded session, what they had got before as well.
    assert [session["generated_tokens"] == 24 for session in sessions] == [True, False, True, True]
    calls = [session["logits_compared"] / facts["n_vocab"] for session in sessions]
    assert calls[0] == calls[2] == 25
    assert min(calls[1], calls[3]) > 25
    assert [session["ended"] for session in sessions] == [
        "finished",
        "evicted and restarted, then cancelled",
        "truncated and continued, then finished",
        "superseded by epoch 1, then finished",
    ]
    for mode in ("exact", "grouped"):
        kv = facts[mode]
        assert (kv["kv_bytes_before"], kv["kv_bytes_after"], kv["tokens_left"]) == (0, 0, 0)
        assert 0 < kv["kv_bytes_peak"] <= kv["kv_bytes_budget"]
        assert kv["prefill_tokens_per_second"] > 0
        assert kv["decode_tokens_per_second"] > 0
    assert facts["grouped"]["native_calls"] < facts["exact"]["native_calls"]


def test_tiny_model_as_tables(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    called = shell("demo", "--sessions", 2, "--tokens", 8)
    assert called.status == 0, called
    assert called.out.rstrip().endswith("All equal.")
    assert "NO" not in called.out.split()
    assert "Once upon a time, in a village by the sea, there lived →" in called.out
    assert max(map(len, called.out.splitlines())) <= 100
    assert called.err.splitlines()[0] == "each session alone"


def test_model_of_ones_own_without_vocabulary(shell: Shell, tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "own [1].gguf", n_layer=1, n_vocab=64)
    called = shell("demo", "--model", path, "--sessions", 1, "--tokens", 8, "--json")
    assert called.status == 0, called
    facts = called.document
    assert facts["model"] == "own [1].gguf"
    assert facts["exchanged_runs"] == 0
    (session,) = facts["sessions"]
    assert (session["prompt"], session["continuation"], session["unmoved"]) == (None, None, None)
    assert session["ended"] == (
        "evicted and restarted, then truncated and continued, then superseded by epoch 1, then cancelled"
    )


def test_memory_that_cannot_be_cut_back_is_not(shell: Shell, tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "mamba.gguf", "mamba", n_layer=1)
    called = shell("demo", "--model", path, "--sessions", 2, "--tokens", 8, "--json")
    assert called.status == 0, called
    facts = called.document
    assert facts["truncation_shown"] is False
    assert facts["sessions"][1]["ended"] == "evicted and restarted, then superseded by epoch 1, then cancelled"


# On an engine without a model.


@pytest.mark.parametrize("sessions", [1, 2, 3, 5, 16])
def test_any_number_of_sessions(sessions: int) -> None:
    facts = demo_on(sessions=sessions)
    assert facts.ok
    assert len(facts.sessions) == sessions
    assert facts.exact.kv_bytes_peak == facts.exact.kv_bytes_budget
    befell = ", ".join(session.ended for session in facts.sessions)
    assert [befell.count(incident) for incident in Incident] == [1, 1, 1, 1]


def test_the_cancelled_session_is_stopped_at_work_however_fast_the_engine_is() -> None:
    for _ in range(20):
        facts = trio.run(run_demo, fake_setting(sessions=1, tokens=8), Silent())
        assert facts.ok
        # What it had by then, and what was under way, which is not torn apart.
        assert facts.sessions[0].generated_tokens == 5 * 8 // 6 + 1


@pytest.mark.parametrize(
    "make, exact, grouped",
    [
        pytest.param(SeesNeighbours, False, True, id="sees neighbours"),
        pytest.param(RemembersLastTenant, False, False, id="remembers the last tenant"),
        pytest.param(MixesUpMembers, True, False, id="mixes up members"),
        pytest.param(LeaksFirstInto, True, False, id="leaks a neighbour's token"),
    ],
)
def test_broken_isolation_is_noticed(
    shell: Shell,
    on_fake: Callable[[Callable[..., FakeEngine]], None],
    make: Callable[..., FakeEngine],
    exact: bool,
    grouped: bool,
) -> None:
    on_fake(make)
    called = shell("demo", "--json")
    assert called.status == 1
    facts = called.document
    assert facts["ok"] is False
    assert all(session["equal_to_solo"] for session in facts["sessions"]) is exact
    assert all(session["unmoved"] for session in facts["sessions"]) is grouped
    called = shell("demo")
    assert called.status == 1
    assert "NO" in called.out.split()
    assert "All equal." not in called.out


def falsified(facts: DemoFacts) -> list[DemoFacts]:
    """Return the facts with one of them wrong, for each of those that count."""
    first, *others = facts.sessions
    checks = [attrs.evolve(facts.checks, **{field.name: False}) for field in attrs.fields(type(facts.checks))]
    firsts = [attrs.evolve(first, equal_to_solo=False), attrs.evolve(first, unmoved=False)]
    return [
        *(attrs.evolve(facts, checks=wrong) for wrong in checks),
        *(attrs.evolve(facts, sessions=(wrong, *others)) for wrong in firsts),
    ]


def test_each_fact_alone_decides() -> None:
    facts = demo_on()
    assert facts.ok
    wrong = falsified(facts)
    assert len(wrong) == 8
    assert not any(each.ok for each in wrong)
    assert facts.exact.clean
    assert not attrs.evolve(facts.exact, kv_bytes_before=1).clean
    assert not attrs.evolve(facts.exact, kv_bytes_after=1).clean
    assert not attrs.evolve(facts.exact, tokens_left=1).clean


def test_failing_engine_ends_in_advice(shell: Shell, on_fake: Callable[[Callable[..., FakeEngine]], None]) -> None:
    on_fake(FailsInCompany)
    called = shell("demo", "--json")
    assert (called.status, called.out) == (2, "")
    *_, what, advice = called.err.splitlines()
    assert what == "hotkv-trio: engine failed: the computation failed (native code -3)"
    assert advice.startswith("Next: try fewer sessions or tokens")
    assert "Traceback" not in called.err


def test_watcher_hears_of_every_token() -> None:
    watcher = Silent()
    facts = trio.run(run_demo, fake_setting(), watcher)
    n_tokens = sum(session.prompt_tokens + 12 for session in facts.sessions)
    assert len(watcher.titles) == 3 + facts.exchanged_runs
    assert watcher.n_tokens > n_tokens * len(watcher.titles)


# Its parts.


def test_every_pair_is_told_apart() -> None:
    for count in range(1, 20):
        runs = list(exchanges(count))
        for one, other in itertools.permutations(range(count), 2):
            assert any(one in kept and other not in kept for kept in runs), (count, one, other)


@pytest.mark.parametrize("sessions", range(1, 8))
def test_first_of_several_sessions_has_a_quiet_life(sessions: int) -> None:
    parts = cast_parts(fake_setting(sessions=sessions), "attention")
    assert (not parts[0].incidents) is (sessions > 1)
    assert sum(len(part.incidents) for part in parts) == len(Incident)


def test_comparison_is_of_bits() -> None:
    row = np.array([0.0, 1.0, -2.5], dtype=np.float32)
    assert compare([row, row], [row.copy(), row.copy(), row]).equal
    assert not compare([row], [np.array([-0.0, 1.0, -2.5], dtype=np.float32)]).equal
    assert not compare([row, row], [row]).equal
    moved = compare([row, row], [row, np.array([0.0, -1.0, -2.0], dtype=np.float32)])
    assert moved == attrs.evolve(moved, equal=False, max_abs=2.0, same_top=0.5)


def test_continuation_leaves_out_what_was_cut_off() -> None:
    (prompt,) = random_prompts(16, 1)
    take = Take(Part("1", prompt, 8, frozenset({Incident.TRUNCATED})))
    take.rows = list(np.eye(8, 16, dtype=np.float32))
    take.decoded = [10, 11, 12]
    assert take.continuation == [10, 11, 12]
    take.decoded = [10, 11, 12, 13]
    assert take.continuation == [10, 11]
    # Where it was cut back, it takes the second best.
    assert take.next_token() == take.rows[2].argsort()[-2] != take.rows[2].argmax()
    take.decoded = [10, 11, 12, 13, 14]
    assert take.continuation == [10, 11, 14]
    assert take.next_token() == take.rows[-1].argmax()


def test_prompts_differ_and_are_unequal() -> None:
    def tokenize(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)

    prompts = text_prompts(tokenize, 40)
    assert len({prompt.text for prompt in prompts}) == 40
    assert len({len(prompt.tokens) for prompt in random_prompts(16, 8)}) == 8
    again = zip(random_prompts(9, 20), random_prompts(9, 20), strict=True)
    assert all(np.array_equal(one.tokens, other.tokens) for one, other in again)


async def test_recorder_says_when_a_call_begins_and_what_is_left_in_the_slots() -> None:
    calls: list[NativeCall] = []
    recorder = Recorder(FakeEngine(n_slots=3), calls.append)
    recorder.open()
    held = recorder.hold(1)
    held.may_go_on.set()
    recorder.process([Append(1, 0, np.array([1, 2], dtype=np.int32), "last")])
    await held.begun.wait()
    recorder.close()
    assert recorder.left == [0, 2, 0]
    assert [call.members for call in calls] == [((1, 0, 2, "last"),)]


def test_recorder_closes_what_could_not_be_opened() -> None:
    async def open_and_close(engine: FakeEngine) -> None:
        recorder = Recorder(engine, lambda _: None)
        with pytest.raises(EngineFailed):
            recorder.open()
        recorder.close()
        await trio.lowlevel.checkpoint()

    engine = FakeEngine()
    engine.fail("open", EngineFailed(None, "no memory"))
    trio.run(open_and_close, engine)
    assert engine.closed


def test_text_cannot_steer_the_terminal(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = fake_setting()
    prompts = [attrs.evolve(prompt, text="[red]\x1b[31m\n") for prompt in setting.prompts]
    evil = attrs.evolve(setting, prompts=prompts, to_text=lambda _: "\x1b]0;[/]\x07")
    monkeypatch.setattr(_command, "llama_setting", lambda *_, **__: evil)
    called = shell("demo")
    assert called.status == 0
    assert "[red]·[31m↵" in called.out
    assert {char for char in called.out if not char.isprintable()} == {"\n"}


def test_progress_on_a_terminal() -> None:
    screen = io.StringIO()
    with Progress(Console(file=screen, force_terminal=True, width=100), "{task.completed:.0f} tokens") as progress:
        progress.advance(1)
        for title in ("one", "two"):
            progress.begin(title, 10)
            progress.advance(30)
    assert "one" in screen.getvalue()
    assert "two" in screen.getvalue()
    assert "30 tokens" in screen.getvalue()


# What it refuses.


@pytest.mark.parametrize("kind", UNUSABLE)
def test_unusable_file(shell: Shell, tmp_path: Path, kind: str) -> None:
    assert shell("demo", "--model", unusable(tmp_path, kind)).is_refusal("bad[1].gguf", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sessions", "0"],
        ["--sessions", "257"],
        ["--sessions", "many"],
        ["--tokens", "7"],
        ["--tokens", "1e9"],
        ["--modle", "x"],
        ["extra"],
    ],
    ids=" ".join,
)
def test_wrong_usage(shell: Shell, arguments: Sequence[str]) -> None:
    called = shell("demo", *arguments)
    assert (called.status, called.out) == (2, "")
    assert arguments[-1].lstrip("-") in called.err or arguments[0] in called.err
    assert called.err.rstrip().endswith("hotkv-trio demo --help says what there is.")
