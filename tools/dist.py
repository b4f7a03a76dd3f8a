"""The wheel and the sdist: what is in them, and what they do in empty environments. `make dist` runs it.

    python tools/dist.py                                  build both, check their contents and metadata
    python tools/dist.py python3.11 python3.12            … and install the wheel for each of these Pythons

It needs build, hatchling and twine. For each Python, in an environment that holds nothing else and away from the clone:
the wheel alone simulates, serves, looks at a run and says in one line that torch is missing, with a command; that
command installs it, and the demo is trained, verified and exported. `--without-torch` leaves that second half out;
`--steps` makes it shorter.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAINING = ("torch", "jax", "ray", "lightning", "transformers", "plotly", "matplotlib")
"""What `pip install atoll` alone must not bring."""
GOODPUT = "simulate goodput --profile spot --chips 512 --learners 1,2 --hours 2 --seeds 1 --rounds 4"
LACKS_TORCH = "needs torch, which is not installed here: pip install "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the two files go")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--steps", type=int, help="of the demo")
    asked = parser.parse_args()
    check((ROOT / ".git").exists(), "what is built is compared with what is committed: run this in a clone")
    wheel, sdist = build(asked.out)
    check_wheel(wheel)
    check_sdist(sdist)
    for python in asked.pythons:
        with empty_environment(python) as place:
            command = check_alone(place, wheel)
            if not asked.without_torch:
                check_with_torch(place, command, ["--steps", str(asked.steps)] if asked.steps else [])


# ---- the files ------------------------------------------------------------------------------------------------------


def build(out: Path) -> tuple[Path, Path]:
    """The wheel is built from the sdist, so whoever has the sdist gets the same one."""
    for old in (*out.glob("*.whl"), *out.glob("*.tar.gz")):
        old.unlink()
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)], ROOT)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    run([sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist)], ROOT)
    return wheel, sdist


def check_wheel(wheel: Path) -> None:
    """It holds the package as it is committed, its metadata and its license, and nothing else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = message_from_bytes(archive.read(metadata))
    info = metadata.removesuffix("METADATA")
    files = {name.removeprefix("src/") for name in tracked("src")}
    files |= {info + name for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    check(names == files, f"{wheel.name} has what it should not, or lacks something: {sorted(names ^ files)}")
    needs = [word for word in told.get_all("Requires-Dist", []) if "extra ==" not in word]
    heavy = [word for word in needs if word.startswith(TRAINING)]
    check(not heavy, f"pip install atoll alone would bring {heavy}")
    check(len(needs) == len(project["dependencies"]), f"the wheel asks for {needs}")
    extras = set(told.get_all("Provides-Extra", []))
    check(extras == set(project["optional-dependencies"]), f"the wheel's extras are {sorted(extras)}")
    check(told["Requires-Python"] == project["requires-python"], f"the wheel is for {told['Requires-Python']}")
    check(wheel.name.endswith("-py3-none-any.whl"), f"{wheel.name} is not for every machine")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")


def check_sdist(sdist: Path) -> None:
    """All that is committed: an unpacked sdist can run the tests and build the site."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    known = tracked() | {"PKG-INFO"}
    check(names <= known, f"{sdist.name} has files that are not committed: {sorted(names - known)}")
    check(known <= names, f"{sdist.name} lacks {sorted(known - names)}")
    print(f"{sdist.name}: {len(names)} files, {sdist.stat().st_size / 1e6:.1f} MB")


def tracked(folder: str = ".") -> set[str]:
    """Without links, which no archive of ours has."""
    found = run(["git", "ls-files", "-z", folder], ROOT).split("\0")
    return {name for name in found if name and not (ROOT / name).is_symlink()}


# ---- in empty environments ------------------------------------------------------------------------------------------


@contextmanager
def empty_environment(python: str) -> Iterator[Path]:
    """A folder with an environment in `venv`."""
    version = run([python, "-c", "import platform; print(platform.python_version(), platform.machine())"], ROOT).strip()
    print(f"Python {version}", flush=True)
    with tempfile.TemporaryDirectory(prefix="atoll-dist-") as folder:
        place = Path(folder)
        run([python, "-m", "venv", str(place / "venv")], place)
        install(place, "pip>=25")  # older ones spend half of an install on wheels for other machines
        yield place


def install(place: Path, *what: str) -> None:
    words = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    run([str(place / "venv/bin/python"), *words, *what], place)


def check_alone(place: Path, wheel: Path) -> list[str]:
    """What pip is to install for torch, as the wheel itself says."""
    install(place, str(wheel))
    atoll, python = str(place / "venv/bin/atoll"), str(place / "venv/bin/python")
    check(run([atoll, "--version"], place).startswith("atoll "), "atoll --version says no version")
    found = run([python, "-c", f"from importlib.util import find_spec as f; print(*filter(f, {TRAINING}))"], place)
    check(not found.strip(), f"the environment has {found}")
    check("goodput" in run([atoll, *GOODPUT.split()], place), "atoll simulate goodput printed no goodput")
    demo = subprocess.run([atoll, "train", "--demo"], cwd=place, env=environment(), capture_output=True, text=True)
    told, _, command = demo.stderr.partition(LACKS_TORCH)
    check((demo.returncode, demo.stdout, told) == (2, "", "atoll: the built-in GPT "), demo)
    check(command.endswith("\n") and command.count("\n") == 1, demo)
    code = "import atoll; atoll.Learner"
    learner = subprocess.run([python, "-c", code], cwd=place, env=environment(), capture_output=True, text=True)
    check(learner.stderr == f"atoll: atoll.Learner {LACKS_TORCH}{command}", learner)
    check_syncer(place, atoll)
    print("  alone: atoll simulate and atoll syncer work, and what needs torch says so", flush=True)
    return shlex.split(command)


def check_syncer(place: Path, atoll: str) -> None:
    """It listens, serves its dashboard and status, and ends in good order."""
    out = place / "served"
    command = [atoll, "syncer", "--learners", "1", "--steps", "10", "--port", "0", "--out", str(out)]
    with subprocess.Popen(command, cwd=place, env=environment(), stdout=subprocess.PIPE, text=True) as syncer:
        try:
            assert syncer.stdout is not None
            check(any(line.startswith("syncer at ") for line in syncer.stdout), "atoll syncer does not listen")
            check("learner" in run([atoll, "status", str(out)], place), "atoll status says nothing of learners")
        finally:
            syncer.terminate()
        syncer.stdout.read()


def check_with_torch(place: Path, command: list[str], shorter: list[str]) -> None:
    install(place, *command)
    atoll, begun = str(place / "venv/bin/atoll"), time.monotonic()
    run([atoll, "train", "--demo", "--out", "demo", *shorter], place)
    seconds = time.monotonic() - begun
    run([atoll, "verify", "demo"], place)
    run([atoll, "export", "demo", "model.safetensors"], place)
    check((place / "model.safetensors").stat().st_size > 100_000, "the exported model is too small")
    print(f"  with [torch]: atoll train --demo works ({seconds:.0f} s), atoll verify finds nothing", flush=True)


def environment() -> dict[str, str]:
    """Nothing of the clone."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "ATOLL_", "VIRTUAL_ENV"))}


def run(words: list[str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    check(done.returncode == 0, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def check(holds: bool, otherwise: object) -> None:
    if not holds:
        sys.exit(f"dist: {otherwise}")


if __name__ == "__main__":
    main()
