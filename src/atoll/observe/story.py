"""What a run came to, in words: honest sentences, warnings, advice, and the closing screen.

Advice is given where much work was dropped, and names only what helps against the cause. Steps between reading a
fragment and adopting its new version are dropped once per sync, so a larger H drops fewer of them. Steps overwritten in
rounds that a learner missed are kept by adopt = "carry" (measured by `benchmarks/slow.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from atoll.observe.figures import CAUSES, NONE, count, decimal, listing, percent, plain, span
from atoll.observe.screen import WIDEST
from atoll.observe.summary import Summary
from atoll.observe.tail import is_routine
from atoll.observe.timeline import is_good_end, starts_everything
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import USUAL
from atoll.protocol.statistics import format_score, format_scores_apart
from atoll.store.verify import VerifyReport
from atoll.telemetry.events import AFTER_END, Event

WARNING = "Warning: "
"""How a sentence begins that tells of something wrong."""
ADVICE = "Advice: "
"""How one begins that says what to do about it in the next run."""


def story(summary: Summary, events: Iterable[Event] = ()) -> list[str]:
    events = list(events)
    told = [
        _work(summary, is_sequel=_is_sequel(events)),
        _resumes(summary),
        *_kills(summary),
        _deaths(events),
        _returns(events),
    ]
    told += [_gaps(summary), _phases(summary), _shares(summary, events), _relays(summary)]
    told += [_merging(summary, events), _training(summary), _validation(summary, events), *_metrics(summary)]
    told += [f"{WARNING}{warning}" for warning in _warnings(summary, events)]
    told += [f"{ADVICE}{advice}" for advice in advise(summary)]
    return [sentence for sentence in told if sentence]


def last_sample(events: Iterable[Event]) -> str | None:
    """What the model wrote when it was last asked to."""
    samples = [event["sample"] for event in events if event["kind"] == "score" and event.get("sample")]
    return samples[-1] if samples else None


def _is_sequel(events: Iterable[Event]) -> bool:
    """Return whether the run was made from another one: its steps are of both, its time is its own."""
    return next((event["kind"] for event in events if event["kind"] in ("run", "reigned")), "") == "reigned"


def _work(summary: Summary, *, is_sequel: bool) -> str:
    learners: dict[str, Any] = summary["per_learner"]
    steps = sum(learner["steps"] for learner in learners.values())
    together = " together" if len(learners) > 1 else ""
    processes = summary.get("data_parallel")
    who = f"{processes} data-parallel processes" if processes else _number(len(learners), "learner")
    work = f"{who} made {_number(steps, 'step')}{together} on {count(summary['tokens']['computed'])} tokens"
    took = span(summary["wall_s"])
    here = f", those before this run included. This run took {took}" if is_sequel else f" in {took}"
    return f"{work}{here}; {percent(summary['goodput'])} of learner time went into steps."


def _resumes(summary: Summary) -> str:
    after = Counter(str(entry["after"]) for entry in summary.get("resumes") or ())
    words = {"ended": "stopped", "killed": "killed as a whole"}
    ways = [f"{words[way]} {_times(number)}" for way, number in sorted(after.items())]
    if not ways:
        return ""
    counted = "Its end and its start each time count in goodput, uptime and liveness; the time between does not"
    return (
        f"It was {' and '.join(ways)}{', and resumed each time' if after.total() > 1 else ' and resumed'}. {counted}."
    )


def _phases(summary: Summary) -> str:
    """Which H each phase of training got."""
    found = [one for one in summary.get("phases") or () if one["rounds"]]
    told = [f"{'by hand' if one['by_hand'] else 'phase ' + str(one['phase'])}: {_h_of(one)}" for one in found]
    return f"H of each phase of training, asked for and effective: {'; '.join(told)}." if told else ""


def _h_of(one: dict[str, Any]) -> str:
    return f"{one['sync_every']} and {decimal(one['effective_h'], 1)} ({one['rounds']:,} rounds)"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


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
    """Those that no kill of ours explains. A learner is back when it has joined."""
    planned: Counter[str] = Counter()
    dead: dict[str, str] = {}
    back: dict[str, str] = {}
    stepless: list[str] = []
    for event in events:
        name = str(event.get("learner") or event.get("process", ""))
        match event["kind"]:
            case "killed":
                planned[name] += 1
            case "exited" if is_good_end(event) or event.get("code") == ConfigError.exit_code:
                dead.pop(name, None)  # it did what it could; or a warning says why it cannot take part
            case "exited" if event.get("stepless"):
                stepless.append(name)
            case "exited" if planned[name]:
                planned[name] -= 1
            case "exited":
                dead[name] = str(event.get("text", ""))
            case "joined" if name in dead:
                back[name] = dead.pop(name)
            case "restarted" if name.startswith(NO_LEARNERS) and name in dead:
                back[name] = dead.pop(name)
            case "started":
                dead.pop(name, None)  # by an operator, or with a run that goes on
    again = sorted(dead.keys() & back.keys())
    told = [
        _dead(sorted(back.keys() - dead.keys()), "died and came back", back),
        _dead(sorted(dead.keys() - back.keys()), "died and did not come back", dead),
        _dead(again, "died more than once and did not come back the last time", dead),
        _stepless(stepless),
    ]
    return " ".join(sentence for sentence in told if sentence)


def _returns(events: Sequence[Event]) -> str:
    """Name the learners that no supervisor started, and that were lost and came back as another process."""
    watched = {event["process"] for event in events if event["kind"] in ("started", "restarted")}
    gone: set[str] = set()
    back: Counter[str] = Counter()
    for event in events:
        name = str(event.get("learner"))
        if starts_everything(event):
            gone.clear()
        elif event["kind"] in ("lost", "left") and name not in watched:
            gone.add(name)
        elif event["kind"] == "joined" and name in gone:
            gone.remove(name)
            back[name] += event["incarnation"] > 1 and not event.get("known_as")
    return " ".join(f"{name} was lost and started again {_times(number)}." for name, number in back.items() if number)


def _stepless(names: Sequence[str]) -> str:
    were, it = ("was", "it") if len(names) == 1 else ("were", "they")
    return f"{listing(names)} {were} killed at the end: {it} had made no step." if names else ""


NO_LEARNERS = ("syncer", "shard-", "evaluator")
"""How the names of processes begin that join nothing: one is back when it was started again."""


def _dead(names: Sequence[str], what: str, how: dict[str, str]) -> str:
    same = {how[name].removeprefix(f"{name} ") for name in names}
    causes = same if len(same) == 1 else [how[name] for name in names if how[name]]
    return f"{listing(names)} {what} ({'; '.join(causes) or 'logs/ may say why'})." if names else ""


def _restart_after(recovery: Sequence[dict[str, Any]], kill: dict[str, Any]) -> dict[str, Any] | None:
    mine = (e for e in recovery if e["learner"] == kill["learner"] and e["at_s"] >= kill["at_s"])
    return next((entry for entry in mine if entry["after"] == "restarted"), None)


def _gaps(summary: Summary) -> str:
    if summary["median_gap_s"] is None:
        return ""
    return (
        f"{_number(summary['rounds'], 'committed round')} with {percent(summary['participation'])} of the learners "
        f"alive in them "
        f"(participation); "
        f"the longest pause between two was {span(summary['longest_gap_s'])} (median {span(summary['median_gap_s'])})."
    )


def _relays(summary: Summary) -> str:
    ways = [
        f"{plain(name)} {count(one['bytes_in'])}B to the syncer and {count(one['bytes_out'])}B back"
        for name, one in (summary.get("relays") or {}).items()
    ]
    return f"Bodies through relays: {listing(ways)}." if ways else ""


def _shares(summary: Summary, events: Sequence[Event]) -> str:
    """Say whose links carried only a share of the rounds, and the last figures of each."""
    narrow = [event for event in events if event["kind"] == "share" and event["share"] < 1]
    reasons = {event["learner"]: plain(event["text"]).removeprefix(f"{event['learner']}: ") for event in narrow}
    shares = {name: figures.get("round_share") for name, figures in summary["per_learner"].items()}
    sentences = [
        f"The link of {name} let it take part in {percent(share)} of the rounds (the last: {reasons[name]})."
        for name, share in shares.items()
        if name in reasons and share is not None
    ]
    return " ".join(sentences)


def _merging(summary: Summary, events: Sequence[Event]) -> str:
    tokens, cut = dict(summary["tokens"]), lost_at_cut(summary)
    if not tokens["computed"]:
        return ""
    tokens |= {"lost": tokens["lost"] - cut, "cut": cut}
    fates = [
        f"{percent(tokens[fate] / tokens['computed'])} {words}"
        for fate, words in _fates(summary, _where_lost(summary, events))
        if tokens.get(fate)
    ]
    return f"Of the tokens, {listing(fates)}.{_by_learner(summary)}" if fates else ""


def lost_at_cut(summary: Summary) -> int:
    """Tokens that the run was begun without, since they were in no version at the cut that it was made of."""
    return int((summary["tokens"].get("dropped_by_cause") or {}).get("cut", 0))


def beginning(summary: Summary) -> str:
    """Say where in another run this one began: cut 240."""
    return plain(summary.get("parent", "")).partition(" ")[2] or "the cut that it was made of"


def _is_loss(event: Event) -> bool:
    return event["kind"] in ("lost", "left") and not is_routine(event) and not event.get("moved")


def _where_lost(summary: Summary, events: Sequence[Event]) -> str:
    """The ledger counts together what went with a process, what was thrown away in quarantine, and what a learner that
    did not stop in time made behind the last rounds."""
    gone = any(_is_loss(event) for event in events)
    if not summary.get("quarantines"):
        if summary.get("resumes") and not gone:
            return "when the run was stopped, or at its end, made too late to be collected"
        return "with a process" if gone else "at the run's end, made too late to be collected"
    return "with a process or in quarantine" if gone else "in quarantine"


def _fates(summary: Summary, where_lost: str) -> tuple[tuple[str, str], ...]:
    return (
        ("merged", "were merged into the model (merged share)"),
        ("dropped", f"were dropped when a learner {_where_dropped(summary)}"),
        ("cut", f"were computed before this run began, and not merged at {beginning(summary)}"),
        ("lost", f"were lost {where_lost}"),
        ("rolled_back", "were in versions that were rolled back"),
        ("filtered", "were left out by the outlier filter"),
        ("in_flight", "were on their way when the account ends"),
    )


_CAUSES = (("overlap", "by overlap"), ("missed", "in missed rounds"))


def _where_dropped(summary: Summary) -> str:
    if _adopts_by_carry(summary):
        return "took the run's parameters in place of its own (it began anew, the run went back, or its copy was gone)"
    tokens = summary["tokens"]
    causes = tokens.get("dropped_by_cause") or {}
    told = ", ".join(
        f"{percent(causes[name] / tokens['computed'])} {words}" for name, words in _CAUSES if name in causes
    )
    return f"adopted a newer version{f' ({told})' if told else ''}"


def _adopts_by_carry(summary: Summary) -> bool:
    """Whether an adoption drops no steps. Empty, it is the default (protocol/settings.py)."""
    settings = summary["settings"]
    return (settings.get("adopt", "overwrite") or ("overwrite" if settings.get("synchronous") else "carry")) == "carry"


def _by_learner(summary: Summary) -> str:
    """From the least to the most merged."""
    known = {name: one["merged_share"] for name, one in summary["per_learner"].items()}
    shares = sorted((share, name) for name, share in known.items() if share is not None)
    if len(shares) < 2:
        return ""
    (least, low), (most, high) = shares[0], shares[-1]
    if percent(least) == percent(most):
        return ""
    return f" By learner, from {percent(least)} ({low}) to {percent(most)} ({high}) were merged."


def _training(summary: Summary) -> str:
    start, end = summary["training_loss_start"], summary["training_loss_end"]
    if start is None or end is None:
        return ""
    return f"Training loss of the learners went from {format_score(start)} to {format_score(end)}."


def _validation(summary: Summary, events: Sequence[Event]) -> str:
    start, end = summary["validation_loss_start"], summary["validation_loss_end"]
    if start is None:
        return ""
    best, at = summary["validation_loss_best"], summary["validation_loss_best_round"]
    kept = "atoll export --best RUN FILE"
    if _is_by_hand(events):
        kept = f"kept where its evaluator runs, in atoll-learners/{plain(summary['run'])}/evaluator or its --folder"
    if end is None:
        return (
            f"Validation loss of the global model went from {format_score(start)} to one that is not finite; "
            f"the lowest was {format_score(best)} at round {at:,} ({kept})."
        )
    unit = f" {plain(summary['loss_unit'])}" if summary["loss_unit"] else ""
    last, lower = format_score(end), ""
    if best is not None and best < end:
        last, lowest = format_scores_apart(end, best)
        lower = f"; the lowest was {lowest} at round {at:,} ({kept})"
    went = f"went from {format_score(start)} to {last}{unit}{_when_scored(summary)}"
    return f"Validation loss of the global model {went}{lower}."


def _when_scored(summary: Summary) -> str:
    """Say of which round the last score is; empty: of the last."""
    stale = summary.get("validation_stale_round")
    return "" if stale is None else f" at round {stale:,} of {summary['rounds_closed']:,}"


def _is_by_hand(events: Sequence[Event]) -> bool:
    """Whether nothing but the syncer was started by Atoll."""
    return not any(event["kind"] == "started" and event["process"] != "syncer" for event in events)


def _metrics(summary: Summary) -> list[str]:
    return [
        f"Its {plain(name)} went from {format_score(one['start'])} to {_end_and_best(one, _when_scored(summary))}."
        for name, one in summary["metrics"].items()
    ]


def _end_and_best(metric: dict[str, Any], when: str) -> str:
    if metric["best"] is None or metric["best"] == metric["end"]:
        return f"{format_score(metric['end'])}{when}"
    end, best = format_scores_apart(metric["end"], metric["best"])
    return f"{end}{when}; the best was {best} at round {metric['best_round']:,}"


def _warnings(summary: Summary, events: Sequence[Event]) -> list[str]:
    settings, learners = summary["settings"], summary["per_learner"]
    found = []
    if nothing := describe_no_rounds(summary):
        found.append(nothing if nothing.endswith("?") else f"{nothing}.")
    by_hand = _is_by_hand(events)
    meant, joined = int(settings.get("learners") or 0), len(learners)
    if joined < meant:
        found.append(f"only {joined} of {meant} learners ever joined{'' if by_hand else '; logs/ says why'}.")
    idle = [name for name, figures in learners.items() if figures["rounds"] == 0]
    if idle and summary["rounds"]:
        found.append(f"{listing(idle)} never contributed to a round.")
    configured, effective = int(settings.get("sync_every") or 0), summary["effective_h"]
    if configured and effective is not None and abs(effective / configured - 1) > 0.15:
        reason = f" ({summary['narrowest']})" if summary.get("narrowest") else ""
        found.append(
            f"a fragment was synced every {effective:g} learner steps, where {configured} were asked for{reason}."
        )
    if summary["participation"] is not None and summary["participation"] < 0.5:
        found.append(f"a round had only {percent(summary['participation'])} of the learners alive in it on average.")
    found += _neglected(events) + _fresh_restarts(events)
    found += [f"{event['text']}." for event in events if event["kind"] == "same_batches"]
    # A run that went on may have had the same end before.
    found += dict.fromkeys(f"{event['text']}." for event in events if event.get("about") == AFTER_END)
    if summary["refusals"]:
        reasons = [event["text"] for event in events if event["kind"] == "refused"]
        last = f" (the last: {reasons[-1]})" if reasons else ""
        found.append(f"{_number(summary['refusals'], 'contribution')} refused{last}.")
    if when := _when_scored(summary):
        found.append(f"the last model was not scored: the last figures of validation are those{when}.")
    start, end = summary["validation_loss_start"], summary["validation_loss_end"]
    if summary.get("validation_not_finite") and end is None:
        found.append(f"the validation loss was {'never finite' if start is None else 'not finite at the end'}.")
    elif start is None and not summary["metrics"]:
        how = "a script scores it with atoll.evaluate"
        if summary.get("tape"):
            how = "a run under a tape has no evaluator"
        elif by_hand:
            how = "atoll learn SCRIPT --evaluator scores it, with the script's atoll.evaluate"
        how = _scorer_failure(events) or how
        found.append(f"the global model was never scored, so nothing is known of its validation loss: {how}.")
    if start is not None and end is not None and end > start:
        found.append("the validation loss went up.")
    return found + _broken_numbers(events)


def describe_no_rounds(summary: Summary) -> str:
    """Why such a run came to nothing; empty: it committed a round."""
    if summary["rounds"]:
        return ""
    if summary["per_learner"] and not summary["tokens"]["computed"]:
        return "no learner made a step: does the script call learner.step() after every optimizer step?"
    return "no round was committed: the model is what it was at the start"


def find_shortfall(summary: Summary, events: Sequence[Event]) -> str:
    """Why a run that came to its end failed all the same; empty: it did not."""
    alarms = _number_alarms(events)
    broken = f"the run ended while {alarms[-1]['text']}" if alarms and not alarms[-1]["over"] else ""
    return describe_no_rounds(summary) or broken


def _number_alarms(events: Sequence[Event]) -> list[Event]:
    """That the numbers of every learner are not finite, and that they are again."""
    return [event for event in events if event["kind"] == "alarm" and event.get("about") == "numbers"]


def _broken_numbers(events: Sequence[Event]) -> list[str]:
    alarms = _number_alarms(events)
    raised = [event["text"] for event in alarms if not event["over"]]
    return [f"{'for a while: ' if alarms[-1]['over'] else ''}{text}." for text in raised[-1:]]


def _neglected(events: Sequence[Event]) -> list[str]:
    """Whose work was merged far less than the others': when the alarm was raised, not how it ended."""
    alarms = [event for event in events if event["kind"] == "low_share"]
    raised = {event["learner"]: event["text"] for event in alarms if not event.get("over")}
    lasting = {name for name in raised if not [e for e in alarms if e["learner"] == name][-1].get("over")}
    return [
        f"{name} was merged less than the others {'until the end' if name in lasting else 'for a while'} "
        f"(the last: {text})."
        for name, text in raised.items()
    ]


