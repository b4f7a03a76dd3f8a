"""A peer's state is not believed: what a hostile one serves is refused in one line, and the newcomer trains on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.learner.same import capture
from tests.learner.test_peer import Process
from torch import nn

from atoll.learner import peer_state_checks
from atoll.learner.packing import Packing, Unpacking
from atoll.learner.peer_state_checks import (
    StateSpec,
    expected_layout,
    fit_states,
    take_peer_state,
    wrong_buffers,
)
from atoll.learner.peer_state_transfer import PeerStates
from atoll.learner.snapshot import Snapshot, encode, ranged
from atoll.learner.trained_model import TorchModel
from atoll.mailbox.box import reserve
from atoll.mailbox.channel import StateCopyMade
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner import effects as fx
from atoll.protocol.limits import LINE

Lie = Callable[[dict[str, Any]], None]


def served(peer: Process, lie: Lie) -> tuple[StateCopyMade, int]:
    """The peer's own copy of its optimizer's state, changed by its owner before it is given away."""
    honest = capture(peer.model, peer.optimizer, {"counter": peer.counter}, parameters=False, rng=False)
    saved = Unpacking(honest.tensors).unpack(honest.states["optimizer"])
    lie(saved)
    packing = Packing()
    states = {**honest.states, "optimizer": packing.pack(saved, "optimizer")}
    kept = {name: tensor for name, tensor in honest.tensors.items() if not name.startswith("optimizer")}
    pieces = list(ranged(*encode(Snapshot({**kept, **packing.tensors}, states))))
    size = sum(map(len, pieces))
    fd = reserve(size, "a test")
    with open(fd, "wb", closefd=False) as memory:
        memory.writelines(pieces)
    return StateCopyMade(1, 0, size), fd


def set_option(name: str, value: object) -> Lie:
    def lie(saved: dict[str, Any]) -> None:
        saved["options"][0][name] = value

    return lie


def set_state(name: str, value: object, parameter: str = "weight") -> Lie:
    def lie(saved: dict[str, Any]) -> None:
        saved["state"][parameter][name] = value

    return lie


def without(saved: dict[str, Any]) -> None:
    del saved["state"]["weight"]["exp_avg_sq"]


def of_nobody(saved: dict[str, Any]) -> None:
    saved["state"]["ghost"] = saved["state"]["weight"]


def numbers_for_parameters(saved: dict[str, Any]) -> None:
    saved["state"] = {10**400: saved["state"]["weight"]}


def no_state(saved: dict[str, Any]) -> None:
    saved["state"] = "none"


def tensors_for_shapes(saved: dict[str, Any]) -> None:
    saved["parameters"][0]["weight"] = torch.ones(3)


def long_text(saved: dict[str, Any]) -> None:
    saved["state"]["weight"] = {"x" * 5000: 1}


LIES: dict[str, tuple[Lie, str]] = {
    "another shape": (set_state("exp_avg", torch.zeros(5, 7)), "'exp_avg' of 'weight' is (5, 7) float32"),
    "another type": (set_state("exp_avg", torch.zeros(2, 3, dtype=torch.float64)), "float64, here it is (2, 3)"),
    "a string": (set_state("exp_avg", "lots"), "is a str, here it is a tensor"),
    "a list": (set_state("exp_avg_sq", [0.0] * 6), "is a list, here it is a tensor"),
    "NaN": (set_state("exp_avg", torch.full((2, 3), torch.nan)), "not finite"),
    "infinity": (set_state("exp_avg_sq", torch.full((2, 3), torch.inf)), "not finite"),
    "a step that divides by zero": (set_state("step", torch.tensor(-1.0)), "'step' of 'weight' is -1.0: below zero"),
    "a step that no run reaches": (set_state("step", torch.tensor(1e30)), "no optimizer reaches"),
    "a step of many digits": (set_state("step", 10**5000), "is a int, here it is a tensor"),
    "one name missing": (without, "this optimizer keeps 'step', 'exp_avg', 'exp_avg_sq'"),
    "one name more": (set_state("momentum_buffer", torch.zeros(2, 3)), "it holds 'step', 'exp_avg', 'exp_avg_sq'"),
    "a parameter that is not here": (of_nobody, "'ghost' is no parameter of this optimizer"),
    "numbers for parameters": (numbers_for_parameters, "a int is no parameter"),
    "no state at all": (no_state, "it holds no optimizer's state"),
    "tensors for shapes": (tensors_for_shapes, "it holds no optimizer's state"),
    "text without end": (long_text, "xxxx"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_lie_is_refused_in_a_line_and_the_newcomer_trains_on(case: str) -> None:
    lie, said = LIES[case]
    newcomer = Process()
    taken = newcomer.takes(*served(Process(steps=3), lie))
    assert said in taken.reason and taken.refused and len(taken.reason) <= LINE and "\n" not in taken.reason
    assert not newcomer.optimizer.state and newcomer.counter.count == 0
    newcomer.step()
    assert all(torch.isfinite(parameter).all() for parameter in newcomer.model.parameters())


@pytest.mark.parametrize(("name", "value"), [("lr", -0.01), ("betas", (2.0, 2.0)), ("maximize", True), ("eps", "x")])
def test_options_come_from_the_learners_own_script(name: str, value: object) -> None:
    newcomer, peer = Process(), Process(steps=3)
    before = {key: option for key, option in newcomer.optimizer.param_groups[0].items() if key != "params"}
    assert newcomer.takes(*served(peer, set_option(name, value))) == fx.Taken("ticket", 3)
    after = {key: option for key, option in newcomer.optimizer.param_groups[0].items() if key != "params"}
    assert after == before and newcomer.moments()[0]["step"] == 3, "the tensors are taken, the options are not"


def test_two_names_for_one_tensor_are_two_tensors() -> None:
    def lie(saved: dict[str, Any]) -> None:
        saved["state"]["weight"]["exp_avg_sq"] = saved["state"]["weight"]["exp_avg"]

    newcomer = Process()
    assert newcomer.takes(*served(Process(steps=3), lie)).reason == ""
    state = newcomer.optimizer.state[newcomer.model.weight]
    assert state["exp_avg"].data_ptr() != state["exp_avg_sq"].data_ptr()


def test_what_the_script_does_not_allow_is_neither_given_nor_taken() -> None:
    peer, newcomer = Process(steps=4), Process()
    newcomer.peers = PeerStates(TorchModel(newcomer.model, newcomer.optimizer), {}, newcomer.post)  # type: ignore[arg-type]
    assert newcomer.takes(*peer.gives()).reason == "", "an earlier version gives it all the same"
    assert newcomer.counter.count == 0 and newcomer.moments()[0]["step"] == 4
    silent = Process(steps=1)
    silent.peers = PeerStates(TorchModel(silent.model, silent.optimizer), {}, silent.post)  # type: ignore[arg-type]
    frame, fd = silent.gives()
    assert b"extra/" not in os.pread(fd, frame.size, 0)
    os.close(fd)


def test_what_was_allowed_and_does_not_come_is_refused() -> None:
    peer, newcomer = Process(steps=4), Process()
    peer.peers = PeerStates(TorchModel(peer.model, peer.optimizer), {}, peer.post)  # type: ignore[arg-type]
    taken = newcomer.takes(*peer.gives())
    assert "'extra/counter' is here, not in the snapshot" in taken.reason and taken.refused
    assert not newcomer.optimizer.state


class TestBuffers:
    def test_they_have_the_shape_and_type_that_they_have_here(self) -> None:
        own = {"buffers/a": torch.zeros(2)}
        assert wrong_buffers(own, {"buffers/a": torch.ones(2), "buffers/more": torch.ones(9)}) == []
        for other in (torch.zeros(3), torch.zeros(2, dtype=torch.float64)):
            assert "here it is (2,) float32" in wrong_buffers(own, {"buffers/a": other})[0]
        assert wrong_buffers(own, {}) == ["'buffers/a' is missing"]

    def test_they_are_finite_but_where_they_are_not_here(self) -> None:
        mask = torch.tensor([0.0, -torch.inf])
        assert wrong_buffers({"buffers/mask": mask}, {"buffers/mask": mask.clone()}) == []
        assert "not finite" in wrong_buffers({"buffers/mask": mask}, {"buffers/mask": mask.flip(0)})[0]


class TestLayout:
    KINDS = (
        *(torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
        *(torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD),
        *(torch.optim.Rprop, torch.optim.Adafactor),
    )

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_it_is_what_the_first_step_makes(self, kind: Any, dtype: torch.dtype) -> None:
        model = nn.Linear(3, 2).to(dtype)
        optimizer = kind(model.parameters(), lr=0.01)
        before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        guessed = expected_layout(optimizer, model)
        assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
        model(torch.randn(4, 3, dtype=dtype)).square().mean().backward()
        optimizer.step()
        made = {
            name: {key: StateSpec.of(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in model.named_parameters()
        }
        assert guessed == made == expected_layout(optimizer, model)

    def test_parameters_of_one_shape_share_a_stand_in_within_their_group_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(5))
        plain, momentum = list(model.parameters())[:3], list(model.parameters())[3:]
        optimizer = torch.optim.SGD([{"params": plain}, {"params": momentum, "momentum": 0.9}], lr=0.01)
        stand_ins: list[torch.Tensor] = []
        make = peer_state_checks._state_of_stand_in

        def count(optimizer: Any, group: Any, parameter: torch.Tensor) -> dict[str, Any]:
            stand_ins.append(parameter)
            return make(optimizer, group, parameter)

        monkeypatch.setattr(peer_state_checks, "_state_of_stand_in", count)
        layout = expected_layout(optimizer, model)
        assert [sorted(kept) for kept in layout.values()] == [[]] * 3 + [["momentum_buffer"]] * 2
        assert len(stand_ins) == 2

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_kind_that_torch_brings_is_taken_bit_for_bit(self, kind: Any) -> None:
        peer, newcomer = Process(steps=3, kind=kind), Process(kind=kind)
        assert newcomer.takes(*peer.gives()).reason == ""
        for own, its in zip(newcomer.model.parameters(), peer.model.parameters(), strict=True):
            state = newcomer.optimizer.state[own]
            assert all(torch.equal(state[key], value) for key, value in peer.optimizer.state[its].items())

    def test_an_optimizer_of_unknown_layout_is_no_peers_fault(self) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(model.parameters())
        with pytest.raises(ConfigError, match="the state of LBFGS is taken from no peer"):
            take_peer_state(model, optimizer, {}, capture(model, optimizer, parameters=False, rng=False))
        newcomer = Process(kind=torch.optim.LBFGS)
        taken = newcomer.takes(*Process(steps=0, kind=torch.optim.LBFGS).gives())
        assert "LBFGS is taken from no peer" in taken.reason and not taken.refused

    def test_numbers_are_bounded_like_tensors(self) -> None:
        layout: Any = {"w": {"step": int, "scale": float}}
        assert fit_states(layout, {"w": {"step": 3, "scale": 0.5}}) == ({"w": {"step": 3, "scale": 0.5}}, [])
        for lie in ({"step": -1}, {"step": 2**63}, {"step": 10**5000}, {"step": True}, {"step": "3"}):
            assert fit_states(layout, {"w": {"scale": 0.5, **lie}})[1], lie
        for lie in ({"scale": float("nan")}, {"scale": float("inf")}, {"scale": 1e300}, {"scale": None}):
            assert fit_states(layout, {"w": {"step": 1, **lie}})[1], lie

    def test_a_parameter_that_never_had_a_gradient_has_no_state(self) -> None:
        states, reasons = fit_states({"w": {"step": int}, "unused": {"step": int}}, {"w": {"step": 3}})
        assert states == {"w": {"step": 3}} and reasons == []


def test_a_schedule_that_comes_from_a_peer_brings_its_learning_rate() -> None:
    """CosineAnnealingLR computes each rate from the one before: with the script's first one it would go astray."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    model, optimizer, schedule = made()
    for _ in range(60):
        optimizer.step()
        schedule.step()
    came = capture(model, optimizer, {"schedule": schedule}, parameters=False, rng=False)
    newcomer, own, late = made()
    take_peer_state(newcomer, own, {"schedule": late}, came)
    assert own.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] < 0.05
    for one in (schedule, late):
        one.step()
    assert own.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_schedule_of_a_peer_sets_no_rate_that_trains_backwards() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    schedule._last_lr = [-0.01]
    came = capture(model, optimizer, {"schedule": schedule}, parameters=False, rng=False)
    take_peer_state(model, optimizer, {"schedule": schedule}, came)
    assert optimizer.param_groups[0]["lr"] == 0.1
