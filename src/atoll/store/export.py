"""`atoll export`: write the global model of a run as safetensors, from its cuts and journal.

It only reads the run, so it works on a live run and on one that was killed. The output is outside the run's folder and
appears whole or not at all; nothing is replaced without --force.

With --tail a second file beside it holds the mean of the last versions (tail.py), and says which they are.

The file also holds frozen parameters and buffers, which are not merged. The first learner's folder has them: their
values at the start in UNMERGED, and its buffers in its part of every cut. They are copied byte by byte, so any dtype is
kept and nothing is held in memory. A remark names each tensor that is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from atoll.config import load
from atoll.numerics.arrays import FloatArray
from atoll.protocol.errors import ConfigError
from atoll.protocol.records import BegunRecord
from atoll.store.atomic import staged
from atoll.store.cuts import complete_cuts, read_manifest
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.rebuild import load_at_cut, load_newest
from atoll.store.rundir import EVALUATOR, LEARNERS, UNMERGED, RunDir, facts_of_model, read_model_facts
from atoll.store.tail import average_tail

MODEL = "model.safetensors"
CONFIG = "config.toml"


@dataclass(frozen=True, slots=True)
class ExportedModel:
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
    tail: Path | None = None
    """Where the mean of the last versions is, if it was asked for."""


def export_run(
    path: Path,
    out: Path,
    cut: int | None = None,
    *,
    force: bool = False,
    merged: bool = False,
    tail: int | None = None,
    parameter_names: bool = False,
) -> ExportedModel:
    """The newest version, or what a cut holds, to `out`: a `.safetensors` file, or else a folder with the settings too.

    `merged`: without frozen parameters and buffers that are not merged. `tail`: the mean of the last so many versions
    too. `parameter_names`: also of a model whose `state_dict()` has other names.
    ConfigError for what cannot be asked; BadCut, Corrupt or NotKept name what is wrong in the run's directory.
    """
    run = RunDir(path)
    _check_out(run, out, force)
    file = out if out.suffix == ".safetensors" else out / MODEL
    beside = file.with_name(f"{file.stem}-tail.safetensors")
    if tail is not None:
        _check_out(run, beside, force)
    head = load_newest(run) if cut is None else load_at_cut(run, cut)
    averaged = average_tail(run, tail) if tail is not None else None
    rest = find_unmerged(run, head.cut, merged=merged, parameter_names=parameter_names)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _save(file, head.model.tensors_by_name(), facts_of_model(head.run, head.round, head.versions), rest.tensors)
        if averaged is not None:
            _save(beside, averaged.tensors_by_name(), averaged.facts(), rest.tensors)
        if file != out and run.settings.exists():
            with staged(out / CONFIG) as draft:
                shutil.copyfile(run.settings, draft)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another place") from error
    remarks = (*head.remarks, *rest.remarks, *(averaged.remarks if averaged is not None else ()))
    made = (head.run, head.round, tuple(head.versions), head.cut, head.replayed)
    return ExportedModel(file, *made, remarks, beside if averaged is not None else None)


KEPT = {
    "best": "a script with a scorer (atoll.evaluate) keeps one, scored every `evaluate_every` rounds",
    "ema": "a script whose scorer is given by `atoll.evaluate(..., ema=0.9)` keeps one",
}
"""Models that an evaluator keeps, and how a script comes to have them."""


@dataclass(frozen=True, slots=True)
class KeptExport:
    file: Path
    facts: dict[str, str]
    """Metadata of the file."""
    remarks: tuple[str, ...]


def export_kept(
    path: Path, out: Path, kept: str, *, force: bool = False, merged: bool = False, parameter_names: bool = False
) -> KeptExport:
    """A model that the evaluator keeps, with the first learner's tensors that are not merged. `kept`: "best", what
    scored best, or "ema", the moving average."""
    run = RunDir(path)
    _check_out(run, out, force)
    source = {"best": run.best_model, "ema": run.ema_model}[kept]
    if not source.exists():
        raise ConfigError(
            f"{path} holds no {source.name}: {KEPT[kept]}{_describe_evaluator(run)}. "
            f"Without --{kept} the newest version is written"
        )
    newest = max(complete_cuts(run.cuts), default=0)
    rest = find_unmerged(run, newest, merged=merged, parameter_names=parameter_names)
    file = out if out.suffix == ".safetensors" else out / MODEL
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if rest.tensors:
            metadata = {"format": "pt", **read_model_facts(source)}
            save_whole(file, read_table(source), rest.tensors, metadata)
        else:
            with staged(file) as draft:
                shutil.copyfile(source, draft)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another place") from error
    return KeptExport(file, read_model_facts(file), rest.remarks)


def _describe_evaluator(run: RunDir) -> str:
    """Say where an evaluator that was started by hand keeps its models; empty: `atoll train` started this run's."""
    if run.settings.exists() and not load(run.settings).by_hand:
        return ""
    _, begun = next(read(run.journal, disk=LocalDisk()), (None, None))
    name = begun.run if isinstance(begun, BegunRecord) else "RUN"
    place = LEARNERS / name / EVALUATOR
    return (
        f"; an evaluator that was started by hand keeps it where it runs, in {place} or its --folder: "
        "copy it into the run's folder"
    )


