"""The supervisor's rules with scripts that train nothing (no torch, so they are quick); tests/system has whole runs."""

from __future__ import annotations

import io
import json
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from rich.console import Console
from tests.observe.conftest import a_status

from atoll.config import convert
from atoll.launch import children
from atoll.launch import local as local_run
from atoll.launch.children import Child
from atoll.launch.environment import LaunchEnvironment, assign_devices, read_environment
from atoll.launch.local import LocalRun, script_arguments
from atoll.launch.ranks import RankProcesses
from atoll.launch.resume import Resume
from atoll.launch.supervision import Supervision
from atoll.learner.script import TRAINS_ON
from atoll.observe.screen import LiveScreen
from atoll.observe.story import story
from atoll.observe.summary import summarise
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.store.rundir import RunDir
from atoll.telemetry.events import EventLog
from atoll.telemetry.status import RunStatus

pytestmark = pytest.mark.system


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_run, "Child", partial(Child, waits_s=(0.01,) * children.LIMIT))
    monkeypatch.setattr(local_run, "RankProcesses", partial(RankProcesses, waits_s=(0.01,) * children.LIMIT))


def local(tmp_path: Path, code: str, **options: Any) -> LocalRun:
    script = tmp_path / "script.py"
    script.write_text(code)
    out = RunDir.create(tmp_path / "run")
    config = convert({"protocol": {"learners": 2}}, "a test")
    return LocalRun(config, out, script=script_arguments(script, []), **{"evaluator": False, **options})


def events(run: LocalRun, kind: str = "") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.out.events.read_text().splitlines()]
    return [event for event in lines if kind in ("", event["kind"])]


@pytest.mark.faults
async def test_learners_that_die_too_often_are_given_up_and_the_run_fails(tmp_path: Path) -> None:
    run = local(tmp_path, "raise SystemExit(7)")
    with pytest.raises(RunFailed, match="every learner died too often; their logs are in"):
        await run.run()
    assert [e["process"] for e in events(run, "restarted")].count("learner-1") == children.LIMIT
    assert {e["code"] for e in events(run, "exited")} == {7}
    assert events(run, "finished")[0]["reason"] == "no learner is left"


async def test_the_operator_says_how_often_a_learner_is_started_again(tmp_path: Path) -> None:
    run = local(tmp_path, "print('no room left')\nraise SystemExit(7)", max_restarts=1)
    with pytest.raises(RunFailed, match=r"every learner died too often \(no room left\); their logs are in"):
        await run.run()
    assert [e["process"] for e in events(run, "restarted")].count("learner-0") == 1


def test_one_that_dies_while_the_last_death_of_another_is_handled_is_started_again(tmp_path: Path) -> None:
    def say(line: bytes) -> None:
        """learner-0 was looked at, and lived; it is gone before anybody counts who is left."""
        if json.loads(line).get("process") == "learner-1" and first.process is not None:
            first.process.kill()
            first.process.wait()

    log = tmp_path / "log"
    processes = Supervision(RunDir(tmp_path), EventLog(say), Child("syncer", [], {}, log), children.LIMIT)
    first = processes.learners["learner-0"] = Child("learner-0", ["sleep", "60"], {}, log)
    second = processes.learners["learner-1"] = Child("learner-1", ["false"], {}, log, limit=0)
    first.start()
    second.start()
    assert second.process is not None
    second.process.wait()
    processes.restart_dead()
    assert not first.running and second.given_up
    processes.restart_dead()
    assert first.waiting and not processes.is_ending


