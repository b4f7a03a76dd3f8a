"""A run whose first learners have links of different width: nobody trains alone while another fetches version 0."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.learner.test_two_learners import StartedProcesses, events, until

from atoll.chaos.tcp_relay import TcpRelay
from atoll.cli.shared import where
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.fabric.transfer import get_json
from atoll.store.rundir import RunDir

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(600)]

SCRIPT = """
import sys, time
import torch
import atoll

torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(4)))  # 4 MB
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.Learner(model, optimizer, join_wait_s=300) as learner:  # on a crowded machine the others come late
    open(sys.argv[1], "w").write(str(time.time()))
    while not learner.done:
        model(torch.randn(2, 500)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
        learner.step(tokens=2)
"""
WHOLE = 4 * 4 * (500 * 500 + 500)
NAMES = ("learner-0", "learner-1", "learner-2")


@contextmanager
def line_to(port: int) -> Iterator[tuple[TcpRelay, Callable[..., None]]]:
    """A relay in a thread of its own, and how to call its methods."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    relay = TcpRelay("127.0.0.1", port)
    asyncio.run_coroutine_threadsafe(relay.start(), loop).result(10)
    try:
        yield relay, loop.call_soon_threadsafe
    finally:
        withdraw_secrets(relay.host, relay.port)
        asyncio.run_coroutine_threadsafe(relay.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StartedProcesses]:
    place = StartedProcesses(tmp_path)
    place.script.write_text(SCRIPT)
    yield place
    for process in place.processes:
        process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def begins_at(place: StartedProcesses, name: str) -> float | None:
    """When it went on from joining to its first step; None: it has not."""
    path = place.result_path(name)
    return float(text) if path.exists() and (text := path.read_text()) else None


def start_all(place: StartedProcesses, line: TcpRelay, **rules: object) -> RunDir:
    """The first gives version 0. The third comes by the line."""
    out = place.syncer(learners=3, steps=100_000, wait_for_learners_s=300, **rules)
    publish_secrets(line.host, line.port, published_secrets("127.0.0.1", place.port))
    place.learner("learner-0")
    until(lambda: events(out, "joined"), "the first is there")
    place.learner("learner-1")
    place.learner("learner-2", ATOLL_SYNCER=line.url)
    return out


def status_of(out: RunDir, name: str) -> dict[str, Any]:
    status: Any = asyncio.run(get_json(where(str(out.path)), "/v1/status"))
    found = [one for one in status["learners"] if one["learner"] == name]
    return {"phase": status["phase"], "notice": status["notice"], **(found[0] if found else {})}


def test_nobody_trains_before_the_slowest_link_has_carried_version_0(place: StartedProcesses) -> None:
    with line_to(place.port) as (line, _):
        line.limit(250_000)
        out = start_all(place, line)
        seen = until(
            lambda: (now := status_of(out, "learner-2")).get("fetch_left_s") is not None and now,
            "its download is under way",
        )
        assert seen["phase"] == "waiting" and seen["state"] == "joining"
        assert 0 < seen["lacking_bytes"] < seen["whole_bytes"] == WHOLE
        assert seen["notice"].startswith(
            "Training begins once the learners hold version 0. learner-2 fetches the run's parameters: "
        )
        assert not any(begins_at(place, name) for name in NAMES)
        [begun] = until(lambda: events(out, "begun"), "training begins")
        started = [until(lambda name=name: begins_at(place, name), f"{name} trains") for name in NAMES]
        held = {one["learner"]: one["at"] for one in events(out, "recovered")}
    assert set(held) == set(NAMES) and begun["at"] >= max(held.values())
    assert min(started) >= max(held.values()) - 0.01
    assert begun["seconds"] >= 0.9 * WHOLE / 250_000, "as long as the link takes"
    assert "every learner that is here holds version 0" in begun["text"]
    assert "fetches the run's parameters: " in events(out, "fetching")[0]["text"]
    assert "of 4.01 MB" in place.log("learner-2"), "its own terminal says so too"


def test_a_download_that_stands_still_is_not_waited_for(place: StartedProcesses) -> None:
    with line_to(place.port) as (line, call):
        line.limit(250_000)
        out = start_all(place, line, join_stall_s=3.0, lost_after_s=60.0)
        until(lambda: 0 < status_of(out, "learner-2").get("lacking_bytes", 0) < WHOLE - 500_000, "it is under way")
        call(line.silence, True)
        [begun] = until(lambda: events(out, "begun"), "the others begin")
        assert "not all hold version 0" in begun["text"]
        [warning] = [one for one in events(out, "warning") if one.get("learner") == "learner-2"]
        assert "its download of version 0 has not moved for 3 s" in warning["text"]
        for name in NAMES[:2]:
            until(lambda name=name: begins_at(place, name), f"{name} trains")
        assert begins_at(place, "learner-2") is None
        until(lambda: events(out, "round"), "rounds are committed without it")
        call(line.silence, False)
        call(line.limit, None)
        until(lambda: begins_at(place, "learner-2"), "it comes later")
        until(
            lambda: any(m["learner"] == "learner-2" for one in events(out, "round") for m in one["members"]),
            "it contributes",
        )
