"""The controller of a run on Ray: the loop of `atoll train`, in an actor that no terminal belongs to.

The run's folder is on a file system that every node sees. The controller holds `run.lock`; its name in the cluster is
the folder's, so there is one. When Ray starts it again, because its node was lost, it goes on with the keepers that
are there: they are found by their names, and the syncers and learners never noticed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from atoll.bucket.claims import read_place
from atoll.bucket.client import keep_credentials, read_credentials
from atoll.config import parse
from atoll.fabric.address import SyncerAddress
from atoll.fabric.certificates import fingerprint, make_server
from atoll.fabric.join_tokens import JoinToken, JoinTokens, Role, new_secret
from atoll.launch.children import Child
from atoll.launch.environment import LaunchEnvironment
from atoll.launch.local import RUNNER, LocalRun
from atoll.launch.on_ray.actors import ActorChild, close_actors
from atoll.launch.on_ray.cluster import (
    CONTROLLER,
    HEAD,
    NAMESPACE,
    LearnerNeeds,
    RayNode,
    find_head,
    find_shortage,
    list_leaving_nodes,
    list_nodes,
    name_actor,
    name_run,
)
from atoll.launch.on_ray.groups import NodeGroup, list_groups
from atoll.launch.on_ray.syncers import SyncerPair
from atoll.launch.restoring import attach_store
from atoll.launch.resume import plan_resume
from atoll.launch.scaling import number_of
from atoll.protocol.errors import AtollError, ConfigError, RunFailed
from atoll.store.event_parts import read_events
from atoll.store.keys import KeyDir
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import hold_run
from atoll.syncer.credentials import read_tokens, write_tokens
from atoll.syncer.process import import_named
from atoll.telemetry.status import RunStatus

PROBE_S = 60.0
"""How long a node may take to say what it sees."""
LOCK_S = 120.0
"""How long the lock of a controller whose machine is gone may last: a file server has to notice that."""
START_S = 300.0
"""How long the syncer may take to listen: Ray starts a process of its own first."""
LINGER_S = 30.0
"""A controller whose run is over stays so long for those who watch."""
NOTICE_S = 1.0
"""Between two looks at which nodes are taken away."""
CERTIFICATE_DAYS = 3650.0
ROLES: dict[str, Role] = {"join": "learner", "scorer": "evaluator", "operator": "operator"}
CHUNK_BYTES = 1 << 20


class RunJob(msgspec.Struct, frozen=True):
    """What a controller is made with. No secret: Ray keeps it for as long as there is a controller."""

    out: str
    config: str
    """As TOML."""
    script: tuple[str, ...]
    launch: LaunchEnvironment
    pages: str
    closes: str
    """Writes the summary: `module:function`."""
    uploads: str
    """Uploads what is left of a run with a store, and says what is missing: `module:function`."""
    max_restarts: int
    force: bool = False
    resume: bool = False
    changes: tuple[str, ...] = ()
    accept_loss: bool = False


class Watched(msgspec.Struct, frozen=True):
    """What whoever watches is told."""

    state: str
    """starting, running, ended or failed."""
    failure: str
    exit_code: int
    link: str
    """Of the dashboard, good for one visit."""
    status: RunStatus | None
    events: bytes
    offset: int
    remark: str = ""
    """At the end: what is not in the bucket."""


@dataclass
class RayRun(LocalRun):
    again: bool = False
    """Ray started this controller again: the one before was lost."""
    adopts: bool = False
    """… and the processes go on. If no syncer served yet, they are started anew instead."""
    credentials: dict[str, str] = field(default_factory=dict, repr=False)
    """Variables by which the syncers open the run's bucket."""
    _children: dict[str, ActorChild | NodeGroup] = field(default_factory=dict)
    _notices_at: float = 0.0

    async def run(self) -> None:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                with hold_run(self.out.path, served=self.adopts):
                    await self._run_held()
                return
            except ConfigError:
                if not self.again or hasattr(self, "_syncer") or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(1.0)

    def _prepare_folder(self) -> None:
        self._make_keys()
        if not self.adopts:
            super()._prepare_folder()

    def _make_keys(self) -> None:
        """TLS and tokens of this run's own: nodes talk over a network."""
        keys = KeyDir.create(self.out.secrets)
        if not keys.certificate.exists():
            pair = make_server(["localhost", *{node.address for node in list_nodes()}], CERTIFICATE_DAYS)
            keys.write(keys.key, pair.key)
            keys.write(keys.certificate, pair.certificate)
            tokens = [JoinToken(id=name, role=role, secret=new_secret()) for name, role in ROLES.items()]
            write_tokens(keys, JoinTokens(tokens))
        service = msgspec.structs.replace(self.config.service, keys=str(keys.path), port=0)
        self.config = msgspec.structs.replace(self.config, service=service)

    # ---- processes ----------------------------------------------------------------------------------------------

    @property
    def _pair(self) -> SyncerPair:
        assert isinstance(self._syncer, SyncerPair)
        return self._syncer

    def _make_syncer(self, command: list[str]) -> Child:
        return SyncerPair(
            "syncer",
            command,
            {**self._common_env, **self.credentials},
            self.out.log("syncer"),
            choose_node=choose_node,
            events=self._events,
            run=name_run(self.out.path),
        )

    def _make_script(self, name: str, env: dict[str, str], ranks: int) -> Child:
        assert self.launch is not None
        evaluates = name == "evaluator"
        nodes = 1 if evaluates else self.config.nodes_per_learner
        cpus = 0 if evaluates else self.config.cpus_per_learner / nodes
        gpus = 0 if evaluates else self.config.gpus_per_learner / nodes
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        make: Callable[..., ActorChild | NodeGroup] = (
            partial(NodeGroup, nodes=nodes, ranks=ranks, bundle={"CPU": cpus, **({"GPU": gpus} if gpus else {})})
            if nodes > 1
            else partial(ActorChild, options=options, ranks=ranks if self.config.ranks > 1 else 0)
        )
        child = make(
            name,
            [sys.executable, *RUNNER, *self.script],
            {**self._common_env, **env, "ATOLL_SYNCER": self._make_link("scorer" if evaluates else "join")},
            self.out.log(name),
            folder=Path(self.launch.folder),
            limit=self.max_restarts,
            run=name_run(self.out.path),
            missing=self.launch.variables,
            tag=" ".join(self._pair.hosts),
        )
        self._children[name] = child
        return child

    @property
    def _common_env(self) -> dict[str, str]:
        threads = str(max(1, int(self.config.cpus_per_learner / self.config.ranks)))
        return {**super()._common_env, "ATOLL_THREADS": threads, "OMP_NUM_THREADS": threads}

    def _make_link(self, token: str) -> str:
        """By which somebody with this token finds the syncers where they are now."""
        keys = KeyDir.open(self.out.secrets)
        return SyncerAddress(
            urls=tuple(f"https://{host}" for host in self._pair.hosts),
            token=read_tokens(keys).named(token).secret,
            pin=fingerprint(keys.certificate.read_bytes()),
        ).link()

    def _open_links(self, url: str) -> str:
        self._pair.command = self._plain_syncer_command
        self._pair.start_standby()
        return self._make_link("operator")

    @property
    def _plain_syncer_command(self) -> list[str]:
        return [sys.executable, "-P", "-m", "atoll.syncer", str(self.out.path), *self._served]

    async def _start_processes(self) -> None:
        if not self.adopts:
            await super()._start_processes()
            return
        self.addresses: dict[str, str] = {}
        self._pair.command = self._plain_syncer_command
        self._pair.attach(list_nodes())
        self._url = self._make_link("operator")
        self._events.say("warning", "the controller was lost: another one goes on with the processes that are there")
        self.listens(await self._make_dashboard_link())
        self._adopt_learners()

    def _adopt_learners(self) -> None:
        """Those whose keepers are there; one without a process is started again."""
        names = find_processes(self.out.path)
        for name in sorted((one for one in names if one.startswith("learner-")), key=number_of):
            self._learners[name] = self._make_learner(name)
        if self.evaluator and "evaluator" in names:
            self._processes.scorer = self._make_script("evaluator", self._evaluator_env(), ranks=1)
        self._scaling.count_from(len(self._learners))
        for child in self._processes.list_scripts():
            assert isinstance(child, ActorChild | NodeGroup)
            if not child.attach():
                self._start_child(child)

    def _look_at_processes(self) -> None:
        self._pair.look()
        self._leave_nodes()
        self._url = self._make_link("operator") if self._pair.hosts else self._url
        hosts = self._pair.hosts
        links = {token: self._make_link(token) for token in ("scorer", "join")}
        for name, child in self._children.items():
            child.look()
            known = set(child.report.tag.split()) if child.report is not None else set()
            if child.running and known and hosts and not known & set(hosts):
                # Both syncers that it knows are gone: it would dial them for ever.
                self._events.say("warning", f"{name} knows none of the syncers that are there now: it is started again")
                child.reset_restarts()
                child.signal_all(signal.SIGKILL)
            if not child.placed or not child.running:
                child.env["ATOLL_SYNCER"] = links["scorer" if name == "evaluator" else "join"]
                child.tag = " ".join(hosts)

    def _leave_nodes(self) -> None:
        """Of nodes that are taken away, learners drain and syncers go, one at a time, before it happens."""
        if time.monotonic() < self._notices_at:
            return
        self._notices_at = time.monotonic() + NOTICE_S
        if not (leaving := list_leaving_nodes()):
            return
        for name, child in self._children.items():
            if child.node_ids & leaving and child.move(signal.SIGTERM):
                self._events.say("warning", f"the node of {name} is taken away: it drains, and is started elsewhere")
        if all(place.child.placed for place in self._pair.places):
            for place in self._pair.places:
                if place.node is not None and place.node.id in leaving and place.child.move(signal.SIGKILL):
                    self._events.say("warning", f"the node of {place.child.name} is taken away: it goes elsewhere")
                    return

    def close(self) -> None:
        """End whatever is left, and every keeper."""
        if hasattr(self, "_syncer"):
            actors = [one for child in self._children.values() for one in child.list_actors()]
            close_actors([*(place.child for place in self._pair.places), *actors])
            for child in self._children.values():
                child.release()

    def interrupt(self) -> None:
        if hasattr(self, "_processes"):
            self._processes.handle_interrupt()


