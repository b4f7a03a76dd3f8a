"""The inner optimizer's moments: encoded on the device as on the CPU, averaged, and adopted by the fragment's rule."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tests.learner.small import Remembers
from tests.numerics.moment_bodies import pack, unpack
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import atoll
from atoll.learner import moment_blocks
from atoll.learner.boundary import Boundary
from atoll.learner.model import describe, merged
from atoll.learner.moments import InnerMoments
from atoll.learner.offload import EncodedMoments, Offload, StreamOffload
from atoll.learner.placement import choose_placement
from atoll.learner.state import Optimizers
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import AdoptOrder, ReadOrder
from atoll.numerics.arrays import ByteArray, FloatArray
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


# ---- all of a fragment at once --------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Rows of odd widths, a tensor that is split along its rows, one of other strides, one without a gradient."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(23, 70, device=device))
        self.conv = nn.Parameter(torch.randn(5, 3, 3, 3, device=device).to(memory_format=torch.channels_last))
        self.gain = nn.Parameter(torch.randn(130, device=device, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.randn((), device=device))
        self.still = nn.Parameter(torch.randn(64, device=device))
        self.bias = nn.Parameter(torch.randn(64, device=device, dtype=torch.float16))
        self.matrix = nn.Parameter(torch.randn(8, 128, device=device))
        self.odd = nn.Parameter(torch.randn(7, 65, device=device, dtype=torch.bfloat16))


class MixedTraining:
    def __init__(self, seed: int, device: str) -> None:
        self.model = model = Mixture(seed, device)
        matrices: Any = getattr(torch.optim, "Muon", torch.optim.SGD)
        self.optimizers: list[Optimizer] = [
            torch.optim.AdamW([model.embed, model.conv, model.gain, model.scale, model.still], betas=(0.9, 0.95)),
            torch.optim.SGD([model.bias], lr=0.01, momentum=0.8),
            matrices([model.matrix, model.odd], lr=0.01, momentum=0.85),
        ]
        self.plan = make_plan(describe(model), 3)
        self.moments = InnerMoments(self.plan, merged(model), self.optimizers)
        self.step()
        self.state(model.embed)["exp_avg_sq"] = self.state(model.embed)["exp_avg_sq"].double()

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter is not self.model.still:
                sizes = 10.0 ** torch.linspace(-22, 1, parameter.numel(), device=parameter.device)
                parameter.grad = (torch.randn_like(sizes) * sizes).view(parameter.shape).to(parameter.dtype)
        for optimizer in self.optimizers:
            optimizer.step()

    def state(self, parameter: torch.Tensor) -> dict[str, Any]:
        (found,) = [optimizer.state[parameter] for optimizer in self.optimizers if parameter in optimizer.state]
        return found

    def own(self, fragment: int) -> dict[tuple[int, int], torch.Tensor]:
        """By piece and slot, as a copy of its type."""
        found, pieces = {}, self.plan.fragments[fragment].pieces
        for number, piece in enumerate(pieces):
            parameter = self.model.get_parameter(piece.tensor.name)
            if parameter is not self.model.still:
                held = [one for key, one in self.state(parameter).items() if key != "step"]
                for slot, one in enumerate(held):
                    rows = one if piece.is_whole else one[piece.first : piece.first + piece.rows]
                    found[number, slot] = rows.cpu().clone()
        return found

    def decay(self, fragment: int, piece: int, slot: int) -> float:
        parameter = self.model.get_parameter(self.plan.fragments[fragment].pieces[piece].tensor.name)
        (decays,) = [
            kept.decays
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if any(one is parameter for one in group["params"]) and (kept := atoll.kept_moments(optimizer, group))
        ]
        return decays[slot]


def flatten_own(own: Mapping[tuple[int, int], torch.Tensor]) -> dict[tuple[int, int], FloatArray]:
    return {place: one.float().reshape(-1).numpy() for place, one in own.items()}


def encoded_of(body: ByteArray, pieces: int, device: str) -> EncodedMoments:
    return EncodedMoments(body[:pieces].tolist(), torch.from_numpy(body).to(device)[pieces:])


def due_moment(
    own: torch.Tensor, mean: torch.Tensor, read: torch.Tensor, rule: str, left: float, squared: bool
) -> torch.Tensor:
    """By the page, one moment alone."""
    if rule == "blend":
        mean = own.float() * 0.25 + mean * 0.75
    if rule == "carry":
        carried = own.float() + (mean - read) * left
        mean = torch.maximum(carried, mean * left) if squared else carried
    if squared:
        mean = torch.where(mean > 0, mean.clamp_min(torch.finfo(own.dtype).tiny), mean)
    return mean.to(own.dtype)


@pytest.mark.parametrize("rule", ["overwrite", "blend", "carry"])
@pytest.mark.parametrize("run_values", [1 << 22, 700])
@everywhere
def test_all_moments_at_once_are_those_of_each_alone_bit_for_bit(
    device: str, run_values: int, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moment_blocks, "CHUNK", run_values)
    one, other = MixedTraining(0, device), MixedTraining(1, device)
    assert any(not piece.is_whole for part in one.plan.fragments for piece in part.pieces)
    for part in one.plan.fragments:
        f, count = part.index, len(part.pieces)
        read = as_body(one.moments.encode(f))
        check_moments(part, read)
        assert read.tobytes() == pack(part, read[:count].tolist(), flatten_own(one.own(f))).tobytes()
        averaged = average_moments(part, [read, as_body(other.moments.encode(f))], [1.0, 3.0])
        one.step()
        own = one.own(f)
        before = encoded_of(read, count, device) if rule == "carry" else None
        one.moments.adopt(f, encoded_of(averaged, count, device), rule, blend=0.25, read=before, steps=2)
        means, reads, now = unpack(part, averaged), unpack(part, read), one.own(f)
        assert means.keys() == own.keys()
        for place, mine in own.items():
            mean, then = (torch.from_numpy(values[place]).view(mine.shape) for values in (means, reads))
            due = due_moment(mine, mean, then, rule, one.decay(f, *place) ** 2, squared=place[1] == 1)
            assert now[place].dtype == due.dtype and torch.equal(now[place], due), part.pieces[place[0]].label


def test_moments_are_taken_where_forms_are_equal_and_left_alone_elsewhere() -> None:
    one, other = MixedTraining(0, "cpu"), MixedTraining(1, "cpu")
    for part in one.plan.fragments:
        f, count = part.index, len(part.pieces)
        own, theirs = one.own(f), other.own(f)
        strange = {number for number in range(count) if (number, 0) in own and number % 2}
        forms = [NAMES.index("mean") if n in strange else form for n, form in enumerate(one.moments.encode(f).forms)]
        one.moments.adopt(f, encoded_of(pack(part, forms, flatten_own(theirs)), count, "cpu"), "overwrite")
        means = unpack(part, pack(part, forms, flatten_own(theirs)))
        for (number, slot), now in one.own(f).items():
            was = own[number, slot]
            if number in strange and NAMES[one.moments.encode(f).forms[number]] != "mean":
                assert torch.equal(now, was)
            else:
                mean = torch.from_numpy(means[number, slot]).view(was.shape)
                assert torch.equal(now, due_moment(was, mean, mean, "overwrite", 1.0, squared=slot == 1))


def test_a_state_that_was_loaded_is_the_one_that_is_shared() -> None:
    one, other = Training(), Training(seed=1)
    one.moments.encode(0)
    other.step(2)
    one.optimizer.load_state_dict(other.optimizer.state_dict())
    due = as_body(other.moments.encode(0))
    assert as_body(one.moments.encode(0)).tobytes() == due.tobytes()
    averaged = as_body(Training(seed=2).moments.encode(0))
    one.moments.adopt(0, as_encoded(averaged), "overwrite")
    assert all(torch.equal(one.own(key, 0), v) for key, v in zip(one.keys, values_of(one, 0, averaged), strict=True))


class CallCounter(TorchDispatchMode):
    """Counts what does work: a view does none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += not any(given.alias_info and not given.alias_info.is_write for given in call._schema.returns)
        return call(*args, **(kwargs or {}))


