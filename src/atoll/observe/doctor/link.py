"""Checks of the link to a syncer, over the path that learners use.

They cover addresses, certificate, TLS cost, round trip, the syncer's clock, bandwidth both ways, and what the link
carries (carry.py). Only requests that a learner may make are sent, and nothing of the run is changed. Every wait has a
deadline and every body a bound: it may be no syncer at all. Test bodies grow until one takes about two seconds, 64 MiB
at most, so that a slow link is not kept busy and a fast one is still measured.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
import msgspec

from atoll.fabric.address import BY_AUTHORITY, SyncerAddress
from atoll.fabric.calls import DialResult, dial, next_chunk
from atoll.fabric.certificates import days_left
from atoll.fabric.intake import LONGEST, TIME_HEADER
from atoll.fabric.join_tokens import FEW_DAYS
from atoll.fabric.transfer import asked, body_session, get_json_at, pieces, sent
from atoll.fabric.wire import FabricLimits
from atoll.observe.doctor import carry
from atoll.observe.doctor.carry import LinkLoad, MeasuredLink, sized_like
from atoll.observe.doctor.local import Check, brief, size
from atoll.observe.figures import listing, plain, span
from atoll.protocol.errors import ConfigError, PeerError, Unreachable
from atoll.telemetry.status import RunStatus

USUAL = 24
"""P and H of a run that has not begun and says nothing of them."""
LONG_STEP = 4.0
"""Times η: in an effective outer step above it the gradient itself is the smallest part."""
AGAINST = -0.1
"""ρ of merged gradients below which they undo each other, beyond chance."""
ENOUGH_CYCLES = 5
"""Cycles after which ρ is a mean over as many rounds as the syncer takes."""


class FragmentSize(msgspec.Struct, frozen=True):
    size: int


class PlanSizes(msgspec.Struct, frozen=True):
    fragments: tuple[FragmentSize, ...]


class ManifestSizes(msgspec.Struct, frozen=True):
    """What a link depends on of it."""

    plan: PlanSizes


def check_link(address: SyncerAddress, parameters: float | None = None, step_s: float | None = None) -> Iterator[Check]:
    """`parameters` and `step_s`: of a model that is to be trained, instead of the run's own."""
    with asyncio.Runner() as runner:
        found = runner.run(_knock(address))
        yield judge_addresses(address, found)
        there = next((one for one in found if one.dialled is not None), None)
        if there is None:
            return
        yield judge_certificate(address, found) if address.pin else judge_no_tls(address)
        session = runner.run(_session(address))
        try:
            yield from _through(runner, session, there, parameters, step_s)
        except (PeerError, Unreachable) as error:
            advice = "Is it a syncer, and the link of this run? atoll status LINK asks the same."
            yield Check("syncer", "fail", f"{there.url}: {plain(str(error))}", advice, {"url": there.url})
        finally:
            runner.run(_closed(session))


def _through(
    runner: asyncio.Runner,
    session: aiohttp.ClientSession,
    address: DialledAddress,
    parameters: float | None,
    step_s: float | None,
) -> Iterator[Check]:
    url, run = address.url, runner.run
    status = run(_status(session, url))
    trips = run(measure_trips(session, url))
    yield judge_trips(url, trips)
    yield judge_clock(trips)
    down = run(measure_download(session, url))
    yield judge_bandwidth("bandwidth down", down)
    up = run(measure_upload(session, url))
    yield judge_bandwidth("bandwidth up", up)
    if address.dialled is not None and address.dialled.cipher:
        yield judge_tls(address.dialled, down.bytes + up.bytes, down.cpu_s + up.cpu_s)
    if parameters is None and status.phase != "waiting":
        parameters = run(_parameters(session, url))
    link = MeasuredLink(up.bits_per_s, down.bits_per_s, min(trip.seconds for trip in trips))
    yield check_load(status, link, parameters, step_s if step_s is not None else status.step_s)
    if status.store:
        yield check_store(status)
    if status.phase == "training":
        yield check_shortage(status)
        yield check_outer_step(status)


STORE_BEHIND_S = 30.0
"""A bucket that is further behind does not keep up."""


def check_load(status: RunStatus, link: MeasuredLink, parameters: float | None, step_s: float | None) -> Check:
    if parameters is None or step_s is None:
        missing = " and ".join(
            words for words, value in (("--parameters N", parameters), ("--step SECONDS", step_s)) if value is None
        )
        return Check("carries", "ok", f"not known yet: the run has not gone far enough; {missing} would say")
    sync_every = status.sync_every or USUAL
    fragments = min(status.fragments or USUAL, sync_every)
    try:
        codecs = (sized_like(status.codec), sized_like(status.version_codec))
        known = (sync_every, fragments, status.overlap, *codecs, status.share == "moments")
        return carry.judge_load(LinkLoad(parameters, step_s, *known), link)
    except ConfigError as error:
        return Check("carries", "warn", str(error), "Look at --parameters and --step.")


