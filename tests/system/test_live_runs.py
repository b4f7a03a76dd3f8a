"""A run that is alive is never replaced: neither by --force nor by --demo, and it is not gone on with beside itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, Run

from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

LINE = (SCRIPTS / "line.py", "--learners", "1", "--evaluate-every", "0", "--cut-every", "10")
NEW = (
    "run.toml",
    "environment.json",
    "syncer.url",
    "events.jsonl",
    "journal/lock",
    "journal/terms/000001",
    "logs/syncer.log",
)


def identities(out: Path) -> dict[str, int]:
    """Which files they are: one that was removed and made again is another."""
    return {name: (out / name).stat().st_ino for name in NEW}


def test_a_live_run_is_refused_by_name_and_goes_on(run: Run) -> None:
    run.train(*LINE)
    run.until(lambda events: sum(e["kind"] == "round" for e in events) > 5)
    before, settings = identities(run.out), (run.out / "run.toml").read_bytes()
    rounds = len(run.events("round"))
    for command in (
        ("train", *LINE, "--force", "--out", run.out),
        ("train", "--demo", "--out", run.out),
        ("train", "--resume", run.out, "--steps", "9"),
    ):
        said = run.command(*command)
        assert said.returncode == 2, said
        assert said.stderr == (
            f"atoll: run {run.out} is alive, pid {run.pid_of_command()}: "
            "end it first, or use another folder; nothing of it was touched\n"
        )
    said = run.command("syncer", "--resume", run.out, "--steps", "9")
    assert said.returncode == 2 and f"{run.out} is served by another syncer" in said.stderr
    assert identities(run.out) == before and (run.out / "run.toml").read_bytes() == settings
    run.until(lambda events: sum(e["kind"] == "round" for e in events) > rounds + 5)
    run.interrupt()
    run.ended()
    report = verify_run(run.out)
    assert report.ok and report.facts["terms"] == 1, report.problem


@pytest.mark.faults
def test_a_syncer_without_a_supervisor_is_refused_by_name_too(run: Run) -> None:
    run.start("syncer", "--learners", "1", "--port", "0", "--out", run.out)
    run.until(lambda events: any(e["kind"] == "run" for e in events))
    run.address()
    said = run.command("train", *LINE, "--force", "--out", run.out)
    assert said.returncode == 2
    assert f"run {run.out} is alive, pid {run.pid_of_command()}, term 1: " in said.stderr
    assert (run.out / "journal" / "lock").exists()
    run.interrupt()
    run.ended()
    again = run.command("train", *LINE, "--steps", "9", "--force", "--out", run.out)
    assert again.returncode == 0, "once it is over it may be replaced"
