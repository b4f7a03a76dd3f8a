"""Whatever a peer says on its channel: a hello that is refused changes nothing, and the run goes on for all others."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
from msgspec.structs import replace
from tests.fabric.fuzz import Fuzz, in_a_line, large_ones
from tests.syncer.conftest import TENSORS, Stage
from tests.syncer.test_service import next_pull

from atoll.fabric.control_channel import ControlChannel, SendQueue
from atoll.fabric.wire import check_hello, decode_from_learner, decode_from_syncer
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Announce, FromLearner, Hello, Progress, Refused
from atoll.syncer.service import SyncerService

SAID = 6
"""Messages after a hello that was taken."""


def state_of(service: SyncerService) -> str:
    """All that a peer could have changed, as one digest."""
    machine = service._machine
    known: list[object] = [sorted(service._channels)]
    if machine is not None:
        known += [machine.history.state(), machine.state.out.clock, machine.phase, sorted(machine.members.learners)]
    return hashlib.blake2b(msgspec.msgpack.encode(known)).hexdigest()


class Peer:
    """A channel whose other end only keeps what it is sent."""

    def __init__(self, hello: Hello) -> None:
        self.outbox = SendQueue(1024)
        self.channel = ControlChannel(hello.learner, hello.session, outbox=self.outbox, abort=lambda: None, flush_s=2.0)

    @property
    def refusal(self) -> str:
        last = decode_from_syncer(self.outbox._waiting[-1])
        assert isinstance(last, Refused)
        return last.reason


def messages(fuzz: Fuzz, count: int) -> Iterator[FromLearner]:
    """What decodes, and is no hello."""
    for given in fuzz.inputs(count):
        if given.kind == "learner":
            with suppress(PeerError):
                message = decode_from_learner(given.data)
                if not isinstance(message, Hello):
                    yield message


def hellos(fuzz: Fuzz, count: int) -> Iterator[Hello]:
    for data in fuzz.hellos(count):
        with suppress(PeerError):
            yield check_hello(decode_from_learner(data))


def fitting(service: SyncerService, peer: Peer, message: FromLearner, dice: random.Random) -> FromLearner:
    """A report is mostly made to fit the run's form, so that what it says is looked at."""
    machine = service._machine
    assert machine is not None
    learner = machine.members.learners.get(peer.channel.learner)
    if not isinstance(message, Progress) or learner is None or dice.random() < 0.1:
        return message
    size, edges = len(machine.versions), (0, 1, 64, 2**40, 2**48 - 1, 2**63 - 1)
    rows = {name: tuple(dice.choice(edges) for _ in range(size)) for name in ("steps", "tokens", "dropped", "counted")}
    held = tuple(dice.choice((-1, 0, 0, *machine.versions)) for _ in range(size))
    if dice.random() < 0.5:  # one whose sums are right
        rows |= {"tokens": (dice.choice(edges),) * size, "dropped": (0,) * size}
    t, total = learner.t + dice.choice((0, 1, 2, 2**40)), learner.tokens_total + dice.choice(edges)
    told = {"t": min(t, 2**63 - 1), "tokens_total": min(total, 2**63 - 1), "incarnation": learner.incarnation}
    return replace(message, **rows, **told, versions=held)


async def harass(stage: Stage, count: int, seed: int) -> None:
    """A run with an honest learner, and hellos and messages that no honest one sends."""
    large_ones()  # made now: it takes a second, in which an honest learner would fall silent
    service = await stage.open(learners=1)
    honest = stage.join("honest")
    await honest.begin(1.0)
    fuzz, said = Fuzz(seed, TENSORS), messages(Fuzz(seed + 1, TENSORS), 100 * SAID * count)
    taken = refused = 0
    for number, hello in enumerate(hellos(fuzz, count)):
        if number % 50 == 0:
            honest.report()
            await asyncio.sleep(0.001)
        peer, before = Peer(hello), state_of(service)
        service.opened(peer.channel, hello)
        if peer.channel.closing:
            refused += 1
            assert state_of(service) == before, "a refused hello changes nothing"
            assert not in_a_line(peer.refusal).startswith("!")
            continue
        taken += 1
        for _ in range(SAID):
            if not peer.channel.closing:
                service.received(peer.channel, fitting(service, peer, next(said), fuzz.dice))
        service.closed(peer.channel, "it went")
        await asyncio.sleep(0)
    assert taken > count // 20 and refused > count // 40  # what is beyond its bounds the wire refused before
    pull = await next_pull(honest)
    await honest.contribute(pull, 0.5)
    await honest.until(Announce, lambda announce: announce.round == pull.round)


async def test_no_hello_and_no_message_disturbs_the_run(stage: Stage) -> None:
    await harass(stage, 2000, seed=1)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(1000, 1005))
async def test_many_hellos_and_messages_do_not_disturb_the_run(stage: Stage, seed: int) -> None:
    await harass(stage, 6000, seed)


async def test_an_absurd_model_begins_no_run(stage: Stage) -> None:
    service = await stage.open()
    before, refused = state_of(service), 0
    for hello in hellos(Fuzz(3), 400):
        if len(hello.tensors) == 0 or any(min(tensor.shape, default=1) > 9 for tensor in hello.tensors):
            peer = Peer(hello)
            service.opened(peer.channel, hello)
            assert peer.channel.closing and not in_a_line(peer.refusal).startswith("!")
            refused += 1
    assert refused > 20 and state_of(service) == before
