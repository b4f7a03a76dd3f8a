"""The folder of a run: which file lies where, and how it comes to be.

    run.toml            what was asked for
    environment.json    where and with which variables its script was started (launch/environment.py); mode 600
    events.jsonl        what happened, one JSON object a line
    events/             earlier parts of it, of a long run (event_parts.py)
    syncer.url          where its syncer listens
    last.url            where it listened before, while a supervisor starts it again
    linked-pins.json    fingerprints that its join links name, where it has keys (cli/linked_pins.py)
    secrets/            what is shown at its port, where it has no keys (syncer/credentials.py); mode 700
    journal/            every decision and outer gradient, durable before it is told (journal.py)
    durable/            up to where the journal was durable, for whoever finds less of it (end_mark.py)
    cuts/               consistent snapshots of the whole run (cuts.py)
    learners/<id>/      what belongs to one learner
    shards/<number>/    what a shard of the syncer holds, where there are several: a folder like this (docs/adr/0031)
    logs/<process>.log  what a process printed
    norms.json          which norms are usual, for the next term
    origin.bin          of a run that was made of another: the state that its first record goes on from (verify_cuts.py)
    run.lock            held by whoever has the whole run in hand (writer_lease.py)
    store.json          which bucket it is copied to, and which copy of the run this folder is (bucket/claims.py)
    standby.json        who would carry out an attack on it (chaos/standby.py), while it goes on
    summary.json        the figures, once the run is over
    model.safetensors   the trained model
    model-best.safetensors, model-tail.safetensors  what scored best, and the mean of the last versions (tail.py)
    model-ema.safetensors  the moving average of the scored models, where the script asks for it (averaged_model.py)
    report.html         all of it on one page, once somebody asked for it

The folder is this user's alone (mode 700), and so is all that is in it: a file is as open as its folder. A run with
`[service] share_files` is as open as the umask says; its secrets never are.

A folder that holds a run is never written over unless that was asked for, and then only these names are removed. Names
that come from outside (learners, processes) become part of a path only if they are such (protocol/limits.py).
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError, safe_open

from atoll.protocol.errors import ConfigError
from atoll.protocol.limits import ALLOWED, LONGEST, is_name
from atoll.store.atomic import make_folder, staged
from atoll.store.writer_lease import hold_run

RUNS = Path("atoll-runs")
"""Where runs without a name of their own are kept, below the current folder."""
LEARNERS = Path("atoll-learners")
"""Where learners and evaluators that were started by hand keep theirs as RUN/NAME, below the current folder."""
EVALUATOR = "evaluator"
"""The name of an evaluator there, unless it is given another."""
UNMERGED = "unmerged.safetensors"
"""In the folder of the run's first learner: its frozen parameters and the buffers that are not merged, as it began."""
_MARKS = ("run.toml", "events.jsonl", "summary.json")
"""A folder with one of these holds a run."""
_OURS = (
    *_MARKS,
    *(
        "environment.json",
        "model.safetensors",
        "model-best.safetensors",
        "model-ema.safetensors",
        "model-tail.safetensors",
        "report.html",
        "syncer.url",
        "last.url",
        "linked-pins.json",
        "norms.json",
        "origin.bin",
        "standby.json",
        "store.json",
        "attack.json",
    ),
    *("journal", "durable", "cuts", "learners", "shards", "logs", "secrets"),
)

