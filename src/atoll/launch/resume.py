"""Going on with a run that was stopped: which cut, whose state, and how exactly.

By default Θ is the journal's head: nothing that was acknowledged is given up. Learners take it and go on with the inner
optimizer, schedules and random states of the newest good cut, but for those whose own file is not as it says: they
begin afresh, and nobody else does. The data goes on where the ledger stands. Where the journal ends with that cut,
everything is put back exactly as it was. `from_cut` makes a new run out of one cut: there everything is exactly as it
was then, and what came after it belongs to the old run alone.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atoll.protocol import records
from atoll.protocol.errors import ConfigError
from atoll.protocol.history import History
from atoll.store.cuts import (
    BadCut,
    Manifest,
    check_cut,
    complete_cuts,
    digest,
    folder_of,
    known_cuts,
    read_manifest,
    read_syncer_part,
    write_manifest,
    write_syncer_part,
)
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.journal import Journal, read
from atoll.store.rundir import RunDir
from atoll.store.terms import acquire
from atoll.syncer.changes import change
from atoll.syncer.recovery import CutState


@dataclass(frozen=True)
class Resume:
    cut: int | None
    run: str
    """The run that goes on."""
    states: dict[str, Path] = field(default_factory=dict)
    """Per learner, its part of the cut."""
    exact: bool = False
    reopen: bool = False
    """The run had ended, and goes on."""
    changes: tuple[str, ...] = ()
    """Settings that the operator changes on the way, as `key=value`."""
    remarks: tuple[str, ...] = ()


def plan_resume(out: RunDir, changes: tuple[str, ...] = ()) -> Resume:
    """The newest good cut, and what can be put back from it."""
    remarks: list[str] = []
    head = _head(out)
    reopen = _check_budget(out, head, changes)
    for cut in complete_cuts(out.cuts):
        try:
            checked = check_cut(out.cuts, out.learners, cut)
            nothing_behind = _is_head(out, cut)
        except (BadCut, Corrupt) as error:
            remarks.append(f"cut {cut} is passed over: {error}")
            continue
        manifest = checked.manifest
        remarks += checked.remarks()
        exact = bool(manifest.learners) and not manifest.left_out and nothing_behind
        how = "exactly as it was" if exact else "Θ from the journal's head, inner optimizers from the cut"
        remarks.append(f"run {head.run} goes on at round {head.committed} with cut {cut}: {how}")
        return Resume(cut, head.run, _parts(out, manifest), exact, reopen, changes, tuple(remarks))
    remarks.append(f"run {head.run} goes on at round {head.committed}: no complete cut, so fresh inner optimizers")
    return Resume(None, head.run, {}, False, reopen, changes, tuple(remarks))


def _head(out: RunDir) -> History:
    """What the journal knows of the run, without its numbers."""
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
    raise ConfigError(f"{out.path} cannot be gone on with: {'; '.join(remarks) or 'its run has no parameters yet'}")


def _check_budget(out: RunDir, head: History, changes: tuple[str, ...]) -> bool:
    """Whether a run that has ended is opened again; ConfigError when there is nothing left to do in it."""
    asked = change(head, changes)
    if head.is_budget_spent(asked.settings if asked is not None else None):
        raise ConfigError(
            f"the run in {out.path} is done ({head.ended or 'its budget is spent'}): "
            "give it more with --steps or --tokens, or make a new run of a cut with --from-cut N --out DIR"
        )
    return bool(head.ended)


def from_cut(old: RunDir, cut: int, new: RunDir, changes: tuple[str, ...] = ()) -> Resume:
    """A new run that begins as the old one was at that cut."""
    if cut not in complete_cuts(old.cuts):
        known = ", ".join(map(str, sorted(complete_cuts(old.cuts)))) or "none"
        raise ConfigError(f"{old.path} has no complete cut {cut}: there are {known}")
    checked = check_cut(old.cuts, old.learners, cut)
    manifest = checked.manifest
    part, state, arrays = read_syncer_part(old.cuts, cut)
    then = msgspec.msgpack.decode(state, type=CutState)
    run = secrets.token_hex(4)
    begun = msgspec.structs.replace(then.history.begun, run=run, parent=f"{part.run} cut {cut}")
    history = msgspec.structs.replace(then.history, begun=begun, term=1, cuts=[], ended="", finished=False)
    reign = acquire(new.journal)
    journal = Journal.begin(new.journal, reign.term, disk=LocalDisk())
    journal.append([(begun, None)])
    now = CutState(history, journal.position, 0, then.rounds)
    journal.close()
    reign.release()
    write_syncer_part(new.cuts, run, cut, part.round, msgspec.msgpack.encode(now), arrays)
    for name, learner in manifest.learners.items():
        (new.learners / name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(old.learners / name / learner.file, new.learners / name / learner.file)
    table = (folder_of(new.cuts, cut) / "syncer.json").read_bytes()
    write_manifest(new.cuts, msgspec.structs.replace(manifest, run=run, syncer=digest(table)))
    exact = bool(manifest.learners)
    remark = f"a new run {run} from cut {cut} of run {part.run}, exactly as it was"
    return Resume(
        cut, run, _parts(new, read_manifest(new.cuts, cut)), exact, False, changes, (*checked.remarks(), remark)
    )


def _parts(out: RunDir, manifest: Manifest) -> dict[str, Path]:
    return {name: out.learners / name / part.file for name, part in manifest.learners.items()}


def _is_head(out: RunDir, cut: int) -> bool:
    """Whether nothing was decided behind the cut: then all of it can be as it was."""
    _, state, _ = read_syncer_part(out.cuts, cut)
    position = msgspec.msgpack.decode(state, type=CutState).position
    behind = read(out.journal, start=position, disk=LocalDisk())
    return all(isinstance(record, records.CutDone | records.Reigned) for _, record in behind)
