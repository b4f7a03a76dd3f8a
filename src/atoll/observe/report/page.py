"""The sections of a report on one page, with a table of contents."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.observe.figures import plain
from atoll.observe.plots.html import drawn
from atoll.observe.plots.page import NO_SCRIPT, Drawn, frame, place
from atoll.observe.plots.pictures import Drawable
from atoll.observe.report import pictures, sections
from atoll.observe.report.html import STYLE, Html, join, note, paragraph, text
from atoll.observe.report.reading import Run

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


def render(run: Run) -> bytes:
    told = _sections(run)
    figures = {one.name: drawn(one.picture) for one in told if one.picture is not None}
    contents = "".join(f'<a href="#{one.name}">{one.title}</a>' for one in told)
    title = f"Run {plain(str(run.summary['run'] or run.path.name))}"
    shown = [_section(one, figures.get(one.name)) for one in told]
    body = join([_header(run, title), Html(f"<nav>{contents}</nav>"), *shown, Html(NO_SCRIPT)])
    return frame(title, STYLE, body, [(drawing, f"figure-{name}") for name, drawing in figures.items()])


def _header(run: Run, title: str) -> Html:
    reason = plain(str(run.summary["reason"] or ""))
    head = f"<header><h1>{text(title)}</h1><p>{text(plain(run.path.name))}</p></header>"
    told = [paragraph(f"{sections.sentence(reason)}.")] if reason and run.state == "ended" else []
    return join([Html(head), *told, *([note(HEADLINES[run.state], run.missing)] if run.missing else [])])


def _section(section: Section, drawing: Drawn | None) -> Html:
    figure = "" if drawing is None else place(drawing, f"figure-{section.name}")
    words = paragraph(section.words) if section.words else ""
    head = f'<section id="{section.name}" class="{section.name}"><h2>{section.title}</h2>'
    return Html(f"{head}{words}{figure}{section.body}</section>")


def _sections(run: Run) -> list[Section]:
    lanes, losses, rounds = pictures.lanes(run), pictures.losses(run), pictures.participation(run)
    found = [Section("summary", "Summary", sections.summary(run))]
    if lanes.lanes:
        words = "What every learner did, from the first parameters on; signs say what hit it and when it was back."
        found.append(Section("timeline", "Timeline", sections.learners(run), words, lanes))
    if any(trail.points for trail in losses.trails):
        words = "Validation loss of the global model, by the evaluator, and the training loss of every learner."
        found.append(Section("loss", "Loss", sections.sample(run), words, losses))
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