_KEPT = ("run.lock",)
"""Ours too, and never removed."""


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @classmethod
    def create(cls, path: Path | None = None, *, force: bool = False, shared: bool = False) -> RunDir:
        """A new, empty run directory; `force` removes the files of a run that lies there already, unless it is alive:
        then ConfigError names who has it, and nothing of it is touched. `shared`: others may read it."""
        run = cls((path or unused_path(time.localtime())).absolute())
        try:
            if run.holds_run() and not force:
                raise ConfigError(
                    f"{run.path} already holds a run: choose another folder with --out, "
                    f"or replace that run with --force; --resume {run.path} goes on with it"
                )
            if run.holds_run():
                with hold_run(run.path):
                    if not shared:
                        run.close_to_others()
                    run._clear_folder()
            run._make_folders(shared)
            run._refuse_links()
            make_folder(run.learners)
            make_folder(run.logs)
        except OSError as error:
            raise ConfigError(
                f"cannot write the run to {run.path}: {error.strerror or error}; choose another folder with --out"
            ) from error
        return run

    def _make_folders(self, shared: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o777 if shared else 0o700, exist_ok=True)
        if not shared:
            self.close_to_others()

    def close_to_others(self) -> None:
        """Also where an earlier version, or somebody else, made the folder. One that holds other things than a run is
        not ours to close."""
        if not self.path.stat().st_mode & 0o077:
            return
        foreign = [entry.name for entry in self.path.iterdir() if entry.name not in (*_OURS, *_KEPT)]
        if foreign and not self.holds_run():
            raise ConfigError(
                f"{self.path} can be read by others and holds {foreign[0]}, which is no part of a run: choose a folder "
                "of its own with --out, or let others read the run with share_files = true in [service]"
            )
        try:
            self.path.chmod(0o700)
        except PermissionError:
            raise ConfigError(
                f"{self.path} is another user's and can be read by others: have its owner do chmod 700, "
                "or let others read the run with share_files = true in [service]"
            ) from None

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """A run that lies there already."""
        run = cls(path.absolute())
        if not run.settings.exists() or not run.journal.is_dir():
            raise ConfigError(f"{path} holds no run to go on with: it has no run.toml and journal/")
        run._refuse_links()
        return run

    def _refuse_links(self) -> None:
        """Refuse links in place of logs and events: they could lead the lines into any file of this user."""
        for place in (self.events, self.logs, *(self.logs.iterdir() if self.logs.is_dir() else ())):
            if place.is_symlink():
                raise ConfigError(f"{place} is a link, and nothing is written through it: remove it")

    @classmethod
    def open_shard(cls, path: Path, *, shared: bool = False) -> RunDir:
        """The folder of a shard: new, or one that it goes on with."""
        run = cls(path.absolute())
        try:
            run._make_folders(shared)
        except OSError as error:
            raise ConfigError(f"cannot write the shard to {run.path}: {error.strerror or error}") from error
        return run

    @property
    def settings(self) -> Path:
        return self.path / "run.toml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def address(self) -> Path:
        """Where the syncer of this run listens, while it does."""
        return self.path / "syncer.url"

    @property
    def last_address(self) -> Path:
        return self.path / "last.url"

    @property
    def linked_pins(self) -> Path:
        return self.path / "linked-pins.json"

    def withdraw_address(self) -> None:
        """Nothing listens there until the syncer says so again. What it was is kept: join links know the run by its
        port, also where this start fails."""
        if self.address.exists():
            self.address.replace(self.last_address)

    def find_last_port(self) -> int:
        """Where the syncer listened last; 0: nobody knows."""
        for file in (self.address, self.last_address):
            with suppress(OSError, ValueError):
                return urlsplit(file.read_text()).port or 0
        return 0

    @property
    def secrets(self) -> Path:
        return self.path / "secrets"

    @property
    def norms(self) -> Path:
        return self.path / "norms.json"

    @property
    def origin(self) -> Path:
        return self.path / "origin.bin"

    @property
    def model(self) -> Path:
        return self.path / "model.safetensors"

    @property
    def best_model(self) -> Path:
        """The global model with the best score, kept by the run's evaluator."""
        return self.path / "model-best.safetensors"

    @property
    def ema_model(self) -> Path:
        """The moving average of the scored models, kept by the run's evaluator where the script asks for it."""
        return self.path / "model-ema.safetensors"

    @property
    def tail_model(self) -> Path:
        """The mean of its last versions, where `tail_average` asks for it."""
        return self.path / "model-tail.safetensors"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def marks(self) -> Path:
        """Folder of the marks of the journal's durable end."""
        return self.path / "durable"

    @property
    def cuts(self) -> Path:
        return self.path / "cuts"

    @property
    def learners(self) -> Path:
        return self.path / "learners"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def shard(self, number: int) -> RunDir:
        """The folder of a shard that this machine runs, from 2 on."""
        return RunDir(self.path / "shards" / str(number))

    def learner(self, learner: str) -> Path:
        """The folder of one learner, made if it is not there."""
        folder = self.learners / checked_name(learner)
        make_folder(folder)
        return folder

    def log(self, process: str) -> Path:
        """Where the output of one process goes."""
        return self.logs / f"{checked_name(process)}.log"

    def holds_run(self) -> bool:
        return any((self.path / name).exists() for name in _MARKS)

    def _clear_folder(self) -> None:
        for kept in self.path.glob("model-best-of-*.safetensors"):  # of earlier runs (learner/evaluator.py)
            kept.unlink()
        for name in _OURS:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