def _fresh_restarts(events: Sequence[Event]) -> list[str]:
    """Name the learners of several ranks that lost the state of their inner optimizers: no peer has it."""
    fresh = Counter(str(event["process"]) for event in events if event["kind"] == "restarted" and event.get("fresh"))
    return [
        f"{name} came back {_times(number)} before its first snapshot, so its inner optimizer and what the script "
        "registered began anew (cut_every says how often one is taken)."
        for name, number in fresh.items()
    ]


def _scorer_failure(events: Sequence[Event]) -> str:
    """Empty: it did not fail, or a script has none."""
    ended = [e for e in events if e["kind"] == "exited" and e.get("process") == "evaluator"]
    return str(ended[-1].get("text", "")) if ended and ended[-1].get("code") not in (0, ConfigError.exit_code) else ""


def _number(value: int, one: str, many: str = "") -> str:
    return f"{count(value) if value >= 1e6 else f'{value:,}'} {one if value == 1 else many or one + 's'}"


# ---- advice ---------------------------------------------------------------------------------------------------------

MUCH = 0.15
"""Share of the tokens that one cause drops, from which on there is advice. Overwrite usually drops τ/H = 8 %."""
ENOUGH = 12
"""A fragment is away for one step of so many: the usual settings have τ/H = 2/24."""


