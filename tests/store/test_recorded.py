"""A run that an earlier version wrote (recorded/record.py): today's code makes the same of it, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
from tests.store.recorded.record import JUDGED, NAMES, ROUNDS, judge_drawn_rounds, record_run

from atoll.protocol.records import MergedRecord
from atoll.store.disk import LocalDisk
from atoll.store.export import export_run
from atoll.store.journal import read
from atoll.store.verify import verify_run

RECORDED = Path(__file__).parent / "recorded"
EXPECTED: dict[str, Any] = json.loads((RECORDED / "expected.json").read_text())


def rounds_in(run: Path) -> list[MergedRecord]:
    records = [record for _, record in read(run / "journal", disk=LocalDisk())]
    return [record for record in records if isinstance(record, MergedRecord)]


def values_of(run: Path) -> dict[str, bytes]:
    """Return the model's values. Its file also names the head of the journal, which may be written otherwise today."""
    model = safetensors.numpy.load_file(run / "model.safetensors")
    return {name: values.tobytes() for name, values in model.items()}


def test_its_files_alone_say_that_it_is_well_and_rebuild_its_model(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "run", tmp_path / "run")
    report = verify_run(tmp_path / "run")
    assert report.ok and report.facts["rounds"] == ROUNDS, report.problem
    model = values_of(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()
    export_run(tmp_path / "run", tmp_path / "rebuilt.safetensors")
    rebuilt = safetensors.numpy.load_file(tmp_path / "rebuilt.safetensors")
    assert {name: values.tobytes() for name, values in rebuilt.items()} == model


def test_the_same_contributions_make_the_same_records_and_the_same_model(tmp_path: Path) -> None:
    """Also what the filter left out of each round."""
    earlier = rounds_in(RECORDED / "run")
    left_out = [{share.learner for share in record.members if share.factors} for record in earlier]
    assert len(earlier) == ROUNDS and all(NAMES[-1] in names for names in left_out), "the attacker, in each round"
    record_run(tmp_path / "again")
    assert rounds_in(tmp_path / "again") == earlier
    assert values_of(tmp_path / "again") == values_of(RECORDED / "run")


@pytest.mark.parametrize("members", JUDGED)
def test_the_filter_judges_as_before_up_to_64_members(members: int) -> None:
    assert judge_drawn_rounds(members) == EXPECTED["verdicts"][str(members)]
