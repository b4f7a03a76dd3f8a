"""Lightning: optimization by hand, two optimizers whose rates fall, a stream. The first life of learner-1 fails."""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import atoll
from atoll.integrations.lightning import AtollCallback


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        chance = torch.Generator().manual_seed(0)
        while True:
            yield torch.randn(4, generator=chance)


class Module(lightning.LightningModule):
    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 16), nn.Linear(16, 1)

    def loss_of(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.second(nn.functional.gelu(self.first(batch))), batch.sum(1, keepdim=True))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        if batch_idx == 30 and os.environ.get("ATOLL_LEARNER") == "learner-1" and not Path("failed").exists():
            Path("failed").touch()
            raise ZeroDivisionError("as in a user's loss")
        loss = self.loss_of(batch)
        self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in (self.first, self.second)]
        linear = [torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 - step / 10_000) for one in optimizers]
        return optimizers, [{"scheduler": one, "interval": "step"} for one in linear]


lightning.seed_everything(0)
module = Module()
held_out = torch.tensor(list(itertools.product((-1.0, 0.0, 1.0), repeat=4)))
atoll.evaluate(module, lambda module: module.loss_of(held_out).item())
callback = AtollCallback(tokens=len)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(accelerator="cpu", max_steps=10_000, callbacks=[callback], **quiet)
trainer.fit(module, DataLoader(Stream(), 8))
print("last rates", *(one.param_groups[0]["lr"] for one in trainer.optimizers))
