"""A tape made without a model meets one."""

from __future__ import annotations

import pytest

from atoll.launch.replay.play import make_tape_plan
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import BegunRecord
from atoll.protocol.settings import Settings

BEGUN = BegunRecord("run", Settings(learners=2, fragments=24, sync_every=24), {}, (), "plan")


def test_a_tape_may_have_more_fragments_than_the_model_has_tensors() -> None:
    plan = make_tape_plan(BEGUN, (TensorSpec("weight", (64, 8), "float32"), TensorSpec("bias", (64,), "float32")))
    assert len(plan.fragments) == 24


def test_a_tape_of_more_fragments_than_the_model_can_be_cut_into_is_refused_with_how_many_it_may_have() -> None:
    with pytest.raises(ConfigError, match="no more than 8 can be made of it: make the tape with --fragments 8"):
        make_tape_plan(BEGUN, (TensorSpec("weight", (4, 4), "float32"), TensorSpec("bias", (4,), "float32")))
