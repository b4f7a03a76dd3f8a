"""The syncer's machine has Atoll without any extra; only the learner's has torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.system.conftest import SCRIPTS, WAIT_S, Run, heed_interrupts

from atoll.extras import EXTRAS, install_command

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def test_a_syncer_without_torch_serves_a_run_that_is_looked_at_checked_and_exported(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as bare:
        bare.setenv("ATOLL_TEST_WITHOUT", ",".join(EXTRAS))
        words = ("--learners", "1", "--steps", "40", "--set", "sync_every=4", "--set", "fragments=2")
        run.start("syncer", "--out", run.out, "--port", "0", *words)
        address = run.address()
    learner = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "line.py")],
        cwd=run.folder,
        env=run.environment({"ATOLL_JOIN": address}),
        text=True,
        stderr=subprocess.PIPE,
        preexec_fn=heed_interrupts,
    )
    run.ended()
    said = learner.communicate(timeout=WAIT_S)[1]
    assert learner.returncode == 0, said
    with monkeypatch.context() as bare:
        bare.setenv("ATOLL_TEST_WITHOUT", ",".join(EXTRAS))
        for words in (["status", run.out], ["verify", run.out], ["export", run.out, run.folder / "model.safetensors"]):
            done = run.command(*words)
            assert done.returncode == 0 and not done.stderr, done.stderr
        told = run.command("report", run.out)
    assert (run.folder / "model.safetensors").stat().st_size > 0
    lacks = f"atoll: atoll report needs plotly, which is not installed here: {install_command('plots')}\n"
    assert (told.returncode, told.stderr) == (2, lacks)
