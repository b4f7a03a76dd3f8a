"""Lightning, with the extra `lightning`.
Alone it just trains:           python examples/lightning_fit.py
Two learners train one model:   atoll train examples/lightning_fit.py --learners 2 --steps 200
The global model, loaded back:  python examples/lightning_fit.py atoll-lightning.ckpt
"""

import sys

import lightning
import torch
from torch import nn

import atoll
from atoll.integrations.lightning import AtollCallback


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[:, :-1]), batch[:, -1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


lightning.seed_everything(0)
inputs = torch.randn(4096, 8)
samples = torch.cat([inputs, (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdim=True)], dim=1)
module = Module.load_from_checkpoint(sys.argv[1]) if sys.argv[1:] else Module()
atoll.evaluate(module, lambda module: module.training_step(samples[-512:]).item())
if not sys.argv[1:]:
    callback = AtollCallback(tokens=len)
    trainer = lightning.Trainer(max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False)
    trainer.fit(module, torch.utils.data.DataLoader(samples[:-512], 32))
    if callback.learner.index == 0:  # the module holds the global model now
        trainer.save_checkpoint("atoll-lightning.ckpt")
print("validation loss", module.training_step(samples[-512:]).item())
