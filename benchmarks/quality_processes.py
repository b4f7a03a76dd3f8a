"""The quality table with real processes: `atoll train` against data-parallel of quality.py at equal tokens.

    python benchmarks/quality_processes.py --list                              # the plan, and what is missing
    python benchmarks/quality_processes.py --rows m4 m4-default --minutes 9 --mixed            # on a GPU
    python benchmarks/quality_processes.py --depth 2 --block 64 --batch 4 --steps 60 --pace 0.05 --warm-pace 0.1 \\
        --out small.json --reference other.json                                # on a CPU

Each row is a run of learners (quality_learner.py), couriers, syncer and evaluator as separate processes. It ends after
as many tokens as data-parallel of its seed had: M * steps * batch * block. What quality.py has and these must have too,
they take from it: text, model, first weights, inner optimizer, schedule, precision and the loss of Θ. Rows are compared
only where the options of both files are equal, the digest of the text among them. What differs: batches are leased, so
a learner's windows are others than in lockstep; contributions are bf16, as the product sends them.

A syncer has more to do at H = 2 than in all of the rest of a run: half of the model for each step, with moments, from
and to every learner. So a step lasts at least --warm-pace seconds in a warm start and --pace after it (of four
learners; of eight twice as long), and the model is cut into fewer fragments: a round's own cost comes less often. What
H came of it is in the results.

Rows of a tape train under the failures that `atoll simulate tape` draws, in the tape's own time: the machine's clock
has no part in it, so nothing is scaled and a run sees the failures of all its steps. No tape has shared moments or
another adoption than the default after its warm start, so these rows are compared with a tape without failures.

A row and seed that the file has is not run again. Two calls may run at the same time if each has an --out of its own
(then: --join). --scratch: where run folders go while a row runs, several GB; /dev/shm if the disk is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import torch
from lockstep_engine import OutOfTime, compare, prepare_torch
from quality import (
    RowFailed,
    Table,
    can_train,
    describe_options,
    join_tables,
    load_text,
    make_parser,
    read_installed_source,
    read_settings,
    train_missing,
)
from quality_learner import StepTimes, Task
from safetensors.torch import load_file

from atoll.protocol.records import AnyRecord, BegunRecord, ChangedRecord, DrawnRecord, MergedRecord
from atoll.store.event_parts import read_lines
from atoll.store.journal import read_tape
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text
from atoll.workloads.training import build_model, validation_loss

HERE = Path(__file__).resolve().parent
WARM_SHARE = 0.15
FRAGMENTS = 8
"""Of rows with a warm start. A round costs a syncer some milliseconds whatever its size, and at H = 2 a step has P/2 of
them: 12 with the default P. With fewer than 8 too few can be under way at once."""
WARM = (f"warm_start={WARM_SHARE}", "share=moments", "adopt=carry", f"fragments={FRAGMENTS}")
SPREAD = (1.0, 1.06, 1.12, 1.18)
"""The slowest takes 18 % longer for a step than the fastest."""
CHIPS = "1.2M"
"""Of the paper profile with 8 learners: goodput 88 %."""
SCORES = 10
"""Of the curve."""
PHASE_KEYS = ("sync_every", "effective_h", "effective_h_mean", "rounds")
LAST_S = 20.0
"""How long a run that is given up may take to end."""


class ProcessRow(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained. What it does not name is the default of the product."""

    learners: int = 4
    words: tuple[str, ...] = ()
    """Settings, as `--set` takes them."""
    optimizer: str = "adamw"
    lr: float = 1e-3
    factors: tuple[float, ...] = ()
    """By learner, how many times as long its steps last; none: all the same."""
    tape: Literal["", "calm", "paper"] = ""
    """Drawn failures: none, or those of the paper profile."""
    against: str = "dp"
    """The row of quality.py that its loss is compared with …"""
    beside: tuple[str, ...] = ()
    """… and those of this table."""

    @property
    def cost(self) -> tuple[int, str, bool, tuple[float, ...], str]:
        """Rows that are equal in it take about the same time."""
        return self.learners, self.optimizer, bool(self.words), self.factors, self.tape