def unused_path(now: time.struct_time, root: Path = RUNS) -> Path:
    """`atoll-runs/<yyyymmdd-hhmmss>`, with a number behind it if two runs start in one second."""
    name = time.strftime("%Y%m%d-%H%M%S", now)
    path, number = root / name, 2
    while path.exists():
        path, number = root / f"{name}-{number}", number + 1
    return path


def find_runs(below: Path = RUNS) -> list[RunDir]:
    """The runs right below a folder, the oldest first."""
    found = [run for path in below.iterdir() if (run := RunDir(path.absolute())).holds_run()] if below.is_dir() else []
    return sorted(found, key=lambda run: run.settings.stat().st_mtime if run.settings.exists() else 0.0)


def find_compared(below: Path = RUNS) -> list[RunDir]:
    """The runs that `atoll compare` made, in a folder of their own each."""
    folders = sorted(path for path in below.iterdir() if path.is_dir()) if below.is_dir() else []
    methods = ("decoupled", "synchronous-diloco", "data-parallel", "elastic-data-parallel")
    places = [RunDir((path / name).absolute()) for path in folders for name in methods]
    return [run for run in places if run.holds_run()]


def named_run(path: Path, below: Path = RUNS) -> Path:
    """The folder itself; where there is none, the run of that name among those that were given no place of their
    own."""
    return below / path if len(path.parts) == 1 and not path.exists() and (below / path).is_dir() else path


def newest_run(below: Path = RUNS) -> RunDir:
    """Of those that were not given a place of their own."""
    if not (found := find_runs(below)):
        raise ConfigError(f"there is no run in {below}: name its folder with --run DIR")
    return found[-1]


def checked_name(name: str) -> str:
    """The name itself, if it may become part of a path."""
    if not is_name(name):
        raise ConfigError(f"{name[:LONGEST]!r} is no name: {ALLOWED}")
    return name


def save_model(path: Path, tensors: Mapping[str, np.ndarray[Any, Any]], facts: Mapping[str, str] | None = None) -> None:
    """The tensors as one safetensors file: whole and durable, or not there. `facts`: of which moment of which run."""
    # safetensors writes the memory as it lies, so it has to lie in C order.
    ready = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    with staged(path) as draft:
        safetensors.numpy.save_file(ready, draft, metadata={"format": "pt", **(facts or {})})


def facts_of_model(run: str, round: int, versions: Sequence[int]) -> dict[str, str]:
    """What a model file says of itself in its metadata."""
    return {"run": run, "round": str(round), "versions": ",".join(map(str, versions))}


def read_model_facts(path: Path) -> dict[str, str]:
    """The same, as a file has it; empty where there is none, or it says nothing or cannot be read."""
    try:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError):
        return {}
