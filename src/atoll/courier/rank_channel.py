"""The socket between the couriers of one learner: rank 0's leads, the others follow.

    leader → follower    the frames that all training processes get (`is_counted`), as they are; Goodbye
                         UploadPart  FetchPart  RunKnown  ShardsKnown, and the effects Settle, DropRests, UploadAll
    follower → leader    PartUploaded  PartArriving  PartFetched  PartLacking  BoxReady  RankFailed
                         and of its training process's frames CopyMade, SlotFreed, VersionTaken, Saved, Goodbye

Both prove that they know the learner's secret before the first frame, and neither shows it: each answers the other's
random bytes. What is sent afterwards is not encrypted, like everything between the ranks of a process group. Nothing
here waits to send: a follower that does not take what it is told is lost.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import msgspec

from atoll.mailbox.channel import (
    COUNTED,
    CopyMade,
    CourierChannel,
    Frame,
    Goodbye,
    SlotFreed,
    StopOrder,
    VersionTaken,
    decode_frame,
)
from atoll.protocol.errors import PeerError
from atoll.protocol.learner import effects as fx

COMES_S = 60.0
"""Within this all ranks have come, or the learner ends."""
PROOF_S = 10.0
"""A connection proves the secret within this."""
MOST_STRANGERS = 256
"""Connections that have proved nothing yet; beyond them the oldest is closed."""
MOST_WAITING = 10_000
"""Frames that a follower has not taken; beyond them it is lost."""
LACKING_S = 0.5
"""Time between two reports of what a rank lacks."""
RANDOM_BYTES = 32
PROOF_BYTES = 32
SILENT_S = 20
"""A machine that is gone without a word is noticed after about this long."""


class UploadPart(Frame, frozen=True):
    """Encode what this rank sends of a copy, and send it as its part of the answer to a pull."""

    ask: int
    round: int
    attempt: int
    fragment: int
    slot: int
    t: int
    base: int = -1
    """The version that the copy was made on. A rank that has another one by now cannot answer."""


class PartUploaded(Frame, frozen=True):
    ask: int
    digests: tuple[tuple[int, str], ...] = ()
    """Of the bodies that this rank sent, with the shards that have them. None: it sends nothing of the fragment."""
    reason: str = ""
    """Why it did not arrive."""
    nbytes: int = 0
    """Size of the bodies together."""
    seconds: float = 0.0
    """Seconds that they took, as in `fx.Uploaded`."""


class FetchPart(Frame, frozen=True):
    """Get this rank's part of the newest version into this slot."""

    fragment: int
    slot: int


class PartArriving(Frame, frozen=True):
    """Little of this rank's part is still to come, as in `fx.Arriving`."""

    fragment: int


class PartFetched(Frame, frozen=True):
    fragment: int
    version: int | None = None
    """None: this rank holds nothing of the fragment, so any version will do."""
    reason: str = ""
    """Why it could not be fetched."""
    nbytes: int = 0
    """Bytes that arrived, as in `fx.Fetched`."""
    seconds: float = 0.0
    """Seconds that they took, as in `fx.Fetched`."""
    latency_s: float = 0.0
    """Seconds from the request to the first piece."""


class PartLacking(Frame, frozen=True):
    """Bytes of the run's parameters that this rank neither holds nor has received, while it joins."""

    nbytes: int


class BoxReady(Frame, frozen=True):
    """A rank's shared memory is there, and holds these versions, per fragment: in its model, and in its base."""

    adopted: tuple[int, ...]
    base: tuple[int, ...]


class RunKnown(Frame, frozen=True):
    """For the head of the shared memory."""

    run: str
    incarnation: int
    term: int


class ShardsKnown(Frame, frozen=True):
    """Where shards 2, 3 … of the syncer are; none: it is one process."""

    addresses: tuple[str, ...]


class RankFailed(Frame, frozen=True):
    """This rank cannot do what it was told: the learner ends."""

    reason: str


