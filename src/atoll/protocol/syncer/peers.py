"""How a newcomer gets an inner optimizer: its parameters come from the syncer, the optimizer's state from a peer.

A newcomer in a running run, and a learner in quarantine, asks for a peer (Seek). The syncer asks a healthy
peer (Help), by chance among those that help the fewest. Once a copy of that peer's state is ready (Ready), the newcomer
is told (Helped), gets it from the peer directly or through the relay, and reports the outcome (Settled). The syncer
only arranges this; it stores none of it.

Rules kept here, each with its test:
- only a live learner that still steps, and that has no strike, helps;
- several newcomers are spread over several peers;
- if a peer goes away, declines or takes too long, the next try goes to one that has not failed, if there is one; two
  tries are enough;
- a peer whose state was refused gets one strike, and is not chosen for that process again (forgotten when either that
  process or the syncer restarts);
- in a run that is opened again, those of its last rounds are given the time to come back;
- if no peer comes in time (`_patience_s`), or after two tries, the newcomer goes on with a fresh inner optimizer;
- it is a member of no round before that is settled;
- tickets and chance come from the sessions of both, which nobody else knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocol.learner.peer_state import BYTES_PER_S
from atoll.protocol.messages import Fresh, Help, Helped, Ready, Release, Settled, Stream, Unable
from atoll.protocol.syncer.membership import KnownLearner
from atoll.protocol.syncer.state import SyncerState

BOUND_S = 10.0
"""A try may take at least this long; also at least max(H, P) rounds, and what its bytes need."""
TRIES = 2
ADDRESS_CHARS = 256


@dataclass(slots=True)
class Recovery:
    """One newcomer, and the peer that helps it now."""

    newcomer: KnownLearner
    incarnation: int
    after: int
    """Rounds that were committed when it asked; for the event's text only."""
    since: float
    """When it asked."""
    tries: int = 0
    peer: KnownLearner | None = None
    ticket: str = ""
    asked_at: float = 0.0
    asked_round: int = 0
    ready: Ready | None = None
    failed: dict[str, str] = field(default_factory=dict)
    """Peers that did not help, and why."""
    declined: set[str] = field(default_factory=set)
    frozen: bool = False
    """It needs frozen parameters too."""

    def trusts(self, peer: KnownLearner) -> bool:
        return peer.name not in self.declined and peer.session not in self.newcomer.distrusted

    def wrong_helper(self, peer: str) -> str:
        """Why this one cannot have helped. The newcomer says who did, and a helper may get a strike for it: so only a
        peer that was asked may be named."""
        asked = peer in self.failed or (self.peer is not None and self.peer.name == peer)
        return "" if asked else f"it says that {peer} helped, which was not asked"

    @property
    def why(self) -> str:
        """What went wrong before."""
        return "; ".join(f"{peer}: {reason}" for peer, reason in self.failed.items())


