"""What a round costs the syncer does not grow faster than the number of its learners."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest
from tests.protocol.work import count_opcodes
from tests.protocol.world import World

from atoll.fabric import control_channel
from atoll.protocol import messages as msg
from atoll.protocol.effects import Tick
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import median
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.cuts import OpenCut
from atoll.protocol.syncer.machine import Syncer
from atoll.protocol.syncer.membership import SLOWER, STALLED_STEPS, KnownLearner
from atoll.simulate import campaign

SLACK_BYTES = 8
"""Of numbers that take more bytes where there are more learners."""


def late_world(learners: int, latency_s: float = 0.3) -> World:
    """Behind the knee: a version is hardly adopted when its fragment is due again, and each learner has a step time of
    its own, so that rounds wait for one learner after the other."""
    step_s = [1 + 0.5 * number / learners for number in range(learners)]
    world = World(learners, fragments=4, sync_every=4, step_s=step_s, latency_s=latency_s, jitter=0.9)
    return world.run_until(round=8)


def longest_messages(world: World) -> dict[str, int]:
    """By kind, in ten rounds."""
    heard = len(world.log)
    world.run_until(round=18)
    longest: dict[str, int] = {}
    for effect in [effect for _, effect in world.log[heard:] if isinstance(effect, fx.Send)]:
        kind = type(effect.message).__name__
        longest[kind] = max(longest.get(kind, 0), len(msgspec.msgpack.encode(effect.message)))
    return longest


def test_no_message_grows_with_the_number_of_learners() -> None:
    few, many = (longest_messages(late_world(learners)) for learners in (12, 96))
    assert few.keys() >= {"Pull", "Announce"}
    assert all(many[kind] <= few[kind] + SLACK_BYTES for kind in few), (few, many)


def count_looks(learners: int, latency_s: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """How often the syncer looks at all its learners, per round."""
    world, looks = late_world(learners, latency_s), 0
    before, advance = world.syncer.committed, Syncer._advance_all

    def count(machine: Syncer, now: float) -> None:
        nonlocal looks
        looks += 1
        advance(machine, now)

    with monkeypatch.context() as patched:
        patched.setattr(Syncer, "_advance_all", count)
        world.run_until(round=before + 20)
    return looks / 20


@pytest.mark.parametrize("latency_s", [0.3, 1.2])
def test_the_syncer_looks_at_all_learners_a_few_times_a_round_however_many_they_are(
    latency_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (count_looks(learners, latency_s, monkeypatch) for learners in (8, 64))
    assert many <= few + 10, (few, many)


# ---- one event of a crowd, in bytecode instructions -----------------------------------------------------------------

P = 8


class Crowd:
    """A syncer in a run with so many learners, each of which has steps to give. The first rounds are frozen, and the
    next one is due: it waits for a free flight."""

    def __init__(self, learners: int, narrow: int = 0) -> None:
        settings = Settings(learners=learners, fragments=P, sync_every=P, quorum=learners).resolved(1000)
        self.machine = Syncer.fresh(settings, run="run", fingerprint="plan")
        self.machine.state.enter_phase("running")
        self.names = [f"learner-{number}" for number in range(learners)]
        self.now, self.t = 1.0, dict.fromkeys(self.names, 0)
        for number, name in enumerate(self.names):
            learner = KnownLearner(name, name, 1, 0.5, P, state="training", recovered=True, versions=(0,) * P)
            learner.merged, learner.last_heard, learner.last_step_at = [-1] * P, 0.5, 0.5
            learner.share = 0.5 if number < narrow else 1.0
            self.machine.members._add(learner)
            self.machine.history.ledger.joined(name, 1, 0)
        self.machine.state.versions[:] = [0] * P
        self.looks = 0
        self.machine._advance_all = self._count_look  # type: ignore[method-assign]
        self.handle(Tick())
        for steps in (1, 40):
            for name in self.names:
                self.report(name, steps)

    def _count_look(self, now: float) -> None:
        self.looks += 1
        Syncer._advance_all(self.machine, now)

    def handle(self, event: fx.SyncerEvent) -> list[fx.SyncerEffect]:
        self.now += 1e-6
        return self.machine.handle(self.now, event)

    def report(self, name: str, steps: int = 1) -> None:
        self.t[name] += steps
        t, tokens = self.t[name], 10 * self.t[name]
        report = msg.Progress(
            t=t,
            steps=(t,) * P,
            tokens=(tokens,) * P,
            versions=(0,) * P,
            tokens_total=tokens,
            incarnation=1,
            dropped=(0,) * P,
            counted=(0,) * P,
            loss=1.0,
        )
        self.handle(fx.Received(name, report))

    def count_work_of_reports(self, name: str, reports: int) -> int:
        return count_opcodes(lambda: [self.report(name) for _ in range(reports)])


def test_a_report_costs_the_same_however_many_learners_there_are() -> None:
    """Also where its learner is new, and where its tokens and its share are held against the others'."""
    works = []
    for learners in (8, 256):
        crowd = Crowd(learners)
        new = KnownLearner("new", "new", 1, 0.5, P, state="training", versions=(0,) * P, merged=[0] * P)
        crowd.machine.members._add(new)
        crowd.machine.history.ledger.joined("new", 1, 0)
        crowd.names.append("new")
        crowd.t["new"] = 0
        crowd.report("new")
        crowd.handle(Tick())
        before = crowd.looks
        works.append([crowd.count_work_of_reports(name, 40) for name in crowd.names[-2:]])
        assert crowd.looks == before, "a report was looked at"
    few, many = works
    assert all(of_many <= 1.02 * of_few for of_few, of_many in zip(few, many, strict=True)), works


