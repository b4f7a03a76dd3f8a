"""Scoring and sampling the global model: always the same windows of the held-out part, so losses of a run compare."""

from __future__ import annotations

import numpy as np
import torch

from atoll.workloads.gpt import Gpt
from atoll.workloads.text import Text, windows

PROMPTS = (b"def ", b"class ", b"import ")


@torch.no_grad()
def validation_loss(model: Gpt, text: Text, count: int = 256, batch: int = 32) -> float:
    """Mean nats per byte over up to `count` windows, evenly spread over the held-out part of the text."""
    rows = held_out_windows(text, model.config.block, count).to(model.embedding.weight.device)
    was_training = model.training
    model.eval()
    total = sum((float(model(chunk)) * len(chunk) for chunk in torch.split(rows, batch)), start=0.0)
    model.train(was_training)
    return total / len(rows)


def held_out_windows(text: Text, block: int, count: int) -> torch.Tensor:
    rows = windows(text.held_out, block, f"the held-out part of {text.name}")
    picked = np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(np.intp)
    return torch.from_numpy(rows[picked].astype(np.int64))


def sample(model: Gpt, seed: int = 0, length: int = 160, temperature: float = 0.7) -> str:
    """A few lines that the model writes, one piece per prompt."""
    generator = torch.Generator().manual_seed(seed)
    pieces = (prompt + model.generate(prompt, length, temperature, generator) for prompt in PROMPTS)
    return "\n\n".join(readable(piece) for piece in pieces)


def readable(piece: bytes) -> str:
    """Text that is safe to print: no control characters, no broken UTF-8, no half line at the end."""
    text = piece.decode("utf-8", errors="replace")
    text = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    whole, cut, _ = text.rpartition("\n")
    return (whole if cut else text).rstrip()
