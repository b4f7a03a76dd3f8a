"""The gates against creeping cost: what is compared, and that the recorded messages can still be read."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from gates import judge
from recorded_messages import MESSAGES, read_stream

from atoll.fabric.wire import decode_from_learner


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    path = tmp_path / "committed.json"
    path.write_text(json.dumps({"arch": "x86_64", "peak_mib": {"syncer": 100.0, "courier": 200.0}}))
    return path


@pytest.mark.parametrize(
    ("syncer", "courier", "code"), [(90.0, 200.0, 0), (103.0, 200.0, 0), (103.1, 200.0, 1), (50.0, 207.0, 1)]
)
def test_a_figure_may_exceed_the_committed_one_by_three_percent(
    committed: Path, syncer: float, courier: float, code: int
) -> None:
    figures = {"peak_mib": {"syncer": syncer, "courier": courier}}
    assert judge({"arch": "x86_64"}, committed, figures, "arch") == code


def test_results_of_another_machine_are_not_compared(committed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert judge({"arch": "aarch64"}, committed, {"peak_mib": {"syncer": 900.0}}, "arch") == 0
    assert "not comparable: arch is aarch64 here, x86_64 in committed.json" in capsys.readouterr().out


def test_the_recorded_messages_are_messages_of_this_version() -> None:
    frames = read_stream().frames
    kinds = Counter(type(decode_from_learner(frame.data)).__name__ for frame in frames if frame.data)
    assert kinds.total() == MESSAGES
    assert {"Hello", "Progress", "Contribution", "Heartbeat", "CutSaved", "Leave"} <= kinds.keys()