def _check_out(run: RunDir, out: Path, force: bool) -> None:
    if not run.path.is_dir():
        known = run.path.parent.iterdir() if run.path.parent.is_dir() else ()
        near = get_close_matches(run.path.name, [one.name for one in known if one.is_dir()], n=1)
        meant = f": did you mean {run.path.parent / near[0]}?" if near else ": atoll ls lists the runs"
        raise ConfigError(f"there is no folder {run.path}{meant}")
    if not run.cuts.is_dir():
        raise ConfigError(f"{run.path} holds no run with parameters: there is no cuts/ in it")
    if out.resolve().is_relative_to(run.path.resolve()):
        raise ConfigError(f"{out} lies in the run's own directory: choose a place outside of {run.path}")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already: choose another name, or replace it with --force")


def _save(
    path: Path, tensors: Mapping[str, FloatArray], facts: Mapping[str, str], unmerged: Mapping[str, StoredTensor]
) -> None:
    """Like every model of ours; its metadata says what it is of. Equal tensors and facts give equal files: safetensors
    itself writes metadata in a random order."""
    save_whole(path, tensors, unmerged, {"format": "pt", **facts})


NOTHING_UNMERGED = "-".join([hashlib.blake2b(b"", digest_size=16).hexdigest()] * 2)
"""The digest of a learner that merges all of its model (learner/unmerged.py)."""
BUFFERS = "buffers/"
"""Under this prefix a learner's part of a cut holds buffers."""
HEADER_LIMIT_BYTES = 32 * 2**20
PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class UnmergedRest:
    """Tensors of an export beside the merged ones."""

    tensors: dict[str, StoredTensor]
    remarks: tuple[str, ...] = ()


def find_unmerged(run: RunDir, cut: int, *, merged: bool, parameter_names: bool) -> UnmergedRest:
    """Tensors that are not merged, by their names in the model; none of them with `merged`.

    ConfigError: `state_dict()` of the model has other names, and `parameter_names` are not asked for.
    """
    found = sorted(run.learners.glob(f"*/{UNMERGED}"))
    if not found:
        return _describe_unmerged_elsewhere(run, merged=merged, parameter_names=parameter_names)
    learner, tensors, facts = found[0].parent.name, read_table(found[0]), _read_facts(found[0])
    _check_names(facts.get("renamed", ()), parameter_names=parameter_names)
    if merged:
        return UnmergedRest({}, (f"left out: {_name_some(tensors)}",) if tensors else ())
    remarks = []
    if shards := facts.get("left_out"):
        remarks.append(f"left out: {_name_some(shards)}, of which each rank of {learner} holds a part")
    if not tensors:
        return UnmergedRest({}, tuple(remarks))
    held = read_manifest(run.cuts, cut).learners.get(learner) if cut in complete_cuts(run.cuts) else None
    whose = f"those that {learner} began with: cut {cut} has no others"
    if held is not None and (part := found[0].parent / held.file).exists():
        saved = read_table(part)
        tensors |= {name: saved[key] for name in tensors if (key := BUFFERS + name) in saved}
        whose = f"those of {learner}"
    return UnmergedRest(tensors, (*remarks, f"frozen parameters and local buffers are {whose}"))