def test_learners_with_narrow_links_cost_the_same_each_however_many_they_are() -> None:
    works = []
    for learners, narrow in ((64, 8), (256, 32)):
        crowds = Crowd(learners), Crowd(learners, narrow)
        without, work = (
            count_opcodes(lambda crowd=crowd: crowd.machine.rounds.pull_ahead(crowd.now)) for crowd in crowds
        )
        works.append((work - without) / narrow)
    assert works[1] <= 1.1 * works[0], works


def test_a_learner_with_a_share_is_looked_at_only_where_it_has_a_turn() -> None:
    crowd = Crowd(16, narrow=4)
    crowd.handle(Tick())
    asked = [
        name
        for name in crowd.names[:4]
        if not crowd.machine.rounds.has_turn_ahead(crowd.machine.members.learners[name])
    ]
    assert asked and crowd.machine.rounds.closing.due_rounds()
    before = crowd.looks
    for _ in range(10):
        for name in asked:
            crowd.report(name)
    assert crowd.looks == before


def test_answers_before_the_last_one_and_words_about_peers_bring_nothing_about() -> None:
    crowd = Crowd(16)
    machine, (last, *others) = crowd.machine, crowd.names
    number = next(iter(machine.state.open_rounds))
    assert machine.state.open_rounds[number].stage == "pulling"
    machine.cuts.open = OpenCut(3, crowd.now, crowd.now + 60.0, dict.fromkeys(crowd.names, 1))

    def say(name: str, message: msg.FromLearner) -> int:
        before = crowd.looks
        crowd.handle(fx.Received(name, message))
        return crowd.looks - before

    saved, nothing = msg.CutSaved(of=3, incarnation=1, t=41), msg.Decline(round=number, attempt=1, reason="no steps")
    for message in (saved, nothing):
        assert [say(name, message) for name in others] == [0] * 15 and say(last, message) == 1
    ready = msg.Ready(ticket="t", size=1, digest="d", t=1, direct="")
    assert say(last, ready) == say(last, msg.Settled(ticket="t", peer="p")) == 0
    assert say(last, msg.Settled(ticket="t", peer="p", again=True)) == 1
    before = crowd.looks
    crowd.handle(fx.RelayMeasured(tuple(crowd.names), 1e6, 1e6))
    assert crowd.looks == before


def test_all_that_were_no_members_are_sent_one_announcement_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = late_world(12)
    for name in ("learner-0", "learner-5", "learner-9"):
        world.learners[name].answers = False
    heard = len(world.log)
    world.run_until(round=16)
    sent = [effect for _, effect in world.log[heard:] if isinstance(effect, fx.Send)]
    encoded: list[object] = []
    monkeypatch.setattr(control_channel, "encode", lambda message: encoded.append(message) or b"")
    rounds: dict[int, list[fx.Send]] = {}
    for send in sent:
        if isinstance(send.message, msg.Announce):
            rounds.setdefault(send.message.round, []).append(send)
    several = 0
    for announced in rounds.values():
        others = [send for send in announced if send.learner not in [one.learner for one in send.message.members]]
        several += len(others) > 1
        assert len({id(send.message) for send in others}) <= 1
        shared, before = control_channel.SharedAnnouncement(), len(encoded)
        for send in announced:
            shared.encode(send.learner, send.message)
        assert len(encoded) - before == len(announced) - max(0, len(others) - 1)
    assert several, "no round had several learners that were not its members"


@pytest.mark.parametrize("seed", [3, 7, 11])
def test_kept_medians_are_those_of_the_learners_as_they_are(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens to them: a place that changes a learner and forgets `update_medians` would be seen here."""
    handle, events = Syncer.handle, count()

    def check(machine: Syncer, now: float, event: fx.SyncerEvent) -> list[fx.SyncerEffect]:
        effects = handle(machine, now, event)
        if next(events) % 3 == 0:
            check_medians(machine)
        return effects

    monkeypatch.setattr(Syncer, "handle", check)
    plan = campaign.plan(seed)
    campaign.run(plan, campaign.make(plan))


def check_medians(machine: Syncer) -> None:
    members = machine.members
    live = [one.step_s.value for one in members.live_learners() if one.step_s.value is not None]
    assert members.step_s() == (median(live) if live else None)
    answers = sorted(one.answer_s.value for one in members.reachable_learners() if one.answer_s.value is not None)
    assert members.answer_s() == (answers[(len(answers) - 1) // 2] if answers else None)
    steps = sorted(one.step_s.value for one in members.stepping_learners() if one.step_s.value is not None)
    longest_s = min(steps[-1], SLOWER * steps[(len(steps) - 1) // 2]) if steps else 0.0
    assert members.longest_stall_s() == max(members.settings.stalled_after_s, STALLED_STEPS * longest_s)
    windows = machine.contributions.shares._windows
    for learner in members.learners.values():
        others = [one for one in members.reachable_learners() if one is not learner]
        moved = [one.usual for one in others if one.usual.tokens > 0]
        known = [usual.per_step for usual in moved if usual.known]
        usual = known if learner.usual.known else [usual.per_step for usual in moved] if len(moved) > 1 else []
        assert members.per_step(learner) == (median(usual) if usual else None)
        assert members.per_step(learner, least=2) == (median(usual) if len(usual) > 1 else None)
        judged = [(one, windows[one.name]) for one in others if one.name in windows]
        shares = [window.share for one, window in judged if window.incarnation == one.incarnation]
        shares = [share for share in shares if share is not None]
        assert members.merged_share_of_others(learner) == (median(shares) if shares else None)
