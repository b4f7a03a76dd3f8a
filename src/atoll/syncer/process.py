"""The syncer as a process: run directory, signals, a supervisor's orders, exit code.

Under a supervisor, orders come as lines on standard input: `end REASON` ends the run in good order; `unscored` means
that no evaluator is left to wait for. When standard input closes, the supervisor is gone, and the run ends too; where
another syncer stands by (`mortal`) only this process does, as if it were killed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn, Protocol

from atoll.bucket.uploader import StoreLag, Uploader, make_uploader
from atoll.config import TAIL_CUTS, Config
from atoll.fabric.address import host_port
from atoll.fabric.handlers import ServedPages
from atoll.fabric.listener import allow_files
from atoll.fabric.tasks import VitalTasks, keep_showing
from atoll.numerics import kernels
from atoll.numerics.arrays import FloatArray
from atoll.protocol.errors import AtollError, ConfigError, RunFailed, first_error
from atoll.store.atomic import Appender, write_atomic
from atoll.store.disk import Disk, DiskFailed
from atoll.store.event_parts import PART_BYTES, begin_part, events_size, open_parts, read_events
from atoll.store.rundir import RunDir, facts_of_model, read_model_facts, save_model
from atoll.store.writer_lease import Deposed, StandbyTurn, WriterLease, acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog, parse
from atoll.telemetry.status import RunStatus

OPERATOR = "the operator asked for it"
STALE_S = 5.0
"""A standby takes over from a syncer whose lease is this old; from one whose process is gone, at once."""
LOOK_S = 0.25
SHOW_S = 5.0
"""Seconds between two states of the run that a terminal is given."""
DAY_S, RECENT_BYTES = 86400.0, 1 << 26
"""Age of the relays that a syncer still shows after it started, and how much of the events it reads for them."""
ELSEWHERE = DiskFailed.exit_code
"""The exit code of a syncer that another machine has replaced: to start it again would not help."""


Figures = Callable[[], RunStatus]
"""The state of the run now."""


class LivePages(ServedPages, Protocol):
    """The dashboard: made above this layer, and handed in or named."""

    def run(self, figures: Figures) -> Coroutine[Any, Any, None]:
        """Follow the run until cancelled."""
        ...


PagesMaker = Callable[[RunDir], LivePages]


def serve(
    config: Config,
    out: RunDir,
    *,
    evaluated: bool,
    score_wait_s: float = 0.0,
    supervised: bool = False,
    changes: tuple[str, ...] = (),
    reopen: bool = False,
    standby: Callable[[], None] | None = None,
    ready: Callable[[str, str, str], None] | None = None,
    pages: PagesMaker | None = None,
    watch: Callable[[RunStatus], None] | None = None,
    disk: Disk | None = None,
    mortal: bool = False,
    or_any_port: bool = False,
) -> int:
    """Run a syncer until its run is over. Its address is written to the run directory; `ready` gets the address, the
    run's name and a link to the dashboard.

    With `standby` it first waits for its turn, and calls it when it begins to wait. `pages` make the dashboard; `watch`
    is given the state of the run every few seconds.
    """
    kernels.warm()
    allow_files()
    code = 0
    uploader: Uploader | None = None
    try:
        if not config.service.share_files:
            out.close_to_others()
        lease = acquire(out.journal) if standby is None else _wait_for_turn(out, standby)
        if url := config.service.store:
            kept_first = config.service.durability == "store"
            keep, shards = config.protocol.keep_cuts, config.service.shards
            uploader = make_uploader(out, url, lease.term, keep=keep, told_after_put=kept_first, shards=shards)
        run_store = RunStore(
            out,
            lease,
            every_round=config.service.durability != "cut",
            keep=config.protocol.keep_cuts,
            payload_cuts=TAIL_CUTS if config.service.tail_average else 2,
            disk=disk,
            uploader=uploader,
        )
        begin = StartOptions(
            changes,
            reopen,
            ready or (lambda url, run, look: None),
            pages(out) if pages is not None else None,
            watch,
            by_hand=not supervised and standby is None,
            mortal=mortal,
            uploader=uploader,
            or_any_port=or_any_port,
            score_wait_s=score_wait_s,
        )
        if standby is None or not _ended_well(out, run_store):
            asyncio.run(_serve(config, out, run_store, begin, evaluated, supervised))
        run_store.close()
    except* AtollError as errors:
        error = first_error(errors)
        code = error.exit_code
        if uploader is not None and uploader.deposed:
            error, code = RunFailed(f"this run went on elsewhere: {config.service.store} has a later term"), ELSEWHERE
        print(f"atoll: {error}", file=sys.stderr, flush=True)
    return code


def import_named(option: str, name: str) -> Any:
    """What a supervisor names as `module:function`: it makes the dashboard, or a disk with faults (chaos)."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{option} {name} is not there ({error}): name a module and a function in it") from error


