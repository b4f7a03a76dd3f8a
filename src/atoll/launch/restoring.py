"""Going on with a run from its bucket: on an empty disk, on another machine (docs/adr/0033).

Where the last holder released the run, or told nothing before the bucket had it, the run goes on as it is. Otherwise it
may have told of rounds that the bucket does not hold: then a new run begins with the bucket's newest round, in the next
term, as `from_cut` begins one with a cut. Learners that hold more of the old run join it as newcomers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from atoll.bucket.claims import StoredHead, begin_store, check_own, is_copy, own_copy, read_place, write_place
from atoll.bucket.client import StoreUnavailable, open_bucket
from atoll.bucket.restore import Restored, Takeover, claim_run, clear_draft, fetch_run, finish_restore
from atoll.config import load
from atoll.digests import compute_digest
from atoll.launch.begun_here import remember_run
from atoll.launch.environment import read_environment
from atoll.launch.restored_shards import begin_shards_anew, clear_written, cut_to_common
from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.store.cuts import (
    CutState,
    Manifest,
    check_cut,
    complete_cuts,
    folder_of,
    write_manifest,
    write_syncer_part,
)
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.durable_end import EndLost, find_end
from atoll.store.end_mark import place_mark
from atoll.store.head import read_head
from atoll.store.journal import ORIGIN, Journal
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import hold_run
from atoll.syncer.recovery import Recovered, recover

EVERYBODY = "everybody"
PROBE = "probes/resume"
"""Put before a run goes on, to see that the bucket can be written."""


@dataclass(frozen=True, slots=True)
class RestoredRun:
    out: RunDir
    remarks: tuple[str, ...]


def restore_run(
    url: str,
    out: Path,
    *,
    take_over: bool = False,
    read_only: bool = False,
    accept_loss: bool = False,
    tell: Callable[[str], None],
) -> RestoredRun:
    """Bring the run in this bucket back into an empty folder. `read_only`: a copy to look at, nothing is claimed.
    EndLost: the bucket held more of the journal than it does now, and that is not accepted."""
    bucket = open_bucket(url)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty: choose another folder, or remove it")
    takeover = Takeover(0) if read_only else claim_run(bucket, out.absolute(), take_over=take_over)
    clear_draft(out.absolute())
    draft, restored = fetch_run(bucket, out.absolute(), takeover, tell)
    remarks = list(restored.remarks)
    cut_off = cut_to_common(draft, restored.shards) if restored.shards > 1 else 0
    if cut_off and read_only:
        remarks.append(f"{cut_off} rounds at the end are left out: not all shards had uploaded their parts of them")
    if not read_only and not (takeover.behind or accept_loss):
        _refuse_lost_rounds(draft, takeover, url)
    if not read_only and (takeover.behind or cut_off or _lacks_rounds(draft, takeover)):
        remarks += _begin_new_run(draft, restored)
    _mark_ends(draft, restored.shards)
    run = finish_restore(draft, out.absolute())
    if not read_only and run.settings.exists():
        remember_run(load(run.settings), read_environment(run.path))
    return RestoredRun(run, tuple(remarks))


def _lacks_rounds(draft: RunDir, takeover: Takeover) -> bool:
    """Whether something of the journal is gone from the bucket that was in it."""
    return takeover.head is not None and _count_rounds(draft) < takeover.head.stored


def _count_rounds(draft: RunDir) -> int:
    head = read_head(draft)
    return head.committed if head is not None else 0


def _refuse_lost_rounds(draft: RunDir, takeover: Takeover, url: str) -> None:
    """A bucket may be behind what was told, and that is no loss of its own; it never holds less than it held."""
    if takeover.head is not None and (rounds := _count_rounds(draft)) < takeover.head.stored:
        ends = f"ends at round {rounds - 1}" if rounds else "holds no round"
        lost = f"the journal in {url} {ends}, but round {takeover.head.stored - 1} was in it"
        raise EndLost(lost, ", or make a new run of what is there")


def _mark_ends(draft: RunDir, shards: int) -> None:
    """Mark the ends of what was fetched. What the bucket lacks behind them is said above, and not looked for again."""
    for run in (draft, *(draft.shard(number) for number in range(2, shards + 1))):
        with suppress(Corrupt):  # the next reader says what is damaged
            if not run.marks.exists() and (end := find_end(run, LocalDisk())).position != ORIGIN:
                place_mark(run.marks, end)


def attach_store(out: RunDir, url: str) -> None:
    """Before a run starts: its bucket can be written, and is this run's. ConfigError says what is wrong. Of two that
    start the same run at the same moment one is refused here or later: the bucket knows each disk's claims apart."""
    bucket = open_bucket(url)
    with hold_run(out.path):
        place = read_place(out.path)
        try:
            if place is None or place.url != url:
                begin_store(bucket, out.path)
            else:
                bucket.put(PROBE, b"")
                check_own(bucket, out, place)
                if is_copy(out.path, place):
                    own_copy(bucket, out, place)
        except StoreUnavailable as error:
            without = "to go on without it: --store none --set durability=round"
            raise ConfigError(f"{error}: check the network, and AWS_ENDPOINT_URL where it is set; {without}") from error


