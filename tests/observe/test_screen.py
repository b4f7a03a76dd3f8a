from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from atoll.observe.screen import LiveScreen, PlainLines, choose_screen
from atoll.observe.story import print_closing, story
from atoll.observe.summary import summarise
from atoll.observe.tail import status_line
from atoll.protocol.statistics import format_score
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus

Status = Callable[..., RunStatus]


def console(width: int = 80, height: int = 40, terminal: bool = True) -> Console:
    environ = {"TERM": "xterm-256color"}
    return Console(file=io.StringIO(), width=width, height=height, force_terminal=terminal, _environ=environ)


def text_of(screen: LiveScreen, width: int) -> str:
    paper = Console(file=io.StringIO(), width=width, height=40)
    paper.print(screen.render())
    assert isinstance(paper.file, io.StringIO)
    return paper.file.getvalue()


def written(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("phase", ["waiting", "training", "ending", "finished"])
@pytest.mark.parametrize(
    "learners", [0, pytest.param(1, marks=pytest.mark.faults), 4, pytest.param(8, marks=pytest.mark.faults)]
)
@pytest.mark.parametrize("loss", [None, float("nan")])
def test_it_renders_in_every_state(
    status: Status, notes: list[Event], width: int, phase: str, learners: int, loss: float | None
) -> None:
    screen = LiveScreen(console(width))
    with screen:
        screen.update(status(phase, learners, loss), notes)
    shown = text_of(screen, width)
    assert phase in shown
    assert all(len(line) <= min(width, 120) for line in shown.splitlines())


@pytest.mark.parametrize("width", [80, 120])
def test_it_shows_what_the_run_is_about(status: Status, notes: list[Event], width: int) -> None:
    screen = LiveScreen(console(width))
    screen.update(status(learners=8), notes)
    shown = text_of(screen, width)
    for words in (
        *("first", "63 %", "1:04 elapsed", "0:38 left", "1,203 · step 1,203", "93 %", "97 %", "24.0 (set 24)"),
        *("12 ms · quorum 1", "1.83", "9.9M · 84.1k/s", "every live learner reported", "2: learner-0 and learner-1"),
        *("learner-7", "learner-2 #2", "quarantined", "gone", "joining", "stalled", "muted", "stopped", "tokens/s"),
        *("0:40  killed", "0:46  recovered", "1:00  score", "✓"),
    ):
        assert words in shown, words


def test_a_run_that_was_gone_on_with_does_not_say_that_no_time_is_gone(status: Status) -> None:
    screen = LiveScreen(console(100))
    screen.update(status(term=2, elapsed_s=0.2, left_s=None, progress=0.6))
    shown = text_of(screen, 100)
    assert "60 % · 0:00 since it went on in term 2 · time left not known yet" in shown and "elapsed" not in shown


def test_nothing_is_cut_off_at_80_columns(status: Status) -> None:
    screen = LiveScreen(console(80))
    screen.update(status(learners=8, loss=10.1234, round=123_456, validation_round=123_450, quorum=8))
    assert "…" not in text_of(screen, 80)


@pytest.mark.parametrize("loss", [0.8341, 0.08341, 0.000834, 123_456.0, -0.0834])
@pytest.mark.parametrize("width", [60, 70, 80, 100])
def test_a_figure_is_never_cut(status: Status, loss: float, width: int) -> None:
    """0.08… says nothing: names are cut, or columns left out."""
    now = status(learners=2)
    names = ("learner-10", "a-very-long-name-of-a-learner-on-another-machine")
    learners = [
        msgspec.structs.replace(one, learner=name, loss=loss) for one, name in zip(now.learners, names, strict=True)
    ]
    screen = LiveScreen(console(width))
    screen.update(msgspec.structs.replace(now, learners=tuple(learners)))
    shown = text_of(screen, width)
    assert shown.count(format_score(loss)) == 2, shown
    row = next(line for line in shown.splitlines() if line.lstrip().startswith("a-very"))
    assert "…" in row and row.count("…") == 1
    assert "adopted" in shown or width < 80 or loss != 0.8341


def test_a_learner_that_is_away_says_why(status: Status) -> None:
    now = status(learners=3)
    states = ("gone", "restarting", "done")
    learners = [msgspec.structs.replace(one, state=state) for one, state in zip(now.learners, states, strict=True)]
    screen = LiveScreen(console(80))
    now = msgspec.structs.replace(now, learners=tuple(learners), members=("learner-0",), expected=2, left_s=None)
    screen.update(now)
    for words in ("○ gone", "◌ restarting", "✓ done", "· training · 0 of 2 learners here", "nobody makes steps now"):
        assert words in text_of(screen, 80)
    assert " · 0 of 2 learners here · " in status_line(now) and status_line(now).endswith(" · left –")


def test_without_a_budget_nothing_is_said_of_its_share_or_of_the_time_left(status: Status) -> None:
    now = status(budgeted=False, progress=0.0, left_s=None)
    screen = LiveScreen(console(80))
    screen.update(now)
    shown = text_of(screen, 80)
    assert "1:04 elapsed · no budget: it trains until its scripts end" in shown and "…" not in shown
    assert " 0 %" not in shown and "not known" not in shown
    assert status_line(now).startswith("   1:04  round 1,203 · ") and "left" not in status_line(now)


def test_the_screen_says_when_nothing_was_merged_in_many_rounds(status: Status) -> None:
    """It showed "round 123", and the summary "rounds 4"."""
    screen = LiveScreen(console(80))
    screen.update(status(round=123, rounds_merged=4))
    assert re.search("committed +4 of 123 rounds; nothing was merged in the others", text_of(screen, 80))
    screen.update(status(round=4, rounds_merged=4))
    assert "rounds;" not in text_of(screen, 80)


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24)])
def test_an_alarm_stays_in_sight_between_hundreds_of_refusals(
    status: Status, say: Callable[..., Event], width: int, height: int
) -> None:
    events = [say(0, "recovered", learner="learner-0", text="learner-0 may contribute")]
    for place in range(200):
        about = {"learner": f"learner-{place % 2}", "incarnation": place}
        events += [say(place / 10, kind, text=f"{about['learner']} {kind}", **about) for kind in STORM]
        if place == 20:
            events.append(say(2, "alarm", over=False, text="the numbers of every learner are not finite"))
    screen = LiveScreen(console(width, height))
    screen.update(status(learners=2), events)
    lines = [line for line in text_of(screen, width).splitlines() if re.match(r" +\d:\d\d  ", line)]
    assert [line.split()[1] for line in lines] == ["recovered", "refused", "quarantined", "fresh", "alarm"]
    assert "refused 200 of learner-0 and learner-1 since 0:00; the last:" in " ".join(lines[1].split())
    assert lines[1].lstrip().startswith("0:20 "), "the time of the newest"


