"""The syncer asks a learner to leave: a real learner in a process of its own, beside one that stays."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.learner.test_two_learners import SCRIPT

from atoll.config import convert
from atoll.learner.script import FILE
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.run_store import RunStore
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

WAIT_S = 180.0


class Run:
    def __init__(self, path: Path) -> None:
        self.path, self.events, self._news = path, list[dict[str, Any]](), asyncio.Event()
        out = RunDir.create(path / "run")
        self.run_store = RunStore(out, acquire(out.journal))
        rules = {"learners": 2, "fragments": 2, "sync_every": 4, "codec": "fp32", "tokens": 100_000_000}
        config = convert({"protocol": rules}, "the test")
        self.service = SyncerService(config, run="drained", events=EventLog(self._note), run_store=self.run_store)

    def _note(self, line: bytes) -> None:
        self.events.append(json.loads(line))
        self._news.set()

    async def until(self, kind: str, learner: str, count: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while len(found := [e for e in self.events if e["kind"] == kind and _names(e, learner)]) < count:
                self._news.clear()
                await self._news.wait()
        return found[-1]

    async def learner(self, name: str) -> asyncio.subprocess.Process:
        (self.path / "script.py").write_text(SCRIPT)
        env = {"ATOLL_SYNCER": f"http://127.0.0.1:{self.service.server.port}", "ATOLL_LEARNER": name}
        env |= {"ATOLL_ROLE": "learner", "ATOLL_FOLDER": str(self.path / name)}
        command = (sys.executable, str(self.path / "script.py"), str(self.path / f"{name}.json"))
        return await asyncio.create_subprocess_exec(*command, env={**os.environ, **env})


def _names(event: dict[str, Any], learner: str) -> bool:
    return event.get("learner") == learner or any(m["learner"] == learner for m in event.get("members", ()))


@pytest.mark.faults
async def test_a_drained_learner_leaves_with_code_0_and_nothing_is_lost(tmp_path: Path) -> None:
    run = Run(tmp_path)
    serving = asyncio.ensure_future(run.service.run(lambda parameters: None))
    await run.service.started.wait()
    stays, leaves = await run.learner("learner-0"), await run.learner("learner-1")
    await run.until("round", "learner-0", 2)
    await run.until("round", "learner-1", 2)
    assert (await run.service.drain("learner-1")).startswith("learner-1 is leaving: it stopped at step ")
    assert await asyncio.wait_for(leaves.wait(), WAIT_S) == 0
    left = await run.until("left", "learner-1")
    assert "it was drained: the operator asked; its state is saved" in left["text"]
    assert left["unmerged_tokens"] == 0 and (tmp_path / "learner-1" / FILE).exists()
    assert json.loads((tmp_path / "learner-1.json").read_text())["done"]
    assert run.service._machine is not None
    assert run.service._machine.history.ledger.totals().whole()["lost"] == 0
    await run.until("round", "learner-0", 1 + sum(e["kind"] == "round" for e in run.events))
    run.service.end("the test is over")
    assert await asyncio.wait_for(stays.wait(), WAIT_S) == 0
    await asyncio.wait_for(serving, WAIT_S)
    run.run_store.close()
