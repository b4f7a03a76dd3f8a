"""The syncer's process dies at any of its effects: nothing that was told is lost, and the run goes on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.protocol.world import World

from atoll.protocol import records
from atoll.protocol.clock import SYNCER
from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.messages import Hello, Welcome
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.ending import RETURN_S
from atoll.protocol.syncer.machine import Syncer


class DieAt:
    """At the nth effect of the run, before or after it is carried out."""

    def __init__(self, number: int, when: str) -> None:
        self.number, self.when, self.seen = number, when, 0

    def __call__(self, effect: fx.SyncerEffect, when: str) -> bool:
        if when == "before":
            self.seen += 1
        return self.seen == self.number and when == self.when


def crashed(number: int, when: str, **settings: Any) -> World:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, steps=16, **settings)
    world.crash = DieAt(number, when)
    return world.run_to_end()


def effects_of_a_run(**settings: Any) -> int:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, steps=16, **settings).run_to_end()
    return len(world.log)


@pytest.mark.parametrize(
    "every", [pytest.param(4, id="every fourth"), pytest.param(1, id="every", marks=pytest.mark.faults)]
)
@pytest.mark.parametrize(
    ("when", "synchronous"),
    [
        ("before", False),
        ("after", True),
        pytest.param("before", True, marks=pytest.mark.faults),
        pytest.param("after", False, marks=pytest.mark.faults),
    ],
)
def test_killed_at_every_effect_the_run_ends_with_nothing_lost(when: str, synchronous: bool, every: int) -> None:
    first = 1 + (2 * (when == "after") + synchronous) % every  # other effects in each of the four
    for number in range(first, effects_of_a_run(synchronous=synchronous), every):
        world = crashed(number, when, synchronous=synchronous)
        assert world.syncer.phase == "finished", f"effect {number}"
        assert world.syncer.committed >= 8
        totals = world.syncer.history.ledger.totals()
        assert not any(totals.balance()) and not any(totals.lost), f"effect {number}: {totals}"
        for learner in world.learners.values():
            assert learner.theta == world.theta, f"effect {number}: what a learner ends with is the run's model"


def test_what_the_records_tell_is_what_the_syncer_knew() -> None:
    world = World(3, fragments=3, sync_every=6, latency_s=0.1, quorum=2).run_until(round=20)
    world.kill("learner-1")
    world.run_until(round=30)
    told = History(world.begun)
    for record in world.journal:
        told.apply(record)
    knew = world.syncer.history
    assert (told.versions, told.committed, told.started) == (knew.versions, knew.committed, knew.started)
    assert told.lives == knew.lives
    assert told.ledger.totals().merged == knew.ledger.totals().merged
    assert History.restore(knew.state()).state() == knew.state()


def test_a_new_term_voids_what_was_not_committed_and_asks_again() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.3)
    world.run_until(round=6)
    world.run_until(seconds=1.1)
    before = world.syncer.committed
    world.crash_syncer()
    world.run_until(round=before + 4)
    assert world.syncer.history.term == 2
    rounds = [line.round for line in world.journal if isinstance(line, records.MergedRecord | records.PassedRecord)]
    assert rounds == list(range(len(rounds))), "every round once, in order, over both terms"


def test_learners_train_on_while_there_is_no_syncer() -> None:
    world = World(2, fragments=2, sync_every=4).run_until(round=4)
    steps = [learner.t for learner in world.learners.values()]
    world.crash_syncer(down_s=20.0)
    world.run_until(seconds=20.0)
    assert all(learner.t >= t + 19 for learner, t in zip(world.learners.values(), steps, strict=True))
    world.run_until(round=world.syncer.committed + 4)


def test_a_new_term_waits_for_those_it_knows_so_that_nobody_drops_what_it_trained_meanwhile() -> None:
    world = World(3, fragments=2, sync_every=4, overlap=0, latency_s=0.01).run_until(round=8)
    world.run_until(seconds=1.0)  # its version is adopted everywhere
    world.crash_syncer(down_s=20.0, apart_s=0.7)
    first = world.syncer.committed
    world.run_until(round=first + 2)
    for number in (first, first + 1):
        merged = next(line for line in world.journal if isinstance(line, records.MergedRecord) and line.round == number)
        assert {share.learner for share in merged.members} == set(world.learners)
        assert all(share.steps > 15 for share in merged.members), "the steps of the outage are in it"


def test_a_new_term_does_not_wait_long_for_the_dead() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.01).run_until(round=8)
    world.learners["learner-1"].alive = False
    world.crash_syncer(down_s=1.0)
    begun = world.now
    world.run_until(round=world.syncer.committed + 1)
    assert RETURN_S < world.now - begun < RETURN_S + 4


@pytest.mark.parametrize("phase", ["ending", "finished"])
def test_with_durability_cut_an_end_that_was_told_survives_a_power_cut(phase: str) -> None:
    """Seed 11937: learners had left with the finished model; the run forgot its end, went back to its last cut, and
    went on without them."""
    world = World(2, cut_every=3)
    world.disk.every_round = False
    world.run_until(round=4)
    world.end("asked to")
    while world.syncer.phase != phase:
        world.step()
    told = list(world.syncer.versions)
    world.disk.power_cut()
    world.crash_syncer()
    assert world.syncer.history.ended == "asked to" and world.syncer.versions == told
    world.run_until(seconds=60)
    assert world.finished and all(learner.over for learner in world.learners.values())


def test_an_ending_that_was_begun_is_gone_on_with() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05).run_until(round=4)
    world.crash = lambda effect, when: when == "after" and isinstance(effect, Note) and effect.kind == "ending"
    world.end("the operator asked for it")
    world.crash = lambda effect, when: False
    world.run_to_end()
    assert world.syncer.phase == "finished" and world.syncer.history.ended == "the operator asked for it"
    assert not any(world.syncer.history.ledger.totals().lost)


def test_rounds_that_the_disk_did_not_keep_are_made_again() -> None:
    """durability = "cut", and the machine itself went down: learners hold versions that the run does not know of."""
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, steps=40).run_until(round=12)
    kept = next(i for i, line in enumerate(world.journal) if isinstance(line, records.MergedRecord) and line.round == 8)
    del world.journal[kept:]
    world.disk.marked = kept
    world.disk.losses += 1
    world.crash_syncer()
    assert world.syncer.committed == 8
    world.run_to_end()
    assert {one.incarnation for one in world.syncer.members.learners.values()} == {2}
    for learner in world.learners.values():
        assert learner.theta == world.theta, "everybody ends with the run's model"
    assert not any(world.syncer.history.ledger.totals().balance())


def test_one_that_holds_rounds_the_disk_did_not_keep_is_known_also_when_others_took_their_place() -> None:
    """Its versions bear numbers that the run has given again meanwhile: they are not the same versions."""
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, steps=60).run_until(round=12)
    world.unlink("learner-1")
    kept = next(i for i, line in enumerate(world.journal) if isinstance(line, records.MergedRecord) and line.round == 8)
    del world.journal[kept:]
    world.disk.marked = kept
    world.disk.losses += 1
    world.learners["learner-1"].alive = False
    world.crash_syncer()
    world.run_until(round=20)
    world.crash_syncer()
    world.run_until(round=24)
    world.learners["learner-1"].alive = True
    world.link("learner-1")
    assert max(world.learners["learner-1"].adopted) < min(world.syncer.versions)
    assert world.syncer.members.learners["learner-1"].incarnation == 2
    world.run_to_end()
    assert not any(world.syncer.history.ledger.totals().balance())


def test_one_that_was_there_in_the_term_before_goes_on_as_it_was() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, steps=60).run_until(round=8)
    for number in (14, 20, 26):
        world.crash_syncer()
        world.run_until(round=number)
    assert {one.incarnation for one in world.syncer.members.learners.values()} == {1}


def greeted(syncer: Syncer, now: float, **known: Any) -> Welcome:
    hello = Hello(protocol=2, learner="learner-0", session="session", **known)
    sent = [effect.message for effect in syncer.handle(now, fx.Greeted(hello)) if isinstance(effect, fx.Send)]
    return next(message for message in sent if isinstance(message, Welcome))


def test_a_life_that_the_disk_did_not_keep_is_not_given_its_number_again() -> None:
    """The learner would take itself for the one that is meant, and its counters for those of that account."""
    settings = Settings(learners=1, fragments=2, sync_every=4)
    empty = Syncer.fresh(settings, run="run", fingerprint="plan")
    assert greeted(empty, 0.0, run="run", incarnation=1, versions=(0, 0)).incarnation == 2
    other = Syncer.fresh(settings, run="another run", fingerprint="plan")
    assert greeted(other, 0.0, run="run", incarnation=7, versions=(0, 0)).incarnation == 1


def test_one_that_knows_of_a_later_life_than_the_disk_begins_another() -> None:
    syncer = Syncer.fresh(Settings(learners=1, fragments=2, sync_every=4), run="run", fingerprint="plan")
    assert greeted(syncer, 0.0).incarnation == 1
    syncer.handle(1.0, fx.Lost("learner-0", "connection reset"))
    assert greeted(syncer, 2.0, run="run", incarnation=2).incarnation == 3
    assert syncer.history.lives["learner-0"].incarnation == 3 and len(syncer.history.ledger.open) == 1


def test_one_that_heard_of_a_round_the_disk_did_not_keep_begins_another_life() -> None:
    """It may be about to adopt what came of that round, under a number that is given again."""
    syncer = Syncer.fresh(Settings(learners=1, fragments=2, sync_every=4), run="run", fingerprint="plan")
    greeted(syncer, 0.0)
    syncer.handle(1.0, fx.Lost("learner-0", "the machine went down"))
    history = History.restore(syncer.history.state())
    history.apply(records.TermRecord(2, 0, "", 0))
    known = {"run": "run", "incarnation": 1, "term": 1}
    assert greeted(Syncer(history), 2.0, **known, clock={SYNCER: 1}).incarnation == 2
    again = History.restore(syncer.history.state())
    again.apply(records.TermRecord(2, 0, "", 0))
    assert greeted(Syncer(again), 2.0, **known, clock={SYNCER: 0}).incarnation == 1