def choose_node(excluded: set[str]) -> RayNode | None:
    """For a syncer: the node with the fewest GPUs and, of those, the most CPUs."""
    nodes = [node for node in list_nodes() if node.id not in excluded]
    return min(nodes, key=lambda node: (node.gpus, -node.cpus, node.id), default=None)


def find_processes(folder: Path) -> list[str]:
    """The processes of this run that have a keeper, or learners that wait for several nodes."""
    start = f"{name_run(folder)}:"
    named = ray.util.list_named_actors(all_namespaces=True)
    found = {
        one["name"].removeprefix(start).partition(".node")[0]
        for one in named
        if one["namespace"] == NAMESPACE and one["name"].startswith(start) and one["name"] != f"{start}{CONTROLLER}"
    }
    return sorted(found | list_groups(name_run(folder)).keys())


def find_blind_nodes(nodes: Sequence[RayNode], paths: Sequence[str]) -> list[str]:
    """What a node does not see, in words; nodes that are lost meanwhile see nothing and say nothing."""

    def look(wanted: Sequence[str]) -> list[str]:
        return [path for path in wanted if not os.path.exists(path)]

    calls = {}
    for node in nodes:
        affinity = NodeAffinitySchedulingStrategy(node.id, soft=False)
        asked = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=affinity).remote(list(paths))
        calls[asked] = node
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=PROBE_S)
    told = []
    for call in done:
        try:
            told += [f"node {calls[call].address} does not see {path}" for path in ray.get(call)]
        except RayError:
            continue
    return told


