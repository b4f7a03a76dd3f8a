from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.store.written import everything

from atoll.observe.plots.pictures import Lane
from atoll.observe.report import read_run, write_report
from atoll.observe.report.page import MOST_POINTS, draw_lanes, draw_losses, draw_losses_over, draw_participation, render
from atoll.observe.report.reading import find_faults, find_recoveries
from atoll.observe.summary import summarise
from atoll.observe.timeline import remove_idle_time
from atoll.protocol.errors import ConfigError
from atoll.telemetry.events import Event, versions

Say = Callable[..., Event]
SCRIPT = "<script>alert(1)</script>"
LATER = 1e12
"""A clock that shows every file to be old."""


def lay(folder: Path, events: Iterable[Event], rest: bytes = b"", summary: bool = True) -> Path:
    """A run's folder with these events."""
    folder.mkdir(exist_ok=True)
    events = list(events)
    (folder / "events.jsonl").write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in events) + rest)
    (folder / "run.toml").write_text("seed = 7\n[protocol]\nlearners = 2\n")
    if summary:
        (folder / "summary.json").write_text(json.dumps(summarise(events)))
    return folder


def page(folder: Path) -> str:
    return write_report(folder)[1].read_text()


def without_library(text: str) -> str:
    scripts = [one for one in re.findall(r"<script>.*?</script>", text, re.DOTALL) if len(one) > 1_000_000]
    assert len(scripts) == 1, "the library is in the page once"
    return text.replace(scripts[0], "")


