"""The image: its Dockerfile's own commands, carried out without docker as it would; and docker's build where it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.integrations.containers import ROOT, Image, Instruction, Volume, parse_dockerfile, possible

pytestmark = pytest.mark.integrations
DOCKERFILE = ROOT / "Dockerfile"
needs_root = pytest.mark.skipif(not possible(), reason="needs root, mount namespaces and setpriv")


def docker_answers() -> bool:
    """Its command alone builds nothing: there has to be an engine."""
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True, check=False, timeout=60).returncode == 0


def only(name: str) -> Instruction:
    (found,) = (one for one in parse_dockerfile(DOCKERFILE.read_text()) if one.name == name)
    return found


def run(image: Image, *command: str, bare: bool = False, **volumes: Path) -> subprocess.CompletedProcess[str]:
    mounts = [Volume(folder, f"/{name}") for name, folder in volumes.items()]
    words = image.container(command, volumes=mounts, bare=bare).words()
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)


def writable(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def test_it_runs_as_a_user_without_rights_and_names_its_base_by_version() -> None:
    user, _, group = only("USER").text.partition(":")
    assert int(user) > 0 and int(group) > 0, "a number: Kubernetes cannot tell of a name that it is not root's"
    assert only("FROM").text.partition(":")[2] not in ("", "latest")


def test_what_is_copied_is_not_ignored_and_all_else_is() -> None:
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    copied = {
        one for line in parse_dockerfile(DOCKERFILE.read_text()) if line.name == "COPY" for one in line.words[:-1]
    }
    assert ignore[1] == "*" and {line[1:] for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / one).exists() for one in copied)


@needs_root
def test_its_commands_work_on_a_root_that_cannot_be_written(image: Image, tmp_path: Path) -> None:
    scratch = writable(tmp_path / "tmp")
    assert "Usage: atoll" in run(image, tmp=scratch).stdout, "what it does without a command"
    kernels = {file.name for file in scratch.rglob("*.nbi")}
    assert kernels == {file.name for file in image.home.glob("kernels/**/*.nbi")} != set()
    done = run(image, "sh", "-c", "id -u; touch /opt/atoll/x /usr/x /x; echo >/tmp/x && echo written", tmp=scratch)
    assert done.stdout.split() == ["10001", "written"] and done.stderr.count("Read-only file system") == 3


@needs_root
@pytest.mark.faults
def test_a_run_trains_in_it_and_compiles_nothing(image: Image, tmp_path: Path) -> None:
    scratch, out = writable(tmp_path / "tmp"), writable(tmp_path / "runs")
    words = ("atoll", "train", "--out", "/runs/a", "--learners", "2", "--steps", "30", "--set", "workload.depth=1")
    done = run(image, *words, tmp=scratch, runs=out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "a" / "summary.json").is_file()
    kernels = {file.name for file in image.home.glob("kernels/**/*.nbc")}
    assert {file.name for file in scratch.rglob("*.nbc")} == kernels, "those of the image were found"


@pytest.mark.skipif(not docker_answers(), reason="no docker engine answers here")
def test_docker_builds_it_and_its_help_is_printed() -> None:
    subprocess.run(["docker", "build", "--tag", "atoll-test", str(ROOT)], check=True, timeout=1800)
    words = ["docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "atoll-test"]
    assert "Usage: atoll" in subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout


@needs_root
@pytest.mark.faults
@pytest.mark.timeout(1800)
def test_all_its_packages_install_anew(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    whole = Image.build(DOCKERFILE, tmp_path_factory.mktemp("whole"), with_packages=True)
    done = run(whole, "python", "-c", "import torch, atoll; print(atoll.__file__)", tmp=writable(tmp_path / "tmp"))
    assert done.stdout.startswith("/opt/atoll/venv/"), done.stderr