ROWS = {
    "m4": ProcessRow(words=WARM),
    "m4-default": ProcessRow(),
    "m4-muon": ProcessRow(words=WARM, optimizer="muon", against="muon-dp"),
    "m4-slow": ProcessRow(words=WARM, factors=(1.0, 1.0, 1.0, 2.0), beside=("m4",)),
    "k1": ProcessRow(words=(*WARM, "quorum_policy=minimum"), factors=SPREAD, beside=("m4",)),
    "k1-grace": ProcessRow(words=WARM, factors=SPREAD, beside=("m4",)),
    "km": ProcessRow(words=(*WARM, "quorum=4"), factors=SPREAD, beside=("m4",)),
    "m8": ProcessRow(learners=8, words=WARM, against="m8-dp"),
    "m8-calm": ProcessRow(learners=8, tape="calm", against="m8-dp", beside=("m8",)),
    "m8-tape": ProcessRow(learners=8, tape="paper", against="m8-dp", beside=("m8-calm", "m8")),
}


# ---- the table ------------------------------------------------------------------------------------------------------


class ProcessTable(Table):
    def __init__(self, path: Path, options: dict[str, Any], reference: Path | None = None) -> None:
        super().__init__(path, options, ROWS)
        self._lockstep = read_reference(reference, self.options) if reference is not None else {}

    def compare_rows(self) -> dict[str, Any]:
        return {
            name: {
                "against": row.against,
                **compare(self.results[name], self._lockstep.get(row.against, {})),
                "beside": {
                    other: compare(self.results[name], self.results.get(other, {}))["above_percent"]
                    for other in row.beside
                },
            }
            for name, row in ROWS.items()
            if name in self.results
        }


def read_reference(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """The results of quality.py, if they are of the same text, model, schedule and precision."""
    if not path.exists():
        print(f"there is no {path}: no row is compared with data-parallel")
        return {}
    kept = json.loads(path.read_text())
    apart = {key: value for key, value in kept["options"].items() if options.get(key) != value}
    if apart:
        print(f"{path} has other options, {apart}: no row is compared with data-parallel")
        return {}
    results: dict[str, Any] = kept["results"]
    return results


def report(table: Table) -> None:
    compared = table.compare_rows()
    print(f"\n{'row':11} {'loss':>7} {'seeds':>5}  against data-parallel; beside; H asked and got; held; goodput")
    for name in ROWS:
        if name not in compared:
            print(f"{name:11} missing")
            continue
        one, runs = compared[name], list(table.results[name].values())
        above = one["above_percent"]
        apart = "not run" if above is None else f"{above:+.2f} % (spread {one['spread_percent']:.2f})"
        beside = ", ".join(f"{other} {value:+.2f} %" for other, value in one["beside"].items() if value is not None)
        phases = ", ".join(f"{phase['sync_every']}: {phase['effective_h_mean']}" for phase in runs[0]["phases"])
        print(
            f"{name:11} {one['loss']:7.4f} {len(runs):5}  {one['against']} {apart}; {beside or '-'}; {phases}; "
            f"{runs[0].get('held_share', 0.0):.2%}; {runs[0]['goodput']:.1%}"
        )


# ---- a row ----------------------------------------------------------------------------------------------------------


def make_task(row: ProcessRow, seed: int, options: argparse.Namespace, workload: WorkloadSettings, times: Path) -> Task:
    slower = row.learners / 4
    paced = {} if row.tape else {"pace_s": slower * options.pace, "warm_pace_s": slower * options.warm_pace}
    warm = WARM_SHARE if any(word.startswith("warm_start=") for word in row.words) else 0.0
    settings = msgspec.structs.replace(workload, optimizer=row.optimizer, lr=row.lr)
    own = {"seed": seed, "mixed": options.mixed, "warm_share": warm, "factors": row.factors, "times": str(times)}
    return Task(workload=settings, **own, **paced)


def count_tokens(row: ProcessRow, steps: int, workload: WorkloadSettings) -> int:
    """What data-parallel of quality.py takes for as many learners."""
    return row.learners * steps * workload.batch * workload.block


def make_train_words(row: ProcessRow, steps: int, task: Task, out: Path, tape: Path) -> list[str]:
    """The command line behind `atoll`."""
    script = [str(HERE / "quality_learner.py"), "--json", "--out", str(out), "--seed", str(task.seed)]
    if row.tape:
        told = ["--tape", str(tape)]
    else:
        fragments = FRAGMENTS if row.words else 24
        words = [*row.words, "wait_for_learners_s=300", f"evaluate_every={max(1, steps * fragments // 24 // SCORES)}"]
        told = ["--learners", str(row.learners), "--tokens", str(count_tokens(row, steps, task.workload))]
        told += [part for word in words for part in ("--set", word)]
    return ["train", *script, *told, "--", msgspec.json.encode(task).decode()]


def make_tape_words(row: ProcessRow, steps: int, seed: int, tape: Path) -> list[str]:
    """So many steps of the median learner: with failures the run lasts longer, and its learners make as many."""
    words = ["simulate", "tape", str(tape), "--profile", "paper", "--chips", CHIPS, "--learners", str(row.learners)]
    words += ["--steps", str(steps), "--seed", str(seed), "--warm-start", str(WARM_SHARE)]
    return words if row.tape == "paper" else [*words, "--set", "failures.mtbi_s=1e15"]


def train_row(
    row: ProcessRow, seed: int, options: argparse.Namespace, workload: WorkloadSettings, text: Text, deadline: float
) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=options.scratch, ignore_cleanup_errors=True) as scratch:
        out, tape, times = (Path(scratch) / name for name in ("run", "row.tape", "times"))
        times.mkdir()
        task = make_task(row, seed, options, workload, times)
        if row.tape:
            run_atoll(make_tape_words(row, options.steps, seed, tape), deadline, options.watch)
        trained = time.monotonic()
        words = make_train_words(row, options.steps, task, out, tape)
        summary = json.loads(run_atoll(words, deadline, options.watch))
        seconds = {"train_s": round(time.monotonic() - trained, 1), "seconds": round(time.monotonic() - began, 1)}
        if row.tape:
            found = describe_tape(summary, read_tape(tape), workload.batch * workload.block)
        else:
            assert summary["data_digest"] == text.digest, "learners have the text of quality.py"
            found = describe_run(summary, read_events(out)) | describe_steps(read_times(times))
        loss = score_model(out / "model.safetensors", workload, text)
    paces = {"pace_s": task.pace_s, "warm_pace_s": task.warm_pace_s}
    return {"loss": loss, **found, **paces, **seconds, "cores": os.cpu_count()}


