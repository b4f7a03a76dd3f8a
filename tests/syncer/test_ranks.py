"""Learners of several ranks, as a syncer sees them: their bodies become whole fragments, and nothing else changes."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from tests.syncer.conftest import WAIT_S, FakeLearner, Stage, plan

from atoll.digests import combine_digests, compute_digest
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.handlers import ServedFragment
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.deltas import read_whole
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.rank_plan import RankPlan, make_rank_plan
from atoll.protocol.errors import PeerError, Unreachable
from atoll.protocol.messages import (
    Announce,
    Box,
    Contribution,
    Pull,
    RankBoxes,
    Refused,
    Started,
    TensorSpec,
    Welcome,
)
from atoll.protocol.settings import Settings
from atoll.syncer import ranks as ranks_module
from atoll.syncer.contributions import Inbox
from atoll.syncer.model import PIECE, memory_bound
from atoll.syncer.ranks import MOST_PIECES, PARTS, LearnerRanks

KEY = ("a", 3, 1)
MODEL = (
    TensorSpec("embed", (7, 6), "float32", embedding=True),
    TensorSpec("norm", (6,), "float32"),
    TensorSpec("out", (6, 5), "float32"),
)


def box(name: str, *sides: tuple[int, int], sends: bool = True) -> Box:
    return Box(name, tuple(a for a, _ in sides), tuple(b - a for a, b in sides), sends)


TWO: tuple[RankBoxes, ...] = (
    (box("embed", (0, 4), (0, 6)), box("norm", (0, 6)), box("out", (0, 6), (0, 2))),
    (box("embed", (4, 7), (0, 6)), box("norm", (0, 6), sends=False), box("out", (0, 6), (2, 5))),
)
"""Rows of one tensor, columns of another, copies of the third."""
THREE: tuple[RankBoxes, ...] = (
    (box("embed", (0, 3), (0, 6)), box("norm", (0, 2)), box("out", (0, 2), (0, 5))),
    (box("embed", (3, 6), (0, 6)), box("norm", (2, 6)), box("out", (2, 6), (0, 5))),
    (box("embed", (6, 7), (0, 6)), box("norm", (6, 6)), box("out", (6, 6), (0, 5))),
)
"""Uneven, and empty."""


def model_plan(fragments: int = 3) -> FragmentPlan:
    return make_plan(MODEL, fragments, "balanced")


def rank_plans(ranks: tuple[RankBoxes, ...], fragments: int = 3) -> tuple[RankPlan, ...]:
    return tuple(make_rank_plan(model_plan(fragments), boxes) for boxes in ranks)


def encoded(codec: str, of: RankPlan, fragment: int, whole: FloatArray) -> ByteArray:
    """What a rank's courier sends of a whole fragment's delta."""
    local = np.empty(of.plan.fragments[fragment].size, np.float32)
    of.take(fragment, whole, local)
    part, by = of.sent(fragment), make_codec(codec)
    body = np.empty(body_nbytes(by, part), np.uint8)
    values = local[: part.size]
    encode_contribution(by, part, Delta(values, np.zeros_like(values)), body)
    return body


def some_values(size: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


# ---- the inbox ------------------------------------------------------------------------------------------------------


def put(inbox: Inbox, key: tuple[str, int, int], rank: int, body: ByteArray) -> str:
    into = inbox.receive_body(key, rank=rank)
    assert into.nbytes == body.nbytes
    into[:] = body.data
    mark = compute_digest(body.data)
    inbox.mark_arrived(key, mark, rank)
    return mark


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("ranks", [TWO, THREE], ids=["two ranks", "three ranks"])
def test_bodies_of_all_ranks_are_one_delta(codec: str, ranks: tuple[RankBoxes, ...]) -> None:
    plans, inbox = rank_plans(ranks), Inbox(model_plan(), make_codec(codec))
    for fragment in model_plan().fragments:
        key, whole = ("a", fragment.index, 1), some_values(fragment.size)
        inbox.expect_body(key, fragment.index, plans=plans)
        senders = [rank for rank, one in enumerate(plans) if one.sent(fragment.index).size]
        bodies = {rank: encoded(codec, plans[rank], fragment.index, whole) for rank in senders}
        marks = {rank: put(inbox, key, rank, bodies[rank]) for rank in reversed(senders)}
        delta = read_whole(inbox.open_body(key, combine_digests([marks[rank] for rank in senders])))
        expected = np.full(fragment.size, np.nan, np.float32)
        for rank in senders:
            part = plans[rank].sent(fragment.index)
            values = np.empty(part.size, np.float32)
            decode_contribution(make_codec(codec), part, bodies[rank], values)
            plans[rank].scatter(fragment.index, values, expected)
        assert delta.tobytes() == expected.tobytes() == read_whole(inbox.get_delta(key)).tobytes()
        if codec in ("fp32", "bf16"):
            alone = make_rank_plan(model_plan(), tuple(_whole(tensor) for tensor in MODEL))
            body, one = encoded(codec, alone, fragment.index, whole), np.empty(fragment.size, np.float32)
            decode_contribution(make_codec(codec), fragment, body, one)
            assert delta.tobytes() == one.tobytes()
        inbox.discard(key)


def _whole(tensor: TensorSpec) -> Box:
    return Box(tensor.name, (0,) * len(tensor.shape), tensor.shape)


def test_it_has_arrived_when_the_last_rank_has() -> None:
    plans, inbox = rank_plans(TWO), Inbox(model_plan(), make_codec("fp32"))
    fragment = next(part for part in model_plan().fragments if all(one.sent(part.index).size for one in plans))
    whole = some_values(fragment.size)
    inbox.expect_body(KEY, fragment.index, plans=plans)
    bodies = [encoded("fp32", one, fragment.index, whole) for one in plans]
    first = put(inbox, KEY, 1, bodies[1])
    with pytest.raises(PeerError, match="the bodies of its ranks 0 did not arrive"):
        inbox.open_body(KEY, first)
    inbox.receive_body(KEY, rank=0)
    inbox.mark_aborted(KEY, rank=0)
    marks = [put(inbox, KEY, 0, bodies[0]), first]
    with pytest.raises(PeerError, match="is not the one its message names"):
        inbox.open_body(KEY, combine_digests(marks[::-1]))
    assert read_whole(inbox.open_body(KEY, combine_digests(marks))).tobytes() == whole.tobytes()


def test_a_body_of_a_rank_that_does_not_exist_or_sends_nothing_is_refused() -> None:
    plans, inbox = rank_plans(THREE), Inbox(model_plan(), make_codec("fp32"))
    idle = [part.index for part in model_plan().fragments if not plans[2].sent(part.index).size]
    inbox.expect_body(KEY, idle[0], plans=plans)
    with pytest.raises(PeerError, match="a has no rank 3: it has declared 3"):
        inbox.receive_body(KEY, rank=3)
    with pytest.raises(PeerError, match=f"rank 2 of a sends nothing of fragment {idle[0]}"):
        inbox.receive_body(KEY, rank=2)
    inbox.expect_body(("b", 3, 1), 0)
    with pytest.raises(PeerError, match="b is a plain learner: there is no part of a rank 1"):
        inbox.receive_body(("b", 3, 1), rank=1)


def test_a_broken_part_is_refused_by_its_rank() -> None:
    plans, inbox = rank_plans(TWO, fragments=1), Inbox(model_plan(1), make_codec("int8"))
    inbox.expect_body(KEY, 0, plans=plans)
    bodies = [encoded("int8", one, 0, some_values(model_plan(1).largest)) for one in plans]
    bodies[1][:3] = 255  # a scale that is no number
    marks = [put(inbox, KEY, rank, body) for rank, body in enumerate(bodies)]
    with pytest.raises(PeerError, match=r"rank 1: .*scale"):
        inbox.open_body(KEY, combine_digests(marks))


def test_asked_again_every_rank_may_send_again() -> None:
    plans, inbox = (
        tuple(make_rank_plan(model_plan(1), boxes) for boxes in TWO),
        Inbox(model_plan(1), make_codec("fp32")),
    )
    inbox.expect_body(KEY, 0, plans=plans)
    bodies = [encoded("fp32", one, 0, some_values(model_plan(1).largest)) for one in plans]
    put(inbox, KEY, 0, bodies[0])
    inbox.receive_body(KEY, rank=1)
    inbox.discard(KEY)
    with pytest.raises(PeerError, match="here already"):
        inbox.receive_body(KEY, rank=0)
    inbox.expect_body(KEY, 0, plans=plans)
    mark = put(inbox, KEY, 0, bodies[0])
    with pytest.raises(PeerError, match="here already"):
        inbox.receive_body(KEY, rank=1)  # the one from before is on its way still
    inbox.mark_aborted(KEY, rank=1)
    marks = [mark, put(inbox, KEY, 1, bodies[1])]
    assert inbox.open_body(KEY, combine_digests(marks)).fragment.size == model_plan(1).largest


def test_no_rank_begins_to_send_what_was_discarded() -> None:
    plans, inbox = (
        tuple(make_rank_plan(model_plan(1), boxes) for boxes in TWO),
        Inbox(model_plan(1), make_codec("fp32")),
    )
    inbox.expect_body(KEY, 0, plans=plans)
    inbox.receive_body(KEY, rank=0)
    inbox.discard(KEY)
    with pytest.raises(PeerError, match="is waited for any more"):
        inbox.receive_body(KEY, rank=1)
    inbox.mark_aborted(KEY, rank=0)
    with pytest.raises(PeerError, match="no contribution to round 3"):
        inbox.receive_body(KEY, rank=1)


def test_one_digest_of_one_body_is_its_own() -> None:
    assert combine_digests(["a"]) == "a"
    assert len({combine_digests(["a", "b"]), combine_digests(["b", "a"]), "ab", "a", "b"}) == 5


# ---- parts of versions ----------------------------------------------------------------------------------------------


def served(values: FloatArray, released: list[str]) -> ServedFragment:
    return ServedFragment(4, 9, "whole", values.view(np.uint8).data, lambda: released.append("whole"))


@pytest.mark.parametrize("small", [True, False])
async def test_a_rank_gets_its_part_of_the_newest_version(small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(ranks_module, "SMALL_BYTES", 0)
    of = LearnerRanks(model_plan())
    of.add_learner("a", TWO)
    for fragment in model_plan().fragments:
        values, released = some_values(fragment.size), list[str]()
        for rank, one in enumerate(rank_plans(TWO)):
            expected = np.empty(one.plan.fragments[fragment.index].size, np.float32)
            one.take(fragment.index, values, expected)
            if not expected.size:
                continue
            part = await of.serve_part("a", rank, fragment.index, partial(served, values, released))
            assert (part.version, part.round, part.steps) == (4, 9, ())
            assert bytes(part.data) == expected.tobytes()
            if part.digest != "whole":  # where it holds all of it, it reads the version itself
                assert part.digest == compute_digest(part.data)
                assert released[-1] == "whole"
            part.release()


async def test_copies_for_one_learner_wait_for_each_other() -> None:
    of = LearnerRanks(model_plan(1))
    of.add_learner("a", TWO)
    values, released, made = some_values(model_plan(1).largest), list[str](), list[int]()

    def serve() -> ServedFragment:
        made.append(1)
        return served(values, released)

    held = [await of.serve_part("a", 0, 0, serve) for _ in range(PARTS)]
    waiting = asyncio.create_task(of.serve_part("a", 1, 0, serve))
    await asyncio.sleep(0)
    assert len(made) == PARTS and not waiting.done()
    held[0].release()
    assert (await waiting).version == 4


async def test_who_asks_for_what_there_is_not_is_told() -> None:
    of = LearnerRanks(model_plan())
    of.add_learner("a", THREE)

    def serve() -> ServedFragment:
        raise AssertionError("nothing is to be served")

    idle = [part.index for part in model_plan().fragments if not rank_plans(THREE)[2].plan.fragments[part.index].size]
    for learner, rank, fragment, says in (
        ("a", 3, 0, "a has no rank 3: it has declared 3"),
        ("b", 0, 0, "b has no rank 0: it has declared 0"),
        ("a", 2, idle[0], "rank 2 of a holds nothing of fragment"),
        ("a", 0, 99, "rank 0 of a holds nothing of fragment 99"),
    ):
        with pytest.raises(PeerError, match=says):
            await of.serve_part(learner, rank, fragment, serve)
    of.remove_learner("a")
    with pytest.raises(PeerError, match="it has declared 0"):
        await of.serve_part("a", 0, 0, serve)


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_plans_of_ranks_fit_into_their_share_of_the_ceiling() -> None:
    tensors = tuple(TensorSpec(f"blocks.{n}.attention.weight", (512, 512), "float32") for n in range(50))
    large, count = make_plan(tensors, 24), 16
    ranks = tuple(
        tuple(box(one.name, (32 * rank, 32 * rank + 32), (0, 512)) for one in tensors) for rank in range(count)
    )
    of = LearnerRanks(large)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    of.add_learner("a", ranks)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    pieces = sum(len(part.pieces) for one in of.plans_of("a") for part in one.plan.fragments)
    assert taken < PIECE * pieces, f"{taken / pieces:.0f} bytes a piece"


def test_the_ceiling_counts_what_learners_of_ranks_take_besides() -> None:
    settings = Settings(fragments=3, sync_every=3, codec="int4")
    most = memory_bound(model_plan(), settings, slots=1)
    assert most.total_bytes(4, of_ranks=2) - most.total_bytes(4) == 2 * most.ranks > MOST_PIECES * PIECE
    bf16 = memory_bound(model_plan(), Settings(fragments=3, sync_every=3, codec="bf16"), slots=1)
    assert most.ranks > bf16.ranks, "blocks of few values take more bytes than long ones"


def test_too_many_pieces_are_refused_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "MOST_PIECES", 8)
    of = LearnerRanks(make_plan(MODEL, 1, "balanced"))
    of.add_learner("a", TWO)
    with pytest.raises(PeerError, match="the ranks of a have 9 pieces of tensors: 8 are the most"):
        of.add_learner("a", THREE)
    assert len(of.plans_of("a")) == 2


# ---- a run ----------------------------------------------------------------------------------------------------------


class RankedLearner(FakeLearner):
    """One with a courier for every rank: that of rank 0 has the control channel, the others only bodies. Without ranks
    it is a plain learner that says the same by one body."""

    def __init__(self, url: str, name: str, ranks: tuple[RankBoxes, ...], codec: str = "fp32") -> None:
        super().__init__(url, name, MODEL, ranks=ranks)
        self.codec = make_codec(codec)
        self.plans = tuple(make_rank_plan(self.plan, boxes) for boxes in ranks or [tuple(map(_whole, MODEL))])
        self.followers = [BodyConnection(url) for _ in ranks[1:]]

    @property
    def links(self) -> list[BodyConnection]:
        return [self.link, *self.followers]

    async def close(self) -> None:
        for one in self.followers:
            await one.close()

    def senders(self, fragment: int) -> Iterator[tuple[int, BodyConnection]]:
        return ((rank, link) for rank, link in enumerate(self.links) if self.plans[rank].sent(fragment).size)

    async def upload_values(self, values: list[FloatArray]) -> None:
        await self.until(Welcome, lambda welcome: welcome.upload)
        for part in self.plan.fragments:
            for rank, link in self.senders(part.index):
                data = encoded("fp32", self.plans[rank], part.index, values[part.index]).data
                mark = compute_digest(data)
                await link.put_initial(self.name, self.session, part.index, data, mark, WAIT_S, rank=rank)
        await self.until(Started)

    async def send_delta(self, pull: Pull, delta: FloatArray) -> str:
        marks = []
        for rank, link in self.senders(pull.fragment):
            body = encoded(self.codec.name, self.plans[rank], pull.fragment, delta)
            marks.append(compute_digest(body.data))
            await link.put_contribution(
                self.name, self.session, pull.round, pull.attempt, body.data, marks[-1], WAIT_S, rank=rank
            )
        return combine_digests(marks)

    async def fetch(self, rank: int, fragment: int) -> FloatArray:
        values = np.empty(self.plans[rank].plan.fragments[fragment].size, np.float32)
        data = values.view(np.uint8).data
        _, _, mark = await self.links[rank].get_fragment(fragment, data, WAIT_S, self.name, rank)
        assert mark == compute_digest(data)
        return values


async def contribute(learner: RankedLearner, pull: Pull, delta: FloatArray) -> None:
    mark, welcome = await learner.send_delta(pull, delta), await learner.until(Welcome)
    steps = learner.t - learner.since[pull.fragment]
    said = Contribution(
        round=pull.round,
        attempt=pull.attempt,
        fragment=pull.fragment,
        base=learner.versions[pull.fragment],
        t=learner.t,
        steps=steps,
        tokens=8 * steps,
        total=8 * learner.t,
        digest=mark,
        run=welcome.run,
        learner=learner.name,
        incarnation=1,
        term=welcome.term,
    )
    assert learner.link.send(said)


async def train(stage: Stage, learners: list[RankedLearner], rounds: int) -> list[bytes]:
    """The values of every fragment after each round. Learners give seeded deltas, the same in every run."""
    values = [some_values(part.size, seed=part.index) for part in model_plan(2).fragments]
    await learners[0].upload_values(values)
    for learner in learners:
        await learner.until(Started)
        learner.versions = [0, 0]
        learner.report()
    seen = []
    for number in range(rounds):
        for _ in range(2):
            for learner in learners:
                learner.step()
        pulls = [await one.until(Pull, lambda pull, number=number: pull.round == number) for one in learners]
        for at, (learner, pull) in enumerate(zip(learners, pulls, strict=True)):
            size = model_plan(2).fragments[pull.fragment].size
            await contribute(learner, pull, some_values(size, seed=100 * number + at))
        for learner in learners:
            await learner.until(Announce, lambda announce, number=number: announce.round == number)
        seen += [bytes(stage.service.fragment(index, -1).data) for index in range(2)]
    return seen


RUN = {"learners": 2, "sync_every": 2, "overlap": 1, "quorum": 2, "quorum_policy": "minimum"}


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
async def test_theta_is_that_of_plain_learners_to_the_bit(tmp_path_factory: pytest.TempPathFactory, codec: str) -> None:
    """A learner of two ranks that also gives the first parameters, and a plain one; one of three, and a plain one."""
    found = []
    for ranks in ((), TWO, THREE):
        stage = Stage(tmp_path_factory.mktemp("run"))
        async with asyncio.TaskGroup() as tasks:
            stage._tasks = tasks
            await stage.open(**{**RUN, "codec": codec})
            learners = [RankedLearner(stage.url, "a", ranks, codec), RankedLearner(stage.url, "b", (), codec)]
            for learner in learners:
                stage.connect(learner)
                await learner.until(Welcome)
            found.append(await train(stage, learners, rounds=4))
            for rank in range(len(ranks)):
                await check_parts(stage, learners[0], rank)
            await stage.end()
            await learners[0].close()
        stage.run_store.close()
        assert not stage.events("refused", "alarm")
    assert found[0] == found[1] == found[2] and len(set(found[0])) > 4


async def check_parts(stage: Stage, learner: RankedLearner, rank: int) -> None:
    for fragment in range(2):
        held = learner.plans[rank].plan.fragments[fragment].size
        if not held:
            continue
        expected = np.empty(held, np.float32)
        whole = stage.service.fragment(fragment, -1)
        learner.plans[rank].take(fragment, np.frombuffer(whole.data, np.float32), expected)
        whole.release()
        assert (await learner.fetch(rank, fragment)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({0: box("embed", (0, 3), (0, 6))}, "of the 42 values of 'embed' 36 are sent, by ranks 0 to 1: the others"),
        ({0: box("embed", (0, 5), (0, 6))}, "rank 0 and rank 1 both send a part of 'embed'"),
        ({2: box("out", (0, 6), (0, 6))}, "rank 0's box of 'out', [0:6, 0:6], is outside of the tensor"),
        ({1: Box("other", (0,), (6,))}, "rank 0 has a box of 'other', which is no tensor of the model"),
    ],
)
async def test_boxes_that_do_not_fit_are_refused_and_the_run_begins_with_the_next(
    stage: Stage, change: dict[int, Box], says: str
) -> None:
    await stage.open(**RUN)
    wrong = tuple(change.get(at, one) for at, one in enumerate(TWO[0]))
    learner = FakeLearner(stage.url, "a", MODEL, ranks=(wrong, TWO[1]))
    stage.connect(learner)
    refused = await learner.until(Refused)
    assert refused.final and says in refused.reason
    good = FakeLearner(stage.url, "b", MODEL, ranks=TWO)
    stage.connect(good)
    assert (await good.until(Welcome)).upload


async def test_shared_moments_are_for_learners_of_one_rank(stage: Stage) -> None:
    await stage.open(**{**RUN, "share": "moments"})
    learner = RankedLearner(stage.url, "a", TWO)
    stage.connect(learner)
    refused = await learner.until(Refused)
    assert refused.final and 'share = "moments" is for learners of one rank' in refused.reason


async def test_what_ranks_send_wrongly_is_refused_and_costs_nobody_anything(stage: Stage) -> None:
    await stage.open(**{**RUN, "learners": 1, "quorum": 1})
    learner = RankedLearner(stage.url, "a", TWO)
    stage.connect(learner)
    follower = learner.followers[0]
    await learner.until(Welcome)
    sizes = [4 * one.sent(0).size for one in learner.plans]
    assert sizes[0] != sizes[1] and all(sizes)
    data = memoryview(bytes(sizes[0]))
    given = (0, data, compute_digest(data), WAIT_S)
    with pytest.raises(PeerError, match=f"this fragment needs exactly {sizes[1]} bytes"):
        await follower.put_initial("a", learner.session, *given, rank=1)
    with pytest.raises(PeerError, match="a has no rank 2: it has declared 2"):
        await follower.put_initial("a", learner.session, *given, rank=2)
    with pytest.raises(PeerError, match="no open control channel under this session"):
        await follower.put_initial("a", "another", *given)
    await learner.upload_values([some_values(part.size, seed=part.index) for part in learner.plan.fragments])
    learner.versions = [0, 0]
    for _ in range(3):
        learner.step()
    pull = await learner.until(Pull)
    size = body_nbytes(learner.codec, learner.plans[1].sent(pull.fragment))
    body = memoryview(bytes(size))
    sent = (pull.round, pull.attempt, body, compute_digest(body), WAIT_S)
    with pytest.raises(PeerError, match="a has no rank 7"):
        await follower.put_contribution("a", learner.session, *sent, rank=7)
    with pytest.raises(PeerError, match="this fragment needs exactly"):
        await follower.put_contribution("a", learner.session, *sent, rank=0)
    with pytest.raises(PeerError, match="a has no rank 2"):
        await follower.get_fragment(0, memoryview(bytearray(8)), WAIT_S, "a", 2)
    with pytest.raises(Unreachable, match="nobody has no open control channel: try again later"):
        await follower.get_fragment(0, memoryview(bytearray(8)), WAIT_S, "nobody", 0)
    await contribute(learner, pull, some_values(learner.plan.fragments[pull.fragment].size))
    await learner.until(Announce)
    await learner.close()
    assert not stage.events("refused", "alarm")


async def test_a_contribution_of_which_a_rank_is_missing_is_refused(stage: Stage) -> None:
    await stage.open(**{**RUN, "learners": 1, "quorum": 1})
    learner = RankedLearner(stage.url, "a", TWO)
    stage.connect(learner)
    await learner.until(Welcome)
    await learner.upload_values([some_values(part.size) for part in learner.plan.fragments])
    learner.versions = [0, 0]
    for _ in range(3):
        learner.step()
    pull = await learner.until(Pull)
    assert len(list(learner.senders(pull.fragment))) == 2
    whole = learner.plans
    learner.plans = (whole[0], make_rank_plan(learner.plan, ()))  # its second rank sends nothing
    await contribute(learner, pull, some_values(learner.plan.fragments[pull.fragment].size))
    learner.plans = whole
    refused = await stage.until("refused")
    assert "the bodies of its ranks 1 did not arrive" in refused["text"]
    await learner.close()


def test_a_plain_models_tensors_have_no_ranks() -> None:
    of = LearnerRanks(plan())
    of.add_learner("a", ())
    assert of.plans_of("a") == () and of.find_sender("a", 0) is None
    with pytest.raises(PeerError, match="a has no rank 1: it has declared 0"):
        of.find_sender("a", 1)