def advise(summary: Summary) -> list[str]:
    causes, computed = summary["tokens"].get("dropped_by_cause") or {}, summary["tokens"]["computed"]
    if not causes or not computed or _adopts_by_carry(summary):
        return []
    given = sum(one["rounds"] for one in summary["per_learner"].values())
    if summary["refusals"] > MUCH * (summary["refusals"] + given):
        return []  # refusals are the cause, and what was refused is nothing to keep
    overlap, missed = causes.get("overlap", 0) / computed, causes.get("missed", 0) / computed
    found = [_sync_less_often(summary, overlap)] if overlap > MUCH else []
    found += [_carry(summary, missed)] if missed > MUCH else []
    return [one for one in found if one]


def _sync_less_often(summary: Summary, overlap: float) -> str:
    every = summary["effective_h_mean"] or summary["settings"].get("sync_every")
    if not every:
        return ""
    away = max(1, round(overlap * every))
    larger = max(USUAL, ENOUGH * away)
    return (
        f"a fragment comes back after {away} of {every:.0f} steps, and what was trained meanwhile is dropped "
        f"({percent(overlap)} of the tokens): --set sync_every={larger} drops less of it, --set adopt=carry keeps it."
    )


def _carry(summary: Summary, missed: float) -> str:
    shares = {name: one["merged_share"] for name, one in summary["per_learner"].items()}
    known = {name: share for name, share in shares.items() if share is not None}
    least = f"; least was merged of {min(known, key=known.__getitem__)}" if len(known) > 1 else ""
    return (
        f"{percent(missed)} of the tokens were overwritten in rounds that their learner was not in{least}: "
        "--set adopt=carry keeps such steps."
    )


