"""The learner of vision.py: a CNN with BatchNorm that reads digits in noise, written like a user's script.

It is told what to do by one argument of JSON (`Task`). The images are drawn, the same in every process.
"""

from __future__ import annotations

import sys
import time
from typing import Literal

import msgspec
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import atoll
from atoll.workloads.training import learning_rate

IMAGES, HELD_OUT = 40_000, 4_000
NOISE = 0.9
PEAK = 3e-3
GLYPHS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")
"""Of each digit five rows of three pixels, as bits."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    seed: int = 0
    batch: int = 32
    buffers: Literal["mean", "local"] = "mean"
    pace_s: float = 0.0
    """A step lasts at least so long: learners that share few cores then keep one pace."""


def draw_digits(count: int, seed: int) -> TensorDataset:
    """Images of 12 x 12 with a digit somewhere in them, under noise; and which digit it is."""
    dice = torch.Generator().manual_seed(seed)
    bits = torch.tensor([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in rows] for rows in GLYPHS])
    glyphs = bits.float().repeat_interleave(2, 1).repeat_interleave(2, 2)
    labels = torch.randint(10, (count,), generator=dice)
    images = NOISE * torch.randn(count, 1, 12, 12, generator=dice)
    down, right = torch.randint(3, (count,), generator=dice), torch.randint(7, (count,), generator=dice)
    rows = down[:, None, None] + torch.arange(10)[None, :, None]
    columns = right[:, None, None] + torch.arange(6)[None, None, :]
    images[torch.arange(count)[:, None, None], 0, rows, columns] += glyphs[labels]
    return TensorDataset(images, labels)


def training_images() -> TensorDataset:
    return draw_digits(IMAGES, seed=1)


def build_model(seed: int) -> nn.Module:
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for inside, outside in ((1, 32), (32, 64)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 3 * 3, 10))


def build_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=PEAK, weight_decay=0.1)


def train_batch(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor, progress: float
) -> torch.Tensor:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(progress, PEAK)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def score_model(model: nn.Module) -> tuple[float, float]:
    """Loss and the share of errors on held-out images, by the running statistics."""
    images, labels = draw_digits(HELD_OUT, seed=2)[:]
    logits = model.eval()(images)
    return float(F.cross_entropy(logits, labels)), float((logits.argmax(1) != labels).float().mean())


def main() -> None:
    task = msgspec.json.decode(sys.argv[-1], type=Task)
    torch.set_num_threads(1)
    model = build_model(task.seed)
    optimizer = build_optimizer(model)
    with atoll.Learner(model, optimizer, buffers=task.buffers) as learner:
        for images, labels in learner.batches(training_images(), batch_size=task.batch):
            began = time.monotonic()
            loss = train_batch(model, optimizer, images, labels, learner.progress)
            time.sleep(max(0.0, task.pace_s - (time.monotonic() - began)))
            learner.step(tokens=len(images), loss=loss)


if __name__ == "__main__":
    main()
