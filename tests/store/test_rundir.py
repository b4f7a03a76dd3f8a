from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir, checked_name, save_model, unused_path


def test_a_new_run_gets_its_folders(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "deep" / "first")
    assert run.learners.is_dir() and run.logs.is_dir()
    assert run.learner("learner-0") == run.path / "learners" / "learner-0"
    assert run.learner("learner-0").is_dir()
    assert run.log("syncer") == run.path / "logs" / "syncer.log"
    names = [path.name for path in (run.settings, run.events, run.summary, run.model)]
    assert names == ["run.toml", "events.jsonl", "summary.json", "model.safetensors"]


@pytest.mark.parametrize("mark", ["run.toml", "events.jsonl", "summary.json"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).touch()
    with pytest.raises(ConfigError, match=r"already holds a run: choose another folder with --out, or replace"):
        RunDir.create(tmp_path)


def test_force_removes_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    run.settings.touch()
    run.log("syncer").touch()
    run.learners.rmdir()
    run.learners.symlink_to(elsewhere)
    (tmp_path / "notes.txt").touch()
    RunDir.create(tmp_path, force=True)
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "learners", "logs", "notes.txt", "run.lock"]
    assert (elsewhere / "kept").exists()
    assert not run.log("syncer").exists()


def test_a_place_that_cannot_be_written_is_a_mistake_of_the_operator(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write the run to .*choose another folder with --out") as caught:
        RunDir.create(tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot write"):
        RunDir.create(tmp_path / "file")


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "learner 0", "é", "x" * 65, "a\n"])
def test_names_from_outside_do_not_become_paths(tmp_path: Path, name: str) -> None:
    run = RunDir.create(tmp_path)
    for use in (run.learner, run.log, checked_name):
        with pytest.raises(ConfigError, match="is no name"):
            use(name)


def test_runs_without_a_name_are_called_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.strptime("2026-05-04 03:02:01", "%Y-%m-%d %H:%M:%S")
    assert unused_path(now) == Path("atoll-runs/20260504-030201")
    (tmp_path / "20260504-030201").mkdir()
    assert unused_path(now, tmp_path).name == "20260504-030201-2"
    monkeypatch.chdir(tmp_path)
    assert RunDir.create().path.parent == tmp_path / "atoll-runs"


def test_a_model_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = {
        "w": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "one": np.array(3.5, dtype=np.float64),
        "none": np.zeros((0, 4), dtype=np.float16),
    }
    save_model(tmp_path / "model.safetensors", tensors)
    save_model(tmp_path / "model.safetensors", tensors)
    loaded = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert np.array_equal(loaded[name], tensor)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    assert oct((tmp_path / "model.safetensors").stat().st_mode & 0o444) == oct(0o444 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