def _wait_for_turn(out: RunDir, waiting: Callable[[], None]) -> WriterLease:
    """Wait until the syncer that serves this run is gone, or its lease is stale."""
    turn = StandbyTurn(out.journal, STALE_S)
    waiting()
    while (lease := turn.try_claim(time.monotonic())) is None:
        time.sleep(LOOK_S)
    return lease


def _ended_well(out: RunDir, run_store: RunStore) -> bool:
    """Whether the syncer before this standby finished the run: everybody has left and the model is written. Another
    term would only log the end once more, without the learners, which it never met."""
    if run_store.found_on_disk is None or not run_store.found_on_disk.history.finished:
        return False
    history = run_store.found_on_disk.history
    facts = facts_of_model(history.run, history.committed, history.versions)
    if any(life.open for life in history.lives.values()) or not facts.items() <= read_model_facts(out.model).items():
        return False
    print(f"the run in {out.path} is over: {history.ended}", flush=True)
    return True


@dataclass(frozen=True)
class StartOptions:
    """What the service is started with."""

    changes: tuple[str, ...]
    reopen: bool
    ready: Callable[[str, str, str], None]
    pages: LivePages | None = None
    watch: Callable[[RunStatus], None] | None = None
    by_hand: bool = False
    """Nobody else says that everything is started. A standby that takes over starts nothing: learners go on."""
    mortal: bool = False
    """Whoever holds our standard input is not the run's supervisor: should it go, the run goes on elsewhere."""
    uploader: Uploader | None = None
    """Of a run with a store."""
    or_any_port: bool = False
    """Where the port is taken, another will do."""
    score_wait_s: float = 0.0
    """Wait at least so long for the score of the last model."""


async def _serve(
    config: Config, out: RunDir, run_store: RunStore, begin: StartOptions, evaluated: bool, supervised: bool
) -> None:
    with Appender(out.events, PART_BYTES, begin_part) as sink, closing(EventLog(sink)) as events:
        if begin.by_hand:
            events.say("started", "syncer started", {"process": "syncer", "pid": os.getpid()})
        run = ("" if run_store.found_on_disk else _announced(out)) or secrets.token_hex(4)
        service = SyncerService(
            config,
            run=run,
            events=events,
            run_store=run_store,
            evaluated=evaluated,
            score_wait_s=begin.score_wait_s,
            earlier_relays=_find_relays(out, time.time() - DAY_S),
            pages=begin.pages,
        )
        service.server.or_any_port = begin.or_any_port
        service.meter.supervised = supervised
        if supervised and not evaluated:
            service.unscored()
        if begin.changes or begin.reopen:
            service.operator.ask_to_change(begin.changes, reopen=begin.reopen)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, service.end, OPERATOR)

        def save(tensors: Mapping[str, FloatArray]) -> None:
            if run_store.fenced():  # another syncer may have committed newer versions
                raise Deposed
            save_model(out.model, tensors, service.model_facts())

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run(save))
            started = tasks.create_task(service.started.wait())
            beside: list[asyncio.Task[Any]] = [started]
            _fall_with_callbacks(loop, service.vital)
            if begin.uploader is not None:
                service.show_store(begin.uploader.lag)
                begin.uploader.start()
                beside.append(tasks.create_task(_watch_store(begin.uploader, service.meter.store, events)))
            if begin.pages is not None:
                beside.append(tasks.create_task(show_pages(begin.pages, service.figures, events)))
            if begin.watch is not None:
                beside.append(tasks.create_task(_show_progress(begin.watch, service.figures, events)))
            if supervised:
                beside.append(tasks.create_task(_obey(service, begin.mortal)))
            await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                url = _local_url(config, service)
                write_atomic(out.address, url.encode())
                begin.ready(url, service.name, f"{url}{service.dashboard_path()}")
            await asyncio.wait([running])
            for task in beside:
                task.cancel()


