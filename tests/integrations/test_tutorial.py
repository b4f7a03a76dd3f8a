"""Every command of docs/tutorial.md does what the page says, in the page's order, in an empty folder.

A python block whose first line is a comment with a file's name is that file. An sh block is given to a shell; one that
`<!-- stays -->` stands before is left in its terminal, and has to end well by the next heading; one that
`<!-- until Ctrl-C -->` stands before likewise, once `<!-- Ctrl-C -->` has interrupted it, which it does not before the
run has made a round; one that `<!-- not run -->` stands before is the reader's set-up. A learner is waited for until it
is in the run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.architecture.pages import ROOT
from tests.system.conftest import WAIT_S, Run, heed_interrupts

from atoll.store.verify import verify_run

PAGE = ROOT / "docs" / "tutorial.md"
ON_SCRIPTS = ROOT / "docs" / "scripts.md"
BLOCK = re.compile(
    r"^(?:<!-- (stays|until Ctrl-C|not run) -->\n)?```(sh|python)\n(.*?)^```$|^(?:## |<!-- )(Ctrl-C|[1-9][^\n]+)",
    re.MULTILINE | re.DOTALL,
)


IN_RUN = re.compile(r"atoll learn(?!.*--evaluator)|ATOLL_JOIN")
"""Commands of learners."""


def shorten(text: str, port: int) -> str:
    """A tenth of the steps, and a port that is free."""
    return re.sub(r"--steps (\d+)0\b", r"--steps \1", text).replace("--port 7077", f"--port {port}")


@dataclass(frozen=True)
class Terminal:
    text: str
    process: subprocess.Popen[str]
    output: Path
    interrupted: bool = False
    """Ctrl-C is what ends it …"""
    rounds: int = 0
    """… in a run that had made so many rounds before."""


class Reader:
    """Somebody who follows the page."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env
        self._open: list[Terminal] = []
        self.said = dict[str, str]()
        """What each command printed, by its text."""

    def follow(self, page: str) -> None:
        for how, language, text, heading in BLOCK.findall(page):
            if heading:
                self.close_terminals()
            elif language == "python":
                name = text.partition("\n")[0].removeprefix("# ")
                (self.folder / name).write_text(text)
            elif how in ("stays", "until Ctrl-C"):
                self.open_terminal(text, interrupted=how == "until Ctrl-C")
            elif how != "not run":
                self._finish(self._start(text))
        self.close_terminals()

    def open_terminal(self, text: str, *, interrupted: bool = False) -> None:
        rounds = self._count_rounds(text)
        self._open.append(replace(self._start(text), interrupted=interrupted, rounds=rounds))
        self._wait_for_words(self._open[-1])

    def close_terminals(self) -> None:
        for terminal in self._open:
            if terminal.interrupted:
                self._wait_for_round(terminal)
                os.killpg(terminal.process.pid, signal.SIGINT)
        while self._open:
            self._finish(self._open.pop())

    def leave(self) -> None:
        for terminal in self._open:
            os.killpg(terminal.process.pid, signal.SIGKILL)
            terminal.process.wait()

    def _start(self, text: str) -> Terminal:
        output = self.folder.parent / f"said-{len(self.said) + len(self._open)}.txt"
        command = ["bash", "-euo", "pipefail", "-c", text]
        with output.open("w") as out:
            started = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.env,
                text=True,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                preexec_fn=heed_interrupts,
                process_group=0,
            )
        return Terminal(text.strip(), started, output)

    def _wait_for_words(self, terminal: Terminal) -> None:
        """Until it has said that it is there."""
        deadline = time.monotonic() + WAIT_S
        trains = terminal.text.startswith("atoll train")
        wanted = re.compile(
            "(joined|connected to) run " if IN_RUN.search(terminal.text) else "dashboard: " if trains else "."
        )
        while not wanted.search(terminal.output.read_text()) and terminal.process.poll() is None:
            assert time.monotonic() < deadline, f"{terminal.text} says nothing"
            time.sleep(0.05)

    def _wait_for_round(self, terminal: Terminal) -> None:
        deadline = time.monotonic() + WAIT_S
        while self._count_rounds(terminal.text) <= terminal.rounds:
            assert time.monotonic() < deadline, f"{terminal.text} makes no round"
            assert terminal.process.poll() is None, terminal.output.read_text()
            time.sleep(0.05)

    def _count_rounds(self, text: str) -> int:
        """Of the run that a command names."""
        named = re.search(r"atoll-runs/\w+", text)
        events = self.folder / named[0] / "events.jsonl" if named else self.folder
        return events.read_text().count('"kind":"round"') if events.is_file() else 0

    def _finish(self, terminal: Terminal) -> None:
        code = terminal.process.wait(2 * WAIT_S)
        self.said[terminal.text] = terminal.output.read_text()
        assert code == 0, f"{terminal.text}\n{self.said[terminal.text]}"


@pytest.fixture
def reader(run: Run, tmp_path: Path) -> Iterator[Reader]:
    folder = tmp_path / "try"
    folder.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    reader = Reader(folder, {**run.environment(), "PATH": path})
    yield reader
    reader.leave()


def check_outcome(reader: Reader) -> None:
    runs = reader.folder / "atoll-runs"
    for name in ("two", "kill", "open", "far"):
        report = verify_run(runs / name)
        assert report.ok, (name, report.problem)
    killed = (runs / "kill" / "events.jsonl").read_text()
    assert '"killed"' in killed
    assert "alone" in reader.said["python my_script.py"]
    opened = (runs / "open" / "events.jsonl").read_text()
    assert "third joined (incarnation 2)" in opened, "after the resume, by the same link"
    assert "third" in reader.said["atoll status here.txt"]
    assert '"kind":"score"' in (runs / "far" / "events.jsonl").read_text()
    assert (runs / "kill" / "report.html").stat().st_size > 100_000
    assert (reader.folder / "link.txt").stat().st_mode & 0o077 == 0
    assert reader.said["python load.py"].startswith("import argparse")


@pytest.mark.integrations
@pytest.mark.timeout(900)
def test_every_command_of_the_tutorial_works(run: Run, reader: Reader) -> None:
    reader.follow(shorten(PAGE.read_text(), run.free_port()))
    check_outcome(reader)


@pytest.mark.integrations
@pytest.mark.timeout(600)
def test_a_learner_joins_by_hand_as_the_page_on_scripts_says(reader: Reader) -> None:
    script = next(text for _, _, text, _ in BLOCK.findall(PAGE.read_text()) if text.startswith("# my_script.py"))
    (reader.folder / "my_script.py").write_text(script)
    section = ON_SCRIPTS.read_text().partition("## Learners by hand")[2].partition("\n## ")[0]
    [commands] = [text for _, language, text, _ in BLOCK.findall(section) if language == "sh"]
    reader.open_terminal("atoll train my_script.py --learners 1 --out atoll-runs/first", interrupted=True)
    reader.open_terminal(commands)
    reader.close_terminals()
    said = reader.said[commands.strip()]
    assert "round trip" in said and "joined run" in said and verify_run(reader.folder / "atoll-runs" / "first").ok


@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_the_killed_learner_of_the_tutorial_contributes_again(run: Run, reader: Reader) -> None:
    """As printed, but for the port."""
    reader.follow(PAGE.read_text().replace("--port 7077", f"--port {run.free_port()}"))
    check_outcome(reader)
    events = (reader.folder / "atoll-runs" / "kill" / "events.jsonl").read_text()
    assert "learner-1 joined (incarnation 2)" in events