class Controller:
    """The actor. Its methods are called by whoever watches; the run goes on in a thread of its own."""

    def __init__(self, job: bytes) -> None:
        self._job = msgspec.msgpack.decode(job, type=RunJob)
        self._status: RunStatus | None = None
        self._link, self._state, self._error, self._remark = "", "starting", RunFailed(""), ""
        self._credentials: dict[str, str] = {}
        self._given = threading.Event()
        again = bool(ray.get_runtime_context().was_current_actor_reconstructed)
        self._out = RunDir(Path(self._job.out))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._run: RayRun | None = None
        threading.Thread(target=self._carry_out, args=(again,), name="atoll-run", daemon=True).start()

    # ---- for those who start and watch it -----------------------------------------------------------------------

    def give_credentials(self, found: bytes) -> None:
        """Those of the run's bucket; it begins once it was told. By a call: Ray keeps what an actor is made with."""
        self._credentials = msgspec.msgpack.decode(found, type=dict[str, str])
        self._given.set()

    def watch(self, offset: int) -> bytes:
        """How it stands, and the events from this byte on."""
        state = self._state  # first: what is written until then is in the events below
        whole, newline, _ = read_events(self._out.events, offset, CHUNK_BYTES).rpartition(b"\n")
        events = whole + newline
        told = Watched(
            state,
            str(self._error),
            self._error.exit_code,
            self._link,
            self._status,
            events,
            offset + len(events),
            self._remark,
        )
        return msgspec.msgpack.encode(told)

    def is_over(self) -> bool:
        return self._state in ("ended", "failed")

    def interrupt(self) -> None:
        """Once: the run ends in good order; twice: everything is killed."""
        if self._run is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._run.interrupt)

    # ---- the run ------------------------------------------------------------------------------------------------

    def _carry_out(self, again: bool) -> None:
        try:
            if not again and not self._given.wait(PROBE_S):
                raise RunFailed("whoever started the run was gone before it began")
            self._prepare(again)
            assert self._run is not None
            asyncio.run(self._run_to_end(self._run))
            failure = import_named("closes", self._job.closes)(self._out, self._run.shortfall)
            self._run.close()  # a standby may still write
            self._remark = import_named("uploads", self._job.uploads)(self._out)
            if failure:
                raise RunFailed(failure)
            self._close("ended")
        except AtollError as error:
            self._fail(error)
        except Exception as error:  # of whatever kind: nobody else would tell of it
            self._fail(RunFailed(f"the controller failed: {type(error).__name__}: {error}"))
        finally:
            time.sleep(LINGER_S)
            ray.kill(ray.get_runtime_context().current_actor, no_restart=True)

    def _fail(self, error: AtollError) -> None:
        self._error = error if isinstance(error, RunFailed) else RunFailed(str(error))
        self._error.exit_code = error.exit_code
        self._close("failed")

    def _close(self, state: str) -> None:
        """Every process and keeper is gone before anybody hears that it is over."""
        if self._run is not None:
            self._run.close()
        self._state = state

    async def _run_to_end(self, run: RayRun) -> None:
        self._loop = asyncio.get_running_loop()
        self._state = "running"
        await run.run()

    def _prepare(self, again: bool) -> None:
        job, config = self._job, parse(self._job.config, "the command line")
        nodes, resume = list_nodes(), None
        adopts = again and self._out.address.exists()
        needs = LearnerNeeds(config.cpus_per_learner, config.gpus_per_learner, config.nodes_per_learner)
        if not again and (shortage := find_shortage(nodes, config.protocol.learners, needs)):
            raise ConfigError(shortage)
        if job.resume:
            RunDir.open(self._out.path)
        elif not again or not self._out.path.exists():
            RunDir.create(self._out.path, force=job.force, shared=config.service.share_files)
        if config.service.store:
            self._open_store(config.service.store, again=again)
        if job.resume and not adopts:
            resume = plan_resume(self._out, job.changes, accept_loss=job.accept_loss)
        files = [str(self._out.path), job.launch.folder, *(one for one in job.script[:1] if one != "-m")]
        if not again and (told := find_blind_nodes(nodes, files)):
            raise ConfigError(f"{told[0]}: put it where every node sees it, on a file system that they share")
        self._run = RayRun(
            config,
            self._out,
            script=list(job.script),
            evaluator=config.service.evaluate_every > 0,
            resume=resume,
            watch=self._note,
            pages=job.pages,
            listens=self._note_link,
            max_restarts=job.max_restarts,
            launch=job.launch,
            heeds_signals=False,
            start_s=START_S,
            again=again,
            adopts=adopts,
            credentials=self._credentials,
        )

    def _open_store(self, url: str, *, again: bool) -> None:
        if again:
            self._credentials = read_credentials(self._out.secrets)
        else:
            keep_credentials(self._out.secrets, self._credentials)
        os.environ.update(self._credentials)  # this process is the controller's alone
        if not again or read_place(self._out.path) is None:
            attach_store(self._out, url)

    def _note(self, status: RunStatus | None) -> None:
        self._status = status

    def _note_link(self, link: str) -> None:
        self._link = link


