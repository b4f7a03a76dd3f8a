"""A world whose learners have links of a given width, and what tests look at in it."""

from __future__ import annotations

from math import ceil, inf
from typing import Any

from tests.protocol.world import World

from atoll.protocol import schedule
from atoll.protocol.settings import Settings
from atoll.simulate import world as simulated
from atoll.simulate.cells import begin_cells, constant_gradient
from atoll.simulate.drawn_parts import DrawnRelays, DrawnShards
from atoll.simulate.links import SimulatedLink
from atoll.simulate.simulated_learner import SimulatedLearner

MBIT = 1e6 / 8
STEP_S = 0.2


class LinkedWorld(World):
    """Steps of 0.2 s and 40 ms to the syncer, as in the measurements on real links."""

    def __init__(
        self,
        rates: list[float],
        *,
        up_bytes: float,
        down_bytes: float,
        fragments: int = 24,
        sync_every: int = 24,
        first_bytes: float = 0.0,
        **settings: Any,
    ) -> None:
        """`rates`: per learner, Mbit/s of each way. `first_bytes`: of version 0 of a fragment."""
        settings = {"latency_s": 0.04, "jitter": 0.05, "merge_s": 0.01, "seed": 1, **settings}
        super().__init__(len(rates), present=0, fragments=fragments, sync_every=sync_every, **settings)
        self.up_bytes, self.down_bytes, self.first_bytes = up_bytes, down_bytes, first_bytes
        self.set_body_bytes(up_bytes, down_bytes)
        for number, rate in enumerate(rates):
            self.add_link(f"learner-{number}", rate)
            self.join(f"learner-{number}", STEP_S * (1 + 0.01 * number))

    def add_link(self, name: str, mbit: float) -> None:
        self.network.links[name] = SimulatedLink(
            mbit * MBIT, mbit * MBIT, self.up_bytes, self.down_bytes, self.first_bytes
        )

    def set_rates(self, mbit: float) -> None:
        for link in self.network.links.values():
            link.set_rates(mbit * MBIT, mbit * MBIT)

    def run_steps(self, steps: float) -> LinkedWorld:
        self.run(self.now + steps * STEP_S)
        return self

    @property
    def h(self) -> float:
        return self.syncer.rounds.interval.steps * self.settings.fragments

    def floor_steps(self, mbit: float) -> int:
        """Return the floor of the overlap (docs/protocol.md), and the step by which learners are out of phase."""
        up_s, down_s = self.up_bytes / (mbit * MBIT), self.down_bytes / (mbit * MBIT)
        return ceil(schedule.least_overlap_s(self.network.longest_s, up_s, down_s, self.merge_s) / STEP_S) + 1

    def members_since(self, seconds: float, name: str = "") -> list[dict[str, Any]]:
        notes = [note for at, note in self.notes if note.kind == "round" and at >= seconds]
        members: list[dict[str, Any]] = [one for note in notes for one in note.data["members"]]  # type: ignore[attr-defined]
        return [one for one in members if name in ("", one["learner"])]

    def overlap_p95(self, since: float, name: str = "") -> float:
        overlaps = sorted(one["overlap"] for one in self.members_since(since, name) if one["overlap"] is not None)
        return float(overlaps[ceil(0.95 * len(overlaps)) - 1]) if overlaps else inf

    def count_fates(self, name: str) -> tuple[int, int]:
        """Fragment-tokens of a learner that were merged, and that were dropped."""
        fates = self.syncer.history.ledger.by_learner()[name]
        return sum(fates.merged), sum(fates.dropped)

    def merged_share(self, name: str, since: tuple[int, int] = (0, 0)) -> float:
        """`since`: its fates when the counting begins."""
        merged, dropped = (now - before for now, before in zip(self.count_fates(name), since, strict=True))
        return merged / (merged + dropped)

    def told_shares(self) -> list[float]:
        """List the shares that learners were told of, in order."""
        return [float(note.data["share"]) for note in self.said("share") if "share" in note.data]  # type: ignore[arg-type]

    def share_of(self, learner: SimulatedLearner | str) -> float:
        return self.syncer.members.learners[learner if isinstance(learner, str) else learner.name].share


class PartWorld(simulated.World):
    """The same with relays between learners and syncer, or with a syncer of several shards."""

    def __init__(
        self,
        rates: list[float],
        *,
        up_bytes: float,
        down_bytes: float,
        relays: DrawnRelays | None = None,
        shards: DrawnShards | None = None,
        **settings: Any,
    ) -> None:
        """`rates`: per learner, Mbit/s of each way."""
        cells: dict[str, Any] = {"theta": begin_cells(), "gradient": constant_gradient} if shards is not None else {}
        resolved = Settings(learners=len(rates), **settings).resolved(1000)
        times = {"latency_s": 0.04, "jitter": 0.05, "merge_s": 0.01}
        super().__init__(resolved, seed=1, relays=relays, shards=shards, **times, **cells)
        self.network.redials = True
        self.simulated_syncer.check_lease()
        self.set_body_bytes(up_bytes, down_bytes)
        for number, rate in enumerate(rates):
            name = f"learner-{number}"
            self.network.links[name] = SimulatedLink(rate * MBIT, rate * MBIT, up_bytes, down_bytes)
            self.network.dial_later(self.join(name, STEP_S * (1 + 0.01 * number)))

    def run_steps(self, steps: float) -> PartWorld:
        self.run(self.now + steps * STEP_S)
        return self
