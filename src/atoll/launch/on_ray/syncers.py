"""The two syncers of a run on Ray: one serves, the other stands by on another node. To its run they are one child.

Which of them serves, the term in the journal decides; nobody tells them. Rules:
- one that ends with 0 says that the run is over: a standby ends so too when the run has ended;
- one that dies is started again, as a standby. Where its node is lost it goes to another that has none of the
  two; while there is no such node, the run goes on with one syncer;
- before one has served, it is started again as it was first: there is nothing to stand by for, and a standby would
  take a run that ended for over before it is opened again;
- a syncer keeps its address as long as its node lives. An order goes to both: a standby reads it when it serves.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from atoll.fabric.address import host_port
from atoll.launch.children import NODE_LOST, Child, describe_exit
from atoll.launch.on_ray.actors import ActorChild
from atoll.launch.on_ray.cluster import RayNode
from atoll.launch.supervision import UNWRITABLE
from atoll.telemetry.events import EventLog

PORTS = range(20000, 30000)
"""Below those that systems give to whoever asks for any."""
ChooseNode = Callable[[set[str]], RayNode | None]
"""A node for a syncer, none of those with these ids; None: there is none."""


@dataclass
class SyncerPlace:
    """Where one of the two is."""

    child: ActorChild
    node: RayNode | None = None
    port: int = 0
    told_alone: bool = False

    @property
    def host(self) -> str:
        return host_port(self.node.address, self.port) if self.node is not None else ""


@dataclass
class SyncerPair(Child):
    choose_node: ChooseNode = lambda excluded: None
    events: EventLog | None = None
    """Once there is one."""
    run: str = ""
    cpus: float = 0.0
    places: list[SyncerPlace] = field(init=False)
    _lines: list[str] = field(default_factory=list, repr=False)
    _served: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.places = [SyncerPlace(self._make_member(name)) for name in ("syncer", "syncer-2")]

    def _make_member(self, name: str) -> ActorChild:
        log = self.log.with_name(f"{name}.log")
        return ActorChild(
            name, self.command, self.env, log, obeys=True, waits_s=self.waits_s, run=self.run, lasting=False
        )

    # ---- as one child -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The first of them; the other stands by once this one serves."""
        self._start(self.places[0], standby=False)

    def start_standby(self) -> None:
        self._served = True
        self._start(self.places[1], standby=True)

    def attach(self, nodes: list[RayNode]) -> None:
        """Go on with those that an earlier controller started; others are started as standbys."""
        self._served = True
        for place in self.places:
            node, _, port = place.child.tag.partition(" ") if place.child.attach() else ("", "", "")
            if found := [one for one in nodes if one.id == node]:
                place.node, place.port = found[0], int(port)
            else:
                place.child.restart_later()

    @property
    def running(self) -> bool:
        return any(place.child.running for place in self.places)

    @property
    def started(self) -> bool:
        return any(place.child.started for place in self.places)

    @property
    def pid(self) -> int:
        return self.places[0].child.pid

    @property
    def hosts(self) -> tuple[str, ...]:
        """Where learners find them."""
        return tuple(place.host for place in self.places if place.host)

    def look(self) -> None:
        for place in self.places:
            place.child.look()

    def poll_exit(self) -> int | None:
        for place in self.places:
            code = place.child.poll_exit()
            if code == 0:
                return 0
            if code is not None:
                self._handle_exit(place, code)
            elif place.child.waiting:
                self._start_again(place)
        if all(place.child.given_up for place in self.places):
            return UNWRITABLE  # nobody is left to start
        return None

    def _handle_exit(self, place: SyncerPlace, code: int) -> None:
        child = place.child
        self._say("exited", f"{child.name} ended: {describe_exit(code)}", code)
        if code in (NODE_LOST, 2):
            place.node = None  # the port may be taken, or nobody is there any more
            child.release()
        if code == UNWRITABLE:
            child.given_up = True
        else:
            child.restart_later()

    def _start_again(self, place: SyncerPlace) -> None:
        if place.node is None and self._find_node(place) is None:
            if not place.told_alone:
                place.told_alone = True
                self._say("warning", "no other node is there for a syncer to stand by: the run goes on with one")
            return
        place.told_alone = False
        self._prepare(place, standby=self._served)
        if place.child.restart_if_due():
            self._send_lines(place)
            self._say(
                "restarted", f"{place.child.name} {'stands by' if self._served else 'is started'} at {place.host}"
            )

    def restart_if_due(self) -> bool:
        return False  # each of the two by itself: `poll_exit`

    def send_order(self, line: str) -> None:
        self._lines.append(line)
        for place in self.places:
            place.child.send_order(line)

    def signal(self, number: signal.Signals) -> None:
        for place in self.places:
            place.child.signal(number)

    def kill_all(self) -> None:
        for place in self.places:
            place.child.kill_all()

    def prepare_successor(self) -> None:
        """One stands by."""

    # ---- one of them --------------------------------------------------------------------------------------------

    def _start(self, place: SyncerPlace, *, standby: bool) -> None:
        if self._find_node(place) is None:
            place.child.restart_later()
            return
        self._prepare(place, standby=standby)
        place.child.start()
        self._send_lines(place)

    def _send_lines(self, place: SyncerPlace) -> None:
        for line in self._lines:
            place.child.send_order(line)

    def _find_node(self, place: SyncerPlace) -> RayNode | None:
        others = {other.node.id for other in self.places if other is not place and other.node is not None}
        if place.node is None and (found := self.choose_node(others)) is not None:
            place.node, place.port = found, secrets.choice(PORTS)
        return place.node

    def _prepare(self, place: SyncerPlace, *, standby: bool) -> None:
        assert place.node is not None
        where = ["--host", place.node.address, "--port", str(place.port)]
        place.child.command = [*self.command, "--mortal", *where, *(["--standby"] if standby else [])]
        affinity = NodeAffinitySchedulingStrategy(place.node.id, soft=False)
        place.child.options = {"num_cpus": self.cpus, "scheduling_strategy": affinity}
        place.child.tag = f"{place.node.id} {place.port}"

    def _say(self, kind: str, text: str, code: int | None = None) -> None:
        if self.events is not None:
            self.events.say(kind, text, {"process": "syncer-2" if "syncer-2" in text else "syncer", "code": code})