def test_a_shard_that_dies_is_started_again_and_one_that_was_told_to_end_is_not(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    events = EventLog(lambda line: lines.append(json.loads(line)))
    processes = Supervision(RunDir(tmp_path), events, Child("syncer", [], {}, tmp_path / "log"), children.LIMIT)
    shard = Child("shard-2", ["sleep", "60"], {}, tmp_path / "log", waits_s=(0.0,))
    processes.shards.append(shard)
    assert shard in processes.list_children() and shard not in processes.list_scripts()
    try:
        shard.start()
        assert shard.process is not None
        shard.process.kill()
        shard.process.wait()
        processes.restart_shards()
        processes.restart_shards()
        assert shard.running
        texts = [line["text"] for line in lines]
        assert texts == ["shard-2 ended: killed by SIGKILL", "shard-2 was started again"]
        shard.kill_all()
        shard.command = ["true"]
        shard.start()
        shard.process.wait()
        processes.ending = True
        processes.restart_shards()
        assert not shard.waiting and len(lines) == 2, "the run is over"
    finally:
        shard.kill_all()


def test_a_shard_that_may_not_take_part_ends_the_run_with_its_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    events = EventLog(lambda line: None)
    processes = Supervision(RunDir(tmp_path), events, Child("syncer", [], {}, log), children.LIMIT)
    shard = Child("shard-3", ["sh", "-c", "echo atoll: it holds another run; exit 2"], {}, log)
    processes.shards.append(shard)
    shard.start()
    assert shard.process is not None
    shard.process.wait()
    with pytest.raises(RunFailed, match=r"shard-3 died \(exit code 2\): it holds another run"):
        processes.restart_shards()


async def test_words_of_a_death_that_is_not_followed_by_a_restart(tmp_path: Path) -> None:
    run = local(tmp_path, "raise SystemExit(7)", max_restarts=0)
    with pytest.raises(RunFailed, match="every learner died; their logs are in"):
        await run.run()
    assert {e["text"].partition(" and ")[0] for e in events(run, "warning")} == {"learner-0 died", "learner-1 died"}


TYPO = "import os\nprint(lerner)\n"


async def test_a_script_that_fails_on_every_learner_before_its_first_step_ends_the_run(tmp_path: Path) -> None:
    run = local(tmp_path, TYPO)
    with pytest.raises(RunFailed) as caught:
        await run.run()
    assert caught.value.exit_code == 1
    cause = "NameError: name 'lerner' is not defined (script.py, line 2)"
    assert str(caught.value).startswith(f"the script failed on every learner before its first step: {cause}. ")
    assert f"atoll train --resume {run.out.path}" in str(caught.value)
    exits = [e for e in events(run, "exited") if e["process"].startswith("learner")]
    assert exits[0]["text"].endswith(f" failed: {cause}"), "the first death tells the cause"
    [told] = events(run, "warning")
    assert told["text"] == f"the whole traceback is in {run.out.log(told['process'])}", "and where to read on, once"
    assert (
        Path(told["text"].removeprefix("the whole traceback is in ")).read_text().startswith("Traceback (most recent")
    )
    assert len(exits) <= 3, "while the other starts, the first may have been started once more"


@pytest.mark.faults
async def test_learners_that_fail_each_in_another_way_are_started_again(tmp_path: Path) -> None:
    code = "import os\nif os.environ['ATOLL_LEARNER'][-1] == '1': raise ValueError('odd')\nraise ValueError('even')"
    run = local(tmp_path, code, max_restarts=1)
    with pytest.raises(RunFailed, match=r"every learner died too often \(ValueError: "):
        await run.run()
    assert len(events(run, "restarted")) == 2


async def test_a_wrong_call_of_the_api_ends_the_run_at_the_first_one(tmp_path: Path) -> None:
    code = """
import os, time
if os.environ["ATOLL_LEARNER"] == "learner-1":
    time.sleep(60)
def step(token): raise TypeError("Learner.step() got an unexpected keyword argument 'token'")
step(token=5)
"""
    with pytest.raises(RunFailed, match=r"calls Atoll wrongly: TypeError: Learner\.step\(\) got an unexpected keyword"):
        await local(tmp_path, code).run()


async def test_a_scorer_that_fails_before_its_first_score_is_a_warning(tmp_path: Path) -> None:
    code = "import os, time\nif os.environ['ATOLL_ROLE'] == 'evaluator': scroe()\ntime.sleep(2)"
    run = local(tmp_path, code, evaluator=True)
    await run.run()
    told = [e["text"] for e in events(run, "warning") if "not scored" in e["text"]]
    assert told == [
        "the model is not scored: NameError: name 'scroe' is not defined (script.py, line 2); the run goes on"
    ]
    assert not [e for e in events(run, "restarted") if e["process"] == "evaluator"]


async def test_a_script_without_a_scorer_is_told_so_and_no_score_is_missed(tmp_path: Path) -> None:
    words = "this script brings no scorer"
    code = (
        f"import os, sys, time\nif os.environ['ATOLL_ROLE'] == 'evaluator': sys.exit('atoll: {words}')\ntime.sleep(2)"
    )
    run = local(tmp_path, code, evaluator=True)
    await run.run()
    assert [e["text"] for e in events(run, "warning")] == [f"the model is not scored: {words}; the run goes on"]
    assert [e["text"] for e in events(run, "exited") if e["process"] == "evaluator"] == ["evaluator ended"]


@pytest.mark.faults
async def test_a_mistake_that_the_evaluator_only_met_first_is_the_scripts(tmp_path: Path) -> None:
    code = "import os, time\nif os.environ['ATOLL_ROLE'] != 'evaluator': time.sleep(1)\nopen('no/such/file')"
    with pytest.raises(RunFailed, match="the script failed on every learner before its first step: FileNotFoundError"):
        await local(tmp_path, code, evaluator=True).run()


@pytest.mark.parametrize(("code", "again"), [("modl.train()", True), ("open('no/such/file')", False)])
async def test_a_mistake_in_the_code_after_the_first_steps_is_repeated_once(
    tmp_path: Path, code: str, again: bool
) -> None:
    """What comes from outside may be mended by the next start."""
    run = local(tmp_path, code, watch=lambda status: setattr(run._processes, "_stepped", True), max_restarts=3)
    words = "the script failed on every learner and again after a restart" if again else "every learner died too often"
    with pytest.raises(RunFailed, match=words):
        await run.run()
    assert (len(events(run, "restarted")) < 5) == again


async def test_a_run_that_nobody_joined_falls_short_and_without_an_evaluator_nobody_will_score_it(
    tmp_path: Path,
) -> None:
    told: list[bool] = []

    def watch(status: RunStatus | None) -> None:
        if status is not None:
            told.append(status.scorer)

    run = local(tmp_path, "", watch=watch)
    await run.run()
    assert told and not any(told)
    assert run.shortfall.startswith("no learner joined the run: the script has to train inside 'with atoll.Learner(")


@pytest.mark.faults
async def test_a_learner_that_fails_after_the_run_is_told(tmp_path: Path) -> None:
    code = """
import os, socket, urllib.parse
if os.environ["ATOLL_LEARNER"] == "learner-1":
    where = urllib.parse.urlsplit(os.environ["ATOLL_SYNCER"])
    while True:
        try:
            socket.create_connection((where.hostname, where.port)).close()
        except ConnectionError:
            break
    raise MemoryError("no room for the model")
"""
    run = local(tmp_path, code, listens=lambda link: run.request_end("a test asked for it"))
    await run.run()
    assert "learner-1 failed and did not come back: MemoryError: no room for the model" in run.shortfall


async def test_the_screen_says_whose_scripts_the_end_waits_for(tmp_path: Path) -> None:
    """It stood still for seconds after "the run is over"."""
    seen = tmp_path / "seen"
    code = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.02)"

    def watch(status: RunStatus | None) -> None:
        if run.out.events.exists() and events(run, "closing"):
            seen.touch()

    run = local(tmp_path, code, listens=lambda link: run.request_end("a test asked for it"), watch=watch)
    await run.run()
    [told] = events(run, "closing")
    assert told["text"] == "waiting up to 30 s for the scripts of learner-0, learner-1 to end" and seen.exists()


