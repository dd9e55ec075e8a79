"""What several sessions do, as data, and their outputs: alone, or all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import attrs
import trio

from hotkv_trio import SessionKey, open_runtime
from hotkv_trio.llama import LlamaEngine
from hotkv_trio.testing import build_tiny_gguf

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from hotkv_trio import Executor, Runtime, Session
    from hotkv_trio.llama import KVType, Layout

N_VOCAB = 512

Outputs: TypeAlias = "list[npt.NDArray[np.float32]]"


@attrs.frozen
class Prefill:
    tokens: tuple[int, ...]
    output: str = "last"


@attrs.frozen
class Truncate:
    length: int


Operation: TypeAlias = Prefill | Truncate
Program: TypeAlias = "tuple[Operation, ...]"


def random_program(rng: random.Random, *, first: int, n_decodes: int) -> Program:
    """A prefill of ``first`` tokens, then decodes, with a cut and another prefill somewhere among them."""
    output = rng.choice(["last", "all", "none"])
    operations: list[Operation] = [Prefill(random_tokens(rng, first), output)]
    length = first
    cut_at = rng.randrange(n_decodes)
    for i in range(n_decodes):
        if i == cut_at:
            length = rng.randint(max(0, length - 30), length)
            more = rng.choice([1, 7, 70])
            operations += [Truncate(length), Prefill(random_tokens(rng, more))]
            length += more
        operations.append(Prefill(random_tokens(rng, 1)))
        length += 1
    return tuple(operations)


def random_tokens(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(N_VOCAB) for _ in range(n))


def with_other_tokens(program: Program, rng: random.Random) -> Program:
    """The same shape of program over other tokens."""
    return tuple(
        Prefill(random_tokens(rng, len(operation.tokens)), operation.output)
        if isinstance(operation, Prefill)
        else operation
        for operation in program
    )


async def perform(session: Session, program: Program, *, jitter: random.Random | None = None) -> Outputs:
    """Run a program; return the output of each of its appends."""
    outputs = []
    for operation in program:
        for _ in range(jitter.randrange(4) if jitter else 0):
            await trio.lowlevel.checkpoint()
        if isinstance(operation, Truncate):
            await session.truncate(operation.length)
        elif len(operation.tokens) == 1 and operation.output == "last":
            outputs.append((await session.decode(operation.tokens[0])).output)
        else:
            outputs.append((await session.prefill(operation.tokens, output=operation.output)).output)  # type: ignore[arg-type]
    return outputs


async def perform_all(
    runtime: Runtime, programs: Sequence[Program], *, jitter: random.Random | None = None
) -> list[Outputs]:
    """Run each program in a session of its own, all at once; return the outputs of each."""
    outputs: list[Outputs] = [[] for _ in programs]

    async def perform_one(number: int) -> None:
        async with runtime.open_session(SessionKey(f"session-{number}", 0)) as session:
            outputs[number] = await perform(session, programs[number], jitter=jitter)

    async with trio.open_nursery() as nursery:
        for number in range(len(programs)):
            nursery.start_soon(perform_one, number)
    assert runtime.limiter.borrowed_bytes == 0
    return outputs


async def run_alone(
    make_engine: Callable[[], LlamaEngine], program: Program, *, prefill_chunk: int, executor: Executor | None = None
) -> Outputs:
    """Run one program in a runtime of its own, of the same shape."""
    async with open_runtime(make_engine(), prefill_chunk=prefill_chunk, exact=True, executor=executor) as runtime:
        return (await perform_all(runtime, [program]))[0]


def are_equal(one: Outputs, other: Outputs) -> bool:
    """Whether two runs agree in every bit."""
    return len(one) == len(other) and all(
        a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)
    )


@attrs.frozen
class Case:
    """A model and how its KV is stored."""

    path: Path
    kv: KVType
    n_slots: int
    n_ctx: int = 768
    layout: Layout = "streams"

    def engine(self) -> LlamaEngine:
        return LlamaEngine(
            self.path,
            n_slots=self.n_slots,
            n_ctx=self.n_ctx,
            type_k=self.kv,
            type_v=self.kv,
            layout=self.layout,
            threads=1,
        )


def build(folder: Path, weights: str) -> Path:
    return build_tiny_gguf(
        folder / f"{weights}.gguf",
        n_layer=2,
        weights=weights,  # type: ignore[arg-type]
    )
