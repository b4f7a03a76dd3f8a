"""A relay between real couriers and a real syncer: what is merged, what crosses the link, what happens without it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from tests.courier.conftest import WAIT_S, Run, Training
from tests.courier.test_moments import SharingTraining
from tests.relay.conftest import Region, Relay

from atoll.chaos.tcp_relay import TcpRelay
from atoll.cli import relay as command
from atoll.digests import compute_digest
from atoll.fabric import client, relay_channel
from atoll.fabric.address import SyncerAddress, parse_address
from atoll.fabric.calls import open_session, request
from atoll.fabric.control_channel import SendQueue
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.fabric.relay_channel import RelayChannel
from atoll.numerics.codec import decode_contribution
from atoll.numerics.deltas import ReadableDelta, read_whole
from atoll.numerics.merge import merge
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import PROTOCOL, ContributionKey, FromSyncer, Hello, Refused, TensorSpec
from atoll.protocol.relay import RelayRates, SumAsked, SumMember, SumSettled
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.relay import service
from atoll.relay.bodies import HeldBodies, MadeSum
from atoll.relay.service import RelayEnded, RelayService, have_changed
from atoll.relay.versions import WHOLE
from atoll.syncer.outer_state import Overflow
from atoll.syncer.relays import RelaySums


async def step_until(trainings: list[Training], version: int, changes: tuple[float, ...] = (-0.5, -0.25, -1.0)) -> None:
    """All step, each by its own change, until every fragment of each has at least that version."""
    async with asyncio.timeout(WAIT_S):
        while min(min(one.versions()) for one in trainings) < version:
            await step_all(trainings, changes)


async def step_all(trainings: list[Training], changes: tuple[float, ...] = (-0.5, -0.25, -1.0)) -> None:
    for one, change in zip(trainings, changes, strict=False):
        one.step(change * (1 + 0.1 * one.t))
        at = one.t
        await one.until(lambda one=one, at=at: one.courier._machine.t >= at, idle=False)  # type: ignore[misc,union-attr]
    await asyncio.sleep(0.01)


async def join_all(trainings: list[Training]) -> None:
    for one in trainings:
        await one.join()


async def make(region: Region, learners: int = 2, **rules: object) -> tuple[Run, Relay, list[Training]]:
    run = await region.run(learners=learners, quorum=learners, sync_every=2, **rules)
    relay = await region.relay(run)
    return run, relay, [region.learner(relay.url, f"learner-{number}") for number in range(learners)]


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SumAsked, list[np.ndarray], MadeSum]]:
    """What relays were asked for, what they held of it, and what they made of that."""
    seen: list[tuple[SumAsked, list[np.ndarray], MadeSum]] = []
    make_sum = HeldBodies.make_sum

    def note(bodies: HeldBodies, asked: SumAsked, given: list[np.ndarray]) -> MadeSum:
        part, deltas = bodies.plan.fragments[asked.fragment], []
        for data in given:
            deltas.append(np.empty(part.size, np.float32))
            decode_contribution(bodies._codec, part, data, deltas[-1])
        made = make_sum(bodies, asked, given)
        seen.append((asked, deltas, made))
        return made

    monkeypatch.setattr(HeldBodies, "make_sum", note)
    return seen


Summed = list[tuple[SumAsked, list[np.ndarray], MadeSum]]


@pytest.mark.parametrize(("codec", "most"), [("fp32", 1e-6), ("bf16", 1e-2), ("int4", 0.3)])
@pytest.mark.parametrize("rule", ["mean", "rda-row"])
async def test_the_merged_gradient_is_that_of_the_flat_merge(
    region: Region, summed: Summed, rule: str, codec: str, most: float
) -> None:
    run, relay, trainings = await make(region, codec=codec)
    await join_all(trainings)
    if rule != "mean":
        await run.service.change([f"merge={rule}"])
    run.watch_deltas()
    await step_until(trainings, 4)
    assert relay.service.sums and run.said("round")
    checked = 0
    for (asked, deltas, _), (fragment, gradient) in zip(summed, run.deltas, strict=False):
        assert asked.fragment == fragment
        part, flat = relay.service.bodies.plan.fragments[fragment], np.empty_like(gradient)  # type: ignore[union-attr]
        merge(part, deltas, [one.weight for one in asked.members], flat, asked.rule)
        if codec != "int4" or not any(
            len(one.members) == 2 for one, *_ in summed[:checked]
        ):  # later ones also hold what earlier ones left out
            assert np.linalg.norm(gradient - flat) <= most * np.linalg.norm(flat)
        checked += 1
    assert checked and any(len(asked.members) == 2 for asked, *_ in summed)


async def test_two_regions_and_a_learner_of_none_merge_as_if_all_were_flat(region: Region, summed: Summed) -> None:
    run = await region.run(learners=5, quorum=5, sync_every=2)
    relays = [await region.relay(run, name) for name in ("eu", "us")]
    where = [relays[0].url, relays[0].url, relays[1].url, relays[1].url, run.url]
    trainings = [region.learner(url, f"learner-{number}") for number, url in enumerate(where)]
    await join_all(trainings)
    await run.service.change(["merge=rda-row"])
    own: list[tuple[int, np.ndarray]] = []
    """By round, what came directly."""
    get_delta = run.service.begun.inbox.get_delta

    def note(key: ContributionKey) -> ReadableDelta:
        own.append((key[1], read_whole(get_delta(key))))
        return get_delta(key)

    run.service.begun.inbox.get_delta = note  # type: ignore[method-assign]
    run.watch_deltas()
    async with asyncio.timeout(WAIT_S):
        while not any(len(event["members"]) == 5 for event in run.said("round")[:-1]):
            await step_all(trainings, (-0.5, -0.25, -1.0, 0.75, 0.125))
    rounds = run.said("round")
    event = next(event for event in rounds if len(event["members"]) == 5)
    weights = {member["learner"]: member["weight"] for member in event["members"]}
    asks = [(asked, deltas) for asked, deltas, _ in summed if asked.round == event["round"]]
    assert sorted(len(asked.members) for asked, _ in asks) == [2, 2]
    pairs = [
        pair for asked, deltas in asks for pair in zip((one.learner for one in asked.members), deltas, strict=True)
    ]
    given = {**dict(pairs), "learner-4": next(delta for round, delta in own if round == event["round"])}
    part = run.service.begun.parameters.plan.fragments[event["fragment"]]
    flat = np.empty(part.size, np.float32)
    merge(part, [given[name] for name in sorted(weights)], [weights[name] for name in sorted(weights)], flat, "rda-row")
    made = [gradient for fragment, gradient in run.deltas if fragment == part.index]
    assert any(np.linalg.norm(gradient - flat) <= 1e-6 * np.linalg.norm(flat) for gradient in made)


async def test_members_and_weights_are_decided_and_told_per_learner(region: Region, summed: Summed) -> None:
    run, _, trainings = await make(region)
    await join_all(trainings)
    await step_until(trainings, 2)
    asked = next(asked for asked, *_ in summed if len(asked.members) == 2)
    event = next(event for event in run.said("round") if event["round"] == asked.round)
    weights = {member["learner"]: member["weight"] for member in event["members"]}
    assert weights == {member.learner: member.weight for member in asked.members} and len(weights) == 2


async def test_each_version_is_fetched_once(region: Region) -> None:
    run, relay, trainings = await make(region, learners=3)
    await join_all(trainings)
    await step_until(trainings, 3)
    rounds, size = len(run.said("round")), sum(part.size for part in relay.service.bodies.plan.fragments)  # type: ignore[union-attr]
    assert relay.service.versions.served >= 2 * 3
    assert relay.service.upstream.bytes_down <= 4 * size * (2 + rounds / 2)


async def test_version_0_in_2_bytes_a_value_is_fetched_once_and_answers_no_reader_of_fp32(region: Region) -> None:
    run, relay, trainings = await make(region, learners=3, initial_codec="bf16")
    await join_all(trainings)
    size = sum(part.size for part in relay.service.bodies.plan.fragments)  # type: ignore[union-attr]
    assert relay.service.upstream.bytes_down == 2 * size
    assert relay.service.versions.served == 2
    assert relay.service.versions.find(0, WHOLE) is None
    theta = run.theta()
    for training in trainings:
        assert all(np.array_equal(values.numpy(), theta[name]) for name, values in training.parameters.items())


async def test_without_the_relay_learners_go_on_directly_and_come_back_to_it(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RELAY_S", 0.3)
    run, relay, trainings = await make(region)
    await join_all(trainings)
    await step_until(trainings, 2)
    port = relay.service.port.port
    await relay.stop()
    await step_until(trainings, 4)
    assert run.service._channels and not any(channel.relay for channel in run.service._channels.values())
    again = await region.relay(run, port=port)
    async with asyncio.timeout(WAIT_S):
        while not all(channel.relay for channel in run.service._channels.values()) or len(run.service._channels) < 2:
            await step_all(trainings)
    before = max(max(one.versions()) for one in trainings)
    await step_until(trainings, before + 2)
    assert again.sums and again.service.sums
    assert {event["incarnation"] for event in run.said("joined")} == {1}, "in the same lives"
    async with asyncio.timeout(WAIT_S):  # a channel that is left is told once its end has come
        while len(moves := {event["text"] for event in run.said("lost") if event.get("moved")}) < len(trainings):
            await step_all(trainings)
    assert moves == {f"learner-{number} moves back to its relay" for number in range(len(trainings))}


async def test_a_relay_whose_line_breaks_does_not_say_that_the_syncer_closed_its_channel(region: Region) -> None:
    run = await region.run()
    line = TcpRelay("127.0.0.1", run.service.server.port)
    await line.start()
    region.stack.push_async_callback(line.stop)
    publish_secrets("127.0.0.1", line.port, published_secrets("127.0.0.1", run.service.server.port))
    region.stack.callback(withdraw_secrets, "127.0.0.1", line.port)
    relay = await region.relay(run, where=line.url)
    await line.stop()
    async with asyncio.timeout(WAIT_S):
        while not any("out of reach" in words for words in relay.said):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
    [first, *_] = [words for words in relay.said if "out of reach" in words]
    assert first == "the syncer is out of reach (the connection to it broke); dialling again"


async def test_a_learner_that_found_no_relay_when_it_came_goes_to_it_once_it_is_there(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "RELAY_S", 0.3)
    run, relay, trainings = await make(region)
    port = relay.service.port.port
    await relay.stop()
    await join_all(trainings)
    await step_until(trainings, 2)
    assert run.service._channels and not any(channel.relay for channel in run.service._channels.values())
    again = await region.relay(run, port=port)
    async with asyncio.timeout(WAIT_S):
        while not all(channel.relay for channel in run.service._channels.values()) or len(run.service._channels) < 2:
            await step_all(trainings)
    before = max(max(one.versions()) for one in trainings)
    await step_until(trainings, before + 2)
    assert again.sums and {event["incarnation"] for event in run.said("joined")} == {1}


def test_a_relay_without_a_default_route_names_the_address_that_it_reaches_its_syncer_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its link named 127.0.0.1 alone: learners of other machines dialled themselves and went past the relay."""
    address = SyncerAddress(urls=("https://lost.example.org:7077", "https://10.77.0.1:7077"))
    routes = {"10.77.0.1": "10.77.0.3", "127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(command, "own_address", lambda toward="", port=9: routes.get(toward))
    monkeypatch.setattr("atoll.cli.advertised.own_address", lambda: None)
    assert command.own_host_toward(address, "0.0.0.0") == "10.77.0.3"
    assert command.own_host_toward(address, "10.0.0.9") == "10.0.0.9"
    alone = SyncerAddress(urls=("https://127.0.0.1:7077",))
    assert command.own_host_toward(alone, "0.0.0.0") == "127.0.0.1"
    assert "add --advertise HOST" in command.warn_of_loopback("0.0.0.0", ["127.0.0.1"])
    assert not command.warn_of_loopback("0.0.0.0", ["10.77.0.3"])
    assert not command.warn_of_loopback("127.0.0.1", ["127.0.0.1"])


def test_only_relays_and_who_has_not_answered_are_asked_whether_they_are_relays() -> None:
    relays, urls = client.RelaySearch(), ("relay", "syncer", "standby")
    assert relays.list_asked(urls, used="syncer") == ["relay", "standby"], "nobody else has answered"
    assert not relays.note_answer("standby", is_relay=False)
    assert relays.note_answer("relay", is_relay=True)
    assert relays.list_asked(urls, used="syncer") == ["relay"]
    assert relays.list_asked(urls, used="relay") == []
    assert relays.note_answer("relay", is_relay=False), "an older one names itself only when it is dialled"


async def test_a_sum_that_cannot_be_is_refused_and_the_round_gathered_again(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = HeldBodies.make_sum
    wrong = [1]

    def absurd(bodies: HeldBodies, asked: SumAsked, given: list[np.ndarray]) -> MadeSum:
        good = made(bodies, asked, given)
        if not wrong:
            return good
        wrong.pop()
        data = (good.data.view(np.float32) * np.float32(1000)).view(np.uint8)
        return MadeSum(data, compute_digest(data.data), None)

    monkeypatch.setattr(HeldBodies, "make_sum", absurd)
    run, _, trainings = await make(region)
    await join_all(trainings)
    await step_until(trainings, 2)
    again = run.said("again")[0]
    assert "the sum's norm is" in again["reason"]
    assert run.said("round")[0]["attempt"] == 2


async def test_bodies_that_are_dropped_while_they_are_summed_end_no_relay(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The syncer may give a round up while a thread makes its sum, or has not begun to."""
    made, dropped = HeldBodies.make_sum, []

    def late(bodies: HeldBodies, asked: SumAsked, given: list[np.ndarray]) -> MadeSum:
        if not dropped:
            dropped.append(asked.round)
            for member in asked.members:
                bodies.drop((member.learner, asked.round, member.attempt))
        return made(bodies, asked, given)

    monkeypatch.setattr(HeldBodies, "make_sum", late)
    run, relay, trainings = await make(region)
    await join_all(trainings)
    await step_until(trainings, 2)
    assert "the sum is of other contributions" in run.said("again")[0]["reason"]
    assert relay.service.up and run.said("round")[0]["attempt"] == 2


async def test_sums_of_a_merge_that_came_to_nothing_are_settled_by_no_later_commit(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the relay would take over what a void sum left out, and drop what the merged one did."""
    run, _, trainings = await make(region)
    settled: list[SumSettled] = []
    settle = HeldBodies.settle

    def note(bodies: HeldBodies, one: SumSettled) -> None:
        settled.append(one)
        settle(bodies, one)

    monkeypatch.setattr(HeldBodies, "settle", note)
    await join_all(trainings)
    parameters, failed = run.service.begun.parameters, []
    stage = parameters.stage_merge

    def overflow(fragment: int, *more: Any) -> str:
        if not failed:
            failed.append(fragment)
            raise Overflow("values that are not finite")
        return stage(fragment, *more)

    monkeypatch.setattr(parameters, "stage_merge", overflow)
    await step_until(trainings, 2)
    assert failed and run.said("round")[0]["attempt"] == 2
    rounds = [one.round for one in settled]
    assert rounds and len(set(rounds)) == len(rounds), "one sum of a round is in the model"


async def test_nobody_goes_back_to_a_relay_while_the_run_ends(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who hangs up then misses the end: the run is over without it, and it dials for ever."""
    given_up: list[str] = []

    async def watch(link: client.SyncerConnection, outbox: object) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.append(link.url)
            raise

    monkeypatch.setattr(client.SyncerConnection, "_watch_relays", watch)
    run, _, trainings = await make(region)
    await join_all(trainings)
    run.service.end("asked to")
    async with asyncio.timeout(WAIT_S):
        while len(given_up) < len(trainings):
            await step_all(trainings)
    assert len(run.service._channels) == len(trainings), "they stay where they are"


async def test_what_is_not_finite_is_refused_in_the_words_of_the_screen(region: Region) -> None:
    run, relay, trainings = await make(region)
    await join_all(trainings)
    await step_until(trainings, 1)
    for parameter in trainings[1].parameters.values():
        parameter += float("nan")
    async with asyncio.timeout(WAIT_S):
        while not run.said("refused"):
            await step_all(trainings)
    event = run.said("refused")[0]
    assert event["learner"] == "learner-1" and "values are not finite" in event["text"]
    assert relay.service.sums


@pytest.mark.parametrize("why", ["robust", "moments"])
async def test_what_needs_each_contribution_is_passed_on_as_it_is(region: Region, summed: Summed, why: str) -> None:
    rules: dict[str, Any] = {"share": "moments"} if why == "moments" else {}
    run, relay, trainings = await make(region, **rules)
    for one in trainings:
        if why == "moments":
            one.__class__ = SharingTraining
    await join_all(trainings)
    if why == "robust":
        await run.service.change(["robust=true"])
    await step_until(trainings, 3)
    assert not relay.service.sums and any(f"passed on as they are: {why}" in line for line in relay.said)
    assert why == "robust" or not summed
    assert {member["learner"] for member in run.said("round")[-1]["members"]} == {"learner-0", "learner-1"}
    assert all(channel.relay for channel in run.service._channels.values())


async def test_one_member_goes_on_as_it_came(region: Region, summed: Summed) -> None:
    run = await region.run(learners=2, quorum=2, sync_every=2, codec="int4")
    relay = await region.relay(run)
    trainings = [region.learner(relay.url, "learner-0"), region.learner(run.url, "learner-1")]
    await join_all(trainings)
    await step_until(trainings, 2)
    assert summed and all(len(asked.members) == 1 and made.rest is None for asked, _, made in summed)


async def test_a_syncer_that_comes_back_is_served_again(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the syncer only closes its port for a while; a kill of its process is a system test."""
    run, relay, trainings = await make(region)
    await join_all(trainings)
    await step_until(trainings, 1)
    for channel in list(run.service.server._relays._channels.values()):  # type: ignore[union-attr]
        channel.close()
    async with asyncio.timeout(WAIT_S):
        while sum("connected to run" in line for line in relay.said) < 2:
            await step_all(trainings)
    await step_until(trainings, 1 + max(max(one.versions()) for one in trainings))


async def test_a_relay_that_is_not_let_in_ends_in_one_line(region: Region) -> None:
    run = await region.run()
    wrong = run.url.replace("http://", f"atoll://{'a' * 32}@") + "/"
    service = RelayService(parse_address(wrong), name="eu", host="127.0.0.1", port=0)
    with pytest.raises(BaseExceptionGroup) as raised:
        await service.run()
    (error,) = raised.value.exceptions
    assert isinstance(error, RelayEnded) and "this token is not known here" in str(error)


async def test_one_token_has_a_few_relays_at_once_and_a_learners_token_none(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_channel, "MOST_OF_TOKEN", 2)
    run = await region.run()
    for name in ("north", "south"):
        await region.relay(run, name)
    learners = published_secrets("127.0.0.1", run.service.server.port)["learner"]
    for address, reason in (
        (run.url, "the token 'relay' has 2 relays here"),
        (f"atoll://{learners}@127.0.0.1:{run.service.server.port}/", "for a learner, and this takes a relay"),
    ):
        third = RelayService(parse_address(address), name="west", host="127.0.0.1", port=0)
        with pytest.raises(BaseExceptionGroup) as raised:
            await third.run()
        (error,) = raised.value.exceptions
        assert isinstance(error, RelayEnded) and reason in str(error)


async def test_a_learner_that_is_not_let_in_hears_it_in_the_syncers_words(region: Region) -> None:
    run = await region.run()
    relay = await region.relay(run)
    where = f"atoll://{'b' * 32}@127.0.0.1:{relay.service.port.port}/"
    said: asyncio.Queue[FromSyncer] = asyncio.Queue()
    link = client.SyncerConnection(
        where,
        hello=lambda: Hello(protocol=PROTOCOL, learner="stranger", session="session"),
        on_open=lambda: None,
        on_message=said.put_nowait,
        on_lost=lambda reason: None,
    )
    running = asyncio.ensure_future(link.run())
    async with asyncio.timeout(WAIT_S):
        answer = await said.get()
    await link.close()
    await running
    assert isinstance(answer, Refused) and answer.final and "this token is not known here" in answer.reason
    assert not run.service._channels


@pytest.mark.parametrize("header", ["", "another"])
async def test_nobody_pretends_to_come_through_a_relay(region: Region, header: str) -> None:
    """Whoever does not know a relay's session cannot tell what is held."""
    run, relay, trainings = await make(region)
    await join_all(trainings)
    secret = parse_address(run.url).headers_for(f"{run.url}/v1/held/x")
    headers = {**secret, "Atoll-Relay": header, "Atoll-Session": trainings[0].start.session, "Content-Length": "2"}
    session = open_session()
    try:
        async with request(session, "PUT", f"{run.url}/v1/held/learner-0/0/1", headers=headers, data=b"{}") as answer:
            assert answer.status == 503
    finally:
        await session.close()
    assert relay.service.up


def test_feedback_is_what_committed_sums_left_out() -> None:
    bodies = HeldBodies((TensorSpec("w", (4, 64), "float32"),), Settings(fragments=1, codec="int4"))
    (part,), rng = bodies.plan.fragments, np.random.default_rng(0)
    given, total = np.zeros(256), np.zeros(256)

    def give(round: int, ask: int) -> tuple[np.ndarray, MadeSum]:
        members, deltas = [], []
        for learner in ("a", "b"):
            values = rng.normal(size=256).astype(np.float32)
            data = np.empty(bodies.body_nbytes(0), np.uint8)
            bodies._codec.encode(values, ((4, 64),), data)
            bodies.expect((learner, round, 1), 0)
            assert bodies.hold((learner, round, 1), learner, data)
            decoded = np.empty(256, np.float32)
            decode_contribution(bodies._codec, part, data, decoded)
            deltas.append(decoded)
            members.append(SumMember(learner, 1, learner, 1.0))
        asked = SumAsked(ask=ask, round=round, fragment=0, rule="mean", members=tuple(members))
        made = bodies.make_sum(asked, bodies.find_bodies(bodies.holdings.find_members(asked)))
        bodies.note_sum(asked, made)
        return (deltas[0] + deltas[1]) / 2, made

    for round in range(20):
        exact, made = give(round, round + 1)
        if round % 3 == 2:  # this one is not committed: nothing of it counts
            before = bodies._feedback[0].copy()
            for learner in ("a", "b"):
                bodies.drop((learner, round, 1))
            assert np.array_equal(before, bodies._feedback[0])
            continue
        decoded = np.empty(256, np.float32)
        decode_contribution(bodies._codec, part, made.data, decoded)
        bodies.settle(SumSettled(round=round, ask=round + 1))
        given, total = given + decoded, total + exact
        np.testing.assert_allclose(given + bodies._feedback[0], total, atol=1e-4)
    assert not bodies._bodies and not bodies._rests


# ---- what its link carries -------------------------------------------------------------------------------------------

RATE = 4e5
"""Bytes per second between the relay and the syncer."""


async def test_the_syncer_hears_what_the_link_of_a_relay_carries_and_who_shares_it(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RATES_S", 0.02)
    run = await region.run(learners=2, quorum=2, sync_every=2)
    line = TcpRelay("127.0.0.1", run.service.server.port)
    await line.start()
    region.stack.push_async_callback(line.stop)
    line.limit(RATE)
    publish_secrets("127.0.0.1", line.port, published_secrets("127.0.0.1", run.service.server.port))
    region.stack.callback(withdraw_secrets, "127.0.0.1", line.port)
    relay = await region.relay(run, where=line.url)
    heard: list[fx.RelayMeasured] = []
    handle = run.service._handle

    def note(event: fx.SyncerEvent) -> None:
        if isinstance(event, fx.RelayMeasured):
            heard.append(event)
        handle(event)

    monkeypatch.setattr(run.service, "_handle", note)
    model = {"a": torch.zeros(100, 256), "b": torch.zeros(100, 256)}
    trainings = [region.learner(relay.url, f"learner-{number}", model) for number in range(2)]
    await join_all(trainings)
    async with asyncio.timeout(WAIT_S):
        while not (heard and heard[-1].up_rate and heard[-1].down_rate):
            await step_all(trainings)
    assert heard[-1].learners == ("learner-0", "learner-1")
    assert heard[-1].up_rate == pytest.approx(RATE, rel=0.25)
    assert heard[-1].down_rate == pytest.approx(RATE, rel=0.25)
    rates = run.service._relays.rates
    assert len(rates) == 1
    heard.clear()
    trainings[1].courier._link.hang_up()  # type: ignore[union-attr]
    async with asyncio.timeout(WAIT_S):
        while not any(event.learners == ("learner-1",) for event in heard):
            await step_all(trainings)
    await relay.stop()
    async with asyncio.timeout(WAIT_S):
        while rates:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


def test_the_syncer_hears_of_a_rate_that_has_changed_by_more_than_a_twentieth() -> None:
    told = RelayRates(up_rate=100.0, down_rate=0.0)
    for rates, changed in [((104.9, 0.0), False), ((95.1, 0.0), False), ((106.0, 0.0), True), ((94.0, 0.0), True)]:
        assert have_changed(told, RelayRates(up_rate=rates[0], down_rate=rates[1])) == changed
    assert have_changed(told, RelayRates(up_rate=100.0, down_rate=1.0)), "the first one"


async def test_a_relay_that_tells_a_rate_below_nothing_is_sent_away() -> None:
    sums = RelaySums(lambda *said: None, lambda: ("run", 1))
    channel = RelayChannel("eu", "secret", "", "", SendQueue(8))
    sums.relay_opened(channel)
    with pytest.raises(PeerError, match="below 0"):
        sums.relay_received(channel, RelayRates(up_rate=-1.0))
    sums.relay_received(channel, RelayRates(up_rate=1.0))
    sums.relay_closed(channel, "gone")
    assert sums.rates == {}


async def test_the_bytes_of_a_relay_are_counted_over_all_its_connections() -> None:
    sums = RelaySums(lambda *said: None, lambda: ("run", 1))
    for told in ([(10, 20), (15, 40)], [(1, 2)]):
        channel = RelayChannel("eu", f"session-{len(told)}", "", "", SendQueue(8))
        sums.relay_opened(channel)
        for up, down in told:
            sums.relay_received(channel, RelayRates(bytes_up=up, bytes_down=down))
        sums.relay_closed(channel, "gone")
    [relay] = sums.list_relays()
    assert (relay.relay, relay.connected, relay.bytes_in, relay.bytes_out) == ("eu", False, 16, 42)
