"""A learner that is ended before it has joined: its script goes no further, in processes of their own."""

from __future__ import annotations

import signal
import subprocess

import pytest
from tests.learner.test_two_learners import WAIT_S, StartedProcesses, events, place, until

__all__ = ["place"]
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RANKED = """
import os, torch.distributed
torch.distributed.init_process_group("gloo", init_method=f"file://{os.environ['MEET']}", rank=int(os.environ["RANK"]),
                                     world_size=2)
"""


def check_ended(place: StartedProcesses, name: str, learner: subprocess.Popen[bytes]) -> None:
    assert learner.wait(WAIT_S) == 143, place.log(name)
    assert place.log(name).splitlines()[-1] == (
        "atoll: ended before it joined the run, which has nothing of it: its machine is taken away (SIGTERM); "
        "the same command lets it join"
    )
    assert "Traceback" not in place.log(name)
    assert not place.result_path(name).exists(), "what follows `with` runs on no untrained model"


def test_sigterm_ends_one_that_nobody_answers(place: StartedProcesses) -> None:
    learner = place.learner("learner-0")
    until(lambda: _handles_sigterm(learner), "it is joining")
    learner.send_signal(signal.SIGTERM)
    check_ended(place, "learner-0", learner)


def test_sigterm_ends_one_that_waits_for_the_others(place: StartedProcesses) -> None:
    out = place.syncer(steps=1000, wait_for_learners_s=600)
    learner = place.learner("learner-0")
    until(lambda: "connected to run" in place.log("learner-0"), "it waits for the second learner")
    learner.send_signal(signal.SIGTERM)
    check_ended(place, "learner-0", learner)
    [left] = until(lambda: events(out, "left"), "the run hears of it")
    assert left["learner"] == "learner-0" and "(SIGTERM); it had not joined yet" in left["text"]


@pytest.mark.faults
def test_sigterm_ends_one_that_trains_without_having_joined(place: StartedProcesses) -> None:
    """Entering waits no longer: it makes steps, and is in no run."""
    place.syncer(steps=1000, wait_for_learners_s=600)
    text = place.script.read_text()
    place.script.write_text(text.replace("Learner(model, optimizer)", "Learner(model, optimizer, join_wait_s=6)"))
    learner = place.learner("learner-0", HOW="own")
    until(lambda: "training begins without it" in place.log("learner-0"), "it trains")
    learner.send_signal(signal.SIGTERM)
    check_ended(place, "learner-0", learner)


@pytest.mark.faults
def test_sigterm_ends_all_ranks_of_one_that_waits(place: StartedProcesses) -> None:
    out = place.syncer(steps=1000, wait_for_learners_s=600)
    text = place.script.read_text()
    place.script.write_text(text.replace("torch.manual_seed", f"{RANKED}torch.manual_seed", 1))
    meet = {"WORLD_SIZE": "2", "MEET": str(place.path / "meet"), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [place.learner("learner-0", RANK=str(rank), **meet) for rank in range(2)]
    until(lambda: events(out, "joined"), "rank 0 is connected")
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    for rank in ranks:
        assert rank.wait(WAIT_S) == 143, place.log("learner-0")
    assert not place.result_path("learner-0").exists()


def _handles_sigterm(process: subprocess.Popen[bytes]) -> bool:
    with open(f"/proc/{process.pid}/status") as status:
        caught = next(line for line in status if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
