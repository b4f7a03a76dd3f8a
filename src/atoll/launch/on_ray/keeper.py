"""A keeper: one process of a run on this node, started as the controller says, watched, and ended with the keeper.

It decides nothing. Every answer has `life`, a word of this keeper's own: another word means that Ray started the keeper
again, perhaps on another node, and that the process it had is gone.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from functools import partial
from pathlib import Path

import msgspec

from atoll.launch.children import Child
from atoll.launch.environment import VISIBLE
from atoll.launch.ranks import RankPlace, RankProcesses, find_free_port
from atoll.protocol.errors import ConfigError


class ProcessOrder(msgspec.Struct, frozen=True):
    """What a keeper starts. The variables may hold a token: this travels as the argument of a call."""

    name: str
    arguments: tuple[str, ...]
    """Of this node's own Python."""
    env: dict[str, str]
    missing: dict[str, str]
    """Variables that are set where this node sets none."""
    log: str
    folder: str
    obeys: bool = False
    ranks: int = 0
    """On this node; 0: it is no group, and knows of no ranks."""
    place: RankPlace = RankPlace()
    nice: int = 0
    tag: str = ""
    """What the controller wants to know again of this start."""


class KeeperReport(msgspec.Struct, frozen=True):
    life: str
    node: str
    """Its address."""
    number: int = 0
    """How many processes were started in this life."""
    running: bool = False
    pid: int = 0
    code: int | None = None
    more_pids: dict[str, int] = {}
    """Of a group's ranks besides the first."""
    ended: str = ""
    """Whose end was the group's: a log's name."""
    tag: str = ""
    node_id: str = ""
    port: int = 0
    """One that was free when it was asked for, for ranks to meet."""


class Keeper:
    def __init__(self, address: str = "", node_id: str = "") -> None:
        """`address`: of this node, as others reach it."""
        self._life, self._address, self._node_id = secrets.token_hex(8), address, node_id
        self._child: Child | None = None
        self._number, self._pid, self._code, self._tag = 0, 0, 0, ""

    def start(self, order: bytes) -> bytes:
        said = msgspec.msgpack.decode(order, type=ProcessOrder)
        if self._child is not None and self._child.running:
            self._child.kill_all()
        if not Path(said.folder).is_dir():
            raise ConfigError(f"this node does not see {said.folder}, where {said.name} is to be started")
        self._child = make_child(said)
        self._child.start()
        self._number, self._pid, self._tag = self._number + 1, self._child.pid, said.tag
        return self.report()

    def report(self) -> bytes:
        child, code = self._child, None
        if child is not None and (found := child.poll_exit()) is not None:
            self._code = found
        if child is not None and not child.started:
            code = self._code
        running = child is not None and code is None
        more = child.more_pids if child is not None and running else {}
        ended = child.ended.log.name if child is not None and code is not None else ""
        told = KeeperReport(self._life, self._address, self._number, running, self._pid, code, more, ended)
        return msgspec.msgpack.encode(msgspec.structs.replace(told, tag=self._tag, node_id=self._node_id))

    def find_place(self) -> bytes:
        """Where this is, with a port at which the ranks of several nodes may meet."""
        here = msgspec.msgpack.decode(self.report(), type=KeeperReport)
        return msgspec.msgpack.encode(msgspec.structs.replace(here, port=find_free_port(self._address)))

    def send_order(self, line: str) -> None:
        if self._child is not None:
            self._child.send_order(line)

    def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.signal(signal.Signals(number))

    def signal_all(self, number: int) -> None:
        if self._child is not None:
            self._child.signal_all(signal.Signals(number))

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill_all()


def make_child(said: ProcessOrder) -> Child:
    """As the order says, with what this node has."""
    missing = {name: value for name, value in said.missing.items() if name not in os.environ and name != VISIBLE}
    make = partial(RankProcesses, count=said.ranks, place=said.place) if said.ranks else Child
    return make(
        said.name,
        [sys.executable, *said.arguments],
        {**missing, **said.env},
        Path(said.log),
        obeys=said.obeys,
        nice=said.nice,
        folder=Path(said.folder),
    )
