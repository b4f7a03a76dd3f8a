"""What must hold of a learner's ranks, of the syncer's shards and of relays, whatever the world does:

all ranks do the same              what one reads, adopts or saves, each does as its next, after the same step
a version is whole in all ranks    what a rank adopts is its part of the committed version, in its place
tokens are those of all ranks      of every step, once: known a step later
a contribution is of one read      its parts are of all ranks, of copies made after one step on one base

decisions name existing heads      before anybody is told of a round, every shard that holds a part of it has written it
                                   down: the record of the round names a record of that shard's chain
a shard acts on its own orders     it follows no term below the newest it heard, undoes only what was taken back or
                                   taken up anew, and uses norms and heads only of the order that it carries out
a shard holds what was decided     after every decision, and when it has come back, its part of a fragment is that of
                                   the committed version; so no void record is ever read. Before version 0 is decided,
                                   it holds nothing, or what a lead that lives is about to decide

everybody is counted once          a round that is merged from sums has each of its members in it, once, by its weight
feedback is of what is merged      a relay takes over what a sum left out only once a round with that sum is committed
bounded memory                     what a relay holds, and what the syncer knows of it, does not grow with the run
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from atoll.courier.rank_channel import UploadPart
from atoll.mailbox.channel import AdoptOrder
from atoll.protocol.messages import ContributionKey
from atoll.protocol.records import AnyRecord, MergedRecord
from atoll.protocol.relay import SumAsked
from atoll.protocol.shard import (
    Abandon,
    Apply,
    LeadLost,
    LeadSaid,
    LeaveLead,
    RestoreParameters,
    Shard,
    ShardEffect,
    ShardEvent,
    Step,
    Undo,
    UseNorms,
    Written,
)
from atoll.protocol.shard_messages import RoundDecided, TakeUp, Unstage
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.shard_effects import LEAD
from atoll.simulate.cells import Cells, take_part
from atoll.simulate.disk import SimulatedDisk
from atoll.simulate.oracle import Oracle, Violation
from atoll.simulate.ranked_learner import RankedLearner
from atoll.simulate.simulated_rank import ReadFact, SentPart
from atoll.simulate.simulated_relay import SimulatedRelay, SyncerSums
from atoll.simulate.simulated_shard import SimulatedShard


class RankInvariants:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._done: dict[str, list[str]] = {}
        """By session: what its ranks do, one after the other."""
        self._counts: dict[tuple[str, int], int] = {}
        """How much of it each rank has done."""

    def watch_rank(self, learner: RankedLearner, rank: int, done: str) -> None:
        all_done, key = self._done.setdefault(learner.session, []), (learner.session, rank)
        count = self._counts.get(key, 0)
        self._counts[key] = count + 1
        if count == len(all_done):
            all_done.append(done)
        elif all_done[count] != done:
            said = f"rank {rank} of {learner.name} {done}, where another {all_done[count]}"
            raise Violation("all ranks do the same", said, learner.name)

    def watch_tokens(self, learner: RankedLearner) -> None:
        each = learner.tokens_per_step
        if not (learner.t - 1) * each <= learner.tokens_total <= learner.t * each:
            said = f"{learner.name} counts {learner.tokens_total} tokens after {learner.t} steps of {each}"
            raise Violation("tokens are those of all ranks", said, learner.name)

    def watch_disagreement(self, learner: RankedLearner, error: Exception) -> None:
        """The couriers found out themselves."""
        raise Violation("all ranks do the same", str(error), learner.name) from error

    def watch_rank_adoption(self, learner: RankedLearner, rank: int, order: AdoptOrder) -> None:
        f, plan = order.fragment, learner.plans[rank]
        if not plan.plan.fragments[f].size:
            return
        part, oracle = learner.ranks[rank].incoming.get(order.slot), self._oracle
        lost = [value for (g, version, value) in oracle.never_were if (g, version) == (f, order.version)]
        committed = [oracle.values.get((f, order.version)), *lost]
        if not any(isinstance(one, Cells) and take_part(plan, f, one) == part for one in committed):
            said = f"rank {rank} of {learner.name} adopts {part} as its part of version {order.version}"
            raise Violation("a version is whole in all ranks", f"{said}, committed is {committed[0]}", learner.name, f)

    def watch_slot(self, learner: RankedLearner, rank: int, order: UploadPart, read: ReadFact) -> None:
        """A rank sends what lies in the slot that it was told of."""
        if (read.fragment, read.t) != (order.fragment, order.t):
            said = f"rank {rank} of {learner.name} sends {read} for the copy of step {order.t}: its slot was used again"
            raise Violation("a contribution is of one read", said, learner.name, order.fragment)

    def watch_parts(self, learner: str, fragment: int, parts: Mapping[int, SentPart]) -> None:
        """A contribution is merged. (What learners sent for two answers may lie together before that: then no message
        names it.)"""
        reads = {part.read for part in parts.values()}
        if len(reads) != 1 or next(iter(reads)).fragment != fragment:
            said = f"a contribution of {learner} is put together of {sorted(map(str, reads))}"
            raise Violation("a contribution is of one read", said, learner, fragment)


class ShardOrders:
    """Orders that one process of a shard was given, by which its effects are judged."""

    def __init__(self) -> None:
        self._term = 0
        self._carried_out: dict[int, int] = {}
        """Order that was stepped last, keyed by fragment."""
        self._heads: dict[int, str] = {}
        """Head behind what was written, keyed by order."""
        self._void: set[int] = set()
        """Orders that were taken back, or that a newer connection took up anew."""

    def find_wrong(self, event: ShardEvent, effects: Sequence[ShardEffect]) -> str | None:
        """Return what the shard does that it was not told to."""
        match event:
            case LeadSaid(message) if message.term < self._term:
                heeded = [effect for effect in effects if not isinstance(effect, LeaveLead)]
                return f"heeds term {message.term} after term {self._term}: {heeded}" if heeded else None
            case LeadSaid(message):
                self._term = message.term
                if isinstance(message, Unstage):
                    self._void.add(message.order)
                elif isinstance(message, TakeUp):
                    self._void |= set(self._carried_out.values())
            case LeadLost():
                self._void |= set(self._carried_out.values())
            case Written(order, head):
                self._heads[order] = head
            case _:
                pass
        return next((wrong for effect in effects if (wrong := self._judge(effect)) is not None), None)

    def _judge(self, effect: ShardEffect) -> str | None:
        match effect:
            case Step(stage):
                self._carried_out[stage.fragment] = stage.order
            case RestoreParameters():
                self._carried_out.clear()
                self._void.clear()
            case Undo(fragment) if self._carried_out.get(fragment) not in self._void:
                return f"undoes order {self._carried_out.get(fragment)}, which nobody took back"
            case Abandon(order) if order not in self._void:
                return f"abandons order {order}, which nobody took back"
            case UseNorms(norms) if self._carried_out.get(norms.fragment) != norms.order:
                return f"uses norms of order {norms.order} for order {self._carried_out.get(norms.fragment)}"
            case Apply(RoundDecided(fragment=fragment, head=head), staged=True):
                order = self._carried_out.get(fragment, -1)
                if self._heads.get(order) != head:
                    return f"commits order {order}, {self._heads.get(order)!r}, where {head!r} is decided"
            case _:
                pass
        return None


class ShardInvariants:
    def __init__(
        self,
        oracle: Oracle,
        shards: Sequence[SimulatedShard],
        holders: Sequence[tuple[int, ...]],
        read_initial: Callable[[], list[list[float]]],
    ) -> None:
        """`read_initial`: the first parameters that leads hold which may be about to decide them."""
        self._orders: dict[int, tuple[Shard, ShardOrders]] = {}
        """Process that runs, and what it was told, keyed by the number of the shard."""
        self._oracle, self._shards, self._holders, self._read_initial = oracle, shards, holders, read_initial

    def watch_decision(self, record: MergedRecord) -> None:
        """It is durable in the lead's journal, and nobody was told of it yet."""
        for shard in self._shards:
            head = record.heads[shard.number - LEAD] if len(record.heads) >= shard.number else ""
            holds = shard.number in self._holders[record.fragment]
            if holds and head not in shard.disk.chain:
                said = (
                    f"round {record.round} is decided with {head!r} of shard {shard.number}, which has not written it"
                )
                raise Violation("decisions name existing heads", said, fragment=record.fragment)

    def watch_missing_head(self, shard: SimulatedShard, decision: RoundDecided) -> None:
        said = f"shard {shard.number} is told of {decision.head!r} for round {decision.round}, which it has not written"
        raise Violation("decisions name existing heads", said, fragment=decision.fragment)

    def watch_orders(self, shard: SimulatedShard, event: ShardEvent, effects: Sequence[ShardEffect]) -> None:
        machine, orders = self._orders.get(shard.number, (None, ShardOrders()))
        if machine is not shard.machine:
            orders = ShardOrders()
            self._orders[shard.number] = (shard.machine, orders)
        if (wrong := orders.find_wrong(event, effects)) is not None:
            raise Violation("a shard acts on its own orders", f"shard {shard.number} {wrong}")

    def watch_shard(self, shard: SimulatedShard, fragment: int) -> None:
        version, oracle = shard.versions[fragment], self._oracle
        lost = [value for (f, v, value) in oracle.never_were if (f, v) == (fragment, version)]
        committed = [oracle.values.get((fragment, version)), *lost]
        if not oracle.theta and version == 0:
            committed += [initial[fragment] for initial in self._read_initial() if initial]
        held = shard.theta[fragment]
        if not any(isinstance(one, Cells) and shard.cut_out(one, fragment) == held for one in committed):
            said = f"shard {shard.number} holds {held} as version {version} of fragment {fragment}"
            raise Violation("a shard holds what was decided", f"{said}, decided is {committed[0]}", fragment=fragment)

    def check_end(self, journal: Sequence[AnyRecord]) -> None:
        for record in journal:
            if isinstance(record, MergedRecord):
                self.watch_decision(record)


