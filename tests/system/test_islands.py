"""A run that has left its machine: a syncer and learners in network namespaces, TLS and tokens between them. One joins
by the link alone, one is cut off for a while and goes on training, one is drained."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import SCRIPTS, Event, Run, members
from tests.system.islands import Loopback, Namespaces, Places

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

NAMES = ["syncer", "learner-0", "learner-1", "learner-2"]
H = 8


class Island(Run):
    def __init__(self, folder: Path, places: Places) -> None:
        super().__init__(folder)
        self.places = places
        self.learners: dict[str, subprocess.Popen[str]] = {}

    def at(self, name: str, *words: str | Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        command = [*self.places.inside(name), sys.executable, "-m", "atoll.cli", *map(str, words)]
        with (self.folder / f"{name}.log").open("a") as log:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment(env), stdout=log, stderr=log, text=True
            )

    def syncer(self) -> str:
        """The join link. A syncer whose output goes to a file says how to get it, and keeps the secret out of it."""
        words = ("--bind", self.places.address("syncer"), "--keys", "atoll-keys", "--learners", "2", "--port", "7077")
        protocol = {"fragments": 4, "sync_every": H}
        (self.folder / "rules.toml").write_text(
            "[protocol]\n" + "".join(f"{key} = {value}\n" for key, value in protocol.items())
        )
        self._process = self.at("syncer", "syncer", "--out", self.out, "--config", "rules.toml", *words)
        self.until(lambda events: "atoll tokens --keys" in (self.folder / "syncer.log").read_text())
        assert "atoll://" not in (self.folder / "syncer.log").read_text()
        printed = self.command("tokens", "--keys", "atoll-keys", "link").stdout.split()
        return next(word for word in printed if word.startswith("atoll://"))

    def join(self, name: str, link: str) -> None:
        seen = self.places.seen_from(name, link)
        self.learners[name] = self.at(name, "learn", SCRIPTS / "plain.py", "--name", name, env={"ATOLL_JOIN": seen})

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


CASES = [
    pytest.param("any", 8.0, id="short"),
    pytest.param("loopback", 8.0, id="loopback"),
    pytest.param("namespaces", 60.0, id="a-minute"),
]


@pytest.fixture
def island(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Island]:
    kind = request.getfixturevalue("kind")
    if kind == "namespaces" and not Namespaces.possible():
        pytest.skip("network namespaces need root and iproute2; addresses of loopback are tested instead")
    places = Loopback(NAMES) if kind == "loopback" or not Namespaces.possible() else Namespaces(NAMES)
    run = Island(tmp_path, places)
    try:
        yield run
        run.until_gone(3.0)
    finally:
        run.kill()
        for process in run.learners.values():
            process.wait()
        places.close()


def rounds_of(events: list[Event], learner: str) -> list[Event]:
    return [e for e in events if e["kind"] == "round" and any(m["learner"] == learner for m in e["members"])]


def member(event: Event, learner: str) -> dict[str, Any]:
    return next(one for one in event["members"] if one["learner"] == learner)


@pytest.mark.parametrize(("kind", "cut_s"), CASES)
def test_one_joins_by_the_link_one_is_cut_off_one_is_drained(kind: str, island: Island, cut_s: float) -> None:
    long = cut_s > 10
    if not long:
        (island.folder / "gate").touch()  # steps of 10 ms, else of half a second
    assert island.command("cert").returncode == 0
    link = island.syncer()
    for name in NAMES[1:3]:
        island.join(name, link)
    island.until(lambda events: len({name for name, _ in members(events)}) == 2)

    began = time.time()
    island.join("learner-2", link)
    island.until(lambda events: bool(rounds_of(events, "learner-2")))
    joined_s = rounds_of(island.events(), "learner-2")[0]["at"] - began
    assert joined_s < 15 or not long, "it contributes soon, by the link alone; beside other tests it may take longer"

    before = member(rounds_of(island.events(), "learner-1")[-1], "learner-1")
    island.places.cut("learner-1", True)
    cut_at = time.time()
    island.until(lambda events: events[-1]["at"] > cut_at + cut_s)
    island.places.cut("learner-1", False)
    healed_at, at_healing = time.time(), island.events("round")[-1]["round"]
    island.until(lambda events: any(e["at"] > healed_at for e in rounds_of(events, "learner-1")))
    back = next(e for e in rounds_of(island.events(), "learner-1") if e["at"] > healed_at)
    after = member(back, "learner-1")
    while_cut = [e for e in island.events("round") if cut_at + 4 < e["at"] < healed_at]
    assert len(while_cut) > cut_s / 2, "the others went on"
    assert not any("learner-1" in [m["learner"] for m in e["members"]] for e in while_cut)
    assert after["incarnation"] == before["incarnation"] and after["t"] - before["t"] > cut_s, "it kept training"
    assert back["round"] - at_healing <= H or not long, "current again within H rounds"
    print(
        f"joined in {joined_s:.1f} s; cut off for {cut_s:g} s, {after['t'] - before['t']} steps meanwhile, "
        f"in a round again {back['at'] - healed_at:.1f} s and {back['round'] - at_healing} rounds after healing"
    )

    command = [*island.places.inside("syncer"), sys.executable, "-m", "atoll.cli", "drain", "learner-2"]
    drained = subprocess.run(
        [*command, "--run", str(island.out)], cwd=island.folder, capture_output=True, text=True, timeout=60, check=False
    )
    assert drained.returncode == 0, drained.stderr
    assert island.learners["learner-2"].wait(30) == 0
    island.until(lambda events: any(e["kind"] == "left" and e["learner"] == "learner-2" for e in events))

    assert island._process is not None
    island._process.send_signal(signal.SIGINT)
    assert island._process.wait(60) == 0, island.logs()
    for name in NAMES[1:3]:
        assert island.learners[name].wait(30) == 0
    tokens = json.loads((island.out / "summary.json").read_text())["tokens"]
    assert tokens["computed"] == tokens["merged"] + tokens["dropped"] and tokens["lost"] == tokens["in_flight"] == 0
    assert island.command("verify", island.out).returncode == 0


@pytest.mark.parametrize("kind", ["namespaces"])
def test_a_learner_has_its_ranks_on_two_machines(kind: str, island: Island) -> None:
    """Their couriers find each other at MASTER_ADDR; both send and fetch their own part."""
    assert island.command("cert").returncode == 0
    link, group = island.syncer(), {"MASTER_ADDR": island.places.address("learner-0"), "MASTER_PORT": "29512"}
    group |= {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "out", "ATOLL_JOIN": link}
    for rank, name in enumerate(NAMES[1:3]):
        words = ("learn", SCRIPTS / "ranks.py", "--name", "learner-0", "--", "fsdp", "0.05")
        island.learners[name] = island.at(name, *words, env={**group, "RANK": str(rank)})
    island.until(lambda events: len(rounds_of(events, "learner-0")) > 3 * H)
    assert "as learner-0, 2 ranks" in (island.folder / "learner-0.log").read_text()
    for name in NAMES[1:3]:
        island.learners[name].send_signal(signal.SIGTERM)
    island.until(lambda events: any(e["kind"] == "left" for e in events))
    assert [island.learners[name].wait(60) for name in NAMES[1:3]] == [0, 0], island.logs()
    assert island._process is not None
    island._process.send_signal(signal.SIGINT)
    assert island._process.wait(60) == 0
    assert island.command("verify", island.out).returncode == 0
