"""A process on some node of a Ray cluster, as its controller sees it: a child, behind a keeper.

Nothing here waits: `look` takes what the keeper has answered since, and asks again. Rules:
- a process that a keeper says has ended, ended as it says;
- a keeper that does not answer any more, or answers from another life, has lost its process: exit code NODE_LOST.
  That is no fault of the script and does not count against its restarts;
- a process that was asked to end because its node is taken away (`move`) ends so too, whatever its exit code;
- a start is repeated until a keeper answers it: while no node has room, Ray keeps the keeper pending.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from atoll.launch.children import NODE_LOST, Child, open_log
from atoll.launch.on_ray.cluster import NAMESPACE
from atoll.launch.on_ray.keeper import Keeper, KeeperReport, ProcessOrder
from atoll.launch.ranks import RankPlace
from atoll.protocol.errors import ConfigError

AGAIN_S = 1.0
"""Between two starts of a keeper that is not there."""
CLOSE_S = 15.0
NEWEST = ("ATOLL_SYNCER",)
"""Variables that are as they are when a start is sent."""


class NodeKeeper(Keeper):
    """A keeper that Ray places."""

    def __init__(self) -> None:
        super().__init__(ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id())


@dataclass
class ActorChild(Child):
    run: str = ""
    """Names of actors begin with it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the actor: what it needs, and where it may be."""
    missing: dict[str, str] = field(default_factory=dict)
    ranks: int = 0
    """On its node; 0: it is no group."""
    place: RankPlace = field(default_factory=RankPlace)
    lasting: bool = True
    """Ray starts its keeper again when its node is lost; else it is for the controller to choose another node."""
    tag: str = ""
    """What a later controller is told of this start."""
    report: KeeperReport | None = None
    """The newest of this start."""
    _actor: Any = field(default=None, repr=False)
    _call: Any = field(default=None, repr=False)
    _starting: bool = field(default=False, repr=False)
    _alive: bool = field(default=False, repr=False)
    """It was started, and its end was not seen."""
    _code: int | None = field(default=None, repr=False)
    _again_at: float = field(default=0.0, repr=False)
    _env: dict[str, str] = field(default_factory=dict, repr=False)
    """Of this start, also when it is repeated; but the syncers may be elsewhere by then."""
    _moving: bool = field(default=False, repr=False)
    """It was asked to end because its node is taken away."""

    @property
    def actor_name(self) -> str:
        return f"{self.run}:{self.name}"

    # ---- what a controller does with a child --------------------------------------------------------------------

    def start(self) -> None:
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._starting, self._alive, self._code, self.report = True, True, None, None
        self._moving = False
        self._env = dict(self.env)
        self._started_at, self._restart_at = time.monotonic(), None
        self._send_start()

    def ask_place(self) -> Any:
        """A call that its keeper answers once it has a node."""
        if self._actor is None:
            self._actor = self.make_actor()
        return self._actor.find_place.remote()

    def attach(self) -> bool:
        """Go on with a keeper that an earlier controller made; False: there is none with a process."""
        try:
            self._actor = ray.get_actor(self.actor_name, NAMESPACE)
            found = msgspec.msgpack.decode(ray.get(self._actor.report.remote(), timeout=CLOSE_S), type=KeeperReport)
        except (ValueError, RayError):
            return False
        if not found.running:
            return False
        self.report, self._alive, self.tag, self._started_at = found, True, found.tag, time.monotonic()
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        return True

    @property
    def started(self) -> bool:
        return self._alive or self._code is not None

    @property
    def running(self) -> bool:
        return self._alive

    @property
    def node_ids(self) -> set[str]:
        return {self.report.node_id} if self.report is not None else set()

    def list_actors(self) -> list[ActorChild]:
        return [self]

    @property
    def placed(self) -> bool:
        """A node has it."""
        return self.report is not None

    @property
    def pid(self) -> int:
        return self.report.pid if self.report is not None else 0

    @property
    def more_pids(self) -> dict[str, int]:
        return self.report.more_pids if self.report is not None else {}

    @property
    def ended(self) -> Child:
        """Of a group, the rank whose end was its end."""
        if self.report is None or self.report.ended in ("", self.log.name):
            return self
        return Child(self.report.ended.removesuffix(".log"), [], {}, self.log.with_name(self.report.ended))

    def poll_exit(self) -> int | None:
        code, self._code = self._code, None
        return code

    def send_order(self, line: str) -> None:
        self._tell("send_order", line)

    def move(self, number: signal.Signals) -> bool:
        """Its node is about to be taken away: it is asked to end, and started again elsewhere. Whether this is new."""
        if self._moving or not self.running or not self.placed:
            return False
        self._moving = True
        self._tell("signal", int(number))
        return True

    def signal_all(self, number: signal.Signals) -> None:
        self._signal("signal_all", number)

    def _signal(self, how: str, number: signal.Signals) -> None:
        if not self._alive:
            return
        if self._starting:  # no node has it: nobody would hear it
            self.release()
            self._end(-int(number))
        else:
            self._tell(how, int(number))

    def signal(self, number: signal.Signals) -> None:
        self._signal("signal", number)

    def give_way(self, nice: int) -> None:
        """Each learner has cores of its own."""

    def prepare_successor(self) -> None:
        """Another syncer stands by."""

    def kill_all(self) -> None:
        self.cancel_restart()
        self._alive = self._starting = False
        self._tell("kill")

    def release(self) -> None:
        """Its keeper is ended, and what it had is free. A process that it still has dies with it."""
        actor, self._actor, self._call = self._actor, None, None
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)

    # ---- what is heard of it ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take what its keeper has answered, and ask anew."""
        if not self._alive:
            return
        if self._call is None:
            if time.monotonic() >= self._again_at:
                if self._starting:
                    self._send_start()
                elif self._actor is not None:
                    self._call = self._actor.report.remote()
            return
        done, _ = ray.wait([self._call], timeout=0)
        if not done:
            return
        call, self._call = self._call, None
        try:
            self._take(msgspec.msgpack.decode(ray.get(call, timeout=1.0), type=KeeperReport))
        except ConfigError as error:
            self._note(str(error))
            self._end(ConfigError.exit_code)
        except (RayActorError, GetTimeoutError):
            self._miss()
        except RayError as error:  # its keeper could not start it
            self._note(str(error).strip().splitlines()[-1])
            self._end(1)

    def _take(self, report: KeeperReport) -> None:
        before, self.report = self.report, report
        self._starting = False
        if before is not None and (before.life, before.number) != (report.life, report.number):
            self._lose()
        elif report.code is not None and self._moving:
            self.release()
            self._lose()
        elif report.code is not None:
            self._end(report.code)

    def _note(self, words: str) -> None:
        """Where its last words are looked for."""
        with open_log(self.log) as log:
            log.write(f"atoll: {words}\n".encode())

    def _miss(self) -> None:
        """No answer. Of a start that Ray may still carry out when a node comes, it is asked again."""
        self._again_at = time.monotonic() + AGAIN_S
        if not self.lasting:
            self._actor = None
        if not self._starting or not self.lasting:
            self._lose()

    def _lose(self) -> None:
        self.reset_restarts()
        self.report = None
        self._end(NODE_LOST)

    def _end(self, code: int) -> None:
        self._alive = self._starting = False
        self._code = code

    def _send_start(self) -> None:
        order = ProcessOrder(
            self.name,
            tuple(self.command[1:]),
            {**self._env, **{name: self.env[name] for name in NEWEST if name in self.env}},
            self.missing,
            str(self.log),
            str(self.folder or self.log.parent),
            self.obeys,
            self.ranks,
            self.place,
            self.nice,
            self.tag,
        )
        if self._actor is None:
            self._actor = self.make_actor()
        self._call = self._actor.start.remote(msgspec.msgpack.encode(order))

    def make_actor(self) -> Any:
        """Its keeper, also one that an earlier controller left."""
        kept = {"max_restarts": -1, "max_task_retries": 0} if self.lasting else {"max_restarts": 0}
        return (
            ray.remote(NodeKeeper)
            .options(
                name=self.actor_name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                **kept,
                **self.options,
            )
            .remote()
        )

    def _tell(self, method: str, *words: object) -> None:
        if self._actor is not None:
            with suppress(RayError):
                getattr(self._actor, method).remote(*words)


def close_actors(children: list[ActorChild]) -> None:
    """End them with their processes, and wait until that is done."""
    calls = [child._actor.kill.remote() for child in children if child._actor is not None]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
    for child in children:
        child.release()
