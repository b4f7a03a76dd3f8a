"""The inner optimizer's moments: encoded on the device as on the CPU, averaged, and adopted by the fragment's rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.learner.small import Remembers
from tests.numerics.moment_bodies import pack, unpack
from torch import nn
from torch.optim import Optimizer

import atoll
from atoll.learner.boundary import Boundary
from atoll.learner.model import describe, merged
from atoll.learner.moments import InnerMoments
from atoll.learner.offload import EncodedMoments, Offload, StreamOffload
from atoll.learner.placement import choose_placement
from atoll.learner.state import Optimizers
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import AdoptOrder, ReadOrder
from atoll.numerics.arrays import ByteArray
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.moments import NAMES, average_moments, check_moments, read_moments
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.settings import Settings
from atoll.protocol.tape import AdoptedEntry, MomentsEntry

SHARED = Settings(fragments=2, sync_every=4, overlap=1, share="moments")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
everywhere = pytest.mark.parametrize("device", DEVICES)


def optimizers(parameters: Any) -> dict[str, Optimizer]:
    parameters = list(parameters)
    found: dict[str, Optimizer] = {
        "adam": torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.95)),
        "adamw": torch.optim.AdamW(parameters, lr=0.01, betas=(0.9, 0.95)),
        "sgd": torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True),
    }
    if hasattr(torch.optim, "Muon"):
        found["muon"] = torch.optim.Muon(parameters, lr=0.01)
    return found


KINDS = [*optimizers(nn.Linear(2, 2, bias=False).parameters())]
each = pytest.mark.parametrize("kind", KINDS)


class Training:
    """A model of one matrix, which is split over both fragments, and its optimizer."""

    def __init__(self, kind: str = "adamw", device: str = "cpu", seed: int = 0, dtype: torch.dtype = torch.float32):
        torch.manual_seed(seed)
        self.model = nn.Linear(70, 6, bias=False).to(device, dtype)
        self.optimizer = optimizers(self.model.parameters())[kind]
        self.plan: FragmentPlan = make_plan(describe(self.model), 2)
        self.moments = InnerMoments(self.plan, merged(self.model), self.optimizer)
        self.keys = [key for key in ("exp_avg", "exp_avg_sq", "momentum_buffer") if key in self._steps(1)]

    def _steps(self, count: int) -> Mapping[str, Any]:
        for _ in range(count):
            self.optimizer.zero_grad()
            weight = self.model.weight
            self.model(torch.randn(5, 70, device=weight.device, dtype=weight.dtype)).float().square().sum().backward()
            self.optimizer.step()
        return self.state

    def step(self, count: int = 1) -> None:
        self._steps(count)

    @property
    def state(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.optimizer.state[self.model.weight]
        return found

    def own(self, key: str, fragment: int) -> torch.Tensor:
        """Of the rows of the fragment, as a copy."""
        (piece,) = self.plan.fragments[fragment].pieces
        rows: torch.Tensor = self.state[key][piece.first : piece.first + piece.rows]
        return rows.detach().cpu().float().clone()


def as_body(encoded: EncodedMoments) -> ByteArray:
    return np.append(np.array(encoded.forms, np.uint8), encoded.data.cpu().numpy())


def as_encoded(body: ByteArray, device: str = "cpu") -> EncodedMoments:
    return EncodedMoments([int(body[0])], torch.from_numpy(body[1:].copy()).to(device))


def values_of(training: Training, fragment: int, body: ByteArray) -> list[torch.Tensor]:
    part = training.plan.fragments[fragment]
    return [torch.from_numpy(values).view(part.pieces[0].shape) for values in unpack(part, body).values()]


@each
@everywhere
def test_what_is_encoded_on_the_device_is_what_the_cpu_would_encode(kind: str, device: str) -> None:
    training = Training(kind, device)
    training.step(3)
    part, encoded = training.plan.fragments[1], training.moments.encode(1)
    body = as_body(encoded)
    check_moments(part, body)
    own = {(0, slot): training.own(key, 1).numpy().reshape(-1) for slot, key in enumerate(training.keys)}
    assert body.tobytes() == pack(part, encoded.forms, own).tobytes()


@each
@everywhere
def test_overwrite_takes_the_average_and_nothing_else_changes(kind: str, device: str) -> None:
    one, other = Training(kind, device), Training(kind, device, seed=1)
    one.step(3), other.step(5)
    bodies = [as_body(training.moments.encode(1)) for training in (one, other)]
    averaged = average_moments(one.plan.fragments[1], bodies, [1.0, 3.0])
    before, step = [one.own(key, 0) for key in one.keys], int(one.state.get("step", 0))
    one.moments.adopt(1, as_encoded(averaged, device), "overwrite")
    for key, due in zip(one.keys, values_of(one, 1, averaged), strict=True):
        assert torch.equal(one.own(key, 1), due)
    assert all(torch.equal(one.own(key, 0), was) for key, was in zip(one.keys, before, strict=True))
    assert int(one.state.get("step", 0)) == step, "step stays local"
    one.step()
    assert torch.isfinite(one.model.weight).all()


def test_blend_keeps_a_share_of_the_own() -> None:
    one, other = Training(), Training(seed=1)
    own, averaged = [one.own(key, 0) for key in one.keys], as_body(other.moments.encode(0))
    one.moments.adopt(0, as_encoded(averaged), "blend", blend=0.25)
    for key, was, mean in zip(one.keys, own, values_of(one, 0, averaged), strict=True):
        assert torch.allclose(one.own(key, 0), 0.25 * was + 0.75 * mean)


@each
def test_carry_keeps_what_the_steps_since_the_copy_added(kind: str) -> None:
    one, other = Training(kind), Training(kind, seed=1)
    read = as_body(one.moments.encode(0))
    averaged = average_moments(one.plan.fragments[0], [read, as_body(other.moments.encode(0))], [1.0, 1.0])
    one.step(2)
    kept = atoll.kept_moments(one.optimizer, one.optimizer.param_groups[0])
    assert kept is not None
    own = [one.own(key, 0) for key in one.keys]
    one.moments.adopt(0, as_encoded(averaged), "carry", read=as_encoded(read), steps=2)
    pairs = zip(values_of(one, 0, averaged), values_of(one, 0, read), strict=True)
    for key, was, decay, (mean, then) in zip(one.keys, own, kept.decays, pairs, strict=True):
        due = was + decay**2 * (mean - then)
        if key == "exp_avg_sq":
            due = torch.maximum(due, decay**2 * mean)
            assert (one.own(key, 0) > 0).all()
        assert torch.allclose(one.own(key, 0), due, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_positive_square_is_never_adopted_as_zero(dtype: torch.dtype) -> None:
    training = Training("adam", dtype=dtype)
    part = training.plan.fragments[0]
    squares = np.geomspace(1e-44, 1e-3, part.size).astype(np.float32)
    body = pack(part, [NAMES.index("adam")], {(0, 0): np.zeros_like(squares), (0, 1): squares})
    training.moments.adopt(0, as_encoded(body), "overwrite")
    assert (training.own("exp_avg_sq", 0) > 0).all() and torch.isfinite(training.own("exp_avg_sq", 0)).all()


def test_a_broken_moment_is_encoded_as_what_is_refused() -> None:
    for key, value in [("exp_avg", float("nan")), ("exp_avg_sq", float("inf")), ("exp_avg_sq", -1.0)]:
        training = Training("adamw")
        training.state[key][0, 0] = value
        with pytest.raises(PeerError, match="not finite"):
            check_moments(training.plan.fragments[0], as_body(training.moments.encode(0)))


# ---- which optimizers -----------------------------------------------------------------------------------------------


def shares(optimizers: Optimizers, model: nn.Module) -> InnerMoments:
    return InnerMoments(make_plan(describe(model), 1), merged(model), optimizers)


def test_before_the_first_step_there_are_none_and_none_are_put_there() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moments = shares(optimizer, model)
    encoded = moments.encode(0)
    assert encoded.forms == [0, 0] and encoded.data.numel() == 0
    warm = nn.Linear(3, 2)
    stepped = torch.optim.SGD(warm.parameters(), lr=0.1, momentum=0.9)
    warm(torch.ones(3)).sum().backward()
    stepped.step()
    moments.adopt(0, shares(stepped, warm).encode(0), "overwrite")
    assert not optimizer.state


def test_parameters_of_several_optimizers_have_each_their_own_form() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    several: list[Optimizer] = [
        torch.optim.AdamW(model[0].parameters()),
        torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.5),
    ]
    moments = shares(several, model)
    model(torch.ones(3)).sum().backward()
    for optimizer in several:
        optimizer.step()
    assert [NAMES[form] for form in moments.encode(0).forms] == ["adam", "adam", "momentum"]


def test_optimizers_that_cannot_share_are_refused_with_what_to_do() -> None:
    model = nn.Linear(3, 2)
    for optimizer, reason in [
        (None, "no inner optimizer keeps any: give Learner its optimizer, and SGD a momentum"),
        (torch.optim.SGD(model.parameters(), lr=0.1), "no inner optimizer keeps any"),
        (torch.optim.Adamax(model.parameters()), "does not know what Adamax keeps: use Adam, AdamW, SGD with momentum"),
        (torch.optim.AdamW(model.parameters(), amsgrad=True), "cannot average the maxima that amsgrad keeps"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            shares(optimizer, model)


def test_another_optimizer_is_registered_by_one_function() -> None:
    class Heavy(Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"decay": 0.8})

        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["speed"] = parameter.grad.clone()

    form = "adam"

    @atoll.kept_moments.register(Heavy)
    def of_heavy(optimizer: Optimizer, group: dict[str, Any]) -> atoll.KeptMoments:
        return atoll.KeptMoments(form, ("speed",), (group["decay"],))

    model = nn.Linear(3, 2, bias=False)
    optimizer = Heavy(model.parameters())
    for form in ("adam", "another"):
        with pytest.raises(ConfigError, match=f"registered of Heavy is no moments: form '{form}' with 1 keys"):
            shares(optimizer, model)
    form = "momentum"
    moments = shares(optimizer, model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    assert [NAMES[form] for form in moments.encode(0).forms] == ["momentum"]


def test_placement_device_is_refused_and_auto_takes_host() -> None:
    plan = make_plan(describe(nn.Linear(3, 2)), 2)
    device = torch.device("cuda")
    settings = Settings(fragments=2, sync_every=4, overlap=1, share="moments", codec="int8")
    placement = choose_placement("auto", device, plan, settings, 2**40)
    assert not placement.on_device and 'share = "moments"' in placement.text
    with pytest.raises(ConfigError, match="placement = device does not send moments: use placement = host"):
        choose_placement("device", device, plan, settings, 2**40)


# ---- between two steps ----------------------------------------------------------------------------------------------


class Place:
    def __init__(self, offload: type[Offload] | None = None) -> None:
        self.training, self.courier = Training(), Remembers()
        self.box = Mailbox.create(self.training.plan, SHARED)
        taking_part = merged(self.training.model)
        self.boundary = Boundary(
            self.box,
            SHARED,
            taking_part,
            self.courier,
            moments=self.training.moments,  # type: ignore[arg-type]
        )
        if offload is not None:
            self.boundary._offload = StreamOffload(self.box, self.boundary._own, torch.device("cpu"))
        self.t = 1

    def step(self) -> None:
        self.t += 1
        self.training.step()
        self.boundary.count_step(self.t, 10)
        self.boundary.adopt_ready(self.t)
        self.boundary.make_copies(self.t)

    def lands(self, body: ByteArray, fragment: int = 0, slot: int = 0, **order: Any) -> None:
        self.box.incoming(slot, fragment)[:] = 0.5
        self.box.incoming_moments(slot)[: body.size] = body
        base = {"round": 0, "rule": "overwrite", "blend": 0.5, "step": 0}
        self.boundary.carry_out(AdoptOrder(slot, fragment, 1, **{**base, **order}))

    def entries(self) -> list[object]:
        kept = self.boundary._tape._entries.since(0)[1]
        return [entry for entry in kept if isinstance(entry, AdoptedEntry | MomentsEntry)]


@pytest.mark.parametrize("offload", [None, StreamOffload])
def test_a_copy_has_its_moments_behind_it_and_a_version_is_adopted_with_its_own(offload: type[Offload] | None) -> None:
    place = Place(offload)
    place.boundary.carry_out(ReadOrder(2, 0, 0, 2))
    place.step()
    part = place.training.plan.fragments[0]
    sent = read_moments(part, place.box.outgoing_moments(2))
    assert sent.tobytes() == as_body(place.training.moments.encode(0)).tobytes()
    other = Training(seed=1)
    averaged = average_moments(part, [sent, as_body(other.moments.encode(0))], [1.0, 1.0])
    place.lands(averaged, moments=True)
    place.boundary.adopt_ready(place.t)
    for key, due in zip(place.training.keys, values_of(place.training, 0, averaged), strict=True):
        assert torch.equal(place.training.own(key, 0), due)
    assert place.entries() == [MomentsEntry(2, 0, 1), AdoptedEntry(2, 0, 1)]


@pytest.mark.parametrize("offload", [None, StreamOffload])
def test_carry_subtracts_what_was_sent_with_the_copy(offload: type[Offload] | None) -> None:
    place = Place(offload)
    place.boundary.carry_out(ReadOrder(2, 0, 0, 2))
    place.step()
    sent = read_moments(place.training.plan.fragments[0], place.box.outgoing_moments(2)).copy()
    place.step()
    own = [place.training.own(key, 0) for key in place.training.keys]
    place.lands(sent, rule="carry", minus=2, minus_steps=1, minus_tokens=10, copy_t=2, moments=True)
    place.boundary.adopt_ready(place.t)
    assert place.box.steps[0] == 1
    mean, square = (place.training.own(key, 0) for key in place.training.keys)
    assert torch.equal(mean, own[0]), "the average is what was sent: nothing is to be changed"
    assert torch.equal(square, torch.maximum(own[1], 0.95 * values_of(place.training, 0, sent)[1]))


def test_a_version_without_moments_leaves_them_alone_and_the_tape_says_so() -> None:
    place = Place()
    place.step()
    own = [place.training.own(key, 0) for key in place.training.keys]
    place.lands(np.zeros(0, np.uint8))
    place.boundary.adopt_ready(place.t)
    assert all(torch.equal(place.training.own(key, 0), was) for key, was in zip(place.training.keys, own, strict=True))
    assert place.entries() == [AdoptedEntry(2, 0, 1)]
