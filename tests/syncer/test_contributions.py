"""Contributions: what may arrive, whose buffers are used again, and how the filter judges them in a merge."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from tests.syncer.conftest import plan

from atoll.config import Outer
from atoll.numerics import sample
from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import make_codec
from atoll.numerics.deltas import read_whole
from atoll.numerics.filter import Filter
from atoll.numerics.screen import NormScreen
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Contribution, TensorSpec, buffer_name
from atoll.protocol.syncer import effects as fx
from atoll.syncer.contributions import Inbox, Merging
from atoll.syncer.parameters import Parameters

KEY = ("a", 3, 1)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(plan(), make_codec("fp32"))


def fill(inbox: Inbox, key: tuple[str, int, int], value: float) -> None:
    into = inbox.receive_body(key)
    np.frombuffer(into, dtype=np.float32)[:] = value
    inbox.mark_arrived(key, "mark")


def test_what_was_not_asked_for_is_refused(inbox: Inbox) -> None:
    with pytest.raises(PeerError, match=r"no contribution to round 3 \(attempt 1\) is waited for"):
        inbox.receive_body(KEY)


def test_the_same_body_twice_is_refused(inbox: Inbox) -> None:
    inbox.expect_body(KEY, 0)
    inbox.receive_body(KEY)
    with pytest.raises(PeerError, match="is here already"):
        inbox.receive_body(KEY)
    inbox.mark_arrived(KEY, "mark")
    with pytest.raises(PeerError, match="is here already"):
        inbox.receive_body(KEY)


def test_a_body_that_broke_off_may_come_again(inbox: Inbox) -> None:
    inbox.expect_body(KEY, 0)
    inbox.receive_body(KEY)
    inbox.mark_aborted(KEY)
    with pytest.raises(PeerError, match="did not arrive"):
        inbox.open_body(KEY, "mark")
    fill(inbox, KEY, 2.0)
    assert (read_whole(inbox.open_body(KEY, "mark")) == 2.0).all()
    assert (read_whole(inbox.get_delta(KEY)) == 2.0).all()


def test_a_body_is_as_long_as_its_fragment(inbox: Inbox) -> None:
    sizes = [part.size for part in plan().fragments]
    for fragment, size in enumerate(sizes):
        inbox.expect_body(("a", fragment, 1), fragment)
        assert inbox.receive_body(("a", fragment, 1)).nbytes == 4 * size


def test_another_digest_than_the_messages_is_refused(inbox: Inbox) -> None:
    inbox.expect_body(KEY, 0)
    fill(inbox, KEY, 1.0)
    with pytest.raises(PeerError, match="not the one its message names"):
        inbox.open_body(KEY, "another")


def test_a_discarded_body_keeps_its_buffer_until_it_is_whole(inbox: Inbox) -> None:
    inbox.expect_body(KEY, 0)
    into = inbox.receive_body(KEY)
    inbox.discard(KEY)
    other = ("b", 4, 1)
    inbox.expect_body(other, 0)
    elsewhere = inbox.receive_body(other)
    into[0] = 1
    assert np.frombuffer(into, dtype=np.uint8).ctypes.data != np.frombuffer(elsewhere, dtype=np.uint8).ctypes.data
    inbox.mark_arrived(KEY, "mark")
    with pytest.raises(PeerError, match="did not arrive"):
        inbox.open_body(KEY, "mark")


def test_a_body_that_is_read_aside_keeps_its_buffers(inbox: Inbox) -> None:
    inbox.expect_body(KEY, 0)
    fill(inbox, KEY, 1.0)
    held = inbox.hold_buffers(KEY)
    delta = inbox.open_body(KEY, "mark")
    inbox.discard(KEY)
    assert inbox.is_opened(KEY)
    inbox.expect_body(("b", 4, 1), 0)
    fill(inbox, ("b", 4, 1), 9.0)
    assert (read_whole(delta) == 1.0).all()
    inbox.release_buffers(KEY, held)
    assert not inbox.is_opened(KEY)


def test_asked_again_it_starts_anew(inbox: Inbox) -> None:
    """A probe of the same round: what came of the last one is forgotten."""
    inbox.expect_body(KEY, 0)
    fill(inbox, KEY, 1.0)
    inbox.expect_body(KEY, 0)
    fill(inbox, KEY, 2.0)
    assert (read_whole(inbox.open_body(KEY, "mark")) == 2.0).all()


def test_buffers_are_used_again(inbox: Inbox) -> None:
    """However many rounds there are, memory is what the most contributions at once needed."""
    seen: set[int] = set()
    kept = []
    for number in range(100):
        for learner in ("a", "b"):
            inbox.expect_body((learner, number, 1), number % 2)
            fill(inbox, (learner, number, 1), 1.0)
            kept.append(buffer := inbox._pending[learner, number, 1].buffer)
            assert buffer is not None
            seen.add(buffer.ctypes.data)
        for learner in ("a", "b"):
            inbox.discard((learner, number, 1))
    assert len(seen) == 2


def test_bodies_of_discarded_probes_do_not_pile_up(inbox: Inbox) -> None:
    """A learner begins to answer each probe and never ends: the fourth body has to wait for one of the first three."""
    probes = [("a", number, 0) for number in range(4)]
    for key in probes[:3]:
        inbox.expect_body(key, 0, probe=True)
        inbox.receive_body(key)
    inbox.expect_body(probes[3], 0, probe=True)
    with pytest.raises(PeerError, match="3 bodies of a that nobody waits for are still being received"):
        inbox.receive_body(probes[3])
    inbox.expect_body(("b", 3, 1), 0)
    inbox.receive_body(("b", 3, 1))
    inbox.mark_aborted(probes[0])
    inbox.receive_body(probes[3])


async def test_a_message_that_comes_twice_at_once_is_opened_once() -> None:
    """Two copies in one write are read before the task of the first has started."""
    large = plan((TensorSpec("one", (256, 256), "float32"), TensorSpec("two", (256, 256), "float32")))
    parameters, inbox, told, work = Parameters(large, Outer()), Inbox(large, make_codec("fp32")), [], []
    merging = Merging(parameters, inbox, NormScreen(large), False, told.append, work.append)
    inbox.expect_body(KEY, 0)
    fill(inbox, KEY, 1.0)
    message = Contribution(round=3, attempt=1, fragment=0, base=0, t=1, steps=1, tokens=1, digest="mark")
    merging.screen_contribution("a", message)
    merging.screen_contribution("a", message)
    [await one for one in work]
    assert len(told) == 1 and told[0].refusal is None


@pytest.mark.parametrize(
    ("place", "values", "words"),
    [
        (1, (0xFF,), "a scale that is not finite"),
        (14, (97 << 6 & 255 | 32, 97 << 6 >> 8), "a code that is reserved"),
        (18, (100 << 6 & 255, 100 << 6 >> 8), "past its end or does not ascend"),
        (16, (97 << 6 & 255, 97 << 6 >> 8), "past its end or does not ascend"),
    ],
)
def test_a_body_that_no_encoder_writes_is_refused_with_the_reason(
    place: int, values: tuple[int, ...], words: str
) -> None:
    one, codec, told = plan((TensorSpec("t", (100,), "float32"),), 1), make_codec("topk"), []
    parameters, inbox = Parameters(one, Outer()), Inbox(one, codec)
    parameters.commit_initial()
    merging = Merging(parameters, inbox, NormScreen(one), False, told.append, lambda work: work.close())
    before = parameters.committed_buffers()[0].values.tobytes()
    inbox.expect_body(KEY, 0)
    body = np.frombuffer(inbox.receive_body(KEY), np.uint8)
    codec.encode(np.arange(100, dtype=np.float32), ((1, 100),), body)  # keeps 91 to 99
    body[place : place + len(values)] = values
    inbox.mark_arrived(KEY, "mark")
    merging.screen_contribution(
        "a", Contribution(round=3, attempt=1, fragment=0, base=0, t=1, steps=1, tokens=1, digest="mark")
    )
    [delivered] = told
    assert words in (delivered.refusal or "")
    assert parameters.committed_buffers()[0].values.tobytes() == before


async def test_running_statistics_beyond_all_bounds_are_refused_where_they_would_be_merged() -> None:
    of = plan((TensorSpec(buffer_name("mean", "norm.running_var"), (4,), "float32"),), 1)
    parameters, inbox, told = Parameters(of, Outer()), Inbox(of, make_codec("fp32")), []
    parameters.commit_initial()
    screen = NormScreen(of, least=1)
    assert screen.judge(0, np.zeros(4, np.float32)) is None
    merging = Merging(parameters, inbox, screen, False, told.append, lambda work: work.close())
    for number, (base, fragment) in enumerate([(0, 0), (1, 0), (0, 5), (0, -1)]):
        key = ("a", number, 1)
        inbox.expect_body(key, 0)
        fill(inbox, key, 1e30)
        message = Contribution(
            round=number, attempt=1, fragment=fragment, base=base, t=1, steps=1, tokens=1, digest="mark"
        )
        merging.screen_contribution("a", message)
    beyond, *others = [one.refusal for one in told]
    assert beyond.startswith("the norm of its buffers is ") and beyond.endswith(", over 1,000,000 times the run's 1")
    assert others == [None, "fragment 5 is not one of the plan's 1", "fragment -1 is not one of the plan's 1"]


LARGE = (TensorSpec("one", (64, 64), "float32"), TensorSpec("two", (64, 64), "float32"))
NAMES = ("a", "b", "c", "d")


class Bench:
    """A syncer's merging part, with four learners of which the last gives the opposite of what it should."""

    def __init__(self, *, robust: bool) -> None:
        self.plan = plan(LARGE)
        self.parameters = Parameters(self.plan, Outer(robust=robust))
        self.parameters.commit_initial()
        self.inbox, self.told = Inbox(self.plan, make_codec("fp32")), []
        screen = NormScreen(self.plan)
        self.merging = Merging(self.parameters, self.inbox, screen, robust, self.told.append, lambda work: work.close())
        self._dice = np.random.default_rng(0)

    def deltas(self, fragment: int) -> list[FloatArray]:
        size = self.plan.fragments[fragment].size
        common = self._dice.standard_normal(size)
        given = [(common + self._dice.standard_normal(size)).astype(np.float32) for _ in NAMES]
        return [*given[:3], -given[3]]

    async def round(self, number: int) -> tuple[fx.Merged, list[FloatArray]]:
        fragment, parts = number % 2, []
        deltas = self.deltas(fragment)
        for name, delta in zip(NAMES, deltas, strict=True):
            key = (name, number, 1)
            self.inbox.expect_body(key, fragment)
            body = np.frombuffer(self.inbox.receive_body(key), np.uint8)
            body[:] = delta.view(np.uint8)
            self.inbox.mark_arrived(key, "mark")
            self.inbox.open_body(key, "mark")
            parts.append(fx.Part(name, 1, 1.0))
        self.merging.merge_round(fx.Merge(number, fragment, tuple(parts)))
        await asyncio.sleep(0)
        merged = self.told.pop()
        assert isinstance(merged, fx.Merged)
        self.parameters.commit_version(fragment, number // 2 + 1, number)
        return merged, deltas


async def test_with_robust_what_points_against_the_others_is_left_out_and_written_down() -> None:
    bench = Bench(robust=True)
    merged, deltas = await bench.round(0)
    against = {one.learner: one for one in merged.judged}
    assert not np.frombuffer(against["d"].factors, np.float32).any()
    assert against["d"].influence == 0 and against["a"].influence == pytest.approx(1 / 3)
    assert against["a"].factors == b"" and against["a"].agreement > 0 > against["d"].agreement
    again = Parameters(bench.plan, Outer(robust=True))
    again.commit_initial()
    factors = [np.frombuffer(one.factors or np.ones(1, np.float32).tobytes(), np.float32) for one in merged.judged]
    assert again.stage_merge(0, deltas, [1.0] * 4, factors) == merged.digest, "a replay makes the same of it"


async def test_without_robust_everything_is_merged_and_the_attacker_is_named_all_the_same() -> None:
    bench = Bench(robust=False)
    for number in range(12):
        merged, _ = await bench.round(number)
        assert all(one.factors == b"" and one.influence == 0.25 for one in merged.judged)
    assert {one.learner for one in merged.judged if one.suspect} == {"d"}


async def test_the_filter_looks_at_every_value_with_robust_and_at_a_sample_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample, "LEAST", 1024)
    for robust in (True, False):
        bench = Bench(robust=robust)
        merged, deltas = await bench.round(0)
        exact = [one.agreement for one in Filter(bench.plan).judge(0, NAMES, deltas)]
        assert ([one.agreement for one in merged.judged] == exact) is robust


