"""How good the trained model is: decoupled training against data-parallel at equal tokens, a table of rows.

    python benchmarks/quality.py --list                                # the plan, and what is missing
    python benchmarks/quality.py --rows dp default h2-moments --minutes 9 --mixed              # on a GPU
    python benchmarks/quality.py --depth 2 --block 64 --batch 4 --steps 60 --out small.json    # on a CPU: minutes

Learners in lockstep by the engine of lockstep_engine.py: a GPT of 12.4M parameters (10.7M in the reference) on the
Python source that is installed on the machine; on a GPU machine most of it is that of torch and its like. A row and
seed that the file has, of the same options, is not run again, so the table is filled over many calls. A row that the
limit of minutes would cut off is not begun, or given up. Told are the validation loss, its curve, the bytes per token
of a learner each way, and for each phase the autocorrelation ρ of merged gradients with the effective outer step
η(1 + μ/(1 − μρ)).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from lockstep_engine import OutOfTime, Row, compare, prepare_torch, train

from atoll.protocol.phases import TrainingPhase, warm_start
from atoll.telemetry.events import versions
from atoll.workloads.settings import WorkloadSettings
from atoll.workloads.text import Text, standard_library

H2 = (warm_start(0.15),)
"""The first 15 % at H = 2: τ = 1, mean, outer step 1 / 0, carry."""
H4 = (msgspec.structs.replace(warm_start(0.15), sync_every=4),)
THREE = (*H2, TrainingPhase(until=0.4, sync_every=8, outer_momentum=0.5))
"""Then to 40 % at H = 8, RDA by rows 0.6 / 0.5."""
WARM = Row(adopt="carry", phases=H2, moments="fp32")
"""15 % at H = 2, then the default with carry; moments are shared throughout."""


def vary(row: Row, **changes: Any) -> Row:
    return msgspec.structs.replace(row, **changes)


ROWS = {
    # M = 4, AdamW 1e-3
    "dp": Row(method="data-parallel"),
    "default": Row(),
    "rda-1-0": Row(outer_lr=1.0, outer_momentum=0.0),
    "h4": Row(adopt="carry", phases=H4),
    "h2": Row(adopt="carry", phases=H2),
    "h4-moments": vary(WARM, phases=H4),
    "h2-moments": WARM,
    "three-moments": vary(WARM, phases=THREE),
    "h2-moments-int4": vary(WARM, up="int4"),
    "moments": Row(moments="fp32"),
    # Muon inside
    "muon-dp": Row(method="data-parallel", optimizer="muon"),
    "muon-default": Row(optimizer="muon", against="muon-dp"),
    "muon-h2-moments": vary(WARM, optimizer="muon", against="muon-dp"),
    # M = 8
    "m8-dp": Row(method="data-parallel", learners=8, against="m8-dp"),
    "m8-default": Row(learners=8, against="m8-dp"),
    "m8-h4": Row(learners=8, adopt="carry", phases=H4, against="m8-dp"),
    "m8-h2": Row(learners=8, adopt="carry", phases=H2, against="m8-dp"),
    "m8-h2-moments": vary(WARM, learners=8, against="m8-dp"),
    # M = 16
    "m16-dp": Row(method="data-parallel", learners=16, against="m16-dp"),
    "m16-default": Row(learners=16, against="m16-dp"),
    "m16-mean": Row(learners=16, merge="mean", against="m16-dp"),
    "m16-rda": Row(learners=16, merge="rda", against="m16-dp"),
    # each side's own best learning rate
    "dp-5e-4": Row(method="data-parallel", lr=5e-4),
    "dp-2e-3": Row(method="data-parallel", lr=2e-3),
    "h2-moments-5e-4": vary(WARM, lr=5e-4, against="dp-5e-4"),
    "h2-moments-2e-3": vary(WARM, lr=2e-3, against="dp-2e-3"),
    # what moments may cost, and what else there is
    "h2-moments-int8": vary(WARM, moments="int8"),
    "h2-moments-int8-int4": vary(WARM, moments="int8", up="int4"),
    "h2-int4": Row(adopt="carry", phases=H2, up="int4"),
    "topk": Row(up="topk"),
    "h2-topk": Row(adopt="carry", phases=H2, up="topk"),
    "diloco": Row(fragments=1, overlap=0, merge="mean", outer_lr=0.7, outer_momentum=0.9),
    "alone": Row(method="alone"),
    # merge rules beside the default, and learners that miss a quarter of the rounds
    "embeddings": Row(merge="rda-row-embeddings"),
    "late": Row(misses=0.25),
    "late-literal": Row(misses=0.25, merge="rda-row-literal"),
    # the mean of the last versions
    "tail": Row(tail=4),
    "h2-tail": Row(adopt="carry", phases=H2, tail=4),
    "muon-h2-moments-tail": vary(WARM, optimizer="muon", tail=4, against="muon-dp"),
    # carry beside overwrite, the outer step being the same, at the default overlap and at a long one
    "carry": Row(adopt="carry"),
    "default-12": Row(overlap=12),
    "carry-12": Row(adopt="carry", overlap=12),
}
REFERENCE = {"depth": 10, "block": 256, "batch": 16, "steps": 2100}
MOST_TEXT_BYTES = 96 << 20
"""For M = 8 the reference takes 69M tokens: with less text they come back, and the loss is that of a memory."""
GPU_DEPTH = 6
"""Models of this depth and more are for a GPU."""


class AnyRow(Protocol):
    """A row of a table: a frozen struct."""

    @property
    def against(self) -> str:
        """The row that its loss is compared with."""

    @property
    def cost(self) -> tuple[Any, ...]:
        """Rows that are equal in it take about the same time."""


class RowFailed(Exception):
    """A row's processes failed; other rows may do better."""


