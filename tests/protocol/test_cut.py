"""Cuts: when they are taken, whom they wait for, and what is in them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Self

import msgspec
import pytest
from tests.protocol.world import TENSORS, SimulatedLearner, World

from atoll.protocol import records
from atoll.protocol.effects import Note
from atoll.protocol.history import History, HistoryState
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.ledger import Ledger
from atoll.protocol.messages import Announce, CutSaved, Lease, Recover, Register, Welcome
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx


class CutWorld(World):
    """Remembers what was on disk when a cut was taken, and who saved when."""

    def __init__(self, learners: int = 3, **settings: Any) -> None:
        self.taken: list[tuple[float, syncer_fx.TakeCut, bytes, list[records.AnyRecord]]] = []
        self.saves: list[tuple[float, str, int]] = []
        super().__init__(learners, **{"fragments": 2, "sync_every": 4, "cut_every": 4, "latency_s": 0.1, **settings})

    def _carry_out(self, effect: syncer_fx.SyncerEffect) -> None:
        if isinstance(effect, syncer_fx.TakeCut):
            as_it_was = msgspec.msgpack.encode(effect.history)
            self.taken.append((self.now, effect, as_it_was, list(self.journal)))
        super()._carry_out(effect)

    def _do(self, learner: SimulatedLearner, effect: learner_fx.LearnerEffect) -> None:
        if isinstance(effect, learner_fx.Save):
            self.saves.append((self.now, learner.machine.name, effect.cut))
        super()._do(learner, effect)

    def run_until(self, *, round: int | None = None, seconds: float | None = None) -> Self:
        super().run_until(round=round, seconds=seconds)
        return self

    def took(self) -> list[int]:
        return [effect.cut for _, effect, _, _ in self.taken if not effect.first]

    def at_cut(self, cut: int) -> float:
        return next(at for at, effect, _, _ in self.taken if effect.cut == cut)

    def completed(self, cut: int) -> tuple[float, syncer_fx.CompleteCut]:
        found = [(at, e) for at, e in self.log if isinstance(e, syncer_fx.CompleteCut) and e.cut == cut]
        assert len(found) == 1, f"cut {cut} was completed {len(found)} times:\n{self.story()}"
        return found[0]

    def learners_of(self, cut: int) -> set[str]:
        return {name for name, _ in self.completed(cut)[1].saved}

    def left_out(self, cut: int) -> dict[str, str]:
        return dict(self.completed(cut)[1].left_out)

    def done(self) -> list[int]:
        return [record.cut for record in self.journal if isinstance(record, records.CutDoneRecord)]


# ---- when ------------------------------------------------------------------------------------------------------------


def test_a_cut_is_taken_every_so_many_rounds() -> None:
    assert CutWorld(cut_every=4).run_until(round=15).took() == [4, 8, 12]
    assert CutWorld(cut_every=3).run_until(round=11).took() == [3, 6, 9]


def test_after_a_long_cut_one_is_left_out_and_no_more() -> None:
    """Cuts of a large model would otherwise keep the disk from the rounds; without any the journal would grow."""

    class SlowDisk(CutWorld):
        def cut_s(self) -> float:
            return 10.0

    world = SlowDisk(cut_every=4).run_until(round=150)
    rounds_s = (world.at_cut(world.took()[1]) - world.at_cut(4)) / (world.took()[1] - 4)
    assert 4 * rounds_s < 10.0, "a cut would be due while the one before it is written"
    assert len(world.took()) >= 3 and all(cut % 4 == 0 for cut in world.took())
    for earlier, later in pairwise(world.took()):
        written_s, _ = world.completed(earlier)
        due = [at for at, e in world.log if isinstance(e, syncer_fx.Commit) and (e.round + 1) % 4 == 0]
        behind = [at for at in due if at > written_s]
        assert behind[1] == world.at_cut(later), "the first that was due behind it is left out"


def test_without_a_rhythm_only_the_first_cut_is_taken() -> None:
    world = CutWorld(cut_every=0).run_until(round=20)
    assert [(effect.cut, effect.first) for _, effect, _, _ in world.taken] == [(0, True)]


def test_a_cut_stands_right_behind_a_commit_and_before_its_announcement() -> None:
    world = CutWorld().run_until(round=9)
    effects = [effect for _, effect in world.log]
    for cut in (4, 8):
        place = next(i for i, e in enumerate(effects) if isinstance(e, syncer_fx.TakeCut) and e.cut == cut)
        written, committed = effects[place - 2], effects[place - 1]
        assert isinstance(written, syncer_fx.Persist) and written.round == cut - 1
        assert isinstance(committed, syncer_fx.Commit) and committed.round == cut - 1
        told = [i for i, e in enumerate(effects) if isinstance(e, syncer_fx.Send) and _announces(e, cut - 1)]
        assert len(told) == 3 and min(told) > place


def test_version_0_is_in_the_first_cut_before_anybody_hears_of_it() -> None:
    world = CutWorld().run_until(round=1)
    effects = [effect for _, effect in world.log]
    place, cut = next((i, e) for i, e in enumerate(effects) if isinstance(e, syncer_fx.TakeCut))
    assert (cut.cut, cut.first) == (0, True)
    started = effects[place + 1]
    assert isinstance(started, syncer_fx.Persist) and isinstance(started.records[0], records.StartedRecord)


def test_one_cut_is_open_at_a_time() -> None:
    world = CutWorld(cut_every=2, cut_wait_s=25.0)
    world.learners["learner-1"].saves = False
    world.run_until(round=50)
    moments = [(at, e.cut, type(e)) for at, e in world.log if isinstance(e, syncer_fx.TakeCut | syncer_fx.CompleteCut)][
        1:
    ]
    assert [kind for _, _, kind in moments[:6]] == [syncer_fx.TakeCut, syncer_fx.CompleteCut] * 3
    assert [cut for _, cut, _ in moments[0:6:2]] == [cut for _, cut, _ in moments[1:6:2]]
    assert world.took()[1] > 4, "those that were due meanwhile are left out"


# ---- the marker ------------------------------------------------------------------------------------------------------


def test_every_message_behind_a_cut_names_it_and_none_before() -> None:
    world = CutWorld().run_until(round=10)
    newest, named = 0, set()
    for _, effect in world.log:
        if isinstance(effect, syncer_fx.TakeCut):
            newest = effect.cut
        elif isinstance(effect, syncer_fx.Send):
            assert effect.message.cut == newest
            named.add(effect.message.cut)
    assert named == {0, 4, 8}


@pytest.mark.parametrize("latency_s", [0.0, 0.1, 1.7])
def test_the_first_message_that_names_a_cut_is_a_learners_marker(latency_s: float) -> None:
    world = CutWorld(latency_s=latency_s).run_until(round=11)
    assert world.took()[0] == 4
    for cut in world.took():
        saves = {name: at for at, name, of in world.saves if of == cut}
        assert saves == dict.fromkeys(world.learners, world.at_cut(cut) + latency_s), "at once, and once each"


def test_what_was_sent_before_a_cut_is_no_marker_though_it_comes_later() -> None:
    opened = CutWorld(latency_s=0.4).run_until(round=4).now
    world = CutWorld(latency_s=0.4)
    register = Register(datasets=(("text", 1000, 1.0),), epochs=0, batch=4)
    world.at(opened - 0.1, lambda: world.inject(syncer_fx.Received("learner-0", register)))
    world.run_until(round=4).run_until(seconds=0.35)
    (sent_at, lease), *_ = world.sent(Lease, "learner-0")
    assert sent_at < opened < sent_at + 0.4 < world.now and lease.cut == 0, "it came when the cut was open"
    assert not world.saves
    world.run_until(seconds=0.1)
    assert [(name, cut) for _, name, cut in world.saves] == [(name, 4) for name in world.learners]


def test_a_newcomer_saves_nothing_for_a_cut_that_was_opened_before_it_came() -> None:
    world = CutWorld(3, present=2, cut_every=10).run_until(round=11)
    world.join("learner-2")
    world.run_until(round=18)
    assert {name for _, name, _ in world.saves} == {"learner-0", "learner-1"}
    world.run_until(round=22)
    assert world.learners_of(20) == set(world.learners)


def test_one_that_was_away_when_a_cut_was_opened_saves_nothing_for_it_when_it_comes_back() -> None:
    world = CutWorld().run_until(round=3)
    world.unlink("learner-1")
    world.run_until(round=5)
    world.link("learner-1")
    world.run_until(round=7)
    assert {name for _, name, cut in world.saves if cut == 4} == {"learner-0", "learner-2"}, "others have saved theirs"
    world.run_until(round=10)
    assert world.learners_of(8) == set(world.learners)


# ---- whom it waits for -----------------------------------------------------------------------------------------------


def test_a_cut_is_complete_with_all_learners_and_journaled() -> None:
    world = CutWorld().run_until(round=6)
    at, complete = world.completed(4)
    assert world.learners_of(4) == set(world.learners) and complete.left_out == ()
    assert at == pytest.approx(world.at_cut(4) + 0.3), "there, saved, and back"
    assert [r for r in world.journal if isinstance(r, records.CutDoneRecord)] == [
        records.CutDoneRecord(4, 4, ("learner-0", "learner-1", "learner-2"), "digest")
    ]
    assert world.said("cut")[0].text == "cut 4 is complete: 3 learners"
    assert world.syncer.history.cuts == [4]


def test_what_a_learner_said_of_its_part_is_in_the_cut() -> None:
    world = CutWorld().run_until(round=6)
    parts = dict(world.completed(4)[1].saved)
    for name, said in parts.items():
        assert (said.of, said.incarnation, said.file, said.digest) == (4, 1, "file", "digest")
        assert 0 < said.t <= world.learners[name].t


def test_one_that_is_dead_is_not_waited_for() -> None:
    world = CutWorld(lost_after_s=1000.0).run_until(round=3)
    world.kill("learner-2")
    world.run_until(round=6)
    assert world.learners_of(4) == {"learner-0", "learner-1"}
    assert world.completed(4)[0] < world.at_cut(4) + 1.0


def test_one_that_dies_while_a_cut_is_open_is_left_out_at_once() -> None:
    world = CutWorld(cut_wait_s=50.0).run_until(round=4)
    world.learners["learner-2"].saves = False
    world.run_until(seconds=2.0)
    assert world.syncer.cuts.open is not None
    died = world.now
    world.kill("learner-2")
    world.run_until(seconds=0.5)
    assert world.left_out(4) == {"learner-2": "it was gone"}
    assert world.completed(4)[0] == died
    assert world.said("cut")[0].text == "cut 4 is complete: 2 learners, without learner-2"


def test_a_new_process_under_the_same_name_does_not_stand_in_for_the_one_that_was_asked() -> None:
    world = CutWorld(cut_wait_s=50.0).run_until(round=4)
    world.learners["learner-2"].saves = False
    world.run_until(seconds=1.0)
    world.join("learner-2")
    world.run_until(seconds=1.0)
    assert world.left_out(4) == {"learner-2": "it was gone"}


def test_one_that_never_saves_is_left_out_at_the_deadline_with_the_reason() -> None:
    world = CutWorld(cut_wait_s=5.0)
    world.learners["learner-1"].saves = False
    world.run_until(round=4).run_until(seconds=6.0)
    assert world.left_out(4) == {"learner-1": "it did not save in time"}
    assert world.learners_of(4) == {"learner-0", "learner-2"}
    assert world.completed(4)[0] == pytest.approx(world.at_cut(4) + 5.0)
    assert world.syncer.committed > 6, "rounds went on meanwhile"


def test_one_that_could_not_save_is_left_out_with_its_own_reason() -> None:
    world = CutWorld(cut_wait_s=50.0)
    world.learners["learner-1"].saves = False
    world.run_until(round=4).run_until(seconds=1.0)
    assert world.syncer.cuts.open is not None
    world.inject(syncer_fx.Received("learner-1", CutSaved(of=4, incarnation=1, t=3, reason="its disk is full")))
    assert world.left_out(4) == {"learner-1": "its disk is full"}


def test_a_part_of_another_cut_does_not_count() -> None:
    world = CutWorld(cut_wait_s=50.0)
    world.learners["learner-1"].saves = False
    world.run_until(round=4).run_until(seconds=1.0)
    world.inject(syncer_fx.Received("learner-1", CutSaved(of=3, incarnation=1, t=3, file="file", digest="digest")))
    assert world.syncer.cuts.open is not None and "learner-1" in world.syncer.cuts.open.awaited
    world.inject(syncer_fx.Received("learner-1", CutSaved(of=4, incarnation=1, t=3, file="file", digest="digest")))
    assert world.learners_of(4) == set(world.learners)


@pytest.mark.parametrize("incarnation", [0, 2])
def test_a_part_that_another_life_saved_does_not_count(incarnation: int) -> None:
    world = CutWorld(cut_wait_s=50.0)
    world.learners["learner-1"].saves = False
    world.run_until(round=4).run_until(seconds=1.0)
    said = CutSaved(of=4, incarnation=incarnation, t=3, file="file", digest="digest")
    world.inject(syncer_fx.Received("learner-1", said))
    assert world.syncer.cuts.open is not None and "learner-1" in world.syncer.cuts.open.awaited


def test_a_learner_names_the_life_that_was_told_to_save() -> None:
    """The part is written in the background: another life may have begun when it is durable."""
    learner = LearnerMachine("a", "session", TENSORS)
    learner.restore("run", [3, 3], learner_fx.Stepped(10, (4, 4), (40, 40)), incarnation=1)
    settings = Settings(learners=2, fragments=2, sync_every=4).resolved(10)
    welcome = Welcome(
        run="run", settings=settings, fingerprint="p", versions=(3, 3), gathering=8, committed=8, incarnation=1, term=1
    )
    learner.handle(0.0, learner_fx.Arrived(welcome))
    asked = learner.handle(1.0, learner_fx.Arrived(Recover(incarnation=2, reason="strikes", term=1, cut=8)))
    assert any(isinstance(effect, learner_fx.Save) for effect in asked) and learner.incarnation == 2
    said = learner.handle(2.0, learner_fx.Saved(8, 10, "file", "digest"))
    parts = [one.message for one in said if isinstance(one, learner_fx.Say) and isinstance(one.message, CutSaved)]
    assert [(part.of, part.incarnation) for part in parts] == [(8, 1)]


def test_one_that_was_not_asked_is_not_in_the_cut_whatever_it_says() -> None:
    world = CutWorld(3, present=2, cut_wait_s=50.0)
    world.learners["learner-1"].saves = False
    world.run_until(round=4).run_until(seconds=0.5)
    world.join("learner-2")
    world.inject(syncer_fx.Received("learner-2", CutSaved(of=4, incarnation=1, t=0, file="file", digest="digest")))
    world.inject(syncer_fx.Received("learner-0", CutSaved(of=4, incarnation=1, t=9, file="again", digest="digest")))
    world.inject(syncer_fx.Received("learner-1", CutSaved(of=4, incarnation=1, t=3, file="file", digest="digest")))
    parts = dict(world.completed(4)[1].saved)
    assert parts.keys() == {"learner-0", "learner-1"} and parts["learner-0"].file == "file", "said once"


def test_when_everybody_is_gone_a_cut_is_the_syncers_part_alone() -> None:
    world = CutWorld(2, cut_wait_s=50.0)
    for learner in world.learners.values():
        learner.saves = False
    world.run_until(round=4)
    for name in world.learners:
        world.kill(name)
    world.run_until(seconds=1.0)
    assert world.learners_of(4) == set() and set(world.left_out(4)) == set(world.learners)


# ---- what is in it ---------------------------------------------------------------------------------------------------


def test_a_cuts_history_is_a_fold_over_the_journal_up_to_there_and_stays_it() -> None:
    world = CutWorld(3, quorum=2).run_until(round=6)
    world.kill("learner-1")
    world.run_until(seconds=5.0)
    world.join("learner-1")
    world.learners["learner-2"].broken = True
    world.run_until(round=40)
    assert world.said("quarantined") and len(world.took()) >= 9
    for _, effect, as_it_was, journal in world.taken:
        folded = fold(world.begun, journal).state()
        assert without_reports(effect.history) == without_reports(folded)
        assert effect.history.committed == effect.cut
        assert msgspec.msgpack.encode(effect.history) == as_it_was, "what came later is not in it"


def test_going_on_from_a_cut_and_the_journal_behind_it_is_the_run_as_it_is() -> None:
    world = CutWorld(3, quorum=2).run_until(round=22)
    _, effect, as_it_was, journal = world.taken[-1]
    history = History.restore(msgspec.msgpack.decode(as_it_was, type=HistoryState))
    for record in world.journal[len(journal) :]:
        history.apply(record)
    assert effect.cut == 20
    assert without_reports(history.state()) == without_reports(world.syncer.history.state())


# ---- when it goes wrong ----------------------------------------------------------------------------------------------


def test_a_syncers_part_that_cannot_be_written_ends_the_cut_with_a_warning() -> None:
    world = CutWorld(latency_s=0.4).run_until(round=4)
    effects = world.inject(syncer_fx.CutKept(4, "no room on the disk"))
    warnings = [e.text for e in effects if isinstance(e, Note) and e.kind == "warning"]
    assert warnings == ["cut 4 came to nothing: no room on the disk"]
    world.run_until(round=7)
    assert 4 not in [complete.cut for complete in world.complete] and world.done() == []
    world.run_until(round=10)
    assert world.learners_of(8) == set(world.learners), "the next one is taken all the same"


def test_a_manifest_that_cannot_be_written_ends_the_cut_too() -> None:
    class Unwritable(CutWorld):
        def _carry_out(self, effect: syncer_fx.SyncerEffect) -> None:
            if isinstance(effect, syncer_fx.CompleteCut) and effect.cut == 4:
                self._later(0.0, lambda: self._deliver(syncer_fx.CutKept(4, "input/output error")))
            else:
                super()._carry_out(effect)

    world = Unwritable().run_until(round=10)
    assert world.said("warning")[0].text == "cut 4 came to nothing: input/output error"
    assert world.done() == [8]


def test_a_cut_is_not_complete_before_the_syncers_part_is_durable() -> None:
    class Slow(CutWorld):
        def _carry_out(self, effect: syncer_fx.SyncerEffect) -> None:
            if not isinstance(effect, syncer_fx.TakeCut) or effect.first:
                super()._carry_out(effect)

    world = Slow().run_until(round=4).run_until(seconds=3.0)
    open_ = world.syncer.cuts.open
    assert open_ is not None and not open_.awaited and not world.complete, "all learners have saved"
    world.inject(syncer_fx.CutKept(4))
    assert {name for name, _ in world.complete[0].saved} == set(world.learners)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [syncer_fx.TakeCut, syncer_fx.CompleteCut])
def test_after_a_crash_of_the_syncer_the_next_cuts_come(
    when: str, kind: type[syncer_fx.TakeCut | syncer_fx.CompleteCut]
) -> None:
    world = CutWorld()
    crashes: list[syncer_fx.SyncerEffect] = []

    def dies(effect: syncer_fx.SyncerEffect, moment: str) -> bool:
        first = not crashes and isinstance(effect, kind) and effect.cut == 4 and moment == when
        crashes.extend([effect] if first else [])
        return first

    world.crash = dies
    world.run_until(round=14)
    assert len(crashes) == 1 and world.syncer.history.term == 2
    assert world.done() == [8, 12]
    assert world.learners_of(8) == world.learners_of(12) == set(world.learners)


def test_a_learner_does_not_save_twice_for_a_cut_that_both_terms_name() -> None:
    world = CutWorld().run_until(round=5)
    world.run_until(seconds=0.5)
    world.crash_syncer()
    world.run_until(round=7)
    assert [name for _, name, cut in world.saves if cut == 4].count("learner-0") == 1


# ---- the last one ----------------------------------------------------------------------------------------------------


def ended(world: CutWorld) -> CutWorld:
    world.end("Ctrl-C")
    world.run_to_end()
    return world


def test_the_last_one_has_its_deadline_also_when_nobody_says_anything_new() -> None:
    """Seed 508867: with a full disk nobody is told of it, and nothing made the syncer look at the time."""
    world = World(2, fragments=2, sync_every=4, cut_every=10, cut_wait_s=3.0).run_until(round=5)
    world.end("Ctrl-C")
    while world.syncer.cuts.open is None:
        world.step()
        world.disk.full = world.syncer.committed >= 7
    assert world.syncer.wake_at is not None and world.syncer.wake_at <= world.syncer.cuts.open.deadline


@pytest.mark.parametrize("latency_s", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
def test_a_run_that_ends_takes_a_cut_of_everybody_behind_its_last_round(latency_s: float, adopt: str) -> None:
    world = ended(CutWorld(cut_every=50, latency_s=latency_s, adopt=adopt).run_until(round=7))
    assert world.done() == [world.syncer.committed]
    assert world.learners_of(world.syncer.committed) == set(world.learners)
    kinds = [
        type(record) for record in world.journal if isinstance(record, records.CutDoneRecord | records.EndedRecord)
    ]
    assert kinds == [records.EndedRecord, records.CutDoneRecord, records.EndedRecord], "and only then it is over"


def test_a_run_without_cuts_ends_without_one() -> None:
    assert not ended(CutWorld(cut_every=0).run_until(round=7)).took()


def test_a_cut_that_is_open_when_a_run_ends_is_completed_before_the_last_one() -> None:
    world = CutWorld(cut_wait_s=3.0).run_until(round=3)
    world.learners["learner-1"].saves = False
    ended(world.run_until(round=4))
    assert world.done() == [4, world.syncer.committed]
    assert world.left_out(4) == world.left_out(world.syncer.committed) == {"learner-1": "it did not save in time"}


def test_a_last_cut_that_nobody_saved_for_does_not_take_the_place_of_one_before_it() -> None:
    world = CutWorld(cut_every=4, cut_wait_s=3.0).run_until(round=6)
    for learner in world.learners.values():
        learner.saves = False
    ended(world)
    assert world.done() == [4] and world.took()[-1] == world.syncer.committed
    assert any("the last cut" in note.text and "did not save in time" in note.text for note in world.said("warning"))


def test_while_the_last_steps_are_collected_no_other_cut_is_taken() -> None:
    world = ended(CutWorld(cut_every=1).run_until(round=7))
    drained = next(r for r in world.journal if isinstance(r, records.EndedRecord))
    at = world.journal.index(drained)
    cuts = [record.cut for record in world.journal[at:] if isinstance(record, records.CutDoneRecord)]
    assert cuts[-1] == world.syncer.committed and len(cuts) <= 2, "one that was open, and the last"


def test_one_whose_connection_breaks_while_a_cut_is_open_is_left_out_though_it_is_back_at_once() -> None:
    world = CutWorld(cut_wait_s=1000.0).run_until(round=3)
    world.learners["learner-1"].saves = False
    world.run_until(round=4)
    world.inject(syncer_fx.Lost("learner-1", "connection reset"))
    assert world.syncer.cuts.open is None or "learner-1" not in world.syncer.cuts.open.awaited


def test_the_last_cut_does_not_wait_for_one_that_dies() -> None:
    world = CutWorld(cut_every=50, cut_wait_s=1000.0).run_until(round=7)
    world.learners["learner-1"].saves = False
    world.end("Ctrl-C")
    while not world.took():
        world.run_until(seconds=0.1)
    world.kill("learner-1")
    world.run_to_end()
    assert world.learners_of(world.syncer.committed) == {"learner-0", "learner-2"}


def test_a_last_cut_that_cannot_be_written_costs_nothing_but_that_cut() -> None:
    world = CutWorld(cut_every=50).run_until(round=7)
    world.disk.cuts_fail = True
    ended(world)
    assert not world.done() and world.syncer.phase == "finished"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", [syncer_fx.TakeCut, syncer_fx.CompleteCut])
def test_a_syncer_that_dies_at_the_last_cut_takes_it_again(
    when: str, kind: type[syncer_fx.TakeCut | syncer_fx.CompleteCut]
) -> None:
    """Also of those who had saved for it already."""
    world = CutWorld(cut_every=50).run_until(round=7)
    crashes: list[syncer_fx.SyncerEffect] = []

    def dies(effect: syncer_fx.SyncerEffect, moment: str) -> bool:
        first = not crashes and isinstance(effect, kind) and moment == when
        crashes.extend([effect] if first else [])
        return first

    world.crash = dies
    began = world.now
    ended(world)
    assert len(crashes) == 1 and world.syncer.history.term == 2
    last = [record for record in world.journal if isinstance(record, records.CutDoneRecord)]
    assert [record.learners for record in last] == [tuple(sorted(world.learners))]
    assert world.now - began < world.syncer.settings.cut_wait_s, "nobody is waited for in vain"


# ---- words -----------------------------------------------------------------------------------------------------------


def fold(begun: records.BegunRecord, journal: list[records.AnyRecord]) -> History:
    history = History(begun)
    for record in journal:
        history.apply(record)
    return history


def without_reports(state: HistoryState) -> tuple[object, ...]:
    """Reports are in no record: of the ledger, what is merged is what both know."""
    fields = {name: getattr(state, name) for name in HistoryState.__struct_fields__ if name != "ledger"}
    return (*fields.values(), Ledger.restore(state.ledger).totals().merged)


def _announces(send: syncer_fx.Send, number: int) -> bool:
    return isinstance(send.message, Announce) and send.message.round == number
