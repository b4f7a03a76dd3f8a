"""Runs of `atoll train` for the benchmarks: started as a user would, their summaries read back."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def train(arguments: list[str], out: Path | None = None, cores: str = "") -> dict[str, Any]:
    """The summary of one run, on `cores` alone where they are named (as taskset writes them)."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = out or Path(scratch) / "run"
        command = [sys.executable, "-m", "atoll.cli", "train", "--json", "--out", str(folder), *arguments]
        if cores:
            command = ["taskset", "-c", cores, *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
        summary: dict[str, Any] = json.loads(done.stdout)
        return summary


def steps_of(summary: dict[str, Any]) -> list[int]:
    """Steps of every learner over all its lives."""
    learners = summary.get("per_learner")
    return [one["steps"] for one in learners.values()] if isinstance(learners, dict) else []
