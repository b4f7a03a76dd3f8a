"""A syncer of several processes: the bits of one, and nothing lost when one of them dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.system.conftest import SCRIPTS, WAIT_S, Event, Run

from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.store.verify import verify_run

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

WIDE = (SCRIPTS / "wide.py", "--learners", "2", "--set", "evaluate_every=0", "--set", "fragments=3")
SYNCHRONOUS = (
    "--set",
    "synchronous=true",
    "--set",
    "sync_every=3",
    "--steps",
    "12",
    "--set",
    "wait_for_learners_s=240",
)
SOON_S = 5.0


def count_rounds(events: list[Event], since: float = 0.0) -> int:
    return sum(event["kind"] == "round" and event["at"] > since for event in events)


def check_clean(run: Run) -> None:
    report = verify_run(run.out)
    assert report.ok, report.problem


def read_model(path: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in load_file(path).items()}


def compile_codec(name: str) -> None:
    """Once for all processes: in a new clone a courier would miss the first round's deadline over it, and the rounds
    would be others."""
    part, codec = make_plan([TensorSpec("a", (4, 640), "float32")], 1).fragments[0], make_codec(name)
    body, values = np.empty(body_nbytes(codec, part), np.uint8), np.ones(part.size, np.float32)
    rest = np.empty_like(values) if codec.needs_feedback else None
    encode_contribution(codec, part, Delta(values, np.zeros_like(values), rest=rest), body)
    decode_contribution(codec, part, body, values)


FURTHER = [pytest.param(*one, marks=pytest.mark.faults) for one in (("int4", "rda-row"), ("fp32", "rda"))]


@pytest.mark.parametrize(("codec", "merge"), [("fp32", "rda-row"), *FURTHER])
def test_the_model_has_the_bits_of_a_syncer_of_one_process(run: Run, codec: str, merge: str) -> None:
    compile_codec(codec)
    settings = (*SYNCHRONOUS, "--set", f"codec={codec}", "--set", f"merge={merge}")
    run.train(*WIDE, *settings, "--syncer-shards", "2").ended()
    check_clean(run)
    assert sum(path.stat().st_size for path in (run.out / "shards" / "2" / "journal").rglob("*.bin")) > 0
    alone = Run(run.folder)
    alone.out = run.folder / "alone"
    alone.start("train", "--out", alone.out, *WIDE, *settings).ended()
    models = []
    for one in (run, alone):
        exported = one.folder / f"{one.out.name}.safetensors"
        done = one.ask("export", one.out, exported)
        assert done.returncode == 0, done.stderr
        assert read_model(exported) == read_model(one.out / "model.safetensors")
        models.append(read_model(exported))
    assert models[0] == models[1]


@pytest.mark.faults
def test_a_killed_shard_comes_back_and_rounds_go_on(run: Run) -> None:
    """By a signal, while learners step as fast as they can. test_shard_crash_matrix.py has deaths of a shard in every
    run of the tests."""
    run.train(*WIDE, "--syncer-shards", "2", "--steps", "100000")
    run.until(lambda events: count_rounds(events) >= 6)
    os.kill(run.pid("shard-2"), signal.SIGKILL)
    run.until(lambda events: any(e["kind"] == "alarm" and e["over"] for e in events))
    away, back = run.events("alarm")
    assert away["text"].startswith("shard 2 was lost") and back["text"].startswith("shard 2 is back")
    run.until(lambda events: count_rounds(events, since=back["at"]) >= 3)
    first = next(e for e in run.events("round") if e["at"] > back["at"])
    assert first["at"] - back["at"] < SOON_S
    assert not [e for e in run.events("restarted", "lost") if e.get("process") != "shard-2"], "learners train on"
    run.interrupt()
    run.ended()
    check_clean(run)


@pytest.mark.faults
def test_a_killed_lead_and_a_kill_of_everything_lose_nothing(run: Run) -> None:
    run.train(*WIDE, "--syncer-shards", "2", "--steps", "100000")
    run.until(lambda events: count_rounds(events) >= 6)
    os.kill(run.pid("syncer"), signal.SIGKILL)
    run.until(lambda events: any(e["kind"] == "reigned" for e in events))
    before = count_rounds(run.events())
    run.until(lambda events: count_rounds(events) >= before + 6)
    run.kill_everything()
    check_clean(run)
    before = count_rounds(run.events())
    run.start("train", "--resume", run.out)
    run.until(lambda events: count_rounds(events) >= before + 6)
    run.interrupt()
    run.ended()
    check_clean(run)


@pytest.mark.faults
def test_without_its_supervisor_the_run_ends_in_good_order_with_all_shards(run: Run) -> None:
    run.train(*WIDE, "--syncer-shards", "2", "--steps", "100000")
    run.until(lambda events: count_rounds(events) >= 6)
    run.signal(signal.SIGKILL)
    run.until_events(lambda events: any(e["kind"] == "finished" for e in events))
    run.until_gone(WAIT_S)
    assert run.events("finished")[0]["reason"] == "its supervisor is gone"
    check_clean(run)


@pytest.mark.faults
def test_the_built_in_model_is_trained_scored_and_repeated(run: Run) -> None:
    """The fixture replays it at its end."""
    run.train("--learners", "2", "--steps", "60", "--syncer-shards", "3", "--set", "version_codec=int8").ended()
    assert run.events("score"), run.logs()
    check_clean(run)


@pytest.mark.faults
def test_shards_by_hand_join_the_first(run: Run) -> None:
    """Those of test_rank_shards.py do in every run of the tests."""
    lead, other = run.free_port(), run.free_port()
    run.start("syncer", "--shard", "1/2", "--out", run.out, "--learners", "1", "--steps", "30", "--port", str(lead))
    url = run.address()
    second = run.beside("syncer", "--shard", "2/2", "--join", url, "--out", run.folder / "two", "--port", str(other))
    learner = run.beside("learn", SCRIPTS / "wide.py", "--syncer", url, "--name", "learner-0")
    run.ended()
    assert second.wait(30) == 0 and learner.wait(30) == 0, (run.folder / "beside.log").read_text()


@pytest.mark.faults
def test_a_standby_takes_over_from_a_killed_lead_with_its_shards(run: Run) -> None:
    lead, other, spare = (str(run.free_port()) for _ in range(3))
    both = f"http://127.0.0.1:{lead},http://127.0.0.1:{spare}"
    run.start("syncer", "--shard", "1/2", "--out", run.out, "--learners", "1", "--steps", "100000", "--port", lead)
    run.address()
    standby = run.beside("syncer", "--standby", run.out, "--port", spare)
    folder = run.out / "shards" / "2"
    second = run.beside("syncer", "--shard", "2/2", "--join", both, "--out", folder, "--port", other)
    learner = run.beside("learn", SCRIPTS / "wide.py", "--syncer", both, "--name", "learner-0")
    run.until(lambda events: count_rounds(events) >= 6)
    run.signal(signal.SIGKILL)
    run.ended(code=-signal.SIGKILL)
    run.until_events(lambda events: any(e["kind"] == "reigned" for e in events))
    back = run.events("reigned")[0]["at"]
    run.until_events(lambda events: count_rounds(events, since=back) >= 6)
    standby.send_signal(signal.SIGINT)
    words = (run.folder / "beside.log").read_text()
    assert standby.wait(60) == 0 and second.wait(60) == 0 and learner.wait(60) == 0, words
    check_clean(run)
