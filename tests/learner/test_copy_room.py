"""Room for copies of a learner's state: made ready beside the training, used by one copy at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tests.learner.same import capture
from torch import nn

from atoll.learner import copy_room
from atoll.learner.copy_room import CopyRoom
from atoll.learner.state import begin_capture, large_tensors

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_room, "SMALL_BYTES", 0)
    monkeypatch.setattr(copy_room, "BLOCK_BYTES", 1 << 16)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.Linear(300, 5).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def ready(model: nn.Module, optimizer: torch.optim.Optimizer) -> CopyRoom:
    room = CopyRoom()
    room.make_ready(large_tensors(model, optimizer))
    assert room.wait_until_ready(WAIT_S)
    return room


def test_a_copy_in_it_is_the_copy_without_it() -> None:
    model, optimizer = trained()
    room = ready(model, optimizer)
    plain, taken = capture(model, optimizer), room.take()
    assert taken is not None
    kept = capture(model, optimizer, room=taken)
    assert plain.states == kept.states and plain.tensors.keys() == kept.tensors.keys()
    for name, tensor in plain.tensors.items():
        assert tensor.dtype == kept.tensors[name].dtype and torch.equal(tensor, kept.tensors[name]), name
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    assert torch.equal(plain.tensors["model/0.weight"], kept.tensors["model/0.weight"])
    room.close()


def test_all_of_it_fits_and_nothing_overlaps_or_crosses_a_block() -> None:
    model, optimizer = trained()
    room = ready(model, optimizer)
    taken = room.take()
    assert taken is not None
    ends = []
    for tensor in large_tensors(model, optimizer):
        made = taken.make_tensor(tensor)
        assert made is not None
        ends.append((made.data_ptr(), made.data_ptr() + made.nbytes))
    first = ends[0][0]
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(ends))
    block = taken._block
    assert all((start - first) // block == (end - 1 - first) // block for start, end in ends)
    assert taken.make_tensor(torch.zeros(block + 1, dtype=torch.uint8)) is None


def test_one_copy_at_a_time_and_the_next_when_the_last_is_let_go() -> None:
    model, optimizer = trained()
    room = ready(model, optimizer)
    kept = capture(model, optimizer, room=room.take())
    one = kept.tensors["buffers/1.running_mean"]
    del kept
    assert room.take() is None
    del one
    assert room.take() is not None


def test_who_waits_for_the_copy_of_a_base_does_not_keep_the_room() -> None:
    model, optimizer = trained()
    room = ready(model, optimizer)
    base = torch.ones(100)
    begun = begin_capture(model, None, {"held": Held(base)}, room=room.take(), steady=[base])
    copy = begun.packing.steady_copies[id(base)]
    begun.finish()
    assert room.take() is None, "the snapshot is still there"
    del begun
    assert copy.done() and room.take() is not None


class Held:
    def __init__(self, base: torch.Tensor) -> None:
        self._base = base

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"base": self._base}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        raise AssertionError("nobody loads it")


def test_before_it_is_ready_and_once_it_is_closed_there_is_none() -> None:
    room = CopyRoom()
    assert room.take() is None and not room.is_begun
    room.make_ready([torch.zeros(10)])
    assert room.wait_until_ready(WAIT_S)
    held = room.take()
    assert held is not None
    tensor = held.make_tensor(torch.zeros(10))
    room.close()
    assert room.take() is None
    assert tensor is not None and tensor.fill_(3.0).sum() == 30.0


def test_without_memory_to_spare_copies_allocate_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_room, "can_spare", lambda size: False)
    room = CopyRoom()
    room.make_ready([torch.zeros(10)])
    assert not room.wait_until_ready(WAIT_S)
    assert room.take() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_off_the_device_lies_in_it() -> None:
    values = [torch.arange(1 << 20, device="cuda", dtype=torch.float32), torch.ones(3, device="cuda")]
    model = nn.ParameterList(values)
    room = CopyRoom()
    room.make_ready(large_tensors(model, None))
    assert room.wait_until_ready(WAIT_S)
    kept = capture(model, None, room=room.take())
    assert room.take() is None
    assert torch.equal(kept.tensors["model/0"], values[0].cpu()) and torch.equal(
        kept.tensors["model/1"], values[1].cpu()
    )
    room.close()
