from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll import cli
from atoll.extras import install_command
from atoll.observe.trackers import NO_TARGETS, Targets, Tracking, figures, scores
from atoll.protocol.errors import ConfigError
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus

Say = Callable[..., Event]
MakeStatus = Callable[..., RunStatus]


class Noted:
    def __init__(self) -> None:
        self.told: list[tuple[float, int, dict[str, float]]] = []
        self.closed = 0

    def write_scalars(self, at: float, round: int, values: Mapping[str, float]) -> None:
        self.told.append((at, round, dict(values)))

    def close(self) -> None:
        self.closed += 1


class Broken(Noted):
    def write_scalars(self, at: float, round: int, values: Mapping[str, float]) -> None:
        raise OSError("no space left")


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_a_status_becomes_named_numbers(status: MakeStatus) -> None:
    told = figures(status(liveness=0.75, carried_h=46.2))
    assert told["run/carried_h"] == 46.2 and told["round_share/learner-3"] == 1.0
    assert told["run/goodput"] == 0.934 and told["run/participation"] == 0.968 and told["run/liveness"] == 0.75
    assert told["run/tokens_per_s"] == 84_136.8 and told["run/effective_h"] == 24.0 and told["run/grace_s"] == 0.0123
    assert told["loss/learner-3"] == 1.7934 and told["tokens_per_s/learner-0"] == 21_034.2


def test_what_is_not_known_or_no_number_is_left_out(status: MakeStatus) -> None:
    assert "run/goodput" not in figures(status(goodput=None))
    assert not any(name.startswith("loss/") for name in figures(status(loss=float("nan"))))
    crowd = figures(status(learners=8))
    assert [name for name in crowd if name.startswith("loss/")] == ["loss/learner-0", "loss/learner-1"], "who trains"


def test_a_score_stands_at_the_round_that_was_scored(events: list[Event], say: Say) -> None:
    assert list(scores([*events, say(20, "score", round=9, loss=None)])) == [
        (1001.5, 0, {"validation/loss": 5.5}),
        (1012.5, 7, {"validation/loss": 2.25}),
    ]


def test_statuses_are_told_every_so_often_and_scores_always(status: MakeStatus, say: Say) -> None:
    noted, now = Noted(), [0.0]
    tracking = Tracking({"noted": noted}, every_s=2.0, now=lambda: now[0])
    for at in (10.0, 11.0, 11.9, 12.0):
        now[0] = at
        tracking.update(status(), [say(at, "score", round=5, loss=at)])
    assert [at for at, _, values in noted.told if "run/goodput" in values] == [10.0, 12.0]
    assert [values["validation/loss"] for _, _, values in noted.told if "validation/loss" in values] == [
        10.0,
        11.0,
        11.9,
        12.0,
    ]


def test_a_run_that_has_not_begun_or_cannot_be_asked_is_not_told(status: MakeStatus) -> None:
    noted = Noted()
    tracking = Tracking({"noted": noted})
    tracking.update(None)
    tracking.update(status("waiting"))
    assert noted.told == []


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(status: MakeStatus) -> None:
    noted = Noted()
    with Tracking({"broken": Broken(), "noted": noted}, every_s=0.0) as tracking:
        tracking.update(status())
        tracking.update(status())
    assert len(noted.told) == 2 and noted.closed == 1
    assert tracking.trouble == ["broken got no more figures: no space left"]


def test_no_targets_are_nothing_to_open() -> None:
    assert not NO_TARGETS and Targets(wandb="p")
    NO_TARGETS.check_packages()
    NO_TARGETS.open_trackers("run", {}).close()


# ---- TensorBoard -----------------------------------------------------------------------------------------------------


def test_tensorboard_reads_back_what_was_told(status: MakeStatus, say: Say, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    with Targets(tensorboard=tmp_path / "board").open_trackers("run", {}) as tracking:
        tracking.update(status(), [say(3.5, "score", round=1180, loss=1.832)])
    (file,) = (tmp_path / "board").iterdir()
    found = {
        value.tag: (event.wall_time, event.step, value.tensor.float_val[0])
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found["validation/loss"][:2] == (1003.5, 1180) and found["validation/loss"][2] == pytest.approx(1.832)
    assert found["run/goodput"][1] == 1203 and found["run/goodput"][2] == pytest.approx(0.934)
    assert {"loss/learner-0", "run/participation", "run/grace_s", "run/effective_h"} <= found.keys()


def test_tensorboard_is_written_without_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    code = (
        "import sys, pathlib; from atoll.observe.trackers import TensorBoard; "
        "board = TensorBoard(pathlib.Path(sys.argv[1])); board.scalars(1.0, 2, {'a': 3.0}); board.close(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == 0


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--tensorboard .*name another folder"):
        Targets(tensorboard=tmp_path / "file" / "board").open_trackers("run", {})


# ---- Weights & Biases ------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A stand-in for the package: what it was asked, in order."""
    asked: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric: asked.append(("axis", step_metric)),
        log=lambda values: asked.append(("log", values)),
        finish=lambda: asked.append(("finish", None)),
    )

    def init(**fields: Any) -> SimpleNamespace:
        if fields["project"] == "forbidden":
            raise RuntimeError("api_key not configured\nmore lines")
        asked.append(("init", fields))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **fields: fields))
    return asked


def test_weights_and_biases_gets_every_figure_with_its_round(
    fake: list[tuple[str, Any]], status: MakeStatus, say: Say
) -> None:
    with Targets(wandb="mine").open_trackers("first", {"seed": 3}) as tracking:
        tracking.update(status(), [say(3.5, "score", round=1180, loss=1.832)])
    assert [kind for kind, _ in fake] == ["init", "axis", "log", "log", "finish"]
    opened = fake[0][1]
    assert (opened["project"], opened["name"], opened["config"]) == ("mine", "first", {"seed": 3})
    assert opened["settings"]["console"] == "off", "the screen is ours"
    assert fake[2][1] == {"validation/loss": 1.832, "round": 1180}, "no step: a late score would be dropped"
    assert fake[3][1]["round"] == 1203 and fake[3][1]["run/goodput"] == 0.934


def test_a_project_that_cannot_be_opened_is_one_line(fake: list[tuple[str, Any]]) -> None:
    with pytest.raises(ConfigError, match="--wandb forbidden: api_key not configured; wandb login"):
        Targets(wandb="forbidden").open_trackers("first", {})


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "command", "said"),
    [
        ("tensorboard", "train --tensorboard board", "--tensorboard needs tensorboard, which is not installed here"),
        ("wandb", "train --wandb mine", "which is not installed here: " + install_command("tracking")),
        ("", "train --tensorboard board --tape a.tape", "follow a run with a syncer: leave --tape out"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_begun(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    missing: str,
    command: str,
    said: str,
) -> None:
    if missing:
        for name in [one for one in sys.modules if one.split(".")[0] == missing]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, missing, None)
    else:
        monkeypatch.setattr(Targets, "check_packages", lambda self: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["atoll", *command.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and err.startswith("atoll: ") and err.count("\n") == 1
    assert said in err and list(tmp_path.iterdir()) == []
