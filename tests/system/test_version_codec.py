"""Runs whose versions come down as encoded steps, through a killed syncer and a kill of everything."""

from __future__ import annotations

import os
import signal

import pytest
from tests.system.conftest import Event, Run

from atoll.numerics.fragments import make_plan
from atoll.protocol.records import BegunRecord, MergedRecord
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

OPTIONS = ("--learners", "2", "--set", "evaluate_every=0", "--set", "wait_for_learners_s=60")


def rounds(events: list[Event]) -> int:
    return sum(event["kind"] == "round" for event in events)


@pytest.mark.parametrize(("codec", "smaller"), [("bf16", 1.99), ("int8", 3.7), ("int4", 7.0), ("topk", 20.0)])
def test_versions_survive_a_killed_syncer_and_a_resume_and_are_repeated_bit_for_bit(
    run: Run, codec: str, smaller: float
) -> None:
    run.train(*OPTIONS, "--set", f"version_codec={codec}", "--steps", "100000")
    run.until(lambda events: rounds(events) >= 12)
    os.kill(run.pid("syncer"), signal.SIGKILL)
    run.until(lambda events: any(event["kind"] == "reigned" for event in events))
    before = rounds(run.events())
    run.until(lambda events: rounds(events) >= before + 12)
    run.kill_everything()
    report = verify_run(run.out)
    assert report.ok, report.problem
    before = rounds(run.events())
    run.start("train", "--resume", run.out)
    run.until(lambda events: rounds(events) >= before + 36)
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok, report.problem
    check_bytes(run, rounds(run.events()) - before, smaller)
    run.check_replay()


def check_bytes(run: Run, rounds_since: int, smaller: float) -> None:
    """Steps are that many times smaller than their fragments; and steps are what learners got."""
    lines = [record for _, record in read(run.out / "journal", disk=LocalDisk())]
    begun = lines[0]
    assert isinstance(begun, BegunRecord)
    plan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
    merged = [record for record in lines if isinstance(record, MergedRecord) and record.payload is not None]
    sizes = [(record.payload.length, 4 * plan.fragments[record.fragment].size) for record in merged if record.payload]
    assert sizes and smaller * sum(step for step, _ in sizes) <= sum(whole for _, whole in sizes)
    model, learners = 4 * plan.size, 2
    whole = learners * rounds_since * model / begun.settings.fragments
    assert run.events("finished")[-1]["bytes_out"] < learners * model + whole * (1 / smaller + 0.19)
