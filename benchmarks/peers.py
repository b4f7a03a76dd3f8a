"""A round of 64 MiB of parameters between two learners: ours, those of other systems, and bare all-reduces.

    python benchmarks/peers.py [--rounds 8] [--mib 64] [--only NAME ...] [--forgather CHECKOUT]

With --only the new rows replace those of the same names in the result file, and its other rows stay.

Every system with its default codec, on this machine, one after the other. `round_s` is from the read of the parameters
(the later of both learners') until both have the new ones in their models; `held_s` is how long a learner's training
thread is held for that round, `longest_s` the longest single hold. Medians, without the first two rounds. Ours is
durable: every round is synced to disk before it is announced (and without that, for comparison). `ours-24` has the
default number of fragments instead of one: `held_s` is the sum over all 24, `longest_s` the longest of any step.

Other people's packages go into virtual environments of their own below build/peers, which are made at the first run and
need the network: torchft 0.2.0, GradientMail 0.0.2, and Flower 1.41.0 in the second (peer_learners/ runs them).
GradientMail is written for Python 3.12; on 3.11 its `type` statements and type parameters are rewritten to what 3.11
knows, and nothing else. Forgather is no package: --forgather names a clone of https://github.com/jdinalt/forgather.

`flower` is the runtime that Flower documents; `flower-stream` its older, deprecated one. A Flower client gets its
parameters when a round begins and trains within it, so it is held from the end of one training until the next begins.
`flower` starts a process for every training and asks for work every three seconds: of it half as many rounds are run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bodies import MIB, WIDTH, PlayedTraining, open_run, serve_until
from runs import train
from seeds import count_cores, find_commit

HERE = Path(__file__).resolve().parent
PEERS = HERE.parent / "build" / "peers"
RESULT = HERE / "results" / "peers.json"
TORCHFT, GRADIENTMAIL, FLOWER = "torchft==0.2.0", "gradientmail==0.0.2", "flwr==1.41.0"
PEER_S = 600.0
SKIPPED = 2

Rounds = list[dict[str, float]]


# ---- ours -----------------------------------------------------------------------------------------------------------


def measure_ours(
    rows: int, rounds: int, codec: str = "bf16", durability: str = "round", *, learners: int = 2, scratch: Path
) -> list[Rounds]:
    with open_run(scratch, learners, rows, codec, durability) as crowd:
        holds = [clock_holds(one) for one in crowd]
        found: list[Rounds] = [[] for _ in crowd]
        for number in range(1, rounds + 1):
            began = time.monotonic()
            for one in crowd:
                one.step()
            serve_until(crowd, lambda number=number: all(has_adopted(one, number) for one in crowd))  # type: ignore[misc]
            ended = time.monotonic()
            for one, held in zip(found, holds, strict=True):
                one.append({"began": began, "ended": ended, "held_s": sum(held), "longest_s": max(held)})
                held.clear()
        return found


def clock_holds(one: PlayedTraining) -> list[float]:
    """Seconds that its training thread copies a fragment out or takes a version in, as they come."""
    held: list[float] = []

    def clocked(work: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: object) -> None:
            began = time.monotonic()
            work(*given)
            held.append(time.monotonic() - began)

        return timed

    boundary = one.boundary
    assert boundary is not None
    boundary._copy, boundary._take = clocked(boundary._copy), clocked(boundary._take)  # type: ignore[method-assign]
    return held


def has_adopted(one: PlayedTraining, version: int) -> bool:
    return one.box is not None and int(one.box.adopted[0]) >= version


def measure_default_fragments(mib: int, cycles: int) -> dict[str, Any]:
    """A run of real learners (flights.py) with 24 fragments: how long `learner.step()` holds the training thread."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        os.environ |= {"PARAMETERS": str(mib * MIB // 4), "STEP_S": "0.1", "HELD": scratch}
        words = ["cut_every=0", "evaluate_every=0", f"steps={24 * (cycles + SKIPPED)}"]
        arguments = [str(HERE / "flights.py"), "--learners", "2", *(w for word in words for w in ("--set", word))]
        summary = train(arguments)
        for name in ("PARAMETERS", "STEP_S", "HELD"):
            del os.environ[name]
        steps = [json.loads(path.read_text())["held"] for path in Path(scratch).glob("held-*.json")]
    kept = [one[24 * SKIPPED : 24 * (SKIPPED + cycles)] for one in steps]
    sums = [sum(one[at : at + 24]) for one in kept for at in range(0, len(one) - 23, 24)]
    every = sorted(spent for one in kept for spent in one)
    return {
        "held_s": round(median(sums), 5),
        "longest_s": round(every[-1], 5),
        "p99_s": round(every[int(0.99 * len(every))], 5),
        "effective_h": summary["effective_h"],
    }


# ---- others ---------------------------------------------------------------------------------------------------------


