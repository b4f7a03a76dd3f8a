"""A number made of what the model is trained on, where that is the script's own: equal ones mean equal batches.

With loaders of their own and equal seeds, learners train on the same batches in the same order, and no figure shows it.
So every `EVERY` steps a few values of the tensors that the model is given are hashed, and the number goes along with
the report of the step. Leased data needs no such look. Nothing waits for a device: the values are copied off it beside
the training, and the number is told when they have arrived. Copies of the model are not looked at, nor is what is
traced by torch.compile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

EVERY = 8
TENSORS = 4
"""So many tensors are looked at, and …"""
VALUES = 256
"""… so many values of each."""


class Inputs:
    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        """`wanted`: whether the data is the script's own."""
        self._wanted = wanted
        self._due = True
        self._number = -1
        self._pending: tuple[list[torch.Tensor], torch.cuda.Event] | None = None
        self._hook: RemovableHandle | None = None
        with suppress(RuntimeError):  # a model of torch.jit.script takes no hooks
            self._hook = model.register_forward_pre_hook(Hook(self.look), with_kwargs=True)

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


class Hook:
    """What a model carries of it. A copy of the model, or a file of it, carries a hook that does nothing."""

    def __init__(self, look: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None) -> None:
        self._look = look

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._look is not None and not torch.compiler.is_compiling():
            self._look(module, given, named)

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


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
