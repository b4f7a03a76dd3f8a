"""Hash of everything that happened in a world: equal traces mean equal worlds, on any host and in any process.

A trace holds each event that a state machine of the product handles, and each effect that it answers with, in order:
the machine, the node that it runs on, the types and all field values. Messages and journal records carry a tag of their
type anyway; for other structs the name of the type is added.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from atoll.courier.rank_orders import RankOrders
from atoll.learner.meeting import Meeting
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.relay import RelayHoldings, SumGathering
from atoll.protocol.shard import Shard
from atoll.protocol.syncer.effect_order import EffectOrder
from atoll.protocol.syncer.machine import Syncer
from atoll.protocol.syncer.shard_effects import Tell
from atoll.protocol.syncer.shards import LeadShards

FLUSH_BYTES = 1 << 16
MACHINES: dict[type, str] = {
    Syncer: "syncer",
    EffectOrder: "syncer's order",
    LearnerMachine: "learner",
    RankOrders: "rank leader",
    Meeting: "ranks",
    Shard: "shard",
    LeadShards: "lead",
    RelayHoldings: "relay",
    SumGathering: "syncer's relays",
}
"""Machines of the product that the simulator runs, and what traces call them."""
NAMES: dict[str, str] = {}
"""Names that types had before they were renamed, for comparisons with older traces (tools/traces.py)."""


class Trace:
    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._buffer = bytearray()
        self._encode = msgspec.msgpack.Encoder().encode_into
        self._names: dict[tuple[type, ...], str] = {}
        """Names of an event and its effects, keyed by their types."""

    def add(self, at: float, machine: type, node: str, event: object, effects: Sequence[object]) -> None:
        """Add an event that a machine has handled, and its effects in order. For a machine without events, the event
        is a word or a tuple of values."""
        buffer = self._buffer
        values = (*event, *effects) if type(event) is tuple else (event, *effects)
        kinds = tuple(map(type, values))
        names = self._names.get(kinds) or self._name_types(kinds, values)
        self._encode((at, MACHINES[machine], node, names, event, effects), buffer, -1)
        if len(buffer) > FLUSH_BYTES:
            self._hash.update(buffer)
            buffer.clear()

    def hexdigest(self) -> str:
        self._hash.update(self._buffer)
        self._buffer.clear()
        return self._hash.hexdigest()

    def _name_types(self, kinds: tuple[type, ...], values: tuple[object, ...]) -> str:
        names = " ".join(map(_name_type, kinds))
        if Tell in kinds:
            # Its event is the only struct that may be of several types and carries no tag.
            return " ".join([names, *(_name_type(type(value.event)) for value in values if isinstance(value, Tell))])
        self._names[kinds] = names
        return names


def _name_type(kind: type) -> str:
    return NAMES.get(kind.__name__, kind.__name__)
