"""``hotkv-trio generate``: what it refuses before it calls anybody, and what it says while a shard is away."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
import trio

from hotkv_trio import open_runtime
from hotkv_trio._cli._generate import _told_of_outages
from hotkv_trio.route import open_route
from hotkv_trio.serve import ConnectionLost
from hotkv_trio.testing import FakeEngine, build_tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from hotkv_trio import Runtime, SessionKey
    from hotkv_trio._engine import EngineInfo
    from hotkv_trio.route._hop import Hop, HopSession
    from tests.cli._shell import Shell


@pytest.mark.parametrize("tokens", ["0", "-4"])
def test_a_number_of_tokens_that_makes_no_sense(shell: Shell, tokens: str) -> None:
    called = shell("generate", "--route", "unix:s", "--model", "m.gguf", "--prompt", "a", "--tokens", tokens)
    assert called.status == 2
    assert "for --tokens. Must be > 0" in called.err


def test_a_prompt_without_tokens_is_refused_before_anybody_is_called(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotkv_trio.llama import Vocabulary

    # This vocabulary begins every text with a token; not all do.
    monkeypatch.setattr(Vocabulary, "tokenize", lambda self, text: [*text.encode()])
    model = build_tiny_gguf(tmp_path / "m.gguf")
    options = ("--route", f"unix:{tmp_path}/absent", "--model", model)
    assert shell("generate", *options, "--prompt", "").is_refusal("the prompt has no tokens", "--prompt")
    assert shell("generate", *options, "--prompt", "a").is_refusal("cannot connect to", "the addresses")


@pytest.mark.parametrize("option", [["--token-file", "t"], ["--insecure"]], ids=" ".join)
def test_what_a_deployment_says_itself_is_not_ignored(shell: Shell, option: list[str]) -> None:
    called = shell("generate", "--cluster", "c", "--model", "m.gguf", "--prompt", "a", *option)
    assert called.is_refusal("go with --route, not with --cluster", "a token of its own")


@attrs.define(eq=False)
class _OftenAway:
    """A shard that is away whenever it is called, twice."""

    runtime: Runtime
    nursery: trio.Nursery
    calls: int = 0

    def open_hop(self, nursery: trio.Nursery) -> Hop:
        return self

    async def info(self) -> EngineInfo:
        return self.runtime.info

    async def open(self, key: SessionKey) -> HopSession:
        self.calls += 1
        if self.calls % 3:
            raise ConnectionLost("away")
        session: HopSession = await self.nursery.start(self.runtime.serve_session, key)
        return session


async def test_an_outage_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with open_runtime(FakeEngine()) as runtime, trio.open_nursery() as nursery:
        async with open_route([_OftenAway(runtime, nursery)], jitter=lambda: 0) as route:
            for _ in range(2):
                with _told_of_outages():
                    async with route.open_session() as session, session.generate([1, 2], 2) as tokens:
                        assert len([token async for token in tokens]) == 2
                assert capsys.readouterr().err.count("a shard is lost") == 1
        nursery.cancel_scope.cancel()
