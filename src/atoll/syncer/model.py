"""The run's model: where it comes from, who may train it, and the memory it takes.

- The first joiner's tensors make the fragment plan. A run that an earlier term left behind has its model already.
- A learner that joins brings the same tensors, or is refused with the first difference named. One that trains on other
  data is let in, and an event says so.
- `memory_bound`: the most memory that a syncer takes, whatever its peers do.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from atoll.config import Config
from atoll.fabric.state_forwarding import ForwardingLimits
from atoll.fabric.wire import KIB, MIB, FabricLimits
from atoll.numerics.agreement import BUCKETS, GRADIENT_BUCKETS
from atoll.numerics.codec import body_nbytes, largest_body, make_codec
from atoll.numerics.filter import NAMES
from atoll.numerics.fragments import FragmentPlan, difference, make_plan, most_fragments
from atoll.numerics.moments import most_bytes
from atoll.numerics.sample import largest_sample
from atoll.numerics.updates import make_version_codec
from atoll.protocol import schedule
from atoll.protocol.errors import PeerError, PlanError
from atoll.protocol.history import History
from atoll.protocol.messages import MOST_RANKS, Hello
from atoll.protocol.records import BegunRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.outbox import TAPE_BYTES
from atoll.syncer.contributions import ALIGNED
from atoll.syncer.parameters import Parameters
from atoll.syncer.ranks import MOST_PIECES, PARTS
from atoll.syncer.recovery import Recovered, make_parameters, outer_of
from atoll.syncer.versions import OLD

PROGRAM = 256 * MIB
CONNECTION = 640 * KIB
"""An open connection: buffers of TLS, which are the largest; headers; and what is on its way to a slow reader."""
NAME = 4 * KIB
NAME_FRAGMENT = 512
"""Kept of a name: its life, its tokens, its line in the status; and for each fragment what was merged."""
PIECE = 1 * KIB
"""Of a rank's plan, as Python objects."""
TAPE = 16
"""A tape takes this many times its bytes in the journal, as Python objects."""
MISSES = 3
"""Pulls of a learner beside those of the rounds in flight: two that it missed, and a probe (`contributions.STALE`)."""


@dataclass(frozen=True, slots=True)
class Model:
    history: History
    plan: FragmentPlan
    parameters: Parameters

    def check_learner(self, hello: Hello) -> None:
        """PeerError unless the learner trains this model."""
        if (reason := difference(hello.tensors, self.plan.tensors)) is not None:
            raise PeerError(f"{reason}. The run's own settings are in its run.toml.")

    def describe_other_data(self, hello: Hello) -> str:
        """A warning where the learner's data is not the first joiner's; empty: it is."""
        run = self.history.begun.data
        if hello.data == run:
            return ""
        return f"{hello.learner} trains on other data (digest {hello.data[:12]}) than the run ({run[:12]})"

    def describe(self, round_memory: int, *, tail_average: bool = False) -> tuple[str, dict[str, object]]:
        """Text and data of the event at the run's beginning."""
        begun, settings = self.history.begun, self.history.settings
        text = (
            f"the model has {self.plan.size:,} parameters in {settings.fragments} fragments, "
            f"H = {settings.sync_every}, adopt = {settings.adopt}"
        )
        slots = len(outer_of(self.history).make().slots())
        most = memory_bound(self.plan, settings, slots, round_memory=round_memory, tail_average=tail_average)
        return text, {
            "settings": msgspec.to_builtins(settings),
            "parameters": self.plan.size,
            "data": begun.data,
            "memory_ceiling": {
                "fixed_bytes": most.fixed,
                "bytes_per_learner": most.each,
                "bytes_per_name": most.name,
                "bytes_per_learner_of_more_rounds": most.more,
                "most_bytes_of_more_rounds": most.budget,
                "bytes_more_per_learner_of_ranks": most.ranks,
            },
        }


def model_of_first_joiner(hello: Hello, config: Config, run: str, term: int) -> Model:
    """AtollError: the run cannot begin with this model."""
    settings = config.protocol.resolved(most_fragments(hello.tensors, config.protocol.plan))
    settings = msgspec.structs.replace(settings, seed=config.seed)
    plan = make_plan(hello.tensors, settings.fragments, settings.plan)
    begun = BegunRecord(
        run=run,
        settings=settings,
        outer=msgspec.to_builtins(config.outer),
        tensors=hello.tensors,
        fingerprint=plan.fingerprint,
        data=hello.data,
        seed=config.seed,
        frozen=hello.frozen,
        unmerged=hello.unmerged,
        renamed=hello.renamed,
        shards=config.service.shards,
    )
    history = History(begun, term)
    return Model(history, plan, _room_for(plan, history))


def model_of_earlier_terms(found: Recovered) -> Model:
    history = found.history
    plan = make_plan(history.tensors, history.begun.settings.fragments, history.begun.settings.plan)
    return Model(history, plan, found.parameters or _room_for(plan, history))


def _room_for(plan: FragmentPlan, history: History) -> Parameters:
    try:
        return make_parameters(plan, history)
    except (MemoryError, ValueError):  # numpy raises ValueError for more than the address space
        raise PlanError(f"a model of {plan.size:,} parameters does not fit into this syncer's memory") from None


COPIES = 1 + 1 + OLD + 1
"""Of each fragment: committed, the next version, OLD that somebody still reads, and one that a cut is written from."""


