"""``hotkv-trio plan``: spread a model's layers over machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import attrs
from cyclopts import Parameter

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._arguments import (
    SOME,
    AsJson,
    ModelFile,
    TypeK,
    TypeV,
)
from hotkv_trio._cli._output import columns_table, new_console, print_json, size_cell
from hotkv_trio._sizes import rounded_size

if TYPE_CHECKING:
    from rich.console import Console

    from hotkv_trio.llama._planning import ShardPlan


def plan(
    file: ModelFile,
    /,
    *,
    shards: Annotated[int, Parameter(validator=SOME, help="How many.")],
    memory: Annotated[
        str, Parameter(help="Bytes that each shard may use, in order, as 8GiB,16GiB; a single one is for all.")
    ] = "",
    context: Annotated[int, Parameter(validator=SOME, help="Tokens of one session.")] = 4096,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    json_: AsJson = False,
) -> None:
    """Cut a model into shards: evenly by bytes of weights, or so that the most sessions fit into the --memory given.

    The figures are of weights and KV. llama.cpp's compute buffers, up to some hundred MiB a shard, come on top.
    """
    from hotkv_trio.llama._facts import read_model_facts
    from hotkv_trio.llama._planning import parse_bytes, plan_shards

    with advising(A_WHOLE_MODEL):
        read_model_facts(file)
    with advising("other --shards, --memory or --context; hotkv-trio inspect says where the model may be cut"):
        sizes = [parse_bytes(part) for part in memory.split(",")] if memory else []
        planned = plan_shards(file, shards, sizes, n_ctx=context, type_k=type_k, type_v=type_v)
    if json_:
        print_json(attrs.asdict(planned))
    else:
        _show(planned, new_console())


def _show(planned: ShardPlan, console: Console) -> None:
    with_memory = planned.shards[0].memory is not None
    more = ("memory", "sessions") if with_memory else ()
    table = columns_table("shard", "layers", "bytes of\nweights", "KV bytes\nper token", "bytes of\none session", *more)
    for number, shard in enumerate(planned.shards):
        row = [str(number), "{}:{}".format(*shard.layers)]
        row += [size_cell(shard.weight_bytes), size_cell(shard.kv_bytes_per_token), size_cell(shard.slot_bytes)]
        if with_memory:
            row += [rounded_size(shard.memory or 0), "any number" if shard.sessions is None else f"{shard.sessions:,}"]
        table.add_row(*row)
    console.print(table)
    if with_memory:
        sessions = "any number of" if planned.sessions is None else f"{planned.sessions:,}"
        console.print(f"The route holds {sessions} sessions of {planned.n_ctx_seq:,} tokens.", highlight=False)
    else:
        console.print(
            f"One session has {planned.n_ctx_seq:,} tokens. With --memory: how many sessions fit.", highlight=False
        )
