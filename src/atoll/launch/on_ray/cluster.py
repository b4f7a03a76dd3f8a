"""A Ray cluster: how it is reached, what a run is called there, which nodes it has, and whether a run fits on it."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.extras import missing
from atoll.protocol.errors import ConfigError, Unreachable

DIAL_S = 10.0
NAMESPACE = "atoll"
CONTROLLER = "controller"
HEAD = "node:__internal_head__"
"""What Ray counts on the head alone."""


# ---- names of a run's actors: its folder, and the process ------------------------------------------------------------


def name_run(folder: Path) -> str:
    """One name for one folder, whoever asks."""
    return re.sub(r"[^A-Za-z0-9._/-]", "_", str(folder.absolute()))


def name_actor(folder: Path, process: str) -> str:
    return f"{name_run(folder)}:{process}"


# ---- nodes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RayNode:
    id: str
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class LearnerNeeds:
    """Of each learner, on all its nodes together."""

    cpus: float
    gpus: float
    nodes: int = 1
    """Which it is spread over, evenly."""

    def count_parts(self, node: RayNode) -> int:
        """How many learners, or parts of learners, fit on this node."""
        by_cpus = int(node.cpus * self.nodes // self.cpus) if self.cpus else 10**6
        return min(by_cpus, int(node.gpus * self.nodes // self.gpus)) if self.gpus else by_cpus

    def count_learners(self, nodes: Sequence[RayNode], most: int) -> int:
        """How many fit on these nodes, up to `most`; the parts of one are on different nodes."""
        parts = [self.count_parts(node) for node in nodes]
        fits = (many for many in range(most, 0, -1) if sum(min(one, many) for one in parts) >= many * self.nodes)
        return next(fits, 0)

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU{'' if self.cpus == 1 else 's'}" + (f" and {self.gpus:g} GPUs" if self.gpus else "")
        return f"{each} on {self.nodes} nodes" if self.nodes > 1 else each


def find_shortage(nodes: Sequence[RayNode], learners: int, needs: LearnerNeeds) -> str:
    """What is missing for so many learners; empty: nothing."""
    if not nodes:
        return "the cluster has no node that is alive"
    room = needs.count_learners(nodes, learners)
    if room >= learners:
        return ""
    gpus, cpus = sum(node.gpus for node in nodes), sum(node.cpus for node in nodes)
    many = f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
    has = f"{many} with {cpus:g} CPUs and {gpus:g} GPUs"
    missing = []
    if learners * needs.gpus > gpus:
        missing.append(f"{learners * needs.gpus - gpus:g} GPUs")
    if learners * needs.cpus > cpus:
        missing.append(f"{learners * needs.cpus - cpus:g} CPUs")
    together = "no node has" if needs.nodes == 1 else f"no {needs.nodes} nodes have"
    lacks = f"{' and '.join(missing)} are missing" if missing else f"{together} so much together"
    if (more := needs.nodes - len(nodes)) > 0:
        lacks = f"{more} more node{'s are' if more > 1 else ' is'} needed"
    advice = (
        f"start {room} (--learners {room}) and add others by atoll scale once there are nodes"
        if room
        else ("ask for less (--gpus-per-learner, --set cpus_per_learner=N), or add larger nodes")
    )
    return f"{learners} learners of {needs} do not fit on {has}: {lacks}; {advice}"


def import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise missing("ray", "--on ray") from None
    return ray


def parse_engine(word: str) -> str:
    """The address of `ray` or `ray://HOST:PORT`; empty: that of RAY_ADDRESS, or of the cluster that this machine is a
    node of."""
    if word == "ray":
        return ""
    if word.startswith("ray://") and len(word) > len("ray://"):
        return word
    raise ConfigError(f"--on {word} is not understood: write ray, or ray://HOST:PORT for a cluster elsewhere")


def connect(address: str) -> None:
    """To the cluster, for this process. Unreachable: there is none."""
    ray = import_ray()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if (parts := urlsplit(where if "://" in where else f"ray://{where}")).port is not None:
            with socket.create_connection((parts.hostname or "", parts.port), DIAL_S):
                pass  # Ray itself would try for minutes
        ray.init(address=where, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        start = "" if address else " (name one by ray://HOST:10001 or RAY_ADDRESS, or start one: ray start --head)"
        shown = "" if where == "auto" else f" at {where}"
        words = str(error).strip().splitlines()
        raise Unreachable(f"no Ray cluster answers{shown}{start}: {words[0][:200] if words else error!r}") from None


def list_leaving_nodes() -> set[str]:
    """The ids of nodes that are about to be taken away, as a spot machine's notice or an autoscaler told Ray. Ray has
    no public call for it; without the private one, as through a Ray Client, nodes go without notice."""
    ray = import_ray()
    try:
        from ray._private.state import state

        return set(state.get_draining_nodes())
    except (ImportError, AttributeError, ray.exceptions.RaySystemError):
        return set()


def find_head() -> str:
    """The id of the node that the cluster was begun with; empty: it is not told apart."""
    nodes = import_ray().nodes()
    return next((str(node["NodeID"]) for node in nodes if node["Alive"] and HEAD in node["Resources"]), "")


def list_nodes() -> list[RayNode]:
    """Those that are alive, and stay."""
    leaving = list_leaving_nodes()
    return [
        RayNode(
            str(node["NodeID"]),
            str(node["NodeManagerAddress"]),
            float(node["Resources"].get("CPU", 0.0)),
            float(node["Resources"].get("GPU", 0.0)),
        )
        for node in import_ray().nodes()
        if node["Alive"] and str(node["NodeID"]) not in leaving
    ]