TrainRow = Callable[[str, int, float], dict[str, Any]]
"""Row, seed and deadline to what came of it; OutOfTime after the deadline, RowFailed if it could not be trained."""


def as_json(row: AnyRow) -> Any:
    return msgspec.json.decode(msgspec.json.encode(row))


def is_row(told: Any, row: AnyRow) -> bool:
    """Whether a file tells of this row; fields that it does not know had their defaults then."""
    try:
        return bool(msgspec.convert(told, type(row)) == row)
    except msgspec.ValidationError:
        return False


class Table:
    """The results file."""

    def __init__(self, path: Path, options: dict[str, Any], rows: Mapping[str, AnyRow] = ROWS) -> None:
        """`options`: of its rows; none: those of the file."""
        self._path, self.rows = path, rows
        kept = json.loads(path.read_text()) if path.exists() else {"options": options, "results": {}}
        options = options or kept["options"]
        if kept["options"] != options:
            raise SystemExit(f"{path} has rows of other options, {kept['options']}: name another file with --out")
        same = {name for name, row in rows.items() if is_row(kept.get("rows", {}).get(name), row)}
        self.options = options
        self.results = {name: runs for name, runs in kept["results"].items() if name in same}
        """By row, then by seed."""
        for name in kept["results"].keys() - same:
            print(f"{name} is another row now than in {path}: what that has of it goes with the next row written")

    def has_run(self, row: str, seed: int) -> bool:
        return str(seed) in self.results.get(row, {})

    def add_run(self, row: str, seed: int, run: dict[str, Any]) -> None:
        self.results.setdefault(row, {})[str(seed)] = run
        ordered = {name: self.results[name] for name in self.rows if name in self.results}
        content = {
            "options": self.options,
            "rows": {name: as_json(self.rows[name]) for name in ordered},
            "compared": self.compare_rows(),
            "missing": [name for name in self.rows if name not in ordered],
            "results": ordered,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".part")
        written.write_text(json.dumps(content, indent=1) + "\n")
        written.replace(self._path)

    def take_rows(self, path: Path) -> None:
        """Those that another file has and this one has not."""
        for row, runs in Table(path, self.options, self.rows).results.items():
            for seed, run in runs.items():
                if not self.has_run(row, int(seed)):
                    self.add_run(row, int(seed), run)

    def compare_rows(self) -> dict[str, Any]:
        return {
            name: {"against": row.against, **compare(self.results[name], self.results.get(row.against, {}))}
            for name, row in self.rows.items()
            if name in self.results
        }

    def expected_s(self, row: AnyRow) -> float:
        """The longest that a row as costly took so far, or any where none was; 0: not known."""
        like = [name for name in self.results if self.rows[name].cost == row.cost] or self.results
        return max((run["seconds"] for name in like for run in self.results[name].values()), default=0.0)


def train_missing(table: Table, options: argparse.Namespace, train_row: TrainRow) -> None:
    deadline = time.monotonic() + 60 * options.minutes
    machine = {"device": device_name(), "versions": versions(), "commit": options.commit or find_commit()}
    for seed in options.seeds:
        for name in options.rows:
            if table.has_run(name, seed):
                continue
            if time.monotonic() + table.expected_s(table.rows[name]) > deadline:
                print(f"seed {seed} {name}: put off, it would not end within --minutes {options.minutes:g}", flush=True)
                continue
            try:
                run = train_row(name, seed, deadline)
            except OutOfTime:
                print(f"seed {seed} {name}: given up, --minutes {options.minutes:g} are over", flush=True)
                return
            except RowFailed as failure:
                print(f"seed {seed} {name}: {failure}", flush=True)
                continue
            table.add_run(name, seed, {**run, **machine})
            print(f"seed {seed} {name:20} loss {run['loss']:.4f}  {run['seconds']} s", flush=True)


