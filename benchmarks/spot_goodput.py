"""Goodput on a cluster of spot machines: predicted by the simulator, then measured in a real run on Ray.

    python benchmarks/spot_goodput.py [--trace examples/spot_trace.toml]

A Ray cluster on this machine: a head and another node that stay, and as many spot nodes as the trace has, each with a
GPU that only Ray counts, and so one learner. Steps last 0.25 s, asleep: two cores are enough.

1. A first run, in which two nodes are taken away and come back, says what the simulator has to know of this machine:
   the length of a step and the share of it that is work, how late learners begin, and how long one takes from its
   node's coming to its first step.
2. With this the simulator predicts the goodput of the trace. The prediction is written down before the next run starts.
3. A second run: nodes are killed without warning, and started, on the schedule of the trace. Its clock starts with the
   training part of the run, and the run is asked to end with it.

Goodput is that of summary.json: seconds spent stepping, of all learners, over learners times seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.system.ray_cluster import RayCluster, opened_cluster

from atoll.estimate.goodput import Job, gather, run
from atoll.estimate.profile import Elasticity, Failures, Profile
from atoll.estimate.spot_trace import NodeChange, SpotTrace, find_absences, load_trace
from atoll.launch.on_ray.cluster import connect
from atoll.launch.on_ray.controller import find_controller
from atoll.observe.clusters import NEVER_S, measure_run
from atoll.store.event_parts import read_lines
from atoll.telemetry.events import Event, parse

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "spot_goodput.json"
SCRIPT = Path(__file__).parent / "spot_learner.py"
ASKED_POINTS = 2.0
SEEDS = 20
WAIT_S = 600.0
SETTLE_S, AWAY_S = 5.0, 12.0
"""In the first run: of steps before and after, and without a node, for longer than Ray takes to miss it."""


class SpotCluster:
    """Spot nodes by their names."""

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster, self._nodes = cluster, dict[str, Any]()

    def make(self, change: NodeChange) -> None:
        if change.up:
            self._nodes[change.node] = self._cluster.add(cpus=1, gpus=1)
        else:
            self._cluster.lose(self._nodes.pop(change.node))


class SpotRun:
    """A run on Ray that goes on until it is asked to end."""

    def __init__(self, folder: Path, learners: int) -> None:
        words = ["--learners", str(learners), "--gpus-per-learner", "1", "--steps", "1000000"]
        command = [sys.executable, "-m", "atoll.cli", "train", str(SCRIPT), "--on", "ray", "--out", str(folder)]
        self._command = [*command, *words, "--set", "evaluate_every=0"]
        self._folder = folder

    def __enter__(self) -> SpotRun:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.wait_for_recoveries(1)
        self.began = float(next(event for event in self.events() if event["kind"] == "recovered")["at"])
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    @property
    def now(self) -> float:
        """Seconds since the beginning of its training part."""
        return time.time() - self.began

    def events(self) -> list[Event]:
        return list(parse(read_lines(self._folder / "events.jsonl")))

    def wait_for_recoveries(self, count: int) -> None:
        """Of learners, since its beginning."""
        deadline = time.monotonic() + WAIT_S
        while sum(event["kind"] == "recovered" for event in self.events()) < count:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                raise RuntimeError(f"{count} learners never came: {self._process.communicate()[1]}")
            time.sleep(0.05)

    def end(self) -> dict[str, Any]:
        """In good order; its summary."""
        import ray

        connect("")
        ray.get(find_controller(self._folder).interrupt.remote(), timeout=WAIT_S)  # type: ignore[union-attr]
        ray.shutdown()  # nothing that belongs to a node is to be lost with it
        self._process.communicate(timeout=WAIT_S)
        return dict(json.loads((self._folder / "summary.json").read_text()))


def measure_machine(folder: Path, cluster: SpotCluster, nodes: tuple[str, ...]) -> Profile:
    """What the simulator has to know, from a run in which two nodes are lost, one after the other. Of an absence, what
    lies behind the coming of the node is recovery."""
    away = []
    with SpotRun(folder, len(nodes)) as run:
        run.wait_for_recoveries(len(nodes))
        time.sleep(SETTLE_S)
        for number, node in enumerate(nodes[:2], start=1):
            lost = run.now
            cluster.make(NodeChange(lost, node, False))
            time.sleep(AWAY_S)
            away.append(run.now - lost)
            cluster.make(NodeChange(run.now, node, True))
            run.wait_for_recoveries(len(nodes) + number)
            time.sleep(SETTLE_S)
        run.end()
        found = measure_run(run.events(), "a first run on this cluster").profile
    absent = found.failures.observed_s
    if len(absent) != len(away):
        raise RuntimeError(f"{len(away)} nodes were lost for a while, and {len(absent)} learners came back")
    recovery = Elasticity(recover_s=fmean(absent) - fmean(away), start_s=found.elasticity.start_s)
    return msgspec.structs.replace(found, failures=Failures(mtbi_s=NEVER_S), elasticity=recovery)


def follow(trace: SpotTrace, cluster: SpotCluster, folder: Path) -> tuple[dict[str, Any], float]:
    """A run under this trace: its summary, and by how many seconds a change came late at most."""
    late = 0.0
    with SpotRun(folder, len(trace.nodes)) as run:
        for change in trace.changes:
            time.sleep(max(0.0, change.at_s - run.now))
            late = max(late, run.now - change.at_s)
            print(f"  {run.now:5.1f} s: {change.node} {'comes' if change.up else 'is lost'}", flush=True)
            cluster.make(change)
        time.sleep(max(0.0, trace.seconds - run.now))
        return run.end(), late


def predict(profile: Profile, trace: SpotTrace) -> dict[str, Any]:
    """No rounds are played: nobody waits for them."""
    learners = len(trace.nodes)
    absences = find_absences(trace, learners)
    jobs = [
        Job(profile, "decoupled", learners, learners, seed, trace.seconds / 3600, 0, absences) for seed in range(SEEDS)
    ]
    return msgspec.to_builtins(gather(jobs[0], [run(job) for job in jobs]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT / "examples" / "spot_trace.toml")
    parser.add_argument("--out", type=Path, default=RESULT)
    said = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the cluster ends with this
    trace, began = load_trace(said.trace), time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    with tempfile.TemporaryDirectory() as scratch, opened_cluster(nodes=1) as ray_cluster:
        cluster = SpotCluster(ray_cluster)
        for node in trace.nodes:
            cluster.make(NodeChange(0.0, node, True))
        print(f"{time.monotonic() - began:.0f} s: a first run", flush=True)
        profile = measure_machine(Path(scratch) / "first", cluster, trace.nodes)
        predicted = predict(profile, trace)
        print(f"{time.monotonic() - began:.0f} s: predicted {100 * predicted['goodput']:.1f} %", flush=True)
        said.out.with_suffix(".predicted.json").write_text(json.dumps(predicted, indent=2) + "\n")
        summary, late = follow(trace, cluster, Path(scratch) / "run")
    said.out.with_suffix(".predicted.json").unlink()
    points = 100 * (predicted["goodput"] - summary["goodput"])
    found = {
        "trace": said.trace.name,
        "predicted_goodput": predicted["goodput"],
        "measured_goodput": summary["goodput"],
        "error_points": abs(points),
        "asked_points": ASKED_POINTS,
        "losses": sum(not change.up for change in trace.changes),
        "recover_s": profile.elasticity.recover_s,
        "latest_change_s": late,
        "measured": {key: summary[key] for key in ("wall_s", "uptime", "liveness", "merged_share", "rounds", "tokens")},
        "steps": sum(one["steps"] for one in summary["per_learner"].values()),
        "failure": summary["failure"],
        "predicted": predicted,
        "profile": msgspec.to_builtins(profile),
        "took_s": time.monotonic() - began,
    }
    said.out.write_text(json.dumps(found, indent=2) + "\n")
    print(
        f"predicted {100 * predicted['goodput']:.1f} %, measured {100 * summary['goodput']:.1f} %: "
        f"{points:+.2f} points (asked: {ASKED_POINTS:g}); {found['took_s']:.0f} s"
    )
    return 0 if abs(points) <= ASKED_POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
