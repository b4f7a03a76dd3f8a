"""The disk of a run fills up while it trains: an alarm is raised, nothing is lost, and with room the run goes on.

The disk is a small file system of its own (tmpfs, which takes root); where none can be mounted, and once more in any
case among the long tests, writes that find no room are made to fail by a shim around os.write (crashing/full.py).
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import SCRIPTS, Event, Run, members
from tests.system.crashing import facts, full
from tests.system.crashing.facts import Outage

from atoll.fabric.transfer import get_json
from atoll.telemetry.events import parse

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

CRASHING = Path(__file__).parent / "crashing"
DIARY = (SCRIPTS / "diary.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--learners", "2")
SIZE = "16m"


class SmallDisk:
    """A mounted file system, filled to its last byte by somebody else's file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self) -> None:
        with (self.folder / "filler").open("wb", buffering=0) as file:
            piece = bytes(65536)
            while piece:
                try:
                    file.write(piece)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    piece = piece[: len(piece) // 2]

    def free(self) -> None:
        (self.folder / "filler").unlink()


class SaidToBeFull(SmallDisk):
    """A folder like any other, in which the run's processes find no room."""

    def fill(self) -> None:
        (self.folder.parent / full.MARK).touch()

    def free(self) -> None:
        (self.folder.parent / full.MARK).unlink()


@pytest.fixture(params=["mounted", "said to be full"])
def disk(request: pytest.FixtureRequest, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """Holds the run's directory; the learners' diaries lie elsewhere."""
    monkeypatch.setattr(Run, "events", _events)
    folder = run.folder / "disk"
    folder.mkdir()
    run.out = folder / "run"
    if request.param == "mounted" and _mount(folder):
        try:
            yield SmallDisk(folder)
            run.until_gone(2.0)
        finally:
            run.kill()  # a file system in use cannot be taken away
            subprocess.run(["umount", str(folder)], check=True)
    else:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CRASHING), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("ATOLL_FULL_DISK", str(folder))
        yield SaidToBeFull(folder)


def _events(self: Run, *kinds: str) -> list[Event]:
    """As every reader of ours does it: a line that a full disk tore is passed over."""
    path = self.out / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [event for event in parse(lines) if not kinds or event["kind"] in kinds]


def _mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def status(run: Run) -> dict[str, Any]:
    url = (run.out / "syncer.url").read_text()
    return dict(asyncio.run(get_json(url, "/v1/status")))


def until_alarmed(run: Run) -> str:
    """The alarm on the screens: events are written to the same disk, so they can only come later."""
    text = ""

    def alarmed(events: object) -> bool:
        nonlocal text
        text = status(run)["alarm"]
        return bool(text)

    run.until(alarmed)
    return text


def test_a_full_disk_raises_an_alarm_and_costs_nothing_but_time(run: Run, disk: SmallDisk) -> None:
    run.train(*DIARY)
    run.until(lambda events: both_train(events, since=0.0))
    disk.fill()
    filled = time.time()
    assert "nothing can be committed" in until_alarmed(run)
    alarmed = time.time()
    steps = {learner: diary[-1]["t"] for learner, diary in facts.diaries(run).items() if "t" in diary[-1]}
    committed = status(run)["round"]
    run.until(lambda events: all(_newest(run, learner) > t + 100 for learner, t in steps.items()))
    assert status(run)["round"] - committed <= 1, "one round may wait for its record, none goes past it"
    disk.free()
    freed = time.time()
    run.until(lambda events: both_train(events, since=freed))
    run.interrupt()
    run.ended()
    over = [e["over"] for e in run.events("alarm")]
    assert over == sorted(over) and set(over) == {False, True}, "raised, and over at last"
    assert any("make room on that disk" in e["text"] for e in run.events("alarm"))
    again = min(e["at"] for e in run.events("round") if e["at"] > freed)
    print(f"rounds again {again - freed:.2f} s after there was room, {again - filled:.1f} s after it ran full")
    facts.check_kept_stepping(run, [Outage("a full disk", filled, again)])
    assert not run.events("restarted")
    facts.check_rounds(run, most_untold=0)
    told = [line for diary in facts.diaries(run).values() for line in diary if "version" in line]
    assert not [line for line in told if alarmed < line["at"] < freed], "nobody is told what is not durable"
    assert facts.check_adopted(run) == len(told) > 10
    assert facts.check_files(run).facts["fragment_tokens"]["lost"] == 0


def both_train(events: list[Event], since: float) -> bool:
    """Twenty rounds since then, and both learners in some of them."""
    rounds = [event for event in events if event["kind"] == "round" and event["at"] > since]
    return len(rounds) >= 20 and len({name for name, _ in members(rounds)}) == 2


def _newest(run: Run, learner: str) -> int:
    return int(next(line["t"] for line in reversed(facts.diaries(run)[learner]) if "t" in line))