class MemoryBound(msgspec.Struct, frozen=True):
    fixed: int
    """Whatever the number of learners."""
    each: int
    """For each connected learner."""
    name: int = 0
    """For each name that ever joined."""
    more: int = 0
    """For each connected learner, if as many rounds are under way as there may be at all …"""
    budget: int = 0
    """… and the most for all of them together (`round_memory_mib`)."""
    ranks: int = 0
    """More for each connected learner of several ranks."""

    def total_bytes(self, learners: int, names: int = 0, of_ranks: int = 0) -> int:
        """`of_ranks`: so many of the learners have several."""
        more = min(self.budget, learners * self.more)
        return self.fixed + learners * self.each + names * self.name + more + of_ranks * self.ranks


def memory_bound(
    plan: FragmentPlan,
    settings: Settings,
    slots: int,
    limits: FabricLimits | None = None,
    forwarding: ForwardingLimits | None = None,
    *,
    round_memory: int = 0,
    tail_average: bool = False,
) -> MemoryBound:
    """A sum of what each limit allows; `slots`: of the outer optimizer, per parameter; `round_memory`: for
    contributions to more rounds under way than τ asks for; `tail_average`: a mean is made at the end.

    | what | bytes |
    | --- | --- |
    | the program | 256 MiB: Python, NumPy, compiled kernels, caches |
    | the model | Θ `COPIES` times, and the outer state |
    | rounds | the largest fragment three times: what is merged now, and the gradient that is written meanwhile |
    | a cut | the outer state once more, while it is written |
    | a lossy version codec | feedback like one more slot; what a round encodes, decodes and leaves out |
    | its encoded steps | of each fragment up to the size of its Θ, and those that readers of OLD versions hold |
    | version 0 in 2 bytes a value | as it came, until version 1; three fragments that are decoded meanwhile |
    | shared moments | those of as many versions as Θ; while they are averaged, three times a fragment in float64 |
    | a rollback | Θ three times, the outer state twice and the feedback once more, with guard = "rollback" |
    | a mean of the last versions | all of a cut once more, the sum in float64, and the mean |
    | one learner | for each of its pulls a body; its queues, both ways; its tape until written |
    | the same, in the round that is merged | its delta: a sample for the filter, or all of it where rows are wide |
    | more rounds under way than τ asks for | the same for each of them, up to `round_memory` for all together |
    | one learner of several ranks, besides | the ranks' plans; `PARTS` parts of versions that are sent to them |
    | the same, for each pull | what ranks' bodies take more than a whole one; their delta; a part while it is decoded |
    | forwarded states | as many streams, and as much of each, as `ForwardingLimits` allows |
    | connections | as many as are allowed, whoever holds them; large answers that are not taken yet |
    | the filter | of as many learners as may be there, for every fragment the direction of the last contribution |
    | autocorrelation | for every fragment a sketch of its last merged gradient |
    | one name | kept of a learner for good, also after it left; a join token brings so many (`JoinToken.names`) |
    """
    limits, forwarding = limits or FabricLimits(), forwarding or ForwardingLimits()
    model, largest = 4 * plan.size, 4 * plan.largest
    fixed = PROGRAM + COPIES * model + 2 * slots * model + 3 * largest
    feedback = 0
    if (codec := make_version_codec(settings.version_codec)) is not None:
        feedback = model if codec.needs_feedback else 0
        fixed += 2 * feedback + 6 * largest
        fixed += model + (1 + OLD) * sum(body_nbytes(codec, part) for part in plan.fragments)
    if settings.rounds_initial:
        fixed += model // 2 + 3 * (largest + largest // 2)
    if settings.shares_moments:
        fixed += COPIES * len(plan.fragments) * most_bytes(plan) + 6 * largest
    if settings.guard == "rollback":
        fixed += 2 * (1 + slots) * model + model + feedback + largest
    if tail_average:
        fixed += (1 + slots) * model + feedback + 2 * model + model
    fixed += forwarding.streams * forwarding.window_bytes + limits.connections * CONNECTION + limits.answer_bytes
    fixed += settings.fragments * (NAMES * BUCKETS + GRADIENT_BUCKETS) * 8
    least, most = (max(map(count, settings.in_all_phases)) for count in (schedule.least_flights, schedule.most_flights))
    each = contribution_bytes(plan, settings)
    talk = limits.queue_bytes + 2 * limits.control_bytes + TAPE * TAPE_BYTES + 4 * largest_sample(plan) + largest
    return MemoryBound(
        fixed,
        (least + MISSES) * each + talk,
        NAME + settings.fragments * NAME_FRAGMENT,
        more=(most - least) * each,
        budget=round_memory,
        ranks=MOST_PIECES * PIECE + PARTS * largest + (most + MISSES) * (2 * largest + _more_of_ranks(plan, settings)),
    )


def contribution_bytes(plan: FragmentPlan, settings: Settings) -> int:
    """Memory of a contribution until its round is merged: the body as it came."""
    return largest_body(make_codec(settings.codec), plan) + moments_room(plan, settings)


def _more_of_ranks(plan: FragmentPlan, settings: Settings) -> int:
    """What the bodies of ranks take more than one of the whole: where a codec has blocks, theirs may be of few values,
    which no codec makes more than 4 bytes each."""
    codec = make_codec(settings.codec)
    blocks = 4 * plan.largest - largest_body(codec, plan) if codec.needs_feedback else 0
    return blocks + ALIGNED * MOST_RANKS


def moments_room(plan: FragmentPlan, settings: Settings) -> int:
    """For those of any fragment; 0 where they are not shared."""
    return most_bytes(plan) if settings.shares_moments else 0
