"""Frozen parameters that are not the run's are taken from a peer, whole and checked, or the learner is refused."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.learner.test_peer import Post
from tests.learner.test_two_learners import WAIT_S, StartedProcesses, until
from torch import nn

from atoll.learner.peer_state_transfer import PeerStates
from atoll.learner.snapshot import write
from atoll.learner.trained_model import TorchModel
from atoll.learner.unmerged import FrozenRule, UnmergedTensors
from atoll.mailbox.channel import StateCopyMade, TakeOrder
from atoll.protocol.errors import ConfigError
from atoll.protocol.learner import effects as fx
from atoll.store.rundir import UNMERGED


class Process:
    """A training process whose first layer is frozen, drawn from its own seed."""

    def __init__(self, seed: int, rule: FrozenRule = "run", width: int = 3) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(3, width).requires_grad_(False), nn.Linear(width, 1))
        self.model.register_buffer("scale", torch.full((2,), float(seed)))
        self.optimizer = torch.optim.AdamW(self.model[1].parameters())
        self.unmerged = UnmergedTensors(self.model, None, rule)
        self.unmerged.describe()
        self.post = Post()
        trained = TorchModel(self.model, self.optimizer)
        self.peers = PeerStates(trained, {}, self.post, None, self.unmerged)  # type: ignore[arg-type]

    def gives(self) -> StateCopyMade:
        self.peers.carry_out(fx.Capture(1, frozen=True), t=7)
        if self.peers._thread is not None:
            self.peers._thread.join(20)
        copy: StateCopyMade = self.post.sent[-1]
        return copy

    def takes(self, peer: Process) -> fx.Taken:
        copy = peer.gives()
        self.post.next = peer.post.descriptors[-1]
        self.peers.carry_out(TakeOrder("ticket", copy.size), t=0)
        taken: fx.Taken = self.post.sent[-1]
        return taken


def test_a_newcomer_takes_the_runs_frozen_parameters_and_buffers() -> None:
    first, newcomer = Process(0), Process(1)
    first.unmerged.compare(first.unmerged.digest)
    newcomer.unmerged.compare(first.unmerged.digest)
    first.model.scale += 1  # local buffers go on
    assert newcomer.unmerged.lacking and newcomer.takes(first).reason == ""
    assert torch.equal(newcomer.model[0].weight, first.model[0].weight) and not newcomer.model[0].weight.requires_grad
    assert torch.equal(newcomer.model.scale, first.model.scale) and not newcomer.unmerged.lacking
    newcomer.peers.carry_out(fx.Begin("goes on"), t=0)
    assert Process(2).unmerged.digest != newcomer.unmerged.digest == first.unmerged.digest


def test_those_of_another_learner_than_the_runs_are_not_taken() -> None:
    run, other, newcomer = Process(0).unmerged.digest, Process(1), Process(2)
    newcomer.unmerged.compare(run)
    before = newcomer.model[0].weight.clone()
    taken = newcomer.takes(other)
    assert taken.refused and taken.reason == "its frozen parameters are not those of the run's first learner"
    assert torch.equal(newcomer.model[0].weight, before) and not newcomer.optimizer.state


@pytest.mark.parametrize("rule", ["mine", "run"])
def test_who_has_not_the_runs_gives_none(rule: FrozenRule) -> None:
    peer = Process(1, rule)
    peer.unmerged.compare(Process(0).unmerged.digest)
    assert peer.gives().reason == "its frozen parameters are not the run's"


def test_others_shapes_than_the_scripts_are_no_fault_of_the_peer() -> None:
    first, newcomer = Process(0), Process(0, width=4)
    newcomer.unmerged.compare(first.unmerged.digest)
    taken = newcomer.takes(first)
    assert not taken.refused and "other names, shapes or types" in taken.reason


def test_when_nobody_can_give_them_the_learner_is_refused() -> None:
    newcomer = Process(1)
    newcomer.unmerged.compare(Process(0).unmerged.digest)
    with pytest.raises(ConfigError, match="are not those of the run's first learner"):
        newcomer.peers.carry_out(fx.Begin("no peer is there"), t=0)


def test_a_first_learner_that_goes_on_has_its_own_again(tmp_path: Path) -> None:
    first, again = Process(0), Process(1)
    write(tmp_path / UNMERGED, first.unmerged.capture())
    again.unmerged.restore_saved(tmp_path / UNMERGED)
    again.unmerged.describe()
    assert again.unmerged.digest == first.unmerged.digest


SCRIPT = """
import json, os, sys, time, torch, atoll
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))  # no seed
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model[2].parameters(), lr=0.01)
with atoll.Learner(model, optimizer, frozen=os.environ.get("FROZEN", "run")) as learner:
    for batch in learner.batches(torch.ones(256, 4), batch_size=8):
        (model(batch) - torch.randn(8, 2)).square().mean().backward()  # noise: a loss of 0 has norms that jump
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)
        learner.step(tokens=len(batch))
json.dump({name: tensor.tolist() for name, tensor in model.state_dict().items()}, open(sys.argv[1], "w"))
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StartedProcesses]:
    place = StartedProcesses(tmp_path)
    place.script.write_text(SCRIPT)
    yield place
    for process in place.processes:
        process.kill()
        process.communicate()


@pytest.mark.faults
@pytest.mark.system
@pytest.mark.timeout(900)
def test_two_learners_without_a_seed_train_one_model(place: StartedProcesses) -> None:
    run = place.syncer()
    first = place.learner("learner-0", ATOLL_FOLDER=str(run.learner("learner-0")))
    until(lambda: any(run.cuts.glob("*/syncer.json")), "the run begins")
    second, refused = place.learner("learner-1"), place.learner("learner-2", FROZEN="refuse")
    assert refused.wait(WAIT_S) == 2 and "not those of the run's first learner" in place.log("learner-2")
    until(lambda: b"learner-1 took the run's parameters" in run.events.read_bytes(), "the second may contribute")
    assert "a peer's are taken" in place.log("learner-1")
    place.processes[0].send_signal(signal.SIGINT)  # the syncer: the run ends in good order
    one, other = place.result(first, "learner-0"), place.result(second, "learner-1")
    assert one == other and one["0.weight"]
    assert (run.learner("learner-0") / UNMERGED).exists()
