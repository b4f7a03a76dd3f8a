"""A newcomer's courier and its peer's, with a real syncer between them; what travels is the state of a real AdamW."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import pytest
import torch
from tests.courier.conftest import WAIT_S, Run, Stage, Training
from tests.courier.test_service import base, flat, stepping

from atoll.courier.states import MOST_MORE, StateTransfers
from atoll.learner.trained_model import TorchModel
from atoll.mailbox.channel import CourierChannel, Start
from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import TensorSpec


async def trained(stage: Stage, run: Run, name: str = "learner-0", *, direct: bool = True) -> Training:
    """A learner that has been at it for a while."""
    training = stage.training(run, name=name, direct=direct)
    await training.join()
    for _ in range(5):
        training.learn()
    return training


async def together(others: list[Training], work: list[Any]) -> None:
    """Do this while the others go on."""
    over = False

    async def train(one: Training) -> None:
        while not over and not one.channel.closed:
            one.step(-0.01)
            with suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await one.until(lambda: over or one.channel.closed, idle=False)

    async with asyncio.TaskGroup() as tasks:
        for one in others:
            tasks.create_task(train(one))
        await asyncio.gather(*work)
        over = True


def moments(training: Training) -> list[dict[str, Any]]:
    return [training.optimizer.state[parameter] for parameter in training.model.parameters()]


def same(one: Training, other: Training) -> bool:
    pairs = zip(moments(one), moments(other), strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


async def running(
    stage: Stage, *, learners: int = 2, peers: int = 1, direct: bool = True
) -> tuple[Run, list[Training]]:
    """A run in which rounds have been committed."""
    run = await stage.run(learners=learners)
    trainings = [await trained(stage, run, f"learner-{number}", direct=direct) for number in range(peers)]
    await together(trainings[1:], [stepping(trainings[0], until=2)])
    return run, trainings


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "through the syncer"])
async def test_the_inner_optimizer_of_a_peer_arrives_bit_for_bit(stage: Stage, direct: bool) -> None:
    run, [peer] = await running(stage, direct=direct)
    newcomer = stage.training(run, name="learner-1")
    await together([peer], [newcomer.join()])
    assert moments(newcomer)[0]["step"] == 5 and same(newcomer, peer)
    helped = await run.until_said("helped")
    assert (helped["learner"], helped["peer"]) == ("learner-1", "learner-0") and 0 < helped["peer_t"] <= peer.t
    assert helped["bytes"] > 2 * 4 * 15
    relayed = run.service.server._states.bytes_in
    assert (relayed == 0) is direct, f"{relayed} bytes went through the syncer"
    assert not run.said("fresh")


async def test_the_parameters_are_the_runs_not_the_peers(stage: Stage) -> None:
    run, [peer] = await running(stage)
    newcomer = stage.training(run, {name: torch.zeros_like(p) for name, p in peer.parameters.items()}, "learner-1")
    weight = newcomer.model.weight.detach().clone()
    await together([peer], [newcomer.join()])
    assert min(newcomer.versions()) >= 2 and flat(newcomer.parameters) == base(newcomer), "committed versions"
    assert torch.equal(newcomer.model.weight, weight), "no parameters travel with the optimizer"


async def test_the_copy_is_let_go_once_the_newcomer_has_it(stage: Stage) -> None:
    run, [peer] = await running(stage)
    newcomer = stage.training(run, name="learner-1")
    await together([peer], [newcomer.join()])
    states = peer.courier._states
    assert states is not None
    await together([newcomer], [peer.until(lambda: not states._copies)])
    assert states._host is not None and not states._host._offers


async def test_the_peer_steps_on_while_it_is_asked(stage: Stage) -> None:
    run, [peer] = await running(stage, direct=False)
    before, committed = peer.t, len(run.said("round"))
    newcomer = stage.training(run, name="learner-1")
    versions = max(peer.versions())
    await together([peer], [newcomer.join()])
    assert peer.t > before
    await together([peer], [stepping(newcomer, until=versions + 3)])
    assert len(run.said("round")) > committed


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "through the syncer"])
async def test_a_peer_that_dies_in_the_middle_is_followed_by_another(
    stage: Stage, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, peers = await running(stage, learners=3, peers=2, direct=direct)
    begun = asyncio.Event()

    async def stuck(*what: object, **more: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    for peer in peers:
        assert peer.courier._link is not None
        monkeypatch.setattr(peer.courier._link, "put_relay", stuck)
    monkeypatch.setattr("atoll.fabric.host.StateHost._send", stuck)
    newcomer = stage.training(run, name="learner-2")

    async def accident() -> None:
        await begun.wait()
        monkeypatch.undo()
        await asked_first().kill_courier()

    def asked_first() -> Training:
        """By chance."""
        return peers[int(run.said("helping")[0]["peer"].removeprefix("learner-"))]

    await together(peers, [newcomer.join(), accident()])
    first = asked_first()
    [second] = [peer for peer in peers if peer is not first]
    assert same(newcomer, second) and not same(newcomer, first)
    assert sorted(event["peer"] for event in run.said("helping")) == ["learner-0", "learner-1"]


async def test_without_a_peer_the_newcomer_begins_at_once(stage: Stage) -> None:
    run, [peer] = await running(stage)
    peer.hang_up()
    await run.until_said("left")
    newcomer = stage.training(run, name="learner-1")
    await newcomer.join()
    assert moments(newcomer) == [{}, {}] and (await run.until_said("fresh"))["learner"] == "learner-1"


async def test_an_optimizer_of_another_kind_is_said_and_left(stage: Stage, capfd: pytest.CaptureFixture[str]) -> None:
    run, [peer] = await running(stage)
    newcomer = stage.training(run, name="learner-1")
    newcomer.optimizer = torch.optim.SGD(newcomer.model.parameters(), momentum=0.9)
    newcomer.peers._trained = TorchModel(newcomer.model, newcomer.optimizer)
    await together([peer], [newcomer.join()])
    assert "'optimizer' is SGD here, AdamW in the snapshot" in (await run.until_said("fresh"))["reason"]
    refused = await run.until_said("refused")
    assert (refused["learner"], refused["newcomer"]) == ("learner-0", "learner-1"), "whose state it was"
    assert "its own inner optimizer, which warms up" in capfd.readouterr().err
    await together([peer], [stepping(newcomer, until=max(newcomer.versions()) + 1)])


async def test_a_learning_rate_is_not_taken_from_a_peer(stage: Stage) -> None:
    """With -0.01 in it a newcomer climbed where the others descended."""
    run, [peer] = await running(stage)
    newcomer = stage.training(run, name="learner-1")
    own = newcomer.optimizer.param_groups[0]["lr"]
    peer.optimizer.param_groups[0]["lr"] = -0.01
    await together([peer], [newcomer.join()])
    await run.until_said("helped")
    assert newcomer.optimizer.param_groups[0]["lr"] == own > 0 and moments(newcomer)[0]["step"] > 0


async def test_a_state_that_is_not_finite_is_refused_and_its_peer_is_struck(stage: Stage) -> None:
    run, [peer] = await running(stage)
    newcomer = stage.training(run, name="learner-1")
    for state in peer.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], torch.nan)
    await together([peer], [newcomer.join()])
    refused = await run.until_said("refused")
    assert (refused["learner"], refused["newcomer"]) == ("learner-0", "learner-1")
    assert "has values that are not finite" in refused["reason"]
    assert len(run.said("helping")) == 1 and run.said("fresh"), "it is not asked again"
    assert not newcomer.optimizer.state and not run.said("quarantined")


async def test_a_new_courier_of_a_newcomer_asks_again(stage: Stage) -> None:
    run, [peer] = await running(stage)
    newcomer = stage.training(run, name="learner-1")
    newcomer.hire()
    await newcomer.until(lambda: newcomer.peers.waits)
    await newcomer.kill_courier()
    newcomer.hire()
    await together([peer], [newcomer.until(lambda: not newcomer.peers.waits)])
    assert same(newcomer, peer)


async def test_only_the_two_of_a_ticket_get_at_the_relay(stage: Stage) -> None:
    run, _ = await running(stage)
    with pytest.raises(PeerError, match="no recovery of learner-0 under way"):
        run.service.forwarding_wanted("made-up", "learner-0", 0)
    with pytest.raises(PeerError, match="learner-0 is not asked for its state"):
        run.service.forwarding_allowed("made-up", "learner-0")
    empty = await stage.run()
    with pytest.raises(PeerError, match="has not begun"):
        empty.service.forwarding_wanted("made-up", "learner-0", 0)


class TestAlone:
    """Its own part, with a link that says what the test says."""

    async def states(
        self, stack: AsyncExitStack, link: object
    ) -> tuple[StateTransfers, asyncio.Queue[fx.LearnerEvent]]:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        ours, theirs = CourierChannel.pair()
        stack.callback(ours.close)
        stack.callback(theirs.close)
        start = Start("learner-1", "session", "", (TensorSpec("w", (4,), "float32"),))
        told: asyncio.Queue[fx.LearnerEvent] = asyncio.Queue()
        return StateTransfers(ours, link, start, told.put_nowait, print, tasks), told  # type: ignore[arg-type]

    async def test_a_state_that_no_model_like_ours_could_have_is_not_even_asked_for(self) -> None:
        async with AsyncExitStack() as stack:
            states, told = await self.states(stack, object())
            states.carry_out(fx.FetchState("one", MOST_MORE + 1 + 16 * 16, "d"))
            failed = await asyncio.wait_for(told.get(), WAIT_S)
        assert isinstance(failed, fx.StateFailed) and "more than this model could have" in failed.reason

    async def test_a_state_of_another_digest_than_the_peer_told_the_syncer_is_not_taken(self) -> None:
        class Link:
            async def get_state(self, ticket: str, into: Callable[[int], memoryview], **more: object) -> str:
                into(8)[:] = b"mischief"
                return "another"

        async with AsyncExitStack() as stack:
            states, told = await self.states(stack, Link())
            states.carry_out(fx.FetchState("one", 8, "d"))
            failed = await asyncio.wait_for(told.get(), WAIT_S)
        assert isinstance(failed, fx.StateFailed) and "its peer named d" in failed.reason

    async def test_what_is_left_is_not_fetched_on(self) -> None:
        ended = asyncio.Event()

        class Link:
            async def get_state(self, *what: object, **more: object) -> str:
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
                return ""

        async with AsyncExitStack() as stack:
            states, told = await self.states(stack, Link())
            states.carry_out(fx.FetchState("one", 8, "d"))
            await asyncio.sleep(0)
            states.carry_out(fx.LeaveState("one"))
            await ended.wait()
        assert told.empty()
