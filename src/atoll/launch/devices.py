"""Which learner trains on which GPU of this machine.

Every process sees its own devices alone, by CUDA_VISIBLE_DEVICES: `cuda` and `cuda:0` in a script is then the first of
them. Where there are more devices than learners each gets as many as the others, in one block; where there are fewer,
learners share them in turn. The evaluator takes a device that is left over, else it shares the one with the fewest
learners. Where CUDA_VISIBLE_DEVICES is set, only what it names is dealt out.

Without an NVIDIA driver nothing is set, and a script chooses its device itself: the CPU, or Apple's GPU (mps), which is
one device that all learners share.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from atoll.protocol.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
EVALUATOR = "evaluator"
DRIVER = Path("/proc/driver/nvidia/gpus")
ASK_S = 10.0
"""How long nvidia-smi may take: it is slow where it has to wake the driver."""

Devices = tuple[str, ...]
"""As CUDA_VISIBLE_DEVICES has them: numbers, or identifiers that begin with GPU- or MIG-."""


@dataclass(frozen=True, slots=True)
class Assignment:
    learners: tuple[Devices, ...]
    """By the learner's number."""
    evaluator: Devices

    def devices_of(self, index: int) -> Devices:
        """A learner that joins later shares with an earlier one."""
        return self.learners[index % len(self.learners)]

    def describe(self, *, evaluator: bool) -> str:
        """One line for the operator."""
        parts = [f"learner-{index} on {_names(devices)}" for index, devices in enumerate(self.learners)]
        if evaluator:
            parts.append(f"{EVALUATOR} on {_names(self.evaluator)}")
        return f"GPUs: {', '.join(parts)}"


def assign_devices(devices: Devices, learners: int, *, strict: bool = False) -> Assignment | None:
    """Deal the devices out; None: there are none. ConfigError with `strict`, where not every learner gets its own."""
    if strict and learners > len(devices):
        raise ConfigError(
            f"--strict-devices: {learners} learners do not fit on {_count(len(devices))}: "
            f"start at most {len(devices)} with --learners, or leave --strict-devices out and let them share"
            if devices
            else "--strict-devices: this machine shows no NVIDIA GPU: leave it out to train on what there is"
        )
    if not devices:
        return None
    each = max(1, len(devices) // learners)
    dealt = tuple(
        tuple(devices[(index * each + place) % len(devices)] for place in range(each)) for index in range(learners)
    )
    used = Counter(device for mine in dealt for device in mine)
    return Assignment(dealt, (min(devices, key=lambda device: used[device]),))


def find_devices(environment: Mapping[str, str], ask_driver: Callable[[], Devices] | None = None) -> Devices:
    """The GPUs that a process with this environment sees, without loading CUDA."""
    if VISIBLE in environment:
        return parse_visible(environment[VISIBLE])
    return (ask_driver or _ask_driver)()


def parse_visible(value: str) -> Devices:
    """What CUDA_VISIBLE_DEVICES names. As CUDA does, it ends before the first that is no device: -1 shows none."""
    words = (word.strip() for word in value.split(","))
    return tuple(takewhile(lambda word: re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", word) is not None, words))


def parse_nvidia_smi(listing: str) -> Devices:
    """The devices in what `nvidia-smi -L` prints: GPUs by number; where they are partitioned (MIG), the parts."""
    parts = tuple(re.findall(r"^\s+MIG .*\(UUID: (MIG-[\w/-]+)\)", listing, re.MULTILINE))
    return parts or tuple(re.findall(r"^GPU (\d+):", listing, re.MULTILINE))


def _ask_driver() -> Devices:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return tuple(str(number) for number in range(len(list(DRIVER.iterdir())))) if DRIVER.is_dir() else ()
    return parse_nvidia_smi(done.stdout)


def _names(devices: Devices) -> str:
    return "+".join(devices)


def _count(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
