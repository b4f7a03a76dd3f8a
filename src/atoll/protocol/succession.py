"""Whose a learner's name is while two processes ask for it.

Rules kept here, each with its test: the process that has the name keeps it while it lives; the same session is the same
process, on another connection; whoever proves to be its successor takes the name at once; anybody else has it only if
the process before does not answer.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Literal

import msgspec

from atoll.protocol.messages import Hello

Claim = Literal["same", "successor", "stranger"]


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


def tell_taken(name: str, host: str, pid: int) -> str:
    """What the second process of a name is told."""
    where = f", from {host}" if host else ""
    return f"{name} is here already{where}{f', pid {pid}' if pid else ''}: choose another --name (ATOLL_LEARNER)"
