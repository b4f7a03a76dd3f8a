"""All learners behind one shared link of 10 Mbit/s with a small buffer, filled by fragments: control gets through."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atoll.chaos.inject import Injector
from atoll.chaos.performance import ChaosRun, read_events
from atoll.chaos.plan import parse_plan
from atoll.chaos.tcp_relay import Bottleneck
from atoll.store.rundir import RunDir

pytestmark = [pytest.mark.system, pytest.mark.faults, pytest.mark.timeout(900)]

BYTES_PER_S = 10e6 / 8
PLAN: dict[str, Any] = {
    "seconds": 40.0,
    "config": {
        "protocol": {"learners": 4, "sync_every": 12, "fragments": 12, "overlap": 6},
        "service": {"evaluate_every": 0},
        "workload": {"depth": 4, "batch": 1, "block": 32, "pace_s": 0.2},
    },
}


def test_heartbeats_get_through_a_link_that_fragments_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = {}
    route = Injector.open_relays

    async def narrow(self: Injector, url: str) -> dict[str, str]:
        addresses = await route(self, url)
        shared["up"], shared["down"] = Bottleneck(BYTES_PER_S), Bottleneck(BYTES_PER_S)
        for line in self.lines.values():
            line.share(shared["up"], shared["down"])
        return addresses

    monkeypatch.setattr(Injector, "route", narrow)
    out = RunDir.create(tmp_path / "run")
    injector = asyncio.run(ChaosRun(parse_plan(PLAN, "the test"), out).run())

    delays = sorted(delay for line in injector.lines.values() for delay in line.control_delays)
    p99 = delays[int(0.99 * len(delays))]
    events = read_events(out)
    rounds = [event["at"] for event in events if event["kind"] == "round"]
    filled = shared["down"].carried / BYTES_PER_S / (rounds[-1] - rounds[0])
    print(f"{len(delays)} control packets, p99 {1000 * p99:.0f} ms; the link down is {100 * filled:.0f} % full")
    assert filled > 0.8, "it must be filled for this to say anything"
    assert p99 < 0.5
    ends = [event for event in events if event["kind"] == "ending"]
    assert not [e for e in events if e["kind"] == "lost" and e["at"] < ends[0]["at"]], "nobody is thought dead"
