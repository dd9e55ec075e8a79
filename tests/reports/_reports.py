"""Public reports against systems that do this job: who reported it, what ours must show, and which tests show it.

Each is a *kind* of fault.  The tests of it cite the report in their docstrings, by the name given here, on `FakeEngine`
and on a real tiny model.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final, Literal, TypeAlias

import attrs

TESTS: Final = Path(__file__).parents[1]

Kind: TypeAlias = Literal["fake", "llama"]

REPORTS: Final[dict[str, tuple[str, ...]]] = {
    "a fresh slot is as a fresh context": ("llama.cpp #27148", "llama.cpp #27422"),
    "no answer carries another session's content": ("LMCache #4385", "mlx-lm #965", "llama.cpp #10072"),
    "neighbours in a batch change nothing": ("llama.cpp #24962",),
    "a full session ends nobody else": ("llama.cpp #23652", "lemonade #3276"),
    "no KV slot is a typed error": ("ollama #10127",),
    "cancelling queued work leaves the running alone": ("ik_llama #1929",),
    "work of a client who left is not run": ("llama.cpp #13262", "llama.cpp #24496"),
    "an abort while queued leaves the session usable": ("sglang #31765",),
    "a cancel leaks neither lock nor memory": ("sglang #22273", "sglang #22790", "petals #163"),
    "churn ends, in exact zeros, without spinning": ("petals #396", "petals #487", "LMCache #2942"),
    "each waiter's deadline is its own": ("petals #434",),
    "waiters are served in strict order": ("petals #53",),
    "a closing runtime leaves nothing behind": ("petals #154",),
    "no path knows of slot 0 alone": ("mesh-llm #1551",),
    "no slot is lent while a call that names it runs": ("mesh-llm #1150",),
    "a removal that fails loses no slot": ("mesh-llm #581",),
    "a disconnect takes that session only": ("mesh-llm #1523", "llama.cpp #7378"),
    "every entry point asks whether the session can be used": ("mesh-llm #1853",),
    "an append begins at the length": ("mesh-llm #1544",),
    "queued work of a superseded owner does not run": ("mesh-llm #1570",),
    "the length changes after a native success only": ("mesh-llm #1514",),
    "no call takes an id without its epoch": ("LMCache #2878", "LMCache #4825", "LMCache #3770"),
    "an abort is cleaned up at once": ("LMCache #5006",),
    "releasing twice changes nothing": ("LMCache #5095",),
    "shards that evict differently do not disagree": ("LMCache #1467", "exo #1341"),
    "eviction between look-up and use": ("LMCache #4133",),
    "work refreshes the TTL": ("LMCache #4091",),
    "a refused rollback is not ignored": ("llama.cpp PR 28007", "llama.cpp #23206", "llama-cpp-python #2140"),
    "a sliding window lives through many turns": ("llama-cpp-python PR 2180", "llama.rn #396"),
    "quantised keys live through many turns": ("llama.cpp #9383", "llama.cpp #7230"),
    "a prompt longer than a batch is cut into chunks": ("node-llama-cpp #129",),
    "all slots ask for outputs at once": ("llama.cpp #24967",),
    "sizes and ids out of range are refused": (
        "llama.cpp #24098",
        "llama.cpp #16432",
        "llama-cpp-python #2045",
        "llama-cpp-python #2051",
    ),
    "one thread calls llama.cpp": ("llama-cpp-python #471", "llama-cpp-python #1367", "llama-cpp-python #1995"),
    "values that are not finite poison nobody": ("vllm PR 50283",),
    "a retry writes no row twice": ("omlx PR 3414",),
    "a replay under a new epoch is the unbroken run": ("petals #587",),
    "nothing is shared between sessions": ("vllm CVE-2025-46570",),
    "who is evicted, and in what order": ("llama-server test_router",),
    "removing one slot leaves another's state as it was": ("llama.cpp test-save-load-state",),
}

NOT_ON: Final[dict[str, tuple[Kind, str]]] = {
    "quantised keys live through many turns": ("fake", "it has no types of KV"),
    "sizes and ids out of range are refused": ("fake", "it has no sizes that end a process"),
    "removing one slot leaves another's state as it was": ("fake", "about the bytes that llama.cpp would save"),
}
"""Kinds that cannot be made on one of the engines, and why."""

_NATIVE_ROOMS: Final = frozenset({"hostile", "isolation", "llama", "real"})


@attrs.frozen
class Citation:
    """A test, or a module of tests, that cites reports."""

    test: str
    """``room/file.py::name``"""
    engines: frozenset[Kind]
    text: str
    """The docstring, with names that share a project spelt out."""

    def cites(self, report: str) -> bool:
        return re.search(rf"{re.escape(report.lower())}(?!\d)", self.text) is not None


def citations() -> list[Citation]:
    """Return every test with a docstring, and every module of tests with one."""
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        name = path.relative_to(TESTS).as_posix()
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        if text := ast.get_docstring(tree):
            found.append(Citation(name, _engines(name, tree), _spelt(text)))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                text = _spelt(ast.get_docstring(node) or "")
                found.append(Citation(f"{name}::{node.name}", _engines(name, node), text))
    return found


def _engines(name: str, node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[Kind]:
    """Return the engines that a test runs on: by its room, its fixture, or what it names itself."""
    room = name.partition("/")[0]
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    arguments = set() if isinstance(node, ast.Module) else {argument.arg for argument in node.args.args}
    engines: set[Kind] = set()
    if room == "core" or "both" in arguments or "FakeEngine" in names:
        engines.add("fake")
    if room in _NATIVE_ROOMS or "both" in arguments or "LlamaEngine" in names:
        engines.add("llama")
    return frozenset(engines)


def _spelt(text: str) -> str:
    text = re.sub(r"\s+", " ", text).lower()
    # "petals #396, #487" names two of petals.
    while (spelt := re.sub(r"([\w.-]+)( #\d+,? (?:and )?)(#\d+)", r"\1\2\1 \3", text)) != text:
        text = spelt
    return text
