"""`atoll replay`: what its verdict says, and its exit code."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.store.test_audit import merged

from atoll.cli import replay
from atoll.config import Config
from atoll.launch.replay import play
from atoll.launch.replay.play import RunReplay
from atoll.launch.replay.syncer import ReplayOutcome
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import MergedRecord, PayloadPlace
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


@pytest.mark.parametrize(
    ("until", "said"),
    [
        (None, "round 2 was merged from a relay's sum"),
        (None, "--until 1 repeats the rounds before it; --from-cut 4 those since that cut"),
        (2, "round 2 was merged from a relay's sum"),
        (1, ""),
    ],
)
def test_a_relays_sum_that_is_gone_is_told_before_anything_is_trained(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, until: int | None, said: str
) -> None:
    """It was told after three minutes of training."""
    (run.journal / "payload-000001-0002.bin").write_bytes(bytes(8))
    places = {2: None, 3: PayloadPlace(1, 0, 8, "x"), 7: PayloadPlace(2, 0, 8, "x")}
    rounds = [merged(number, groups=(("a", "b"),), payload=place) for number, place in places.items()]
    monkeypatch.setattr(play, "complete_cuts", lambda cuts: [6, 4, 2])
    check = partial(RunReplay(run, Config(), until=until)._check_sums, [merged(0), *rounds])
    terms = {(MergedRecord, record.round): 1 for record in rounds}
    if not said:
        check(terms)
        return
    with pytest.raises(ConfigError) as refused:
        check(terms)
    assert said in str(refused.value)
