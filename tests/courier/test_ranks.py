"""A learner of two ranks: real couriers, a leader and a follower, against a real syncer; the tests play both training
processes, which agree on what they carry out by counting frames."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from tests.courier.conftest import DTYPES, WAIT_S, Run, Stage, Training

from atoll.courier import body
from atoll.courier.rank_channel import Arrivals, PartUploaded, UploadPart
from atoll.learner.boundary import Boundary
from atoll.mailbox.channel import Goodbye, Start, ToCourier, ToTraining, is_counted
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.rank_plan import make_rank_plan
from atoll.protocol.messages import Box, Recover, TensorSpec

SHAPES: dict[str, tuple[int, ...]] = {"a": (5, 3), "b": (4,), "c": (1, 2), "d": (3,)}
FRAGMENTS = 3
HALVES = (
    (
        Box("a", (0, 0), (3, 3)),
        Box("b", (0,), (2,)),
        Box("c", (0, 0), (1, 2)),
        Box("d", (0,), (3,)),
    ),
    (
        Box("a", (3, 0), (2, 3)),
        Box("b", (2,), (2,)),
        Box("c", (0, 0), (0, 2)),
        Box("d", (0,), (3,), sends=False),
    ),
)
"""Uneven halves of rows; of "c" rank 1 holds nothing; of "d" both hold everything, and rank 0 sends it."""


def make_whole(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=noise) for name, shape in SHAPES.items()}


def cut(whole: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    return {
        box.tensor: whole[box.tensor][
            tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
        ].clone()
        for box in HALVES[rank]
        if 0 not in box.sizes
    }


class RankTraining(Training):
    """One rank's. Frames that are counted wait until all ranks have them."""

    def __init__(self, url: str, rank: int, listener: socket.socket, name: str) -> None:
        super().__init__(url, cut(make_whole(0), rank), name)
        self._listener = listener if rank == 0 else None
        self.start = msgspec.structs.replace(
            self.start,
            tensors=tuple(TensorSpec(n, shape, DTYPES[torch.float32]) for n, shape in SHAPES.items()),
            ranks=HALVES,
            rank=rank,
            leader="" if rank == 0 else f"127.0.0.1:{listener.getsockname()[1]}",
            secret="of this group",
        )
        self.counted: deque[ToTraining] = deque()
        self.history: list[str] = []

    def send(self, frame: ToCourier, descriptor: int | None = None) -> None:
        if isinstance(frame, Start) and self._listener is not None:
            with self._listener:
                super().send(frame, self._listener.fileno())
        else:
            super().send(frame, descriptor)

    def take_frame(self, frame: ToTraining) -> None:
        if is_counted(frame):
            self.counted.append(frame)
        else:
            super().take_frame(frame)

    def carry_out(self, count: int) -> None:
        for _ in range(count):
            frame = self.counted.popleft()
            self.history.append(repr(frame))
            super().take_frame(frame)

    def make_plan(self, fragments: int) -> FragmentPlan:
        return make_rank_plan(make_plan(self.start.tensors, fragments), HALVES[self.start.rank]).plan


class Group:
    """The training processes of one learner."""

    def __init__(self, members: list[Training]) -> None:
        self.members, self.leader = members, members[0]

    def listen(self) -> None:
        """What all ranks have received, all carry out."""
        for each in self.members:
            each.listen()
        ranks = [each for each in self.members if isinstance(each, RankTraining)]
        count = min((len(each.counted) for each in ranks), default=0)
        for each in ranks:
            each.carry_out(count)

    async def until(self, true: Callable[[], bool], *, idle: bool = True) -> None:
        async with asyncio.timeout(WAIT_S):
            while not true():
                self.listen()
                for each in self.members:
                    if idle and each.boundary is not None:
                        each.boundary.serve_orders()
                await asyncio.sleep(0.002)

    async def join(self) -> None:
        for each in self.members:
            each.hire()
        await self.until(lambda: all(each.boundary is not None and each.boundary.recovered for each in self.members))

    async def step(self, tokens: int = 10) -> None:
        """The same change of the whole model, whoever holds which part; then the boundary, as a learner has it."""
        t, change = self.leader.t + 1, make_whole(100 + self.leader.t)
        for each in self.members:
            own = cut(change, each.start.rank) if isinstance(each, RankTraining) else change
            for name, parameter in each.parameters.items():
                parameter += 0.1 * own[name]
            each.t, each.tokens = t, each.tokens + tokens
            boundary_of(each).count_step(t, tokens, each.tokens)
        self.listen()
        for each in self.members:
            each.pass_boundary()
        await self.until(lambda: not self.wait_for_round(t), idle=False)

    def wait_for_round(self, t: int) -> bool:
        """Synchronous: adopt what was waited for; whether there is more of that."""
        for each in self.members:
            boundary_of(each).adopt_ready(t)
            boundary_of(each).settle()
        return any(boundary_of(each).is_held(t) for each in self.members)

    async def train(self, until: int) -> None:
        """Asynchronous, at an easy pace, until every fragment has at least that version."""
        async with asyncio.timeout(WAIT_S):
            while min(min(each.versions()) for each in self.members) < until:
                await self.step()
                await self.until(lambda: self.leader.courier._machine.t >= self.leader.t, idle=False)  # type: ignore[union-attr]
                await asyncio.sleep(0.01)


