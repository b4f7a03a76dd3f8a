"""Whose a learner's name is while two processes ask for it.

Rules kept here, each with its test: the process that has the name keeps it while it lives; the same session is the same
process, on another connection; whoever proves to be its successor takes the name at once; a process that was succeeded
is dead, and its late hello takes nothing back; anybody else has the name only if the process before does not answer.
"""

from __future__ import annotations

from collections import OrderedDict
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
    life: int = 0
    """The incarnation that it knew itself to be in; 0: it has had none yet."""

    def __repr__(self) -> str:
        """Leaves out the proof: it is a secret."""
        return f"Holder({self.session!r}, host={self.host!r}, pid={self.pid})"

    @classmethod
    def of(cls, hello: Hello, address: str = "") -> Holder:
        """`address`: where its connection comes from, for one that does not say where it is."""
        return cls(hello.session, hello.proof, hello.host or address, hello.pid, hello.incarnation)


def judge_claim(holder: Holder, claimant: Holder) -> Claim:
    """What another hello under the name of `holder` is. A stranger has to wait for whether the holder answers."""
    if claimant.session == holder.session:
        return "same"
    proves = bool(holder.proof) and compare_digest(holder.proof.encode(), claimant.proof.encode())
    return "successor" if proves else "stranger"


class Predecessors:
    """Which processes were succeeded. A folder belongs to one process at a time, so they are dead; but a courier that
    was dialling when its process was killed still says hello, and shows the same proof as the successor.

    The newest `REMEMBERED` of a folder are known by session. Any other that has had a life is held against the newest:
    by the numbers of their lives or, while the newest has shown none, as one of those that were forgotten. All of it is
    in memory: a new syncer begins with nothing."""

    def __init__(self, most: int) -> None:
        """`most`: of so many folders, those that were heard of last."""
        self._most = most
        self._lives: OrderedDict[tuple[str, str], dict[str, int]] = OrderedDict()
        """By the learner's name and its folder's proof: the sessions, in the order of their first hellos, with the
        first incarnation that each has named: one that came late may have been given a later one since."""

    def has_process(self, name: str, claimant: Holder) -> bool:
        if not (lives := self._lives.get((name, claimant.proof))):
            return False
        newest = list(lives)[-1]
        if claimant.session in lives:
            return claimant.session != newest
        if lives[newest]:
            return 0 < claimant.life < lives[newest]
        return claimant.life > 0 and len(lives) == REMEMBERED

    def note_hello(self, name: str, holder: Holder) -> None:
        """It was let in."""
        if not holder.proof:
            return
        lives = self._lives.setdefault((name, holder.proof), {})
        lives[holder.session] = lives.get(holder.session) or holder.life
        if len(lives) > REMEMBERED:
            del lives[next(iter(lives))]
        self._lives.move_to_end((name, holder.proof))
        if len(self._lives) > self._most:
            self._lives.popitem(last=False)


def tell_taken(name: str, host: str, pid: int) -> str:
    """What the second process of a name is told."""
    where = f", from {host}" if host else ""
    return f"{name} is here already{where}{f', pid {pid}' if pid else ''}: choose another --name (ATOLL_LEARNER)"
