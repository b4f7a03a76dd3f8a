"""The files of examples/deploy/skypilot: by SkyPilot's own parser where it is, and their commands by a real run.

SkyPilot (470 MB) pins other versions of packages than Atoll is tested with, so it is not among the extra
`integrations`. Install it elsewhere and name its Python: SKYPILOT_PYTHON=sky/bin/python make integrations.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.containers import ROOT
from tests.system.conftest import SCRIPTS, WAIT_S, Run

yaml = pytest.importorskip("yaml")

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]
FILES = ROOT / "examples" / "deploy" / "skypilot"
PYTHON = os.environ.get("SKYPILOT_PYTHON", sys.executable if importlib.util.find_spec("sky") else "")
PARSE = """
import json, sys, sky, yaml
document = yaml.safe_load(open(sys.argv[1]))
given = [(name, "x") for name in document.get("secrets", {})]  # as --secret NAME does
task = sky.Task.from_yaml_config(document, secrets_overrides=given)
(one, *more) = task.resources
print(json.dumps({
    "name": task.name, "spot": one.use_spot, "ports": one.ports, "secrets": sorted(task.secrets),
    "accelerators": sorted(name for found in task.resources for name in found.accelerators or ()),
    "recovery": one.job_recovery,
}))
"""


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FILES / name).read_text()))


def parse(name: str, folder: Path) -> dict[str, Any]:
    env = {**os.environ, "HOME": str(folder), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    env.pop("PYTHONPATH", None)
    words = [PYTHON, "-c", PARSE, str(FILES / name)]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(not PYTHON, reason="SkyPilot is not installed: name its Python by SKYPILOT_PYTHON")
def test_skypilot_reads_the_learners_job_as_it_is_meant(tmp_path: Path) -> None:
    found = parse("learner.yaml", tmp_path)
    assert found["spot"] and found["secrets"] == ["ATOLL_JOIN"]
    assert found["accelerators"] == ["A100-80GB", "H100", "L40S"]
    assert found["recovery"]["strategy"] == "EAGER_NEXT_REGION"


@pytest.mark.skipif(not PYTHON, reason="SkyPilot is not installed: name its Python by SKYPILOT_PYTHON")
def test_skypilot_reads_the_syncers_machine_as_it_is_meant(tmp_path: Path) -> None:
    found = parse("syncer.yaml", tmp_path)
    assert not found["spot"] and found["ports"] == ["7077"]


def test_only_what_a_restart_cannot_mend_ends_a_job() -> None:
    recovery = read("learner.yaml")["resources"]["job_recovery"]
    assert 2 not in recovery["recover_on_exit_codes"] and "max_restarts_on_errors" not in recovery
    assert read("learner.yaml")["secrets"] == {"ATOLL_JOIN": None}, "a secret is in no file"


class Machine:
    """A folder as the home of a machine, with the `atoll` of this environment where setup would put it."""

    def __init__(self, run: Run, name: str) -> None:
        self._run, self.home = run, run.folder / name
        (self.home / "work").mkdir(parents=True)
        (self.home / "atoll").symlink_to(sys.prefix)

    def start(self, file: str, **values: str) -> subprocess.Popen[str]:
        task = read(file)
        env = {**self._run.environment(), **task["envs"], **values, "HOME": str(self.home)}
        text = task["run"].replace("7077", values.get("PORT", "7077"))
        with (self.home / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", "-c", text], cwd=self.home / "work", env=env, text=True, stdout=log, stderr=log
            )


@pytest.mark.system
@pytest.mark.faults
def test_the_commands_of_both_files_make_a_run_in_which_a_machine_is_taken_away(run: Run) -> None:
    port, options = str(Run.free_port()), "--learners 2 --steps 150 --set fragments=4 --set sync_every=8"
    host = Machine(run, "syncer")
    assert host.start("syncer.yaml", ATOLL_ADVERTISE="").wait(60) == 0, "sky launch only makes the machine ready"
    syncer = host.start("syncer.yaml", ATOLL_ADVERTISE="127.0.0.1", ATOLL_OPTIONS=options, PORT=port)
    run.out = host.home / "run" / "out"
    keys = host.home / "run" / "keys"
    run.until_events(lambda events: (keys / "last.json").exists())
    link = run.ask("tokens", "--keys", keys, "link").stdout.strip()

    def learner(machine: str, name: str) -> subprocess.Popen[str]:
        values = {"ATOLL_LEARNER": name, "ATOLL_JOIN": link, "SCRIPT": str(SCRIPTS / "plain.py")}
        return Machine(run, machine).start("learner.yaml", **values)

    first, second = learner("a", "learner-0"), learner("b", "learner-1")
    run.until_events(lambda events: sum(event["kind"] == "round" for event in events) > 6)
    second.send_signal(signal.SIGKILL)  # a spot machine is gone, and so is its disk
    second.wait()
    third = learner("c", "learner-1")
    run.until_events(lambda events: sum(event["kind"] == "joined" for event in events) > 2)
    for machine in ("a", "c"):
        (run.folder / machine / "work" / "gate").touch()  # short steps from here on
    assert [one.wait(WAIT_S) for one in (first, third, syncer)] == [0, 0, 0], run.logs()
    assert set(run.summary["per_learner"]) == {"learner-0", "learner-1"}
    assert run.command("verify", run.out).returncode == 0
