"""Whose a learner's name is while two processes ask for it.

Rules kept here, each with its test: the process that has the name keeps it while it lives; the same session is the same
process, on another connection; whoever proves to be its successor takes the name at once; a process that was succeeded
is dead, and its late hello takes nothing back; anybody else has the name only if the process before does not answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from hmac import compare_digest
from typing import Literal

import msgspec

from atoll.protocol.messages import Hello

Claim = Literal["same", "successor", "stranger"]
SUCCEEDED = "a later process of the same folder has had this name: this one is over"
REMEMBERED = 4
"""Processes of one folder, the newest, whose order is remembered."""


class Holder(msgspec.Struct, frozen=True):
    """A process that has a name, as its hello told."""

    session: str
    proof: str = ""
    """What a successor of it shows too; empty: it has none."""
    host: str = ""
    pid: int = 0

    def __repr__(self) -> str:
        """Leaves out the proof: it is a secret."""
        return f"Holder({self.session!r}, host={self.host!r}, pid={self.pid})"

    @classmethod
    def of(cls, hello: Hello, address: str = "") -> Holder:
        """`address`: where its connection comes from, for one that does not say where it is."""
        return cls(hello.session, hello.proof, hello.host or address, hello.pid)


def judge_claim(holder: Holder, claimant: Holder) -> Claim:
    """What another hello under the name of `holder` is. A stranger has to wait for whether the holder answers."""
    if claimant.session == holder.session:
        return "same"
    proves = bool(holder.proof) and compare_digest(holder.proof.encode(), claimant.proof.encode())
    return "successor" if proves else "stranger"


class Predecessors:
    """Which processes were succeeded. A folder belongs to one process at a time, so they are dead; but a courier that
    was dialling when its process was killed still says hello, and shows the same proof as the successor."""

    def __init__(self, most: int) -> None:
        """`most`: of so many folders, those that were heard of last."""
        self._most = most
        self._sessions: OrderedDict[tuple[str, str], deque[str]] = OrderedDict()
        """By the learner's name and its folder's proof, in the order of their first hellos."""

    def has_process(self, name: str, claimant: Holder) -> bool:
        sessions = self._sessions.get((name, claimant.proof))
        return sessions is not None and claimant.session in sessions and claimant.session != sessions[-1]

    def note_hello(self, name: str, holder: Holder) -> None:
        """It was let in."""
        if not holder.proof:
            return
        sessions = self._sessions.setdefault((name, holder.proof), deque(maxlen=REMEMBERED))
        if holder.session not in sessions:
            sessions.append(holder.session)
        self._sessions.move_to_end((name, holder.proof))
        if len(self._sessions) > self._most:
            self._sessions.popitem(last=False)


def tell_taken(name: str, host: str, pid: int) -> str:
    """What the second process of a name is told."""
    where = f", from {host}" if host else ""
    return f"{name} is here already{where}{f', pid {pid}' if pid else ''}: choose another --name (ATOLL_LEARNER)"
