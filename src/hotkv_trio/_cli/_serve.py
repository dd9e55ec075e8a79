"""``hotkv-trio serve``: a model, or a range of its layers, for other processes."""

from __future__ import annotations

import logging
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path  # ruff: ignore[typing-only-standard-library-import]
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import trio
from cyclopts import Parameter, validators

from hotkv_trio._cli._advice import A_WHOLE_MODEL, WHAT_IT_WAS_CUT_FROM, WHO_MAY, advising
from hotkv_trio._cli._arguments import (
    SOME,
    Bytes,
    ModelFile,
    OptionalLayerRange,
    OptionalPath,
    Some,
    TypeK,
    TypeV,
    parse_layers,
)
from hotkv_trio._cli._output import new_console, plain
from hotkv_trio._cli._tls import server_context
from hotkv_trio._errors import InvalidInput
from hotkv_trio._nursery import open_body_nursery
from hotkv_trio._runtime import open_runtime
from hotkv_trio._sizes import size

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from hotkv_trio._runtime import Runtime
    from hotkv_trio.llama import KVType, LlamaEngine
    from hotkv_trio.serve import ShardServer

_FREE = "another port, or port 0 for any that is free; unix:PATH in a folder that exists"
_SAFE = "127.0.0.1:PORT, or unix:PATH in a folder that exists; beyond this machine: --token-file and --certificate"


async def serve(
    file: ModelFile,
    /,
    *,
    listen: Annotated[
        list[str],
        Parameter(
            consume_multiple=True, negative=(), help="HOST:PORT, [IPV6]:PORT or unix:PATH; port 0: any free one."
        ),
    ],
    layers: OptionalLayerRange = None,
    sessions: Annotated[Some, Parameter(help="Hot sessions side by side.")] = 4,
    context: Annotated[Some, Parameter(help="Tokens of one session.")] = 4096,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    threads: Annotated[int | None, Parameter(validator=SOME, help="CPU threads; else one for each processor.")] = None,
    exact: Annotated[bool, Parameter(negative=(), help="One session in each native call.")] = False,
    prefill_chunk: Annotated[Some, Parameter(help="Tokens of a prefill in one native call.")] = 128,
    budget: Annotated[
        Bytes,
        Parameter(help="Bytes of KV that all sessions together may hold, as 8GiB: those of one at least."),
    ] = None,
    idle_ttl: Annotated[
        float, Parameter(validator=SOME, help="Seconds after which an idle session loses its KV.")
    ] = 600.0,
    token_file: Annotated[
        OptionalPath, Parameter(help="Tokens of clients, one a line; else those in HOTKV_TOKEN.")
    ] = None,
    certificate: Annotated[OptionalPath, Parameter(help="PEM file of a certificate chain and its key: TLS.")] = None,
    client_authority: Annotated[
        OptionalPath, Parameter(help="PEM file: clients need a certificate of this authority.")
    ] = None,
    insecure: Annotated[bool, Parameter(negative=(), help="Allow plain TCP beyond this machine.")] = False,
    grace: Annotated[
        float,
        Parameter(
            validator=validators.Number(gte=0), help="On SIGTERM, seconds in which to answer the requests received."
        ),
    ] = 30.0,
    silence: Annotated[
        float,
        Parameter(
            validator=SOME,
            help="Seconds after which a client of whom nothing comes, not even a ping, counts as gone.",
        ),
    ] = 60.0,
    metrics: Annotated[
        str | None,
        Parameter(help="Address for /metrics, /healthz and /readyz over HTTP; whoever reaches it may read figures."),
    ] = None,
    log: Annotated[Literal["text", "json"], Parameter(help="Lines of the log on stderr.")] = "text",
) -> None:
    """Serve sessions until SIGTERM or SIGINT; then the requests received are answered, and connections closed.

    Each token is a request of its own, so a generation stops there: its client, such as hotkv-trio generate, waits for
    a server in this one's place, and puts the session back. One line for each address is printed once clients are
    accepted there. Clients on other machines need a token, and TLS unless --insecure is given. What peers did wrong is
    logged on stderr, never what they sent.
    """
    from hotkv_trio.serve import Limits, ShardServer, read_tokens

    _log(log)
    with advising(WHO_MAY):
        tokens = read_tokens(token_file)
    context_of_tls = server_context(certificate, client_authority)
    engine = _engine(file, layers, sessions, context, (cast("KVType", type_k), cast("KVType", type_v)), threads)
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        # Before the model is loaded, which may take long: who asks is told that it is alive, and not ready.
        async with _metrics(metrics) as tell, AsyncExitStack() as stack:
            runtime = await _opened(
                stack, engine, kv_budget=budget, idle_ttl=idle_ttl, prefill_chunk=prefill_chunk, exact=exact
            )
            if budget is not None and budget < (needed := runtime.info.slot_bytes):
                with advising(f"--budget {needed} or more, or a smaller --context"):
                    raise InvalidInput(f"--budget {size(budget)}: one session of {context} tokens takes {size(needed)}")
            server = ShardServer(runtime, tokens=tokens, limits=Limits(silence_timeout=silence))
            tell(server)
            async with trio.open_nursery() as nursery:
                with advising(_SAFE), advising(_FREE, only=OSError):
                    places = await nursery.start(
                        partial(server.serve, *listen, ssl_context=context_of_tls, insecure=insecure)
                    )
                first, end = runtime.info.layers
                for place in places:
                    new_console().print(
                        plain(f"serving layers {first}:{end} of {file.name} on {place}"), soft_wrap=True
                    )
                async for _ in signals:
                    break
                await server.drain(grace)


