"""summary.json: what a run came to, as a pure function of its events and its account.

Rounds, tokens, shares of them and steps are those of the whole run, also of the runs that it was made from: from its
account (protocol/account.py), which its last event tells, or else its journal. The events of a folder know only what
happened there, so times, losses, restarts and participation are of this folder. Events of runs that tell no account are
counted instead.

The training part runs from the first `recovered` to the last `ending` (without one: to the last round). goodput, uptime
and liveness are shares of it. A run that was stopped and gone on with lay still in between: that counts for nothing.
After `ending` the last steps are collected in rounds that nothing paces (the drain): they count as rounds, as merged
tokens and for participation, but not for the gaps, effective H and absences. With phases of training, effective H,
overlap and the settings beside them are those of the last phase.

| field | meaning |
| --- | --- |
| data_parallel | processes that averaged their gradients at every step, as one learner; 0: it is no such run
| goodput | seconds spent stepping (all between two calls of learner.step, so also the script's own validation), all
learners, over learner-seconds allocated (`LearnerTime`) |
| merged_share | fragment-tokens merged over fragment-tokens computed, without those in flight |
| uptime | share of that time in which at least one learner was stepping: alive and recovered |
| liveness | learner-seconds alive (joined, and not gone) over those allocated |
| participation | mean over rounds of members over learners alive and recovered at that moment, the muted included; a
learner whose link carries only a share of the rounds counts in those of its share |
| effective_h, _mean, _p95 | learner steps between two syncs of a fragment: median, mean, 95th percentile |
| carried_h, narrowest | H that rounds were spaced by at last, as the links carry it, to 20 %; the part that made it
larger than was asked, with what it carried; empty: none did |
| phases | of each phase of training, and each H set by hand: H as asked for and as it was, rounds; empty: one H |
| overlap, _mean, _p95 | learner steps from reading a contribution to adopting the version that holds it |
| rho, outer_step | autocorrelation of merged gradients, effective outer step: means over the last phase |
| rounds, rounds_closed | committed rounds; all, also those in which nothing was merged (`round` on the screen) |
| fragments | of each its version, and the tokens merged into it; null where no ledger told |
| tokens | by fate (`ledger.FATES`): computed is the sum of the others. From the ledger; without it, from the events |
| parent | the run that this one was made of, and where in it: "75851b74 cut 240"; empty: of none |
| tokens.dropped_by_cause | overlap + missed = dropped, crash (quarantine too) + cut (not merged at the cut that the run
began from) = lost, filtered; only of a ledger |
| bytes_per_token | bytes in and out of the syncer over tokens computed |
| relays | per relay, bytes of bodies that the syncer received through it (bytes_in) and sent (bytes_out) |
| longest_gap_s, median_gap_s | time between two commits |
| wall_s, total_s | the training part; from the first event to the last |
| validation_loss_start, _end, _best, _best_round | of the global model, by the evaluator (CPU: evaluator_cpu_s); _end
is null where the last one was not finite |
| validation_stale_round | where the run closed without a score of its last model: the round of the last score
| validation_not_finite | scores whose loss was not finite |
| quarantines | how often a learner was in quarantine |
| loss_unit, metrics | the scorer's own words; per metric: direction, start, end, best, best_round |
| training_loss_start, _end | of the learners, the mean over the first and the last cycle of rounds |
| kills | by a demonstration (`--demo`) or `atoll chaos`; what else killed a process is in the events `exited` |
| recovery | per `killed` and `restarted`: seconds until a newer incarnation of the learner was in a round, or null |
| per_learner | over all its incarnations; steps, rounds, merged_share and tokens_by_fate from the account; share: of
all committed rounds, those that it contributed to; participation: share of the rounds made while it was there
(recovered, and not gone) that it was in; round_share: share of these rounds that its link let it take part in, on
average; muted_s; busy_s: seconds spent stepping, here and since the syncer first heard of the process;
longest_absence_s also counts the time before its first round |

Learner-seconds are allocated for as many as the run is meant for at a moment, or as are alive where more joined
(protocol/statistics.py). Where no event tells how many it is meant for, it is the most that were alive at once. Figures
that nothing in the events supports are null, never guessed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import Any

from atoll.observe.timeline import (
    Incarnation,
    Presence,
    Span,
    find_closing,
    find_ending,
    find_incarnations,
    find_session_starts,
    find_stays,
    find_training_part,
    first_of_kind,
    remove_idle_time,
    select_kinds,
    select_paced_rounds,
    starts_everything,
    take_share,
)
from atoll.protocol.ledger import FATES
from atoll.protocol.settings import PHASED
from atoll.protocol.statistics import LearnerTime, Spread, participation, round_score, spread
from atoll.telemetry.events import Event
from atoll.telemetry.round_members import count_filtered_tokens, count_members, count_merged_tokens, names_all

Summary = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LearnerWork:
    """What one training process did, as it was last heard to say."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    """Seconds spent stepping, in the time of these events alone."""


def summarise(events: Iterable[Event], account: Mapping[str, Any] | None = None) -> Summary:
    """`account`: of a run that has not told its own at its end, as its journal has it."""
    # Several processes append to the file: nearly, but not always, in the order of time.
    timeline = remove_idle_time(sorted(events, key=lambda event: float(event["at"])))
    # In the folder of a run that was made from another one no run begins: it goes on.
    header = first_of_kind(timeline, "run") or first_of_kind(timeline, "reigned") or {}
    plan = first_of_kind(timeline, "plan") or {}
    changes = [event for event in select_kinds(timeline, "phase", "changed") if "sync_every" in event]
    phase = changes[-1] if changes else {"at": 0.0}
    settings: dict[str, Any] = {
        **(header.get("settings") or {}),
        **(plan.get("settings") or {}),  # with P and H as the model made them
        **{key: phase[key] for key in PHASED if key in phase},
    }
    part = find_training_part(timeline)
    rounds = select_kinds(timeline, "round")
    paced = select_paced_rounds(timeline)
    fragments = int(settings.get("fragments") or 0) or 1 + max((int(r["fragment"]) for r in rounds), default=0)
    presence = Presence.of(timeline, part)
    learner_time = count_learner_time(timeline, part, presence, _learners_meant(header, settings))
    work = work_done(timeline, fragments)
    closing = find_closing(timeline)
    told: Mapping[str, Any] = closing if closing.get("tokens") is not None else account or closing
    tokens = tokens_by_fate(timeline, work, fragments, told)
    gaps = [b["at"] - a["at"] for a, b in pairwise(paced)]
    merged, closed = int(told.get("rounds", len(rounds))), int(told.get("round", _count_closed(timeline)))
    passed = closed - merged if "rounds" in told else len(select_kinds(timeline, "passed"))
    ending = find_ending(timeline) or closing
    wall = part.length
    in_phase = [event for event in paced if event["at"] >= phase["at"]]
    steps, overlap = steps_between_syncs(in_phase), steps_to_adoption(in_phase)
    causes = {name: told[name] for name in ("dropped_by_cause",) if told.get(name) is not None}
    share = told.get("merged_share") if "rounds" in told else _share_of_events(rounds, fragments, tokens["computed"])
    return {
        "run": header.get("run"),
        "parent": told.get("parent", ""),
        "data_parallel": header.get("data_parallel", 0),
        "data_digest": plan.get("data") or None,
        "parameters": plan.get("parameters"),
        "reason": closing.get("reason") or ending.get("reason") or ending.get("text"),
        "goodput": _round(learner_time.goodput(sum(w.busy_s for w in work.values()), part.end)),
        "merged_share": _round(share),
        "uptime": _ratio(presence.stepping_s(), wall),
        "liveness": _round(learner_time.liveness(part.end)),
        "participation": _round(_mean([participation(count_members(r), r["live"]) for r in rounds if r.get("live")])),
        "effective_h": steps.median,
        "effective_h_mean": _round(steps.mean),
        "effective_h_p95": steps.p95,
        **read_pace(timeline, settings, rounds=len(rounds)),
        "phases": h_by_phase(changes, paced),
        "overlap": overlap.median,
        "overlap_mean": _round(overlap.mean),
        "overlap_p95": overlap.p95,
        "rho": _round(_mean([r["rho"] for r in in_phase if r.get("rho") is not None])),
        "outer_step": _round(_mean([r["outer_step"] for r in in_phase if r.get("outer_step") is not None])),
        "tokens": {**tokens, **causes},
        "fragments": told.get("fragments"),
        "rounds": merged,
        "rounds_closed": closed,
        "rounds_passed": passed,
        "resumes": resumes(timeline, part),
        "restarts": len(select_kinds(timeline, "restarted")),
        "kills": len(select_kinds(timeline, "killed")),
        "refusals": len(select_kinds(timeline, "refused")),
        "quarantines": len(select_kinds(timeline, "quarantined")),
        "recovery": recoveries(timeline, part),
        "bytes_per_token": _bytes_per_token(timeline, tokens["computed"]),
        "relays": _relays(timeline),
        **read_scores(select_kinds(timeline, "score")),
        "validation_stale_round": find_stale_score(timeline),
        **training_losses(rounds, fragments),
        "evaluator_cpu_s": _round(sum(float(e.get("cpu_s") or 0.0) for e in select_kinds(timeline, "score"))),
        "longest_gap_s": _round(max(gaps, default=None)),
        "median_gap_s": _round(median(gaps) if gaps else None),
        "wall_s": _round(wall),
        "total_s": _round(timeline[-1]["at"] - timeline[0]["at"] if timeline else 0.0),
        "per_learner": per_learner(timeline, work, part, told.get("fates") or {}, merged),
        "settings": settings,
    }


def count_learner_time(timeline: Sequence[Event], part: Span, presence: Presence, meant: int) -> LearnerTime:
    """Of the whole training part."""
    counted = LearnerTime(meant or presence.most_at_once())
    changes = [event for event in select_kinds(timeline, "changed") if "learners" in event]
    moments = [(float(event["at"]), 0, int(event["learners"])) for event in changes]
    for stay, span in enumerate(presence.alive):
        moments += [(span.start, 2, stay), (span.end, 1, stay)]
    counted.begin_part(part.start)
    for at, what, which in sorted(moments):  # at one moment who goes comes before who comes: a restart is no second one
        at = min(max(at, part.start), part.end)
        if what == 0:
            counted.change_meant(at, which)
        elif what == 1:
            counted.remove_learner(at, str(which))
        elif presence.alive[which].length > 0:
            counted.add_learner(at, str(which))
    return counted


def _count_closed(timeline: Sequence[Event]) -> int:
    """As far as events tell of single rounds."""
    return 1 + max((event["round"] for event in select_kinds(timeline, "round", "passed")), default=-1)


def resumes(timeline: Sequence[Event], part: Span) -> list[dict[str, Any]]:
    """Each time that the run was gone on with: when, and whether it had been ended before or was killed whole."""
    return [
        {
            "at_s": _round(max(0.0, timeline[place]["at"] - part.start)),
            "after": "ended" if find_closing(timeline[:place]) else "killed",
        }
        for place in find_session_starts(timeline)
    ]


def work_done(timeline: Sequence[Event], fragments: int) -> dict[Incarnation, LearnerWork]:
    counter = WorkCounter()
    for event in timeline:
        counter.add(event)
    return counter.work(fragments)


class WorkCounter:
    """Per training process the last counters it was heard to say. Of one whose end nobody saw, because the run was cut
    off, those of its last round; a run of before these were told knows at least what was merged of it."""

    def __init__(self) -> None:
        self._first: dict[Incarnation, Incarnation] = {}
        """A learner out of quarantine, or one that comes back after its account was closed, is a new incarnation, but
        the same process: its counters go on."""
        self._newest: dict[str, int] = {}
        self._merged: dict[Incarnation, LearnerWork] = {}
        self._heard: dict[Incarnation, LearnerWork] = {}
        self._told: dict[Incarnation, LearnerWork] = {}
        self._met: set[Incarnation] = set()
        """Processes that took the parameters since everything was started."""
        self._uncounted_s: dict[Incarnation, float] = defaultdict(float)
        """Seconds that a process was stepping in time that the timeline does not have: in the run that this one was
        made from, or while the syncer was away until somebody went on with the run."""

    def add(self, event: Event) -> None:
        if event["kind"] == "joined" and event.get("known_as", 0) not in (0, event["incarnation"]):
            before = (event["learner"], event["known_as"])
            self._first[before[0], event["incarnation"]] = self._process(before)
        for life in find_incarnations([event]):
            self._newest[life[0]] = max(life[1], self._newest.get(life[0], life[1]))
            self._merged.setdefault(self._process(life), LearnerWork())
        match event["kind"]:
            case "started" if starts_everything(event):
                self._met.clear()
            case "recovered":
                self._leave_out_earlier(event)
            case "quarantined":
                life = (event["learner"], event["incarnation"])
                self._first[life[0], life[1] + 1] = self._process(life)
            case "round":
                for member in event["members"]:
                    self._add_member(member)
            case "lost" | "left":
                self._told[self._process((event["learner"], event["incarnation"]))] = _work(event)
            case "finished":
                for entry in event.get("learners", ()):
                    name = entry["learner"]
                    life = (name, entry.get("incarnation", self._newest.get(name, 1)))
                    self._told[self._process(life)] = _work(entry)

    def _add_member(self, member: dict[str, Any]) -> None:
        process = self._process((member["learner"], member["incarnation"]))
        so_far = self._merged[process]
        after = LearnerWork(max(so_far.steps, member["t"]), so_far.tokens + member["tokens"])
        self._merged[process] = after
        if "busy_s" in member:
            self._heard[process] = LearnerWork(after.steps, member["total"], member["busy_s"])
            self._told.pop(process, None)  # it was only its connection that was lost

    def _leave_out_earlier(self, recovered: Event) -> None:
        process = self._process((recovered["learner"], recovered["incarnation"]))
        if process not in self._met and recovered.get("busy_before") is not None:
            known = self._told.get(process) or self._heard.get(process) or LearnerWork()
            self._uncounted_s[process] += max(0.0, recovered["busy_before"] - known.busy_s)
        self._met.add(process)

    def _process(self, life: Incarnation) -> Incarnation:
        return self._first.get(life, life)

    def work(self, fragments: int) -> dict[Incarnation, LearnerWork]:
        merged = {life: LearnerWork(w.steps, round(w.tokens / fragments)) for life, w in self._merged.items()}
        return {life: self._without_earlier(life, work) for life, work in (merged | self._heard | self._told).items()}

    def _without_earlier(self, life: Incarnation, work: LearnerWork) -> LearnerWork:
        return replace(work, busy_s=max(0.0, work.busy_s - self._uncounted_s.get(life, 0.0)))


def tokens_by_fate(
    timeline: Sequence[Event], work: dict[Incarnation, LearnerWork], fragments: int, told: Mapping[str, Any]
) -> dict[str, int]:
    """`told`: what the ledger says."""
    if (known := told.get("tokens")) is not None:
        return {name: int(known.get(name, 0)) for name in FATES}  # earlier versions rolled nothing back
    lost: dict[Incarnation, float] = {}
    gone_kinds = {"lost", "left"}  # a courier that sees its training process die takes leave for it
    for event in timeline:
        if event["kind"] == "ending":
            gone_kinds = {"lost"}
        if event["kind"] in gone_kinds:
            lost[event["learner"], event["incarnation"]] = float(event.get("unmerged_tokens") or 0)
        elif event["kind"] in ("joined", "recovered"):
            # The same incarnation is back: it was the connection that was lost, not the steps.
            lost.pop((event["learner"], event["incarnation"]), None)
    computed = sum(w.tokens for w in work.values())
    undone = round(sum(event["fragment_tokens"] for event in select_kinds(timeline, "restored")) / fragments)
    merged = round(_merged_fragment_tokens(select_kinds(timeline, "round")) / fragments) - undone
    filtered = round(sum(map(count_filtered_tokens, select_kinds(timeline, "round"))) / fragments)
    gone = round(sum(lost.values()))
    rest = max(0, computed - merged - undone - gone - filtered)
    # Until the run has said that it is finished, nobody knows what became of the rest.
    in_flight = 0 if find_closing(timeline) else rest
    fates = (computed, merged, rest - in_flight, gone, undone, filtered, in_flight)
    return dict(zip(FATES, fates, strict=True))


def recoveries(timeline: Sequence[Event], part: Span) -> list[dict[str, Any]]:
    """From each kill and each restart of a learner to its next contribution."""
    found: list[dict[str, Any]] = []
    newest: dict[str, int] = defaultdict(lambda: -1)
    waiting: list[tuple[dict[str, Any], float, int]] = []
    for event in timeline:
        learner = event.get("learner") or event.get("process") or ""
        if event["kind"] in ("joined", "recovered"):
            newest[learner] = max(newest[learner], event["incarnation"])
        elif event["kind"] in ("killed", "restarted") and learner in newest:
            entry = {
                "learner": learner,
                "after": event["kind"],
                "at_s": _round(event["at"] - part.start),
                "seconds": None,
            }
            found.append(entry)
            waiting.append((entry, event["at"], newest[learner]))
        elif event["kind"] == "round":
            members = {member["learner"]: member["incarnation"] for member in event["members"]}
            for entry, at, incarnation in waiting:
                if entry["seconds"] is None and members.get(entry["learner"], -1) > incarnation:
                    entry["seconds"] = _round(event["at"] - at)
    return found


def per_learner(
    timeline: Sequence[Event],
    work: dict[Incarnation, LearnerWork],
    part: Span,
    fates: Mapping[str, Mapping[str, Any]],
    merged: int,
) -> dict[str, dict[str, Any]]:
    """`fates`: what the account says of each of them; `merged`: rounds in which something was."""
    rounds = [event for event in select_kinds(timeline, "round") if names_all(event)]
    all_paced = select_paced_rounds(timeline)
    paced = [event for event in all_paced if names_all(event)]
    seen = find_incarnations(timeline)
    present, muted_s = rounds_present(timeline), muted_seconds(timeline, part)
    shares = mean_round_shares(timeline)
    answer: dict[str, dict[str, Any]] = {}
    for learner in sorted({name for name, _ in work} | fates.keys()):
        mine = [w for (name, _), w in work.items() if name == learner]
        inside = [any(m["learner"] == learner for m in r["members"]) for r in rounds]
        there = [any(m["learner"] == learner for m in r["members"]) for r in paced]
        moments = [part.start, *(r["at"] for r, yes in zip(paced, there, strict=True) if yes), part.end]
        told = fates.get(learner, {})
        given = int(told.get("rounds", sum(inside)))
        answer[learner] = {
            "merged_share": _round(told.get("merged_share")),
            "steps": told.get("steps", sum(w.steps for w in mine)),
            "tokens": told.get("computed", sum(w.tokens for w in mine)),
            "tokens_by_fate": {name: told.get(name, 0) for name in (*FATES, "dropped_by_cause")} if told else None,
            "participation": _ratio(sum(inside), max(sum(inside), present[learner])),
            "round_share": _round(shares.get(learner)),
            "muted_s": _round(muted_s[learner]),
            "busy_s": _round(sum(w.busy_s for w in mine)),
            "rounds": given,
            "share": _ratio(given, merged),
            "incarnations": sum(name == learner for name, _ in seen),
            "longest_absence_s": _round(max(b - a for a, b in pairwise(moments))),
            "longest_absence_rounds": _longest_absence(all_paced, learner),
        }
    return answer


def _learners_meant(header: Event, settings: dict[str, Any]) -> int:
    told = header.get("learners", settings.get("learners", 0))
    return int(told) if isinstance(told, int | float) else len(told)


def _share_of_events(rounds: Iterable[Event], fragments: int, computed: int) -> float | None:
    return _ratio(_merged_fragment_tokens(rounds), fragments * computed)


def _merged_fragment_tokens(rounds: Iterable[Event]) -> int:
    return sum(map(count_merged_tokens, rounds))


def steps_between_syncs(paced: Iterable[Event]) -> Spread:
    return spread([m["since"] for r in paced for m in r["members"] if m.get("since") is not None])


def h_by_phase(changes: Sequence[Event], paced: Sequence[Event]) -> list[dict[str, Any]]:
    """For each phase of training, and each H set by hand: what was asked for, and what came of it."""
    found, number = [], 0
    for change, later in pairwise([*changes, {"at": inf}]):
        rounds = [event for event in paced if change["at"] <= event["at"] < later["at"]]
        steps, number = steps_between_syncs(rounds), change.get("training_phase") or number
        by_hand = change["kind"] == "changed"
        told = {"phase": number, "by_hand": by_hand, "sync_every": change["sync_every"], "rounds": len(rounds)}
        found.append({**told, "effective_h": steps.median, "effective_h_mean": _round(steps.mean)})
    return found


def read_pace(timeline: Sequence[Event], settings: dict[str, Any], *, rounds: int) -> dict[str, Any]:
    """Return the H of the last interval between rounds, and the part that made it larger than the H in the settings.
    After a change of H and in a new term of the syncer, H is as in the settings until an event says otherwise."""
    carried, narrowest = settings.get("sync_every") if rounds else None, ""
    for event in reversed(timeline):
        if event["kind"] == "reigned" or (event["kind"] in ("phase", "changed") and "sync_every" in event):
            break
        if event["kind"] == "pace":
            carried, narrowest = event["h"], event.get("narrowest", "")
            break
    return {"carried_h": None if carried is None else float(carried), "narrowest": narrowest}


def mean_round_shares(timeline: Sequence[Event]) -> dict[str, float]:
    """Return the mean share of the rounds of each learner, over the rounds that were made while it was there."""
    shares: dict[str, float] = {}
    found: dict[str, list[float]] = defaultdict(list)
    there: dict[str, int] = {}
    for event in timeline:
        take_share(shares, event)
        match event["kind"]:
            case "recovered":
                there[event["learner"]] = event["incarnation"]
            case "lost" | "left" if there.get(event["learner"]) == event["incarnation"]:
                del there[event["learner"]]
            case "started" if starts_everything(event):
                there.clear()
            case "round":
                for learner in there.keys() | {member["learner"] for member in event["members"]}:
                    found[learner].append(shares.get(learner, 1.0))
    return {learner: fmean(values) for learner, values in found.items()}


def steps_to_adoption(paced: Iterable[Event]) -> Spread:
    return spread([m["overlap"] for r in paced for m in r["members"] if m.get("overlap") is not None])


def rounds_present(timeline: Sequence[Event]) -> Counter[str]:
    """Per learner, the rounds that name all their members and were made while it was there: recovered, and not gone."""
    found: Counter[str] = Counter()
    moments = [event["at"] for event in select_kinds(timeline, "round") if names_all(event)]
    for learner, span in find_stays(timeline, ("recovered",), moments[-1] if moments else 0.0):
        found[learner] += bisect_right(moments, span.end) - bisect_left(moments, span.start)
    return found


def muted_seconds(timeline: Sequence[Event], part: Span) -> dict[str, float]:
    """Per learner, how long it reported but did not answer: from `muted` until it answers again or is gone."""
    found: dict[str, float] = defaultdict(float)
    since: dict[str, float] = {}
    for event in select_kinds(timeline, "muted", "probed", "lost", "left", "quarantined", "started"):
        if event["kind"] == "started":
            for learner in list(since) if starts_everything(event) else ():
                found[learner] += Span(since.pop(learner), event["at"]).within(part).length
            continue
        learner = event["learner"]
        if event["kind"] == "muted":
            since.setdefault(learner, event["at"])
        elif learner in since:
            found[learner] += Span(since.pop(learner), event["at"]).within(part).length
    for learner, start in since.items():
        found[learner] += Span(start, max(start, part.end)).within(part).length
    return found


def _relays(timeline: Sequence[Event]) -> dict[str, dict[str, int]]:
    """Bytes through each relay, over all terms that came to an end."""
    found: dict[str, Counter[str]] = {}
    for event in select_kinds(timeline, "finished"):
        for name, figures in event.get("relays", {}).items():
            found.setdefault(name, Counter()).update(figures)
    return {name: dict(figures) for name, figures in sorted(found.items())}


def _bytes_per_token(timeline: Sequence[Event], computed: int) -> float | None:
    """Every syncer that came to an end told its own bytes, and which tokens were computed before it; a run that was
    gone on with has several."""
    told = [event for event in select_kinds(timeline, "finished") if "bytes_in" in event]
    if told and all("computed_before" in event for event in told):
        computed = sum(event["tokens"]["computed"] - event["computed_before"] for event in told if event.get("tokens"))
    return _ratio(sum(event["bytes_in"] + event["bytes_out"] for event in told), computed) if told else None


def _work(told: Event) -> LearnerWork:
    return LearnerWork(int(told.get("t") or 0), int(told.get("tokens") or 0), float(told.get("busy_s") or 0.0))


def _longest_absence(rounds: Sequence[Event], learner: str) -> int:
    """In rounds; those that do not name all their members count for the next one that does."""
    longest = current = waiting = 0
    for event in rounds:
        waiting += 1
        if any(member["learner"] == learner for member in event["members"]):
            current = waiting = 0
        elif names_all(event):
            current, waiting = current + waiting, 0
            longest = max(longest, current)
    return longest


def _last(timeline: Sequence[Event], kind: str) -> Event | None:
    """A run that was ended and gone on with has several; the last counts."""
    return next((event for event in reversed(timeline) if event["kind"] == kind), None)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return _round(part / whole) if whole > 0 else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


# ---- losses and metrics ---------------------------------------------------------------------------------------------

Score = tuple[int, float]
"""A round, and the value then."""


def read_scores(scores: Sequence[Event]) -> dict[str, Any]:
    """The summary's fields of what the evaluator found; null where it found nothing."""
    losses = [(int(e["round"]), float(e["loss"])) for e in scores if e.get("loss") is not None]
    has_loss = bool(losses) or any(e.get("not_finite") for e in scores)  # a scorer may give metrics alone
    best = best_score(losses, "min")
    return {
        "validation_loss_start": losses[0][1] if losses else None,
        "validation_loss_end": _value(scores[-1].get("loss")) if scores else None,
        "validation_not_finite": len(scores) - len(losses) if has_loss else 0,
        "validation_loss_best": best[1] if best else None,
        "validation_loss_best_round": best[0] if best else None,
        "loss_unit": next((str(e["unit"]) for e in reversed(scores) if e.get("unit")), ""),
        "metrics": _read_metrics(scores),
    }