def make_controller(folder: Path, job: RunJob, credentials: dict[str, str]) -> Any:
    """ConfigError: the run has one. `credentials`: of its bucket."""
    options: dict[str, Any] = {"name": name_actor(folder, CONTROLLER), "namespace": NAMESPACE, "lifetime": "detached"}
    if find_head():  # the cluster ends with it: a controller there is lost with no other node
        options["resources"] = {HEAD: 0.001}  # (a soft affinity to it Ray does not heed where no CPUs are asked for)
    make = ray.remote(Controller).options(**options, num_cpus=0, max_restarts=-1, max_concurrency=8)
    if (before := find_controller(folder)) is not None and ray.get(before.is_over.remote(), timeout=PROBE_S):
        ray.kill(before, no_restart=True)  # it stays a while for those who watch
    try:
        made = make.remote(msgspec.msgpack.encode(job))
        # Through a Ray Client this is the first to know.
        ray.get(made.give_credentials.remote(msgspec.msgpack.encode(credentials)), timeout=PROBE_S)
        return made
    except ValueError:
        raise ConfigError(
            f"run {folder} is alive on this cluster: watch it with atoll train --on ray --resume {folder}, or use "
            "another folder; nothing of it was touched"
        ) from None


def find_controller(folder: Path) -> Any | None:
    """Of this run, if it goes on in this cluster."""
    try:
        return ray.get_actor(name_actor(folder, CONTROLLER), NAMESPACE)
    except ValueError:
        return None
