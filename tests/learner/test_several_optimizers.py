"""Several optimizers and schedules: kept in cuts, put back, taken from a peer; mistakes are told at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.learner.same import capture, same
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR

from atoll.learner.capture import Stateful
from atoll.learner.learner import Learner
from atoll.learner.peer_state_checks import take_peer_state
from atoll.learner.snapshot import decode, encode
from atoll.learner.state import Optimizers, optimizers_by_path, restore
from atoll.protocol.errors import ConfigError, PeerError


@pytest.fixture(autouse=True)
def _no_run_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATOLL_SYNCER", "ATOLL_LEARNER", "ATOLL_ROLE"):
        monkeypatch.delenv(name, raising=False)


class Script:
    """Two layers, each with an optimizer and a schedule of its own."""

    def __init__(self, steps: int = 0, *, named: bool = False) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(steps)
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.first = AdamW(self.model[0].parameters(), lr=0.01)
        self.second = SGD(self.model[1].parameters(), lr=0.1, momentum=0.9)
        self.optimizers: Optimizers = [self.first, self.second]
        if named:
            self.optimizers = {"trunk": self.first, "head": self.second}
        self.extras: dict[str, Stateful] = {
            "trunk": StepLR(self.first, 2),
            "head": LambdaLR(self.second, lambda t: 1 / (t + 1)),
        }
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(5, 3)).square().mean().backward()
        for optimizer in (self.first, self.second):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in self.extras.values():
            schedule.step()  # type: ignore[attr-defined]

    def states(self) -> list[dict[str, Any]]:
        return [one.state_dict() for one in (self.first, self.second, *self.extras.values())]


@pytest.mark.parametrize("named", [False, True])
def test_a_cut_holds_all_of_them_and_the_future_is_the_same(named: bool) -> None:
    before, after = Script(steps=5, named=named), Script(named=named)
    saved = capture(before.model, before.optimizers, before.extras)
    header, parts = encode(saved)
    restore(after.model, after.optimizers, after.extras, decode(b"".join([header, *parts])))
    assert same(after.states(), before.states())
    for script in (before, after):
        script.step()
    assert same(after.states(), before.states())
    assert same([*after.model.state_dict().values()], [*before.model.state_dict().values()])


def test_names_tell_them_apart_whatever_their_order() -> None:
    before, after = Script(steps=3, named=True), Script(named=True)
    after.optimizers = {"head": after.second, "trunk": after.first}
    restore(after.model, after.optimizers, after.extras, capture(before.model, before.optimizers, before.extras))
    assert same(after.states(), before.states())


def test_what_was_saved_of_one_does_not_fit_two() -> None:
    before, after = Script(steps=1), Script()
    saved = capture(before.model, before.first, before.extras)
    with pytest.raises(ConfigError, match="'optimizer/0' is here, not in the snapshot"):
        restore(after.model, after.optimizers, after.extras, saved)


@pytest.mark.parametrize("named", [False, True])
def test_a_newcomer_takes_all_of_them_from_a_peer(named: bool) -> None:
    peer, newcomer = Script(steps=4, named=named), Script(named=named)
    given = capture(peer.model, peer.optimizers, parameters=False, rng=False)
    take_peer_state(newcomer.model, newcomer.optimizers, {}, given)
    assert newcomer.first.state[newcomer.model[0].weight]["step"] == 4
    momentum = newcomer.second.state[newcomer.model[1].weight]["momentum_buffer"]
    assert same(momentum, peer.second.state[peer.model[1].weight]["momentum_buffer"])


def test_one_that_does_not_fit_leaves_all_as_they_were() -> None:
    peer, newcomer = Script(steps=4), Script()
    other = Adam(peer.model[1].parameters())
    given = capture(peer.model, [peer.first, other], parameters=False, rng=False)
    with pytest.raises(PeerError, match="'optimizer/1' is SGD here, Adam in the snapshot"):
        take_peer_state(newcomer.model, newcomer.optimizers, {}, given)
    assert not newcomer.first.state and not newcomer.second.state


class TestToldAtOnce:
    """At construction or registration: never at the first cut."""

    @pytest.mark.parametrize("wrong", ["AdamW", 3, {"trunk": None}, ["AdamW"]])
    def test_what_is_no_optimizer_is_a_type_error(self, wrong: Any) -> None:
        with pytest.raises(TypeError, match="give torch optimizers, one, a list of them, or a dict by name"):
            Learner(nn.Linear(2, 1), wrong)

    def test_a_schedule_is_told_to_register(self) -> None:
        script = Script()
        with pytest.raises(TypeError, match=r"'optimizer/1' is of type StepLR.*learner\.register"):
            Learner(script.model, [script.first, script.extras["trunk"]])  # type: ignore[list-item]

    def test_what_has_no_state_is_not_registered(self) -> None:
        learner = Learner(nn.Linear(2, 1))
        with pytest.raises(TypeError, match=r"'extra/clip' is a float, without state_dict\(\)"):
            learner.register("clip", 1.0)  # type: ignore[arg-type]

    def test_what_no_cut_can_hold_is_not_registered(self) -> None:
        class Odd:
            def state_dict(self) -> dict[str, Any]:
                return {"model": nn.Linear(2, 1)}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                pass

        with pytest.raises(TypeError, match="'extra/odd/model' is a Linear, which a snapshot cannot hold"):
            Learner(nn.Linear(2, 1)).register("odd", Odd())

    def test_an_option_that_no_cut_can_hold_is_a_type_error(self) -> None:
        model = nn.Linear(2, 1)
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0]["warmup"] = lambda t: t
        with pytest.raises(TypeError, match="'optimizer/0/warmup' is a function, which a snapshot cannot hold"):
            Learner(model, optimizer)

    def test_an_optimizer_without_the_models_parameters_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
        with pytest.raises(SystemExit) as ended:
            Learner(model, [SGD(model.parameters(), lr=0.1), AdamW(other.parameters())])
        assert ended.value.code == 2
        assert "'optimizer/1' (AdamW) trains none of the model's parameters" in capsys.readouterr().err

    def test_a_parameter_that_only_the_optimizer_knows_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        model, scale = nn.Linear(2, 1), nn.Parameter(torch.ones(7))
        with pytest.raises(SystemExit):
            Learner(model, SGD([*model.parameters(), scale], lr=0.1))
        line = capsys.readouterr().err
        assert "trains 1 tensors that are no parameters of the model, the first of shape (7,)" in line

    def test_frozen_parameters_of_an_optimizer_may_be_anywhere(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        aside = nn.Linear(2, 2).requires_grad_(False)
        Learner(model, SGD([*model.parameters(), *aside.parameters()], lr=0.1))


def test_paths_are_those_of_a_snapshot() -> None:
    one: Optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert [*optimizers_by_path(None)] == [] and [*optimizers_by_path(one)] == ["optimizer"]
    assert [*optimizers_by_path((one, one))] == ["optimizer/0", "optimizer/1"] and [
        *optimizers_by_path({"a": one})
    ] == ["optimizer/a"]
