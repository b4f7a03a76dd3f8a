"""What hostile learners do to a run, with and without `--robust`: a small model, but every part of the merge shipped.

    python benchmarks/insiders.py                          # the whole table, three seeds
    python benchmarks/insiders.py --seeds 0 --attacks none flip
    python benchmarks/insiders.py --cost                   # what the filter takes beside the merge

Eight learners train a byte-level model (four bytes predict the next, 12,000 parameters, AdamW) on the standard
library's source, in one process and in lockstep. Each round one of six fragments is merged: contributions go through
the shipped codec, screen, weight limits, filter, merge rule and outer step. The last one or two learners attack in
every round. Prints a table and writes a JSON file with every figure.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy: small matrices are slower on several cores

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.config import Outer
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.filter import Filter
from atoll.numerics.fragments import FragmentPlan, Piece, make_plan
from atoll.numerics.merge import merge
from atoll.numerics.screen import NormScreen
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import median
from atoll.protocol.syncer.claims import above_others
from atoll.protocol.syncer.weights import limit_of, limit_weights
from atoll.syncer.outer_state import Overflow
from atoll.syncer.parameters import Parameters
from atoll.workloads.text import Text
from atoll.workloads.training import learning_rate

ROOT = Path(__file__).resolve().parent.parent
Floats = NDArray[np.float32]
Stacked = dict[str, Floats]
"""Every learner's tensor of that name, one behind the other."""

CONTEXT, CHANNELS, HIDDEN, SYMBOLS = 4, 12, (64, 48), 98
TENSORS = (
    TensorSpec("embedding", (SYMBOLS, CHANNELS), "float32", embedding=True),
    TensorSpec("first.weight", (CONTEXT * CHANNELS, HIDDEN[0]), "float32"),
    TensorSpec("first.bias", (HIDDEN[0],), "float32"),
    TensorSpec("second.weight", HIDDEN, "float32"),
    TensorSpec("second.bias", (HIDDEN[1],), "float32"),
    TensorSpec("third.weight", (HIDDEN[1], SYMBOLS), "float32"),
    TensorSpec("third.bias", (SYMBOLS,), "float32"),
)
LEARNERS, FRAGMENTS, SYNC_EVERY, BATCH, STEPS = 8, 6, 24, 16, 576
PEAK_LR, WARMUP, BETAS = 4e-3, 0.05, (0.9, 0.99)
CLAIM = 7.0


# ---- the model, for all learners at once ----------------------------------------------------------------------------


def first_values(seed: int) -> dict[str, Floats]:
    dice = np.random.default_rng(seed)
    return {one.name: _first(one, dice) for one in TENSORS}


def _rows(piece: Piece) -> slice:
    return slice(piece.first, piece.first + piece.rows)


def _first(tensor: TensorSpec, dice: np.random.Generator) -> Floats:
    if len(tensor.shape) == 1:
        return np.zeros(tensor.shape, np.float32)
    scale = 0.1 if tensor.embedding else (2.0 / tensor.shape[0]) ** 0.5
    return (scale * dice.standard_normal(tensor.shape)).astype(np.float32)


def forward(p: Stacked, x: NDArray[np.uint8]) -> list[Floats]:
    """x: [learners, batch, CONTEXT]. All activations, the logits last."""
    m, b, _ = x.shape
    e = np.stack([p["embedding"][i][x[i]] for i in range(m)]).reshape(m, b, -1)
    h = np.maximum(e @ p["first.weight"] + p["first.bias"][:, None], 0.0)
    g = np.maximum(h @ p["second.weight"] + p["second.bias"][:, None], 0.0)
    return [e, h, g, g @ p["third.weight"] + p["third.bias"][:, None]]


def gradients(p: Stacked, x: NDArray[np.uint8], y: NDArray[np.uint8]) -> Stacked:
    e, h, g, logits = forward(p, x)
    m, b, _ = x.shape
    d = np.exp(logits - logits.max(-1, keepdims=True))
    d /= d.sum(-1, keepdims=True)
    d[np.arange(m)[:, None], np.arange(b)[None], y] -= 1.0
    d /= b
    dg = (d @ p["third.weight"].transpose(0, 2, 1)) * (g > 0)
    dh = (dg @ p["second.weight"].transpose(0, 2, 1)) * (h > 0)
    de = (dh @ p["first.weight"].transpose(0, 2, 1)).reshape(m, b, CONTEXT, CHANNELS)
    chosen = (x.reshape(m, -1, 1) == np.arange(SYMBOLS)).astype(np.float32)
    return {
        "embedding": chosen.transpose(0, 2, 1) @ de.reshape(m, -1, CHANNELS),
        "first.weight": e.transpose(0, 2, 1) @ dh,
        "first.bias": dh.sum(1),
        "second.weight": h.transpose(0, 2, 1) @ dg,
        "second.bias": dg.sum(1),
        "third.weight": g.transpose(0, 2, 1) @ d,
        "third.bias": d.sum(1),
    }


