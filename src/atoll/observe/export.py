"""`atoll export`: the global model of a run as safetensors, made from its cuts and journal.

It reads only, so it works on a run that goes on and on one that was killed. What is written lies outside of the run's
directory and is whole or not there; nothing is replaced unless that was asked for.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.numpy

from atoll.observe.rebuild import Head, at_cut, newest
from atoll.observe.whole import Stored, find_unmerged, save_whole
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import staged
from atoll.store.rundir import RunDir, facts_of_model, read_model_facts

MODEL = "model.safetensors"
CONFIG = "config.toml"


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and of which moment of the run it is."""

    file: Path
    run: str
    round: int
    """Rounds behind it."""
    versions: tuple[int, ...]
    cut: int
    """The cut it was made from."""
    replayed: int
    """Rounds behind that cut that were made again."""
    remarks: tuple[str, ...] = ()


def export_run(path: Path, out: Path, cut: int | None = None, *, force: bool = False, whole: bool = False) -> Exported:
    """The newest version, or what a cut holds, to `out`: a `.safetensors` file, or else a folder with the settings too.

    `whole`: with frozen parameters and buffers that are not merged (whole.py).
    ConfigError for what cannot be asked; BadCut, Corrupt or NotKept name what is wrong in the run's directory.
    """
    run = RunDir(path)
    _check_out(run, out, force)
    head = newest(run) if cut is None else at_cut(run, cut)
    unmerged, remark = find_unmerged(run, head.cut) if whole else ({}, "")
    file = out if out.suffix == ".safetensors" else out / MODEL
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _save(file, head, unmerged)
        if file != out and run.settings.exists():
            with staged(out / CONFIG) as draft:
                shutil.copyfile(run.settings, draft)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another place") from error
    versions, remarks = tuple(head.versions), (*head.remarks, *([remark] if remark else []))
    return Exported(file, head.run, head.round, versions, head.cut, head.replayed, remarks)


def export_best(path: Path, out: Path, *, force: bool = False) -> tuple[Path, dict[str, str]]:
    """The model with the best score, as its evaluator kept it; where it is, and what it says of itself."""
    run = RunDir(path)
    _check_out(run, out, force)
    if not run.best_model.exists():
        raise ConfigError(
            f"{path} holds no best model: a script with a scorer (atoll.evaluate) keeps one, scored every "
            "--evaluate-every rounds; without --best the newest version is written"
        )
    file = out if out.suffix == ".safetensors" else out / MODEL
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with staged(file) as draft:
            shutil.copyfile(run.best_model, draft)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another place") from error
    return file, read_model_facts(file)


def _check_out(run: RunDir, out: Path, force: bool) -> None:
    if not run.cuts.is_dir():
        raise ConfigError(f"{run.path} holds no run with parameters: there is no cuts/ in it")
    if out.resolve().is_relative_to(run.path.resolve()):
        raise ConfigError(f"{out} lies in the run's own directory: choose a place outside of {run.path}")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already: choose another name, or replace it with --force")


def _save(path: Path, head: Head, unmerged: Mapping[str, Stored]) -> None:
    """Like every model of ours; its metadata says what it is of."""
    metadata = {"format": "pt", **facts_of_model(head.run, head.round, head.versions)}
    if unmerged:
        save_whole(path, head, unmerged, metadata)
        return
    with staged(path) as draft:
        safetensors.numpy.save_file(head.model.tensors(), draft, metadata=metadata)
