"""``hotkv-trio bench``: every suite runs and says what it should; the figures themselves are not judged here."""

from __future__ import annotations

import stat
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import trio
from rich.console import Console

from hotkv_trio import EngineFailed, InvalidInput
from hotkv_trio._cli.bench import _server
from hotkv_trio._cli.bench._findings import Bar, Curve, Findings, Spread, number, take_turns
from hotkv_trio._cli.bench._setting import decode_together
from hotkv_trio._cli.bench._show import draw, show_all
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hotkv_trio._session import Session
    from tests.cli._shell import Shell

COLUMNS = {
    "core": {"us each", "owner thread", "inline"},
    "overhead": {"N", "of the loop", "of one without copies", "exact, of grouped"},
    "prefill": {"tokens", "of the loop"},
    "ragged": {"active", "of consecutive", "lowest", "native calls a step"},
    "mixed": {"decoders", "chunk", "p50 ms", "p95 ms", "p99 ms", "of one after the other"},
    "cancel": {"cancelled while", "p50 / step", "p99 / step"},
    "memory": {"layers", "slots", "accounted MiB", "llama.cpp's log MiB", "resident MiB"},
    "peers": {"N", "who", "tok/s in all", "hotkv-trio of it"},
}


def numbers_in(cell: Any) -> list[float]:
    if isinstance(cell, dict):
        return [cell["low"], cell["median"], cell["high"]]
    return [cell] if isinstance(cell, int | float) else []


@pytest.mark.parametrize("suite", COLUMNS)
def test_suite_measures_on_a_tiny_model(shell: Shell, suite: str) -> None:
    called = shell("bench", "--suite", suite, "--quick", "--json")
    assert called.status == 0, called
    assert called.err.startswith(f"{suite}: ")
    document = called.document
    assert document["on"]["model"] == "tiny random model"
    assert {"processor", "packages", "llama_cpp_commit", "load_before", "load_after"} <= set(document["on"])
    (found,) = document["suites"]
    assert found["suite"] == suite
    assert found["rows"]
    for row in found["rows"]:
        assert set(row) >= COLUMNS[suite]
        assert list(row) == list(found["rows"][0])
    measured = [x for row in found["rows"] for cell in row.values() for x in numbers_in(cell)]
    assert measured
    assert min(measured) >= 0
    assert found["bars"]
    assert all(bar["measured"] >= 0 for bar in found["bars"])
    assert found["seconds"] > 0


def test_bytes_are_those_that_llama_cpp_reports(shell: Shell) -> None:
    (found,) = shell("bench", "--suite", "memory", "--quick", "--json").document["suites"]
    assert all(row["accounted MiB"] == pytest.approx(row["llama.cpp's log MiB"], abs=0.01) for row in found["rows"])
    assert all(row["resident MiB"] > row["accounted MiB"] for row in found["rows"])
    by_case = {(row["layers"], row["slots"]): row["accounted MiB"] for row in found["rows"]}
    assert by_case["0:4", 2] == 2 * by_case["0:4", 1] == 2 * by_case["0:2", 2]


def test_tables_and_plots(shell: Shell, tmp_path: Path) -> None:
    called = shell("bench", "--suite", "prefill", "ragged", "--quick", "--plots", tmp_path / "new" / "plots")
    assert called.status == 0, called
    assert called.err.splitlines() == [
        "prefill: a prompt against a bare loop",
        "ragged: some of the hot sessions active",
    ]
    assert "prefill: A prompt" in called.out
    assert "asked" not in called.out
    assert "ragged: 2 of 4 hot sessions active" in called.out
    assert max(map(len, called.out.splitlines())) <= 80
    (plot,) = (tmp_path / "new" / "plots").iterdir()
    assert plot.name == "prefill.png"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("cuts,middle", [((), None), ((1, 3), 1)])
def test_memory_of_a_model_that_cannot_be_cut_in_the_middle(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, cuts: tuple[int, ...], middle: int | None
) -> None:
    def valid_cuts(_facts: object) -> tuple[int, ...]:
        if not cuts:
            raise InvalidInput("cannot be served by ranges of layers")
        return cuts

    monkeypatch.setattr("hotkv_trio._cli.bench._memory.valid_cuts", valid_cuts)
    (found,) = shell("bench", "--suite", "memory", "--quick", "--json").document["suites"]
    halves = [] if middle is None else [f"0:{middle}", f"{middle}:4"]
    assert list(dict.fromkeys(row["layers"] for row in found["rows"])) == ["0:4", *halves]


