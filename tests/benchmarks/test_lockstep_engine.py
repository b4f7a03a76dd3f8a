"""The loop behind benchmarks/lockstep.py and benchmarks/quality.py does what the product and data-parallel do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from batched_muon import BatchedMuon
from lockstep_engine import OutOfTime, Row, train
from lockstep_learner import LockstepLearner, flatten_pieces
from lockstep_syncer import ON_DEVICE, DeviceSyncer, HostSyncer
from quality import ROWS
from shared_moments import MOMENTS, SharedMoments, adopt_moments

from atoll.config import Outer
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.phases import TrainingPhase
from atoll.workloads.gpt import Gpt
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text
from atoll.workloads.training import build_model, build_optimizers

SMALL = WorkloadSettings(depth=1, block=8, batch=2, eval_windows=4)
TEXT = Text(bytes(np.random.default_rng(0).integers(32, 64, 40_000, dtype=np.uint8)))
CPU = torch.device("cpu")


def small_plan() -> FragmentPlan:
    shapes = {"embedding.weight": (40, 16), "blocks.up": (70, 24), "blocks.down": (24, 70), "gain": (24,)}
    return make_plan([TensorSpec(n, s, "float32", embedding=n.startswith("e")) for n, s in shapes.items()], 3)


def draw(plan: FragmentPlan, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(part.size, generator=generator) for part in plan.fragments]


@pytest.mark.parametrize("merge", sorted(ON_DEVICE))
def test_merging_on_a_device_gives_the_shipped_numbers(merge: str) -> None:
    plan, first = small_plan(), draw(small_plan(), 0)
    plain, later = Outer(merge="mean", lr=1.0, momentum=0.0), Outer(merge=merge, lr=0.6, momentum=0.6)
    host, device = HostSyncer(plan, list(first), plain, "fp32"), DeviceSyncer(plan, list(first), plain)
    for number in range(5):
        if number == 2:  # momentum begins at zero
            host.change_outer(later)
            device.change_outer(later)
        deltas = [draw(plan, 10 * number + learner) for learner in range(1, 5)]
        for one in deltas[1:]:
            one[0][:200] = -deltas[0][0][:200] if number == 3 else 0.0  # directions that cancel, and none
        for part in plan.fragments:
            given = [one[part.index] for one in deltas]
            bases = [max(0, number - old) for old in (0, 0, 1, 3)]  # of the last no syncer keeps it
            gradients = [syncer.merge(part, given, bases) for syncer in (host, device)]
            torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(host.versions[part.index], device.versions[part.index], rtol=1e-6, atol=1e-6)
    assert host.sent == device.sent


def build_sgd(model: Gpt, settings: WorkloadSettings) -> dict[str, torch.optim.Optimizer]:
    return {"sgd": torch.optim.SGD(model.parameters(), lr=settings.lr)}


@pytest.mark.parametrize("numerics", ["host", "device"])
def test_the_mean_after_every_step_of_sgd_is_data_parallel(numerics: str) -> None:
    """H = 1, no overlap, outer step 1 / 0, and no clipping, which each learner would do by its own norm."""
    each = TrainingPhase(until=1.0, sync_every=1, overlap=0, merge="mean", outer_lr=1.0, outer_momentum=0.0)
    rows = Row(learners=3, lr=0.3, phases=(each,)), Row(method="data-parallel", learners=3, lr=0.3)
    settings = msgspec.structs.replace(SMALL, clip=1e9)
    ours, theirs = (train(row, 0, settings, 12, TEXT, numerics=numerics, build=build_sgd) for row in rows)
    assert [step for step, _ in ours["curve"]] == [step for step, _ in theirs["curve"]]
    assert np.allclose(ours["curve"], theirs["curve"], rtol=1e-5)
    assert ours["curve"][-1][1] < ours["curve"][0][1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_carry_with_moments_over_an_overlap_is_training_alone_where_there_is_one_learner(optimizer: str) -> None:
    """Every step is in the model once, in the moments too, through a change of phase."""
    plain = Row(learners=1, merge="mean", outer_lr=1.0, outer_momentum=0.0, adopt="carry", moments="fp32")
    early = TrainingPhase(until=0.5, sync_every=2, overlap=1)
    decoupled = msgspec.structs.replace(plain, fragments=4, sync_every=8, phases=(early,), optimizer=optimizer)
    rows = decoupled, Row(method="alone", learners=1, optimizer=optimizer)
    ours, theirs = (train(row, 0, SMALL, 24, TEXT, scores=1) for row in rows)
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert [phase["sync_every"] for phase in ours["phases"]] == [2, 8]
    assert ours["rounds"] == 11 * 2 + 12 * 4 // 8 + 4


@pytest.mark.faults
def test_muon_with_all_matrices_of_a_shape_at_once_is_that_of_torch() -> None:
    """Weights, wide, high and square, differ by one rounding at most; momenta by none."""
    settings = WorkloadSettings(depth=2, optimizer="muon", weight_decay=0.3)
    ours, theirs = build_model(settings, 0), build_model(settings, 0)
    muon, lr = build_optimizers(theirs, settings)["muon"], torch.tensor(0.0, dtype=torch.float64)
    batched, generator = BatchedMuon(build_optimizers(ours, settings)["muon"], lr), torch.Generator().manual_seed(0)
    for step in range(1, 4):
        lr.fill_(0.003 * step)
        muon.param_groups[0]["lr"] = 0.003 * step
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            own.grad = torch.randn(own.shape, generator=generator) * 10.0**-step
            other.grad = own.grad.clone()
        batched.step()
        muon.step()
    assert len(batched.state) == len(muon.state) == 8
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)
        if other in muon.state:
            assert torch.equal(batched.state[own]["momentum_buffer"], muon.state[other]["momentum_buffer"])
            assert own.any(), "it has been stepped"


def count_calls(step: Callable[[], None]) -> int:
    with CallCount() as count:
        step()
    return count.calls


class CallCount(TorchDispatchMode):
    """How often torch is called: on a GPU that is what a short step costs."""

    calls = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return call(*args, **(kwargs or {}))


@pytest.mark.faults
def test_a_step_of_muon_has_as_many_calls_however_many_matrices_there_are() -> None:
    counted = []
    for depth in (1, 3):
        settings = WorkloadSettings(depth=depth, optimizer="muon")
        model = build_model(settings, 0)
        muon = BatchedMuon(build_optimizers(model, settings)["muon"], torch.tensor(0.001, dtype=torch.float64))
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        muon.step()
        counted.append(count_calls(muon.step))
    assert counted[0] == counted[1]


def shrink(name: str) -> Row:
    return msgspec.structs.replace(ROWS[name], learners=2, fragments=min(4, ROWS[name].fragments))


@pytest.mark.parametrize(
    "name", ["three-moments", "h2-moments-int8-int4", "muon-h2-moments", "diloco", "alone", "embeddings"]
)
def test_every_kind_of_row_runs(name: str) -> None:
    row = shrink(name)
    run = train(row, 0, SMALL, 30, TEXT, scores=1)
    assert np.isfinite(run["loss"]) and run["loss"] < 5.6
    assert run["up_bytes"] > 0 or row.method == "alone"
    assert all(phase["rho"] is None or abs(phase["rho"]) <= 1.001 for phase in run.get("phases", []))


def test_a_seed_gives_the_same_curve_again_and_both_numerics_agree() -> None:
    row = shrink("h2-moments-int8")
    first, again, device = (
        train(row, 3, SMALL, 20, TEXT, numerics=numerics, scores=4) for numerics in ("host", "host", "device")
    )
    assert first["curve"] == again["curve"] or torch.cuda.is_available(), "a GPU adds in any order"
    assert np.allclose(first["curve"], again["curve"], rtol=1e-4)
    assert np.allclose(first["curve"], device["curve"], rtol=1e-3)
    assert (device["numerics"], device["rounds"]) == ("device", first["rounds"])


def step_two_learners() -> tuple[list[LockstepLearner], FragmentPlan]:
    learners = [LockstepLearner(SMALL, 0, CPU, build_optimizers) for _ in range(2)]
    step_all(learners, seed=0)
    specs = [TensorSpec(name, tuple(p.shape), "float32") for name, p in learners[0].model.named_parameters()]
    return learners, make_plan(specs, 3)


def step_all(learners: list[LockstepLearner], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in learners:
        one.step(torch.randint(32, 64, (2, 9), generator=generator), 0.5)


def test_shared_moments_are_the_mean_and_positive_ones_stay_positive() -> None:
    learners, plan = step_two_learners()
    for part in plan.fragments:
        exact, coded = (SharedMoments(codec).average(part, learners) for codec in ("fp32", "int8"))
        assert list(exact) == list(coded) == ["exp_avg", "exp_avg_sq"]
        for slot, moment in exact.items():
            own = torch.stack([flatten_pieces(one.moments(part, slot)) for one in learners])
            torch.testing.assert_close(moment.averaged, own.mean(0))
            assert (coded[slot].averaged - moment.averaged).abs().max() <= 0.02 * own.abs().max()
            assert slot == "exp_avg" or (coded[slot].averaged[own.amax(0) > 0] > 0).all()
            adopt_moments(learners, part, slot, moment, "overwrite", steps=1)
            assert all(torch.equal(flatten_pieces(one.moments(part, slot)), moment.averaged) for one in learners)


def test_carried_moments_are_the_mean_with_the_gradients_since() -> None:
    learners, plan = step_two_learners()
    part = plan.fragments[0]
    shared = SharedMoments("fp32").average(part, learners)
    step_all(learners, seed=1)
    step_all(learners, seed=2)
    for slot, beta in zip(MOMENTS, SMALL.betas, strict=False):
        before = [flatten_pieces(one.moments(part, slot)) for one in learners]
        adopt_moments(learners, part, slot, shared[slot], "carry", steps=2)
        for one, own, read in zip(learners, before, shared[slot].read, strict=True):
            added = own - beta**2 * read
            expected = beta**2 * shared[slot].averaged + added
            torch.testing.assert_close(flatten_pieces(one.moments(part, slot)), expected, rtol=1e-5, atol=1e-9)


def test_the_literal_rule_differs_only_where_learners_miss_rounds() -> None:
    usual, literal = shrink("late"), shrink("late-literal")
    late = [train(row, 0, SMALL, 30, TEXT, scores=1)["loss"] for row in (usual, literal)]
    never = [train(msgspec.structs.replace(row, misses=0.0), 0, SMALL, 30, TEXT, scores=1) for row in (usual, literal)]
    assert never[0]["loss"] == never[1]["loss"] or torch.cuda.is_available(), "a GPU adds in any order"
    assert abs(late[0] - late[1]) > 1e-6 and late[0] != never[0]["loss"]


def test_the_loss_of_a_tail_is_that_of_the_mean_of_the_last_versions() -> None:
    plain, tail = (train(shrink(name), 0, SMALL, 60, TEXT, scores=2) for name in ("default", "tail"))
    assert tail["newest_loss"] == plain["loss"] or torch.cuda.is_available(), "a GPU adds in any order"
    assert tail["curve"][:-1] == plain["curve"][:-1] or torch.cuda.is_available()
    assert np.isfinite(tail["loss"]) and tail["loss"] != tail["newest_loss"]
    one = train(msgspec.structs.replace(shrink("tail"), tail=1), 0, SMALL, 60, TEXT, scores=1)
    assert one["loss"] == one["newest_loss"], "the newest version is the mean of itself"


def test_where_learners_miss_rounds_both_numerics_agree_and_the_loss_falls() -> None:
    runs = [train(shrink("late-literal"), 1, SMALL, 40, TEXT, numerics=one, scores=2) for one in ("host", "device")]
    assert np.allclose(runs[0]["curve"], runs[1]["curve"], rtol=1e-3)
    assert runs[0]["curve"][-1][1] < runs[0]["curve"][0][1]


def test_a_row_past_its_deadline_is_given_up() -> None:
    with pytest.raises(OutOfTime):
        train(ROWS["default"], 0, SMALL, 3, TEXT, deadline=0.0)
