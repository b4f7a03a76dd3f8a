"""The `[workload]` table of run.toml: what the built-in workload trains, on what and how. Imports no torch."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import msgspec

from atoll.protocol.errors import ConfigError

OPTIMIZERS = ("adamw", "muon")
PARALLEL = ("fsdp", "ddp")


class WorkloadSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    depth: int = 2
    """Blocks of the GPT, and the one dial of its size: 32 * depth channels, depth attention heads."""
    experts: int = 0
    """Networks in each block of the GPT, of which a byte goes through two; 0: one network for all."""
    block: int = 64
    """Bytes of context per training window."""
    batch: int = 8
    """Windows per learner and step; of a learner of several ranks, per rank."""
    parallel: str = "fsdp"
    """How the ranks of a learner (`--ranks`) share the model: "fsdp", each holds a part of every tensor, or "ddp", each
    holds all."""
    optimizer: str = "adamw"
    """What a learner steps with: "adamw", or "muon" (torch 2.9 or newer) for the matrices of the blocks and AdamW for
    the rest; `lr` and `weight_decay` are for both."""
    lr: float = 1e-2
    """Peak learning rate of the inner optimizer; warm-up and cosine follow the progress of the run."""
    warmup: float = 0.03
    """Share of the run over which the learning rate rises to its peak."""
    floor: float = 0.1
    """Learning rate at the end of the run, as a share of the peak."""
    weight_decay: float = 0.1
    """Decay of matrices; gains are never decayed."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of AdamW's two moments."""
    clip: float = 1.0
    """Gradients with a larger norm are scaled down to this one."""
    data: tuple[str, ...] = ()
    """Files, folders or globs to train on; empty: the source of this Python's standard library."""
    eval_windows: int = 256
    """Windows of the held-out part that make one validation loss."""
    pace_s: float = 0.0
    """A step lasts at least this many seconds, asleep for the rest; 0: as fast as it goes."""

    def __post_init__(self) -> None:
        for key in ("depth", "block", "batch", "eval_windows"):
            _check(key, getattr(self, key) >= 1, getattr(self, key), "a whole number of at least 1")
        _check("experts", self.experts == 0 or self.experts >= 2, self.experts, "0, or a whole number of at least 2")
        _check("optimizer", self.optimizer in OPTIMIZERS, repr(self.optimizer), " or ".join(OPTIMIZERS))
        _check("parallel", self.parallel in PARALLEL, repr(self.parallel), " or ".join(PARALLEL))
        for key in ("lr", "clip"):
            value = getattr(self, key)
            _check(key, math.isfinite(value) and value > 0, value, "a number above 0")
        _check("warmup", 0 <= self.warmup < 1, self.warmup, "a share of the run: at least 0 and below 1")
        _check("floor", 0 <= self.floor <= 1, self.floor, "a share of the peak learning rate: 0 to 1")
        _check("weight_decay", 0 <= self.weight_decay < math.inf, self.weight_decay, "0 or more")
        _check("pace_s", 0 <= self.pace_s <= 3600, self.pace_s, "seconds per step: 0 to 3600")
        _check("betas", all(0 <= beta < 1 for beta in self.betas), self.betas, "two numbers of at least 0 and below 1")


def _check(key: str, fits: bool, value: object, wanted: str) -> None:
    if not fits:
        raise ConfigError(f"workload.{key} is {value}; set it to {wanted}")


def read_run(path: Path) -> tuple[WorkloadSettings, int]:
    """The `[workload]` table and the `seed` of a run.toml; what is not there has its default."""
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the run's settings from {path} ({error}); check ATOLL_RUN_TOML") from error
    try:
        settings = msgspec.convert(document.get("workload", {}), WorkloadSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}, table [workload]: {error}; correct or remove that key") from error
    seed = document.get("seed", 0)
    if not isinstance(seed, int):
        raise ConfigError(f"{path}: seed is {seed!r}; set it to a whole number")
    return settings, seed
