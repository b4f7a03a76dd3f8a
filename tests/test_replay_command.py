"""`atoll replay`: what its verdict says, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli import replay
from atoll.config import Config
from atoll.launch.replay.play import RunReplay
from atoll.launch.replay.syncer import ReplayOutcome
from atoll.store.rundir import RunDir

from .test_cli import atoll


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path / "run")
    run.settings.write_bytes(Config().toml())
    run.journal.mkdir()
    return run


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (
            ReplayOutcome(through=6, compared=7, made_again=0, from_journal=[0, 1, 2, 3, 4, 5, 6]),
            1,
            "no round was made again: 7 were read from the journal, through round 6, and fit together; "
            "a replay that only reads proves nothing of the training",
        ),
        (
            ReplayOutcome(through=6, compared=7, made_again=5, from_journal=[2, 3]),
            0,
            "bit-identical through round 6: 5 rounds made again, 2 read from the journal (7 versions compared)",
        ),
    ],
)
def test_a_replay_that_only_reads_fails_and_says_that_it_proves_nothing(
    run: RunDir,
    outcome: ReplayOutcome,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(RunReplay, "play", lambda self: outcome)
    monkeypatch.setattr(replay, "compile_kernels", lambda console: None)
    assert atoll(monkeypatch, "replay", str(run.path)) == code
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == said and ("bit-identical" in shown[-1]) == (code == 0)
    assert shown[0].startswith(
        f"note: {len(outcome.from_journal)} rounds were read from the journal and not made again"
    )
    assert atoll(monkeypatch, "replay", str(run.path), "--json") == code
    told = json.loads(capsys.readouterr().out)
    assert (told["identical"], told["made_again"]) == (code == 0, outcome.made_again)
