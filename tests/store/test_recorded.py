"""A run that an earlier version wrote (recorded/record.py): today's code makes the same of it, to the bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.numpy
from tests.store.recorded.record import JUDGED, NAMES, ROUNDS, judge_drawn_rounds, record_run

from atoll.protocol.records import MergedRecord
from atoll.store.disk import LocalDisk
from atoll.store.export import export_run
from atoll.store.journal import read
from atoll.store.verify import verify_run

RECORDED = Path(__file__).parent / "recorded"
VERDICTS: dict[str, str] = json.loads((RECORDED / "verdicts.json").read_text())


def rounds_in(run: Path) -> list[MergedRecord]:
    records = [record for _, record in read(run / "journal", disk=LocalDisk())]
    return [record for record in records if isinstance(record, MergedRecord)]


def tensors_in(model: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in safetensors.numpy.load_file(model).items()}


def test_its_files_alone_say_that_it_is_well_and_rebuild_its_model(tmp_path: Path) -> None:
    shutil.copytree(RECORDED / "run", tmp_path / "run")
    report = verify_run(tmp_path / "run")
    assert report.ok and report.facts["rounds"] == ROUNDS, report.problem
    (tmp_path / "run" / "model.safetensors").unlink()
    export_run(tmp_path / "run", tmp_path / "rebuilt.safetensors")
    assert tensors_in(tmp_path / "rebuilt.safetensors") == tensors_in(RECORDED / "run" / "model.safetensors")


def test_the_same_contributions_make_the_same_records_and_the_same_model(tmp_path: Path) -> None:
    """Also what the filter left out of each round."""
    earlier = rounds_in(RECORDED / "run")
    left_out = [{share.learner for share in record.members if share.factors} for record in earlier]
    assert len(earlier) == ROUNDS and all(NAMES[-1] in names for names in left_out), "the attacker, in each round"
    record_run(tmp_path / "again")
    assert rounds_in(tmp_path / "again") == earlier
    assert tensors_in(tmp_path / "again" / "model.safetensors") == tensors_in(RECORDED / "run" / "model.safetensors")


@pytest.mark.parametrize("members", JUDGED)
def test_the_filter_judges_as_before_up_to_64_members(members: int) -> None:
    assert judge_drawn_rounds(members) == VERDICTS[str(members)]