@cache
def prepare_torch_peers() -> str:
    """An interpreter that has torchft, where there is a wheel of it, and GradientMail."""
    home = PEERS / "torch"
    if not is_ready(home, TORCHFT, GRADIENTMAIL):
        pip = make_environment(home)
        torch_only = home / "constraints.txt"
        torch_only.write_text(f"torch=={version('torch').partition('+')[0]}\n")
        subprocess.run([*pip, "install", "-c", str(torch_only), "torch", "numpy", "safetensors>=0.8"], check=True)
        installed = subprocess.run([*pip, "install", "-c", str(torch_only), TORCHFT], check=False)
        add_gradientmail(home, pip)
        if not installed.returncode:
            mark_ready(home, TORCHFT, GRADIENTMAIL)
    return str(home / "bin" / "python")


@cache
def prepare_flower() -> str:
    """An interpreter that has Flower. Its requirements are many and rule out versions that torchft's ask for."""
    home = PEERS / "flower"
    if not is_ready(home, FLOWER):
        subprocess.run([*make_environment(home), "install", FLOWER], check=True)
        mark_ready(home, FLOWER)
    return str(home / "bin" / "python")


def is_ready(home: Path, *packages: str) -> bool:
    mark = home / "ready"
    return mark.exists() and mark.read_text().split() == list(packages)


def mark_ready(home: Path, *packages: str) -> None:
    (home / "ready").write_text("\n".join(packages))


def make_environment(home: Path) -> list[str]:
    """A new virtual environment; the command of its pip."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    return [str(home / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]


def add_gradientmail(home: Path, pip: list[str]) -> None:
    fetch = ["download", "--no-deps", "--python-version", "3.12", "--only-binary", ":all:", "-d", str(home)]
    subprocess.run([*pip, *fetch, GRADIENTMAIL], check=True)
    site = next((home / "lib").glob("python3*/site-packages"))
    with zipfile.ZipFile(next(home.glob("gradientmail-*.whl"))) as wheel:
        wheel.extractall(site)
    if sys.version_info < (3, 12):
        for path in (site / "gradientmail").rglob("*.py"):
            path.write_text(lower(path.read_text()))


def lower(source: str) -> str:
    """Python 3.12's `type X = …` and type parameters, as Python 3.11 writes them."""
    names: set[str] = set()

    def bare(parameters: str) -> str:
        plain = [one.partition(":")[0].strip() for one in parameters.split(",")]
        names.update(plain)
        return ", ".join(plain)

    def of_class(found: re.Match[str]) -> str:
        bases = f"{found[3]}, " if found[3] else ""
        return f"class {found[1]}({bases}_Generic[{bare(found[2])}]):"

    def of_function(found: re.Match[str]) -> str:
        bare(found[2])
        return found[1]

    source = re.sub(r"^type (_Json|ParameterTree) = .*$", r"\1 = object", source, flags=re.M)  # these name themselves
    source = re.sub(r"^type (\w+) = ", r"\1 = ", source, flags=re.M)
    source = re.sub(r"\bclass (\w+)\[([^\]]+)\](?:\(([^)]*)\))?:", of_class, source)
    source = re.sub(r"(\bdef \w+)\[([^\]]+)\](?=\()", of_function, source)
    made = "".join(f'{name} = _TypeVar("{name}")\n' for name in sorted(names))
    return f"from typing import Generic as _Generic, TypeVar as _TypeVar\n{made}{source}" if names else source


def run_peer(python: str, script: str, *arguments: object) -> list[Rounds]:
    command = [python, str(HERE / "peer_learners" / script), *map(str, arguments)]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=plain, start_new_session=True
    ) as running:
        try:
            said, complained = running.communicate(timeout=PEER_S)
        except BaseException:
            os.killpg(running.pid, signal.SIGKILL)  # its learners with it
            raise
    if running.returncode:
        raise RuntimeError(f"{script}: {complained.strip().splitlines()[-1:]}")
    found: list[Rounds] = json.loads(said.splitlines()[-1])
    return found


# ---- all of them ----------------------------------------------------------------------------------------------------