FromFollower = (
    PartUploaded
    | PartArriving
    | PartFetched
    | PartLacking
    | BoxReady
    | RankFailed
    | CopyMade
    | SlotFreed
    | VersionTaken
    | fx.Saved
    | Goodbye
)
BETWEEN_COURIERS = (UploadPart, FetchPart, RunKnown, ShardsKnown, fx.Settle, fx.DropRests, fx.UploadAll, Goodbye)
FROM_LEADER = {kind.__name__: kind for kind in (*BETWEEN_COURIERS, *COUNTED, StopOrder)}
FROM_FOLLOWER = {kind.__name__: kind for kind in get_args(FromFollower)}


RunCallback = Callable[[Callable[[], None]], None]


class RankChannel:
    """One end, once both have proved the secret. It reads and writes by itself until it is closed or lost."""

    def __init__(
        self,
        sock: socket.socket,
        kinds: dict[str, Any],
        on_frame: Callable[[Any], None],
        on_lost: Callable[[str], None],
        run_callback: RunCallback,
    ) -> None:
        """`on_lost` is called once, with the reason, unless this end is closed first. `run_callback` ends the courier
        where something raises."""
        _watch_machine(sock)
        self._channel = CourierChannel(sock)
        self._kinds, self._on_frame, self._on_lost = kinds, on_frame, on_lost
        self._loop = asyncio.get_running_loop()
        self._writing = self._over = False
        self._loop.add_reader(sock, run_callback, self._read)

    def send(self, frame: msgspec.Struct) -> None:
        if self._over:
            return
        self._channel.send(frame)
        if self._channel.waiting > MOST_WAITING:
            self._lose("it does not take what it is told")
        elif self._channel.clogged and not self._writing:
            self._writing = True
            self._loop.add_writer(self._channel.sock, self._write)

    def close(self) -> None:
        """What waits is sent as far as the socket takes it."""
        if not self._over:
            self._over = True
            self._channel.flush()
            self._loop.remove_reader(self._channel.sock)
            self._loop.remove_writer(self._channel.sock)
            self._channel.close()

    def _write(self) -> None:
        if self._channel.flush():
            self._writing = False
            self._loop.remove_writer(self._channel.sock)

    def _read(self) -> None:
        try:
            frames = [decode_frame(data, self._kinds) for data in self._channel.receive()]
        except (PeerError, msgspec.MsgspecError) as error:
            self._lose(f"it sent what is no frame: {error}")
            return
        for frame in frames:
            if not self._over:
                self._on_frame(frame)
        if self._channel.closed:
            self._lose("its courier is gone")

    def _lose(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._on_lost(reason)


def _watch_machine(sock: socket.socket) -> None:
    """Frames go at once, and a machine that is gone is noticed while nothing is sent."""
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": SILENT_S // 2, "TCP_KEEPINTVL": SILENT_S // 4, "TCP_KEEPCNT": 2}
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**options, "TCP_USER_TIMEOUT": 1000 * SILENT_S}.items():
        if hasattr(socket, name):  # not every system has them all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- proving the secret ---------------------------------------------------------------------------------------------


async def prove_to_leader(sock: socket.socket, secret: str, rank: int) -> None:
    """The follower's side. PeerError: the other end does not know the secret, or does not want us."""
    loop, mine = asyncio.get_running_loop(), secrets.token_bytes(RANDOM_BYTES)
    theirs = await _receive(sock, RANDOM_BYTES)
    said = rank.to_bytes(4, "little") + theirs + mine
    await loop.sock_sendall(sock, said[:4] + mine + _proof(secret, b"follower", said))
    if not hmac.compare_digest(await _receive(sock, PROOF_BYTES), _proof(secret, b"leader", said)):
        raise PeerError("it does not know this learner's secret")


async def check_follower(sock: socket.socket, secret: str) -> int:
    """The leader's side: the rank that proved the secret. PeerError: it did not."""
    loop, mine = asyncio.get_running_loop(), secrets.token_bytes(RANDOM_BYTES)
    await loop.sock_sendall(sock, mine)
    answer = await _receive(sock, 4 + RANDOM_BYTES + PROOF_BYTES)
    said = answer[:4] + mine + answer[4 : 4 + RANDOM_BYTES]
    if not hmac.compare_digest(answer[4 + RANDOM_BYTES :], _proof(secret, b"follower", said)):
        raise PeerError("it does not know this learner's secret")
    await loop.sock_sendall(sock, _proof(secret, b"leader", said))
    return int.from_bytes(answer[:4], "little")


