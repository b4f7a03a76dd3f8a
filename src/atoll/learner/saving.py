"""A learner's part of a cut: captured between two steps, written in the background, one at a time.

The training process only copies; a thread writes the file and makes it durable. A cut that comes while the last one is
still being written is left out, with that reason: training is never held up for a disk. Parts of cuts that the run
keeps stay, and so do the newest few: whether their cuts will be complete is not known yet. So do those that the last
lives of this learner went on from (a file `lives` names them): without them the run could not be replayed. All others
are deleted.

A learner that is to leave saves its state beside them, for whoever is started next under its name. A file `run` says
which run the parts are of: where a learner joins another run from the same folder, they are removed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from atoll.learner.ending import say
from atoll.learner.preempt import DRAIN_S, FILE, LIMIT_S
from atoll.learner.snapshot import Snapshot, write
from atoll.protocol.effects import Saved
from atoll.protocol.errors import AtollError
from atoll.store.atomic import make_folder, write_atomic
from atoll.store.rundir import UNMERGED

RUN = "run"
LIVES = "lives"
MOST_LIVES = 3
"""Of so many lives, the newest, the parts stay that they went on from."""
NEWEST = 2
"""Parts that stay whatever became of their cuts: the one that is open, and the one before."""


class Saver:
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._results: SimpleQueue[Saved] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def reason_not_to(self) -> str:
        """Why nothing can be saved now; empty: it can."""
        if self._folder is None:
            return "it has no folder to save to (atoll learn --folder)"
        return "its last part is still being written" if self.busy else ""

    def take_part(self, cut: int, t: int, capture: Callable[[], Snapshot], kept: tuple[int, ...]) -> None:
        """Between two steps: only copies are made here. Why nothing is saved is told with the results."""
        if reason := self.reason_not_to():
            self.refuse(cut, t, reason)
            return
        try:
            snapshot = capture()
        except AtollError as error:
            self.refuse(cut, t, str(error))
        else:
            self.save(cut, t, snapshot, kept)

    def save_for_later(self, capture: Callable[[], Snapshot]) -> bool:
        """Whoever is started next under this name goes on with this inner optimizer; False: it has no folder."""
        if self._folder is None:
            return False
        self.finish(LIMIT_S - DRAIN_S)
        make_folder(self._folder)
        write(self._folder / FILE, capture())
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
        """The parts that lie here are of this run from now on."""
        if self._folder is None or not run or read_run(self._folder) == run:
            return
        with suppress(OSError):  # a disk that is full or gone costs cuts, not steps
            make_folder(self._folder)
            if read_run(self._folder):
                for part in list_parts(self._folder):
                    part.unlink(missing_ok=True)
            write_atomic(self._folder / RUN, run.encode())

    def save(self, cut: int, t: int, snapshot: Snapshot, kept: tuple[int, ...] = ()) -> None:
        """`kept`: the complete cuts that the run keeps."""
        assert not self.reason_not_to()
        # Not a daemon: an interpreter that ends waits for what is being written.
        self._thread = threading.Thread(target=self._write, args=(cut, t, snapshot, kept), name="atoll-cut")
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

    def finish(self, limit_s: float) -> None:
        if self._thread is not None:
            self._thread.join(limit_s)

    def _write(self, cut: int, t: int, snapshot: Snapshot, kept: tuple[int, ...]) -> None:
        assert self._folder is not None
        path = self._folder / part_name(cut)
        try:
            make_folder(self._folder)
            mark = write(path, snapshot)
            wanted = {*read_lives(self._folder), *(part_name(one) for one in kept)}
            for old in list_parts(self._folder)[:-NEWEST]:
                if old.name not in wanted:
                    old.unlink(missing_ok=True)
        except Exception as error:  # whatever it is: the syncer waits for an answer
            self.refuse(cut, t, f"its part could not be written: {error}")
        else:
            self._results.put(Saved(cut, t, path.name, mark))


def part_name(cut: int) -> str:
    return f"cut-{cut:06d}.safetensors"


def list_parts(folder: Path) -> list[Path]:
    """The oldest first."""
    return sorted(folder.glob("cut-*.safetensors"), key=_number)


def read_run(folder: Path) -> str:
    """Which run the parts in a folder are of; empty: nobody has said so."""
    try:
        return (folder / RUN).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def read_lives(folder: Path) -> list[str]:
    """The parts that the last lives went on from, the newest last."""
    try:
        return (folder / LIVES).read_text().split()
    except (OSError, UnicodeDecodeError):
        return []


def _number(part: Path) -> tuple[int, str]:
    """Orders parts by their cuts, also past six digits."""
    return len(part.name), part.name
