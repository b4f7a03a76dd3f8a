"""Runs with a bucket, which is moto's S3: everything is killed, the disk is gone, and they go on from the bucket."""

from __future__ import annotations

import shutil
import statistics
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from tests.system.conftest import Event, Run
from tests.system.stores import BUCKET, LocalS3, possible
from tests.system.stores import s3 as s3

from atoll.bucket.claims import claim_term, newest_term, read_claim
from atoll.bucket.client import open_bucket

pytestmark = [
    pytest.mark.system,
    pytest.mark.faults,
    pytest.mark.skipif(not possible(), reason="needs obstore and moto: make integrations"),
]

URL = f"s3://{BUCKET}/run"
FEW = ("--set", "fragments=4", "--set", "sync_every=4", "--set", "cut_every=10")
"""Every file of a cut is an object."""
SHAPE = ("--learners", "2", "--set", "evaluate_every=0", *FEW, "--store", URL)


def committed(events: list[Event]) -> int:
    return max((event["round"] + 1 for event in events if event["kind"] in ("round", "passed")), default=0)


def gaps(events: list[Event]) -> list[float]:
    at = [float(event["at"]) for event in events if event["kind"] == "round"]
    return [later - sooner for sooner, later in pairwise(at)]


def lose_disk(run: Run) -> int:
    """Kill everything and delete the run's folder; how many rounds it had committed."""
    run.kill_everything()
    rounds = committed(run.events())
    shutil.rmtree(run.out)
    return rounds


def go_on(run: Run, folder: Path, *words: str) -> Run:
    again = Run(run.folder)
    again.out = folder
    return again.start("train", "--resume", folder, *words).ended()


def test_with_durability_store_a_lost_disk_costs_nothing(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100000", *SHAPE, "--set", "durability=store", replayed=False)
    run.until(lambda events: committed(events) > 25)
    told = lose_disk(run)
    again = go_on(run, run.folder / "again", "--store", URL, "--steps", "80")
    (back,) = again.events("reigned")[-1:]
    assert back["round"] >= told, "a round that was told is not there"
    assert back["run"] == again.events("run")[0]["run"], "it is the same run"
    verified = again.command("verify", again.out)
    assert verified.returncode == 0 and "all is well" in verified.stdout, verified.stdout


def test_with_durability_round_a_lost_disk_needs_the_operators_word_and_begins_a_new_run(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100000", *SHAPE, replayed=False)
    run.until(lambda events: committed(events) > 45)
    old = run.events("run")[0]["run"]
    told = lose_disk(run)
    again = run.folder / "again"
    refused = run.command("train", "--resume", again, "--store", URL)
    assert refused.returncode == 2 and "has not released it" in refused.stderr and "--take-over" in refused.stderr
    assert not again.exists()
    restored = run.command("restore", URL, again, "--take-over")
    assert restored.returncode == 0, restored.stderr
    assert f"run {old} was not released" in restored.stdout
    assert "those that it told of after that are lost" in restored.stdout
    after = go_on(run, again, "--steps", "80")
    (back,) = after.events("reigned")[-1:]
    assert back["run"] != old and told - 30 < back["round"] <= told, "a second's rounds may be lost, not a cut's"
    verified = after.command("verify", again)
    assert verified.returncode == 0 and "all is well" in verified.stdout, verified.stdout
    # It ended in good order, so anybody may go on with it, as the same run.
    shutil.rmtree(again)
    third = go_on(run, run.folder / "third", "--store", URL, "--steps", "100")
    assert third.events("reigned")[-1]["run"] == back["run"]


def test_the_old_machine_cannot_go_on_once_another_has_claimed_the_run(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100000", *SHAPE, replayed=False)
    run.until(lambda events: committed(events) > 20)
    restored = run.command("restore", URL, run.folder / "again", "--take-over")
    assert restored.returncode == 0, restored.stderr
    run.ended(code=1)
    assert "this run went on elsewhere" in run.stderr + run.stdout
    before = set(open_bucket(URL).list_objects())
    refused = run.command("train", "--resume", run.out)
    assert refused.returncode == 2 and "went on elsewhere" in refused.stderr
    now = set(open_bucket(URL).list_objects())
    assert {key for key in now - before if not key.startswith("probes/")} == set()


def test_a_store_that_fails_at_random_for_a_minute_delays_no_round(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100000", *SHAPE, replayed=False)
    run.until(lambda events: committed(events) > 60)
    healthy = len(run.events())
    s3.failing = 0.6
    ends = time.time() + 60
    run.until(lambda events: time.time() > ends)
    s3.failing = 0.0
    assert s3.refused > 20
    bad = [event for event in run.events()[healthy:] if event["at"] < ends]
    good = gaps(run.events()[:healthy][-60:])
    assert statistics.median(gaps(bad)) < 2 * statistics.median(good), "rounds take longer while the store fails"
    assert max(gaps(bad)) < max(3.0, 3 * max(good))
    run.interrupt()
    run.ended()
    copy = run.folder / "copy"
    restored = run.command("restore", URL, copy, "--read-only")
    assert restored.returncode == 0, restored.stderr
    for name in ("journal/segment-000001.log", "model.safetensors", "events.jsonl", "summary.json"):
        assert (copy / name).read_bytes() == (run.out / name).read_bytes(), name
    assert run.command("verify", copy).returncode == 0


def test_a_store_that_hangs_is_named_before_a_request_times_out_and_catches_up(run: Run, s3: LocalS3) -> None:
    def alarms(events: list[Event], *, over: bool) -> list[Event]:
        return [one for one in events if one["kind"] == "alarm" and one["over"] == over and one["at"] > hung_at]

    run.train("--steps", "100000", *SHAPE, replayed=False)
    run.until(lambda events: committed(events) > 30)
    hung_at = time.time()
    s3.answering.clear()
    run.until(lambda events: bool(alarms(events, over=False)))
    alarm = alarms(run.events(), over=False)[0]
    assert f"the store fails: {URL} has not answered for " in alarm["text"] and "; what waits: " in alarm["text"]
    assert alarm["at"] - hung_at < 45
    s3.answering.set()
    run.until(lambda events: bool(alarms(events, over=True)))
    run.interrupt()
    run.ended()
    assert run.command("verify", URL).returncode == 0


def test_a_store_that_is_down_stops_commits_and_no_training_with_durability_store(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "100000", *SHAPE, "--set", "durability=store", replayed=False)
    run.until(lambda events: committed(events) > 30)
    s3.down = True
    run.until(lambda events: any(event["kind"] == "alarm" for event in events))
    rounds = committed(run.events())
    steps = run.command("status", run.out, "--json").stdout
    time.sleep(5)
    assert committed(run.events()) == rounds and run.command("status", run.out, "--json").stdout != steps
    s3.down = False
    run.until(lambda events: committed(events) > rounds + 20)
    run.interrupt()
    run.ended()


def test_of_sixteen_claimants_one_wins(s3: LocalS3) -> None:
    bucket = open_bucket(URL)
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: claim_term(bucket, 1, f"disk-{n}", Path("/")), range(16)))
    assert won.count(True) == 1
    assert newest_term(bucket) == 1 and read_claim(bucket, 1).token == f"disk-{won.index(True)}"


def test_settings_name_the_store(run: Run, s3: LocalS3) -> None:
    run.train("--steps", "40", *SHAPE).ended()
    assert tomllib.loads((run.out / "run.toml").read_text())["service"]["store"] == URL
    taken = run.command("train", "--out", run.folder / "other", "--store", URL, "--steps", "40")
    assert taken.returncode == 2 and f"{URL} holds another run" in taken.stderr
