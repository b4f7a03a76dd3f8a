"""A run on a Ray cluster of several nodes, which are lost without warning; learners are added and taken away."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from tests.system.conftest import SCRIPTS, Event, Run, members
from tests.system.ray_cluster import (
    RayCluster,
    find_actor,
    find_process,
    find_syncer,
    find_syncers,
    opened_cluster,
    until_no_process,
)

pytest.importorskip("ray", reason="needs Ray (pip install 'atoll[ray]')")
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

LINE = (SCRIPTS / "line.py", "--on", "ray", "--set", "evaluate_every=0", "--set", "overlap=1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with opened_cluster(nodes=3) as cluster:
        yield cluster


def names(events: list[Event]) -> set[str]:
    return {name for name, _ in members(events)}


def newest(events: list[Event], name: str) -> int:
    """The newest incarnation of this learner that was in a round."""
    return max((incarnation for one, incarnation in members(events) if one == name), default=0)


def test_nodes_are_lost_and_added_and_the_run_grows_and_shrinks(run: Run, cluster: RayCluster) -> None:
    run.train(*LINE, "--learners", "3")
    run.until(lambda events: names(events) == {"learner-0", "learner-1", "learner-2"})
    here = {name: cluster.node_of(find_process(run.out, name)) for name in ("learner-0", "learner-1", "learner-2")}
    assert len(set(map(id, here.values()))) == 3, "one on each node"

    # A node without a syncer is lost: its learner waits for another, and the others never stop.
    run.until(lambda events: len(find_syncers(run.out)) == 2)
    syncers = {id(cluster.node_of(pid)) for pid in find_syncers(run.out)}
    lost = next(name for name, node in here.items() if id(node) not in syncers)
    cluster.lose(here[lost])
    run.until(lambda events: any(e["kind"] == "exited" and e["process"] == lost for e in events))
    gone = len(run.events("round"))
    run.until(lambda events: len([e for e in events if e["kind"] == "round"]) > gone + 20)
    assert newest(run.events(), lost) == 1, "no node has room for it"
    cluster.add()
    run.until(lambda events: newest(events, lost) == 2)
    others = sorted(set(here) - {lost})
    assert [newest(run.events(), name) for name in others] == [1, 1]
    assert max(run.events("round")[n + 1]["at"] - e["at"] for n, e in enumerate(run.events("round")[:-1])) < 20

    # The syncer's node is lost: the one that stands by goes on.
    serving = cluster.node_of(find_syncer(run.out))
    beside = [name for name in here if cluster.node_of(find_process(run.out, name)) is serving]
    cluster.lose(serving)
    run.until(lambda events: any(e["kind"] == "reigned" and e["term"] == 2 for e in events))
    rounds = len(run.events("round"))
    run.until(lambda events: len([e for e in events if e["kind"] == "round"]) > rounds + 20)
    before = {name: newest(run.events(), name) for name in beside}
    cluster.add(3)
    run.until(lambda events: all(newest(events, name) == before[name] + 1 for name in beside))

    # It grows by two and shrinks by three.
    assert run.ask("scale", run.out, "+2").returncode == 0
    run.until(lambda events: {"learner-3", "learner-4"} <= names(events))
    assert run.ask("scale", run.out, "-3").returncode == 0
    leavers = {"learner-2", "learner-3", "learner-4"}
    run.until(lambda events: leavers <= {e["learner"] for e in events if e["kind"] == "left"})

    step = run.events("round")[-1]["members"][0]["t"]
    assert run.ask("set", run.out, f"steps={step + 200}").returncode == 0
    run.ended()
    until_no_process(run.out, 30)
    assert run.summary["failure"] is None and run.summary["tokens"]["in_flight"] == 0
    verified = run.ask("verify", run.out)
    assert verified.returncode == 0 and "all is well" in verified.stdout


def test_a_node_that_gives_notice_loses_nothing(run: Run, cluster: RayCluster) -> None:
    while len(cluster.nodes) < 4:
        cluster.add()
    run.train(*LINE, "--learners", "2")
    run.until(lambda events: names(events) == {"learner-0", "learner-1"})
    leaves = cluster.node_of(find_process(run.out, "learner-1"))
    cluster.give_notice(leaves)
    run.until(lambda events: newest(events, "learner-1") == 2)
    assert cluster.node_of(find_process(run.out, "learner-1")) is not leaves
    run.until(lambda events: leaves not in [cluster.node_of(pid) for pid in find_syncers(run.out)])
    step = run.events("round")[-1]["members"][0]["t"]
    assert run.ask("set", run.out, f"steps={step + 200}").returncode == 0
    run.ended()
    until_no_process(run.out, 30)
    assert run.summary["tokens"]["lost"] == 0 and run.summary["failure"] is None
    assert run.ask("verify", run.out).returncode == 0


def fill(cluster: RayCluster, nodes: int) -> None:
    while len(cluster.nodes) < nodes:
        cluster.add()


def end_well(run: Run) -> None:
    assert run.ask("set", run.out, f"steps={run.events('round')[-1]['round'] + 300}").returncode == 0
    run.ended()
    until_no_process(run.out, 30)
    assert run.summary["failure"] is None
    verified = run.ask("verify", run.out)
    assert verified.returncode == 0 and "all is well" in verified.stdout


def rank_nodes(run: Run, cluster: RayCluster) -> list[object]:
    return [cluster.node_of(find_process(run.out, "learner-0", rank)) for rank in (0, 1)]


def test_a_learner_over_two_nodes_ends_with_one_of_them_and_comes_back_on_others(run: Run, cluster: RayCluster) -> None:
    fill(cluster, 3)
    words = ("--learners", "1", "--ranks", "2", "--set", "nodes_per_learner=2", "--set", "evaluate_every=0")
    run.train(SCRIPTS / "ranks.py", "--on", "ray", *words, "--steps", "100000", "--", "fsdp", "0.05")
    run.until(lambda events: newest(events, "learner-0") == 1)
    first, second = rank_nodes(run, cluster)
    assert first is not second and first is not None and second is not None
    assert (run.out / "logs" / "learner-0.rank1.log").exists()

    while len(cluster.nodes) > 2:  # no other node has room
        cluster.lose(next(node for node in cluster.nodes if node not in (first, second)))
    cluster.lose(second)
    run.until(lambda events: any(e["kind"] in ("lost", "left") for e in events))
    cluster.add()
    run.until(lambda events: newest(events, "learner-0") == 2)

    os.kill(find_process(run.out, "learner-0", 1), signal.SIGKILL)
    run.until(lambda events: newest(events, "learner-0") == 3)
    assert any("learner-0.rank1 ended: killed by SIGKILL" in e["text"] for e in run.events("exited"))
    end_well(run)


def test_a_run_that_ended_goes_on_also_when_the_node_of_its_syncer_is_lost_before_it_serves(
    run: Run, cluster: RayCluster
) -> None:
    fill(cluster, 3)
    run.train(*LINE, "--learners", "2", "--steps", "60").ended()
    rounds = len(run.events("round"))
    run.start("train", "--on", "ray", "--resume", run.out, "--steps", "100000")
    run.until(lambda events: len(find_syncers(run.out)) == 1)
    cluster.lose(cluster.node_of(find_syncers(run.out)[0]))
    cluster.add()
    run.until(lambda events: len([e for e in events if e["kind"] == "round"]) > rounds + 20)
    end_well(run)


def test_a_node_is_lost_while_learners_start(run: Run, cluster: RayCluster) -> None:
    fill(cluster, 3)
    run.train(*LINE, "--learners", "3", "--steps", "100000")
    run.until(lambda events: any(e["kind"] == "started" and e["process"] == "learner-2" for e in events))
    syncers = {id(cluster.node_of(pid)) for pid in find_syncers(run.out)}
    cluster.lose(next((node for node in cluster.nodes if id(node) not in syncers), cluster.nodes[0]))
    cluster.add()
    run.until(lambda events: names(events) == {"learner-0", "learner-1", "learner-2"})
    end_well(run)


def test_the_controller_and_a_node_are_lost_at_once(run: Run, cluster: RayCluster) -> None:
    fill(cluster, 3)
    run.train(*LINE, "--learners", "2", "--steps", "100000")
    run.until(lambda events: names(events) == {"learner-0", "learner-1"})
    assert cluster.node_of(find_actor("Controller")) is None, "it is on the head"
    os.kill(find_actor("Controller"), signal.SIGKILL)
    cluster.lose(cluster.node_of(find_process(run.out, "learner-1")))
    run.until(lambda events: any("controller was lost" in e["text"] for e in events))
    cluster.add()
    run.until(lambda events: newest(events, "learner-1") == 2)
    end_well(run)
