"""Learners in lockstep in one process, with the shipped numerics: the engine of lockstep.py and quality.py.

One step is: every learner steps; versions that are due are adopted; fragments that are due are read, merged, and
adopted τ steps later. So there is no system, no failure and no waiting in it: what a row loses, its algorithm loses.
- Phases, their settings and the order of fragments are the protocol's (protocol/phases.py, protocol/schedule.py).
- Codecs with feedback, merge, outer step and adoption are the shipped ones. On a GPU, where versions come down whole
  and the merge is the mean or RDA by rows in one of its forms, `DeviceSyncer` does merge and outer step there, in fp32:
  the same up to rounding (tests/benchmarks/test_lockstep_engine.py), without the way to the host.
- A fragment is read again only after its last version was adopted: so H is at least τ + 1.
- A row may have learners that miss rounds. Who misses one gives nothing to it and does not get its version, so that the
  next contribution is of an older base; the product sends every version to all, and this is for links that do not.
- After the last step a cycle without training collects what is left. Scores are those of Θ; of a row with a tail the
  last one is that of the mean of its last versions, as `tail_average` writes it.
- The batches of a seed are the same for every row; data-parallel takes those of all learners as one batch.
- On a GPU every learner's step, its optimizers' too, is a CUDA graph on a stream of its own, so that learners step side
  by side: one of them does not fill it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from lockstep_learner import Build, LockstepLearner, Sender, cut_out, shape_like
from lockstep_syncer import ON_DEVICE, DeviceSyncer, HostSyncer, OuterTrace
from shared_moments import SharedMoment, SharedMoments, adopt_moments

from atoll.config import Outer
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import Fragment, make_plan, most_fragments
from atoll.protocol.messages import TensorSpec
from atoll.protocol.phases import TrainingPhase, due_phase
from atoll.protocol.schedule import fragment_of
from atoll.protocol.settings import Settings
from atoll.workloads.gpt import Gpt
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import build_model, build_optimizers, validation_loss


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained. What it does not name is the default of the product, but that contributions are whole."""

    method: Literal["decoupled", "data-parallel", "alone"] = "decoupled"
    learners: int = 4
    fragments: int = 24
    sync_every: int = 24
    overlap: int = 2
    adopt: str = "overwrite"
    merge: str = "rda-row"
    outer_lr: float = 0.6
    outer_momentum: float = 0.6
    phases: tuple[TrainingPhase, ...] = ()
    up: str = "fp32"
    down: str = "fp32"
    moments: Literal["off", "fp32", "int8"] = "off"
    optimizer: str = "adamw"
    lr: float = 1e-3
    misses: float = 0.0
    """The share of rounds that a learner misses, drawn by the seed. All have equal weights all the same."""
    tail: int = 0
    """Its loss is that of the mean of the last so many versions of every fragment; 0: of the newest."""
    against: str = "dp"
    """The row that its loss is compared with."""

    @property
    def cost(self) -> tuple[str, int, str, bool, str, str]:
        """Rows that are equal in it take about the same time."""
        return self.method, self.learners, self.optimizer, bool(self.phases), self.moments, self.up

    @property
    def outer(self) -> Outer:
        return Outer(merge=self.merge, lr=self.outer_lr, momentum=self.outer_momentum)

    def settings(self, steps: int, most: int) -> Settings:
        """Those of a run; `most`: into how many fragments the model can be cut."""
        count = min(self.fragments, most)
        own = Settings(fragments=count, sync_every=self.sync_every, overlap=self.overlap, adopt=self.adopt, steps=steps)
        return msgspec.structs.replace(own, phases=self.phases or (TrainingPhase(until=1.0),)).resolved(most)


class OutOfTime(Exception):
    """The row was given up: it would have gone on past the limit."""


# ---- methods --------------------------------------------------------------------------------------------------------


class DataParallel:
    """One model; its batch is that of all learners. Alone: that of the first."""

    def __init__(
        self, row: Row, seed: int, settings: WorkloadSettings, device: torch.device, build: Build, mixed: bool
    ) -> None:
        self._taken = 1 if row.method == "alone" else row.learners
        settings = msgspec.structs.replace(settings, batch=self._taken * settings.batch)
        self._learner = LockstepLearner(settings, seed, device, build, mixed)
        self._row, self._steps = row, 0

    def make_step(self, batches: list[torch.Tensor], progress: float) -> None:
        batch = torch.cat(batches[: self._taken])
        self._learner.step(batch, progress)
        self._learner.wait_step()
        self._steps += 1

    def finish(self) -> None:
        pass

    def current_model(self) -> Gpt:
        return self._learner.model

    def describe(self) -> dict[str, Any]:
        """Each learner sends and gets the gradient of every step, in fp32."""
        size = sum(p.numel() for p in self._learner.model.parameters())
        sent = 0 if self._row.method == "alone" else 4 * size * self._steps
        return {"parameters": size, "up_bytes": sent, "down_bytes": sent, "whole_bytes": sent}


