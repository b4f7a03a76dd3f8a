"""The pictures of a report: learners as lanes in time, losses, participation. Times count from the first parameters."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from atoll.observe.plots import Course, Lane, Lanes, Mark, Stretch, Trail
from atoll.observe.plots.pictures import Kind
from atoll.observe.presence import Span, stays
from atoll.observe.report.faults import faults, mended
from atoll.observe.report.reading import Run
from atoll.observe.summary import of_kind

THE_RUN = "the run"
"""The lane of what hit nobody in particular."""
MOST_POINTS = 300
"""Of a line: more cannot be told apart on a screen."""


def lanes(run: Run) -> Lanes:
    alive = _by_learner(stays(run.timeline, ("joined", "recovered"), run.part.start + run.end_s))
    stepping = _by_learner(stays(run.timeline, ("recovered",), run.part.start + run.end_s))
    marks = _marks(run)
    names = sorted(alive, key=_in_order)
    shown = tuple(
        Lane(name, _stretches(run, name, alive[name], stepping.get(name, [])), marks.get(name, ())) for name in names
    )
    others = tuple(Lane(name, (), marks[name]) for name in sorted(marks.keys() - alive.keys()))
    return Lanes("", "", shown + others)


def losses(run: Run) -> Course:
    scored = [(run.at_s(e), float(e["loss"])) for e in of_kind(run.timeline, "score") if e.get("loss") is not None]
    scored += [(run.at_s(e), float(e["validation_loss"])) for e in of_kind(run.timeline, "validation")]
    scored = [(max(0.0, at_s), loss) for at_s, loss in scored]  # the first may be of before the first step
    trails = [Trail("validation, global model", tuple(scored), dots=True)]
    own: dict[str, list[tuple[float, float]]] = {}
    for event in of_kind(run.timeline, "round"):
        for member in event["members"]:
            if member.get("loss") is not None:
                own.setdefault(member["learner"], []).append((run.at_s(event), float(member["loss"])))
    trails += [Trail(f"training, {name}", _thinned(own[name])) for name in sorted(own, key=_in_order)]
    return Course("", "", tuple(trails), "loss", end_s=run.end_s)


def participation(run: Run) -> Course:
    """Members of those who live, and those who live of those the run is meant for."""
    rounds = [event for event in of_kind(run.timeline, "round") if event.get("live")]
    many = group(len(rounds))
    shares = [(run.at_s(r), len(r["members"]) / r["live"]) for r in rounds]
    meant = max([int(run.summary["settings"].get("learners") or 0), *(r["live"] for r in rounds)], default=1)
    here = [(run.at_s(r), r["live"] / meant) for r in rounds]
    name = "members of live" if many == 1 else f"members of live, mean of {many} rounds"
    trails = (Trail(name, _means(shares, many)), Trail("live of all", _changes(here), steps=True))
    return Course("", "", trails, "share of learners", shares=True, end_s=run.end_s)


def group(rounds: int) -> int:
    """How many rounds become one point of a line."""
    return max(1, -(-rounds // MOST_POINTS))


def _stretches(run: Run, name: str, alive: Sequence[Span], stepping: Sequence[Span]) -> tuple[Stretch, ...]:
    begun = [e["at"] for e in of_kind(run.timeline, "started", "restarted") if e.get("process") == name]
    end = run.part.end
    found: list[tuple[Span, Kind]] = []
    left: float | None = None
    for stay in sorted(alive):
        found += _away(left, stay.start, [at for at in begun if at <= stay.start])
        inside = sorted(span for span in stepping if stay.start <= span.start <= stay.end)
        first = inside[0].start if inside else stay.end
        found += [(Span(stay.start, first), "recovering"), *((span, "stepping") for span in inside)]
        left = stay.end
    if left is not None and left < end:
        found += _away(left, end, [at for at in begun if at < end])
    zero = run.part.start
    whole = Span(zero, zero + run.end_s)
    cut = [(span.within(whole), kind) for span, kind in found]
    return tuple(Stretch(span.start - zero, span.end - zero, kind) for span, kind in cut if span.length > 0)


def _away(left: float | None, until: float, begun: Sequence[float]) -> list[tuple[Span, Kind]]:
    """Gone from when it left until it was started again, joining from then on."""
    again = [at for at in begun if left is None or at >= left]
    start = again[-1] if again else until
    gone: list[tuple[Span, Kind]] = [(Span(left, start), "gone")] if left is not None else []
    return [*gone, (Span(start, until), "joining")]


def _marks(run: Run) -> dict[str, tuple[Mark, ...]]:
    found: dict[str, list[Mark]] = {}
    for fault in faults(run.timeline):
        for whom in fault.whom or (THE_RUN,):
            found.setdefault(whom, []).append(Mark(fault.at - run.part.start, fault.text, fault.kind))
    for event, names in mended(run.timeline):
        for whom in names or (THE_RUN,):
            found.setdefault(whom, []).append(
                Mark(run.at_s(event), str(event.get("text", "")), event["kind"], good=True)
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
