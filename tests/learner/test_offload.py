from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tests.learner.small import boxed, in_order, reading

from atoll.learner.boundary import adopt
from atoll.learner.offload import CpuOffload, StreamOffload, make_offload, shaped
from atoll.mailbox.box import Mailbox
from atoll.protocol.errors import ConfigError

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mixed(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Several dtypes and strides, whose values every one of them can hold."""
    return {
        "a": torch.arange(6.0, device=device).view(2, 3).requires_grad_(),
        "b": torch.arange(6.0, device=device).view(3, 2).T,
        "c": torch.tensor([1.5, -2.0], dtype=torch.bfloat16, device=device),
        "d": torch.tensor(0.25, dtype=torch.float16, device=device),
    }


def flat(box: Mailbox, parameters: dict[str, torch.Tensor], fragment: int) -> np.ndarray:
    own = in_order(box, parameters)[fragment]
    return np.concatenate([tensor.detach().float().cpu().reshape(-1).numpy() for tensor in own])


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_a_copy_holds_every_tensor_of_its_fragment_in_fp32(fragments: int) -> None:
    parameters = mixed()
    box, _ = boxed(parameters, fragments)
    offload = make_offload(box, reading(box, parameters))
    assert isinstance(offload, CpuOffload)
    for fragment in range(fragments):
        transfer = offload.read(fragment, 1, 1)
        transfer.wait()
        assert transfer.done()
        assert np.array_equal(box.outgoing(1, fragment), flat(box, parameters, fragment))
        assert not any(view.requires_grad for view in offload.outgoing(fragment, 1, 1))


def test_what_arrives_is_shaped_like_the_parameters() -> None:
    parameters = mixed()
    box, _ = boxed(parameters)
    offload = make_offload(box, reading(box, parameters))
    box.incoming(1, 0)[:] = np.arange(15, dtype=np.float32)
    assert offload.bring(0, 1).done()
    arrived = offload.arrived(0, 1)
    assert [tuple(view.shape) for view in arrived] == [(2, 3), (2, 3), (2,), ()]
    assert torch.cat([view.reshape(-1) for view in arrived]).tolist() == list(range(15))


def test_base_and_outgoing_are_views_of_the_shared_memory() -> None:
    parameters = mixed()
    box, _ = boxed(parameters, 2)
    offload = make_offload(box, reading(box, parameters))
    box.base(1)[:] = 3.0
    box.outgoing(0, 1)[:] = 4.0
    assert all((view == 3.0).all() for view in offload.base(1))
    assert all((view == 4.0).all() for view in offload.outgoing(1, 0, 1))


def test_a_parameter_whose_data_was_exchanged_is_read_where_it_is_now() -> None:
    own = torch.nn.Parameter(torch.zeros(3))
    box, _ = boxed({"w": own})
    offload = make_offload(box, reading(box, {"w": own}))
    own.data = torch.ones(3)
    offload.read(0, 0, 1)
    assert box.outgoing(0, 0).tolist() == [1.0, 1.0, 1.0]


def test_other_devices_are_refused() -> None:
    parameters = {"w": torch.zeros(3)}
    box, _ = boxed(parameters)
    with pytest.raises(ConfigError, match="the model is on 'meta'"):
        make_offload(box, lambda fragment: [torch.zeros(3, device="meta")])


def test_shaped_cuts_a_flat_array_at_the_fragments_offsets() -> None:
    parameters = mixed()
    box, _ = boxed(parameters)
    views = shaped(torch.arange(15.0), box, 0)
    assert [view.reshape(-1)[0].item() for view in views] == [0.0, 6.0, 12.0, 14.0]


SLOW = 1_000_000_000
"""Device cycles; about half a second."""
LARGE = 4 * 2**20


@cuda
class TestOnCuda:
    @pytest.fixture
    def place(self) -> Iterator[tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]]:
        parameters = {"w": torch.full((LARGE,), 1.0, device="cuda"), **mixed("cuda")}
        box, _ = boxed(parameters)
        offload = make_offload(box, reading(box, parameters))
        assert isinstance(offload, StreamOffload)
        yield box, parameters, offload
        offload.close()

    def test_the_slots_are_page_locked(self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]) -> None:
        box, _, _ = place
        assert torch.from_numpy(box.outgoing(0, 0)).is_pinned()
        assert torch.from_numpy(box.incoming(box.layout.first_incoming - 1, 0)).is_pinned()

    def test_closing_unlocks_them(self) -> None:
        parameters = mixed("cuda")
        box, _ = boxed(parameters)
        make_offload(box, reading(box, parameters)).close()
        assert not torch.from_numpy(box.outgoing(0, 0)).is_pinned()

    def test_a_copy_is_what_the_parameter_was_at_the_boundary(
        self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]
    ) -> None:
        box, parameters, offload = place
        offload.read(0, 1, 1).wait()  # kernels are loaded when they are first used, and that waits
        with torch.no_grad():
            parameters["w"].mul_(1.0).add_(1.0)
        torch.cuda.synchronize()
        torch.cuda._sleep(SLOW)
        with torch.no_grad():
            parameters["w"].add_(1.0)
        expected_w = 3.0
        transfer = offload.read(0, 0, 1)
        with torch.no_grad():
            parameters["w"].mul_(100.0)  # the next step changes it at once
        assert not transfer.done(), "nothing waited for the device"
        transfer.wait()
        assert transfer.done()
        values = dict(zip([piece.label for piece in box.plan.fragments[0].pieces], shaped_host(box, 0), strict=True))
        assert (values["w"] == expected_w).all()
        assert values["b"].tolist() == mixed()["b"].tolist()

    def test_copies_one_after_the_other_do_not_mix(
        self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]
    ) -> None:
        box, parameters, offload = place
        transfers = []
        for slot in range(3):
            with torch.no_grad():
                parameters["w"].fill_(float(slot))
            transfers.append(offload.read(0, slot, 1))
        for slot, transfer in enumerate(transfers):
            transfer.wait()
            assert (shaped_host(box, slot)[-1] == slot).all()

    def test_an_adoption_takes_what_arrived_and_training_goes_on_behind_it(
        self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]
    ) -> None:
        box, parameters, offload = place
        own = in_order(box, parameters)[0]
        box.incoming(0, 0)[:] = 5.0
        torch.cuda._sleep(SLOW)
        transfer = offload.bring(0, 0)
        transfer.wait()
        adopt(own, offload.arrived(0, 0), "overwrite")
        with torch.no_grad():
            parameters["w"].add_(1.0)
        box.incoming(0, 0)[:] = -1.0  # the courier uses the slot again
        torch.cuda.synchronize()
        assert (parameters["w"] == 6.0).all()
        assert (parameters["c"] == 5.0).all()

    def test_a_version_brought_while_an_adoption_is_queued_does_not_overtake_it(
        self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]
    ) -> None:
        box, parameters, offload = place
        own = in_order(box, parameters)[0]
        box.incoming(0, 0)[:] = 5.0
        offload.bring(0, 0).wait()
        torch.cuda._sleep(SLOW)
        adopt(own, offload.arrived(0, 0), "overwrite")
        offload.release(0, 0)
        seen = parameters["w"].clone()
        box.incoming(1, 0)[:] = 9.0
        second = offload.bring(0, 1)  # into the same staging buffer
        second.wait()
        adopt(own, offload.arrived(0, 1), "overwrite")
        torch.cuda.synchronize()
        assert (seen == 5.0).all()
        assert (parameters["w"] == 9.0).all()

    def test_one_version_at_a_time_needs_one_staging_buffer(
        self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]
    ) -> None:
        box, _, offload = place
        for slot in range(box.layout.first_incoming):
            offload.bring(0, slot).wait()
            offload.arrived(0, slot)
            offload.release(0, slot)
        assert len(offload._spare) == 1

    def test_a_graph_is_captured_while_threads_bring_versions_and_wait_for_them(
        self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]
    ) -> None:
        box, _, offload = place
        over, errors, brought = threading.Event(), list[Exception](), list[int]()

        def bring() -> None:
            try:
                offload.enter_thread()
                while not over.is_set():
                    slot = len(brought) % box.layout.first_incoming  # the first of each allocates its staging buffer
                    offload.bring(0, slot).wait()
                    brought.append(slot)
            except Exception as error:
                errors.append(error)

        number = torch.zeros(8, device="cuda")
        thread = threading.Thread(target=bring)
        thread.start()
        try:
            for _ in range(20):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(200):
                        number.add_(1.0)
                graph.replay()
        finally:
            over.set()
            thread.join()
        torch.cuda.synchronize()
        assert not errors and len(brought) > 3
        assert number.tolist() == [20 * 200.0] * 8

    def test_carry_subtracts_the_copy_that_was_sent(
        self, place: tuple[Mailbox, dict[str, torch.Tensor], StreamOffload]
    ) -> None:
        box, parameters, offload = place
        own = in_order(box, parameters)[0]
        offload.read(0, 0, 1).wait()
        with torch.no_grad():
            parameters["w"].add_(2.0)
        box.incoming(1, 0)[:] = 10.0
        offload.bring(0, 1).wait()
        adopt(own, offload.arrived(0, 1), "carry", read=offload.outgoing(0, 0, 1))
        assert (parameters["w"] == 12.0).all()
        box.base(0)[:] = 11.0
        offload.bring(0, 1).wait()
        adopt(own, offload.arrived(0, 1), "carry", read=offload.base(0))
        assert (parameters["w"] == 11.0).all()


def shaped_host(box: Mailbox, slot: int) -> list[torch.Tensor]:
    return shaped(torch.from_numpy(box.outgoing(slot, 0)), box, 0)


def strided() -> dict[str, torch.Tensor]:
    """What is split, in every kind of memory: plain, transposed, channels last, a vector with gaps."""
    return {
        "plain": torch.arange(24.0).view(8, 3).requires_grad_(),
        "turned": torch.arange(100.0, 124.0).view(3, 8).T,
        "conv": torch.arange(200.0, 248.0).view(4, 3, 2, 2).to(memory_format=torch.channels_last),
        "gaps": torch.arange(300.0, 340.0)[::2],
    }


@pytest.mark.parametrize("rule", ["overwrite", "carry", "blend"])
def test_pieces_of_split_tensors_are_read_and_adopted_in_place_whatever_their_strides(rule: str) -> None:
    parameters = strided()
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    box, _ = boxed(parameters, 12)
    split = {piece.tensor.name for part in box.plan.fragments for piece in part.pieces if not piece.is_whole}
    assert split == parameters.keys()
    offload = make_offload(box, reading(box, parameters))
    for fragment in range(12):
        offload.read(fragment, 0, 1)
        assert np.array_equal(box.outgoing(0, fragment), flat(box, parameters, fragment))
        box.incoming(0, fragment)[:] = box.outgoing(0, fragment) + 2.0
        own = in_order(box, parameters)[fragment]
        adopt(own, offload.arrived(fragment, 0), rule, blend=0.5, read=offload.outgoing(fragment, 0, 1))
    moved = 1.0 if rule == "blend" else 2.0
    for name, tensor in parameters.items():
        assert torch.equal(tensor, before[name] + moved), name


def test_a_split_parameter_whose_data_was_exchanged_is_read_where_it_is_now() -> None:
    own = torch.nn.Parameter(torch.zeros(4))
    box, _ = boxed({"w": own}, 2)
    offload = make_offload(box, reading(box, {"w": own}))
    own.data = torch.arange(4.0)
    for fragment, values in enumerate([[0.0, 1.0], [2.0, 3.0]]):
        offload.read(fragment, 0, 1)
        assert box.outgoing(0, fragment).tolist() == values
