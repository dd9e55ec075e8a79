"""``hotkv-trio top``: what shard servers hold and do, as a table that keeps itself up to date."""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Annotated

import attrs
import trio
from cyclopts import Parameter, validators
from rich.console import Group
from rich.live import Live
from rich.text import Text

from hotkv_trio._cli._advice import WHO_MAY, advising
from hotkv_trio._cli._arguments import OptionalPath  # ruff: ignore[typing-only-first-party-import]
from hotkv_trio._cli._output import columns_table, new_console, plain
from hotkv_trio._cli._tls import client_context
from hotkv_trio._sizes import rounded_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from hotkv_trio.serve import ShardClient, Statistics


@attrs.frozen
class _Seen:
    """What one shard said, and when."""

    where: str
    client: ShardClient
    said: Statistics
    at: float


async def top(
    *,
    connect: Annotated[list[str], Parameter(consume_multiple=True, negative=(), help="Addresses of shard servers.")],
    interval: Annotated[float, Parameter(validator=validators.Number(gt=0), help="Seconds between two looks.")] = 1.0,
    looks: Annotated[
        int | None, Parameter(validator=validators.Number(gte=1), help="How often to look; else until interrupted.")
    ] = None,
    token_file: Annotated[OptionalPath, Parameter(help="A token to show, in a file; else that in HOTKV_TOKEN.")] = None,
    authority: Annotated[OptionalPath, Parameter(help="PEM file of the authority to trust: TLS.")] = None,
    certificate: Annotated[
        OptionalPath, Parameter(help="PEM file of a certificate chain and its key, where servers want one.")
    ] = None,
    insecure: Annotated[
        bool, Parameter(negative=(), help="Allow a token to travel in plain text beyond this machine.")
    ] = False,
) -> None:
    """Show shards, with their bytes, tokens a second, evictions and refusals, and the sessions of this token there."""
    from hotkv_trio.serve import open_shard_client, read_tokens

    with advising(WHO_MAY):
        shown = read_tokens(token_file)
    context = client_context(authority, certificate)
    with advising(
        "an address that hotkv-trio serve printed, the same token, and --authority if it has a --certificate"
    ):
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(
                    open_shard_client(where, token=shown[0] if shown else None, ssl_context=context, insecure=insecure)
                )
                for where in connect
            ]
            before: list[_Seen] = []
            console = new_console()
            nobody = "no sessions of this token" if shown else "no sessions of clients without a token"
            # Elsewhere than on a terminal there is nothing to write over: each look is printed.
            with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
                while True:
                    seen = [
                        _Seen(where, client, await client.statistics(), trio.current_time())
                        for where, client in zip(connect, clients, strict=True)
                    ]
                    screen = _screen(seen, before or seen, nobody)
                    if live is None:
                        console.print(screen)
                    else:
                        live.update(screen, refresh=True)
                    before = seen
                    looks = None if looks is None else looks - 1
                    if looks == 0:
                        return
                    await trio.sleep(interval)


def _screen(seen: Sequence[_Seen], before: Sequence[_Seen], nobody: str) -> RenderableType:
    shards = columns_table("shard", "layers", "hot", "waiting", "KV", "tokens/s", "evicted", "expired", "refused")
    sessions = columns_table("session", "epoch", "shard", "state", "length", "bytes", "age", "idle")
    for table in (shards, sessions):
        table.padding, table.show_edge = (0, 1, 0, 0), False
    # Names may be long; figures stay whole.
    sessions.columns[0].no_wrap, sessions.columns[0].overflow, sessions.columns[0].min_width = False, "fold", 7
    for number, (now, then) in enumerate(zip(seen, before, strict=True)):
        runtime = now.said.runtime
        first, end = now.client.info.layers
        shards.add_row(
            str(number),
            f"{first}:{end}",
            f"{runtime.hot}/{runtime.slots}",
            str(runtime.waiting),
            f"{rounded_size(runtime.borrowed_bytes)}\nof {rounded_size(runtime.total_bytes)}",
            f"{_rate(now, then):,.1f}",
            str(runtime.evicted),
            str(runtime.expired),
            str(now.said.refusals),
        )
        for session in now.said.sessions:
            sessions.add_row(
                plain(session.session),
                str(session.epoch),
                f"{first}:{end}",
                session.state,
                str(session.length),
                rounded_size(now.client.info.slot_bytes if session.hot else 0),
                f"{session.age:,.0f} s",
                "" if session.idle is None else f"{session.idle:,.0f} s",
            )
    # Above the table, which has no room for them on a terminal of 80 columns.
    addresses = [plain(f"shard {number}: {now.where}") for number, now in enumerate(seen)]
    return Group(*addresses, shards, sessions if sessions.row_count else Text(nobody, "dim"))


def _rate(now: _Seen, then: _Seen) -> float:
    """Return the tokens appended in a second since the last look."""
    done = [seen.said.runtime.tokens_prefilled + seen.said.runtime.tokens_decoded for seen in (then, now)]
    return (done[1] - done[0]) / (now.at - then.at) if now.at > then.at else 0.0
