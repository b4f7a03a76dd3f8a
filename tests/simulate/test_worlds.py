"""Drawn worlds: every promise holds, the same seed is the same world, and all that can be drawn is drawn."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from tests.protocol.world import World as LinkedWorld

from atoll.learner import script
from atoll.protocol.records import GoneRecord
from atoll.protocol.settings import Settings
from atoll.simulate import campaign, training
from atoll.simulate.drawn_parts import OF_RANKS, OF_RELAYS, OF_SHARDS
from atoll.simulate.faults import OF_LEARNERS, OF_THE_REST, TO_LEAVE, Fault, FaultName
from atoll.simulate.inject import LEARNER_FAULTS, OTHER_FAULTS
from atoll.simulate.simulated_learner import SimulatedLearner
from atoll.simulate.simulated_syncer import SimulatedSyncer
from atoll.simulate.world import World

TRACES = """
from atoll.simulate import campaign
print([campaign.run(campaign.plan(seed, 3)).trace for seed in (3, 11)])
"""


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.faults) for block in range(1, 5))])
def test_whatever_is_drawn_every_promise_holds(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        outcome = campaign.run(campaign.plan(seed))
        assert not outcome.invariant, f"atoll simulate faults --seed {seed}: {outcome.invariant}: {outcome.message}"


@pytest.mark.faults
@pytest.mark.parametrize("block", range(50))
def test_thousands_of_worlds(block: int) -> None:
    for seed in range(10_000 + 100 * block, 10_000 + 100 * block + 100):
        outcome = campaign.run(campaign.plan(seed))
        assert not outcome.invariant, f"atoll simulate faults --seed {seed}: {outcome.invariant}: {outcome.message}"


class EndingWorld(LinkedWorld):
    """It begins a term and comes to its end as the simulator's own does."""

    def begin_term(self, syncer: SimulatedSyncer) -> None:
        World.begin_term(self, syncer)

    def close_run(self, syncer: SimulatedSyncer) -> object:
        return World.close_run(self, syncer)


@pytest.mark.parametrize("full", [False, True])
def test_a_run_is_over_once_its_last_records_are_durable(full: bool) -> None:
    """Seed 5377: a standby had taken over when the run was over. The accounts that the old syncer closed then were
    written nowhere, and the successor had not come to close them yet."""
    world = EndingWorld(2, fragments=2, sync_every=4).run_until(round=6)
    world.run_until(seconds=1.5)
    world.kill("learner-1")
    world.end()
    while not world.said("finishing"):
        world.run_until(seconds=0.01)
    open_before, finishing = world.syncer.history.ledger.totals().in_flight, world.simulated_syncer
    world.run_until(seconds=1.9)
    if full:
        world.disk.full = True
        world.run_until(seconds=5.0)
        assert not world.finished
        world.disk.full = False
    else:
        world.start_syncer(world.disk.claim)
    world.run_to_end(seconds=20)
    assert any(open_before), "nobody but the end closes this account"
    assert not any(world.syncer.history.ledger.totals().in_flight)
    closed = {line.learner for line in world.journal if isinstance(line, GoneRecord)}
    assert closed == {"learner-0", "learner-1"} and finishing.alive == full


def test_the_same_seed_is_the_same_world_in_any_process() -> None:
    """Nothing depends on the order of a set, or on where an object lies."""
    traces = [
        subprocess.run(
            [sys.executable, "-c", TRACES],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=100,
        ).stdout
        for hash_seed in ("0", "4242")
    ]
    assert traces[0] == traces[1] and traces[0].count(",") == 1


def test_the_number_of_learners_that_was_drawn_gives_the_same_world_when_it_is_given() -> None:
    drawn = campaign.plan(7)
    assert campaign.plan(7, drawn.options.settings.learners) == drawn
    assert campaign.plan(7, 9).options.settings.learners == 9


def test_one_that_was_deposed_before_the_run_had_parameters_keeps_no_first_cut() -> None:
    """Seed 301456: its cut 0 stood in the place of its successor's, and the journal did not follow from it."""
    outcome = campaign.run(campaign.plan(301456, 4))
    assert not outcome.invariant, outcome.message


@pytest.mark.parametrize(
    ("seed", "learners"),
    [
        pytest.param(400574, 3, id="a-round-that-was-pulled-once-is-not-opened-anew-at-the-end"),
        pytest.param(408542, 1, id="a-synchronous-learner-waits-for-no-round-whose-copy-a-rollback-voided"),
        pytest.param(418003, 2, id="a-deposed-syncer-may-carry-out-a-rollback-that-it-wrote-in-time"),
        pytest.param(423139, 3, id="a-deposed-syncer-asks-a-peer-for-what-it-knows-of"),
        pytest.param(912954, 5, id="a-report-that-is-newer-than-a-contribution-stays-true"),
        pytest.param(915470, 1, id="what-was-lost-may-become-fewer-at-the-end"),
        pytest.param(700138, 1, id="what-a-process-uploaded-is-not-version-0-of-the-next-one-of-its-name"),
        pytest.param(710479, 2, id="one-that-was-muted-a-moment-ago-is-not-counted-for-the-next-round"),
        pytest.param(728798, 4, id="one-that-was-muted-a-moment-ago-is-not-counted-for-a-quorum-of-four"),
        pytest.param(731164, 2, id="rounds-wait-for-a-rollback-that-waits-for-a-full-disk"),
        pytest.param(742552, 2, id="a-version-0-that-the-power-took-with-it-may-be-held-for-a-while"),
        pytest.param(618570, 3, id="an-end-is-judged-when-it-is-decided-and-not-when-a-slow-disk-lets-it-be-told"),
        pytest.param(508867, 3, id="the-last-cut-has-its-deadline-also-when-nobody-says-anything"),
        pytest.param(528179, 3, id="a-window-is-not-put-off-by-a-standstill-before-it-opened"),
    ],
)
def test_worlds_that_once_broke_a_promise(seed: int, learners: int) -> None:
    outcome = campaign.run(campaign.plan(seed, learners))
    assert not outcome.invariant, outcome.message


