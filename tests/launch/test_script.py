from __future__ import annotations

import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import atoll
from atoll.launch.local import RUNNER
from atoll.launch.script import USAGE, is_usage_error, remove_own_frames
from atoll.store.rundir import checked_name


def run(tmp_path: Path, code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "beside.py").write_text("word = 'beside'\n")
    command = [sys.executable, *RUNNER, str(tmp_path / "mine.py"), *arguments]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def test_a_script_runs_as_if_it_were_started_by_itself(tmp_path: Path) -> None:
    code = "import sys, beside\nprint(__name__, sys.argv[1:], beside.word, __file__)\nsys.exit(7)"
    done = run(tmp_path, code, "--a", "b")
    assert done.returncode == 7
    assert done.stdout.strip() == f"__main__ ['--a', 'b'] beside {tmp_path / 'mine.py'}"


def test_a_mistake_that_atoll_can_name_is_one_line(tmp_path: Path) -> None:
    done = run(tmp_path, "from atoll.protocol.errors import PlanError\nraise PlanError('the model has no blocks')")
    assert (done.returncode, done.stderr) == (2, "atoll: the model has no blocks\n")


def test_a_script_that_says_why_it_ends_is_not_started_again(tmp_path: Path) -> None:
    done = run(tmp_path, "import sys\nsys.exit('no data')")
    assert (done.returncode, done.stderr) == (2, "no data\n")


def test_any_other_error_keeps_its_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, "raise ValueError('mine')")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: mine")


def test_it_does_not_outlive_its_supervisor(tmp_path: Path) -> None:
    """Here the supervisor is a process that never was our parent."""
    done = run(tmp_path, "import time\ntime.sleep(30)", ATOLL_SUPERVISOR="1")
    assert done.returncode == -15


def test_a_traceback_shows_the_scripts_own_frames(tmp_path: Path) -> None:
    """And not those that called it, nor Atoll's between the script and its scorer."""
    code = """
import asyncio
from atoll.launch.script import main as atolls_own

def score():
    import json
    json.loads("{")

def train():
    score()

train()
"""
    done = run(tmp_path, code)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[1].startswith(f'  File "{tmp_path / "mine.py"}"')
    assert "runpy" not in done.stderr and "atoll/launch" not in done.stderr
    assert "json/decoder.py" in done.stderr, "a library's frames stay"


def test_a_typo_that_python_cannot_read_is_shown_alone(tmp_path: Path) -> None:
    done = run(tmp_path, "import os\nmodel = (\n")
    assert done.returncode == 1
    assert done.stderr.startswith(f'  File "{tmp_path / "mine.py"}", line 2\n'), done.stderr
    assert done.stderr.rstrip().endswith("SyntaxError: '(' was never closed")


USAGE_ERRORS = {
    "atoll.Lerner(None)": "AttributeError: module 'atoll' has no attribute 'Lerner'",
    "atoll.Learner(torch.nn.Linear(1, 1), optimiser=None)": "TypeError: Learner.__init__() got an unexpected keyword",
    "atoll.Learner(torch.nn.Linear(1, 1)).step(tokens=1)": "RuntimeError: learner.step() outside of 'with",
    "atoll.evaluate(None)": "TypeError: evaluate() missing 1 required positional argument",
    "atoll.Learner(torch.nn.Linear(1, 1)).batches(torch.utils.data.DataLoader([0]))": (
        "TypeError: learner.batches takes a dataset, not a DataLoader"
    ),
    "atoll.Learner(torch.nn.Linear(1, 1)).batches([0])": "TypeError: learner.batches needs a batch size: learner.",
    "atoll.Learner(torch.nn.Linear(1, 1)).step(token=1)": (
        "TypeError: Learner.step() got an unexpected keyword argument 'token': did you mean 'tokens'?"
    ),
    "atoll.Learner(torch.nn.Linear(1, 1), 3)": "TypeError: 'optimizer' is of type int: give torch optimizers",
    "atoll.Learner(torch.nn.Linear(1, 1)).stpe": "AttributeError: 'Learner' object has no attribute 'stpe'",
}
CALLS = [
    pytest.param(call, marks=() if place in (0, 1) else pytest.mark.faults) for place, call in enumerate(USAGE_ERRORS)
]


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_ends_at_the_scripts_line_and_the_supervisor_is_told(tmp_path: Path, call: str) -> None:
    done = run(
        tmp_path, f"import atoll{', torch' if 'torch' in call else ''}\n{call}", ATOLL_SUPERVISOR=str(os.getpid())
    )
    assert done.returncode == USAGE
    *_, place, line, last = [line for line in done.stderr.splitlines() if not set(line) <= set(" ~^")]
    assert place == f'  File "{tmp_path / "mine.py"}", line 2, in <module>' and line.strip() == call
    assert last.startswith(USAGE_ERRORS[call])
    assert "atoll/learner" not in done.stderr


WRONG_CALLS: list[tuple[Callable[[nn.Module], object], str]] = [
    (
        lambda model: atoll.Learner(model.parameters()),  # type: ignore[arg-type]
        "'model' is of type generator: give the torch.nn.Module itself",
    ),
    (
        lambda model: atoll.evaluate(model.state_dict(), lambda model: 0.0),  # type: ignore[arg-type]
        "'model' is of type OrderedDict: give the torch.nn.Module itself",
    ),
    (
        lambda model: atoll.evaluate(model, 0.5),  # type: ignore[arg-type]
        "'score' is of type float: give the function that scores a model, without calling it",
    ),
    (
        lambda model: atoll.Learner(model, quorum=2),  # type: ignore[call-arg]
        "Learner.__init__() got an unexpected keyword argument 'quorum': it is a setting of the run, given to the "
        "command that starts it: --set quorum=2",
    ),
    (
        lambda model: atoll.Learner(model, optimiser=None),  # type: ignore[call-arg]
        "Learner.__init__() got an unexpected keyword argument 'optimiser': did you mean 'optimizer'? It knows model, "
        "optimizer, syncer, name, seed, data, tokens_per_step, buffers, frozen, placement, join_wait_s",
    ),
    (
        lambda model: atoll.evaluate(model, lambda model: 0.0, every=10),  # type: ignore[call-arg]
        "evaluate() got an unexpected keyword argument 'every': it knows model, score, sample, directions, unit, ema",
    ),
]


@pytest.mark.parametrize(("call", "words"), WRONG_CALLS)
def test_a_wrong_call_is_told_with_the_way_out(call: Callable[[nn.Module], object], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        call(nn.Linear(1, 1))
    assert str(caught.value) == words
    assert is_usage_error(caught.value)
    remove_own_frames(caught.value, usage=True)
    assert {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)} == {__file__}


def test_a_notebook_sees_the_keywords_of_a_learner() -> None:
    assert list(inspect.signature(atoll.Learner).parameters)[:3] == ["model", "optimizer", "syncer"]


def test_alone_a_wrong_call_is_exit_code_1(tmp_path: Path) -> None:
    assert run(tmp_path, "import atoll\natoll.Lerner(None)").returncode == 1


def test_frames_that_a_mistake_of_ours_was_raised_in_stay() -> None:
    with pytest.raises(TypeError) as caught:
        checked_name(None)  # type: ignore[arg-type]
    assert not is_usage_error(caught.value)
    remove_own_frames(caught.value)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[0].startswith("test_frames") and "checked_name" in names
