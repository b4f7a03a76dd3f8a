from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.learner.same import capture, same
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as schedules

from atoll.learner import capture as capture_module
from atoll.learner import packing
from atoll.learner.capture import Stateful, random_state, set_random_state
from atoll.learner.snapshot import Snapshot, decode, encode, read, write
from atoll.learner.state import begin_capture, restore
from atoll.protocol.errors import ConfigError

CPU = torch.device("cpu")
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _others_keep_their_draws() -> Iterator[None]:
    before = random_state()
    yield
    set_random_state(before)


class Net(nn.Module):
    """Tied weights, running statistics, dropout, layers in bf16 and channels_last, a frozen one, a passing buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(8)
        self.narrow = nn.Linear(8, 8).bfloat16()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        y = self.embedding(x)
        y = y + self.conv(y.reshape(-1, 2, 2, 2).to(memory_format=torch.channels_last)).reshape(y.shape)
        y = functional.dropout(self.norm(y), 0.2)
        y = torch.tanh(self.narrow(y.bfloat16()).float() + self.frozen(y))
        return self.head(y)  # type: ignore[no-any-return]


class Thing:
    """Something registered, that takes its state or not."""

    def __init__(self, state: dict[str, Any], refuses: bool = False) -> None:
        self.state, self.refuses = state, refuses

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict
        if self.refuses:
            raise RuntimeError("no, thank you:\n  and here is why")


class Training:
    """A script's objects, and a step that draws from every source of chance there is."""

    def __init__(
        self, optimizer: Callable[[Any], torch.optim.Optimizer], schedule: Callable[[Any], Any], seed: int
    ) -> None:
        torch.manual_seed(0)
        frozen = Net().frozen.state_dict()  # each process loads the same ones
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = Net()
        self.model.frozen.load_state_dict(frozen)
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.schedule = schedule(self.optimizer)
        self.extras: dict[str, Stateful] = {"lr": self.schedule}

    def train(self, steps: int) -> Training:
        for _ in range(steps):
            tokens = torch.randint(0, 11, (16,))
            targets = torch.from_numpy(np.random.randint(0, 11, 16))
            weight = 0.5 + random.random()

            def loss(
                tokens: torch.Tensor = tokens, targets: torch.Tensor = targets, weight: float = weight
            ) -> torch.Tensor:
                self.optimizer.zero_grad()
                result = weight * functional.cross_entropy(self.model(tokens), targets)
                result.backward()
                return result.detach()

            value = self.optimizer.step(loss)
            if isinstance(self.schedule, schedules.ReduceLROnPlateau):
                self.schedule.step(float(value))
            else:
                self.schedule.step()
        return self

    def everything(self) -> list[object]:
        state = {name: tensor for name, tensor in self.model.state_dict().items() if "frozen" not in name}
        return [
            state,
            self.optimizer.state_dict(),
            self.schedule.state_dict(),
            torch.rand(2),
            random.random(),
            np.random.rand(),
        ]

    def capture(self, **options: Any) -> Snapshot:
        return capture(self.model, self.optimizer, self.extras, **options)

    def restore(self, snapshot: Snapshot, **options: Any) -> None:
        restore(self.model, self.optimizer, self.extras, snapshot, **options)


def contiguous(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """All that LBFGS can take."""
    return [p for p in parameters if p.is_contiguous() and p.dtype == torch.float32]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def cosine(optimizer: Any) -> Any:
    return schedules.CosineAnnealingLR(optimizer, 30)


def warm_up_then_cosine(optimizer: Any) -> Any:
    parts: list[Any] = [schedules.LinearLR(optimizer, 0.1, total_iters=12), schedules.CosineAnnealingLR(optimizer, 30)]
    return schedules.SequentialLR(optimizer, parts, [12])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": sgd,
    "adamw": adamw,
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw of two groups": lambda p: torch.optim.AdamW([{"params": p[1::2]}, {"params": p[::2], "lr": 0.003}], lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.001),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=5),
    "muon": lambda p: torch.optim.Muon([matrix for matrix in p if matrix.ndim == 2], lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(contiguous(p), lr=0.1, max_iter=2),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": cosine,
    "warm-up then cosine": warm_up_then_cosine,
    "milestones": lambda o: schedules.MultiStepLR(o, [5, 5, 12, 15], gamma=0.7),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.05, total_steps=40),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "a function": lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step)),
}
PAIRS = [*((name, "cosine") for name in OPTIMIZERS), *(("adamw", name) for name in SCHEDULES if name != "cosine")]


