"""Tapes drawn from the goodput model: their absences, their goodput beside the model's, the file, the command."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.estimate.chips import TimeSpan
from atoll.estimate.drawn_tape import draw_tape, list_absences
from atoll.estimate.goodput import Job, run
from atoll.estimate.profile import Profile, load, with_values
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import (
    AnyRecord,
    BegunRecord,
    ChangedRecord,
    DrawnRecord,
    JoinedRecord,
    MergedRecord,
    PlayedRecord,
    TermRecord,
)
from atoll.protocol.tape import TookEntry
from atoll.store.audit import JournalAudit
from atoll.store.journal import read_tape, write_tape

PAPER = with_values(load("paper"), {"rules.fragments": 2})
"""A round in twelve steps: goodput does not depend on rounds, and they take most of the time here."""
OFTEN = with_values(PAPER, {"elasticity.down_s": 2, "elasticity.up_s": 2})
"""With many small losses instead of few large ones, fewer tapes make a mean."""
WHOLE = with_values(PAPER, {"slices": 2})
"""Of two learners each is one slice: a failure takes it away."""


def draw(profile: Profile = PAPER, *, chips: int = 300_000, steps: int = 60, seed: int = 0) -> list[AnyRecord]:
    return draw_tape("paper", profile, learners=2, chips=chips, steps=steps, seed=seed)


def head(lines: list[AnyRecord]) -> DrawnRecord:
    assert isinstance(lines[1], DrawnRecord)
    return lines[1]


@settings(deadline=None, max_examples=12)
@given(seed=st.integers(0, 2**32), chips=st.sampled_from([2_000, 150_000, 600_000]), slices=st.sampled_from([2, 64]))
def test_absences_are_what_the_goodput_leaves_over(seed: int, chips: int, slices: int) -> None:
    drawn = head(draw(with_values(PAPER, {"slices": slices}), chips=chips, steps=40, seed=seed))
    ends = {"learner-0": 0, "learner-1": 0}
    for one in drawn.absences:
        assert one.tick >= ends[one.learner] and one.ticks >= 1 and one.reason, "in order, and none in another"
        ends[one.learner] = one.tick + one.ticks + 1  # two in a row would be one
        assert one.tick + one.ticks <= drawn.ticks
    assert drawn.possible_steps == 2 * drawn.ticks
    assert drawn.steps / drawn.possible_steps == pytest.approx(drawn.goodput, abs=1.5 / drawn.ticks)


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 2**32))
def test_a_seed_says_everything(seed: int) -> None:
    assert draw(WHOLE, seed=seed) == draw(WHOLE, seed=seed) != draw(WHOLE, seed=seed + 1)


@pytest.mark.parametrize(
    ("profile", "learners", "chips", "seeds"),
    [
        (OFTEN, 2, 4_000_000, 12),
        pytest.param(PAPER, 8, 1_200_000, 24, marks=pytest.mark.faults),
        pytest.param(PAPER, 8, 150_000, 8, marks=pytest.mark.faults),
        pytest.param(PAPER, 4, 2_400_000, 24, marks=pytest.mark.faults),
    ],
)
def test_the_mean_goodput_of_many_tapes_is_the_models(profile: Profile, learners: int, chips: int, seeds: int) -> None:
    tapes = [
        head(draw_tape("", profile, learners=learners, chips=chips, steps=250, seed=seed)) for seed in range(seeds)
    ]
    model = fmean(run(Job(profile, "decoupled", learners, chips, seed, 24.0, 0)).tally.goodput for seed in range(4))
    assert fmean(drawn.goodput for drawn in tapes) == pytest.approx(model, abs=0.01)
    assert fmean(drawn.steps / drawn.possible_steps for drawn in tapes) == pytest.approx(model, abs=0.01)


def test_a_learner_that_lost_all_its_slices_is_another_process_when_it_comes_back_and_recovers() -> None:
    lines = draw(WHOLE, chips=60_000, steps=100)
    gone = [one for one in head(lines).absences if one.reason == "gone"]
    joined = [line for line in lines if isinstance(line, JoinedRecord)]
    assert gone and len(joined) > 2
    entries = [entry for line in lines if isinstance(line, PlayedRecord) for one in line.tapes for entry in one.entries]
    assert any(isinstance(entry, TookEntry) for entry in entries), "a peer's state is in place"


def test_a_drawn_tape_is_read_as_it_was_written_and_stands_up_to_verify(tmp_path: Path) -> None:
    lines = draw(WHOLE, chips=60_000)
    write_tape(tmp_path / "a.tape", lines)
    assert read_tape(tmp_path / "a.tape") == lines
    begun, *rest = lines
    assert isinstance(begun, BegunRecord)
    audit = JournalAudit(begun)
    for line in rest:
        if not isinstance(line, TermRecord):
            audit.take_record(line)
    assert audit.history.finished


def test_a_warm_start_changes_the_rounds_of_a_drawn_tape_and_none_of_its_failures() -> None:
    plain = draw(OFTEN, steps=60)
    warm = draw_tape("paper", OFTEN, learners=2, chips=300_000, steps=60, seed=0, warm_start=0.5)
    assert head(warm).absences == head(plain).absences
    changes = [line for line in warm if isinstance(line, ChangedRecord)]
    assert [line.settings.sync_every for line in changes] == [2, 24]
    early = [sum(isinstance(line, MergedRecord) and line.progress < 0.5 for line in lines) for lines in (warm, plain)]
    assert early[0] > 5 * early[1] > 0


def test_a_changed_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    write_tape(path, draw())
    whole = path.read_bytes()
    at = whole.index(b"not its authors' values")
    path.write_bytes(whole[:at] + b"now" + whole[at + 3 :])
    with pytest.raises(ConfigError, match=r"a\.tape is damaged at byte \d+, record 2"):
        read_tape(path)


def spans(*lengths: tuple[float, str]) -> list[TimeSpan]:
    found, now = [], 0.0
    for length, kind in lengths:
        share = {"stepping": 1.0, "fewer": 0.5}.get(kind, 0.0)
        found.append(TimeSpan(now, now + length, "stepping" if share else kind, share))  # type: ignore[arg-type]
        now += length
    return found


def test_ticks_without_a_step_are_told_with_what_took_them() -> None:
    life = spans((20, "stepping"), (13, "scaling down"), (17, "stepping"), (20, "fewer"), (30, "stepping"))
    ends = [10, 20, 43, 63, 73, 83, 93]
    found = [(one.tick, one.ticks, one.reason) for one in list_absences("learner-0", ends, life, 10, 10.0)]
    assert found == [(2, 1, "scaling down"), (4, 1, "missing slices"), (9, 1, "slow steps")]
    assert not list_absences("learner-0", [6, 14, 31, 38], [], 3, 10.0)[1:], "two in a tick: one counts in the next"


def test_too_few_chips_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 chips are too few for 2 learners"):
        draw(chips=1)
    with pytest.raises(ConfigError, match="--steps 0: a tape needs an end"):
        draw(steps=0)
