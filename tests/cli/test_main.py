"""The command line itself: how it is called, and what it says where its extra is missing."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hotkv_trio._cli import _output, main
from hotkv_trio.llama._tiny_gguf import build_tiny_gguf
from tests.cli._shell import unusable

if TYPE_CHECKING:
    from tests.cli._shell import Shell

CERTIFICATES = Path(__file__).parents[1] / "serve" / "certificates"


def test_module_says_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotkv_trio", "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    ours, theirs = map(importlib.metadata.version, ("hotkv-trio", "llama-cpp-python"))
    engine = rf"llama\.cpp [0-9a-f]{{7,}} \(llama-cpp-python {re.escape(theirs)}\)"
    assert re.fullmatch(rf"hotkv-trio {re.escape(ours)}, {engine}, (native|python) tap", done.stdout.strip())


def test_help_names_the_commands(shell: Shell) -> None:
    called = shell("--help")
    assert called.status == 0
    assert "demo" in called.out


def test_completion_is_installed(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    called = shell("--install-completion", "--shell", "bash")
    assert called.status == 0
    assert any("inspect" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


def test_unknown_command(shell: Shell) -> None:
    called = shell("dmeo")
    assert called.status == 2
    assert "demo" in called.err
    assert "Next: hotkv-trio --help" in called.err


@pytest.mark.parametrize(
    "option",
    [
        *(["serve", "m.gguf", "--listen", "unix:s", *option] for option in (["--grace", "-1"], ["--idle-ttl", "0"])),
        *(["serve", "m.gguf", "--listen", "unix:s", *option] for option in (["--silence", "0"], ["--budget", "0"])),
        ["recipe", "m.gguf", "--context", "-1"],
        ["plan", "m.gguf", "--shards", "0"],
        ["plan", "m.gguf", "--shards", "2", "--context", "0"],
        *(["top", "--connect", "unix:s", *option] for option in (["--interval", "-1"], ["--looks", "0"])),
    ],
    ids=lambda arguments: " ".join((arguments[0], *arguments[-2:])),
)
def test_a_number_that_makes_no_sense_is_refused_before_anything_is_done(shell: Shell, option: list[str]) -> None:
    called = shell(*option)
    assert called.status == 2
    assert f"for {option[-2]}. Must be >" in called.err
    assert "Next: hotkv-trio" in called.err


def test_bytes_are_written_as_elsewhere(shell: Shell, tmp_path: Path) -> None:
    model = build_tiny_gguf(tmp_path / "m.gguf")
    serving = ("serve", model, "--listen", f"unix:{tmp_path / 's'}", "--context", 256)
    assert shell(*serving, "--budget", "1.5KiB").is_refusal(
        "--budget 1,536 B (1.5 KiB): one session of 256 tokens takes", "--budget "
    )
    unknown = shell(*serving, "--budget", "plenty")
    assert unknown.status == 2
    assert "Invalid value for --budget: 'plenty' is no size in bytes" in unknown.err


@pytest.mark.parametrize("kind", ["absent", "foreign", "cut header", "cut weights"])
def test_a_vocabulary_is_looked_for_in_a_whole_file(shell: Shell, tmp_path: Path, kind: str) -> None:
    model = unusable(tmp_path, kind)
    called = shell("generate", "--route", "unix:s", "--model", model, "--prompt", "a")
    assert called.is_refusal(str(model), "a whole GGUF file")


@pytest.mark.parametrize(
    "options,what,advice",
    [
        (["serve", "--client-authority", "ca.pem"], "without --certificate: there would be no TLS", "--certificate"),
        (["top", "--certificate", "client.pem"], "without --authority: there would be no TLS", "--authority"),
        (["serve", "--certificate", "absent.pem"], "absent.pem", "a certificate chain with its key"),
        (["serve", "--certificate", "ca.pem"], "ca.pem is no PEM file with a certificate chain", "with its key"),
        (["serve", "--certificate", "server.pem", "--client-authority", "absent.pem"], "absent.pem", "an authority's"),
        (["top", "--authority", "absent.pem"], "absent.pem", "an authority's certificate"),
        (["top", "--authority", "README.md"], "README.md is no PEM file with an authority's", "an authority's"),
        (["top", "--authority", "ca.pem", "--certificate", "ca.pem"], "ca.pem is no PEM file", "with its key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_tls_is_never_left_out_and_files_are_named(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, options: list[str], what: str, advice: str
) -> None:
    monkeypatch.chdir(CERTIFICATES)
    command, *rest = options
    where = ["m.gguf", "--listen", "unix:s"] if command == "serve" else ["--connect", "unix:s"]
    assert shell(command, *where, *rest).is_refusal(what, advice)


@pytest.mark.parametrize("command", ["serve", "top"])
def test_a_file_without_tokens_is_not_taken_for_none(shell: Shell, tmp_path: Path, command: str) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# not yet\n", encoding="utf-8")
    where = ["m.gguf", "--listen", "unix:s"] if command == "serve" else ["--connect", "unix:s"]
    assert shell(command, *where, "--token-file", tokens).is_refusal("holds no tokens", "one token of 16 characters")


@pytest.mark.parametrize("name", ["x:x:", "[red]x", "x\x1b[31m"])
def test_what_others_have_named_is_shown_as_it_is(shell: Shell, tmp_path: Path, name: str) -> None:
    """Neither an emoji, nor markup, nor a control sequence."""
    shown = name.replace("\x1b", "·")
    assert shell("inspect", tmp_path / name).is_refusal(shown, "a whole GGUF file")
    assert shell("top", "--connect", f"unix:{tmp_path / name}").is_refusal(shown, "an address")


def test_consoles_are_made_in_one_place() -> None:
    folder = Path(_output.__file__).parent
    made = {path.name for path in folder.rglob("*.py") if re.search(r"\bConsole\(", path.read_text(encoding="utf-8"))}
    assert made == {"_output.py"}


@pytest.mark.parametrize("missing", ["cyclopts", "rich"])
def test_missing_extra(missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in list(sys.modules):
        if name in {"hotkv_trio._cli._app", "hotkv_trio._cli._output"} or name.partition(".")[0] == missing:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["demo"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert (
        said.err == f"hotkv-trio: the command line needs {missing}; run: pip install '.[cli]' in hotkv-trio's folder\n"
    )


def test_other_missing_modules_are_not_taken_for_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hotkv_trio._cli._app", raising=False)
    monkeypatch.setitem(sys.modules, "hotkv_trio._cli.demo._command", None)
    with pytest.raises(ModuleNotFoundError):
        main(["demo"])