def _announced(out: RunDir) -> str:
    """The name of a run that was announced and has not begun: join links contain it. Later the journal knows it."""
    with open_parts(out.events) as parts:
        lines = parts[0].file if parts else ()
        return next((str(event["run"]) for event in parse(lines) if event["kind"] == "run" and "run" in event), "")


def _find_relays(out: RunDir, since: float) -> set[str]:
    """Return the relays that the newest events tell of."""
    recent = read_events(out.events, max(0, events_size(out.events) - RECENT_BYTES))
    told = parse(line for line in recent.splitlines(keepends=True) if b'"kind":"relay"' in line)
    return {event["relay"] for event in told if event["at"] > since}


def _local_url(config: Config, service: SyncerService) -> str:
    """The address for commands on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(service.server.host, service.server.host)
    scheme = "https" if config.service.keys and not config.service.front else "http"
    return f"{scheme}://{host_port(host, service.server.port)}"


async def _obey(service: SyncerService, mortal: bool) -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    try:
        while line := await reader.readline():
            order, _, reason = line.decode(errors="replace").strip().partition(" ")
            if order == "end":
                service.end(reason)
            elif order == "unscored":
                service.unscored()
        if mortal:
            os._exit(1)
        service.unscored()
        service.end("its supervisor is gone")
    finally:
        transport.close()


async def _watch_store(uploader: Uploader, find_lag: Callable[[], StoreLag | None], events: EventLog) -> NoReturn:
    """Say when the store does not answer, and when it does again. Deposed: another machine has claimed the run."""
    alarmed = ""
    while True:
        lag = find_lag() or uploader.lag()
        if lag.trouble and not alarmed:
            behind = f"is {lag.rounds} rounds behind" if lag.known else "lacks rounds, how many is not known yet"
            text = f"the store fails: {lag.trouble} (the bucket {behind}, the run goes on)"
            events.say("alarm", text, {"about": "store", "over": False})
        elif alarmed and not lag.trouble:
            events.say("alarm", "the store answers again", {"about": "store", "over": True})
        alarmed = lag.trouble
        if uploader.deposed:
            raise Deposed
        await asyncio.sleep(LOOK_S)


async def show_pages(pages: LivePages, figures: Figures, events: EventLog) -> NoReturn:
    """Until cancelled. A mistake in the pages is reported and they start again: the run does not notice."""
    await keep_showing("the dashboard", lambda: pages.run(figures), lambda text: events.say("alarm", text))


async def _show_progress(watch: Callable[[RunStatus], None], figures: Figures, events: EventLog) -> NoReturn:
    """The same for lines on a terminal."""

    async def show() -> NoReturn:
        while True:
            await asyncio.sleep(SHOW_S)
            watch(figures())

    await keep_showing("the progress", show, lambda text: events.say("alarm", text))


def _fall_with_callbacks(loop: asyncio.AbstractEventLoop, vital: VitalTasks) -> None:
    """End the syncer when a timer raises: otherwise it would look alive and do nothing."""

    def fail(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context:
            vital.fail(context["exception"])
        loop.default_exception_handler(context)

    loop.set_exception_handler(fail)