# ---- the same future ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "schedule"), PAIRS)
def test_training_goes_on_bit_for_bit_in_a_fresh_process(optimizer: str, schedule: str) -> None:
    kinds = OPTIMIZERS[optimizer], SCHEDULES[schedule]
    first = Training(*kinds, seed=1).train(10)
    header, parts = encode(first.capture())
    kept = b"".join([header, *parts])
    expected = first.train(10).everything()

    second = Training(*kinds, seed=2).train(3)
    assert not same(second.model.state_dict(), first.model.state_dict())
    second.restore(decode(kept))
    assert same(second.train(10).everything(), expected)


@cuda
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=str)
def test_training_on_a_device_goes_on_bit_for_bit_too(options: dict[str, bool]) -> None:
    def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.BatchNorm1d(64), nn.Linear(64, 8)).cuda()
        return model, torch.optim.AdamW(model.parameters(), **options)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
        for _ in range(5):
            model(torch.randn(16, 64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model.state_dict(), optimizer.state_dict()]

    first, second = fresh(1), fresh(2)
    train(*first)
    snapshot = capture(*first)
    expected = train(*first)
    restore(*second, None, snapshot)
    assert same(train(*second), expected)


def test_another_default_device_makes_no_difference() -> None:
    first, second = Training(adamw, cosine, seed=1).train(2), Training(adamw, cosine, seed=2)
    with torch.device("meta"):
        header, parts = encode(first.capture())
        second.restore(decode(b"".join([header, *parts])))
    assert same(second.everything()[:3], first.everything()[:3])


def test_a_capture_changes_nothing_about_the_training() -> None:
    first, second = Training(adamw, cosine, seed=1).train(5), None
    for _ in range(3):
        first.capture()
    expected = first.train(5).everything()
    second = Training(adamw, cosine, seed=1).train(10)
    assert same(second.everything(), expected)


def test_a_snapshot_stays_what_it_was_while_training_goes_on_and_after_restoring(tmp_path: Path) -> None:
    training = Training(adamw, cosine, seed=1).train(3)
    snapshot = training.capture()
    write(tmp_path / "before", snapshot)
    training.train(3).restore(snapshot)
    training.train(3)
    write(tmp_path / "after", snapshot)
    assert (tmp_path / "before").read_bytes() == (tmp_path / "after").read_bytes()


def test_a_file_is_enough(tmp_path: Path) -> None:
    first = Training(sgd, warm_up_then_cosine, seed=1).train(10)
    write(tmp_path / "state.safetensors", first.capture())
    expected = first.train(10).everything()
    second = Training(sgd, warm_up_then_cosine, seed=2)
    second.restore(read(tmp_path / "state.safetensors"))
    assert same(second.train(10).everything(), expected)


def test_layouts_in_memory_come_back_with_the_optimizers_state() -> None:
    first, second = Training(adamw, cosine, seed=1).train(2), Training(adamw, cosine, seed=2)
    second.restore(first.capture())
    for kind in ("exp_avg", "exp_avg_sq"):
        mine = first.optimizer.state[first.model.conv.weight][kind]
        its = second.optimizer.state[second.model.conv.weight][kind]
        assert not mine.is_contiguous() and its.stride() == mine.stride()


# ---- what is kept ---------------------------------------------------------------------------------------------------


def test_names_tell_what_a_tensor_belongs_to() -> None:
    snapshot = Training(adamw, cosine, seed=1).train(1).capture()
    names = set(snapshot.tensors)
    assert {"model/embedding.weight", "buffers/norm.running_mean", "buffers/seen"} <= names
    assert {"rng/torch", "rng/numpy/state/key", "optimizer/state/narrow.weight/exp_avg"} <= names
    unwanted = {"model/head.weight", "model/frozen.weight", "buffers/passing"}
    assert not names & unwanted
    assert all(tensor.device == CPU and tensor.is_contiguous() for tensor in snapshot.tensors.values())
    assert snapshot.tensors["model/narrow.weight"].dtype == torch.bfloat16


def test_parameters_are_written_in_place() -> None:
    first, second = Training(sgd, cosine, seed=1).train(2), Training(sgd, cosine, seed=2)
    before = {name: tensor.data_ptr() for name, tensor in second.model.state_dict().items()}
    second.restore(first.capture())
    assert {name: tensor.data_ptr() for name, tensor in second.model.state_dict().items()} == before
    assert second.model.head.weight is second.model.embedding.weight


def test_a_newcomer_takes_all_but_parameters_and_chance_from_a_peer() -> None:
    peer, newcomer = Training(adamw, cosine, seed=1).train(4), Training(adamw, cosine, seed=2)
    snapshot = peer.capture(parameters=False, rng=False)
    assert not any(name.startswith(("model/", "rng/")) for name in snapshot.tensors) and snapshot.rng is None
    own = {name: p.detach().clone() for name, p in newcomer.model.named_parameters()}
    drawn = random_state()
    for taken in (snapshot, peer.capture()):
        newcomer.restore(taken, parameters=False, rng=False)
        assert same({name: p.detach() for name, p in newcomer.model.named_parameters()}, own)
        assert same(random_state(), drawn)
        assert same(newcomer.optimizer.state_dict(), peer.optimizer.state_dict())
        assert newcomer.model.seen == peer.model.seen == newcomer.model.norm.num_batches_tracked
        assert not newcomer.model.norm.running_mean.any(), "running statistics are merged: the run's"
        assert newcomer.schedule.state_dict() == peer.schedule.state_dict()
    whole = peer.capture(parameters=False, rng=False, buffers="local")
    newcomer.restore(whole, parameters=False, rng=False, buffers="local")
    assert same(dict(newcomer.model.named_buffers()), dict(peer.model.named_buffers()))


def test_a_model_alone_will_do() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    restore(other, None, None, capture(model))
    assert same(other.state_dict(), model.state_dict())


def test_a_model_without_any_tensor_will_do() -> None:
    restore(nn.ReLU(), None, {}, capture(nn.ReLU(), rng=False), rng=False)


def test_a_second_optimizer_goes_by_names_too() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    second = torch.optim.AdamW([model.weight, model.bias])
    turned = torch.optim.AdamW([other.bias, other.weight])
    model(torch.ones(2)).sum().backward()
    second.step()
    restore(other, None, {"second": turned}, capture(model, None, {"second": second}))
    assert same(dict(turned.state[other.bias]), dict(second.state[model.bias]))


def test_a_scaler_and_a_moving_average_are_kept_like_a_schedule() -> None:
    def things() -> dict[str, Stateful]:
        return {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0), "average": nn.BatchNorm1d(2)}

    model, mine, fresh = nn.Linear(2, 2), things(), things()
    mine["scaler"].load_state_dict({**mine["scaler"].state_dict(), "scale": 3.0, "_growth_tracker": 5})
    mine["average"](torch.randn(4, 2))  # type: ignore[operator]
    restore(model, None, fresh, capture(model, None, mine))
    for name in mine:
        assert same(fresh[name].state_dict(), mine[name].state_dict())