def loss_of(values: dict[str, Floats], x: NDArray[np.uint8], y: NDArray[np.uint8]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        logits = forward({name: value[None] for name, value in values.items()}, x[None])[-1][0].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        picked = logits[np.arange(len(y)), y]
        return float(np.mean(np.log(np.exp(logits - top).sum(-1)) + top[:, 0] - picked))


class Learners:
    """All learners of a run: parameters, AdamW, and the steps that each has made on each fragment."""

    def __init__(self, values: dict[str, Floats], plan: FragmentPlan) -> None:
        self.plan = plan
        self.p = {name: np.repeat(value[None], LEARNERS, 0) for name, value in values.items()}
        self.base = {name: value.copy() for name, value in self.p.items()}
        self._m = {name: np.zeros_like(value) for name, value in self.p.items()}
        self._v = {name: np.zeros_like(value) for name, value in self.p.items()}
        self._t = np.zeros(LEARNERS)
        self.steps = np.zeros((LEARNERS, len(plan.fragments)), int)

    def step(self, x: NDArray[np.uint8], y: NDArray[np.uint8], lr: float, who: NDArray[np.bool_]) -> None:
        given = gradients(self.p, x, y)
        self._t += who
        self.steps[who] += 1
        t = np.maximum(self._t, 1)
        rate, root = (1 - BETAS[0] ** t) / lr, 1 - BETAS[1] ** t
        for name, g in given.items():
            m, v, p = self._m[name], self._v[name], self.p[name]
            each = (slice(None), *[None] * (p.ndim - 1))
            moves = who.astype(np.float32)[each]
            m += (moves * np.float32(1 - BETAS[0])) * (g - m)
            v += (moves * np.float32(1 - BETAS[1])) * (g * g - v)
            spread = np.sqrt(v * (1 / root).astype(np.float32)[each])
            spread += 1e-8
            p -= m / spread * (moves / rate.astype(np.float32)[each])

    def delta(self, learner: int, fragment: int) -> Floats:
        rows = [(piece.tensor.name, _rows(piece)) for piece in self.plan.fragments[fragment].pieces]
        return np.concatenate([(self.base[n][learner][r] - self.p[n][learner][r]).ravel() for n, r in rows])

    def adopt(self, fragment: int, values: dict[str, Floats]) -> None:
        for piece in self.plan.fragments[fragment].pieces:
            name, rows = piece.tensor.name, _rows(piece)
            self.p[name][:, rows] = self.base[name][:, rows] = values[name][rows]
        self.steps[:, fragment] = 0


# ---- data -----------------------------------------------------------------------------------------------------------


@cache
def corpora() -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]:
    """To train on, held out, and other data: the prose of Python's manual."""
    text = Text.load()
    prose = Text(Path(sysconfig.get_paths()["stdlib"], "pydoc_data", "topics.py").read_bytes())
    return symbols(text.train), symbols(text.held_out), symbols(prose.train)


