"""Whether the time of the token check tells how much of a token is right.

    python -m evidence.route.token_timing [--checks 200000] [--hellos 4000] [--seed 0]

Two wrong tokens take turns at random: one differs from the right one in its first character, the other in its last.
Both are timed in the check itself, and as whole connections to a server on a Unix socket, from the hello to the
refusal. As in dudect, Welch's t of the two, without the slowest tenth of each, must stay below 4.5 (a difference of
the means that chance would hardly ever show). A comparison that stops at the first difference is timed likewise, and
must be caught: else the measurement would prove nothing.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import statistics
import sys
import tempfile
import time
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
PREFIX_WRONG = "x" + RIGHT[1:]
PREFIX_RIGHT = RIGHT[:-1] + "x"
KINDS = (PREFIX_WRONG, PREFIX_RIGHT)
LIMIT = 4.5


def leaky(token: str) -> bool:
    """Stop at the first difference, as no check may."""
    return all(one == other for one, other in zip(token, RIGHT, strict=True))


def time_checks(check: Callable[[str], object], n: int, rng: random.Random) -> list[list[int]]:
    """Return the nanoseconds of checks of either kind."""
    found: list[list[int]] = [[], []]
    for _ in range(n):
        kind = rng.getrandbits(1)
        token = KINDS[kind]
        begun = time.perf_counter_ns()
        check(token)
        found[kind].append(time.perf_counter_ns() - begun)
    return found


async def time_hellos(n: int, rng: random.Random) -> list[list[int]]:
    """Return the nanoseconds from a hello to its refusal."""
    found: list[list[int]] = [[], []]
    progress = Progress("hellos", n)
    with tempfile.TemporaryDirectory() as folder:
        where = f"unix:{folder}/s"
        async with open_runtime(FakeEngine()) as runtime, trio.open_nursery() as nursery:
            await nursery.start(ShardServer(runtime, tokens=[RIGHT]).serve, where)
            hellos = [ClientEnd(max_frame=1000).hello(token=kind, recipe=None, dtype="float32") for kind in KINDS]
            for number in range(n):
                kind = rng.getrandbits(1)
                async with await trio.open_unix_socket(where.removeprefix("unix:")) as stream:
                    begun = time.perf_counter_ns()
                    await stream.send_all(hellos[kind])
                    await stream.receive_some(1000)
                    found[kind].append(time.perf_counter_ns() - begun)
                progress(number + 1)
            nursery.cancel_scope.cancel()
    return found


def tell(what: str, found: list[list[int]]) -> float:
    """Print the medians and Welch's t of two kinds of times; return t."""
    cut = [sorted(times)[: len(times) * 9 // 10] for times in found]
    means, variances = [statistics.fmean(times) for times in cut], [statistics.variance(times) for times in cut]
    t = (means[1] - means[0]) / math.sqrt(sum(v / len(times) for v, times in zip(variances, cut, strict=True)))
    medians = [statistics.median(times) for times in found]
    print(
        f"{what}: {sum(map(len, found)):,} times, median {medians[0]:,.0f} ns with a wrong first character,"
        f" {medians[1]:,.0f} ns with a wrong last one; difference of means {means[1] - means[0]:+,.1f} ns, t = {t:+.2f}"
    )
    return t


def main() -> int:
    """Measure; exit 1 if the kinds can be told apart, or the leaky check is not caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=200_000)
    parser.add_argument("--hellos", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable()  # a line for each refused hello
    rng = random.Random(given.seed)
    principals = Principals([RIGHT])
    assert principals.authenticate(RIGHT)
    assert not any(map(principals.authenticate, KINDS))
    check = tell("the token check", time_checks(principals.authenticate, given.checks, rng))
    hello = tell("hello to refusal", trio.run(time_hellos, given.hellos, rng))
    caught = tell("for comparison, a check that stops early", time_checks(leaky, given.checks // 10, rng))
    shown = abs(check) < LIMIT and abs(hello) < LIMIT and abs(caught) > LIMIT
    print(f"cannot be told apart (|t| < {LIMIT}), and the one that stops early is caught: {'yes' if shown else 'NO'}")
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main())
