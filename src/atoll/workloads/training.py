"""What the learners and the data-parallel baselines share, so that only the algorithm differs.

The model and its optimizers, the learning rate, the pace of steps, and scores: always of the same windows of the
held-out text, so that losses of a run compare.
"""

from __future__ import annotations

import math
import time

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from atoll.protocol.errors import ConfigError
from atoll.workloads.gpt import Gpt, GptConfig
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, windows


def build_model(settings: WorkloadSettings, seed: int) -> Gpt:
    """The model with the same initial weights in every process of a run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Gpt(GptConfig(depth=settings.depth, block=settings.block, experts=settings.experts))


def build_optimizers(model: Gpt, settings: WorkloadSettings) -> dict[str, Optimizer]:
    """By name: AdamW for everything, or Muon for the matrices of the blocks and AdamW for the rest."""
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2] if settings.optimizer == "muon" else []
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)
    return {"muon": _build_muon(hidden, settings), "adamw": adamw} if hidden else {"adamw": adamw}


def _build_muon(matrices: list[nn.Parameter], settings: WorkloadSettings) -> Optimizer:
    """Its steps are as long as AdamW's, so that one learning rate and weight decay fit both."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"workload.optimizer is 'muon', which torch has since 2.9 and this is torch {torch.__version__}: install "
            f"torch 2.9 or newer, or set it to adamw"
        )
    decay = settings.weight_decay
    return torch.optim.Muon(matrices, lr=settings.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")


def set_learning_rate(optimizers: dict[str, Optimizer], progress: float, settings: WorkloadSettings) -> float:
    lr = learning_rate(progress, settings.lr, settings.warmup, settings.floor)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = lr
    return lr


def learning_rate(progress: float, peak: float, warmup: float = 0.03, floor: float = 0.1) -> float:
    """Linear up to `peak` over the first `warmup` of the run, then a cosine down to `floor * peak` at its end.

    It depends on the run's progress alone, so that learners of any speed end it together.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return peak * max(progress / warmup, 0.01)
    fall = (progress - warmup) / (1.0 - warmup)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * fall)))


class StepPace:
    """Makes every step last at least `pace_s`: many learners on few cores then run at one speed, and a death speeds
    nobody up. Call `begin` when a step begins and `rest` before it ends."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._began = 0.0

    def begin_step(self) -> None:
        self._began = time.perf_counter()

    def sleep_rest(self) -> None:
        left = self._began + self._pace_s - time.perf_counter()
        if left > 0:
            time.sleep(left)


# ---- scores and samples ---------------------------------------------------------------------------------------------

PROMPTS = (b"def ", b"class ", b"import ")


@torch.no_grad()
def validation_loss(model: Gpt, text: Text, count: int = 256, batch: int = 32) -> float:
    """Mean nats per byte over up to `count` windows, evenly spread over the held-out part of the text."""
    rows = held_out_windows(text, model.config.block, count).to(model.embedding.weight.device)
    was_training = model.training
    model.eval()
    total = sum((float(model(chunk)) * len(chunk) for chunk in torch.split(rows, batch)), start=0.0)
    model.train(was_training)
    return total / len(rows)


def held_out_windows(text: Text, block: int, count: int) -> torch.Tensor:
    rows = windows(text.held_out, block, f"the held-out part of {text.name}")
    picked = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.intp)
    return torch.from_numpy(rows[picked].astype(np.int64))


def sample(model: Gpt, seed: int = 0, length: int = 160, temperature: float = 0.7) -> str:
    """A few lines that the model writes, one piece per prompt."""
    generator = torch.Generator().manual_seed(seed)
    pieces = (prompt + model.generate(prompt, length, temperature, generator) for prompt in PROMPTS)
    return "\n\n".join(readable(piece) for piece in pieces)


def readable(piece: bytes) -> str:
    """Text that is safe to print: no control characters, no broken UTF-8, no half line at the end."""
    text = piece.decode("utf-8", errors="replace")
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    whole, cut, _ = text.rpartition("\n")
    return (whole if cut else text).rstrip()
