from __future__ import annotations

import subprocess
import sys

import pytest

from atoll.learner.script import end_script

SCRIPT = """
import torch, atoll
with atoll.Learner(torch.nn.Linear(2, 2, dtype=torch.float64), syncer="http://127.0.0.1:9"):
    print("never inside")
"""


def test_the_cause_is_kept_for_those_who_look() -> None:
    cause = ValueError("why")
    with pytest.raises(SystemExit) as caught:
        end_script("what", 2, cause)
    assert caught.value.code == 2 and caught.value.__cause__ is cause


@pytest.mark.system
def test_a_script_ends_with_one_line_and_no_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("atoll: parameter 'weight' is float64") and ended.stderr.count("\n") == 1