def describe(found: list[Rounds]) -> dict[str, Any]:
    rounds = list(zip(*found, strict=False))[SKIPPED:]
    taken = [max(one["ended"] for one in both) - max(one["began"] for one in both) for both in rounds]
    every = [one for both in rounds for one in both]
    return {
        "rounds": len(rounds),
        "round_s": round(median(taken), 4),
        "fastest_s": round(min(taken), 4),
        "slowest_s": round(max(taken), 4),
        "held_s": round(median(one["held_s"] for one in every), 5),
        "longest_s": round(median(one["longest_s"] for one in every), 5),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows, rounds = options.mib * MIB // 4 // WIDTH, options.rounds + SKIPPED
    mine = sys.executable

    def ours(codec: str, durability: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
            return describe(measure_ours(rows, rounds, codec, durability, scratch=Path(scratch)))

    def torch_peer(script: str, *words: object) -> dict[str, Any]:
        return describe(run_peer(prepare_torch_peers(), script, rows, rounds, *words))

    def flower(how: str, rounds: int) -> dict[str, Any]:
        return describe(run_peer(prepare_flower(), "flower_rounds.py", rows, rounds, how))

    systems: dict[str, Any] = {
        "ours": lambda: ours("bf16", "round"),
        "ours-fp32": lambda: ours("fp32", "round"),
        "ours-fp32-no-fsync": lambda: ours("fp32", "cut"),
        "ours-24": lambda: measure_default_fragments(options.mib, cycles=max(3, options.rounds // 3)),
        "torchft": lambda: torch_peer("torchft_diloco.py", 0),
        "torchft-delayed": lambda: torch_peer("torchft_diloco.py", 20),
        "gradientmail": lambda: torch_peer("gradientmail_session.py", 1.0, 1),
        "gradientmail-fast": lambda: torch_peer("gradientmail_session.py", 0.05, 0),
        "flower": lambda: flower("deployment", SKIPPED + max(2, options.rounds // 2)),
        "flower-stream": lambda: flower("stream", rounds),
        "forgather": lambda: torch_peer("forgather_diloco.py", options.forgather.resolve()),
        "gloo": lambda: describe(run_peer(mine, "gloo.py", rows, rounds, "all-reduce")),
        "ddp": lambda: describe(run_peer(mine, "gloo.py", rows, rounds, "ddp")),
        "ddp-alone": lambda: describe(run_peer(mine, "gloo.py", rows, rounds, "alone")),
    }
    found: dict[str, Any] = {}
    for name in options.only or systems:
        if name == "forgather" and options.forgather is None:
            print("forgather: left out, as no --forgather names a checkout of it", file=sys.stderr)
            continue
        try:
            day = datetime.now(UTC).date().isoformat()
            found[name] = {**systems[name](), "load": round(os.getloadavg()[0], 1), "measured": day}
        except (RuntimeError, ValueError, OSError, subprocess.SubprocessError) as error:
            found[name] = {"could_not_run": str(error)}
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    return found


def compare(found: dict[str, Any]) -> dict[str, float]:
    def ratio(name: str, over: str, of: str) -> float | None:
        both = found.get(name, {}).get(of), found.get(over, {}).get(of)
        return round(both[0] / both[1], 4) if both[0] and both[1] else None

    told = {
        "gradientmail_over_ours": ratio("gradientmail", "ours", "round_s"),
        "gradientmail_fast_over_ours": ratio("gradientmail-fast", "ours", "round_s"),
        "torchft_over_ours": ratio("torchft", "ours", "round_s"),
        "forgather_over_ours": ratio("forgather", "ours", "round_s"),
        "flower_over_ours": ratio("flower", "ours", "round_s"),
        "flower_stream_over_ours": ratio("flower-stream", "ours", "round_s"),
        "held_over_torchft": ratio("ours", "torchft", "held_s"),
        "held_over_gradientmail": ratio("ours", "gradientmail", "held_s"),
        "longest_24_over_torchft": ratio("ours-24", "torchft", "longest_s"),
        "p99_24_over_torchft": None,
    }
    if "p99_s" in found.get("ours-24", {}) and "longest_s" in found.get("torchft", {}):
        told["p99_24_over_torchft"] = round(found["ours-24"]["p99_s"] / found["torchft"]["longest_s"], 4)
    return {name: value for name, value in told.items() if value is not None}


def read_kept(options: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """The result whose other rows stay, where only some are measured."""
    if not options.only or not options.out.exists():
        return {}
    kept: dict[str, Any] = json.loads(options.out.read_text())
    if (kept["mib"], kept["machine"]) != (options.mib, machine):
        raise SystemExit(
            f"{options.out} has rounds of {kept['mib']} MiB on {kept['machine']}, these are of {options.mib} MiB on"
            f" {machine}: give another --out, or measure all"
        )
    return kept


def kept_forgather(kept: dict[str, Any]) -> dict[str, str]:
    return {name: number for name, number in kept.get("versions", {}).items() if name == "forgather"}


def read_commit(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--only", nargs="+", help="names of systems, as the result has them")
    parser.add_argument("--forgather", type=Path, metavar="CHECKOUT", help="a clone of Forgather")
    parser.add_argument("--note", default="", help="a word on the machine, for the result")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = {"arch": platform.machine(), "cores": count_cores(), "system": platform.system()}
    kept = read_kept(options, machine)
    stayed = {name: {"commit": kept["commit"], **row} for name, row in kept.get("systems", {}).items()}
    found = stayed | measure(options)
    result = {
        "machine": machine,
        "versions": {"python": platform.python_version(), "torch": version("torch"), "numpy": version("numpy")}
        | {name: number for name, _, number in (one.partition("==") for one in (TORCHFT, GRADIENTMAIL, FLOWER))}
        | ({"forgather": read_commit(options.forgather)} if options.forgather else kept_forgather(kept)),
        "commit": find_commit(),
        "note": options.note,
        "mib": options.mib,
        "systems": found,
        "compared": compare(found),
    }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