# ---- printing -------------------------------------------------------------------------------------------------------

INTERRUPTED = "the operator asked for it"
"""The reason of a run that could go on."""
INCOMPARABLE = "its scores cannot be compared"
"""The reason of a run that `atoll compare` ended."""
_SAMPLE = "what the trained model writes"


def print_closing(
    console: Console,
    summary: Summary,
    story: Sequence[str],
    sample: str | None = None,
    out: Path | None = None,
    again: str = "atoll train",
    unspent: str = "",
) -> None:
    """`again`: the command that goes on with it. `unspent`: how far it came, where some of its budget is left."""
    width = min(console.width, WIDEST)
    console.print()
    console.print(_figures(summary, width))
    for sentence in story:
        line = Text(plain(sentence), "yellow" if sentence.startswith((WARNING, ADVICE)) else "")
        console.print(line, width=width, soft_wrap=not console.is_terminal)
    if sample:
        text = Text(plain(sample.strip("\n").expandtabs(4), keep="\n"), "italic")
        console.print()
        console.print(Panel(text, title=_SAMPLE, title_align="left", border_style="magenta", width=width))
    if out is not None:
        console.print()
        files = ", ".join(_files_in(out))
        print_command(console, f"All of it is in {out}: {files}. On one page:", f"atoll report {out}")
        if summary["reason"] in (INTERRUPTED, INCOMPARABLE):
            stopped = f"It stopped at {unspent}. " if unspent else ""
            print_command(console, f"{stopped}It goes on with:", f"{again} --resume {out}")
        elif unspent:
            ended = f"{WARNING}the scripts ended first, at {unspent}. To spend all of it, loop until learner.done."
            print_command(console, f"{ended} It goes on with:", f"{again} --resume {out}", "yellow")


