"""Real runs with accidents: what the dashboard shows of them in a real browser, and the same runs from their tapes."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.system.conftest import SCRIPTS, Event, Run, browser_page, members

from atoll.launch.replay.recording import read_recording
from atoll.protocol.records import Absence, DrawnRecord, GoneRecord, MergedRecord
from atoll.store.disk import LocalDisk
from atoll.store.journal import read, read_tape
from atoll.store.verify import verify_run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

LINE = (SCRIPTS / "line.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--learners", "2")
WAIT_MS = 120_000
GONE = "#rows tr[data-learner=learner-1][data-state=away]"
BACK = "#rows tr[data-learner=learner-1][data-state=training]"
ALL_STEPPING = "#rows:has(tr:nth-child(2)):not(:has(tr:not([data-state=training])))"


def kill(run: Run, process: str) -> None:
    os.kill(run.pid(process), signal.SIGKILL)


def is_back(events: list[Event]) -> bool:
    return ("learner-1", 2) in members(events)


def reigned(events: list[Event]) -> bool:
    return any(event["kind"] == "reigned" for event in events)


@pytest.fixture
def page() -> Iterator[Page]:
    with browser_page(viewport={"width": 1300, "height": 1000}, color_scheme="dark") as page:
        page.set_default_timeout(WAIT_MS)
        yield page


def test_a_killed_learner_turns_red_says_away_and_returns(page: Page, run: Run, tmp_path: Path) -> None:
    run.train(*LINE, "--set", "port=0")
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if "Content Security Policy" in line.text else None)
    address = run.address()
    assert page.goto(f"{address}/").status == 401, "without a link nobody looks on"
    page.goto(run.command("dashboard", run.out).stdout.strip())
    page.wait_for_selector("body[data-connection=live]")
    page.wait_for_selector(ALL_STEPPING, state="attached")
    page.wait_for_selector("#loss .main-svg", state="attached")
    page.get_by_text("Learners as a table").click()
    page.screenshot(path=tmp_path / "before.png", full_page=True)

    kill(run, "learner-1")
    page.wait_for_selector(GONE)
    red = page.locator(GONE).locator("td").first
    assert red.inner_text() == "away"
    assert red.evaluate("node => getComputedStyle(node).color") == "rgb(255, 107, 102)"
    assert "1 away" in (page.get_attribute("#lanes", "aria-label") or "")
    page.wait_for_selector("#said:has-text('learner-1')", state="attached")
    page.screenshot(path=tmp_path / "away.png", full_page=True)
    page.wait_for_selector(BACK)
    assert page.locator(BACK).locator("td").nth(1).inner_text() == "2", "its second life"

    before = int(page.locator("#tiles dd span").first.inner_text().replace(",", ""))
    kill(run, "syncer")
    page.wait_for_selector("body[data-connection=lost]")
    assert "connects again by itself" in page.inner_text("#lost")
    page.wait_for_selector("body[data-connection=live]")
    page.wait_for_selector(ALL_STEPPING)
    assert int(page.locator("#tiles dd span").first.inner_text().replace(",", "")) >= before
    assert "learner-1" in page.inner_text("#notes"), "the new syncer knows what happened before it"
    page.screenshot(path=tmp_path / "after.png", full_page=True)

    page.evaluate("() => { new WebSocket(`ws://${location.host}/v1/live`).onopen = (e) => e.target.send('garbage'); }")
    said = len(run.events("round"))
    run.until(lambda events: sum(event["kind"] == "round" for event in events) > said + 20)
    run.interrupt()
    run.ended()
    assert not complaints and f"dashboard: {address}/enter/" in run.stdout


@pytest.mark.faults
def test_a_run_with_a_killed_learner_and_a_killed_syncer_is_repeated_bit_for_bit(run: Run) -> None:
    """Its sample in every run of the tests: what test_chaos.py attacked is repeated too."""
    run.train(*LINE, "--set", "port=0")
    run.until(lambda events: len(members(events)) >= 2)
    kill(run, "learner-1")
    run.until(is_back)
    kill(run, "syncer")
    run.until(reigned)
    at = len(run.events("round"))
    run.until(lambda events: sum(e["kind"] == "round" for e in events) > at + 20)
    address = run.address()
    run.interrupt()
    run.ended()
    assert f"dashboard: {address}/enter/" in run.stdout
    run.until_gone(2.0)
    run.check_replay()


@pytest.mark.faults
def test_a_run_whose_loaders_prefetch_is_repeated_and_no_leased_sample_is_left_out(run: Run) -> None:
    """One is killed: what it had prefetched and not trained on goes to whoever is leased it next."""
    run.train(SCRIPTS / "loader.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--learners", "2")
    run.until(lambda events: len(members(events)) == 2)
    os.kill(run.pid("learner-1"), signal.SIGKILL)
    run.until(lambda events: ("learner-1", 2) in members(events))
    at = len(run.events("round"))
    run.until(lambda events: sum(e["kind"] == "round" for e in events) > at + 20)
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok, report.problem
    run.check_replay()


def test_a_learner_that_starts_again_draws_another_order_and_its_replay_the_same(run: Run) -> None:
    run.train(SCRIPTS / "shuffled.py", "--set", "evaluate_every=0", "--set", "overlap=1", "--learners", "2")
    run.until(lambda events: len(members(events)) == 2)
    kill(run, "learner-1")
    run.until(is_back)
    run.interrupt()
    run.ended()
    logs = "".join(path.read_text() for path in run.out.glob("logs/learner-*.log"))
    drawn = re.findall(r"first batch (\[.*\])", logs)
    assert len(drawn) == len(set(drawn)) == 3
    run.check_replay()


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_run_that_was_ended_killed_whole_and_gone_on_with_is_repeated(run: Run) -> None:
    """Long after the cuts that it went on from are gone."""

    def goes_on(rounds: int) -> None:
        at = len(run.events("round"))
        run.until(lambda events: sum(e["kind"] == "round" for e in events) > at + rounds)

    run.train(*LINE, "--set", "cut_every=4")
    run.until(lambda events: len(members(events)) == 2)
    run.interrupt()
    run.ended()
    run.start("train", "--resume", run.out)
    goes_on(12)
    run.kill_everything()
    run.start("train", "--resume", run.out)
    goes_on(30)
    run.interrupt()
    run.ended()
    assert [one["after"] for one in run.summary["resumes"]] == ["ended", "killed"]
    run.check_replay()


@pytest.mark.faults
def test_a_part_of_a_run_and_a_script_that_does_something_else(run: Run) -> None:
    run.train(*LINE, "--steps", "60", "--set", "adopt=carry")
    run.ended()
    until = run.replay("--until", "5", "--jobs", "1")
    assert (until["identical"], until["through"]) == (True, 5)
    settings = run.out / "run.toml"
    settings.write_text(re.sub(r'("[^"]*line.py"),?', r'\1, "--rate", "0.06",', settings.read_text()))
    other = run.replay()
    assert other["difference"] == {"round": 0, "fragment": 0, "version": 1, "tensors": ["weight"]}, other


def check_own_tokens(run: Run, per_step: int) -> None:
    """Ledger, status and events show the tokens that the script gave for each step, not those of the scenario."""
    journal = [line for _, line in read(run.out / "journal", disk=LocalDisk())]
    shares = [share for line in journal if isinstance(line, MergedRecord) for share in line.members]
    assert shares and all(
        (share.tokens, share.total) == (per_step * share.steps, per_step * share.t) for share in shares
    )
    gone = [line for line in journal if isinstance(line, GoneRecord)]
    assert {line.learner for line in gone} == {"learner-0", "learner-1"}
    status = json.loads(run.command("status", run.out, "--json").stdout)
    assert status["tokens"]["computed"] == sum(line.total for line in gone) == per_step * sum(line.t for line in gone)
    assert status["per_learner"]["learner-1"]["tokens_by_fate"]["lost"] > 0, "it was killed"
    kinds = [event["kind"] for event in run.events()]
    assert kinds.count("round") == status["rounds"] > 10 and kinds[-1] == "finished" and "lost" in kinds
    report = verify_run(run.out)
    assert report.ok, report.problem


@pytest.mark.faults
def test_a_synthetic_tape_is_followed_and_what_comes_of_it_is_repeated(run: Run, tmp_path: Path) -> None:
    tape = tmp_path / "mixed.tape"
    faults = ("--fault", "kill:learner-1@20+10", "--fault", "crash@30+3")
    shape = ("--learners", "2", "--fragments", "2", "--sync-every", "4", "--overlap", "1", "--steps", "60")
    assert run.command("simulate", "tape", tape, *shape, "--step-s", "1,2.5", *faults).returncode == 0
    run.train(SCRIPTS / "line.py", "--tape", tape)
    run.ended()
    first = (run.out / "model.safetensors").read_bytes()
    assert run.replay()["identical"]
    check_own_tokens(run, 16)
    run.train(SCRIPTS / "line.py", "--tape", tape, "--force")
    run.ended()
    assert (run.out / "model.safetensors").read_bytes() == first


@pytest.mark.faults
def test_real_learners_make_the_steps_of_a_drawn_tape_and_no_others(run: Run, tmp_path: Path) -> None:
    """learner-0 is gone for ticks 20 to 45: it misses the rounds of that time, and comes back with its peer's state."""
    tape = tmp_path / "drawn.tape"
    cluster = ("--profile", "paper", "--chips", "100k", "--learners", "2", "--slices", "2", "--seed", "14")
    made = run.command("simulate", "tape", tape, *cluster, "--steps", "60", "--fragments", "2", "--sync-every", "4")
    lines = read_tape(tape)
    drawn = lines[1]
    assert isinstance(drawn, DrawnRecord) and Absence("learner-0", 20, 26, "gone") in drawn.absences
    run.train(SCRIPTS / "counting.py", "--tape", tape)
    run.ended()
    assert drawn.describe() in made.stdout and drawn.describe() in run.stdout
    assert (run.summary["goodput"], run.summary["learner_steps"]) == (drawn.goodput, drawn.steps)

    steps = {"learner-0": drawn.ticks, "learner-1": drawn.ticks}
    for one in drawn.absences:
        steps[one.learner] -= one.ticks
    for part in read_recording(lines).parts:
        said = re.findall(r"^step (\d+)$", (run.out / "logs" / f"{part.name}.log").read_text(), re.MULTILINE)
        assert [int(number) for number in said] == list(range(1, part.acts()[-1].t + 1))
        steps[part.learner] -= len(said)
    assert abs(steps["learner-1"]) <= 1, "of the last tick"
    assert -1 <= steps["learner-0"] <= 3, "what it would have trained after it was last told something was lost with it"

    report = verify_run(run.out)
    assert report.ok, report.problem
    journal = [line for _, line in read(run.out / "journal", disk=LocalDisk())]
    rounds = [
        (line.step, {share.learner for share in line.members}) for line in journal if isinstance(line, MergedRecord)
    ]
    assert drawn in journal and all(learners == {"learner-1"} for step, learners in rounds if 22 < step < 42)
    assert any("learner-0" in learners for step, learners in rounds if step > 50)