def load_text(data: list[str]) -> Text:
    return Text.load(data) if data else Text(read_installed_source(), "the Python source installed on the machine")


def read_installed_source() -> bytes:
    packages = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    return b"\n".join(path.read_bytes() for path in [*standard_library(), *packages])[:MOST_TEXT_BYTES]


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def find_commit() -> str:
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def report(table: Table) -> None:
    compared = table.compare_rows()
    print(f"\n{'row':21} {'loss':>7} {'seeds':>5}  against                  bytes per token up, down; ρ, outer step")
    for name in ROWS:
        if name not in compared:
            print(f"{name:21} missing")
            continue
        one, runs = compared[name], list(table.results[name].values())
        above = one["above_percent"]
        apart = "not run" if above is None else f"{above:+.2f} % (spread {one['spread_percent']:.2f})"
        sent = ", ".join(f"{runs[0][f'{way}_bytes_per_token']:,.0f}" for way in ("up", "down"))
        known = [phase for phase in runs[0].get("phases", []) if phase["rho"] is not None]
        steps = "; ".join(f"{phase['rho']:.2f}, {phase['outer_step']:.2f}" for phase in known)
        print(f"{name:21} {one['loss']:7.4f} {len(runs):5}  {one['against']:8} {apart:24} {sent}; {steps}")


def list_rows() -> None:
    usual = Row()
    for name, row in ROWS.items():
        changed = {key: getattr(row, key) for key in row.__struct_fields__ if getattr(row, key) != getattr(usual, key)}
        phases = "; ".join(f"until {phase.until:g}: {phase.describe()}" for phase in changed.pop("phases", ()))
        said = ", ".join(f"{key} = {value}" for key, value in changed.items())
        print(f"{name:21} {said or 'the default'}{f' [{phases}]' if phases else ''}")


def make_parser(about: str | None, rows: Mapping[str, AnyRow], out: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows), metavar="ROW")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--list", action="store_true", help="what the rows are and which are missing; train nothing")
    parser.add_argument(
        "--join", nargs="+", type=Path, default=[], metavar="FILE", help="take rows from these; no more"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="end within this time")
    for name, value in REFERENCE.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--experts", type=int, default=0, help="of every block, a byte goes through two of them")
    parser.add_argument("--data", nargs="+", default=[], help="text; without it, the Python source installed here")
    parser.add_argument("--mixed", action="store_true", help="steps compiled and with bf16 autocast")
    parser.add_argument("--commit", default="", help="of the source, where git cannot say it")
    parser.add_argument("--out", type=Path, default=out)
    return parser


def can_train(options: argparse.Namespace) -> bool:
    if torch.cuda.is_available() or options.depth < GPU_DEPTH:
        return True
    print(f"depth {options.depth} is for a GPU, and there is none: nothing is trained (try --depth 2, and --out)")
    return False


def main() -> None:
    options = make_parser(__doc__, ROWS, Path("benchmarks/results/quality.json")).parse_args()
    if options.list:
        list_rows()
        report(Table(options.out, {}))
    elif options.join:
        report(join_tables(options.out, options.join))
    elif can_train(options):
        report(train_table(options))


def join_tables(out: Path, others: list[Path], open_table: Callable[[Path, dict[str, Any]], Table] = Table) -> Table:
    table = open_table(out, open_table(others[0], {}).options)
    for path in others:
        table.take_rows(path)
    return table


def read_settings(options: argparse.Namespace) -> WorkloadSettings:
    return WorkloadSettings(**{key: getattr(options, key) for key in ("depth", "block", "batch", "experts")})


def describe_options(options: argparse.Namespace, settings: WorkloadSettings, text: Text) -> dict[str, Any]:
    """Losses of two tables compare where these are equal."""
    shape = {key: getattr(options, key) for key in (*REFERENCE, "mixed")}
    shape |= {"experts": settings.experts} if settings.experts else {}
    inner = {key: getattr(settings, key) for key in ("warmup", "floor", "weight_decay", "clip", "eval_windows")}
    about = {"betas": list(settings.betas), "text": text.name, "text_bytes": len(text.train), "digest": text.digest}
    return shape | inner | about


def train_table(options: argparse.Namespace) -> Table:
    settings, text = read_settings(options), load_text(options.data)
    table = Table(options.out, describe_options(options, settings, text))
    prepare_torch()

    def train_row(name: str, seed: int, deadline: float) -> dict[str, Any]:
        run = train(ROWS[name], seed, settings, options.steps, text, deadline=deadline, mixed=options.mixed)
        tokens = options.steps * settings.batch * settings.block
        return run | {f"{way}_bytes_per_token": run[f"{way}_bytes"] / tokens for way in ("up", "down")}

    train_missing(table, options, train_row)
    return table


if __name__ == "__main__":
    main()
