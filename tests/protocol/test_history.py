"""A run's state as a fold over its records, and the same state through a cut."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.world import World

from atoll.protocol.account import make_account
from atoll.protocol.history import History, HistoryState, number_learners
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    CutDoneRecord,
    EndedRecord,
    GoneRecord,
    JoinedRecord,
    MergedRecord,
    OwnedRecord,
    PassedRecord,
    ResetRecord,
    Share,
    SourcesRecord,
    StartedRecord,
    TermRecord,
    decode,
    encode,
)
from atoll.protocol.settings import Settings

RULES = Settings(learners=2, fragments=2, sync_every=4)
BEGUN = BegunRecord("run", RULES, {"lr": 0.6}, (), "plan")
OTHER = msgspec.structs.replace(RULES, quorum=2)


class Written:
    """Records of a small run, each as its writer's own history allows it."""

    def __init__(self) -> None:
        self.history = History(BEGUN)
        self.records: list[AnyRecord] = []

    def add(self, *records: AnyRecord) -> Written:
        for record in records:
            self.history.apply(record)
            self.records.append(record)
        return self

    def lease(self, learner: str, incarnation: int = 1) -> Written:
        assert self.history.leases is not None
        granted = self.history.leases.next(learner, incarnation, 64)
        assert granted is not None
        return self.add(granted)

    def round(self, *members: Share) -> Written:
        number = self.history.committed
        fragment = number % 2
        version = self.history.versions[fragment] + 1
        return self.add(
            MergedRecord(number, fragment, version, 1, "every live learner reported", members, f"{number:032x}")
        )


def share(learner: str, t: int, base: int, incarnation: int = 1, tokens: int = 16, position: int = -1) -> Share:
    return Share(learner, incarnation, t, 2, tokens, 128.0, base, 8 * t, position)


def eventful() -> Written:
    """Every kind of record there is, but the first."""
    run = Written().add(JoinedRecord("a", 1, "session a", 0), JoinedRecord("b", 1, "session b", 0), StartedRecord("a"))
    run.add(SourcesRecord((("text", 1000, 1.0), ("code", 300, 2.0)), 2))
    run.lease("a").lease("b").lease("a")
    run.round(share("a", 2, 0, position=8), share("b", 2, 0, position=8))
    run.round(share("a", 4, 0, position=16, tokens=32))
    run.add(CutDoneRecord(2, 2, ("a", "b"), "digest"), PassedRecord(2, 0, "0 of 1 contributions came"))
    run.add(GoneRecord("b", 1, 4, 32, (0, 0), (16, 32), position=12, again_from=8, reason="killed"))
    run.add(JoinedRecord("b", 2, "another session", 0), OwnedRecord("b", "eu")).lease("b", 2)
    run.add(
        ResetRecord(1, "the outer step gave values that are not finite"), ChangedRecord(OTHER, {"lr": 0.3}, "quorum=2")
    )
    run.round(share("a", 8, 1, position=32), share("b", 2, 1, incarnation=2, position=8))
    run.add(
        TermRecord(2, 999, "hash", 4), EndedRecord("40 steps are done"), EndedRecord("40 steps are done", final=True)
    )
    run.add(ChangedRecord(OTHER, {"lr": 0.3}, "the run goes on", reopen=True))
    return run.round(share("a", 10, 1, position=40))


def fold(records: list[AnyRecord]) -> History:
    history = History(BEGUN)
    for record in records:
        history.apply(record)
    return history


def through_bytes(state: HistoryState) -> HistoryState:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=HistoryState)


# ---- the fold --------------------------------------------------------------------------------------------------------


def test_the_same_records_give_the_same_state() -> None:
    run = eventful()
    assert fold(run.records).state() == fold(run.records).state() == run.history.state()


def test_records_out_of_a_journal_give_the_same_state() -> None:
    run = eventful()
    assert fold([decode(encode(record)) for record in run.records]).state() == run.history.state()