class RelayInvariants:
    def __init__(self, disk: SimulatedDisk, learners: int, fragments: int) -> None:
        self._disk, self._most = disk, 3 * learners * (fragments + 1)

    def watch_sums(self, sums: SyncerSums, merge: fx.Merge, counted: Sequence[tuple[ContributionKey, float]]) -> None:
        """A round is merged: `counted` is all that is in it, by what the bodies are."""
        wanted = {(part.learner, merge.round, part.attempt): part.weight for part in merge.parts}
        times = Counter(key for key, _ in counted)
        if times != Counter(wanted.keys()) or any(wanted[key] != weight for key, weight in counted):
            found = ", ".join(f"{key[0]} (attempt {key[2]}) {times[key]} times" for key in sorted({*times, *wanted}))
            said = f"round {merge.round} of {sorted(wanted)} is merged from {found}"
            raise Violation("everybody is counted once", said, fragment=merge.fragment)
        self._check_size("bodies that relays hold, by the syncer", len(sums.gathering.held))
        self._check_size("sums that are asked for", len(sums.gathering.asks))

    def watch_feedback(self, relay: SimulatedRelay, asked: SumAsked) -> None:
        if self._disk.losses:
            return  # the record may be gone since
        found = (one for one in reversed(self._disk.journal) if isinstance(one, MergedRecord))
        record = next((one for one in found if one.round == asked.round), None)
        merged = {(one.learner, record.attempt) for one in record.members} if record is not None else set()
        if any((one.learner, one.attempt) not in merged for one in asked.members):
            said = f"{relay.name} takes over what its sum for round {asked.round} left out; merged are {sorted(merged)}"
            raise Violation("feedback is of what is merged", said, fragment=asked.fragment)

    def watch_holdings(self, relay: SimulatedRelay) -> None:
        self._check_size(f"bodies at {relay.name}", len(relay.holdings.held))
        self._check_size(f"sums of {relay.name}", len(relay.holdings.summed))

    def _check_size(self, what: str, count: int) -> None:
        if count > self._most:
            raise Violation("bounded memory", f"{what}: {count}, at most {self._most}")
