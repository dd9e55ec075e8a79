"""``hotkv-trio cluster``: a model's shards on a Ray cluster, started, shown, moved and ended."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, cast

import attrs
import rich.progress
from cyclopts import App, Parameter
from rich.text import Text

from hotkv_trio._cli._advice import A_WHOLE_MODEL, advising
from hotkv_trio._cli._arguments import (  # ruff: ignore[typing-only-first-party-import]
    AsJson,
    ModelFile,
    Some,
    TypeK,
    TypeV,
)
from hotkv_trio._cli._output import columns_table, new_console, plain, print_json
from hotkv_trio._errors import InvalidInput
from hotkv_trio._sizes import rounded_size

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hotkv_trio.llama import KVType
    from hotkv_trio.ray import Deployment, Replica, ReplicaId

Name: TypeAlias = Annotated[str, Parameter(name="NAME", help="Of the deployment.")]
Address: TypeAlias = Annotated[
    str | None, Parameter(name="--address", help="Of the Ray cluster; else the one that this machine is part of.")
]
Patience: TypeAlias = Annotated[float, Parameter(name="--patience", help="Seconds until what is started serves.")]

_A_CLUSTER = (
    "ray start --head here, or ray start --address HEAD:6379 to join one; pip install '.[ray]' in hotkv-trio's folder"
    " brings Ray"
)
_ROOM = "hotkv-trio cluster status NAME and ray status, which say what there is; smaller shards; or more nodes"

cluster = App(name="cluster", help="A model's shards on many machines, placed and brought back by Ray.")


@cluster.command
async def up(
    file: ModelFile,
    /,
    *,
    name: Annotated[str, Parameter(help="Of the deployment; not in use yet.")],
    shards: Annotated[Some, Parameter(help="Into how many shards the model is cut.")],
    replicas: Annotated[str, Parameter(help="Of each shard, as 2,1,1; a single number is for all.")] = "1",
    memory: Annotated[
        str, Parameter(help="Bytes that each shard may use of its node, in order, as 8GiB,16GiB; one is for all.")
    ] = "",
    sessions: Annotated[Some, Parameter(help="Hot sessions side by side, on each replica.")] = 4,
    context: Annotated[Some, Parameter(help="Tokens of one session.")] = 4096,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    threads: Annotated[Some, Parameter(help="CPU threads of a replica.")] = 1,
    cpus: Annotated[float | None, Parameter(help="What Ray counts a replica as; else its threads.")] = None,
    exact: Annotated[bool, Parameter(negative=(), help="One session in each native call.")] = False,
    resource: Annotated[
        list[str] | None,
        Parameter(consume_multiple=True, negative=(), help="NAME=AMOUNT that a replica takes of its node as well."),
    ] = None,
    model_on_nodes: Annotated[
        str | None, Parameter(help="Path where nodes look for the model; else the same. Others get what they need.")
    ] = None,
    host: Annotated[
        str | None,
        Parameter(help="What replicas listen on; else their node's address. On one machine: 127.0.0.1."),
    ] = None,
    certificate: Annotated[
        str | None, Parameter(help="PEM file of a certificate chain and its key, on every node: TLS.")
    ] = None,
    insecure: Annotated[bool, Parameter(negative=(), help="Allow plain TCP beyond this machine.")] = False,
    patience: Patience = 300.0,
    address: Address = None,
    json_: AsJson = False,
) -> None:
    """Start a model's shards; they serve when this returns, and go on until hotkv-trio cluster down.

    Ray spreads them over its nodes, and brings back what is lost. Clients need a token, which is made for the
    deployment, and which whoever has joined the Ray cluster can read.
    """
    from hotkv_trio.llama._facts import read_model_facts
    from hotkv_trio.llama._planning import parse_bytes
    from hotkv_trio.ray import deploy, plan_shards

    with advising(A_WHOLE_MODEL):
        read_model_facts(file)
    with advising("other --shards, --memory or --context; hotkv-trio inspect says where the model may be cut"):
        sizes = [parse_bytes(part) for part in memory.split(",")] if memory else []
        plan = plan_shards(file, shards, sizes, n_ctx=context, type_k=type_k, type_v=type_v)
    counts = _counts(replicas)
    with _talking_to_ray(), _bar("starting") as progress:
        started = await deploy(
            name,
            file,
            plan,
            replicas=counts[0] if len(counts) == 1 else counts,
            sessions=sessions,
            n_ctx=context,
            type_k=cast("KVType", type_k),
            type_v=cast("KVType", type_v),
            threads=threads,
            exact=exact,
            cpus=cpus,
            resources=dict(map(_resource, resource or [])),
            model_on_nodes=model_on_nodes,
            host=host,
            certificate=certificate,
            insecure=insecure,
            patience=patience,
            address=address,
            progress=progress,
        )
    _show(started, json_=json_)


@cluster.command
async def status(name: Name, /, *, address: Address = None, json_: AsJson = False) -> int:
    """Show where each replica serves, and what it holds.

    Exit status 1: one is away, being started or brought back.
    """
    from hotkv_trio.ray import status as look

    with _talking_to_ray():
        found = await look(name, address=address)
    _show(found, json_=json_)
    return 0 if all(any(one.state == "serving" for one in shard) for shard in found.replicas) else 1


@cluster.command
async def drain(
    name: Name,
    /,
    *,
    node: Annotated[str | None, Parameter(help="Its id, the beginning of it, or its address.")] = None,
    replica: Annotated[str | None, Parameter(help="Shard and replica, as 0.1.")] = None,
    grace: Annotated[float, Parameter(help="Seconds that requests may take to end.")] = 30.0,
    patience: Patience = 300.0,
    address: Address = None,
    json_: AsJson = False,
) -> None:
    """Move a deployment off a node, or put another replica in the place of one; sessions go on there.

    What takes the place serves before anything ends. A drained node may leave the Ray cluster then.
    """
    from hotkv_trio.ray import drain as move

    with _talking_to_ray(), _bar("moving") as progress:
        found = await move(
            name,
            node=node,
            replica=None if replica is None else _replica_id(replica),
            grace=grace,
            patience=patience,
            address=address,
            progress=progress,
        )
    _show(found, json_=json_)


@cluster.command
async def down(name: Name, /, *, address: Address = None) -> None:
    """End a deployment at once; ending what is not there does nothing."""
    from hotkv_trio.ray import down as end

    with _talking_to_ray():
        await end(name, address=address)


@contextlib.contextmanager
def _talking_to_ray() -> Generator[None]:
    from hotkv_trio.ray import DeploymentFailed, DeploymentUnknown

    try:
        # Ray says on stdout what happens to its processes.
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except DeploymentFailed as error:
        error.add_note(_ROOM)
        raise
    except DeploymentUnknown as error:
        error.add_note("hotkv-trio cluster up FILE --name NAME --shards N, or another name")
        raise
    except InvalidInput as error:
        if "pip install" in str(error):
            error.add_note(_A_CLUSTER)
        else:
            error.add_note("hotkv-trio cluster --help, and hotkv-trio cluster status NAME for what there is")
        raise
    except OSError as error:
        error.add_note(_A_CLUSTER)
        raise


@contextlib.contextmanager
def _bar(title: str) -> Generator[Callable[[int, int], None]]:
    """Show on stderr, while the block runs, how many replicas serve."""
    console = new_console(stderr=True)
    bars = rich.progress.Progress(
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bars.add_task(title, total=None)
    with bars:
        yield partial(_advance, bars, task)


def _advance(bars: rich.progress.Progress, task: rich.progress.TaskID, done: int, total: int) -> None:
    bars.update(task, completed=done, total=total)


def _show(found: Deployment, *, json_: bool) -> None:
    replicas = [replica for shard in found.replicas for replica in shard]
    if json_:
        print_json({
            "name": found.name,
            "epoch": found.epoch,
            "replicas": [_document(replica) for replica in replicas],
        })
        return
    table = columns_table("replica", "layers", "state", "address", "node", "hot", "KV")
    table.columns[3].no_wrap, table.columns[3].overflow = False, "fold"
    for replica in replicas:
        figures = replica.figures
        said = ("", "")
        if figures is not None:
            kv = f"{rounded_size(figures.borrowed_bytes)}\nof {rounded_size(figures.total_bytes)}"
            said = (f"{figures.hot}/{figures.slots}", kv)
        state = Text(replica.state, style="green" if replica.state == "serving" else "yellow")
        table.add_row(
            str(replica.id),
            "{}:{}".format(*replica.layers),
            state,
            plain(replica.where or ""),
            (replica.node or "")[:8],
            *said,
        )
    console = new_console()
    console.print(table)
    console.print(plain(f"deployment {found.name}, epoch {found.epoch}"), highlight=False)


def _document(replica: Replica) -> dict[str, Any]:
    document = attrs.asdict(replica, filter=lambda attribute, _: attribute.name not in {"id", "place"})
    return {"replica": str(replica.id), **document}


def _counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(f"{text!r} says no numbers of replicas: write 2,1,1") from None


def _resource(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        return name, float(amount)
    except ValueError:
        raise InvalidInput(f"{text!r} says no resource: write NAME=AMOUNT") from None


def _replica_id(text: str) -> ReplicaId:
    from hotkv_trio.ray import ReplicaId

    shard, _, replica = text.partition(".")
    try:
        return ReplicaId(int(shard), int(replica))
    except ValueError:
        raise InvalidInput(f"{text!r} says no replica: write SHARD.REPLICA, as 0.1") from None
