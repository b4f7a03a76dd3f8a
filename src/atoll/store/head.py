"""History of a run and the account of its work, read from its journal without the parameters."""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.protocol import records
from atoll.protocol.account import make_account
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.history import History
from atoll.store.cuts import BadCut, CutState, known_cuts, read_syncer_part
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.journal import read
from atoll.store.rundir import RunDir


def read_account(out: RunDir) -> dict[str, Any]:
    """Return the account of a run that has not ended, as far as its journal tells it; empty: there is none to read."""
    try:
        head = read_head(out) if out.journal.is_dir() else None
    except (AtollError, OSError):
        return {}
    return {} if head is None else make_account(head)


def read_head(out: RunDir) -> History | None:
    """Return the history of the run, without its parameters; None if it has not begun."""
    remarks: list[str] = []
    for cut in known_cuts(out.cuts):
        try:
            _, state, _ = read_syncer_part(out.cuts, cut)
            then = msgspec.msgpack.decode(state, type=CutState)
            history = History.restore(then.history)
            for _, record in read(out.journal, start=then.position, disk=LocalDisk()):
                history.apply(record)
        except (BadCut, Corrupt, msgspec.MsgspecError) as error:
            # Corrupt: a syncer that was replaced may have left a cut that the journal does not lead on from.
            remarks.append(f"cut {cut}: {error}")
        else:
            return history
    if not remarks:
        return _read_beginning(out)
    raise ConfigError(f"{out.path} cannot be resumed: {'; '.join(remarks)}")


def _read_beginning(out: RunDir) -> History | None:
    """Return the history of a run that has no cut. Such a run can have no parameters either."""
    history: History | None = None
    for _, record in read(out.journal, disk=LocalDisk()):
        if history is None and isinstance(record, records.BegunRecord):
            history = History(record)
        elif history is None or isinstance(record, records.StartedRecord):
            raise ConfigError(
                f"{out.path} cannot be resumed: its journal tells of parameters, and {out.cuts} holds no cut with "
                "them: put back a copy of that folder"
            )
        else:
            history.apply(record)
    return history
