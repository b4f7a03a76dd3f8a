"""Real runs that share moments: a learner and the syncer are killed in them, and they are repeated bit for bit."""

from __future__ import annotations

import os
import signal

import pytest
from tests.system.conftest import Event, Run, members

from atoll.protocol.records import JoinedRecord, PlayedRecord, TermRecord
from atoll.protocol.tape import AdoptedEntry, MomentsEntry
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults]

SMALL = (
    *("--learners", "2", "--steps", "100000", "--share", "moments", "--set", "evaluate_every=0"),
    *("--set", "workload.depth=1", "--set", "workload.block=16", "--set", "workload.batch=4"),
    *("--set", "fragments=4", "--set", "sync_every=8", "--set", "cut_every=24"),
)
WARM = ("--warm-start", "0.01")
"""Carry for the first thousand steps, then overwrite."""


def rounds(events: list[Event]) -> int:
    return sum(event["kind"] == "round" for event in events)


@pytest.mark.parametrize("more", [(), WARM, ("--set", "workload.optimizer=muon", "--set", "codec=int8")], ids=str)
def test_kills_cost_averages_at_most_and_the_run_is_repeated(run: Run, more: tuple[str, ...]) -> None:
    run.train(*SMALL, *more)
    run.until(lambda events: len(members(events)) == 2)
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    before = rounds(run.events())
    run.until(lambda events: rounds(events) >= before + 16)
    os.kill(run.pid("syncer"), signal.SIGKILL)
    run.until(lambda events: any(event["kind"] == "reigned" for event in events))
    before = rounds(run.events())
    run.until(lambda events: rounds(events) >= before + 24)
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok, report.problem
    check_adoptions(run)
    run.check_replay()


def check_adoptions(run: Run) -> None:
    """Averages were adopted in both terms, and a newcomer's first versions came without."""
    term, processes, adopted = 1, dict[tuple[str, int], str](), list[tuple[int, str, int, bool]]()
    for _, record in read(run.out / "journal", disk=LocalDisk()):
        if isinstance(record, TermRecord):
            term = record.term
        if isinstance(record, JoinedRecord):
            processes[record.learner, record.incarnation] = record.session
        if isinstance(record, PlayedRecord):
            for one in record.tapes:
                pairs = zip((None, *one.entries), one.entries, strict=False)
                adopted += [
                    (term, processes[one.learner, one.incarnation], entry.version, isinstance(last, MomentsEntry))
                    for last, entry in pairs
                    if isinstance(entry, AdoptedEntry)
                ]
    for number in {number for number, _, _, _ in adopted}:
        assert any(shared for at, _, _, shared in adopted if at == number), f"term {number}"
    newcomer = processes["learner-1", 2]
    first = next(shared for _, process, _, shared in adopted if process == newcomer)
    assert not first, "it held no version before"
