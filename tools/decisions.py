"""Decision hashes of real processes: does a change of the shells that should change nothing change nothing?

    python tools/decisions.py                          # every case against tools/decisions.json
    python tools/decisions.py --only shards/small      # one of them; --only shards: all of that layout
    python tools/decisions.py --keep /tmp/before       # and leave what was compared there, as text for diff
    python tools/decisions.py --write                  # record them anew, after a change that is meant to change them

tools/traces.py hashes what the state machines decide in simulated worlds, whose shells are the simulator's. Here small
runs of real processes are hashed, one for each case of lockstep/lockstep_cases.py, in the layouts plain, ranks (2 ranks
per learner), shards (a syncer of 2), relay, and ranks-shards: so a change of syncer/lead.py, syncer/shard_service.py,
courier/body.py, courier/rank_leader.py or relay/service.py cannot change a decision unseen.

What is compared is what lockstep/lockstep_lines.py lists: the journal, tapes, adoptions, chains of shards, sums of
relays, and what the processes say to each other. Runs are synchronous and wait for no clock, so all of it is the same
each time, however busy the machine is, but for the fields and messages that are named there with the reason. A case
with a death in it compares less: `Case.sections` says what, and lockstep_cases.py why.

Each case has two hashes. `decisions` has # in the place of digests and measures of values, and is the same on every
machine. `values` has them; it is compared where the file was recorded on a machine of the same kind, since kernels may
contract a product and a sum on one processor and not on another.

A case that differs is run once more: on a busy machine a request may come to a shard two seconds before the lead's word
of it. Exit code 1: a hash differs both times; the first lines that do are shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "lockstep"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from lockstep_cases import CASES
from lockstep_lines import Sections, mask, read_sections
from lockstep_run import Case, LockstepRun, RunStopped

from atoll.numerics import kernels

RECORDED = Path(__file__).resolve().parent / "decisions.json"
SHOWN = 12
"""Lines of a difference that are shown."""
MARK = 6
"""Characters of each line's hash that are recorded: enough to tell which line differs."""

Hashes = dict[str, dict[str, str]]
"""Section → `decisions` and `values`: a short hash of each line, one behind the other."""


def find_machine() -> str:
    """Return the kind of this machine: where it is the same, values have the same bits."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    level = next((name for name in ("avx512f", "avx2", "asimd") if f" {name} " in flags), "other")
    return f"{platform.machine()} {level}"


def play_case(case: Case) -> Sections:
    """Run a case, and read what it left. RunStopped: it did not come to its end."""
    with tempfile.TemporaryDirectory(prefix="atoll-decisions-") as folder:
        with LockstepRun(case, Path(folder)) as run:
            run.play()
            run.replay()
        sections = read_sections(Path(folder))
    sections["replay"] = run.replayed
    return {name: lines for name, lines in sections.items() if name in case.sections}


def hash_lines(lines: list[str]) -> str:
    return "".join(hashlib.blake2b(line.encode()).hexdigest()[:MARK] for line in lines)


def hash_sections(sections: Sections) -> Hashes:
    return {
        name: {"decisions": hash_lines([mask(line) for line in lines]), "values": hash_lines(lines)}
        for name, lines in sections.items()
    }


def find_kinds(recorded: str) -> tuple[str, ...]:
    """Return which hashes are compared here. `recorded`: the kind of machine that recorded them."""
    return ("decisions", "values") if recorded == find_machine() else ("decisions",)


def compare_case(sections: Sections, recorded: Hashes, kinds: tuple[str, ...]) -> list[str]:
    """Return what differs, for people; nothing: all is as recorded."""
    differences = []
    for name, hashes in hash_sections(sections).items():
        for kind in kinds:
            before = recorded.get(name, {}).get(kind, "")
            if hashes[kind] != before:
                lines = [mask(line) for line in sections[name]] if kind == "decisions" else sections[name]
                differences += describe_difference(f"{name} ({kind})", lines, hashes[kind], before)
                break  # where decisions differ, so do values
    return differences


def describe_difference(name: str, lines: list[str], ours: str, before: str) -> list[str]:
    """Show the lines that are new here, by the hashes of those that were recorded."""
    marks, known = [ours[n : n + MARK] for n in range(0, len(ours), MARK)], set()
    for n in range(0, len(before), MARK):
        known.add(before[n : n + MARK])
    new = [(n, line) for n, (line, mark) in enumerate(zip(lines, marks, strict=True), 1) if mark not in known]
    lost = len(known - set(marks))
    shown = [f"  {name}: {len(new)} lines of {len(lines)} are new, {lost} of those recorded are gone"]
    if not new and not lost:
        shown = [f"  {name}: the same lines in another order or number"]
    shown += [f"    line {n}: {line[:600]}" for n, line in new[:SHOWN]]
    return shown


def write_lines(folder: Path, case: Case, sections: Sections) -> None:
    text = "".join(f"=== {name}\n" + "".join(f"{line}\n" for line in lines) for name, lines in sections.items())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{case.title.replace('/', '.')}.txt").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the hashes in tools/decisions.json")
    parser.add_argument("--compare", action="store_true", help="compare with what is recorded (the default)")
    parser.add_argument(
        "--only", metavar="LAYOUT/CASE", help="cases whose name begins so, such as shards or plain/small"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the lines that are hashed to this folder")
    parser.add_argument("--jobs", type=int, default=2, help="cases at once [default: 2]")
    parser.add_argument("--list", action="store_true", help="list the cases")
    options = parser.parse_args()
    cases = [case for case in CASES if case.title.startswith(options.only or "")]
    if options.list or not cases:
        print("\n".join(f"{case.title:28} {case.about}" for case in CASES))
        return 0 if options.list else 2
    machine, recorded = find_machine(), {"machine": "", "cases": {}}
    if RECORDED.exists() and not (options.write and len(cases) == len(CASES)):
        recorded = json.loads(RECORDED.read_text())
    if options.write and recorded["machine"] != machine:
        recorded = {"machine": machine, "cases": {}}
    kinds = find_kinds(recorded["machine"])
    if len(kinds) == 1:
        print(f"recorded on {recorded['machine']}, this is {machine}: values are not compared")
    if not kernels.are_compiled():
        kernels.warm()  # or every process would

    def judge(case: Case) -> tuple[str, list[str]]:
        """Run a case, and return a word on it, with what differs; a difference has to come twice."""
        for _ in range(1 if options.write else 2):
            try:
                sections = play_case(case)
            except RunStopped as stopped:
                word, differences = "did not end", [str(stopped)]
                continue
            if options.keep is not None:
                write_lines(options.keep, case, sections)
            if options.write:
                recorded["cases"][case.title] = hash_sections(sections)
                return f"{sum(map(len, sections.values()))} lines", []
            word, differences = "differs", compare_case(sections, recorded["cases"].get(case.title, {}), kinds)
            if not differences:
                return "as recorded", []
        return word, differences

    differ, began = 0, time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, (case, (word, differences)) in enumerate(zip(cases, pool.map(judge, cases), strict=True), 1):
            differ += bool(differences)
            print(f"{number:2} of {len(cases)}  {case.title:24} {word:12} {time.monotonic() - began:5.0f} s")
            print("\n".join(differences), end="\n" if differences else "", flush=True)
    if options.write:
        RECORDED.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    elif len(cases) > 1:
        print(f"{len(cases)} cases, {differ} differ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