class Base(NamedTuple):
    """The version of a fragment that a learner last adopted."""

    version: int
    values: torch.Tensor


class Flight(NamedTuple):
    """A fragment between reading and adoption."""

    part: Fragment
    members: list[int]
    read_at: int
    adopt_at: int
    rule: str
    read: list[torch.Tensor]
    moments: dict[str, SharedMoment]


class Decoupled:
    def __init__(
        self,
        row: Row,
        seed: int,
        steps: int,
        settings: WorkloadSettings,
        device: torch.device,
        build: Build,
        on_device: bool,
        mixed: bool,
    ) -> None:
        self._row, self._steps, self._step = row, steps, 0
        self._learners = [LockstepLearner(settings, seed, device, build, mixed) for _ in range(row.learners)]
        self._model = build_model(settings, seed).to(device)
        specs = _tensor_specs(self._model)
        self._settings = row.settings(steps, most_fragments(specs))
        self._phase, self._phase_began, self._phase_rounds, self._round = 1, 0, 0, 0
        self._plan = make_plan(specs, self._settings.fragments)
        first = [self._learners[0].read(part) for part in self._plan.fragments]
        outer = self._outer_in(1)
        self._syncer: HostSyncer | DeviceSyncer = (
            DeviceSyncer(self._plan, first, outer) if on_device else HostSyncer(self._plan, first, outer, row.down)
        )
        self._sender = Sender(make_codec(row.up))
        self._moments = SharedMoments(row.moments) if row.moments != "off" else None
        self._bases = [[Base(0, values) for values in first] for _ in self._learners]
        """By learner, then fragment."""
        self._dice = np.random.default_rng([seed, 1])
        assert not (row.misses and self._moments), "moments are shared among all learners"
        self._last = [deque[torch.Tensor](maxlen=row.tail) for _ in first]
        """By fragment, the versions of its tail."""
        self._flights: list[Flight] = []
        self._trace, self._whole = OuterTrace(), 0

    def make_step(self, batches: list[torch.Tensor], progress: float) -> None:
        for one, batch in zip(self._learners, batches, strict=True):
            one.step(batch, progress)
        for one in self._learners:
            one.wait_step()
        self._step += 1
        self._adopt_due(self._step)
        self._enter_due_phase()
        in_phase = self._settings.in_phase(self._phase, self._settings)
        due = (self._step - self._phase_began) * in_phase.fragments // in_phase.sync_every
        while self._phase_rounds < due:
            self._take_round(in_phase)
            self._phase_rounds += 1
        self._adopt_due(self._step)

    def finish(self) -> None:
        """Every fragment once more, without training."""
        self._adopt_due(self._step + self._settings.sync_every)
        last = msgspec.structs.replace(self._settings.in_phase(self._phase, self._settings), overlap=0)
        for _ in self._plan.fragments:
            self._take_round(last, complete=True)
            self._adopt_due(self._step)

    def _enter_due_phase(self) -> None:
        due = due_phase(self._settings.phases, self._step / self._steps)
        if due != self._phase:
            self._phase, self._phase_began, self._phase_rounds = due, self._step, 0
            self._syncer.change_outer(self._outer_in(due))

    def _outer_in(self, phase: int) -> Outer:
        return msgspec.structs.replace(self._row.outer, **self._settings.phases[phase - 1].outer)

    def _take_round(self, settings: Settings, complete: bool = False) -> None:
        """Merged when it is read: nobody reads or adopts it before it has come back, so that makes no difference.
        `complete`: nobody misses it."""
        part = self._plan.fragments[fragment_of(self._round, settings)]
        assert all(part is not one.part for one in self._flights), "it is read again after its version was adopted"
        members = [*range(len(self._learners))] if complete else self._draw_members()
        bases = [self._bases[m][part.index] for m in members]
        read = [self._learners[m].read(part) for m in members]
        deltas = self._sender.contribute(part, members, [base.values for base in bases], read)
        moments = {} if self._moments is None else self._moments.average(part, self._learners)
        gradient = self._syncer.merge(part, deltas, [base.version for base in bases])
        self._trace.add_gradient(part.index, self._phase, gradient)
        self._last[part.index].append(self._syncer.versions[part.index])
        adopt_at = self._step + settings.overlap
        self._flights.append(Flight(part, members, self._step, adopt_at, settings.adopt, read, moments))
        self._round += 1
        self._whole += 4 * part.size

    def _draw_members(self) -> list[int]:
        """Those that do not miss this round; if all would, the first does not."""
        if not self._row.misses:
            return [*range(len(self._learners))]
        drawn = self._dice.random(len(self._learners)) >= self._row.misses
        return [m for m, there in enumerate(drawn) if there] or [0]

    def _adopt_due(self, step: int) -> None:
        due = [one for one in self._flights if one.adopt_at <= step]
        self._flights = [one for one in self._flights if one.adopt_at > step]
        for flight in due:
            index = flight.part.index
            newest = Base(self._syncer.numbers[index], self._syncer.versions[index])
            for m, read in zip(flight.members, flight.read, strict=True):
                self._learners[m].adopt(flight.part, newest.values, flight.rule, read)
                self._bases[m][index] = newest
            for slot, moment in flight.moments.items():
                adopt_moments(self._learners, flight.part, slot, moment, flight.rule, self._step - flight.read_at)

    def current_model(self) -> Gpt:
        """Θ."""
        return self._fill_model(self._syncer.versions)

    def averaged_model(self) -> Gpt:
        return self._fill_model([torch.stack([*last]).double().mean(0).float() for last in self._last])

    def _fill_model(self, fragments: list[torch.Tensor]) -> Gpt:
        named = dict(self._model.named_parameters())
        for part, values in zip(self._plan.fragments, fragments, strict=True):
            own = cut_out(named, part)
            torch._foreach_copy_(own, shape_like(values, own))
        return self._model

    def describe(self) -> dict[str, Any]:
        """The bytes of one learner, in both directions; `whole_bytes`: those of its fragments in fp32."""
        beside = 0 if self._moments is None else self._moments.sent
        phases = [
            {
                "until": phase.until,
                "sync_every": phase.sync_every,
                **self._trace.describe_phase(number, self._outer_in(number)),
            }
            for number, phase in enumerate(self._settings.phases, start=1)
        ]
        return {
            "parameters": self._plan.size,
            "up_bytes": self._sender.sent[0] + beside,
            "down_bytes": self._syncer.sent + beside,
            "whole_bytes": self._whole,
            "rounds": self._round,
            "phases": phases,
        }


