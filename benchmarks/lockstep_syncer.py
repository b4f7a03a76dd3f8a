"""The syncer of the lockstep loop: merge and outer step, by the shipped code or on the learners' device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.fragments import Fragment, FragmentPlan, Piece
from atoll.numerics.kernels import CANCELLED, SPECK
from atoll.numerics.merge import subtracts_from_newest
from atoll.syncer.parameters import Parameters
from atoll.syncer.versions import OLD

ON_DEVICE = {"mean", "rda-row", "rda-row-embeddings", "rda-row-literal"}
"""The merge rules that `DeviceSyncer` has."""


class HostSyncer:
    """The shipped one's parameters."""

    def __init__(self, plan: FragmentPlan, first: list[torch.Tensor], outer: Outer, down: str) -> None:
        self._parameters = Parameters(plan, outer, down)
        self._device = first[0].device
        self.versions, self.numbers = first, [0] * len(first)
        self.sent = 0
        for part, values in zip(plan.fragments, first, strict=True):
            copied = values.cpu().numpy().copy()
            self._parameters.put_initial(part.index, copied, compute_digest(copied.view(np.uint8).data))
        self._parameters.commit_initial()

    def change_outer(self, outer: Outer) -> None:
        self._parameters.change_outer(outer)

    def merge(
        self, part: Fragment, deltas: list[torch.Tensor], bases: list[int], weights: list[float] | None = None
    ) -> torch.Tensor:
        """The next version becomes the committed one. Returns the outer gradient. `bases`: the version of each.
        `weights`: None for equal ones."""
        held, index = self._parameters, part.index
        equal = [1.0] * len(deltas)
        held.stage_merge(index, [delta.cpu().numpy().copy() for delta in deltas], weights or equal, bases=bases)
        gradient = torch.from_numpy(held.outer_gradient(index).copy())
        self.sent += len(held.round_payload(index))
        before = held.committed_buffers()[index]
        self.numbers[index] += 1
        held.commit_version(index, self.numbers[index], before.round + 1)
        self.versions[index] = torch.from_numpy(held.committed_buffers()[index].values).to(self._device, copy=True)
        return gradient


class DeviceSyncer:
    """The rules of ON_DEVICE, and Nesterov's outer step, where the learners are. All weights are equal."""

    def __init__(self, plan: FragmentPlan, first: list[torch.Tensor], outer: Outer) -> None:
        self._outer = outer
        self.versions, self.numbers = first, [0] * len(first)
        self._kept: list[dict[int, torch.Tensor]] = [{} for _ in first]
        """By fragment, the versions before the newest that the shipped syncer keeps for the literal rule."""
        self._momentum = [torch.zeros_like(values) for values in first]
        self.sent = 0

    def change_outer(self, outer: Outer) -> None:
        if outer.momentum and not self._outer.momentum:
            torch._foreach_zero_(self._momentum)
        self._outer = outer

    def merge(self, part: Fragment, deltas: list[torch.Tensor], bases: list[int]) -> torch.Tensor:
        if subtracts_from_newest(self._outer.merge):
            deltas = self._subtract_from_newest(part.index, deltas, bases)
        gradient, momentum = torch.empty_like(deltas[0]), self._momentum[part.index]
        for piece, place in part.parts:
            rows = [delta[place].view(_rows_of(piece), -1) for delta in deltas]
            by_mean = piece.tensor.embedding and self._outer.merge != "rda-row-embeddings"
            plain = self._outer.merge == "mean" or by_mean
            gradient[place] = (take_mean(rows) if plain else _merge_by_rows(rows)).view(-1)
        momentum.mul_(self._outer.momentum).add_(gradient)
        step = gradient + self._outer.momentum * momentum
        self.versions[part.index] = self.versions[part.index] - self._outer.lr * step
        self.numbers[part.index] += 1
        self.sent += 4 * part.size
        return gradient

    def _subtract_from_newest(self, index: int, deltas: list[torch.Tensor], bases: list[int]) -> list[torch.Tensor]:
        """As `Parameters` does it; the newest version is kept for the rounds that follow."""
        newest, kept = self.versions[index], self._kept[index]
        found = [d + (newest - kept[base]) if base in kept else d for d, base in zip(deltas, bases, strict=True)]
        kept[self.numbers[index]] = newest
        kept.pop(self.numbers[index] - OLD, None)
        return found


def _rows_of(piece: Piece) -> int:
    return piece.rows if len(piece.shape) >= 2 else 1


def take_mean(deltas: list[torch.Tensor]) -> torch.Tensor:
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
    return torch.where(cancelled.unsqueeze(1), take_mean(deltas), merged * factors)


def _row_norms(rows: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


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
        return {"rho": rho, "outer_step": None if rho is None else outer.make().effective_step(rho)}
