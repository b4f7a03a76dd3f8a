from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from atoll.digests import compute_digest
from atoll.fabric.client import SyncerConnection
from atoll.fabric.control_channel import ClientSocket
from atoll.fabric.transfer import get_fragment_once, get_json, post_score
from atoll.fabric.wire import FabricLimits, ScoreReport
from atoll.protocol.errors import ConfigError, PeerError, Unreachable
from atoll.protocol.messages import PROTOCOL, Heartbeat, Hello, Leave, Started

if TYPE_CHECKING:
    from .conftest import ServedFabric

BODY = bytes(range(256)) * 16
LARGE = bytes(range(256)) * (5 << 12)


async def test_bodies_go_both_ways(place: ServedFabric) -> None:
    await place.open()
    link = (await place.joined()).link
    for data in (BODY, LARGE):
        place.handlers.buffers["learner-0", 5, 1] = bytearray(len(data))
        place.handlers.initials[0] = bytearray(len(data))
        place.handlers.fragments[0] = data
        await link.put_contribution("learner-0", "s0", 5, 1, memoryview(data), compute_digest(data), 10)
        await link.put_initial("learner-0", "s0", 0, memoryview(data), compute_digest(data), 10)
        into = bytearray(len(data))
        assert await link.get_fragment(0, memoryview(into), 10) == (3, 7, compute_digest(data))
        assert into == data == place.handlers.buffers["learner-0", 5, 1] == place.handlers.initials[0]
    assert place.handlers.held == 0


async def test_what_the_syncer_does_not_want_is_a_peer_error_in_its_words(place: ServedFabric) -> None:
    await place.open()
    link = (await place.joined()).link
    with pytest.raises(PeerError, match="round 9 did not ask learner-0 for attempt 1"):
        await link.put_contribution("learner-0", "s0", 9, 1, memoryview(LARGE), compute_digest(LARGE), 10)
    with pytest.raises(PeerError, match="there is no fragment 1"):
        await link.get_fragment(1, memoryview(bytearray(8)), 10)


async def test_a_fragment_of_another_length_or_digest_is_a_peer_error(place: ServedFabric) -> None:
    await place.open()
    link = (await place.joined()).link
    place.handlers.fragments[0] = BODY
    with pytest.raises(PeerError, match="has 4096 bytes, 4095 were expected"):
        await link.get_fragment(0, memoryview(bytearray(4095)), 10)


async def test_whoever_holds_a_version_gets_the_steps_from_there(place: ServedFabric) -> None:
    await place.open()
    link = (await place.joined()).link
    place.handlers.fragments[0], place.handlers.steps = BODY, [b"aa", b"bb", b"cc"]
    into = bytearray(len(BODY))
    found = await link.get_version(0, 1, 2, memoryview(into), 10)
    assert (found.version, found.digest) == (3, compute_digest(BODY))
    assert [bytes(step) for step in found.steps] == [b"bb", b"cc"]
    assert not any(into) and link.bytes_in < len(BODY)
    whole = await link.get_version(0, 3, 2, memoryview(into), 10)
    assert whole == (3, compute_digest(BODY), ()) and into == BODY
    assert place.handlers.held == 0


@pytest.mark.parametrize(
    ("have", "step_bytes", "steps", "size", "text"),
    [
        (1, 2, [b"aa", b"bb", b"c"], 4096, "has 3 bytes, 4 were expected"),
        (0, 2, [b"aa", b"bb"], 4096, "came as 2 steps from version 0 to 3"),
        (1, 2, [b"aa", b"bb", b"cc"], 4, "came as 2 steps from version 1 to 3"),
    ],
)
async def test_steps_that_do_not_lead_to_the_version_are_a_peer_error(
    place: ServedFabric, have: int, step_bytes: int, steps: list[bytes], size: int, text: str
) -> None:
    await place.open()
    link = (await place.joined()).link
    place.handlers.fragments[0], place.handlers.steps = BODY, steps
    with pytest.raises(PeerError, match=text):
        await link.get_version(0, have, step_bytes, memoryview(bytearray(size)), 10)


