"""Records judged in their order: worlds full of faults keep every rule, and each rule can be seen to be broken."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.protocol.test_campaign import a_world, some_faults
from tests.protocol.world import World

from atoll.protocol.history import History
from atoll.protocol.records import (
    AlarmedRecord,
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    CutDoneRecord,
    EndedRecord,
    GoneRecord,
    GrantedRecord,
    JoinedRecord,
    MergedRecord,
    PassedRecord,
    ResetRecord,
    Share,
    SourcesRecord,
    StartedRecord,
    TermRecord,
)
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.store.audit import JournalAudit
from atoll.store.audit_members import BadRun, MemberAudit
from atoll.store.cuts import CutState
from atoll.store.journal import ORIGIN

SETTINGS = Settings(fragments=2, sync_every=4)
BEGUN = BegunRecord("run", SETTINGS, {}, (), "plan")
START = (JoinedRecord("a", 1, "s1", 0), StartedRecord("a"))


def audited(*records: AnyRecord) -> JournalAudit:
    audit = JournalAudit(BEGUN)
    for record in records:
        audit.take_record(record)
    return audit


def share(**changes: Any) -> Share:
    """Twenty tokens in two steps, all it has trained on."""
    given = Share("a", 1, 2, 2, 20, 200.0, 0, total=20, limit=2.0)
    return replace(given, **changes)


def merged(round: int = 0, *members: Share, **changes: Any) -> MergedRecord:
    record = MergedRecord(round, round % 2, round // 2 + 1, 1, "every live learner reported", members or (share(),), "")
    return replace(record, **changes)


def gone(**changes: Any) -> GoneRecord:
    """With twenty tokens, in no version."""
    return replace(GoneRecord("a", 1, 2, 20, dropped=(0, 0), lost=(20, 20)), **changes)


def test_an_alarm_of_the_ledger_is_found_again_in_the_records() -> None:
    quiet = audited(*START)
    quiet.check_alarms()
    alarmed = audited(*START, AlarmedRecord("a", 1, "a (incarnation 1), fragment 0: 24 tokens computed, but …"))
    alarmed.check_totals()
    with pytest.raises(BadRun, match=r"the ledger does not balance: a \(incarnation 1\), fragment 0: 24 tokens"):
        alarmed.check_alarms()
    with pytest.raises(BadRun, match=r"\(1 more like it\)"):
        audited(*START, AlarmedRecord("a", 1, "x"), AlarmedRecord("a", 1, "y")).check_alarms()


# ---- what syncers write --------------------------------------------------------------------------------------------


def test_in_worlds_full_of_faults_nothing_is_wrong_and_cuts_hold_what_the_records_give() -> None:
    records = cuts = 0
    for seed in range(12):
        world, dice = a_world(seed)
        some_faults(world, dice)
        world.run_until(seconds=120)
        audit = JournalAudit(world.begun)
        for _, effect in world.log:
            if isinstance(effect, fx.Persist):
                for record in effect.records:
                    audit.take_record(record)
                    records += 1
            elif isinstance(effect, fx.TakeCut):
                audit.check_cut(CutState(effect.history, ORIGIN, 0, tuple(audit.rounds)))
                cuts += 1
        audit.check_totals()
    assert records > 300 and cuts > 10


def test_over_a_syncer_that_is_killed_again_and_again_nothing_is_wrong() -> None:
    world = World(3, fragments=3, sync_every=6, latency_s=0.1, quorum=2, jitter=1.0, steps=60)
    for at in (5.0, 11.0, 23.0, 29.0):
        world.at(at, world.crash_syncer)
    world.run_to_end()
    audit = JournalAudit(world.begun)
    for record in world.journal:
        audit.take_record(record)
    audit.check_totals()
    assert audit.history.finished and audit.members.contributions > 30


# ---- a contribution under way when its learner is gone ---------------------------------------------------------------


def test_a_contribution_may_be_merged_after_its_learner_is_gone() -> None:
    audit = audited(*START, gone(), merged())
    totals = audit.compute_totals()
    assert (totals.merged, totals.lost) == ((20, 0), (0, 20))
    audit.check_totals()


def test_it_is_in_a_round_that_was_under_way_and_in_no_later_one() -> None:
    late = merged(2, share())
    with pytest.raises(BadRun, match=r"round 2: a \(incarnation 1\) is a member, but it was over before"):
        audited(*START, gone(), PassedRecord(0, 0, ""), PassedRecord(1, 1, ""), replace(late, version=1))


def test_it_gave_no_more_than_it_was_closed_with() -> None:
    with pytest.raises(BadRun, match=r"was closed at 20 tokens, but gave at 30"):
        audited(*START, gone(), merged(0, share(total=30)))


def test_what_it_gave_was_not_issued_again() -> None:
    data = (SourcesRecord((("text", 100, 1.0),), 0), GrantedRecord(0, 0, 0, 0, 50, "a", 1))
    audited(*START, *data, gone(again_from=8), merged(0, share(position=8)))
    with pytest.raises(BadRun, match=r"merged up to sample 9 of its leases, but those from 8 on were issued again"):
        audited(*START, *data, gone(again_from=8), merged(0, share(position=9)))


def test_what_came_back_may_be_issued_again_first_of_all() -> None:
    data = (SourcesRecord((("text", 100, 1.0),), 0), GrantedRecord(0, 0, 0, 0, 50, "a", 1))
    again = (JoinedRecord("a", 2, "s2", 0), GrantedRecord(1, 0, 0, 8, 50, "a", 2))
    audited(*START, *data, gone(again_from=8), *again, GrantedRecord(2, 0, 0, 50, 60, "a", 2))
    with pytest.raises(BadRun, match=r"lease 1 \(samples 0 to 8 .*\) is issued twice"):
        audited(*START, *data, gone(again_from=8), again[0], GrantedRecord(1, 0, 0, 0, 8, "a", 2))
    with pytest.raises(BadRun, match=r"lease 1 \(samples 50 to 60 .*\) is granted, but lease 1 \(samples 8 to 18"):
        audited(*START, *data, gone(again_from=8), again[0], GrantedRecord(1, 0, 0, 50, 60, "a", 2))


def test_behind_a_cut_that_is_the_oldest_one_it_may_be_of_somebody_nobody_knows() -> None:
    """learner a was over before the cut; its contribution was under way."""
    before = audited(*START, gone())
    cut = CutState(before.history.state(), ORIGIN, 0, tuple(before.rounds))
    late = JournalAudit.restore_from_cut(cut, under_way=True)
    late.take_record(merged())
    late.check_totals()
    with pytest.raises(BadRun, match="it was over before"):
        JournalAudit.restore_from_cut(cut, under_way=False).take_record(merged())
    with pytest.raises(BadRun, match="it never joined"):
        JournalAudit.restore_from_cut(cut, under_way=True).take_record(merged(0, share(learner="b")))
    late.take_record(PassedRecord(1, 1, ""))
    with pytest.raises(BadRun, match="it was over before"):
        late.take_record(merged(2, share(t=4, base=1)))


def test_entries_are_kept_only_while_they_may_matter() -> None:
    audit = audited(*START)
    for number in range(40):
        life = 2 * number + 1
        audit.take_record(gone(incarnation=life, total=0, lost=(0, 0)))
        audit.take_record(JoinedRecord("a", life + 1, f"s{life}", 0))
        audit.take_record(gone(incarnation=life + 1, total=0, lost=(0, 0)))
        audit.take_record(JoinedRecord("a", life + 2, f"t{life}", 0))
        audit.take_record(PassedRecord(number, number % 2, ""))
    assert audit.members.incarnations == 81
    assert len(audit.members._known) <= 1 + 2 * 2, "the open one, and those of the last P rounds"


def test_sums_that_differ_from_those_of_the_members_are_told() -> None:
    audit = audited(*START, merged())
    audit.check_totals()
    audit.members.merged[0] += 1
    with pytest.raises(BadRun, match=r"the ledger says \(20, 0\) tokens are merged, the members make \[21, 0\]"):
        audit.check_totals()


# ---- what no syncer writes -------------------------------------------------------------------------------------------

OTHER_SETTINGS = Settings(fragments=1, sync_every=4)
BUDGET = Settings(fragments=2, sync_every=4, steps=10)

WRONG: list[tuple[str, tuple[AnyRecord, ...], str]] = [
    ("the run begins again", (*START, BEGUN), r"begins a second time"),
    ("it starts again", (*START, StartedRecord("b")), r"starts a second time, from b"),
    ("a term goes back", (TermRecord(3, 0, "", 0), TermRecord(2, 0, "", 0)), r"term 2 follows term 3"),
    ("a term goes on elsewhere", (*START, merged(), TermRecord(2, 0, "", 0)), r"goes on from round 0, not 1"),
    ("a round before version 0", (START[0], merged()), r"round 0 comes before version 0"),
    ("a round after the end", (*START, EndedRecord("", True), merged()), r"round 0 comes after the end"),
    ("a round twice", (*START, PassedRecord(0, 0, ""), PassedRecord(0, 0, "")), r"round 0 comes where round 1 is due"),
    ("another fragment's turn", (*START, PassedRecord(0, 1, "")), r"takes fragment 1, its turn is fragment 0"),
    (
        "the step falls",
        (*START, merged(step=2.5), PassedRecord(1, 1, "", step=2.0)),
        r"round 1 is at step 2 of the run, after",
    ),
    ("a step that is none", (*START, merged(step=float("nan"))), r"round 0 is at step nan of the run, after step 0"),
    (
        "the end goes back",
        (*START, merged(step=2.5), EndedRecord("", step=2.0)),
        r"the end is at step 2 of the run, after",
    ),
    (
        "a progress that its step does not make",
        (*START, ChangedRecord(BUDGET, {}, ""), merged(step=5.0, progress=0.25)),
        r"round 0 has a progress of 0.25 at step 5.0 of 10",
    ),
    (
        "a progress beyond the end",
        (*START, ChangedRecord(BUDGET, {}, ""), merged(step=5.0, progress=1.5)),
        r"round 0 has a progress of 1.5 at step 5.0 of 10",
    ),
    ("nobody is a member", (*START, replace(merged(), members=())), r"round 0 is merged from nothing"),
    ("a fragment that is not there", (*START, ResetRecord(2, "")), r"fragment 2 is reset, the run has 2"),
    ("other fragments", (*START, ChangedRecord(OTHER_SETTINGS, {}, "")), r"cannot change: 2 became 1"),
    ("no outer settings", (*START, ChangedRecord(SETTINGS, {"lr": -1.0}, "")), r"changed to what cannot be"),
    ("a cut of the future", (*START, CutDoneRecord(1, 1, (), "")), r"cut 1 is done after cut -1, with 0 rounds"),
    ("a life again", (*START, gone(), JoinedRecord("a", 1, "s2", 0)), r"a \(incarnation 1\) joins after incarnation 1"),
    ("two lives at once", (*START, JoinedRecord("a", 2, "s2", 0)), r"joins while incarnation 1 is not over"),
    ("gone twice", (*START, gone(), gone()), r"a \(incarnation 1\) is gone, but it was over before"),
    ("gone without a life", (*START, gone(learner="b")), r"b \(incarnation 1\) is gone, but it never joined"),
    ("gone with less", (*START, merged(), gone(total=10)), r"gone with 10 tokens, but a contribution told of 20"),
    ("gone in three parts", (*START, gone(lost=(20, 20, 20))), r"the fates of 3 fragments, the run has 2"),
    ("a negative fate", (*START, gone(lost=(21, 20), dropped=(-1, 0))), r"0 merged \+ -1 dropped \+ 21 lost"),
    ("an unnumbered dataset", (*START, SourcesRecord((("x", 0, 1.0),), 0)), r"dataset 'x' has 0 samples"),
    ("data named twice", (*START, *[SourcesRecord((("x", 9, 1.0),), 0)] * 2), r"named a second time"),
    ("a lease of nothing", (*START, GrantedRecord(0, 0, 0, 0, 9, "a", 1)), r"no record names the data"),
    (
        "a lease to nobody",
        (*START, SourcesRecord((("x", 9, 1.0),), 0), GrantedRecord(0, 0, 0, 0, 9, "b", 1)),
        r"granted to b \(incarnation 1\), which is not there",
    ),
    (
        "an empty lease",
        (*START, SourcesRecord((("x", 9, 1.0),), 0), GrantedRecord(0, 0, 0, 4, 4, "a", 1)),
        r"is of no dataset of the run, or empty",
    ),
    (
        "a lease behind the last pass",
        (
            *START,
            SourcesRecord((("x", 9, 1.0),), 1),
            GrantedRecord(0, 0, 0, 0, 9, "a", 1),
            GrantedRecord(1, 0, 1, 0, 9, "a", 1),
        ),
        r"is granted, but nothing is due",
    ),
    ("samples without data", (*START, merged(0, share(position=3))), r"round 0: samples are merged that nobody leased"),
]


@pytest.mark.parametrize(("records", "words"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_it_is_said_what_is_wrong_with(records: tuple[AnyRecord, ...], words: str) -> None:
    *before, last = records
    audit = audited(*before)
    with pytest.raises(BadRun, match=words):
        audit.take_record(last)


def test_a_run_has_fragments() -> None:
    with pytest.raises(BadRun, match="the run begins with 0 fragments"):
        JournalAudit(replace(BEGUN, settings=Settings()))


def test_a_record_that_the_rules_here_let_pass_and_the_fold_refuses_is_wrong_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: History, record: AnyRecord) -> None:
        raise AssertionError("never before seen")

    audit = audited(*START)
    monkeypatch.setattr(History, "apply", refuse)
    with pytest.raises(BadRun, match="PassedRecord cannot follow the records before it: never before seen"):
        audit.take_record(PassedRecord(0, 0, ""))


STEPS = {"a": 5, "b": 5, "c": 544}
BACK = [Share(name, 1, 600, steps, 8 * steps, 64.0 * steps, 0, 8 * steps) for name, steps in STEPS.items()]
"""One that was cut off for a while gives all that it trained on."""


@pytest.mark.parametrize(
    ("weights", "limit", "wrong"),
    [
        ((320.0, 320.0, 640.0), 2.0, ""),
        ((320.0, 320.0, 320.0), 1.0, ""),
        ((320.0, 320.0, 2560.0), 8.0, "c (incarnation 1) may weigh 8 times the others, allowed are 2"),
        ((320.0, 320.0, 34816.0), 0.0, "c (incarnation 1) may weigh 0 times the others, allowed are 2"),
        ((320.0, 320.0, 34816.0), 2.0, "4352 tokens in 544 steps weigh 34816.0, or 640.0 within the limit"),
        ((320.0, 320.0, 641.0), 2.0, "c (incarnation 1) weighs 641.0, but 4352 tokens in 544 steps weigh 34816.0"),
        ((319.0, 320.0, 640.0), 2.0, "a (incarnation 1) weighs 319.0, but 40 tokens in 5 steps weigh 320.0"),
    ],
)
def test_a_weight_is_what_its_limit_leaves_and_the_limit_what_the_run_allows(
    weights: tuple[float, ...], limit: float, wrong: str
) -> None:
    tallies = MemberAudit(2)
    for share in BACK:
        tallies.check_join(JoinedRecord(share.learner, 1, share.learner, 0))
    limits = (2.0, 2.0, limit)
    weighed = zip(BACK, weights, limits, strict=True)
    members = tuple(replace(share, weight=weight, limit=most) for share, weight, most in weighed)
    record = MergedRecord(0, 0, 1, 1, "all reported", members, "digest")
    if not wrong:
        tallies.check_members(record, Settings())
        return
    with pytest.raises(BadRun) as caught:
        tallies.check_members(record, Settings())
    assert wrong in str(caught.value)
