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
from atoll.learner.boundary import Boundary
from atoll.mailbox.channel import Start, ToCourier, ToTraining, is_counted
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.rank_plan import make_rank_plan
from atoll.protocol.boxes import Box
from atoll.protocol.messages import TensorSpec

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
