"""The command: its arguments, the model they name, and what becomes of the facts."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from hotkv_trio._cli._arguments import AsJson, to_path
from hotkv_trio._cli._output import new_console, print_json
from hotkv_trio._cli._progress import Progress
from hotkv_trio._cli.demo._display import show
from hotkv_trio._cli.demo._prompts import random_prompts, text_prompts
from hotkv_trio._cli.demo._stage import Setting
from hotkv_trio._cli.demo._stages import run_demo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotkv_trio.llama import Vocabulary

FEWEST_TOKENS = 8
"""So that everything that may befall a session has its place between two of them."""


async def demo(
    *,
    model: Annotated[Path | None, Parameter(converter=to_path)] = None,
    sessions: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=256))] = 4,
    tokens: Annotated[int, Parameter(validator=validators.Number(gte=FEWEST_TOKENS, lte=4096))] = 24,
    json_: AsJson = False,
) -> int:
    """Run several sessions on one model, and hold each against its run alone, bit for bit.

    Each session runs alone; then all run together in exact mode, while one is cut back, one evicted, one superseded
    and one cancelled; then together in grouped mode, again and again with other neighbours. Exit status 1 if anything
    differs that should not.

    Parameters
    ----------
    model
        A GGUF file; without one a tiny random model is built.
    sessions
        How many.
    tokens
        How many each generates.
    """
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(new_console(stderr=True), "{task.completed:.0f} tokens"))
        threads = None
        if model is None:
            from hotkv_trio.llama._tiny_gguf import build_tiny_gguf

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hotkv-trio-"))
            model = build_tiny_gguf(Path(folder) / "tiny.gguf")
            # There is less to compute in a call than threads lose in waiting for each other.
            threads = 1
        facts = await run_demo(llama_setting(model, sessions, tokens, stack, threads=threads), progress)
    if json_:
        print_json(facts.as_dict())
    else:
        show(facts, new_console())
    return 0 if facts.ok else 1


def llama_setting(
    path: Path, n_sessions: int, n_tokens: int, stack: ExitStack, *, threads: int | None = None
) -> Setting:
    """Return the demo's setting for a GGUF file; what it needs to be open is closed with ``stack``.

    Args:
        path: the file.
        n_sessions: how many sessions.
        n_tokens: how many each generates.
        stack: closes what the setting needs open.
        threads: of a native call; None: the engine's own choice.

    Raises:
        InvalidInput: the file is no model that can be served.
    """
    from hotkv_trio.llama import LlamaEngine, Vocabulary
    from hotkv_trio.llama._facts import read_model_facts

    facts = read_model_facts(path)
    to_text = None
    if facts.tokenizer == "none":
        prompts = random_prompts(facts.n_vocab, n_sessions)
    else:
        vocabulary = Vocabulary(path)
        stack.callback(vocabulary.close)
        prompts = text_prompts(vocabulary.tokenize, n_sessions)
        to_text = _detokenizer(vocabulary)
    longest = max(len(prompt.tokens) for prompt in prompts)
    return Setting(
        model=path.name,
        make_engine=lambda: LlamaEngine(path, n_slots=n_sessions, n_ctx=longest + n_tokens, threads=threads),
        prompts=prompts,
        n_decodes=n_tokens,
        to_text=to_text,
    )


def _detokenizer(vocabulary: Vocabulary) -> Callable[[Sequence[int]], str]:
    def to_text(tokens: Sequence[int]) -> str:
        spoken = list(itertools.takewhile(lambda token: not vocabulary.is_end(token), tokens))
        # Several tokens may make one character, and the last of them be missing.
        return vocabulary.detokenize(spoken).decode(errors="replace")

    return to_text
