"""The syncer's books: lives opened and closed once, leases ahead of need, alarms."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine as Machine
from atoll.protocol.messages import PROTOCOL, Contribution, Hello, Lease, Progress, Range, Recover, Register, Welcome
from atoll.protocol.records import (
    AlarmedRecord,
    AnyRecord,
    BegunRecord,
    GoneRecord,
    GrantedRecord,
    JoinedRecord,
    MergedRecord,
    Share,
    SourcesRecord,
)
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.accounts import AHEAD, LEASE_BATCHES, MOST_AHEAD, Accounts
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

BATCH = 4
LEASE = LEASE_BATCHES * BATCH
"""Samples of one lease."""
TEXT = (("text", 100 * LEASE, 1.0),)


class Desk:
    """The books alone, with learners that are nothing but their words."""

    def __init__(self, **settings: Any) -> None:
        rules = Settings(**{"learners": 2, "fragments": 2, "sync_every": 4, **settings})
        state = SyncerState(History(BegunRecord("run", rules, {}, (), "plan")))
        self.out, self.members, self.accounts = state.out, state.members, Accounts(state)
        self.done: list[syncer_fx.SyncerEffect] = []

    def take(self) -> list[syncer_fx.SyncerEffect]:
        effects = self.out.take_effects()
        self.done.extend(effects)
        return effects

    def join(self, name: str) -> KnownLearner:
        hello = Hello(protocol=PROTOCOL, learner=name, session=f"session of {name} {len(self.done)}")
        learner, _ = self.members.find_or_begin_life(0.0, hello, "run")
        self.accounts.open_life(learner)
        self.take()
        return learner

    def register(
        self,
        learner: KnownLearner,
        datasets: tuple[tuple[str, int, float], ...] = TEXT,
        epochs: int = 0,
        batch: int = BATCH,
    ) -> list[Lease]:
        """What it is sent for it."""
        self.accounts.register_data(learner, Register(datasets=datasets, epochs=epochs, batch=batch))
        return self.leases(learner)

    def leases(self, learner: KnownLearner) -> list[Lease]:
        sends = [
            effect for effect in self.take() if isinstance(effect, syncer_fx.Send) and effect.learner == learner.name
        ]
        return [send.message for send in sends if isinstance(send.message, Lease)]

    def took(self, learner: KnownLearner, position: int) -> list[Lease]:
        """It reports that it has taken so many samples; what it is sent for it."""
        learner.position = position
        self.accounts.book_report(learner, self.report(learner, position=position))
        return self.leases(learner)

    def report(self, learner: KnownLearner, **said: Any) -> Progress:
        nothing = {"t": 0, "steps": (0, 0), "tokens": (0, 0), "versions": (0, 0), "dropped": (0, 0), "counted": (0, 0)}
        return Progress(**{**nothing, "incarnation": learner.incarnation, **said})

    def merge(self, learner: KnownLearner, position: int, fragment: int = 0) -> None:
        share = Share(learner.name, learner.incarnation, 1, 1, 8, 64.0, 0, 8, position)
        self.out.persist(
            MergedRecord(self.out.history.committed, fragment, 1, 1, "every live learner", (share,), "digest")
        )

    def records(self, kind: type[AnyRecord]) -> list[Any]:
        self.take()
        return [r for e in self.done if isinstance(e, syncer_fx.Persist) for r in e.records if isinstance(r, kind)]

    def notes(self, kind: str) -> list[str]:
        self.take()
        return [effect.text for effect in self.done if isinstance(effect, Note) and effect.kind == kind]


def spans(*leases: Lease) -> list[tuple[int, int]]:
    return [(one.start, one.stop) for lease in leases for one in lease.ranges]


# ---- the run's data --------------------------------------------------------------------------------------------------


def test_the_first_to_register_says_what_the_runs_data_is() -> None:
    desk = Desk()
    one, two = desk.join("learner-0"), desk.join("learner-1")
    desk.register(one, epochs=3)
    desk.register(two, epochs=3)
    assert desk.records(SourcesRecord) == [SourcesRecord(TEXT, 3)], "once"
    assert desk.out.history.leases is not None and desk.out.history.leases.epochs == 3


@pytest.mark.parametrize("batch", [-1, 0, 26, 2**62])
def test_a_batch_that_no_pass_holds_is_not_leased_for(batch: int) -> None:
    desk = Desk()
    (told,) = desk.register(desk.join("learner-0"), (("text", 25, 1.0),), batch=batch)
    assert told.own == f"a batch of {batch} samples does not fit a dataset of 25" and told.ranges == ()


@pytest.mark.parametrize(
    ("datasets", "epochs", "reason"),
    [
        ((("text", 7, 1.0),), 0, "dataset 'text' is 7 samples of weight 1 here"),
        ((("code", 100 * LEASE, 1.0),), 0, "dataset 'code' is 25600 samples of weight 1 here, 'text' is"),
        ((*TEXT, ("code", 9, 1.0)), 0, "2 datasets here, 1 in the run"),
        (TEXT, 2, "2 epochs here, 0 in the run"),
        ((("text", 0, 1.0),), 0, "dataset 'text' has 0 samples: leave it out, or give it some"),
        ((), 0, "0 datasets, 0 epochs: leases need a dataset"),
    ],
)
def test_one_with_other_data_is_told_why_its_data_is_its_own(
    datasets: tuple[tuple[str, int, float], ...], epochs: int, reason: str
) -> None:
    desk = Desk()
    one, two = desk.join("learner-0"), desk.join("learner-1")
    desk.register(one)
    (told,) = desk.register(two, datasets, epochs)
    assert reason in told.own and told.ranges == () and not told.over
    (warning,) = desk.notes("warning")
    assert warning == f"learner-1: {told.own}; its data is counted, not leased"
    assert desk.took(two, -1) == [], "nor is it leased anything later"


def test_data_that_cannot_be_leased_is_not_made_the_runs() -> None:
    desk = Desk()
    desk.register(desk.join("learner-0"), (("text", 0, 1.0),))
    assert desk.records(SourcesRecord) == []
    assert spans(*desk.register(desk.join("learner-1"))) == [(0, LEASE), (LEASE, 2 * LEASE)]


# ---- leases ----------------------------------------------------------------------------------------------------------


def test_leases_come_before_they_are_needed_and_not_too_many() -> None:
    desk = Desk()
    learner, leased, position = desk.join("learner-0"), 0, 0
    for lease in desk.register(learner):
        leased += sum(stop - start for start, stop in spans(lease))
    while position < 20 * LEASE:
        assert leased - position >= (AHEAD - 1) * LEASE - BATCH, "it never waits for the next"
        assert leased - position <= AHEAD * LEASE
        position += BATCH
        leased += sum(stop - start for start, stop in spans(*desk.took(learner, position)))


def test_every_lease_is_written_down_before_it_is_told_of() -> None:
    desk = Desk()
    one, two = desk.join("learner-0"), desk.join("learner-1")
    desk.register(one)
    desk.register(two)
    for position in range(0, 10 * LEASE, LEASE):
        desk.took(one, position)
        desk.took(two, position // 2)
    written: set[int] = set()
    told: set[int] = set()
    for effect in desk.done:
        if isinstance(effect, syncer_fx.Persist):
            written |= {record.lease for record in effect.records if isinstance(record, GrantedRecord)}
        elif isinstance(effect, syncer_fx.Send) and isinstance(effect.message, Lease):
            assert {one.lease for one in effect.message.ranges} <= written - told, "and told once"
            told |= {one.lease for one in effect.message.ranges}
    assert told == written == set(range(len(written))) and len(written) > 12


def test_two_learners_share_one_pass() -> None:
    desk = Desk()
    one, two = desk.join("learner-0"), desk.join("learner-1")
    first, second = spans(*desk.register(one)), spans(*desk.register(two, batch=2 * BATCH))
    assert first == [(0, LEASE), (LEASE, 2 * LEASE)]
    assert second == [(2 * LEASE, 4 * LEASE), (4 * LEASE, 6 * LEASE)], "leases of as many batches"


def test_one_that_comes_back_is_told_again_what_it_holds_and_has_not_taken() -> None:
    desk = Desk()
    learner = desk.join("learner-0")
    desk.register(learner)
    desk.took(learner, LEASE + 1)
    held = desk.accounts.leases_held(learner)
    assert [(one.lease, one.start, one.stop) for one in held] == [
        (1, LEASE, 2 * LEASE),
        (2, 2 * LEASE, 3 * LEASE),
        (3, 3 * LEASE, 4 * LEASE),
    ], "but for the one it has taken to the end"
    assert Desk().accounts.leases_held(learner) == (), "nothing is leased yet"


def test_what_a_learner_had_not_given_goes_to_the_next_that_asks() -> None:
    desk = Desk()
    one = desk.join("learner-0")
    desk.register(one)
    desk.took(one, LEASE)
    desk.merge(one, position=40)
    desk.accounts.close_life(one, "it left")
    (gone,) = desk.records(GoneRecord)
    assert (gone.position, gone.again_from, gone.reason) == (LEASE, 40, "it left")
    two = desk.join("learner-1")
    assert spans(*desk.register(two)) == [(40, 40 + LEASE), (40 + LEASE, 40 + 2 * LEASE)]


def test_what_a_contribution_under_way_holds_is_not_issued_again() -> None:
    desk = Desk()
    one = desk.join("learner-0")
    desk.register(one)
    desk.took(one, LEASE)
    under_way = Contribution(
        round=0, attempt=1, fragment=0, base=0, t=9, steps=9, tokens=72, digest="", total=72, position=100
    )
    desk.accounts.close_life(one, "killed", under_way)
    assert desk.records(GoneRecord)[0].again_from == 100
    desk.merge(one, position=100)
    assert spans(*desk.register(desk.join("learner-1")))[0] == (100, 100 + LEASE)


def test_at_the_end_of_the_data_everybody_is_told_so() -> None:
    desk = Desk()
    one, two = desk.join("learner-0"), desk.join("learner-1")
    data = (("text", 2 * LEASE + 10, 1.0),)
    (first,) = desk.register(one, data, epochs=1)
    assert spans(first) == [(0, LEASE), (LEASE, 2 * LEASE)] and not first.over
    (second,) = desk.register(two, data, epochs=1)
    assert spans(second) == [(2 * LEASE, 2 * LEASE + 10)] and second.over
    (last,) = desk.took(one, 2 * LEASE)
    assert last.ranges == () and last.over


def test_a_synchronous_run_deals_leases_in_order_of_names_whoever_reports_first() -> None:
    dealt: list[list[GrantedRecord]] = []
    for order in (["learner-0", "learner-1", "learner-2"], ["learner-2", "learner-0", "learner-1"]):
        desk = Desk(learners=3, synchronous=True)
        learners = {name: desk.join(name) for name in order}
        for name in order[:-1]:
            assert desk.register(learners[name]) == [], "not before all are there"
        desk.register(learners[order[-1]])
        for position in range(BATCH, 3 * LEASE, BATCH):
            for name in order:
                desk.took(learners[name], position)
        dealt.append(desk.records(GrantedRecord))
    assert dealt[0] == dealt[1]
    assert [lease.learner for lease in dealt[0]] == ["learner-0", "learner-1", "learner-2"] * (len(dealt[0]) // 3)


def test_a_synchronous_run_that_has_begun_leases_to_those_that_are_there() -> None:
    desk = Desk(learners=3, synchronous=True)
    one, two = desk.join("learner-0"), desk.join("learner-1")
    desk.merge(one, position=-1)
    assert spans(*desk.register(two)) == [(0, LEASE), (LEASE, 2 * LEASE)]


def test_one_that_joins_again_and_again_does_not_fill_the_others_accounts_with_leases() -> None:
    desk = Desk(learners=2, synchronous=True)
    steady, restless = desk.join("learner-0"), desk.join("learner-1")
    desk.register(steady)
    for _ in range(50):
        desk.register(restless)
        assert desk.accounts.leases_held(restless), "it has what it needs"
        desk.accounts.close_life(restless, "another process took its name")
        restless = desk.join("learner-1")
    assert len(desk.accounts.leases_held(steady)) <= MOST_AHEAD


def test_the_next_process_of_a_name_is_leased_nothing_before_it_says_what_its_data_is() -> None:
    """It would drop those leases, and take the next ones for the first."""
    desk = Desk(learners=2, synchronous=True)
    one, two = desk.join("learner-0"), desk.join("learner-1")
    desk.merge(one, position=-1)
    desk.register(one)
    desk.register(two)
    desk.accounts.close_life(two, "another process took its name")
    after = desk.join("learner-1")
    assert desk.took(one, LEASE * len(desk.accounts.leases_held(one))), "it has used up what it had"
    assert desk.accounts.leases_held(after) == ()
    sent = desk.register(after)
    assert tuple(one for lease in sent for one in lease.ranges) == desk.accounts.leases_held(after) != ()


# ---- alarms ----------------------------------------------------------------------------------------------------------


def test_a_report_that_does_not_balance_is_one_alarm() -> None:
    desk = Desk()
    one, two = desk.join("learner-0"), desk.join("learner-1")
    fine = desk.report(one, tokens_total=16, tokens=(16, 16), steps=(2, 2))
    desk.accounts.book_report(one, fine)
    assert desk.notes("unbalanced") == []
    for total in (24, 32, 40):
        desk.accounts.book_report(one, msgspec.structs.replace(fine, tokens_total=total))
    (alarm,) = desk.notes("unbalanced")
    assert alarm.startswith("the ledger does not balance: learner-0 (incarnation 1), fragment 0: 24 tokens computed")
    desk.accounts.book_report(two, fine)
    desk.accounts.book_report(two, msgspec.structs.replace(fine, tokens_total=24))
    assert len(desk.notes("unbalanced")) == 2, "one for each that is wrong"
    alarms = [f"the ledger does not balance: {record.wrong}" for record in desk.records(AlarmedRecord)]
    assert alarms == desk.notes("unbalanced"), "and written down"


def test_a_learner_that_took_more_than_it_was_leased_is_an_alarm() -> None:
    desk = Desk()
    learner = desk.join("learner-0")
    desk.register(learner)
    desk.took(learner, 2 * LEASE + 1)
    (alarm,) = desk.notes("unbalanced")
    assert f"says it took {2 * LEASE + 1} samples, {2 * LEASE} were leased to it" in alarm


# ---- lives -----------------------------------------------------------------------------------------------------------


def test_tokens_of_processes_that_take_a_name_from_each_other_count_once() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.1).run_until(round=4)
    one = world.learners["learner-1"]
    other = world.start_process("learner-1", 1.0)
    for number in range(8):
        back = other if number % 2 == 0 else one
        world.learners["learner-1"] = back
        world.network.connect(back, world.simulated_syncer)
        world.run_until(seconds=3.3)
    trained = one.tokens_total + other.tokens_total
    fates = world.syncer.history.ledger.by_learner()["learner-1"].whole()
    assert 0 < fates["merged"] < fates["computed"] <= trained
    assert world.syncer.members.total_tokens() <= trained + world.learners["learner-0"].tokens_total
    assert not world.said("unbalanced")
    assert [note.data["known_as"] for note in world.said("joined")][-2:] == [6, 7], "which life each knew itself in"


def eventful() -> World:
    """Killed and restarted, quarantined, cut off; the syncer dies too."""
    world = World(3, fragments=2, sync_every=4, latency_s=0.05, steps=60, abandon_s=10.0).run_until(round=6)
    world.kill("learner-1")
    world.run_until(seconds=2.0)
    world.join("learner-1")
    world.learners["learner-2"].broken = True
    world.run_until(seconds=15.0)
    world.unlink("learner-0")
    world.run_until(seconds=12.0)
    world.crash_syncer()
    return world.run_to_end()


def test_a_life_is_written_down_before_anybody_is_told_its_number() -> None:
    world = eventful()
    written: set[tuple[str, int]] = set()
    told: set[tuple[str, int]] = set()
    for _, effect in world.log:
        if isinstance(effect, syncer_fx.Persist):
            joined = [record for record in effect.records if isinstance(record, JoinedRecord)]
            assert not written & {(one.learner, one.incarnation) for one in joined}, "no number is given twice"
            written |= {(one.learner, one.incarnation) for one in joined}
        elif isinstance(effect, syncer_fx.Send) and isinstance(effect.message, Welcome | Recover):
            assert (effect.learner, effect.message.incarnation) in written
            told.add((effect.learner, effect.message.incarnation))
    assert {("learner-0", 2), ("learner-1", 2), ("learner-2", 2)} <= told


def test_every_life_is_closed_once() -> None:
    world = eventful()
    world.inject(syncer_fx.Over())
    world.inject(syncer_fx.Over())
    joined = [(one.learner, one.incarnation) for one in world.journal if isinstance(one, JoinedRecord)]
    gone = [(one.learner, one.incarnation) for one in world.journal if isinstance(one, GoneRecord)]
    assert sorted(gone) == sorted(joined) and len(set(gone)) == len(gone) >= 6
    totals = world.syncer.history.ledger.totals()
    assert not any(totals.in_flight) and not any(totals.balance())


def test_what_was_on_its_way_when_the_run_was_over_is_passed_over() -> None:
    """Seed 14101: a link was held up until after the end. Its accounts and leases were closed by then, and an honest
    report was refused for the samples it named."""
    world = World(1).run_until(round=2)
    register = syncer_fx.Received("learner-0", Register(datasets=TEXT, epochs=0, batch=BATCH))
    world.inject(register)
    machine = world.learners["learner-0"].machine
    machine.handle(world.now, learner_fx.Disconnected("it says the rest when it leaves"))
    said = machine.make_goodbye("x")[0]
    report = syncer_fx.Received("learner-0", msgspec.structs.replace(said, position=BATCH))
    world.inject(report)
    assert not world.said("refused") and world.syncer.members.learners["learner-0"].position == BATCH
    world.inject(syncer_fx.Over())
    assert world.inject(report) == [] and world.inject(register) == []
    assert not world.said("refused") and not world.said("unbalanced")


def test_why_a_life_is_over_is_in_its_record() -> None:
    world = eventful()
    reasons = {(r.learner, r.incarnation): r.reason for r in world.journal if isinstance(r, GoneRecord)}
    assert reasons["learner-1", 1] == "another process took its name"
    assert reasons["learner-0", 1] == "away for 10 s"
    assert "not finite" in reasons["learner-2", 1]


def test_one_that_stays_away_has_lost_what_it_had_not_given() -> None:
    world = World(2, fragments=2, sync_every=4, abandon_s=20.0).run_until(round=6)
    world.unlink("learner-1")
    world.run_until(seconds=19.5)
    assert not [record for record in world.journal if isinstance(record, GoneRecord)]
    world.run_until(seconds=1.0)
    (gone,) = [record for record in world.journal if isinstance(record, GoneRecord)]
    assert (gone.learner, gone.reason) == ("learner-1", "away for 20 s")
    assert world.syncer.history.ledger.totals().lost == gone.lost


def test_its_return_is_a_new_life_without_a_reset() -> None:
    world = World(2, fragments=2, sync_every=4, abandon_s=20.0, steps=80).run_until(round=6)
    world.unlink("learner-1")
    world.run_until(seconds=25.0)
    world.link("learner-1")
    (_, welcome), *_ = reversed(world.sent(Welcome, "learner-1"))
    assert (welcome.incarnation, welcome.reset) == (2, False)
    joined = [record for record in world.journal if isinstance(record, JoinedRecord)][-1]
    gone = next(record for record in world.journal if isinstance(record, GoneRecord))
    assert joined.origin == gone.total > 0, "its tokens so far belong to the life before"
    world.run_to_end()
    assert not world.said("quarantined")
    assert world.syncer.members.total_tokens() == sum(learner.tokens_total for learner in world.learners.values())
    late = [m for r in world.journal if isinstance(r, MergedRecord) for m in r.members if m.learner == "learner-1"][-1]
    assert late.incarnation == 2, "and it contributes again"


def test_away_counts_from_the_start_of_a_term_for_those_that_never_came_back_in_it() -> None:
    world = World(2, fragments=2, sync_every=4, abandon_s=20.0).run_until(round=6)
    world.kill("learner-1")
    world.crash_syncer()
    came_back = world.now
    world.run_until(seconds=30.0)
    (gone,) = [record for record in world.journal if isinstance(record, GoneRecord)]
    at = next(at for at, e in world.log if isinstance(e, syncer_fx.Persist) and gone in e.records)
    assert gone.learner == "learner-1" and came_back + 20.0 <= at <= came_back + 21.0


def test_a_range_is_told_as_it_was_granted() -> None:
    desk = Desk()
    learner = desk.join("learner-0")
    (told,) = desk.register(learner, (("text", 3 * LEASE, 3.0), ("code", 3 * LEASE, 1.0)))
    granted = desk.records(GrantedRecord)
    assert told.ranges == tuple(Range(g.lease, g.dataset, g.epoch, g.start, g.stop) for g in granted)
    assert [one.dataset for one in told.ranges] == [0, 1]


def test_a_lease_that_is_meant_for_another_life_is_passed_over() -> None:
    """While the disk is full two processes take a name by turns: what waited is sent to whoever has it now."""
    machine = Machine("a", "s", ())
    settings = Settings(fragments=1, sync_every=4)
    welcome = Welcome(run="r", incarnation=5, settings=settings, fingerprint="", versions=(0,), gathering=0)
    machine.handle(0.0, learner_fx.Arrived(welcome))
    ranges = (Range(7, 0, 0, 0, 64),)
    for incarnation, taken in ((4, False), (6, False), (5, True), (0, False)):
        effects = machine.handle(0.0, learner_fx.Arrived(Lease(ranges=ranges, incarnation=incarnation)))
        assert (learner_fx.Supply(ranges) in effects) == taken
