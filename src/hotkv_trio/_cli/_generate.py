"""``hotkv-trio generate``: text from a route of shard servers."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path  # ruff: ignore[typing-only-standard-library-import]
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._tls import client_context

if TYPE_CHECKING:
    from hotkv_trio.llama import Vocabulary
    from hotkv_trio.route import Route


async def generate(
    *,
    route: Annotated[
        list[str], Parameter(consume_multiple=True, help="Addresses of shards, in the order of their layers.")
    ],
    model: Annotated[Path, Parameter(help="The model's GGUF file, for its vocabulary alone.")],
    prompt: Annotated[str, Parameter(help="Text to go on from.")],
    tokens: Annotated[int, Parameter(help="How many to generate at most.")] = 64,
    replay: Annotated[
        Literal["exact", "fast"], Parameter(help="How a history that a shard has lost is put back.")
    ] = "exact",
    token_file: Annotated[Path | None, Parameter(help="A token to show, in a file; else that in HOTKV_TOKEN.")] = None,
    authority: Annotated[Path | None, Parameter(help="PEM file of the authority to trust: TLS.")] = None,
    certificate: Annotated[
        Path | None, Parameter(help="PEM file of a certificate chain and its key, where servers want one.")
    ] = None,
    insecure: Annotated[
        bool, Parameter(negative=(), help="Allow a token to travel in plain text beyond this machine.")
    ] = False,
) -> None:
    """Print the most likely text after a prompt, as it is generated.

    A shard that is lost is waited for, and put back to where it was: the text is the same as if nothing had happened.
    """
    from hotkv_trio.llama import Vocabulary
    from hotkv_trio.route import ShardAddress, open_route
    from hotkv_trio.serve import read_tokens

    with advising(A_WHOLE_MODEL):
        vocabulary = Vocabulary(model)
    try:
        shown = read_tokens(token_file)
        context = client_context(authority, certificate)
        shards = [
            ShardAddress(where=where, token=shown[0] if shown else None, ssl_context=context, insecure=insecure)
            for where in route
        ]
        with advising("the addresses that hotkv-trio serve printed, in the order of the layers, and the same token"):
            async with open_route(shards, replay=replay) as opened:
                await _stream(opened, vocabulary, prompt, tokens)
    finally:
        vocabulary.close()


async def _stream(route: Route, vocabulary: Vocabulary, prompt: str, n_tokens: int) -> None:
    # A character may be cut between two tokens.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    given = [int(token) for token in vocabulary.tokenize(prompt)]
    async with route.open_session() as session, session.generate(given, n_tokens) as generated:
        async for token in generated:
            if vocabulary.is_end(token):
                break
            _write(decoder.decode(vocabulary.detokenize([token])))
    _write(decoder.decode(b"", final=True) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
