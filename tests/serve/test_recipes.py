"""The recipes of ``docs/recipes.md`` run: what stands there, with other ports, paths and names.

Its Python is run by ``tests/docs/test_code.py``, as that of every page.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hotkv_trio.testing import build_tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
CERTIFICATES = Path(__file__).parent / "certificates"
TOKEN = "the-token-of-a-recipe"


def blocks(language: str) -> list[str]:
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```$", PAGE)


def script(first_line: str) -> str:
    (found,) = [block for block in blocks("sh") if block.startswith(f"# {first_line}\n")]
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, and a ``hotkv-trio`` on the path."""
    build_tiny_gguf(tmp_path / "model.gguf")
    command = tmp_path / "bin" / "hotkv-trio"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hotkv_trio "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": "200",
    }


def start(processes: list[subprocess.Popen[str]], folder: Path, command: list[str]) -> subprocess.Popen[str]:
    """Start a server; it accepts clients when this returns."""
    process = subprocess.Popen(
        [*command, "--context", "256", "--threads", "1"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    processes.append(process)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("serving layers "), process.stderr and process.stderr.read()
    return process


def stop(process: subprocess.Popen[str]) -> None:
    """Stop a server as its recipe's owner would, which drains it."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the recipe makes certificates with openssl")
def test_two_machines(folder: Path, started: list[subprocess.Popen[str]]) -> None:
    ports = {"7001": str(free_port()), "7002": str(free_port())}

    def here(text: str) -> str:
        """Return a recipe's text with both machines here, and a model of four layers."""
        text = text.replace("DNS:$name", "DNS:localhost").replace("--layers 0:15", "--layers 0:2")
        text = text.replace("--layers 15:", "--layers 2:").replace("'The", "'a").replace(" 0.0.0.0:", " 127.0.0.1:")
        text = re.sub(r"shard-[ab]\.example:(\d+)", r"localhost:\1", text)
        return re.sub(r"\b700[12]\b", lambda match: ports[match[0]], text)

    def run(text: str) -> str:
        return subprocess.run(
            ["bash", "-euc", text], cwd=folder, env=environment(folder), capture_output=True, text=True, check=True
        ).stdout

    run(here(script("once")))
    assert (folder / "tokens").stat().st_mode & 0o777 == 0o600
    run(here(script("for each machine")))
    assert (folder / "shard-a.example.pem").stat().st_mode & 0o777 == 0o600
    servers = [
        start(started, folder, shlex.split(here(script(f"on {name}")), comments=True))
        for name in ("shard-a.example", "shard-b.example")
    ]
    said = run(here(script("anywhere")))
    assert said.endswith("\n")
    whole = [*["hotkv-trio", "serve", "model.gguf", "--listen"], f"unix:{folder / 'whole.sock'}"]
    start(started, folder, whole)
    route = f"--route unix:{folder / 'whole.sock'} --model"
    alone = re.sub(r"--route.*?--model", lambda _: route, here(script("anywhere")), flags=re.DOTALL)
    alone = re.sub(r"--token-file \S+ --authority \S+", "", alone)
    assert run(alone) == said
    with pytest.raises(subprocess.CalledProcessError):
        run(here(script("anywhere")).replace("--authority authorities.pem", f"--authority {CERTIFICATES / 'ca.pem'}"))
    for server in servers:
        stop(server)


def prepared(folder: Path, text: str) -> str:
    """Return a command's text with the paths of this machine."""
    secrets = folder / "secrets"
    secrets.mkdir(exist_ok=True)
    (secrets / "tokens").write_text(TOKEN, encoding="utf-8")
    shutil.copy(CERTIFICATES / "server.pem", secrets / "certificate.pem")
    for old, new in (
        ("/opt/hotkv/bin", folder / "bin"),
        ("/srv/models", folder),
        ("/models", folder),
        ("${CREDENTIALS_DIRECTORY}", secrets),
        ("/run/secrets", secrets),
        ("0.0.0.0:7001", f"127.0.0.1:{free_port()}"),
    ):
        text = text.replace(old, str(new))
    return text


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    (block,) = blocks("ini")
    parser.read_string(block)
    return parser


def test_the_units_command_serves_and_drains(folder: Path, started: list[subprocess.Popen[str]]) -> None:
    service = unit()["Service"]
    metrics = f"127.0.0.1:{free_port()}"
    command = prepared(folder, service["ExecStart"]).replace("127.0.0.1:9100", metrics)
    process = start(started, folder, shlex.split(command))
    stop(process)
    grace = float(re.findall(r"--grace (\d+)", command)[0])
    assert float(service["TimeoutStopSec"]) > grace


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(folder: Path) -> None:
    (block,) = blocks("ini")
    path = folder / "hotkv.service"
    path.write_text(block.replace("/opt/hotkv/bin", str(folder / "bin")), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path],
        capture_output=True,
        text=True,
        check=False,
    )
    # What it says of this machine's other units, or lack of them, is not of this one.
    assert "hotkv" not in done.stderr, done.stderr
    assert done.returncode == 0 or "hotkv" not in done.stdout + done.stderr


def instructions() -> list[tuple[str, str]]:
    (block,) = blocks("dockerfile")
    lines = block.replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line]


def last(kind: str) -> str:
    return [text for name, text in instructions() if name == kind][-1]


def test_the_containers_commands_serve_are_healthy_and_drain(
    folder: Path, started: list[subprocess.Popen[str]]
) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    entry = json.loads(last("ENTRYPOINT")) + json.loads(last("CMD"))
    process = start(started, folder, [prepared(folder, word).replace("127.0.0.1:9100", metrics) for word in entry])
    healthy = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    healthy = [prepared(folder, word).replace("127.0.0.1:9100", metrics) for word in healthy]
    assert subprocess.run(healthy, env=environment(folder), check=False).returncode == 0
    stop(process)
    began = time.monotonic()
    done = subprocess.run(healthy, env=environment(folder), capture_output=True, check=False)
    assert done.returncode != 0
    assert time.monotonic() - began < 10


def test_the_container_file_builds_on_what_there_is() -> None:
    known = {"FROM", "RUN", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} == known
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(n for n, name in enumerate(names) if name == "RUN")
    assert last("STOPSIGNAL") == "SIGTERM"
    assert last("EXPOSE") in last("CMD")
    runs = [text for name, text in instructions() if name == "RUN"]
    for text in runs:
        assert subprocess.run(["bash", "-nc", text], check=False).returncode == 0
    (extras,) = re.findall(r"/src\[(.*?)\]", "\n".join(runs))
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [extra for extra in extras.split(",") if f"\n{extra} = [" not in pyproject] == []
    assert (ROOT / "constraints.txt").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("docker") is None
    or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0,
    reason="needs a docker daemon",
)
def test_the_container_is_built(tmp_path: Path) -> None:
    (block,) = blocks("dockerfile")
    path = tmp_path / "Dockerfile"
    path.write_text(block, encoding="utf-8")
    subprocess.run(["docker", "build", "--quiet", "--file", path, ROOT], check=True)
