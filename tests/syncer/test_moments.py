"""Shared moments in the syncer: behind contributions, averaged with the version made of them, and in memory alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
from tests.numerics.moment_bodies import INT8, pack
from tests.syncer.conftest import WAIT_S, FakeLearner, Stage, plan
from tests.syncer.test_service import next_pull

from atoll.config import Outer
from atoll.digests import compute_digest
from atoll.numerics.arrays import ByteArray
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec
from atoll.numerics.deltas import read_whole
from atoll.numerics.fragments import Fragment
from atoll.numerics.moments import NAMES, average_moments, list_moments, most_bytes, read_moments
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Announce, Pull
from atoll.protocol.settings import Settings
from atoll.syncer.contributions import Inbox
from atoll.syncer.model import contribution_bytes, memory_bound
from atoll.syncer.parameters import Parameters

ADAM, NONE = NAMES.index("adam"), NAMES.index("none")
KEY = ("a", 3, 1)


def moments_of(part: Fragment, value: float, forms: Sequence[int] | None = None) -> ByteArray:
    """Every mean is the value, every square its square."""
    forms = [ADAM] * len(part.pieces) if forms is None else forms
    values = {}
    for moment in list_moments(INT8, part, forms):
        size = part.pieces[moment.piece].size
        values[moment.piece, moment.slot] = np.full(size, value**2 if moment.squared else value, np.float32)
    return pack(part, forms, values)


def contribution(part: Fragment, delta: float, moments: ByteArray) -> ByteArray:
    codec = make_codec("fp32")
    values, body = np.full(part.size, delta, np.float32), np.empty(body_nbytes(codec, part), np.uint8)
    encode_contribution(codec, part, Delta(values, np.zeros_like(values)), body)
    return np.append(body, moments)


# ---- arriving -------------------------------------------------------------------------------------------------------


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(plan(), make_codec("fp32"), moments=True)


def arrive(inbox: Inbox, body: ByteArray) -> None:
    inbox.expect_body(KEY, 0)
    into = inbox.receive_body(KEY, body.size)
    assert into.nbytes == body.size
    np.frombuffer(into, np.uint8)[:] = body
    inbox.mark_arrived(KEY, "mark")


def test_a_body_is_a_contribution_and_the_moments_behind_it(inbox: Inbox) -> None:
    part = plan().fragments[0]
    for forms in ([ADAM] * len(part.pieces), [NONE] * len(part.pieces)):
        moments = moments_of(part, 0.5, forms)
        arrive(inbox, contribution(part, 2.0, moments))
        assert (read_whole(inbox.open_body(KEY, "mark")) == 2.0).all()
        assert (inbox.get_moments([KEY])[0] == moments).all()
        inbox.discard(KEY)


def test_a_body_without_room_for_forms_or_past_all_of_them_is_another_length(inbox: Inbox) -> None:
    part = plan().fragments[0]
    for named, due in [(0, 4 * part.size + len(part.pieces)), (10**9, 4 * plan().largest + most_bytes(plan()))]:
        inbox.expect_body(KEY, 0)
        assert inbox.receive_body(KEY, named).nbytes == due, "which the port refuses, since it is not what was named"
        inbox.mark_aborted(KEY)


@pytest.mark.parametrize("wrong", ["short", "long", "form", "nan", "negative"])
def test_moments_that_are_none_are_refused_with_a_reason(inbox: Inbox, wrong: str) -> None:
    part = plan().fragments[0]
    moments = moments_of(part, float("nan") if wrong == "nan" else 0.5)
    if wrong == "form":
        moments[0] = 99
    if wrong == "negative":
        moments[list_moments(INT8, part, [ADAM] * len(part.pieces))[1].data.start + 3] = 0xFF
    if wrong == "short":
        moments = moments[:-1]
    if wrong == "long":
        moments = np.append(moments_of(part, 0.5, [NONE] * len(part.pieces)), np.uint8(0))
    arrive(inbox, contribution(part, 2.0, moments))
    with pytest.raises(PeerError, match="moment"):
        inbox.open_body(KEY, "mark")


# ---- averaged -------------------------------------------------------------------------------------------------------


def served(parameters: Parameters, fragment: int, version: int) -> ByteArray | None:
    try:
        found = parameters.serve_moments(fragment, version)
    except PeerError:
        return None
    data = np.frombuffer(bytes(found.data), np.uint8)
    assert found.digest == compute_digest(data.data) and found.version == version
    found.release()
    return data


def test_the_average_goes_with_its_version_and_with_no_other() -> None:
    parameters = Parameters(plan(), Outer(merge="mean", optimizer="sgd", lr=1.0))
    parameters.commit_initial()
    part = plan().fragments[0]
    given, weights = [moments_of(part, 1.0), moments_of(part, 3.0)], [1.0, 3.0]
    deltas = [np.ones(part.size, np.float32)] * 2
    parameters.stage_merge(0, deltas, weights, moments=given)
    assert served(parameters, 0, 0) is None and served(parameters, 0, 1) is None, "staged, but nobody knows of it"
    parameters.commit_version(0, 1, 0)
    found = served(parameters, 0, 1)
    assert found is not None and (found == average_moments(part, given, weights)).all()
    assert served(parameters, 0, 2) is None and served(parameters, 1, 0) is None and served(parameters, 9, 0) is None
    packed = parameters.pack_state()
    parameters.restore_state(packed, [2, 1], 1)
    assert served(parameters, 0, 2) is None, "a rollback has none"


def test_a_version_from_the_journal_or_a_cut_has_none_also_in_a_buffer_that_had() -> None:
    parameters = Parameters(plan(), Outer(merge="mean", optimizer="sgd", lr=1.0))
    parameters.commit_initial()
    part, delta = plan().fragments[0], np.ones(plan().fragments[0].size, np.float32)
    for version in (1, 2, 3):
        parameters.stage_merge(0, [delta], [1.0], moments=[moments_of(part, 1.0)])
        parameters.commit_version(0, version, version)
    for version in (4, 5):
        parameters.stage_payload(0, delta.view(np.uint8).data)
        parameters.commit_version(0, version, version)
        assert served(parameters, 0, version) is None
    arrays = {name: array.view(np.uint8).copy() for name, array in parameters.hold_arrays().items()}
    assert not any("moments" in name for name in arrays)


def test_memory_bounds_count_the_moments() -> None:
    alone, shared = Settings(fragments=2, sync_every=4), Settings(fragments=2, sync_every=4, share="moments")
    more = contribution_bytes(plan(), shared) - contribution_bytes(plan(), alone)
    assert more == most_bytes(plan())
    assert memory_bound(plan(), shared, 1).fixed >= memory_bound(plan(), alone, 1).fixed + 5 * 2 * most_bytes(plan())


# ---- over the wire --------------------------------------------------------------------------------------------------


class Sharing:
    """A learner whose contributions come with moments."""

    def __init__(self, learner: FakeLearner, value: float = 1.0) -> None:
        self.learner, self.value = learner, value
        self.forms: list[int] | None = None
        learner.body = self._send  # type: ignore[method-assign]

    async def _send(self, pull: Pull, delta: float) -> str:
        learner, part = self.learner, self.learner.plan.fragments[pull.fragment]
        body = contribution(part, delta, moments_of(part, self.value, self.forms))
        mark = compute_digest(body.data)
        await learner.link.put_contribution(
            learner.name, learner.session, pull.round, pull.attempt, body.data, mark, WAIT_S
        )
        return mark


async def test_the_average_of_a_round_is_served_with_its_version(stage: Stage) -> None:
    await stage.open(share="moments", quorum=2)
    sharing = [Sharing(stage.join(name), value) for name, value in (("a", 1.0), ("b", 2.0))]
    for one in sharing:
        await one.learner.begin()
    pulls = await asyncio.gather(*(next_pull(one.learner) for one in sharing))
    for one, pull in zip(sharing, pulls, strict=True):
        await one.learner.contribute(pull, 0.25)
    told = [await one.learner.until(Announce) for one in sharing]
    announced, members = told[0], [member for one in told for member in one.members]
    part = plan().fragments[announced.fragment]
    into = np.zeros(most_bytes(plan()), np.uint8)
    size = await sharing[0].learner.link.get_moments(part.index, 1, into.data, WAIT_S)
    weights = [member.tokens for member in members]
    assert [member.learner for member in members] == ["a", "b"], "each its own entry"
    due = average_moments(part, [moments_of(part, 1.0), moments_of(part, 2.0)], weights)
    assert (read_moments(part, into) == due).all() and size == due.size
    assert stage.service.figures().share == "moments"
    with pytest.raises(PeerError, match="no averaged moments of version 0"):
        await sharing[0].learner.link.get_moments(part.index, 0, into.data, WAIT_S)


async def test_a_learner_whose_moments_are_broken_is_refused_and_nothing_changes(stage: Stage) -> None:
    await stage.open(share="moments", learners=1)
    sharing = Sharing(stage.join("a"), float("nan"))
    await sharing.learner.begin()
    pull = await next_pull(sharing.learner)
    await sharing.learner.contribute(pull, 0.25)
    refused = await stage.until("refused")
    assert refused["learner"] == "a" and "a moment of" in refused["reason"] and "not finite" in refused["reason"]
    assert stage.service.begun.parameters.version_rounds() == [-1, -1]
    again = await next_pull(sharing.learner, pull)
    part = plan().fragments[again.fragment]
    key = ("a", sharing.learner.session, again.round, again.attempt)
    with pytest.raises(PeerError, match="this fragment needs exactly"):
        await sharing.learner.link.put_contribution(*key, contribution(part, 0.25, np.zeros(0, np.uint8)).data, "", 5)
