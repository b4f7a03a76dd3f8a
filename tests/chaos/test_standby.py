"""A plan for a run that goes on: who takes it, and which runs take none."""

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


def signed(folder: Path, pid: int) -> RunDir:
    (folder / SIGN).write_bytes(msgspec.json.encode(Ready(pid)))
    return RunDir(folder)


def test_a_run_that_nobody_may_attack_is_given_no_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run that can be attacked goes on in .*: start it with --breakable"):
        order(RunDir(tmp_path), PLAN)
    assert not (tmp_path / ATTACK).exists()


def test_one_plan_waits_at_a_time(tmp_path: Path) -> None:
    order(signed(tmp_path, os.getpid()), PLAN)
    assert msgspec.json.decode((tmp_path / ATTACK).read_bytes(), type=Plan) == PLAN
    with pytest.raises(ConfigError, match="another plan waits"):
        order(RunDir(tmp_path), PLAN)


def test_nobody_is_there_to_carry_it_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run that can be attacked"):
        ready(RunDir(tmp_path))
    # A process id that cannot be in use: the kernel's largest is 2^22.
    with pytest.raises(ConfigError, match="no run that can be attacked"):
        ready(signed(tmp_path, 2**22 + 1))
