"""Synthetic tapes: the same each time, whole, and consistent enough to be followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.launch.replay.recording import ModelVersions, RecordedCopy, read_recording
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import AnyRecord, BegunRecord, GoneRecord, JoinedRecord, MergedRecord, TermRecord
from atoll.protocol.settings import Settings
from atoll.protocol.tape import StoppedEntry, TookEntry
from atoll.simulate.scenario import make_tape, parse_fault
from atoll.store.audit import JournalAudit
from atoll.store.journal import read_tape, write_tape


def a_tape(*faults: str, adopt: str = "overwrite", synchronous: bool = False) -> list[AnyRecord]:
    settings = Settings(
        learners=3,
        fragments=4,
        sync_every=8,
        overlap=1,
        steps=60,
        cut_every=0,
        adopt=adopt,  # type: ignore[arg-type]
        synchronous=synchronous,
    ).resolved(4)
    drawn = [parse_fault(text, 3) for text in faults]
    return make_tape(settings, step_s=[1.0, 1.5, 4.0], faults=drawn, latency_s=0.05)


FAULTS = ("kill:learner-1@20+10", "slow:learner-0@40+10", "crash@60+5", "leave:learner-2@5+20")


@pytest.mark.parametrize("adopt", ["overwrite", "carry"])
@pytest.mark.parametrize("synchronous", [False, True])
def test_every_part_can_be_played_in_its_order(adopt: str, synchronous: bool) -> None:
    score = read_recording(a_tape(*FAULTS, adopt=adopt, synchronous=synchronous))
    assert score.rounds >= 30
    copied = set()
    for part in score.parts:
        held, t = ModelVersions(), 0
        for act in part.acts():
            assert act.t >= t, "steps only go up"
            t = act.t
            if isinstance(act, RecordedCopy):
                assert held.is_base_of(act), f"{part.name}: {act}"
                copied.add((act.round, part.learner))
            else:
                held.take(act)
    wanted = {(d.round, share.learner) for d in score.decisions if isinstance(d, MergedRecord) for share in d.members}
    assert copied == wanted


def test_what_happened_is_on_it() -> None:
    lines = a_tape(*FAULTS)
    assert len([line for line in lines if isinstance(line, JoinedRecord) and line.learner == "learner-1"]) == 2
    assert any(isinstance(line, GoneRecord) and line.learner == "learner-2" for line in lines)
    score = read_recording(lines)
    entries = [entry for part in score.parts for entry in part.entries]
    assert any(isinstance(entry, TookEntry) and entry.ticket in score.lent for entry in entries), (
        "a newcomer was helped"
    )
    assert sum(isinstance(entry, StoppedEntry) for entry in entries) == 3, "whoever was there at the end was told"


def test_what_is_on_it_stands_up_to_verify() -> None:
    """A run under a tape takes its records over, all but those of terms."""
    begun, *lines = a_tape(*FAULTS)
    assert isinstance(begun, BegunRecord)
    audit = JournalAudit(begun)
    for line in lines:
        if not isinstance(line, TermRecord):
            audit.take_record(line)
    assert audit.history.finished and audit.history.step >= 60


def test_the_same_scenario_gives_the_same_tape(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tape(tmp_path / name, a_tape(*FAULTS))
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert read_tape(tmp_path / "one") == a_tape(*FAULTS)


def test_a_changed_or_torn_tape_is_refused_by_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.tape"
    write_tape(path, a_tape())
    whole = path.read_bytes()
    path.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    with pytest.raises(ConfigError, match=r"a\.tape is damaged at byte \d+, record \d+"):
        read_tape(path)
    path.write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match="is not a whole tape"):
        read_tape(path)
    path.write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"a\.tape"):
        read_tape(path)
    with pytest.raises(ConfigError, match="there is no tape"):
        read_tape(tmp_path / "nothing")


@pytest.mark.parametrize(
    "text", ["kill", "kill:learner-9@1+1", "melt:learner-0@1+1", "crash:learner-0@1+1", "kill@1+1"]
)
def test_a_fault_that_is_not_understood_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text.split("@")[0]):
        parse_fault(text, 3)
