"""What the end of a run does to the score: the last cycle of rounds by several rules, from the same moment of a run.

    python benchmarks/last_steps.py                      # all rows, three seeds: ten minutes of a core
    python benchmarks/last_steps.py --rows waves-constant --seeds 2 --out small.json

Learners in lockstep (P = H = 24 where the model can be cut so, τ = 2, overwrite) with the shipped merge and outer step.
At one or more moments of a run the last cycle is made by each rule below, all from the same Θ, outer state and
learners; then the run goes on as if nothing had been. Told is by how many percent each changes the validation loss of
the Θ before it: mean, spread and in what share of the cases it is worse. A run with a constant learning rate is looked
at five times in its last fifth; one whose rate falls (by a cosine, to a tenth) at its end alone.

| rule | Θ becomes |
| --- | --- |
| shipped | Θ − η(Δ + μ²b): merge by rows, Nesterov's step without looking ahead (docs/adr/0039) |
| ahead | Θ − η(Δ + μΔ + μ²b): Nesterov's step, as in every other round |
| less-momentum | the same, and b counts by the share of H steps that the contribution has |
| no-momentum | Θ − ηΔ |
| mean | as shipped, with the mean instead of RDA |
| average | Θ − mean Δ: the plain average of the learners |
| tail | as shipped, and then the mean of the last four versions of each fragment (`atoll export --tail 4`) |
| learner | no Θ at all: the model of one learner (mean of their losses) |
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, pstdev
from typing import NamedTuple, cast

import msgspec
import numpy as np
import torch
from lockstep_learner import cut_out, flatten_pieces, shape_like
from torch import nn

from atoll.config import Outer
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Fragment, make_plan, most_fragments
from atoll.numerics.merge import merge
from atoll.protocol.messages import TensorSpec
from atoll.protocol.phases import outer_at_end
from atoll.protocol.settings import USUAL
from atoll.telemetry.events import versions
from atoll.workloads.gpt import Gpt, GptConfig
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, windows

OVERLAP, TAIL, FLOOR, LOOKS = 2, 4, 0.1, 5
LAST = msgspec.convert(outer_at_end(msgspec.to_builtins(Outer())), Outer)
"""The outer settings of the last cycle."""


class Task(NamedTuple):
    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    data: torch.Tensor
    held_out: torch.Tensor
    batch: int
    lr: float


class Row(NamedTuple):
    task: Callable[[], Task]
    learners: int
    falls: bool
    """The learning rate does."""
    steps: int
    seeds: int


# ---- tasks ----------------------------------------------------------------------------------------------------------


def next_byte() -> Task:
    """The script of docs/tutorial.md."""
    runs = torch.tensor(list(inspect.getsource(argparse).encode())).unfold(0, 17, 2)
    return Task(
        lambda: nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1]),
        runs[:-1024],
        runs[-1024:],
        batch=256,
        lr=1e-3,
    )


def waves() -> Task:
    """A smooth function without noise, which a small net soon fits: what is left of its loss is the noise of steps."""
    at = 6 * torch.rand(8192, 2, generator=torch.Generator().manual_seed(5)) - 3
    data = torch.cat([at, torch.sin(at[:, :1]) * torch.cos(at[:, 1:])], 1)
    return Task(
        lambda: nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
        lambda model, batch: nn.functional.mse_loss(model(batch[:, :2]), batch[:, 2:]),
        data[:-1024],
        data[-1024:],
        batch=64,
        lr=3e-3,
    )


def clusters() -> Task:
    """Ten kinds of points around ten centers: still learning when it ends."""
    dice = torch.Generator().manual_seed(7)
    centers, kinds = torch.randn(10, 64, generator=dice), torch.randint(10, (6000,), generator=dice)
    points = centers[kinds] / 2 + torch.randn(6000, 64, generator=dice)
    data = torch.cat([points, kinds[:, None].float()], 1)
    return Task(
        lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
        lambda model, batch: nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1].long()),
        data[:-2000],
        data[-2000:],
        batch=32,
        lr=1e-3,
    )


def gpt() -> Task:
    """The model and text of `atoll train` without a script."""
    settings, text = WorkloadSettings(), Text.load()
    held_out = windows(text.held_out, settings.block, "held-out text")[:256]
    return Task(
        lambda: Gpt(GptConfig(depth=settings.depth, block=settings.block)),
        lambda model, batch: cast(torch.Tensor, model(batch.long())),
        torch.from_numpy(windows(text.train, settings.block, "training text").copy()),
        torch.from_numpy(held_out.copy()),
        batch=settings.batch,
        lr=settings.lr,
    )


ROWS = {
    "waves-constant": Row(waves, 2, False, 600, 3),
    "waves-falling": Row(waves, 2, True, 600, 3),
    "waves-falling-4": Row(waves, 4, True, 600, 3),
    "clusters-constant": Row(clusters, 2, False, 400, 3),
    "clusters-falling": Row(clusters, 2, True, 400, 3),
    "next_byte-constant": Row(next_byte, 2, False, 400, 3),
    "next_byte-falling": Row(next_byte, 2, True, 400, 3),
    "gpt-constant": Row(gpt, 2, False, 400, 3),
    "gpt-falling": Row(gpt, 2, True, 400, 3),
}


# ---- a run ----------------------------------------------------------------------------------------------------------


class LockstepRun:
    def __init__(self, row: Row, seed: int) -> None:
        self._row, self._task, self._dice = row, row.task(), np.random.default_rng(seed)
        torch.manual_seed(seed)
        self._models = [self._task.build() for _ in range(row.learners)]
        for model in self._models[1:]:
            model.load_state_dict(self._models[0].state_dict())
        self._optimizers = [torch.optim.AdamW(model.parameters(), lr=self._task.lr) for model in self._models]
        self._named = [dict(model.named_parameters()) for model in self._models]
        self._scored = self._task.build()
        embeddings = {f"{name}.weight" for name, part in self._scored.named_modules() if isinstance(part, nn.Embedding)}
        specs = [
            TensorSpec(name, tuple(p.shape), "float32", embedding=name in embeddings)
            for name, p in self._named[0].items()
        ]
        self._plan = make_plan(specs, min(USUAL, most_fragments(specs)))
        self._theta = [self._read(0, part) for part in self._plan.fragments]
        self._momentum = [np.zeros_like(values) for values in self._theta]
        self._base = list(self._theta)
        """What every learner adopted last."""
        self._since = [0 for _ in self._theta]
        """Steps since then."""
        self._tail = [deque([values], maxlen=TAIL) for values in self._theta]
        self._flights: dict[int, int] = {}
        """By fragment on its way, the step at which it is adopted."""
        self._step = self._round = 0

    def make_step(self) -> None:
        progress = self._step / self._row.steps
        falling = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = self._task.lr * (falling if self._row.falls else 1)
            batch = self._task.data[self._dice.integers(len(self._task.data), size=self._task.batch)]
            optimizer.zero_grad()
            self._task.loss(model, batch).backward()
            optimizer.step()
        self._step += 1
        self._since = [steps + 1 for steps in self._since]
        for index in [index for index, due in self._flights.items() if due <= self._step]:
            self._adopt(self._plan.fragments[index])
        while self._round < self._step * len(self._theta) // USUAL:
            part = self._plan.fragments[self._round % len(self._theta)]
            self._theta[part.index] = self._take_round(part, Outer(), self._momentum[part.index])
            self._tail[part.index].append(self._theta[part.index])
            self._flights[part.index] = self._step + OVERLAP
            self._round += 1

    def look_at_ends(self) -> dict[str, float]:
        """The validation loss before the last cycle and after it by each rule. Nothing is changed."""
        shipped = self._end_by(LAST)
        tail = [
            np.mean([*list(last)[1 if index not in self._flights else 0 :], values], axis=0, dtype=np.float64)
            for index, (last, values) in enumerate(zip(self._tail, shipped, strict=True))
        ]
        plain = Outer(optimizer="sgd", momentum=0.0)
        return {
            "before": self._score(self._theta),
            "shipped": self._score(shipped),
            "ahead": self._score(self._end_by(Outer())),
            "less-momentum": self._score(self._end_by(Outer(), by_steps=True)),
            "no-momentum": self._score(self._end_by(plain)),
            "mean": self._score(self._end_by(msgspec.structs.replace(LAST, merge="mean"))),
            "average": self._score(self._end_by(msgspec.structs.replace(plain, merge="mean", lr=1.0))),
            "tail": self._score([values.astype(np.float32) for values in tail]),
            "learner": fmean(self._score_model(model) for model in self._models),
        }

    def _end_by(self, outer: Outer, *, by_steps: bool = False) -> list[FloatArray]:
        """Θ after a last cycle. What is on its way has nothing more to give. `by_steps`: momentum counts by the share
        of H steps that the contribution has."""
        ended = []
        for part in self._plan.fragments:
            if part.index in self._flights:
                ended.append(self._theta[part.index])
                continue
            share = np.float32(self._since[part.index] / USUAL if by_steps else 1.0)
            ended.append(self._take_round(part, outer, share * self._momentum[part.index]))
        return ended

    def _take_round(self, part: Fragment, outer: Outer, momentum: FloatArray) -> FloatArray:
        """The next version; the momentum moves on in place."""
        base, gradient = self._base[part.index], np.empty(part.size, np.float32)
        deltas = [base - self._read(m, part) for m in range(len(self._models))]
        merge(part, deltas, [1.0] * len(deltas), gradient, outer.merge)
        new, made = np.empty_like(base), outer.make()
        made.step(self._theta[part.index], new, dict.fromkeys(made.slots(), momentum), gradient)
        return new

    def _adopt(self, part: Fragment) -> None:
        for named in self._named:
            own = cut_out(named, part)
            torch._foreach_copy_(own, shape_like(torch.from_numpy(self._theta[part.index]), own))
        self._base[part.index], self._since[part.index] = self._theta[part.index], 0
        del self._flights[part.index]

    def _read(self, learner: int, part: Fragment) -> FloatArray:
        values: FloatArray = flatten_pieces(cut_out(self._named[learner], part)).numpy().copy()
        return values

    def _score(self, fragments: list[FloatArray]) -> float:
        named = dict(self._scored.named_parameters())
        for part, values in zip(self._plan.fragments, fragments, strict=True):
            own = cut_out(named, part)
            torch._foreach_copy_(own, shape_like(torch.from_numpy(values), own))
        return self._score_model(self._scored)

    def _score_model(self, model: nn.Module) -> float:
        with torch.no_grad():
            return self._task.loss(model, self._task.held_out).item()


def look_at_run(row: Row, seed: int) -> list[dict[str, float]]:
    looks = 1 if row.falls else LOOKS
    every = row.steps // 5 // LOOKS
    at = {row.steps - every * n for n in range(looks)}
    run, found = LockstepRun(row, seed), []
    for step in range(1, row.steps + 1):
        run.make_step()
        if step in at:
            found.append(run.look_at_ends())
    return found


def compare_rules(found: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By rule: percent above the loss before, and the share of the cases in which it is above."""
    by_rule = {name: [100 * (one[name] / one["before"] - 1) for one in found] for name in found[0] if name != "before"}
    return {
        name: {
            "percent": round(fmean(values), 2),
            "spread": round(pstdev(values), 2),
            "worse": round(fmean(value > 0 for value in values), 2),
        }
        for name, values in by_rule.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, help="instead of each row's own number")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/last_steps.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    told = json.loads(options.out.read_text())["rows"] if options.out.exists() else {}
    for name in options.rows:
        row = ROWS[name]
        found = [one for seed in range(options.seeds or row.seeds) for one in look_at_run(row, seed)]
        before = fmean(one["before"] for one in found)
        told[name] = {"before": before, "cases": len(found), "rules": compare_rules(found)}
        print(f"{name}: {before:.4g} before the end, {len(found)} cases")
        for rule, figures in told[name]["rules"].items():
            text = f"{figures['percent']:+6.2f} % ± {figures['spread']:.2f}"
            print(f"  {rule:14} {text}, worse in {figures['worse']:.0%}", flush=True)
        options.out.write_text(json.dumps({"versions": versions(), "rows": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
