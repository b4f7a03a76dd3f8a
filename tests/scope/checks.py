"""The rules that hold in every state of the small-scope search; each has a name, which a violation tells.

Records are judged when they become durable, messages when they leave, machines after every event.
"""

from __future__ import annotations

from operator import le
from typing import TYPE_CHECKING

from atoll.protocol import effects as fx
from atoll.protocol import records
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
    """Before it is added to what is durable."""
    durable, settings = state.durable, state.durable.settings
    match line:
        case records.Merged() | records.Passed():
            behind, fragment = durable.committed, line.fragment
            holds(line.round == behind, "rounds commit in order", f"{line.round} after {behind} rounds")
            holds(line.round % settings.fragments == fragment, "round t takes fragment t mod P")
            holds(line.step >= durable.step, "the run's step never falls", f"{line.step} after {durable.step}")
            if isinstance(line, records.Merged):
                holds(line.version == durable.versions[fragment] + 1, "versions go up by one", f"{line.version}")
                _merged(state, line)
        case records.Joined(name, incarnation):
            before = durable.lives[name].incarnation if name in durable.lives else 0
            holds(incarnation == before + 1, "no incarnation is given twice", f"{incarnation} after {before}")
        case records.Granted():
            _granted(state, line)
        case records.Reigned(term):
            holds(term == durable.term + 1, "terms go up by one")
        case records.Gone():
            holds(min(line.lost) >= 0 and min(line.dropped) >= 0, "nothing negative is lost or dropped", str(line))


def _merged(state: State, line: records.Merged) -> None:
    members = [(share.learner, share.incarnation) for share in line.members]
    holds(bool(members) and len(set(members)) == len(members), "a round has members, each once")
    before = [one for one in state.journal if isinstance(one, records.Merged) and one.fragment == line.fragment]
    for share in line.members:
        who = (share.learner, share.incarnation)
        last = [one for one in before if who in [(s.learner, s.incarnation) for s in one.members]]
        newest = last[-1].version if last else 0
        holds(share.base >= newest, "merged again only on a base that holds it", f"{who}: {share.base} < {newest}")
        holds(share.base < line.version, "a base is a committed version")
        holds(share.steps > 0 and share.tokens > 0, "a contribution holds steps")


def _granted(state: State, line: records.Granted) -> None:
    """Issued once, and again only after it came back with an incarnation that is over."""
    over: set[tuple[str, int]] = set()
    for one in reversed(state.journal):
        if isinstance(one, records.Gone):
            over.add((one.learner, one.incarnation))
        elif isinstance(one, records.Granted) and (one.learner, one.incarnation) not in over:
            apart = one.stop <= line.start or line.stop <= one.start
            holds(apart or one.epoch != line.epoch, "a sample is leased once", f"{line} after {one}")


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
        case fx.Note(kind="unbalanced"):
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
            granted = {line.lease: line for line in state.journal if isinstance(line, records.Granted)}
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
