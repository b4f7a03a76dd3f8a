"""The run's model: where it comes from, and who may train it.

The first joiner's model is the run's model: its tensors make the fragment plan. A run that an earlier term left behind
has its model already. Whoever joins brings the same tensors, or is refused with the first difference named; one that
trains on other data is let in, and that is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from atoll.config import Config, Outer
from atoll.numerics.fragments import Plan, difference, make_plan
from atoll.protocol.errors import PeerError, PlanError
from atoll.protocol.history import History
from atoll.protocol.messages import Hello
from atoll.protocol.records import Begun
from atoll.syncer.ceiling import ceiling
from atoll.syncer.parameters import Parameters
from atoll.syncer.recovery import Recovered, outer_of


@dataclass(frozen=True, slots=True)
class Model:
    history: History
    plan: Plan
    parameters: Parameters

    def check(self, hello: Hello) -> None:
        """PeerError unless it is this model that the learner trains."""
        run = tuple(tensor for part in self.plan.fragments for tensor in part.tensors)
        if (reason := difference(hello.tensors, run)) is not None:
            raise PeerError(f"{reason}. The run's own settings are in its run.toml.")

    def other_data(self, hello: Hello) -> str:
        """That the learner's data is not the first joiner's; empty: it is."""
        run = self.history.begun.data
        if hello.data == run:
            return ""
        return f"{hello.learner} trains on other data (digest {hello.data[:12]}) than the run ({run[:12]})"

    def told(self) -> tuple[str, dict[str, object]]:
        """For the run's events, when it begins."""
        begun, settings = self.history.begun, self.history.settings
        text = (
            f"the model has {self.plan.size:,} parameters in {settings.fragments} fragments, H = {settings.sync_every}"
        )
        most = ceiling(self.plan, settings, len(outer_of(self.history).make().slots()))
        return text, {
            "settings": msgspec.to_builtins(settings),
            "parameters": self.plan.size,
            "data": begun.data,
            "memory_ceiling": {
                "fixed_bytes": most.fixed,
                "bytes_per_learner": most.each,
                "bytes_per_name": most.name,
            },
        }


def first_joiners(hello: Hello, config: Config, run: str, term: int) -> Model:
    """The run begins with it. AtollError: with this model it cannot."""
    settings = config.protocol.resolved(len(hello.tensors))
    settings = msgspec.structs.replace(settings, seed=config.seed)
    plan = make_plan(hello.tensors, settings.fragments, settings.plan)
    begun = Begun(
        run=run,
        settings=settings,
        outer=msgspec.to_builtins(config.outer),
        tensors=hello.tensors,
        fingerprint=plan.fingerprint,
        data=hello.data,
        seed=config.seed,
        frozen=hello.frozen,
    )
    return Model(History(begun, term), plan, _room_for(plan, config.outer))


def earlier_terms(found: Recovered) -> Model:
    history = found.history
    plan = make_plan(history.tensors, history.begun.settings.fragments, history.begun.settings.plan)
    return Model(history, plan, found.parameters or Parameters(plan, outer_of(history)))


def _room_for(plan: Plan, outer: Outer) -> Parameters:
    try:
        return Parameters(plan, outer)
    except (MemoryError, ValueError):  # numpy's word for what no address reaches
        raise PlanError(f"a model of {plan.size:,} parameters does not fit into this syncer's memory") from None
