"""How a round grows with the fragment and with the number of learners, memory per parameter, and 7B and 70B projected.

    python benchmarks/scaling.py [--rounds 8] [--draw docs]

sizes     rounds of one fragment between two learners, as peers.py counts them: read to adopted, default codec, durable
learners  the same with 16 MiB and ever more learners; parameters that the syncer merges per second, and its peak memory
memory    a run of real processes with the default settings and pretended steps (flights.py), at two sizes; the growth
          per parameter, beside what the layout says (docs/architecture.md, Memory)
project   what `atoll simulate bandwidth --profile atoll` says for 7B and 70B; and whether a link carries per step what
          that profile says, by the bytes that benchmarks/results/links.json counted on real links

All learners are on this machine, and one process plays the training processes of the first two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bodies import MIB, WIDTH, read_memory
from msgspec.structs import replace
from peers import SKIPPED, describe, measure_ours
from seeds import count_cores, find_commit

from atoll.config import Outer, convert
from atoll.estimate.bandwidth import loads_gbit, profile
from atoll.launch.local import LocalRun
from atoll.mailbox.box import BoxLayout
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.store.rundir import RunDir
from atoll.syncer.model import contribution_bytes

HERE = Path(__file__).resolve().parent
RESULT, LINKS = HERE / "results" / "scaling.json", HERE / "results" / "links.json"
SIZES_MIB = (1, 4, 16, 64, 256)
CROWDS = (1, 2, 4, 8)
CROWD_MIB = 16
SMALL, LARGE = 24 * 256 * 256, 24 * 256 * 8192
"""Parameters of the two runs whose memory is compared."""
GBIT_S = "1,2,5,10"
CODECS = (("bf16", "fp32"), ("int4", "int4"))
MODELS = (("7B", "2"), ("70B", "10"))
"""Parameters, and seconds of a step that is assumed."""


# ---- rounds ---------------------------------------------------------------------------------------------------------


def measure_round(mib: int, learners: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        rows = mib * MIB // 4 // WIDTH
        told = describe(measure_ours(rows, rounds + SKIPPED, learners=learners, scratch=Path(scratch)))
        peak = int((Path(scratch) / "syncer.memory").read_text())
    row = {"mib": mib, "learners": learners, **told, "mib_per_s": round(mib * learners / told["round_s"], 1)}
    row |= {"syncer_peak_mib": round(peak / MIB), "load": round(os.getloadavg()[0], 1)}
    print(row, file=sys.stderr, flush=True)
    return row


# ---- memory ---------------------------------------------------------------------------------------------------------


class Peaks:
    """The most memory that each kind of process of a run was seen to take."""

    def __init__(self) -> None:
        self.of = dict.fromkeys(("syncer", "shared", "courier"), 0)
        self.run: LocalRun

    def look(self, status: object) -> None:
        self._raise("syncer", self.run._syncer.process, "RssAnon")
        for child in self.run._learners.values():
            self._raise("shared", child.process, "RssShmem")
            if child.process is not None:
                for courier in find_children(child.process.pid):
                    self.of["courier"] = max(self.of["courier"], read_memory(courier, "RssAnon"))

    def _raise(self, kind: str, process: subprocess.Popen[bytes] | None, field: str) -> None:
        if process is not None:
            self.of[kind] = max(self.of[kind], read_memory(process.pid, field))


def find_children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def run_for_memory(parameters: int, learners: int = 2, steps: int = 96) -> dict[str, int]:
    os.environ |= {"PARAMETERS": str(parameters), "STEP_S": "0.2"}
    document = {
        "protocol": {"learners": learners, "steps": steps, "cut_every": 0},
        "service": {"evaluate_every": 0},
    }
    peaks = Peaks()
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        folder, script = RunDir.create(Path(scratch) / "run"), [str(HERE / "flights.py")]
        config = convert(document, "the benchmark")
        peaks.run = LocalRun(config, folder, script=script, evaluator=False, watch=peaks.look)
        asyncio.run(peaks.run.run())
    return peaks.of


def measure_memory() -> dict[str, Any]:
    small, large = run_for_memory(SMALL), run_for_memory(LARGE)
    grown = {kind: round((large[kind] - small[kind]) / (LARGE - SMALL), 2) for kind in small}
    told = {"parameters": [SMALL, LARGE], "learners": 2, "measured_bytes_per_parameter": grown}
    told["layout_bytes_per_parameter"] = read_layout(LARGE)
    print(told, file=sys.stderr, flush=True)
    return told


def read_layout(parameters: int) -> dict[str, float]:
    """What the code itself says, for the same model and the same settings."""
    tensors = [TensorSpec(str(number), (parameters // 24 // 256, 256), "float32") for number in range(24)]
    settings = Settings(fragments=24, sync_every=24)
    plan = make_plan(tensors, 24)
    layout = BoxLayout.of(plan, settings)
    return {
        "shared_from_the_start": round(layout.first_bytes / plan.size, 2),
        "shared_at_most": round(layout.total_bytes / plan.size, 2),
        "syncer": round((2 + len(Outer().make().slots())) * 4.0, 2),
        "syncer_for_each_contribution": round(contribution_bytes(plan, settings) / plan.size, 2),
    }


# ---- projected ------------------------------------------------------------------------------------------------------


def simulate(*words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "atoll.cli", "simulate", "bandwidth", "--profile", "atoll", *words]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    return [{key: round(v, 4) if isinstance(v, float) else v for key, v in one.items()} for one in answers]


def project() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Eight learners, each in a data center of its own, 50 ms from the syncer: by model, and by what they send."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for parameters, step_s in MODELS:
        place = ["--parameters", parameters, "--step-s", step_s, "--datacenters", "8", "--learners", "8"]
        place += ["--latency-s", "0.05", "--gbit-s", GBIT_S]
        rows = {"data-parallel": simulate(*place, "--methods", "data-parallel")}
        for codec, down in CODECS:
            asked = [*place, "--methods", "decoupled", "--codec", codec, "--version-codec", down]
            rows[codec] = simulate(*asked)
        found[parameters] = rows
    return found


def check_profile() -> dict[str, Any] | None:
    """What the profile says that a learner's link carries per round, beside what was counted on a real one."""
    if not LINKS.exists():
        return None
    links = json.loads(LINKS.read_text())
    asked, counted = links["asked"], links["limited"]["ours"]["kilobytes_per_round"]
    places = {"learners": asked["learners"], "datacenters": asked["learners"], "step_s": asked["step"]}
    run = replace(profile("atoll").run, parameters=asked["parameters"], **places)
    predicted = dict(zip(("up", "down"), (1e6 / 8 * gbit / run.fragments for gbit in loads_gbit(run)), strict=True))
    return {
        "predicted_kilobytes_per_round": {way: round(value, 1) for way, value in predicted.items()},
        "counted_kilobytes_per_round": counted,
        "counted_over_predicted": {way: round(counted[way] / predicted[way], 4) for way in predicted},
    }