def test_what_a_thing_writes_into_the_optimizer_on_loading_does_not_last() -> None:
    training = Training(adamw, cosine, seed=1).train(2)
    rate = training.optimizer.param_groups[0]["lr"]

    class Eager(Thing):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            training.optimizer.param_groups[0]["lr"] = 9.0

    training.extras["eager"] = Eager({})
    training.restore(training.capture())
    assert training.optimizer.param_groups[0]["lr"] == rate


# ---- what is refused, and leaves everything as it was ---------------------------------------------------------------


def refused(training: Training, snapshot: Snapshot, **options: bool) -> str:
    """The refusal, after a proof that it changed nothing."""
    before, drawn = training.capture(), random_state()
    with pytest.raises(ConfigError) as caught:
        training.restore(snapshot, **options)
    after = training.capture()
    assert after.meta == before.meta and same(dict(after.tensors), dict(before.tensors))
    assert same(random_state(), drawn)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_model_is_refused() -> None:
    first, second = Training(adamw, cosine, seed=1).train(2), Training(adamw, cosine, seed=2).train(1)
    snapshot = first.capture()
    second.model.head = nn.Linear(8, 12, bias=False)
    assert refused(second, snapshot) == (
        "the snapshot is of another model: 'model/head.weight' is here, not in the snapshot"
    )
    second.model.head = second.model.embedding  # type: ignore[assignment]
    second.model.narrow.weight = nn.Parameter(torch.zeros(8, 9, dtype=torch.bfloat16))
    assert "'model/narrow.weight' is (8, 9) bfloat16 here, (8, 8) bfloat16 in the snapshot" in refused(second, snapshot)
    second.model.narrow.weight = nn.Parameter(torch.zeros(8, 8))
    assert "'model/narrow.weight' is (8, 8) float32 here, (8, 8) bfloat16 in the snapshot" in refused(second, snapshot)


