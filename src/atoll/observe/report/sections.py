"""The text and tables of a report's sections, and the HTML they are made of.

Whatever comes from a run is escaped here: an `Html` may be put on a page, a `str` may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NewType

from atoll.observe.figures import NONE, clock, count, decimal, percent, plain, span
from atoll.observe.report.reading import ReportedRun, find_faults
from atoll.observe.story import ADVICE, WARNING, last_sample, story
from atoll.observe.summary import Summary
from atoll.observe.timeline import select_kinds
from atoll.protocol.statistics import format_score
from atoll.telemetry.events import versions

MOST_FAULTS = 500
"""Rows of the faults' table; a storm has more, and nobody reads them."""
FATES = {
    "merged": "in the model",
    "dropped": "given up when a learner adopted a newer version",
    "lost": "gone with a process (a crash, or a learner that was given up), or in quarantine",
    "filtered": "left out of the merge by the outlier filter (--robust)",
    "rolled_back": "in versions that were taken back when the validation loss had become worse",
    "in_flight": "on their way when the account ends",
}
CAUSES = {
    "overlap": "made between reading the copy that was merged and adopting the version",
    "missed": "overwritten by a version that holds none of the learner's steps",
}
CUT = "of these, in no version at the cut that the run began from, and its learner did not go on with them"


def summary(run: ReportedRun) -> Html:
    figures, tokens = run.summary, run.summary["tokens"]
    meant = figures["settings"].get("sync_every") or 0
    steps = sum(learner["steps"] for learner in figures["per_learner"].values())
    first, last = figures["training_loss_start"], figures["training_loss_end"]
    facts = [
        ("goodput", percent(figures["goodput"]), "of learner time went into steps"),
        ("uptime", percent(figures["uptime"]), "somebody was stepping"),
        ("liveness", percent(figures["liveness"]), "of the learners were alive"),
        ("participation", percent(figures["participation"]), "of those alive were in a round"),
        ("effective H", decimal(figures["effective_h"], 1), _steps_between(figures, int(meant))),
        ("H that is carried", decimal(figures.get("carried_h"), 1), figures.get("narrowest") or "as was asked"),
        (
            "rounds committed",
            f"{figures['rounds']:,}",
            f"of {figures['rounds_closed']:,}, {figures['rounds_passed']} passed over",
        ),
        ("tokens", count(tokens["computed"]), f"in {steps:,} steps" if steps else ""),
        ("merged share", percent(figures["merged_share"]), "of fragment-tokens"),
        ("bytes per token", decimal(figures["bytes_per_token"], 1), "in and out of the syncer"),
        ("validation loss", *_validation(figures)),
        ("training loss", format_score(last, 4), "never told" if first is None else f"from {format_score(first, 4)}"),
        *((plain(name), format_score(one["end"]), _metric(one)) for name, one in figures["metrics"].items()),
        ("longest gap", span(figures["longest_gap_s"]), f"median {span(figures['median_gap_s'])}"),
        ("training took", span(figures["wall_s"]), f"restarts {figures['restarts']}, planned kills {figures['kills']}"),
    ]
    return join([cards(facts), *_story(run)])


def _validation(figures: dict[str, Any]) -> tuple[str, str]:
    start, end = figures["validation_loss_start"], figures["validation_loss_end"]
    not_finite = end is None and figures.get("validation_not_finite")
    whence = "" if not_finite else "never scored"
    return "not finite" if not_finite else format_score(
        end, 4
    ), whence if start is None else f"from {format_score(start, 4)}"


def _metric(one: dict[str, Any]) -> str:
    """What stands beside its last value."""
    best = "" if one["best"] is None else f"; best {format_score(one['best'])} at round {one['best_round']:,}"
    return f"from {format_score(one['start'])}{best}"


def _steps_between(figures: Summary, meant: int) -> str:
    """What stands beside the median."""
    mean, p95 = figures.get("effective_h_mean"), figures.get("effective_h_p95")
    asked = f"steps a sync, of {meant}" if meant else "steps a sync"
    return asked if mean is None else f"{asked}; mean {decimal(mean, 1)}, p95 {decimal(p95, 0)}"


