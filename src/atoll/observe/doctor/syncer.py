"""The way to a syncer: whether it answers, how long a round trip takes, how fast a fragment comes, what its clock says.

Only what it shows anybody is asked for: /v1/status and, for the bandwidth, the fragments that an evaluator fetches too.
Every wait has a deadline and every body a bound: it may be no syncer at all.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from atoll.observe.doctor.check import Check, size
from atoll.observe.figures import plain, span

TRIES = 10
DEADLINE_S = 5.0
SLOW_TRIP_S = 0.2
MOST_BYTES, MOST_S = 64 << 20, 3.0
"""As much of the fragments as is asked for."""
TELLING_BYTES = 1 << 20
"""Fewer say more of the round trip than of the link."""
SLOW_BITS_PER_S = 10e6
CLOCK_S = 2.0
_STATUS_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    seconds: float
    clock_s: float | None
    """The syncer's clock less ours, at the middle of the trip."""
    status: dict[str, Any]


class NoSyncer(Exception):
    """What answered there instead, in a few words."""


def checks(url: str) -> Iterator[Check]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=DEADLINE_S)
    try:
        answers = [ask(connection) for _ in range(TRIES)]
        yield judge_trips(url, [answer.seconds for answer in answers])
        yield judge_clock([answer.clock_s for answer in answers if answer.clock_s is not None])
        yield bandwidth(connection, answers[-1].status)
    except (OSError, http.client.HTTPException, NoSyncer) as error:
        words = str(error) if isinstance(error, NoSyncer) else getattr(error, "strerror", None) or str(error)
        advice = "Is the run over, the port right, a firewall in between? atoll status DIR asks the same."
        yield Check("syncer", "fail", f"no syncer answers at {url}: {plain(words)[:120]}", advice, {"url": url})
    finally:
        connection.close()


def ask(connection: http.client.HTTPConnection) -> Answer:
    begun, wall = time.perf_counter(), time.time()
    connection.request("GET", "/v1/status")
    response = connection.getresponse()
    body = response.read(_STATUS_BYTES)
    took = time.perf_counter() - begun
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    if response.status != 200 or not isinstance(status, dict) or "fragments" not in status:
        raise NoSyncer(f"something else does ({response.status} {response.reason})")
    told = response.getheader("Date")
    return Answer(took, _clock(told, wall + took / 2) if told else None, status)


def _clock(date: str, here: float) -> float | None:
    try:
        # Whole seconds, cut off: on average half a second too early.
        return parsedate_to_datetime(date).timestamp() + 0.5 - here
    except ValueError:
        return None


def judge_trips(url: str, took: list[float]) -> Check:
    middle, worst = median(took), max(took)
    value = f"{1000 * middle:.1f} ms to {url}, {1000 * worst:.0f} ms at worst"
    figures = {"url": url, "median_s": round(middle, 6), "worst_s": round(worst, 6)}
    if middle > SLOW_TRIP_S:
        advice = "A fragment is away for several trips: overlap (τ) times the step time should be well above this."
        return Check("round trip", "warn", value, advice, figures)
    return Check("round trip", "ok", value, figures=figures)


def judge_clock(differences: list[float]) -> Check:
    if not differences:
        return Check("syncer's clock", "ok", "it does not tell its time")
    found = median(differences)
    value = "the same as here" if abs(found) < 1 else f"{span(abs(found))} {'ahead of' if found > 0 else 'behind'} ours"
    figures = {"difference_s": round(found, 2)}
    if abs(found) > CLOCK_S:
        advice = "Events of both machines stand in one file: keep both clocks with NTP."
        return Check("syncer's clock", "warn", f"{value} (± 1 s)", advice, figures)
    return Check("syncer's clock", "ok", f"{value} (± 1 s)", figures=figures)


def bandwidth(connection: http.client.HTTPConnection, status: dict[str, Any]) -> Check:
    if status.get("phase") == "waiting":
        return Check("bandwidth", "ok", "not measured: the run has no parameters yet")
    begun, got = time.perf_counter(), 0
    for fragment in range(int(status["fragments"])):
        connection.request("GET", f"/v1/fragments/{fragment}")
        response = connection.getresponse()
        if response.status != 200:
            response.read(_STATUS_BYTES)
            break
        while block := response.read(1 << 18):
            got += len(block)
            if got >= MOST_BYTES or time.perf_counter() - begun > MOST_S:
                connection.close()
                return judge_bandwidth(got, time.perf_counter() - begun)
    return judge_bandwidth(got, time.perf_counter() - begun)


def judge_bandwidth(got: int, took_s: float) -> Check:
    if not got:
        return Check("bandwidth", "ok", "not measured: the syncer gave no fragment")
    rate = 8 * got / max(took_s, 1e-9)
    value = f"{rate / 1e6:,.0f} Mbit/s ({size(got)} in {span(took_s)})"
    figures = {"bits_per_s": round(rate), "bytes": got, "seconds": round(took_s, 4)}
    if got < TELLING_BYTES:
        return Check("bandwidth", "ok", f"{value}; too little to tell much", figures=figures)
    if rate < SLOW_BITS_PER_S:
        advice = "atoll simulate bandwidth says what a link like this gives."
        return Check("bandwidth", "warn", value, advice, figures)
    return Check("bandwidth", "ok", value, figures=figures)