STORM = ("refused", "quarantined", "fresh", "recovered")


def test_what_comes_much_later_has_a_line_of_its_own(status: Status, say: Callable[..., Event]) -> None:
    screen = LiveScreen(console(100))
    deaths = [say(at, "exited", process="learner-0", code=1, text=f"died at {at}") for at in (0, 1, 2, 900)]
    screen.update(status(learners=2), [say(0, "recovered", text="a"), *deaths])
    shown = text_of(screen, 100)
    assert "3 of learner-0 since 0:00; the last: died at 2" in shown and re.search(r"died at 900\s*$", shown)


def test_what_became_of_the_work_is_plain(status: Status) -> None:
    screen = LiveScreen(console(80))
    screen.update(status(rho=0.31, outer_step=1.04, outer_lr=0.6))
    shown = " ".join(text_of(screen, 80).split())
    for words in (
        "outer step 1.04 (η 0.6) · ρ of merged gradients 0.31",
        "merged share 90 %",
        "participation 97 %",
        "steps a sync median 24.0 · mean 24.3 · p95 31",
        "not merged 8 % by overlap · 1 % in missed rounds · 1 % lost",
    ):
        assert words in shown, words
    row = next(line for line in text_of(screen, 80).splitlines() if "learner-3" in line and "training" in line)
    assert "88 %" in row


def test_a_data_parallel_run_shows_no_figures_of_merges(status: Status) -> None:
    merges = ("effective H", "steps a sync", "rounds under way", "outer step")
    now = msgspec.structs.replace(status(), effective_h=20.0, effective_h_mean=20.0, overlap_steps=1.0, outer_step=0.5)
    for processes in (0, 4):
        screen = LiveScreen(console())
        screen.update(msgspec.structs.replace(now, data_parallel=processes))
        shown = text_of(screen, 80)
        assert [label in shown for label in merges] == [not processes] * 4, shown


def test_a_larger_h_comes_with_the_part_that_makes_it_and_what_would_hold_it(status: Status) -> None:
    narrow = "way down of site-2: 58 of 60 Mbit/s"
    advice = "H is 46.2 instead of 24; version_codec = bf16 would hold H = 24"
    screen = LiveScreen(console(80))
    now = status(effective_h=46.0, carried_h=46.2, narrowest=narrow, shortage=f"{narrow}: {advice}", overlap_steps=4.0)
    screen.update(now)
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", text_of(screen, 80)).split())
    for words in ("effective H 46.0 (set 24)", f"narrowest {narrow}", f"behind {advice}", "overlap 4.0 steps"):
        assert words in shown, words
    assert shown.count(narrow) == 1 and f"H 46.0/24 ({narrow})" in status_line(now)
    assert "Mbit/s" not in status_line(status())


