"""Learners in lockstep in one process, with the shipped numerics: the engine of lockstep.py and quality.py.

One step is: every learner steps; versions that are due are adopted; fragments that are due are read, merged, and
adopted τ steps later. So there is no system, no failure and no waiting in it: what a row loses, its algorithm loses.
- Phases, their settings and the order of fragments are the protocol's (protocol/phases.py, protocol/schedule.py).
- Codecs with feedback, merge, outer step and adoption are the shipped ones. On a GPU, where versions come down whole
  and the merge is the mean or RDA by rows, `DeviceSyncer` does merge and outer step there, in fp32: the same up to
  rounding (tests/benchmarks/test_lockstep_engine.py), without the way to the host.
- A fragment is read again only after its last version was adopted: so H is at least τ + 1.
- After the last step a cycle without training collects what is left. Scores are those of Θ.
- The batches of a seed are the same for every row; data-parallel takes those of all learners as one batch.
- On a GPU every learner's step is a CUDA graph on a stream of its own, so that learners step side by side: one of them
  does not fill it. With Muon, which needs its learning rate on the host, only forward and backward are in the graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from torch.optim import Optimizer

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.learner.boundary import adopt
from atoll.learner.codecs import decode, encode, encode_contribution
from atoll.numerics.codec import Codec, body_nbytes, body_parts, make_codec
from atoll.numerics.codec_kernels import ABSMAX_BLOCK
from atoll.numerics.fragments import Fragment, FragmentPlan, Piece, Rows, make_plan, most_fragments, row_lengths
from atoll.numerics.merges.rda import CANCELLED, SPECK
from atoll.protocol.messages import TensorSpec
from atoll.protocol.phases import TrainingPhase, due_phase, outer_in
from atoll.protocol.schedule import fragment_of
from atoll.protocol.settings import Settings
from atoll.syncer.parameters import Parameters
from atoll.workloads.gpt import Gpt
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import build_model, build_optimizers, learning_rate, validation_loss

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Of AdamW, and of Muon or SGD."""
Build = Callable[[Gpt, WorkloadSettings], dict[str, Optimizer]]


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
    against: str = "dp"
    """The row that its loss is compared with."""

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


# ---- learners -------------------------------------------------------------------------------------------------------


class LockstepLearner:
    def __init__(self, settings: WorkloadSettings, seed: int, device: torch.device, build: Build) -> None:
        self.model = build_model(settings, seed).to(device)
        self._settings = settings
        self._optimizers = build(self.model, settings)
        self.decays = _find_decays(self._optimizers)
        self._lr = torch.tensor(settings.lr, device=device)
        self._batch = torch.zeros(settings.batch, settings.block + 1, dtype=torch.int64, device=device)
        self._named = dict(self.model.named_parameters())
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._graph_steps = list(self._optimizers) == ["adamw"]
        """Whether the optimizer's step is in the graph."""
        if "adamw" in self._optimizers:
            for group in self._optimizers["adamw"].param_groups:
                group["lr"], group["capturable"] = self._lr, device.type == "cuda"
        if self._stream is not None:
            self._capture(self._stream)

    def step(self, batch: torch.Tensor, progress: float) -> None:
        """On a GPU it goes on beside the steps of others until `wait_step`; so long the batch must be kept."""
        if self._stream is None:
            self._make_step(batch, progress)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._make_step(batch, progress)

    def wait_step(self) -> None:
        """What is asked of the GPU from now on comes after the step."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def _make_step(self, batch: torch.Tensor, progress: float) -> None:
        self._batch.copy_(batch)
        lr = learning_rate(progress, self._settings.lr, self._settings.warmup, self._settings.floor)
        self._lr.fill_(lr)
        for name, optimizer in self._optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self._lr if name == "adamw" else lr
        if self._graph is None:
            self._compute_gradients()
        else:
            self._graph.replay()
        if self._graph is None or not self._graph_steps:
            self._step_optimizers()

    def _compute_gradients(self) -> None:
        self.model.zero_grad()
        self.model(self._batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip)

    def _step_optimizers(self) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step()

    def _make_captured(self) -> None:
        self._compute_gradients()
        if self._graph_steps:
            self._step_optimizers()

    def _capture(self, stream: torch.cuda.Stream) -> None:
        """Steps before a capture are needed, and undone. All on one stream: what cuBLAS works in belongs to it."""
        first = [parameter.detach().clone() for parameter in self.model.parameters()]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._make_captured()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), first, strict=True):
                parameter.copy_(value)
            for optimizer in self._optimizers.values():
                for state in optimizer.state.values():
                    for value in state.values():
                        value.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._make_captured()

    def read(self, part: Fragment) -> torch.Tensor:
        """A copy, flat."""
        return _flat(_cut_out(self._named, part))

    def adopt(self, part: Fragment, values: torch.Tensor, rule: str, read: torch.Tensor) -> None:
        own = _cut_out(self._named, part)
        adopt(own, _shaped(values, own), rule, read=_shaped(read, own))

    def moments(self, part: Fragment, slot: str) -> list[torch.Tensor]:
        """The optimizers' own, of those pieces that have such a moment."""
        if slot not in self._moments:
            states = {p: state for optimizer in self._optimizers.values() for p, state in optimizer.state.items()}
            self._moments[slot] = {
                name: states[p][slot] for name, p in self._named.items() if slot in states.get(p, {})
            }
        return _cut_out(self._moments[slot], part)

    def has_moment(self, piece: Piece, slot: str) -> bool:
        return piece.tensor.name in self._moments[slot]


