"""Feedback in drawn worlds: what a learner encodes with is what replay finds in the journal, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.courier.feedback import Feedback
from atoll.launch.replay.recording import ALONE, RecordedCopy, read_recording
from atoll.mailbox.box import Mailbox
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.tape import AdoptedEntry, AnyEntry, ForgotEntry, OwnedEntry
from atoll.simulate import campaign, simulated_learner
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.training import Training
from atoll.simulate.world import World


class Answers:
    """A learner's shared memory and what its couriers do with it. A rest is the step of its copy."""

    def __init__(self, plan: FragmentPlan, settings: Settings) -> None:
        self.box = Mailbox.create(plan, settings)
        self.tape: list[AnyEntry] = []
        self.machine: LearnerMachine | None = None
        self.feedback = Feedback(self.box)
        self.used: dict[tuple[int, int], int] = {}
        """Round and step → the step whose rest went with it; −1: none."""

    def follow_courier(self, machine: LearnerMachine) -> Feedback:
        if self.machine is not machine:
            self.machine, self.feedback = machine, Feedback(self.box)
        return self.feedback

    def upload(self, number: int, copy: fx.Copied) -> None:
        self.box.base_version[copy.fragment] = copy.base
        if self.feedback.has_settled(copy.fragment, copy.t):
            return
        buffer = self.feedback.take_buffer(copy.fragment, copy.t)
        assert buffer is not None
        self.used[number, copy.t] = -1 if buffer.feedback is None else int(buffer.feedback[0])
        buffer.rest[:] = copy.t
        self.feedback.keep_rest(buffer)


class FeedbackWorld(World):
    """Its learners keep what their answers leave out."""

    def __init__(self, settings: Settings, **more: Any) -> None:
        super().__init__(settings, **more)
        fragments = settings.fragments
        self._plan = make_plan([TensorSpec(f"w{n}", (1,), "float32") for n in range(fragments)], fragments)
        self._memory = Settings(fragments=fragments, sync_every=fragments, overlap=0, codec="topk").resolved(fragments)
        self.answers: dict[str, Answers] = {}

    def of(self, learner: Training) -> Answers:
        assert isinstance(learner, SimulatedLearner)
        if learner.session not in self.answers:
            self.answers[learner.session] = Answers(self._plan, self._memory)
        return self.answers[learner.session]

    def carry_out_learner_effect(self, learner: SimulatedLearner, effect: fx.LearnerEffect) -> None:
        own = self.of(learner)
        feedback = own.follow_courier(learner.machine)
        match effect:
            case fx.Settle(fragment, version, t):
                feedback.settle(fragment, version, t)
                return
            case fx.DropRests(fragment):
                feedback.drop_rests(fragment)
                return
            case fx.ForgetVersions(reset=reset):
                own.tape.append(ForgotEntry(learner.t, reset))
                feedback.forget_all()
            case fx.Own():
                own.tape.append(OwnedEntry(learner.t))
            case fx.Upload(number, _, fragment) if learner.answers:
                own.upload(number, max((c.fact for (f, _), c in learner.copies.items() if f == fragment), key=_t))
            case _:
                pass
        super().carry_out_learner_effect(learner, effect)

    def on_adoption(self, learner: Training, adopt: fx.Adopt, value: float, dropped: int) -> None:
        self.of(learner).tape.append(AdoptedEntry(learner.t, adopt.fragment, adopt.version))
        super().on_adoption(learner, adopt, value, dropped)

    def check_feedback(self) -> tuple[int, int]:
        """Every contribution in the journal: how many there are, and how many of them had feedback."""
        merged = with_feedback = 0
        score = read_recording([self.begun, *self.disk.journal])
        for part in (one for one in score.parts if one.copies):
            own = self.answers[part.session]
            part.entries = own.tape
            copies = {act.round: act for act in part.acts() if isinstance(act, RecordedCopy)}
            for copy in copies.values():
                due = -1 if copy.feedback == ALONE else copies[copy.feedback].t
                assert own.used[copy.round, copy.t] == due, (part.name, copy)
                merged, with_feedback = merged + 1, with_feedback + (due >= 0)
        return merged, with_feedback

    def close(self) -> None:
        for own in self.answers.values():
            own.box.close()


def _t(copy: fx.Copied) -> int:
    return copy.t


@pytest.fixture(autouse=True)
def keeps_feedback(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*given: Any, **named: Any) -> LearnerMachine:
        machine = LearnerMachine(*given, **named)
        machine.keeps_feedback = True
        return machine

    monkeypatch.setattr(simulated_learner, "LearnerMachine", make)


def run_seeds(seeds: range) -> None:
    merged = with_feedback = 0
    for seed in seeds:
        plan = campaign.plan(seed)
        world = campaign.make(plan, FeedbackWorld, traced=False)
        assert isinstance(world, FeedbackWorld)
        try:
            outcome = campaign.run(plan, world)
            assert not outcome.invariant, f"seed {seed}: {outcome.invariant}: {outcome.message}"
            more = world.check_feedback()
        finally:
            world.close()
        merged, with_feedback = merged + more[0], with_feedback + more[1]
    assert 0.5 * merged < with_feedback < merged


def test_the_journal_tells_the_feedback_of_every_contribution() -> None:
    run_seeds(range(8))


@pytest.mark.faults
@pytest.mark.parametrize("block", range(20))
def test_in_hundreds_of_worlds(block: int) -> None:
    run_seeds(range(100 + 20 * block, 120 + 20 * block))
