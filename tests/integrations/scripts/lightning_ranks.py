"""Lightning with two processes under DDP."""

import os
import time

import lightning
import torch
from torch import nn

import atoll
from atoll.integrations.lightning import AtollCallback


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return nn.functional.mse_loss(self.net(batch), batch.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0)
samples = torch.randn(4096, 4)
module = Module()
atoll.evaluate(module, lambda module: module.training_step(samples[-512:]).item())
callback = AtollCallback(tokens=len)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, callbacks=[callback], **quiet)
trainer.fit(module, torch.utils.data.DataLoader(samples[:-512], 8, shuffle=True))
assert callback.learner is not None
if callback.learner.index == 0:  # on all its ranks, as Lightning wants it
    trainer.save_checkpoint("saved.ckpt")
total = sum(parameter.detach().double().sum().item() for parameter in module.parameters())
print("rank", os.environ.get("LOCAL_RANK"), "ends with", total)