async def test_a_script_that_trains_on_after_the_end_is_named_and_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "TRAINS_ON_S", 0.2)
    monkeypatch.setattr(local_run, "LAST_S", 1.0)
    code = (
        f"import sys, time\nsys.stderr.write({f'atoll: {TRAINS_ON}'!r} + chr(10))\nsys.stderr.flush()\ntime.sleep(60)"
    )
    asked: list[LocalRun] = []

    def watch(status: RunStatus | None) -> None:
        """The end is asked for once both scripts have printed it."""
        logs = [run.out.log(f"learner-{index}") for index in range(2)]
        if not asked and all(log.exists() and TRAINS_ON in log.read_text() for log in logs):
            asked.append(run)
            run.request_end("a test asked for it")

    run = local(tmp_path, code, watch=watch)
    await run.run()
    names = "learner-0, learner-1: "
    due = [
        f"{names}the script trains on after the run's end: break its loop at learner.done",
        f"{names}killed, as the script had not ended 1 s after the run",
    ]
    assert [event["text"] for event in events(run, "warning")] == due
    told = story(summarise(events(run)), events(run))
    assert [f"Warning: {text}." for text in due] == [one for one in told if names in one]


def test_a_script_that_never_makes_a_step_is_killed_at_the_end_and_the_reason_told(tmp_path: Path) -> None:
    lines: list[bytes] = []
    syncer = Child("syncer", [], {}, tmp_path / "log")
    processes = Supervision(RunDir(tmp_path), EventLog(lines.append), syncer, children.LIMIT)
    idle = processes.learners["learner-0"] = Child("learner-0", ["sleep", "60"], {}, tmp_path / "log")
    idle.start()
    status = a_status(learners=1)
    stalled = msgspec.structs.replace(status.learners[0], state="stalled", step=0)
    processes.note_progress(msgspec.structs.replace(status, learners=(stalled,)))
    processes.kill_without_step()
    [told] = [json.loads(line) for line in lines]
    assert (told["kind"], told["code"], told["stepless"]) == ("exited", -9, True)
    assert told["text"] == "learner-0 was killed at the end: it had made no step"
    processes.restart_dead()
    assert idle.process is None and not any(b"SIGKILL" in line for line in lines)


