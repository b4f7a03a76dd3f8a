"""A learner of the lockstep loop: its model and optimizers, and how it sends. lockstep_engine.py says what for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from batched_muon import BatchedMuon
from lockstep_codec import transfer
from torch.optim import Optimizer

from atoll.learner.boundary import adopt
from atoll.numerics.codec import Codec
from atoll.numerics.fragments import Fragment, Piece, row_lengths
from atoll.workloads.gpt import Gpt
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.training import build_model, learning_rate

Build = Callable[[Gpt, WorkloadSettings], dict[str, Optimizer]]

LR_TYPES = {"adamw": torch.float32, "muon": torch.float64}
"""Optimizers that take their learning rate from a tensor on the device, and of which type: so it can change between two
replays of a CUDA graph that holds their steps."""


class LockstepLearner:
    def __init__(
        self, settings: WorkloadSettings, seed: int, device: torch.device, build: Build, mixed: bool = False
    ) -> None:
        """`mixed`: the forward and backward pass compiled, with bf16 autocast."""
        self.model = build_model(settings, seed).to(device)
        self._forward = torch.compile(self.model, dynamic=False) if mixed else self.model
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=mixed)
        self._settings = settings
        self._optimizers = build(self.model, settings)
        self.decays = _find_decays(self._optimizers)
        self._lrs = {
            name: torch.tensor(settings.lr, dtype=dtype, device=device)
            for name, dtype in LR_TYPES.items()
            if name in self._optimizers
        }
        self._batch = torch.zeros(settings.batch, settings.block + 1, dtype=torch.int64, device=device)
        self._named = dict(self.model.named_parameters())
        self._moments: dict[str, dict[str, torch.Tensor]] = {}
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._graph_steps = self._optimizers.keys() <= LR_TYPES.keys()
        """Whether the optimizers' steps are in the graph."""
        if "adamw" in self._optimizers:
            for group in self._optimizers["adamw"].param_groups:
                group["lr"], group["capturable"] = self._lrs["adamw"], device.type == "cuda"
        if "muon" in self._optimizers:
            self._optimizers["muon"] = BatchedMuon(self._optimizers["muon"], self._lrs["muon"])
        if self._stream is not None and not settings.experts:  # how many bytes an expert gets changes with every step
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
        for name, optimizer in self._optimizers.items():
            if name in self._lrs:
                self._lrs[name].fill_(lr)
                continue
            for group in optimizer.param_groups:
                group["lr"] = lr
        if self._graph is None:
            self._compute_gradients()
        else:
            self._graph.replay()
        if self._graph is None or not self._graph_steps:
            self._step_optimizers()

    def _compute_gradients(self) -> None:
        self.model.zero_grad()
        with self._autocast:
            loss = self._forward(self._batch)
        loss.backward()
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
        return flatten_pieces(cut_out(self._named, part))

    def adopt(self, part: Fragment, values: torch.Tensor, rule: str, read: torch.Tensor) -> None:
        own = cut_out(self._named, part)
        adopt(own, shape_like(values, own), rule, read=shape_like(read, own))

    def moments(self, part: Fragment, slot: str) -> list[torch.Tensor]:
        """The optimizers' own, of those pieces that have such a moment."""
        if slot not in self._moments:
            states = {p: state for optimizer in self._optimizers.values() for p, state in optimizer.state.items()}
            self._moments[slot] = {
                name: states[p][slot] for name, p in self._named.items() if slot in states.get(p, {})
            }
        return cut_out(self._moments[slot], part)

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


def cut_out(tensors: Mapping[str, torch.Tensor], part: Fragment) -> list[torch.Tensor]:
    held = [piece for piece in part.pieces if piece.tensor.name in tensors]
    return [tensors[piece.tensor.name].detach()[piece.first : piece.first + piece.rows] for piece in held]


def flatten_pieces(pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([piece.reshape(-1) for piece in pieces])


def shape_like(values: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    cut = torch.split(values, [piece.numel() for piece in like])
    return [piece.view(own.shape) for piece, own in zip(cut, like, strict=True)]


class Sender:
    """The contributions of all learners: encoded with feedback, as a learner does it on its device."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._feedback: dict[tuple[int, int], torch.Tensor] = {}
        """By learner and fragment."""
        self.sent: Counter[int] = Counter()
        """Bytes, by learner."""

    def contribute(
        self, part: Fragment, members: list[int], bases: list[torch.Tensor], thetas: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """By member, what arrives of Δ = base − θ."""
        rows = row_lengths(part.pieces)
        self.sent.update(dict.fromkeys(members, self._codec.nbytes(rows)))
        total = torch.stack(bases) - torch.stack(thetas)
        if self._codec.name == "fp32":
            return list(total)
        if self._codec.needs_feedback:
            none = torch.zeros_like(total[0])
            total += torch.stack([self._feedback.get((m, part.index), none) for m in members])
        arrived = transfer(self._codec, total, rows)
        if self._codec.needs_feedback:
            self._feedback.update(zip([(m, part.index) for m in members], total - arrived, strict=True))
        return list(arrived)
