"""The supervisor's rules with scripts that train nothing (no torch, so they are quick); tests/system has whole runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from atoll.config import convert
from atoll.launch import children
from atoll.launch.local import LocalRun, script_arguments
from atoll.observe.screen import Screen
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.store.rundir import RunDir
from atoll.telemetry.status import RunStatus

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "BACKOFF_S", (0.01,) * children.LIMIT)


def local(tmp_path: Path, code: str, **options: Any) -> LocalRun:
    script = tmp_path / "script.py"
    script.write_text(code)
    out = RunDir.create(tmp_path / "run")
    config = convert({"protocol": {"learners": 2}}, "a test")
    return LocalRun(config, out, script=script_arguments(script, []), **{"evaluator": False, **options})


def events(run: LocalRun, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.out.events.read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


async def test_learners_that_die_too_often_are_given_up_and_the_run_fails(tmp_path: Path) -> None:
    run = local(tmp_path, "raise SystemExit(7)")
    with pytest.raises(RunFailed, match="every learner died too often; their logs are in"):
        await run.run()
    assert [e["process"] for e in events(run, "restarted")].count("learner-1") == children.LIMIT
    assert {e["code"] for e in events(run, "exited")} == {7}
    assert events(run, "finished")[0]["reason"] == "no learner is left"


async def test_one_that_is_done_and_one_that_cannot_end_the_run_well(tmp_path: Path) -> None:
    run = local(tmp_path, "import os, sys\nsys.exit('bad disk' if os.environ['ATOLL_LEARNER'][-1] == '1' else 0)")
    await run.run()
    assert events(run, "warning")[0]["text"] == "learner-1 cannot take part: bad disk"
    assert events(run, "finished")[0]["reason"] == "every learner has ended"


async def test_when_nobody_can_take_part_the_first_reason_is_the_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^bad disk$"):
        await local(tmp_path, "import sys\nsys.exit('bad disk')", evaluator=True).run()


async def test_a_run_without_parameters_does_not_wait_for_a_score(tmp_path: Path) -> None:
    run = local(
        tmp_path, "import os\nif os.environ['ATOLL_ROLE'] == 'evaluator': import time; time.sleep(60)", evaluator=True
    )
    await run.run()
    assert events(run, "finished")


async def test_children_know_the_run(tmp_path: Path) -> None:
    run = local(tmp_path, "import os\nprint({k: v for k, v in os.environ.items() if k.startswith('ATOLL')})")
    await run.run()
    said = (run.out.logs / "learner-1.log").read_text()
    for part in ("'ATOLL_LEARNER': 'learner-1'", "'ATOLL_ROLE': 'learner'", "'ATOLL_SEED': '0'", "http://127.0.0.1:"):
        assert part in said
    assert "ATOLL_SUPERVISOR" not in said


ATTACK = """
import os, pathlib, time, urllib.error, urllib.request
looks = pathlib.Path({looks!r})
if os.environ["ATOLL_LEARNER"] == "learner-0":
    said = b'{{"round": 1' + b"0" * 400 + b', "loss": 1.0, "cpu_s": 0.0}}'
    try:
        code = urllib.request.urlopen(os.environ["ATOLL_SYNCER"] + "/v1/scores", data=said).status
    except urllib.error.HTTPError as error:
        code = error.code
    looks.with_name("code").write_text(str(code))
    seen = len(looks.read_bytes())
    while len(looks.read_bytes()) < seen + 3:
        time.sleep(0.02)
"""
"""Any process of this machine; it stays until the run was looked at after its score."""


async def test_a_score_of_hundreds_of_digits_ends_no_run(tmp_path: Path) -> None:
    looks, screen = tmp_path / "looks", Screen(Console(file=io.StringIO(), force_terminal=True))
    looks.touch()

    def watch(status: RunStatus | None) -> None:
        screen.update(status)
        with looks.open("ab") as file:
            file.write(b"." if status is not None else b"")

    run = local(tmp_path, ATTACK.format(looks=str(looks)), watch=watch)
    await run.run()
    assert events(run, "finished") and not events(run, "score")
    assert 400 <= int((tmp_path / "code").read_text()) < 500


async def test_what_cannot_be_shown_ends_no_run_and_is_said_once(tmp_path: Path) -> None:
    shown = []

    def broken(status: RunStatus | None) -> None:
        shown.append(status)
        raise OverflowError("integer division result too large for a float")

    run = local(tmp_path, "", watch=broken)
    await run.run()
    assert events(run, "finished") and len(shown) > 1
    [warning] = events(run, "warning")
    assert warning["text"].startswith("the run cannot be shown (OverflowError: integer division result too large")


def test_a_script_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"there is no script none\.py"):
        script_arguments(Path("none.py"), [])
