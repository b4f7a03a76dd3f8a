"""A learner over several nodes: a placement group with a keeper on each of its nodes. To its run it is one child.

Rules:
- no rank is started before every node of the group is there; until then Ray keeps the placement group pending;
- every start has a port of its own, on the node of rank 0;
- when the ranks of one node end badly, the others are asked to end and killed `TERM_S` later: they could only wait. The
  learner ended as the guilty one did; where a node was lost, by that;
- when those of one node end with 0, the others have `EXIT_S`;
- a group that lost a node, or has to leave one, gives all of them back and is placed anew.
"""

from __future__ import annotations

import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from atoll.launch.children import NODE_LOST, Child
from atoll.launch.on_ray.actors import AGAIN_S, NEWEST, ActorChild
from atoll.launch.on_ray.keeper import KeeperReport
from atoll.launch.ranks import EXIT_S, RankPlace, weigh_innocence
from atoll.launch.script import TERM_S

GroupStage = Literal["ended", "placing", "meeting", "running"]
"""Meeting: the nodes are there, and their keepers are asked where they are."""


@dataclass
class NodeGroup(Child):
    run: str = ""
    """Names of actors and placement groups begin with it."""
    nodes: int = 2
    ranks: int = 2
    """On all nodes together."""
    bundle: dict[str, float] = field(default_factory=dict)
    """What it takes of each node."""
    missing: dict[str, str] = field(default_factory=dict)
    tag: str = ""
    parts: list[ActorChild] = field(init=False)
    """One for each node."""
    _stage: GroupStage = field(default="ended", repr=False)
    _group: Any = field(default=None, repr=False)
    _calls: list[Any] = field(default_factory=list, repr=False)
    _again_at: float = field(default=0.0, repr=False)
    _env: dict[str, str] = field(default_factory=dict, repr=False)
    _codes: dict[int, int] = field(default_factory=dict, repr=False)
    """Of the parts that have ended."""
    _code: int | None = field(default=None, repr=False)
    _guilty: Child | None = field(default=None, repr=False)
    _kill_at: float = field(default=inf, repr=False)
    _end_at: float = field(default=inf, repr=False)
    _moving: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.parts = [self._make_part(number) for number in range(self.nodes)]

    def _make_part(self, number: int) -> ActorChild:
        name = f"{self.name}.node{number}" if number else self.name
        part = ActorChild(name, self.command, {}, self.log, nice=self.nice, folder=self.folder, run=self.run)
        part.missing, part.ranks, part.lasting = self.missing, self.ranks // self.nodes, False
        return part

    # ---- as one child -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._stage, self._code, self._guilty, self._moving = "placing", None, None, False
        self._codes, self._env = {}, dict(self.env)
        self._kill_at = self._end_at = inf
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._started_at, self._restart_at = time.monotonic(), None

    def attach(self) -> bool:
        """Go on with a group that an earlier controller made; one that does not run as a whole is given back."""
        found = [ray.util.get_placement_group(name) for name in list_groups(self.run).get(self.name, [])]
        attached = [part.attach() for part in self.parts]
        if len(found) == 1 and all(attached):
            self._group, self._stage, self._started_at = found[0], "running", time.monotonic()
            self.tag = self.parts[0].tag
            return True
        for part in self.parts:
            part.kill_all()
            part.release()
        for group in found:
            ray.util.remove_placement_group(group)
        return False

    @property
    def running(self) -> bool:
        return self._stage != "ended"

    @property
    def started(self) -> bool:
        return self.running or self._code is not None

    @property
    def placed(self) -> bool:
        return self._stage == "running" and all(part.placed for part in self.parts)

    @property
    def report(self) -> KeeperReport | None:
        """Of the node of rank 0."""
        return self.parts[0].report if self._stage == "running" else None

    @property
    def node_ids(self) -> set[str]:
        return {one for part in self.parts for one in part.node_ids} if self._stage == "running" else set()

    @property
    def pid(self) -> int:
        return self.parts[0].pid if self._stage == "running" else 0

    @property
    def more_pids(self) -> dict[str, int]:
        parts = self.parts if self._stage == "running" else []
        return {name: pid for part in parts for name, pid in part.more_pids.items()}

    @property
    def ended(self) -> Child:
        return self._guilty or self

    def poll_exit(self) -> int | None:
        code, self._code = self._code, None
        return code

    def move(self, number: signal.Signals) -> bool:
        """A node of it is about to be taken away: all ranks are asked to end, and started again elsewhere."""
        if self._moving or not self.placed:
            return False
        self._moving = True
        self.signal(number)
        return True

    def signal_all(self, number: signal.Signals) -> None:
        for part in self._find_hearers(int(number)):
            part.signal_all(number)

    def signal(self, number: signal.Signals) -> None:
        for part in self._find_hearers(int(number)):
            part.signal(number)

    def _find_hearers(self, number: int) -> list[ActorChild]:
        """Of a group that has no ranks yet nobody would hear it: it ends."""
        if self._stage in ("placing", "meeting"):
            self.release()
            self._stage, self._code = "ended", -number
        return self.parts if self._stage == "running" else []

    def give_way(self, nice: int) -> None:
        """Each learner has cores of its own."""

    def kill_all(self) -> None:
        self.cancel_restart()
        for part in self.parts:
            part.kill_all()
        if self._stage in ("placing", "meeting"):
            self.release()
        self._stage = "ended"

    def release(self) -> None:
        for part in self.parts:
            part.release()
        group, self._group = self._group, None
        if group is not None:
            with suppress(RayError):
                ray.util.remove_placement_group(group)

    def list_actors(self) -> list[ActorChild]:
        return self.parts

    # ---- from one stage to the next -----------------------------------------------------------------------------

    def look(self) -> None:
        if self._stage == "placing":
            self._look_for_nodes()
        elif self._stage == "meeting":
            self._look_for_keepers()
        elif self._stage == "running":
            self._look_at_parts(time.monotonic())

    def _look_for_nodes(self) -> None:
        if time.monotonic() < self._again_at:
            return
        if self._group is None:
            name = f"{self.run}:{self.name}#{secrets.token_hex(4)}"
            self._group = ray.util.placement_group(
                [self.bundle] * self.nodes, strategy="STRICT_SPREAD", name=name, lifetime="detached"
            )
        if ray.util.placement_group_table(self._group).get("state") != "CREATED":
            return
        for number, part in enumerate(self.parts):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            part.options = {
                "num_cpus": self.bundle.get("CPU", 0),
                "num_gpus": self.bundle.get("GPU", 0),
                "scheduling_strategy": place,
            }
        self._calls, self._stage = [part.ask_place() for part in self.parts], "meeting"

    def _look_for_keepers(self) -> None:
        done, left = ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        try:
            told = {call: msgspec.msgpack.decode(ray.get(call), type=KeeperReport) for call in done}
        except RayError:  # a node was lost meanwhile
            self.release()
            self._stage, self._again_at = "placing", time.monotonic() + AGAIN_S
            return
        if not left:
            self._start_ranks([told[call] for call in self._calls])

    def _start_ranks(self, places: list[KeeperReport]) -> None:
        newest = {name: self.env[name] for name in NEWEST if name in self.env}
        for number, (part, here) in enumerate(zip(self.parts, places, strict=True)):
            part.env, part.tag = {**self._env, **newest}, self.tag
            part.place = RankPlace(number * part.ranks, self.ranks, places[0].node, places[0].port, here.node)
            part.start()
        self._stage = "running"

    def _look_at_parts(self, now: float) -> None:
        for number, part in enumerate(self.parts):
            part.look()
            if (code := part.poll_exit()) is not None:
                self._codes[number] = code
        if len(self._codes) == self.nodes:
            self._finish()
        elif self._codes:
            self._end_others(now)

    def _end_others(self, now: float) -> None:
        self._end_at = min(self._end_at, now + EXIT_S)
        if self._kill_at == inf and (any(self._codes.values()) or now >= self._end_at):
            self._kill_at = now + TERM_S
            self.signal(signal.SIGTERM)
        elif now >= self._kill_at:
            self.signal_all(signal.SIGKILL)

    def _finish(self) -> None:
        self._stage, bad = "ended", {number: code for number, code in self._codes.items() if code}
        self._code = 0
        if self._moving or NODE_LOST in bad.values():
            self._code = NODE_LOST
            self.reset_restarts()
            self.release()
        elif bad:
            number = min(bad, key=lambda one: (*weigh_innocence(bad[one], self.parts[one].ended), one))
            self._code, self._guilty = bad[number], self.parts[number].ended


def list_groups(run: str) -> dict[str, list[str]]:
    """The names of the placement groups of a run's learners, by learner; also those that wait for nodes."""
    found: dict[str, list[str]] = {}
    for group in ray.util.placement_group_table().values():
        start, _, rest = str(group["name"]).rpartition(":")
        learner, mark, _ = rest.partition("#")
        if start == run and mark and group["state"] != "REMOVED":
            found.setdefault(learner, []).append(str(group["name"]))
    return found
