"""A plan for a run that goes on: who takes it, and what is refused before anything is done."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from atoll.chaos.plan import Fault, Plan
from atoll.chaos.standby import ATTACK, SIGN, Ready, order, ready
from atoll.config import Config
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import Settings
from atoll.store.rundir import RunDir

PLAN = Plan(
    config=Config(protocol=Settings(learners=2)),
    fault=(
        Fault(kind="kill", target="learner-0", at_s=1.0),
        Fault(kind="delay", target="learner-1", at_s=2.0, for_s=1.0, size=0.1),
        Fault(kind="disk-full", at_s=3.0, for_s=1.0),
    ),
)
SIGNALS = msgspec.structs.replace(PLAN, fault=PLAN.fault[:1])


def signed(folder: Path, pid: int, *, breakable: bool) -> RunDir:
    (folder / SIGN).write_bytes(msgspec.json.encode(Ready(pid, breakable)))
    return RunDir(folder)


def test_links_and_the_disk_need_a_run_that_can_be_broken(tmp_path: Path) -> None:
    out = signed(tmp_path, os.getpid(), breakable=False)
    with pytest.raises(ConfigError, match="delay, disk-full need a run that was started with atoll train --breakable"):
        order(out, PLAN)
    assert not (tmp_path / ATTACK).exists()
    order(out, SIGNALS)
    assert msgspec.json.decode((tmp_path / ATTACK).read_bytes(), type=Plan) == SIGNALS


def test_one_that_can_be_broken_takes_all_kinds(tmp_path: Path) -> None:
    order(signed(tmp_path, os.getpid(), breakable=True), PLAN)
    with pytest.raises(ConfigError, match="another plan waits"):
        order(RunDir(tmp_path), PLAN)


def test_nobody_is_there_to_carry_it_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run goes on in"):
        ready(RunDir(tmp_path))
    # A process id that cannot be in use: the kernel's largest is 2^22.
    with pytest.raises(ConfigError, match="no run goes on in"):
        ready(signed(tmp_path, 2**22 + 1, breakable=True))