def _proof(secret: str, who: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.encode(), who + said, "sha256")


async def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not more:
            raise PeerError("it ended the connection: is it of another learner?")
        data += more
    return data


async def dial_leader(address: str, secret: str, rank: int, deadline_s: float = COMES_S) -> socket.socket:
    """PeerError in one line where that does not lead to the leader."""
    host, _, port = address.rpartition(":")
    sock: socket.socket | None = None
    try:
        async with asyncio.timeout(deadline_s):
            sock = await _connect(host.strip("[]"), int(port))
            await prove_to_leader(sock, secret, rank)
        return sock
    except (OSError, ValueError, PeerError) as error:  # a timeout is an OSError
        if sock is not None:
            sock.close()
        why = f"no answer within {deadline_s:g} s" if isinstance(error, TimeoutError) else str(error)
        raise PeerError(f"rank {rank} does not reach rank 0 at {address}: {why}") from error
    except asyncio.CancelledError:
        if sock is not None:
            sock.close()
        raise


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    error: OSError | None = None
    for family, kind, protocol, _, where in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, where)
            return sock
        except OSError as failed:
            error = failed
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise
    raise error or OSError(f"no address of {host}")


class Arrivals:
    """The leader's open door: each rank comes once, proves the secret, and is handed on."""

    def __init__(self, listener: socket.socket, learner: str, ranks: int, secret: str) -> None:
        self._listener, self._learner, self._ranks, self._secret = listener, learner, ranks, secret
        self._missing = set(range(1, ranks))
        self._complete = asyncio.Event()
        self._proving: dict[asyncio.Task[None], socket.socket] = {}
        """The oldest first."""
        listener.setblocking(False)

    async def wait_for_all(self, take: Callable[[int, socket.socket], None], deadline_s: float = COMES_S) -> None:
        """PeerError names who did not come. `take` is handed every rank that has come."""
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as tasks:
                doors = tasks.create_task(self._accept(take, tasks))
                if self._missing:
                    await self._complete.wait()
                for task in [doors, *self._proving]:
                    task.cancel()
        except TimeoutError:
            raise PeerError(f"{self._name_missing()} did not come within {deadline_s:g} s") from None
        finally:
            self._listener.close()

    async def _accept(self, take: Callable[[int, socket.socket], None], tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            if len(self._proving) >= MOST_STRANGERS:
                next(iter(self._proving)).cancel()
            task = tasks.create_task(self._let_in(sock, take))
            self._proving[task] = sock
            task.add_done_callback(self._end_proof)

    def _end_proof(self, task: asyncio.Task[None]) -> None:
        sock = self._proving.pop(task)
        if task.cancelled():
            sock.close()

    async def _let_in(self, sock: socket.socket, take: Callable[[int, socket.socket], None]) -> None:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(PROOF_S):
                rank = await check_follower(sock, self._secret)
        except (OSError, PeerError):
            sock.close()  # a stranger; if it is one of ours, its rank will be missing
            return
        if rank not in self._missing:
            self._turn_away(rank, sock)
            return
        self._missing.discard(rank)
        take(rank, sock)
        if not self._missing:
            self._complete.set()

    def _turn_away(self, rank: int, sock: socket.socket) -> None:
        """It knows the secret, so it is told why."""
        known = rank < self._ranks
        why = "has come already" if known else f"is not among its {self._ranks} ranks"
        channel = CourierChannel(sock)
        with suppress(OSError):
            channel.send(StopOrder(f"rank {rank} of {self._learner} {why}", final=True, failed=True))
        channel.close()

    def _name_missing(self) -> str:
        names = [str(rank) for rank in sorted(self._missing)]
        which = f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
        return f"{which} of {self._learner}"
