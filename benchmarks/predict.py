"""Real runs with injected kills against what the goodput simulator predicts from their events.

    python benchmarks/predict.py

Three runs of the small GPT on this machine: 2, 4 and 8 learners, some of which are killed on the way and started again.
`atoll simulate calibrate --from-run` takes step times, failures and recoveries from each and predicts its goodput.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runs import train

RESULT = Path(__file__).parent / "results" / "predict.json"
RUNS = {
    2: (2500, ["learner-0@0.2", "learner-1@0.4", "learner-0@0.6", "learner-1@0.8"]),
    4: (1500, ["learner-0@0.15", "learner-1@0.3", "learner-2@0.45", "learner-3@0.6", "learner-0@0.75"]),
    8: (600, ["learner-0@0.15", "learner-3@0.3", "learner-5@0.45", "learner-6@0.6"]),
}
"""By learners: steps, and who is killed at which share of the run."""


def predict(learners: int, folder: Path) -> dict[str, Any]:
    steps, kills = RUNS[learners]
    words = [word for kill in kills for word in ("--kill", kill)]
    train(["--learners", str(learners), "--steps", str(steps), *words], out=folder)
    command = [sys.executable, "-m", "atoll.cli", "simulate", "calibrate", "--from-run", str(folder), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    measured, predicted = 100 * found["measured"]["goodput"], 100 * found["predicted"]["goodput"]
    print(
        f"{learners} learners, {found['wall_s']:.0f} s, {found['deaths']} deaths: "
        f"measured {measured:.1f} %, predicted {predicted:.1f} % ({found['error_points']:+.1f} points)",
        flush=True,
    )
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        found = [predict(learners, Path(scratch) / str(learners)) for learners in RUNS]
    worst = max(abs(one["error_points"]) for one in found)
    RESULT.write_text(json.dumps({"worst_error_points": worst, "runs": found}, indent=2) + "\n")
    print(f"worst: {worst:.2f} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
