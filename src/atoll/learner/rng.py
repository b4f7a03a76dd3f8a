"""The random states that a training process draws from: torch on the CPU and every CUDA device, numpy's, Python's own.

Global ones only; a generator that a script made for itself it registers like a schedule, with a state_dict().
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from atoll.protocol.errors import ConfigError


def current() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        # A process that never used CUDA draws nothing from it, and asking would start it.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
    }


def check(state: dict[str, Any]) -> None:
    """ConfigError where this process has other devices than that of the state, or numpy would read out of bounds."""
    if state["numpy"]["bit_generator"] == "MT19937" and not 0 <= state["numpy"]["state"]["pos"] <= 624:
        raise ConfigError("the snapshot's random state of numpy is damaged: its position lies outside of it")
    there, here = len(state["cuda"]), torch.cuda.device_count()
    if there not in (0, here):
        raise ConfigError(
            f"the snapshot holds the random states of {there} CUDA devices, {here} are here: show the process as many "
            f"(CUDA_VISIBLE_DEVICES)"
        )


def put(state: dict[str, Any]) -> None:
    python = state["python"]
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
