"""The live screen of a run. It shows what it is told and nothing else: a status and the newest events.

Drawn in place, only when `update` is called, and never higher than the terminal: first the run, then the learners, then
as many of the last notable events as there is room for. The newest of them that are too long for one row are wrapped
where rows are empty. `choose_screen` gives plain lines where there is no terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import msgspec
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.observe.figures import (
    NONE,
    causes_of,
    clock,
    count,
    decimal,
    listing,
    percent,
    plain,
    span,
    sparkline,
)
from atoll.observe.tail import NO_STEP, EventTail, NotableEvents, PlainLines, describe_presence
from atoll.protocol.statistics import format_score
from atoll.telemetry.events import Event
from atoll.telemetry.status import AWAY, STEPPING, LearnerStatus, RelayStatus, RunStatus

__all__ = ["EventTail", "LiveScreen", "PlainLines", "choose_screen"]

WIDEST = 120
"""Wider than this a table is harder to read, not easier."""
ROOMY = 92
"""Columns beside the longest name, from which on figures stand apart."""
STATE, GAP = 13, 2
"""The widest state with its mark; what lies between two columns."""
FIXED = STATE + len("merged") + len("in last") + 4 * GAP
"""What the table of learners needs beside names and figures …"""
NAME = len("learner-2 #2")
"""… and what it keeps for names before it leaves columns out."""
DROPPED = ("adopted", "tokens/s")
"""Columns that are left out where there is no room, the first one first."""
WIDE = 100
"""From here on three figures stand beside each other."""
LABEL = len("participation")
"""Labels at the left take this much, so that all the rows line up."""
SPARKS = 10
EVENTS = 6
"""At most."""
SHARES = 4
"""Lines about learners with a share of the rounds, and about learners in quarantine, at most."""
ALARMS = 4
"""Lines of them at most."""
FEW, MOST = 10, 0.9
"""After so many rounds, of which fewer than this share were committed, the screen says so."""
OFF_H = 0.15
"""An effective H further off than this is shown as a warning."""

_STATES = {
    "joining": ("◌", "cyan"),
    "starting": ("◌", "cyan"),
    "training": ("●", "green"),
    "stalled": ("◍", "yellow"),
    "muted": ("◍", "yellow"),
    "quarantined": ("✖", "bold red"),
    "stopped": ("■", "blue"),
    "away": ("○", "red"),
    "gone": ("○", "red"),
    "restarting": ("◌", "cyan"),
    "done": ("✓", "green"),
}
_PHASES = {"waiting": "cyan", "training": "green", "ending": "yellow", "finished": "bold green"}


class LiveScreen:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._notes = NotableEvents()
        self._scores: list[float] = []
        self._scored_round: int | None = None
        self._score: Event | None = None
        """The newest that the events tell of."""
        self._status: RunStatus | None = None
        self._link = ""
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def update(self, status: RunStatus | None, notes: Sequence[Event] = ()) -> None:
        """`status` is None while the syncer cannot be asked: the last one known stays."""
        for _ in self._notes.take_events(notes):
            pass
        self._status = status or self._status
        self._score = next((event for event in reversed(notes) if event["kind"] == "score"), self._score)
        if self._status is not None:
            self._status = status = _with_score(self._status, self._score)
            if status.validation_loss is not None and status.validation_round != self._scored_round:
                self._scores.append(status.validation_loss)
                self._scored_round = status.validation_round
        self._live.update(self.render(), refresh=True)

    def show_link(self, link: str) -> None:
        """The syncer is there, and shows the run too."""
        self._link = link

    def __enter__(self) -> LiveScreen:
        self._live.start()
        self._live.update(self.render(), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        width = min(self._console.width, WIDEST)
        status = self._status
        if status is None:
            start = Panel(Text("starting the syncer …", "dim"), title="Atoll", width=width)
            return Group(start, self._render_events(self._console.height - 5))
        run = _run_panel(status, self._scores, width)
        if self._link:
            run.subtitle, run.subtitle_align = Text(f"dashboard: {self._link}"), "left"
        lines = [*_quarantine_lines(status.learners), *_share_lines(status.learners)]
        learners = Group(_learner_table(status.learners, width), *lines)
        used = len(self._console.render_lines(Group(run, learners), pad=False)) + 2
        return Group(run, learners, self._render_events(self._console.height - used))

    def _render_events(self, rows: int) -> RenderableType:
        events = self._notes.list_newest(min(EVENTS, rows))
        spare, lines = rows - len(events), list[Text]()
        for event in reversed(events):
            wrapped = self._notes.wrap_line(event, self._console, 1 + spare)
            spare, lines = spare - len(wrapped) + 1, [*wrapped, *lines]
        return Group(Text(), *lines) if lines else Text()


def choose_screen(console: Console) -> LiveScreen | PlainLines:
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainLines(console)


def _with_score(status: RunStatus, score: Event | None) -> RunStatus:
    """The last score comes when the syncer may not be asked any more."""
    if score is None or score.get("loss") is None or score.get("round", -1) <= (status.validation_round or -1):
        return status
    metrics = {name: value for name, value in (score.get("metrics") or {}).items() if value is not None}
    return msgspec.structs.replace(
        status, validation_loss=score["loss"], validation_round=score["round"], metrics=metrics
    )


def _run_panel(status: RunStatus, scores: Sequence[float], width: int) -> Panel:
    title = Text.assemble(("Atoll", "bold"), f" · {plain(status.run)}")
    phase = Text(status.phase, _PHASES.get(status.phase, ""))
    alarms = [status.alarm, status.store_alarm, *(one.alarm for one in status.learners)]
    alarm = [Text(f"ALARM: {plain(text)}", "bold white on red") for text in alarms if text][:ALARMS]
    notice = [Text(plain(status.notice), "yellow")] if status.notice else []
    room = [] if alarm or notice else [Text()]  # their lines come in its place, so that the learners stay on the screen
    body = Group(*alarm, *notice, _progress(status), *room, _facts(status, scores, width), _last_round(status))
    title.append(" · ").append_text(phase)
    if status.phase in ("waiting", "training"):
        title.append(f" · {describe_presence(status)}")
    return Panel(body, title=title, title_align="left", width=width, padding=(0, 1), box=box.ROUNDED)


def _progress(status: RunStatus) -> Table:
    line = Table.grid(expand=True, padding=(0, 1))
    line.add_column(ratio=1)
    line.add_column(justify="right", no_wrap=True)
    # A later term goes on with what others did: their time is not in elapsed_s.
    since = "elapsed" if status.term <= 1 else f"since it went on in term {status.term}"
    elapsed = f"{clock(status.elapsed_s)} {since}"
    if status.phase == "waiting":
        held = bool(status.versions) and min(status.versions) >= 0
        words = f"waiting for {'all learners to hold version 0' if held else 'the first parameters'}"
    elif status.phase == "ending":
        words = f"{elapsed} · collecting the last steps"
    elif status.phase == "finished":
        words = elapsed
    else:
        words = f"{elapsed} · {_left(status)}"
    if not status.budgeted:
        line.add_row(Text(words), Text())
        return line
    bar = ProgressBar(total=1.0, completed=min(1.0, max(0.0, status.progress)), complete_style="cyan")
    line.add_row(bar, Text(f"{percent(status.progress)} · {words}"))
    return line


def _left(status: RunStatus) -> str:
    if not status.budgeted:
        return "no budget: it trains until its scripts end"
    if status.left_s is not None:
        return f"{clock(status.left_s)} left"
    anybody = any(one.state in STEPPING for one in status.learners)
    return "time left not known yet" if anybody else "nobody makes steps now"


def _facts(status: RunStatus, scores: Sequence[float], width: int) -> Table:
    facts: list[tuple[str, Text]] = [
        ("round", Text(f"{count(status.round)} · step {count(status.global_step)}")),
        ("goodput", _goodput(status)),
        ("tokens", Text(f"{count(status.tokens)} · {count(status.tokens_per_s)}/s")),
        ("effective H", _effective_h(status)),
        ("participation", _share(status.participation, 0.5)),
        ("validation", _validation(status, scores)),
        ("grace", _grace(status)),
        ("merged share", _share(status.merged_share, 0.8)),
        ("median gap", Text(span(status.median_gap_s))),
    ]
    if status.data_parallel:  # gradients are averaged at every step: rounds are only copies of the model
        facts = [fact for fact in facts if fact[0] != "effective H"]
    beside = 3 if width >= WIDE else 2
    if beside == 2 and len(facts) % 2:
        facts = facts[:-1]
    if status.standby:
        facts.append(("standby", Text(plain(status.standby))))
    if status.store:
        facts.append(("store", Text(describe_store(status), "bold red" if status.store_alarm else "")))
    grid = Table.grid(expand=True, padding=(0, 1))
    for place in range(beside):
        grid.add_column(style="dim", no_wrap=True, min_width=0 if place else LABEL)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for first in range(0, len(facts), beside):
        grid.add_row(*(cell for fact in facts[first : first + beside] for cell in fact))
    return grid


def _goodput(status: RunStatus) -> Text:
    if status.goodput is None and status.phase == "training":
        return Text(NO_STEP)
    return _share(status.goodput, 0.8)


def describe_relay(relay: RelayStatus) -> str:
    """Return "eu 12.0MB in, 30.1MB out"."""
    gone = "" if relay.connected else " (gone)"
    return f"{relay.relay}{gone} {count(relay.bytes_in)}B in, {count(relay.bytes_out)}B out"


def describe_store(status: RunStatus) -> str:
    """How far the bucket is behind."""
    if not status.store_rounds:
        return "all rounds are there"
    if not status.store_known:
        return f"{span(status.store_s)} behind, how many rounds is not known yet"
    return f"{status.store_rounds} round{'' if status.store_rounds == 1 else 's'}, {span(status.store_s)} behind"


def _last_round(status: RunStatus) -> Table:
    grid = Table.grid(expand=True, padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, width=LABEL)
    grid.add_column(ratio=1, overflow="ellipsis", no_wrap=True)
    members = f"{len(status.members)}: {plain(listing(status.members, 5))}" if status.members else NONE
    if status.effective_h_mean is not None and not status.data_parallel:
        grid.add_row("steps a sync", Text(_steps_between(status)))
    if status.training_phases or status.earlier_h:
        grid.add_row("phase", Text(_phase(status)))
    if status.overlap_steps is not None and not status.data_parallel:
        grid.add_row("overlap", Text(_overlap(status)))
    if status.outer_step is not None and not status.data_parallel:
        grid.add_row("outer step", Text(_outer_step(status)))
    if status.relays:
        grid.add_row("relays", Text(plain(listing([describe_relay(one) for one in status.relays], 3))))
    if status.narrowest:
        grid.add_row("narrowest", Text(plain(status.narrowest), "yellow"))
    if status.shortage:
        # The advice stands at the end: the line is wrapped, since one that is cut would lose it.
        behind = plain(status.shortage).removeprefix(f"{plain(status.narrowest)}: ")
        grid.add_row("behind", Text(behind, "yellow", no_wrap=False, overflow="fold"))
    if status.round >= FEW and status.rounds_merged < MOST * status.round:
        told = f"{status.rounds_merged:,} of {status.round:,} rounds; nothing was merged in the others"
        grid.add_row("committed", Text(told, "yellow"))
    if computed := status.fates.get("computed"):
        grid.add_row("not merged", Text(" · ".join(causes_of(status.dropped_by_cause, computed))))
    if status.metrics:
        grid.add_row("metrics", Text(_metrics(status)))
    grid.add_row("members", Text(members))
    grid.add_row("closed", Text(plain(status.reason) or NONE))
    return grid


def _grace(status: RunStatus) -> Text:
    return Text("waits for all live" if status.synchronous else f"{span(status.grace_s)} · quorum {status.quorum}")


def _share(share: float | None, least: float) -> Text:
    return Text(percent(share), "" if share is None else "green" if share >= least else "yellow")


def _effective_h(status: RunStatus) -> Text:
    if status.effective_h is None:
        return Text(f"{NONE} (set {status.sync_every})")
    off = abs(status.effective_h / max(1, status.sync_every) - 1) > OFF_H
    return Text.assemble((decimal(status.effective_h, 1), "yellow" if off else "green"), f" (set {status.sync_every})")


def _steps_between(status: RunStatus) -> str:
    median, mean = decimal(status.effective_h, 1), decimal(status.effective_h_mean, 1)
    return f"median {median} · mean {mean} · p95 {decimal(status.effective_h_p95, 0)}"


def _phase(status: RunStatus) -> str:
    """Which phase of training it is in, and which H those before got."""
    ends = f", until {percent(status.phase_until)}" if status.phase_until < 1.0 else ""
    now = [f"{status.training_phase} of {status.training_phases}{ends}"] if status.training_phases else []
    before = ", ".join(f"H {asked} got {decimal(got, 1)}" for asked, got in status.earlier_h[-3:])
    return " · ".join([*now, *([f"before: {before}"] if before else [])])


def _overlap(status: RunStatus) -> str:
    steps, p95 = decimal(status.overlap_steps, 1), decimal(status.overlap_p95, 0)
    return f"{steps} steps (τ {status.overlap}) · p95 {p95} · up to {status.rounds_under_way} rounds under way"


def _outer_step(status: RunStatus) -> str:
    return f"{decimal(status.outer_step, 2)} (η {status.outer_lr:g}) · ρ of merged gradients {decimal(status.rho, 2)}"


def _validation(status: RunStatus, scores: Sequence[float]) -> Text:
    if status.validation_loss is None:
        # A later term does not know the scores of those before it.
        yet = "yet" if status.term <= 1 else "again yet"
        nobody = "no evaluator" if status.scorer else "no scorer"
        waits = status.scorer and (status.evaluator or (status.evaluator is None and status.term <= 1))
        return Text(NONE if status.metrics else f"not scored {yet}" if waits else nobody, "dim")
    return Text.assemble(
        (format_score(status.validation_loss), "bold magenta"),
        (f" {sparkline(scores, SPARKS)}", "magenta"),
        (f" at {count(status.validation_round or 0)}", "dim"),
    )


def _metrics(status: RunStatus) -> str:
    return " · ".join(f"{plain(name)} {format_score(value)}" for name, value in status.metrics.items())


def _learner_table(learners: Sequence[LearnerStatus], width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, width=width, show_edge=False, collapse_padding=True, header_style="dim")
    longest = max((_name(learner).cell_len for learner in learners), default=0)
    figures = {
        "step": [count(one.step) for one in learners],
        "tokens/s": [count(one.tokens_per_s) if one.state == "training" else NONE for one in learners],
        "loss": [format_score(one.loss) for one in learners],
        "adopted": [count(one.version_round) if one.version_round >= 0 else NONE for one in learners],
    }
    widths = {name: max(5, len(name), *map(len, told)) for name, told in figures.items()}
    for name in DROPPED:  # a figure that is cut says something else: names are cut, and columns left out
        if width - FIXED - min(longest, NAME) < sum(widths.values()) + GAP * len(widths):
            del widths[name]
    roomy = width - longest >= ROOMY
    table.add_column("learner", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("state", no_wrap=True, min_width=STATE)
    for name, narrow in widths.items():
        table.add_column(name, justify="right", no_wrap=True, width=12 if roomy else narrow)
    table.add_column("merged", justify="right", no_wrap=True, width=6)
    table.add_column("in last", justify="center", no_wrap=True)
    for place, learner in enumerate(learners):
        mark, colour = _STATES.get(learner.state, ("?", ""))
        table.add_row(
            _name(learner),
            Text(f"{mark} {learner.state}{_fetched(learner)}", colour),
            *(figures[name][place] for name in widths),
            Text(percent(learner.merged_share), "bold red" if learner.alarm else ""),
            Text("✓", "green") if learner.in_last_round else Text("·", "dim"),
            style="dim" if learner.state in AWAY else "",
        )
    if not learners:
        table.add_row(Text("none yet", "dim"))
    return table


def _fetched(learner: LearnerStatus) -> str:
    """How much of the parameters a joining learner has. The widest state has room for two digits."""
    share = learner.fetched_share
    return "" if share is None else f" {min(99, int(100 * share))}%"


def _quarantine_lines(learners: Sequence[LearnerStatus]) -> list[Text]:
    """Say of each learner in quarantine why it is. Wrapped, since the reason stands at the end."""
    told = [one for one in learners if one.quarantine]
    lines = [f"{plain(one.learner)} is in quarantine: {plain(one.quarantine)}" for one in told[:SHARES]]
    if len(told) > SHARES:
        lines.append(f"{len(told) - SHARES} more are in quarantine")
    return [Text(f" {line}", "bold red") for line in lines]


def _share_lines(learners: Sequence[LearnerStatus]) -> list[Text]:
    """Say of each learner that its link carries only a share of the rounds, and which way is narrow."""
    narrow = [learner for learner in learners if learner.round_share < 1.0 and learner.state not in AWAY]
    lines = [f"{plain(learner.learner)} {describe_share(learner)}" for learner in narrow[:SHARES]]
    if len(narrow) > SHARES:
        lines.append(f"{len(narrow) - SHARES} more take part in a share of the rounds")
    return [Text(f" {line}", "yellow", no_wrap=True, overflow="ellipsis") for line in lines]


def describe_share(learner: LearnerStatus) -> str:
    """Return "takes part in 25 % of the rounds: way down 15 Mbit/s"."""
    way = f": {plain(learner.narrower_way)}" if learner.narrower_way else ""
    return f"takes part in {percent(learner.round_share)} of the rounds{way}"


def _name(learner: LearnerStatus) -> Text:
    name = Text(plain(learner.learner))
    if learner.incarnation > 1:
        name.append(f" #{learner.incarnation}", "dim")
    return name