def find_stale_score(timeline: Sequence[Event]) -> int | None:
    """Return the round of the last score, if the run closed without a score of its last model."""
    score = _last(timeline, "score")
    if score is None or not find_closing(timeline):
        return None
    is_final = score.get("final", True) and select_kinds(timeline, "round", "score")[-1] is score
    return None if is_final else int(score["round"])


def _value(value: float | None) -> float | None:
    return None if value is None else float(value)


def _read_metrics(scores: Sequence[Event]) -> dict[str, dict[str, Any]]:
    values: dict[str, list[Score]] = {}
    directions: dict[str, str] = {}
    for event in scores:
        directions |= event.get("directions") or {}
        for name, value in (event.get("metrics") or {}).items():
            if value is not None:
                values.setdefault(name, []).append((int(event["round"]), float(value)))
    return {name: _read_metric(found, directions.get(name)) for name, found in values.items()}


def _read_metric(found: Sequence[Score], direction: str | None) -> dict[str, Any]:
    best = best_score(found, direction)
    return {
        "direction": direction,
        "start": found[0][1],
        "end": found[-1][1],
        "best": best[1] if best else None,
        "best_round": best[0] if best else None,
    }


def best_score(found: Sequence[Score], direction: str | None) -> Score | None:
    """The first of the best ones; None where nobody said what is better."""
    if not found or direction not in ("min", "max"):
        return None
    return (min if direction == "min" else max)(found, key=lambda score: score[1])


def training_losses(rounds: Sequence[Event], fragments: int) -> dict[str, float | None]:
    """The mean of the members' training losses over the first and the last cycle of rounds; of a run of fewer than two
    cycles, over its two halves. One value says little: a cycle has every fragment and every member once."""
    named = [event for event in rounds if names_all(event)]
    many = max(1, min(fragments, len(named) // 2))
    return {
        "training_loss_start": _mean_loss(named[:many]),
        "training_loss_end": _mean_loss(named[-many:]),
    }


def _mean_loss(rounds: Iterable[Event]) -> float | None:
    found = [float(m["loss"]) for event in rounds for m in event["members"] if m.get("loss") is not None]
    return round_score(fmean(found)) if found else None