def run_atoll(words: Sequence[str], deadline: float, watch: bool) -> str:
    """What the command printed. OutOfTime after the deadline; RowFailed with its last words if it failed; `watch`:
    these and all others are shown as they come."""
    command = [sys.executable, "-m", "atoll.cli", *words]
    env = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    shown = None if watch else subprocess.PIPE
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=shown, text=True, env=env)
    try:
        printed, told = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        end_run(process)
        raise OutOfTime from None
    except BaseException:
        end_run(process)
        raise
    if process.returncode:
        raise RowFailed("\n".join([f"atoll {words[0]} failed:", *(told or "").strip().splitlines()[-12:]]))
    return printed


def end_run(process: subprocess.Popen[str]) -> None:
    """An interrupt ends a run in good order, a second one kills its processes."""
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=LAST_S)
            return
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    process.communicate()


# ---- what came of it ------------------------------------------------------------------------------------------------


def read_events(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(out / "events.jsonl")]


def describe_run(summary: dict[str, Any], events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens = summary["tokens"]["computed"]
    finished = [event for event in events if event["kind"] == "finished"]
    whole = {**{key: summary[key] for key in PHASE_KEYS[1:]}, "sync_every": summary["settings"]["sync_every"]}
    keys = (
        "goodput",
        "merged_share",
        "participation",
        "restarts",
        "refusals",
        "rounds",
        "rounds_passed",
        "overlap_mean",
    )
    return {
        "tokens": tokens,
        "tokens_by_fate": summary["tokens"],
        "phases": [{key: one[key] for key in PHASE_KEYS} for one in summary["phases"] or [whole]],
        "up_bytes_per_token": sum(event["bytes_in"] for event in finished) / tokens,
        "down_bytes_per_token": sum(event["bytes_out"] for event in finished) / tokens,
        **{key: summary[key] for key in (*keys, "wall_s")},
        "merged_share_by_learner": {name: one["merged_share"] for name, one in summary["per_learner"].items()},
        "fragments": summary["settings"]["fragments"],
        "evaluator_loss": summary["validation_loss_end"],
        "curve": [[event["round"], event["loss"]] for event in events if event["kind"] == "score"],
    }


def describe_tape(summary: dict[str, Any], tape: Sequence[AnyRecord], tokens: int) -> dict[str, Any]:
    """Nothing goes over a network: no bytes, and nobody is late. `tokens`: of a step."""
    begun, drawn = tape[:2]
    assert isinstance(begun, BegunRecord) and isinstance(drawn, DrawnRecord)
    absent: Counter[str] = Counter()
    for one in drawn.absences:
        absent[one.learner] += one.ticks
    names = [f"learner-{number}" for number in range(drawn.learners)]
    return {
        "tokens": drawn.steps * tokens,
        "steps": {name: drawn.ticks - absent[name] for name in names},
        "goodput": summary["goodput"],
        "drawn": summary["drawn"],
        "rounds": summary["rounds"],
        "fragments": begun.settings.fragments,
        "phases": describe_phases(tape, begun.settings.fragments),
        "restarts": summary["processes"] - summary["learners"],
        "wall_s": summary["wall_s"],
    }


def describe_phases(tape: Sequence[AnyRecord], fragments: int) -> list[dict[str, Any]]:
    """H asked for and, on average over the run's steps, got; without the rounds of its last cycle."""
    found: list[tuple[int, list[float]]] = []
    for record in tape:
        if isinstance(record, ChangedRecord):
            found.append((record.settings.sync_every, []))
        elif isinstance(record, MergedRecord) and record.progress < 1.0:
            found[-1][1].append(record.step)
    return [
        {
            "sync_every": asked,
            "effective_h_mean": round(fragments * (steps[-1] - steps[0]) / (len(steps) - 1), 2),
            "rounds": len(steps),
        }
        for asked, steps in found
        if len(steps) > 1
    ]


def read_times(folder: Path) -> list[StepTimes]:
    return [msgspec.json.decode(path.read_bytes(), type=StepTimes) for path in sorted(folder.iterdir())]


def describe_steps(times: Sequence[StepTimes]) -> dict[str, Any]:
    """`speed_of_pace`: the time that the steps take at their pace over the time they took; None: they have none."""
    each = sum(sum(one.each_s) for one in times)
    paced = sum(one.paced_s for one in times)
    held = [seconds for one in times for seconds in one.held_s]
    return {
        "steps": {one.learner: one.steps for one in times},
        "step_ms": {one.learner: round(1000 * one.median_s, 2) for one in times},
        "held_ms": round(1000 * median(held), 3),
        "held_share": sum(held) / each,
        "speed_of_pace": paced / each if paced else None,
    }


def score_model(path: Path, workload: WorkloadSettings, text: Text) -> float:
    """As quality.py scores Θ."""
    model = build_model(workload, 0)
    model.load_state_dict(load_file(path))
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return validation_loss(model, text, workload.eval_windows)


# ---- the command ----------------------------------------------------------------------------------------------------


def list_rows() -> None:
    usual = ProcessRow()
    for name, row in ROWS.items():
        changed = {key: getattr(row, key) for key in row.__struct_fields__ if getattr(row, key) != getattr(usual, key)}
        said = ", ".join(
            f"{key} = {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
            for key, value in changed.items()
        )
        print(f"{name:11} {said or 'the default'}")


def train_table(options: argparse.Namespace) -> Table:
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        return train_on_text(options, options.data or [write_installed_source(Path(scratch))])


def write_installed_source(folder: Path) -> str:
    """As one file: so that not each learner gathers it again, and all have the same."""
    path = folder / "source"
    path.write_bytes(read_installed_source())
    return str(path)


def train_on_text(options: argparse.Namespace, data: list[str]) -> Table:
    text = load_text(options.data)
    assert Text.load(data).digest == text.digest, "learners have the text of quality.py"
    workload = msgspec.structs.replace(read_settings(options), data=tuple(str(Path(one).absolute()) for one in data))
    table = ProcessTable(options.out, describe_options(options, workload, text), options.reference)
    prepare_torch()

    def train_named(name: str, seed: int, deadline: float) -> dict[str, Any]:
        print(f"seed {seed} {name}: {count_tokens(ROWS[name], options.steps, workload):,} tokens", flush=True)
        return train_row(ROWS[name], seed, options, workload, text, deadline)

    train_missing(table, options, train_named)
    return table


def main() -> None:
    parser = make_parser(__doc__, ROWS, HERE / "results" / "quality_processes.json")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a step of four learners lasts at least")
    parser.add_argument("--warm-pace", type=float, default=0.3, help="the same in a warm start")
    parser.add_argument("--reference", type=Path, default=HERE / "results" / "quality.json", help="of quality.py")
    parser.add_argument("--watch", action="store_true", help="show what the runs say of their progress")
    parser.add_argument("--scratch", type=Path, default=None, help="a folder for runs; they are deleted")
    options = parser.parse_args()
    if options.list:
        list_rows()
        report(ProcessTable(options.out, {}, options.reference))
    elif options.join:
        report(join_tables(options.out, options.join, lambda path, told: ProcessTable(path, told, options.reference)))
    elif can_train(options):
        report(train_table(options))


if __name__ == "__main__":
    main()