def test_another_buffer_is_refused() -> None:
    first, second = Training(adamw, cosine, seed=1).train(2), Training(adamw, cosine, seed=2).train(1)
    second.model.register_buffer("more", torch.zeros(2))
    assert "'buffers/more' is here, not in the snapshot" in refused(second, first.capture(), parameters=False)
    assert "'buffers/more' is in the snapshot, not here" in refused(first, second.capture(), parameters=False)


def test_another_optimizer_is_refused() -> None:
    first, second = Training(adamw, cosine, seed=1).train(2), Training(sgd, cosine, seed=2).train(1)
    assert "'optimizer' is SGD here, AdamW in the snapshot" in refused(second, first.capture())


def test_what_only_one_side_has_is_refused() -> None:
    first, second = Training(adamw, cosine, seed=1), Training(adamw, cosine, seed=2)
    first.extras["scaler"] = torch.amp.GradScaler("cpu")
    assert "'extra/scaler' is in the snapshot, not here" in refused(second, first.capture())
    assert "'extra/scaler' is here, not in the snapshot" in refused(first, second.capture())
    with pytest.raises(ConfigError, match="'optimizer' is in the snapshot, not here"):
        restore(second.model, None, second.extras, second.capture())


def test_parameters_and_chance_that_a_snapshot_does_not_hold_are_missed() -> None:
    training = Training(adamw, cosine, seed=1).train(1)
    assert "'model/embedding.weight' is here, not in" in refused(training, training.capture(parameters=False))
    assert "holds no random states" in refused(training, training.capture(rng=False))


def test_a_thing_that_refuses_its_state_leaves_the_others_as_they_were() -> None:
    first, second = Training(adamw, cosine, seed=1).train(2), Training(adamw, cosine, seed=2).train(1)
    first.extras |= {"before": Thing({"a": [1]}), "fussy": Thing({"a": torch.ones(2)})}
    second.extras |= {"before": Thing({"a": [2]}), "fussy": Thing({"a": torch.zeros(2)}, refuses=True)}
    text = refused(second, first.capture())
    assert text == "'extra/fussy' does not take its state from the snapshot: RuntimeError: no, thank you:"


def test_a_thing_that_takes_half_of_its_state_gets_all_of_its_own_back() -> None:
    class Half(Thing):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.state["first"][:] = state_dict["first"]
            self.state["second"].copy_(state_dict["second"])

    first, second = Training(adamw, cosine, seed=1).train(2), Training(adamw, cosine, seed=2).train(1)
    first.extras["half"] = Half({"first": [1], "second": torch.ones(2)})
    second.extras["half"] = Half({"first": [2], "second": torch.zeros(3)})
    assert "'extra/half' does not take its state" in refused(second, first.capture())


def test_an_optimizer_that_refuses_leaves_the_schedule_as_it_was() -> None:
    class Fussy(torch.optim.AdamW):
        refuses = False

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            if self.refuses:
                self.refuses = False
                raise ValueError

    first, second = Training(Fussy, cosine, seed=1).train(2), Training(Fussy, cosine, seed=2).train(1)
    second.optimizer.refuses = True  # type: ignore[attr-defined]
    assert refused(second, first.capture()) == "'optimizer' does not take its state from the snapshot: ValueError"