async def test_averaged_moments_are_those_of_one_version_and_fit_into_their_room(place: ServedFabric) -> None:
    await place.open()
    link = (await place.joined()).link
    place.handlers.fragments[0] = BODY
    into = bytearray(len(BODY) + 9)
    before = link.bytes_in
    assert await link.get_moments(0, 3, memoryview(into), 10) == len(BODY) == link.bytes_in - before
    assert into == BODY + bytes(9) and place.handlers.held == 0
    with pytest.raises(PeerError, match="no averaged moments of version 4 of fragment 0"):
        await link.get_moments(0, 4, memoryview(into), 10)
    with pytest.raises(PeerError, match="has 4096 bytes, 4095 at most were expected"):
        await link.get_moments(0, 3, memoryview(into)[:4095], 10)


@pytest.mark.parametrize("have", ["-1", "x", "1" * 13, "\u0663", "1,2"])
async def test_a_version_that_is_no_number_is_refused(place: ServedFabric, have: str) -> None:
    await place.open()
    place.handlers.fragments[0] = BODY
    with pytest.raises(PeerError, match="have is no version"):
        await get_json(place.url, f"/v1/fragments/0?have={have}")


async def test_a_body_past_its_deadline_is_unreachable(place: ServedFabric) -> None:
    await place.open()
    link = (await place.joined()).link
    place.handlers.fragments[0] = BODY
    with pytest.raises(Unreachable, match="not done within"):
        await link.get_fragment(0, memoryview(bytearray(4096)), 0)


async def test_a_link_outlives_its_syncer_and_joins_again_by_itself(place: ServedFabric) -> None:
    await place.open()
    learner = await place.joined()
    port = place.server.port
    await place.server.stop()
    assert "the syncer is stopping" in await learner.lost_it()
    assert not learner.link.up and not learner.link.send(Heartbeat())
    with pytest.raises(Unreachable):
        await learner.link.get_fragment(0, memoryview(bytearray(1)), 1)
    assert "cannot be reached" in await learner.lost_it()
    await place.open(port=port)
    assert isinstance(await learner.heard(), Started)
    assert learner.link.send(Heartbeat())
    await place.handlers.until("received")
    assert [entry[2] for entry in place.handlers.told("opened")] == ["s0", "s0"]


async def test_an_address_that_fails_is_named_as_one_of_several() -> None:
    """A learner that was cut off from the syncer named its standby alone, as if the standby were the syncer."""
    lost: asyncio.Queue[str] = asyncio.Queue()
    link = SyncerConnection(
        "http://127.0.0.1:9,http://127.0.0.1:11",
        hello=lambda: Hello(protocol=PROTOCOL, learner="a", session="s"),
        on_open=lambda: None,
        on_message=lambda message: None,
        on_lost=lost.put_nowait,
    )
    running = asyncio.ensure_future(link.run())
    async with asyncio.timeout(10):
        told = [await lost.get(), await lost.get()]
    await link.close()
    await running
    for reason, port in zip(told, (9, 11), strict=True):
        assert reason.startswith(f"http://127.0.0.1:{port} (one of 2 addresses) cannot be reached: ")


async def test_waits_between_dials_double_up_to_their_cap_and_a_good_message_sets_them_back(
    place: ServedFabric,
) -> None:
    await place.open(FabricLimits(backoff_s=0.01, backoff_cap_s=0.04))
    learner = await place.joined()
    await place.server.stop()
    for _ in range(5):
        await learner.lost_it()
    assert learner.link._backoff_s == 0.04
    await place.open(place.limits, port=place.server.port)
    await learner.heard()
    assert learner.link._backoff_s == 0.01


async def test_closing_sends_what_is_queued(place: ServedFabric) -> None:
    await place.open()
    learner = await place.joined()
    for number in range(100):
        assert learner.link.send(Heartbeat(clock={"a": number}))
    assert learner.link.send(Leave(reason="done"))
    await learner.link.close()
    assert (await place.handlers.until("received", 101))[2] == Leave(reason="done")
    await place.handlers.until("closed")
    assert learner.lost.empty()