def print_command(console: Console, words: str, command: str, style: str = "") -> None:
    """The command has a line of its own, which nothing breaks: it is there to be copied."""
    text = Text(plain(words), style)
    console.print(text, width=min(console.width, WIDEST), soft_wrap=not console.is_terminal)
    console.print(Text(f"  {command}"), soft_wrap=True)


def _files_in(out: Path) -> list[str]:
    """Those that are worth a look, and are there."""
    logs = out / "logs"
    names = ("summary.json", "events.jsonl", "model.safetensors", "model-ema.safetensors", "model-tail.safetensors")
    notes = {"model.safetensors": " (what is merged)"}  # frozen parameters are in an export
    files = [name + notes.get(name, "") for name in names if (out / name).exists()]
    return [*files, *(["logs/"] if logs.is_dir() and any(logs.iterdir()) else [])]


OF_ROUNDS = ("effective H", "its mean, p95", "overlap (τ)", "overlap, missed", "outer step, ρ")
"""Of no meaning where gradients are averaged at every step."""


def _figures(summary: Summary, width: int) -> Table:
    tokens, learners, cut = summary["tokens"], summary["per_learner"], lost_at_cut(summary)
    facts = [
        ("goodput", percent(summary["goodput"])),
        ("rounds committed", f"{summary['rounds']:,} of {summary['rounds_closed']:,}"),
        ("uptime", percent(summary["uptime"])),
        ("participation", percent(summary["participation"])),
        ("liveness", percent(summary["liveness"])),
        ("effective H", decimal(summary["effective_h"], 1)),
        ("tokens", count(tokens["computed"])),
        ("its mean, p95", f"{decimal(summary['effective_h_mean'], 1)}, {decimal(summary['effective_h_p95'], 0)}"),
        ("overlap (τ)", f"{decimal(summary['overlap'], 1)} ({summary['settings'].get('overlap', NONE)})"),
        ("merged share", percent(summary["merged_share"])),
        ("longest gap", span(summary["longest_gap_s"])),
        ("overlap, missed", _dropped(summary)),
        ("median gap", span(summary["median_gap_s"])),
        ("lost", f"{count(tokens['lost'] - cut)} tokens"),
        *((f"not in {beginning(summary)}", f"{count(most)} tokens") for most in [cut] if cut),
        ("outer step, ρ", f"{decimal(summary['outer_step'])}, {decimal(summary['rho'])}"),
        ("restarts", f"{summary['restarts']}{_planned_kills(summary)}"),
        ("bytes per token", decimal(summary["bytes_per_token"], 1)),
        ("refusals", str(summary["refusals"])),
        ("steps, sum", f"{sum(learner['steps'] for learner in learners.values()):,}"),
        ("validation", _validation_course(summary)),
        ("training loss", _course(summary["training_loss_start"], summary["training_loss_end"])),
        *((plain(name), _course(one["start"], one["end"])) for name, one in summary["metrics"].items()),
    ]
    if summary.get("data_parallel"):
        facts = [fact for fact in facts if fact[0] not in OF_ROUNDS]
    facts += [("", "")] * (len(facts) % 2)
    title = f"{summary['run'] or 'the run'}, {span(summary['wall_s'])}"
    table = Table(box=box.ROUNDED, title=plain(title), title_justify="left", show_header=False, width=min(width, 80))
    beside = 2 if width >= 76 else 1
    for _ in range(beside):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(ratio=1, justify="right", no_wrap=True)
    for first in range(0, len(facts), beside):
        table.add_row(*(cell for fact in facts[first : first + beside] for cell in fact))
    return table


