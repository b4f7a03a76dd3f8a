"""The stages of a round that the benchmark takes the time of are methods that there are."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from bodies import NAMES, STAGES


def test_every_stage_is_a_method_that_has_a_name() -> None:
    for owner, method in [one for stages in STAGES.values() for one in stages]:
        assert callable(getattr(owner, method)) and NAMES[method]