def test_learners_with_a_share_of_the_rounds_are_named_with_their_narrow_way(status: Status) -> None:
    now = status(learners=6)
    share = {"round_share": 0.25, "narrower_way": "way down 15 Mbit/s"}
    some = [msgspec.structs.replace(one, **share) if place else one for place, one in enumerate(now.learners)]
    screen = LiveScreen(console(80))
    screen.update(msgspec.structs.replace(now, learners=tuple(some)))
    shown = text_of(screen, 80)
    assert "learner-1 takes part in 25 % of the rounds: way down 15 Mbit/s" in shown
    assert "learner-0 takes part" not in shown and "learner-3 takes part" not in shown, (
        "a learner that is gone has none"
    )
    screen.update(msgspec.structs.replace(now, learners=tuple(some * 3)))
    assert "8 more take part in a share of the rounds" in text_of(screen, 80)


@pytest.mark.parametrize("kind", ["pace", "share"])
def test_changes_of_pace_and_shares_are_notable(status: Status, say: Callable[..., Event], kind: str) -> None:
    screen = LiveScreen(console(80))
    screen.update(status(), [say(5, kind, share=0.25, learner="b", text="said once")])
    assert f"{kind}" in text_of(screen, 80) and "said once" in text_of(screen, 80)


def test_the_phase_of_training_is_shown_and_which_h_those_before_got(status: Status) -> None:
    screen = LiveScreen(console(80))
    screen.update(status(training_phase=2, training_phases=3, phase_until=0.4, earlier_h=((2, 7.0),)))
    assert "phase 2 of 3, until 40 % · before: H 2 got 7.0" in " ".join(text_of(screen, 80).split())
    screen.update(status())
    assert "before" not in text_of(screen, 80)


def test_a_learner_whose_work_is_thrown_away_is_an_alarm(status: Status) -> None:
    screen, now = LiveScreen(console(80, height=24)), status(learners=8)
    told = "only 31 % of learner-3's last work was merged, 91 % of the others'"
    learners = tuple(
        msgspec.structs.replace(one, alarm=told if one.learner == "learner-3" else "") for one in now.learners
    )
    screen.update(msgspec.structs.replace(now, learners=learners))
    shown = text_of(screen, 80).splitlines()
    assert sum(f"ALARM: {told}" in line for line in shown) == 1 and len(shown) <= 23


def test_it_is_never_higher_than_the_terminal(status: Status, notes: list[Event]) -> None:
    screen = LiveScreen(console(80, height=24))
    screen.update(status(learners=8), notes)
    assert len(text_of(screen, 80).splitlines()) <= 23


def test_the_last_screen_shows_the_last_score(status: Status, say: Callable[..., Event]) -> None:
    screen = LiveScreen(console(100))
    screen.update(status("finished", validation_loss=0.272, validation_round=401, metrics={"accuracy": 0.5}))
    screen.update(None, [say(60, "score", round=444, loss=0.125, metrics={"accuracy": 0.75}, text="the last")])
    shown = text_of(screen, 100)
    assert re.search(r"0\.125 .* at 444", shown) and "accuracy 0.75" in shown and "at 401" not in shown
    screen.update(status("finished", validation_loss=0.3, validation_round=401))
    assert "at 444" in text_of(screen, 100), "a status that comes late does not know it"


ADVICE = "learner-1 has made no step yet; does its script call learner.step() after every optimizer step? See the log"


@pytest.mark.parametrize("width", [80, 100])
def test_the_newest_events_are_wrapped_where_rows_are_empty(
    status: Status, say: Callable[..., Event], width: int
) -> None:
    screen = LiveScreen(console(width, 30))
    screen.update(
        status(learners=2), [say(0, "recovered", text="a"), *(say(n, "stalled", text=ADVICE) for n in (1, 2))]
    )
    shown = text_of(screen, width)
    assert " ".join(shown.split()).count(ADVICE) == 2 and "…" not in shown
    assert len(shown.splitlines()) <= 29