def test_an_engine_that_cannot_be_opened_for_its_memory(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    called = shell("bench", "--suite", "memory", "--quick")
    assert called.status == 2
    assert "the process that opens layers 0:4 failed" in called.err


def test_model_of_ones_own(shell: Shell, tmp_path: Path) -> None:
    path = build_tiny_gguf(tmp_path / "own.gguf", n_layer=1, n_vocab=64)
    called = shell("bench", "--suite", "prefill", "--quick", "--json", "--model", path, "--threads", 2)
    assert called.status == 0, called
    assert (called.document["on"]["model"], called.document["on"]["threads"]) == ("own.gguf", 2)


@pytest.mark.parametrize("quick", [False, True])
def test_only_a_whole_run_of_a_model_is_held_against_the_targets(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    short = Findings(suite="core", title="t", caption="c", rows=[{"a": 1}], bars=[Bar.at_most("x", 1.3, 1.2)])

    async def measure(_: object) -> Findings:
        await trio.lowlevel.checkpoint()
        return short

    monkeypatch.setattr("hotkv_trio._cli.bench._command._suites", lambda: {"core": measure})
    path = build_tiny_gguf(tmp_path / "own.gguf", n_layer=1, n_vocab=64)
    called = shell("bench", "--model", path, *(["--quick"] if quick else []))
    assert called.status == 0
    assert ("What is asked of SmolLM2-135M" in called.out) is ("NO" in called.out.split()) is not quick
    document = shell("bench", "--model", path, "--json", *(["--quick"] if quick else [])).document
    assert document["suites"][0]["bars"][0]["met"] is False


def test_wrong_arguments(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shell("bench", "--suite", "speed").status == 2
    assert shell("bench", "--threads", 0).status == 2
    for option in ("--model", "--llama-server", "--llama-batched-bench"):
        absent = shell("bench", "--quick", option, tmp_path / "absent")
        assert absent.status == 2
        assert "Next: try " in absent.err
        assert "core: " not in absent.err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert shell("bench", "--quick", "--plots", tmp_path).is_refusal(
        "matplotlib", "pip install '.[cli,bench]' in hotkv-trio's folder"
    )


def test_other_tokens_than_the_bare_loop_end_it(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = decode_together

    async def wrong(sessions: Sequence[Session], tokens: Sequence[int], n_steps: int) -> tuple[float, list[int]]:
        seconds, ended = await decode(sessions, tokens, n_steps)
        return seconds, [token + 1 for token in ended]

    monkeypatch.setattr("hotkv_trio._cli.bench._overhead.decode_together", wrong)
    called = shell("bench", "--suite", "overhead", "--quick", "--json")
    assert called.status == 2
    assert "the runtime decoded other tokens than the bare loop" in called.err


# Its parts.


def test_spread_and_numbers() -> None:
    spread = Spread.of([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (spread.median, spread.low, spread.high, spread.n) == (3.0, 2.0, 4.0, 5)
    assert Spread.of_ratios([2.0, 6.0], [1.0, 2.0]).median == pytest.approx(2.5)
    assert [number(x) for x in (0.0, 0.98543, 1.25, 12.34, 123.4, 12345.6, 7)] == [
        "0.000",
        "0.985",
        "1.25",
        "12.3",
        "123",
        "12,346",
        "7",
    ]
    assert str(spread) == "3.00 [2.00-4.00]"


def test_bars() -> None:
    assert Bar.at_least("x", 0.98, 0.98).met
    assert not Bar.at_least("x", 0.97, 0.98).met
    assert Bar.at_most("x", 1.2, 1.2).met
    assert not Bar.at_most("x", 1.3, 1.2).met
    findings = Findings(suite="s", title="t", caption="c", rows=[{"a": 1}], bars=[Bar.at_most("x", 1.3, 1.2)])
    console = Console(width=80)
    with console.capture() as captured:
        show_all([findings], console, with_bars=True)
    assert "NO" in captured.get().split()


def test_curve_is_drawn(tmp_path: Path) -> None:
    lines = {"one": [(1, Spread.of([1.0])), (2, Spread.of([2.0]))]}
    path = draw(Curve("name", "title", "x", "y", lines, bound=1.5), tmp_path)
    assert path == tmp_path / "name.png"
    assert path.read_bytes().startswith(b"\x89PNG")


async def test_arms_take_turns_in_both_orders() -> None:
    order: list[str] = []

    async def arm(name: str) -> float:
        await trio.lowlevel.checkpoint()
        order.append(name)
        return len(order)

    advanced: list[None] = []
    samples = await take_turns({"a": lambda: arm("a"), "b": lambda: arm("b")}, 3, lambda: advanced.append(None))
    assert order == ["b", "a", "a", "b", "b", "a"]
    assert samples == {"a": [2, 3, 6], "b": [1, 4, 5]}
    assert len(advanced) == 3


SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, said):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"tokens_evaluated": len(asked["prompt"]), "tokens_predicted": asked["n_predict"] - LAZY})
    def log_message(self, *_):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""

BATCHED_BENCH = """
import sys
assert sys.argv[sys.argv.index("-npl") + 1] in "14"
print("loading")
print('{"pp": 32, "speed": 1000.0}')
"""


def program(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(code)}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_peers_with_programs(shell: Shell, tmp_path: Path) -> None:
    called = shell(
        *("bench", "--suite", "peers", "--quick", "--json"),
        *("--llama-server", program(tmp_path / "server", SERVER.replace("LAZY", "0"))),
        *("--llama-batched-bench", program(tmp_path / "bench", BATCHED_BENCH)),
    )
    assert called.status == 0, called
    (found,) = called.document["suites"]
    peers = ["hotkv-trio", "llama-cpp-python", "llama-server", "llama-batched-bench"]
    assert [row["who"] for row in found["rows"] if row["N"] == 1] == peers
    speeds = [row["tok/s in all"]["median"] for row in found["rows"] if row["who"] == "llama-batched-bench"]
    assert speeds == [pytest.approx(1000.0)] * 2
    assert found["bars"][0]["what"] == "N = 4: of llama-server"


async def test_server_that_does_less_is_noticed(tmp_path: Path) -> None:
    lazy = program(tmp_path / "server", SERVER.replace("LAZY", "1"))
    with trio.fail_after(60):
        with pytest.RaisesGroup(pytest.RaisesExc(EngineFailed, match="other work")):
            async with _server.open_llama_server(lazy, tmp_path, n_sessions=1, n_ctx=256, threads=1) as server:
                await server.generate([[1, 2, 3]], 4)


async def test_server_that_dies_at_work_is_noticed(tmp_path: Path) -> None:
    reset = 'self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))'
    dying = SERVER.replace("asked = ", f"import os, socket, struct; {reset}; os._exit(1)\n        asked = ")
    with trio.fail_after(60):
        with pytest.RaisesGroup(pytest.RaisesExc(EngineFailed, match="POST /completion"), flatten_subgroups=True):
            async with _server.open_llama_server(
                program(tmp_path / "server", dying), tmp_path, n_sessions=1, n_ctx=256, threads=1
            ) as server:
                await server.generate([list(range(1000))], 4)


async def test_failing_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = program(tmp_path / "broken", "raise SystemExit(3)")
    with pytest.raises(EngineFailed, match="llama-batched-bench failed"):
        await _server.batched_bench(broken, tmp_path, n_sessions=1, prompt=1, tokens=1, threads=1)
    mute = program(tmp_path / "mute", "import time\ntime.sleep(600)")
    for path, patience, said in ((broken, 60, "ended before it was ready"), (mute, 0.3, "not ready after")):
        monkeypatch.setattr(_server, "_PATIENCE", patience)
        with pytest.RaisesGroup(pytest.RaisesExc(EngineFailed, match=said)):
            async with _server.open_llama_server(path, tmp_path, n_sessions=1, n_ctx=256, threads=1):
                pytest.fail("it is not up")