def _begin_new_run(draft: RunDir, restored: Restored) -> list[str]:
    """Make a new run of what was fetched, in the term that was claimed."""
    term, head = restored.takeover.term, restored.takeover.head
    # Without a cut there are no parameters to go on from, even where the journal tells of rounds.
    bare = restored.cut is None and not restored.remarks
    found = None if bare else recover(draft, disk=LocalDisk())
    if found is None or found.parameters is None:
        clear_written(draft)
        return ["the bucket holds no snapshot of it yet: the run begins anew"]
    old, round = found.history.run, found.history.committed
    why = "was not released" if restored.takeover.behind else "lacks a part of its journal in the bucket"
    run = secrets.token_hex(4)
    _write_beginning(draft, found, run, term)
    _leave_to_old_run(draft)
    return [
        f"run {old} {why}: {_describe_loss(round, head)}",
        f"a new run {run} begins with round {round} of run {old}; learners of the old one join it as newcomers",
    ]


def _describe_loss(round: int, head: StoredHead | None) -> str:
    if head is None:
        return f"what it told of behind round {round} is lost"
    lost, when = max(0, head.told - round), time.strftime("%H:%M:%S UTC", time.gmtime(head.at))
    # The head is some seconds old, so that it never knows all: the sentence must not read as the whole loss.
    after = "those that it told of after that are lost, and their number is not known"
    if not lost:
        return f"all rounds that it had told of by {when} are here; {after}"
    known = f"{lost} round{'' if lost == 1 else 's'} that it had told of by {when} {'is' if lost == 1 else 'are'} lost"
    return f"{known}; {after.replace('are lost', 'are lost too')}"


def _leave_to_old_run(draft: RunDir) -> None:
    """What the new run has of its own: events, figures and models."""
    models = (draft.model, draft.best_model, draft.ema_model, draft.tail_model)
    for path in (draft.events, draft.summary, *models, draft.norms):
        path.unlink(missing_ok=True)
    if (place := read_place(draft.path)) is not None:
        write_place(draft.path, msgspec.structs.replace(place, events=0))


def _write_beginning(draft: RunDir, found: Recovered, run: str, term: int) -> None:
    history, parameters = found.history, found.parameters
    assert parameters is not None
    cut = history.committed
    succeeds = (*history.begun.succeeds, history.run)
    state = history.state().begin_run(run, f"round {cut}", term=term, succeeds=succeeds)
    arrays = {name: np.ascontiguousarray(values).view(np.uint8) for name, values in parameters.hold_arrays().items()}
    before = next(iter(complete_cuts(draft.cuts)), None)
    learners = check_cut(draft.cuts, draft.learners, before).manifest.learners if before is not None else {}
    shards = begin_shards_anew(draft, history.begun, state, cut)
    clear_written(draft)
    journal = Journal.begin(draft.journal, term, after=ORIGIN, disk=LocalDisk(), marks=draft.marks)
    journal.append([(state.begun, None)])
    now = CutState(state, journal.position, 0, tuple(parameters.version_rounds()))
    journal.close()
    encoded = msgspec.msgpack.encode(now)
    write_atomic(draft.origin, encoded)
    write_syncer_part(draft.cuts, run, cut, cut, encoded, arrays)
    table = (folder_of(draft.cuts, cut) / "syncer.json").read_bytes()
    # Learners' states are of an earlier round: nothing can be put back exactly, and "left out" says so.
    left_out = {EVERYBODY: f"their states are of cut {before}, and this is round {cut}"} if learners else {}
    write_manifest(draft.cuts, Manifest(run, cut, cut, compute_digest(table), learners, left_out, shards))
