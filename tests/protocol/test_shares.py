"""The alarm about a learner whose work is thrown away: in virtual time, and step by step."""

from __future__ import annotations

import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.records import BegunRecord, MergedRecord, Share
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.learner_warnings import LOW_S, ShareWatch
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

H = 8


def alarms(world: World) -> list[tuple[str, bool]]:
    return [(str(note.data["learner"]), bool(note.data["over"])) for note in world.said("low_share")]


# ---- the shipped rules in virtual time ------------------------------------------------------------------------------


def test_learners_whose_work_is_merged_raise_no_alarm() -> None:
    world = World(4, fragments=4, sync_every=H, latency_s=0.02).run_until(seconds=40 * H)
    assert not alarms(world)
    assert not any(world.syncer.contributions.shares.alarm(one) for one in world.syncer.members.learners.values())


def test_a_learner_that_nobody_hears_out_is_told_once_and_again_when_it_is_over() -> None:
    world = World(4, fragments=4, sync_every=H, latency_s=0.02).run_until(seconds=6 * H)
    mute = world.learners["learner-2"]
    mute.answers = False
    world.run_until(seconds=12 * H)
    assert alarms(world) == [("learner-2", False)], "once, however long it lasts"
    learner = world.syncer.members.learners["learner-2"]
    assert "learner-2" in world.syncer.contributions.shares.alarm(learner)
    mute.answers = True
    world.run_until(seconds=12 * H)
    assert alarms(world) == [("learner-2", False), ("learner-2", True)]
    assert not world.syncer.contributions.shares.alarm(learner)
    mute.answers = False
    world.run_until(seconds=12 * H)
    assert alarms(world)[2:] == [("learner-2", False)], "another episode"


def test_one_that_goes_takes_its_alarm_with_it() -> None:
    world = World(3, fragments=4, sync_every=H).run_until(seconds=2 * H)
    world.learners["learner-1"].answers = False
    world.run_until(seconds=12 * H)
    assert alarms(world) == [("learner-1", False)]
    world.kill("learner-1")
    world.run_until(seconds=4 * H)
    assert alarms(world) == [("learner-1", False), ("learner-1", True)]


def test_the_only_learner_there_is_is_not_judged() -> None:
    world = World(1, fragments=4, sync_every=H).run_until(seconds=2 * H)
    world.learners["learner-0"].answers = False
    world.run_until(seconds=20 * H)
    assert not alarms(world)


# ---- step by step ---------------------------------------------------------------------------------------------------


class Watched:
    """Learners that make steps of ten tokens, of each of which some share is merged at once."""

    def __init__(self, learners: int = 3, step_s: float = LOW_S) -> None:
        self.step_s = step_s
        settings = Settings(learners=learners, fragments=1, sync_every=H)
        state = SyncerState(History(BegunRecord("run", settings, {}, (), "")))
        self.out, self.members, self.watch = state.out, state.members, ShareWatch(state)
        self.version, self.now = 0, 0.0
        for number in range(learners):
            name = f"learner-{number}"
            self.members._add(KnownLearner(name, "", 1, 0.0, 1, state="training", versions=(0,)))
            self.out.history.ledger.joined(name, 1, 0)
        self.told: list[Note] = []
        self.merged: dict[str, int] = dict.fromkeys(self.members.learners, 0)
        self.held = dict(self.merged)

    def steps(self, count: int, *, held: bool = False, **shares: float) -> Watched:
        """`shares`: a=0.4 is learner-0's; all of the others' is merged. `held`: of learner-0 nothing is merged or
        dropped yet."""
        for _ in range(count):
            self.now += self.step_s
            for place, learner in enumerate(self.members.learners.values()):
                held_back = held and place == 0
                self._step(learner, 0 if held_back else round(10 * shares.get("abc"[place], 1.0)), held=held_back)
        self.told += [effect for effect in self.out.take_effects() if isinstance(effect, Note)]
        return self

    def _step(self, learner: KnownLearner, merged: int, *, held: bool) -> None:
        learner.t += 1
        total = 10 * learner.t
        self.held[learner.name] += 10 if held else 0
        if merged:
            merged, self.held[learner.name] = merged + self.held[learner.name], 0
            self.version += 1
            share = Share(learner.name, 1, learner.t, 1, merged, 1.0, self.version - 1, total=total)
            self.out.history.ledger.merged(MergedRecord(0, 0, self.version, 1, "", (share,), ""))
            self.merged[learner.name] += merged
        in_flight = self.held[learner.name]
        dropped = total - self.merged[learner.name] - in_flight
        wrong = self.out.history.ledger.reported(learner.name, 1, total, (in_flight,), (dropped,), (self.version,))
        assert wrong is None
        self.watch.note_report(self.now, learner)

    @property
    def words(self) -> list[tuple[object, object]]:
        return [(note.data["learner"], note.data["over"]) for note in self.told]


def test_it_takes_a_full_window_and_two_looks() -> None:
    watched = Watched().steps(4 * H, a=0.0)
    assert watched.words == []
    watched.steps(1, a=0.0)
    assert watched.words == [("learner-0", False)]
    assert watched.told[0].data["share"] == 0.0 and watched.told[0].data["others"] == 1.0


@pytest.mark.parametrize(("share", "told"), [(0.4, True), (0.5, False), (0.6, False)])
def test_less_than_half_of_the_others_is_too_little(share: float, told: bool) -> None:
    assert bool(Watched().steps(12 * H, a=share).words) is told


def test_the_others_are_the_measure_not_all_of_the_work() -> None:
    assert not Watched().steps(12 * H, a=0.3, b=0.5, c=0.4).words


def test_an_alarm_is_not_over_before_the_share_is_well_above_its_limit() -> None:
    watched = Watched().steps(5 * H, a=0.4)
    assert watched.words == [("learner-0", False)]
    for _ in range(6):
        watched.steps(2 * H, a=0.6).steps(2 * H, a=0.4)
    assert watched.words == [("learner-0", False)], "around the limit it is told once"
    assert watched.steps(4 * H, a=0.7).words == [("learner-0", False), ("learner-0", True)]


def test_a_low_share_is_told_only_once_it_has_lasted() -> None:
    """Where a step takes a hundredth of a second, two looks are 80 ms apart."""
    watched = Watched(step_s=0.01).steps(round(LOW_S / 0.01), a=0.0)
    assert watched.words == []
    assert watched.steps(5 * H, a=0.0).words == [("learner-0", False)]
    assert not Watched(step_s=0.01).steps(40 * H, a=0.0).steps(round(LOW_S / 0.01), a=1.0).words


def test_rounds_that_come_unevenly_give_no_share_above_1_and_no_alarm() -> None:
    """What learner-0 computes is merged in bursts, three windows apart, and never dropped: an equal of the others."""
    watched, shares = Watched(step_s=0.01).steps(4 * H), []
    for _ in range(20):
        for _ in range(6 * H):
            shares.append(watched.steps(1, held=True).watch._windows["learner-0"].share)
        watched.steps(1)
    assert all(share is not None and share <= 1.0 for share in shares) and 1.0 in shares
    assert not watched.words


def test_the_alarm_says_what_to_do() -> None:
    (note,) = Watched().steps(6 * H, a=0.0).told
    assert note.text == (
        "only 0 % of learner-0's last work was merged, 100 % of the others': atoll status shows whether it is slow or "
        "cut off; adopt=carry keeps its work, and a larger sync_every (now 8) gives it more time for a round"
    )
