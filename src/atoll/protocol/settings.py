"""The rules a run is held by: small, frozen, checked on construction, handed to every learner at its welcome."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from atoll.protocol.errors import ConfigError
from atoll.protocol.limits import MAX_COUNTER, ChoiceName, ChoiceNameOrNone, Name
from atoll.protocol.phases import TrainingPhase, check_order, warm_start

PHASED = ("sync_every", "overlap", "adopt")
"""What a phase may change of these settings."""
MOST_PHASES = 64
"""With the one behind the last that is named."""
USUAL = 24
"""The paper's H and P."""
SEEDS = 2**63


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    learners: int = 4
    """M: how many learners the run is meant for. More may join, fewer may be there."""
    fragments: int = 0
    """P. 0: 24, or H or what the plan can make of the model where that is less."""
    sync_every: int = 0
    """H: learner steps between two syncs of the same fragment. 0: 24, or more where `fragments` or `overlap` ask it."""
    overlap: int = 2
    """τ: learner steps a fragment may be on its way from reading to adoption."""
    quorum: int = 1
    """K: the fewest learners a round needs."""
    synchronous: bool = False
    """Every round takes all stepping learners, and they wait for it: Streaming DiLoCo; with one fragment, DiLoCo."""
    quorum_policy: ChoiceName = "grace"
    """How long a round waits after its quorum for more learners."""
    grace_share: float = 0.5
    """γ: the share of the slack that the grace window may use."""
    grace_cap_steps: float = 1.0
    """The longest grace window, in learner steps."""
    adopt: ChoiceNameOrNone = ""
    """Rule by which a learner takes a new version into its model. Empty: carry, or overwrite in a synchronous run."""
    blend: float = 0.5
    """α of adopt = "blend": the share of the learner's own values that stays."""
    codec: ChoiceName = "bf16"
    """How contributions travel. It encodes Δ = base − θ, never θ."""
    version_codec: ChoiceName = "fp32"
    """How versions come down. fp32: whole, as Θ. Any other encodes what changes Θ, once, with feedback of its own."""
    initial_codec: Literal["fp32", "bf16"] | UnsetType = UNSET
    """How version 0 travels, up and down. bf16: in 2 bytes a value; each trained fp32 value is rounded to 8 significant
    bits, with an error of at most 2^-8 of it, and the rounded values are version 0. Unset, it is fp32: 4 bytes a value,
    no loss, and no message and no record has a word of it."""
    plan: ChoiceName = "balanced"
    """How tensors are dealt into fragments."""
    share: Literal["parameters", "moments"] | UnsetType = UNSET
    """What learners share. "moments": the inner optimizer's too, averaged and adopted with each fragment. Unset, it is
    "parameters", and no message and no record has a word of it."""
    steps: int = 0
    """The run ends at this step: the median steps of its learners (`Pace`, protocol/syncer/closing.py). 0: none."""
    tokens: int = 0
    """The run ends once the learners together have trained on this many tokens. 0: no such limit."""
    progress: Literal["budget", "added"] | UnsetType = UNSET
    """Meaning of `learner.progress`, which learning rates follow, after the budget was raised. "budget": share of the
    whole budget, so that they go back. "added": share of the added part, so that they begin anew. Default: "budget"."""
    cut_every: int = -1
    """Rounds between two cuts of the whole run. −1: ten times over every fragment; 0: none but the first."""
    keep_cuts: int = 3
    """Complete cuts that are kept."""
    cut_wait_s: float = 60.0
    """A learner that has not saved its part of a cut by then is left out of it."""
    seed: int = 0
    """Of the order in which leases go through the data."""
    startup_s: float = 3.0
    """Until the times of a step, a quorum and a sync are known, the most a round waits for all stepping learners."""
    assemble_s: float = 60.0
    """How long a run waits for those it was meant for: to begin (synchronous), or to end once those there stopped. Also
    how long a synchronous run waits for a learner's first step, how long a newcomer waits for a peer with the frozen
    parameters, and after how long without all others a learner's token count is believed though none showed a rate."""
    wait_for_learners_s: float = 0.0
    """How long a run that has its first parameters waits for the rest of its learners before anybody trains."""
    join_stall_s: float = 30.0
    """Training of a new run begins once all learners that are there hold version 0. A learner whose download has not
    moved for this long is not waited for any more."""
    patience_s: float = 5.0
    """How long a round waits for a quorum that the stepping learners cannot make, before it asks for fewer. Also how
    long the last cycle waits for learners (at least), a newcomer for a peer, and the end of a run in a new term for the
    learners of the term before."""
    heartbeat_s: float = 1.0
    """A learner that has nothing to say still says so this often."""
    lost_after_s: float = 6.0
    """A learner that has said nothing for this long is gone."""
    abandon_s: float = 300.0
    """A learner that has been away for this long has lost what it had not given; its data is issued again."""
    stalled_after_s: float = 10.0
    """A learner that has made no step for this long (and eight times its step) is not waited for. So long a due round
    also waits for its quorum where enough learners step but too few are ready."""
    first_step_s: float = 900.0
    """How long the first step of a training process may take while it uses the processor (torch.compile, autotuning).
    Until then the learner is not waited for, and that is no fault; after it, it is stalled."""
    pull_floor_s: float = 0.75
    """A pull may take the larger of this and four times the usual."""
    strikes: int = 3
    """Refusals since the last accepted contribution that send a learner into quarantine (`Strikes`)."""
    weight_limit: float = 2.0
    """A contribution counts for at most this many times the median of all but the largest
    (protocol/syncer/weights.py)."""
    guard: Literal["off", "alarm", "rollback"] = "alarm"
    """What follows when the scores of the run's evaluator become much worse (guard.py)."""
    weight_limits: Annotated[dict[Name, float], Meta(max_length=1024)] = {}
    """The same for single learners, by name, where the operator allows them more."""
    warm_start: float = 0.0
    """The first share of the run has a small H and plain averaging (`phases.warm_start`). 0: none."""
    phases: Annotated[tuple[TrainingPhase, ...], Meta(max_length=MOST_PHASES)] = ()
    """Other settings for earlier parts of the run (phases.py). Once resolved, the last one has the run's own."""

    def __post_init__(self) -> None:
        _least("learners", self.learners, 1)
        _least("fragments", self.fragments, 0)
        _least("sync_every", self.sync_every, 0)
        _least("overlap", self.overlap, 0)
        _least("cut_every", self.cut_every, -1)
        _least("keep_cuts", self.keep_cuts, 1)
        _least("quorum", self.quorum, 1)
        _least("steps", self.steps, 0)
        _least("tokens", self.tokens, 0)
        _least("strikes", self.strikes, 1)
        if self.quorum > self.learners:
            raise ConfigError(
                f"quorum = {self.quorum} can never be reached by {self.learners} learners: "
                f"set quorum to {self.learners} or less, or ask for more learners"
            )
        if not 0.0 <= self.warm_start < 1.0:
            raise ConfigError(f"warm_start = {self.warm_start} is no share of the run: 0.15 is 15 % of it, 0 is none")
        if self.synchronous and self.shares_moments:
            raise ConfigError('share = "moments" is for runs that nobody waits in: leave synchronous out')
        self._check_phases()
        if not 0.0 <= self.blend <= 1.0:
            raise ConfigError(
                f"blend = {self.blend} is not between 0 and 1: it is the share of its own values a learner keeps"
            )
        for limit in (self.weight_limit, *self.weight_limits.values()):
            if not 1.0 <= limit < MAX_COUNTER:
                raise ConfigError(
                    f"weight_limit = {limit} is not a number of 1 (the median itself) or more: 2 is usual"
                )
        if self.grace_cap_steps < 0:
            raise ConfigError(f"grace_cap_steps = {self.grace_cap_steps} is below 0: 0 is a window of no length")
        if not 0.0 <= self.grace_share < 1.0:
            raise ConfigError(f"grace_share = {self.grace_share} must be at least 0 and below 1")
        for name in (
            "startup_s",
            "assemble_s",
            "patience_s",
            "heartbeat_s",
            "lost_after_s",
            "abandon_s",
            "cut_wait_s",
            "stalled_after_s",
            "first_step_s",
            "pull_floor_s",
            "join_stall_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be above 0 seconds")
        if self.wait_for_learners_s < 0:
            raise ConfigError(f"wait_for_learners_s = {self.wait_for_learners_s} is below 0: 0 waits for nobody")
        if self.lost_after_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"lost_after_s = {self.lost_after_s} is under two heartbeats of {self.heartbeat_s} s: "
                f"set it to {2 * self.heartbeat_s} or more"
            )
        for name in self.__struct_fields__:
            value, most = getattr(self, name), SEEDS if name == "seed" else MAX_COUNTER
            if isinstance(value, int | float) and not -most < value < most:
                raise ConfigError(f"{name} is no number that a run reaches: it must be below {most}")

    def _check_phases(self) -> None:
        check_order(self.phases)
        if len(self.phases) > MOST_PHASES - 1 and self.phases[-1].until < 1.0:
            raise ConfigError(f"{len(self.phases)} phases and the run's own behind them are more than {MOST_PHASES}")
        for phase in self.phases:
            overlap = self.overlap if phase.overlap is None else phase.overlap
            if overlap >= (sync_every := phase.sync_every or self.resolved_sync_every):
                raise ConfigError(
                    f"overlap = {overlap} is not below sync_every = {sync_every} in the phase until {phase.until:g}: "
                    f"a fragment would be read again before it came back; set overlap = {sync_every - 1} in it"
                )

    def check_budget(self) -> None:
        """ConfigError: phases follow the run's progress, and nothing says how long it is."""
        if (self.phases or self.warm_start) and not self.steps and not self.tokens:
            raise ConfigError("phases follow the run's progress, so it needs a budget: set steps or tokens")
        if (self.phases or self.warm_start) and self.synchronous and not self.steps:
            raise ConfigError("phases of a synchronous run follow its steps, so it needs a budget of them: set steps")

    @property
    def resolved_sync_every(self) -> int:
        """H, which no model changes: one that cannot be cut into as many has fewer and larger fragments, and each of
        them is synced as rarely as those of a large one."""
        return self.sync_every or max(USUAL, self.fragments, self.overlap + 1)

    @property
    def resolved_adopt(self) -> str:
        """Name of the adoption rule. A synchronous run overwrites by default, as Streaming DiLoCo does."""
        return self.adopt or ("overwrite" if self.synchronous else "carry")

    def resolved(self, most: int) -> Settings:
        """Return these settings with P, H and the adoption rule filled in. `most`: number of fragments that the model
        can be cut into at most (`most_fragments`)."""
        fragments = self.fragments or min(USUAL, most, self.sync_every or USUAL)
        overlap, sync_every = self.overlap, self.resolved_sync_every
        if overlap >= sync_every and overlap > 0:
            raise ConfigError(
                f"overlap = {overlap} is not below sync_every = {sync_every}: a fragment would be read again "
                f"before it came back; set overlap to {sync_every - 1} or less"
            )
        cut_every = 10 * fragments if self.cut_every < 0 else self.cut_every
        return msgspec.structs.replace(
            self, fragments=fragments, sync_every=sync_every, adopt=self.resolved_adopt, cut_every=cut_every
        )._with_whole_phases()

    def _with_whole_phases(self) -> Settings:
        """Every phase names H, τ and adoption, and behind the last one are the run's own: so each of them says what all
        will ask of the memory that a learner shares with its courier."""
        overlap = min(1, self.overlap) if self.synchronous else 1
        phases = self.phases or ((warm_start(self.warm_start, overlap),) if self.warm_start else ())
        if not phases:
            return self
        self.check_budget()
        last = () if phases[-1].until == 1.0 else (TrainingPhase(until=1.0),)
        own, whole = self.phased_values, []
        for phase in (*phases, *last):
            named = {key: getattr(phase, key) for key in PHASED if getattr(phase, key) is not None}
            whole.append(msgspec.structs.replace(phase, **{**own, **named}))
        return msgspec.structs.replace(self, phases=tuple(whole), warm_start=0.0)

    def with_phases(self, phases: tuple[TrainingPhase, ...], own: Settings) -> Settings:
        """With other phases from now on, in a run that began with `own`. None: its own settings hold to its end."""
        asked = msgspec.structs.replace(
            own, phases=phases or (TrainingPhase(until=1.0),), steps=self.steps, tokens=self.tokens
        )
        return msgspec.structs.replace(self, phases=asked._with_whole_phases().phases)

    def in_phase(self, number: int, own: Settings) -> Settings:
        """These settings in phase `number`, 1 being the first; `own`: as the run began."""
        named: dict[str, Any] = {key: getattr(self.phases[number - 1], key) for key in PHASED}
        return msgspec.structs.replace(self, **named, cut_every=own.cuts_at(named["sync_every"]))

    def cuts_at(self, sync_every: int) -> int:
        """`cut_every` with another H, so that a cut comes after as many learner steps."""
        return self.cut_every and max(1, round(self.cut_every * self.sync_every / sync_every))

    @property
    def phased_values(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in PHASED}

    @property
    def restarts_progress(self) -> bool:
        """Whether `learner.progress` begins at 0 again where the budget is raised."""
        return self.progress == "added"

    @property
    def shares_moments(self) -> bool:
        return self.share == "moments"

    @property
    def rounds_initial(self) -> bool:
        """Whether version 0 is rounded to bf16, and sent in that form."""
        return self.initial_codec == "bf16"

    @property
    def adopts(self) -> set[str]:
        """The rules of adoption in all phases."""
        return {one.adopt for one in self.in_all_phases}

    @property
    def may_carry(self) -> bool:
        """Whether a learner may have to adopt by carry: an asynchronous run can be set to it while it goes on."""
        return not self.synchronous or "carry" in self.adopts

    @property
    def in_all_phases(self) -> tuple[Settings, ...]:
        """One for each phase, and behind them these."""
        phases = [{key: getattr(one, key) for key in PHASED} for one in self.phases]
        return (*(msgspec.structs.replace(self, **named) for named in phases), self)


def _least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value} is too small: the least is {least}")
