"""Losses of a run: found before the run goes on, and refused unless the operator accepts them.

What is looked at: the durable end of the journal and of every chain in the run's folder (store/durable_end.py), and the
payloads behind the newest snapshot. Accepted means: the journal is cut back to what still leads to one state of the
whole run, the marks are set there, and the next term begins with a LossRecord. A shard whose folder lies elsewhere
looks at its own chain when it starts.
"""

from __future__ import annotations

from atoll.launch.restored_shards import cut_to_common
from atoll.store.cuts import BadCut, complete_cuts
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.durable_end import (
    EndLost,
    LostPayload,
    accept_end,
    check_end,
    cut_off,
    find_end,
    find_lost_payload,
    write_accepted,
)
from atoll.store.rundir import RunDir
from atoll.store.segments import ORIGIN


def check_whole(out: RunDir, *, accept: bool) -> list[str]:
    """Return what was accepted, for people; none: nothing is missing. EndLost: something is, and it is not accepted."""
    shards = list_shards(out)
    losses = [what for shard in (0, *shards) if (what := _find_loss(_folder_of(out, shard), shard))]
    payload = find_lost_payload(out)
    if payload is not None:
        losses.append(f"an outer gradient that was durable cannot be read: {payload.what}")
    if not losses:
        return []
    what = "; ".join(losses)
    if not accept or any(_is_empty(_folder_of(out, shard)) for shard in (0, *shards)):
        raise EndLost(what, _advise_cut(out))  # of a journal of which nothing is left, there is nothing to go on with
    _accept(out, shards, payload, what)
    return [f"accepted: {what}"]


def list_shards(out: RunDir) -> list[int]:
    """The other shards whose folders lie in the run's."""
    return sorted(int(path.name) for path in (out.path / "shards").glob("*") if path.name.isdecimal())


def _folder_of(out: RunDir, shard: int) -> RunDir:
    return out.shard(shard) if shard else out


def accept_lost_chain(shard: RunDir, number: int) -> str:
    """Let a shard that was started by hand go on with what its chain still holds. Return what is lost; empty: nothing.
    The lead refuses it all the same where a decision names what is gone."""
    if lost := _find_loss(shard, number):
        accept_end(shard, number)
    return lost


def _find_loss(run: RunDir, shard: int) -> str:
    try:
        check_end(run, LocalDisk(), shard=shard)
    except EndLost as lost:
        return lost.what
    return ""


def _is_empty(run: RunDir) -> bool:
    return find_end(run, LocalDisk()).position == ORIGIN


def _advise_cut(out: RunDir) -> str:
    """Name a snapshot that holds more than the journal."""
    newest = next(iter(complete_cuts(out.cuts)), 0)
    return (
        f", or make a new run of snapshot {newest} (--from-cut)" if newest > find_end(out, LocalDisk()).rounds else ""
    )


def _accept(out: RunDir, shards: list[int], payload: LostPayload | None, what: str) -> None:
    write_accepted(out, what)
    if payload is not None:
        cut_off(out, payload.before)
    if shards:
        try:
            cut_to_common(out, len(shards) + 1)
        except (BadCut, Corrupt) as error:
            raise EndLost(f"{what}; without it no snapshot is left that all shards lead on from ({error})") from error
    for shard in (0, *shards):
        accept_end(_folder_of(out, shard), shard)
