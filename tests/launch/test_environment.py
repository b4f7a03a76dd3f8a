from __future__ import annotations

import stat
from pathlib import Path

import pytest

from atoll.launch.environment import (
    LaunchEnvironment,
    capture_environment,
    read_environment,
    select_variables,
    write_environment,
)

KEPT = {
    "CUDA_VISIBLE_DEVICES": "2,3",
    "DATA_DIR": "/data/c4",
    "HF_HOME": "/cache/hf",
    "OMP_NUM_THREADS": "4",
    "PATH": "/usr/bin",
    "PYTHONPATH": "/srv/anna/lib",
    "WANDB_PROJECT": "islands",
}
SECRET = {
    "AWS_SECRET_ACCESS_KEY": "x",
    "DATABASE_URL": "postgres://anna:hunter2@db/c4",
    "GIT_ASKPASS": "x",
    "HF_TOKEN": "x",
    "MY_LINK": "atoll://TOKEN@host:7077/run",
    "WANDB_API_KEY": "x",
}
OF_THE_SESSION = {
    "ATOLL_LEARNER": "learner-0",
    "PWD": "/srv/anna",
    "RANK": "3",
    "SLURM_JOB_ID": "7",
    "SSH_CONNECTION": "1.2.3.4",
    "TMPDIR": "/tmp/job-7",
    "XDG_RUNTIME_DIR": "/run/user/1000",
}


def test_what_a_script_may_need_is_kept_and_no_secret() -> None:
    assert select_variables({**KEPT, **SECRET, **OF_THE_SESSION}) == KEPT


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_it_is_for_its_user_alone_also_in_a_run_that_others_may_read(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    write_environment(tmp_path, LaunchEnvironment("/srv/anna", KEPT))
    file = tmp_path / "environment.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_environment(tmp_path) == LaunchEnvironment("/srv/anna", KEPT)


def test_what_is_set_now_goes_before_and_what_is_not_is_told(tmp_path: Path) -> None:
    then = LaunchEnvironment(str(tmp_path), {"DATA_DIR": "/data/c4", "HF_HOME": "/cache/hf"})
    now = {"DATA_DIR": "/other"}
    assert then.find_missing(now) == {"HF_HOME": "/cache/hf"} and then.find_folder() == tmp_path
    assert then.describe_differences(now, tmp_path) == ["not set now, and as the run was begun with: HF_HOME"]
    assert then.describe_differences(KEPT, tmp_path) == []
    assert then.describe_differences(KEPT, Path("/")) == [f"the script starts in {tmp_path}, as it did before"]


def test_a_working_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    then = LaunchEnvironment(str(tmp_path / "gone"), {})
    assert then.find_folder() is None
    [line] = then.describe_differences({}, tmp_path)
    assert line == f"the script was started in {tmp_path / 'gone'}, which is gone: it starts in {tmp_path}"


def test_this_process_is_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATA_DIR", "/data/c4")
    found = capture_environment()
    assert Path(found.folder) == tmp_path and found.variables["DATA_DIR"] == "/data/c4"


def test_a_run_that_has_none(tmp_path: Path) -> None:
    assert read_environment(tmp_path) is None
    (tmp_path / "environment.json").write_text("{")
    assert read_environment(tmp_path) is None
