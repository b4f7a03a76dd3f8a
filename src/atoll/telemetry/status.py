"""The state of a run at one moment, as the syncer serves it on /v1/status and every screen shows it."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

AWAY = ("away", "gone", "restarting", "done")
"""States of a learner that is not connected. That one is being restarted only its supervisor knows."""
STEPPING = ("joining", "starting", "training", "muted", "quarantined")
"""States of one that makes steps, or is about to: out of quarantine it joins again, and trains meanwhile."""


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    learner: str
    state: str
    """joining, starting (in its first step), training, stalled, muted, quarantined, stopped, away or gone; see AWAY."""
    incarnation: int
    step: int
    """Steps of all its processes in the run."""
    tokens: int
    tokens_per_s: float
    loss: float | None
    version_round: int
    """The newest round whose version it has adopted; −1 for none."""
    in_last_round: bool
    missing: bool = False
    """It is not connected, though it has not left and was not asked to; also once it counts as gone."""
    merged_share: float | None = None
    """Fragment-tokens merged over those computed, of all its lives; what is in flight counts for nothing yet."""
    alarm: str = ""
    """What is wrong with it; empty: nothing."""
    quarantine: str = ""
    """Why it is in quarantine, until a round takes from it again; empty: it is not."""
    suspect: bool = False
    """What it gives is not trusted: `alarm` says why."""
    agreement: float | None = None
    """The median cosine of its last contribution with the others'; None: it gave none yet."""
    influence: float | None = None
    """Its share of that merge."""
    tokens_per_step: int = 0
    """The most that a step of it has, as it declared; 0: it declared nothing."""
    round_share: float = 1.0
    """Share of the rounds that it takes part in, as far as its link carries them."""
    narrower_way: str = ""
    """Way that a share below 1 follows, and what it carries: "way down 15 Mbit/s"."""
    up_rate: float = 0.0
    """Bytes per second that its way up carries, as it measured them; 0: not measured."""
    down_rate: float = 0.0
    """Bytes per second that its way down carries; 0: not measured."""
    whole_bytes: int = 0
    """Bytes of the run's parameters that it fetches while it joins; 0: it fetches none."""
    lacking_bytes: int = 0
    """Bytes of them that have not arrived yet."""
    first_step_s: float = 0.0
    """Seconds that its first step takes so far; 0: it has made one, or uses no processor."""
    fetch_left_s: float | None = None
    """Seconds until they have, at the rate of the last ten; None: not known."""

    @property
    def fetched_share(self) -> float | None:
        """Share of the parameters that has arrived; None: it fetches none."""
        return 1 - self.lacking_bytes / self.whole_bytes if self.lacking_bytes and self.whole_bytes else None


