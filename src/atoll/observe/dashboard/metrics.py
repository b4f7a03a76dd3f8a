"""The run's figures for Prometheus, from a status as every screen shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.observe.dashboard.history import rounds_behind
from atoll.telemetry.status import AWAY, LearnerStatus, RunStatus

STATES = ("joining", "starting", "training", "stalled", "muted", "quarantined", "stopped", "away", "gone", "done")
FATES = ("merged", "dropped", "lost", "rolled_back", "filtered", "in_flight")


def exposition(status: RunStatus, viewers: int = 0) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(status, viewers))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, status: RunStatus, viewers: int) -> None:
        self._status, self._viewers = status, viewers

    def collect(self) -> Iterator[Metric]:
        yield from _of_run(self._status, self._viewers)
        yield from _of_learners(self._status)


def _of_run(status: RunStatus, viewers: int) -> Iterator[Metric]:
    info = GaugeMetricFamily("atoll_run_info", "The run, and what it is doing.", labels=["run", "phase"])
    info.add_metric([status.run, status.phase], 1)
    yield info
    figures: list[tuple[str, str, float | None]] = [
        ("progress_ratio", "Share of the budget that is spent.", status.progress),
        ("global_step", "Steps of the global model.", status.global_step),
        ("rounds", "Rounds closed, also those in which nothing was merged.", status.round),
        ("goodput_ratio", "Learner-seconds spent stepping over those allocated.", status.goodput),
        ("liveness_ratio", "Learner-seconds alive over learner-seconds allocated.", status.liveness),
        (
            "participation_ratio",
            "Mean share of the learners alive, recovered and with a turn in a round.",
            status.participation,
        ),
        ("merged_share_ratio", "Fragment-tokens merged over those whose fate is known.", status.merged_share),
        ("effective_h_steps", "Median learner steps between two syncs of a fragment.", status.effective_h),
        ("effective_h_mean_steps", "The mean of the same.", status.effective_h_mean),
        ("effective_h_p95_steps", "The 95th percentile of the same.", status.effective_h_p95),
        ("sync_every_steps", "H: the same, as set.", status.sync_every),
        ("carried_h_steps", "H that rounds are spaced by: as set, or what the links carry.", status.carried_h),
        ("overlap_steps", "Median learner steps from reading a contribution to adopting it.", status.overlap_steps),
        ("overlap_p95_steps", "The 95th percentile of the same.", status.overlap_p95),
        ("overlap_asked_steps", "tau: the same, as set.", status.overlap),
        ("rounds_under_way_limit", "Rounds that may be between freezing and commit.", status.rounds_under_way),
        ("behind", "1 while a link, the syncer or its memory makes H larger.", 1.0 if status.shortage else 0.0),
        ("grace_seconds", "How long a round waits beyond its quorum.", status.grace_s),
        (
            "narrowest_used_bytes_per_second",
            "What rounds take of the link that makes H larger than set.",
            status.narrowest_used,
        ),
        ("narrowest_rate_bytes_per_second", "What that link carries.", status.narrowest_rate),
        ("round_gap_seconds", "Median time between two commits.", status.median_gap_s),
        ("tokens_per_second", "Of all learners together.", status.tokens_per_s),
        ("outer_gradient_autocorrelation", "Cosine of a merged gradient and the one before it.", status.rho),
        ("outer_step", "How far the model moves for each merged gradient.", status.outer_step),
        ("outer_learning_rate", "eta: the same without momentum, as set.", status.outer_lr or None),
        ("validation_loss", "Of the global model.", status.validation_loss),
        ("validation_round", "The round that was scored.", status.validation_round),
        ("evaluator_up", "1 while an evaluator is here.", status.evaluator),
        ("learners_expected", "M.", status.expected),
        ("term", "The term of the syncer.", status.term),
        ("alarm", "1 while nothing can be committed, or the loss is bad.", 1.0 if status.alarm else 0.0),
        ("standby", "1 while a standby waits for its turn.", float(bool(status.standby))),
        ("disk_free_bytes", "What the disk of the run's folder has left.", status.disk_free_bytes),
        (
            "store_behind_rounds",
            "Committed rounds that the bucket lacks.",
            status.store_rounds if status.store else None,
        ),
        ("store_behind_seconds", "How long it has lacked them.", status.store_s if status.store else None),
        ("store_alarm", "1 while the bucket fails.", float(bool(status.store_alarm)) if status.store else None),
        ("dashboard_viewers", "Browsers that look on.", viewers),
    ]
    for name, text, value in figures:
        if value is not None:
            yield GaugeMetricFamily(f"atoll_{name}", text, value=value)
    # The label names the part without its figures: these change all the time, and every label is a series of its own.
    part = status.narrowest.rpartition(": ")[0]
    yield _labelled("narrowest_part", "The part that makes H larger than set.", "part", [(part, 1)] if part else [])
    yield CounterMetricFamily("atoll_tokens", "Tokens trained on.", value=status.tokens)
    yield CounterMetricFamily("atoll_received_bytes", "Bodies and messages from learners.", value=status.bytes_in)
    yield CounterMetricFamily("atoll_sent_bytes", "Bodies and messages to learners.", value=status.bytes_out)
    yield _labelled("relay_up", "1 while the relay is connected.", "relay", _each_relay(status, "connected"))
    received, sent = _each_relay(status, "bytes_in"), _each_relay(status, "bytes_out")
    yield _labelled("relay_received_bytes", "Bytes of bodies that came through the relay.", "relay", received)
    yield _labelled("relay_sent_bytes", "Bytes of versions that the relay fetched.", "relay", sent)
    fates = ((fate, status.fates[fate]) for fate in FATES if fate in status.fates)
    yield _labelled("ledger_tokens", "What became of the tokens computed.", "fate", fates)
    causes = status.dropped_by_cause.items()
    yield _labelled("dropped_tokens", "Why tokens are in no version.", "cause", causes)
    versions = ((str(fragment), version) for fragment, version in enumerate(status.versions))
    yield _labelled("fragment_version", "Newest version.", "fragment", versions)


def _each_relay(status: RunStatus, figure: str) -> list[tuple[str, float]]:
    return [(one.relay, float(getattr(one, figure))) for one in status.relays]


def _of_learners(status: RunStatus) -> Iterator[Metric]:
    counts = ((state, sum(one.state == state for one in status.learners)) for state in STATES)
    yield _labelled("learners", "Learners known, by state.", "state", counts)

    def each(name: str, text: str, values: Iterable[tuple[LearnerStatus, float | None]]) -> Metric:
        known = ((one.learner, value) for one, value in values if value is not None)
        return _labelled(f"learner_{name}", text, "learner", known)

    all_of_them = status.learners
    yield each("up", "1 while it is connected.", ((one, one.state not in AWAY) for one in all_of_them))
    missing = ((one, float(one.missing)) for one in all_of_them)
    yield each("missing", "1 while it is not connected, and nobody asked it to leave.", missing)
    yield each("step", "Its own step.", ((one, one.step) for one in all_of_them))
    yield each("incarnation", "Which life of it this is.", ((one, one.incarnation) for one in all_of_them))
    yield each("tokens_per_second", "Its speed.", ((one, one.tokens_per_s) for one in all_of_them))
    yield each("loss", "Its training loss.", ((one, one.loss) for one in all_of_them))
    yield each(
        "merged_share_ratio", "Of its fragment-tokens, merged.", ((one, one.merged_share) for one in all_of_them)
    )
    round_shares = ((learner, learner.round_share) for learner in all_of_them)
    yield each("round_share_ratio", "Share of the rounds that its link carries.", round_shares)
    ups = ((learner, learner.up_rate or None) for learner in all_of_them)
    yield each("up_bytes_per_second", "What its way up carries, as it measured it.", ups)
    downs = ((learner, learner.down_rate or None) for learner in all_of_them)
    yield each("down_bytes_per_second", "What its way down carries, as it measured it.", downs)
    alarms = ((one, 1.0 if one.alarm and not one.suspect else 0.0) for one in all_of_them)
    yield each("low_share_alarm", "1 while its work is merged far less than the others'.", alarms)
    yield each("suspect", "1 while what it gives is not trusted.", ((one, float(one.suspect)) for one in all_of_them))
    yield each("agreement", "Median cosine with the others' contributions.", ((o, o.agreement) for o in all_of_them))
    yield each("influence_ratio", "Its share of its last merge.", ((one, one.influence) for one in all_of_them))
    behind = ((one, rounds_behind(status, one.version_round)) for one in all_of_them)
    yield each("rounds_behind", "Rounds since the newest it holds.", behind)


def _labelled(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"atoll_{name}", text, labels=[label])
    for labelled, value in values:
        family.add_metric([labelled], value)
    return family
