"""A run whose scores become bad goes back to the newest good one, and everything that follows it goes along."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.protocol.test_reopening import read_again
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.messages import Announce, Recover, Welcome
from atoll.protocol.records import MergedRecord, PassedRecord, RestoredRecord, ScoredRecord, Share, Undone
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.rollback import undone


def trained(rounds: int = 8, **settings: Any) -> World:
    settings.setdefault("guard", "rollback")
    return World(3, fragments=2, sync_every=4, latency_s=0.05, **settings).run_until(round=rounds)


def score(world: World, loss: float | None, number: int | None = None) -> None:
    world.deliver(world.simulated_syncer, fx.Scored(world.syncer.committed if number is None else number, loss))


def rolled_back(rounds: int = 8, more: int = 6, **settings: Any) -> tuple[World, RestoredRecord]:
    """A good score after so many rounds, and a bad one so many later."""
    world = trained(rounds, **settings)
    score(world, 1.0)
    world.run_until(round=rounds + more)
    score(world, None)
    world.run(world.now + 0.5)
    return world, restored(world)


def restored(world: World) -> RestoredRecord:
    (record,) = [line for line in world.journal if isinstance(line, RestoredRecord)]
    return record


def kinds(world: World, kind: str) -> list[Note]:
    return [note for _, note in world.notes if note.kind == kind]


def test_every_fragment_goes_up_by_one_and_holds_what_it_held_then() -> None:
    world = trained(8)
    score(world, 1.0)
    then, number = list(world.simulated_syncer.theta), world.syncer.committed
    world.run_until(round=14)
    before = list(world.syncer.versions)
    score(world, None)
    world.run(world.now + 0.5)
    assert restored(world).round == number and restored(world).versions == tuple(v + 1 for v in before)
    world.run_until(round=world.syncer.committed + 1)
    first = next(
        line for line in world.journal[world.journal.index(restored(world)) :] if isinstance(line, MergedRecord)
    )
    kept = 1 - first.fragment
    assert world.simulated_syncer.theta[kept] == then[kept], "the fragment that was not merged since is as it was"


def test_the_rounds_under_way_are_abandoned_and_the_run_goes_on_behind_them() -> None:
    world, record = rolled_back()
    passed = [
        line for line in world.journal if isinstance(line, PassedRecord) and line.reason == "the run is rolled back"
    ]
    assert passed and passed[-1].round == record.at - 1
    world.run_until(round=record.at + 10)
    assert sum(isinstance(line, MergedRecord) and line.round >= record.at for line in world.journal) >= 8


def test_what_was_merged_in_between_is_rolled_back_and_every_token_still_has_one_fate() -> None:
    world, record = rolled_back()
    undone = [
        line for line in world.journal if isinstance(line, MergedRecord) and record.round <= line.round < record.at
    ]
    due = [sum(s.tokens for one in undone if one.fragment == f for s in one.members) for f in (0, 1)]
    totals = world.syncer.history.ledger.totals()
    assert list(totals.rolled_back) == due and min(due) > 0 and not any(totals.balance())
    world.run_until(round=record.at + 10)
    world.end("enough")
    totals = world.run_to_end().syncer.history.ledger.totals()
    assert list(totals.rolled_back) == due and not any(totals.balance()) and not any(totals.in_flight)
    own = world.syncer.history.ledger.by_learner().values()
    assert [sum(one.rolled_back[f] for one in own) for f in (0, 1)] == due


@pytest.mark.parametrize("adopt", ["overwrite", "blend", "carry"])
def test_learners_take_it_in_place_of_their_own_values_whatever_the_rule(adopt: str) -> None:
    world, record = rolled_back(adopt=adopt)
    world.run_until(round=record.at + 6)
    taken = [effect for _, effect in world.log if isinstance(effect, fx.Send)]
    told = [one.message for one in taken if isinstance(one.message, Announce) and one.message.restored]
    assert {(one.fragment, one.version) for one in told} == set(enumerate(record.versions))
    assert all(min(learner.adopted) >= min(record.versions) for learner in world.learners.values())


def test_a_synchronous_run_is_rolled_back_too() -> None:
    world, record = rolled_back(synchronous=True, overlap=0)
    world.run_until(round=record.at + 8)
    assert sum(isinstance(line, MergedRecord) and line.round >= record.at for line in world.journal) >= 4


def test_one_that_was_away_is_told_when_it_comes_back() -> None:
    world = trained(8, adopt="carry")
    score(world, 1.0)
    world.run_until(round=12)
    world.unlink("learner-2")
    score(world, None)
    world.run(world.now + 0.5)
    world.link("learner-2")
    world.run_until(round=world.syncer.committed + 6)
    sent = [one for _, one in world.log if isinstance(one, fx.Send) and one.learner == "learner-2"]
    welcome = [one.message for one in sent if isinstance(one.message, Welcome)][-1]
    assert welcome.least == restored(world).versions
    assert min(world.learners["learner-2"].adopted) >= min(restored(world).versions)


def test_a_suspect_goes_into_quarantine_and_nobody_else() -> None:
    world = trained(8)
    score(world, 1.0)
    world.run_until(round=14)
    world.syncer.members.learners["learner-1"].suspect = "it points against the others"
    score(world, None)
    world.run(world.now + 0.5)
    sent = [one.learner for _, one in world.log if isinstance(one, fx.Send) and isinstance(one.message, Recover)]
    assert sent == ["learner-1"] and kinds(world, "restored")[0].data["suspects"] == ["learner-1"]
    world.run_until(round=restored(world).at + 12)
    assert world.syncer.members.learners["learner-1"].incarnation == 2


def test_a_later_term_knows_of_it() -> None:
    world, record = rolled_back(cut_every=4)
    history = read_again(world)
    assert history.versions == list(record.versions) == history.least and history.trend.rolled_back
    world.crash_syncer(0.1)
    world.run_until(round=record.at + 8)
    assert world.syncer.history.least == list(record.versions), "and those that come back are told"


def test_with_an_alarm_nothing_is_rolled_back() -> None:
    world = trained(8, guard="alarm")
    score(world, 1.0)
    world.run_until(round=12)
    score(world, None)
    world.run_until(round=16)
    assert not any(isinstance(line, RestoredRecord) for line in world.journal)
    (alarm,) = kinds(world, "alarm")
    assert alarm.data["answer"] == "guard=rollback" and alarm.data["over"] is False
    assert alarm.text.endswith("look for the cause, or let the run be rolled back")
    score(world, 1.0)
    assert kinds(world, "alarm")[-1].data["over"] is True


def test_an_alarm_offers_no_rollback_where_there_is_no_good_round_to_go_back_to() -> None:
    world = trained(8, guard="alarm")
    score(world, None)
    (alarm,) = kinds(world, "alarm")
    assert alarm.data["answer"] == ""
    assert alarm.text.endswith("there is no earlier round with a good score to go back to: look for the cause")


def test_without_a_guard_nothing_is_written_down() -> None:
    world = trained(8, guard="off")
    score(world, 1.0)
    score(world, None)
    assert not any(isinstance(line, ScoredRecord) for line in world.journal) and not kinds(world, "alarm")


@pytest.mark.parametrize("number", [-1, 10**6, 10**400])
def test_a_score_of_a_round_that_is_not_there_counts_for_nothing(number: int) -> None:
    world = trained(8)
    score(world, None, number)
    assert not any(isinstance(line, ScoredRecord) for line in world.journal) and not kinds(world, "alarm")


def test_a_run_that_ends_meanwhile_is_not_rolled_back_and_says_so() -> None:
    world = trained(8)
    score(world, 1.0)
    world.run_until(round=12)
    score(world, None)
    world.end("enough")
    world.run_to_end()
    assert not any(isinstance(line, RestoredRecord) for line in world.journal)
    assert "not rolled back" in kinds(world, "alarm")[-1].text


def test_what_the_store_cannot_give_leaves_the_run_as_it_is() -> None:
    world = trained(8)
    score(world, 1.0)
    world.run_until(round=12)
    world.disk.restore_earlier = lambda restore, step: ([], fx.Unrestorable("no cut is left"))  # type: ignore[assignment,return-value]
    score(world, None)
    world.run_until(round=18)
    assert "no cut is left" in kinds(world, "alarm")[-1].text
    score(world, None)
    assert len(kinds(world, "alarm")) == 2, "it is not tried again before the alarm is over"


def test_a_good_cut_is_kept_for_as_long_as_the_run_may_go_back_to_it() -> None:
    world = trained(8, cut_every=4, keep_cuts=1)
    score(world, 1.0)
    world.run_until(round=24)
    assert world.complete[-1].cut > 16 and world.complete[-1].spared == 8


def test_with_an_alarm_a_good_cut_is_kept_from_the_first_bad_score_on() -> None:
    """The operator may answer the alarm with guard=rollback."""
    world = trained(8, cut_every=4, keep_cuts=1, guard="alarm")
    score(world, 1.0)
    world.run_until(round=16)
    assert world.complete[-1].spared == -1
    score(world, 9.0)
    world.run_until(round=24)
    assert world.complete[-1].spared == 8


def test_the_first_good_score_after_a_rollback_ends_the_alarm() -> None:
    world, record = rolled_back()
    world.run_until(round=record.at + 6)
    assert [note.data["over"] for note in kinds(world, "alarm")] == [False]
    score(world, 1.0)
    assert [note.data["over"] for note in kinds(world, "alarm")] == [False, True]


def test_an_operator_who_answers_an_alarm_has_the_run_rolled_back_with_the_next_bad_score() -> None:
    world = trained(8, guard="alarm")
    score(world, 1.0)
    world.run_until(round=12)
    score(world, None)
    settings = msgspec.structs.replace(world.syncer.settings, guard="rollback")
    world.deliver(world.simulated_syncer, fx.ChangeAsked(settings, {}, "guard=rollback"))
    score(world, None)
    world.run(world.now + 0.5)
    assert restored(world).round == 8


@pytest.mark.parametrize(("since", "rounds"), [(2, range(2, 7)), (3, range(3, 7)), (6, range(6, 7)), (7, range(0))])
def test_a_rollback_takes_back_from_its_first_round_to_the_last(since: int, rounds: range) -> None:
    """Seven rounds, each with tokens of its own, so that their sum tells which they were."""
    lines = [merged(number) for number in range(7)]
    due = [sum(1 << number for number in rounds if number % 2 == fragment) for fragment in (0, 1)]
    expected = (Undone("a", 1, (due[0], due[1])),) if rounds else ()
    assert undone(lines, since, 2) == expected


def test_what_an_earlier_rollback_took_back_is_not_taken_back_again() -> None:
    """Behind four rounds the run goes back to two; behind six to one. Then rounds 2 and 3 are gone already."""
    back = RestoredRecord(2, 4, (1, 1), ("", ""), (), "bad")
    lines = [*(merged(number) for number in range(4)), back, merged(4), merged(5)]
    assert undone(lines, 1, 2) == (Undone("a", 1, (1 << 4, (1 << 1) + (1 << 5))),)


def merged(number: int) -> MergedRecord:
    share = Share("a", 1, number + 1, 1, 1 << number, 1.0, 0)
    return MergedRecord(number, number % 2, number // 2 + 1, 1, "", (share,), "")
