"""A spot trace: which nodes of a cluster are taken away and come, and when. TOML:

    seconds = 200
    nodes = ["spot-0", "spot-1"]        # there at the beginning
    changes = [
        { at_s = 20, node = "spot-1", up = false },
        { at_s = 35, node = "spot-1", up = true },
    ]

A node holds one learner. The learner of a node that is lost goes to a node without one, or waits for the next that
comes; who waits longest comes first. So an engine such as Ray places them, and for equal nodes it does not matter who
goes where.
"""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path

import msgspec

from atoll.estimate.chips import Strike
from atoll.protocol.errors import ConfigError


class NodeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    at_s: float
    node: str
    up: bool


class SpotTrace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seconds: float
    nodes: tuple[str, ...]
    changes: tuple[NodeChange, ...] = ()

    def __post_init__(self) -> None:
        there = set(self.nodes)
        if self.seconds <= 0 or len(there) < len(self.nodes):
            raise ConfigError("a trace has seconds above 0, and names every node once")
        for before, after in pairwise((NodeChange(0.0, "", True), *self.changes)):
            if not before.at_s <= after.at_s <= self.seconds:
                raise ConfigError(f"{after.node} changes at {after.at_s:g} s: changes go in order, from 0 to seconds")
            if after.up == (after.node in there):
                raise ConfigError(f"{after.node} is {'there' if after.up else 'away'} already at {after.at_s:g} s")
            there ^= {after.node}


def load_trace(path: Path) -> SpotTrace:
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), SpotTrace)
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"trace {path}: {error.__cause__ or error}") from error


def find_absences(trace: SpotTrace, learners: int) -> tuple[tuple[Strike, ...], ...]:
    """Of each learner: when it has no node, and for how long. For 0 s: it is on another node at once."""
    found: list[list[Strike]] = [[] for _ in range(learners)]
    free = list(trace.nodes[learners:])
    place = dict(zip(trace.nodes, range(learners), strict=False))
    waiting = [(learner, 0.0) for learner in range(len(trace.nodes), learners)]
    for change in trace.changes:
        if change.up:
            free.append(change.node)
        elif change.node in free:
            free.remove(change.node)
        else:
            waiting.append((place.pop(change.node), change.at_s))
        while free and waiting:
            learner, since = waiting.pop(0)
            place[free.pop(0)] = learner
            found[learner].append(Strike(since, change.at_s - since))
    for learner, since in waiting:
        found[learner].append(Strike(since, trace.seconds - since))
    return tuple(tuple(strikes) for strikes in found)
