"""Shared moments in a courier: sent behind a contribution, fetched with the next version, or done without."""

from __future__ import annotations

import pytest
import torch
from tests.courier.conftest import Run, Stage, Training
from tests.courier.test_service import stepping

from atoll.fabric.body_meter import ArrivalMeter
from atoll.learner.moments import InnerMoments
from atoll.numerics.fragments import FragmentPlan
from atoll.protocol.errors import PeerError
from atoll.protocol.tape import AdoptedEntry, MomentsEntry


class SharingTraining(Training):
    """Its parameters have SGD's momentum, which never changes by itself."""

    momentum = 1.0

    def make_moments(self, plan: FragmentPlan) -> InnerMoments:
        self.inner = torch.optim.SGD(list(self.parameters.values()), lr=0.1, momentum=0.5)
        for parameter in self.parameters.values():
            self.inner.state[parameter]["momentum_buffer"] = torch.full_like(parameter, self.momentum)
        return InnerMoments(plan, self.parameters, self.inner)

    def momenta(self) -> set[float]:
        return {value for state in self.inner.state.values() for value in state["momentum_buffer"].reshape(-1).tolist()}

    def entries(self) -> list[AdoptedEntry | MomentsEntry]:
        assert self.boundary is not None
        kept = self.boundary._tape._entries.since(0)[1]
        return [entry for entry in kept if isinstance(entry, AdoptedEntry | MomentsEntry)]


def make(stage: Stage, run: Run, name: str, momentum: float) -> SharingTraining:
    own = {"a": torch.ones(3), "b": torch.ones(1, 2)}
    training = stage.training(run, own, name)
    training.__class__ = SharingTraining
    assert isinstance(training, SharingTraining)
    training.momentum = momentum
    return training


async def both_step(one: SharingTraining, other: SharingTraining) -> None:
    """Until each has every fragment's version 1."""
    while min(*one.versions(), *other.versions()) < 1:
        for training in (one, other):
            training.step(-0.5)
            at = training.t
            await training.until(lambda at=at, training=training: training.courier._machine.t >= at)  # type: ignore[misc]


async def test_two_learners_adopt_the_mean_of_their_moments(stage: Stage) -> None:
    run = await stage.run(learners=2, quorum=2, share="moments", sync_every=2, adopt="overwrite")
    one, other = make(stage, run, "learner-0", 1.0), make(stage, run, "learner-1", 3.0)
    await one.join()
    await other.join()
    assert (one.momenta(), other.momenta()) == ({1.0}, {3.0}), "the first parameters come without"
    await both_step(one, other)
    assert one.momenta() == other.momenta() and all(1.0 < value < 3.0 for value in one.momenta())
    for training in (one, other):
        for entry in training.entries():
            if isinstance(entry, AdoptedEntry) and entry.version == 1:
                assert MomentsEntry(entry.t, entry.fragment, 1) in training.entries()


async def test_where_the_syncer_has_none_a_version_is_adopted_without(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await stage.run(share="moments", sync_every=2)
    one = make(stage, run, "learner-0", 1.0)
    await one.join()

    def forgotten(index: int, version: int) -> None:
        raise PeerError("a syncer that came back has none")

    monkeypatch.setattr(run.service, "moments", forgotten)
    await stepping(one, until=2)
    assert one.momenta() == {1.0}
    assert all(isinstance(entry, AdoptedEntry) for entry in one.entries())


async def test_whoever_skipped_a_version_does_not_ask(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = await stage.run(share="moments", sync_every=2)
    one = make(stage, run, "learner-0", 1.0)
    await one.join()
    asked: list[int] = []
    serve = run.service.moments

    def note(index: int, version: int) -> object:
        asked.append(version)
        return serve(index, version)

    monkeypatch.setattr(run.service, "moments", note)
    assert one.box is not None
    fetch = one.courier._memory.bodies._fetch_moments  # type: ignore[union-attr]
    part = one.box.plan.fragments[0]
    arrival = ArrivalMeter().expect_part()
    assert not await fetch(part, 2, 0, arrival), "it holds version 0"
    assert asked == []
    assert not await fetch(part, 1, 0, arrival), "the next one, of which there is none yet"
    assert asked == [1]