def _find_decays(optimizers: dict[str, Optimizer]) -> dict[str, float]:
    """By moment, what a step leaves of it."""
    found = {}
    for optimizer in optimizers.values():
        if "betas" in optimizer.defaults:
            found["exp_avg"], found["exp_avg_sq"] = optimizer.defaults["betas"]
        if "momentum" in optimizer.defaults:
            found["momentum_buffer"] = optimizer.defaults["momentum"]
    return found


def _cut_out(tensors: dict[str, torch.Tensor], part: Fragment) -> list[torch.Tensor]:
    held = [piece for piece in part.pieces if piece.tensor.name in tensors]
    return [tensors[piece.tensor.name].detach()[piece.first : piece.first + piece.rows] for piece in held]


def _flat(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _shaped(values: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    cut = torch.split(values, [piece.numel() for piece in like])
    return [piece.view(own.shape) for piece, own in zip(cut, like, strict=True)]


class Sender:
    """A learner's contributions: encoded with feedback, as it does it on a device."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._feedback: dict[int, torch.Tensor] = {}
        self.sent = 0

    def contribute(self, part: Fragment, base: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        """What arrives of Δ = base − θ."""
        self.sent += body_nbytes(self._codec, part)
        if self._codec.name == "fp32":
            return base - theta
        body = torch.empty(body_nbytes(self._codec, part), dtype=torch.uint8, device=base.device)
        rest = torch.empty_like(base) if self._codec.needs_feedback else None
        encode_contribution(self._codec, part, base, theta.clone(), self._feedback.get(part.index), rest, body)
        if rest is not None:
            self._feedback[part.index] = rest
        delta = torch.empty_like(base)
        for by, rows, values, data, _ in body_parts(self._codec, part):
            decode(by, body[data], rows, delta[values])
        return delta


# ---- the syncer -----------------------------------------------------------------------------------------------------


class HostSyncer:
    """The shipped one's parameters."""

    def __init__(self, plan: FragmentPlan, first: list[torch.Tensor], outer: Outer, down: str) -> None:
        self._parameters = Parameters(plan, outer, down)
        self._device = first[0].device
        self.versions = first
        self.sent = 0
        for part, values in zip(plan.fragments, first, strict=True):
            copied = values.cpu().numpy().copy()
            self._parameters.put_initial(part.index, copied, compute_digest(copied.view(np.uint8).data))
        self._parameters.commit_initial()

    def change_outer(self, outer: Outer) -> None:
        self._parameters.change_outer(outer)

    def merge(self, part: Fragment, deltas: list[torch.Tensor]) -> torch.Tensor:
        """The next version becomes the committed one. Returns the outer gradient."""
        held, index = self._parameters, part.index
        held.stage_merge(index, [delta.cpu().numpy() for delta in deltas], [1.0] * len(deltas))
        gradient = torch.from_numpy(held.outer_gradient(index).copy())
        self.sent += len(held.round_payload(index))
        before = held.committed_buffers()[index]
        held.commit_version(index, before.version + 1, before.round + 1)
        self.versions[index] = torch.from_numpy(held.committed_buffers()[index].values).to(self._device)
        return gradient


class DeviceSyncer:
    """The mean or RDA by rows, and Nesterov's outer step, where the learners are. All weights are equal."""

    def __init__(self, plan: FragmentPlan, first: list[torch.Tensor], outer: Outer) -> None:
        self._outer = outer
        self.versions = first
        self._momentum = [torch.zeros_like(values) for values in first]
        self.sent = 0

    def change_outer(self, outer: Outer) -> None:
        if outer.momentum and not self._outer.momentum:
            torch._foreach_zero_(self._momentum)
        self._outer = outer

    def merge(self, part: Fragment, deltas: list[torch.Tensor]) -> torch.Tensor:
        gradient, momentum = torch.empty_like(deltas[0]), self._momentum[part.index]
        for piece, place in part.parts:
            rows = [delta[place].view(_rows_of(piece), -1) for delta in deltas]
            plain = self._outer.merge == "mean" or piece.tensor.embedding
            gradient[place] = (_mean(rows) if plain else _merge_by_rows(rows)).view(-1)
        momentum.mul_(self._outer.momentum).add_(gradient)
        step = gradient + self._outer.momentum * momentum
        self.versions[part.index] = self.versions[part.index] - self._outer.lr * step
        self.sent += 4 * part.size
        return gradient


def works_on_device(row: Row) -> bool:
    merges = {row.merge, *(phase.merge for phase in row.phases if phase.merge)}
    return row.down == "fp32" and merges <= {"mean", "rda-row"}


def _rows_of(piece: Piece) -> int:
    return piece.rows if len(piece.shape) >= 2 else 1


def _mean(deltas: list[torch.Tensor]) -> torch.Tensor:
    return _sum([delta * (1 / len(deltas)) for delta in deltas])


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _merge_by_rows(deltas: list[torch.Tensor]) -> torch.Tensor:
    """`numerics.merges.rda.merge_rows` for equal weights: norms in float64, sums in float32."""
    norms = torch.stack([_row_norms(delta) for delta in deltas])
    radius = norms.mean(0)
    toward = torch.where(norms > SPECK * radius, radius / norms, 0.0) / len(deltas)
    merged = _sum([delta * c.float().unsqueeze(1) for delta, c in zip(deltas, toward, strict=True)])
    length = _row_norms(merged)
    cancelled = length < CANCELLED * radius
    factors = torch.where((length > 0) & ~cancelled, radius / length, 1.0).float().unsqueeze(1)
    return torch.where(cancelled.unsqueeze(1), _mean(deltas), merged * factors)


def _row_norms(rows: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


class OuterTrace:
    """The autocorrelation ρ of a fragment's merged gradients: the mean cosine of each and the one before it."""

    def __init__(self) -> None:
        self._last: dict[int, torch.Tensor] = {}
        self._cosines: dict[int, list[torch.Tensor]] = {}

    def add_gradient(self, fragment: int, phase: int, gradient: torch.Tensor) -> None:
        direction = gradient / gradient.norm().clamp_min(1e-30)
        if fragment in self._last:
            self._cosines.setdefault(phase, []).append(torch.dot(self._last[fragment], direction))
        self._last[fragment] = direction

    def describe_phase(self, phase: int, outer: Outer) -> dict[str, Any]:
        """ρ, and the effective outer step η(1 + μ/(1 − μρ)); None: no fragment was merged twice."""
        found = self._cosines.get(phase)
        rho = float(torch.stack(found).mean()) if found else None
        step = None if rho is None else outer.lr * (1 + outer.momentum / (1 - outer.momentum * rho))
        return {"rho": rho, "outer_step": step}


# ---- shared moments: not in the product; what is measured here decides whether and how ------------------------------


class SharedMoment(NamedTuple):
    averaged: torch.Tensor
    read: list[torch.Tensor]
    """Each learner's own."""


class SharedMoments:
    """The inner optimizer's moments of a fragment, averaged over the learners as they were when it was read. They are
    adopted with its version by the same rule: overwrite takes m̄; carry keeps what the n steps since have added to the
    learner's own, m ← m + βⁿ(m̄ − m_read), which leaves exp_avg_sq above zero. `step` stays local.

    With int8 they travel by the shipped codec, without feedback, both ways; exp_avg_sq as its square root, of which
    nothing in a block is below half a code: a value above zero never becomes zero."""

    def __init__(self, codec: str) -> None:
        self._codec = make_codec(codec)
        self.sent = 0
        """By one learner, and as many come down to it."""

    def average(self, part: Fragment, learners: list[LockstepLearner]) -> dict[str, SharedMoment]:
        averaged = {}
        for slot in MOMENTS:
            held = [one.moments(part, slot) for one in learners]
            if held[0]:
                rows = row_lengths([piece for piece in part.pieces if learners[0].has_moment(piece, slot)])
                read = [_flat(pieces) for pieces in held]
                arrived = [self._transfer(values, rows, slot) for values in read]
                averaged[slot] = SharedMoment(self._transfer(_mean(arrived), rows, slot), read)
                self.sent += self._codec.nbytes(rows)
        return averaged

    def _transfer(self, values: torch.Tensor, rows: Rows, slot: str) -> torch.Tensor:
        """What arrives of them."""
        if self._codec.name == "fp32":
            return values
        if slot != "exp_avg_sq":
            return self._encode_and_decode(values, rows)
        roots = self._encode_and_decode(values.sqrt(), rows)
        return torch.maximum(roots, _block_floor(roots, rows)).square()

    def _encode_and_decode(self, values: torch.Tensor, rows: Rows) -> torch.Tensor:
        body = torch.empty(self._codec.nbytes(rows), dtype=torch.uint8, device=values.device)
        encode(self._codec, values, rows, body)
        arrived = torch.empty_like(values)
        decode(self._codec, body, rows, arrived)
        return arrived


def _block_floor(roots: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Half a code of each value's block: the largest of a block is code 127."""
    floors, start = [], 0
    for count, width in rows:
        values = roots[start : start + count * width].view(count, width)
        padded = torch.nn.functional.pad(values, (0, -width % ABSMAX_BLOCK)).unflatten(1, (-1, ABSMAX_BLOCK))
        largest = padded.amax(-1, keepdim=True).expand_as(padded).flatten(1)[:, :width]
        floors.append(largest.reshape(-1) / 254)
        start += count * width
    return torch.cat(floors)


def adopt_moments(
    learners: list[LockstepLearner], part: Fragment, slot: str, moment: SharedMoment, rule: str, steps: int
) -> None:
    """`steps`: made since it was read."""
    for one, read in zip(learners, moment.read, strict=True):
        own = one.moments(part, slot)
        if rule == "carry":
            change = (moment.averaged - read) * one.decays[slot] ** steps
            torch._foreach_add_(own, _shaped(change, own))
        else:
            torch._foreach_copy_(own, _shaped(moment.averaged, own))


# ---- methods --------------------------------------------------------------------------------------------------------


class DataParallel:
    """One model; its batch is that of all learners. Alone: that of the first."""

    def __init__(self, row: Row, seed: int, settings: WorkloadSettings, device: torch.device, build: Build) -> None:
        self._taken = 1 if row.method == "alone" else row.learners
        settings = msgspec.structs.replace(settings, batch=self._taken * settings.batch)
        self._learner = LockstepLearner(settings, seed, device, build)
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


class Flight(NamedTuple):
    """A fragment between reading and adoption."""

    part: Fragment
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
    ) -> None:
        self._row, self._steps, self._step = row, steps, 0
        self._learners = [LockstepLearner(settings, seed, device, build) for _ in range(row.learners)]
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
        self._senders = [Sender(make_codec(row.up)) for _ in self._learners]
        self._moments = SharedMoments(row.moments) if row.moments != "off" else None
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
        in_phase = self._settings.in_all_phases[self._phase - 1]
        due = (self._step - self._phase_began) * in_phase.fragments // in_phase.sync_every
        while self._phase_rounds < due:
            self._take_round(in_phase)
            self._phase_rounds += 1
        self._adopt_due(self._step)

    def finish(self) -> None:
        """Every fragment once more, without training."""
        self._adopt_due(self._step + self._settings.sync_every)
        last = msgspec.structs.replace(self._settings.in_all_phases[self._phase - 1], overlap=0)
        for _ in self._plan.fragments:
            self._take_round(last)
            self._adopt_due(self._step)

    def _enter_due_phase(self) -> None:
        due = due_phase(self._settings.phases, self._step / self._steps)
        if due != self._phase:
            self._phase, self._phase_began, self._phase_rounds = due, self._step, 0
            self._syncer.change_outer(self._outer_in(due))

    def _outer_in(self, phase: int) -> Outer:
        return Outer(**outer_in(self._settings.phases[phase - 1], msgspec.structs.asdict(self._row.outer)))

    def _take_round(self, settings: Settings) -> None:
        """Merged when it is read: nobody reads or adopts it before it has come back, so that makes no difference."""
        part = self._plan.fragments[fragment_of(self._round, settings)]
        assert all(part is not one.part for one in self._flights), "it is read again after its version was adopted"
        base = self._syncer.versions[part.index]
        read = [one.read(part) for one in self._learners]
        deltas = [one.contribute(part, base, theta) for one, theta in zip(self._senders, read, strict=True)]
        moments = {} if self._moments is None else self._moments.average(part, self._learners)
        self._trace.add_gradient(part.index, self._phase, self._syncer.merge(part, deltas))
        adopt_at = self._step + settings.overlap
        self._flights.append(Flight(part, self._step, adopt_at, settings.adopt, read, moments))
        self._round += 1
        self._whole += 4 * part.size

    def _adopt_due(self, step: int) -> None:
        due = [one for one in self._flights if one.adopt_at <= step]
        self._flights = [one for one in self._flights if one.adopt_at > step]
        for flight in due:
            values = self._syncer.versions[flight.part.index]
            for one, read in zip(self._learners, flight.read, strict=True):
                one.adopt(flight.part, values, flight.rule, read)
            for slot, moment in flight.moments.items():
                adopt_moments(self._learners, flight.part, slot, moment, flight.rule, self._step - flight.read_at)

    def current_model(self) -> Gpt:
        """Θ."""
        named = dict(self._model.named_parameters())
        for part, values in zip(self._plan.fragments, self._syncer.versions, strict=True):
            own = _cut_out(named, part)
            torch._foreach_copy_(own, _shaped(values, own))
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
            "up_bytes": self._senders[0].sent + beside,
            "down_bytes": self._syncer.sent + beside,
            "whole_bytes": self._whole,
            "rounds": self._round,
            "phases": phases,
        }


def _tensor_specs(model: Gpt) -> list[TensorSpec]:
    named = model.named_parameters()
    return [TensorSpec(name, tuple(p.shape), "float32", embedding=name.startswith("embedding")) for name, p in named]


# ---- a row ----------------------------------------------------------------------------------------------------------


def prepare_torch() -> None:
    """TF32 on a GPU, and one thread on a CPU."""
    torch.set_float32_matmul_precision("high")
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
) -> dict[str, Any]:
    """Loss, curve and bytes. `numerics`: where merge and outer step are done; auto: on a GPU, if they can.
    `scores`: how many there are of the curve. `deadline`: of time.monotonic(); OutOfTime after it."""
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    settings = msgspec.structs.replace(settings, optimizer=row.optimizer, lr=row.lr)
    on_device = works_on_device(row) and (numerics == "device" or (numerics == "auto" and device.type == "cuda"))
    data, dice = Windows(text, settings.block), np.random.default_rng(seed)
    method: DataParallel | Decoupled = (
        Decoupled(row, seed, steps, settings, device, build, on_device)
        if row.method == "decoupled"
        else DataParallel(row, seed, settings, device, build)
    )
    curve, every = [], max(1, steps // max(1, scores))
    for step in range(steps):
        if time.monotonic() > deadline:
            raise OutOfTime
        batches = [data.gather(dice.integers(len(data), size=settings.batch)) for _ in range(row.learners)]
        method.make_step([batch.to(device) for batch in batches], step / steps)
        if (step + 1) % every == 0 and step + 1 < steps:
            curve.append([step + 1, validation_loss(method.current_model(), text, settings.eval_windows)])
    method.finish()
    loss = validation_loss(method.current_model(), text, settings.eval_windows)
    return {
        "loss": loss,
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
