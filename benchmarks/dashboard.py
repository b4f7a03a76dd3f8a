"""What the dashboard costs: the processor time of a browser that shows a run, and of the syncer's side of it.

`python benchmarks/dashboard.py` serves the page with the real server, fed by a pretended run of 64 learners with ten
minutes behind it, opens it in a headless chromium and adds up the processor seconds of all the browser's processes per
second of time. Without a GPU chromium also paints with the processor: that is in the figure. `--pictures FOLDER` takes
pictures of it instead, in light and dark.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pretended import PretendedRun

from atoll.fabric.server import Server
from atoll.observe.dashboard import Dashboard

RESULT = Path(__file__).parent / "results" / "dashboard.json"
PAST_S = 600.0
SETTLE_S = 5.0
HEIGHTS = (1000, 3600)
"""Of the window: a usual one, and one that shows all of the page at once, so that all of it is drawn."""
COUNT_DRAWINGS = """
    window.drawings = 0;
    const clear = CanvasRenderingContext2D.prototype.clearRect;
    CanvasRenderingContext2D.prototype.clearRect = function (...box) {
        window.drawings += this.canvas.id === "lanes";
        return clear.apply(this, box);
    };
"""
"""So that a browser that was starved, and drew less, is not taken for a cheap one."""
TICKS = os.sysconf("SC_CLK_TCK")


class Stage:
    """A port that serves the dashboard of a pretended run."""

    def __init__(self, learners: int, folder: Path, past_s: float = PAST_S) -> None:
        self._events = (folder / "events.jsonl").open("ab", buffering=0)
        self.run = PretendedRun(learners, time.time() - past_s, self._say)
        past = []
        for number in range(int(past_s)):
            self.run.advance(self.run.began + number)
            past.append((self.run.now, self.run.status()))
        self.dashboard = Dashboard(folder / "events.jsonl")
        self.dashboard._catch_up()
        for at, status in past:  # the curves of the past, as a syncer that was there has them
            self.dashboard.history.take_status(at, status)
        self.server = Server(self, host="127.0.0.1", port=0, pages=self.dashboard)  # type: ignore[arg-type]

    def _say(self, at: float, kind: str, text: str, data: dict[str, object]) -> None:
        self._events.write(msgspec.json.encode({"at": round(at, 6), "kind": kind, "text": text, **data}) + b"\n")

    async def __aenter__(self) -> Stage:
        await self.server.start()
        self._tasks = [asyncio.create_task(self._live()), asyncio.create_task(self.dashboard.run(self.run.status))]
        return self

    async def __aexit__(self, *why: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.stop()
        self._events.close()

    async def _live(self) -> None:
        while True:
            self.run.advance(time.time())
            await asyncio.sleep(0.05)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/"


async def measured(learners: int, seconds: float, height: int) -> dict[str, Any]:
    from playwright.async_api import async_playwright

    with tempfile.TemporaryDirectory() as folder:
        async with Stage(learners, Path(folder)) as stage, async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            page = await browser.new_page(viewport={"width": 1400, "height": height})
            await page.add_init_script(COUNT_DRAWINGS)
            await page.goto(stage.url)
            await page.wait_for_selector("body[data-connection=live]")
            await page.wait_for_selector(f"#rows tr:nth-child({learners})", state="attached")
            await asyncio.sleep(SETTLE_S)
            pids = list(descendants(os.getpid(), b"chrom"))
            drawings = await page.evaluate("window.drawings")
            before, own, began = cpu_s(pids), time.process_time(), time.monotonic()
            await asyncio.sleep(seconds)
            wall = time.monotonic() - began
            spent, drawings = cpu_s(pids) - before, await page.evaluate("window.drawings") - drawings
            found = {
                "learners": learners,
                "window": f"1400 x {height}",
                "seconds": round(wall, 1),
                "browser_processes": len(pids),
                "browser_cores": round(spent / wall, 3),
                "drawings_per_s": round(drawings / wall, 2),
                "load_average": round(os.getloadavg()[0], 1),
                "server_and_pretended_run_cores": round((time.process_time() - own) / wall, 3),
                "snapshot_bytes": len(stage.dashboard.history.encode_snapshot(time.time(), stage.run.status())),
                "chromium": browser.version,
                "cores": len(os.sched_getaffinity(0)),
            }
            await browser.close()
    return found


async def pictures(folder: Path, sizes: list[int]) -> None:
    from PIL import Image
    from playwright.async_api import async_playwright

    for learners in sizes:
        with tempfile.TemporaryDirectory() as events:
            async with Stage(learners, Path(events)) as stage, async_playwright() as playwright:
                browser = await playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
                for scheme in ("light", "dark"):
                    page = await browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme=scheme)
                    page.on("console", lambda message: print("console:", message.text))
                    page.on("pageerror", lambda error: print("error:", error))
                    await page.goto(stage.url)
                    await page.wait_for_selector("body[data-connection=live]")
                    await page.wait_for_selector("#traffic .main-svg")
                    await asyncio.sleep(3)
                    await page.screenshot(path=(path := folder / f"{learners}-{scheme}.png"), full_page=True)
                    Image.open(path).convert("RGB").quantize(224).save(path, optimize=True)
                await browser.close()


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("no chromium on the PATH: nothing to measure with")
    return found


def descendants(pid: int, name: bytes) -> Iterator[int]:
    """Every process below this one whose command contains the name."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    waiting = list(parents.get(pid, ()))
    while waiting:
        one = waiting.pop()
        waiting += parents.get(one, ())
        if name in (Path("/proc") / str(one) / "cmdline").read_bytes():
            yield one


def cpu_s(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        try:
            fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--learners", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--pictures", type=Path)
    said = parser.parse_args()
    try:
        import playwright  # noqa: F401
    except ImportError:
        print("playwright is not installed: nothing to measure with", file=sys.stderr)
        return
    if said.pictures is not None:
        said.pictures.mkdir(parents=True, exist_ok=True)
        asyncio.run(pictures(said.pictures, said.learners))
        return
    found = [asyncio.run(measured(learners, said.seconds, height)) for learners in said.learners for height in HEIGHTS]
    RESULT.write_text(json.dumps(found, indent=2) + "\n")
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
