"""A small byte-level GPT whose size has one dial: `depth` blocks, 32 * depth channels, depth heads of 32.

Chosen by measurement for few steps on one CPU thread (docs/LOG.md): embedding and head are one tied matrix, positions
are rotary, each byte's embedding is mixed with the one before it (`smear`, which hands the first block bigrams for the
price of one vector), squared ReLU, no biases. Both matrices that write into the residual stream start at zero: every
block begins as the identity, and the loss near ln 256.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
HEAD_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class GptConfig:
    depth: int = 2
    # Blocks; width and heads follow from it.
    block: int = 64
    # The longest context, in bytes.

    @property
    def width(self) -> int:
        return HEAD_CHANNELS * self.depth

    @property
    def heads(self) -> int:
        return self.depth


class Gain(nn.Module):
    """Layer norm with a gain and no bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


class Block(nn.Module):
    """x ← x + attention(norm(x));  x ← x + mlp(norm(x))."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = Gain(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm_mlp = Gain(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for reads in (self.qkv, self.up):
            nn.init.normal_(reads.weight, std=width**-0.5)
        for writes in (self.mix, self.down):
            nn.init.zeros_(writes.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.mix(self.attend(self.norm_attention(x), cos, sin))
        hidden: Tensor = self.up(self.norm_mlp(x))
        written: Tensor = self.down(F.relu(hidden).square())
        return x + written

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, HEAD_CHANNELS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, width)


class Gpt(nn.Module):
    """`model(batch)` is the loss of [B, T + 1] bytes, in nats per byte; `logits` and `generate` are for reading it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.smear = nn.Parameter(torch.zeros(config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = Gain(config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        angles = rotary_angles(config.block)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        logits = self.logits(batch[:, :-1])
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))

    def logits(self, x: Tensor) -> Tensor:
        """[B, T] bytes, T at most `block`, to [B, T, 256]: what may follow each of them."""
        length = x.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        h = self.embedding(x)
        h = h + self.smear * F.pad(h, (0, 0, 1, -1))
        h = F.rms_norm(h, (self.config.width,))
        for block in self.blocks:
            h = block(h, cos, sin)
        return F.linear(self.norm(h), self.embedding.weight)

    @torch.no_grad()
    def generate(
        self, prompt: bytes, length: int, temperature: float = 0.8, generator: torch.Generator | None = None
    ) -> bytes:
        """`length` bytes that follow `prompt`; at temperature 0 the likeliest of each."""
        written = list(prompt) or [ord("\n")]
        start = len(written)
        for _ in range(length):
            context = torch.tensor([written[-self.config.block :]], device=self.embedding.weight.device)
            written.append(draw(self.logits(context)[0, -1], temperature, generator))
        return bytes(written[start:])


def draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
    return int(torch.multinomial(chances, 1, generator=generator))


def rotary_angles(length: int) -> Tensor:
    """[length, 16]: position times frequency, from 1 down to 1e-4 radians per byte."""
    frequencies = 10_000.0 ** (-torch.arange(HEAD_CHANNELS // 2) / (HEAD_CHANNELS // 2))
    return torch.arange(length)[:, None] * frequencies


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of channels (a, b) turned by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
