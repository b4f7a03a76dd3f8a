"""Where the copies of a round stand in a part, and which process is whose."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.launch.replay.recording import LOST, ProcessRecording, RecordedCopy, decisions_after, read_recording
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History
from atoll.protocol.records import (
    BegunRecord,
    ChangedRecord,
    JoinedRecord,
    LentRecord,
    MergedRecord,
    PassedRecord,
    PlayedRecord,
    ResetRecord,
    Share,
    StartedRecord,
    Stretch,
    TermRecord,
)
from atoll.protocol.settings import Settings
from atoll.protocol.tape import AdoptedEntry, AnyEntry, BeganEntry, ForgotEntry, InformedEntry, MarkedEntry, OwnedEntry

BEGUN = BegunRecord("run", Settings(learners=2, fragments=2, sync_every=2), {}, (), "plan")
BEGAN = BeganEntry(0, 1, "2.13", "DEFAULT", "cpu", False)


def played(learner: str, incarnation: int, first: int, *entries: AnyEntry) -> PlayedRecord:
    return PlayedRecord((Stretch(learner, incarnation, first, entries),))


def part(*entries: object, copies: list[RecordedCopy]) -> ProcessRecording:
    return ProcessRecording("a", "session", 1, list(entries), copies)  # type: ignore[arg-type]


def test_a_copy_stands_behind_the_adoption_that_gave_it_its_base() -> None:
    adopted, copy = AdoptedEntry(3, 0, 7), RecordedCopy(3, 10, 0, base=7, steps=1)
    assert part(adopted, copies=[copy]).acts() == [adopted, copy]


def test_and_before_the_one_that_took_its_base_away() -> None:
    first, second, copy = AdoptedEntry(1, 0, 7), AdoptedEntry(3, 0, 8), RecordedCopy(3, 10, 0, base=7, steps=2)
    assert part(first, second, copies=[copy]).acts() == [first, copy, second]


def test_and_before_all_else_of_its_step_where_its_base_is_there() -> None:
    first, others = AdoptedEntry(1, 0, 7), [AdoptedEntry(3, 1, 8), InformedEntry(3, 5)]
    copy = RecordedCopy(3, 10, 0, base=7, steps=2)
    assert part(first, *others, copies=[copy]).acts() == [first, copy, *others]


def test_learners_that_adopt_the_last_rounds_in_different_orders_do_not_wait_for_each_other() -> None:
    """At the end all fragments are copied at the same step, and each learner takes their versions as they come."""
    copies = [RecordedCopy(5, 10, 0, base=0, steps=5), RecordedCopy(5, 11, 1, base=0, steps=5)]
    versions = [AdoptedEntry(5, 0, 1), AdoptedEntry(5, 1, 1)]
    for order in (versions, versions[::-1]):
        assert part(OwnedEntry(0), *order, copies=copies).acts() == [OwnedEntry(0), *copies, *order]


def test_the_first_parameters_are_a_base_of_every_fragment() -> None:
    owned, adopted, copy = OwnedEntry(0), AdoptedEntry(2, 1, 1), RecordedCopy(2, 1, 1, base=0, steps=2)
    assert part(BEGAN, owned, adopted, copies=[copy]).acts() == [BEGAN, owned, copy, adopted]


def test_copies_are_made_before_everything_is_forgotten() -> None:
    adopted, forgot, copy = AdoptedEntry(1, 0, 7), ForgotEntry(4, True), RecordedCopy(4, 9, 0, base=7, steps=3)
    assert part(adopted, forgot, copies=[copy]).acts() == [adopted, copy, forgot]


def test_after_a_cut_only_what_came_behind_its_mark_is_played() -> None:
    entries = [AdoptedEntry(1, 0, 7), MarkedEntry(4, 20), AdoptedEntry(4, 1, 7), AdoptedEntry(6, 0, 8)]
    copies = [RecordedCopy(3, 9, 0, 7, 2), RecordedCopy(4, 10, 1, 7, 1), RecordedCopy(6, 11, 0, 7, 5)]
    acts = part(*entries, copies=copies).acts(after=20)
    lost = replace(copies[2], feedback=LOST)
    assert acts == [entries[2], copies[1], lost, entries[3]], "what round 9 left out is not made again"


def test_what_a_copy_left_out_goes_with_the_next_one_that_was_merged() -> None:
    entries = [AdoptedEntry(1, 0, 7), AdoptedEntry(4, 0, 8), ForgotEntry(7, False), AdoptedEntry(7, 0, 10)]
    copies = [RecordedCopy(3, 10, 0, 7, 2), RecordedCopy(3, 11, 1, 0, 3), RecordedCopy(6, 14, 0, 8, 2)]
    after = [RecordedCopy(9, 18, 0, 10, 2), RecordedCopy(11, 22, 0, 12, 2, rollbacks=1)]
    acts = part(OwnedEntry(0), *entries, copies=[*copies, *after]).acts()
    found = {act.round: act.feedback for act in acts if isinstance(act, RecordedCopy)}
    assert found == {10: -1, 11: -1, 14: 10, 18: -1, 22: -1}, "none after it forgot, and none across a rollback"


def test_after_a_cut_it_knows_of_the_run_what_it_knew_at_the_mark() -> None:
    """Its first step behind the cut went by it, and the state it saved does not hold it."""
    first, known, later = InformedEntry(1, 5, 0.1, 7), InformedEntry(3, 9, 0.3, 11), InformedEntry(6, 12, 0.4, 15)
    assert part(first, known, MarkedEntry(4, 20), later, copies=[]).acts(after=20) == [known, later]
    assert part(first, known, MarkedEntry(4, 20), copies=[]).acts(after=20) == [], "nothing is left to be played"


def test_a_journal_becomes_a_score() -> None:
    share = Share("a", 1, 2, 2, 20, 200.0, 0)
    merged = MergedRecord(0, 0, 1, 1, "all", (share,), "digest")
    score = read_recording(
        [
            BEGUN,
            JoinedRecord("a", 1, "one", 0),
            JoinedRecord("b", 1, "two", 0),
            played("a", 1, 0, BEGAN, OwnedEntry(0)),
            StartedRecord("a"),
            merged,
            LentRecord("ticket", "a", 1, 2),
            JoinedRecord("a", 2, "one", 2),
            JoinedRecord("b", 2, "three", 0),
            played("a", 2, 2, ForgotEntry(2, True)),
            PassedRecord(1, 1, "nobody", 0.25, 2.5),
        ]
    )
    assert [(one.learner, one.number, one.joined_at) for one in score.parts] == [("a", 1, 0), ("b", 1, 0), ("b", 2, 1)]
    assert score.parts[0].entries == [BEGAN, OwnedEntry(0), ForgotEntry(2, True)], "one process, two incarnations"
    assert score.parts[0].copies == [RecordedCopy(2, 0, 0, 0, 2)]
    assert score.lent == {"ticket": (score.parts[0], 2)}
    assert (score.rounds, len(score.decisions)) == (2, 3)
    assert (score.progress[2], score.global_steps[2]) == (0.25, 2), "what learners were told with that round"


def test_a_run_made_of_a_cut_is_told_what_the_cut_knows_of_its_progress() -> None:
    history = History(BEGUN)
    for record in (StartedRecord("a"), PassedRecord(0, 0, "nobody", 0.125, 1.5)):
        history.apply(record)
    score = read_recording([BEGUN, PassedRecord(1, 1, "nobody", 0.25, 2.5)])
    score.begin_at(history)
    assert score.progress == {1: 0.125, 2: 0.25} and score.global_steps == {1: 1, 2: 2}


def test_a_process_that_goes_on_from_another_run_is_refused_with_the_name_of_that_run() -> None:
    made = replace(BEGUN, parent="abcd1234 cut 6")
    merged = MergedRecord(0, 0, 1, 1, "all", (Share("a", 1, 2, 2, 20, 200.0, 0),), "digest")
    for first in (merged, played("a", 1, 0, BEGAN), LentRecord("ticket", "a", 1, 2)):
        with pytest.raises(ConfigError, match="a went on in this run as the process that it was in abcd1234 cut 6"):
            read_recording([made, first])


def test_a_learner_has_the_number_that_it_had_in_the_run() -> None:
    joined = [JoinedRecord("b", 1, "one", 0), JoinedRecord("a", 1, "two", 0), JoinedRecord("b", 2, "three", 0)]
    score = read_recording([BEGUN, *joined])
    assert [(part.learner, part.index) for part in score.parts] == [("b", 0), ("a", 1), ("b", 0)]
    named = read_recording([BEGUN, JoinedRecord("learner-1", 1, "one", 0), JoinedRecord("learner-0", 1, "two", 0)])
    assert [part.index for part in named.parts] == [1, 0]
    before = History(BEGUN)
    for name in ("z", "a"):
        before.apply(JoinedRecord(name, 1, "earlier", 0))
    score.begin_at(before)
    assert [(part.learner, part.index) for part in score.parts] == [("b", 2), ("a", 1), ("b", 2)]


def test_it_is_known_whether_a_script_makes_the_first_parameters_again() -> None:
    """A process that is restarted before training begins adopts version 0 like all others: nobody goes on with it."""
    joined = [JoinedRecord("a", 1, "one", 0), JoinedRecord("a", 2, "two", 0)]
    assert read_recording([BEGUN, *joined, played("a", 1, 0, BEGAN, OwnedEntry(0))]).has_first_parameters
    restarted = [*joined, StartedRecord("a"), played("a", 2, 0, BEGAN, AdoptedEntry(0, 0, 0))]
    assert not read_recording([BEGUN, *restarted]).has_first_parameters


def test_what_is_missing_of_a_tape_is_known() -> None:
    score = read_recording(
        [BEGUN, JoinedRecord("a", 1, "one", 0), played("a", 1, 0, BEGAN), played("a", 1, 4, OwnedEntry(0))]
    )
    assert score.parts[0].missing == "its tape lacks entries 1 to 3"
    assert score.parts[0].entries == [BEGAN]


def test_what_was_decided_between_a_cut_and_its_next_round_is_played_too() -> None:
    """A setting that changed there would otherwise be the old one for all that follows."""
    started, first, second = StartedRecord("a"), PassedRecord(9, 0, "no quorum"), PassedRecord(10, 1, "no quorum")
    changed, reset = ChangedRecord(BEGUN.settings, {"outer_lr": 0.1}, "outer_lr"), ResetRecord(1, "overflow")
    terms = [TermRecord(number, 0, "", 0) for number in (1, 2, 3)]
    decisions = [terms[0], started, changed, first, terms[1], reset, changed, terms[2], second]
    assert decisions_after(decisions, committed=10, term=2) == [reset, changed, terms[2], second]
    assert decisions_after(decisions, committed=9, term=1) == decisions[2:]
    assert decisions_after(decisions, committed=11, term=3) == []
