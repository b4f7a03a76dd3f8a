"""`atoll train --on ray`: a run on a Ray cluster, watched from here; it goes on without whoever watches."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
from rich.console import Console

from atoll.bucket.client import select_credentials
from atoll.cli.shared import close, document_of, short
from atoll.cli.store import restore_if_empty
from atoll.config import Config, convert, merged, parse_settings
from atoll.launch.begun_here import check_begun_here, remember_run
from atoll.launch.environment import capture_environment, read_environment
from atoll.launch.local import WORKLOAD
from atoll.launch.on_ray.cluster import LearnerNeeds, connect, find_shortage, import_ray, list_nodes, parse_engine
from atoll.observe import dashboard
from atoll.observe.screen import choose_screen
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.store.rundir import RUNS, RunDir
from atoll.syncer.changes import check_changeable
from atoll.telemetry.events import parse

LOOK_S = 0.5
ANSWER_S = 120.0
"""A controller whose node is lost is started again by Ray meanwhile."""
CLOSES, UPLOADS = "atoll.cli.shared:close_unseen", "atoll.cli.store:finish_unseen"
QUESTION = "Ctrl-C: d detaches (the run goes on), e ends it in good order, k kills everything, Enter goes on watching: "


def start_on_ray(
    engine: str, config: Config, out: Path | None, script: list[str], max_restarts: int, *, force: bool, as_json: bool
) -> None:
    address = parse_engine(engine)
    import_ray()
    check_config(config)
    connect(address)
    from atoll.launch.on_ray.controller import RunJob, find_controller, make_controller

    folder = (out or RUNS / time.strftime("%Y%m%d-%H%M%S")).absolute()
    if find_controller(folder) is None:
        needs = LearnerNeeds(config.cpus_per_learner, config.gpus_per_learner, config.nodes_per_learner)
        if shortage := find_shortage(list_nodes(), config.protocol.learners, needs):
            raise ConfigError(shortage)
    job = RunJob(
        str(folder),
        config.toml().decode(),
        tuple(absolute(script)),
        capture_environment(),
        dashboard.NAME,
        CLOSES,
        UPLOADS,
        max_restarts,
        force=force,
    )
    remember_run(config, job.launch)
    credentials = select_credentials(config.service.store, os.environ)
    watch_run(make_controller(folder, job, credentials), RunDir(folder), as_json=as_json)


def resume_on_ray(
    engine: str,
    folder: Path,
    words: list[str],
    max_restarts: int,
    *,
    store: str | None,
    as_json: bool,
    trusted: bool,
    accept_loss: bool,
) -> None:
    """Watch the run if it goes on, else go on with it; from its bucket, where the folder is empty."""
    address = parse_engine(engine)
    ray = import_ray()
    connect(address)
    from atoll.launch.on_ray.controller import RunJob, find_controller, make_controller

    run = RunDir(folder.absolute())
    controller = find_controller(run.path)
    if controller is not None and not ray.get(controller.is_over.remote(), timeout=ANSWER_S):
        if words:
            raise ConfigError(f"{words[0]}: the run goes on; change it by atoll set or atoll scale")
        watch_run(controller, run, as_json=as_json)
        return
    if store is not None:
        restore_if_empty(run.path, store, Console(stderr=as_json), accept_loss=accept_loss)
    no_rules = ("cpus_per_learner", "gpus_per_learner", "nodes_per_learner", "store", "durability")
    rules = tuple(word for word in words if word.partition("=")[0] not in no_rules)
    check_changeable(rules)
    check_begun_here(RunDir.open(run.path), trusted=trusted)
    config = convert(merged(document_of(run.settings), parse_settings(words)), str(run.settings))
    job = RunJob(
        str(run.path),
        config.toml().decode(),
        tuple(config.script or WORKLOAD),
        read_environment(run.path) or capture_environment(),
        dashboard.NAME,
        CLOSES,
        UPLOADS,
        max_restarts,
        resume=True,
        changes=rules,
        accept_loss=accept_loss,
    )
    remember_run(config, job.launch)
    credentials = select_credentials(config.service.store, os.environ)
    watch_run(make_controller(run.path, job, credentials), run, as_json=as_json)


def check_config(config: Config) -> None:
    """ConfigError: something of it cannot be on a cluster."""
    service = config.service
    if given := [name for name in ("keys", "front", "mutual", "advertise") if getattr(service, name)]:
        raise ConfigError(f"[service] {given[0]}: a run on Ray makes its own keys, in its folder: leave it out")
    if service.shards > 1:
        raise ConfigError("--syncer-shards is not there on Ray yet: leave it out, or start the shards by hand")


def absolute(script: list[str]) -> list[str]:
    return script if script[:1] == ["-m"] else [str(Path(script[0]).absolute()), *script[1:]]


# ---- watching -------------------------------------------------------------------------------------------------------


class Interrupts:
    """Signals since they were last asked for. The second one within a question is no answer."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    @contextmanager
    def noted(self) -> Iterator[Interrupts]:
        before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def watch_run(controller: Any, out: RunDir, *, as_json: bool) -> None:
    """Show the run until it is over, or until whoever watches has seen enough."""
    ray = import_ray()
    from atoll.launch.on_ray.controller import Watched

    console = Console(stderr=as_json)
    console.print(f"the run is on the cluster, in {short(out.path)}; it goes on without this terminal", style="dim")
    offset, told_link = 0, ""
    with Interrupts().noted() as interrupts, choose_screen(console) as view:
        while True:
            try:
                answer = ray.get(controller.watch.remote(offset), timeout=ANSWER_S)
            except ray.exceptions.ActorUnavailableError:
                time.sleep(LOOK_S)  # Ray starts it again elsewhere
                continue
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                raise RunFailed(f"the run's controller is gone: see {short(out.path)}, and {again(out)}") from None
            now = msgspec.msgpack.decode(answer, type=Watched)
            if now.link and now.link != told_link:
                told_link = now.link
                view.show_link(now.link)
            events = list(parse(now.events.splitlines(keepends=True)))
            offset = now.offset
            view.update(now.status, events)
            if interrupts.count:
                if (choice := ask_choice()) == "d":
                    break
                for _ in range({"e": 1, "k": 2}.get(choice, 0)):
                    ray.get(controller.interrupt.remote(), timeout=ANSWER_S)
                    time.sleep(1.0)  # two at once are one
                interrupts.count = 0
            if now.state in ("ended", "failed") and not now.events:
                break
            time.sleep(LOOK_S)
    if now.state not in ("ended", "failed"):
        console.print(f"detached; the run goes on. To watch it: {again(out)}", soft_wrap=True, highlight=False)
        return
    if now.remark:
        console.print(now.remark, style="bold yellow", soft_wrap=True, highlight=False, markup=False)
    if now.state == "failed":
        failure = RunFailed(now.failure)
        failure.exit_code = now.exit_code
        raise failure
    if out.events.exists():
        close(out, console, as_json, again="atoll train --on ray")


def ask_choice() -> str:
    """What Ctrl-C is to do; without a terminal: to detach."""
    if not sys.stdin.isatty():
        return "d"
    print(f"\n{QUESTION}", end="", file=sys.stderr, flush=True)
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        continue
    return os.read(sys.stdin.fileno(), 64).decode(errors="replace").strip().lower()[:1]


def again(out: RunDir) -> str:
    return f"atoll train --on ray --resume {short(out.path)}"
