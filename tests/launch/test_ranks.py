from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from atoll.cli.look import ProcessEvents
from atoll.launch import children, ranks
from atoll.launch.children import Child
from atoll.launch.ranks import EXIT_S, RankPlace, RankProcesses, find_interface, make_rank_variables
from atoll.launch.script import TERM_S
from atoll.launch.supervision import Supervision, describe_process
from atoll.store.rundir import RunDir
from atoll.telemetry.events import EventLog

Make = Callable[..., RankProcesses]
SLEEP = "import time; time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); {SLEEP}"
OF_RANK = "import os; exec({{'0': {!r}, '1': {!r}}}[os.environ['RANK']])"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (children, ranks):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[RankProcesses] = []

    def group(first: str, second: str) -> RankProcesses:
        command = [sys.executable, "-c", OF_RANK.format(first, second)]
        made.append(RankProcesses("learner-1", command, {"ATOLL_LEARNER": "learner-1"}, tmp_path / "learner-1.log"))
        return made[-1]

    yield group
    for one in made:
        one.kill_all()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait(group: RankProcesses) -> int:
    codes: list[int | None] = []
    wait_until(lambda: codes.append(group.poll_exit()) or codes[-1] is not None)  # type: ignore[func-returns-value]
    assert codes[-1] is not None
    return codes[-1]


def test_ranks_have_torchruns_variables_a_name_and_logs_of_their_own(make: Make) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ATOLL_LEARNER")
    tell = f"import os; print(*(os.environ[name] for name in {names})); print(os.environ['MASTER_PORT'])"
    group = make(tell, tell)
    ports = set()
    for _ in range(2):
        group.start()
        assert wait(group) == 0 and not group.running
        assert group.poll_exit() is None, "told once"
        logs = [rank.read_log_tail().splitlines() for rank in group.ranks]
        assert [lines[0] for lines in logs] == ["0 2 0 2 127.0.0.1 learner-1", "1 2 1 2 127.0.0.1 learner-1"]
        assert logs[0][1] == logs[1][1], "one port for the group"
        ports.add(logs[0][1])
    assert len(ports) == 2, "and another one for the next start"
    assert [rank.log.name for rank in group.ranks] == ["learner-1.log", "learner-1.rank1.log"]


def test_when_a_rank_dies_the_others_are_asked_to_end_and_the_group_ended_as_it_did(make: Make) -> None:
    group = make(SLEEP, "raise SystemExit(7)")
    group.start()
    assert wait(group) == 7 and not group.running
    assert group.ended.name == "learner-1 rank 1" and group.ended.log.name == "learner-1.rank1.log"


def test_a_rank_that_does_not_hear_is_killed(make: Make, clock: Clock) -> None:
    group = make(DEAF, "raise SystemExit(7)")
    group.start()
    first, second = group.ranks
    wait_until(lambda: first.last_words() == "deaf" and not second.running)
    assert group.poll_exit() is None
    clock.now += TERM_S - 1
    assert group.poll_exit() is None and first.running
    clock.now += 1
    assert group.poll_exit() is None
    wait_until(lambda: not first.running)
    assert group.poll_exit() == 7, "why the group ended, not how the others did"


def test_who_ends_with_0_is_followed_by_the_others_or_they_are_ended(make: Make, clock: Clock) -> None:
    group = make(SLEEP, "")
    group.start()
    wait_until(lambda: not group.ranks[1].running)
    assert group.poll_exit() is None
    clock.now += EXIT_S - 1
    assert group.poll_exit() is None and group.ranks[0].running, "it may have a model to write"
    clock.now += 1
    assert group.poll_exit() is None
    wait_until(lambda: not group.running)
    assert group.poll_exit() == -signal.SIGTERM and group.ended.name == "learner-1 rank 0"


LOST = "raise RuntimeError('[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4711: Connection reset by peer.')"


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("raise ValueError('odd')", 1),
        ("raise SystemExit(1)", 1),
        ("raise SystemExit(2)", 2),
        ("os.kill(os.getpid(), 9)", -9),
    ],
)
def test_of_two_that_died_between_two_looks_the_one_that_only_lost_its_peer_is_not_blamed(
    make: Make, cause: str, code: int
) -> None:
    group = make(LOST, f"import os; {cause}")
    group.start()
    wait_until(lambda: not group.running)
    assert group.poll_exit() == code and group.ended.name == "learner-1 rank 1"


def test_a_signal_goes_to_every_rank_and_a_kill_leaves_none(make: Make) -> None:
    group = make(SLEEP, SLEEP)
    group.start()
    group.signal(signal.SIGTERM)
    assert wait(group) == -signal.SIGTERM
    group.start()
    group.kill_all()
    assert not group.running and group.poll_exit() == -signal.SIGKILL


def test_a_group_is_one_learner_for_its_supervisor_and_what_is_said_names_the_rank(make: Make, tmp_path: Path) -> None:
    lines: list[bytes] = []
    events = EventLog(lines.append)
    processes = Supervision(RunDir(tmp_path), events, Child("syncer", [], {}, tmp_path / "log"), children.LIMIT)
    group = processes.learners["learner-1"] = make(SLEEP, "raise ValueError('odd')")
    processes.learners["learner-0"] = Child("learner-0", [], {}, tmp_path / "log")  # one that does not fail alike
    group.waits_s = (0.0,)
    group.start()
    events.say("started", "learner-1 started", describe_process(group))
    wait_until(lambda: processes.restart_dead() or group.restarts == 1)  # type: ignore[func-returns-value]
    told = b"".join(lines).decode()
    assert '"learner-1 rank 1 failed: ValueError: odd (<string>, line 1)"' in told
    assert f"the whole traceback is in {tmp_path / 'learner-1.rank1.log'}" in told
    again = "learner-1 was started again, all 2 ranks of it, with a fresh inner optimizer: no snapshot is there yet"
    assert f'"{again}"' in told
    assert told.count('"exited"') == 1, "the others ended with it"
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines))
    pids = {rank.log.stem: rank.process.pid for rank in group.ranks if rank.process is not None}
    assert ProcessEvents(tmp_path / "events.jsonl").find_running() == pids
    assert list(pids) == ["learner-1", "learner-1.rank1"]


def test_gloo_takes_the_loopback_unless_the_operator_names_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert (make_rank_variables(0, 2, RankPlace())["GLOO_SOCKET_IFNAME"] == "lo") == (sys.platform == "linux")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert "GLOO_SOCKET_IFNAME" not in make_rank_variables(0, 2, RankPlace())


def test_ranks_over_several_machines_are_numbered_through_and_meet_at_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    place = RankPlace(first=2, world=6, master="10.0.0.1", port=1234, address="10.0.0.2")
    assert make_rank_variables(1, 2, place) == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
    }


def test_each_rank_over_several_machines_has_its_log(tmp_path: Path) -> None:
    group = RankProcesses("learner-1.node1", [], {}, tmp_path / "learner-1.log", count=2, place=RankPlace(2, 4))
    assert [rank.log.name for rank in group.ranks] == ["learner-1.rank2.log", "learner-1.rank3.log"]
    assert [rank.name for rank in group.ranks] == ["learner-1 rank 2", "learner-1 rank 3"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel as Linux has it")
def test_the_interface_of_an_address() -> None:
    assert find_interface("127.0.0.1") == "lo" and find_interface("203.0.113.7") == ""
