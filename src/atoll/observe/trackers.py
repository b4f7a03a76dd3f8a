"""A run's figures for TensorBoard and Weights & Biases, while it goes on: the same that the screen shows.

`Tracking` turns statuses and events into named numbers at a round; a `Tracker` writes them somewhere. The packages are
optional (the extra `tracking`) and imported when asked for. A tracker that fails is dropped and named at the
end: it never stops training.

| name | what |
| --- | --- |
| validation/loss | of the global model, at the round that was scored |
| run/goodput, participation, liveness, merged_share | shares, as on the screen |
| run/tokens, tokens_per_s, effective_h, carried_h, grace_s, median_gap_s, rho, outer_step | the same |
| loss/NAME, tokens_per_s/NAME, round_share/NAME | of each learner that trains |
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from atoll.extras import missing
from atoll.observe.figures import plain
from atoll.protocol.errors import ConfigError
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus

EVERY_S = 2.0
_SHARES = ("goodput", "participation", "liveness", "merged_share")
_RUN = (
    *_SHARES,
    *("tokens", "tokens_per_s", "effective_h", "carried_h", "grace_s", "median_gap_s", "rho", "outer_step"),
)


class Tracker(Protocol):
    def write_scalars(self, at: float, round: int, values: Mapping[str, float]) -> None:
        """`at`: seconds since 1970."""

    def close(self) -> None: ...


class TensorBoard:
    """Event files in a folder, by the package's own writer: torch is not needed for it."""

    def __init__(self, folder: Path) -> None:
        self._protos = _package("tensorboard.compat.proto.event_pb2"), _package("tensorboard.compat.proto.summary_pb2")
        writer = _package("tensorboard.summary.writer.event_file_writer")
        try:
            self._writer = writer.EventFileWriter(str(folder), flush_secs=5)
        except OSError as error:
            raise ConfigError(f"--tensorboard {folder}: {error.strerror or error}; name another folder") from error

    def write_scalars(self, at: float, round: int, values: Mapping[str, float]) -> None:
        event, summary = self._protos
        found = [summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(event.Event(wall_time=at, step=round, summary=summary.Summary(value=found)))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project; its axis is the round. WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, project: str, name: str, settings: Mapping[str, Any]) -> None:
        wandb = _package("wandb")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                config=dict(settings),
                # The screen of the run is ours: nothing is captured from it or printed into it.
                settings=wandb.Settings(console="off", silent=True),
            )
            self._run.define_metric("*", step_metric="round")
        except Exception as error:  # whatever it raises (no login, no network), the run has not begun
            words = plain(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
            raise ConfigError(f"--wandb {project}: {words}; wandb login, or WANDB_MODE=offline") from error

    def write_scalars(self, at: float, round: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "round": round})

    def close(self) -> None:
        self._run.finish()


@dataclass(frozen=True, slots=True)
class Targets:
    """Where the figures go, as the command line says."""

    tensorboard: Path | None = None
    wandb: str | None = None

    def __bool__(self) -> bool:
        return self.tensorboard is not None or self.wandb is not None

    def check_packages(self) -> None:
        """ConfigError where a package is missing: worth a call before anything is begun."""
        if self.tensorboard is not None:
            _package("tensorboard.summary.writer.event_file_writer")
        if self.wandb is not None:
            _package("wandb")

    def open_trackers(self, run: str, settings: Mapping[str, Any]) -> Tracking:
        trackers: dict[str, Tracker] = {}
        if self.tensorboard is not None:
            trackers["TensorBoard"] = TensorBoard(self.tensorboard)
        if self.wandb is not None:
            trackers["W&B"] = WeightsAndBiases(self.wandb, run, settings)
        return Tracking(trackers)


NO_TARGETS = Targets()


class Tracking:
    def __init__(
        self, trackers: Mapping[str, Tracker], every_s: float = EVERY_S, now: Callable[[], float] = time.time
    ) -> None:
        self._trackers = dict(trackers)
        self._every_s, self._now = every_s, now
        self._due = 0.0
        self.trouble: list[str] = []
        """Why a tracker was left out, one sentence each."""

    def update(self, status: RunStatus | None, events: Iterable[Event] = ()) -> None:
        """`status` is None while the syncer cannot be asked."""
        for at, round, values in scores(events):
            self._write_scalars(at, round, values)
        now = self._now()
        if status is not None and status.phase != "waiting" and now >= self._due:
            self._due = now + self._every_s
            self._write_scalars(now, status.round, figures(status))

    def close(self) -> None:
        for name in list(self._trackers):
            self._try_tracker(name, self._trackers[name].close)
        self._trackers.clear()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_scalars(self, at: float, round: int, values: Mapping[str, float]) -> None:
        for name, tracker in list(self._trackers.items()):
            self._try_tracker(name, partial(tracker.write_scalars, at, round, values))

    def _try_tracker(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # not ours, and no reason to end a run
            self._trackers.pop(name, None)
            self.trouble.append(f"{name} got no more figures: {plain(str(error)) or type(error).__name__}")


def figures(status: RunStatus) -> dict[str, float]:
    found = {f"run/{name}": getattr(status, name) for name in _RUN}
    for learner in status.learners:
        if learner.state == "training":
            name = learner.learner
            found |= {f"loss/{name}": learner.loss, f"tokens_per_s/{name}": learner.tokens_per_s}
            found[f"round_share/{name}"] = learner.round_share
    return {name: float(value) for name, value in found.items() if value is not None and math.isfinite(value)}


def scores(events: Iterable[Event]) -> Iterator[tuple[float, int, dict[str, float]]]:
    for event in events:
        if event["kind"] != "score":
            continue
        found = {"loss": event.get("loss"), **(event.get("metrics") or {})}
        if values := {f"validation/{name}": float(value) for name, value in found.items() if value is not None}:
            yield float(event["at"]), max(0, int(event["round"])), values


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        top = name.split(".")[0]
        raise missing(top, f"--{top}") from error
