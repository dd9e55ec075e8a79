"""``hotkv-trio generate``: text from a route of shard servers."""

from __future__ import annotations

import codecs
import contextlib
import logging
import sys
from pathlib import Path  # ruff: ignore[typing-only-standard-library-import]
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from hotkv_trio._cli._advice import A_WHOLE_MODEL, WHO_MAY, advising
from hotkv_trio._cli._arguments import OptionalPath, Some, to_path
from hotkv_trio._cli._tls import client_context
from hotkv_trio._errors import ContextFull, EngineFailed, InvalidInput

if TYPE_CHECKING:
    import ssl
    from collections.abc import Generator, Sequence

    from hotkv_trio.llama import Vocabulary
    from hotkv_trio.route import Route, ShardAddress
    from hotkv_trio.route._hop import Shard

_SERVERS = (
    "the addresses that hotkv-trio serve printed, in the order of the layers, the same token, and --authority if"
    " servers have a --certificate"
)
_SHORTER = "a shorter --prompt, fewer --tokens, or servers with a larger --context"
_THEIRS = "the --model that the servers were given: its vocabulary is theirs"
_AWAY = frozenset({"connection_lost", "runtime_closed", "shard_draining"})
"""What a route says of a shard that has to come back first."""


async def generate(
    *,
    route: Annotated[
        list[str] | None,
        Parameter(consume_multiple=True, negative=(), help="Addresses of shards, in the order of their layers."),
    ] = None,
    cluster: Annotated[str | None, Parameter(help="Instead: a deployment of hotkv-trio cluster, by its name.")] = None,
    model: Annotated[Path, Parameter(converter=to_path, help="The model's GGUF file, for its vocabulary alone.")],
    prompt: Annotated[str, Parameter(help="Text to go on from.")],
    tokens: Annotated[Some, Parameter(help="How many to generate at most.")] = 64,
    replay: Annotated[
        Literal["exact", "fast"], Parameter(help="How a history that a shard has lost is put back.")
    ] = "exact",
    token_file: Annotated[OptionalPath, Parameter(help="A token to show, in a file; else that in HOTKV_TOKEN.")] = None,
    authority: Annotated[OptionalPath, Parameter(help="PEM file of the authority to trust: TLS.")] = None,
    certificate: Annotated[
        OptionalPath, Parameter(help="PEM file of a certificate chain and its key, where servers want one.")
    ] = None,
    insecure: Annotated[
        bool, Parameter(negative=(), help="Allow a token to travel in plain text beyond this machine.")
    ] = False,
) -> None:
    """Print the most likely text after a prompt, as it is generated.

    A shard that is lost is waited for, for about 45 seconds, and put back to where it was: the text is the same as if
    nothing had happened.
    """
    from hotkv_trio.llama import Vocabulary
    from hotkv_trio.llama._gguf import read_gguf
    from hotkv_trio.route import open_route

    if (route is None) == (cluster is None):
        with advising("--route ADDRESS..., as hotkv-trio serve printed them, or --cluster NAME"):
            raise InvalidInput("either a route or a cluster's deployment is needed")
    if cluster is not None and (token_file is not None or insecure):
        with advising("neither: a deployment has a token of its own, and says whether plain text is allowed"):
            raise InvalidInput("--token-file and --insecure go with --route, not with --cluster")
    with advising(A_WHOLE_MODEL):
        # For its words, where the file is none: llama.cpp's speak of other things.
        read_gguf(model)
        vocabulary = Vocabulary(model)
    try:
        with advising("a --prompt of some text"):
            given = [int(token) for token in vocabulary.tokenize(prompt)]
            if not given:
                raise InvalidInput("the prompt has no tokens")
        context = client_context(authority, certificate)
        shards: Sequence[Shard] = (
            _addresses(route or [], token_file, context, insecure=insecure)
            if cluster is None
            else await _deployed(cluster, context)
        )
        with (
            advising(_SERVERS),
            advising(_SHORTER, only=ContextFull),
            advising("the log of the server that failed, which says more", only=EngineFailed),
        ):
            async with open_route(shards, replay=replay) as opened:
                _check_vocabulary(opened, vocabulary)
                _check_room(opened, given)
                with _told_of_outages():
                    await _stream(opened, vocabulary, given, tokens)
    finally:
        vocabulary.close()


def _addresses(
    route: Sequence[str], token_file: Path | None, context: ssl.SSLContext | None, *, insecure: bool
) -> list[ShardAddress]:
    from hotkv_trio.route import ShardAddress
    from hotkv_trio.serve import read_tokens

    with advising(WHO_MAY):
        shown = read_tokens(token_file)
    token = shown[0] if shown else None
    return [ShardAddress(where=where, token=token, ssl_context=context, insecure=insecure) for where in route]


async def _deployed(name: str, context: ssl.SSLContext | None) -> Sequence[Shard]:
    from hotkv_trio.ray import deployed_shards

    with advising(f"hotkv-trio cluster status {name}, on a machine that has joined the Ray cluster"):
        return await deployed_shards(name, ssl_context=context)


def _check_vocabulary(route: Route, vocabulary: Vocabulary) -> None:
    theirs, ours = route.infos[0].n_vocab, vocabulary.n_vocab
    if theirs != ours:
        with advising(_THEIRS):
            raise InvalidInput(f"the vocabulary of --model has {ours:,} tokens, that of the shards {theirs:,}")


def _check_room(route: Route, given: Sequence[int]) -> None:
    room = min(info.n_ctx_seq for info in route.infos)
    if len(given) > room:
        with advising(_SHORTER):
            raise InvalidInput(f"the prompt has {len(given)} tokens; a session on these shards holds {room}")


@contextlib.contextmanager
def _told_of_outages() -> Generator[None]:
    """Say on stderr, once an outage, that a shard is waited for: the route logs each attempt."""

    def tell(record: logging.LogRecord) -> bool:
        if getattr(record, "attempt", 0) == 2 and getattr(record, "code", "") in _AWAY:
            sys.stderr.write("\nhotkv-trio: a shard is lost, and is called again until it is back\n")
        return record.levelno >= logging.WARNING

    logger = logging.getLogger("hotkv_trio")
    level = logger.level
    logger.addFilter(tell)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(tell)


async def _stream(route: Route, vocabulary: Vocabulary, given: Sequence[int], n_tokens: int) -> None:
    # A character may be cut between two tokens.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        async with route.open_session() as session, session.generate(given, n_tokens) as generated:
            async for token in generated:
                if vocabulary.is_end(token):
                    break
                _write(decoder.decode(vocabulary.detokenize([token])))
    finally:
        # After an error, too: what is said of it begins a line.
        _write(decoder.decode(b"", final=True) + "\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
