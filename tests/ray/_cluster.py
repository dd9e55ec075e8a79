"""A Ray cluster of several nodes on this machine, and what is done to it while sessions generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hotkv_trio.route import Route

N_SESSIONS = 8
NODE = {"num_cpus": 4, "memory": 4 * 2**30, "object_store_memory": 100 * 2**20}
# A node that is gone is noticed in a second, not in fifteen.
QUICK = {
    "health_check_initial_delay_ms": 300,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}


@final
class Machines:
    """Ray's own cluster for tests: each node has all processes of a machine."""

    def __init__(self, n_nodes: int) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._ray = ray
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**NODE, "include_dashboard": False, "_system_config": QUICK}
        )
        self.nodes = [self._cluster.add_node(**NODE) for _ in range(n_nodes - 1)]
        """But the head."""

    @property
    def address(self) -> str:
        """Of the cluster."""
        return str(self._cluster.address)

    def add(self) -> str:
        """Add a node; return its id."""
        self.nodes.append(self._cluster.add_node(**NODE))
        return str(self.nodes[-1].node_id)

    def remove(self, node: str) -> None:
        """Kill every process of a node."""
        (gone,) = [one for one in self.nodes if one.node_id == node]
        self.nodes.remove(gone)
        self._cluster.remove_node(gone, allow_graceful=False)

    def log_folder(self) -> str:
        """Where Ray's processes log."""
        return str(self._cluster.head_node.get_logs_dir_path())

    def stop(self) -> None:
        """End everything."""
        self._ray.shutdown()
        self._cluster.shutdown()


async def generate_while(
    route: Route,
    prompts: Sequence[Sequence[int]],
    act: Callable[[], Awaitable[Any]],
    *,
    before: int = 8,
    after: int = 8,
    at_most: int = 96,
    pause: float = 0.02,
) -> tuple[list[list[int]], list[int]]:
    """Generate on sessions side by side, and do something once each has ``before`` tokens.

    They go on meanwhile, with a pause of so many seconds after each token, until that is done and each has ``after``
    tokens more; one that would have more than ``at_most`` then waits.

    Returns:
        The tokens of each session, and how often each history was put back.
    """
    tokens: list[list[int]] = [[] for _ in prompts]
    replays = [0] * len(prompts)
    begun, done = trio.Event(), trio.Event()

    async def run(number: int) -> None:
        mine = tokens[number]
        last = at_most
        async with route.open_session() as session:
            async with session.generate(prompts[number], at_most) as generated:
                async for token in generated:
                    mine.append(token)
                    if min(map(len, tokens)) >= before:
                        begun.set()
                    if len(mine) == before:
                        await begun.wait()
                    if len(mine) == at_most - after:
                        await done.wait()
                    if done.is_set():
                        last = min(last, len(mine) + after)
                    if len(mine) == last:
                        break
                    await trio.sleep(pause)
            replays[number] = session.replays

    async with trio.open_nursery() as nursery:
        for number in range(len(prompts)):
            nursery.start_soon(run, number)
        await begun.wait()
        await act()
        done.set()
    return tokens, replays


def agree(got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> bool:
    """Return whether each session's tokens are the first of those expected."""
    return all(
        len(mine) > 0 and list(mine) == list(all_[: len(mine)]) for mine, all_ in zip(got, expected, strict=True)
    )
