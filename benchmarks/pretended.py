"""A run that is not there: events and statuses of any number of learners, seeded, as fast or as slow as one likes.

For looking at the dashboard, and for measuring what it costs, without a machine for 64 learners.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from atoll.protocol.statistics import merged_share
from atoll.telemetry.status import LearnerStatus, RunStatus

FRAGMENTS = 24
STEP_S = 0.12
FAILS = 1 / 240
"""How often a learner fails, per second."""
AWAY_S = (4.0, 25.0)
JOIN_S = 2.5
TOKENS = 2048

Say = Callable[[float, str, str, dict[str, object]], None]


@dataclass
class Pretended:
    name: str
    speed: float
    state: str = "joining"
    until: float = 0.0
    """When its state of now ends, if it does by itself."""
    incarnation: int = 1
    step: float = 0.0
    busy_s: float = 0.0
    loss: float = 5.5
    behind: int = 0


@dataclass
class PretendedRun:
    learners: int
    began: float
    say: Say
    seed: int = 1
    now: float = 0.0
    round: int = 0
    crowd: list[Pretended] = field(default_factory=list)
    members: tuple[str, ...] = ()
    reason: str = ""
    scored: tuple[int, float] | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    _alive_s: float = 0.0
    _shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.now = self.began
        self.say(self.began - 3, "run", "run pretended: waiting", {"run": "pretended", "learners": self.learners})
        for number in range(self.learners):
            one = Pretended(
                f"learner-{number}", self.chance.uniform(0.8, 1.2), until=self.began + JOIN_S * number / self.learners
            )
            self.crowd.append(one)
            self._say_of(one, self.began - 1, "joined", "joined")

    def advance(self, to: float) -> None:
        """Live on until this moment."""
        while self.now + STEP_S <= to:
            self.now += STEP_S
            for one in self.crowd:
                self._live(one)
            self._commit()

    def _say_of(self, one: Pretended, at: float, kind: str, words: str, **data: object) -> None:
        known = {"learner": one.name, "incarnation": one.incarnation, **data}
        self.say(at, kind, f"{one.name} {words}", known)

    def _live(self, one: Pretended) -> None:
        if one.state != "gone":
            self._alive_s += STEP_S
        if one.state == "training":
            one.step += one.speed
            one.busy_s += 0.97 * STEP_S
            one.loss = 1.4 + 4.1 * math.exp(-one.step / 900) + self.chance.gauss(0, 0.03)
            if self.chance.random() < FAILS * STEP_S:
                self._fail(one)
        elif self.now >= one.until:
            self._mend(one)

    def _fail(self, one: Pretended) -> None:
        what = self.chance.choice(["kill", "kill", "kill", "pause", "mute"])
        seconds = self.chance.uniform(*AWAY_S)
        one.until = self.now + seconds
        data: dict[str, object] = {"target": one.name, "what": f"{what} {one.name}", "seconds": round(seconds, 1)}
        self.say(self.now, "fault", f"{what} {one.name} for {seconds:.0f} s", data)
        if what == "kill":
            one.state = "gone"
            self.say(
                self.now + 0.01, "exited", f"{one.name} ended: killed by SIGKILL", {"process": one.name, "code": -9}
            )
            self._say_of(one, self.now + 0.02, "lost", "is gone: its training process died")
        else:
            one.state = "stalled" if what == "pause" else "muted"
            self._say_of(one, self.now + 0.5, one.state, "is not waited for")

    def _mend(self, one: Pretended) -> None:
        if one.state == "gone":
            one.state, one.until = "joining", self.now + JOIN_S
            one.incarnation += 1
            self.say(self.now, "restarted", f"{one.name} was started again", {"process": one.name, "pid": 1})
            self._say_of(one, self.now, "joined", f"joined (incarnation {one.incarnation})")
            return
        kind = {"joining": "recovered", "stalled": "steps", "muted": "probed"}[one.state]
        one.state = "training"
        self._say_of(one, self.now, kind, "took the run's parameters" if kind == "recovered" else "is back")

    def _commit(self) -> None:
        live = [one for one in self.crowd if one.state == "training"]
        if not live:
            return
        inside = [one for one in live if self.chance.random() < 0.97]
        for one in self.crowd:
            one.behind = 0 if one in inside else one.behind + 1
        self.members = tuple(one.name for one in inside)
        everybody = len(inside) == len(live)
        self.reason = (
            "every live learner reported" if everybody else f"grace window over with {len(inside)} of {len(live)}"
        )
        self._shares = [*self._shares[-255:], len(inside) / len(live)]
        fragment, version = self.round % FRAGMENTS, 1 + self.round // FRAGMENTS
        self.say(
            self.now,
            "round",
            f"round {self.round}: fragment {fragment} is version {version}; {self.reason}",
            {
                "round": self.round,
                "fragment": fragment,
                "version": version,
                "attempt": 0,
                "reason": self.reason,
                "live": len(live),
                "members": [self._member(one, version) for one in inside],
                "grace_s": 0.012,
                "effective_h": 24.0,
            },
        )
        self.bytes_in += 240_000 * len(inside)
        self.bytes_out += 240_000 * len(live)
        if self.round % 75 == 0:
            loss = 1.5 + 4.0 * math.exp(-self.round / 700)
            self.scored = (self.round, loss)
            self.say(
                self.now, "score", f"validation loss {loss:.4f}", {"round": self.round, "loss": loss, "cpu_s": 0.4}
            )
        self.round += 1

    def _member(self, one: Pretended, version: int) -> dict[str, Any]:
        counted = {
            "t": int(one.step),
            "steps": 24,
            "tokens": 24 * TOKENS,
            "weight": 1.0,
            "base": version - 1,
            "since": 24,
        }
        return {"learner": one.name, "incarnation": one.incarnation, **counted}

    # ---- as a status says it ----------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        elapsed = max(STEP_S, self.now - self.began)
        tokens = int(sum(one.step for one in self.crowd) * TOKENS)
        dropped, in_flight, lost = int(0.06 * tokens), int(0.03 * tokens), int(0.01 * tokens)
        merged = tokens - dropped - in_flight - lost
        allocated = self.learners * elapsed
        return RunStatus(
            run="pretended",
            phase="training",
            elapsed_s=elapsed,
            left_s=1200.0,
            progress=min(0.99, self.round / 20_000),
            global_step=self.round,
            round=self.round,
            fragments=FRAGMENTS,
            sync_every=24,
            synchronous=False,
            quorum=1,
            members=self.members,
            reason=self.reason,
            effective_h=24.0 + self.chance.choice((-1, 0, 0, 1)),
            grace_s=self.chance.uniform(0.01, 0.03),
            participation=sum(self._shares) / len(self._shares) if self._shares else None,
            goodput=min(1.0, sum(one.busy_s for one in self.crowd) / allocated),
            tokens=tokens,
            tokens_per_s=sum(one.speed for one in self.crowd if one.state == "training") * TOKENS / STEP_S,
            median_gap_s=STEP_S,
            validation_loss=self.scored[1] if self.scored else None,
            validation_round=self.scored[0] if self.scored else None,
            learners=tuple(self._learners()),
            term=1,
            expected=self.learners,
            liveness=min(1.0, self._alive_s / allocated),
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            fates={"computed": tokens, "merged": merged, "dropped": dropped, "lost": lost, "in_flight": in_flight},
            dropped_by_cause={"overlap": dropped - dropped // 6, "missed": dropped // 6, "crash": lost},
            merged_share=merged_share(merged, tokens, in_flight),
            effective_h_mean=24.4,
            effective_h_p95=29.0,
            versions=tuple((self.round + FRAGMENTS - 1 - fragment) // FRAGMENTS for fragment in range(FRAGMENTS)),
        )

    def _learners(self) -> Iterator[LearnerStatus]:
        for one in sorted(self.crowd, key=lambda one: one.name):
            yield LearnerStatus(
                learner=one.name,
                state=one.state,
                incarnation=one.incarnation,
                step=int(one.step),
                tokens=int(one.step * TOKENS),
                tokens_per_s=one.speed * TOKENS / STEP_S if one.state == "training" else 0.0,
                loss=one.loss,
                version_round=self.round - 1 - one.behind,
                in_last_round=one.name in self.members,
                merged_share=0.94 - 0.04 * abs(one.speed - 1.0),
            )
