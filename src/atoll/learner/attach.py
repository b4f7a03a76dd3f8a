"""`atoll.attach`: a learner that steps itself, for a training loop that is left as it is.

It joins at once, and counts a step whenever every one of its optimizers has made one: by a hook behind
`optimizer.step()`. A step that a GradScaler leaves out is none. When the run is done, or this machine
is taken away, the hook leaves the run and ends the script (`SystemExit`), which would not know; a loop that asks
`learner.done` itself says `at_end="go on"`.

A script that ends by itself leaves in good order too, with the reason if that is an error. Nobody else calls `leave`
then, and the threads that it needs must still run: so it is called as the interpreter begins to end, before thread
pools are closed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.learner.learner import Learner
from atoll.learner.script import say
from atoll.learner.state import Optimizers, optimizers_by_path

AtEnd: TypeAlias = Literal["exit", "go on"]


def attach(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    tokens: int | Callable[[], int],
    loss: Callable[[], torch.Tensor | float | None] | None = None,
    at_end: AtEnd = "exit",
    **learner: Any,
) -> Learner:
    """Join the run this script was launched in, and let its own loop train from then on.

        learner = atoll.attach(model, optimizer, tokens=batch_size * block_size * accumulation)

    `tokens` is how many tokens (or samples) one step of the optimizer trains on, or a function that says it of the last
    step; `loss` is a function that gives the last step's loss. Of several optimizers (a list, or a dict by name) a step
    is made when each has made one. `at_end`: "exit" ends the script when the run is done; with "go on" its loop asks
    `learner.done`. Everything else is what `atoll.Learner` takes. `learner.leave()` leaves before the script ends.
    """
    if at_end not in ("exit", "go on"):
        raise ValueError(f'at_end = {at_end!r} is not known: use "exit" or "go on"')
    found = list(optimizers_by_path(optimizer).values())
    if not found:
        raise TypeError("atoll.attach counts the steps of optimizers, and none is given: use atoll.Learner")
    entered = Learner(model, optimizer, **learner).__enter__()
    stepping = SelfStepping(entered, found, tokens, loss, at_end)
    stepping.begin()
    return entered


class SelfStepping:
    """The hooks of one attached learner."""

    def __init__(
        self,
        learner: Learner,
        optimizers: list[Optimizer],
        tokens: int | Callable[[], int],
        loss: Callable[[], torch.Tensor | float | None] | None,
        at_end: AtEnd,
    ) -> None:
        self._learner, self._optimizers, self._at_end = learner, optimizers, at_end
        self._count_tokens = tokens if callable(tokens) else lambda: tokens
        self._read_loss = loss if loss is not None else lambda: None
        self._stepped: set[int] = set()
        """Optimizers that have made this step."""
        self._handles: list[Any] = []

    def begin(self) -> None:
        self._handles = [one.register_step_post_hook(self._note_step) for one in self._optimizers]
        self._learner.on_leaving(self.end)
        # atexit would be too late: pools of threads, which copies need, take no more work by then.
        threading._register_atexit(self._leave_with_script)  # type: ignore[attr-defined]

    def end(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        # A GradScaler calls a fused optimizer in any case, and lets it leave the step out itself.
        if (overflow := getattr(optimizer, "found_inf", None)) is not None and bool(overflow):
            return
        self._stepped.add(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        self._learner.step(tokens=self._count_tokens(), loss=self._read_loss())
        if self._learner.done and self._at_end == "exit":
            self._learner.leave()
            say("the run is done: the script ends here")
            raise SystemExit(0)

    def _leave_with_script(self) -> None:
        if self._handles:
            # At a prompt, or in a notebook, the last error is one that somebody saw and went on after.
            prompted = hasattr(sys, "ps1")
            self._learner.leave(None if prompted else getattr(sys, "last_value", None))
