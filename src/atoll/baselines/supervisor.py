"""A data-parallel run under faults, on this machine: M ranks and a supervisor that forms their groups.

A generation is a group of ranks that train together (workloads/elastic.py). The supervisor names its members, reads the
ranks' logs, notices deaths and restarts the dead. What happens to the group depends on the method:
- ElasticRun: the live ranks form a new group at once, and again when the dead one is back;
- RestartingRun: one death kills all, and they restart together from the last checkpoint.
The run begins when every rank has made its first step, and is stopped `seconds` later.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from atoll.baselines.faults import RankFault, inject_faults
from atoll.baselines.figures import RankLog, RankMessage, RankPause, RankStep, compute_figures
from atoll.config import Config
from atoll.launch.children import BACKOFF_S, Child, cores, describe_exit
from atoll.launch.local import RUNNER
from atoll.observe.summary import Summary
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.store.atomic import Appender, make_folder, write_atomic
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import hold_run
from atoll.telemetry.events import EventLog

TICK_S = 0.02
START_S = 120.0
"""How long the ranks may take to their first step."""
END_S = 60.0
"""How long they may take to stop and score the model."""
AGAIN_S = 1.0
"""A group that broke though nobody died is formed again after this wait."""
PATIENCE_S = 5.0


class BaselineRun(ABC):
    method: str

    def __init__(
        self,
        config: Config,
        out: RunDir,
        seconds: float,
        faults: tuple[RankFault, ...] = (),
        *,
        patience_s: float = PATIENCE_S,
        watch: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        assert config.protocol.steps > 0, "the learning rate needs a budget to follow"
        self.config, self.out, self.seconds, self.faults = config, out, seconds, faults
        self.patience_s, self.watch = patience_s, watch
        self.world = config.protocol.learners
        self.generation = 0
        self.members: tuple[int, ...] = ()
        """Of the present generation."""
        self.ready: set[int] = set()
        """Alive, and waiting for a group or in one."""
        self.restarts = 0
        self._due: dict[int, float] = {}
        """Dead ranks, and when each is started again."""
        self._doomed: set[int] = set()
        """Ranks that are to die: by a fault, or with the others."""
        self._away_until: dict[int, float] = {}
        self._steps: list[RankStep] = []
        self._starts: dict[int, int] = {}
        self._pauses: list[RankPause] = []
        self._ends: dict[int, RankMessage] = {}
        self._form_at: float | None = None
        self._stopping = False
        self._struck = 0

    async def run(self) -> Summary:
        with hold_run(self.out.path):
            return await self._run_held()

    async def _run_held(self) -> Summary:
        write_atomic(self.out.settings, self.config.toml())
        make_folder(self.out.path / "groups")
        with Appender(self.out.events) as sink:
            self._events = EventLog(sink)
            self._ranks = [self._make_rank(rank) for rank in range(self.world)]
            self._logs = [RankLog(child.log) for child in self._ranks]
            try:
                return await self._run_to_end()
            finally:
                for child in self._ranks:
                    child.kill_all()

    async def _run_to_end(self) -> Summary:
        for rank in range(self.world):
            self._start_rank(rank)
        await self._supervise_until(
            lambda: len({step.rank for step in self._steps}) == self.world, START_S, "make a first step"
        )
        began = time.monotonic()
        self._log_event("chaos", f"every rank has made a step: {len(self.faults)} faults follow")
        blows = asyncio.create_task(inject_faults(self, self.faults))
        try:
            while time.monotonic() < began + self.seconds:
                self._supervise_ranks()
                self.watch(time.monotonic() - began)
                await asyncio.sleep(TICK_S)
                if blows.done():
                    blows.result()  # an error of ours is not hidden
        finally:
            blows.cancel()
            with suppress(asyncio.CancelledError):
                await blows
        return await self._stop_ranks()

    async def _stop_ranks(self) -> Summary:
        ended_at = time.monotonic()
        self._stopping = True
        for child in self._ranks:
            child.signal(signal.SIGCONT)
        scores = self._choose_scorer()
        for child in self._ranks:
            child.send_order(json.dumps({"stop": True, "scores": scores}))
        await self._supervise_until(lambda: scores in self._ends, END_S, "score the model")
        return self._write_summary(ended_at, self._ends[scores])

    def _choose_scorer(self) -> int:
        """Of those that are there the first; where all are dead, rank 0 begins once more with the last checkpoint."""
        alive = [rank for rank, child in enumerate(self._ranks) if child.running and rank not in self._doomed]
        if not alive:
            self._ranks[0].kill_all()
            self._start_rank(0)
        return min(self.ready & set(alive), default=min(alive, default=0))

    async def _supervise_until(self, holds: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise RunFailed(f"the ranks did not {what} within {seconds:g} s; their logs are in {self.out.logs}")
            self._supervise_ranks()
            await asyncio.sleep(TICK_S)

    # ---- what the methods do in their own way ----------------------------------------------------------------------

    @abstractmethod
    def after_death(self, rank: int) -> None: ...

    @abstractmethod
    def group_wanted(self) -> tuple[int, ...]:
        """Who should train together now; nobody: wait."""

    def starts_due(self) -> list[int]:
        """The dead that are to be started now."""
        return [rank for rank, due in self._due.items() if time.monotonic() >= due]

    def rank_environment(self, rank: int) -> dict[str, str]:
        return {}

    def steps_made(self) -> int:
        """The number of the newest step."""
        return self._steps[-1].step if self._steps else 0

    # ---- supervising -----------------------------------------------------------------------------------------------

    def _supervise_ranks(self) -> None:
        for rank in range(self.world):
            self._handle_exit(rank)
        for rank in range(self.world):
            self._read_log(rank)
        if self._stopping:
            return
        for rank in self.starts_due():
            self._start_rank(rank)
            self.restarts += 1
        wanted = self.group_wanted()
        overdue = self._form_at is not None and time.monotonic() >= self._form_at
        if wanted and (wanted != self.members or overdue):
            self._form_group(wanted)

    def _handle_exit(self, rank: int) -> None:
        child = self._ranks[rank]
        if (code := child.poll_exit()) is None:
            return
        self._read_log(rank)  # its last words, before it is forgotten
        self.ready.discard(rank)
        if self._stopping and (code == 0 or rank in self._doomed):
            return
        if rank not in self._doomed:
            words = child.last_words().removeprefix("atoll: ")
            raise (ConfigError if code == 2 else RunFailed)(words or f"{child.name} died: {describe_exit(code)}")
        self._doomed.discard(rank)
        self._log_event("exited", f"{child.name} ended: {describe_exit(code)}", process=child.name, code=code)
        self._due[rank] = max(time.monotonic() + BACKOFF_S[0], self._away_until.pop(rank, 0.0))
        self.members = ()
        self.after_death(rank)

    def _read_log(self, rank: int) -> None:
        for message in self._logs[rank].read_new():
            self._take_message(rank, message)

    def _take_message(self, rank: int, message: RankMessage) -> None:
        match message["kind"]:
            case "ready":
                self.ready.add(rank)
            case "step":
                self._ranks[rank].give_way(self.config.learner_nice)
                self._steps.append(msgspec.convert({**message, "rank": rank}, RankStep))
            case "formed":
                self._starts[message["generation"]] = message["step"]
                self._log_event(
                    "formed", f"rank-{rank} is in generation {message['generation']}", rank=rank, **_rest(message)
                )
            case "saved":
                self._log_event("saved", f"checkpoint after step {message['step']}", step=message["step"])
            case "broken" if message["generation"] == self.generation and self._form_at is None:
                self._form_at = time.monotonic() + AGAIN_S
            case "end":
                self._ends[rank] = message
                self._log_event("end", f"rank-{rank} ended after step {message['step']}", rank=rank, **_rest(message))

    def _form_group(self, ranks: tuple[int, ...]) -> None:
        self.generation += 1
        self.members, self._form_at = ranks, None
        for rank in ranks:
            self._ranks[rank].send_order(json.dumps({"generation": self.generation, "ranks": ranks}))

    def _start_rank(self, rank: int) -> None:
        child, again = self._ranks[rank], self._due.pop(rank, None) is not None
        child.start()
        assert child.process is not None
        kind, text = ("restarted", "was started again") if again else ("started", "started")
        self._log_event(kind, f"{child.name} {text}", process=child.name, pid=child.process.pid)

    def _make_rank(self, rank: int) -> Child:
        threads = str(max(1, cores() // self.world))
        env = {
            "RANK": str(rank),
            "ATOLL_RUN_TOML": str(self.out.settings),
            "ATOLL_STEPS": str(self.config.protocol.steps),
            "ATOLL_GROUPS": str(self.out.path / "groups"),
            "ATOLL_THREADS": threads,
            "OMP_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",
            **self.rank_environment(rank),
        }
        command = [sys.executable, *RUNNER, "-m", "atoll.workloads.elastic"]
        name = f"rank-{rank}"
        return Child(name, command, env, self.out.log(name), obeys=True)

    # ---- what faults do (faults.Struck) ----------------------------------------------------------------------------

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self._ranks[rank].signal(number)

    def end_rank(self, rank: int, number: signal.Signals, away_s: float) -> None:
        back = time.monotonic() + away_s
        if not self._ranks[rank].running:
            if rank in self._due:
                self._due[rank] = max(self._due[rank], back)
            return
        self._away_until[rank] = back
        self.kill_rank(rank, number)

    def kill_rank(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        self._doomed.add(rank)
        self._ranks[rank].signal(number)

    def record_pause(self, rank: int, seconds: float) -> None:
        now = time.monotonic()
        self._pauses.append(RankPause(rank, (now - seconds, now)))

    def log_fault(self, fault: RankFault) -> None:
        self._struck += 1
        self._log_event("fault", f"fault: {fault.describe()}", what=fault.kind, target=f"rank-{fault.rank}")

    # ---- what came of it -------------------------------------------------------------------------------------------

    def _write_summary(self, ended_at: float, end: RankMessage) -> Summary:
        found = compute_figures(self._steps, self._starts, end["step"], self.world, ended_at, self._pauses)
        summary = {
            "method": self.method,
            "learners": self.world,
            **msgspec.to_builtins(found),
            "restarts": self.restarts,
            "generations": self.generation,
            "faults": self._struck,
            "validation_loss": end["validation_loss"],
        }
        write_atomic(self.out.summary, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
        return summary

    def _log_event(self, kind: str, text: str, **data: object) -> None:
        self._events.say(kind, text, data)


def _rest(message: RankMessage) -> RankMessage:
    return {key: value for key, value in message.items() if key not in ("kind", "at")}


class ElasticRun(BaselineRun):
    """The ranks that are left continue without a dead one, and admit it again when it is back."""

    method = "elastic-data-parallel"

    def after_death(self, rank: int) -> None:
        """The others found their connections closed, and wait to be told who is left."""

    def group_wanted(self) -> tuple[int, ...]:
        """All that are there; the first group waits for everybody."""
        if not self.generation and len(self.ready) < self.world:
            return ()
        return tuple(sorted(self.ready))


class RestartingRun(BaselineRun):
    """When one rank dies, all are killed and restart from the last checkpoint."""

    method = "data-parallel"

    def __init__(self, *arguments: Any, checkpoint_every: int = 0, **named: Any) -> None:
        """`checkpoint_every`: steps between two checkpoints; 0: one about every 10 s."""
        super().__init__(*arguments, **named)
        self._checkpoint_every = checkpoint_every

    def rank_environment(self, rank: int) -> dict[str, str]:
        path = self.out.path / "checkpoint.safetensors"
        return {"ATOLL_CHECKPOINT": str(path), "ATOLL_CHECKPOINT_EVERY": str(self._checkpoint_every)}

    def after_death(self, rank: int) -> None:
        for other in range(self.world):
            if other not in self._due and other not in self._doomed:
                self.kill_rank(other)

    def starts_due(self) -> list[int]:
        """All together, once all are dead and every host is there."""
        everybody = len(self._due) == self.world and time.monotonic() >= max(self._due.values())
        return list(self._due) if everybody else []

    def group_wanted(self) -> tuple[int, ...]:
        """Everybody or nobody."""
        return tuple(range(self.world)) if len(self.ready) == self.world else ()