def symbols(text: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Printable ASCII, newline, tab, anything else."""
    table = np.full(256, SYMBOLS - 1, np.uint8)
    table[32:127] = np.arange(95)
    table[ord("\n")], table[ord("\t")] = 95, 96
    return table[text]


def windows(part: NDArray[np.uint8], dice: np.random.Generator, count: int) -> NDArray[np.uint8]:
    starts = dice.integers(0, len(part) - CONTEXT, count)
    return part[starts[:, None] + np.arange(CONTEXT + 1)]


# ---- attacks --------------------------------------------------------------------------------------------------------

Attack = Callable[[Floats, "Floats | None", np.random.Generator], Floats]
"""Of an honest contribution, the first one that was given to the fragment, and chance: what is given instead."""


def noise(delta: Floats, _: Floats | None, dice: np.random.Generator) -> Floats:
    drawn = dice.standard_normal(delta.size).astype(np.float32)
    return drawn * np.float32(np.linalg.norm(delta) / np.linalg.norm(drawn))


ATTACKS: dict[str, Attack] = {
    "none": lambda delta, _, __: delta,
    "flip": lambda delta, _, __: -delta,
    "flip x5": lambda delta, _, __: np.float32(-5.0) * delta,
    "x5": lambda delta, _, __: np.float32(5.0) * delta,
    "x9.5": lambda delta, _, __: np.float32(9.5) * delta,
    "stale": lambda delta, first, __: delta if first is None else first,
    "constant": lambda delta, _, __: np.full_like(delta, np.linalg.norm(delta) / delta.size**0.5),
    "noise": noise,
}


@dataclass(frozen=True)
class Case:
    attack: str = "none"
    attackers: int = 0
    claims: bool = False
    """They claim seven times the tokens that they trained on."""
    seed: int = 0
    robust: bool = False
    merge: str = "rda-row"
    slow: bool = False
    """The first learner is four times as slow."""
    other: bool = False
    """The second learner has other data."""


@dataclass
class Run:
    case: Case
    loss: float = 0.0
    suspects: dict[str, str] = field(default_factory=dict)
    """Learner → why the filter named it first …"""
    above: dict[str, str] = field(default_factory=dict)
    """… and, where it claims more tokens than the others, how many."""
    refused: int = 0
    filter_s: float = 0.0

    @property
    def named(self) -> list[str]:
        return sorted(self.suspects.keys() | self.above.keys())

    @property
    def attackers(self) -> list[str]:
        return [f"learner-{i}" for i in range(LEARNERS - self.case.attackers, LEARNERS)]


# ---- one run --------------------------------------------------------------------------------------------------------


def play(case: Case) -> Run:
    plan, values = make_plan(TENSORS, FRAGMENTS), first_values(case.seed)
    run, learners, syncer = Run(case), Learners(values, plan), Syncer(plan, values, case)
    train, held_out, prose = corpora()
    dice, quick = np.random.default_rng(1000 + case.seed), np.ones(LEARNERS, bool)
    for t in range(1, STEPS + 1):
        rows = [windows(prose if case.other and i == 1 else train, dice, BATCH) for i in range(LEARNERS)]
        batch, who = np.stack(rows), quick.copy()
        who[0] = not case.slow or t % 4 == 0
        with np.errstate(all="ignore"):
            learners.step(batch[..., :CONTEXT], batch[..., CONTEXT], learning_rate(t / STEPS, PEAK_LR, WARMUP), who)
        if t % (SYNC_EVERY // FRAGMENTS) == 0:
            fragment = (t // (SYNC_EVERY // FRAGMENTS) - 1) % FRAGMENTS
            syncer.sync(t, fragment, learners, run)
            learners.adopt(fragment, syncer.parameters.tensors_by_name())
    rows = windows(held_out, np.random.default_rng(0), 8192)
    run.loss = loss_of(syncer.parameters.tensors_by_name(), rows[:, :CONTEXT], rows[:, CONTEXT])
    return run


class Syncer:
    """The shipped parts of a merge, in the order of the real one."""

    def __init__(self, plan: FragmentPlan, values: dict[str, Floats], case: Case) -> None:
        self.case, self.plan, self.settings = case, plan, Settings(learners=LEARNERS)
        self.parameters = Parameters(plan, Outer(merge=case.merge))  # type: ignore[arg-type]
        for part in plan.fragments:
            first = np.concatenate([values[piece.tensor.name][_rows(piece)].ravel() for piece in part.pieces])
            np.frombuffer(self.parameters.initial_bytes(part.index), np.float32)[:] = first
        self.parameters.commit_initial()
        self._screen = NormScreen(plan, window=16 * LEARNERS, least=8 * LEARNERS)
        self._filter, self._codec = Filter(plan, sync_every=SYNC_EVERY), make_codec("bf16")
        self._first: dict[tuple[int, int], Floats] = {}
        self._dice = np.random.default_rng(2000 + case.seed)

    def sync(self, t: int, fragment: int, learners: Learners, run: Run) -> None:
        names: list[str] = []
        deltas: list[Floats] = []
        weights: list[float] = []
        limits: list[float] = []
        counts: list[int] = []
        per_step = {i: BATCH * (CLAIM if self.case.claims and self._attacks(i) else 1.0) for i in range(LEARNERS)}
        for i in range(LEARNERS):
            steps = int(learners.steps[i, fragment])
            if steps == 0:
                continue
            delta = self._given(i, fragment, learners.delta(i, fragment))
            if self._screen.judge(fragment, delta, steps, (i, t)) is not None:
                run.refused += 1
                continue
            self._screen.note_merged((i, t))
            names.append(f"learner-{i}")
            deltas.append(delta)
            counts.append(steps)
            weights.append(per_step[i] ** 2 * steps)
            limits.append(limit_of(names[-1], t, self.settings))
            others = [each for j, each in per_step.items() if j != i]
            if (wrong := above_others(per_step[i], median(others))) is not None:
                run.above.setdefault(names[-1], wrong)
        began = time.perf_counter()
        judged = self._filter.judge(fragment, names, deltas, self.parameters.momentum(fragment), steps=counts)
        run.filter_s += time.perf_counter() - began
        for name, one in zip(names, judged, strict=True):
            if one.suspect:
                run.suspects.setdefault(name, f"step {t}: {one.suspect}")
        factors = [one.factors for one in judged] if self.case.robust else []
        try:
            self.parameters.stage_merge(fragment, deltas, limit_weights(weights, limits), factors)
        except (Overflow, ValueError):
            return  # the round is passed over
        self.parameters.commit_version(fragment, self.parameters.committed_buffers()[fragment].version + 1, t)

    def _attacks(self, learner: int) -> bool:
        return learner >= LEARNERS - self.case.attackers

    def _given(self, learner: int, fragment: int, delta: Floats) -> Floats:
        """What arrives: spoiled where it attacks, and through the codec."""
        if self._attacks(learner):
            first = self._first.get((learner, fragment))
            delta = ATTACKS[self.case.attack](delta, first, self._dice)
            self._first.setdefault((learner, fragment), delta)
        part = self.parameters.plan.fragments[fragment]
        body, arrived = np.zeros(body_nbytes(self._codec, part), np.uint8), np.empty(delta.size, np.float32)
        moved = Delta(np.ascontiguousarray(delta, np.float32), np.zeros_like(arrived))
        encode_contribution(self._codec, part, moved, body)
        decode_contribution(self._codec, part, body, arrived)
        return arrived


# ---- the table ------------------------------------------------------------------------------------------------------

WITHIN, WITHOUT_ATTACK, HARM = 1.05, 1.005, 2.0
"""What is promised: with the filter under attack, with it in peace, and what is never reached without a name."""


def cases(seeds: list[int], merges: dict[str, list[str]]) -> list[Case]:
    found = []
    for rule, attacks in merges.items():
        for seed in seeds:
            for robust in (False, True):
                fixed = {"seed": seed, "robust": robust, "merge": rule}
                found += [Case(**fixed), Case(slow=True, other=True, **fixed)]  # type: ignore[arg-type]
                for attack in attacks:
                    for attackers in (1, 2):
                        for claims in (True,) if attack == "none" else (False, True):
                            found.append(Case(attack, attackers, claims, **fixed))  # type: ignore[arg-type]
    return found


def broken_promises(runs: list[Run]) -> list[str]:
    """Each in one line; none: the table is as it should be."""
    plain = {(r.case.merge, r.case.seed): r for r in runs if not r.case.robust and is_honest(r.case)}
    wrong = []
    for run in runs:
        honest = plain[run.case.merge, run.case.seed].loss
        ratio = run.loss / honest if np.isfinite(run.loss) else np.inf
        if run.case.robust and not (run.case.slow or run.case.other):
            most = WITHIN if run.case.attackers else WITHOUT_ATTACK
            if ratio > most:
                wrong.append(f"{run.case}: loss {run.loss:.4f} is {ratio:.3f} times the honest one")
        if run.case.robust and run.named != run.attackers:
            wrong.append(f"{run.case}: named {run.named}, the attackers are {run.attackers}")
        if not run.case.robust and ratio > HARM and not run.named:
            wrong.append(f"{run.case}: loss {run.loss:.4f} and nobody was named")
        if not run.case.attackers and run.named:
            wrong.append(f"{run.case}: named {run.named}, all are honest")
    return wrong


def is_honest(case: Case) -> bool:
    return case.attackers == 0 and not case.slow and not case.other


def rows_of(runs: list[Run]) -> list[dict[str, Any]]:
    """One row for each attack, over the seeds."""
    order = list(ATTACKS)
    table: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        case = run.case
        key = (case.merge != "rda-row", order.index(case.attack), case.attackers, case.claims, case.slow or case.other)
        row = table.setdefault(key, {"merge": case.merge, "attack": case.attack, "attackers": case.attackers})
        row |= {"claims": case.claims, "slow and other data": case.slow or case.other}
        which = "robust" if case.robust else "default"
        row.setdefault(f"losses {which}", []).append(round(run.loss, 4))
        row.setdefault(f"named {which}", []).append(run.named)
        row.setdefault(f"suspects {which}", []).append(run.suspects)
    return [row for _, row in sorted(table.items(), key=lambda one: one[0])]


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'merge':8} {'attack':10} {'of 8':>4} {'claims':>6}  {'default':>9} {'robust':>9}  named with --robust")
    for row in rows:
        losses = [mean(row.get(f"losses {which}") or [float("nan")]) for which in ("default", "robust")]
        named = sorted({name for one in row.get("named robust", []) for name in one})
        attack = "slow, other" if row["slow and other data"] else row["attack"]
        claims = "7x" if row["claims"] else ""
        figures = " ".join(f"{loss:9.4g}" for loss in losses)
        print(f"{row['merge']:8} {attack:10} {row['attackers']:4} {claims:>6}  {figures}  {', '.join(named)}")


def show_cost() -> None:
    """Eight contributions of 1.3 million elements, beside the merge that follows."""
    plan = make_plan([TensorSpec("a", (1024, 1024), "float32"), TensorSpec("b", (512, 512), "float32")], 1)
    dice, fragment = np.random.default_rng(0), plan.fragments[0]
    deltas = [dice.standard_normal(fragment.size).astype(np.float32) for _ in range(LEARNERS)]
    names, out, filter_ = [f"learner-{i}" for i in range(LEARNERS)], np.empty(fragment.size, np.float32), Filter(plan)
    works: dict[str, Callable[[], object]] = {
        "filter": lambda: filter_.judge(0, names, deltas, out),
        "merge rda-row": lambda: merge(fragment, deltas, [1.0] * LEARNERS, out, "rda-row"),
        "merge mean": lambda: merge(fragment, deltas, [1.0] * LEARNERS, out, "mean"),
    }
    for name, work in works.items():
        work()
        spent = []
        for _ in range(9):
            began = time.process_time()
            work()
            spent.append(time.process_time() - began)
        print(f"{name:14} {1e3 * min(spent) / (LEARNERS * fragment.size * 4 / 1e6):.2f} ms per MB of contributions")


def side_by_side(jobs: int) -> list[Run]:
    """All runs of this command line, by as many processes."""
    command = [sys.executable, __file__, *sys.argv[1:], "--jobs", str(jobs), "--part"]
    started = [subprocess.Popen([*command, str(part)], stdout=subprocess.PIPE) for part in range(jobs)]
    with ThreadPoolExecutor(jobs) as readers:  # all at once: a full pipe would hold its process up
        printed = list(readers.map(lambda one: one.communicate()[0].splitlines(), started))
    if any(one.returncode for one in started):
        raise SystemExit("a process of the benchmark failed: what it said is above")
    runs = [msgspec.json.decode(line, type=Run) for lines in printed for line in lines]
    return sorted(runs, key=lambda run: (run.case.merge != "rda-row", run.case.robust, run.case.seed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=list(ATTACKS))
    parser.add_argument("--mean", nargs="*", default=["flip x5"], help="attacks under merge=mean as well")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cost", action="store_true", help="time the filter and the merge, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/insiders.json"))
    options = parser.parse_args()
    if options.cost:
        show_cost()
        return 0
    merges = {"rda-row": options.attacks, "mean": [one for one in options.mean if one in options.attacks]}
    wanted = cases(options.seeds, merges)
    if options.part is not None:
        for case in wanted[options.part :: options.jobs]:
            print(msgspec.json.encode(play(case)).decode(), flush=True)
        return 0
    runs = side_by_side(options.jobs)
    rows, wrong = rows_of(runs), broken_promises(runs)
    show(rows)
    print("\n".join(wrong) or "every promise holds")
    filter_s = mean(run.filter_s for run in runs)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    result = {
        "commit": commit,
        "steps": STEPS,
        "options": vars(options) | {"out": ""},
        "filter_s": round(filter_s, 3),
        "wrong": wrong,
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
