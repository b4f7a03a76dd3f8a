from __future__ import annotations

from pathlib import Path

import pytest

from atoll.launch.on_ray.cluster import LearnerNeeds, RayNode, find_shortage, name_actor, parse_engine
from atoll.protocol.errors import ConfigError

NODES = [RayNode("a", "10.0.0.1", 16, 8), RayNode("b", "10.0.0.2", 16, 8), RayNode("c", "10.0.0.3", 64, 0)]


@pytest.mark.parametrize(
    ("learners", "cpus", "gpus"), [(16, 1, 1), (2, 16, 8), (4, 8, 4), (96, 1, 0), (5, 16, 0), (10**6, 0, 0)]
)
def test_a_run_fits_where_every_learner_finds_a_node(learners: int, cpus: float, gpus: float) -> None:
    assert find_shortage(NODES, learners, LearnerNeeds(cpus, gpus)) == ""


def test_what_is_missing_is_named_with_what_would_fit() -> None:
    told = find_shortage(NODES, 4, LearnerNeeds(1, 8))
    assert "4 learners of 1 CPU and 8 GPUs do not fit on 3 nodes with 96 CPUs and 16 GPUs" in told
    assert "16 GPUs are missing" in told and "--learners 2" in told


def test_enough_in_all_and_on_no_node_together() -> None:
    told = find_shortage(NODES, 1, LearnerNeeds(1, 16))
    assert "no node has so much together" in told and "ask for less" in told


def test_cpus_count_where_gpus_would_do() -> None:
    assert "--learners 8" in find_shortage(NODES, 16, LearnerNeeds(4, 1))


@pytest.mark.parametrize(
    ("learners", "cpus", "gpus", "nodes"), [(1, 2, 16, 2), (2, 16, 8, 2), (1, 0, 0, 3), (16, 3, 0, 3), (16, 2, 1, 2)]
)
def test_a_learner_over_several_nodes_fits_on_different_ones(
    learners: int, cpus: float, gpus: float, nodes: int
) -> None:
    assert find_shortage(NODES, learners, LearnerNeeds(cpus, gpus, nodes)) == ""


@pytest.mark.parametrize(
    ("learners", "cpus", "gpus", "nodes", "words"),
    [
        (1, 4, 0, 4, "1 learners of 4 CPUs on 4 nodes do not fit on 3 nodes with 96 CPUs and 16 GPUs: 1 more node"),
        (3, 2, 16, 2, "32 GPUs are missing; start 1 "),
        (1, 0, 24, 3, "8 GPUs are missing"),
        (1, 192, 0, 2, "96 CPUs are missing"),
        (1, 66, 0, 2, "no 2 nodes have so much together"),
    ],
)
def test_what_is_missing_for_learners_over_several_nodes(
    learners: int, cpus: float, gpus: float, nodes: int, words: str
) -> None:
    assert words in find_shortage(NODES, learners, LearnerNeeds(cpus, gpus, nodes))


def test_a_cluster_without_nodes() -> None:
    assert "no node" in find_shortage([], 1, LearnerNeeds(1, 0))


def test_an_engine_is_ray_here_or_elsewhere() -> None:
    assert parse_engine("ray") == "" and parse_engine("ray://head:10001") == "ray://head:10001"
    for word in ("rays", "ray://", "slurm", ""):
        with pytest.raises(ConfigError, match="is not understood"):
            parse_engine(word)


def test_one_folder_is_one_name() -> None:
    assert name_actor(Path("/runs/my run"), "learner-0") == "/runs/my_run:learner-0"