def _story(run: ReportedRun) -> list[Html]:
    if not run.summary["rounds"] or not run.summary["per_learner"]:
        return []
    sentences = [plain(one) for one in story(run.summary, run.timeline)]
    told = " ".join(one for one in sentences if not one.startswith((WARNING, ADVICE)))
    warnings = [sentence(one.removeprefix(WARNING)) for one in sentences if one.startswith((WARNING, ADVICE))]
    honest = [paragraph(told, "told")] if run.state == "ended" else []  # half of its figures would be missing
    return [*honest, *([note("Worth a look", warnings)] if warnings else [])]


def learners(run: ReportedRun) -> Html:
    columns = (
        *("learner", "steps", "tokens", "merged share", "stepping", "rounds", "participation", "share of rounds"),
        *("muted", "incarnations", "longest absence"),
    )
    rows = [
        (
            plain(name),
            f"{one['steps']:,}",
            count(one["tokens"]),
            percent(one.get("merged_share")),
            span(one["busy_s"]),
            f"{one['rounds']:,}",
            percent(one.get("participation")),
            percent(one.get("round_share")),
            span(one.get("muted_s")),
            str(one["incarnations"]),
            span(one["longest_absence_s"]),
        )
        for name, one in run.summary["per_learner"].items()
    ]
    return table(columns, rows) if rows else paragraph("No learner joined.")


def sample(run: ReportedRun) -> Html:
    written = last_sample(run.timeline)
    if not written:
        return Html("")
    return join([heading("What the model last wrote"), verbatim(plain(written.strip("\n").expandtabs(4), keep="\n"))])


def fault_table(run: ReportedRun) -> Html:
    found = find_faults(run.timeline)
    if not found:
        return paragraph("Nothing hit this run.")
    kinds = Counter(fault.kind for fault in found)
    rows = [
        (
            clock(fault.at - run.part.start),
            fault.kind,
            plain(", ".join(fault.whom)) or NONE,
            span(fault.seconds) if fault.seconds is not None else "never",
            plain(fault.text),
        )
        for fault in found[:MOST_FAULTS]
    ]
    told = ", ".join(f"{number} × {kind}" for kind, number in kinds.most_common())
    left_out = f" The first {MOST_FAULTS} of {len(found)} are listed." if len(found) > MOST_FAULTS else ""
    columns = ("at", "what", "whom", "contributed again after", "in its own words")
    return join([paragraph(f"{told}.{left_out}"), table(columns, rows, words=(1, 2, 4))])


def ledger(run: ReportedRun) -> Html:
    tokens = {**dict.fromkeys(FATES, 0), **run.summary["tokens"]}
    computed = tokens["computed"]
    rows = [
        (name.replace("_", " "), f"{tokens[name]:,}", _share(tokens[name], computed), FATES[name]) for name in FATES
    ]
    causes = tokens.get("dropped_by_cause") or {}
    rows[2:2] = [
        (f"– {name}", f"{causes[name]:,}", _share(causes[name], computed), CAUSES[name]) for name in CAUSES if causes
    ]
    if causes.get("cut"):
        place = 1 + next(place for place, row in enumerate(rows) if row[0] == "lost")
        rows.insert(place, ("– at the cut", f"{causes['cut']:,}", _share(causes["cut"], computed), CUT))
    rows.append(("computed", f"{computed:,}", _share(computed, computed), "all of them, each with one fate"))
    return join([table(("fate", "tokens", "share", ""), rows, words=(0, 3)), _fragments(run)])


def _fragments(run: ReportedRun) -> Html:
    """Per fragment: a token counts once for each fragment it was merged into."""
    if not (fragments := run.summary["fragments"]):
        return Html("")
    computed, total = run.summary["tokens"]["computed"], sum(merged for _, merged in fragments)
    rows = [
        (str(place), str(version), f"{merged:,}", _share(merged, computed))
        for place, (version, merged) in enumerate(fragments)
    ]
    told = (
        f"Fragment-tokens: {total:,} merged of {computed * len(fragments):,} computed ({len(fragments)} fragments × "
        f"tokens), {_share(total, computed * len(fragments))}."
    )
    columns = ("fragment", "version", "fragment-tokens merged", "of computed")
    return join([paragraph(told), folded("Every fragment", table(columns, rows))])


def settings(run: ReportedRun) -> Html:
    shown = [verbatim(run.settings)] if run.settings else [paragraph("There is no run.toml.")]
    made = {key: run.summary["settings"].get(key) for key in ("fragments", "sync_every", "cut_every")}
    if run.summary["parameters"]:
        parameters = f"The model has {run.summary['parameters']:,} parameters. Filled in from it: "
        shown.insert(0, paragraph(parameters + ", ".join(f"{key} = {value}" for key, value in made.items()) + "."))
    changes = [plain(str(event.get("text", ""))) for event in select_kinds(run.timeline, "changed", "phase")]
    return join([*shown, *(paragraph(f"Changed on the way: {text}") for text in changes)])


