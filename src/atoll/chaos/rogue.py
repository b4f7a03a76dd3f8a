"""An extra learner that speaks the protocol and misbehaves: `python -m atoll.chaos.rogue RUN_DIR URL ATTACK [STEP_S]`.

It runs the shipped learner's rules, so that it joins, recovers, is asked and waits like any other; only what it gives
is spoiled (`ATTACKS`). It trains nothing: each of its steps is a little noise. It goes on until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from msgspec.structs import replace

from atoll.chaos.verdict import ROGUE
from atoll.digests import compute_digest
from atoll.fabric.address import parse_address
from atoll.fabric.client import SyncerConnection
from atoll.fabric.wire import encode
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.protocol.effects import Tick
from atoll.protocol.errors import ConfigError, PeerError, Unreachable
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Contribution
from atoll.protocol.records import BegunRecord
from atoll.protocol.statistics import after_adoption
from atoll.store.disk import LocalDisk
from atoll.store.journal import read
from atoll.store.rundir import RunDir

STEP_S = 0.2
SHOUT_S = 1.0
TOKENS = 64
"""Of a step."""
BODY_S = 30.0
ENDS = (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.ERROR)


# ---- attacks --------------------------------------------------------------------------------------------------------

Numbers = Callable[[np.ndarray], np.ndarray]
"""What becomes of an honest Δ."""
ChangeAnswer = Callable[[Contribution], list[Contribution]]
"""What is said instead of an honest contribution."""


def _honest(contribution: Contribution) -> list[Contribution]:
    return [contribution]


def _same(delta: np.ndarray) -> np.ndarray:
    return delta


def _with(**values: int | str) -> ChangeAnswer:
    return lambda contribution: [msgspec.structs.replace(contribution, **values)]


@dataclass(frozen=True, slots=True)
class Attack:
    says: str
    numbers: Numbers = _same
    words: ChangeAnswer = _honest
    size: int = 0
    """Bytes that its bodies are longer (or, below 0, shorter) than they should be."""
    noise: bytes = b""
    """A frame that it sends beside everything else."""


def _one(value: float) -> Numbers:
    def change(delta: np.ndarray) -> np.ndarray:
        spoiled = delta.copy()
        spoiled[spoiled.size // 2] = value
        return spoiled

    return change


ATTACKS: dict[str, Attack] = {
    "nan": Attack("one of its numbers is NaN", _one(float("nan"))),
    "inf": Attack("one of its numbers is Inf", _one(float("inf"))),
    "huge": Attack("its numbers are a million times too large", lambda delta: 1e6 * (delta + 1e-3)),
    "short": Attack("its bodies end too soon", size=-2),
    "long": Attack("its bodies go on for too long", size=64),
    "stale": Attack("it gives on a base that is long past", words=_with(base=-1)),
    "future": Attack("it gives on a base that never was", words=_with(base=10**6)),
    "other-fragment": Attack("it gives another fragment than was asked for", words=_with(fragment=10**4)),
    "below-zero": Attack("it counts steps below zero", words=_with(steps=-5)),
    "boast": Attack("it names a billion tokens", words=_with(tokens=10**9)),
    "other-run": Attack("what it gives is meant for another run", words=_with(run="another")),
    "digest": Attack("it names another digest than its bodies have", words=_with(digest="0" * 32)),
    "garbage": Attack("it sends frames that are no messages", noise=b"\xff\x00{not a message"),
    "unknown-type": Attack("it sends messages of a kind nobody knows", noise=b'{"type":"Overthrow","clock":{}}'),
    "unknown-field": Attack("it sends fields nobody knows", noise=b'{"type":"Heartbeat","sudo":true}'),
    "duplicate": Attack("it says everything twice", words=lambda contribution: [contribution, contribution]),
}
HARMLESS = ("duplicate",)
"""Its numbers are honest, and are merged, once."""


# ---- the learner ----------------------------------------------------------------------------------------------------


class Rogue:
    def __init__(self, begun: BegunRecord, url: str, attack: Attack, name: str, step_s: float = STEP_S) -> None:
        self.machine = LearnerMachine(name, secrets.token_hex(8), begun.tensors)
        self.attack, self.step_s = attack, step_s
        self._plan: FragmentPlan = make_plan(begun.tensors, begun.settings.fragments, begun.settings.plan)
        self._codec, self._has_moments = make_codec(begun.settings.codec), begun.settings.shares_moments
        fragments = begun.settings.fragments
        self._t = self._total = 0
        self._steps, self._tokens = [0] * fragments, [0] * fragments
        self._dropped, self._missed = [0] * fragments, [0] * fragments
        self._held = [-1] * fragments
        self._dice = np.random.default_rng(0)
        self._reads: dict[int, fx.Read] = {}
        self._adopts: list[fx.Adopt] = []
        self._holds: dict[int, int] = {}
        self._waits = self._held_back = self._over = False
        self._tasks: asyncio.TaskGroup | None = None
        self._link = SyncerConnection(
            url,
            hello=self.machine.hello,
            on_open=lambda: None,
            on_message=lambda message: self._send_message(fx.Arrived(message)),
            on_lost=lambda reason: self._send_message(fx.Disconnected(reason)),
        )

    async def run(self) -> None:
        if self.attack.noise:
            await self._shout_on()
            return
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._link.run())
            try:
                while not self._over:
                    await asyncio.sleep(self.step_s)
                    self._make_steps()
            finally:
                await self._link.close()

    async def _shout_on(self) -> None:
        """Again and again: an honest hello, then noise, until it is cut off."""
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    url = f"{self._link.url}/v1/control"
                    async with session.ws_connect(
                        url, headers=parse_address(self._link.url).headers_for(url)
                    ) as socket:
                        hello = self.machine.hello()
                        await socket.send_bytes(encode(replace(hello, seq=time.monotonic_ns())))
                        await socket.receive(timeout=BODY_S)
                        await socket.send_bytes(self.attack.noise)
                        while (await socket.receive(timeout=BODY_S)).type not in ENDS:
                            pass
                except aiohttp.ClientConnectorError:
                    return  # the run is over
                except (aiohttp.ClientError, TimeoutError, OSError):
                    pass
                await asyncio.sleep(SHOUT_S)

    # ---- what it does instead of training --------------------------------------------------------------------------

    def _make_steps(self) -> None:
        self._send_message(Tick())
        if (
            min(self._held) < 0
            or self._waits
            or self._held_back
            or any(step <= self._t for step in self._holds.values())
        ):
            self._adopt_arrived()
            return
        self._t += 1
        self._total += TOKENS
        self._steps = [count + 1 for count in self._steps]
        self._tokens = [count + TOKENS for count in self._tokens]
        self._adopt_arrived()
        for number, order in sorted(self._reads.items()):
            if self._t >= order.step and self._reads.get(number) is order:
                del self._reads[number]
                f = order.fragment
                counted = (self._t, self._steps[f], self._tokens[f], self._held[f], self._total)
                self._send_message(fx.Copied(number, f, *counted))
        self._send_message(self._report_step())
        self._adopt_arrived()

    def _report_step(self) -> fx.Stepped:
        counters = (tuple(self._steps), tuple(self._tokens), self._total)
        dropped, missed = tuple(self._dropped), tuple(self._missed)
        return fx.Stepped(self._t, *counters, busy_s=self._t * self.step_s, dropped=dropped, missed=missed)

    def _adopt_arrived(self) -> None:
        waiting = any(step <= self._t for step in self._holds.values())
        for order in list(self._adopts):
            if order.step <= self._t or waiting or min(self._held) < 0:
                self._adopts.remove(order)
                f = order.fragment
                counters = (self._dropped[f], self._missed[f])
                self._dropped[f], self._missed[f] = after_adoption(self._tokens[f], order.held_tokens, 0, *counters)
                self._held[f], self._steps[f], self._tokens[f] = order.version, 0, 0
                for number in [n for n in self._holds if n % len(self._held) == f and n <= order.round]:
                    del self._holds[number]
                self._send_message(fx.Adopted(f, order.version, self._t, 0, 0, self._dropped[f], self._missed[f]))

    # ---- the shipped rules, and what they want ---------------------------------------------------------------------

    def _send_message(self, event: fx.LearnerEvent) -> None:
        for effect in self.machine.handle(time.monotonic(), event):
            self._handle_effect(effect)

    def _handle_effect(self, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Say(message):
                said = self.attack.words(message) if isinstance(message, Contribution) else [message]
                for one in said:
                    self._link.send(one)
            case fx.Read(round=number):
                self._reads[number] = effect
            case fx.CancelRead(number):
                self._reads.pop(number, None)
            case fx.Hold(number, step):
                self._holds[number] = step
            case fx.LetGo(number):
                self._holds.pop(number, None)
            case fx.Fetch(fragment):
                self._spawn_task(self._fetch_version(fragment))
            case fx.Adopt():
                self._adopts.append(effect)
            case fx.Upload(number, attempt, fragment):
                self._spawn_task(self._upload_body(number, attempt, fragment))
            case fx.ForgetVersions():
                fragments = len(self._held)
                self._held, self._adopts, self._reads, self._holds = [-1] * fragments, [], {}, {}
                self._steps, self._tokens = [0] * fragments, [0] * fragments
                self._dropped, self._missed = [0] * fragments, [0] * fragments
            case fx.Own():
                self._held = [0] * len(self._held)
            case fx.Await():
                self._waits = True
            case fx.Begin():
                self._waits = False
            case fx.HoldBack():
                self._held_back = True
            case fx.BeginTraining():
                self._held_back = False
            case fx.Capture(number):
                self._send_message(fx.Captured(number, reason="it gives nothing away"))
            case fx.FetchState(ticket):
                self._send_message(fx.StateFailed(ticket, "it wants nobody's state"))
            case fx.Save(cut):
                self._send_message(fx.Saved(cut, self._t, reason="it saves nothing"))
            case fx.HangUp():
                self._link.hang_up()
            case fx.Stop(final=final):
                self._over = self._over or final
            case _:
                pass

    async def _fetch_version(self, fragment: int) -> None:
        into = np.empty(self._plan.fragments[fragment].size, np.float32)
        try:
            version, _, _ = await self._link.get_fragment(fragment, into.view(np.uint8).data, BODY_S)
        except (PeerError, Unreachable) as error:
            self._send_message(fx.FetchFailed(fragment, str(error)))
        else:
            self._send_message(fx.Fetched(fragment, version))

    async def _upload_body(self, number: int, attempt: int, fragment: int) -> None:
        part = self._plan.fragments[fragment]
        delta = self.attack.numbers(1e-4 * self._dice.standard_normal(part.size).astype(np.float32)).astype(np.float32)
        data = np.zeros(body_nbytes(self._codec, part), np.uint8)
        encode_contribution(self._codec, part, Delta(delta, np.zeros_like(delta)), data)
        if self._has_moments:
            data = np.append(data, np.zeros(len(part.pieces), np.uint8))  # it has none
        data = np.resize(data, max(0, data.size + self.attack.size))
        mark, machine = compute_digest(data.data), self.machine
        try:
            await self._link.put_contribution(machine.name, machine.session, number, attempt, data.data, mark, BODY_S)
        except (PeerError, Unreachable) as error:
            self._send_message(fx.UploadFailed(number, attempt, str(error)))
        else:
            self._send_message(fx.Uploaded(number, attempt, mark))

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)


def begun_of(out: RunDir) -> BegunRecord:
    """What the run is, from its journal."""
    for _, record in read(out.journal, disk=LocalDisk()):
        if isinstance(record, BegunRecord):
            return record
    raise ConfigError(f"{out.path} has no run to join yet")


def main(arguments: list[str]) -> int:
    folder, url, name, *more = arguments
    rogue = Rogue(
        begun_of(RunDir(Path(folder))),
        url,
        ATTACKS[name],
        f"{ROGUE}{name}-{os.getpid()}",
        float(more[0]) if more else STEP_S,
    )
    asyncio.run(rogue.run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
