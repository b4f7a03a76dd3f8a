"""What must hold of a syncer's shards, whatever the world does:

decisions name existing heads     before anybody is told of a round, every shard that holds a part of it has written it
                                  down: the record of the round names a record of that shard's chain
a shard holds what was decided    after every decision, and when it has come back, its part of a fragment is that of the
                                  committed version; so no void record is ever read. Before version 0 is decided, it
                                  holds nothing, or what a lead that lives is about to decide
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.protocol.records import AnyRecord, MergedRecord
from atoll.protocol.shard_messages import RoundDecided
from atoll.protocol.syncer.shards import LEAD
from atoll.simulate.cells import Cells
from atoll.simulate.oracle import Oracle, Violation
from atoll.simulate.simulated_shard import SimulatedShard


class ShardInvariants:
    def __init__(
        self,
        oracle: Oracle,
        shards: Sequence[SimulatedShard],
        holders: Sequence[tuple[int, ...]],
        read_initial: Callable[[], list[list[float]]],
    ) -> None:
        """`read_initial`: the first parameters that leads hold which may be about to decide them."""
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
