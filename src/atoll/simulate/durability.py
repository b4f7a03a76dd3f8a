"""What may be told only once it is written down, beside versions: lives, leases, the beginning and the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.protocol.history import History
from atoll.protocol.messages import Ending, Finish, FromSyncer, Lease, Recover, Started, Welcome

if TYPE_CHECKING:
    from atoll.simulate.disk import Disk
    from atoll.simulate.oracle import Oracle


def unwritten(oracle: Oracle, learner: str, message: FromSyncer) -> str | None:
    """What a message tells that no record does."""
    match message:
        case Welcome(incarnation=incarnation) | Recover(incarnation=incarnation):
            known = (learner, incarnation) in oracle.lives
            return None if known else f"{learner} is told of its incarnation {incarnation}"
        case Lease(ranges=ranges):
            granted = {one.lease for life in oracle.samples.lives.values() for one in life.granted[-len(ranges) - 8 :]}
            missing = [one.lease for one in ranges if one.lease not in granted]
            return f"{learner} is told of leases {missing}" if missing else None
        case Started():
            return None if oracle.theta else "the first parameters are told of"
        case Ending():
            return None if oracle.ended else "it is told that the run ends"
        case Finish():
            return None if oracle.finished else "it is told that the run is over"
        case _:
            return None


def forgotten(disk: Disk, history: History) -> str | None:
    """What a cut and the journal behind it tell otherwise than the whole journal does."""
    whole = History(disk.begun)
    for record in disk.journal:
        whole.apply(record)
    ours, theirs = history.state(), whole.state()
    plain = ("term", "started", "versions", "committed", "lives", "leases", "cuts", "ended", "finished", "settings")
    for name in (*plain, "trend", "least", "rolled_back", "good_cut"):
        if (mine := getattr(ours, name)) != (other := getattr(theirs, name)):
            return f"{name}: {mine} after a cut, {other} by the whole journal"
    return None
