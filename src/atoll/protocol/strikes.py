"""What a refusal costs a learner: its numbers are broken, or not to be believed.

Rules kept here, each with its test: three refusals in a row send a learner into recovery, as a new life that takes the
run's parameters and another inner optimizer; meanwhile it is in quarantine: no round waits for it, it helps nobody. The
peer whose state a newcomer refused, or went into quarantine with, gets a strike too, and that newcomer never asks it
again.
"""

from __future__ import annotations

from atoll.protocol.accounts import Accounts
from atoll.protocol.attendance import Attendance
from atoll.protocol.membership import Learner, Membership
from atoll.protocol.messages import Recover
from atoll.protocol.outbox import Outbox
from atoll.protocol.peers import Peers
from atoll.protocol.rounds import Rounds
from atoll.protocol.settings import Settings


class Strikes:
    def __init__(
        self,
        settings: Settings,
        members: Membership,
        accounts: Accounts,
        rounds: Rounds,
        peers: Peers,
        attendance: Attendance,
        out: Outbox,
    ) -> None:
        self.settings, self.members, self.accounts, self.rounds = settings, members, accounts, rounds
        self.peers, self.attendance, self.out = peers, attendance, out

    def strike(self, now: float, learner: Learner, what: str, reason: str, **data: object) -> None:
        """`what` was refused."""
        learner.strikes += 1
        self.out.note("refused", f"{what}: {reason}", learner, **data, reason=reason)
        if learner.strikes >= self.settings.strikes:
            self.quarantine(now, learner, f"after {learner.strikes} refusals in a row", reason)

    def strike_helper(self, now: float, peer: Learner, newcomer: Learner, reason: str) -> None:
        """For the state that it gave the newcomer."""
        self.strike(now, peer, f"state of {peer.name} refused by {newcomer.name}", reason, newcomer=newcomer.name)

    def quarantine(self, now: float, learner: Learner, when: str, reason: str) -> None:
        text = f"{learner.name} is in quarantine {when}; it recovers from the run"
        self.out.note("quarantined", text, learner)
        self.rounds.unseat(learner, "it is in quarantine")
        self.peers.lost(learner, "it is in quarantine")
        self.attendance.close(learner, f"its numbers are broken: {reason}")
        self.members.restart(now, learner)
        self.accounts.open(learner)
        self.out.send(learner.name, Recover(incarnation=learner.incarnation, reason=reason))
        self._doubt_its_helper(now, learner, reason)

    def _doubt_its_helper(self, now: float, learner: Learner, reason: str) -> None:
        peer, learner.helper = self.members.learners.get(learner.helper), ""
        if peer is not None and peer.session not in learner.distrusted:
            learner.distrusted.add(peer.session)
            if peer.connected and not peer.closed:
                self.strike_helper(now, peer, learner, f"it went into quarantine with it: {reason}")
