"""The ranks of one learner: R processes of its script, which are started, ended and started again as one.

Each has what torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), and all
have the learner's name. The ranks see the same GPUs, those of their learner: LOCAL_RANK says which one is whose. Rules:
- every start has a port of its own;
- when a rank dies, the others are asked to end (SIGTERM) and killed `TERM_S` later: they could only wait for it. The
  group then ended as that rank did;
- when a rank ends with 0, the others have `EXIT_S` to do so too; then they are ended in the same way;
- a signal to the learner goes to all its ranks.

Ranks of a data-parallel run are hidden from the script (learner/averaging.py): they have variables of Atoll's own, and
each sees the GPUs that a learner would.

A learner over several machines has such a group on each of them, with a part of its ranks (`RankPlace`).
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

import msgspec

from atoll.launch.children import Child, read_script_error
from atoll.launch.environment import VISIBLE, assign_devices, parse_visible
from atoll.launch.script import TERM_S

EXIT_S = 300.0
"""As torchrun waits: one rank may have something to write at the end, and one that waits for a peer never ends."""
LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""Linux: the address of an interface."""
_PEER_GONE = re.compile(r"gloo|nccl|torch\.distributed|(closed|reset) by peer", re.IGNORECASE)


class RankPlace(msgspec.Struct, frozen=True):
    """Which ranks of a learner are on this machine, and where they all meet."""

    first: int = 0
    """The number of the first rank here."""
    world: int = 0
    """All ranks, also those elsewhere; 0: all are here."""
    master: str = LOOPBACK
    """The address of rank 0's machine."""
    port: int = 0
    """0: any that is free at the start."""
    address: str = ""
    """Of this machine, as the others reach it."""


@dataclass
class RankProcesses(Child):
    """`process` is that of the first rank here, until all have ended."""

    count: int = 2
    place: RankPlace = field(default_factory=RankPlace)
    hidden: bool = False
    """The script knows nothing of ranks: its learner averages the gradients."""
    ranks: list[Child] = field(init=False)
    _codes: dict[int, int] = field(default_factory=dict, repr=False)
    """Of the ranks that have ended, by their number."""
    _culprit: int | None = field(default=None, repr=False)
    """The rank that ended the group."""
    _kill_at: float | None = field(default=None, repr=False)
    _end_at: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.ranks = [self._make_rank(rank) for rank in range(self.count)]

    def _make_rank(self, rank: int) -> Child:
        number = self.place.first + rank
        name = f"{self.log.stem} rank {number}" if max(self.count, self.place.world) > 1 else self.name
        log = self.log.with_name(f"{self.log.stem}.rank{number}.log") if number else self.log
        return Child(name, self.command, {}, log, nice=self.nice, folder=self.folder)

    def start(self) -> None:
        self._codes.clear()
        self._culprit = self._kill_at = self._end_at = None
        place = msgspec.structs.replace(self.place, port=self.place.port or find_free_port())
        for rank, child in enumerate(self.ranks):
            if self.hidden:
                variables = make_hidden_variables(rank, self.count, place, self.env.get(VISIBLE, ""))
            else:
                variables = make_rank_variables(rank, self.count, place)
            child.env = {**self.env, **variables}
            child.start()
        self.process = self.ranks[0].process
        self._started_at, self._restart_at = time.monotonic(), None

    @property
    def running(self) -> bool:
        return any(rank.running for rank in self.ranks)

    @property
    def ended(self) -> Child:
        return self if self._culprit is None else self.ranks[self._culprit]

    @property
    def more_pids(self) -> dict[str, int]:
        others = [rank for rank in self.ranks if rank.log != self.log]
        return {rank.log.stem: rank.process.pid for rank in others if rank.process is not None}

    def poll_exit(self) -> int | None:
        """The exit code of the rank that ended the group, told once, when all ranks are gone."""
        if self.process is None:
            return None
        now = time.monotonic()
        new = {rank: code for rank, child in enumerate(self.ranks) if (code := child.poll_exit()) is not None}
        self._codes |= new
        if self._culprit is None and any(new.values()):
            self._end_others(now, self._find_culprit({rank: code for rank, code in new.items() if code}))
        elif new and self._end_at is None:
            self._end_at = now + EXIT_S
        if len(self._codes) < self.count:
            self._end_late(now)
            return None
        self.process = None
        return 0 if self._culprit is None else self._codes[self._culprit]

    def _end_others(self, now: float, culprit: int) -> None:
        self._culprit, self._kill_at = culprit, now + TERM_S
        self.signal(signal.SIGTERM)

    def _end_late(self, now: float) -> None:
        if self._kill_at is not None and now >= self._kill_at:
            self.signal_all(signal.SIGKILL)
        elif self._culprit is None and self._end_at is not None and now >= self._end_at:
            self._end_others(now, next(rank for rank in range(self.count) if rank not in self._codes))

    def _find_culprit(self, died: dict[int, int]) -> int:
        """The rank that died first, of those that died between two looks."""
        return min(died, key=lambda rank: (*weigh_innocence(died[rank], self.ranks[rank]), rank))

    # ---- what is done to the learner is done to all its ranks -------------------------------------------------------

    def give_way(self, nice: int) -> None:
        for rank in self.ranks:
            rank.give_way(nice)

    def signal_all(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal_all(number)

    def signal(self, number: signal.Signals) -> None:
        for rank in self.ranks:
            rank.signal(number)

    def kill_all(self) -> None:
        self.cancel_restart()
        for rank in self.ranks:
            rank.kill_all()


def weigh_innocence(code: int, rank: Child) -> tuple[bool, bool, bool]:
    """The least of several is the one whose death ended the others: a rank that loses its peer ends with 1, mostly with
    an exception of torch.distributed."""
    error = read_script_error(rank.read_log_tail())
    lost_peer = error is not None and _PEER_GONE.search(f"{error.kind}: {error.text}") is not None
    return code == 1, lost_peer, error is None


def make_rank_variables(rank: int, count: int, place: RankPlace) -> dict[str, str]:
    """As torchrun names them, for the ranks on this machine, `count` of them."""
    return {
        "RANK": str(place.first + rank),
        "WORLD_SIZE": str(place.world or count),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port),
        **_name_interface(place.address or place.master),
    }


def make_hidden_variables(rank: int, count: int, place: RankPlace, visible: str) -> dict[str, str]:
    """For the ranks of a data-parallel run. Where each has a GPU of its own, NCCL averages what is on it."""
    devices = parse_visible(visible)
    variables = {
        "ATOLL_RANK": str(rank),
        "ATOLL_RANKS": str(count),
        "ATOLL_MEETING": f"tcp://{place.master}:{place.port}",
        "ATOLL_BACKEND": "cpu:gloo,cuda:nccl" if len(devices) >= count else "gloo",
    }
    if (dealt := assign_devices(devices, count)) is not None:
        variables[VISIBLE] = ",".join(dealt.devices_of(rank))
    return variables | _name_interface(place.master)


def _name_interface(address: str) -> dict[str, str]:
    """Gloo asks for the machine's name where it is not told its interface, and that may resolve nowhere."""
    interface = find_interface(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}


def find_interface(address: str) -> str:
    """Of this machine, the one that has this address; empty: none that we know of."""
    if sys.platform != "linux":
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return ""


def find_free_port(address: str = LOOPBACK) -> int:
    """Nobody holds it for us: a process that finds it taken is started again with another."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])
