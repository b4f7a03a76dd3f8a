"""Which words of a folder from elsewhere a command asks about: those that it would use."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.config import Config, Service
from atoll.launch.begun_here import check_begun_here, remember_run
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir

SCRIPT, STORE = "runs /there/evil.py", "copies it to s3://theirs/run"


@pytest.fixture
def from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run = RunDir.create(tmp_path / "run")
    config = Config(script=("/there/evil.py",), service=Service(store="s3://theirs/run"))
    run.settings.write_bytes(config.toml())
    return run


@pytest.mark.parametrize(
    ("runs_script", "copies", "verb", "said"),
    [
        (True, True, "go on with", f"to go on with it {SCRIPT}, {STORE}. "),  # atoll train --resume
        (False, True, "go on with", f"to go on with it {STORE}. "),  # atoll syncer --resume
        (True, False, "replay", f"to replay it {SCRIPT}. "),  # atoll replay
    ],
)
def test_a_run_from_elsewhere_is_refused_with_what_the_command_would_do(
    from_elsewhere: RunDir, runs_script: bool, copies: bool, verb: str, said: str
) -> None:
    words = {"runs_script": runs_script, "copies": copies, "verb": verb}
    with pytest.raises(ConfigError) as refused:
        check_begun_here(from_elsewhere, trusted=False, **words)  # type: ignore[arg-type]
    assert said in str(refused.value) and "say --trust" in str(refused.value)
    check_begun_here(from_elsewhere, trusted=True, **words)  # type: ignore[arg-type]


def test_a_command_that_uses_none_of_the_words_asks_nothing(from_elsewhere: RunDir) -> None:
    """`atoll replay RUN SCRIPT`: the script is the operator's own."""
    check_begun_here(from_elsewhere, trusted=False, runs_script=False, copies=False)


def test_a_run_that_began_here_is_known(from_elsewhere: RunDir) -> None:
    remember_run(Config(script=("/there/evil.py",), service=Service(store="s3://theirs/run")), None)
    check_begun_here(from_elsewhere, trusted=False)
