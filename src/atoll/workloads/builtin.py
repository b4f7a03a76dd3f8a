"""What each learner of `atoll train` runs when no SCRIPT is named, and what its evaluator runs too.

Written like a user's script, on the public face alone. Settings come from the run's run.toml (ATOLL_RUN_TOML).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import atoll
from atoll.protocol.errors import AtollError
from atoll.workloads.ranks import count_ranks, join_ranks, spread_model
from atoll.workloads.settings import WorkloadSettings, read_run
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import StepPace, build_model, build_optimizers, sample, set_learning_rate, validation_loss


def main() -> None:
    if threads := os.environ.get("ATOLL_THREADS"):
        torch.set_num_threads(int(threads))
    path = os.environ.get("ATOLL_RUN_TOML")
    settings, seed = read_run(Path(path)) if path else (WorkloadSettings(), 0)
    with join_ranks() as device:
        train(settings, seed, device)


def train(settings: WorkloadSettings, seed: int, device: torch.device) -> None:
    text = Text.load(settings.data)
    gpt = build_model(settings, seed).to(device)
    model = spread_model(gpt, device, settings.parallel)
    optimizers = build_optimizers(gpt, settings)
    atoll.evaluate(
        gpt,
        lambda model: validation_loss(model, text, settings.eval_windows),
        sample=lambda model: sample(model, seed),
        unit="nats per byte",
    )

    dataset, pace = Windows(text, settings.block), StepPace(settings.pace_s)
    # Ranks know the tokens of a step one step later, so that their last contribution seems to have one step's too many.
    declared = settings.batch * settings.block if count_ranks() == 1 else 0
    # AdamW alone goes without its name, as in the cuts of older runs.
    given = optimizers if len(optimizers) > 1 else optimizers["adamw"]
    with atoll.Learner(model, given, data=text.digest, tokens_per_step=declared) as learner:
        for batch in learner.batches(dataset, batch_size=settings.batch):
            pace.begin_step()
            set_learning_rate(optimizers, learner.progress, settings)
            loss = model(batch.to(device))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
            pace.sleep_rest()
            learner.step(tokens=batch.shape[0] * settings.block, loss=loss)


if __name__ == "__main__":
    try:
        main()
    except AtollError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
