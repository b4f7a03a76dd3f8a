"""The learner's side of the fabric: a control channel that is dialled again and again, and bodies beside it.

Rules:
- trouble with the network is never raised by `run`: it is told to `on_lost`, and the syncer is dialled again after a
  wait drawn evenly from 0 to 0.1 s, 0.2 s, … 1 s; the first message that is no refusal sets the wait back;
- `send` never waits; it says False when the channel is down or its queue (1024 messages) is full (which drops it);
- where several addresses are named (a,b,c), a loss moves on to the next: a successor is found by itself;
- a relay (docs/adr/0032) is gone to once it is there: while a syncer is used, every other address that is a relay, or
  has not answered yet, is asked every few seconds whether it passes requests on, but not while the run ends;
- a syncer names the versions it understands when a channel opens; if ours is not among them it gets no message, and
  the learner hears a final refusal;
- every message is numbered, and no number comes twice in a session, also over another connection or another courier of
  the same training process;
- a dead syncer is noticed within 9 s by pings, at once where its machine says so;
- bodies travel on connections of their own (`bodies`) so that bulk never starves control.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import aiohttp
import msgspec

from atoll.fabric.address import SyncerAddress
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.calls import close_session, close_socket, dial_socket, open_session, receive_frame, send_frame
from atoll.fabric.control_channel import ClientSocket, SendQueue
from atoll.fabric.transfer import asked, reason_of, showing
from atoll.fabric.wire import (
    PROTOCOL_HEADER,
    RELAY_HEADER,
    FabricLimits,
    check_syncer_version,
    decode_from_syncer,
    encode,
    one_line,
)
from atoll.protocol.errors import PeerError, Unreachable, WrongCertificate
from atoll.protocol.messages import Ending, Finish, FromLearner, FromSyncer, Hello, Refused
from atoll.protocol.relay import RELAY_BACK

RELAY_S = 8.0
"""Between two looks whether a relay is there again, on average."""
LostPeer = Literal["syncer", "relay", ""]


class RelaySearch:
    """Which addresses are asked whether they are relays: those that are, and those that have not answered yet."""

    def __init__(self) -> None:
        self._is_relay: dict[str, bool] = {}

    def note_answer(self, url: str, *, is_relay: bool) -> bool:
        """Whether it is one. One that has said so stays one, also where an answer does not name it."""
        self._is_relay[url] = is_relay or self._is_relay.get(url, False)
        return self._is_relay[url]

    def is_relay(self, url: str) -> bool:
        return self._is_relay.get(url, False)

    def list_asked(self, urls: Sequence[str], used: str) -> list[str]:
        """While `used` is; none, where that is a relay."""
        if self.is_relay(used):
            return []
        return [url for url in urls if url != used and self._is_relay.get(url, True)]


class SyncerConnection(BodyConnection):
    """One learner's connection to its syncer. Belongs to one event loop; `run` is started once."""

    def __init__(
        self,
        where: str,
        *,
        hello: Callable[[], Hello],
        on_open: Callable[[], None],
        on_message: Callable[[FromSyncer], None],
        on_lost: Callable[[str], None],
        limits: FabricLimits | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(where, limits=limits)
        self._hello = hello
        self._on_open = on_open
        self._on_message = on_message
        self._on_lost = on_lost
        self._jitter = jitter
        self._outbox: SendQueue | None = None
        self._seq = time.monotonic_ns()
        """Of the last message. Where a courier died, its successor begins above whatever it had counted to."""
        self._backoff_s = self._limits.backoff_s
        self._control: aiohttp.ClientSession | None = None
        self._relays = RelaySearch()
        self.lost: LostPeer = "syncer"
        """Peer of the last loss, as `on_lost` got it; empty if this client left the syncer for its relay."""
        self.met_another = False
        """Whether somebody with another certificate answered the last dial."""
        self._back_to = ""
        """A relay that answers again."""
        self._closing = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def up(self) -> bool:
        return self._outbox is not None

    async def run(self) -> None:
        self._idle.clear()
        self._control = _control_session(self._address, self._limits, self._relays)
        try:
            while not self._closing.is_set():
                reason = await self._connected()
                if self._closing.is_set():
                    break
                self.lost = "relay" if self._relays.is_relay(self.url) else "syncer"
                if self._back_to:
                    self.lost, reason = "", RELAY_BACK
                self._on_lost(reason)
                await self._pause()
                self._take_next_address()
        finally:
            self._idle.set()
            await close_session(self._control, self._limits.flush_s)

    def send(self, message: FromLearner) -> bool:
        """Whether it is on its way; False says that it is not, and never will be."""
        if self._outbox is None:
            return False
        data = self._numbered(message)
        if self._outbox.put(data):
            self.bytes_out += len(data)
            return True
        self._outbox.close(discard=True)
        return False

    def hang_up(self) -> None:
        """Leave this syncer; the next address is dialled."""
        if self._outbox is not None:
            self._outbox.close(discard=True)

    async def close(self) -> None:
        """Sends what is queued (2 s at most), ends `run`, and cuts whatever is still on its way."""
        self._closing.set()
        if self._outbox is not None:
            self._outbox.close()
        try:
            async with asyncio.timeout(self._limits.flush_s):
                await self._idle.wait()
        except TimeoutError:
            pass  # the syncer does not take it: closing the session below cuts the connection
        if self._control is not None:
            await close_session(self._control, self._limits.flush_s)
        await super().close()

    def _miss_syncer(self) -> None:
        """The control channel says when it is lost."""

    async def _pause(self) -> None:
        wait_s = self._jitter() * self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._limits.backoff_cap_s)
        try:
            async with asyncio.timeout(wait_s):
                await self._closing.wait()
        except TimeoutError:
            pass  # the wait is over

    async def _connected(self) -> str:
        """Dial and talk until the channel is lost; why it was."""
        self.met_another = False
        try:
            socket = await self._dial()
        except TimeoutError:
            return f"{self._dialled} did not answer within {self._limits.dial_s:g} s{self._address.through}"
        except FinalRefusal as error:
            self._on_message(Refused(reason=str(error), final=True))
            return str(error)
        except (Unreachable, PeerError) as error:
            self.met_another = isinstance(error, WrongCertificate)
            return one_line(f"{self._dialled} cannot be reached: {error}")
        if self._closing.is_set():  # its training process ended: a hello now could take the name from a successor
            await close_socket(socket)
            return "it is closed"
        outbox = SendQueue(self._limits.send_queue)
        outbox.put(self._numbered(self._hello()))
        self._outbox = outbox
        try:
            self._on_open()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(socket, outbox))
                watch = tasks.create_task(self._watch_relays(outbox))
                reason = await self._read(socket, watch)
                watch.cancel()
                self._outbox = None
                outbox.close(discard=True)
        finally:
            self._outbox = None
            await close_socket(socket)  # also when this task is cancelled; a closed one stays as it is
        return reason

    async def _watch_relays(self, outbox: SendQueue) -> None:
        """Hang up when a relay answers, with the syncer behind it. It may be there for the first time."""
        while urls := self._relays.list_asked(self._urls, self.url):
            await asyncio.sleep(RELAY_S * (0.5 + self._jitter()))
            for url in urls:
                with suppress(PeerError, Unreachable):
                    async with asked(self._for_bodies(), "GET", f"{url}/v1/status", self._limits.dial_s) as answer:
                        if self._relays.note_answer(url, is_relay=RELAY_HEADER in answer.headers):
                            self._back_to = url
                            outbox.close()
                            return

    @property
    def _dialled(self) -> str:
        """Address of the last dial. It says that there are others, or a standby's looks like that of the syncer."""
        return f"{self.url} (one of {len(self._urls)} addresses)" if len(self._urls) > 1 else self.url

    def _take_next_address(self) -> None:
        super()._take_next_address()
        while self._back_to in self._urls and self.url != self._back_to:
            super()._take_next_address()
        self._back_to = ""

    def _numbered(self, message: FromLearner) -> bytes:
        self._seq += 1
        return encode(msgspec.structs.replace(message, seq=self._seq))

    async def _dial(self) -> ClientSocket:
        assert self._control is not None
        limits = self._limits
        async with asyncio.timeout(limits.dial_s):
            socket = await dial_socket(
                self._control,
                f"{self.url}/v1/control",
                timeout=aiohttp.ClientWSTimeout(ws_close=limits.flush_s),
                heartbeat=limits.ping_s,
                max_msg_size=limits.control_bytes,
                compress=0,
            )
        assert isinstance(socket, ClientSocket)
        return socket

    async def _read(self, socket: aiohttp.ClientWebSocketResponse, watch: asyncio.Task[None]) -> str:
        while True:
            try:
                frame = await receive_frame(socket)
            except Unreachable as error:
                return f"the control channel failed: {error}"
            if frame.type is not aiohttp.WSMsgType.BINARY:
                return _ending(socket, frame, "relay" if self._relays.is_relay(self.url) else "syncer")
            self.bytes_in += len(frame.data)
            try:
                message = decode_from_syncer(frame.data)
            except PeerError as error:
                return str(error)
            if not isinstance(message, Refused):
                self._backoff_s = self._limits.backoff_s
            if isinstance(message, Ending | Finish):
                watch.cancel()  # who hangs up now may miss the end of the run
            self._on_message(message)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse, outbox: SendQueue) -> None:
        with suppress(Unreachable, TimeoutError):  # closing it tells the reader
            await outbox.drain(lambda data: send_frame(socket, data), self._limits.send_s)
        await close_socket(socket, RELAY_BACK.encode() if self._back_to else b"")


