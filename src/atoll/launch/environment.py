"""What a run's scripts are started with: their folder, environment variables and GPUs.

    environment.json    the working folder and the environment variables; mode 600, also in a run that others may read

`--resume` starts a script in the same folder with the variables of then; variables set now take precedence. Not kept:
- secrets: variables named like one (TOKEN, KEY, PASSWORD, …), and values that hold a password or a join link;
- what belongs to one login, one job or one process (SSH_…, SLURM_…, DISPLAY, TMPDIR, ATOLL_…).

Every process sees only its own GPUs, by CUDA_VISIBLE_DEVICES: `cuda` or `cuda:0` in a script is the first of them. With
more devices than learners each learner gets an equal block; with fewer, learners share them in turn. The ranks of a
learner see all of its devices, as under torchrun, and each takes that of its LOCAL_RANK. The evaluator
takes a spare device, else the one with the fewest learners. If CUDA_VISIBLE_DEVICES is set, only what it names is dealt
out. Without an NVIDIA driver nothing is set, and a script chooses its device itself: the CPU, or Apple's GPU (mps),
which all learners share.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec

from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic

NAME = "environment.json"
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED|AUTH|COOKIE|PRIVATE|SIGNATURE|_PAT$|_PWD$|DSN|WEBHOOK", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"://[^/\s]*@|atoll://|-----BEGIN")
_OF_THE_SESSION = re.compile(
    r"_|PWD|OLDPWD|SHLVL|SHELL|TERM\w*|COLUMNS|LINES|DISPLAY|WAYLAND_\w+|XAUTHORITY|WINDOWID|TMUX\w*|STY|HOSTNAME|"
    r"TMPDIR|TEMP|TMP|XDG_(RUNTIME|SESSION)\w*|DBUS_\w+|SSH_\w+|GPG_\w+|INVOCATION_ID|JOURNAL_STREAM|"
    r"(SLURM|PBS|LSB|OMPI|PMI|PMIX|KUBERNETES|TORCHELASTIC)_\w+|MASTER_\w+|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|"
    r"ATOLL_\w+"
)


class LaunchEnvironment(msgspec.Struct, frozen=True):
    folder: str
    """The working folder."""
    variables: dict[str, str]

    def find_missing(self, now: Mapping[str, str]) -> dict[str, str]:
        """Those that were set then and are not now."""
        return {name: value for name, value in self.variables.items() if name not in now}

    def find_folder(self) -> Path | None:
        """None: it is gone, and a script has to start where its supervisor is."""
        return Path(self.folder) if Path(self.folder).is_dir() else None

    def describe_differences(self, now: Mapping[str, str], folder: Path) -> list[str]:
        """What an operator who goes on from here should know."""
        told = []
        if self.find_folder() is None:
            told.append(f"the script was started in {self.folder}, which is gone: it starts in {folder}")
        elif Path(self.folder) != folder:
            told.append(f"the script starts in {self.folder}, as it did before")
        if missing := self.find_missing(now):
            told.append(f"not set now, and as the run was begun with: {', '.join(missing)}")
        return told


def select_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that are kept."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if not (_SECRET.search(name) or _SECRET_VALUE.search(value) or _OF_THE_SESSION.fullmatch(name))
    }


def capture_environment() -> LaunchEnvironment:
    """As this process has it."""
    return LaunchEnvironment(str(Path.cwd()), select_variables(os.environ))


def write_environment(run: Path, found: LaunchEnvironment) -> None:
    """Note how the script of this run is started; readable by its user alone."""
    before = os.umask(0o077)
    try:
        write_atomic(run / NAME, msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    finally:
        os.umask(before)


def read_environment(run: Path) -> LaunchEnvironment | None:
    """None: of a run whose script was not started here, or by an earlier version."""
    try:
        return msgspec.json.decode((run / NAME).read_bytes(), type=LaunchEnvironment)
    except (OSError, msgspec.MsgspecError):
        return None


# ---- devices --------------------------------------------------------------------------------------------------------

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


def assign_devices(devices: Devices, learners: int, ranks: int = 1, *, strict: bool = False) -> Assignment | None:
    """Deal the devices out; None: there are none. ConfigError with `strict`, where not every rank gets its own."""
    if strict and learners * ranks > len(devices):
        of_ranks = f" of {ranks} ranks" if ranks > 1 else ""
        raise ConfigError(
            f"strict_devices: {learners} learners{of_ranks} do not fit on {_count(len(devices))}: "
            f"{_advise(len(devices), ranks)}, or leave strict_devices out and let them share"
            if devices
            else "strict_devices: this machine shows no NVIDIA GPU: leave it out to train on what there is"
        )
    if not devices:
        return None
    each = max(min(ranks, len(devices)), len(devices) // learners)
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


def _advise(devices: int, ranks: int) -> str:
    most = devices // ranks
    return f"start at most {most} with --learners" if most else f"start learners of at most {devices} with --ranks"


def _count(number: int) -> str:
    return f"{number} GPU" if number == 1 else f"{number} GPUs"
