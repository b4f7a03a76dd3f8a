"""What must hold of a run under faults, and whether it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from atoll.chaos import truth
from atoll.observe.summary import Summary, summarise
from atoll.protocol.errors import ConfigError
from atoll.protocol.ledger import FATES
from atoll.telemetry.events import Event

SHORT_S = 2.0
"""A gap of this length is always allowed."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """None: not asked for. Shares are fractions."""

    goodput: float | None = None
    """At least."""
    uptime: float | None = None
    """At least."""
    participation: float | None = None
    """At least: mean over rounds of members over learners that were live, recovered, not paused and not slowed."""
    tokens_per_live_s: float | None = None
    """At least, as a share of the calm run's: tokens per second of a learner that was live and not paused, slowed
    or leaving."""
    longest_gap: float | None = None
    """At most, in medians of the gaps between two rounds; but 2 s are always allowed. Outages of the syncer aside."""
    recovery_s: float | None = None
    """At most: from a learner's restart to its next contribution."""
    syncer_back_s: float | None = None
    """At most: from a death of the syncer to the next round."""
    loss: float | None = None
    """At most, as a share: the final validation loss above the calm run's at equal merged tokens."""
    ledger: bool = True
    """The ledger balances to zero."""
    verify: bool = True
    """`atoll verify` finds nothing."""
    unhandled: bool = True
    """No process ended by an error that nobody caused."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float | int) and not isinstance(value, bool) and not 0 <= value < float("inf"):
                raise ConfigError(f"verdict: {name} = {value:g} must be a number of 0 or more")

    @property
    def needs_calm(self) -> bool:
        """Whether a run without faults must stand beside it."""
        return self.tokens_per_live_s is not None or self.loss is not None


class Finding(msgspec.Struct, frozen=True):
    """One thing that was asked, and the answer."""

    name: str
    asked: str
    found: str
    ok: bool


def judge(
    limits: Limits,
    timeline: Sequence[Event],
    *,
    verified: str,
    logs: Sequence[str] = (),
    calm: Sequence[Sequence[Event]] = (),
) -> list[Finding]:
    """`verified`: what `atoll verify` has against the run; `logs`: tracebacks that were found in its logs; `calm`: runs
    in peace, whose mean the run is held against: one of them alone may be lucky."""
    summary = summarise(timeline)
    longest, usual = truth.gaps(timeline)
    found = [
        _least("goodput", limits.goodput, summary["goodput"]),
        _least("uptime", limits.uptime, summary["uptime"]),
        _least("participation of the able", limits.participation, truth.participation(timeline)),
        _least(
            "tokens per live second, of calm", limits.tokens_per_live_s, _ratio(truth.steps_per_live_s, timeline, calm)
        ),
        _gap(limits.longest_gap, longest, usual),
        _most("recovery of a learner, s", limits.recovery_s, _slowest(summary["recovery"])),
        _most("syncer back, s", limits.syncer_back_s, _back(timeline)),
        _loss(limits.loss, summary, [summarise(one) for one in calm]),
    ]
    if limits.ledger:
        found.append(_ledger(summary["tokens"], finished=any(event["kind"] == "finished" for event in timeline)))
    if limits.verify:
        found.append(Finding("verify", "nothing wrong", verified or "nothing wrong", not verified))
    if limits.unhandled:
        bad = [*truth.unexplained(timeline), *logs]
        found.append(Finding("unhandled errors", "none", bad[0] if bad else "none", not bad))
    return [one for one in found if one is not None]


def _least(name: str, limit: float | None, value: float | None) -> Finding | None:
    if limit is None:
        return None
    return Finding(name, f"≥ {limit:.3g}", _text(value), value is not None and value >= limit)


def _most(name: str, limit: float | None, value: float | None) -> Finding | None:
    """What never happened is within any limit."""
    if limit is None:
        return None
    return Finding(
        name, f"≤ {limit:.3g}", _text(value) if value is not None else "none", value is None or value <= limit
    )


def _gap(limit: float | None, longest: float | None, usual: float | None) -> Finding | None:
    if limit is None:
        return None
    if longest is None or usual is None:
        return Finding("longest gap between rounds, s", f"≤ {limit:g} medians", "no rounds", False)
    most = max(SHORT_S, limit * usual)
    return Finding(
        "longest gap between rounds, s", f"≤ {most:.3g}", f"{longest:.3g} (median {usual:.3g})", longest <= most
    )


def _loss(limit: float | None, summary: Summary, calm: Sequence[Summary]) -> Finding | None:
    if limit is None:
        return None
    ours, losses = summary["validation_loss_end"], [one["validation_loss_end"] for one in calm]
    scored = [loss for loss in losses if loss is not None]
    if ours is None or not scored or len(scored) < len(losses):
        return Finding("loss above calm", f"≤ {100 * limit:.2g} %", "not scored", False)
    theirs = fmean(scored)
    above = ours / theirs - 1
    merged = summary["tokens"]["merged"] / max(1.0, fmean(one["tokens"]["merged"] for one in calm))
    runs = f"calm {theirs:.4f}" if len(scored) == 1 else f"{len(scored)} calm {min(scored):.4f} to {max(scored):.4f}"
    text = f"{100 * above:+.2f} % ({ours:.4f}, {runs}, {100 * merged:.0f} % of the merged tokens)"
    return Finding("loss above calm", f"≤ {100 * limit:.2g} %", text, above <= limit)


def _ledger(tokens: dict[str, int], *, finished: bool) -> Finding:
    rest = tokens["computed"] - sum(tokens.get(fate, 0) for fate in FATES[1:])
    left = tokens["in_flight"] if finished else 0
    text = f"{rest} unaccounted, {left} in flight at the end"
    return Finding(
        "ledger", "0 unaccounted", text if finished else f"{text} (the run did not finish)", not rest and not left
    )


def _ratio(
    figure: Callable[[Sequence[Event]], float | None], timeline: Sequence[Event], calm: Sequence[Sequence[Event]]
) -> float | None:
    ours, theirs = figure(timeline), [figure(one) for one in calm]
    known = [one for one in theirs if one]
    return ours / fmean(known) if ours is not None and known and len(known) == len(theirs) else None


def _slowest(recoveries: list[dict[str, float | str | None]]) -> float | None:
    times = [one["seconds"] for one in recoveries if one["after"] == "restarted"]
    known = [float(seconds) for seconds in times if isinstance(seconds, int | float)]
    return max(known, default=None)


def _back(timeline: Sequence[Event]) -> float | None:
    times = [float("inf") if back is None else back - died for died, back in truth.syncer_deaths(timeline)]
    return max(times, default=None)


def _text(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"
