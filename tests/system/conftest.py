"""`atoll train` as a user starts it: real processes, watched through the run's events, none of them left behind."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from atoll import cli

Event = dict[str, Any]
MARK = "ATOLL_TEST_RUN"
WAIT_S = 240.0
"""Patience with what has to come, on a machine however crowded; how long it takes is for benchmarks/ to say."""
SCRIPTS = Path(__file__).parent / "scripts"


class Run:
    """One `atoll` command in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "run"
        self._process: subprocess.Popen[str] | None = None
        self._built_in = False
        """It trains the built-in workload and is to be replayed: see `replay_built_in`."""
        self._events: list[Event] = []
        self._read_bytes = 0
        """How much of the events' file is in `_events`: what waits looks there twenty times a second."""

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        return {**os.environ, MARK: str(self.folder), "COLUMNS": "200", **(more or {})}

    def start(self, *arguments: str | Path) -> Run:
        command = [sys.executable, "-m", "atoll.cli", *map(str, arguments)]
        env = self.environment()
        self._process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=heed_interrupts,
        )
        return self

    def beside(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """Another command of the same run, which ends with it."""
        command = [sys.executable, "-m", "atoll.cli", *map(str, arguments)]
        env = self.environment()
        with (self.folder / "beside.log").open("a") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=env, text=True, stdout=log, stderr=log, preexec_fn=heed_interrupts
            )

    def command(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """One that is soon done."""
        command = [sys.executable, "-m", "atoll.cli", *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            text=True,
            capture_output=True,
            timeout=WAIT_S,
            check=False,
        )

    def ask(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """The same in this process, where a process of its own would show nothing more and costs a second."""
        words, out, err, code = [str(word) for word in arguments], io.StringIO(), io.StringIO(), 0
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr(sys, "argv", ["atoll", *words])
            patch.setenv("COLUMNS", "200")
            patch.chdir(self.folder)
            try:
                cli.main()
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def train(self, *arguments: str | Path, replayed: bool = True) -> Run:
        """`replayed`: at its end, if it trains the built-in workload."""
        own_script = any(str(argument).endswith(".py") for argument in arguments)
        self._built_in = replayed and not own_script
        return self.start("train", "--out", self.out, *arguments)

    def replay(self, *more: str) -> dict[str, Any]:
        done = self.command("replay", self.out, "--json", *more)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (0 if found["identical"] else 1)
        return found

    def check_replay(self) -> dict[str, Any]:
        """Every round is made again by training, and every version has the same bits."""
        found = self.replay()
        assert found["identical"] and found["from_journal"] == [], json.dumps(found)
        last = max(event["round"] for event in self.events("round", "passed"))
        assert found["through"] >= last, "rounds of the last cycle may be skipped without a word"
        self._built_in = False  # once is enough
        return found

    def replay_built_in(self) -> None:
        """Every run of the built-in workload that came to its end in good order can be replayed bit for bit: no test of
        one has to ask for it."""
        if self._built_in and self._process is not None and self._process.returncode == 0:
            self.check_replay()

    def ended(self, code: int = 0) -> Run:
        """Wait for its end, which is to have this exit code."""
        assert self._process is not None
        self.stdout, self.stderr = self._process.communicate(timeout=WAIT_S)
        assert self._process.returncode == code, f"{self.stdout}\n{self.stderr}\n{self.logs()}"
        return self

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    # ---- what is known of it --------------------------------------------------------------------------------------

    def events(self, *kinds: str) -> list[Event]:
        if (path := self.out / "events.jsonl").exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read_bytes += len(whole + newline)
            self._events += [json.loads(line) for line in whole.splitlines()]
        return [event for event in self._events if not kinds or event["kind"] in kinds]

    def until(self, what: Callable[[list[Event]], bool]) -> None:
        """Wait until the events say so."""
        assert self._process is not None
        deadline = time.monotonic() + WAIT_S
        while not what(self.events()):
            assert self._process.poll() is None, f"ended too early: {self._process.communicate()}\n{self.logs()}"
            assert time.monotonic() < deadline, f"it never came: {self.events()[-20:]}\n{self.logs()}"
            time.sleep(0.05)

    def until_events(self, what: Callable[[list[Event]], bool]) -> None:
        """The same, when the first command has ended and others go on."""
        deadline = time.monotonic() + WAIT_S
        while not what(self.events()):
            assert time.monotonic() < deadline, f"it never came: {self.events()[-20:]}\n{self.logs()}"
            time.sleep(0.05)

    def address(self) -> str:
        self.until(lambda events: (self.out / "syncer.url").exists())
        return (self.out / "syncer.url").read_text()

    @staticmethod
    def free_port() -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return int(free.getsockname()[1])

    def pid_of_command(self) -> int:
        assert self._process is not None
        return self._process.pid

    def pid(self, process: str) -> int:
        return int([e for e in self.events("started") if e["process"] == process][-1]["pid"])

    @property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "summary.json").read_text()))

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted(self.out.glob("logs/*.log")))

    # ---- what is left of it ---------------------------------------------------------------------------------------

    def processes(self) -> list[int]:
        """Every living process that descends from the command."""
        mark = f"{MARK}={self.folder}".encode()
        return [pid for pid in _pids() if mark in _read(pid, "environ").split(b"\0") and _alive(pid)]

    def until_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, [_read(pid, "cmdline") for pid in left]
            time.sleep(0.05)

    def kill_everything(self) -> None:
        """All processes of the run at once, as a power cut would."""
        self.kill()
        self.until_gone(5.0)
        self._process = None

    def kill(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self._process is not None:
            self._process.communicate()


def members(events: list[Event]) -> set[tuple[str, int]]:
    """Learner and incarnation of everybody who was in a round."""
    return {(m["learner"], m["incarnation"]) for e in events if e["kind"] == "round" for m in e["members"]}


def heed_interrupts() -> None:
    """A shell in the background starts everything with Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _alive(pid: int) -> bool:
    return b"State:\tZ" not in _read(pid, "status")


@contextmanager
def browser_page(*arguments: str, **options: Any) -> Iterator[Any]:
    """An empty page in a real browser; where there is none, the test is skipped."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on the PATH: no page is opened")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=browser, args=["--no-sandbox", *arguments])
        yield opened.new_page(**options)
        opened.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that has to clean up after itself: whatever it started is gone two seconds after its end."""
    run = Run(tmp_path)
    try:
        yield run
        run.until_gone(2.0)
        run.replay_built_in()
    finally:
        run.kill()
