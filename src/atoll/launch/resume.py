"""Going on with a run that was stopped: which cut, whose state, and how exactly.

By default Θ is the journal's head: nothing that was acknowledged is given up. Learners take it and go on with the inner
optimizer, schedules and random states of the newest good cut, but for those whose own file is not as it says: they
begin afresh, and nobody else does. The data goes on where the ledger stands. Where the journal ends with that cut,
everything is put back exactly as it was. `from_cut` makes a new run out of one cut: there everything is exactly as it
was then, and what came after it belongs to the old run alone.

How a run ended, and what going on with it means:

| it | goes on |
| --- | --- |
| has not begun, or has no parameters yet | from its beginning, in the same folder |
| was cut off (killed, power, disk) | where the journal ends |
| was ended with budget left (Ctrl-C, drained, its learners failed, its supervisor gone) | is opened again |
| spent its budget | with more budget it is opened again; without, one line says so and nothing is touched |
| spent its budget and was cut off at its end, or its model is not the head | comes to its end, without learners |
"""

from __future__ import annotations

import copy
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from atoll.config import Outer, load, parse_settings
from atoll.digests import compute_digest
from atoll.launch.losses import check_whole
from atoll.numerics.arrays import ByteArray
from atoll.numerics.updates import make_version_codec
from atoll.protocol import records
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.history import History, HistoryState
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import ChangeAsked
from atoll.protocol.syncer.machine import Syncer
from atoll.store.atomic import make_folder, staged, write_atomic
from atoll.store.cuts import (
    BadCut,
    CheckedCut,
    CutState,
    Manifest,
    check_cut,
    complete_cuts,
    folder_of,
    read_manifest,
    read_syncer_part,
    write_manifest,
    write_syncer_part,
)
from atoll.store.disk import Corrupt, LocalDisk
from atoll.store.head import read_head
from atoll.store.journal import Journal, read
from atoll.store.rundir import UNMERGED, RunDir, facts_of_model, read_model_facts
from atoll.store.segments import Position
from atoll.store.shards import StoredPart, read_shard_part
from atoll.store.writer_lease import acquire
from atoll.syncer.changes import check_new_run, is_changeable, parse_changes
from atoll.syncer.outer_state import FEEDBACK

EVERYONE_ENDED = "every learner has ended"
"""The reason of a run whose last learner ended while the syncer still expected steps."""


@dataclass(frozen=True)
class Resume:
    cut: int | None
    run: str
    """The run that goes on; empty: it has not begun."""
    states: dict[str, Path] = field(default_factory=dict)
    """Per learner, its part of the cut."""
    exact: bool = False
    reopen: bool = False
    """The run had ended, and goes on."""
    changes: tuple[str, ...] = ()
    """Settings that the operator changes on the way, as `key=value`."""
    remarks: tuple[str, ...] = ()
    only_end: bool = False
    """Its budget is spent and its end was cut off: no learner is needed to bring it to its end."""


def plan_resume(out: RunDir, changes: tuple[str, ...] = (), *, accept_loss: bool = False) -> Resume:
    """The newest good cut, and what can be put back from it. ConfigError when there is nothing left to do; EndLost when
    something is missing that was durable, unless that is accepted: then the run goes on without it."""
    lost = check_whole(out, accept=accept_loss)
    planned = _plan_whole(out, changes)
    return replace(planned, remarks=(*lost, *planned.remarks)) if lost else planned


def _plan_whole(out: RunDir, changes: tuple[str, ...]) -> Resume:
    head = read_head(out)
    if head is None or not head.started:
        return _plan_beginning(head, changes)
    if _is_spent(out, head, changes):
        return _plan_end(out, head)
    damaged: dict[int, str] = {}
    reopen = bool(head.ended)
    for cut in complete_cuts(out.cuts):
        try:
            checked = check_cut(out.cuts, out.learners, cut)
            nothing_behind = _is_head(out, cut)
        except (BadCut, Corrupt) as error:
            damaged[cut] = str(error)
            continue
        manifest = checked.manifest
        remarks = _describe_damaged(damaged, f"snapshot {cut}")
        by_hand = _find_by_hand(out, head, checked)
        remarks += checked.list_remarks(but=by_hand)
        exact = bool(manifest.learners) and not manifest.left_out and nothing_behind
        how = f"exactly as it was in snapshot {cut}" if exact else f"the newest model, optimizers as of snapshot {cut}"
        remarks.append(f"run {head.run} goes on at round {head.committed}: {how}")
        if by_hand:
            remarks.append(_describe_by_hand(by_hand))
        return Resume(cut, head.run, _parts(out, manifest), exact, reopen, changes, tuple(remarks))
    remarks = _describe_damaged(damaged, "none")
    remarks.append(f"run {head.run} goes on at round {head.committed}: no complete snapshot, so fresh optimizers")
    return Resume(None, head.run, {}, False, reopen, changes, tuple(remarks))