class Peers:
    def __init__(self, state: SyncerState) -> None:
        self.state = state
        self.open: dict[str, Recovery] = {}
        """By the newcomer's name."""
        self._tickets = 0

    # ---- what the newcomer says ---------------------------------------------------------------------------------

    def begin_recovery(self, now: float, newcomer: KnownLearner, after: int, *, frozen: bool = False) -> None:
        """It cannot contribute until this is settled."""
        self.end_recovery(newcomer, "it asks anew")
        newcomer.state, newcomer.recovered = "joining", False
        self.state.members.update_medians(newcomer)
        self.open[newcomer.name] = Recovery(newcomer, newcomer.incarnation, after, now, frozen=frozen)

    def settle_recovery(self, now: float, newcomer: KnownLearner, said: Settled) -> KnownLearner | None:
        """The peer whose state was refused, where that is a strike."""
        if (recovery := self.open.get(newcomer.name)) is None:
            return None
        if said.again:
            return self._try_another(recovery, said)
        if wrong := said.reason or recovery.wrong_helper(said.peer):
            self._continue_without_peer(recovery, wrong, tell=False)
            return None
        newcomer.helper = said.peer
        seconds, ready = round(now - recovery.since, 3), recovery.ready
        text = f"{newcomer.name} goes on with {said.peer}'s inner optimizer: {said.size:,} bytes in {seconds:.1f} s"
        known = {"peer": said.peer, "bytes": said.size, "seconds": seconds, "t": said.t}
        self.state.out.note("helped", text, newcomer, **known, peer_t=ready.t if ready else None)
        self.end_recovery(newcomer, "the newcomer has it")
        return None

    def _try_another(self, recovery: Recovery, said: Settled) -> KnownLearner | None:
        """It did not come, or was refused: what a newcomer says of one peer costs that peer a strike once."""
        if (peer := recovery.peer) is None or said.ticket != recovery.ticket:
            return None
        self._note_failure(recovery, said.reason)
        if said.size <= 0 or peer.session in recovery.newcomer.distrusted:
            return None
        recovery.newcomer.distrusted.add(peer.session)
        return peer

    def note_gave_up(self, newcomer: KnownLearner) -> None:
        """It says that it waits for nobody."""
        if (recovery := self.open.get(newcomer.name)) is not None:
            self._continue_without_peer(recovery, "it asks no more", tell=False)

    def end_recovery(self, newcomer: KnownLearner, reason: str) -> None:
        """This one seeks no more, or is gone; its peer is free."""
        if (recovery := self.open.pop(newcomer.name, None)) is not None:
            self._release_peer(recovery, reason)

    # ---- what the peer says -------------------------------------------------------------------------------------

    def pass_on_ready(self, peer: KnownLearner, said: Ready) -> None:
        recovery = self._find_recovery(said.ticket)
        if recovery is None or recovery.peer is not peer or said.size <= 0:
            self.state.out.send(peer.name, Release(ticket=said.ticket, reason="nobody waits for it"))
            return
        recovery.ready = said
        self.state.out.taping.note_lent_state(said.ticket, peer.name, peer.incarnation, said.t)
        direct = said.direct if len(said.direct) <= ADDRESS_CHARS else ""
        helped = Helped(ticket=said.ticket, peer=peer.name, size=said.size, digest=said.digest, direct=direct)
        self.state.out.send(recovery.newcomer.name, helped)

    def hear_unable(self, peer: KnownLearner, said: Unable) -> None:
        recovery = self._find_recovery(said.ticket)
        if recovery is not None and recovery.peer is peer:
            recovery.declined.add(peer.name)
            recovery.ticket = ""  # the peer has dropped it: no Release is sent
            self._note_failure(recovery, said.reason)

    def stop_helping_and_seeking(self, learner: KnownLearner, reason: str) -> None:
        """It is gone, or its numbers are broken: it helps nobody, and seeks anew when it comes back."""
        self.end_recovery(learner, "the newcomer is gone")
        for recovery in self.open.values():
            if recovery.peer is learner:
                self._note_failure(recovery, reason)

    # ---- through the relay --------------------------------------------------------------------------------------

    def wrong_newcomer(self, ticket: str, learner: str) -> str | None:
        """Why this learner may not have what is given under the ticket."""
        recovery = self._find_recovery(ticket)
        right = recovery is not None and recovery.newcomer.name == learner and recovery.ready is not None
        return None if right else f"there is no recovery of {learner} under way by this ticket"

    def wrong_peer(self, ticket: str, learner: str) -> str | None:
        recovery = self._find_recovery(ticket)
        right = recovery is not None and recovery.peer is not None and recovery.peer.name == learner
        return None if right else f"{learner} is not asked for its state by this ticket"

    def ask_for_stream(self, ticket: str, offset: int) -> None:
        if (recovery := self._find_recovery(ticket)) is not None and recovery.peer is not None:
            self.state.out.send(recovery.peer.name, Stream(ticket=ticket, offset=offset))

    def _find_recovery(self, ticket: str) -> Recovery | None:
        return next((one for one in self.open.values() if ticket and one.ticket == ticket), None)

    # ---- what time brings ---------------------------------------------------------------------------------------

    def advance_recoveries(self, now: float, wakes: list[float]) -> None:
        for recovery in list(self.open.values()):
            if recovery.peer is not None and (reason := self._too_late(now, recovery, wakes)):
                self._note_failure(recovery, reason)
            if recovery.peer is None:
                self._ask_next_peer(now, recovery, wakes)

    def end_all_recoveries(self, reason: str) -> None:
        """Nothing more is trained."""
        for recovery in list(self.open.values()):
            self._continue_without_peer(recovery, reason)

    @property
    def _most_rounds(self) -> int:
        """H, and at least a cycle: a phase may have an H below P."""
        return max(self.state.settings.sync_every, self.state.settings.fragments)

    def _too_late(self, now: float, recovery: Recovery, wakes: list[float]) -> str:
        assert recovery.peer is not None
        if recovery.ready is None and (not recovery.peer.live or recovery.peer.stopped):
            return "it makes no steps, or does not answer"
        size = recovery.ready.size if recovery.ready else 0
        until = recovery.asked_at + max(BOUND_S, size / BYTES_PER_S)
        wakes.append(until)
        if now < until or self.state.committed < recovery.asked_round + self._most_rounds:
            return ""
        return f"not done within {self._most_rounds} rounds and {now - recovery.asked_at:.1f} s"

    def put_off(self, now: float, seconds: float) -> None:
        """The syncer stood still for so long: no peer could come or answer meanwhile."""
        for recovery in self.open.values():
            recovery.since = min(now, recovery.since + seconds)
            recovery.asked_at = min(now, recovery.asked_at + seconds)

    def _ask_next_peer(self, now: float, recovery: Recovery, wakes: list[float]) -> None:
        """Ask another peer; or wait for one that may come; or go on without."""
        if recovery.tries >= TRIES:
            self._continue_without_peer(recovery, f"two tries came to nothing ({recovery.why})")
        elif (peer := self._choose_peer(recovery)) is not None:
            self._ask_peer(now, recovery, peer)
        elif now < (until := recovery.since + self._patience_s(recovery)):
            wakes.append(until)
        else:
            self._continue_without_peer(
                recovery, f"no healthy peer is there{f' ({recovery.why})' if recovery.failed else ''}"
            )

    def _patience_s(self, recovery: Recovery) -> float:
        """How long it waits for a peer that is not there; 0: nobody may come. A fresh inner optimizer warms up; without
        the run's frozen parameters nothing can be trained. Those that come back into a run that was opened again are
        being started: they have the time that a run has to assemble."""
        settings = self.state.settings
        if self._may_return(recovery):
            return settings.assemble_s
        if not self._may_come(recovery):
            return 0.0
        return settings.assemble_s if recovery.frozen else settings.patience_s

    def _choose_peer(self, recovery: Recovery) -> KnownLearner | None:
        """One that has not failed yet before one that has, then whoever helps the fewest, then by chance."""
        helps = [one.peer.name for one in self.open.values() if one.peer is not None]
        able = [one for one in self.state.members.stepping_learners() if one.strikes == 0 and recovery.trusts(one)]
        chance = self._chance_of(recovery.newcomer)
        return min(
            able, key=lambda one: (one.name in recovery.failed, helps.count(one.name), chance(one)), default=None
        )

    def _may_come(self, recovery: Recovery) -> bool:
        """Whether somebody may yet turn up: one that is away, about to begin, or does not answer just now. For frozen
        parameters, a learner in quarantine counts too: it still has them."""
        seeks = self.open.values() if not recovery.frozen else [one for one in self.open.values() if one.frozen]
        lacking = {one.newcomer.name for one in seeks}
        others = [one for one in self.state.members.learners.values() if one.name not in lacking]
        return any(not one.closed and not one.stopped and recovery.trusts(one) for one in others)

    def _may_return(self, recovery: Recovery) -> bool:
        """Whether one of the last rounds of a run that was opened again is on its way: it is not back yet and the run
        has room for it, or it does not step yet. Who seeks would otherwise begin afresh a moment before it is there."""
        members = self.state.members
        room = len(members.connected_learners()) < self.state.settings.learners
        return any(
            one.may_return and not one.stopped and (one.connected or room) and recovery.trusts(one)
            for one in members.learners.values()
            if one.name not in self.open
        )

    def _chance_of(self, newcomer: KnownLearner) -> Callable[[KnownLearner], str]:
        """A draw that nobody can foresee: it takes the newcomer's session."""
        return lambda peer: self._hash(self.state.committed, newcomer.session, peer.session)

    def _ask_peer(self, now: float, recovery: Recovery, peer: KnownLearner) -> None:
        newcomer = recovery.newcomer
        recovery.tries += 1
        recovery.peer, recovery.ticket, recovery.ready = peer, self._make_ticket(newcomer, peer), None
        recovery.asked_at, recovery.asked_round = now, self.state.committed
        asked = Help(ticket=recovery.ticket, newcomer=newcomer.name, after=recovery.after, frozen=recovery.frozen)
        self.state.out.send(peer.name, asked)
        again = f", after {recovery.why}" if recovery.failed else ""
        text = f"{peer.name} helps {newcomer.name} with its inner optimizer, asked after {recovery.after} rounds{again}"
        known = {"peer": peer.name, "after": recovery.after, "attempt": recovery.tries, "reason": recovery.why}
        self.state.out.note("helping", text, newcomer, **known)

    def _note_failure(self, recovery: Recovery, reason: str) -> None:
        assert recovery.peer is not None
        recovery.failed[recovery.peer.name] = reason
        self._release_peer(recovery, reason)
        recovery.peer, recovery.ticket, recovery.ready = None, "", None

    def _continue_without_peer(self, recovery: Recovery, reason: str, *, tell: bool = True) -> None:
        newcomer = recovery.newcomer
        if tell:
            self.state.out.send(newcomer.name, Fresh(reason=reason))
        text = f"{newcomer.name} goes on without a peer's state, its inner optimizer warms up: {reason}"
        self.state.out.note("fresh", text, newcomer, reason=reason)
        self.end_recovery(newcomer, reason)

    def _release_peer(self, recovery: Recovery, reason: str) -> None:
        if recovery.peer is not None and recovery.ticket and recovery.peer.connected:
            self.state.out.send(recovery.peer.name, Release(ticket=recovery.ticket, reason=reason))

    def _make_ticket(self, newcomer: KnownLearner, peer: KnownLearner) -> str:
        self._tickets += 1
        return self._hash(self._tickets, newcomer.session, peer.session)

    def _hash(self, *parts: object) -> str:
        parts = (self.state.history.run, self.state.history.term, *parts)
        return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).hexdigest()
