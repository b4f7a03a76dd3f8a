"""A learner's state on disk: its part of every snapshot of the run, for a later process to continue from.

A part holds the model, the inner optimizer, what the script registered, the random states, and the learner's place in
its run. Restored exactly, the learner is the same incarnation as before: same session, counters and base, as after a
lost connection. In its folder:

    cut-NNNNNN.safetensors    its part of that snapshot
    preempted.safetensors     saved on leaving, for the next process of this name, which deletes it once it has joined
    run                       the run that the parts belong to; joining another run moves them to a folder of its name
    lives                     the parts that the last processes continued from; a replay needs them

Saving: the training thread only begins to copy, between two steps; another thread waits for the copies, writes the file
and fsyncs it, one at a time, with rests while steps go on (store/disk.py): a syncer may commit rounds to the same disk.
The base is not changed before it is copied (`Boundary.hold_bases`). If the last part is still being written, the next
one is refused with that reason: no step waits for a disk. Parts of complete snapshots that the run keeps stay, as do
the newest few (whether their snapshots will be complete is not known yet) and those in `lives`. All others are deleted.

What a later process does with it: earlier.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import torch

from atoll.learner.capture import BegunSnapshot, Stateful
from atoll.learner.copy_room import CopyRoom
from atoll.learner.folder import RUN, list_parts, read_run
from atoll.learner.offload import ignore_graph_captures
from atoll.learner.script import DRAIN_S, FILE, LIMIT_S, say
from atoll.learner.snapshot import Snapshot, write
from atoll.learner.trained_model import TrainedModel
from atoll.mailbox.box import Mailbox
from atoll.protocol.errors import AtollError
from atoll.protocol.learner.effects import Saved
from atoll.protocol.limits import is_name
from atoll.protocol.messages import RankBoxes, TensorSpec
from atoll.protocol.settings import Settings
from atoll.store.atomic import make_folder, write_atomic
from atoll.store.disk import Rests
from atoll.store.removal import remove_gently
from atoll.store.rundir import UNMERGED


@dataclass
class RunPlace:
    """A learner's place in its run; a `Stateful`, so that it is saved with the other state."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.state = state_dict


def describe_place(
    box: Mailbox,
    settings: Settings,
    tensors: tuple[TensorSpec, ...],
    *,
    name: str,
    session: str,
    index: int,
    t: int,
    total: int,
    feed: dict[str, Any],
    boxes: tuple[RankBoxes, ...] = (),
) -> RunPlace:
    return RunPlace(
        {
            "learner": name,
            "session": session,
            "index": index,
            "run": box.run,
            "incarnation": box.count("incarnation"),
            "settings": msgspec.to_builtins(settings),
            "tensors": msgspec.to_builtins(tensors),
            "t": t,
            "total": total,
            "steps": box.steps.tolist(),
            "tokens": box.tokens.tolist(),
            "dropped": box.dropped.tolist(),
            "missed": box.missed.tolist(),
            "adopted": box.adopted.tolist(),
            "base_version": box.base_version.tolist(),
            "base": list(bases(box)),
            "feed": feed,
            **({"boxes": msgspec.to_builtins(boxes)} if boxes else {}),
        }
    )


def bases(box: Mailbox) -> Iterator[torch.Tensor]:
    """The held base of every fragment; nothing is copied."""
    return (torch.from_numpy(box.base(fragment)) for fragment in range(len(box.plan.fragments)))


def settings_of(state: dict[str, Any]) -> Settings:
    return msgspec.convert(state["settings"], Settings)


def fill_box(box: Mailbox, state: dict[str, Any], run: str = "") -> None:
    """The shared memory as it was; `run`: the run that goes on from it, where that is a new one.

    A base that was half written then has no version, and is fetched again.
    """
    for name in ("steps", "tokens", "dropped", "adopted", "base_version"):
        getattr(box, name)[:] = state[name]
    box.missed[:] = state.get("missed", 0)  # cuts of earlier versions do not tell
    for fragment, base in enumerate(state["base"]):
        box.base(fragment)[:] = base.numpy()
    box.run = run or state["run"]
    box.set_count("incarnation", state["incarnation"])


# ---- saving ---------------------------------------------------------------------------------------------------------

LIVES = "lives"
MOST_LIVES = 3
"""The parts that the newest so many lives continued from are kept."""
NEWEST = 2
"""Parts that stay whatever became of their cuts: the one that is open, and the one before."""


