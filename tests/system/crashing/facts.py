"""What is left of a run that was killed at, held against the promise that nothing is lost.

The journal is what the syncer made durable, events.jsonl what it told people, the learners' diaries what reached them
(scripts/diary.py): nobody was told, and nobody holds, what the journal does not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.system.conftest import Event, Run

from atoll.protocol.records import AnyRecord, MergedRecord, PassedRecord
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.verify import VerifyReport, verify_run

SLOW = 3.0
"""How much longer than promised things may take here: other tests run beside these."""
AGAIN_S = 5.0
"""A syncer commits again within this time of its death."""
STILL_S = 1.0
"""No learner stands still for this long, whatever the syncer does."""


@dataclass(frozen=True, slots=True)
class Outage:
    """From a death to the first round that was told of after it."""

    point: str
    died: float
    again: float

    @property
    def seconds(self) -> float:
        return self.again - self.died


@dataclass(frozen=True, slots=True)
class StepTaken:
    at: float
    queued_s: float
    """Until then, in all (scripts/diary.py)."""


def records(run: Run) -> list[AnyRecord]:
    return [record for _, record in read(run.out / "journal", disk=LocalDisk())]


def deaths(run: Run, shard: int = 1) -> list[dict[str, Any]]:
    """Of the syncer, or of a shard of it, by its own hand."""
    return _lines((run.out if shard == 1 else run.out / "shards" / str(shard)) / "deaths.jsonl")


def returns(run: Run, shard: int) -> list[dict[str, float]]:
    """Of every life of a shard that staged a round: when it first did, and how long it took (deadly.py)."""
    return _lines(run.out / "shards" / str(shard) / "returns.jsonl")


def diaries(run: Run) -> dict[str, list[dict[str, Any]]]:
    return {path.stem.removeprefix("diary-"): _lines(path) for path in sorted(run.folder.glob("diary-*.jsonl"))}


def is_over(death: dict[str, Any], events: list[Event]) -> bool:
    """Whether rounds are told of again."""
    return any(event["kind"] == "round" and event["at"] > death["at"] for event in events)


def outages(run: Run, died: list[dict[str, Any]]) -> list[Outage]:
    rounds = [event["at"] for event in run.events("round")]
    return [Outage(one["point"], one["at"], min(at for at in rounds if at > one["at"])) for one in died]


# ---- the promises -------------------------------------------------------------------------------------------------


def check_rounds(run: Run, most_untold: int) -> None:
    """Every round once and in order over all terms, and what was told is what is in the journal, member by member."""
    rounds = [record for record in records(run) if isinstance(record, MergedRecord | PassedRecord)]
    assert [record.round for record in rounds] == list(range(len(rounds)))
    told = {event["round"]: event for event in run.events("round")}
    assert [event["round"] for event in run.events("round")] == sorted(told), "none is told of twice"
    merged = {record.round: record for record in rounds if isinstance(record, MergedRecord)}
    assert told.keys() <= merged.keys(), f"told, but not in the journal: {sorted(told.keys() - merged.keys())}"
    assert len(merged.keys() - told.keys()) <= most_untold, "a death keeps one round from being told, at most"
    for number, event in told.items():
        assert _as_told(event) == _as_written(merged[number])


def _as_told(event: Event) -> tuple[Any, ...]:
    members = [(m["learner"], m["incarnation"], m["t"], m["steps"], m["tokens"], m["base"]) for m in event["members"]]
    return event["fragment"], event["version"], event["attempt"], members


def _as_written(record: MergedRecord) -> tuple[Any, ...]:
    members = [(m.learner, m.incarnation, m.t, m.steps, m.tokens, m.base) for m in record.members]
    return record.fragment, record.version, record.attempt, members


def check_adopted(run: Run) -> int:
    """Every version that a learner holds is in the journal, with the very bytes it holds; how many were compared."""
    written = {(r.fragment, r.version): r.digest for r in records(run) if isinstance(r, MergedRecord)}
    held = [line for diary in diaries(run).values() for line in diary if "version" in line]
    for line in held:
        found = written.get((line["fragment"], line["version"]))
        assert found == line["digest"], f"the journal has {found} where a learner holds {line}"
    return len(held)


def check_kept_stepping(run: Run, outages: list[Outage], learners: set[str] | None = None) -> None:
    """While nothing was merged, learners made steps as ever: none stood still, and for the time that they had a core
    they were as fast as in the rest of the run, or nearly so. What they wait for a core is the machine's: a syncer that
    starts anew, and the tests beside this one, take theirs."""
    for learner, diary in diaries(run).items():
        if learners is not None and learner not in learners:
            continue
        steps = [StepTaken(line["at"], line["queued_s"]) for line in diary if "t" in line]
        within = {outage: [step for step in steps if outage.died < step.at < outage.again] for outage in outages}
        found = {outage: [step.at for step in some] for outage, some in within.items()}
        calm_s = steps[-1].at - steps[0].at - sum(outage.seconds for outage in outages)
        calm_s -= steps[-1].queued_s - steps[0].queued_s - sum(map(_queued, within.values()))
        usual = (len(steps) - sum(map(len, within.values()))) / calm_s
        for outage, some in within.items():
            longest = max(b - a for a, b in pairwise([outage.died, *found[outage], outage.again]))
            assert longest < SLOW * STILL_S, f"{learner} stood still for {longest:.1f} s after {outage.point}"
            rate = len(some) / (outage.seconds - _queued(some))
            assert rate > usual / SLOW, f"{learner}: {rate:.0f} steps/s after {outage.point}, else {usual:.0f}"


def _queued(steps: list[StepTaken]) -> float:
    """Seconds that a learner waited for a core, from the first of these steps to the last."""
    return steps[-1].queued_s - steps[0].queued_s if steps else 0.0


def check_files(run: Run) -> VerifyReport:
    report = verify_run(run.out)
    assert report.ok, report.problem
    tokens = report.facts["fragment_tokens"]
    assert tokens["computed"] == sum(count for fate, count in tokens.items() if fate != "computed") > 0
    assert not run.events("unbalanced")
    return report


def _lines(path: Path) -> list[dict[str, Any]]:
    """A writer that was killed may leave half a line."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