def _planned_kills(summary: Summary) -> str:
    """Those of a demonstration or a storm. What somebody else killed is told with its exit."""
    return f" ({_number(summary['kills'], 'planned kill')})" if summary["kills"] else ""


def _dropped(summary: Summary) -> str:
    """By overlap and in missed rounds."""
    causes, computed = summary["tokens"].get("dropped_by_cause"), summary["tokens"]["computed"]
    if not causes or not computed:
        return NONE
    return ", ".join(percent(causes[name] / computed) for name in ("overlap", "missed"))


def _validation_course(summary: Summary) -> str:
    start, end = summary["validation_loss_start"], summary["validation_loss_end"]
    if end is None and summary.get("validation_not_finite"):
        return "not finite" if start is None else f"{format_score(start)} → not finite"
    return _course(start, end)


def _course(start: float | None, end: float | None) -> str:
    return NONE if start is None else f"{format_score(start)} → {format_score(end)}"


def conclude(report: VerifyReport) -> str:
    """What was judged of a run in which nothing is wrong."""
    facts = report.facts
    if not facts["unjudged"]:
        return "all is well"
    judged = f"the last {facts['records'] - facts['unjudged']:,} of {facts['records']:,} records"
    return f"what could be judged is well: {judged}, and what follows from them; of those before only their checksums"