def test_events_are_cut_where_no_row_is_empty_and_the_newest_last(status: Status, say: Callable[..., Event]) -> None:
    screen = LiveScreen(console(100, 99))
    screen.update(status(learners=2))
    rows = len(text_of(screen, 100).splitlines())
    screen = LiveScreen(console(100, rows + 4))
    screen.update(status(learners=2), [say(n, "stalled", text=f"{n} {ADVICE}") for n in (1, 2)])
    *_, older, newer, rest = text_of(screen, 100).rstrip().splitlines()
    assert older.endswith("…") and "1 learner-1" in older
    assert "2 learner-1" in newer and rest.endswith("See the log")


def test_before_the_syncer_answers_it_says_so_and_then_keeps_what_it_knew(status: Status) -> None:
    screen = LiveScreen(console())
    screen.update(None)
    assert "starting the syncer" in text_of(screen, 80)
    screen.update(status())
    screen.update(None)
    assert "1,203" in text_of(screen, 80)


def test_validation_losses_become_a_sparkline(status: Status) -> None:
    screen = LiveScreen(console())
    for number, loss in enumerate((5.0, 3.0, 3.0, 1.0)):
        screen.update(status(validation_loss=loss, validation_round=number))
        screen.update(status(validation_loss=loss, validation_round=number))
    assert "1.00 █▅▅▁ at 3" in text_of(screen, 80)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "not scored yet"),
        ({"term": 2, "evaluator": True}, "not scored again yet"),
        ({"term": 2}, "no evaluator"),
        ({"evaluator": False}, "no evaluator"),
        ({"scorer": False}, "no scorer"),
        ({"scorer": False, "metrics": {"accuracy": 0.9}}, "–"),
    ],
)
def test_without_a_score_the_screen_says_whether_one_will_come(
    status: Status, changes: dict[str, Any], told: str
) -> None:
    screen = LiveScreen(console())
    screen.update(status(validation_loss=None, validation_round=None, **changes))
    assert re.search(f"validation +{told}", text_of(screen, 120))


def test_metrics_stand_under_their_own_names(status: Status) -> None:
    screen, lines = LiveScreen(console()), PlainLines(out := console(terminal=False))
    now = status(metrics={"accuracy": 0.9125, "re\x1bcall": None})
    screen.update(now)
    lines.update(now)
    assert "accuracy 0.9125 · re·call –" in text_of(screen, 80)
    assert "accuracy 0.9125 · re·call –" in written(out)


def test_text_from_a_peer_cannot_draw_on_the_terminal(status: Status, notes: list[Event]) -> None:
    out = console()
    screen = LiveScreen(out)
    screen.update(status(reason="\x1b[2Jgone", run="\x1b]0;x"), notes)
    assert "\x1b[2J" not in written(out) and "\x1b]0" not in written(out)
    assert "·[31m[bold]x" in text_of(screen, 80)


def test_it_says_what_the_operator_should_see_to(status: Status) -> None:
    screen = LiveScreen(console())
    screen.update(status())
    assert "certificate" not in text_of(screen, 80)
    screen.update(status(notice="the syncer's certificate ends in 5 days: renew it"))
    assert "the syncer's certificate ends in 5 days: renew it" in text_of(screen, 80)


def test_a_synchronous_run_has_no_grace(status: Status) -> None:
    screen = LiveScreen(console())
    screen.update(status(synchronous=True))
    assert "waits for all live" in text_of(screen, 80)


def test_plain_lines_come_every_few_seconds_and_events_at_once(status: Status, notes: list[Event]) -> None:
    out = console(terminal=False)
    now = 0.0
    with PlainLines(out, every_s=5.0, now=lambda: now) as lines:
        lines.update(None)
        lines.update(status("waiting"))
        lines.update(status(), notes[:2])
        now = 5.0
        lines.update(status())
    assert written(out).splitlines() == [
        "      –  waiting for the first parameters, 4 learners here",
        "   0:00  recovered   learner-0 has the run's parameters after 0.4 s",
        "   1:04   63 %  round 1,203 · 4 of 4 learners here · H 24.0/24 · goodput 93 % · merged 90 % · "
        "84.1k tokens/s · validation 1.83 · left 0:38",
    ]


def test_a_plain_line_of_a_run_that_starts_says_what_it_waits_for(status: Status) -> None:
    early = msgspec.structs.replace(
        status("waiting"), learners=status().learners[:1], notice="Waiting for 3 more of 4 learners."
    )
    told = "waiting for the first parameters, 1 learner here · Waiting for 3 more of 4 learners."
    assert status_line(early).strip() == f"–  {told}"


