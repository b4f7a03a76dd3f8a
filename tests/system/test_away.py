"""A learner whose link alone is cut, while it trains on: real processes, read by their events and their ledger.

In every run of the tests: tests/protocol/test_returning.py in virtual time, and a short cut in test_chaos.py.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from atoll.chaos.performance import read_events
from atoll.chaos.tcp_relay import TcpRelay
from atoll.config import convert
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.launch.local import LocalRun
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

ALONE = "learner-0"
P = H = 8
CUT_IN_ROUND = 3 * P
CUT_S = 8.0


class CutLink:
    """A relay to the syncer for one learner of three, which is cut once the run is under way."""

    def __init__(self, folder: RunDir) -> None:
        self._folder = folder
        self._line: TcpRelay | None = None
        self._began, self._lost = asyncio.Event(), asyncio.Event()
        self.cut_at = 0.0

    async def open(self, url: str) -> dict[str, str]:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self._line = TcpRelay(address.hostname, address.port)
        await self._line.start()
        publish_secrets(self._line.host, self._line.port, published_secrets(address.hostname, address.port))
        return {ALONE: self._line.url}

    def watch(self, status: RunStatus | None) -> None:
        if status is not None and status.round >= CUT_IN_ROUND:
            self._began.set()
        if self.cut_at and any(event["kind"] == "lost" for event in self.own_events()):
            self._lost.set()

    async def cut(self) -> None:
        await self._began.wait()
        assert self._line is not None
        self.cut_at = time.time()
        self._line.silence(True)
        await self._lost.wait()
        await asyncio.sleep(CUT_S)  # the length of the cut is what is tried here
        self._line.reset()
        self._line.silence(False)

    def own_events(self) -> list[Event]:
        """Events of the learner since the cut: on a crowded machine any learner may be lost before it."""
        return [one for one in read_events(self._folder) if one["at"] > self.cut_at and one.get("learner") == ALONE]

    async def close(self) -> None:
        if self._line is not None:
            await self._line.stop()
            withdraw_secrets(self._line.host, self._line.port)


async def train(folder: RunDir, **rules: Any) -> tuple[list[Event], Event, Event]:
    """Return all events, and of the learner that is cut off the first "lost" and "returned" since the cut."""
    rules = {"learners": 3, "fragments": P, "sync_every": H, "heartbeat_s": 0.5, "lost_after_s": 3.0, **rules}
    rules |= {"steps": 240, "cut_every": 0, "wait_for_learners_s": 60.0, "adopt": "carry"}
    work = {"depth": 2, "batch": 1, "block": 32, "pace_s": 0.1}
    document = {"protocol": rules, "service": {"evaluate_every": 0}, "workload": work}
    link = CutLink(folder)
    run = LocalRun(convert(document, "the test"), folder, evaluator=False, route=link.open, watch=link.watch)
    run.beside = link.cut
    try:
        await run.run()
    finally:
        await link.close()
    kinds = [next(one for one in link.own_events() if one["kind"] == kind) for kind in ("lost", "returned")]
    return read_events(folder), kinds[0], kinds[1]


def test_the_steps_of_a_learner_that_is_cut_off_alone_are_merged(tmp_path: Path) -> None:
    events, lost, back = asyncio.run(train(RunDir.create(tmp_path / "run")))
    print(back["text"])
    assert back["away_s"] >= CUT_S
    assert "learner-0 is connected again after " in back["text"]
    log = RunDir(tmp_path / "run").log(ALONE).read_text()
    again = [line for line in log.splitlines() if "connected again" in line]
    assert (
        again and " steps made meanwhile " in again[-1] and log.rindex("connected again") > log.rindex("out of reach")
    )
    assert back["steps"] >= 0.25 * CUT_S / 0.1, "it trained on"
    assert back["kept"] + back["merged"] >= 0.95 * back["steps"] and back["dropped"] < 1
    began, ended = lost["t"], lost["t"] + back["steps"]
    rounds = [event for event in events if event["kind"] == "round"]
    first = next(number for number, event in enumerate(rounds) if event["at"] > back["at"])
    own = [one for event in rounds[: first + 2 * P] for one in event["members"] if one["learner"] == ALONE]
    merged = sum(max(0, min(one["t"], ended) - max(one["t"] - one["steps"], began)) for one in own)
    assert merged >= 0.95 * back["steps"] * P
    assert next(event["fates"] for event in events if event["kind"] == "finished")[ALONE]["merged_share"] >= 0.97


def test_past_abandon_s_the_steps_of_the_absence_do_not_count(tmp_path: Path) -> None:
    _, _, back = asyncio.run(train(RunDir.create(tmp_path / "run"), abandon_s=6.0))
    print(back["text"])
    assert "longer than abandon_s = 6: none of the" in back["text"]
    assert "its data was issued again" in back["text"]
    assert (back["kept"], back["dropped"]) == (0.0, back["steps"])
