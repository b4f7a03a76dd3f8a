"""Containers without docker: the image of the Dockerfile, built in a folder, and processes that see what a container
would. A root file system of its own that cannot be written, volumes, another user, process 1; the network is shared.

Needs root and mount namespaces (`possible`). The host's Python and its packages take the place of the base image.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = Path("/opt/atoll")
"""Where the image has all that is its own."""
BUILD_S = 600.0

# Every folder of the host that a process needs is there, and none can be written; what is written goes to volumes.
ENTER = """
set -eu
root=$1; shift
mount --make-rprivate /
mount -t tmpfs tmpfs "$root"
while [ "$1" != -- ]; do
    kind=$1 from=$2 to=$root$3; shift 3
    if [ -d "$from" ]; then mkdir -p "$to"; elif [ ! -e "$to" ]; then mkdir -p "$(dirname "$to")"; touch "$to"; fi
    mount --rbind "$from" "$to"
    [ "$kind" = rw ] || mount -o remount,bind,ro "$to"
done
shift
mount -o remount,ro "$root"
exec chroot "$root" "$@"
"""


def possible() -> bool:
    """Whether containers can be made here."""
    if os.geteuid() != 0 or not all(shutil.which(one) for one in ("unshare", "mount", "chroot", "setpriv")):
        return False
    words = ["unshare", "--mount", "--pid", "--fork", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(words, capture_output=True, check=False, timeout=60).returncode == 0


# ---- the image ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    text: str

    @property
    def words(self) -> list[str]:
        """Of those that have a list of words, or words between blanks."""
        return json.loads(self.text) if self.text.startswith("[") else self.text.split()


def parse_dockerfile(text: str) -> list[Instruction]:
    lines = (line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in whole.splitlines()]


@dataclass
class Image:
    """Built as docker would, with `home` for /opt/atoll."""

    home: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @classmethod
    def build(cls, dockerfile: Path, home: Path, *, with_packages: bool) -> Image:
        """`with_packages`: all are installed anew; else those of this environment are used beside Atoll's own."""
        image = cls(home, {"PATH": f"{Path(sys.executable).parent}:{os.defpath}"})
        if not with_packages:
            found = Path(sysconfig.get_path("purelib"))
            packages = home / "venv" / found.relative_to(sys.prefix)
            packages.mkdir(parents=True)
            (packages / "host.pth").write_text(f"{found}\n")  # pip finds there what Atoll asks for
        for one in parse_dockerfile(dockerfile.read_text()):
            image._carry_out(one, dockerfile.parent)
        home.chmod(0o755)
        return image

    def _carry_out(self, one: Instruction, context: Path) -> None:
        if one.name == "RUN":
            self._run(one.text)
        elif one.name == "COPY":
            *sources, target = one.words
            for source in sources:
                self._copy(context / source, target)
        elif one.name == "ENV":
            name, _, value = one.text.partition("=")
            self.environment[name] = value.replace(f"${name}", self.environment.get(name, ""))
        elif one.name == "WORKDIR":
            self.folder = one.text
        elif one.name == "USER":
            self.user = one.text
        elif one.name == "ENTRYPOINT":
            self.entrypoint = one.words
        elif one.name == "CMD":
            self.command = one.words
        else:
            assert one.name in ("FROM", "ARG"), f"{one.name} is not understood here"

    def _copy(self, source: Path, target: str) -> None:
        to = self.home / (Path(self.folder) / target).relative_to(HOME)
        if source.is_dir():
            shutil.copytree(source, to, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            to = to / source.name if target.endswith("/") else to
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, to)

    def _run(self, text: str) -> None:
        pip = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        volumes = [Volume(self.home, str(HOME)), Volume(Path(tempfile.mkdtemp()), "/tmp")]
        box = Container(["sh", "-c", text], self.environment | pip, self.folder, volumes, user="0:0")
        done = subprocess.run(box.words(), capture_output=True, text=True, check=False, timeout=BUILD_S)
        shutil.rmtree(volumes[1].source)
        assert done.returncode == 0, f"RUN {text}\n{done.stdout}\n{done.stderr}"

    def container(
        self,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        folder: str = "",
        volumes: Sequence[Volume] = (),
        *,
        user: str = "",
        bare: bool = False,
    ) -> Container:
        """`bare`: without the entrypoint, as `docker exec` and `kubectl exec` start a command."""
        words = [*([] if bare else self.entrypoint), *(command or self.command)]
        own = Volume(self.home, str(HOME), read_only=True)
        return Container(
            words, self.environment | dict(environment or {}), folder or self.folder, [own, *volumes], user or self.user
        )


# ---- a process in one -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Volume:
    source: Path
    """A folder or file of the host."""
    target: str
    read_only: bool = False


@dataclass
class Container:
    command: list[str]
    environment: dict[str, str]
    folder: str
    volumes: list[Volume]
    user: str

    def words(self) -> list[str]:
        """Process 1 of it is the command."""
        root = Path(tempfile.gettempdir()) / "atoll-test-root"  # each has a file system of its own mounted there
        root.mkdir(exist_ok=True)
        mounts = [Volume(one, str(one), read_only=True) for one in _host_folders()]
        mounts += [Volume(Path("/proc"), "/proc"), Volume(Path("/dev"), "/dev"), *self.volumes]
        mounts.sort(key=lambda one: len(Path(one.target).parts))  # a volume at /tmp does not hide a clone below it
        flat = [word for one in mounts for word in (("ro" if one.read_only else "rw"), str(one.source), one.target)]
        user, _, group = self.user.partition(":")
        rights = ["setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups"]
        rights += [] if user == "0" else ["--no-new-privs", "--bounding-set=-all"]
        values = [f"{key}={value}" for key, value in self.environment.items()]
        inside = ["env", "-i", f"--chdir={self.folder}", *values, *self.command]
        space = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*space, "sh", "-c", ENTER, "enter", str(root), *flat, "--", *rights, *inside]


def _host_folders() -> list[Path]:
    """Python, its packages, the tools of a shell, and what name resolution and TLS read. /opt may hold packages too,
    and the image's own folder is made there."""
    named = [*(Path(f"/{one}") for one in ("usr", "bin", "sbin", "lib", "lib64", "etc", "sys")), *HOME.parent.glob("*")]
    python = [Path(one) for one in (sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), ROOT / "src")]
    found = [one for one in (*named, *python) if one.exists() and one != HOME]
    return [one for one in found if not any(one != other and one.is_relative_to(other) for other in found)]


def first_process(started: subprocess.Popen[str]) -> int:
    """The pid, outside, of process 1 inside. `unshare` is the parent of it."""
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    assert len(children) == 1, shlex.join(children)
    return int(children[0])


def stop(started: subprocess.Popen[str], grace_s: float) -> int:
    """As a container is stopped: SIGTERM to process 1, SIGKILL to all after the grace. The exit code."""
    os.kill(first_process(started), signal.SIGTERM)
    try:
        return started.wait(grace_s)
    except subprocess.TimeoutExpired:
        started.kill()
        return started.wait()