def check_store(status: RunStatus) -> Check:
    """Whether the bucket keeps up with the run."""
    value = f"{status.store}: {status.store_rounds} rounds, {status.store_s:g} s behind"
    if status.store_alarm:
        return Check("store", "fail", value, f"{status.store_alarm}.")
    if status.store_s > STORE_BEHIND_S:
        return Check(
            "store", "warn", value, "It takes uploads slower than rounds are made: a nearer bucket, or a larger H."
        )
    return Check("store", "ok", value)


def check_shortage(status: RunStatus) -> Check:
    """What the run itself measures."""
    if status.shortage:
        return Check("rounds", "warn", f"behind H = {status.sync_every}", f"{status.shortage}.")
    steps = "not measured yet" if status.overlap_steps is None else f"{status.overlap_steps:g} steps"
    value = f"overlap {steps}, τ = {status.overlap}; at most {status.rounds_under_way} rounds under way"
    return Check("rounds", "ok", value)


def check_outer_step(status: RunStatus) -> Check:
    """What momentum makes of merged gradients that resemble each other, or that undo each other."""
    if status.rho is None or status.outer_step is None or status.round < ENOUGH_CYCLES * status.fragments:
        return Check("outer step", "ok", "not known yet: every fragment has to be merged several times")
    value = f"{status.outer_step:.2f}, η = {status.outer_lr:g}; ρ of merged gradients is {status.rho:.2f}"
    figures = {"rho": status.rho, "outer_step": status.outer_step, "outer_lr": status.outer_lr}
    if status.outer_step > LONG_STEP * status.outer_lr:
        advice = f"Momentum makes each step more than {LONG_STEP:g} times η: atoll set RUN outer_momentum=0.6, or less."
        return Check("outer step", "warn", value, advice, figures)
    if status.rho < AGAINST:
        advice = "Each step takes back a part of the one before: atoll set RUN outer_lr=VALUE with a smaller one."
        return Check("outer step", "warn", value, advice, figures)
    return Check("outer step", "ok", value, figures=figures)


async def _knock(address: SyncerAddress) -> list[DialledAddress]:
    found = await dial_addresses(address)
    await asyncio.sleep(0.01)  # a closed connection lets go of its socket in a later turn of the loop
    return found


async def _session(address: SyncerAddress) -> aiohttp.ClientSession:
    return body_session(address, FabricLimits())


async def _closed(session: aiohttp.ClientSession) -> None:
    await session.close()
    await asyncio.sleep(0.01)


async def _status(session: aiohttp.ClientSession, url: str) -> RunStatus:
    try:
        return msgspec.convert(await get_json_at(session, f"{url}/v1/status"), RunStatus)
    except msgspec.ValidationError:
        raise PeerError("something answers, but it is no syncer") from None


async def _parameters(session: aiohttp.ClientSession, url: str) -> float:
    try:
        manifest = msgspec.convert(await get_json_at(session, f"{url}/v1/manifest"), ManifestSizes)
    except msgspec.ValidationError:
        raise PeerError("its manifest cannot be read: is it of another version?") from None
    return float(sum(fragment.size for fragment in manifest.plan.fragments))


# ---- addresses, certificate, TLS ------------------------------------------------------------------------------------

DIAL_DEADLINE_S = 5.0
RECORD_BYTES = 16384
"""Bytes that TLS encrypts at a time."""
CIPHER_S = 0.1
"""How long the cipher is measured."""
SLOW_HANDSHAKE_S = 1.0
ENOUGH_BYTES = 4 << 20
"""Fewer bytes say nothing of what a gigabyte costs."""


@dataclass(frozen=True, slots=True)
class DialledAddress:
    url: str
    dialled: DialResult | None
    trouble: str = ""

    @property
    def shown(self) -> str:
        return self.url.partition("://")[2]


async def dial_addresses(address: SyncerAddress) -> list[DialledAddress]:
    """At every address, one after the other: each is timed alone."""
    found = []
    for url in address.urls:
        try:
            found.append(DialledAddress(url, await dial(address, url, DIAL_DEADLINE_S)))
        except Unreachable as error:
            found.append(DialledAddress(url, None, str(error)))
    return found