def shown(text: str) -> str:
    """What a reader sees of it."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.DOTALL))


# ---- the page --------------------------------------------------------------------------------------------------------


def test_a_page_has_every_section_and_a_way_to_each(events: list[Event], tmp_path: Path) -> None:
    text = page(lay(tmp_path / "run", events))
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    losses = ["Loss", "Loss over steps", "Loss over tokens"]
    assert titles == ["Summary", "Timeline", *losses, "Participation", "Faults", "Ledger", "Settings", "Versions"]
    names = [title.lower().replace(" over ", "-") for title in titles]
    assert re.findall(r'<a href="#([\w-]+)">', text) == names
    assert all(f'<section id="{name}"' in text for name in names)


def test_a_page_holds_all_it_needs_and_its_figures(events: list[Event], tmp_path: Path) -> None:
    rest = without_library(page(lay(tmp_path / "run", events)))
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(", rest)
    assert "default-src 'none'" in rest
    drawn = re.findall(r'Plotly\.react\("([\w-]+)"', rest)
    losses = ["figure-loss", "figure-loss-steps", "figure-loss-tokens"]
    assert drawn == ["figure-timeline", *losses, "figure-participation"]
    assert all(f'id="{name}"' in rest for name in drawn)


def test_the_figures_are_those_of_the_summary(events: list[Event], tmp_path: Path) -> None:
    seen = re.sub(r"\s+", " ", shown(page(lay(tmp_path / "run", events))))
    for words in ("goodput 68 %", "uptime 100 %", "liveness 90 %", "participation 86 %", "effective H 4.0"):
        assert words in seen
    assert "steps a sync, of 4; mean 4.0, p95 5" in seen and "from 5.500" in seen and "2.250" in seen
    assert "bytes per token" in seen and "10.0" in seen and "longest gap" in seen and "2.0 s" in seen


def test_the_part_that_makes_h_larger_and_shares_of_the_rounds_are_on_the_page(
    events: list[Event], say: Callable[..., Event], tmp_path: Path
) -> None:
    seen = re.sub(r"\s+", " ", shown(page(lay(tmp_path / "usual", events))))
    assert "H that is carried 4.0 as was asked" in seen
    narrow = "way down of b: 58 of 60 Mbit/s"
    pace = say(4.5, "pace", h=9.0, asked=4, part="way down of b", narrowest=narrow)
    share = say(4.5, "share", learner="b", incarnation=1, share=0.25, text="b: its link is narrow")
    at = next(place for place, event in enumerate(events) if event["kind"] == "killed")
    seen = re.sub(r"\s+", " ", shown(page(lay(tmp_path / "narrow", [*events[:at], pace, share, *events[at:]]))))
    assert f"H that is carried 9.0 {narrow}" in seen
    assert "share of rounds" in seen and "88 %" in seen, "the mean of 1, 0.25 and four times 1"


def test_training_loss_and_metrics_are_on_the_page_without_a_validation_loss(
    events: list[Event], tmp_path: Path
) -> None:
    for event in events:
        if event["kind"] == "round":
            event["members"] = [{**one, "loss": 4.0 - event["round"] / 2} for one in event["members"]]
        if event["kind"] == "score":
            way = {"metrics": {"accuracy": event["round"] / 10}, "directions": {"accuracy": "max"}}
            event |= {"loss": None, "has_loss": False, **way}
    text = page(lay(tmp_path / "run", events))
    seen = re.sub(r"\s+", " ", shown(text))
    assert "training loss 0.8333 from 3.750" in seen  # the members of rounds 0 and 1, of 6 and 7
    assert "accuracy 0.7 from -0.1; best 0.7 at round 7" in seen
    assert "training, a" in without_library(text)


def test_every_token_has_its_line_in_the_ledger(events: list[Event], tmp_path: Path) -> None:
    events[-1]["fragments"] = [[4, 200], [4, 190]]
    seen = re.sub(r"\s+", " ", shown(page(lay(tmp_path / "run", events))))
    assert "merged 195 81.2 %" in seen and "dropped 20 8.3 %" in seen and "lost 25 10.4 %" in seen
    assert "computed 240 100.0 %" in seen
    assert "390 merged of 480 computed (2 fragments × tokens), 81.2 %" in seen


def test_the_settings_are_shown_as_they_lie_there(events: list[Event], tmp_path: Path) -> None:
    assert "seed = 7\n[protocol]\nlearners = 2" in page(lay(tmp_path / "run", events))


def test_versions_are_the_runs_own_where_it_wrote_them_down(events: list[Event], tmp_path: Path) -> None:
    assert "The run did not write them down" in page(lay(tmp_path / "run", events))
    events[0]["versions"] = {"python": "3.99.1", "torch": "9.8.7"}
    text = page(lay(tmp_path / "run", events))
    assert "3.99.1" in text and "9.8.7" in text and "did not write them down" not in text


def test_versions_name_python_torch_and_the_platform() -> None:
    assert {"python", "atoll", "torch", "numpy", "platform"} <= versions().keys()


def test_what_a_run_says_cannot_become_part_of_the_page(events: list[Event], tmp_path: Path) -> None:
    for event in events:
        event["text"] = SCRIPT
        if event["kind"] == "score":
            event["sample"] = SCRIPT
        for key in ("learner", "process"):
            if event.get(key) == "b":
                event[key] = SCRIPT
        for member in event.get("members", ()):
            member["learner"] = SCRIPT if member["learner"] == "b" else member["learner"]
    folder = lay(tmp_path / "run", events)
    (folder / "run.toml").write_text(f'script = ["{SCRIPT}"]\n')
    rest = without_library(page(folder))
    assert "alert(1)" in rest and SCRIPT not in rest


def test_a_report_changes_nothing_else_of_the_run(events: list[Event], tmp_path: Path) -> None:
    folder = lay(tmp_path / "run", events)
    before = everything(folder)
    write_report(folder)
    assert {name: data for name, data in everything(folder).items() if "report.html" not in str(name)} == before
    write_report(folder, tmp_path / "other.html")
    assert (tmp_path / "other.html").read_bytes() == (folder / "report.html").read_bytes()


# ---- runs that are not whole -----------------------------------------------------------------------------------------


def test_a_run_that_was_cut_off_says_so_first_and_what_is_missing(events: list[Event], tmp_path: Path) -> None:
    cut = [event for event in events if event["at"] <= 1010.0]
    folder = lay(tmp_path / "run", cut, rest=b'{"at": 1010.5, "kind": "rou', summary=False)
    run = read_run(folder, now=LATER)
    assert run.state == "cut off"
    assert any("torn" in one for one in run.missing) and any("Bytes per token" in one for one in run.missing)
    assert run.summary["goodput"] is None, "nobody said how long those were stepping that were there at the end"
    text = page(folder)
    assert text.index("This run has not ended") < text.index("<nav>")


def test_a_run_whose_syncer_was_just_heard_of_is_going_on(events: list[Event], tmp_path: Path) -> None:
    folder = lay(tmp_path / "run", events[:-1], rest=b'{"at": 1010.5, "kind": "rou', summary=False)
    heard = (folder / "events.jsonl").stat().st_mtime
    run = read_run(folder, now=heard + 1.0)
    assert run.state == "going on"
    assert not any("torn" in one for one in run.missing), "its last line is only under way"
    assert read_run(folder, now=heard + 60.0).state == "cut off"


def test_a_run_that_was_gone_on_with_after_its_end_has_not_ended(events: list[Event], say: Say, tmp_path: Path) -> None:
    again = [*events, say(20, "started", process="syncer"), say(21, "reigned", run="small", term=2, round=7)]
    assert read_run(lay(tmp_path / "run", again), now=LATER).state == "cut off"
    assert read_run(lay(tmp_path / "run", events), now=LATER).state == "ended"


@pytest.mark.parametrize("rest", [b"", b"\xff\xfe\n", b"[1, 2]\n", b'{"kind": "score"}\n', b'{"a": "\xff"}\n', b"{"])
def test_a_run_that_said_nothing_yet_has_a_report(tmp_path: Path, rest: bytes) -> None:
    seen = shown(page(lay(tmp_path / "run", [], rest, summary=False)))
    assert "has not ended" in seen and "No round was committed" in seen
    assert ("torn" in seen) == rest.endswith(b"\n"), "it is going on: what has no end yet may be under way"


def test_a_baseline_without_a_syncer_is_told_from_its_summary(say: Say, tmp_path: Path) -> None:
    told = [say(at, "validation", step=at, validation_loss=5.0 - at, tokens=10) for at in (0, 1, 2)]
    folder = lay(tmp_path / "run", told, summary=False)
    fates = {"computed": 30, "merged": 30, "dropped": 0, "lost": 0, "in_flight": 0}
    document = {"algorithm": "data-parallel", "rounds": 3, "learners": 2, "tokens": fates, "wall_s": 2.0}
    (folder / "summary.json").write_text(json.dumps(document | {"validation_loss_end": 3.0}))
    run = read_run(folder, now=LATER)
    assert run.state == "ended" and run.summary["rounds"] == 3 and run.summary["per_learner"] == {}
    assert draw_losses(run).trails[0].points == ((0.0, 5.0), (1.0, 4.0), (2.0, 3.0))
    assert "30" in shown(page(folder))


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: (folder / "run").mkdir()])
def test_a_folder_that_holds_no_run_is_one_line(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path)
    with pytest.raises(ConfigError, match="holds no run: name the folder that --out made"):
        read_run(tmp_path / "run")


def test_a_page_that_cannot_be_written_is_one_line(events: list[Event], tmp_path: Path) -> None:
    folder = lay(tmp_path / "run", events)
    with pytest.raises(ConfigError, match="is a folder: name a file in it"):
        write_report(folder, tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(folder, tmp_path / "none" / "such.html")


# ---- the pictures ----------------------------------------------------------------------------------------------------


def spans(lane: Lane) -> list[tuple[str, float, float]]:
    return [(one.kind, round(one.start_s, 3), round(one.end_s, 3)) for one in lane.stretches]


def test_a_lane_shows_what_a_learner_did(events: list[Event], tmp_path: Path) -> None:
    a, b = draw_lanes(read_run(lay(tmp_path / "run", events))).lanes
    assert spans(a) == [("training", 0.0, 11.0)], "what was before the first parameters is left out"
    assert spans(b) == [
        ("joining", 0.0, 1.0),
        ("training", 1.0, 4.0),
        ("away", 4.0, 5.0),
        ("restarting", 5.0, 6.0),
        ("joining", 6.0, 6.5),
        ("training", 6.5, 11.0),
    ]
    marks = [(mark.name, round(mark.at_s, 3), mark.good) for mark in b.marks]
    assert marks == [("killed", 4.0, False), ("restarted", 5.0, True), ("refused", 7.5, False)]


@pytest.mark.parametrize(
    ("abandon_s", "ended", "lane"),
    [
        (300.0, "lost", [("away", 4.0, 10.0)]),
        (2.0, "lost", [("away", 4.0, 6.0), ("gone", 6.0, 10.0)]),
        (300.0, "left", [("gone", 4.0, 10.0)]),
    ],
)
def test_a_learner_that_never_came_back_is_away_until_it_is_given_up(
    events: list[Event], tmp_path: Path, abandon_s: float, ended: str, lane: list[tuple[str, float, float]]
) -> None:
    """The words of docs/look.md: one that may come back with its steps was called gone."""
    for event in events:
        if "settings" in event:
            event["settings"] = {**event["settings"], "abandon_s": abandon_s}
    dead = [e for e in events if e.get("incarnation") != 2 and e["kind"] != "restarted"]
    for event in dead:
        event["members"] = [m for m in event.get("members", ()) if m["incarnation"] != 2]
    [at] = [index for index, e in enumerate(dead) if e["kind"] == "killed"]
    dead.insert(at, {**dead[at], "kind": ended, "learner": "b", "incarnation": 1})
    _, b = draw_lanes(read_run(lay(tmp_path / "run", dead))).lanes
    assert [one for one in spans(b) if one[1] >= 4.0] == lane
    page = (Path(__file__).parents[2] / "docs" / "look.md").read_text().partition("## States")[2].partition("## ")[0]
    words = {line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")}
    assert {kind for kind, _, _ in spans(b)} <= words


def test_losses_begin_with_the_score_of_before_the_first_step(events: list[Event], tmp_path: Path) -> None:
    run = read_run(lay(tmp_path / "run", events))
    (trail,) = draw_losses(run).trails
    assert trail.points == ((0.0, 5.5), (10.5, 2.25))


def test_learners_losses_are_drawn_where_rounds_tell_them(events: list[Event], tmp_path: Path) -> None:
    for event in events:
        for member in event.get("members", ()):
            member["loss"] = 1.0 + member["t"]
    names = [trail.name for trail in draw_losses(read_run(lay(tmp_path / "run", events))).trails]
    assert names == ["validation, global model", "training, a", "training, b"]


def test_losses_are_drawn_over_steps_and_tokens_too(events: list[Event], tmp_path: Path) -> None:
    merged = 0
    for number, event in enumerate(one for one in events if one["kind"] == "round"):
        event["step"] = 2.0 * number
        event["members"][0]["loss"] = 3.0
        merged += sum(member["tokens"] for member in event["members"])
    run = read_run(lay(tmp_path / "run", events))
    steps, tokens = draw_losses_over(run, "steps"), draw_losses_over(run, "tokens")
    assert (steps.x_label, tokens.x_label) == ("the run's steps", "tokens merged")
    assert [at for at, _ in steps.trails[0].points] == [0.0, 12.0], "a score stands at the newest round before it"
    fragments = int(run.summary["settings"].get("fragments") or 0) or 1
    assert tokens.trails[0].points[0][0] == 0.0 and tokens.trails[0].points[-1][0] == merged / fragments
    page = render(run).decode()
    assert 'id="loss-steps"' in page and 'id="loss-tokens"' in page and "tokens merged" in page


def test_participation_is_members_of_live_and_live_of_all(events: list[Event], tmp_path: Path) -> None:
    members, live = draw_participation(read_run(lay(tmp_path / "run", events))).trails
    assert [value for _, value in members.points] == [1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 0.5]
    assert [value for _, value in live.points] == [1.0, 0.5, 1.0, 1.0]


def test_many_rounds_become_few_points(events: list[Event], tmp_path: Path) -> None:
    one = next(event for event in events if event["kind"] == "round")
    many = [*events, *({**one, "at": 1014.0 + number} for number in range(10 * MOST_POINTS))]
    members = draw_participation(read_run(lay(tmp_path / "run", many))).trails[0]
    assert MOST_POINTS // 2 < len(members.points) <= MOST_POINTS
    assert "mean of 11 rounds" in members.name


# ---- faults ----------------------------------------------------------------------------------------------------------


def told(timeline: Iterable[Event]) -> list[tuple[str, tuple[str, ...], float | None]]:
    return [(one.kind, one.whom, one.seconds and round(one.seconds, 3)) for one in find_faults(list(timeline))]


def test_one_death_is_one_fault_however_often_it_is_told(events: list[Event]) -> None:
    assert told(events) == [("killed", ("b",), 3.0), ("refused", ("b",), 0.5)]


def test_a_fault_takes_as_long_as_the_summary_says(events: list[Event]) -> None:
    timeline = remove_idle_time(events)
    recovery = [entry["seconds"] for entry in summarise(timeline)["recovery"] if entry["after"] == "killed"]
    assert [seconds for kind, _, seconds in told(timeline) if kind == "killed"] == recovery


def test_a_move_back_to_a_relay_is_no_fault(say: Say) -> None:
    assert not told([say(1.0, "lost", learner="a", incarnation=1, moved=True, text="a moves back to its relay")])


def test_a_process_that_ends_well_is_no_fault(say: Say) -> None:
    unjoined = say(1, "exited", process="c", code=143, unjoined=True)
    assert told([say(1, "exited", process="a", code=0), unjoined, say(2, "exited", process="b", code=1)]) == [
        ("exited", ("b",), None)
    ]


def round_of(say: Say, at: float, *learners: str, **fields: Any) -> Event:
    return say(at, "round", members=[{"learner": name} for name in learners], **fields)


def test_an_injected_fault_lasts_until_everybody_it_hit_is_back(say: Say) -> None:
    timeline = [
        say(1, "fault", number=3, what="partition", targets=["a", "b"], target="a", seconds=2.0),
        round_of(say, 1.5, "a", "b"),
        say(2, "lost", learner="b", incarnation=1),
        say(3, "mended", number=3),
        round_of(say, 4, "a"),
        say(5, "joined", learner="b", incarnation=1),
        round_of(say, 6, "a", "b"),
    ]
    assert told(timeline) == [("partition", ("a", "b"), 5.0)], "what it brought about is no fault of its own"
    ((event, whom),) = find_recoveries(timeline)
    assert event["kind"] == "mended" and whom == ("a", "b")


def test_a_round_that_does_not_name_all_its_members_leaves_open_who_was_in_it(say: Say) -> None:
    """It names those of a new life, so only who goes on with the same life may be in it without being named."""
    paused = say(1, "fault", number=3, what="pause", targets=["a"], target="a", seconds=1.0)
    open_, told_all = round_of(say, 3, of=99), round_of(say, 5, "b")
    assert told([paused, open_, round_of(say, 6, "a")]) == [("pause", ("a",), 5.0)]
    assert told([paused, open_]) == [("pause", ("a",), 2.0)], "it was not gone to the end, as far as is known"
    assert told([paused, open_, told_all]) == [("pause", ("a",), None)]
    killed = [say(1, "killed", process="a", learner="a"), say(2, "joined", learner="a", incarnation=2)]
    assert told([*killed, open_]) == [("killed", ("a",), None)]


def test_where_the_syncer_was_hit_any_round_will_do(say: Say) -> None:
    timeline = [
        say(1, "fault", number=1, what="syncer-kill", targets=[], target="", seconds=0.0),
        say(2, "mended", number=1),
        round_of(say, 4, "a"),
    ]
    assert told(timeline) == [("syncer-kill", (), 3.0)]
