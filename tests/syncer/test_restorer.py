"""A living syncer whose evaluator finds bad losses goes back, tells its learners, and leaves that on the disk."""

from __future__ import annotations

import numpy as np
from tests.syncer.conftest import WAIT_S, FakeLearner, Stage
from tests.syncer.test_service import next_pull, one_at_work, url

from atoll.fabric.transfer import get_fragment_once
from atoll.fabric.wire import ScoreReport
from atoll.protocol.messages import Announce, Pull
from atoll.store.cuts import folder_of
from atoll.store.disk import LocalDisk
from atoll.store.verify import verify_run
from atoll.syncer.recovery import recover


def score(stage: Stage, round: int, loss: float | None) -> None:
    stage.service.score(ScoreReport(round=round, loss=loss, cpu_s=0.1))


async def give(learner: FakeLearner, pull: Pull, delta: float, version: int) -> None:
    await learner.contribute(pull, delta)
    await learner.until(Announce, lambda one: one.fragment == pull.fragment and one.version == version)


async def poisoned(stage: Stage, guard: str = "rollback") -> FakeLearner:
    """Every value is 0.75 after two rounds, which are scored well, and 100 and less good after two more."""
    learner, pull = await one_at_work(stage, guard=guard, fragments=2)
    for number, (delta, version) in enumerate([(0.25, 1), (0.25, 1), (-99.25, 2), (-99.25, 2)]):
        await give(learner, pull, delta, version)
        if number == 1:
            score(stage, 2, 1.5)
        if number < 3:
            pull = await next_pull(learner, pull)
    return learner


def _behind(rounds: int) -> Pull:
    return Pull(round=rounds - 1, attempt=9, fragment=0, gathering=0, deadline_s=1.0)


async def values(stage: Stage, learner: FakeLearner) -> set[float]:
    found: set[float] = set()
    for part in learner.plan.fragments:
        body = np.empty(part.size, dtype=np.float32)
        await get_fragment_once(url(stage), part.index, body.view(np.uint8).data, WAIT_S)
        found |= set(map(float, body))
    return found


async def test_a_bad_score_takes_the_run_back_to_the_good_one(stage: Stage) -> None:
    learner = await poisoned(stage)
    assert await values(stage, learner) == {100.0}
    score(stage, 4, None)
    event = await stage.until("restored")
    assert (event["round"], event["versions"]) == (2, [3, 3])
    assert event["at"] >= stage.events("alarm")[0]["at"] > 1e9, "the time at which it was said"
    for fragment in (0, 1):
        told = await learner.until(Announce, lambda one, f=fragment: one.restored and one.fragment == f)
        assert told.version == 3 and not told.members
    assert await values(stage, learner) == {0.75}
    await give(learner, await next_pull(learner, _behind(event["committed"])), 0.25, 4)
    assert await values(stage, learner) == {0.5, 0.75}
    await stage.end()
    assert (report := verify_run(stage.out.path)).ok, report.problem
    assert report.facts["fragment_tokens"]["rolled_back"] > 0


async def test_what_is_on_the_disk_then_is_the_run_as_it_was_taken_back(stage: Stage) -> None:
    learner = await poisoned(stage)
    score(stage, 4, None)
    await learner.until(Announce, lambda one: one.restored)
    found = recover(stage.out, disk=LocalDisk())
    assert found is not None and found.parameters is not None and found.history.versions == [3, 3]
    assert {float(x) for tensor in found.parameters.tensors_by_name().values() for x in tensor.flat} == {0.75}


async def test_without_anything_to_go_back_to_the_run_goes_on_with_an_alarm(stage: Stage) -> None:
    learner = await poisoned(stage)
    (folder_of(stage.out.cuts, 0) / "theta-000.bin").unlink()
    score(stage, 4, None)
    assert "not rolled back" in (await stage.until("alarm", 2))["text"]
    assert "validation loss" in stage.service.figures().alarm
    await give(learner, await next_pull(learner, _behind(5)), 0.25, 3)
    score(stage, 6, 1.5)
    assert (await stage.until("alarm", 3))["over"]
    assert stage.service.figures().alarm == ""


async def test_an_alarm_names_the_whole_command_that_lets_the_run_be_rolled_back(stage: Stage) -> None:
    await poisoned(stage, guard="alarm")
    score(stage, 4, None)
    assert (await stage.until("alarm"))["text"].endswith(f"rolled back: atoll set {stage.out.path} guard=rollback")
    assert stage.service.figures().alarm.endswith(f"atoll set {stage.out.path} guard=rollback")


async def test_three_scores_above_the_limit_are_an_alarm_that_the_status_shows(stage: Stage) -> None:
    await one_at_work(stage)
    for loss in (2.0, 30.0, 30.0):
        score(stage, 0, loss)
    assert not stage.events("alarm")
    score(stage, 0, 30.0)
    assert "validation loss is 30" in (await stage.until("alarm"))["text"]
    assert "validation loss is 30" in stage.service.figures().alarm