def test_a_cut_anywhere_and_the_records_behind_it_are_the_whole() -> None:
    run = eventful()
    for split in range(len(run.records) + 1):
        history = History.restore(through_bytes(fold(run.records[:split]).state()))
        for record in run.records[split:]:
            history.apply(record)
        assert history.state() == run.history.state(), f"split at {split}"


@given(data=st.data())
def test_any_number_of_cuts_on_the_way_change_nothing(data: st.DataObject) -> None:
    run = eventful()
    history = History(BEGUN)
    for record in run.records:
        if data.draw(st.booleans()):
            history = History.restore(through_bytes(history.state()))
        history.apply(record)
    assert history.state() == run.history.state()


def test_the_journal_of_a_run_with_accidents_folds_the_same_way_from_every_cut() -> None:
    world = World(3, fragments=3, sync_every=6, latency_s=0.1, quorum=2).run_until(round=10)
    world.kill("learner-1")
    world.run_until(round=14)
    world.join("learner-1")
    world.learners["learner-2"].broken = True
    world.run_until(round=20)
    world.crash_syncer()
    world.run_until(round=26)
    whole = History(world.begun)
    for record in world.journal:
        whole.apply(record)
    for split in range(0, len(world.journal), 7):
        first = History(world.begun)
        for record in world.journal[:split]:
            first.apply(record)
        rest = History.restore(through_bytes(first.state()))
        for record in world.journal[split:]:
            rest.apply(record)
        assert rest.state() == whole.state(), f"split at {split}"


def test_a_state_that_was_taken_does_not_follow_what_comes_later() -> None:
    run = eventful()
    history = fold(run.records[:9])
    state = history.state()
    then = msgspec.msgpack.encode(state)
    for record in run.records[9:]:
        history.apply(record)
    assert msgspec.msgpack.encode(state) == then


