"""The list of commands, their help, and how one gets around: ls, logs."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.observe.conftest import a_status, small_run
from tests.test_cli import atoll

from atoll.cli.command import render
from atoll.cli.declared import ATOLL
from atoll.cli.declared.shared import PANELS
from atoll.cli.look import ProcessEvents
from atoll.cli.runs import LogReader, describe_run, state_of
from atoll.config import Config, known_settings
from atoll.launch.children import LIMIT
from atoll.store.rundir import RunDir, named_run
from atoll.store.writer_lease import hold_run
from atoll.workloads.settings import WorkloadSettings

ALL = {command.name: command for command in ATOLL.commands}
"""By name, and those of groups by both words."""
ALL |= {f"{group.name} {one.name}": one for group in ATOLL.commands for one in group.commands}
WITH_SCRIPT = ("train", "learn", "chaos", "compare", "replay")
LINES = 100
"""Two screens."""


def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert atoll(monkeypatch, *words, "--help") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_command_declares_what_its_function_takes(name: str) -> None:
    command = ALL[name]
    if not command.runs:
        return
    group = next((one for one in ATOLL.commands if command in one.commands), None)
    declared = {one.name: one for one in (*command.parameters, *(group.parameters if group else ()))}
    wanted = inspect.signature(command.function(), eval_str=True).parameters
    assert set(wanted) == {*declared, *(["arguments"] if command.script else [])}
    for parameter, one in declared.items():
        annotation = inspect.formatannotation(wanted[parameter].annotation)
        assert one.many == annotation.startswith("list["), parameter
        optional = one.default is None and not one.required and not one.many
        assert ("None" in annotation) == optional, f"{parameter}: {annotation}"
        if one.kind in (int, float) or one.flag:
            assert ("bool" if one.flag else one.kind.__name__) in annotation, parameter  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(ALL))
def test_help_is_short_and_has_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = render(ALL[name], f"atoll {name}").splitlines()
        assert len(lines) <= LINES and all(len(line) <= columns for line in lines)
    text = help_of(monkeypatch, capsys, *name.split())
    assert text.startswith(f"Usage: atoll {name} ")
    assert name == "simulate" or ("Example" in text and f"\n  atoll {name.split()[0]}" in text)
    assert ("[-- ARGS]" in text) == (name in WITH_SCRIPT)


def test_a_relay_is_told_of_the_link_that_lets_it_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link that a syncer prints is a learner's, and a relay that comes by it is refused."""
    said = " ".join(help_of(monkeypatch, capsys, "relay").split())
    assert "A link of a relay's token (atoll tokens add NAME --role relay)" in said
    assert "The join link that the syncer printed" not in said


def test_train_keeps_few_options_and_reaches_every_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {flag for one in ALL["train"].parameters for flag in one.flags if not one.hidden}
    assert len(shown) <= 24
    assert len(help_of(monkeypatch, capsys, "train").splitlines()) <= LINES / 2 + 10
    for name in ("train", "syncer", "chaos"):
        assert "--set" in {flag for one in ALL[name].parameters for flag in one.flags}
    everything = known_settings(WorkloadSettings)
    document = msgspec.to_builtins(Config())
    for table in ("protocol", "outer", "service"):
        reached = {place.field for place in everything.values() if place.table == table}
        missing = (
            set(document[table]) - reached - {"weight_limits", "seed"}
        )  # weight_limit.NAME, and the run's own seed
        assert not missing, f"[{table}] {missing} cannot be set"


def test_commands_stand_in_groups(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(monkeypatch, capsys)
    places = [text.index(f"\n{panel}:") for panel in PANELS]
    assert places == sorted(places)
    assert all(f"  {one.name} " in text for one in ATOLL.commands)


def test_options_in_the_pages_are_there() -> None:
    """Every `atoll …` line of README and docs, of the Makefile and of the help itself names options that exist."""
    root = Path(__file__).parents[1]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), root / "Makefile"]
    texts = {str(page.relative_to(root)): page.read_text() for page in pages if page.name != "CHANGELOG.md"}
    texts |= {f"atoll {name} --help": command.text for name, command in ALL.items()}
    lines = [
        (name, line) for name, text in texts.items() for line in re.findall(r"(?:^|\s)atoll ([a-z][^\n`|#]*)", text)
    ]
    unknown = [(name, line, word) for name, line in lines for word in unknown_options(line)]
    assert len(lines) > 100 and not unknown, unknown


def unknown_options(line: str) -> list[str]:
    names = re.split(r" && | -- |, atoll ", line)[0].split()
    group = ALL.get(names[0])
    if group is None:
        return []  # prose
    command = ALL.get(" ".join(names[:2]), group)
    known = {flag for one in (*group.parameters, *command.parameters) for flag in one.flags} | {"--help"}
    words = [re.match(r"--[a-z-]+", word) for word in names]
    return [word[0] for word in words if word and word[0] not in known]


def test_help_shows_what_the_settings_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(monkeypatch, capsys, "train")
    assert "M: how many learners. [default: 4]" in text and Config().protocol.learners == 4
    assert "What follows -- goes to your script as it is." in text
    assert "[default: 4]" in help_of(monkeypatch, capsys, "syncer")
    assert {one.default for one in ALL["train"].parameters if "--max-restarts" in one.flags} == {LIMIT}


def test_a_mistyped_command_is_answered_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "trian") == 2
    assert capsys.readouterr().err == "atoll: atoll has no command 'trian': did you mean 'train'?\n"


def test_a_command_that_is_an_option_of_another_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert atoll(monkeypatch, "resume", "first") == 2
    assert capsys.readouterr().err == "atoll: atoll has no command 'resume': use atoll train --resume first\n"


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
    assert ProcessEvents(events).find_running() == {"syncer": os.getpid(), "learner-2": os.getppid()}


def test_status_tells_a_learner_whose_process_starts_from_one_that_is_gone(tmp_path: Path) -> None:
    said = [
        {"kind": "started", "process": "learner-0", "pid": 1},
        {"kind": "joined", "learner": "learner-0", "incarnation": 1},
        {"kind": "exited", "process": "learner-1"},
        {"kind": "restarted", "process": "learner-2", "pid": 2},
    ]
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps({"at": 1.0, "text": "", **one}) + "\n" for one in said))
    absent = a_status(learners=3)
    absent = msgspec.structs.replace(
        absent, learners=tuple(msgspec.structs.replace(one, state="gone") for one in absent.learners)
    )
    shown = ProcessEvents(events).show_restarts(absent)
    assert [one.state for one in shown.learners] == ["gone", "gone", "restarting"]


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
