"""Commands that look at a run, check it, or change it: status, dashboard, verify, export, set, scale, drain, report."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.cli.shared import address_of, is_address, read_failure, short, where
from atoll.cli.store import open_copy
from atoll.extras import check_installed
from atoll.fabric.address import without_secrets
from atoll.fabric.local_secrets import is_own_process
from atoll.fabric.transfer import get_json, make_dashboard_link, post_drain, post_settings
from atoll.launch.resume import describe_resume, describe_unspent, name_command
from atoll.launch.scaling import choose_leavers, parse_count
from atoll.observe.figures import plain
from atoll.observe.report import write_report
from atoll.observe.report.reading import ReportedRun, read_run
from atoll.observe.screen import LiveScreen
from atoll.observe.story import conclude, print_closing, print_command, story, verification_rows
from atoll.observe.tail import EventTail
from atoll.protocol.errors import ConfigError, NotAdmitted, PeerError, RunFailed, Unreachable, WrongCertificate
from atoll.store.export import export_kept, export_run
from atoll.store.rundir import RunDir, newest_run
from atoll.store.verify import verify_run
from atoll.store.writer_lease import describe_holder, find_other_host, is_alive
from atoll.telemetry.status import AWAY, RunStatus

ENDING = ("ending", "closing", "finished")
STARTING = ("started", "restarted", "reigned")
"""Kinds of events by which a run whose syncer does not answer is told to end, or to start."""


def status(run: str, watch: bool, json_: bool) -> None:
    folder = None if is_address(run) else RunDir(Path(run).absolute())
    if folder is not None and _is_over(folder):
        _show_end(folder, as_json=json_)
        return
    if folder is not None and not folder.address.exists() and is_alive(folder.path):
        _show_no_answer(folder, as_json=json_)
        return
    url = where(run)
    try:
        now = asyncio.run(_status(url))
    except WrongCertificate:
        raise
    except Unreachable as error:
        if folder is not None:
            if is_alive(folder.path):
                _show_no_answer(folder, as_json=json_)
            else:
                _show_end(folder, as_json=json_)
            return
        hint = "is the run over, or its host cut off? Name its folder: its figures are shown, or who serves it"
        raise Unreachable(f"no syncer answers at {without_secrets(url)}: {hint}") from error
    processes = ProcessEvents(folder.events) if folder is not None else None
    if watch:
        asyncio.run(_follow(url, processes))
        return
    pids: dict[str, int] = {}
    if processes is not None:
        pids, now = processes.find_running(), processes.show_restarts(now)
    if json_:
        print(msgspec.json.encode({**msgspec.to_builtins(now), "pids": pids}).decode())
    else:
        console = Console()
        with LiveScreen(console) as screen:
            screen.update(now)
        if pids:
            line = f"pids: {', '.join(f'{name} {pid}' for name, pid in pids.items())}"
            console.print(line, style="dim", soft_wrap=True, highlight=False, markup=False)


class ProcessEvents:
    """The processes of a run that `atoll train` started, as its events tell."""

    def __init__(self, events: Path) -> None:
        self._tail = EventTail(events, near_bytes=0)
        self._pids: dict[str, dict[str, int]] = {}
        """Pids of those that have not ended; of a learner of several ranks, of all of them."""
        self._joined: set[str] = set()
        """Learners that have joined since they were started."""

    def find_running(self) -> dict[str, int]:
        """Return the pid of each process that runs, by its name."""
        self._read()
        return {name: pid for pids in self._pids.values() for name, pid in pids.items() if is_own_process(pid)}

    def show_restarts(self, status: RunStatus) -> RunStatus:
        """Return the status with "restarting" for each absent learner whose process runs and has not joined yet."""
        self._read()
        learners = [
            msgspec.structs.replace(one, state="restarting")
            if one.state in ("away", "gone") and one.learner in self._pids.keys() - self._joined
            else one
            for one in status.learners
        ]
        return msgspec.structs.replace(status, learners=tuple(learners))

    def _read(self) -> None:
        for event in self._tail.new_events():
            name = str(event.get("process") or event.get("learner"))
            if event["kind"] in ("started", "restarted"):
                self._pids[name] = {name: event["pid"], **event.get("ranks", {})}
                self._joined.discard(name)
            elif event["kind"] == "exited":
                self._pids.pop(name, None)
            elif event["kind"] == "joined":
                self._joined.add(name)


def _is_over(run: RunDir) -> bool:
    """Nobody on this machine has it, and its figures are there, or no address of a syncer is. An address alone says
    nothing: the port may be another run's by now."""
    if not run.holds_run() or is_alive(run.path):
        return False
    return run.summary.exists() or not run.address.exists()


