"""The list of commands, their help, and how one gets around: ls, logs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.observe.conftest import small_run
from tests.test_cli import atoll

from atoll.cli.commands import COMMANDS, import_command
from atoll.cli.look import running_processes
from atoll.cli.runs import LogReader, describe_run, state_of
from atoll.store.rundir import RunDir, named_run
from atoll.store.writer_lease import hold_run

ALL = sorted(COMMANDS)
WITH_SCRIPT = ("train", "learn", "chaos")


def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert atoll(monkeypatch, *words, "--help") == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return re.sub(r"[\s│]+", " ", text)


@pytest.mark.parametrize("name", ALL)
def test_the_list_says_of_a_command_what_it_says_of_itself(name: str) -> None:
    own = import_command(name).help or ""
    assert own.partition("\n\n")[0].strip() == COMMANDS[name].summary


def test_every_command_is_in_the_list() -> None:
    modules = {module for entry in COMMANDS.values() for module in entry.modules}
    folder = Path(sys.modules["atoll.cli"].__path__[0])
    registering = {
        path.stem for path in folder.glob("*.py") if re.search(r"^@(app|\w+)\.command", path.read_text(), re.M)
    }
    assert registering == modules


def test_commands_stand_in_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(monkeypatch, capsys)
    places = [text.index(f"─ {panel} ─") for panel in dict.fromkeys(entry.panel for entry in COMMANDS.values())]
    assert places == sorted(places)
    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("name", ALL)
def test_flags_have_no_type(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = help_of(monkeypatch, capsys, name)
    assert "<bool>" not in text
    assert ("[-- ARGS]..." in text) == (name in WITH_SCRIPT)


def test_help_shows_what_the_settings_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(monkeypatch, capsys, "train")
    for words in ("how many learners. [default: (4)]", "[default: (rda-row)]", "[default: (24)]", "[default: (0.6)]"):
        assert words in text
    assert "What follows -- goes to your script as it is." in text
    assert "[default: (4)]" in help_of(monkeypatch, capsys, "syncer")


def test_a_mistyped_command_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "trian") == 2
    assert "Did you mean 'train'" in re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().err)


# ---- ls -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three in atoll-runs and one right here."""
    monkeypatch.chdir(tmp_path)
    for place, at in (("atoll-runs/old", 1), ("atoll-runs/live", 2), ("atoll-runs/over", 3), ("mine", 4)):
        folder = tmp_path / place
        folder.mkdir(parents=True)
        for name in ("run.toml", "events.jsonl"):
            (folder / name).write_text("")
            os.utime(folder / name, (at, at))
    figures = {"rounds": 1234, "tokens": {"computed": 56_789}, "validation_loss_end": 0.4321, "reason": "done"}
    (tmp_path / "atoll-runs/over/summary.json").write_text(json.dumps(figures))
    return tmp_path


def test_ls_says_which_runs_are_here_and_which_are_alive(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_run(runs / "atoll-runs/live"):
        assert atoll(monkeypatch, "ls", "--json") == 0
        found = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
        assert atoll(monkeypatch, "ls") == 0
    states = {name: row["state"] for name, row in found.items()}
    assert states == {
        "mine": "cut off",
        "atoll-runs/old": "cut off",
        "atoll-runs/live": "alive",
        "atoll-runs/over": "ended",
    }
    assert found["atoll-runs/over"]["rounds"] == 1234
    assert re.search(r"atoll-runs/over\s+ended.*1,234\s+56.8k\s+0.432", capsys.readouterr().out)
    assert state_of(RunDir(runs / "atoll-runs/live")) == "cut off", "nobody has it any more"


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        (["run", "round", "finished", "exited"], "failed"),
        (["run", "finished", "reigned"], "cut off"),
        (["run", "round", "finished", "reigned", "round"], "cut off"),
    ],
)
def test_ls_tells_a_run_that_failed_from_one_that_was_cut_off(runs: Path, kinds: list[str], state: str) -> None:
    lines = [json.dumps({"at": 1.0, "kind": kind, "text": ""}) for kind in kinds]
    (runs / "mine/events.jsonl").write_text("\n".join(lines) + '\n{"kind":"ro')
    assert state_of(RunDir(runs / "mine")) == state


