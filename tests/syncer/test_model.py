from __future__ import annotations

import gc
import tracemalloc

from tests.syncer.conftest import plan

from atoll.config import Config
from atoll.fabric.join_tokens import NAMES
from atoll.fabric.wire import MIB, FabricLimits
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import PROTOCOL, Hello, TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import Greeted, Lost
from atoll.protocol.syncer.machine import Syncer
from atoll.syncer.model import PROGRAM, contribution_bytes, memory_bound
from atoll.syncer.status import Meter

LARGE = make_plan([TensorSpec(f"w{n}", (1024, 1024), "float32") for n in range(24)], 24, "balanced")
SETTINGS = Settings(learners=4, fragments=24, sync_every=24)


def test_a_small_model_costs_little_more_than_the_program() -> None:
    most = memory_bound(plan(), Settings(fragments=2, sync_every=2, overlap=1), slots=1)
    assert PROGRAM < most.fixed < PROGRAM + 3000 * MIB
    assert most.total_bytes(3) - most.total_bytes(2) == most.each < 20 * MIB


def test_it_grows_with_the_model_and_with_each_learner() -> None:
    most, plainer = memory_bound(LARGE, SETTINGS, slots=1), memory_bound(LARGE, SETTINGS, slots=0)
    model = 4 * LARGE.size
    assert most.fixed - plainer.fixed == 2 * model, "the outer state, and again while a cut is written"
    assert most.fixed > 4 * model
    assert most.each > 4 * LARGE.largest


def test_narrower_limits_are_a_lower_ceiling() -> None:
    narrow = FabricLimits(queue_bytes=MIB, connections=128)
    assert memory_bound(LARGE, SETTINGS, 1, narrow).total_bytes(64) < memory_bound(LARGE, SETTINGS, 1).total_bytes(64)


def test_every_name_that_one_token_may_bring_fits_into_its_share() -> None:
    """What is kept of learners that came, gave to every fragment and left; the status and the meter know them too."""
    fragments, many = 24, 200
    settings = Settings(learners=1, fragments=fragments, sync_every=fragments)
    machine, meter = Syncer.fresh(settings, run="r", fingerprint="plan"), Meter(Config(protocol=settings))
    machine.history.started = True
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(many):
        name = f"{number:064d}"
        machine.handle(0.0, Greeted(Hello(protocol=PROTOCOL, learner=name, session=64 * "s"), 64 * "t"))
        learner = machine.members.learners[name]
        for fragment in range(fragments):
            learner.merged[fragment] = 10**9 + fragment
            machine.history.lives[name].merged[fragment] = (10**9 + fragment, 10**9 + number, 10**12 + number)
            learner.synced_t[fragment], learner.merged_tokens[fragment] = 10**9 + number, 10**12 + number
        learner.versions = learner.steps = learner.tokens = learner.dropped = tuple(10**9 + n for n in range(fragments))
        meter.note_event(0.0, "joined", {"learner": name})
        for look in range(16):
            meter._rate(float(look), learner)
        machine.handle(0.0, Lost(name, "it left"))
        meter.note_event(0.0, "lost", {"learner": name, "incarnation": 1, "busy_s": 1.0})
    each = (tracemalloc.get_traced_memory()[0] - before) / many
    tracemalloc.stop()
    most = memory_bound(LARGE, settings, slots=1)
    assert each < most.name, f"{each:.0f} bytes a name"
    assert most.total_bytes(1, NAMES) - most.total_bytes(1) == NAMES * most.name <= 64 * MIB


def test_it_holds_the_rounds_that_the_smallest_h_of_a_phase_asks_for() -> None:
    plain = Settings(fragments=24, sync_every=24, steps=1000).resolved(24)
    warm = Settings(fragments=24, sync_every=24, steps=1000, warm_start=0.1).resolved(24)
    more = memory_bound(LARGE, warm, slots=1).total_bytes(1) - memory_bound(LARGE, plain, slots=1).total_bytes(1)
    assert more == (12 - 2) * contribution_bytes(LARGE, plain)


def test_more_rounds_under_way_have_their_memory_and_no_more_than_is_allowed() -> None:
    settings = Settings(fragments=24, sync_every=24)
    most = memory_bound(LARGE, settings, slots=1, round_memory=10**15)
    none = memory_bound(LARGE, settings, slots=1)
    assert most.total_bytes(4) - none.total_bytes(4) == 4 * (23 - 2) * contribution_bytes(LARGE, settings)
    assert memory_bound(LARGE, settings, slots=1, round_memory=5).total_bytes(4) == none.total_bytes(4) + 5
