"""What an earlier life of a learner left, and what of it this process continues from.

Rules:
- exactly (the run resumes from the same snapshot): everything is as it was, and the same incarnation goes on;
- otherwise the parameters are the run's, and the rest is restored;
- where a stream was read to is taken from the newest part also by a learner that takes all else from a peer, as one
  does that was killed: a peer reads another share;
- random states are restored last, once the learner has joined: joining may use them;
- what was saved on leaving comes before a snapshot's part, until this learner has joined: its next cut is newer. One
  that ends before has saved nothing, and the next process needs it again;
- a supervisor names the part to continue from, or none (ATOLL_STATE). Without it a learner continues from the newest
  readable part in its own folder if that is of this run and fits; otherwise it says so and starts afresh;
- whoever holds other boxes than were saved gets the state cut along its own (resharding.py).

What is in the folder, and how it came there: saved_state.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from atoll.learner.folder import list_parts, read_run
from atoll.learner.packing import Unpacking
from atoll.learner.ranks import RankGroup
from atoll.learner.resharding import PLACE, make_whole_boxes, part_of_rank, refit, saved_boxes
from atoll.learner.script import FILE, say
from atoll.learner.snapshot import Snapshot, read
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.limits import is_name
from atoll.protocol.messages import RankBoxes, TensorSpec

FitPart: TypeAlias = Callable[[Path, str], Snapshot]
"""Reads a rank's own part: of the folder of rank 0, a file."""


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What an earlier life left."""

    snapshot: Snapshot
    exact: bool
    """Restored with its place in the run: the same incarnation goes on."""
    file: str
    run: str = ""
    """The run of the folder it was found in; empty for one that ATOLL_STATE names: that one has to fit."""
    left: Path | None = None
    """The file, where it was saved on leaving: removed once this learner has joined."""


def find_earlier_state(
    folder: Path | None,
    run: str,
    tensors: Sequence[TensorSpec],
    ranks: RankGroup | None = None,
    boxes: tuple[RankBoxes, ...] = (),
) -> SavedPart | None:
    """What this process continues from, as its boxes have it. `boxes`: those of all ranks, where there are several."""
    if ranks is not None:
        part = find_part_of_ranks(ranks, folder, run, partial(_fit_part, ranks.rank, boxes, tensors))
        same = part is not None and saved_boxes(part.snapshot) == boxes
        return part if part is None or same else replace(part, exact=False)
    part = find_saved_part(folder, run)
    if part is None or folder is None or not saved_boxes(part.snapshot):
        return part
    root = Path(os.environ.get("ATOLL_STATE") or folder / part.file).parent
    try:
        fitted = refit(part.snapshot, root, part.file, make_whole_boxes(tensors), tensors)
    except ConfigError:
        if part.left is not None:  # it would end every later process of this name as well
            part.left.unlink()
        raise
    return replace(part, snapshot=fitted, exact=False)


def _fit_part(
    rank: int, boxes: tuple[RankBoxes, ...], tensors: Sequence[TensorSpec], root: Path, file: str
) -> Snapshot:
    """A rank's own part where it was saved by as many ranks in the same layout, else what lies in its boxes."""
    path = part_of_rank(root, rank, file)
    if path.exists() and saved_boxes(part := read(path)) == boxes:
        return part
    return refit(read(root / file), root, file, boxes[rank], tensors)


def find_saved_part(folder: Path | None, run: str = "") -> SavedPart | None:
    """What was saved on leaving; else what ATOLL_STATE names, nothing if it is empty; else, where it is not set, the
    newest part in this learner's folder. Exactly: only what ATOLL_STATE names. `run`: the run that it joins; empty: not
    known yet."""
    path, exact = os.environ.get("ATOLL_STATE"), os.environ.get("ATOLL_EXACT") == "1"
    if folder is not None and is_name(run) and read_run(folder) != run == read_run(folder / run):
        folder = folder / run  # another run had the folder in between
    of = read_run(folder) if folder is not None else ""
    other = bool(run and of and run != of)
    if folder is not None and not exact and not other and (snapshot := _read_left_state(folder / FILE)) is not None:
        return SavedPart(snapshot, False, FILE, of, folder / FILE)
    if path:
        return SavedPart(read(Path(path)), exact, Path(path).name)
    if path is None and folder is not None and of and not other:
        return _find_own_part(folder, of)
    return None


def find_part_of_ranks(ranks: RankGroup, folder: Path | None, run: str, fit: FitPart) -> SavedPart | None:
    """The same for every rank of a learner; rank 0 says which, and `fit` reads a rank's own from what all saved."""
    state, exact = os.environ.get("ATOLL_STATE"), os.environ.get("ATOLL_EXACT") == "1"
    path = folder / FILE if folder is not None and not exact and (folder / FILE).exists() else None
    if path is None and state:
        path = Path(state)
    if path is None and state is None and folder is not None and (of := read_run(folder)) and run in ("", of):
        path = next(iter(reversed(list_parts(folder))), None)
    found = ranks.share(str(path) if path is not None and ranks.rank == 0 else "", str)
    if not found:
        return None
    root, file = Path(found).parent, Path(found).name
    named = bool(state) and file != FILE
    left = folder / FILE if file == FILE and folder is not None else None
    part, reason = None, ""
    try:
        part = SavedPart(fit(root, file), exact, file, "" if named else run, left)
    except (AtollError, OSError) as error:
        reason = str(error)
    reason = next(filter(None, ranks.gather(reason, str)), "")  # all have read it, or none goes on with it
    if reason and named:
        raise ConfigError(reason)
    if reason and left is not None:
        left.unlink(missing_ok=True)
    if reason and ranks.rank == 0:
        say(f"{file} in {root} is not used, the inner optimizer begins afresh: {reason}")
    return None if reason else part


def remember_feed(folder: Path, run: Callable[[], str]) -> Callable[[], dict[str, Any]]:
    """Reads where the data was in the part that is the newest now, once somebody asks; empty: there is none of this
    run."""
    part, of = next(iter(reversed(list_parts(folder))), None), read_run(folder)

    def read_feed() -> dict[str, Any]:
        if part is None or (of and of != run()):
            return {}
        with suppress(AtollError, OSError, KeyError):
            snapshot = read(part)
            found: dict[str, Any] = Unpacking(snapshot.tensors).unpack(snapshot.states[PLACE])["feed"]
            return found
        return {}

    return read_feed


def _read_left_state(path: Path) -> Snapshot | None:
    """A damaged one would end every later process of this name as well: it is kept under another name."""
    if not path.exists():
        return None
    try:
        return read(path)
    except AtollError as error:
        kept = path.replace(path.with_suffix(".damaged"))
        say(f"{error}; it is kept as {kept.name} and not used")
        return None


def _find_own_part(folder: Path, run: str) -> SavedPart | None:
    """The newest that can be read; None: there is none."""
    for part in reversed(list_parts(folder)):
        with suppress(AtollError, OSError):
            return SavedPart(read(part), False, part.name, run=run)
    return None
