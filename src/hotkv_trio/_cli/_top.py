"""``hotkv-trio top``: what shard servers hold and do, as a table that keeps itself up to date."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path  # ruff: ignore[typing-only-standard-library-import]
from typing import TYPE_CHECKING, Annotated

import attrs
import trio
from cyclopts import Parameter, validators
from rich.console import Group
from rich.live import Live
from rich.text import Text

from hotkv_trio._cli._advice import WHO_MAY, advising
from hotkv_trio._cli._output import columns_table, new_console, plain, rounded_size
from hotkv_trio._cli._tls import client_context

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
    token_file: Annotated[Path | None, Parameter(help="A token to show, in a file; else that in HOTKV_TOKEN.")] = None,
    authority: Annotated[Path | None, Parameter(help="PEM file of the authority to trust: TLS.")] = None,
    certificate: Annotated[
        Path | None, Parameter(help="PEM file of a certificate chain and its key, where servers want one.")
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
            with Live(console=new_console(), auto_refresh=False) as live:
                while True:
                    seen = [
                        _Seen(where, client, await client.statistics(), trio.current_time())
                        for where, client in zip(connect, clients, strict=True)
                    ]
                    live.update(_screen(seen, before or seen), refresh=True)
                    before = seen
                    looks = None if looks is None else looks - 1
                    if looks == 0:
                        return
                    await trio.sleep(interval)


def _screen(seen: Sequence[_Seen], before: Sequence[_Seen]) -> RenderableType:
    shards = columns_table("shard", "layers", "hot", "waiting", "KV", "tokens/s", "evicted", "expired", "refused")
    sessions = columns_table("session", "epoch", "shard", "state", "length", "bytes", "age", "idle")
    for table in (shards, sessions):
        # Names may be long; figures stay whole, and leave the names room on a terminal of 80 columns.
        table.padding, table.show_edge = (0, 1, 0, 0), False
        table.columns[0].no_wrap, table.columns[0].overflow, table.columns[0].min_width = False, "fold", 5
    for now, then in zip(seen, before, strict=True):
        runtime = now.said.runtime
        first, end = now.client.info.layers
        shards.add_row(
            plain(now.where),
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
    return Group(shards, sessions) if sessions.row_count else Group(shards, Text("no sessions of this token", "dim"))


def _rate(now: _Seen, then: _Seen) -> float:
    """Return the tokens appended in a second since the last look."""
    done = [seen.said.runtime.tokens_prefilled + seen.said.runtime.tokens_decoded for seen in (then, now)]
    return (done[1] - done[0]) / (now.at - then.at) if now.at > then.at else 0.0
