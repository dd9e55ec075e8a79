"""Machines for a Ray cluster: Ray's own for tests, or network namespaces, each with a ``ray start`` of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

from tests.ray._cluster import NODE, QUICK, Machines


class Cluster(Protocol):
    """What is done to machines."""

    @property
    def address(self) -> str: ...

    def add(self) -> str:
        """Add one; return Ray's id of it."""
        ...

    def remove(self, node: str) -> None:
        """Kill all its processes."""
        ...

    def stop(self) -> None: ...


class Namespaces:
    """Machines that share nothing but the processors and the disk: each has an address of its own on a bridge.

    This process must be in a network namespace of its own, which becomes the head's (``namespaces.sh`` sees to it).
    """

    def __init__(self, n_nodes: int, hidden: Path | None = None) -> None:
        """Start a head and other nodes.

        Args:
            n_nodes: how many.
            hidden: a folder that no node but the head can see; each has a cache of its own then.
        """
        self._hidden = hidden
        self._folder = Path(tempfile.mkdtemp(prefix="hotkv-ray-"))
        self._names: dict[str, str] = {}
        self._count = 0
        _run("ip link set lo up")
        _run("ip link add br0 type bridge")
        _run("ip addr add 10.77.0.1/24 dev br0")
        _run("ip link set br0 up")
        head = f"{_ray()} start --head --node-ip-address=10.77.0.1 --port=6379 --include-dashboard=false"
        try:
            _run(f"{head} --system-config='{json.dumps(QUICK)}' {_SIZES}")
            for _ in range(n_nodes - 1):
                self.add()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        return "10.77.0.1:6379"

    def add(self) -> str:
        self._count += 1
        name, number = f"hk{self._count}", self._count + 1
        _run(f"ip netns add {name}")
        _run(f"ip link add v{number} type veth peer name e0 netns {name}")
        _run(f"ip link set v{number} master br0 up")
        _run(f"ip -n {name} addr add 10.77.0.{number}/24 dev e0")
        _run(f"ip -n {name} link set e0 up")
        _run(f"ip -n {name} link set lo up")
        before = set(self._ids())
        hide = f"mount -t tmpfs none '{self._hidden}' && " if self._hidden else ""
        cache = self._folder / name
        start = f"{_ray()} start --address={self.address} --node-ip-address=10.77.0.{number} {_SIZES}"
        environment = f"XDG_CACHE_HOME={cache} " if self._hidden else ""
        _run(f'ip netns exec {name} unshare -m sh -c "{hide}{environment}{start}"')
        until = time.monotonic() + 30
        while not (found := set(self._ids()) - before):
            if time.monotonic() > until:
                raise TimeoutError(f"{name} did not join")
            time.sleep(0.1)
        (node,) = found
        self._names[node] = name
        return node

    def remove(self, node: str) -> None:
        for pid in _run(f"ip netns pids {self._names[node]}").split():
            os.kill(int(pid), signal.SIGKILL)

    def unplug(self, node: str) -> None:
        """Cut its cable: what it sent last is never answered, and nobody is told."""
        _run(f"ip -n {self._names[node]} link set e0 down")

    def sent(self) -> dict[str, int]:
        """Return the bytes of excerpts that each node keeps."""
        kept = {}
        for name in self._names.values():
            files = (self._folder / name / "hotkv-trio" / "excerpts").glob("*/*.gguf")
            kept[name] = sum(file.stat().st_blocks * 512 for file in files)
        return kept

    def stop(self) -> None:
        import ray

        ray.shutdown()
        # It looks at all processes of the machine.
        _run(f"{_ray()} stop --force")
        for number in range(1, self._count + 1):
            _run(f"ip netns del hk{number}")
        _run("ip link del br0")
        shutil.rmtree(self._folder)

    def _ids(self) -> list[str]:
        import ray

        from hotkv_trio.ray import _edge

        if not ray.is_initialized():
            # All nodes' sockets are in one folder here, and Ray would take any for this process's node.
            ray.init(
                self.address, namespace="hotkv", log_to_driver=False, logging_level=40, _node_ip_address="10.77.0.1"
            )
        return [node.id for node in _edge.nodes() if node.alive]


_SIZES = " ".join((
    f"--num-cpus={NODE['num_cpus']}",
    f"--memory={NODE['memory']}",
    f"--object-store-memory={NODE['object_store_memory']}",
    "--disable-usage-stats",
))


def _ray() -> str:
    return str(Path(sys.executable).with_name("ray"))


def _run(command: str) -> str:
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout}{done.stderr}")
    return done.stdout


def machines(kind: str, hidden: Path | None) -> Cluster:
    """Start a cluster of three."""
    return Namespaces(3, hidden) if kind == "namespaces" else Machines(3)
