"""Whether the time of the token check tells how much of a token is right.

    python -m evidence.route.token_timing [--processes 20] [--checks 100000] [--hellos 500]

Wrong tokens of two kinds take turns at random: half differ from the right one in their first characters, half in their
last. They are timed in the check itself, and as whole connections to a server on a Unix socket, from the hello to the
refusal. What the making of either kind costs the check (some tenths of a nanosecond, by what it leaves in the caches)
is measured beside it, by checks of the same tokens where the right one is wholly another, and taken off. The
measurement is repeated in as many processes as are asked for, since each has accidents of its own; and the differences
of the processes' means, each without the slowest tenth, are put to Student's t, which must stay below 4.5. A
comparison that stops at the first difference is timed likewise, and must be caught: else the measurement would prove
nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import trio
from evidence.route._servers import Progress

from hotkv_trio import open_runtime
from hotkv_trio.serve import ShardServer
from hotkv_trio.serve._codec import ClientEnd
from hotkv_trio.serve._principals import Principals
from hotkv_trio.testing import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable

RIGHT = "Lw3kQ9zX7vB1nM5pR8tY2uE6iO4aS0dF"
N_CHANGED = 4
OTHER = "".join(reversed(RIGHT.swapcase()))
LIMIT = 4.5
LEAKY = "for comparison, a check that stops early"


def wrong_token(kind: int, rng: random.Random) -> str:
    """Return a token made just now, as one from the network is: of kind 0 its beginning is wrong, of kind 1 its end."""
    token = bytearray(RIGHT, "ascii")
    begin = kind * (len(token) - N_CHANGED)
    token[begin : begin + N_CHANGED] = rng.choices(b"bcfghjklmnpqrstvwxyz", k=N_CHANGED)
    return token.decode()


def leaky(right: str, token: str) -> bool:
    """Stop at the first difference, as no check may."""
    return all(one == other for one, other in zip(token, right, strict=True))


async def time_hellos(n: int, rng: random.Random) -> list[list[int]]:
    """Return the nanoseconds from a hello to its refusal."""
    found: list[list[int]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        where = f"unix:{folder}/s"
        async with open_runtime(FakeEngine()) as runtime, trio.open_nursery() as nursery:
            await nursery.start(ShardServer(runtime, tokens=[RIGHT]).serve, where)
            for _ in range(n):
                kind = rng.getrandbits(1)
                hello = ClientEnd(max_frame=1000).hello(token=wrong_token(kind, rng), recipe=None, dtype="float32")
                async with await trio.open_unix_socket(where.removeprefix("unix:")) as stream:
                    begun = time.perf_counter_ns()
                    await stream.send_all(hello)
                    await stream.receive_some(1000)
                    found[kind].append(time.perf_counter_ns() - begun)
            nursery.cancel_scope.cancel()
    return found


def difference(found: list[list[int]]) -> tuple[float, float]:
    """Return how much longer a wrong end takes than a wrong beginning on average, and the mean of all."""
    slow = sorted([*found[0], *found[1]])[sum(map(len, found)) * 9 // 10]
    means = [statistics.fmean(time for time in times if time < slow) for times in found]
    return means[1] - means[0], statistics.fmean(means)


def against(
    check: Callable[[str], object], control: Callable[[str], object], n: int, rng: random.Random
) -> tuple[float, float]:
    """Return a check's difference less that of the control, and the mean time of the check.

    Each is the first of the two for half of the time: which place it has matters by some tenths of a nanosecond.
    """
    differences, took = [], []
    for checks in ((check, control), (control, check)):
        found: list[list[list[int]]] = [[[], []], [[], []]]
        for _ in range(n // 2):
            which, kind = rng.getrandbits(1), rng.getrandbits(1)
            token, timed = wrong_token(kind, rng), checks[which]
            begun = time.perf_counter_ns()
            timed(token)
            found[which][kind].append(time.perf_counter_ns() - begun)
        first, second = map(difference, found)
        differences.append(first[0] - second[0])
        took.append(first[1])
    return (differences[0] - differences[1]) / 2, took[0]


def measure(given: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return the differences of this process."""
    logging.disable()  # a line for each refused hello
    rng = random.Random()
    principals = Principals([RIGHT])
    assert principals.authenticate(RIGHT)
    assert not any(principals.authenticate(wrong_token(kind, rng)) for kind in (0, 1))
    return {
        "the token check": against(principals.authenticate, Principals([OTHER]).authenticate, given.checks, rng),
        "hello to refusal": difference(trio.run(time_hellos, given.hellos, rng)),
        LEAKY: against(partial(leaky, RIGHT), partial(leaky, OTHER), given.checks // 10, rng),
    }


def tell(what: str, found: list[tuple[float, float]]) -> float:
    """Print what the processes found; return Student's t of the differences."""
    differences = [one for one, _ in found]
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    took = statistics.fmean(took for _, took in found)
    print(
        f"{what}: {took:,.0f} ns; a wrong end takes {mean:+,.2f} ns longer than a wrong beginning, standard error"
        f" {error:,.2f} ns, t = {mean / error:+.2f}"
    )
    return mean / error


def main() -> int:
    """Measure; exit 1 if the kinds can be told apart, or the leaky check is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--checks", type=int, default=100_000, help="in each process")
    parser.add_argument("--hellos", type=int, default=500, help="in each process")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.processes < 2:
        parser.error("--processes: of one there is no error to estimate")
    if given.one:
        print(json.dumps(measure(given)))
        return 0
    progress = Progress("processes", given.processes)
    command = [sys.executable, "-m", "evidence.route.token_timing", "--one"]
    command += ["--checks", str(given.checks), "--hellos", str(given.hellos)]
    found = []
    for number in range(given.processes):
        found.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        progress(number + 1)
    print(f"{given.processes} processes of {given.checks:,} checks and {given.hellos:,} hellos each")
    t = {what: tell(what, [one[what] for one in found]) for what in found[0]}
    shown = all(abs(value) < LIMIT for what, value in t.items() if what != LEAKY) and abs(t[LEAKY]) > LIMIT
    print(f"cannot be told apart (|t| < {LIMIT}), and the one that stops early is caught: {'yes' if shown else 'NO'}")
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