def count_calls(pieces: int, width: int) -> tuple[int, int]:
    """Of encoding, and of adopting with carry."""
    model = nn.ModuleList(nn.Linear(width, 3, bias=False) for _ in range(pieces))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = shares(optimizer, model)
    read = moments.encode(0)
    with CallCounter() as encoding:
        moments.encode(0)
    with CallCounter() as adopting:
        moments.adopt(0, read, "carry", read=read, steps=1)
    return encoding.calls, adopting.calls


@pytest.mark.parametrize("width", [64, 70])
def test_training_makes_no_more_calls_for_moments_of_more_pieces(width: int) -> None:
    encoding, adopting = count_calls(30, width)
    assert (encoding, adopting) == count_calls(1, width)
    assert encoding <= 40 and adopting <= 50, "each is a kernel that the training thread launches"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", ["overwrite", "blend", "carry"])
def test_nothing_waits_for_the_device(rule: str) -> None:
    training = MixedTraining(0, "cuda")
    for part in training.plan.fragments:
        read = training.moments.encode(part.index)
        try:
            with warnings.catch_warnings(action="ignore"):  # that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
            sent = training.moments.encode(part.index)
            before = read if rule == "carry" else None
            training.moments.adopt(part.index, sent, rule, blend=0.25, read=before, steps=1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


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


class MomentsBoundary:
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
    place = MomentsBoundary(offload)
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
    place = MomentsBoundary(offload)
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
    place = MomentsBoundary()
    place.step()
    own = [place.training.own(key, 0) for key in place.training.keys]
    place.lands(np.zeros(0, np.uint8))
    place.boundary.adopt_ready(place.t)
    assert all(torch.equal(place.training.own(key, 0), was) for key, was in zip(place.training.keys, own, strict=True))
    assert place.entries() == [AdoptedEntry(2, 0, 1)]
