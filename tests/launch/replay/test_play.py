"""A tape made without a model meets one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from atoll.config import Config, Outer
from atoll.launch.replay.play import TapeRun, make_tape_plan
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import BegunRecord, ChangedRecord
from atoll.protocol.settings import Settings
from atoll.store.rundir import RunDir

BEGUN = BegunRecord("run", Settings(learners=2, fragments=24, sync_every=24), {}, (), "plan")


def test_a_tape_may_have_more_fragments_than_the_model_has_tensors() -> None:
    plan = make_tape_plan(BEGUN, (TensorSpec("weight", (64, 8), "float32"), TensorSpec("bias", (64,), "float32")))
    assert len(plan.fragments) == 24


def test_a_tape_of_more_fragments_than_the_model_can_be_cut_into_is_refused_with_how_many_it_may_have() -> None:
    with pytest.raises(ConfigError, match="no more than 8 can be made of it: make the tape with --fragments 8"):
        make_tape_plan(BEGUN, (TensorSpec("weight", (4, 4), "float32"), TensorSpec("bias", (4,), "float32")))


def test_the_phases_of_a_tape_change_what_they_name_of_the_runs_own_outer_step(tmp_path: Path) -> None:
    run = TapeRun(tmp_path / "a.tape", Config(outer=Outer(lr=0.5)), RunDir(tmp_path))
    warm = run._with_outer(ChangedRecord(Settings(), {"merge": "mean", "momentum": 0.0}, "", training_phase=1))
    own = run._with_outer(ChangedRecord(Settings(), {}, "", training_phase=2))
    assert isinstance(warm, ChangedRecord) and isinstance(own, ChangedRecord)
    assert (warm.outer["merge"], warm.outer["lr"], warm.outer["momentum"]) == ("mean", 0.5, 0.0)
    assert own.outer == msgspec.to_builtins(run.config.outer)
