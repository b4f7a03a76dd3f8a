"""A plan for a run that goes on: who takes it, and which runs take none."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from atoll.chaos.plan import FaultPlan, PlannedFault
from atoll.chaos.standby import ATTACK, SIGN, AttackSupervisor, find_supervisor, hand_over_plan
from atoll.config import Config
from atoll.protocol.errors import ConfigError
from atoll.protocol.settings import Settings
from atoll.store.rundir import RunDir

PLAN = FaultPlan(
    config=Config(protocol=Settings(learners=2)),
    fault=(
        PlannedFault(kind="kill", target="learner-0", at_s=1.0),
        PlannedFault(kind="delay", target="learner-1", at_s=2.0, for_s=1.0, size=0.1),
        PlannedFault(kind="disk-full", at_s=3.0, for_s=1.0),
    ),
)


def signed(folder: Path, pid: int) -> RunDir:
    (folder / SIGN).write_bytes(msgspec.json.encode(AttackSupervisor(pid)))
    return RunDir(folder)


def test_a_run_that_nobody_may_attack_is_given_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run that can be attacked goes on in .*: start it with --breakable"):
        hand_over_plan(RunDir(tmp_path), PLAN)
    assert not (tmp_path / ATTACK).exists()


def test_one_plan_waits_at_a_time(tmp_path: Path) -> None:
    hand_over_plan(signed(tmp_path, os.getpid()), PLAN)
    assert msgspec.json.decode((tmp_path / ATTACK).read_bytes(), type=FaultPlan) == PLAN
    with pytest.raises(ConfigError, match="another plan waits"):
        hand_over_plan(RunDir(tmp_path), PLAN)


def test_nobody_is_there_to_carry_it_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run that can be attacked"):
        find_supervisor(RunDir(tmp_path))
    # A process id that cannot be in use: the kernel's largest is 2^22.
    with pytest.raises(ConfigError, match="no run that can be attacked"):
        find_supervisor(signed(tmp_path, 2**22 + 1))
