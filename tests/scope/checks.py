"""The rules that hold in every state of the small-scope search; each has a name, which a violation tells.

Records are judged when they become durable, messages when they leave, machines after every event.
"""

from __future__ import annotations

from operator import le
from typing import TYPE_CHECKING

from atoll.protocol import records
from atoll.protocol.effects import Note
from atoll.protocol.messages import (
    Announce,
    Contribution,
    Finish,
    FromSyncer,
    Lease,
    Recover,
    Refused,
    Started,
    Welcome,
)
from atoll.protocol.syncer import effects as fx
from atoll.store.audit_members import BadRun

if TYPE_CHECKING:
    from tests.scope.learner import PretendLearner
    from tests.scope.world import SearchedLearner, SearchedSyncer, State


class Broken(Exception):
    """A rule does not hold."""

    def __init__(self, rule: str, text: str = "") -> None:
        super().__init__(f"{rule}: {text}" if text else rule)
        self.rule = rule


def holds(truth: bool, rule: str, text: str = "") -> None:
    if not truth:
        raise Broken(rule, text)


# ---- the journal --------------------------------------------------------------------------------------------------


def written(state: State, line: records.AnyRecord) -> None:
    """A record becomes durable; the journal's rules are those of `atoll verify`."""
    try:
        state.audit.take_record(line)
    except BadRun as wrong:
        raise Broken("the journal's rules", str(wrong)) from wrong


# ---- what the syncer does -----------------------------------------------------------------------------------------


def woken(state: State, syncer: SearchedSyncer) -> None:
    wake_at = syncer.machine.wake_at
    holds(wake_at is None or wake_at > state.now, "a machine sleeps until later")


def carried_out(state: State, term: int, syncer: SearchedSyncer, effect: fx.SyncerEffect) -> None:
    durable = state.durable
    match effect:
        case fx.Merge(number, _, parts):
            bodies = {(part.learner, number, part.attempt) for part in parts}
            holds(bodies <= syncer.bodies, "only what has arrived is merged", str(bodies - syncer.bodies))
        case fx.Commit(number, fragment, version):
            holds(durable.committed > number, "durable, then committed")
            holds(version == syncer.published[fragment] + 1, "versions go up by one", f"{version}")
        case Note(kind="unbalanced"):
            raise Broken("the ledger balances", effect.text)
        case fx.Send(_, message):
            holds(message.term == term, "every message names its sender's term")
            _sent(state, effect.learner, message)


def _sent(state: State, name: str, message: FromSyncer) -> None:
    """Nothing is told that is not durable."""
    durable = state.durable
    match message:
        case Announce(round=number, fragment=fragment, version=version):
            holds(number < durable.committed, "told only what is durable", f"round {number}")
            holds(version <= durable.versions[fragment], "told only what is durable", f"version {version}")
        case Welcome(incarnation=incarnation) | Recover(incarnation=incarnation):
            known = durable.lives.get(name)
            holds(
                known is not None and known.incarnation >= incarnation, "told only what is durable", f"a life of {name}"
            )
        case Lease(ranges=ranges):
            granted = {line.lease: line for line in state.journal if isinstance(line, records.GrantedRecord)}
            mine = all(one.lease in granted and granted[one.lease].learner == name for one in ranges)
            holds(mine, "told only what is durable", f"a lease of {name}")
        case Started():
            holds(durable.started, "told only what is durable", "the first parameters")
        case Finish():
            holds(durable.finished, "told only what is durable", "the end")


def told(state: State, message: FromSyncer) -> None:
    match message:
        case Announce(fragment=fragment, version=version):
            state.told[fragment] = max(state.told[fragment], version)
        case Welcome(versions=versions) | Finish(versions=versions):
            state.told = [max(pair) for pair in zip(state.told, versions, strict=True)]


def nothing_told_is_lost(state: State) -> None:
    kept = all(now >= then for now, then in zip(state.durable.versions, state.told, strict=True))
    holds(kept, "nothing told is lost", f"{state.told} was told, {state.durable.versions} is kept")


def syncer_is_sound(state: State, syncer: SearchedSyncer) -> None:
    machine = syncer.machine
    totals = machine.history.ledger.totals()
    holds(not any(totals.balance()), "the ledger balances", str(totals))
    holds(min(map(min, (totals.merged, totals.dropped, totals.lost, totals.in_flight))) >= 0, "no fate is negative")
    holds(all(map(le, totals.missed, totals.dropped)), "what was missed was dropped", str(totals))
    holds(machine.versions == machine.history.versions, "what is decided is written", "versions")
    holds(machine.committed == machine.history.committed, "what is decided is written", "rounds")
    fragments = [round_.fragment for round_ in machine.state.open_rounds.values()]
    holds(len(set(fragments)) == len(fragments), "one round of a fragment is under way")
    for recovery in machine.peers.open.values():
        holds(not recovery.newcomer.live, "live only once its peer's state is settled")


# ---- what a learner does ------------------------------------------------------------------------------------------


def learner_is_sound(state: State, learner: SearchedLearner) -> None:
    held, kept = learner.process.adopted, state.durable.versions
    holds(all(h <= k for h, k in zip(held, kept, strict=True)), "adopted only what is durable", f"{held}, {kept}")


def contributes(learner: SearchedLearner, given: Contribution) -> None:
    """When it arrives, of what its sender is by then."""
    holds(given.base >= 0, "only a learner that adopted a version contributes")


def heard(process: PretendLearner, known: int, message: FromSyncer) -> None:
    """`known`: the newest term it had heard of before."""
    over = message.term < known and not isinstance(message, Refused)
    holds(process.hung_up or not over, "no term that is over is heeded", f"{message.term} after {known}")