def built_with(run: ReportedRun) -> Html:
    told = next((event["versions"] for event in select_kinds(run.timeline, "run") if event.get("versions")), None)
    words = (
        "As the syncer said when the run began."
        if told
        else "The run did not write them down: these are of the machine on which this report was made."
    )
    rows = [(str(name), str(value)) for name, value in (told or versions()).items()]
    return join([paragraph(words), table(("", "version"), rows, words=(0, 1))])


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else NONE


# ---- pieces of HTML -------------------------------------------------------------------------------------------------

Html = NewType("Html", str)
STYLE = """\
header { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 0 24px }
nav { position: sticky; top: 0; z-index: 9; background: var(--paper); border-bottom: 1px solid var(--line); \
margin: 8px 0 20px; padding: 8px 0; display: flex; flex-wrap: wrap; gap: 4px 18px }
a { color: inherit; text-decoration-color: var(--faint); text-underline-offset: 3px }
section { margin: 0 0 40px; scroll-margin-top: 56px }
h2 { margin: 0 0 4px; font-size: 18px; font-weight: 600 }
h3 { margin: 18px 0 4px; font-size: 15px; font-weight: 600 }
.note { border-left: 4px solid #E69F00; padding: 8px 14px; margin: 12px 0; \
background: color-mix(in srgb, #E69F00 10%, var(--paper)) }
.note b, .note li { color: var(--ink) } .note ul { margin: 4px 0; padding-left: 20px }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(172px, 1fr)); gap: 12px; margin: 12px 0 }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; break-inside: avoid }
.card span { display: block; color: var(--faint); font-size: 13px }
.card b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; line-height: 1.3 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 4px 0 12px }
th { text-align: left; font-weight: 600; color: var(--faint); font-size: 13px; border-bottom: 1px solid var(--line) }
td { border-bottom: 1px solid var(--line); vertical-align: top }
th, td { padding: 5px 18px 5px 0 } .right { text-align: right; white-space: nowrap }
tr { break-inside: avoid }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; margin: 8px 0; \
font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
.settings pre { columns: 3 240px; column-gap: 40px }
.told { color: var(--ink); max-width: 90ch }
summary { cursor: pointer; margin: 8px 0 }
@media print { nav { display: none } main { padding: 0; max-width: none } section { margin-bottom: 24px } \
.figure, pre { break-inside: avoid } .cards { grid-template-columns: repeat(4, 1fr) } h2 { break-after: avoid } }
"""


def text(value: str) -> Html:
    return Html(escape(value))


def join(parts: Iterable[Html]) -> Html:
    return Html("\n".join(parts))


def paragraph(value: str, kind: str = "") -> Html:
    return Html(f'<p class="{kind}">{escape(value)}</p>' if kind else f"<p>{escape(value)}</p>")


def heading(value: str) -> Html:
    return Html(f"<h3>{escape(value)}</h3>")


def cards(facts: Iterable[tuple[str, str, str]]) -> Html:
    """A name, its figure and a word under it each."""
    made = (
        f'<div class="card"><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(words)}</span></div>'
        for name, figure, words in facts
    )
    return Html(f'<div class="cards">{"".join(made)}</div>')


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[int] = (0,)) -> Html:
    """The columns whose places are in `words` stand at the left, the others are figures."""
    left = set(words)

    def row(tag: str, cells: Sequence[str]) -> str:
        made = (f"<{tag}{'' if at in left else RIGHT}>{escape(cell)}</{tag}>" for at, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return Html(f'<div class="scroll"><table><thead>{row("th", columns)}</thead><tbody>{body}</tbody></table></div>')


RIGHT = ' class="right"'


def folded(title: str, body: Html) -> Html:
    return Html(f"<details><summary>{escape(title)}</summary>{body}</details>")


def verbatim(value: str) -> Html:
    return Html(f"<pre>{escape(value)}</pre>")


def note(title: str, sentences: Iterable[str]) -> Html:
    points = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return Html(f'<div class="note"><b>{escape(title)}</b><ul>{points}</ul></div>')
