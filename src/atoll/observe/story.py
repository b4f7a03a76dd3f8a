"""A few honest sentences about a run: what it did, what hit it, what the model learned, and what looks wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from atoll.observe.advice import advise
from atoll.observe.figures import count, listing, measure, percent, plain, span
from atoll.observe.summary import Summary
from atoll.telemetry.events import Event

WARNING = "Warning: "
"""How a sentence begins that tells of something wrong."""
ADVICE = "Advice: "
"""How one begins that says what to do about it in the next run."""


def story(summary: Summary, events: Iterable[Event] = ()) -> list[str]:
    events = list(events)
    told = [_work(summary), _resumes(summary), *_kills(summary), _deaths(events), _gaps(summary), _merging(summary)]
    told += [_training(summary), _validation(summary), *_metrics(summary)]
    told += [f"{WARNING}{warning}" for warning in _warnings(summary, events)]
    told += [f"{ADVICE}{advice}" for advice in advise(summary)]
    return [sentence for sentence in told if sentence]


def last_sample(events: Iterable[Event]) -> str | None:
    """What the model wrote when it was last asked to."""
    samples = [event["sample"] for event in events if event["kind"] == "score" and event.get("sample")]
    return samples[-1] if samples else None


def _work(summary: Summary) -> str:
    learners: dict[str, Any] = summary["per_learner"]
    steps = sum(learner["steps"] for learner in learners.values())
    return (
        f"{_number(len(learners), 'learner')} made {_number(steps, 'step')} on {count(summary['tokens']['computed'])} "
        f"tokens in {span(summary['wall_s'])}; {percent(summary['goodput'])} of learner time went into steps."
    )


def _resumes(summary: Summary) -> str:
    after = Counter(str(entry["after"]) for entry in summary.get("resumes") or ())
    words = {"ended": "ended", "killed": "killed whole"}
    ways = [f"{words[way]} {_number(times, 'time')}" for way, times in sorted(after.items())]
    return f"It was {' and '.join(ways)} before this, and gone on with." if ways else ""


def _kills(summary: Summary) -> list[str]:
    told = []
    for entry in summary["recovery"]:
        if entry["after"] != "killed":
            continue
        restart = _restart_after(summary["recovery"], entry)
        name, when = entry["learner"], span(entry["at_s"])
        if restart is None:
            told.append(f"{name} was killed {when} in and was not restarted.")
        elif restart["seconds"] is None:
            told.append(f"{name} was killed {when} in and restarted, but contributed to no round after that.")
        else:
            told.append(
                f"{name} was killed {when} in and was contributing again {span(restart['seconds'])} after its restart."
            )
    return told


def _deaths(events: Sequence[Event]) -> str:
    """The restarts that no kill of ours explains."""
    restarts = Counter(event["process"] for event in events if event["kind"] == "restarted")
    restarts.subtract(event["process"] for event in events if event["kind"] == "killed")
    names = sorted(process for process, times in restarts.items() if times > 0)
    deaths = [event for event in events if event["kind"] == "exited" and event.get("code") != 0]
    last = {event["process"]: str(event.get("text", "")) for event in deaths}
    how = "; ".join(last[name] for name in names if name in last) or "logs/ may say why"
    return f"{listing(names)} died and came back ({how})." if names else ""


def _restart_after(recovery: Sequence[dict[str, Any]], kill: dict[str, Any]) -> dict[str, Any] | None:
    mine = (e for e in recovery if e["learner"] == kill["learner"] and e["at_s"] >= kill["at_s"])
    return next((entry for entry in mine if entry["after"] == "restarted"), None)


def _gaps(summary: Summary) -> str:
    if summary["median_gap_s"] is None:
        return ""
    return (
        f"{_number(summary['rounds'], 'round')} with {percent(summary['participation'])} of the learners alive in them "
        f"(participation); "
        f"the longest pause between two was {span(summary['longest_gap_s'])} (median {span(summary['median_gap_s'])})."
    )


def _merging(summary: Summary) -> str:
    tokens = summary["tokens"]
    if not tokens["computed"]:
        return ""
    fates = [
        f"{percent(tokens[fate] / tokens['computed'])} {words}" for fate, words in _fates(tokens) if tokens.get(fate)
    ]
    return f"Of the tokens, {listing(fates)}.{_by_learner(summary)}" if fates else ""


def _fates(tokens: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    causes = tokens.get("dropped_by_cause") or {}
    told = ", ".join(
        f"{percent(causes[name] / tokens['computed'])} {words}" for name, words in _CAUSES if name in causes
    )
    return (
        ("merged", "were merged into the model (merged share)"),
        ("dropped", f"were dropped when a learner adopted a newer version{f' ({told})' if told else ''}"),
        ("lost", "were lost with a process"),
        ("rolled_back", "were in versions that were rolled back"),
        ("in_flight", "were on their way when the account ends"),
    )


_CAUSES = (("overlap", "by overlap"), ("missed", "in missed rounds"))


def _by_learner(summary: Summary) -> str:
    """From the least to the most merged."""
    known = {name: one["merged_share"] for name, one in summary["per_learner"].items()}
    shares = sorted((share, name) for name, share in known.items() if share is not None)
    if len(shares) < 2:
        return ""
    (least, low), (most, high) = shares[0], shares[-1]
    return f" By learner, from {percent(least)} ({low}) to {percent(most)} ({high}) were merged."


def _training(summary: Summary) -> str:
    start, end = summary["training_loss_start"], summary["training_loss_end"]
    if start is None or end is None:
        return ""
    return f"Training loss of the learners went from {measure(start)} to {measure(end)}."


def _validation(summary: Summary) -> str:
    start, end = summary["validation_loss_start"], summary["validation_loss_end"]
    if start is None:
        return ""
    unit = f" {plain(summary['loss_unit'])}" if summary["loss_unit"] else ""
    best, at = summary["validation_loss_best"], summary["validation_loss_best_round"]
    lower = (
        f"; the lowest was {measure(best)} at round {at:,} (atoll export --best)"
        if best is not None and best < end
        else ""
    )
    return f"Validation loss of the global model went from {measure(start)} to {measure(end)}{unit}{lower}."


def _metrics(summary: Summary) -> list[str]:
    return [
        f"Its {plain(name)} went from {measure(one['start'])} to {measure(one['end'])}{_best_of(one)}."
        for name, one in summary["metrics"].items()
    ]


def _best_of(metric: dict[str, Any]) -> str:
    if metric["best"] is None or metric["best"] == metric["end"]:
        return ""
    return f"; the best was {measure(metric['best'])} at round {metric['best_round']:,}"


def _warnings(summary: Summary, events: Sequence[Event]) -> list[str]:
    settings, learners = summary["settings"], summary["per_learner"]
    found = []
    if summary["rounds"] == 0:
        found.append("no round was committed: the model is what it was at the start.")
    meant, joined = int(settings.get("learners") or 0), len(learners)
    if joined < meant:
        logged = any(e["kind"] == "started" and e["process"] != "syncer" for e in events)  # not those started by hand
        found.append(f"only {joined} of {meant} learners ever joined{'; logs/ says why' if logged else ''}.")
    idle = [name for name, figures in learners.items() if figures["rounds"] == 0]
    if idle and summary["rounds"]:
        found.append(f"{listing(idle)} never contributed to a round.")
    configured, effective = int(settings.get("sync_every") or 0), summary["effective_h"]
    if configured and effective is not None and abs(effective / configured - 1) > 0.15:
        found.append(f"a fragment was synced every {effective:g} learner steps, where {configured} were asked for.")
    if summary["participation"] is not None and summary["participation"] < 0.5:
        found.append(f"a round had only {percent(summary['participation'])} of the learners alive in it on average.")
    neglected = {event["learner"]: event["text"] for event in events if event["kind"] == "low_share"}
    found += [
        f"{name} was merged less than the others for a while (the last: {text})." for name, text in neglected.items()
    ]
    found += [f"{event['text']}." for event in events if event["kind"] == "same_batches"]
    if summary["refusals"]:
        reasons = [event["text"] for event in events if event["kind"] == "refused"]
        last = f" (the last: {reasons[-1]})" if reasons else ""
        found.append(f"{_number(summary['refusals'], 'contribution')} refused{last}.")
    start, end = summary["validation_loss_start"], summary["validation_loss_end"]
    if start is None and not summary["metrics"]:
        found.append(
            "the global model was never scored, so nothing is known of its validation loss: "
            "a script scores it with atoll.evaluate."
        )
    if start is not None and end > start:
        found.append("the validation loss went up.")
    return found


def _number(value: int, one: str, many: str = "") -> str:
    return f"{count(value) if value >= 1e6 else f'{value:,}'} {one if value == 1 else many or one + 's'}"
