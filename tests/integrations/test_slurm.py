"""A short run on a real Slurm, where there is one; what is preempted is in tests/system (make faults)."""

from __future__ import annotations

import pytest
from tests.system.slurm import LocalSlurm
from tests.system.test_slurm import slurm as slurm
from tests.system.test_slurm import test_an_array_of_learners_trains_beside_the_syncers_job as test_an_array_of_learners

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.skipif(not LocalSlurm.possible(), reason="needs root, slurmctld, slurmd and munged"),
]

__all__ = ["slurm", "test_an_array_of_learners"]