# ---- pictures -------------------------------------------------------------------------------------------------------


def draw(result: dict[str, Any], folder: Path) -> None:
    """Four pictures in one: round time, throughput, memory, projected H."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    (sizes, crowds), (memory, projected) = figure.subplots(2, 2)
    sizes.loglog([r["mib"] for r in result["sizes"]], [r["round_s"] for r in result["sizes"]], "o-", color="#0072B2")
    sizes.set(title="A round of one fragment, two learners", xlabel="fragment in MiB", ylabel="seconds")
    row = result["crowds"]
    crowds.plot([r["learners"] for r in row], [r["mib_per_s"] for r in row], "o-", color="#009E73")
    crowds.set(title=f"Merged by one syncer, {CROWD_MIB} MiB each", xlabel="learners", ylabel="MiB/s of parameters")
    crowds.set_ylim(bottom=0)
    both = {f"{name}, measured": v for name, v in result["memory"]["measured_bytes_per_parameter"].items()}
    layout = result["memory"]["layout_bytes_per_parameter"]
    both |= {f"{name.replace('_', ' ')}, layout": value for name, value in layout.items()}
    memory.barh(list(both), list(both.values()), color=["#0072B2"] * 3 + ["#999999"] * (len(both) - 3))
    memory.invert_yaxis()
    memory.set(title="Memory", xlabel="bytes per parameter")
    for (parameters, _), colour in zip(MODELS, ("#D55E00", "#CC79A7"), strict=True):
        for (codec, down), dash in zip(CODECS, ("-", "--"), strict=True):
            rows = result["projected"][parameters][codec]
            points = [r["gbit_s"] for r in rows], [r["effective_h"] for r in rows]
            projected.loglog(*points, dash, marker="o", color=colour, label=f"{parameters}, {codec} up, {down} down")
    projected.axhline(24, color="#999999", linewidth=0.8)
    projected.set(title="Projected effective H (24 asked)", xlabel="Gbit/s of a learner's link", ylabel="steps")
    projected.legend(frameon=False, fontsize=8)
    label(sizes, SIZES_MIB, (0.03, 0.1, 0.3, 1, 3, 10))
    label(projected, [int(width) for width in GBIT_S.split(",")], (24, 50, 100, 200))
    crowds.set_xticks(CROWDS)
    for axes in (sizes, crowds, memory, projected):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "scaling.png", dpi=110)


def label(axes: Any, x: Sequence[float], y: Sequence[float]) -> None:
    """Plain numbers on logarithmic axes, those within what is drawn."""
    from matplotlib.ticker import NullLocator

    low, high = axes.get_ylim()
    y = [value for value in y if low <= value <= high]
    for axis, ticks in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_ticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axis.set_minor_locator(NullLocator())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--note", default="", help="a word on the machine, for the result")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--draw", type=Path, help="a folder for scaling.png")
    parser.add_argument("--only-draw", action="store_true", help="of the result that is there, projected anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only_draw:
        result = json.loads(options.out.read_text())
    else:
        result = {
            "machine": {"arch": platform.machine(), "cores": count_cores(), "system": platform.system()},
            "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")},
            "commit": find_commit(),
            "note": options.note,
            "sizes": [measure_round(mib, 2, options.rounds) for mib in SIZES_MIB],
            "crowds": [measure_round(CROWD_MIB, learners, options.rounds) for learners in CROWDS],
            "memory": measure_memory(),
        }
    result |= {"projected": project(), "profile_check": check_profile()}
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.draw is not None:
        draw(result, options.draw)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