def _show_no_answer(run: RunDir, *, as_json: bool) -> None:
    """Somebody has the run, and its syncer does not answer here."""
    kinds = [event["kind"] for event in EventTail(run.events, near_bytes=0).new_events()]
    facts, text = {"state": "starting"}, "This run is starting, or its syncer is: nothing answers yet. "
    if next((kind in ENDING for kind in reversed(kinds) if kind in (*ENDING, *STARTING)), False):
        facts, text = {"state": "ending"}, "This run is ending: its syncer is done, and its summary follows. "
    text += "Ask again in a few seconds."
    if host := find_other_host(run.journal):
        facts = {"state": "elsewhere", "host": host}
        text = (
            f"This run is served on {host} ({describe_holder(run.journal)}), not on this machine. Ask there, or by a "
            f"link: atoll status LINK. If no syncer answers there, and {host} is cut off: end that process there (kill "
            "-9), and a standby takes over"
        )
    print(msgspec.json.encode(facts).decode() if as_json else text)


def _show_end(run: RunDir, *, as_json: bool) -> None:
    """What came of a run that has ended, or was cut off."""
    found = read_run(run.path)
    if as_json:
        told = {"state": found.state, "missing": found.missing, "failure": read_failure(run) or None}
        print(msgspec.json.encode({**told, **found.summary}).decode())
        return
    console = Console()
    unspent, again = describe_unspent(run), name_command(run)
    place = f" at {unspent}" if unspent else ""
    if found.state != "ended":
        command = f"{again} --resume {short(run.path)}"
        print_command(console, f"This run has not ended: it was cut off{place}. It goes on with:", command)
    elif not run.summary.exists():
        why = f"This run failed{place}: {_find_reason(found)}. Once that is mended, it goes on with:"
        print_command(console, why, describe_resume(run, short(run.path)))
    else:
        place = ""
        if failure := read_failure(run):
            console.print(Text(f"This run failed: {plain(failure)}", "yellow"), soft_wrap=not console.is_terminal)
    sentences = story(found.summary, found.timeline)
    unspent = "" if place else unspent
    print_closing(console, found.summary, sentences, out=short(run.path), again=again, unspent=unspent)


def _find_reason(found: ReportedRun) -> str:
    deaths = [e["text"] for e in found.timeline if e["kind"] == "exited" and e.get("code") and e.get("text")]
    return str(deaths[-1] if deaths else found.summary.get("reason"))


async def _status(url: str) -> RunStatus:
    return msgspec.convert(await get_json(url, "/v1/status"), RunStatus)


async def _follow(url: str, processes: ProcessEvents | None) -> None:
    with LiveScreen(Console()) as screen:
        while True:
            try:
                now = await _status(url)
                screen.update(processes.show_restarts(now) if processes is not None else now)
            except Unreachable:
                return
            await asyncio.sleep(0.5)


def dashboard(run: str) -> None:
    print(asyncio.run(make_dashboard_link(where(run))))


def drain(learner: str, run: str | None) -> None:
    place = where(run) if run is not None else address_of(newest_run())
    print(asyncio.run(post_drain(place, learner)))


def verify(run: Path | str, json_: bool) -> None:
    console = Console(stderr=json_)
    with open_copy(run, console) as folder, console.status("reading") as status:
        report = verify_run(folder, progress=lambda what, number: status.update(f"{what} {number:,}"))
    if json_:
        print(msgspec.json.encode(report.document()).decode())
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in verification_rows(report):
            table.add_row(f"[dim]{name}[/]", value)
        console.print(table)
        for remark in report.remarks:
            console.print(f"note: {remark}", soft_wrap=True, highlight=False)
        if report.ok:
            console.print(conclude(report), style="yellow" if report.facts["unjudged"] else "green", soft_wrap=True)
    if not report.ok:
        raise RunFailed(report.problem)


def export(
    run: Path | str,
    out: Path,
    cut: int | None,
    best: bool,
    ema: bool,
    tail: int | None,
    force: bool,
    merged: bool,
    parameter_names: bool,
) -> None:
    console = Console()
    asked = {"--best": best, "--ema": ema, "--cut": cut is not None, "--tail": tail is not None}
    named = [option for option, given in asked.items() if given]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} name different models: give one of them")
    kept = "best" if best else "ema" if ema else ""
    with open_copy(run, console) as folder:
        _export(console, folder, out, cut, kept, tail, force, merged, parameter_names)