def _describe_damaged(damaged: Mapping[int, str], used: str) -> list[str]:
    """Say which newer snapshots cannot be used, and what is used in their place."""
    return [f"snapshot {cut} cannot be used ({wrong}): {used} is used instead" for cut, wrong in damaged.items()]


def _find_by_hand(out: RunDir, head: History, checked: CheckedCut) -> list[str]:
    """Learners that joined by a link or an address, and so keep their states in folders of their own: they have none in
    the run's folder, and none of the names that a supervisor gives."""
    given = {f"learner-{index}" for index in range(head.settings.learners)}
    return [name for name in checked.missing if name not in given and not (out.learners / name).exists()]


def _describe_by_hand(names: list[str]) -> str:
    if len(names) > 1:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        keeps, them = f"{shown} joined by hand and keep their optimizers where they were", "them"
    else:
        keeps, them = f"{names[0]} joined by hand and keeps its optimizer where it was", "it"
    again = f"the same command and link let {them} join again"
    return f"{keeps} started: {again}, and the model comes from the syncer"


def _plan_beginning(head: History | None, changes: tuple[str, ...]) -> Resume:
    remark = "the run has no parameters yet: it goes on from its beginning"
    if head is None:  # whoever begins it takes the settings as they are in run.toml by then
        return Resume(None, "", remarks=(remark,))
    return Resume(None, head.run, reopen=bool(head.ended), changes=changes, remarks=(remark,))


def spent_budget(head: History, settings: Settings) -> str:
    """Which budget the run has spent under these settings; empty: there is something left to do.

    The rules themselves are asked, so that what a resumed syncer would do at once is known before it is started.
    """
    for name, other in (("steps", "tokens"), ("tokens", "steps")):
        only = msgspec.structs.replace(settings, **{other: 0})
        if _make_reopened(head, only).progress >= 1.0:
            return f"{getattr(settings, name):,} {name}"
    return ""


def _make_reopened(head: History, settings: Settings) -> Syncer:
    """The state machine of this run, gone on with under these settings."""
    machine = Syncer(History.restore(copy.deepcopy(head.state())))
    machine.handle(0.0, ChangeAsked(settings, dict(head.outer), "", reopen=True))
    return machine


def describe_resume(out: RunDir, shown: Path | None = None) -> str:
    """The command that goes on with a run that ended; with a larger budget, where its own is spent."""
    command = f"{name_command(out)} --resume {shown or out.path}"
    try:
        head = read_head(out)
        spent = spent_budget(head, head.settings) if head is not None else ""
    except (AtollError, OSError):  # what is wrong with it is said when it is gone on with
        return command
    amount, _, budget = spent.partition(" ")
    return f"{command} --{budget} N (more than the {amount} that are done)" if spent else command


def name_command(out: RunDir) -> str:
    """Return the command that a run goes on with, by who started its learners."""
    try:
        return "atoll syncer" if load(out.settings).by_hand else "atoll train"
    except ConfigError:  # what is wrong with the settings is said when it is gone on with
        return "atoll train"


def describe_unspent(out: RunDir) -> str:
    """How far a run came that has budget left: "step 44 of 1,000". Empty: it spent the budget, or has none."""
    try:
        head = read_head(out)
    except (AtollError, OSError):  # what is wrong with it is said when it is gone on with
        return ""
    if head is None or not head.started:
        return ""
    machine = _make_reopened(head, head.settings)
    if spent_budget(head, head.settings):
        return ""
    steps, tokens = head.settings.steps, head.settings.tokens
    made = [("step", machine.global_step, steps), ("token", machine.members.total_tokens(), tokens)]
    return " and ".join(f"{what} {count:,} of {budget:,}" for what, count, budget in made if budget)


