"""A data-parallel run on this machine: M ranks average their gradients at every step. If one dies, all die."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from atoll.baselines.figures import RankLog, RankMessage
from atoll.config import Config
from atoll.launch.children import Child, cores, describe_exit
from atoll.launch.local import RUNNER
from atoll.launch.ranks import find_free_port
from atoll.observe.summary import Summary
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.store.atomic import Appender, write_atomic
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import hold_run
from atoll.telemetry.events import EventLog

TICK_S = 0.2


@dataclass
class DataParallelRun:
    config: Config
    out: RunDir
    steps: int
    watch: Callable[[RankMessage], None] = lambda report: None

    async def run(self) -> Summary:
        """The summary of the run."""
        with hold_run(self.out.path):
            return await self._run_held()

    async def _run_held(self) -> Summary:
        write_atomic(self.out.settings, self.config.toml())
        ranks = [self._make_rank(rank) for rank in range(self.config.protocol.learners)]
        self._reports: list[RankMessage] = []
        self._log = RankLog(ranks[0].log)
        began = time.time()
        sink = Appender(self.out.events)
        self._events = EventLog(sink)
        try:
            for child in ranks:
                child.start()
            while any(child.running for child in ranks):
                self._take_reports()
                self._check_exits(ranks)
                await asyncio.sleep(TICK_S)
            self._check_exits(ranks)
            self._take_reports()
        finally:
            for child in ranks:
                child.kill_all()
            sink.close()
        return self._summarise(time.time() - began)

    def _check_exits(self, ranks: list[Child]) -> None:
        for child in ranks:
            if child.process is not None and (code := child.process.poll()):
                error = ConfigError if code == 2 else RunFailed
                words = child.last_words().removeprefix("atoll: ")
                raise error(words or f"{child.name} died: {describe_exit(code)}")

    def _take_reports(self) -> None:
        """New reports of rank 0, from its log."""
        for report in self._log.read_new():
            self._reports.append(report)
            self._events.say(report["kind"], f"data-parallel {report['kind']}", report)
            self.watch(report)

    def _summarise(self, total_s: float) -> Summary:
        losses = [r["validation_loss"] for r in self._reports if r["kind"] == "validation"]
        end = next((r for r in self._reports if r["kind"] == "end"), None)
        if end is None or not losses:
            raise RunFailed(f"the run ended without its last report; its logs are in {self.out.logs}")
        tokens = max(int(r.get("tokens", 0)) for r in self._reports)
        return {
            "algorithm": "data-parallel",
            "reason": f"{self.steps:,} steps are done",
            "learners": self.config.protocol.learners,
            "steps": self.steps,
            # Every step merges the gradients of all ranks, or there is no run at all. What nobody measured is null.
            "rounds": self.steps,
            "effective_h": 1.0,
            "participation": 1.0,
            "merged_share": 1.0,
            "uptime": 1.0,
            "liveness": 1.0,
            "goodput": None,
            "bytes_per_token": None,
            "longest_gap_s": None,
            "median_gap_s": None,
            "restarts": 0,
            "tokens": {
                "computed": tokens,
                "merged": tokens,
                "dropped": 0,
                "lost": 0,
                "rolled_back": 0,
                "filtered": 0,
                "in_flight": 0,
            },
            "validation_loss_start": losses[0],
            "validation_loss_end": losses[-1],
            "wall_s": end["train_s"],
            "total_s": total_s,
            "sample": end["sample"],
        }

    def _make_rank(self, rank: int) -> Child:
        world = self.config.protocol.learners
        if rank == 0:
            self._port = find_free_port()
        threads = str(max(1, cores() // world))
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port),
            "ATOLL_RUN_TOML": str(self.out.settings),
            "ATOLL_STEPS": str(self.steps),
            "ATOLL_THREADS": threads,
            "OMP_NUM_THREADS": threads,
        }
        command = [sys.executable, *RUNNER, "-m", "atoll.workloads.data_parallel"]
        return Child(f"rank-{rank}", command, env, self.out.log(f"rank-{rank}"))
