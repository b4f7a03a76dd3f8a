"""What a learner reports about its steps: steps, tokens, seconds, the newest loss, a digest of the inputs.

Counters only grow: if one report is dropped, a later one contains it. Seconds are the script's own, from the end of one
call of Atoll to the beginning of the next. Nothing here makes the device wait: losses and inputs are copied off it
beside the training, and used once they have arrived.

Inputs: learners with loaders of their own and equal seeds train on the same batches in the same order, and no figure
shows it. So every `EVERY` steps a few values of the tensors that the model is given are hashed, and the digest is sent
with the report of the step; equal digests mean equal batches. Leased data is not looked at, nor are copies of the model
and what torch.compile traces.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from atoll.protocol.limits import near


class StepCounter:
    def __init__(self) -> None:
        self.t = self.tokens = 0
        self.busy_s = 0.0
        """Seconds that this process spent in steps."""
        self._first_t = 0
        self._losses = LossReader()
        self._left_at = 0.0

    @property
    def loss(self) -> float | None:
        return near(self._losses.latest())

    @property
    def known_loss(self) -> float | None:
        """The same for another thread, which must not touch what is on its way: a step or two older."""
        return near(self._losses.known)

    def train(self) -> None:
        """The script goes on from here."""
        self._left_at = time.perf_counter()

    def stepped(self, tokens: int) -> None:
        self.busy_s += time.perf_counter() - self._left_at
        self.t += 1
        self.tokens += tokens

    def add_loss(self, loss: torch.Tensor | float | None) -> None:
        self._losses.add(loss)

    def continue_from(self, place: dict[str, Any]) -> None:
        """Go on after the step at which this place (saved_state.py) was saved."""
        self.t, self.tokens, self._first_t = place["t"], place["total"], place["t"]

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step of this process; None: it has made none."""
        return self.busy_s / (self.t - self._first_t) if self.t > self._first_t else None


class LossReader:
    """Keeps the newest loss whose value is known. On CUDA that is a step or two old."""

    def __init__(self) -> None:
        self.known: float | None = None
        self._pending: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = None
        """Page-locked, so that nothing waits for the copy; the same every time."""

    def add(self, loss: torch.Tensor | float | None) -> None:
        if loss is None:
            return
        if not isinstance(loss, torch.Tensor):
            self.known = float(loss)
        elif loss.is_cpu:
            self.known = loss.item()
        elif self._pending is None or self._pending.query():
            self._settle()
            self._pending = self._start_copy(loss.detach())

    def _start_copy(self, loss: torch.Tensor) -> torch.cuda.Event:
        if self._host is None:
            self._host = torch.empty((), dtype=torch.float32, pin_memory=True)
        self._host.copy_(loss.reshape(()), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(loss.get_device()))
        return event

    def latest(self) -> float | None:
        if self._pending is not None and self._pending.query():
            self._settle()
        return self.known

    def _settle(self) -> None:
        if self._pending is not None and self._host is not None:
            self.known = float(self._host)
            self._pending = None


# ---- the inputs of the model ----------------------------------------------------------------------------------------

EVERY = 8
TENSORS = 4
"""So many tensors are looked at, and …"""
VALUES = 256
"""… so many values of each."""


class InputDigest:
    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        """`wanted`: whether the data is the script's own."""
        self._wanted = wanted
        self._due = True
        self._number = -1
        self._pending: tuple[list[torch.Tensor], torch.cuda.Event] | None = None
        self._hook: RemovableHandle | None = None
        with suppress(RuntimeError):  # a model of torch.jit.script takes no hooks
            self._hook = model.register_forward_pre_hook(InputHook(self.look), with_kwargs=True)

    @property
    def number(self) -> int:
        """The newest that is known, below 2^48; −1: none."""
        if self._pending is not None and self._pending[1].query():
            self._number, self._pending = _hashed(self._pending[0]), None
        return self._number

    def stepped(self, t: int) -> None:
        self._due = t % EVERY == 0

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def look(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """At a training step's first call; scoring the same samples everywhere is nobody's mistake."""
        if not self._due or not module.training or not torch.is_grad_enabled():
            return
        self._due = False
        if self._wanted() and self._pending is None:
            self._take(list(islice(_tensors((given, named)), TENSORS)))

    @torch.no_grad()
    def _take(self, tensors: list[torch.Tensor]) -> None:
        devices = {tensor.device.type for tensor in tensors}
        if devices == {"cpu"}:
            self._number = _hashed([_few(tensor) for tensor in tensors])
        elif devices and devices <= {"cpu", "cuda"}:
            copies = [_few(tensor).to("cpu", non_blocking=True) for tensor in tensors]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(next(t.device for t in tensors if t.is_cuda)))
            self._pending = (copies, event)


class InputHook:
    """What a model carries of it. A copy of the model, or a file of it, carries a hook that does nothing."""

    def __init__(self, look: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        self._look = look

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._look is not None and not torch.compiler.is_compiling():
            self._look(module, given, named)

    def __reduce__(self) -> tuple[type[InputHook], tuple[()]]:
        return InputHook, ()


def _tensors(value: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Those in lists, tuples and dicts, in order."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.numel() and not value.is_meta:
            yield value
    elif depth and isinstance(value, list | tuple | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth - 1)


def _few(tensor: torch.Tensor) -> torch.Tensor:
    """Values from all over it, in the order in which they lie in memory: so nothing is copied but these."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.detach().permute(order).reshape(-1)
    return flat[:: max(1, flat.numel() // VALUES)][:VALUES].clone()


def _hashed(samples: list[torch.Tensor]) -> int:
    hashed = hashlib.blake2b(digest_size=6)
    for sample in samples:
        hashed.update(f"{sample.dtype} {sample.numel()};".encode())
        hashed.update(sample.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(hashed.digest(), "big")
