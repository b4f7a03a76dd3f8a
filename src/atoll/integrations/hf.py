"""Hugging Face's Trainer as a learner of a run: `with joined(trainer): trainer.train()`.

`AtollCallback` does the work. It joins when training begins, counts a step behind every step of the optimizer, stops
Trainer when the run is done, and leaves when training ends; then `trainer.model` holds the global model. In a run
- samples come from the run's leases, through Trainer's own dataloader and collator;
- Trainer's learning rate schedule (any LambdaLR, as all of `get_scheduler` but a few are) follows `learner.progress`;
- Trainer writes no checkpoints: they would hold one learner's copy; the run has snapshots of its own;
- a run with a budget ends by it, whatever `num_train_epochs` and `max_steps` say.
Alone, without a run, Trainer trains as it always does.

Tokens are those that Trainer counts. A step that a GradScaler leaves out is none, and its tokens are not counted.

Started by torchrun, or by `atoll train --ranks`, all processes of a Trainer are one learner of several ranks, which
share the model by DDP. Trainer counts the tokens of all ranks on each of them, so rank 0 says them for all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import atoll
from atoll.extras import explained

with explained(__name__, "hf"):
    import torch
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments, set_seed

    from atoll.integrations.loaders import follow_run, lease_samples, share_stream
    from atoll.learner.averaging import count_averaging_ranks
    from atoll.learner.ranks import count_ranks
    from atoll.learner.script import find_syncer, say

__all__ = ["AtollCallback", "joined"]

SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
"""What Trainer.evaluate measures of itself."""
COUNTS = ("epoch", "num_input_tokens_seen")
"""How far Trainer is: in the evaluator nowhere."""


class AtollCallback(TrainerCallback):  # type: ignore[misc]
    """For a Trainer that is made elsewhere: `Trainer(..., callbacks=[AtollCallback()])`; else use `joined`.

    `learner`: what `atoll.Learner` takes."""

    def __init__(self, **learner: Any) -> None:
        self.learner: atoll.Learner | None = None
        """From the beginning of training on."""
        self._options = learner
        self._seen = 0
        """Tokens that Trainer has counted until the last step."""
        self._losses: list[torch.Tensor] = []
        """Of the batches since the last step."""
        self._scale = 0.0
        """The loss scale of the step under way, where there is a GradScaler."""
        self._said_checkpoints = False

    def note_loss(self, loss: torch.Tensor) -> None:
        """Of one batch, as training_step returns it: those of a step add up to its loss."""
        self._losses.append(loss)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        lr_scheduler: Any,
        train_dataloader: Any,
        **_: Any,
    ) -> None:
        check_counting(args)
        self.learner = learner = atoll.Learner(model, getattr(optimizer, "optimizer", optimizer), **self._options)
        self._seen = state.num_input_tokens_seen
        self._losses.clear()
        self._scale = read_scale(optimizer)
        if learner.alone:
            learner.__enter__()
            return
        check_in_run(args, state)
        set_seed(learner._make_seed())  # Trainer's own is the same on every learner
        learner.register("schedule", lr_scheduler, from_peers=True)
        if (scaler := getattr(optimizer, "scaler", None)) is not None:
            learner.register("scaler", scaler)
        learner.__enter__()
        if not lease_samples(train_dataloader, learner):
            share_stream(train_dataloader, learner)
        schedule = getattr(lr_scheduler, "scheduler", lr_scheduler)
        if learner.has_budget and not follow_run(schedule, learner, state.max_steps):
            say("the learning rate follows this learner's own steps: its schedule is no LambdaLR")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, optimizer: Any, **_: Any
    ) -> None:
        assert self.learner is not None
        tokens, self._seen = state.num_input_tokens_seen - self._seen, state.num_input_tokens_seen
        loss = torch.stack(self._losses).sum() if self._losses else None
        self._losses.clear()
        before, self._scale = self._scale, read_scale(optimizer)
        if self._scale >= before:  # it falls with every step that is left out
            if tokens == 0:
                raise ValueError(
                    "Trainer counted no tokens in this step: the batches have no column that is named as "
                    "model.main_input_name says"
                )
            self.learner.step(tokens=tokens if args.process_index == 0 else 0, loss=loss)
        if self.learner.has_budget:
            state.max_steps = max(state.max_steps, state.global_step + 2)  # Trainer ends when it gets there
        if self.learner.done:
            control.should_training_stop = True
        self._leave_checkpoints_out(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._leave_checkpoints_out(control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.learner is not None
        if self.learner.has_budget and not self.learner.done:
            say(f"Trainer ended after {state.global_step} steps of its own, before the run did")
        self.learner.leave()

    def _leave_checkpoints_out(self, control: TrainerControl) -> None:
        if not control.should_save or self.learner is None or self.learner.alone:
            return
        control.should_save = False
        if not self._said_checkpoints:
            self._said_checkpoints = True
            say("Trainer's checkpoints are left out: the run keeps snapshots of its own")


def read_scale(optimizer: Any) -> float:
    """Accelerate does not see that a fused optimizer has left a step out (it is called, and finds out itself); that the
    scale falls is seen of all of them."""
    scaler = getattr(optimizer, "scaler", None)
    return 0.0 if scaler is None else float(scaler.get_scale())


def check_counting(args: TrainingArguments) -> None:
    """ValueError: Trainer does not count tokens."""
    if args.include_num_input_tokens_seen in (False, "no"):
        raise ValueError(
            "a learner needs to know how many tokens each step has, and Trainer does not count them: "
            'TrainingArguments(include_num_input_tokens_seen="all"), or "non_padding"'
        )


def check_in_run(args: TrainingArguments, state: TrainerState) -> None:
    """ValueError: what is asked of Trainer cannot be had in a run."""
    if count_averaging_ranks() > 1:
        raise ValueError("--algorithm data-parallel is for a loop of one's own: Trainer shares the model by itself")
    if args.world_size != (ranks := count_ranks()):
        raise ValueError(
            f"{ranks} processes were started as one learner, and Trainer takes each of them for all there is; without "
            "a GPU it needs TrainingArguments(use_cpu=True)"
        )
    kind = AcceleratorState().distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            f"Trainer shares the model by {kind} here; a learner of Trainer's has one process or several under DDP: "
            "leave it out, or write the loop yourself with FSDP2 (docs/ranks.md)"
        )
    if args.load_best_model_at_end:
        raise ValueError(
            "load_best_model_at_end would put one learner's checkpoint in the place of the global model: leave it out; "
            "the run keeps its best model in model-best.safetensors"
        )
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size begins training anew, which a learner cannot: name the batch size")
    if state.global_step > 0:
        raise ValueError("a run restores its learners itself: call trainer.train() without resume_from_checkpoint")


@contextmanager
def joined(
    trainer: Trainer,
    *,
    save_to: str | Path | None = None,
    directions: Mapping[str, Any] | None = None,
    **learner: Any,
) -> Iterator[AtollCallback]:
    """Let a Trainer train in the run that the script was launched in; alone it trains as always.

        trainer = Trainer(model, args, train_dataset=train, eval_dataset=held_out)
        with joined(trainer, save_to="my-model"):
            trainer.train()

    The evaluator of the run scores the global model by `trainer.evaluate()`, if there is an `eval_dataset`;
    `directions` is that of `atoll.evaluate`, by the names of figures without "eval_". `save_to`: the folder into which
    the learner with index 0 saves the final global model by `save_pretrained`, with the tokenizer; if it has gone
    before the end, nobody does. `learner` is what `atoll.Learner` takes.
    """
    check_counting(trainer.args)
    if trainer.model_init is not None:
        raise ValueError("Trainer(model_init=...) makes another model when training begins: give it the model itself")
    if trainer.eval_dataset is not None:
        atoll.evaluate(trainer.model, lambda _: read_figures(trainer), directions=directions)
    callback = AtollCallback(**learner)
    trainer.add_callback(callback)
    restore = _watch(trainer, callback, in_run=bool(learner.get("syncer") or find_syncer(os.environ)))
    try:
        yield callback
        if save_to is not None and callback.learner is not None:
            save_global_model(trainer, callback.learner, Path(save_to))
    except BaseException as error:
        if callback.learner is not None:
            callback.learner.leave(error)
        raise
    finally:
        restore()
        trainer.remove_callback(callback)


def _watch(trainer: Trainer, callback: AtollCallback, *, in_run: bool) -> Callable[[], None]:
    """What no callback is told: the loss of every batch; and no end by epochs where the run has a budget. Returns what
    undoes it."""
    training_step, initial_values = trainer.training_step, trainer.set_initial_training_values

    def watched_step(*given: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = training_step(*given, **named)
        callback.note_loss(loss.detach())
        return loss

    def endless_epochs(*given: Any, **named: Any) -> Any:
        # Trainer asks before the learner has joined and knows of a budget. Where there is none, `max_steps` ends it.
        epochs, *others = initial_values(*given, **named)
        return sys.maxsize if in_run else epochs, *others

    trainer.training_step = watched_step
    trainer.set_initial_training_values = endless_epochs

    def restore() -> None:
        del trainer.training_step, trainer.set_initial_training_values

    return restore


def read_figures(trainer: Trainer) -> dict[str, float]:
    """What Trainer finds of its model, by names without "eval_"."""
    figures = {name.removeprefix("eval_"): value for name, value in trainer.evaluate().items()}
    return {name: value for name, value in figures.items() if name not in (*SPEED, *COUNTS)}


def save_global_model(trainer: Trainer, learner: atoll.Learner, folder: Path) -> None:
    """As a folder for `from_pretrained`: configuration, weights (of PEFT: the adapters), tokenizer."""
    if not learner.alone and not learner.finished:
        say(f"nothing is saved to {folder}: the run goes on without this learner")
        return
    if not trainer.is_world_process_zero():
        return
    if learner.index != 0:
        say(f"the learner with index 0 saves to {folder}; if it was gone by then: atoll export RUN model.safetensors")
        return
    trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder)
    if trainer.processing_class is not None:
        trainer.processing_class.save_pretrained(folder)
    say(f"saved {'the model' if learner.alone else 'the global model'} to {folder}")
