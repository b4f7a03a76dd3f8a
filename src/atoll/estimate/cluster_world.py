"""The shipped protocol between such learners: who is in which round, and who waits for whom.

It is the world of the fault simulator (both state machines, network, journal, every promise checked at every event), in
which a step takes as long as the learner's chips need for it. A learner without slices is a dead process; one that
scales down or up is a slow step. In a synchronous run learners wait for rounds, and that is found here too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import msgspec

from atoll.estimate.chips import Chips, TimeSpan
from atoll.estimate.profile import Profile
from atoll.protocol.effects import Note
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import participation
from atoll.simulate.training import Training
from atoll.simulate.world import World

NEVER_S = 1e9
"""A step that its process does not live to end."""
WITHIN = 50
"""The rounds asked for come within so many times their usual time, or whoever can be waited for is not there."""


class PlayedRounds(msgspec.Struct, frozen=True):
    """What the protocol made of it."""

    count: int
    seconds: float
    participation: float | None
    """Mean over rounds of members over learners alive and recovered."""
    effective_h: float | None
    merged_share: float | None = None
    """Fragment-tokens merged over those computed, of all learners together …"""
    shares: tuple[float | None, ...] = ()
    """… and of each of them, in the order of the learners: from the fastest to the slowest."""


def settings_of(profile: Profile, learners: int, *, synchronous: bool = False, whole: bool = False) -> Settings:
    """The run's rules. `whole`: the model is one fragment and nothing overlaps, as in DiLoCo.

    Learners say that they live once a step instead of once a second: 10 s steps would be drowned in heartbeats.
    """
    rules = profile.rules
    heartbeat_s = max(1.0, profile.step_s)
    return Settings(
        learners=learners,
        fragments=1 if whole else rules.fragments,
        sync_every=rules.sync_every,
        overlap=0 if whole else rules.overlap,
        quorum=min(rules.quorum, learners),
        quorum_policy="grace" if rules.grace else "minimum",
        synchronous=synchronous,
        adopt="overwrite",  # the paper's rule: its figures are what these are held against
        cut_every=0,
        heartbeat_s=heartbeat_s,
        lost_after_s=6 * heartbeat_s,
        abandon_s=max(300.0, 12 * heartbeat_s),
    ).resolved(rules.fragments)


class ClusterWorld(World):
    def __init__(
        self,
        profile: Profile,
        settings: Settings,
        learners: Sequence[Chips],
        lives: Sequence[list[TimeSpan]],
        seed: int,
    ) -> None:
        """Each learner goes on where its life so far ends."""
        super().__init__(settings, seed=seed, latency_s=profile.rules.latency_s)
        self.chips = {f"learner-{number}": chips for number, chips in enumerate(learners)}
        self.lives = dict(zip(self.chips, lives, strict=True))
        self._shares: list[float] = []
        self._profile = profile
        self.network.redials = True
        self.simulated_syncer.check_lease()
        for name, life in self.lives.items():
            self.queue.call_later(life[-1].end, self._come_back, name)
        self._crash_later(random.Random(seed))

    def play(self, rounds: int, until: float) -> PlayedRounds:
        """So many rounds, or to that moment."""
        step_s = self._profile.step_s * self.settings.sync_every / self.settings.fragments
        limit = min(until, WITHIN * rounds * step_s)
        while self.committed < rounds and self.now < limit:
            self.run(min(limit, self.now + step_s))
        inside = fmean(self._shares) if self._shares else None
        ledger = self.syncer.history.ledger
        own = ledger.by_learner()
        shares = tuple(own[name].merged_share() if name in own else None for name in self.chips)
        whole = ledger.totals().merged_share()
        return PlayedRounds(self.committed, self.now, inside, self.syncer.steps_between_syncs.median, whole, shares)

    @property
    def committed(self) -> int:
        return self.syncer.committed

    def step_s(self, learner: Training) -> float:
        """How long it is to the end of the step that begins now."""
        life = self.lives[learner.name]
        if self.now > (reached := life[-1].end):
            life.append(TimeSpan(reached, self.now, "waiting" if self.settings.synchronous else "recovering"))
        return self.end_step(learner.name) - self.now

    def end_step(self, name: str) -> float:
        """Live on to the end of the next step. When that is; NEVER_S later if its process does not live to end it."""
        chips, life = self.chips[name], self.lives[name]
        gone_at: float | None = None
        while (stretch := chips.standing(life[-1].end)) is not None:
            life.append(stretch)
            if stretch.kind in ("gone", "away") and gone_at is None:
                gone_at = stretch.start
        if gone_at is not None:
            self.queue.call_later(gone_at - self.now, self._vanish, name)
            self.queue.call_later(life[-1].end - self.now, self._come_back, name)
            return life[-1].end + NEVER_S
        life.append(chips.step(life[-1].end, most=1))
        return life[-1].end

    def _vanish(self, name: str) -> None:
        self.kill(self.learners[name], "it lost its last slice")

    def _come_back(self, name: str) -> None:
        """Another process takes its place."""
        self.network.dial_later(self.join(name, self._profile.step_s))

    def _crash_later(self, dice: random.Random) -> None:
        outages = self._profile.syncer
        if outages.mtbf_s:
            self.queue.call_later(dice.expovariate(1 / outages.mtbf_s), self._crash, dice)

    def _crash(self, dice: random.Random) -> None:
        self.crash_syncer(self._profile.syncer.down_s)
        self._crash_later(dice)

    def on_note(self, note: Note) -> None:
        if note.kind == "round":
            members, live = note.data["members"], note.data["live"]
            assert isinstance(members, tuple) and isinstance(live, int)
            self._shares.append(participation(len(members), live))
