"""Start and watch the processes of one small synchronous run.

Everything that waits for time is turned off by settings: pulls have minutes, no learner is lost or stalled, no
heartbeat is due. So a run takes the same decisions on a machine however slow. Learners join one after the other.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
SCRIPT = FOLDER / "exact_steps.py"
WAIT_S = 600.0
LEARNERS = 2
PATIENT = {
    "synchronous": "true", "wait_for_learners_s": 600, "startup_s": 600, "assemble_s": 600, "join_stall_s": 600,
    "patience_s": 600, "heartbeat_s": 100, "lost_after_s": 600, "stalled_after_s": 600, "pull_floor_s": 600,
    "cut_wait_s": 600, "evaluate_every": 0,
}  # fmt: skip


SECTIONS = (
    "journal", "members", "tapes", "adopted", "shards", "sums", "sent", "answers", "events", "model", "replay",
)  # fmt: skip


class RunStopped(Exception):
    """A run did not come to its end."""


@dataclass(frozen=True)
class Layout:
    shards: int = 1
    ranks: int = 1
    relay: bool = False


LAYOUTS = {
    "plain": Layout(),
    "ranks": Layout(ranks=2),
    "shards": Layout(shards=2),
    "relay": Layout(relay=True),
    "ranks-shards": Layout(ranks=2, shards=2),
}


@dataclass(frozen=True)
class Case:
    """A run to record."""

    layout: str
    name: str
    settings: dict[str, object]
    options: tuple[str, ...] = ()
    """Of the syncer."""
    script: tuple[str, ...] = ()
    """Options of exact_steps.py."""
    hold: str = ""
    """A request of learner-1's couriers that waits until `drive` is done with the run (tap.py)."""
    held: int = 1
    """How many times it is sent: by each rank, to each shard that has a part."""
    drive: Callable[[LockstepRun], None] | None = None
    """What is done to the run while it goes on."""
    may_fail: tuple[str, ...] = ()
    """Processes that do not end well, since the case ends them."""
    replayed: bool = True
    """The run is replayed: every version again, bit for bit."""
    sections: tuple[str, ...] = SECTIONS
    """What is compared of it (lockstep_lines.py)."""
    about: str = ""
    """What it is for."""

    @property
    def title(self) -> str:
        return f"{self.layout}/{self.name}"