async def test_one_that_is_done_and_one_that_cannot_end_the_run_well(tmp_path: Path) -> None:
    run = local(tmp_path, "import os, sys\nsys.exit('bad disk' if os.environ['ATOLL_LEARNER'][-1] == '1' else 0)")
    await run.run()
    assert events(run, "warning")[0]["text"] == "learner-1 cannot take part: bad disk"
    assert events(run, "finished")[0]["reason"] == "every learner has ended"


async def test_one_that_sigterm_ended_before_it_joined_is_done_as_one_that_left_is(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom atoll.learner.script import LeftUnjoined, say\nif os.environ['ATOLL_LEARNER'][-1] == '1':"
    )
    code += "\n error = LeftUnjoined('SIGTERM', 143)\n say(str(error))\n print('a library is taken down')\n raise error"
    run = local(tmp_path, code)
    await run.run()
    assert not events(run, "restarted") and events(run, "finished")[0]["reason"] == "every learner has ended"
    [ended] = [one for one in events(run, "exited") if one["code"]]
    assert ended["unjoined"] and ended["text"] == "learner-1 ended before it joined"
    assert not any(sentence for sentence in story(summarise(events(run)), events(run)) if "died" in sentence)


async def test_one_whose_own_handler_of_sigterm_ends_it_with_143_is_started_again(tmp_path: Path) -> None:
    """It was taken for one that had not joined, and a preemption in mid-training lost it for good."""
    code = "import os, sys\nif os.environ['ATOLL_LEARNER'][-1] == '1':\n print('atoll: joined run r')\n sys.exit(143)"
    run = local(tmp_path, code, max_restarts=1)
    await run.run()
    assert [one["process"] for one in events(run, "restarted")] == ["learner-1"]
    assert not any("unjoined" in one for one in events(run, "exited"))
    assert "learner-1 failed and did not come back" in run.shortfall


