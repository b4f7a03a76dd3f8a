"""A small byte-level GPT whose size has one dial: `depth` blocks, 32 * depth channels, depth heads of 32.

Chosen by measurement for few steps on one CPU thread (docs/LOG.md): embedding and head are one tied matrix, positions
are rotary, each byte's embedding is mixed with the one before it (`smear`, which hands the first block bigrams for the
price of one vector), squared ReLU, no biases. Both matrices that write into the residual stream start at zero: every
block begins as the identity, and the loss near ln 256.

With `experts` every block has so many small networks in place of its one, and a router sends each byte through two of
them. Training adds a loss that keeps the router from sending all bytes to the same ones. It is of the learner's own
batch: what others route is not known, and need not be, since they merge one router (docs/quality.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
HEAD_CHANNELS = 32
CHOSEN = 2
"""Experts that a byte goes through."""
BALANCE = 0.01
"""Weight of the loss that spreads bytes over experts."""


@dataclass(frozen=True, slots=True)
class GptConfig:
    depth: int = 2
    # Blocks; width and heads follow from it.
    block: int = 64
    # The longest context, in bytes.
    experts: int = 0
    # Networks in each block, of which a byte goes through two; 0: one network for all.

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


class Experts(nn.Module):
    """Together as large as `count` / 2 networks of a block without experts.

    A byte takes what its two experts write, but all of them read it: shapes stay the same from step to step, so that a
    step compiles and no device waits for the host to count bytes. With the few experts of this workload that is cheap.
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width // CHOSEN, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(4 * width // CHOSEN, width, bias=False) for _ in range(count))
        for reads in (self.router.weight, *self.up.parameters()):
            nn.init.normal_(reads, std=width**-0.5)
        for writes in self.down.parameters():
            nn.init.zeros_(writes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What they write, and how unevenly the bytes are spread: 1 is evenly, `count` / 2 all to the same two."""
        rows = x.reshape(-1, x.shape[-1])
        chances = torch.softmax(self.router(rows), dim=-1)
        best, chosen = chances.topk(CHOSEN, dim=-1)
        weights = torch.zeros_like(chances).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        written = torch.zeros_like(rows)
        for up, down, weight in zip(self.up, self.down, weights.unbind(-1), strict=True):
            written = written + down(F.relu(up(rows)).square()) * weight[:, None]
        shares = F.one_hot(chosen, len(self.up)).float().mean((0, 1))
        return written.view_as(x), len(self.up) * (shares * chances.mean(0)).sum()


class Block(nn.Module):
    """x ← x + attention(norm(x));  x ← x + mlp(norm(x)). With experts also how unevenly these are used."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = Gain(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm_mlp = Gain(width)
        self.experts = Experts(width, config.experts) if config.experts else None
        if self.experts is None:
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)
        for reads in (self.qkv, *([self.up] if self.experts is None else [])):
            nn.init.normal_(reads.weight, std=width**-0.5)
        for writes in (self.mix, *([self.down] if self.experts is None else [])):
            nn.init.zeros_(writes.weight)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.mix(self.attend(self.norm_attention(x), cos, sin))
        read = self.norm_mlp(x)
        if self.experts is not None:
            written, unevenness = self.experts(read)
            return x + written, unevenness
        hidden: Tensor = self.up(read)
        return x + self.down(F.relu(hidden).square()), None

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
        logits, unevenness = self._read(batch[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))
        return loss + BALANCE * sum(unevenness) if self.training and unevenness else loss

    def logits(self, x: Tensor) -> Tensor:
        """[B, T] bytes, T at most `block`, to [B, T, 256]: what may follow each of them."""
        return self._read(x)[0]

    def _read(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits, and of every block with experts how unevenly it uses them."""
        length = x.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        h = self.embedding(x)
        h = h + self.smear * F.pad(h, (0, 0, 1, -1))
        h = F.rms_norm(h, (self.config.width,))
        unevenness = []
        for block in self.blocks:
            h, uneven = block(h, cos, sin)
            if uneven is not None:
                unevenness.append(uneven)
        return F.linear(self.norm(h), self.embedding.weight), unevenness

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
