"""The relay's service: its own channel to the syncer, its port for learners, and what both share.

The channel is dialled again whenever it is lost. While it is down the relay passes nobody on and sends away who is
there: they connect directly (their link names the syncer too), and come back when the relay answers again. A refusal of
the relay's own token ends it, in one line.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import WSMsgType

from atoll.fabric.address import SyncerAddress
from atoll.fabric.calls import close_socket, receive_frame, send_frame
from atoll.fabric.control_channel import ClientSocket
from atoll.fabric.listener import Tls
from atoll.fabric.relay_channel import decode_to_relay, encode_relay
from atoll.fabric.tasks import lasting
from atoll.fabric.transfer import reason_of
from atoll.fabric.wire import FabricLimits, one_line
from atoll.protocol.errors import AtollError, PeerError, Unreachable
from atoll.protocol.messages import PROTOCOL, Pull, Welcome
from atoll.protocol.relay import (
    FromRelay,
    HeldDropped,
    RelayHello,
    RelayMode,
    RelayRates,
    RelayRefused,
    RelayWelcome,
    RunOver,
    SumAsked,
    SumFailed,
    SumSettled,
    ToRelay,
)
from atoll.relay.bodies import HeldBodies
from atoll.relay.passage import Passage
from atoll.relay.port import RelayPort
from atoll.relay.upstream import DialRefused, Upstream
from atoll.relay.versions import VersionCopies

AGAIN_S = 0.5
"""Between two dials."""
RATES_S = 1.0
"""Seconds between two looks whether the syncer should hear new rates."""
TRAFFIC_S = 5.0
"""Longest time after which the syncer hears what has crossed the link."""
CHANGED = 0.05
"""Part of a rate by which it has changed when the syncer hears of it."""


class RelayEnded(AtollError):
    """The syncer refuses this relay for good."""

    exit_code = 2


class _Over(Exception):
    """The run has ended."""


def have_changed(told: RelayRates, now: RelayRates) -> bool:
    """Whether one of the rates has changed by more than the syncer should miss."""
    pairs = ((told.up_rate, now.up_rate), (told.down_rate, now.down_rate))
    return any(abs(new - old) > CHANGED * old for old, new in pairs)


class RelayService:
    """Belongs to one event loop."""

    def __init__(
        self,
        address: SyncerAddress,
        *,
        name: str,
        host: str,
        port: int,
        tls: Tls | None = None,
        names: frozenset[str] = frozenset(),
        say: Callable[[str], None] = lambda text: None,
        log: Callable[[dict[str, object]], None] = lambda entry: None,
        limits: FabricLimits | None = None,
    ) -> None:
        """`say`: lines for people; `log`: what was summed."""
        limits = limits or FabricLimits()
        self.name, self._say, self._log = name, say, log
        self._session = secrets.token_hex(16)
        self.upstream = Upstream(address, self._session, limits)
        self.port = RelayPort(self, host=host, port=port, limits=limits, tls=tls, names=names)
        self.versions = VersionCopies()
        self.passages: dict[str, Passage] = {}
        self.bodies: HeldBodies | None = None
        """Once a learner has brought the run's plan."""
        self.up = False
        self.run_name = ""
        self.connected = asyncio.Event()
        self._mode: RelayMode | None = None
        self._fingerprint = ""
        self._channel: ClientSocket | None = None
        self._told = RelayRates()
        """Rates that the syncer knows, and bytes that it was told of over this channel."""
        self._told_before = (0, 0)
        """Bytes that it was told of over earlier channels."""
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def sums(self) -> bool:
        return self._mode is not None and self._mode.sums

    async def run(self) -> None:
        """Until the run is over. RelayEnded: the syncer does not want it."""
        self.upstream.open()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                await self.port.start()
                watch = tasks.create_task(self.port.vital.watch())
                rates = tasks.create_task(lasting("rates", self._tell_rates))
                with suppress(_Over):
                    await self._keep_connected()
                self._say("the run is over")
                watch.cancel()
                rates.cancel()
        finally:
            self.up = False
            # Learners go on directly from now, not when the port is closed.
            await self._close_passages("the relay ends")
            await self.port.stop()
            await self.upstream.close()

    # ---- the channel --------------------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        told = ""
        while True:
            reason = await self._connect()
            if reason != told:
                self._say(f"the syncer is out of reach ({reason}); dialling again")
            told = "" if self.up else reason
            await self._note_lost(reason)
            await asyncio.sleep(AGAIN_S)
            self.upstream.take_next_address()

    async def _connect(self) -> str:
        """Talk until the channel is lost; why it was."""
        try:
            self._channel = channel = await self.upstream.dial_own()
        except DialRefused as error:
            if error.status in (401, 403):
                raise RelayEnded(f"the syncer does not let this relay in: {error}") from None
            return str(error)
        except (Unreachable, PeerError) as error:
            return one_line(error)
        try:
            await send_frame(
                channel, encode_relay(RelayHello(protocol=PROTOCOL, name=self.name, session=self._session))
            )
            while (frame := await receive_frame(channel)).type is WSMsgType.BINARY:
                self._take(decode_to_relay(frame.data))
        except (Unreachable, PeerError) as error:
            return one_line(error)
        finally:
            with suppress(Unreachable, TimeoutError):
                await close_socket(channel)
        # Without a closing frame the link or the syncer died: it has closed nothing.
        return "it closed the channel" if frame.type is WSMsgType.CLOSE else "the connection to it broke"

    async def _note_lost(self, reason: str) -> None:
        up, down = self._told_before
        self._told_before = (up + self._told.bytes_up, down + self._told.bytes_down)
        self.up, self._channel, self._told = False, None, RelayRates()
        if self.bodies is not None:
            self.bodies.lose_syncer()
        await self._close_passages(f"it lost the syncer ({reason})")

    async def _close_passages(self, why: str) -> None:
        await asyncio.gather(*(passage.close(why) for passage in list(self.passages.values())))

    def _take(self, message: ToRelay) -> None:
        match message:
            case RelayRefused(reason=reason):
                raise RelayEnded(f"the syncer does not let this relay in: {reason}")
            case RunOver():
                raise _Over
            case RelayWelcome(run=run):
                self._take_run(run)
            case RelayMode():
                self._take_mode(message)
            case SumAsked():
                self._spawn(self._answer(message))
            case SumSettled():
                if self.bodies is not None:
                    self.bodies.settle(message)
            case HeldDropped(learner=learner, round=round, attempt=attempt):
                if self.bodies is not None:
                    self.bodies.drop((learner, round, attempt))

    def _take_run(self, run: str) -> None:
        self.versions.clear()  # a syncer that lost its disk's last writes may have come back with fewer versions
        if self.run_name and run != self.run_name:
            self.bodies, self._fingerprint = None, ""
        self.run_name, self.up = run, True
        self.connected.set()
        self._say(f"connected to run {run} at {self.upstream.url}")

    def _take_mode(self, mode: RelayMode) -> None:
        if mode != self._mode:
            summed = "contributions are summed here: one body for each round goes to the syncer"
            self._say(summed if mode.sums else f"contributions are passed on as they are: {mode.reason}")
        self._mode = mode

    # ---- sums ---------------------------------------------------------------------------------------------------

    async def _answer(self, asked: SumAsked) -> None:
        try:
            if (bodies := self.bodies) is None:
                raise ValueError("this relay holds nothing")
            keys = bodies.holdings.find_members(asked)
            began = time.monotonic()
            made = await asyncio.to_thread(bodies.make_sum, asked, bodies.find_bodies(keys))
            work_s = time.monotonic() - began
            ready = bodies.holdings.describe_sum(asked, keys, made.digest)
            bodies.note_sum(asked, made)
            await self.upstream.put_sum(asked.ask, made.data.data, made.digest, work_s)
        except (ValueError, PeerError, Unreachable) as error:
            await self._send(SumFailed(ask=asked.ask, reason=one_line(error)))
            return
        await self._send(ready)
        members = {one.learner: one.weight for one in asked.members}
        entry: dict[str, object] = {"round": asked.round, "fragment": asked.fragment, "members": members}
        self._log({**entry, "digest": made.digest, "bytes": made.data.nbytes, "rows": len(asked.rows)})

    async def _send(self, message: FromRelay) -> None:
        if self._channel is not None:
            with suppress(Unreachable):  # the reader hears of it
                await send_frame(self._channel, encode_relay(message))

    async def _tell_rates(self) -> None:
        told_at = 0.0
        while True:
            await asyncio.sleep(RATES_S)
            upstream, now = self.upstream, time.monotonic()
            rates = RelayRates(
                up_rate=upstream.ways.up.bytes_per_s,
                down_rate=upstream.ways.down.bytes_per_s,
                bytes_up=upstream.bytes_up - self._told_before[0],
                bytes_down=upstream.bytes_down - self._told_before[1],
            )
            is_news = have_changed(self._told, rates) or (rates != self._told and now >= told_at + TRAFFIC_S)
            if self.up and is_news:
                self._told, told_at = rates, now
                await self._send(rates)

    # ---- learners -----------------------------------------------------------------------------------------------

    def open_passage(self, passage: Passage) -> None:
        self.passages[passage.learner] = passage
        ranks = "; its bodies are passed on as they are: it has several ranks" if passage.has_ranks else ""
        self._say(f"{passage.learner} comes through{ranks}")

    def close_passage(self, passage: Passage) -> None:
        if self.passages.get(passage.learner) is passage:
            del self.passages[passage.learner]
            if self.bodies is not None:
                self.bodies.holdings.forget_learner(passage.learner)
            self._say(f"{passage.learner} is gone")

    async def take_welcome(self, passage: Passage, welcome: Welcome) -> None:
        """Before the learner hears of it: the plan by which its bodies are read."""
        for fragment, version in enumerate(welcome.versions):
            self.versions.note_version(fragment, version)
        tensors, passage.tensors = passage.tensors, ()
        if tensors and welcome.fingerprint != self._fingerprint:
            made = await asyncio.to_thread(HeldBodies, tensors, welcome.settings)
            if made.plan.fingerprint == welcome.fingerprint and welcome.fingerprint != self._fingerprint:
                self.bodies, self._fingerprint = made, welcome.fingerprint

    def take_pull(self, passage: Passage, pull: Pull) -> None:
        if self.sums and self.bodies is not None and not passage.has_ranks:
            self.bodies.expect((passage.learner, pull.round, pull.attempt), pull.fragment)

    async def reason_of(self, response: aiohttp.ClientResponse) -> str:
        return await reason_of(response)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)
