"""What becomes of the steps that a learner makes while its link is cut: real processes, one learner of four alone.

    python benchmarks/away.py [--adopt carry overwrite] [--away 60] [--step 0.2] [--parameters 1e6] [--out FILE]
    python benchmarks/away.py --away 40 --abandon 20      # past abandon_s: its life is closed meanwhile

Every learner has a relay in user space to the syncer (atoll/chaos/tcp_relay.py). After three cycles of H steps one of
the relays carries nothing for so many seconds, and its connections break at the end; the learner trains on. Steps are
pretended (flights.py: a sleep, one row of every tensor changed), everything else is real.

The row says, of the steps made while the link was cut: how many were merged within two cycles of the reconnect, from
the run's rounds, fragment by fragment; and the weight that these contributions had in their merges over the weight
tokens² / steps that they name. The two differ: `weight_limit` keeps one learner from having most of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from seeds import count_cores, find_commit

from atoll.chaos.performance import read_events
from atoll.chaos.tcp_relay import TcpRelay
from atoll.config import convert
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.launch.local import LocalRun
from atoll.store.rundir import RunDir
from atoll.telemetry.events import Event
from atoll.telemetry.status import RunStatus

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "away.json"
LEARNERS, H = 4, 24
ALONE = "learner-0"
BEFORE, AFTER = 3 * H, 4 * H
"""Steps before the cut, and after it."""


class CutLink:
    """A relay for each learner; that of `ALONE` is cut for a while."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lines: dict[str, TcpRelay] = {}
        self._begun = asyncio.Event()

    async def open(self, url: str) -> dict[str, str]:
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        secrets = published_secrets(address.hostname, address.port)
        for number in range(LEARNERS):
            line = self.lines[f"learner-{number}"] = TcpRelay(address.hostname, address.port)
            line.delay_s = self.options.delay
            await line.start()
            publish_secrets(line.host, line.port, secrets)
        return {name: line.url for name, line in self.lines.items()}

    def watch(self, status: RunStatus | None) -> None:
        if status is not None and status.round >= BEFORE:
            self._begun.set()

    async def cut(self) -> None:
        await self._begun.wait()
        line = self.lines[ALONE]
        line.silence(True)
        await asyncio.sleep(self.options.away)
        line.reset()  # what was held up by the cut is lost with its connections
        line.silence(False)

    async def close(self) -> None:
        for line in self.lines.values():
            await line.stop()
            withdraw_secrets(line.host, line.port)


async def run(options: argparse.Namespace, adopt: str, scratch: Path) -> dict[str, Any]:
    os.environ |= {"PARAMETERS": str(options.parameters), "STEP_S": str(options.step)}
    steps = BEFORE + round(options.away / options.step) + AFTER
    rules = {"learners": LEARNERS, "steps": steps, "cut_every": 0, "wait_for_learners_s": 60.0, "adopt": adopt}
    document = {"protocol": rules | {"abandon_s": options.abandon}, "service": {"evaluate_every": 0}}
    folder, link = RunDir.create(scratch / "run"), CutLink(options)
    config, script = convert(document, "the benchmark"), [str(HERE / "flights.py")]
    route, beside = link.open, link.cut
    try:
        await LocalRun(
            config, folder, script=script, evaluator=False, route=route, watch=link.watch, beside=beside
        ).run()
    finally:
        await link.close()
    return describe(read_events(folder), adopt)


def describe(events: list[Event], adopt: str) -> dict[str, Any]:
    lost = next(event for event in events if event["kind"] == "lost" and event["learner"] == ALONE)
    back = next(event for event in events if event["kind"] == "returned" and event["learner"] == ALONE)
    began, ended = lost["t"], lost["t"] + back["steps"]
    rounds = [event for event in events if event["kind"] == "round"]
    first = next(number for number, event in enumerate(rounds) if event["at"] > back["at"])
    fragments = 1 + max(event["fragment"] for event in rounds)
    merged = claimed = applied = largest = 0.0
    for event in rounds[: first + 2 * fragments]:
        for own in [one for one in event["members"] if one["learner"] == ALONE]:
            covered = min(own["t"], ended) - max(own["t"] - own["steps"], began)
            merged += max(0, covered)
            if covered > 0 and event["at"] > back["at"] and own["incarnation"] == lost["incarnation"]:
                claimed, applied = claimed + own["tokens"] ** 2 / own["steps"], applied + own["weight"]
                largest = max(largest, own["weight"] / sum(one["weight"] for one in event["members"]))
    fates = next(event["fates"] for event in reversed(events) if event["kind"] == "finished")
    return {
        "adopt": adopt,
        "away_s": back["away_s"],
        "steps_away": back["steps"],
        "merged_share_of_them": round(merged / (back["steps"] * fragments), 4),
        "weight_applied_over_claimed": round(applied / claimed, 4) if claimed else None,
        "largest_share_of_a_round": round(largest, 4),
        "said": back["text"],
        "ledger": fates[ALONE],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adopt", nargs="+", default=["carry", "overwrite"])
    parser.add_argument("--away", type=float, default=60.0, help="seconds")
    parser.add_argument("--abandon", type=float, default=300.0, help="the run's abandon_s")
    parser.add_argument("--step", type=float, default=0.2, help="seconds")
    parser.add_argument("--delay", type=float, default=0.02, help="seconds, each way")
    parser.add_argument("--parameters", type=float, default=1e6)
    parser.add_argument("--note", default="", help="a word on the machine, for the result")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    for adopt in options.adopt:
        with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
            rows.append(asyncio.run(run(options, adopt, Path(scratch))))
        print(rows[-1], file=sys.stderr, flush=True)
    asked = {name: getattr(options, name) for name in ("away", "abandon", "step", "delay", "parameters")}
    result = {
        "machine": {"arch": platform.machine(), "cores": count_cores(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "commit": find_commit(),
        "note": options.note,
        "asked": {**asked, "learners": LEARNERS, "sync_every": H},
        "rows": rows,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