async def _opened(stack: AsyncExitStack, engine: LlamaEngine, **options: Any) -> Runtime:
    with (
        advising("another model, or fewer --sessions or a smaller --context, which take less memory"),
        advising("free space in the user's cache directory, or another one in XDG_CACHE_HOME", only=OSError),
    ):
        return await stack.enter_async_context(open_runtime(engine, **options))


@asynccontextmanager
async def _metrics(where: str | None) -> AsyncGenerator[Callable[[ShardServer], None]]:
    """Answer over HTTP while the block runs; what it gives is to be told the server once there is one."""
    if where is None:
        yield lambda _: None
        return
    try:
        from hotkv_trio.serve.metrics import MetricsServer
    except ModuleNotFoundError as exc:
        with advising("pip install '.[metrics]' in hotkv-trio's folder, or no --metrics"):
            raise InvalidInput(f"--metrics needs {exc.name}") from None
    answering = MetricsServer()

    def tell(server: ShardServer) -> None:
        answering.collector.shard = server

    async with open_body_nursery(trio.CancelScope()) as nursery:
        with advising("another --metrics HOST:PORT, that nobody listens on"):
            place = await nursery.start(answering.serve, where)
        logging.getLogger("hotkv_trio").info("figures are served", extra={"where": place})
        yield tell


def _log(form: Literal["text", "json"]) -> None:
    from hotkv_trio.serve import JSONFormatter, TextFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(JSONFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("hotkv_trio.llama").setLevel(logging.WARNING)


def _engine(
    file: Path,
    layers: str | None,
    sessions: int,
    context: int,
    types: tuple[KVType, KVType],
    threads: int | None,
) -> LlamaEngine:
    from hotkv_trio.llama import LlamaEngine
    from hotkv_trio.llama._architectures import architecture_of, check_range
    from hotkv_trio.llama._facts import read_model_facts

    with advising(A_WHOLE_MODEL):
        facts = read_model_facts(file)
    with advising(WHAT_IT_WAS_CUT_FROM):
        facts.require_model()
    where_to_cut = f"hotkv-trio inspect {file}, which says where the model may be cut"
    with advising(where_to_cut):
        owned = facts.check_layers(None if layers is None else parse_layers(layers, facts.n_layer))
    if owned != (0, facts.n_layer):
        with advising("no --layers: one server for all of them"):
            architecture_of(facts)
        with advising(where_to_cut):
            check_range(facts, owned)
    with advising(
        "another value of that option; hotkv-trio serve --help says what --sessions, --context and others are"
    ):
        return LlamaEngine(
            file,
            layers=None if owned == (0, facts.n_layer) else owned,
            n_slots=sessions,
            n_ctx=context,
            type_k=types[0],
            type_v=types[1],
            threads=threads,
        )
