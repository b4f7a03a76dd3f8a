"""Relays as processes: what crosses a region's link, and kills of relay and syncer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S, Run

from atoll.store.keys import KeyDir
from atoll.store.verify import verify_run
from atoll.syncer.credentials import read_tokens

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from relays import compare

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
LEARNERS = 3
SETTINGS = ("fragments=2", "sync_every=8", "quorum=2", "codec=int4")
BACK_S = 10.0
"""Without their relay, learners are in a round again within this."""


class Region:
    """A syncer, and behind a relay the learners of one region."""

    def __init__(self, run: Run) -> None:
        self.run, self.port = run, run.free_port()
        words = [word for one in SETTINGS for word in ("--set", one)]
        run.start("syncer", "--learners", str(LEARNERS), "--out", run.out, "--port", str(run.free_port()), *words)
        self.relay = self.start_relay()
        self.learners = [self._start_learner(number) for number in range(LEARNERS)]
        run.until(lambda events: sum(len(e["members"]) == LEARNERS for e in events if e["kind"] == "round") > 4)

    def start_relay(self) -> subprocess.Popen[str]:
        """Until it has written its link."""
        link = self.run.folder / "relay" / "link"
        link.unlink(missing_ok=True)
        where = ("--join", self.run.address(), "--out", link.parent, "--name", "eu", "--port", str(self.port))
        self.relay = self.run.beside("relay", *where)
        deadline = time.monotonic() + WAIT_S
        while not link.exists():
            assert self.relay.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return self.relay

    def _start_learner(self, number: int) -> subprocess.Popen[str]:
        given = ("--join", self.run.folder / "relay" / "link", "--name", f"learner-{number}")
        folder = ("--folder", self.run.folder / f"of-{number}")
        return self.run.beside("learn", SCRIPTS / "line.py", *given, *folder, "--", "--pace", "0.05")

    def wait_for_sums(self, more: int) -> None:
        made, deadline = count_sums(self.run), time.monotonic() + WAIT_S
        while count_sums(self.run) < made + more:
            assert time.monotonic() < deadline, "nothing goes through the relay"
            time.sleep(0.1)

    def end(self) -> None:
        """Nothing is lost, the relay ends with the run, and nobody lived twice."""
        self.run.interrupt()
        self.run.ended()
        assert [one.wait(WAIT_S) for one in (*self.learners, self.relay)] == [0] * (LEARNERS + 1)
        report = verify_run(self.run.out)
        assert report.ok, report.problem
        tokens = self.run.summary["tokens"]
        fates = ("merged", "dropped", "lost", "rolled_back", "filtered", "in_flight")
        assert tokens["computed"] == sum(tokens.get(fate, 0) for fate in fates)
        assert tokens["lost"] == tokens["in_flight"] == 0
        assert not self.run.events("unbalanced")
        lives = {event["incarnation"] for event in self.run.events("joined")}
        assert lives == {1}, [event["text"] for event in self.run.events("refused", "quarantined", "lost", "joined")]


def write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text)


def count_sums(run: Run) -> int:
    return len((run.folder / "relay" / "sums.jsonl").read_text().splitlines())


def in_rounds_since(run: Run, moment: float) -> set[str]:
    rounds = [event for event in run.events("round") if event["at"] > moment]
    return {member["learner"] for event in rounds for member in event["members"]}


def test_without_their_relay_learners_go_on_and_with_it_again_they_come_back(run: Run) -> None:
    region = Region(run)
    assert count_sums(run) > 0
    region.relay.kill()
    region.relay.wait()
    moment = time.time()
    run.until(lambda events: len(in_rounds_since(run, moment)) == LEARNERS)
    assert time.time() - moment < BACK_S
    lost = [event["reason"] for event in run.events("lost")]
    assert lost and all(reason == "its way through relay eu broke" for reason in lost), lost
    log = (run.folder / "beside.log").read_text()
    assert "its relay is out of reach (" in log and "the syncer is out of reach" not in log
    learners = run.folder / "learners.link"
    write_secret(learners, run.ask("tokens", "link", "join", "--run", run.out).stdout)
    refused = run.command("relay", "--join", learners, "--out", run.folder / "taken", "--name", "eu", "--port", "0")
    assert refused.returncode == 2 and "is for a learner, and this takes a relay" in refused.stderr, (
        "the name stays free"
    )
    region.start_relay()
    region.wait_for_sums(5)
    run.until(lambda events: json.loads(run.ask("status", run.out, "--json").stdout)["relays"][0]["bytes_in"] > 0)
    region.end()
    assert run.summary["relays"]["eu"]["bytes_in"] > 0


@pytest.mark.faults
def test_a_syncer_that_is_killed_behind_a_relay_goes_on(run: Run) -> None:
    region = Region(run)
    region.relay.kill()
    region.relay.wait()
    os.kill(run.pid_of_command(), signal.SIGKILL)
    run.ended(-signal.SIGKILL)
    run.start("syncer", "--resume", run.out)
    moment = time.time()
    run.until(lambda events: len(in_rounds_since(run, moment)) == LEARNERS)
    [relay] = json.loads(run.ask("status", run.out, "--json").stdout)["relays"]
    assert (relay["relay"], relay["connected"]) == ("eu", False), "the next syncer misses it"
    region.start_relay()
    region.wait_for_sums(5)
    region.end()


@pytest.mark.faults
def test_a_relay_whose_token_is_revoked_ends_in_one_line_and_its_learners_go_on(run: Run) -> None:
    keys, mine = KeyDir(run.folder / "keys"), run.folder / "relay-keys"
    for words in (
        ("cert", "--out", keys.path),
        ("tokens", "--keys", keys.path, "add", "eu", "--role", "relay"),
        ("cert", "--out", mine),
    ):
        assert run.command(*words).returncode == 0
    rules = [word for one in SETTINGS for word in ("--set", one)]
    where = ("--keys", keys.path, "--bind", "127.0.0.1", "--port", str(run.free_port()))
    run.start("syncer", "--learners", "2", "--out", run.out, *where, *rules)
    run.address()
    upward, folder = run.folder / "eu.link", run.folder / "relay"
    write_secret(upward, run.command("tokens", "--keys", keys.path, "link", "eu").stdout)
    given = ("--join", upward, "--keys", mine, "--host", "127.0.0.1", "--port", str(run.free_port()))
    relay = run.beside("relay", *given, "--out", folder, "--name", "eu")
    deadline = time.monotonic() + WAIT_S
    while not (folder / "link").exists():
        assert relay.poll() is None and time.monotonic() < deadline, (run.folder / "beside.log").read_text()
        time.sleep(0.05)
    tokens = read_tokens(keys)
    link = run.folder / "learners.link"  # with their own token in place of the relay's
    theirs = (folder / "link").read_text().replace(tokens.named("eu").secret, tokens.named("join").secret)
    write_secret(link, theirs)
    learners = [
        run.beside(
            "learn", SCRIPTS / "line.py", "--join", link, "--name", f"learner-{n}", "--folder", run.folder / f"of-{n}",
            "--", "--pace", "0.05",
        )
        for n in range(2)
    ]  # fmt: skip
    run.until(lambda events: (folder / "sums.jsonl").exists() and count_sums(run) > 3)
    assert run.command("tokens", "--keys", keys.path, "revoke", "eu").returncode == 0
    assert relay.wait(WAIT_S) == 2
    moment = time.time()
    said = (run.folder / "beside.log").read_text()
    assert "Traceback" not in said, said
    (line,) = [line for line in said.splitlines() if line.startswith("atoll: ") and "revoked" in line]
    assert "the token 'eu' was revoked" in line
    run.until(lambda events: len(in_rounds_since(run, moment)) == 2)
    run.interrupt()
    run.ended()
    assert [one.wait(WAIT_S) for one in learners] == [0, 0]
    assert run.summary["tokens"]["in_flight"] == 0 and verify_run(run.out).ok
    assert {event["incarnation"] for event in run.events("joined")} == {1}


@pytest.mark.faults
def test_a_run_with_sums_is_replayed_from_its_journal(run: Run) -> None:
    """Supervised learners are sent through a relay by their script; the replay has neither relay nor link."""
    link = run.folder / "relay" / "link"
    script = run.folder / "relayed.py"
    script.write_text(
        "import os, pathlib, runpy, sys, time\n"
        f"link = pathlib.Path({str(link)!r})\n"
        "if os.environ.get('ATOLL_SYNCER') and os.environ.get('ATOLL_ROLE') != 'evaluator':\n"
        "    while not link.exists():\n"
        "        time.sleep(0.05)\n"
        "    os.environ['ATOLL_SYNCER'] = link.read_text().strip()\n"
        "sys.argv = ['line.py', '--pace', '0.02']\n"
        f"runpy.run_path({str(SCRIPTS / 'line.py')!r}, run_name='__main__')\n"
    )
    words = [word for one in SETTINGS for word in ("--set", one)]
    run.train(script, "--learners", "2", "--steps", "60", *words)
    relay = run.beside("relay", "--join", run.address(), "--out", link.parent, "--port", "0")
    run.ended()
    assert relay.wait(WAIT_S) == 0 and count_sums(run) > 0
    found = run.replay()
    assert found["from_journal"] and found["difference"] is None and not found["stopped"], found
    assert found["identical"] == (found["made_again"] > 0), "what is only read proves nothing"


@pytest.mark.faults
def test_four_learners_cost_the_link_of_their_region_little_more_than_one(tmp_path: Path) -> None:
    """The whole measurement is benchmarks/relays.py."""
    found = compare("bf16", tmp_path, learners=4, width=512, steps=60, pace=0.1)
    assert found["share"] <= 0.3, found