def _ending(socket: aiohttp.ClientWebSocketResponse, frame: aiohttp.WSMessage, peer: str) -> str:
    if frame.type is aiohttp.WSMsgType.ERROR:
        return one_line(f"the control channel failed: {socket.exception() or frame.data}")
    if frame.type is aiohttp.WSMsgType.TEXT:
        return f"the {peer} sent text on the control channel"
    if frame.type is not aiohttp.WSMsgType.CLOSE:  # the link or the peer died, or this end gave it up
        return f"the connection to the {peer} broke"
    why = one_line(frame.extra or "")
    return f"the {peer} closed the control channel{': ' + why if why else ''}"


def _control_session(address: SyncerAddress, limits: FabricLimits, relays: RelaySearch) -> aiohttp.ClientSession:
    return open_session(
        connector=aiohttp.TCPConnector(limit=2, force_close=True, ssl=address.context() or True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits.dial_s),
        middlewares=[showing(address), _plain_answers(address, relays)],
        proxy=address.proxy or None,
        ws_response_class=ClientSocket,
    )


class FinalRefusal(PeerError):
    """The syncer does not let us in, or speaks another version: dialling again cannot help."""


def _plain_answers(address: SyncerAddress, relays: RelaySearch) -> aiohttp.ClientMiddlewareType:
    """A WebSocket's handshake would follow a redirect, and would not say why it was refused."""

    async def answer(request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        response = await handler(request)
        if 300 <= response.status < 400:
            response.close()
            raise PeerError("it answered with a redirect: is this a syncer?")
        if response.status == 503:  # a relay whose syncer is away
            try:
                raise PeerError(await reason_of(response))
            finally:
                response.close()
        if response.status in (401, 403):
            try:
                reason = await reason_of(response)
            finally:
                response.close()  # also when nobody waits for the reason any more
            if address.headers_for(str(request.url)).get("Authorization") != request.headers.get("Authorization"):
                raise PeerError(reason)  # its secrets were published since it was dialled: the next dial shows them
            raise FinalRefusal(reason)
        if response.status == 101:
            try:
                check_syncer_version(response.headers.get(PROTOCOL_HEADER))
            except PeerError as error:
                response.close()
                raise FinalRefusal(one_line(f"{request.url.origin()}: {error}")) from None
            relays.note_answer(str(request.url.origin()), is_relay=RELAY_HEADER in response.headers)
        return response

    return answer
