"""A small model in shared memory, and a partner that only remembers what it was told."""

from __future__ import annotations

import torch

from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import ToCourier
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def boxed(parameters: dict[str, torch.Tensor], fragments: int = 1, **settings: object) -> tuple[Mailbox, Settings]:
    tensors = tuple(TensorSpec(name, tuple(p.shape), DTYPES[p.dtype]) for name, p in parameters.items())
    rules = Settings(fragments=fragments, overlap=0, **settings).resolved(len(tensors))  # type: ignore[arg-type]
    return Mailbox.create(make_plan(tensors, fragments), rules), rules


def in_order(box: Mailbox, parameters: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[parameters[tensor.name] for tensor in part.tensors] for part in box.plan.fragments]


class Remembers:
    """In place of a courier process."""

    def __init__(self) -> None:
        self.sent: list[ToCourier] = []

    def send(self, frame: ToCourier, descriptor: int | None = None) -> None:
        self.sent.append(frame)

    def told(self) -> list[ToCourier]:
        """What was sent since the last time."""
        sent, self.sent = self.sent, []
        return sent