def _is_spent(out: RunDir, head: History, changes: tuple[str, ...]) -> bool:
    """Whether nothing is left to train; ConfigError where a smaller budget would make it so."""
    asked = parse_changes(head, changes)
    spent = spent_budget(head, asked.settings if asked is not None else head.settings)
    if spent and not head.ended and not spent_budget(head, head.settings):
        raise ConfigError(
            f"the run in {out.path} has already trained for {spent}: ask for more with --steps or --tokens, "
            "or leave them out to go on with its own budget"
        )
    return bool(spent)


def _plan_end(out: RunDir, head: History) -> Resume:
    """A spent run that came to its end is done; otherwise its end is made up for."""
    reason = head.ended or "its budget is spent"
    if head.finished and model_is_head(out, head):
        raise ConfigError(
            f"the run in {out.path} is done ({reason}): "
            "give it more with --steps or --tokens, or make a new run of a cut with --from-cut N --out DIR"
        )
    what = f"its {out.model.name} is not its head" if head.finished else "its end was cut off"
    remark = f"run {head.run} is done ({reason}), but {what}: it is brought to its end"
    return Resume(None, head.run, remarks=(remark,), only_end=True)


def model_is_head(out: RunDir, head: History) -> bool:
    """Whether the model that lies there says it is of the journal's head."""
    return facts_of_model(head.run, head.committed, head.versions).items() <= read_model_facts(out.model).items()


def from_cut(
    old: RunDir,
    cut: int,
    out: Path | None,
    words: tuple[str, ...] = (),
    *,
    force: bool = False,
    shared: bool = False,
) -> tuple[RunDir, Resume]:
    """A new run in `out` that begins as the old one was at that cut. Nothing is made or replaced unless it can be.
    `words`: its other settings. Those that no run changes while it goes on are in its first record."""
    if out is not None and out.absolute().resolve() == old.path.resolve():
        raise ConfigError(f"{out} holds the run that the cut is of: choose another folder for the new run with --out")
    if cut not in complete_cuts(old.cuts):
        known = ", ".join(map(str, sorted(complete_cuts(old.cuts)))) or "none"
        raise ConfigError(f"{old.path} has no complete cut {cut}: there are {known}")
    checked = check_cut(old.cuts, old.learners, cut)
    manifest = checked.manifest
    part, state, arrays = read_syncer_part(old.cuts, cut)
    then = msgspec.msgpack.decode(state, type=CutState)
    check_new_run(words, then.history.begun.shards)
    changes, own = tuple(filter(is_changeable, words)), [word for word in words if not is_changeable(word)]
    shards = [read_shard_part(old, then.history.begun, n, cut) for n in range(2, then.history.begun.shards + 1)]
    _check_cut_has_budget(old, cut, History.restore(copy.deepcopy(then.history)), changes)
    new = RunDir.create(out, force=force, shared=shared)
    run = secrets.token_hex(4)
    history = _with_own_settings(then.history.begin_run(run, f"cut {cut}", term=1), own)
    now = CutState(history, _begin_journal(new, history.begun), 0, then.rounds)
    arrays = arrays if shards else _fit_outer_state(arrays, history)
    encoded = msgspec.msgpack.encode(now)
    write_atomic(new.origin, encoded)
    write_syncer_part(new.cuts, run, cut, part.round, encoded, arrays)
    digests = tuple(_copy_shard_part(new, history, one, shared=shared) for one in shards)
    for file in (*_list_parts(old, manifest), *old.learners.glob(f"*/{UNMERGED}")):
        place = new.learners / file.relative_to(old.learners)
        make_folder(place.parent)
        with staged(place) as draft:
            shutil.copyfile(file, draft)
    table = (folder_of(new.cuts, cut) / "syncer.json").read_bytes()
    named = msgspec.structs.replace(manifest, run=run, syncer=compute_digest(table), shards=digests)
    write_manifest(new.cuts, named)
    # What a learner saved exactly has the old settings in it: with others it takes parameters and optimizer alone.
    exact = bool(manifest.learners) and not parse_settings(own).keys() & {"protocol", "workload"}
    how, shown = "its model and optimizers" if own and not exact else "exactly as it was", " ".join(own)
    remark = f"a new run {run} from cut {cut} of run {part.run}, {how}{f', with {shown}' if own else ''}"
    remarks = (*checked.list_remarks(), remark, *_describe_unmerged(then.history, cut, exact=exact))
    return new, Resume(cut, run, _parts(new, read_manifest(new.cuts, cut)), exact, False, changes, remarks)


