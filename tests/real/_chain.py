"""A real model served whole, and by engines of ranges of its layers joined into a chain: one program of calls for both.

The program is text in, text out, with everything that a session does: four prompts of 1, 8, 40 and about 300 tokens,
each prefilled by a call of its own; greedy decoding, the four in one call a step; then two are cut back and
continued with other words, and all go on.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np

from hotkv_trio._engine import Append
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.llama._log import LOGGER, buffer_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from hotkv_trio._engine import EngineInfo, Output, Rows
    from hotkv_trio.llama import Vocabulary

Tokens = list[int]
Layers = tuple[int, int]

N_CTX: Final = 512
_LONG: Final = (
    "The lighthouse keeper wrote a line into his book every evening: the wind, the height of the sea, the ships that"
    " had passed, and whether the lamp had burnt through the night before. On the last page he had drawn a map. "
)
TEXTS: Final = ("The", "The capital of France is the city of", f"Once upon a time, {_LONG}", 8 * _LONG)
LENGTHS: Final = (1, 8, 40, 300)
"""Tokens taken of each text."""
_MAPPED: Final = re.compile(r"Mapped model buffer size = +([0-9.]+) MiB")
_OTHERWISE: Final = {2: " But then the sea", 3: " In the end,"}
"""How the sessions that are cut back go on."""


@attrs.frozen(eq=False)
class Outcome:
    """What a program of calls gave."""

    logits: list[Rows]
    """Of every call, float32 (members, n_vocab)."""
    texts: list[str]
    """Of each session: its last words, and what was generated after them."""
    bytes_per_token: int
    """Of KV, over all engines."""
    shapes: list[str]
    """Of each engine, what it says of itself."""

    @property
    def n_logits(self) -> int:
        """How many were compared."""
        return sum(rows.size for rows in self.logits)

    def equals(self, other: Outcome) -> bool:
        """Whether every bit of every logit, and so the text, is the same."""
        return (
            len(self.logits) == len(other.logits)
            and all(itertools.starmap(np.array_equal, zip(self.logits, other.logits, strict=True)))
            and self.texts == other.texts
        )


class Chain:
    """Open engines that each take what the one before gives."""

    def __init__(self, engines: Sequence[LlamaEngine]) -> None:
        self.engines = engines
        self.lengths = [0] * len(TEXTS)

    def append(self, members: Sequence[tuple[int, Tokens]]) -> Rows:
        """Append tokens to slots, one call an engine; return the logits of each member's last token."""
        data: list[npt.NDArray[Any]] = [np.asarray(tokens, dtype=np.int32) for _, tokens in members]
        for engine in self.engines:
            output: Output = "last" if engine is self.engines[-1] else "all"
            group = [
                Append(slot, self.lengths[slot], part, output) for (slot, _), part in zip(members, data, strict=True)
            ]
            data = list(engine.process(group))
        for slot, tokens in members:
            self.lengths[slot] += len(tokens)
        return np.concatenate(data)

    def truncate(self, slot: int, length: int) -> None:
        """Cut a slot back, in every engine."""
        assert all(engine.truncate(slot, length) for engine in self.engines)
        self.lengths[slot] = length


@contextlib.contextmanager
def opened(path: Path, ranges: Sequence[Layers | None], **options: Any) -> Generator[tuple[Chain, list[int]]]:
    """Open a chain of engines; yield it, and the KV bytes per token of each."""
    with contextlib.ExitStack() as stack:
        engines = []
        infos = []
        for layers in ranges:
            engine = LlamaEngine(path, layers=layers, n_slots=len(TEXTS), n_ctx=N_CTX, threads=1, **options)
            stack.callback(engine.close)
            infos.append(engine.open())
            engines.append(engine)
        yield Chain(engines), [info.bytes_per_token for info in infos]


@attrs.frozen(eq=False)
class Loaded:
    """What an engine and llama.cpp's log said when a range of layers was loaded."""

    info: EngineInfo
    kv_mib: float
    """By the log."""
    weights_mib: float
    """By the log, in the mapped file; without copies that llama.cpp packs otherwise for the processor."""


def load(path: Path, layers: Layers | None, **options: Any) -> Loaded:
    """Open an engine, close it, and return what was said of bytes."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    engine = LlamaEngine(path, layers=layers, **options)
    try:
        info = engine.open()
    finally:
        engine.close()
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
    mapped = [float(found[1]) for line in lines if (found := _MAPPED.search(line))]
    return Loaded(info, sum(buffer_sizes(lines, "KV")), sum(mapped))


def run(
    path: Path, ranges: Sequence[Layers | None], vocabulary: Vocabulary, n_decodes: int = 16, **options: Any
) -> Outcome:
    """Run the program over a chain of engines, each of a range of layers; ``[None]``: the whole model."""
    with opened(path, ranges, **options) as (chain, bytes_per_token):
        logits, generated = _program(chain, vocabulary, n_decodes)
        shapes = [repr(engine) for engine in chain.engines]
    texts = [vocabulary.detokenize(tokens).decode(errors="replace") for tokens in generated]
    return Outcome(logits, texts, sum(bytes_per_token), shapes)


def _program(chain: Chain, vocabulary: Vocabulary, n_decodes: int) -> tuple[list[Rows], list[Tokens]]:
    prompts = [vocabulary.tokenize(text).tolist()[:n] for text, n in zip(TEXTS, LENGTHS, strict=True)]
    said = [tokens[-8:] for tokens in prompts]
    logits: list[Rows] = []
    following = [0] * len(prompts)

    def call(members: Sequence[tuple[int, Tokens]]) -> None:
        rows = chain.append(members)
        logits.append(rows)
        for (slot, _), row in zip(members, rows, strict=True):
            following[slot] = int(row.argmax())

    def decode() -> None:
        for slot, token in enumerate(following):
            said[slot].append(token)
        call([(slot, [token]) for slot, token in enumerate(following)])

    for slot, tokens in enumerate(prompts):
        call([(slot, tokens)])
    _times(n_decodes, decode)
    for slot, text in _OTHERWISE.items():
        # Half of what it made of its prompt stays.
        back = n_decodes // 2
        chain.truncate(slot, chain.lengths[slot] - back)
        tokens = vocabulary.tokenize(text, add_special=False).tolist()
        said[slot][-back:] = tokens
        call([(slot, tokens)])
    _times(n_decodes, decode)
    return logits, said


def _times(count: int, act: Callable[[], None]) -> None:
    for _ in range(count):
        act()
