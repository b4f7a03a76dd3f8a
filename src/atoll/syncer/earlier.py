"""Values and outer state of an earlier moment of the run, for a rollback: a cut, and the journal behind it.

Payloads are kept back to the cut before the newest. Where those from a cut to the moment that is asked for are gone,
what the cut itself holds is given, unless it was taken while the run was on a way that was rolled back.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.numerics.arrays import ByteArray
from atoll.protocol.effects import Restorable, Restore
from atoll.protocol.restoring import undone
from atoll.store.cuts import BadCut, known_cuts
from atoll.store.disk import Corrupt, Disk
from atoll.store.journal import read
from atoll.store.rundir import RunDir
from atoll.syncer.recovery import Recovered, from_cut, replay


@dataclass(frozen=True, slots=True)
class Earlier:
    packed: ByteArray
    """As `Parameters.pack` gives it."""
    told: Restorable


def read_earlier(out: RunDir, restore: Restore, *, disk: Disk) -> Earlier:
    """As it was after so many rounds, or at the newest cut before. BadCut: nothing of that can be had."""
    reasons: list[str] = []
    for cut in [cut for cut in known_cuts(out.cuts) if cut <= restore.round]:
        try:
            return _earlier(cut, restore, out, disk)
        except (BadCut, Corrupt) as error:
            reasons.append(f"cut {cut}: {error}")
    raise BadCut("; ".join(reasons) or f"no cut of round {restore.round} or before is there any more")


def _earlier(cut: int, restore: Restore, out: RunDir, disk: Disk) -> Earlier:
    found = _reached(cut, restore, out, disk) or from_cut(out.cuts, cut)
    assert found.parameters is not None, "a cut holds parameters"
    history = found.history
    lines = (record for _, record in read(out.journal, start=found.start, disk=disk))
    told = undone(lines, history.committed, len(history.versions))
    ready = Restorable(history.committed, found.parameters.digests(), told)
    return Earlier(found.parameters.pack(), ready)


def _reached(cut: int, restore: Restore, out: RunDir, disk: Disk) -> Recovered | None:
    """From this cut on to the round that was asked for. None: payloads are gone, and what the cut holds will do."""
    found = from_cut(out.cuts, cut)
    lines = read(out.journal, start=found.end, disk=disk)
    try:
        for position, record in lines:
            if found.history.committed >= restore.round:
                break
            replay(found, position, record, out.journal, disk)
            found.history.apply(record)
    except Corrupt:
        if any(begin < cut <= end for begin, end in restore.without):
            raise
        return None
    return found
