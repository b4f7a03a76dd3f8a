"""What is drawn of a world before anything happens in it: the settings of the run, and how its hosts and links are."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from atoll.protocol.effects import Registered
from atoll.protocol.settings import Settings

LEARNERS = (1, 2, 2, 3, 3, 4, 5)
"""One of these, where nobody says how many."""


class Options(msgspec.Struct, frozen=True):
    settings: Settings
    run_seed: int
    """Of all that is drawn while the world runs."""
    step_s: tuple[float, ...]
    """Per learner."""
    late_s: tuple[float, ...]
    """Per learner, when it first joins."""
    rates: tuple[float, ...]
    """Per learner, how fast its clock runs."""
    latency_s: float
    jitter: float
    sync_s: float
    every_round: bool
    """durability = "round"; otherwise "cut"."""
    direct: bool
    courier_s: float
    down_s: float
    """How long a syncer that died is away."""
    outer_lr: float
    data: tuple[tuple[str, int, float], ...]
    epochs: int
    batch: int
    merge_s: float
    faults_s: float
    """Faults begin before this moment, and are over by then."""

    @property
    def registered(self) -> Registered | None:
        return Registered(self.data, self.epochs, self.batch) if self.data else None


def draw(dice: random.Random, learners: int | None) -> Options:
    """The same draws whether the number of learners is given or drawn: the same number gives the same world."""
    drawn = dice.choice(LEARNERS)
    names = learners if learners is not None else drawn
    per_learner = random.Random(dice.getrandbits(64))
    latency_s, jitter = dice.choice([0.0, 0.002, 0.02, 0.2, 0.5]), dice.choice([0.0, 0.5, 2.0])
    return Options(
        settings=_settings(dice, names, latency_s * (1 + jitter)),
        run_seed=dice.getrandbits(64),
        step_s=tuple(per_learner.choice([1.0, per_learner.uniform(0.3, 2.0)]) for _ in range(names)),
        late_s=tuple(per_learner.choice([0.0, 0.0, 0.0, per_learner.uniform(0, 30)]) for _ in range(names)),
        rates=tuple(per_learner.choice([1.0, 1.0, per_learner.uniform(0.98, 1.02)]) for _ in range(names)),
        latency_s=latency_s,
        jitter=jitter,
        sync_s=dice.choice([0.0, 0.001, 0.01, 0.15]),
        every_round=dice.random() < 0.85,
        direct=dice.random() < 0.5,
        courier_s=dice.choice([0.0, 0.0, 0.05]),
        down_s=dice.choice([0.2, 1.0, 4.0]),
        outer_lr=dice.choice([1.0, 0.7]),
        **_data(dice),
        merge_s=dice.choice([0.0, 0.0, 0.05]),
        faults_s=dice.choice([80.0, 140.0, 205.0]),
    )


def _settings(dice: random.Random, learners: int, delay_s: float) -> Settings:
    """Such that a link of that delay, in peace, makes nobody look dead."""
    fragments = dice.randint(1, 6)
    every = fragments * dice.choice([1, 1, 1, 2]) + dice.choice([0, 0, 1])
    quorum = dice.random()
    return Settings(
        learners=learners,
        fragments=fragments,
        sync_every=every,
        overlap=min(dice.randint(0, 3), every - 1),
        quorum=1 + int(quorum * learners) if dice.random() < 0.6 else 1,
        synchronous=dice.random() < 0.3,
        grace=dice.random() < 0.8,
        adopt=dice.choice(["overwrite", "overwrite", "blend", "carry", "carry"]),
        steps=dice.choice([0, 0, 200, 600]),
        tokens=dice.choice([0, 0, 0, 3000 * learners]),
        cut_every=dice.choice([-1, 0, 3, 3 * fragments]),
        cut_wait_s=dice.choice([3.0, 20.0]),
        assemble_s=dice.choice([5.0, 15.0]),
        patience_s=dice.choice([2.0, 5.0]) + 4 * delay_s,
        lost_after_s=dice.choice([3.0, 6.0]) + 2 * delay_s,
        abandon_s=dice.choice([8.0, 30.0, 300.0]),
        stalled_after_s=dice.choice([5.0, 10.0]),
        pull_floor_s=dice.choice([0.5, 1.0]) + 4 * delay_s,
        strikes=dice.choice([1, 3]),
        startup_s=dice.choice([0.5, 3.0]),
    ).resolved(1000)


def _data(dice: random.Random) -> dict[str, Any]:
    kind, samples = dice.random(), dice.choice([700, 3000, 20_000])
    one = (("text", samples, 1.0),)
    two = (*one, ("code", samples // 3, 0.5))
    data = () if kind < 0.3 else one if kind < 0.7 else two
    return {"data": data, "epochs": dice.choice([0, 0, 0, 2]), "batch": dice.choice([1, 2, 4])}
