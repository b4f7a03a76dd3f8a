"""The dashboard over a real port: who may look on, what is told, and that all of it is bounded."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.fabric import tasks
from atoll.fabric.handlers import Handlers
from atoll.fabric.server import Server
from atoll.observe.dashboard import NAME, Dashboard, history, pages, site
from atoll.observe.dashboard.history import BoundedSeries, DashboardHistory, LearnerLanes, rounds_behind
from atoll.observe.dashboard.metrics import exposition
from atoll.protocol.errors import ConfigError
from atoll.store.rundir import RunDir
from atoll.syncer.process import import_named, show_pages
from atoll.telemetry.events import Event, EventLog
from atoll.telemetry.status import RunStatus

Status = Callable[..., RunStatus]
WAIT_S = 60.0


class NoDesk:
    def turned_away(self, address: str, reason: str) -> None:
        pass


class ServedDashboard:
    """The dashboard of a run, on a port of its own."""

    def __init__(self, folder: Path, status: RunStatus) -> None:
        self.status = status
        self.dashboard = Dashboard(folder / "events.jsonl")
        self.server = Server(cast(Handlers, NoDesk()), host="127.0.0.1", port=0, pages=self.dashboard)

    async def open(self) -> None:
        await self.server.start()
        self.session = aiohttp.ClientSession()
        self.sockets: list[aiohttp.ClientWebSocketResponse] = []
        self.following = asyncio.create_task(self.dashboard.run(lambda: self.status))

    async def close(self) -> None:
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        for socket in self.sockets:  # one that nobody closes is found later, in the middle of another test
            await socket.close()
        await self.session.close()
        await self.server.stop()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
        async with self.session.request(method, f"http://{self.host}{path}", headers=headers) as answer:
            return answer.status, await answer.text(), answer.headers

    async def look(self, origin: str | None = None) -> aiohttp.ClientWebSocketResponse:
        url, own = f"http://{self.host}/v1/live", f"http://{self.host}"
        patience = aiohttp.ClientWSTimeout(ws_close=2.0)
        self.sockets.append(await self.session.ws_connect(url, origin=origin or own, autoclose=False, timeout=patience))
        return self.sockets[-1]


async def heard(socket: aiohttp.ClientWebSocketResponse) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        return cast(dict[str, Any], json.loads(await socket.receive_str()))


async def sent_away(socket: aiohttp.ClientWebSocketResponse) -> int:
    """The code that it is closed with."""
    async with asyncio.timeout(WAIT_S):
        while (frame := await socket.receive()).type is aiohttp.WSMsgType.TEXT:
            pass
    assert frame.type is aiohttp.WSMsgType.CLOSE
    return cast(int, frame.data)


@pytest.fixture
async def place(tmp_path: Path, events: list[Event], status: Status) -> AsyncIterator[ServedDashboard]:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    place = ServedDashboard(tmp_path, status())
    await place.open()
    yield place
    await place.close()


# ---- pages ----------------------------------------------------------------------------------------------------------


async def test_the_page_and_its_parts_are_served_and_load_nothing_from_elsewhere(place: ServedDashboard) -> None:
    code, page, headers = await place.get("/")
    assert code == 200 and "<title>Atoll</title>" in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self';" in policy
    assert "http://" not in page and "https://" not in page
    for path in site.ASSETS.iterdir():
        code, text, headers = await place.get(f"/assets/{path.name}")
        assert code == 200 and text == path.read_text() and headers["X-Content-Type-Options"] == "nosniff"
        assert "//cdn" not in text and "https://" not in text


async def test_plotly_comes_from_the_installed_package(place: ServedDashboard) -> None:
    code, text, headers = await place.get("/plotly.min.js")
    assert code == 200 and "plotly" in text[:200] and headers["Content-Type"].startswith("text/javascript")


@pytest.mark.parametrize("path", ["/assets/nothing.js", "/assets/..%2fsite.py", "/assets/%2e%2e/site.py", "/elsewhere"])
async def test_nothing_else_is_served(place: ServedDashboard, path: str) -> None:
    code, text, _ = await place.get(path)
    assert code == 404 and "import" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/live", "/assets/app.js", "/plotly.min.js"])
async def test_other_verbs_are_refused(place: ServedDashboard, method: str, path: str) -> None:
    assert (await place.get(path, method))[0] == 405


@pytest.mark.parametrize("path", ["/", "/metrics", "/plotly.min.js"])
async def test_a_head_has_no_body(place: ServedDashboard, path: str) -> None:
    assert (await place.get(path, "HEAD"))[:2] == (200, "")


@pytest.mark.parametrize("path", ["/", "/metrics", "/assets/app.js"])
async def test_a_name_that_was_made_to_lead_here_reads_nothing(place: ServedDashboard, path: str) -> None:
    code, text, _ = await place.get(path, Host="evil.example")
    assert code == 403 and "127.0.0.1" in text
    assert (await place.get(path, Host=f"localhost:{place.server.port}"))[0] == 200


# ---- the live channel -----------------------------------------------------------------------------------------------


async def test_a_viewer_gets_a_snapshot_and_then_what_is_new(place: ServedDashboard, say: Callable[..., Event]) -> None:
    socket = await place.look()
    whole = await heard(socket)
    assert whole["type"] == "snapshot" and whole["now"]["round"] == 1203 and whole["began"] == 1002.0
    assert whole["names"] == ["syncer", "a", "b", "learner-0", "learner-1", "learner-2", "learner-3"]
    assert [round[0] for round in whole["rounds"]] == [0, 1, 2, 3, 5, 6, 7]
    assert [round[6] for round in whole["rounds"]] == ["6", "6", "2", "6", "4", "6", "2"]
    with place.dashboard._tail.path.open("a") as file:
        file.write(json.dumps(say(20.0, "fault", target="a", what="pause", seconds=3.0)) + "\n")
    while "marks" not in (news := await heard(socket)):
        assert news["type"] == "delta" and "samples" in news
    assert news["marks"] == [[1, 1020.0, "fault", "pause: fault happened", 3.0]]
    assert news["notes"][0][1] == "fault" and "rounds" not in news
    await socket.close()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://localhost:1"])
async def test_pages_of_elsewhere_may_not_look_on(place: ServedDashboard, origin: str) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await place.look(origin)
    assert refusal.value.status == 403


async def test_without_an_origin_nobody_looks_on(place: ServedDashboard) -> None:
    assert (await place.get("/v1/live", Upgrade="websocket", Connection="Upgrade"))[0] == 403
    assert (await place.get("/v1/live", Origin=f"http://{place.host}"))[0] == 426


async def test_the_control_channel_still_refuses_web_pages(place: ServedDashboard) -> None:
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await place.session.ws_connect(f"http://{place.host}/v1/control", origin=f"http://{place.host}")
    assert refusal.value.status == 403


@pytest.mark.parametrize("garbage", ["hello", b"\x00\xff", "x" * 5000], ids=["text", "bytes", "too long"])
async def test_a_viewer_that_speaks_is_sent_away_and_nobody_else_notices(
    place: ServedDashboard, garbage: str | bytes
) -> None:
    quiet, loud = await place.look(), await place.look()
    assert (await heard(quiet))["type"] == (await heard(loud))["type"] == "snapshot"
    await (loud.send_str(garbage) if isinstance(garbage, str) else loud.send_bytes(garbage))
    assert await sent_away(loud) in (aiohttp.WSCloseCode.POLICY_VIOLATION, aiohttp.WSCloseCode.MESSAGE_TOO_BIG)
    await loud.close()
    while len(place.dashboard.viewers) > 1:
        assert (await heard(quiet))["type"] == "delta"


async def test_so_many_viewers_and_no_more(place: ServedDashboard) -> None:
    sockets = [await place.look() for _ in range(site.MOST_VIEWERS)]
    with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
        await place.look()
    assert refusal.value.status == 503
    await sockets[0].close()
    while len(place.dashboard.viewers) == site.MOST_VIEWERS:
        await heard(sockets[1])
    assert (await heard(await place.look()))["type"] == "snapshot"


async def test_where_all_places_are_taken_the_token_with_the_most_gives_one() -> None:
    crowd = site.Viewers()
    greedy = [site.Viewer("greedy") for _ in range(site.MOST_VIEWERS)]
    crowd._there |= dict.fromkeys(greedy)
    assert not crowd._has_room("greedy") and len(crowd) == site.MOST_VIEWERS
    for number in range(site.MOST_VIEWERS // 2):
        assert crowd._has_room("modest")
        assert greedy.pop().outbox.closed, "the newest of them goes"
        crowd._new[site.Viewer("modest")] = None
        assert len(crowd) == site.MOST_VIEWERS, number
    assert not crowd._has_room("modest") and not crowd._has_room("greedy"), "both have the same now"
    assert crowd._has_room("another")


async def test_whose_token_counts_no_more_is_sent_away() -> None:
    crowd, gone, stays = site.Viewers(), site.Viewer("gone"), site.Viewer("stays")
    crowd._there[gone] = crowd._new[stays] = None
    reasons = {"gone": "the token 'gone' was revoked", "stays": ""}
    crowd.sweep(lambda token, mark: reasons[token])
    assert len(crowd) == 1 and gone.outbox.closed and gone.why == "the token 'gone' was revoked"
    assert not stays.outbox.closed


async def test_a_viewer_that_reads_too_slowly_is_dropped() -> None:
    crowd, slow = site.Viewers(), site.Viewer()
    crowd._there[slow] = None
    for _ in range(site.WAITING):
        crowd.tell(b"news", lambda: b"")
    assert len(crowd) == 1
    crowd.tell(b"one too many", lambda: b"")
    assert len(crowd) == 0 and slow.outbox.closed and slow.why == "you read too slowly"


async def test_viewers_are_sent_away_when_the_port_closes(place: ServedDashboard) -> None:
    socket = await place.look()
    await heard(socket)
    async with asyncio.TaskGroup() as tasks:
        code = tasks.create_task(sent_away(socket))
        tasks.create_task(place.server.stop())
    assert code.result() == aiohttp.WSCloseCode.GOING_AWAY


# ---- what is kept ---------------------------------------------------------------------------------------------------


def crowded_round(number: int, learners: int) -> Event:
    members = [{"learner": f"learner-{i}", "incarnation": 1, "t": number} for i in range(learners)]
    return {
        "at": 1000.0 + number,
        "kind": "round",
        "text": "",
        "round": number,
        "fragment": number % 24,
        "version": 1,
        "live": learners,
        "reason": "grace window over with 63 of 64",
        "members": members,
    }


def test_a_snapshot_is_bounded_with_64_learners_and_10_000_rounds(status: Status) -> None:
    past = DashboardHistory()
    for number in range(10_000):
        past.take_events([crowded_round(number, 64)])
        who = f"learner-{number % 64}"
        for kind in ("lost", "joined", "recovered"):
            at = 1000.0 + number
            past.take_events([{"at": at, "kind": kind, "text": "x" * 500, "learner": who, "incarnation": number}])
        past.take_events([{"at": 1000.0 + number, "kind": "score", "round": number, "loss": 2.0 + 1 / 3}])
        past.take_events([{"at": 1000.0 + number, "kind": "exited", "process": who, "code": 1, "text": "y" * 500}])
        past.take_status(1000.0 + number, status())
    now = status()
    assert len(past.encode_snapshot(11_000.0, now)) < 400_000
    assert len(past.rounds) == history.ROUNDS and past.rounds[-1][0] == 9_999
    assert len(past.scores.points) <= history.SCORES and past.scores.points[0][1] == 0, "curves reach back to the start"
    assert len(past.samples.points) <= history.SAMPLES and len(past.lanes.marks) == history.MARKS
    past.encode_delta(11_000.0, now)
    assert len(past.encode_delta(11_000.5, now)) < 4_000, "news are news only"


def test_losses_have_an_axis_of_steps_and_one_of_tokens(status: Status) -> None:
    past = DashboardHistory()
    past.take_status(1000.0, status(global_step=123_456, fates={"computed": 80, "merged": 70}))
    sample = dict(zip(history.SAMPLE, past.samples.points[0], strict=True))
    assert (sample["step"], sample["tokens"]) == (123_456, 70)
    assets = Path(history.__file__).parent / "assets"
    axes = re.findall(r'<option value="(\w+)"', (assets / "index.html").read_text().partition('id="loss-axis"')[2])
    assert axes == ["time", "step", "tokens"] and set(axes[1:]) <= set(history.SAMPLE)


def test_nothing_empty_is_shown_before_the_first_figures() -> None:
    assets = Path(history.__file__).parent / "assets"
    assert (
        'data-loaded="no"' in (assets / "index.html").read_text()
        and 'id="loading"' in (assets / "index.html").read_text()
    )
    assert '[data-loaded="no"] main' in (assets / "style.css").read_text()
    assert 'dataset.loaded = "yes"' in (assets / "app.js").read_text()


def test_a_series_reaches_back_to_its_start_and_stays_bounded() -> None:
    series = BoundedSeries(100)
    for at in range(5000):
        series.add_point([float(at), at])
    assert len(series.points) <= 100 and series.points[0][0] == 0.0
    assert 5000 - cast(float, series.points[-1][0]) < 200
    gaps = [cast(float, b[0]) - cast(float, a[0]) for a, b in zip(series.points, series.points[1:], strict=False)]
    assert max(gaps) <= 3 * min(gaps)


def test_lanes_say_what_befell_a_learner(events: list[Event]) -> None:
    known = LearnerLanes()
    for event in events:
        if event["kind"] != "round":
            known.take_event(event, ())
    b = known.names.index("b")
    assert [state for _, state in known.changes[b]] == ["joining", "training", "away", "joining", "training"]
    assert [mark[2] for mark in known.marks if mark[0] == b] == [
        "recovered",
        "killed",
        "exited",
        "restarted",
        "recovered",
    ]
    assert known.changes[0][0] == (1000.0, "serving")


def test_a_fault_is_marked_where_it_strikes(say: Callable[..., Event]) -> None:
    known = LearnerLanes()
    known.take_event(say(1.0, "fault", what="partition", targets=["a", "b"], target="a", seconds=4.0), ())
    known.take_event(say(2.0, "fault", what="disk-full", targets=[], target="", seconds=1.5), ())
    assert [(known.names[mark[0]], mark[1] - 1000, mark[4]) for mark in known.marks] == [
        ("a", 1.0, 4.0),
        ("b", 1.0, 4.0),
        ("syncer", 2.0, 1.5),
    ]


def test_a_status_mends_what_no_event_told(status: Status) -> None:
    known = LearnerLanes()
    known.take_status(5.0, status(learners=8).learners, ())
    states = {known.names[i]: lane[-1][1] for i, lane in enumerate(known.changes)}
    assert states["learner-0"] == "training" and states["learner-2"] == "joining" and states["learner-3"] == "gone"
    known.drain_news()
    known.take_status(6.0, status(learners=8).learners, ())
    assert known.drain_news() == {"changes": [], "marks": []}, "what stays as it is is not told again"


def test_a_new_learner_takes_the_lane_of_one_that_is_long_gone() -> None:
    known = LearnerLanes()
    for number in range(history.LANES + 5):
        known.take_event({"at": float(number), "kind": "joined", "learner": f"one-{number}", "incarnation": 1}, ())
    assert len(known.names) == history.LANES and known.find_lane("another") is None
    known.take_event({"at": 900.0, "kind": "lost", "learner": "one-7", "incarnation": 1}, ())
    place = known.find_lane("one-7")
    assert known.find_lane("another", needed={place}) is None, "it is still in a round that is shown"
    assert known.find_lane("another") == place and known.find_lane("one-7") is None
    assert len(known.changes[cast(int, place)]) == 0


def test_events_that_make_no_sense_are_left_out() -> None:
    past = DashboardHistory()
    nonsense: list[dict[str, Any]] = [
        {"at": 1.0, "kind": "round"},
        {"at": 1.0, "kind": "round", "members": [{}], "round": 1},
        {"at": None, "kind": "lost", "learner": "a"},
        {"at": "x", "kind": "lost", "learner": "a"},
        {"at": 1.0, "kind": "fault", "target": 7, "seconds": "long"},
        {"at": 1.0, "kind": "joined", "learner": "a" * 5000, "incarnation": 1},
        {"at": 1.0, "kind": "score", "loss": 2.0},
    ]
    past.take_events(nonsense)
    assert len(past.rounds) == 0 and "a" * 5000 not in past.lanes.names


def test_a_restarted_syncer_shows_the_past_and_no_more_of_it_than_a_bound(tmp_path: Path) -> None:
    out = RunDir.create(tmp_path / "run")
    with out.events.open("wb") as file:

        def write(event: Event) -> None:
            file.write(msgspec.json.encode(event) + b"\n")

        write({"at": 7.5, "kind": "recovered", "learner": "learner-0", "incarnation": 1})
        write({"at": 8.0, "kind": "score", "round": 0, "loss": 5.0})
        for number in range(6000):
            write(crowded_round(number, 64))
    assert out.events.stat().st_size > 2 * site.NEAR_BYTES
    dashboard = pages(out)
    assert dashboard.history._began == 7.5, "the head of the file says when it began"
    dashboard._catch_up()
    assert [dashboard.history.rounds[0][0], dashboard.history.rounds[-1][0]] == [6000 - history.ROUNDS, 5999]
    assert dashboard.history.scores.points == [[8.0, 0, 5.0]], "what is rare is found far back"


# ---- figures for Prometheus -----------------------------------------------------------------------------------------


async def test_metrics_can_be_scraped(place: ServedDashboard) -> None:
    code, text, headers = await place.get("/metrics")
    assert code == 200 and headers["Content-Type"].startswith("text/plain")
    found = {one.name: one for one in text_string_to_metric_families(text)}
    assert found["atoll_rounds"].samples[0].value == 1203
    assert found["atoll_run_info"].samples[0].labels == {"run": "first", "phase": "training"}
    assert found["atoll_dashboard_viewers"].samples[0].value == 0


def test_every_figure_is_there(status: Status) -> None:
    fates = {"computed": 10, "merged": 7, "dropped": 1, "lost": 1, "in_flight": 1}
    now = status(
        learners=8,
        fates=fates,
        versions=(4, 3),
        bytes_in=5,
        bytes_out=6,
        liveness=0.5,
        expected=8,
        alarm="full",
        rho=0.31,
        outer_step=1.04,
        outer_lr=0.6,
    )
    found = {one.name: one for one in text_string_to_metric_families(exposition(now).decode())}
    by_label = {name: {tuple(s.labels.values()): s.value for s in one.samples} for name, one in found.items()}
    assert by_label["atoll_ledger_tokens"] == {("merged",): 7, ("dropped",): 1, ("lost",): 1, ("in_flight",): 1}
    assert by_label["atoll_fragment_version"] == {("0",): 4, ("1",): 3}
    assert by_label["atoll_learners"][("gone",)] == 1 and by_label["atoll_learner_up"][("learner-3",)] == 0
    assert (found["atoll_received_bytes"].samples[0].value, found["atoll_sent_bytes"].samples[0].value) == (5, 6)
    assert by_label["atoll_dropped_tokens"] == {("overlap",): 80, ("missed",): 10, ("crash",): 11}
    assert by_label["atoll_learner_merged_share_ratio"][("learner-3",)] == pytest.approx(0.88)
    assert set(by_label["atoll_learner_low_share_alarm"].values()) == {0}
    steps = [found[f"atoll_effective_h_{which}steps"].samples[0].value for which in ("", "mean_", "p95_")]
    assert steps == [24.0, 24.31, 31.0] and found["atoll_merged_share_ratio"].samples[0].value == 0.897
    outer = ("outer_gradient_autocorrelation", "outer_step", "outer_learning_rate")
    assert [found[f"atoll_{name}"].samples[0].value for name in outer] == [0.31, 1.04, 0.6]
    assert found["atoll_liveness_ratio"].samples[0].value == 0.5 and found["atoll_alarm"].samples[0].value == 1


def test_links_and_the_narrowest_part_are_metrics(status: Status) -> None:
    usual = status(narrowest="way down of learner-1: 58 of 60 Mbit/s", carried_h=46.2, effective_h=46.0)
    usual = msgspec.structs.replace(usual, narrowest_used=7.25e6, narrowest_rate=7.5e6)
    narrow = msgspec.structs.replace(usual.learners[1], round_share=0.25, up_rate=5e6, down_rate=7.5e6)
    now = msgspec.structs.replace(usual, learners=(usual.learners[0], narrow))
    found = {one.name: one for one in text_string_to_metric_families(exposition(now).decode())}
    by_label = {name: {tuple(s.labels.values()): s.value for s in one.samples} for name, one in found.items()}
    assert by_label["atoll_narrowest_part"] == {("way down of learner-1",): 1}, "figures in a label would be new series"
    assert by_label["atoll_narrowest_used_bytes_per_second"] == {(): 7.25e6}
    assert by_label["atoll_narrowest_rate_bytes_per_second"] == {(): 7.5e6}
    assert by_label["atoll_learner_round_share_ratio"] == {("learner-0",): 1, ("learner-1",): 0.25}
    assert by_label["atoll_learner_up_bytes_per_second"] == {("learner-1",): 5e6}
    assert by_label["atoll_learner_down_bytes_per_second"] == {("learner-1",): 7.5e6}
    assert (by_label["atoll_carried_h_steps"][()], by_label["atoll_effective_h_steps"][()]) == (46.2, 46.0)
    text = exposition(status()).decode()
    assert "atoll_narrowest_part{" not in text and "\natoll_narrowest_" not in text, "nothing makes H larger"


def test_before_anybody_came_there_are_metrics_too(status: Status) -> None:
    found = {one.name for one in text_string_to_metric_families(exposition(status("waiting", 0)).decode())}
    assert "atoll_progress_ratio" in found and "atoll_goodput_ratio" not in found, "what is not known is not said"


def test_rounds_behind(status: Status) -> None:
    assert [rounds_behind(status(), held) for held in (1202, 1200, -1)] == [0, 2, 1203]


# ---- beside the syncer ----------------------------------------------------------------------------------------------


def test_the_syncer_finds_it_by_name() -> None:
    assert import_named("--pages", NAME) is pages
    with pytest.raises(ConfigError, match=r"--pages atoll.nowhere:pages is not there"):
        import_named("--pages", "atoll.nowhere:pages")


async def test_a_mistake_of_the_dashboard_is_an_alarm_and_it_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "AGAIN_S", 0.001)
    lines: list[bytes] = []
    third = asyncio.Event()

    def broken() -> RunStatus:
        if len(lines) == 2:
            third.set()
        raise ZeroDivisionError("a mistake")

    showing = asyncio.create_task(show_pages(Dashboard(tmp_path / "events.jsonl"), broken, EventLog(lines.append)))
    async with asyncio.timeout(10):
        await third.wait()
    showing.cancel()
    await asyncio.wait([showing])
    assert b'"kind":"alarm"' in lines[0] and b"the dashboard failed (ZeroDivisionError: a mistake)" in lines[0]