@pytest.mark.parametrize(
    "change",
    [
        lambda drawn: drawn["torch"].zero_(),
        lambda drawn: drawn.update(torch=torch.zeros(3)),
        lambda drawn: drawn["python"].update(words=np.zeros(3, dtype=np.uint32)),
        lambda drawn: drawn["numpy"].update(state={"key": np.zeros(3, dtype=np.uint32), "pos": 1}),
        lambda drawn: drawn["numpy"]["state"].update(pos=10**6),
        lambda drawn: drawn.update(cuda=[drawn["torch"]] * 99),
        lambda drawn: drawn.clear(),
        lambda drawn: drawn.update(numpy=None),
        lambda drawn: drawn.pop("python"),
    ],
)
def test_random_states_that_cannot_be_are_refused(
    change: Callable[[Any], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Training(adamw, cosine, seed=1).train(2), Training(adamw, cosine, seed=2).train(1)
    drawn = random_state()
    change(drawn)
    with monkeypatch.context() as patched:
        patched.setattr(capture_module, "random_state", lambda: drawn)
        snapshot = first.capture()
    assert "random state" in refused(second, snapshot)


@pytest.mark.parametrize("state", [None, [], {"tuple": []}, {"dict": []}, {"dict": [["kind", "AdamW"]]}])
def test_what_is_no_optimizers_state_is_refused(state: Any) -> None:
    training = Training(adamw, cosine, seed=1).train(2)
    whole = training.capture()
    snapshot = Snapshot(whole.tensors, {**whole.states, "optimizer": state}, whole.rng)
    assert refused(training, snapshot) == "the snapshot holds no optimizer's state under 'optimizer'"


def test_an_optimizers_state_of_unknown_parameters_is_refused() -> None:
    training = Training(adamw, cosine, seed=1).train(2)
    whole = training.capture()
    packed: Any = whole.states["optimizer"]
    pairs = [[key, {"dict": [["nobody", 1]]} if key == "state" else value] for key, value in packed["dict"]]
    snapshot = Snapshot(whole.tensors, {**whole.states, "optimizer": {"dict": pairs}}, whole.rng)
    assert "'optimizer' does not take its state from the snapshot: KeyError: 'nobody'" in refused(training, snapshot)


# ---- what cannot be captured ----------------------------------------------------------------------------------------


def test_a_function_in_a_schedules_state_is_refused_by_name() -> None:
    class Curve:
        """torch keeps the attributes of a callable object, though not a function."""

        def __init__(self) -> None:
            self.shape = lambda step: 1.0 / (1 + step)

        def __call__(self, step: int) -> float:
            return self.shape(step)

    training = Training(adamw, lambda o: schedules.LambdaLR(o, Curve()), seed=1)
    with pytest.raises(ConfigError, match="'extra/lr/lr_lambdas/0/shape' is a function, which a snapshot cannot hold"):
        training.capture()


def test_a_thing_without_a_state_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'extra/lr' is a float, without state_dict\(\) and load_state_dict\(\)"):
        capture(nn.Linear(2, 2), None, {"lr": 0.1})  # type: ignore[dict-item]


def test_a_lazy_model_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'model/weight' has no memory yet: run one batch"):
        capture(nn.LazyLinear(2))


class Held:
    """With a tensor that training does not change."""

    def __init__(self) -> None:
        self.base = torch.arange(8.0)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"base": self.base}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        raise AssertionError("nobody loads it")


def test_training_goes_on_while_what_it_does_not_change_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy = threading.Event()
    with ThreadPoolExecutor(1) as copier:
        monkeypatch.setattr(packing, "_copiers", lambda: copier)
        copier.submit(may_copy.wait)
        model, held = nn.Linear(2, 2), Held()
        weight = model.weight.detach().clone()
        begun = begin_capture(model, None, {"held": held}, rng=False, steady=[held.base])
        copy = begun.packing.steady_copies[id(held.base)]
        assert not copy.done(), "nobody waited for it"
        with torch.no_grad():
            model.weight += 1
        may_copy.set()
        snapshot = begun.finish()
    assert torch.equal(snapshot.tensors["model/weight"], weight)
    assert torch.equal(snapshot.tensors["extra/held/base"], torch.arange(8.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_a_device_does_next_comes_behind_the_copies() -> None:
    model = nn.Linear(1024, 1024).cuda()
    weight = model.weight.detach().cpu()
    torch.cuda._sleep(10**8)  # the copies have not begun when training goes on
    begun = begin_capture(model, rng=False)
    with torch.no_grad():
        model.weight += 1
    assert torch.equal(begun.finish().tensors["model/weight"], weight)