@pytest.mark.parametrize(("whole_bytes", "tokens"), [(1 << 20, 240), (0, None)])
def test_ls_takes_what_it_can_from_the_events_of_a_run_without_a_summary(
    runs: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int, tokens: int | None
) -> None:
    """Where they are many, only their end is read."""
    monkeypatch.setattr("atoll.cli.runs.WHOLE_BYTES", whole_bytes)
    (runs / "mine/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in small_run()))
    row = describe_run(RunDir(runs / "mine"), 2.0)
    assert (row["rounds"], row["validation_loss"], row["tokens"]) == (7 if whole_bytes else 8, 2.25, tokens)


def test_status_names_the_processes_that_run(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    said = [
        {"kind": "started", "process": "syncer", "pid": os.getpid()},
        {"kind": "started", "process": "learner-0", "pid": gone.pid},
        {"kind": "started", "process": "learner-1", "pid": os.getpid()},
        {"kind": "exited", "process": "learner-1"},
        {"kind": "round", "members": []},
        {"kind": "restarted", "process": "learner-2", "pid": os.getppid()},
    ]
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps({"at": 1.0, "text": "", **one}) + "\n" for one in said))
    assert running_processes(events) == {"syncer": os.getpid(), "learner-2": os.getppid()}


def test_ls_of_a_folder_without_runs_says_what_starts_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert atoll(monkeypatch, "ls") == 0
    assert "atoll train starts one" in capsys.readouterr().out


# ---- logs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def logs(runs: Path) -> Path:
    folder = runs / "mine" / "logs"
    folder.mkdir()
    (folder / "learner-0.log").write_text("".join(f"step {i}\n" for i in range(30)))
    (folder / "syncer.log").write_bytes(b"listening\n\xffodd\n")
    return folder


def test_logs_prints_the_last_lines_of_every_process(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "logs", "mine", "--lines", 2) == 0
    assert capsys.readouterr().out == "==> learner-0 <==\nstep 28\nstep 29\n==> syncer <==\nlistening\n\ufffdodd\n"
    assert atoll(monkeypatch, "logs", "mine", "learner-0", "--lines", 1, "--follow") == 0  # it is not alive
    assert capsys.readouterr().out == "step 29\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mine nobody", "mine has no log of 'nobody'; there are learner-0, syncer"),
        ("atoll-runs/old", "atoll-runs/old has no logs: its processes were started by hand"),
        ("nowhere", "nowhere holds no run: name the folder that --out made (atoll ls)"),
    ],
)
def test_logs_that_are_not_there_are_told_apart(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert atoll(monkeypatch, "logs", *words.split()) == 2
    assert said in capsys.readouterr().err


def test_what_is_new_in_a_log_is_told_once_and_line_by_line(logs: Path) -> None:
    reader = LogReader(logs, None)
    assert reader.last_lines("learner-0", 1) == ["step 29"] and reader.last_lines("syncer", 0) == []
    assert list(reader.new_lines()) == []
    with (logs / "learner-0.log").open("a") as log:
        log.write("step 30\nste")
    (logs / "learner-1.log").write_text("came later\n")
    assert list(reader.new_lines()) == [("learner-0", "step 30"), ("learner-1", "came later")]
    with (logs / "learner-0.log").open("a") as log:
        log.write("p 31\n")
    assert list(reader.new_lines()) == [("learner-0", "step 31")]


def test_a_name_alone_is_also_a_run_in_the_usual_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    usual = tmp_path / "atoll-runs" / "first"
    usual.mkdir(parents=True)
    assert named_run(Path("first")) == Path("atoll-runs/first")
    assert named_run(Path("second")) == Path("second"), "what is nowhere is told as it was written"
    assert named_run(Path("below/first")) == Path("below/first")
    (tmp_path / "first").mkdir()
    assert named_run(Path("first")) == Path("first"), "a folder that is here comes first"


@pytest.mark.parametrize("command", ["status", "verify", "report", "replay", "logs", "dashboard", "set", "export"])
def test_every_command_that_takes_a_run_finds_it_by_its_name(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "atoll-runs" / "first").mkdir(parents=True)
    more = {"set": ["patience_s=3"], "export": ["model.safetensors"]}.get(command, [])
    assert atoll(monkeypatch, command, "first", *more) != 0, "there is nothing in it"
    assert "atoll-runs/first" in capsys.readouterr().err.replace("\n", "")