async def test_who_is_closed_while_it_dials_says_no_hello(place: ServedFabric) -> None:
    """Its training process is dead: it would take the name from a successor that is there by now."""
    await place.open()
    link = SyncerConnection(
        place.url,
        hello=lambda: Hello(protocol=PROTOCOL, learner="a", session="s"),
        on_open=lambda: None,
        on_message=lambda message: None,
        on_lost=lambda reason: None,
    )
    dial, dialled, go_on = link._dial, asyncio.Event(), asyncio.Event()

    async def dial_slowly() -> ClientSocket:
        socket = await dial()
        dialled.set()
        await go_on.wait()
        return socket

    link._dial = dial_slowly  # type: ignore[method-assign]
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        await dialled.wait()
        tasks.create_task(link.close())
        await place.until(link._closing.is_set)
        go_on.set()
    assert place.handlers.told("opened") == []


async def test_a_full_queue_drops_the_channel_and_the_link_dials_again(place: ServedFabric) -> None:
    await place.open(FabricLimits(send_queue=4))
    learner = await place.joined()
    assert [learner.link.send(Heartbeat()) for _ in range(5)] == [True, True, True, True, False]
    await learner.lost_it()
    assert isinstance(await learner.heard(), Started)


async def test_an_error_in_a_callback_is_ours_and_ends_run(place: ServedFabric) -> None:
    await place.open()

    def wrong(message: object) -> None:
        raise KeyError("ours")

    link = SyncerConnection(
        place.url,
        hello=lambda: Hello(protocol=PROTOCOL, learner="a", session="s"),
        on_open=lambda: None,
        on_message=wrong,
        on_lost=lambda reason: None,
    )
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(10):
            await link.run()
    assert caught.group_contains(KeyError)
    await link.close()


async def test_redirects_are_not_followed(place: ServedFabric) -> None:
    await place.open()

    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound(place.url + request.path)

    app = web.Application()
    app.router.add_get("/{any:.*}", away)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    lost: asyncio.Queue[str] = asyncio.Queue()
    link = SyncerConnection(
        url,
        hello=lambda: Hello(protocol=PROTOCOL, learner="a", session="s"),
        on_open=lambda: None,
        on_message=lambda message: None,
        on_lost=lost.put_nowait,
    )
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        tasks.create_task(link.run())
        assert "redirect" in await lost.get()
        await link.close()
    with pytest.raises(PeerError, match="302"):
        await get_json(url, "/v1/status")
    await runner.cleanup()
    assert place.handlers.log == []


@pytest.mark.parametrize("url", ["", "127.0.0.1:7077", "https://a:1", "http://a", "http://a:1/x", "http://a:99999"])
def test_an_address_that_is_none_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(ConfigError, match=r"it looks like http://127\.0\.0\.1:7077"):
        SyncerConnection(
            url,
            hello=lambda: Hello(protocol=PROTOCOL, learner="a", session="s"),
            on_open=lambda: None,
            on_message=lambda message: None,
            on_lost=lambda reason: None,
        )


async def test_an_evaluator_needs_no_link(place: ServedFabric) -> None:
    await place.open()
    place.handlers.fragments[0] = BODY
    assert await get_json(place.url, "/v1/manifest") == {"fragments": 1}
    into = bytearray(len(BODY))
    assert await get_fragment_once(place.url, 0, memoryview(into)) == (3, 7, compute_digest(BODY))
    assert into == BODY
    await post_score(place.url, ScoreReport(round=7, loss=1.5, cpu_s=0.2, sample="def f():", final=True))
    assert place.handlers.told("score") == [
        ("score", ScoreReport(round=7, loss=1.5, cpu_s=0.2, sample="def f():", final=True))
    ]
    with pytest.raises(PeerError, match="Not Found"):
        await get_json(place.url, "/v1/nothing")
