"""The dashboard of a real run in a real browser: it shows a learner's death and return, and its syncer's."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.system.conftest import SCRIPTS, Run

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.system

TINY = ("--set", "workload.depth=1", "--set", "workload.block=32", "--set", "workload.batch=4")
WAIT_MS = 40_000
GONE = "#rows tr[data-learner=learner-1][data-state=gone]"
BACK = "#rows tr[data-learner=learner-1][data-state=stepping]"
ALL_STEPPING = "#rows:has(tr:nth-child(4)):not(:has(tr:not([data-state=stepping])))"


@pytest.fixture
def page() -> Iterator[Page]:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no chromium on the PATH: the dashboard is not looked at")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": 1300, "height": 1000}, color_scheme="dark")
        page.set_default_timeout(WAIT_MS)
        yield page
        opened.close()


@pytest.mark.timeout(900)
def test_a_killed_learner_turns_red_says_gone_and_returns(run: Run, page: Page, tmp_path: Path) -> None:
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if "Content Security Policy" in line.text else None)
    run.train(SCRIPTS / "line.py", "--learners", "4", "--steps", "100000", "--port", "0", "--set", "evaluate_every=0")
    address = run.address()
    assert page.goto(f"{address}/").status == 401, "without a link nobody looks on"
    page.goto(run.command("dashboard", run.out).stdout.strip())
    page.wait_for_selector("body[data-connection=live]")
    page.wait_for_selector(ALL_STEPPING, state="attached")
    page.wait_for_selector("#loss .main-svg", state="attached")
    page.get_by_text("Learners as a table").click()
    page.screenshot(path=tmp_path / "before.png", full_page=True)

    os.kill(run.pid("learner-1"), signal.SIGKILL)
    page.wait_for_selector(GONE)
    red = page.locator(GONE).locator("td").first
    assert red.inner_text() == "gone"
    assert red.evaluate("node => getComputedStyle(node).color") == "rgb(255, 107, 102)"
    assert "1 gone" in (page.get_attribute("#lanes", "aria-label") or "")
    page.wait_for_selector("#said:has-text('learner-1')", state="attached")
    page.screenshot(path=tmp_path / "gone.png", full_page=True)
    page.wait_for_selector(BACK)
    assert page.locator(BACK).locator("td").nth(1).inner_text() == "2", "its second life"

    before = int(page.locator("#tiles dd span").first.inner_text().replace(",", ""))
    os.kill(run.pid("syncer"), signal.SIGKILL)
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
    assert f"dashboard: {address}/enter/" in run.stdout
    assert not complaints


def test_a_port_in_use_is_one_line(run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run.train("--learners", "1", "--steps", "5", "--port", str(port), *TINY).ended(code=2)
    assert run.stderr.strip() == f"atoll: port {port} is in use on 127.0.0.1: choose another with --port, or 0 for any"