def _tensor_specs(model: Gpt) -> list[TensorSpec]:
    named = model.named_parameters()
    return [TensorSpec(name, tuple(p.shape), "float32", embedding=name.startswith("embedding")) for name, p in named]


# ---- a row ----------------------------------------------------------------------------------------------------------


def works_on_device(row: Row) -> bool:
    merges = {row.merge, *(phase.merge for phase in row.phases if phase.merge)}
    return row.down == "fp32" and merges <= ON_DEVICE


def prepare_torch() -> None:
    """TF32 on a GPU, and one thread on a CPU."""
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64  # data-parallel, M = 4 and M = 8 have batches of their own
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


def train(
    row: Row,
    seed: int,
    settings: WorkloadSettings,
    steps: int,
    text: Text,
    *,
    numerics: Literal["auto", "host", "device"] = "auto",
    scores: int = 20,
    deadline: float = math.inf,
    build: Build = build_optimizers,
    mixed: bool = False,
    report: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Loss, curve and bytes. `numerics`: where merge and outer step are done; auto: on a GPU, if they can.
    `mixed`: steps compiled and with bf16 autocast, as people train on a GPU; about three times as fast there.
    `scores`: how many there are of the curve. `deadline`: of time.monotonic(); OutOfTime after it.
    `report` is called after every step."""
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    settings = msgspec.structs.replace(settings, optimizer=row.optimizer, lr=row.lr)
    on_device = works_on_device(row) and (numerics == "device" or (numerics == "auto" and device.type == "cuda"))
    data, dice = Windows(text, settings.block), np.random.default_rng(seed)
    method: DataParallel | Decoupled = (
        Decoupled(row, seed, steps, settings, device, build, on_device, mixed)
        if row.method == "decoupled"
        else DataParallel(row, seed, settings, device, build, mixed)
    )
    curve, every = [], max(1, steps // max(1, scores))
    for step in range(steps):
        if time.monotonic() > deadline:
            raise OutOfTime
        batches = [data.gather(dice.integers(len(data), size=settings.batch)) for _ in range(row.learners)]
        method.make_step([batch.to(device) for batch in batches], step / steps)
        report(step + 1)
        if (step + 1) % every == 0 and step + 1 < steps:
            curve.append([step + 1, validation_loss(method.current_model(), text, settings.eval_windows)])
    method.finish()
    loss = newest = validation_loss(method.current_model(), text, settings.eval_windows)
    if row.tail and isinstance(method, Decoupled):
        loss = validation_loss(method.averaged_model(), text, settings.eval_windows)
    return {
        "loss": loss,
        **({"newest_loss": newest} if row.tail else {}),
        "curve": [*curve, [steps, loss]],
        **method.describe(),
        "numerics": "device" if on_device else "host",
        "seconds": round(time.monotonic() - began, 1),
    }


def compare(runs: dict[str, dict[str, Any]], first: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The runs of a row, by seed, against those of another: over the seeds that both have."""
    above = [100 * (one["loss"] / first[seed]["loss"] - 1) for seed, one in runs.items() if seed in first]
    return {
        "loss": mean(one["loss"] for one in runs.values()),
        "above_percent": mean(above) if above else None,
        "spread_percent": stdev(above) if len(above) > 1 else 0.0,
    }