class Saver:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._results: SimpleQueue[Saved] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._rests, self._hurried = Rests(), False

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def reason_not_to(self) -> str:
        """Why nothing can be saved now; empty: it can."""
        if self._folder is None:
            return "it has no folder to save to (atoll learn --folder)"
        return "its last part is still being written" if self.busy else ""

    def take_part(self, cut: int, t: int, begin_capture: Callable[[], BegunSnapshot], kept: tuple[int, ...]) -> None:
        """Between two steps: copies are begun here. Why nothing is saved is told with the results."""
        if reason := self.reason_not_to():
            self.refuse(cut, t, reason)
            return
        try:
            begun = begin_capture()
        except AtollError as error:
            self.refuse(cut, t, str(error))
        else:
            self.save(cut, t, begun, kept)

    def save_for_later(self, begin_capture: Callable[[], BegunSnapshot]) -> bool:
        """Whoever is started next under this name goes on with this inner optimizer; False: it has no folder."""
        if self._folder is None:
            return False
        self.finish(LIMIT_S - DRAIN_S)
        make_folder(self._folder)
        write(self._folder / FILE, begin_capture().finish())
        return True

    def keep_unmerged(self, capture: Callable[[], Snapshot]) -> None:
        """Once, by the run's first learner: what of the model is in no version, for whoever exports it whole."""
        if self._folder is None:
            return
        try:
            work = (self._folder / UNMERGED, capture())
            threading.Thread(target=self._write_aside, args=work, name="atoll-unmerged").start()
        except AtollError as error:
            say(f"the model cannot be exported whole: {error}")

    def _write_aside(self, path: Path, snapshot: Snapshot) -> None:
        try:
            make_folder(path.parent)
            write(path, snapshot)
        except OSError as error:
            say(f"the model cannot be exported whole: {path} could not be written: {error}")

    def note_life(self, part: str) -> None:
        """This life went on from that part."""
        if self._folder is None or not (self._folder / part).exists():
            return
        with suppress(OSError):
            lives = [one for one in read_lives(self._folder) if one != part]
            write_atomic(self._folder / LIVES, "\n".join([*lives, part][-MOST_LIVES:]).encode())

    def enter_run(self, run: str) -> None:
        """The parts that lie here are of this run from now on. Those of another run are set aside, never removed."""
        if self._folder is None or not run or read_run(self._folder) == run:
            return
        with suppress(OSError):  # a disk that is full or gone costs cuts, not steps
            make_folder(self._folder)
            if is_name(other := read_run(self._folder)):
                _set_aside(self._folder, self._folder / other)
            write_atomic(self._folder / RUN, run.encode())

    def save(self, cut: int, t: int, begun: BegunSnapshot, kept: tuple[int, ...] = ()) -> None:
        """`kept`: the complete cuts that the run keeps."""
        assert not self.reason_not_to()
        self._rests = Rests()
        if self._hurried:
            self._rests.end()
        # Not a daemon: an interpreter that ends waits for what is being written.
        self._thread = threading.Thread(target=self._write, args=(cut, t, begun, kept), name="atoll-cut")
        self._thread.start()

    def refuse(self, cut: int, t: int, reason: str) -> None:
        self._results.put(Saved(cut, t, reason=reason))

    def results(self) -> list[Saved]:
        found: list[Saved] = []
        try:
            while True:
                found.append(self._results.get_nowait())
        except Empty:
            return found

    def hurry(self) -> None:
        """This learner makes no more steps: what it writes is waited for."""
        self._hurried = True
        self._rests.end()

    def finish(self, limit_s: float) -> None:
        if self._thread is not None:
            self._thread.join(limit_s)

    def _write(self, cut: int, t: int, begun: BegunSnapshot, kept: tuple[int, ...]) -> None:
        assert self._folder is not None
        path = self._folder / part_name(cut)
        ignore_graph_captures()
        try:
            make_folder(self._folder)
            mark = write(path, begun.finish(), self._rests)
            wanted = {*read_lives(self._folder), *(part_name(one) for one in kept)}
            for old in list_parts(self._folder)[:-NEWEST]:
                if old.name not in wanted:
                    with suppress(FileNotFoundError):
                        remove_gently(old)
        except Exception as error:  # whatever it is: the syncer waits for an answer
            self.refuse(cut, t, f"its part could not be written: {error}")
        else:
            self._results.put(Saved(cut, t, path.name, mark))


def part_name(cut: int) -> str:
    return f"cut-{cut:06d}.safetensors"


def _set_aside(folder: Path, aside: Path) -> None:
    make_folder(aside)
    for file in (*list_parts(folder), *(folder / name for name in (FILE, LIVES, UNMERGED, RUN))):
        if file.exists():
            file.replace(aside / file.name)
    say(f"the parts of run {aside.name} are in {aside} now")


def read_lives(folder: Path) -> list[str]:
    """The parts that the last lives went on from, the newest last."""
    try:
        return (folder / LIVES).read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


# ---- what is saved ---------------------------------------------------------------------------------------------------

PLACE = "atoll"
"""Under this name a learner's place in its run is saved beside what the script registered."""


class OwnState:
    def __init__(self, trained: TrainedModel, extras: Mapping[str, Stateful]) -> None:
        """`extras`: what the script registered, by name."""
        self._trained, self._extras = trained, extras
        self.room = CopyRoom()

    def make_room(self, box: Mailbox) -> None:
        """After the first step, when the optimizers have their states: so that the first cut holds nobody up."""
        if not self.room.is_begun:
            self.room.make_ready([*self._trained.large_tensors(), *bases(box)])

    def begin_capture(self, place: RunPlace) -> tuple[BegunSnapshot, list[Future[None]]]:
        """Also returns the copy under way of every fragment's base, which must not change until that is made."""
        extras, room, held = {**self._extras, PLACE: place}, self.room.take(), place.state["base"]
        begun = self._trained.begin_capture(extras, room=room, steady=held)
        return begun, [begun.packing.steady_copies[id(base)] for base in held]

    def restore_exactly(self, saved: Snapshot) -> dict[str, Any]:
        """Restore everything but random states; returns the place it was saved at."""
        place = RunPlace({})
        extras = {**self._extras, PLACE: place}
        self._trained.restore(extras, saved, rng=False)
        return place.state

    def restore_saved(self, saved: Snapshot) -> dict[str, Any]:
        """Restore what the run does not know: optimizer, schedules, random states; returns its place."""
        place = RunPlace({})
        extras = {**self._extras, PLACE: place}
        self._trained.restore(extras, saved, parameters=False)
        return place.state