def boundary_of(training: Training) -> Boundary:
    assert training.boundary is not None
    return training.boundary


def make_ranks(stage: Stage, run: Run, name: str = "learner-0") -> Group:
    listener = socket.create_server(("127.0.0.1", 0))
    ranks: list[Training] = [RankTraining(run.url, rank, listener, name) for rank in range(len(HALVES))]
    for each in ranks:
        stage.close_after(each)
    return Group(ranks)


def make_plain(stage: Stage, run: Run, name: str = "learner-0") -> Group:
    return Group([stage.training(run, make_whole(0), name)])


def put_together(group: Group) -> dict[str, np.ndarray]:
    """The whole model, of what the ranks hold."""
    whole = {name: np.full(shape, np.nan, dtype=np.float32) for name, shape in SHAPES.items()}
    for each in group.members:
        for box in HALVES[each.start.rank]:
            if box.tensor in each.parameters:
                part = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
                whole[box.tensor][part] = each.parameters[box.tensor].numpy()
    return whole


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


SYNCHRONOUS = {"synchronous": True, "fragments": FRAGMENTS, "sync_every": FRAGMENTS}


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
async def test_two_ranks_give_the_bits_of_a_plain_learner(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Three rounds of every fragment. Large: all that is done in threads."""
    if not small:
        monkeypatch.setattr(body, "is_small", lambda part: False)
    outcomes = []
    for make in (make_plain, make_ranks):
        run = await stage.run(lr=0.7, **SYNCHRONOUS)
        group = make(stage, run)
        await group.join()
        run.watch_deltas()
        while min(group.leader.versions()) < 3:
            await group.step()
        outcomes.append((run, group))
    (plain_run, plain), (run, ranks) = outcomes
    assert [fragment for fragment, _ in run.deltas] == [fragment for fragment, _ in plain_run.deltas]
    assert all(a.tobytes() == b.tobytes() for (_, a), (_, b) in zip(run.deltas, plain_run.deltas, strict=True))
    assert len(run.deltas) == 3 * FRAGMENTS
    assert same(run.theta(), plain_run.theta()) and not same(run.theta(), run_start())
    whole = {name: parameter.numpy() for name, parameter in plain.leader.parameters.items()}
    for ranks_have in (put_together(ranks), put_together(Group(ranks.members[::-1]))):
        assert same(ranks_have, whole), "also of what both hold"
    first, second = (each.history for each in ranks.members if isinstance(each, RankTraining))
    assert first == second and first
    assert not run.said("refused") and not run.said("warning")


def run_start() -> dict[str, np.ndarray]:
    return {name: values.numpy() for name, values in make_whole(0).items()}


@pytest.mark.parametrize("rule", ["carry", "overwrite"])
async def test_ranks_train_on_while_rounds_are_under_way(stage: Stage, rule: str) -> None:
    """Asynchronous, with a plain learner in the same run; bf16 bodies. Both ranks hold what the run has."""
    run = await stage.run(fragments=FRAGMENTS, sync_every=FRAGMENTS, overlap=1, codec="bf16", adopt=rule, learners=2)
    plain, ranks = make_plain(stage, run, "learner-1"), make_ranks(stage, run)
    both = Group([*ranks.members, *plain.members])
    await both.join()
    await both.train(until=4)
    first, second = (each.history for each in ranks.members if isinstance(each, RankTraining))
    assert first == second
    assert {"ReadOrder", "AdoptOrder", "Welcomed"} <= {one.partition("(")[0] for one in first}
    members = {member["learner"] for event in run.said("round") for member in event["members"]}
    assert members == {"learner-0", "learner-1"}
    assert not run.said("refused")


async def test_an_inner_optimizer_that_is_told_to_start_over_does_so_in_all_ranks(stage: Stage) -> None:
    """Nobody's state is taken: no peer has that of these ranks."""
    run = await stage.run(**SYNCHRONOUS)
    ranks = make_ranks(stage, run)
    await ranks.join()
    while min(ranks.leader.versions()) < 1:
        await ranks.step()
    machine, epoch = ranks.leader.courier._machine, boundary_of(ranks.leader).epoch
    assert machine is not None
    ranks.leader.courier._message(Recover(incarnation=machine.incarnation + 1, reason="a test", term=machine.term))
    await ranks.until(lambda: all(boundary_of(each).epoch == epoch + 1 for each in ranks.members))
    await ranks.until(lambda: all(boundary_of(each).recovered for each in ranks.members))
    first, second = (each.history for each in ranks.members if isinstance(each, RankTraining))
    assert first == second and f"ForgetOrder(epoch={epoch + 1}, reset=True)" in first
    assert all(each.box.count("incarnation") == machine.incarnation for each in ranks.members)  # type: ignore[union-attr]
    assert [each.box.base_version.tolist() for each in ranks.members] == 2 * [machine.versions]  # type: ignore[union-attr]


async def test_a_rank_whose_training_process_dies_ends_the_learner(stage: Stage) -> None:
    run = await stage.run(**SYNCHRONOUS)
    ranks = make_ranks(stage, run)
    await ranks.join()
    ranks.members[1].hang_up()
    await ranks.leader.until(lambda: bool(ranks.leader.stops))
    [stop] = ranks.leader.stops
    assert stop.reason == "rank 1 of learner-0 failed: its training process died"
    assert stop.final and stop.failed and not stop.mistake
    assert (await run.until_said("left"))["learner"] == "learner-0"


async def test_a_courier_that_is_gone_ends_the_learner_in_every_rank(stage: Stage) -> None:
    for gone, left in ((0, 1), (1, 0)):
        run = await stage.run(**SYNCHRONOUS)
        ranks = make_ranks(stage, run)
        await ranks.join()
        courier = ranks.members[gone].courier
        for channel in [courier._follower._leader] if courier._follower else courier._ranks._channels.values():  # type: ignore[union-attr]
            channel._channel.sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
        other = ranks.members[left]
        await other.until(lambda other=other: bool(other.stops))  # type: ignore[misc]
        [stop] = other.stops
        assert stop.reason == f"rank {gone} of learner-0 is lost: its courier is gone" and stop.failed


async def test_a_rank_that_does_not_come_is_named(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = Arrivals.wait_for_all
    monkeypatch.setattr(Arrivals, "wait_for_all", lambda self, take: wait(self, take, 0.1))
    run = await stage.run(**SYNCHRONOUS)
    leader, other = make_ranks(stage, run).members
    leader.hire()
    await leader.until(lambda: bool(leader.stops))
    assert [stop.reason for stop in leader.stops] == ["rank 1 of learner-0 did not come within 0.1 s"]
    assert not run.said("joined")
    other.hire()
    await other.until(lambda: bool(other.stops))
    assert other.stops[0].reason.startswith("rank 1 does not reach rank 0 at 127.0.0.1:")


async def test_ranks_that_leave_together_end_nothing(stage: Stage) -> None:
    """Each says goodbye on its own, one before the other."""
    for order in ((0, 1), (1, 0)):
        run = await stage.run(**SYNCHRONOUS)
        ranks = make_ranks(stage, run)
        await ranks.join()
        for rank in order:
            ranks.members[rank].send(Goodbye("its loop has ended"))
            async with asyncio.timeout(WAIT_S):
                await ranks.members[rank].task
        assert (await run.until_said("left"))["reason"] == "its loop has ended"
        for each in ranks.members:
            each.listen()
            assert not each.stops


async def test_the_end_of_a_run_is_the_end_in_every_rank(stage: Stage) -> None:
    run = await stage.run(**SYNCHRONOUS, steps=6)
    ranks = make_ranks(stage, run)
    await ranks.join()
    while not ranks.leader.stops:
        await ranks.step()
    for each in ranks.members:
        each.stop()
    await ranks.until(lambda: all(each.stops and each.stops[-1].final for each in ranks.members))
    assert not any(stop.failed for each in ranks.members for stop in each.stops)
    assert same(put_together(ranks), run.theta())
    for each in ranks.members:
        each.hang_up()
        async with asyncio.timeout(WAIT_S):
            await each.task


async def test_a_syncer_that_is_replaced_by_one_of_other_rules_ends_the_learner(stage: Stage) -> None:
    run = await stage.run(**SYNCHRONOUS)
    ranks = make_ranks(stage, run)
    await ranks.join()
    port = run.service.server.port
    await run.stop()
    await stage.run(port=port, **{**SYNCHRONOUS, "codec": "bf16"})
    await ranks.until(lambda: bool(ranks.leader.stops and ranks.members[1].stops))
    reason = "the run has another plan or codec than before: the learner starts over"
    assert [each.stops[0].reason for each in ranks.members] == [reason, reason]


async def test_a_copy_on_a_base_that_one_rank_has_replaced_is_not_sent(stage: Stage) -> None:
    """Rank 1 may be ahead of rank 0 between two boundaries."""
    run = await stage.run(**SYNCHRONOUS)
    ranks = make_ranks(stage, run)
    await ranks.join()
    follower = ranks.members[1].courier._follower
    assert follower is not None and follower._bodies is not None and follower._box is not None
    said: list[object] = []
    follower._bodies._tell = said.append
    follower._box.base_version[0] = 4
    follower._bodies.upload_part(UploadPart(7, 0, 0, fragment=0, slot=0, t=1, base=3))
    assert said == [PartUploaded(7, reason=body.BASE_REPLACED)]