def verification_rows(report: VerifyReport) -> list[tuple[str, str]]:
    """What `atoll verify` counted, as a short table."""
    facts = report.facts
    fates = [f"{count(tokens)} {fate.replace('_', ' ')}" for fate, tokens in facts["tokens"].items()]
    causes = [f"{count(tokens)} {CAUSES[cause]}" for cause, tokens in facts["dropped_by_cause"].items()]
    shares = [f"{name} {percent(one['merged_share'])}" for name, one in facts["per_learner"].items()]
    empty = f", {facts['empty']:,} at the end with nothing left to collect" if facts["empty"] else ""
    terms = "1 term" if facts["terms"] == 1 else f"{facts['terms']} terms"
    return [
        ("run", facts["run"] or "has not begun"),
        ("records", f"{facts['records']:,}, by {terms} of the syncer"),
        ("rounds", f"{facts['rounds']:,}, {facts['passed']:,} of them passed over{empty}"),
        ("contributions", f"{facts['contributions']:,} of {facts['learners']:,} learners"),
        ("tokens", ", ".join(fates) or "none"),
        ("not merged", ", ".join(causes) or "none"),
        ("merged share", ", ".join(shares) or "none"),
        ("cuts", ", ".join(map(str, facts["cuts"])) or "none"),
        ("made again", f"{facts['rebuilt_rounds']:,} rounds, bit for bit: all whose gradients are kept"),
        ("took", span(facts["seconds"])),
    ]