class LockstepRun:
    """The processes of one case, in a folder of their own. Used in a with statement, which ends them all."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.layout, self.folder = case, LAYOUTS[case.layout], folder
        self.out, self.tap = folder / "run", folder / "tap"
        shutil.rmtree(folder, ignore_errors=True)
        self.tap.mkdir(parents=True)
        self._log = (folder / "log").open("w")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.replayed: list[str] = []
        """What the replay said."""
        self._commands: dict[str, Callable[[], subprocess.Popen[bytes]]] = {}
        """How each process is started, also again after its death."""

    def __enter__(self) -> LockstepRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._log.close()

    # ---- starting -------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """Start every process, and wait until the run is over."""
        self._start_syncer()
        url = self.url = self._wait_for_text(self.out / "syncer.url")
        for number in range(2, self.layout.shards + 1):
            self._start_shard(number)
        if self.layout.relay:
            self._start_relay()
            url = self._wait_for_text(self.folder / "relay" / "link")
        for number in range(LEARNERS):
            self._start_learner(number, url)
        for number in range(LEARNERS):
            (self.folder / f"may-join-{number}").touch()
            self._wait_for_learner(number)
        if self.case.hold:
            self.wait_until(self._all_are_held, "learner-1 is about to send")
            if self.case.drive is not None:
                self.case.drive(self)
            (self.folder / "go-on").touch()
        self.wait_until(self._all_have_ended, "the run ends")

    def _start_syncer(self) -> None:
        words = ["--out", self.out, "--port", free_port(), "--learners", LEARNERS, *self.case.options]
        if self.layout.shards > 1:
            words += ["--shard", f"1/{self.layout.shards}"]
        for name, value in {**PATIENT, **self.case.settings}.items():
            words += ["--set", f"{name}={value}"]
        self._start("syncer", lambda: self._spawn_cli("syncer", *(("--resume", self.out) if self._began else words)))

    @property
    def _began(self) -> bool:
        return "syncer" in self._processes

    def _start_shard(self, number: int) -> None:
        words = ["--shard", f"{number}/{self.layout.shards}", "--join", self.url, "--port", free_port()]
        words += ["--out", self.out / "shards" / str(number)]
        self._start(f"shard-{number}", lambda: self._spawn_cli("syncer", *words))

    def _start_relay(self) -> None:
        words = ["--join", self.url, "--out", self.folder / "relay", "--name", "eu", "--port", free_port()]
        self._start("relay", lambda: self._spawn_cli("relay", *words))

    def _start_learner(self, number: int, url: str) -> None:
        ranks, port = self.layout.ranks, free_port()
        words = [str(SCRIPT), *self._script_words]
        for rank in range(ranks):
            more = {"ATOLL_JOIN": url, "ATOLL_LEARNER": f"learner-{number}", "RANK": str(rank)}
            more["ATOLL_FOLDER"] = str(self.folder / f"of-{number}")
            if number == 1 and self.case.hold:
                more["ATOLL_HOLD"] = self.case.hold
            if ranks > 1:
                more |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self._start(f"learner-{number}.{rank}", partial(self._spawn, words, more))

    @property
    def _script_words(self) -> list[str]:
        return ["--layout", "fsdp" if self.layout.ranks > 1 else "plain", *self.case.script]

    def _start(self, name: str, command: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._commands[name] = command
        self._processes[name] = command()

    def _spawn_cli(self, verb: str, *words: object) -> subprocess.Popen[bytes]:
        return self._spawn(["-m", "atoll.cli", verb, *map(str, words)], {})

    def _spawn(self, words: Sequence[str], more: dict[str, str]) -> subprocess.Popen[bytes]:
        env = {**self._env, **more}
        return subprocess.Popen([sys.executable, *words], cwd=self.folder, env=env, stdout=self._log, stderr=self._log)

    @property
    def _env(self) -> dict[str, str]:
        paths = (FOLDER, ROOT / "tests/startup", ROOT / "src")
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "ATOLL_STARTED_BY": str(os.getpid()),
            "ATOLL_TAP": str(self.tap),
            "ATOLL_TEST_KERNELS": "plain",
            "OMP_NUM_THREADS": "1",
            "SSL_CERT_FILE": os.devnull,
            "SSL_CERT_DIR": os.devnull,
            "XDG_STATE_HOME": str(self.folder / "state"),
        }

    # ---- waiting --------------------------------------------------------------------------------------------------

    def wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        """Wait for something to come. RunStopped: a process failed, or the time is over."""
        deadline = time.monotonic() + WAIT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise RunStopped(f"{self.case.title}: {what}: not within {WAIT_S:g} s\n{self._read_log()}")
            for name, process in list(self._processes.items()):
                if process.poll() and name not in self.case.may_fail:
                    raise RunStopped(f"{self.case.title}: {name} ended with {process.poll()}\n{self._read_log()}")
            time.sleep(0.02)

    def _wait_for_text(self, path: Path) -> str:
        self.wait_until(lambda: path.exists() and bool(path.read_text()), f"{path.name} is written")
        return path.read_text().strip()

    def _wait_for_learner(self, number: int) -> None:
        self.wait_until(lambda: len(self.read_events("joined")) > number, f"learner-{number} joins")

    def _all_are_held(self) -> bool:
        return len(list(self.folder.glob("held-*"))) == self.case.held

    def _all_have_ended(self) -> bool:
        return all(process.poll() is not None for process in self._processes.values())

    def read_tap(self, process: str) -> str:
        return "".join(path.read_text() for path in sorted(self.tap.glob(f"{process}.*.jsonl")))

    def restart(self, name: str) -> None:
        """Kill a process, and start it again."""
        self._processes[name].kill()
        self._processes[name].wait()
        self._processes[name] = self._commands[name]()

    def replay(self) -> None:
        """Train every version once more, from the journal, and note what came of it."""
        if not self.case.replayed:
            return
        words = ["-m", "atoll.cli", "replay", self.out, "--json", SCRIPT, "--", *self._script_words]
        env = {**self._env, "ATOLL_TAP": ""}
        try:
            done = subprocess.run(
                [sys.executable, *map(str, words)],
                cwd=self.folder,
                env=env,
                capture_output=True,
                text=True,
                check=False,
                timeout=WAIT_S,
            )
        except subprocess.TimeoutExpired:
            raise RunStopped(f"{self.case.title}: the replay was not done within {WAIT_S:g} s") from None
        if not done.stdout:
            raise RunStopped(f"{self.case.title}: the replay said nothing\n{done.stderr[-4000:]}")
        self.replayed = [f"{name}: {json.dumps(value)}" for name, value in sorted(json.loads(done.stdout).items())]

    def kill_courier(self, name: str) -> None:
        """Kill the courier of a rank, such as learner-1.1."""
        [path] = self.tap.glob(f"{name}.*.jsonl")
        os.kill(int(path.name.rsplit(".", 2)[1]), signal.SIGKILL)

    # ---- looking --------------------------------------------------------------------------------------------------

    def read_events(self, *kinds: str) -> list[dict[str, Any]]:
        path = self.out / "events.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in events if not kinds or event["kind"] in kinds]

    def _read_log(self) -> str:
        return (self.folder / "log").read_text()[-4000:]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
