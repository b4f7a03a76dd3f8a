"""What the dashboard's script writes of a loss is what Python writes of it. Needs node, and no package of it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from atoll.observe import dashboard
from atoll.protocol.statistics import format_score

WORDS = Path(dashboard.__file__).parent / "assets" / "words.js"
PRINT = "const { measure } = await import(process.argv[1]); const { readFileSync } = await import('node:fs');"
PRINT += "console.log(JSON.stringify(JSON.parse(readFileSync(0, 'utf8')).map(measure)));"


def test_a_loss_is_written_as_python_writes_it() -> None:
    if (node := shutil.which("node")) is None:
        pytest.skip("needs node")
    random = np.random.default_rng(0)
    sizes = random.choice([-1, 1], 2000) * random.uniform(1, 10, 2000) * 10.0 ** random.integers(-12, 12, 2000)
    ties = [2.125, 2.375, -0.5, 0.03125, 12250.0, 12350.0, 9999.995, 1 - 2**-53, 0.99996, 0.99999, 1e4, 99950.0, 1e22]
    values = [None, 0.0, 1.0, 0.0001, 0.00001, 123_456.0, 0.0000042134, *ties, *sizes.tolist()]
    command = [node, "--input-type=module", "-e", PRINT, WORDS.as_uri()]
    done = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert dict(zip(values, json.loads(done.stdout), strict=True)) == {value: format_score(value) for value in values}
