"""The report's page: its sections with a table of contents, and its pictures.

Pictures show learners as lanes in time, losses over time, steps and tokens, and participation; times count from the
first parameters.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from atoll.observe.figures import plain
from atoll.observe.plots import Lane, LaneChart, LaneMark, LaneSegment, TimeChart, TimeSeries
from atoll.observe.plots.html import NO_SCRIPT, DrawnFigure, drawn, frame, place
from atoll.observe.plots.pictures import Drawable, LaneKind
from atoll.observe.report import sections
from atoll.observe.report.reading import ReportedRun, find_faults, find_recoveries
from atoll.observe.report.sections import STYLE, Html, join, note, paragraph, text
from atoll.observe.timeline import Span, find_stays, select_kinds
from atoll.protocol.settings import Settings
from atoll.telemetry.round_members import count_members, count_merged_tokens

HEADLINES = {
    "going on": "This run has not ended: it is going on, and the page shows it as it was when it was made.",
    "cut off": "This run has not ended: it was cut off, and says nothing of how.",
    "ended": "Something is missing.",
}


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    title: str
    body: Html
    words: str = ""
    picture: Drawable | None = None


def render(run: ReportedRun) -> bytes:
    told = _sections(run)
    figures = {one.name: drawn(one.picture) for one in told if one.picture is not None}
    contents = "".join(f'<a href="#{one.name}">{one.title}</a>' for one in told)
    title = f"Run {plain(str(run.summary['run'] or run.path.name))}"
    shown = [_section(one, figures.get(one.name)) for one in told]
    body = join([_header(run, title), Html(f"<nav>{contents}</nav>"), *shown, Html(NO_SCRIPT)])
    return frame(title, STYLE, body, [(drawing, f"figure-{name}") for name, drawing in figures.items()])


def _header(run: ReportedRun, title: str) -> Html:
    reason = plain(str(run.summary["reason"] or ""))
    head = f"<header><h1>{text(title)}</h1><p>{text(plain(run.path.name))}</p></header>"
    told = [paragraph(f"{sections.sentence(reason)}.")] if reason and run.state == "ended" else []
    return join([Html(head), *told, *([note(HEADLINES[run.state], run.missing)] if run.missing else [])])


def _section(section: Section, drawing: DrawnFigure | None) -> Html:
    figure = "" if drawing is None else place(drawing, f"figure-{section.name}")
    words = paragraph(section.words) if section.words else ""
    head = f'<section id="{section.name}" class="{section.name}"><h2>{section.title}</h2>'
    return Html(f"{head}{words}{figure}{section.body}</section>")


def _sections(run: ReportedRun) -> list[Section]:
    lanes, losses, rounds = draw_lanes(run), draw_losses(run), draw_participation(run)
    found = [Section("summary", "Summary", sections.summary(run))]
    if lanes.lanes:
        words = "What every learner did, from the first parameters on; signs say what hit it and when it was back."
        found.append(Section("timeline", "Timeline", sections.learners(run), words, lanes))
    if any(trail.points for trail in losses.trails):
        words = "Validation loss of the global model, by the evaluator, and the training loss of every learner."
        found.append(Section("loss", "Loss", sections.sample(run), words, losses))
        if run.summary["rounds"]:
            words = "The same over the run's steps: the median of the learners' own."
            found.append(Section("loss-steps", "Loss over steps", Html(""), words, draw_losses_over(run, "steps")))
            words = "The same over the tokens that are merged into the model."
            found.append(Section("loss-tokens", "Loss over tokens", Html(""), words, draw_losses_over(run, "tokens")))
    if run.summary["rounds"] and rounds.trails[0].points:
        words = "How many of the live learners were in a round, and how many of all were alive."
        found.append(Section("participation", "Participation", Html(""), words, rounds))
    return [
        *found,
        Section("faults", "Faults", sections.fault_table(run)),
        Section("ledger", "Ledger", sections.ledger(run), "Every token that was computed has one fate."),
        Section("settings", "Settings", sections.settings(run)),
        Section("versions", "Versions", sections.built_with(run)),
    ]


# ---- pictures -------------------------------------------------------------------------------------------------------

THE_RUN = "the run"
"""The lane of what hit nobody in particular."""
MOST_POINTS = 300
"""Of a line: more cannot be told apart on a screen."""


def draw_lanes(run: ReportedRun) -> LaneChart:
    alive = _by_learner(find_stays(run.timeline, ("joined", "recovered"), run.part.start + run.end_s))
    training = _by_learner(find_stays(run.timeline, ("recovered",), run.part.start + run.end_s))
    marks = _marks(run)
    names = sorted(alive, key=_in_order)
    shown = tuple(
        Lane(name, _stretches(run, name, alive[name], training.get(name, [])), marks.get(name, ())) for name in names
    )
    others = tuple(Lane(name, (), marks[name]) for name in sorted(marks.keys() - alive.keys()))
    return LaneChart("", "", shown + others)


def draw_losses(run: ReportedRun) -> TimeChart:
    scored = [(run.at_s(e), float(e["loss"])) for e in select_kinds(run.timeline, "score") if e.get("loss") is not None]
    scored += [(run.at_s(e), float(e["validation_loss"])) for e in select_kinds(run.timeline, "validation")]
    scored = [(max(0.0, at_s), loss) for at_s, loss in scored]  # the first may be of before the first step
    trails = [TimeSeries("validation, global model", tuple(scored), dots=True)]
    own: dict[str, list[tuple[float, float]]] = {}
    for event in select_kinds(run.timeline, "round"):
        for member in event["members"]:
            if member.get("loss") is not None:
                own.setdefault(member["learner"], []).append((run.at_s(event), float(member["loss"])))
    trails += [TimeSeries(f"training, {name}", _thinned(own[name])) for name in sorted(own, key=_in_order)]
    return TimeChart("", "", tuple(trails), "loss", end_s=run.end_s)


def draw_losses_over(run: ReportedRun, axis: Literal["steps", "tokens"]) -> TimeChart:
    """Draw the losses over what the run had done by then, as its rounds tell."""
    moments, places, place = [-math.inf], [0.0], 0.0
    fragments = int(run.summary["settings"].get("fragments") or 0) or 1
    for event in select_kinds(run.timeline, "round"):
        if axis == "tokens":
            place += count_merged_tokens(event) / fragments
        else:
            place = max(place, float(event.get("step") or median([one["t"] for one in event["members"]] or [0])))
        moments.append(run.at_s(event))
        places.append(place)
    over_time = draw_losses(run)
    trails = tuple(
        replace(trail, points=tuple((places[bisect_right(moments, at_s) - 1], loss) for at_s, loss in trail.points))
        for trail in over_time.trails
    )
    label = "the run's steps" if axis == "steps" else "tokens merged"
    return replace(over_time, trails=trails, end_s=0.0, x_label=label)


def draw_participation(run: ReportedRun) -> TimeChart:
    """Members of those who live, and those who live of those the run is meant for."""
    rounds = [event for event in select_kinds(run.timeline, "round") if event.get("live")]
    many = group(len(rounds))
    shares = [(run.at_s(r), count_members(r) / r["live"]) for r in rounds]
    meant = max([int(run.summary["settings"].get("learners") or 0), *(r["live"] for r in rounds)], default=1)
    here = [(run.at_s(r), r["live"] / meant) for r in rounds]
    name = "members of live" if many == 1 else f"members of live, mean of {many} rounds"
    trails = (TimeSeries(name, _means(shares, many)), TimeSeries("live of all", _changes(here), steps=True))
    return TimeChart("", "", trails, "share of learners", shares=True, end_s=run.end_s)


def group(rounds: int) -> int:
    """How many rounds become one point of a line."""
    return max(1, -(-rounds // MOST_POINTS))


def _stretches(run: ReportedRun, name: str, alive: Sequence[Span], training: Sequence[Span]) -> tuple[LaneSegment, ...]:
    """Return what a learner did, in the words of docs/look.md, from its first join on."""
    begun = [e["at"] for e in select_kinds(run.timeline, "started", "restarted") if e.get("process") == name]
    leaves = [event["at"] for event in select_kinds(run.timeline, "left") if event["learner"] == name]
    abandon_s = float(run.summary["settings"].get("abandon_s") or Settings().abandon_s)
    found: list[tuple[Span, LaneKind]] = []
    for stay, back in pairwise([*sorted(alive), Span(run.part.end, run.part.end)]):
        inside = sorted(span for span in training if stay.start <= span.start <= stay.end)
        first = inside[0].start if inside else stay.end
        found += [(Span(stay.start, first), "joining"), *((span, "training") for span in inside)]
        closed = min([stay.end + abandon_s, *(at for at in leaves if stay.end <= at <= back.start)])
        found += _absence(stay.end, back.start, closed, begun)
    zero = run.part.start
    whole = Span(zero, zero + run.end_s)
    cut = [(span.within(whole), kind) for span, kind in found]
    return tuple(LaneSegment(span.start - zero, span.end - zero, kind) for span, kind in cut if span.length > 0)


def _absence(since: float, until: float, closed: float, begun: Sequence[float]) -> list[tuple[Span, LaneKind]]:
    """Tell an absence apart: `away` while it may come back with its steps, `gone` from `closed` on, `restarting` from
    the start of its next process until that joins."""
    start = max((at for at in begun if since <= at <= until), default=until)
    closed = min(closed, start)
    return [(Span(since, closed), "away"), (Span(closed, start), "gone"), (Span(start, until), "restarting")]


def _marks(run: ReportedRun) -> dict[str, tuple[LaneMark, ...]]:
    found: dict[str, list[LaneMark]] = {}
    for fault in find_faults(run.timeline):
        for whom in fault.whom or (THE_RUN,):
            found.setdefault(whom, []).append(LaneMark(fault.at - run.part.start, fault.text, fault.kind))
    for event, names in find_recoveries(run.timeline):
        for whom in names or (THE_RUN,):
            found.setdefault(whom, []).append(
                LaneMark(run.at_s(event), str(event.get("text", "")), event["kind"], good=True)
            )
    return {whom: tuple(sorted(marks, key=lambda mark: mark.at_s)) for whom, marks in found.items()}


def _by_learner(found: Sequence[tuple[str, Span]]) -> dict[str, list[Span]]:
    answer: dict[str, list[Span]] = {}
    for learner, span in found:
        answer.setdefault(learner, []).append(span)
    return answer


def _in_order(name: str) -> tuple[str, int]:
    """learner-2 before learner-10."""
    head, _, number = name.rpartition("-")
    return (head, int(number)) if number.isdecimal() else (name, -1)


def _means(points: Sequence[tuple[float, float]], many: int) -> tuple[tuple[float, float], ...]:
    groups = [points[at : at + many] for at in range(0, len(points), many)]
    return tuple((group[-1][0], fmean(value for _, value in group)) for group in groups)


def _thinned(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return _means(points, group(len(points)))


def _changes(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Without those that repeat the one before; the last stays, so that the line reaches the end."""
    kept = [one for place, one in enumerate(points) if place == 0 or one[1] != points[place - 1][1]]
    return tuple([*kept, points[-1]] if points and kept[-1] != points[-1] else kept)