def _export(
    console: Console,
    run: Path,
    out: Path,
    cut: int | None,
    kept: str,
    tail: int | None,
    force: bool,
    merged: bool,
    parameter_names: bool,
) -> None:
    if kept:
        copied = export_kept(run, out, kept, force=force, merged=merged, parameter_names=parameter_names)
        for remark in copied.remarks:
            console.print(f"note: {remark}", soft_wrap=True, highlight=False)
        facts = defaultdict(lambda: "unknown", copied.facts)
        if kept == "best":
            what = f"the best of run {facts['run']} ({facts['figure']} {facts['score']} at round {facts['round']})"
        else:
            models = f"{facts['models']} models to round {facts['round']}, decay {facts['decay']}"
            what = f"the moving average of run {facts['run']} ({models})"
        console.print(f"{what} is in {short(copied.file)}", soft_wrap=True, highlight=False)
        return
    done = export_run(run, out, cut, force=force, merged=merged, tail=tail, parameter_names=parameter_names)
    for remark in done.remarks:
        console.print(f"note: {remark}", soft_wrap=True, highlight=False)
    where = f"cut {done.cut} and {done.replayed} rounds behind it" if done.replayed else f"cut {done.cut}"
    console.print(
        f"run {done.run} after {done.round:,} rounds ({where}) is in {short(done.file)}",
        soft_wrap=True,
        highlight=False,
    )
    if done.tail is not None:
        console.print(f"the mean of its last {tail} cycles is in {short(done.tail)}", soft_wrap=True, highlight=False)


def set_(run: str, words: list[str]) -> None:
    url = where(run)
    try:
        changed = asyncio.run(post_settings(url, words))
    except (WrongCertificate, NotAdmitted):
        raise
    except PeerError as error:  # nothing was changed: as in the command that begins a run
        raise ConfigError(str(error)) from None
    except Unreachable as error:
        raise Unreachable(
            f"no syncer answers at {without_secrets(url)}: settings change while a run goes on, or with --resume"
        ) from error
    Console().print(f"changed: {changed}" if changed else "everything was like that already", highlight=False)


def scale(run: str, number: str) -> None:
    url = where(run)
    try:
        now = asyncio.run(_status(url))
        if now.phase in ("ending", "finished"):
            raise ConfigError(f"the run is ending at round {now.round}: its learners stay as they are")
        wanted = parse_count(number, now.expected)
        if wanted == now.expected:
            print(f"the run has {wanted} learners already")
            return
        asyncio.run(post_settings(url, [f"learners={wanted}"]))
    except WrongCertificate:
        raise
    except Unreachable as error:
        raise Unreachable(f"no syncer answers at {without_secrets(url)}: a run is scaled while it goes on") from error
    print(f"{now.expected} learners become {wanted}")
    if not now.supervised:
        for line in _commands_by_hand(run, now, wanted):
            print(line)


def _commands_by_hand(run: str, status: RunStatus, wanted: int) -> list[str]:
    """What whoever started the learners does now."""
    here = [one.learner for one in status.learners if one.state not in AWAY]
    place = f" --run {run}" if not is_address(run) else " --run LINK"
    if wanted > status.expected:
        first, last = status.expected, wanted - 1
        return [
            f"nobody starts them by itself. Each of them: atoll learn SCRIPT --join LINK --name learner-{first}",
            f"under Slurm: sbatch --array={first}-{last} examples/deploy/slurm/learners.sbatch SCRIPT",
        ]
    leavers = choose_leavers(here, max(0, len(here) - wanted))
    return ["nobody ends them by itself:", *(f"  atoll drain {name}{place}" for name in leavers)] if leavers else []


def report(run: Path, out: Path | None, json_: bool) -> None:
    check_installed("plotly", "atoll report")
    console = Console(stderr=json_)
    with console.status("drawing"):
        found, path = write_report(run, out)
    if json_:
        told = {"report": str(path), "state": found.state, "missing": found.missing, "summary": found.summary}
        print(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    state = (
        "" if found.state == "ended" else f" (the run {'is going on' if found.state == 'going on' else 'was cut off'})"
    )
    console.print(f"the report{state} is in {short(path)}", soft_wrap=True, highlight=False, markup=False)