class RelayStatus(msgspec.Struct, frozen=True, kw_only=True):
    relay: str
    connected: bool
    bytes_in: int = 0
    """Bytes of bodies that this syncer has received through it: sums, and contributions that it passed on."""
    bytes_out: int = 0
    """Bytes of versions that it has fetched for its learners."""
    up_rate: float = 0.0
    """Bytes per second that its link to the syncer carries; 0: not measured."""
    down_rate: float = 0.0


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    phase: str
    """waiting (for the first parameters, or until the learners hold them), training, ending or finished."""
    elapsed_s: float
    """Since the first parameters were there."""
    left_s: float | None
    """None: not known yet, or nobody makes steps now."""
    progress: float
    global_step: int
    round: int
    fragments: int
    sync_every: int
    synchronous: bool
    quorum: int
    members: tuple[str, ...]
    """Of the last committed round."""
    reason: str
    """Why the last round closed when it did."""
    effective_h: float | None
    """Median learner steps between two syncs of a fragment, of late …"""
    grace_s: float
    participation: float | None
    goodput: float | None
    tokens: int
    tokens_per_s: float
    median_gap_s: float | None
    validation_loss: float | None
    validation_round: int | None
    learners: tuple[LearnerStatus, ...]
    term: int = 0
    """The syncer's term."""
    cut: int | None = None
    """The newest complete cut."""
    alarm: str = ""
    """Why nothing can be committed; empty: it can."""
    notice: str = ""
    """What the operator should see to before long; empty: nothing."""
    store: str = ""
    """The bucket that the run is copied to; empty: none …"""
    store_rounds: int = 0
    """… which lacks so many committed rounds …"""
    store_known: bool = True
    """… at most: False until this syncer knows what earlier ones put there …"""
    store_s: float = 0.0
    """… since so long."""
    store_alarm: str = ""
    """What is wrong with it; empty: nothing."""
    standby: str = ""
    """Machine and process of a standby that waits for its turn; empty: none does."""
    disk_free_bytes: int | None = None
    """Bytes that the disk of the run's folder has left; None: not known yet."""
    expected: int = 0
    """M: how many learners the run is meant for."""
    data_parallel: int = 0
    """Processes of a data-parallel run, which are its one learner; 0: it is none."""
    supervised: bool = False
    """Somebody starts and restarts its learners: `atoll train`, here or on Ray."""
    liveness: float | None = None
    """Mean share of those M that were alive, since this syncer has known of the first parameters."""
    bytes_in: int = 0
    """Bodies and control messages that this syncer has received …"""
    bytes_out: int = 0
    """… and sent, since it started."""
    fates: dict[str, int] = {}
    """Tokens computed, and of those merged, dropped, lost, rolled back, filtered and in flight."""
    dropped_by_cause: dict[str, int] = {}
    """overlap and missed make up what is dropped, crash is what is lost; filtered is there with `robust` alone."""
    merged_share: float | None = None
    """Fragment-tokens merged over those computed; what is in flight counts for nothing yet."""
    effective_h_mean: float | None = None
    """… their mean …"""
    effective_h_p95: float | None = None
    """… and what 95 % of them do not exceed."""
    training_phase: int = 0
    """Which phase of training it is in, from 1 on …"""
    training_phases: int = 0
    """… of how many; 0: none …"""
    phase_until: float = 1.0
    """… and at which share of the run that one ends."""
    earlier_h: tuple[tuple[int, float | None], ...] = ()
    """Asked and effective H before the present one, in this term."""
    rounds_merged: int = 0
    """Rounds in which something was merged, of those in `round`."""
    versions: tuple[int, ...] = ()
    """Of every fragment."""
    codec: str = "bf16"
    """How contributions travel."""
    version_codec: str = "fp32"
    share: str | UnsetType = UNSET
    """How versions come down."""
    overlap: int = 2
    """τ."""
    overlap_steps: float | None = None
    """Median learner steps from reading a contribution to adopting the version that holds it, of late …"""
    overlap_p95: float | None = None
    """… and what 95 % of them do not exceed."""
    rounds_under_way: int = 0
    """How many rounds may be between freezing and commit."""
    carried_h: float | None = None
    """H that rounds are spaced by: the one asked for, or as large as the narrowest part needs."""
    narrowest: str = ""
    """Part that makes it larger, and how much of the part is used: "way down of site-2: 58 of 60 Mbit/s"."""
    narrowest_used: float | None = None
    """Bytes per second that rounds take of that link; None: no link makes H larger."""
    narrowest_rate: float | None = None
    """Bytes per second that the link carries."""
    shortage: str = ""
    """Part that makes effective H larger than H (a link, the merge, memory), and what would fit; empty: none does."""
    step_s: float | None = None
    """The median of the live learners' step times."""
    loss_unit: str = ""
    """Of the validation loss, in the scorer's words."""
    metrics: dict[str, float | None] = {}
    """Other figures of the newest score, by name …"""
    directions: dict[str, str] = {}
    """… and whether small ("min") or large ("max") values of them are better, where it was declared."""
    budgeted: bool = True
    """False: it trains until its scripts end; `progress` and `left_s` say nothing."""
    scorer: bool = True
    """False: nobody will score it."""
    evaluator: bool | None = None
    """Whether an evaluator is here; None: none has been since this syncer began."""
    evaluator_at: float | None = None
    """Time at which the last one was heard of."""
    rho: float | None = None
    """The autocorrelation of merged gradients: the cosine of each and the one before it of its fragment, of late."""
    outer_step: float | None = None
    """How far Θ moves for each gradient at this ρ, as the outer optimizer says …"""
    outer_lr: float = 0.0
    """… and η, how far it moves at once."""
    relays: tuple[RelayStatus, ...] = ()
    """Every relay that has been here since this syncer started, or in the day before."""