def judge_addresses(address: SyncerAddress, found: Sequence[DialledAddress]) -> Check:
    there = [one for one in found if one.dialled is not None]
    figures: dict[str, Any] = {
        "proxy": address.proxy_shown,
        "addresses": [
            {"url": one.url, "reach_s": round(one.dialled.reach_s, 6)}
            if one.dialled is not None
            else {"url": one.url, "trouble": one.trouble}
            for one in found
        ],
    }
    answers = "; ".join(f"{one.shown} answers in {brief(one.dialled.reach_s)}" for one in there if one.dialled)
    silent = "; ".join(f"{one.shown}: {one.trouble}" for one in found if one.dialled is None)
    value = "; ".join(part for part in (answers, silent) if part) + (address.through if there else "")
    if not there:
        advice = "Is the run over, the port right, a firewall in between, the link of another run?"
        return Check("addresses", "fail", value, advice, figures)
    if len(there) < len(found):
        advice = "A standby answers once it serves; if there is none, the link names an address too many."
        return Check("addresses", "warn", value, advice, figures)
    return Check("addresses", "ok", value, figures=figures)


def judge_certificate(address: SyncerAddress, found: Sequence[DialledAddress]) -> Check:
    """Whoever answered has shown the right one: others are not spoken to."""
    there = [one for one in found if one.dialled is not None]
    known = (
        f"the fingerprint that the link names, {address.pin[:16]}…"
        if address.pin != BY_AUTHORITY
        else "by its authority"
    )
    left = min(days_left(one.dialled.certificate) for one in there if one.dialled is not None)
    value = f"{known}; counts for {left:.0f} more days"
    figures = {"pinned": address.pin != BY_AUTHORITY, "days_left": round(left, 2)}
    if left < FEW_DAYS:
        advice = "When it has expired nobody gets in: renew it while the run goes on (atoll cert --next, --renew)."
        return Check("certificate", "warn", value, advice, figures)
    return Check("certificate", "ok", value, figures=figures)


def judge_no_tls(address: SyncerAddress) -> Check:
    """No TLS: then it is this machine, or `checked_url` (fabric/address.py) would have refused."""
    return Check(
        "certificate", "ok", f"none: {listing(address.urls)} is this machine, in the clear", figures={"tls": False}
    )


def judge_tls(dialled: DialResult, moved: int, cpu_s: float) -> Check:
    """Seconds of one core per gigabyte: what the cipher alone takes here, and what moving it takes in all."""
    rate = cipher_rate(dialled.cipher)
    figures: dict[str, Any] = {
        "cipher": dialled.cipher,
        "handshake_s": round(dialled.handshake_s, 6),
        "cipher_bytes_per_core_s": round(rate),
        "cipher_core_s_per_gb": round(1e9 / rate, 4),
    }
    value = f"handshake {brief(dialled.handshake_s)}; the cipher takes {1e9 / rate:.2f} s of a core per GB"
    if moved >= ENOUGH_BYTES:
        figures["core_s_per_gb"] = round(1e9 * cpu_s / moved, 4)
        value += f", sending and receiving as a whole {1e9 * cpu_s / moved:.2f} s"
    if dialled.handshake_s > SLOW_HANDSHAKE_S:
        advice = "Only new connections pay for it, but a learner that comes back waits for two of them."
        return Check("TLS", "warn", value, advice, figures)
    return Check("TLS", "ok", value, figures=figures)


def cipher_rate(name: str, seconds: float = CIPHER_S) -> float:
    """Bytes a second that one core encrypts, in pieces as TLS does."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

    if "CHACHA20" in name:
        seal: AESGCM | ChaCha20Poly1305 = ChaCha20Poly1305(ChaCha20Poly1305.generate_key())
    else:
        seal = AESGCM(AESGCM.generate_key(256 if "256" in name else 128))
    nonce, record = bytes(12), bytes(RECORD_BYTES)  # nobody gets to see what is sealed here
    done, begun = 0, time.process_time()
    while (took := time.process_time() - begun) < seconds:
        seal.encrypt(nonce, record, None)
        done += RECORD_BYTES
    return done / took


# ---- round trips and bandwidth --------------------------------------------------------------------------------------

TRIES = 10
TRIP_DEADLINE_S = 5.0
SLOW_TRIP_S = 0.2
FIRST_BYTES = 64 << 10
GROWTH = 16
WANTED_S, ENOUGH_S = 2.0, 1.0
BODY_DEADLINE_S = 20.0
SLOW_BITS_PER_S = 10e6
CLOCK_S = 2.0


@dataclass(frozen=True, slots=True)
class RoundTrip:
    seconds: float
    clock_s: float | None
    """The syncer's clock less ours, at the middle of the trip."""


@dataclass(frozen=True, slots=True)
class MeasuredTransfer:
    bytes: int
    seconds: float
    cpu_s: float = 0.0
    """Of this process, at this end."""

    @property
    def bits_per_s(self) -> float:
        return 8 * self.bytes / max(self.seconds, 1e-9)


