"""A small model in shared memory, and a partner that only remembers what it was told."""

from __future__ import annotations

import torch

from atoll.learner.model import view_piece
from atoll.learner.offload import OwnPieces
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import ToCourier
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def boxed(
    parameters: dict[str, torch.Tensor], fragments: int = 1, *, on_device: bool = False, **settings: object
) -> tuple[Mailbox, Settings]:
    tensors = tuple(TensorSpec(name, tuple(p.shape), DTYPES[p.dtype]) for name, p in parameters.items())
    rules = Settings(fragments=fragments, overlap=0, **settings).resolved(fragments)  # type: ignore[arg-type]
    return Mailbox.create(make_plan(tensors, fragments), rules, on_device=on_device), rules


def reading(box: Mailbox, parameters: dict[str, torch.Tensor]) -> OwnPieces:
    return lambda fragment: in_order(box, parameters)[fragment]


def in_order(box: Mailbox, parameters: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    parts = box.plan.fragments
    return [[view_piece(parameters[piece.tensor.name], piece) for piece in part.pieces] for part in parts]


class Remembers:
    """In place of a courier process."""

    def __init__(self) -> None:
        self.sent: list[ToCourier] = []

    def send(self, frame: ToCourier, descriptor: int | None = None) -> None:
        self.sent.append(frame)

    def read_in_background(self, *_: object) -> None:
        """Nothing is ever read from it."""

    def told(self) -> list[ToCourier]:
        """What was sent since the last time."""
        sent, self.sent = self.sent, []
        return sent
