"""The command line up to the moment a process is started; tests/system has the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import __version__, cli
from atoll.launch.local import Kill, LocalRun


def atoll(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["atoll", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "events.jsonl").write_text("")
    (tmp_path / "odd.toml").write_text("[protocol]\nqorum = 2\n")
    (tmp_path / "work.toml").write_text("[workload]\ndept = 2\n")
    (tmp_path / "torn.toml").write_text("[protocol\n")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train --config odd.toml", "odd.toml: unknown key [protocol] 'qorum': did you mean 'quorum'?"),
        ("train --config work.toml", "work.toml, table [workload]: unknown key 'dept': did you mean 'depth'?"),
        ("train --config torn.toml", "torn.toml is not TOML"),
        ("train --config none.toml", "cannot read none.toml: No such file or directory"),
        ("train --quorum 5 --learners 4", "quorum = 5 can never be reached by 4 learners: set quorum to 4 or less"),
        ("train --learners 0", "learners = 0 is too small: the least is 1"),
        ("train --depth 0", "workload.depth is 0"),
        ("train missing.py", "there is no script missing.py: give the path of a Python file"),
        (
            "train --out old",
            "old already holds a run: choose another folder with --out, or replace that run with --force",
        ),
        ("train --kill learner-9@0.5", "there is no such learner; they are learner-0 to learner-3"),
        ("train --kill one@2", "--kill one@2 is not understood: write it as learner-2@0.4"),
        ("train script.py --algorithm data-parallel", "trains the built-in workload only: leave script.py out"),
        ("train --port 70000", "port = 70000 is not between 0 and 65535"),
        ("train --seed -1", "seed = -1 is below 0"),
        ("syncer --port 70000", "port = 70000 is not between 0 and 65535"),
        ("syncer --learners 2 --quorum 3", "quorum = 3 can never be reached by 2 learners"),
        ("learn missing.py --syncer http://127.0.0.1:1", "there is no script missing.py"),
        ("learn script.py --syncer nowhere", "is no address of a syncer: it looks like http://127.0.0.1:7077"),
        ("learn script.py --syncer http://127.0.0.1:1 --name ../x", "cannot be a file name"),
        ("status nowhere", "holds no run with a syncer: name the folder that --out made"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    assert atoll(monkeypatch, *command.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("atoll: ") and err.count("\n") == 1
    assert said in err
    assert not Path("atoll-runs").exists(), "nothing was begun"


def test_a_run_that_is_over_has_no_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    (folder / "old" / "syncer.url").write_text("http://127.0.0.1:9")
    assert atoll(monkeypatch, "status", "old") == 1
    assert "no syncer answers at http://127.0.0.1:9: is the run over?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "syncer", "learn", "status"])
def test_help_has_an_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert atoll(monkeypatch, command, "--help") == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "Example" in out and f"atoll {command} " in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_the_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert atoll(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"atoll {__version__}\n"


class Taken(Exception):
    """Instead of a run."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[LocalRun]:
    runs: list[LocalRun] = []

    async def run(self: LocalRun) -> None:
        runs.append(self)
        raise Taken

    monkeypatch.setattr(LocalRun, "run", run)
    return runs


def begin(monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], *arguments: str) -> LocalRun:
    with pytest.raises(Taken):
        atoll(monkeypatch, "train", *arguments)
    return taken[-1]


def test_the_command_line_becomes_settings(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], folder: Path
) -> None:
    (folder / "run.toml").write_text("seed = 3\n[protocol]\nlearners = 8\nquorum = 2\n")
    run = begin(
        monkeypatch, taken, "--config", "run.toml", "--learners", "3", "--sync", "--outer-lr", "0.5", "--depth", "1"
    )
    assert (run.config.seed, run.config.protocol.learners, run.config.protocol.quorum) == (3, 3, 2)
    assert run.config.protocol.synchronous and run.config.protocol.overlap == 0
    assert (run.config.outer.lr, run.config.workload) == (0.5, {"depth": 1})
    assert run.config.protocol.steps == cli.train.STEPS, "the built-in workload would go on for ever"


def test_a_users_script_keeps_its_own_arguments_and_has_no_budget(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun]
) -> None:
    run = begin(monkeypatch, taken, "script.py", "--learners", "2", "--evaluate-every", "0", "--", "--mine", "3")
    assert run.script == ["script.py", "--mine", "3"]
    assert not run.evaluator and run.config.protocol.steps == 0


def test_the_demo_kills_one_and_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch, taken: list[LocalRun], folder: Path
) -> None:
    run = begin(monkeypatch, taken, "--demo", "--out", "old")
    assert run.kills == (cli.train.DEMO_KILL,)
    run = begin(monkeypatch, taken, "--demo", "--out", "old", "--kill", "learner-1@.25")
    assert run.kills == (Kill("learner-1", 0.25),)
    assert not (folder / "old" / "events.jsonl").exists()


def test_a_learner_by_hand_has_a_name_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}
    monkeypatch.setattr(os, "execv", lambda path, command: started.update(command=command, env=dict(os.environ)))
    monkeypatch.setattr("socket.gethostname", lambda: "My_Host.local")
    for key in ("ATOLL_SYNCER", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.setenv(key, "")
        monkeypatch.delenv(key)
    atoll(monkeypatch, "learn", "script.py", "--syncer", "http://127.0.0.1:7077/", "--", "--mine", "3")
    assert started["command"][1:] == ["-m", "atoll.launch.script", "script.py", "--mine", "3"]
    assert started["env"]["ATOLL_LEARNER"] == f"my-host-local-{os.getpid()}"
    assert started["env"]["ATOLL_SYNCER"] == "http://127.0.0.1:7077"


def test_the_command_starts_without_torch() -> None:
    code = "import sys, atoll.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
