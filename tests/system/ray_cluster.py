"""A Ray cluster of several nodes on this machine, whose nodes can be lost as a machine is: all of it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest


class RayCluster:
    """The head has no room for learners."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}, shutdown_at_exit=False
        )
        self.address = str(self._cluster.address)
        self.nodes: list[Any] = []

    def add(self, cpus: int = 1, gpus: int = 0) -> Any:
        """Also GPUs that the machine has not: Ray only counts them."""
        self.nodes.append(self._cluster.add_node(num_cpus=cpus, num_gpus=gpus))
        return self.nodes[-1]

    def node_of(self, pid: int) -> Any:
        """The node that this process belongs to; the head's is none that may be lost."""
        above = list(_ancestors(pid))
        return next((node for node in self.nodes if _raylet(node) in above), None)

    def lose(self, node: Any) -> None:
        """Without warning: every process of the node is killed at the same moment."""
        raylet = _raylet(node)
        lost = [pid for pid in _pids() if raylet in _ancestors(pid)]
        for pid in (raylet, *lost):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def lose_all(self) -> None:
        """All nodes and the head at the same moment: the cluster is gone."""
        raylets = {_raylet(node) for node in (self._cluster.head_node, *self.nodes)}
        lost = [pid for pid in _pids() if raylets & set(_ancestors(pid))]
        for pid in (*raylets, *lost):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.nodes.clear()

    def give_notice(self, node: Any, seconds: int = 120) -> None:
        """As a spot machine's notice, or an autoscaler."""
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address),
            *("--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"),
            *("--deadline-remaining-seconds", str(seconds)),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def opened_cluster(nodes: int, cpus: int = 1) -> Iterator[RayCluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray is nice to others by 15; on a crowded machine learners would hardly be heard of.
        for name, value in {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        cluster = RayCluster()
        try:
            for _ in range(nodes):
                cluster.add(cpus)
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster
        finally:
            cluster.close()


def find_process(run: Path, name: str, rank: int | None = None) -> int:
    """The pid of a learner of this run, or of a rank of it."""
    wanted = {f"ATOLL_LEARNER={name}".encode(), f"ATOLL_RUN_TOML={run / 'run.toml'}".encode()}
    wanted |= {f"RANK={rank}".encode()} if rank is not None else set()
    return next(pid for pid in _of_run(run) if wanted <= set(_read(pid, "environ").split(b"\0")))


def find_syncer(run: Path) -> int:
    """The one that serves."""
    port = (run / "syncer.url").read_text().rpartition(":")[2].encode()
    return next(pid for pid in _of_run(run) if b"atoll.syncer" in (said := _read(pid, "cmdline")) and port in said)


def find_syncers(run: Path) -> list[int]:
    """The one that serves, and the one that stands by."""
    return [pid for pid in _of_run(run) if b"atoll.syncer" in _read(pid, "cmdline")]


def find_actor(kind: str) -> int:
    """The newest process of such an actor."""
    return max(pid for pid in _pids() if _read(pid, "cmdline").startswith(f"ray::{kind}".encode()))


def until_no_process(run: Path, seconds: float) -> None:
    """Nothing of the run is left on any node."""
    deadline = time.monotonic() + seconds
    while left := _of_run(run):
        assert time.monotonic() < deadline, [_read(pid, "cmdline") for pid in left]
        time.sleep(0.1)


def _of_run(run: Path) -> list[int]:
    mark = f"ATOLL_RUN_TOML={run / 'run.toml'}".encode()
    return [pid for pid in _pids() if mark in _read(pid, "environ").split(b"\0")]


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        found = _read(pid, "stat").rpartition(b")")[2].split()
        if len(found) < 2:
            return
        pid = int(found[1])
        yield pid


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
