"""Planted bugs of the learner's own rules: recovery, copies, versions, peers."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from tests.simulate.planting import Plain, always, mutant

from atoll.protocol import messages as msg
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.connection import ConnectionState
from atoll.protocol.learner.copies import Copies, Pulls, Standing
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.learner.peer_state import Helping, StateCopy
from atoll.protocol.learner.versions import Versions
from atoll.protocol.syncer.contributions import Contributions

# ---- recovery -----------------------------------------------------------------------------------------------------


def _any_fragment(plain: Plain) -> Any:
    return lambda self, report: max(report.versions) >= 0 and not report.seeking


def _recovered_already(plain: Plain) -> Any:
    def broken(self: LearnerMachine) -> Standing:
        return Standing(self.t, self._counters.last.steps, self._stepping, True)

    return broken


mutant(
    "a newcomer contributes before it has every fragment",
    (Contributions, "_has_recovered", _any_fragment),
    (LearnerMachine, "_standing", _recovered_already),
)
mutant(
    "a newcomer contributes before its peer's state is there",
    (Contributions, "_has_recovered", lambda plain: lambda self, report: min(report.versions) >= 0),
    (LearnerMachine, "recovered", lambda plain: property(lambda self: self._versions.is_complete)),
)


def _no_reset(plain: Plain) -> Any:
    return lambda self, now, reason, *, reset: plain(self, now, reason, reset=False)


mutant("quarantine leaves the broken inner optimizer", (LearnerMachine, "_recover_from_run", _no_reset))


def _same_life(plain: Plain) -> Any:
    def broken(self: LearnerMachine, now: float, welcome: msg.Welcome) -> None:
        self._connection.incarnation = welcome.incarnation if self.incarnation else 0
        plain(self, now, welcome)

    return broken


mutant("a learner that was given up goes on as if nothing had happened", (LearnerMachine, "_take_welcome", _same_life))
mutant(
    "a peer gives a copy before it is current",
    (Helping, "_is_current", always(True)),
    (StateCopy, "serves_newcomer", always(True)),
)

# ---- copies and pulls ---------------------------------------------------------------------------------------------


def _copies_stay(plain: Plain) -> Any:
    def broken(self: Copies, fragment: int, until: int | None = None) -> None:
        if until is not None:
            plain(self, fragment, until)

    return broken


def _any_copy(plain: Plain) -> Any:
    return lambda self, copy, ordered: copy.base >= 0


mutant(
    "a copy on another base than the model's is given",
    (Copies, "drop_copy", _copies_stay),
    (Pulls, "_is_useful", _any_copy),
)
mutant(
    "after the last step an older copy will do", (Pulls, "_is_at_hand", lambda plain: lambda self, f: f in self._copies)
)


def _counters_of_now(plain: Plain) -> Any:
    def broken(self: Pulls, now: float, event: fx.Uploaded) -> None:
        """What is said of a copy is what the learner is now, not what it was when the copy was made."""
        sent = self._copies._sent.get((event.round, event.attempt))
        if sent is not None and (steps := self._standing().steps):
            copy, pull = sent
            newer = replace(copy, t=self._standing().t, steps=max(copy.steps, steps[copy.fragment]))
            self._copies._sent[event.round, event.attempt] = (newer, pull)
        plain(self, now, event)

    return broken


mutant("a contribution tells the counters of now", (Pulls, "note_delivered", _counters_of_now))

# ---- versions -----------------------------------------------------------------------------------------------------


def _newest_unknown(plain: Plain) -> Any:
    def broken(self: Versions, welcome: msg.Welcome) -> None:
        newest = list(self.newest)
        plain(self, welcome)
        if len(newest) == len(self.newest) and min(newest) >= 0:
            self.newest = newest

    return broken


mutant("an announcement that was lost is not made up for", (Versions, "take_welcome", _newest_unknown))


def _unannounced(plain: Plain) -> Any:
    def broken(self: Versions, fragment: int, version: int) -> bool:
        self._fetching.discard(fragment)
        if version <= self.held[fragment] or fragment in self.adopting:
            return False
        self.adopting[fragment] = (version, self.rounds.get(fragment, -1))
        return True

    return broken


mutant("a version is adopted before it is announced", (Versions, "take_fetched", _unannounced))


def _not_again(plain: Plain) -> Any:
    def broken(self: Versions, now: float, fragment: int) -> None:
        """A fetch that failed is tried again at the next announcement, which may be a long time."""
        self._fetching.discard(fragment)

    return broken


mutant("a fetch that failed is not tried again", (Versions, "retry_later", _not_again))
mutant("the copy that a version holds is not named", (Versions, "copy_in", always(None)))


def _last_contribution(plain: Plain) -> Any:
    def broken(self: Versions, fragment: int, version: int) -> int | None:
        merged = self._merged.get(fragment)
        return merged[1] if merged is not None else None

    return broken


mutant("carry subtracts the last copy, whether the version holds it or not", (Versions, "copy_in", _last_contribution))

# ---- talking ------------------------------------------------------------------------------------------------------


def _no_heartbeat(plain: Plain) -> Any:
    def broken(self: ConnectionState, now: float, message: msg.FromLearner) -> None:
        if not isinstance(message, msg.Heartbeat):
            plain(self, now, message)

    return broken


mutant("heartbeats are never sent", (ConnectionState, "send_message", _no_heartbeat))


def _ends_at_once(plain: Plain) -> Any:
    def broken(self: LearnerMachine, now: float) -> None:
        """The run is over, so it leaves, whether it holds the finished model or not."""
        if self._final is not None and self.phase != "finished":
            self._send_report(now)
            self._connection.send_message(now, msg.Leave(reason="the run is over"))
            self._stop_for_good("the run is over")

    return broken


mutant("a learner leaves without the finished model", (LearnerMachine, "_finish_if_done", _ends_at_once))