def test_a_learner_that_joins_shows_how_much_of_the_parameters_it_has(status: Status) -> None:
    notice = "Training begins once the learners hold version 0. learner-0 fetches the run's parameters: 34 of 80 MB."
    early = status("waiting", learners=2, versions=(0, 0), notice=notice)
    fetches = msgspec.structs.replace(early.learners[0], whole_bytes=80_000_000, lacking_bytes=46_000_000)
    early = msgspec.structs.replace(early, learners=(fetches, early.learners[1]))
    screen = LiveScreen(console())
    screen.update(early)
    shown = text_of(screen, 120)
    assert "joining 42%" in shown and "34 of 80 MB" in shown and "waiting for all learners to hold version 0" in shown
    assert "waiting for all learners to hold version 0, 2 learners here" in status_line(early)


def test_the_screen_is_for_terminals_only() -> None:
    assert isinstance(choose_screen(console(terminal=True)), LiveScreen)
    assert isinstance(choose_screen(console(terminal=False)), PlainLines)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("terminal", [True, False])
def test_the_closing_has_figures_story_sample_and_place(events: list[Event], width: int, terminal: bool) -> None:
    out = console(width, terminal=terminal)
    summary = summarise(events)
    print_closing(out, summary, story(summary, events), "def main():\n\treturn \x1b[31m1", Path("atoll-runs/first"))
    for words in ("goodput", "68 %", "5.50 → 2.25", "what the trained model writes", "def main():", "atoll-runs/first"):
        assert words in written(out), words
    assert "\x1b[31m1" not in written(out)


def test_the_closing_names_the_files_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "events.jsonl").touch()
    out = console(200, terminal=False)
    print_closing(out, summarise([]), [], out=tmp_path)
    assert f"All of it is in {tmp_path}: events.jsonl. On one page:\n  atoll report {tmp_path}\n" in written(out)
    (tmp_path / "logs" / "syncer.log").touch()
    (tmp_path / "model.safetensors").touch()
    print_closing(out, summarise([]), [], out=tmp_path)
    assert "events.jsonl, model.safetensors (what is merged), logs/. On one page:\n" in written(out)


def test_the_closing_says_how_much_was_made_where_the_scripts_ended_first(tmp_path: Path) -> None:
    out = console(200, terminal=False)
    print_closing(out, summarise([]), [], out=tmp_path, unspent="step 44 of 1,000")
    *_, warning, command = written(out).splitlines()
    assert warning.startswith("Warning: the scripts ended first, at step 44 of 1,000. ")
    assert warning.endswith(" It goes on with:") and command == f"  atoll train --resume {tmp_path}"
    print_closing(out := console(200), summarise([]), [], out=tmp_path)
    assert "It goes on with" not in written(out)


def test_the_closing_of_a_run_that_compare_ended_blames_no_script(tmp_path: Path) -> None:
    summary = summarise([]) | {"reason": "its scores cannot be compared"}
    print_closing(out := console(200, terminal=False), summary, [], out=tmp_path, unspent="step 4 of 400")
    assert "It stopped at step 4 of 400. It goes on with:" in written(out) and "learner.done" not in written(out)


def test_the_closing_of_an_interrupted_run_says_how_far_it_came(tmp_path: Path) -> None:
    """The run's step, apart from the steps that the learners made together."""
    summary = summarise([]) | {"reason": "the operator asked for it"}
    print_closing(out := console(200, terminal=False), summary, [], out=tmp_path, unspent="step 293 of 400")
    assert "It stopped at step 293 of 400. It goes on with:\n  atoll train --resume " in written(out)
    assert "steps, sum" in written(out)
    print_closing(out := console(200, terminal=False), summary, [], out=tmp_path)
    assert "\nIt goes on with:\n" in written(out), "without a budget"


def test_a_command_of_the_closing_is_never_broken() -> None:
    path = Path("atoll-runs") / "a-name-that-is-rather-long"
    print_closing(out := console(44), summarise([]) | {"reason": "the operator asked for it"}, [], out=path)
    lines = written(out).splitlines()
    assert f"  atoll report {path}" in lines and f"  atoll train --resume {path}" in lines


def test_the_closing_of_a_run_of_nothing() -> None:
    out = console()
    print_closing(out, summarise([]), story(summarise([])))
    assert "the run, 0 ms" in written(out)


def test_both_say_where_the_dashboard_is(status: Status) -> None:
    screen = LiveScreen(console(100))
    screen.show_link("http://127.0.0.1:7077/")
    screen.update(status())
    assert "dashboard: http://127.0.0.1:7077/" in text_of(screen, 100)
    lines = PlainLines(console(terminal=False))
    lines.show_link("http://127.0.0.1:7077/")
    assert written(lines._console) == "dashboard: http://127.0.0.1:7077/\n"
