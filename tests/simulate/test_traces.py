"""Traces see whatever the machines of a world do, and the first worlds of every kind have the recorded traces."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

import msgspec
import pytest

from atoll.courier.rank_orders import RankOrders
from atoll.learner.meeting import Meeting
from atoll.mailbox.channel import ToTraining
from atoll.protocol import relay, shard
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.relay import RelayHoldings, SumGathering
from atoll.protocol.shard import Shard
from atoll.protocol.shard_messages import FromLead, FromShard
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.effect_order import EffectOrder
from atoll.protocol.syncer.machine import Syncer
from atoll.protocol.syncer.shard_effects import LeadEffect, Tell
from atoll.protocol.syncer.shards import LeadShards
from atoll.simulate import campaign
from atoll.simulate.campaign import WorldKind
from atoll.simulate.ranked_learner import RankedLearner
from atoll.simulate.trace import MACHINES, Trace
from atoll.simulate.world import World

RECORDED = Path(__file__).parents[2] / "tools" / "traces.json"
SAMPLE = 3
UNTIL_S = 35.0
SEEDS: dict[WorldKind, int] = {"plain": 2, "ranks": 0, "shards": 5, "relays": 0}
"""Of each kind a world in which all that is changed below happens before UNTIL_S."""


@pytest.mark.parametrize("kind", SEEDS)
def test_the_first_worlds_have_the_recorded_traces(kind: WorldKind) -> None:
    recorded = json.loads(RECORDED.read_text())[kind][:SAMPLE]
    traces = [campaign.run(campaign.plan(seed, kind=kind)).trace for seed in range(SAMPLE)]
    assert traces == recorded, "worlds differ from the recorded ones: if that is meant, python tools/traces.py --write"


# ---- every change is seen --------------------------------------------------------------------------------------------


class Differs(BaseException):
    """Ends a world at the first hash that is another one: what comes of the change does not matter."""

    def __init__(self, machine: type, values: Sequence[object]) -> None:
        super().__init__(machine)
        self.machine, self.values = machine, values


class SteppedTrace(Trace):
    """A trace that knows the hash after each addition, and compares it with those of another trace."""

    def __init__(self, expected: Sequence[str] = ()) -> None:
        super().__init__()
        self.expected, self.hashes = expected, list[str]()

    def add(self, at: float, machine: type, node: str, event: object, effects: Sequence[object]) -> None:
        super().add(at, machine, node, event, effects)
        self.hashes.append(self.hexdigest())
        if self.expected and self.hashes[-1] != self.expected[len(self.hashes) - 1]:
            raise Differs(machine, effects)


def run_world(kind: WorldKind, trace: SteppedTrace) -> None:
    world = campaign.make(campaign.plan(SEEDS[kind], kind=kind), traced=False)
    world.trace = trace
    world.run(UNTIL_S)


@cache
def hashes_of(kind: WorldKind) -> Sequence[str]:
    trace = SteppedTrace()
    run_world(kind, trace)
    return trace.hashes


UNIONS = (learner_fx.LearnerEffect, shard.ShardEffect, LeadEffect, ToTraining, syncer_fx.SyncerEffect)
TWINS: dict[type, type[msgspec.Struct]] = {
    kind: twin
    for union in UNIONS
    for kind, twin in permutations(get_args(union), 2)
    if kind.__struct_fields__ == twin.__struct_fields__
}
"""For effects: another one with the same fields."""
WITH_TWINS = (LearnerMachine, Meeting, Shard, LeadShards)
"""Machines that some of these effects are of. Those of others are exchanged for one that is made up."""


def change_type(effect: Any) -> Any:
    twin = TWINS.get(type(effect))
    return None if twin is None else twin(**msgspec.structs.asdict(effect))


def make_up_type(effect: Any) -> Any:
    if not isinstance(effect, msgspec.Struct):
        return None
    twin: Any = types.new_class(f"Twin{type(effect).__name__}", (type(effect),), {"frozen": True})
    return twin(**msgspec.structs.asdict(effect))


def change_field(effect: Any) -> Any:
    """Change the first field that is a number or a text."""
    if not isinstance(effect, msgspec.Struct):
        return None
    for name in effect.__struct_fields__:
        value = getattr(effect, name)
        if isinstance(value, int | float | str):
            return msgspec.structs.replace(effect, **{name: value + 1 if not isinstance(value, str) else value + "x"})
    return None


Change = Callable[[list[Any]], list[Any]]
"""Changes one effect or two of a list, and returns the changed ones; none: it cannot."""


def change_one(change: Callable[[Any], Any]) -> Change:
    def changed(effects: list[Any]) -> list[Any]:
        for place, effect in enumerate(effects):
            of_relay = type(effect) is tuple  # with the session of the relay that it is for
            if (other := change(effect[1] if of_relay else effect)) is not None:
                effects[place] = (effect[0], other) if of_relay else other
                return [effects[place]]
        return []

    return changed


def change_order(effects: list[Any]) -> list[Any]:
    for place in range(1, len(effects)):
        before, after = effects[place - 1 : place + 1]
        if before != after:
            effects[place - 1 : place + 1] = after, before
            return [before, after]
    return []


def find_change(machine: type, what: str) -> Change:
    if what == "type":
        return change_one(change_type if machine in WITH_TWINS else make_up_type)
    return change_one(change_field) if what == "field" else change_order


Plain = Callable[..., Any]


def in_answer(plain: Plain, change: Callable[[list[Any]], None]) -> Plain:
    """A machine that answers with other effects."""

    def changed(*arguments: Any, **named: Any) -> Any:
        answer = plain(*arguments, **named)
        effects = list(answer) if isinstance(answer, list) else [answer]
        change(effects)
        return effects if isinstance(answer, list) else effects[0]

    return changed


def in_argument(plain: Plain, change: Callable[[list[Any]], None]) -> Plain:
    """A machine that is given other effects than were decided."""

    def changed(self: Any, effects: list[Any]) -> Any:
        change(given := list(effects))
        return plain(self, given)

    return changed


def behind_trace(plain: Plain, change: Callable[[list[Any]], None]) -> Plain:
    """A learner whose effects are changed once they are in the trace."""

    def changed(self: Any, learner: Any, event: Any, effects: list[Any]) -> None:
        plain(self, learner, event, effects)
        for place in range(len(effects) - 1 if isinstance(learner, RankedLearner) else 0):
            pair = effects[place : place + 2]
            if all(isinstance(effect, AS_FRAMES) for effect in pair):
                change(pair)
                effects[place : place + 2] = pair

    return changed


AS_FRAMES = (learner_fx.LetGo, learner_fx.CancelRead)
"""Effects of a learner that its ranks get as they are."""
Place = tuple[WorldKind, Any, str, Callable[..., Plain]]
"""Where effects of a machine are changed: the kind of world, class, method, and how."""
PLACES: dict[type, Place] = {
    Syncer: ("plain", Syncer, "handle", in_answer),
    EffectOrder: ("plain", EffectOrder, "enqueue", in_argument),
    LearnerMachine: ("plain", LearnerMachine, "handle", in_answer),
    RankOrders: ("ranks", RankOrders, "take_answer", in_answer),
    Meeting: ("ranks", Meeting, "take_agreed", in_answer),
    Shard: ("shards", Shard, "handle", in_answer),
    LeadShards: ("shards", LeadShards, "take_effects", in_answer),
    RelayHoldings: ("relays", RelayHoldings, "describe_sum", in_answer),
    SumGathering: ("relays", SumGathering, "ask_sums", in_answer),
}
PLACES_OF_ORDER: dict[type, Place] = {
    RankOrders: ("ranks", World, "on_learner_event", behind_trace),
    RelayHoldings: ("relays", RelayHoldings, "find_members", in_answer),
}
"""Of machines that answer with one effect."""


@pytest.mark.parametrize("what", ["type", "field", "order"])
@pytest.mark.parametrize("machine", MACHINES, ids=MACHINES.values())
def test_a_changed_effect_is_seen_at_once(machine: type, what: str) -> None:
    places = PLACES | PLACES_OF_ORDER if what == "order" else PLACES
    kind, owner, name, how = places[machine]
    changed: list[Any] = []

    def change(effects: list[Any]) -> None:
        if not changed:
            changed.extend(find_change(machine, what)(effects))

    expected = hashes_of(kind)
    with patch.object(owner, name, how(getattr(owner, name), change)), pytest.raises(Differs) as seen:
        run_world(kind, SteppedTrace(expected))
    assert seen.value.machine is machine
    values = [item for value in seen.value.values for item in (value if isinstance(value, list) else [value])]
    assert any(value is effect for value in values for effect in changed)


# ---- names are added for all that has no tag -------------------------------------------------------------------------

HANDLED = (
    syncer_fx.SyncerEvent | syncer_fx.SyncerEffect | learner_fx.LearnerEvent | learner_fx.LearnerEffect | ToTraining
    | shard.ShardEvent | shard.ShardEffect | LeadEffect | FromShard | FromLead | relay.FromRelay | relay.ToRelay
)  # fmt: skip


def test_nested_structs_of_several_types_carry_a_tag() -> None:
    """Otherwise a trace does not see which one it is. `Tell` alone has none: its event is named."""
    untagged, known = set[tuple[type, str]](), set[type]()
    waiting = list(get_args(HANDLED))
    while waiting:
        kind = waiting.pop()
        if kind in known or not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            continue
        known.add(kind)
        for name, hint in get_type_hints(kind, include_extras=True).items():
            for members in find_unions(hint):
                structs = [one for one in members if isinstance(one, type) and issubclass(one, msgspec.Struct)]
                waiting += structs
                if len(structs) > 1 and any(one.__struct_config__.tag is None for one in structs):
                    untagged.add((kind, name))
    assert untagged == {(Tell, "event")} and len(known) > 200


def find_unions(hint: Any) -> Iterator[tuple[Any, ...]]:
    """Find what each place within a type may hold."""
    if get_origin(hint) is Annotated:
        yield from find_unions(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        members = tuple(get_args(one)[0] if get_origin(one) is Annotated else one for one in get_args(hint))
        yield members
        for member in members:
            yield from find_unions(member)
    elif get_origin(hint) is not Literal and get_args(hint):
        for argument in get_args(hint):
            yield from find_unions(argument)
    else:
        yield (hint,)