async def test_a_resume_takes_another_port_where_its_own_is_taken_by_then_and_says_so(tmp_path: Path) -> None:
    """Whether it is free was asked before the syncer was started, which took a second more and then ended with 2."""
    run = local(tmp_path, "", resume=Resume(None, ""))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        run.out.address.write_text(f"http://127.0.0.1:{port}")
        await run.run()
    assert urlsplit(run.out.address.read_text()).port not in (None, port)
    [warned] = [one["text"] for one in events(run, "warning")]
    assert warned.startswith(f"port {port}, where the run listened before, is taken: it listens on another one now")


async def test_a_resume_that_fails_before_its_syncer_listens_forgets_no_port(tmp_path: Path) -> None:
    """The next one took another port, and no link was good any more."""
    run = local(tmp_path, "", resume=Resume(None, ""), syncer_words=("--disk", "nowhere:nothing"))
    run.out.address.write_text("http://127.0.0.1:7171")
    with pytest.raises(ConfigError, match="--disk nowhere:nothing is not there"):
        await run.run()
    assert not run.out.address.exists() and run._find_last_port() == 7171


async def test_when_nobody_can_take_part_the_first_reason_is_the_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^bad disk$"):
        await local(tmp_path, "import sys\nsys.exit('bad disk')", evaluator=True).run()


@pytest.mark.faults
async def test_a_run_without_parameters_does_not_wait_for_a_score(tmp_path: Path) -> None:
    run = local(
        tmp_path, "import os\nif os.environ['ATOLL_ROLE'] == 'evaluator': import time; time.sleep(60)", evaluator=True
    )
    await run.run()
    assert events(run, "finished")


async def test_children_know_the_run_and_start_where_and_with_what_they_were_started_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_NOW", "now")
    (tmp_path / "then").mkdir()
    launch = LaunchEnvironment(str(tmp_path / "then"), {"DATA_DIR": "/data/c4", "SET_NOW": "then"})
    code = (
        "import os\nprint(os.getcwd(), os.environ['DATA_DIR'], os.environ['SET_NOW'])\n"
        "print({k: v for k, v in os.environ.items() if k.startswith('ATOLL')})"
    )
    run = local(tmp_path, code, launch=launch)
    await run.run()
    place, said = run.out.log("learner-1").read_text().splitlines()
    for part in ("'ATOLL_LEARNER': 'learner-1'", "'ATOLL_ROLE': 'learner'", "'ATOLL_SEED': '0'", "http://127.0.0.1:"):
        assert part in said
    assert "ATOLL_SUPERVISOR" not in said
    assert place == f"{tmp_path / 'then'} /data/c4 now"
    assert read_environment(run.out.path) == launch, "also for the time after that"


async def test_every_process_sees_its_own_gpus_and_the_run_says_which(tmp_path: Path) -> None:
    code = "import os\nprint('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
    run = local(tmp_path, code, devices=assign_devices(("4", "5", "6"), 2), evaluator=True)
    await run.run()
    logs = {name: run.out.log(name).read_text() for name in ("learner-0", "learner-1", "evaluator")}
    assert logs == {"learner-0": "sees 4\n", "learner-1": "sees 5\n", "evaluator": "sees 6\n"}
    assert events(run, "devices")[0]["text"] == "GPUs: learner-0 on 4, learner-1 on 5, evaluator on 6"
    found = read_environment(run.out.path)
    assert found is not None and found.folder == str(Path.cwd()), "where they started is noted for later"


RANKS = """
import os, pathlib, time
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE")]
print(*place, os.environ["ATOLL_THREADS"], flush=True)
died = pathlib.Path(__file__).with_name("died")
if os.environ["ATOLL_ROLE"] == "learner" and not died.exists():
    said = died.with_name("said")
    if place[0] == "0":
        said.touch()
        time.sleep(60)
    while not said.exists():
        time.sleep(0.01)
    died.touch()
    raise SystemExit(7)
"""