def test_a_state_does_not_grow_with_the_rounds() -> None:
    run = Written().add(JoinedRecord("a", 1, "session", 0), StartedRecord("a"))
    sizes = []
    for number in range(400):
        run.round(share("a", 2 * number + 2, number // 2, tokens=16))
        if number % 50 == 0:
            run.add(CutDoneRecord(number, number, ("a",), "digest"))
        sizes.append(len(msgspec.msgpack.encode(run.history.state())))
    assert max(sizes[200:]) <= min(sizes[100:200]) + 40, "but for the digits of its numbers and a few cuts"


# ---- what each record does -------------------------------------------------------------------------------------------


def test_a_run_begins_once() -> None:
    with pytest.raises(AssertionError, match="a run begins once"):
        History(BEGUN).apply(BEGUN)


def test_before_the_first_parameters_there_is_no_version() -> None:
    history = History(BEGUN)
    assert (history.started, history.versions, history.committed) == (False, [-1, -1], 0)
    history.apply(StartedRecord("a"))
    assert (history.started, history.versions, history.committed) == (True, [0, 0], 0)


def test_a_round_makes_a_version_and_one_that_is_passed_over_does_not() -> None:
    run = Written().add(JoinedRecord("a", 1, "session", 0), StartedRecord("a")).round(share("a", 2, 0))
    run.add(PassedRecord(1, 1, "no quorum"))
    assert (run.history.versions, run.history.committed) == ([1, 0], 2)


def test_what_went_into_a_version_is_remembered_of_its_learner() -> None:
    run = Written().add(JoinedRecord("a", 1, "session", 0), StartedRecord("a")).round(share("a", 2, 0))
    life = run.history.lives["a"]
    assert (life.merged, life.t, life.total, life.open) == ([(1, 2, 16), (-1, 0, 0)], 2, 16, True)


def test_a_contribution_of_an_earlier_life_is_not_the_present_ones() -> None:
    run = Written().add(JoinedRecord("a", 1, "session", 0), StartedRecord("a"))
    run.add(GoneRecord("a", 1, 4, 32, (0, 0), (32, 32)), JoinedRecord("a", 2, "another", 0))
    run.round(share("a", 2, 0))
    life = run.history.lives["a"]
    assert (life.incarnation, life.merged[0], life.total) == (2, (-1, 0, 0), 0)
    assert run.history.ledger.totals().merged == (16, 0), "it is merged all the same"


def test_tokens_of_earlier_processes_add_up_and_those_of_the_same_go_on() -> None:
    run = Written().add(
        JoinedRecord("a", 1, "session", 0), StartedRecord("a"), GoneRecord("a", 1, 4, 32, (0, 0), (32, 32))
    )
    run.add(JoinedRecord("a", 2, "session", 4, origin=32))
    assert (run.history.lives["a"].before, run.history.lives["a"].total) == (0, 32), "the same process, another life"
    run.add(GoneRecord("a", 2, 9, 72, (0, 0), (40, 40)), JoinedRecord("a", 3, "another", 0))
    assert (run.history.lives["a"].before, run.history.lives["a"].total) == (72, 0)


def test_the_account_is_of_the_whole_run_through_processes_cuts_and_forks() -> None:
    run = Written().add(JoinedRecord("a", 1, "session", 0), StartedRecord("a"))
    run.round(share("a", 2, 0)).add(PassedRecord(1, 1, "0 of 1 contributions came"))
    run.add(GoneRecord("a", 1, 9, 72, (0, 0), (56, 72)), JoinedRecord("a", 2, "session", 9, origin=72))
    run.add(GoneRecord("a", 2, 10, 80, (0, 0), (8, 8)), JoinedRecord("a", 3, "another", 0))
    run.round(share("a", 4, 1, incarnation=3))
    fork = through_bytes(run.history.state()).begin_run("fork", "cut 3", term=1)
    for history in (run.history, History.restore(fork)):
        account = make_account(history)
        assert (account["round"], account["rounds"], account["fragments"]) == (3, 2, [[2, 32], [0, 0]])
        assert account["fates"]["a"]["steps"] == 10 + 4, "10 of the process that is gone, 4 of the present one"
        assert account["fates"]["a"]["rounds"] == 2 and account["fates"]["a"]["computed"] == 80 + 32
    assert make_account(run.history, {"a": 7})["fates"]["a"]["steps"] == 17, "it has said more since"
    older = msgspec.structs.replace(run.history.state(), merged_rounds=-1)
    assert History.restore(older).merged_rounds == 2, "as the versions tell it"


def test_one_that_is_gone_is_remembered_as_such() -> None:
    run = Written().add(
        JoinedRecord("a", 1, "session", 0), StartedRecord("a"), GoneRecord("a", 1, 4, 32, (0, 0), (32, 32))
    )
    life = run.history.lives["a"]
    assert (life.open, life.t, life.total) == (False, 4, 32)
    assert run.history.ledger.totals().lost == (32, 32)


def test_a_new_term_changes_the_term_alone_and_notes_what_it_found() -> None:
    run = eventful()
    state = run.history.state()
    began = [*state.began, (7, state.committed, tuple(state.versions))]
    before = msgspec.structs.replace(state, term=7, began=began)
    run.add(TermRecord(7, 0, "", run.history.committed))
    assert run.history.state() == before


def test_a_reset_concerns_the_numbers_alone() -> None:
    run = eventful()
    before = run.history.state()
    assert run.add(ResetRecord(0, "not finite")).history.state() == before


def test_only_a_few_cuts_are_remembered_the_newest_last() -> None:
    run = Written().add(*[CutDoneRecord(cut, cut, (), "digest") for cut in range(0, 200, 10)])
    assert run.history.cuts == list(range(120, 200, 10))


def test_changed_settings_hold_from_there_on_and_the_beginning_stays() -> None:
    history = fold([ChangedRecord(OTHER, {"lr": 0.3}, "quorum=2 outer_lr=0.3")])
    assert (history.settings, history.outer) == (OTHER, {"lr": 0.3})
    assert history.begun == BEGUN
    assert History.restore(through_bytes(history.state())).settings == OTHER


def test_an_end_is_announced_and_then_final() -> None:
    run = Written().add(EndedRecord("40 steps are done"))
    assert (run.history.ended, run.history.finished) == ("40 steps are done", False)
    run.add(EndedRecord("40 steps are done", final=True))
    assert (run.history.ended, run.history.finished) == ("40 steps are done", True)
    assert History.restore(through_bytes(run.history.state())).finished


def test_a_run_that_had_ended_is_opened_again_only_when_that_was_asked_for() -> None:
    run = Written().add(EndedRecord("40 steps are done", final=True), ChangedRecord(OTHER, {}, "quorum=2"))
    assert (run.history.ended, run.history.finished) == ("40 steps are done", True)
    run.add(ChangedRecord(OTHER, {}, "the run goes on", reopen=True))
    assert (run.history.ended, run.history.finished) == ("", False)


def test_leases_come_out_of_the_records_too() -> None:
    run = eventful()
    again = History.restore(through_bytes(run.history.state()))
    assert run.history.leases is not None and again.leases is not None
    assert again.leases.state() == run.history.leases.state()
    assert again.leases.next("c", 1, 64) == run.history.leases.next("c", 1, 64)


# ---- whose a name is -------------------------------------------------------------------------------------------------


def test_a_name_belongs_to_the_token_that_was_written_down_last_also_through_a_cut() -> None:
    run = Written().add(
        JoinedRecord("a", 1, "session", 0), OwnedRecord("a", "eu"), GoneRecord("a", 1, 4, 32, (0, 0), (32, 32))
    )
    assert run.history.owners == {"a": "eu"}, "a name that has left is still somebody's"
    run.add(JoinedRecord("a", 2, "another", 0), OwnedRecord("a", "us"))
    kept = History.restore(through_bytes(run.history.state()))
    assert kept.owners == fold(run.records).owners == {"a": "us"}


def test_a_cut_of_before_names_were_owned_is_nobodys() -> None:
    old = msgspec.to_builtins(Written().add(JoinedRecord("a", 1, "session", 0)).history.state())[:-1]
    assert History.restore(msgspec.convert(old, HistoryState)).owners == {}


def test_an_older_version_reads_a_cut_that_names_owners() -> None:
    class Older(msgspec.Struct, array_like=True):
        """The first fields are enough: what follows is passed over, as HistoryState has always had it."""

        begun: BegunRecord

    state = Written().add(JoinedRecord("a", 1, "session", 0), OwnedRecord("a", "eu")).history.state()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=Older).begun == BEGUN


def test_a_learner_has_the_number_that_its_name_ends_in_where_that_is_free() -> None:
    names = ["learner-3", "rack1-0", "rack2-0", "alice", "node-900"]
    assert list(number_learners(names, 4).values()) == [3, 0, 1, 2, 4]


@given(st.lists(st.from_regex(r"[ab](-[0-9]{1,2})?", fullmatch=True), unique=True), st.integers(1, 8))
def test_numbers_are_distinct_dense_enough_and_never_change(names: list[str], learners: int) -> None:
    numbers = number_learners(names, learners)
    assert len(set(numbers.values())) == len(names)
    assert all(number < max(learners, len(names)) for number in numbers.values())
    for so_far in range(len(names)):
        assert number_learners(names[:so_far], learners).items() <= numbers.items()


# ---- both ends of a rollback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "gone"), [(7, False), (8, False), (9, True), (11, True), (12, True), (13, False)])
def test_a_cut_between_both_ends_of_a_rollback_holds_what_was_rolled_back(cut: int, gone: bool) -> None:
    """Back to 8 rounds, behind 12. Cut n is taken behind n rounds: that of 8 holds what the run went back to."""
    history = History(BEGUN)
    history.rolled_back = [(2, 4), (8, 12)]
    assert history.is_rolled_back(cut) == gone


@pytest.mark.parametrize(("cuts", "good"), [((6, 8, 12), 8), ((6, 9, 12), 6), ((6, 13), 13)])
def test_the_good_cut_is_the_newest_that_no_rollback_took_back(cuts: tuple[int, ...], good: int) -> None:
    history = History(BEGUN)
    history.rolled_back = [(8, 12)]
    history.trend = msgspec.structs.replace(history.trend, good=20)
    for cut in cuts:
        history.apply(CutDoneRecord(cut, cut, ("a",), "manifest"))
    assert history.good_cut == good