async def measure_trips(session: aiohttp.ClientSession, url: str, tries: int = TRIES) -> list[RoundTrip]:
    """The first opens the connection, and is not counted."""
    return [await _trip(session, url) for _ in range(tries + 1)][1:]


async def _trip(session: aiohttp.ClientSession, url: str) -> RoundTrip:
    begun, wall = time.perf_counter(), time.time()
    async with asked(session, "GET", f"{url}/v1/probe/0", TRIP_DEADLINE_S) as response:
        told = response.headers.get(TIME_HEADER, "")
        while await next_chunk(response.content):
            pass
    took = time.perf_counter() - begun
    try:
        return RoundTrip(took, float(told) - (wall + took / 2))
    except ValueError:
        return RoundTrip(took, None)


async def measure_download(session: aiohttp.ClientSession, url: str) -> MeasuredTransfer:
    async def get(count: int) -> None:
        async with asked(session, "GET", f"{url}/v1/probe/{count}", BODY_DEADLINE_S) as response:
            while await next_chunk(response.content):
                pass

    return await _measured(get)


async def measure_upload(session: aiohttp.ClientSession, url: str) -> MeasuredTransfer:
    block = memoryview(os.urandom(1 << 20))

    async def put(count: int) -> None:
        parts = [block] * (count // len(block)) + [block[: count % len(block)]]
        headers = {"Content-Length": str(count)}
        body = sent(pieces(parts, 0, len(block)))
        async with asked(session, "PUT", f"{url}/v1/probe/{count}", BODY_DEADLINE_S, headers=headers, data=body):
            pass

    return await _measured(put)


async def _measured(move: Callable[[int], Awaitable[None]]) -> MeasuredTransfer:
    count = FIRST_BYTES
    while True:
        begun, cpu = time.perf_counter(), time.process_time()
        await move(count)
        took = time.perf_counter() - begun
        if took >= ENOUGH_S or count >= LONGEST:
            return MeasuredTransfer(count, took, time.process_time() - cpu)
        count = choose_next_size(count, took, LONGEST)


def choose_next_size(count: int, took_s: float, longest: int = LONGEST) -> int:
    """For about two seconds, if it goes on like this; it may become faster, so not too much more at once."""
    return min(longest, max(2 * count, min(GROWTH * count, round(count * WANTED_S / max(took_s, 1e-9)))))


def judge_trips(url: str, found: Sequence[RoundTrip]) -> Check:
    took = [trip.seconds for trip in found]
    middle, worst = median(took), max(took)
    value = f"{1000 * middle:.1f} ms to {url}, {1000 * worst:.0f} ms at worst"
    figures = {"url": url, "median_s": round(middle, 6), "worst_s": round(worst, 6)}
    if middle > SLOW_TRIP_S:
        advice = "A fragment is away for several trips: overlap (τ) times the step time should be well above this."
        return Check("round trip", "warn", value, advice, figures)
    return Check("round trip", "ok", value, figures=figures)


def judge_clock(found: Sequence[RoundTrip]) -> Check:
    """By the quickest trip: its answer was made within half of it."""
    told = [(trip.seconds, trip.clock_s) for trip in found if trip.clock_s is not None]
    if not told:
        return Check("syncer's clock", "ok", "it does not tell its time")
    took, apart = min(told)
    figures = {"difference_s": round(apart, 6), "uncertain_s": round(took / 2, 6)}
    about = f"(± {brief(took / 2)})"
    if abs(apart) <= took / 2:
        return Check("syncer's clock", "ok", f"the same as here {about}", figures=figures)
    value = f"{brief(abs(apart))} {'ahead of' if apart > 0 else 'behind'} ours {about}"
    if abs(apart) > CLOCK_S:
        advice = "Events of both machines stand in one file: keep both clocks with NTP."
        return Check("syncer's clock", "warn", value, advice, figures)
    return Check("syncer's clock", "ok", value, figures=figures)


def judge_bandwidth(name: str, moved: MeasuredTransfer) -> Check:
    rate = moved.bits_per_s
    told = f"{rate / 1e6:,.0f}" if rate >= SLOW_BITS_PER_S else f"{rate / 1e6:.2g}"
    value = f"{told} Mbit/s ({size(moved.bytes)} in {span(moved.seconds)})"
    figures = {"bits_per_s": round(rate), "bytes": moved.bytes, "seconds": round(moved.seconds, 4)}
    if rate < SLOW_BITS_PER_S:
        return Check(name, "warn", value, "What it carries is said below, where the model is known.", figures)
    return Check(name, "ok", value, figures=figures)