async def test_the_ranks_of_a_learner_start_again_as_one_and_the_evaluator_is_a_group_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_run, "cores", lambda: 8)
    run = local(tmp_path, RANKS, evaluator=True)
    run.config = convert({"ranks": 2, "protocol": {"learners": 1}}, "a test")
    await run.run()
    [restarted] = events(run, "restarted")
    assert (
        restarted["text"]
        == "learner-0 was started again, all 2 ranks of it, with a fresh inner optimizer: no snapshot is there yet"
        and restarted["process"] == "learner-0"
    )
    exits = [e["text"] for e in events(run, "exited") if e["process"] == "learner-0"]
    assert exits == ["learner-0 rank 1 ended: exit code 7", "learner-0 ended: exit code 0"]
    logs = {path.stem: path.read_text().splitlines() for path in run.out.logs.glob("*.log")}
    assert logs["learner-0"] == ["0 2 4"] * 2 and logs["learner-0.rank1"] == ["1 2 4"] * 2
    assert logs["evaluator"] == ["0 1 4"], "of one rank: a script may join a process group there too"


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
    looks, screen = tmp_path / "looks", LiveScreen(Console(file=io.StringIO(), force_terminal=True))
    looks.touch()

    def watch(status: RunStatus | None) -> None:
        screen.update(status)
        with looks.open("ab") as file:
            file.write(b"." if status is not None else b"")

    run = local(tmp_path, ATTACK.format(looks=str(looks)), watch=watch)
    await run.run()
    assert events(run, "finished") and not events(run, "score")
    assert 400 <= int((tmp_path / "code").read_text()) < 500


@pytest.mark.faults
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


async def test_a_learner_that_dies_as_the_run_ends_is_not_started_again(tmp_path: Path) -> None:
    """Its new process would not be there in time, and the end would wait for it."""

    def end_once_dead(status: RunStatus | None) -> None:
        if any(one["process"] == "learner-1" for one in events(run, "exited")):
            run.request_end("a test asked for it")

    code = "import os, signal, time\nif os.environ['ATOLL_LEARNER'][-1] == '1': os.kill(os.getpid(), 9)\ntime.sleep(3)"
    run = local(tmp_path, code, watch=end_once_dead)
    await run.run()
    assert not events(run, "restarted")
    assert not run.shortfall.startswith("learner-1"), "it was killed, and did not fail"


@pytest.mark.faults
@pytest.mark.parametrize("death", ["os.kill(os.getpid(), 9)", "raise ValueError('odd')"])
async def test_a_learner_that_was_restarted_and_has_not_joined_holds_up_no_end(tmp_path: Path, death: str) -> None:
    def end_once_restarted(status: RunStatus | None) -> None:
        if events(run, "restarted"):
            run.request_end("a test asked for it")

    code = f"""
import os, pathlib, time
if os.environ["ATOLL_LEARNER"] == "learner-1":
    died = pathlib.Path(__file__).with_name("died")
    if died.exists():
        time.sleep(60)
    died.touch()
    {death}
"""
    run = local(tmp_path, code, watch=end_once_restarted)
    begun = time.monotonic()
    await run.run()
    assert time.monotonic() - begun < children.LAST_S
    failed = "learner-1 failed and did not come back: ValueError: odd"
    assert run.shortfall.startswith(failed) == ("ValueError" in death)


def test_why_a_learner_is_not_connected_is_the_supervisors_to_say(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = Supervision(RunDir(tmp_path), EventLog(lambda line: None), Child("syncer", [], {}, log), children.LIMIT)
    waiting = Child("learner-0", [], {}, log)
    waiting.restart_later()
    processes.learners.update({"learner-0": waiting, "learner-1": Child("learner-1", [], {}, log)})
    processes.done.add("learner-1")
    names = ("learner-0", "learner-1", "by-hand")
    assert [processes.describe_absence(name, "training") for name in names] == ["restarting", "done", ""]
    processes.send_order("end the operator asked for it")
    assert processes.describe_absence("learner-0", "ending") == "gone", "no restart comes any more"
