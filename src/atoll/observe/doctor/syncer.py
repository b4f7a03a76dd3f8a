"""The way to a syncer, as learners go it: addresses, certificate, round trip, clock, bandwidth, and what it carries.

Only what a learner may ask is asked, and nothing of the run is changed. Every wait has a deadline and every body a
bound: it may be no syncer at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import msgspec

from atoll.estimate.bandwidth import Codec
from atoll.fabric.address import SyncerAddress
from atoll.fabric.transfer import body_session, get_json_at
from atoll.fabric.wire import Limits
from atoll.observe.doctor import carry, door, speed
from atoll.observe.doctor.carry import CODECS, Load, MeasuredLink
from atoll.observe.doctor.check import Check
from atoll.observe.figures import plain
from atoll.protocol.errors import ConfigError, PeerError, Unreachable
from atoll.telemetry.status import RunStatus

USUAL = 24
"""P and H of a run that has not begun and says nothing of them."""


class Fragment(msgspec.Struct, frozen=True):
    size: int


class Plan(msgspec.Struct, frozen=True):
    fragments: tuple[Fragment, ...]


class Manifest(msgspec.Struct, frozen=True):
    """What a link depends on of it."""

    plan: Plan


def checks(address: SyncerAddress, parameters: float | None = None, step_s: float | None = None) -> Iterator[Check]:
    """`parameters` and `step_s`: of a model that is to be trained, instead of the run's own."""
    with asyncio.Runner() as runner:
        found = runner.run(_knock(address))
        yield door.judge_addresses(address, found)
        there = next((one for one in found if one.dialled is not None), None)
        if there is None:
            return
        yield door.judge_certificate(address, found) if address.pin else door.clear(address)
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
    address: door.Address,
    parameters: float | None,
    step_s: float | None,
) -> Iterator[Check]:
    url, run = address.url, runner.run
    status = run(_status(session, url))
    trips = run(speed.trips(session, url))
    yield speed.judge_trips(url, trips)
    yield speed.judge_clock(trips)
    down = run(speed.down(session, url))
    yield speed.judge_bandwidth("bandwidth down", down)
    up = run(speed.up(session, url))
    yield speed.judge_bandwidth("bandwidth up", up)
    if address.dialled is not None and address.dialled.cipher:
        yield door.judge_tls(address.dialled, down.bytes + up.bytes, down.cpu_s + up.cpu_s)
    if parameters is None and status.phase != "waiting":
        parameters = run(_parameters(session, url))
    link = MeasuredLink(up.bits_per_s, down.bits_per_s, min(trip.seconds for trip in trips))
    yield carries(status, link, parameters, step_s if step_s is not None else status.step_s)


def carries(status: RunStatus, link: MeasuredLink, parameters: float | None, step_s: float | None) -> Check:
    if parameters is None or step_s is None:
        missing = " and ".join(
            words for words, value in (("--parameters N", parameters), ("--step SECONDS", step_s)) if value is None
        )
        return Check("carries", "ok", f"not known yet: the run has not gone far enough; {missing} would say")
    sync_every = status.sync_every or USUAL
    fragments = min(status.fragments or USUAL, sync_every)
    codec: Codec = next((one for one in CODECS if one == status.codec), "bf16")
    try:
        return carry.judge(Load(parameters, step_s, sync_every, fragments, status.overlap, codec), link)
    except ConfigError as error:
        return Check("carries", "warn", str(error), "Look at --parameters and --step.")


async def _knock(address: SyncerAddress) -> list[door.Address]:
    found = await door.knock(address)
    await asyncio.sleep(0.01)  # a closed connection lets go of its socket in a later turn of the loop
    return found


async def _session(address: SyncerAddress) -> aiohttp.ClientSession:
    return body_session(address, Limits())


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
        manifest = msgspec.convert(await get_json_at(session, f"{url}/v1/manifest"), Manifest)
    except msgspec.ValidationError:
        raise PeerError("its manifest cannot be read: is it of another version?") from None
    return float(sum(fragment.size for fragment in manifest.plan.fragments))