def test_every_kind_of_fault_is_drawn_and_can_happen() -> None:
    drawn = {fault.kind for seed in range(300) for fault in campaign.plan(seed).faults}
    assert drawn == {*OF_LEARNERS, *TO_LEAVE, *OF_THE_REST, "rollback", "end"}
    of_ranks = {fault.kind for seed in range(30) for fault in campaign.plan(seed, kind="ranks").faults}
    of_shards = {fault.kind for seed in range(30) for fault in campaign.plan(seed, kind="shards").faults}
    of_relays = {fault.kind for seed in range(30) for fault in campaign.plan(seed, kind="relays").faults}
    assert {*OF_RANKS} <= of_ranks and {*OF_SHARDS} <= of_shards and {*OF_RELAYS} <= of_relays
    assert {*LEARNER_FAULTS, *OTHER_FAULTS} == {*drawn, *OF_RANKS, *OF_SHARDS, *OF_RELAYS}


@pytest.mark.parametrize("kind", sorted({*LEARNER_FAULTS, *OTHER_FAULTS} - {"end"}))
def test_each_fault_alone_is_lived_through(kind: str) -> None:
    parts: dict[campaign.WorldKind, tuple[FaultName, ...]] = {
        "ranks": OF_RANKS,
        "shards": OF_SHARDS,
        "relays": OF_RELAYS,
    }
    plan = campaign.plan(1, 3, next((of for of, kinds in parts.items() if kind in kinds), "plain"))
    target = 1 if kind in LEARNER_FAULTS else -1
    faults = tuple(Fault(at, kind, target, 7.0, 3) for at in (9.0, 31.0))  # type: ignore[arg-type]
    options = msgspec.structs.replace(plan.options, faults_s=40.0)
    outcome = campaign.run(msgspec.structs.replace(plan, options=options, faults=faults))
    assert not outcome.invariant, f"{outcome.invariant}: {outcome.message}"


def test_an_end_that_never_got_to_the_disk_is_asked_for_again() -> None:
    """Seed 12739: on a full disk the run came to an end that nobody was told of; the term that followed did not know of
    it, and went on, as it must. The campaign took the run for ended, asked for no end, and found it running."""
    settings = Settings(learners=1, fragments=1, sync_every=1, overlap=0, synchronous=True, assemble_s=15.0)
    options = msgspec.structs.replace(
        campaign.plan(1, 1).options,
        settings=settings.resolved(1000),
        latency_s=0.0,
        sync_s=0.001,
        every_round=True,
        down_s=1.0,
        faults_s=80.0,
        late_s=(0.0,),
        step_s=(1.0,),
    )
    faults = (
        Fault(63.2, "disk-full", length=16.8),
        Fault(65.1, "failover", length=2.0),
        Fault(73.4, "interrupt", 0, 0.7, 230),
        Fault(73.8, "end"),
    )
    outcome = campaign.run(campaign.SeedPlan(1, options, faults))
    assert not outcome.invariant, f"{outcome.invariant}: {outcome.message}"


def test_settings_of_all_kinds_are_drawn() -> None:
    drawn = [campaign.plan(seed).options for seed in range(200)]
    settings = [one.settings for one in drawn]
    assert {one.learners for one in settings} == {1, 2, 3, 4, 5}
    assert {one.adopt for one in settings} == {"overwrite", "blend", "carry"}
    assert {one.synchronous for one in settings} == {one.every_round for one in drawn} == {True, False}
    assert {bool(one.steps) for one in settings} == {bool(one.tokens) for one in settings} == {True, False}
    assert max(one.quorum for one in settings) > 2 and {len(one.data) for one in drawn} == {0, 1, 2}


def test_a_drained_learner_waits_as_the_real_one_does() -> None:
    assert training.DRAIN_S == script.DRAIN_S


class Watched(World):
    """Remembers which processes went on with a state that the one before had saved."""

    def start_process(self, name: str, step_s: float, *, restored: bool = False) -> SimulatedLearner:
        learner = super().start_process(name, step_s, restored=restored)
        self.restored = [*getattr(self, "restored", []), (name, restored)]
        return learner


@pytest.mark.parametrize("kind", ["drain", "interrupt"])
@pytest.mark.parametrize(("number", "back"), [(3, [False]), (4, []), (7, [True])])
def test_drained_learners_come_back_with_what_they_saved_or_without_or_not_at_all(
    kind: FaultName, number: int, back: list[bool]
) -> None:
    plan = campaign.SeedPlan(1, campaign.plan(1, 3).options, (Fault(20.0, kind, 1, 5.0, number),))
    world = campaign.make(plan, Watched)
    assert isinstance(world, Watched)
    world.run(60.0)
    assert world.restored[3:] == [("learner-1", restored) for restored in back]
    assert world.learners["learner-1"].leaving.left != bool(back)
    assert not campaign.run(plan).invariant