def _describe_unmerged(state: HistoryState, cut: int, *, exact: bool) -> tuple[str, ...]:
    """Learners that are put back exactly go on with what they had computed; others begin without it."""
    tokens = History.restore(copy.deepcopy(state)).ledger.totals().whole()
    if exact or not tokens["in_flight"]:
        return ()
    said = f"{tokens['in_flight']:,} of {tokens['computed']:,} tokens were computed but not merged at cut {cut}"
    return (f"{said}: it begins without them",)


def _with_own_settings(state: HistoryState, words: Sequence[str]) -> HistoryState:
    """With these settings from the beginning on."""
    named = parse_settings(words)
    protocol, outer = named.get("protocol", {}), named.get("outer", {})
    settings = msgspec.structs.replace(state.begun.settings, **protocol)
    begun = msgspec.structs.replace(state.begun, settings=settings, outer={**state.begun.outer, **outer})
    now = msgspec.structs.replace(state.settings, **protocol)
    return msgspec.structs.replace(state, begun=begun, settings=now, outer={**state.outer, **outer})


def _fit_outer_state(arrays: dict[str, ByteArray], state: HistoryState) -> dict[str, ByteArray]:
    """Θ, and the outer state that the new run's optimizer and version codec keep: zero where the old run had none."""
    codec = make_version_codec(state.settings.version_codec)
    slots = [*msgspec.convert(state.outer, Outer).make().slots()]
    slots += [FEEDBACK] if codec is not None and codec.needs_feedback else []
    kept = {name: values for name, values in arrays.items() if name.rpartition("-")[0] in ("theta", *slots)}
    for name in [name for name in arrays if name.startswith("theta-")]:
        for slot in slots:
            kept.setdefault(name.replace("theta", slot), np.zeros_like(arrays[name]))
    return kept


def _begin_journal(out: RunDir, begun: records.BegunRecord) -> Position:
    """The journal of a run, or the chain of a shard, with its first record; the position behind that."""
    lease = acquire(out.journal)
    journal = Journal.begin(out.journal, lease.term, disk=LocalDisk(), marks=out.marks)
    journal.append([(begun, None)])
    journal.close()
    lease.release()
    return journal.position


def _copy_shard_part(new: RunDir, history: HistoryState, shard: StoredPart, *, shared: bool) -> str:
    """Another shard's part of the cut in the new run, complete; the digest of its table."""
    out, part, run = RunDir.open_shard(new.shard(shard.shard).path, shared=shared), shard.part, history.begun.run
    position = _begin_journal(out, history.begun)
    state = msgspec.structs.replace(shard.state, run=run, position=position, file=0, outer=history.outer)
    data = msgspec.msgpack.encode(state)
    digest = write_syncer_part(out.cuts, run, part.cut, part.round, data, shard.arrays)
    write_manifest(out.cuts, Manifest(run, part.cut, part.cut, digest, {}))
    return digest


def _check_cut_has_budget(old: RunDir, cut: int, then: History, changes: tuple[str, ...]) -> None:
    asked = parse_changes(then, changes)
    if spent := spent_budget(then, asked.settings if asked is not None else then.settings):
        raise ConfigError(
            f"cut {cut} of {old.path} has {spent} behind it, all that the new run is to have: "
            "give it more with --steps or --tokens, or take an earlier cut"
        )


def _parts(out: RunDir, manifest: Manifest) -> dict[str, Path]:
    return {name: out.learners / name / part.file for name, part in manifest.learners.items()}


def _list_parts(out: RunDir, manifest: Manifest) -> list[Path]:
    """The learners' parts of a cut, of all their ranks."""
    first = _parts(out, manifest).values()
    return [file for path in first for file in (path, *path.parent.glob(f"rank-*/{path.name}"))]


def _is_head(out: RunDir, cut: int) -> bool:
    """Whether nothing was decided behind the cut: then all of it can be as it was."""
    _, state, _ = read_syncer_part(out.cuts, cut)
    position = msgspec.msgpack.decode(state, type=CutState).position
    behind = read(out.journal, start=position, disk=LocalDisk())
    return all(isinstance(record, records.CutDoneRecord | records.TermRecord) for _, record in behind)
