from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.mailbox.box import BoxLayout, Mailbox
from atoll.mailbox.channel import (
    COUNTED,
    FRAME_LIMIT,
    CourierChannel,
    DialFailed,
    Goodbye,
    GoOrder,
    JoinProgress,
    MailboxReady,
    ReadOrder,
    RunProgress,
    SlotFreed,
    Start,
    StepReport,
    StopOrder,
    TakeOrder,
    ToTraining,
    decode_to_courier,
    decode_to_training,
    is_counted,
)
from atoll.numerics.fragments import make_plan
from atoll.protocol.errors import PeerError
from atoll.protocol.learner.effects import Await, Begin, Capture, Stepped
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings

Ends = tuple[CourierChannel, CourierChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = CourierChannel.pair()
    other = CourierChannel(theirs)
    yield ours, other
    ours.close()
    other.close()


def everything(sender: CourierChannel, receiver: CourierChannel, count: int) -> list[bytes]:
    """Flush and receive in turns until so many frames have come."""
    frames: list[bytes] = []
    for _ in range(10_000):
        sender.flush()
        frames += receiver.receive()
        if len(frames) >= count:
            break
    return frames


@given(reasons=st.lists(st.text(max_size=300), min_size=1, max_size=5), cuts=st.lists(st.integers(1, 50), max_size=40))
def test_frames_that_come_in_pieces_are_put_together(reasons: list[str], cuts: list[int]) -> None:
    near, far = socket.socketpair()
    maker, sink = CourierChannel.pair()
    for reason in reasons:
        maker.send(Goodbye(reason))
    stream = sink.recv(1 << 20)
    channel, frames = CourierChannel(far), []
    for cut in [*cuts, len(stream)]:
        near.sendall(stream[:cut])
        stream = stream[cut:]
        frames += channel.receive()
    assert [decode_to_courier(frame) for frame in frames] == [Goodbye(reason) for reason in reasons]
    for end in (near, channel, maker, sink):
        end.close()


def test_nothing_there_is_no_frame_and_no_wait(ends: Ends) -> None:
    assert ends[0].receive() == []
    assert not ends[0].closed


def test_each_side_decodes_only_what_is_meant_for_it(ends: Ends) -> None:
    ours, theirs = ends
    order = ReadOrder(slot=1, round=2, fragment=0, step=3)
    theirs.send(order)
    [data] = ours.receive()
    assert decode_to_training(data) == order
    with pytest.raises(Exception, match="no frame is called 'ReadOrder' here"):
        decode_to_courier(data)


def test_a_frame_larger_than_the_socket_arrives_whole(ends: Ends) -> None:
    ours, theirs = ends
    tensors = tuple(TensorSpec(f"layers.{n}.weight", (n + 1, 7), "float32") for n in range(20_000))
    start = Start("learner-0", "session", "http://127.0.0.1:1", tensors)
    ours.send(start)
    assert ours.clogged
    [data] = everything(ours, theirs, 1)
    assert decode_to_courier(data) == start
    assert not ours.clogged


def test_a_full_socket_keeps_the_order_and_waits_for_nobody(ends: Ends) -> None:
    ours, theirs = ends
    for t in range(20_000):
        ours.send(StepReport(Stepped(t, (t,) * 8, (t,) * 8)))
    assert ours.clogged
    frames = [decode_to_courier(data) for data in everything(ours, theirs, 20_000)]
    assert [frame.stepped.t for frame in frames if isinstance(frame, StepReport)] == list(range(20_000))


def test_a_frame_past_the_limit_is_refused(ends: Ends) -> None:
    ours, theirs = ends
    ours.sock.sendall((FRAME_LIMIT + 1).to_bytes(4, "little"))
    with pytest.raises(PeerError, match="the limit is"):
        theirs.receive()


def test_a_descriptor_travels_with_its_frame(ends: Ends) -> None:
    ours, theirs = ends
    tensors = (TensorSpec("w", (10,), "float32"),)
    settings = Settings(overlap=0).resolved(1)
    plan = make_plan(tensors, 1)
    box = Mailbox.create(plan, settings)
    box.base(0)[:] = 4.0
    ours.send(MailboxReady(settings, Stepped(0, (), ())), box.fd)
    assert theirs.receive()
    other = Mailbox(theirs.take_descriptor(), BoxLayout.of(plan, settings), plan)
    assert other.fd != box.fd
    assert (other.base(0) == 4.0).all()
    box.close()
    other.close()


def test_a_descriptor_waits_its_turn_behind_a_full_socket(ends: Ends) -> None:
    ours, theirs = ends
    count = 0
    while not ours.clogged:
        ours.send(SlotFreed(count, incoming=True))
        count += 1
    read, write = os.pipe()
    ours.send(MailboxReady(Settings(), Stepped(0, (), ())), read)
    ours.send(Goodbye("after it"))
    frames = [decode_to_courier(data) for data in everything(ours, theirs, count + 2)]
    assert isinstance(frames[-2], MailboxReady) and frames[-1] == Goodbye("after it")
    taken = theirs.take_descriptor()
    os.write(write, b"x")
    assert os.read(taken, 1) == b"x"
    for fd in (read, write, taken):
        os.close(fd)


def test_a_frame_without_its_descriptor_is_an_error(ends: Ends) -> None:
    with pytest.raises(PeerError, match="came without one"):
        ends[0].take_descriptor()


def test_what_the_other_side_said_before_it_went_is_still_heard(ends: Ends) -> None:
    ours, theirs = ends
    theirs.send(StopOrder("the model differs", final=True, failed=True, mistake=True))
    theirs.close()
    ours.send(Goodbye("into the void"))
    ours.send(Goodbye("and again"))
    frames = ours.receive() + ours.receive()
    assert [decode_to_training(frame) for frame in frames] == [
        StopOrder("the model differs", final=True, failed=True, mistake=True)
    ]
    assert ours.closed


def test_a_peer_that_is_gone_closes_the_channel_and_sending_to_it_does_nothing(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    assert ours.receive() == []
    assert ours.closed
    ours.send(Goodbye("too late"))


def test_a_descriptor_may_be_closed_by_its_sender_at_once_also_while_the_frame_waits(ends: Ends) -> None:
    ours, other = ends
    for _ in range(2000):
        ours.send(Goodbye("x" * 1000))  # the socket is full by now
    assert ours.clogged
    near, far = os.pipe()
    ours.send(Goodbye("with it"), near)
    os.close(near)
    os.write(far, b"still there")
    assert len(everything(ours, other, 2001)) == 2001
    received = other.take_descriptor()
    assert os.read(received, 100) == b"still there"
    os.close(received)
    os.close(far)


def test_closing_leaves_no_descriptor_behind() -> None:
    gc.collect()  # shared memory of earlier tests has descriptors too
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = CourierChannel.pair()
    other = CourierChannel(theirs)
    near, far = os.pipe()
    ours.send(Goodbye("arrives, and nobody takes it"), near)
    assert len(other.receive()) == 1
    for _ in range(2000):
        ours.send(Goodbye("x" * 1000))
    ours.send(Goodbye("never leaves"), near)
    for fd in (near, far):
        os.close(fd)
    ours.close()
    other.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_every_frame_is_for_all_ranks_or_it_is_known_why_not() -> None:
    """Rank 0's alone; or of a peer's state or a replay, which several ranks have none of."""
    others = {RunProgress, DialFailed, JoinProgress, StopOrder, Capture, Await, Begin, TakeOrder, GoOrder}
    assert others == set(get_args(ToTraining)) - set(COUNTED)
    assert is_counted(StopOrder("the run ends", final=False))
    assert not is_counted(StopOrder("rank 1 is gone", final=True, failed=True))
