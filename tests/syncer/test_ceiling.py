from __future__ import annotations

from tests.syncer.conftest import plan

from atoll.fabric.wire import MIB, Limits
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.syncer.ceiling import PROGRAM, ceiling

LARGE = make_plan([TensorSpec(f"w{n}", (1024, 1024), "float32") for n in range(24)], 24, "balanced")
SETTINGS = Settings(learners=4, fragments=24, sync_every=24)


def test_a_small_model_costs_little_more_than_the_program() -> None:
    most = ceiling(plan(), Settings(fragments=2, sync_every=2, overlap=1), slots=1)
    assert PROGRAM < most.fixed < PROGRAM + 1500 * MIB
    assert most.bytes(3) - most.bytes(2) == most.each < 20 * MIB


def test_it_grows_with_the_model_and_with_each_learner() -> None:
    most, plainer = ceiling(LARGE, SETTINGS, slots=1), ceiling(LARGE, SETTINGS, slots=0)
    model = 4 * LARGE.size
    assert most.fixed - plainer.fixed == 2 * model, "the outer state, and again while a cut is written"
    assert most.fixed > 4 * model
    assert most.each > 4 * LARGE.largest


def test_narrower_limits_are_a_lower_ceiling() -> None:
    narrow = Limits(queue_bytes=MIB, connections=128)
    assert ceiling(LARGE, SETTINGS, 1, narrow).bytes(64) < ceiling(LARGE, SETTINGS, 1).bytes(64)