async def test_rho_and_the_effective_outer_step_are_those_of_the_merged_gradient() -> None:
    bench, before = Bench(robust=False), {}
    for number in range(4):
        fragment = number % 2
        bench.deltas = lambda fragment: [np.full(4096, (1.0, -2.0)[fragment], np.float32) for _ in NAMES]
        await bench.round(number)
        before[fragment] = bench.merging.describe_outer_step(fragment)
        if number < 2:
            assert before[fragment] == {"rho": None, "outer_step": None}
    assert before[0] == before[1] == {"rho": 1.0, "outer_step": pytest.approx(0.6 * (1 + 0.6 / 0.4))}
    bench.deltas = lambda fragment: [np.full(4096, -3.0, np.float32) for _ in NAMES]
    await bench.round(4)
    turned = {"rho": -1.0, "outer_step": pytest.approx(0.6 * (1 + 0.6 / 1.6))}
    assert bench.merging.describe_outer_step(0) == turned


async def test_a_round_of_a_suspect_alone_comes_to_nothing() -> None:
    bench = Bench(robust=True)
    for number in range(12):
        await bench.round(number)
    key = ("d", 12, 1)
    bench.inbox.expect_body(key, 0)
    np.frombuffer(bench.inbox.receive_body(key), np.uint8)[:] = bench.deltas(0)[0].view(np.uint8)
    bench.inbox.mark_arrived(key, "mark")
    bench.inbox.open_body(key, "mark")
    bench.merging.merge_round(fx.Merge(12, 0, (fx.Part("d", 1, 1.0),)))
    await asyncio.sleep(0)
    (failed,) = bench.told
    assert isinstance(failed, fx.Unmergeable) and not failed.reset and "leaves out every contribution" in failed.reason
