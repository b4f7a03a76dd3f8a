from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from atoll.protocol.errors import ConfigError
from atoll.store.atomic import Appender, write_atomic
from atoll.store.disk import LocalDisk
from atoll.store.journal import Journal
from atoll.store.rundir import RunDir, checked_name, save_model, unused_path
from atoll.store.writer_lease import acquire, hold_run


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
    words = r"already holds a run: choose another folder with --out, or replace .*; --resume /.* goes on with it"
    with pytest.raises(ConfigError, match=words):
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


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}


def fill(run: RunDir) -> dict[str, int]:
    """By every way in which files of a run are made."""
    write_atomic(run.settings, b"")
    save_model(run.model, {"w": np.zeros(2, dtype=np.float32)})
    with Appender(run.events) as sink:
        sink(b"{}\n")
    reign = acquire(run.journal)
    Journal.begin(run.journal, reign.term, disk=LocalDisk()).close()
    reign.release()
    with hold_run(run.path):
        run.learner("learner-0")
    return modes(run.path)


@pytest.mark.usefixtures("usual_umask")
def test_a_run_is_for_its_user_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    found = fill(RunDir.create(tmp_path / "run"))
    assert {"run", "journal", "terms", "learner-0", "logs", "run.lock", "alive", "model.safetensors"} <= found.keys()
    assert set(found.values()) == {0o700, 0o600}, found


@pytest.mark.usefixtures("usual_umask")
def test_a_run_that_is_shared_is_as_open_as_the_umask_says(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert set(fill(RunDir.create(tmp_path / "run", shared=True)).values()) == {0o755, 0o644}


@pytest.mark.usefixtures("usual_umask")
def test_a_folder_that_was_open_is_closed_unless_it_holds_other_things(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunDir.create(tmp_path / "empty").path.stat().st_mode & 0o777 == 0o700
    earlier = RunDir.create(tmp_path / "earlier", shared=True)
    fill(earlier)
    earlier.close_to_others()
    assert earlier.path.stat().st_mode & 0o777 == 0o700
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").touch()
    with pytest.raises(ConfigError, match=r"holds letters\.txt, which is no part of a run: choose a folder of its own"):
        RunDir.create(tmp_path / "home")
    assert modes(tmp_path / "home") == {"home": 0o755, "letters.txt": 0o644}
