"""The goodput simulator: how near it comes to the published tables, and what it takes.

    python benchmarks/goodput.py

The whole table as a user would ask for it (30 cells, 5 seeds), a week of 2.4M chips, and how time grows: with
failures, and with healthy chips. Memory is the largest process times all of them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

from atoll.estimate.calibration import published
from atoll.estimate.goodput import Job, run
from atoll.estimate.profile import load, with_values
from atoll.simulate import worker_pool

RESULT = Path(__file__).parent / "results" / "goodput.json"
Cells = dict[tuple[str, int, int], dict[str, Any]]


def ask(*arguments: str) -> tuple[Cells, float]:
    command = [sys.executable, "-m", "atoll.cli", "simulate", "goodput", "--profile", "paper", "--json", *arguments]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - began
    return {(c["method"], c["learners"], c["chips"]): c for c in json.loads(done.stdout)}, seconds


def against_the_tables(cells: Cells) -> dict[str, Any]:
    errors = {
        f"{known.method} M={known.learners} {known.chips} {figure}": round(
            100 * (cells[known.method, known.learners, known.chips][figure] - value), 2
        )
        for known in published()
        for figure, value in (("goodput", known.goodput), ("uptime", known.uptime))
        if value is not None
    }
    sizes = [abs(error) for error in errors.values()]
    return {
        "figures": len(sizes),
        "mean_error_points": fmean(sizes),
        "worst_error_points": max(sizes),
        "errors": errors,
    }


def rule_of_thumb(cells: Cells) -> float:
    """The largest difference in points between goodput(M, N) and goodput(kM, kN)."""
    found = []
    for (method, learners, chips), cell in cells.items():
        for times in (2, 4, 8, 16):
            other = cells.get(("decoupled", times * learners, times * chips))
            if method != "data-parallel" and other is not None:
                found.append(abs(100 * (cell["goodput"] - other["goodput"])))
    return max(found)


def growth() -> dict[str, float]:
    """Microseconds per failure on few and on many chips, and seconds for a thousand times the healthy chips."""
    paper = load("paper")
    calm = with_values(paper, {"failures.mtbi_s": 1000 * paper.failures.mtbi_s})

    def seconds(job: Job) -> tuple[float, float]:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            outcome = run(job)
            times.append(time.perf_counter() - began)
        return median(times), outcome.failures_per_hour * job.hours

    few, few_failures = seconds(Job(paper, "decoupled", 8, 300_000, 0, 168.0, 0))
    more, more_failures = seconds(Job(paper, "decoupled", 8, 2_400_000, 0, 168.0, 0))
    healthy, _ = seconds(Job(calm, "decoupled", 8, 300_000_000, 0, 168.0, 0))
    return {
        "us_per_failure_300k_chips": 1e6 * few / few_failures,
        "us_per_failure_2400k_chips": 1e6 * more / more_failures,
        "failures_ratio": more_failures / few_failures,
        "time_ratio": more / few,
        "time_ratio_of_1000_times_the_healthy_chips": healthy / few,
    }


def main() -> int:
    cells, table_s = ask()
    week, week_s = ask("--learners", "16", "--chips", "2.4M", "--hours", "168", "--seeds", "1")
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "table": {"cells": len(cells), "seconds": table_s} | against_the_tables(cells),
        "rule_of_thumb_worst_points": rule_of_thumb(cells),
        "week_of_2400k_chips_s": week_s,
        "week_goodput": next(iter(week.values()))["goodput"],
        "memory_gib": largest * (1 + worker_pool.cores()),
        "growth": growth(),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
