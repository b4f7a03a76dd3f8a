from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.courier.conftest import WAIT_S, Run, Stage, Training

from atoll.courier import service
from atoll.courier.service import Courier
from atoll.mailbox.channel import CopyMade, CourierChannel, Goodbye, RunProgress, StopOrder, decode_to_training
from atoll.numerics.fragments import assemble_tensors
from atoll.protocol.effects import Tick
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Refused


def base(training: Training) -> dict[str, list[float]]:
    """What the base says, by tensor."""
    assert training.box is not None
    plan = training.box.plan
    whole = assemble_tensors(plan, [training.box.base(part.index) for part in plan.fragments])
    return {name: values.ravel().tolist() for name, values in whole.items()}


def flat(parameters: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: parameter.float().reshape(-1).tolist() for name, parameter in parameters.items()}


async def stepping(training: Training, until: int, change: float = -0.5) -> None:
    """Steps at an easy pace until every fragment has at least that version."""
    async with asyncio.timeout(WAIT_S):
        while min(training.versions()) < until:
            training.step(change)
            at = training.t
            await training.until(lambda at=at: training.courier._machine.t >= at, idle=False)  # type: ignore[misc,union-attr]
            await asyncio.sleep(0.01)


async def test_the_first_joiner_gives_the_run_its_parameters(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    assert {name: values.reshape(-1).tolist() for name, values in run.theta().items()} == flat(training.parameters)
    assert training.versions() == [0, 0]
    assert training.box is not None and training.box.base_version.tolist() == [0, 0]
    assert training.box.run == training.courier._machine.run != ""  # type: ignore[union-attr]
    assert training.box.count("incarnation") == 1


async def test_how_far_the_run_is_comes_as_one_thing(stage: Stage) -> None:
    run = await stage.run(fragments=1, sync_every=2, steps=8192)
    training = stage.training(run)
    await training.join()
    assert training.progress == [RunProgress()], "also of a run that only begins"
    await stepping(training, until=3)
    await training.until(lambda: training.progress[-1].committed >= 3)
    assert [one.committed for one in training.progress] == list(range(training.progress[-1].committed + 1))
    assert training.progress == sorted(training.progress, key=lambda one: (one.global_step, one.progress))
    assert all(one.global_step <= 8192 * one.progress < one.global_step + 1 for one in training.progress)


async def test_a_training_process_that_reads_nothing_is_told_the_newest_only(stage: Stage) -> None:
    """What waits for it must not grow with the rounds: a step may take hours."""
    near, theirs = CourierChannel.pair()
    courier = Courier(CourierChannel(theirs))
    courier._machine = LearnerMachine("learner-0", "session", ())
    while not courier._channel.clogged:
        courier._channel.send(fx.AskToLeave("x" * 10_000))
    waiting = len(courier._channel._waiting)
    for committed in range(1, 1000):
        courier._carry_out(fx.Inform(committed / 1000, 2 * committed, committed))
        courier._handle(Tick())
    assert len(courier._channel._waiting) == waiting
    frames = []
    while courier._channel.clogged:
        frames += near.receive()
        courier._channel.flush()
    courier._handle(Tick())
    while new := near.receive():
        frames += new
    told = [frame for frame in map(decode_to_training, frames) if isinstance(frame, RunProgress)]
    assert told == [RunProgress(999, 0.999, 1998)]
    near.close()
    courier._channel.close()


async def test_each_reason_why_no_syncer_answers_is_said_once_and_then_a_line_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two dead addresses made 125 lines in a minute: each line differed from the one before it."""
    near, theirs = CourierChannel.pair()
    courier, said, now = Courier(CourierChannel(theirs)), list[str](), [0.0]
    monkeypatch.setattr("atoll.courier.service.say", said.append)
    monkeypatch.setattr(courier, "_loop", SimpleNamespace(time=lambda: now[0]))
    for dial in range(120):
        now[0] = dial / 2
        courier._lost(f"address {dial % 2} cannot be reached")
    assert said[:2] == [f"the syncer is out of reach (address {n} cannot be reached); dialling again" for n in (0, 1)]
    assert len(said) == 5, "and one line every 15 s"
    near.close()
    courier._channel.close()


async def test_a_second_joiner_takes_them(stage: Stage) -> None:
    run = await stage.run(learners=2)
    first = stage.training(run)
    await first.join()
    other = {name: torch.zeros_like(parameter) for name, parameter in first.parameters.items()}
    second = stage.training(run, other, name="learner-1")
    await second.join()
    await second.until(lambda: second.box.base_version.tolist() == [0, 0])  # type: ignore[union-attr]
    assert flat(second.parameters) == base(second) == flat(first.parameters)


async def test_a_step_is_reported(stage: Stage) -> None:
    run = await stage.run(quorum=2, learners=2)
    training = stage.training(run)
    await training.join()
    training.step(0.25, tokens=12)
    learner = run.service._machine.members.learners["learner-0"]  # type: ignore[union-attr]
    await training.until(lambda: learner.t == 1)
    assert (learner.tokens_total, learner.steps, learner.tokens) == (12, (1, 1), (12, 12))


async def test_a_pull_is_answered_with_base_minus_theta_and_the_new_version_becomes_the_base(stage: Stage) -> None:
    run = await stage.run(fragments=1, sync_every=1)
    training = stage.training(run)
    await training.join()
    run.watch_deltas()
    before = base(training)
    training.step(0.25)
    after = flat(training.parameters)
    await training.until(lambda: training.versions() == [1])
    [(fragment, delta)] = run.deltas
    expected = [b - a for name in ("a", "b") for b, a in zip(before[name], after[name], strict=True)]
    assert (fragment, delta.tolist()) == (0, expected)
    await training.until(lambda: training.box.base_version.tolist() == [1])  # type: ignore[union-attr]
    assert flat(training.parameters) == base(training) == after, "with η = 1 the run takes what its only learner has"


async def test_every_fragment_goes_round(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    await stepping(training, until=3)
    rounds = run.said("round")
    assert [event["fragment"] for event in rounds[:4]] == [0, 1, 0, 1]


@pytest.mark.parametrize("rule", ["overwrite", "blend", "carry"])
async def test_every_adoption_rule_goes_round(stage: Stage, rule: str) -> None:
    run = await stage.run(adopt=rule)
    training = stage.training(run)
    await training.join()
    await stepping(training, until=3)
    assert all(np.isfinite(values).all() for values in run.theta().values())


async def test_bf16_tensors_adopt_exactly_what_the_base_says(stage: Stage) -> None:
    run = await stage.run(lr=0.3)
    parameters = {"a": torch.tensor([1.0, 2.0, 3.0]).bfloat16(), "b": torch.tensor([0.1, 0.7])}
    training = stage.training(run, parameters)
    await training.join()
    assert flat(training.parameters) == base(training)
    await stepping(training, until=2, change=-0.125)
    training.stop()
    assert training.box is not None
    for part in training.box.plan.fragments:
        f, at = part.index, int(training.box.steps[part.index])
        if at == 0 and training.box.base_version[f] == training.box.adopted[f]:
            assert base(training)[part.pieces[0].label] == flat(training.parameters)[part.pieces[0].label]


async def test_when_the_training_process_is_gone_the_syncer_is_told_and_the_courier_ends(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    training.hang_up()
    async with asyncio.timeout(WAIT_S):
        await training.task
    assert "its training process died" in (await run.until_said("left"))["text"]


async def test_a_goodbye_is_passed_on_even_if_the_socket_closes_at_once(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    training.step(0.5)
    training.send(Goodbye("it was interrupted"))
    training.hang_up()
    async with asyncio.timeout(WAIT_S):
        await training.task
    assert "it was interrupted" in (await run.until_said("left"))["text"]


async def test_a_new_courier_goes_on_where_the_dead_one_stood(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    await stepping(training, until=1)
    await training.kill_courier()
    held = training.versions()
    training.hire()
    await training.until(lambda: len(training.welcomes) == 2, idle=False)
    assert training.welcomes[1].incarnation == 1
    assert training.versions() == held, "nothing was forgotten"
    rounds = len(run.said("round"))
    await stepping(training, until=max(held) + 2)
    assert len(run.said("round")) > rounds
    assert len(run.said("recovered")) == 1 and not run.said("refused")


async def test_a_base_that_was_half_written_is_fetched_again_before_it_counts(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    await stepping(training, until=2)
    await training.kill_courier()
    assert training.box is not None
    training.box.base_version[1] = -1
    training.box.base(1)[:] = 1e30
    training.hire()
    await training.until(lambda: training.box.base_version[1] >= 2)  # type: ignore[union-attr]
    assert (np.abs(training.box.base(1)) < 1e3).all()
    await stepping(training, until=max(training.versions()) + 2)
    assert not run.said("refused")


async def test_at_the_end_the_last_steps_are_merged_and_the_model_is_the_runs(stage: Stage) -> None:
    run = await stage.run(lr=0.5, steps=6)
    training = stage.training(run)
    await training.join()
    async with asyncio.timeout(WAIT_S):
        while not training.stops:
            training.step(-0.25)
            await training.until(lambda at=training.t: training.courier._machine.t >= at, idle=False)  # type: ignore[misc,union-attr]
            await asyncio.sleep(0.01)
    training.stop()
    await training.until(lambda: any(stop.final for stop in training.stops))
    assert not any(stop.failed for stop in training.stops)
    assert {name: values.reshape(-1).tolist() for name, values in run.theta().items()} == flat(training.parameters)


async def test_it_hangs_up_for_good_once_the_run_is_over_whatever_its_training_process_still_does(stage: Stage) -> None:
    """A loop may take its time to end: a courier that is still connected, loses its connection and dials again comes
    back to a run that it has left."""
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    run.service.end("asked to")
    training.stop()
    await training.until(lambda: any(stop.final for stop in training.stops))
    link = training.courier._link
    assert link is not None and not training.task.done()
    async with asyncio.timeout(WAIT_S):
        await link._idle.wait()
    assert link._closing.is_set() and not link.up and not training.task.done()


async def test_a_model_that_differs_is_the_operators_mistake(stage: Stage) -> None:
    run = await stage.run()
    await stage.training(run).join()
    other = stage.training(run, {"a": torch.zeros(4)}, name="learner-1")
    other.hire()
    await other.until(lambda: bool(other.stops))
    [stop] = other.stops
    assert stop.failed and stop.final and stop.mistake
    assert "'a' is (4,) here, (3,) in the run" in stop.reason


async def test_to_come_too_late_is_no_mistake(stage: Stage) -> None:
    training = stage.training(await stage.run())
    await training.join()
    training.courier._handle(fx.Arrived(Refused(reason="the run is over", over=True)))
    async with asyncio.timeout(WAIT_S):
        await training._readable.wait()
    frames = [decode_to_training(data) for data in training.channel.receive()]
    assert StopOrder("the run is over", final=True, failed=False, mistake=False) in frames


async def test_a_courier_in_the_wrong_ends_with_its_error(stage: Stage) -> None:
    training = stage.training(await stage.run())
    training.hire()
    training.send(CopyMade(0, 0, 0, 0, 0, 0, 0, 0))
    with pytest.raises(AssertionError):
        async with asyncio.timeout(WAIT_S):
            await training.task


async def second_run(stage: Stage, first: Run, **rules: object) -> Run:
    """Another syncer on the same port."""
    port = first.service.server.port
    await first.stop()
    return await stage.run(port=port, **rules)


async def test_an_error_is_of_the_courier_that_made_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two couriers on one loop, as in a test or a notebook."""
    run = await stage.run(learners=2)
    wrong, other = stage.training(run), stage.training(run, name="learner-1")
    await wrong.join()
    await other.join()

    def fail(*what: object) -> None:
        raise RuntimeError("wrong")

    monkeypatch.setattr(wrong.courier._machine, "handle", fail)
    wrong.step(0.25)
    with pytest.raises(RuntimeError, match="wrong"):
        await asyncio.wait_for(wrong.task, WAIT_S)
    await stepping(other, until=1)


async def test_a_courier_that_is_ended_begins_nothing_new(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    courier, heard = training.courier, []
    handle = courier._machine.handle  # type: ignore[union-attr]
    monkeypatch.setattr(courier._machine, "handle", lambda now, event: heard.append(event) or handle(now, event))
    held = asyncio.Event()
    assert courier._tasks is not None

    async def ends_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await held.wait()

    courier._tasks.create_task(ends_slowly())
    await asyncio.sleep(0)
    killed = asyncio.ensure_future(training.kill_courier())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    heard.clear()
    training.step(0.25)
    for _ in range(10):
        await asyncio.sleep(0)
    held.set()
    await asyncio.wait_for(killed, WAIT_S)
    assert training.task.done() and not heard


async def test_a_new_run_begins_with_the_parameters_of_the_learner_that_comes_back(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    await stepping(training, until=2)
    theta = run.theta()
    again = await second_run(stage, run)
    await training.until(lambda: training.versions() == [0, 0] and bool(again.said("initial")), idle=False)
    assert len(training.welcomes) == 2, "the shared memory stays"
    assert all(np.allclose(again.theta()[name], theta[name], atol=2.0) for name in theta)
    await stepping(training, until=2)
    assert not again.said("refused")


@pytest.mark.parametrize("rules", [{"codec": "bf16"}, {"fragments": 1}])
async def test_a_new_run_of_other_rules_makes_the_shared_memory_anew(stage: Stage, rules: dict[str, object]) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    await stepping(training, until=1)
    old = training.box
    again = await second_run(stage, run, **rules)
    await training.until(lambda: training.box is not old and training.boundary.recovered)  # type: ignore[union-attr]
    await stepping(training, until=2)
    assert not again.said("refused")
    assert old is not None
    old.close()


async def test_a_drain_reaches_the_training_process(stage: Stage) -> None:
    run = await stage.run()
    training = stage.training(run)
    await training.join()
    answer = asyncio.create_task(run.service.drain("learner-0"))
    await training.until(lambda: bool(training.drains))
    assert training.drains[0].reason == "the operator asked"
    assert (await run.until_said("draining"))["learner"] == "learner-0"
    assert not answer.done(), "its courier has it, and may die"
    training.leaving = True
    training.stop()
    assert await answer == "learner-0 is leaving: it stopped at step 0, and its last steps are collected"


async def test_it_joins_once_its_kernels_are_loaded_and_is_not_held_up_by_them(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A courier that is part of a run and loads them says nothing meanwhile, and is taken for dead."""
    loading, loaded = threading.Event(), threading.Event()

    def load() -> None:
        assert threading.current_thread() is not threading.main_thread(), "beside the event loop"
        loading.set()
        assert loaded.wait(WAIT_S)

    monkeypatch.setattr(service, "load_kernels", load)
    run = await stage.run()
    training = stage.training(run)
    joining = asyncio.ensure_future(training.join())
    assert await asyncio.to_thread(loading.wait, WAIT_S)
    await asyncio.sleep(0.2)
    assert run.said("joined") == []
    loaded.set()
    await joining
    assert run.said("joined")
