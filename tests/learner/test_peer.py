"""What a training process gives to a newcomer and takes from a peer, without couriers: frames and memory alone."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import nn

from atoll.digests import compute_digest
from atoll.learner import peer_state_transfer as module
from atoll.learner.peer_state_transfer import PeerStates
from atoll.learner.trained_model import TorchModel
from atoll.mailbox.box import mapped, reserve
from atoll.mailbox.channel import StateCopyMade, TakeOrder, ToCourier
from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx


class Post:
    """In place of the partner: keeps what is sent, and hands over what the test puts in."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.descriptors: list[int] = []
        self.next = -1

    def send(self, frame: ToCourier, descriptor: int | None = None) -> None:
        self.sent.append(frame)
        if descriptor is not None:
            self.descriptors.append(os.dup(descriptor))

    def take_descriptor(self) -> int:
        return self.next


class Counter:
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.count = state_dict["count"]


class Process:
    def __init__(self, steps: int = 0, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        self.model = nn.Linear(3, 2)
        self.model.register_buffer("scale", torch.full((2,), float(steps)))
        self.optimizer = kind(self.model.parameters(), lr=0.01)  # type: ignore[call-arg]
        self.counter = Counter(steps)
        for _ in range(steps):
            self.step()
        self.post = Post()
        self.peers = PeerStates(TorchModel(self.model, self.optimizer), {"counter": self.counter}, self.post)  # type: ignore[arg-type]

    def step(self) -> None:
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gives(self, number: int = 1) -> tuple[StateCopyMade, int]:
        self.peers.carry_out(fx.Capture(number), t=7)
        assert self.peers._thread is not None
        self.peers._thread.join(20)
        return self.post.sent[-1], self.post.descriptors[-1]

    def takes(self, frame: StateCopyMade, fd: int) -> fx.Taken:
        self.post.next = fd
        self.peers.carry_out(TakeOrder("ticket", frame.size), t=3)
        taken: fx.Taken = self.post.sent[-1]
        return taken

    def moments(self) -> list[dict[str, torch.Tensor]]:
        return [
            {key: value.clone() for key, value in self.optimizer.state[parameter].items()}
            for parameter in self.model.parameters()
        ]


def equal(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(one, other, strict=True)
    )


def test_optimizer_buffers_and_extras_arrive_bit_for_bit_and_parameters_do_not() -> None:
    peer, newcomer = Process(steps=4), Process()
    weight = newcomer.model.weight.detach().clone()
    assert newcomer.takes(*peer.gives()) == fx.Taken("ticket", 3)
    assert equal(newcomer.moments(), peer.moments()) and newcomer.moments()[0]["step"] == 4
    assert newcomer.counter.count == 4 and torch.equal(newcomer.model.scale, torch.full((2,), 4.0))  # type: ignore[arg-type]
    assert torch.equal(newcomer.model.weight, weight)


def test_the_copy_says_what_it_is() -> None:
    frame, fd = Process(steps=2).gives(number=5)
    assert (frame.number, frame.t, frame.reason) == (5, 7, "")
    assert compute_digest(mapped(fd, frame.size)) == frame.digest
    os.close(fd)


def test_what_is_given_is_the_state_at_the_boundary_whatever_comes_after() -> None:
    peer, newcomer = Process(steps=3), Process()
    then = peer.moments()
    peer.peers.carry_out(fx.Capture(1), t=7)
    peer.step()
    assert peer.peers._thread is not None
    peer.peers._thread.join(20)
    newcomer.takes(peer.post.sent[-1], peer.post.descriptors[-1])
    assert equal(newcomer.moments(), then) and not equal(newcomer.moments(), peer.moments())


def test_both_train_on_alike_from_there() -> None:
    """The future of the optimizer is the peer's: no state is shared, none is missing."""
    peer, newcomer = Process(steps=3), Process()
    newcomer.takes(*peer.gives())
    newcomer.model.load_state_dict(peer.model.state_dict())
    batch = torch.randn(4, 3)
    for process in (peer, newcomer):
        process.model(batch).square().mean().backward()
        process.optimizer.step()
    assert torch.equal(peer.model.weight, newcomer.model.weight)


def test_what_does_not_fit_changes_nothing_and_is_named() -> None:
    peer, newcomer = Process(steps=3), Process(steps=1, kind=torch.optim.SGD)
    taken = newcomer.takes(*peer.gives())
    assert "'optimizer' is SGD here, AdamW in the snapshot" in taken.reason
    assert newcomer.counter.count == 1 and torch.equal(newcomer.model.scale, torch.ones(2))  # type: ignore[arg-type]


def test_bytes_that_are_no_state_are_named_too() -> None:
    newcomer = Process()
    fd = reserve(64, "a test")
    os.pwrite(fd, b"nonsense" * 8, 0)
    assert "damaged" in newcomer.takes(StateCopyMade(1, 0, 64), fd).reason


def test_a_memory_shorter_than_it_was_said_to_be_is_refused() -> None:
    newcomer = Process()
    assert "came for" in newcomer.takes(StateCopyMade(1, 0, 1 << 20), reserve(64, "a test")).reason


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    peer, newcomer = Process(steps=1), Process()
    frame, fd = peer.gives()
    newcomer.takes(frame, fd)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_captured_is_declined_with_the_reason() -> None:
    peer = Process(steps=1)
    peer.counter.count = lambda: 1  # type: ignore[assignment]
    peer.peers.carry_out(fx.Capture(1), t=7)
    [frame] = peer.post.sent
    assert isinstance(frame, StateCopyMade) and "extra/counter" in frame.reason and peer.post.descriptors == []


def test_too_little_memory_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(size: int, what: str) -> int:
        raise PeerError(f"{what} takes 9 MiB of memory and 1 MiB are free")

    monkeypatch.setattr(module, "reserve", full)
    peer = Process(steps=1)
    peer.peers.carry_out(fx.Capture(1), t=7)
    assert peer.peers._thread is not None
    peer.peers._thread.join(20)
    [frame] = peer.post.sent
    assert "1 MiB are free" in frame.reason


def test_what_a_dead_courier_had_ordered_is_not_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    died, write = threading.Event(), module._in_memory

    def write_once_it_died(*order: Any) -> tuple[StateCopyMade, int]:
        assert died.wait(20)
        return write(*order)

    monkeypatch.setattr(module, "_in_memory", write_once_it_died)
    peer = Process(steps=1)
    peer.peers.carry_out(fx.Capture(1), t=7)
    peer.peers.courier_died()
    died.set()
    assert peer.peers._thread is not None
    peer.peers._thread.join(20)
    assert peer.post.sent == []
    frame, fd = peer.gives(number=1)
    assert frame.number == 1
    os.close(fd)


def test_it_waits_from_the_search_to_its_outcome(capsys: pytest.CaptureFixture[str]) -> None:
    newcomer = Process()
    assert not newcomer.peers.waits
    newcomer.peers.carry_out(fx.Await(), t=0)
    assert newcomer.peers.waits
    newcomer.peers.carry_out(fx.Begin("goes on with the inner optimizer of a"), t=0)
    assert not newcomer.peers.waits
    assert capsys.readouterr().err == "atoll: goes on with the inner optimizer of a\n"


def test_without_an_optimizer_buffers_and_extras_travel_all_the_same() -> None:
    peer, newcomer = Process(steps=2), Process()
    for process in (peer, newcomer):
        process.peers._optimizers = None
    assert newcomer.takes(*peer.gives()).reason == ""
    assert newcomer.counter.count == 2