def _describe_unmerged_elsewhere(run: RunDir, *, merged: bool, parameter_names: bool) -> UnmergedRest:
    """Name what is left out where no learner's folder is here, as the run's first learner told when it joined."""
    _, begun = next(read(run.journal, disk=LocalDisk()), (None, None))
    if not isinstance(begun, BegunRecord):
        return UnmergedRest({})
    _check_names(begun.renamed, parameter_names=parameter_names)
    if begun.unmerged:
        tensors = f"{_name_some(begun.unmerged)}, which {'is' if len(begun.unmerged) == 1 else 'are'} not merged"
    elif begun.frozen != NOTHING_UNMERGED:  # a learner of an earlier version, or one that compares nothing
        tensors = "frozen parameters and buffers that are not merged, if the model has any"
    else:
        return UnmergedRest({})
    wanted = run.learners / "NAME" / UNMERGED
    keeps = f"The run's first learner keeps them in {UNMERGED} of its folder: copy it to {wanted} and export again"
    if merged:
        return UnmergedRest({}, (f"left out: {_name_some(begun.unmerged)}",) if begun.unmerged else ())
    return UnmergedRest({}, (f"left out: {tensors}. {keeps}",))


def _check_names(renamed: Collection[str], *, parameter_names: bool) -> None:
    """ConfigError: `state_dict()` of the model has other names, and the names of its parameters are not asked for."""
    if renamed and not parameter_names:
        raise ConfigError(
            f"state_dict() of this model has other names than its parameters, such as {_name_some(renamed)}: any "
            "program that reads the file by names of state_dict() would drop these tensors. With --parameter-names it "
            "is written; docs/models.md says how to load it"
        )


def _name_some(names: Iterable[str]) -> str:
    shown = [f"'{name}'" for name in sorted(names)]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _read_facts(path: Path) -> dict[str, Any]:
    """Return the facts that a learner wrote beside the tensors (learner/unmerged.py)."""
    described = json.loads(read_model_facts(path).get("atoll", "{}"))
    facts: dict[str, Any] = described.get("states", {})
    return facts


def read_table(path: Path) -> dict[str, StoredTensor]:
    """What a safetensors file holds; ConfigError: it cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries: dict[str, Any] = json.loads(file.read(length)) if length <= HEADER_LIMIT_BYTES else {}
        entries.pop("__metadata__")
        found = {
            name: StoredTensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, stop - start)
            for name, entry in entries.items()
            for start, stop in [entry["data_offsets"]]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return found


def save_whole(
    path: Path,
    tensors: Mapping[str, FloatArray | StoredTensor],
    unmerged: Mapping[str, StoredTensor],
    metadata: Mapping[str, str],
) -> None:
    """One safetensors file of both; of a name that is in both, the merged tensor."""
    whole: dict[str, StoredTensor | FloatArray] = {**unmerged, **tensors}
    names = sorted(whole, key=lambda name: (-_item_bytes(whole[name]), name))  # so that each lies at a multiple of it
    text = _header({name: whole[name] for name in names}, metadata)
    with staged(path) as draft, draft.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            _write(whole[name], out)


def _header(whole: Mapping[str, StoredTensor | FloatArray], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for name, one in whole.items():
        start, end = end, end + _length(one)
        dtype = one.dtype if isinstance(one, StoredTensor) else "F32"
        entries[name] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _length(one: StoredTensor | FloatArray) -> int:
    return one.length if isinstance(one, StoredTensor) else one.nbytes


def _item_bytes(one: StoredTensor | FloatArray) -> int:
    return _length(one) // max(1, math.prod(one.shape))


def _write(one: StoredTensor | FloatArray, out: BinaryIO) -> None:
    if not isinstance(one, StoredTensor):
        out.write(np.ascontiguousarray(one).data)
        return
    with one.file.open("rb") as file:
        file.seek(one.start)
        for start in range(0, one.length, PIECE_BYTES):
            wanted = min(PIECE_BYTES, one.length - start)
            if len(piece := file.read(wanted)) < wanted:
                raise ConfigError(f"{one.file} ends too early: copy it again from the learner that wrote it")
            out.write(piece)
