"""Lightning's Trainer as a learner of a run: `Trainer(callbacks=[AtollCallback(tokens=...)])`.

The callback joins when training begins, counts a step whenever a batch has moved `trainer.global_step` (so accumulated
batches are one step, and so are the steps of several optimizers on one batch), stops the Trainer when the run is done
and leaves when training ends: then the module holds the global model. In a run samples come from the run's leases
through the module's own dataloader, schedules that are a LambdaLR stepped by steps follow `learner.progress`, and a run
with a budget ends by it, whatever `max_epochs` and `max_steps` say. Alone the Trainer trains as it always does.

With `strategy="ddp"` all processes of a Trainer are one learner of several ranks; each counts its own batches.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

import atoll
from atoll.extras import explained

with explained(__name__, "lightning"):
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    from atoll.integrations.loaders import follow_run, lease_samples, share_stream
    from atoll.learner.script import say

__all__ = ["AtollCallback"]


class AtollCallback(Callback):  # type: ignore[misc]
    """`tokens(batch)` is how many tokens (or samples) a batch has; `learner`: what `atoll.Learner` takes."""

    def __init__(self, tokens: Callable[[Any], int], **learner: Any) -> None:
        if not callable(tokens):
            raise TypeError("tokens is a function of a batch, as in AtollCallback(tokens=len)")
        self.learner: atoll.Learner | None = None
        """From the beginning of training on."""
        self._count_tokens, self._options = tokens, learner
        self._tokens = 0
        """Of the batches since the last step."""
        self._at = 0
        """`trainer.global_step` at the last step."""
        self._scale = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers[0] if len(trainer.optimizers) == 1 else list(trainer.optimizers)
        self.learner = learner = atoll.Learner(pl_module, optimizers, **self._options)
        self._tokens, self._at, self._scale = 0, trainer.global_step, read_scale(trainer)
        if learner.alone:
            learner.__enter__()
            return
        check_in_run(trainer)
        seed_everything(learner._make_seed(), verbose=False)  # the script's own is the same on every learner
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        for number, schedule in enumerate(schedules):
            learner.register(f"schedule-{number}", schedule, from_peers=True)
        free_sigterm(trainer)
        learner.__enter__()
        loader = trainer.train_dataloader
        if not lease_samples(loader, learner):
            share_stream(loader, learner)
        iter(trainer.fit_loop._data_fetcher)  # workers have begun to load what the loader itself would choose
        if learner.has_budget:
            self._follow(trainer, learner)

    def _follow(self, trainer: Trainer, learner: atoll.Learner) -> None:
        """The run's budget is the end, and how far schedules are."""
        steps = trainer.estimated_stepping_batches
        for config in trainer.lr_scheduler_configs:
            by_steps = config.interval == "step" and math.isfinite(steps)
            if not (by_steps and follow_run(config.scheduler, learner, int(steps))):
                say("the learning rate follows this learner's own steps: its schedule is no LambdaLR over max_steps")
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = -1, -1
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.learner is not None
        self._tokens += self._count_tokens(batch)
        if trainer.global_step == self._at:
            return
        tokens, self._tokens, self._at = self._tokens, 0, trainer.global_step
        before, self._scale = self._scale, read_scale(trainer)
        if self._scale >= before:  # it falls with every step that is left out
            self.learner.step(tokens=tokens, loss=read_loss(outputs))
        if self.learner.done:
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.learner is not None:
            self.learner.leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """SIGTERM, where it stayed Lightning's, is no mistake: the last steps go to the run."""
        if self.learner is not None:
            self.learner.leave(None if isinstance(exception, SIGTERMException) else exception)


def check_in_run(trainer: Trainer) -> None:
    """ValueError: what is asked of the Trainer cannot be had in a run."""
    if trainer.world_size > 1 and type(trainer.strategy) is not DDPStrategy:  # DeepSpeed's is derived from it
        raise ValueError(
            f"Lightning shares the model by {type(trainer.strategy).__name__} here; several processes of Lightning "
            'are one learner under strategy="ddp": use that, or write the loop yourself with FSDP2 (docs/ranks.md)'
        )
    if trainer.global_step > 0:
        raise ValueError("a run restores its learners itself: call trainer.fit() without ckpt_path")


def free_sigterm(trainer: Trainer) -> None:
    """Lightning ends training by an exception after SIGTERM. A learner that hears of it itself leaves at the next step
    and saves its state too; it listens where nobody else does. A handler of the script's own stays."""
    before = getattr(trainer._signal_connector, "_original_handlers", {}).get(signal.SIGTERM)
    if before is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def read_scale(trainer: Trainer) -> float:
    """That a GradScaler leaves a step out is seen by its scale."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())


def read_loss(outputs: Any) -> torch.Tensor | None:
    """What training_step returned: with manual optimization it may be nothing."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss.detach() if isinstance(loss, torch.Tensor) else None
