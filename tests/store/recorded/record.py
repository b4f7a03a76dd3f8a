"""Records a run of today as `run/` and `verdicts.json`: later versions are to make the same of it, bit for bit.

    PYTHONPATH=src:. python -m tests.store.recorded.record FOLDER

The files beside this one were written at commit b44f496a (atoll 4.0, before rounds of many members were compared with a
sample of them), and are never written anew: a version that reads runs of its own only would not be told otherwise.
Four learners with `robust`, of which the last gives the opposite of what it should; what they give is drawn by the
number of the round, so a test can merge it again. `verdicts.json` has digests of the filter's factors on drawn rounds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from tests.store.written import OUTER, P, WrittenRun

from atoll.numerics.arrays import FloatArray
from atoll.numerics.filter import Filter, FilterVerdict
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.records import MergedRecord, Share

NAMES = ("a", "b", "c", "d")
ROUNDS, CUT = 9, 4
JUDGED = (3, 8, 33, 64)
"""Members of the rounds that the filter judges."""
ROUNDS_JUDGED = 6
TENSORS = (
    TensorSpec("blocks.0.weight", (32, 16), "float32"),
    TensorSpec("blocks.1.weight", (32, 15), "float32"),
    TensorSpec("blocks.2.weight", (32, 14), "float32"),
)
WIDE = tuple(TensorSpec(f"blocks.{number}.weight", (24, 16 + number), "float32") for number in range(4))


def draw_contributions(number: int, size: int, members: int, seed: int) -> list[FloatArray]:
    """Draw what is common to all and something of each one's own; every eighth, the last at least, is an attacker."""
    dice = np.random.default_rng([seed, number])
    common = dice.standard_normal(size)
    given = common + dice.standard_normal((members, size))
    attackers = max(1, members // 8)
    given[-attackers:] *= -1.0
    given[-1] *= 3.0
    return [one.astype(np.float32) for one in given]


def judge_drawn_rounds(members: int) -> str:
    """Return the digest of all factors of the filter."""
    plan, names, factors = make_plan(WIDE, 2), [f"learner-{number:02d}" for number in range(members)], hashlib.blake2b()
    judge = Filter(plan)
    for number in range(ROUNDS_JUDGED):
        size = plan.fragments[number % 2].size
        verdicts = judge.judge(number % 2, names, draw_contributions(number, size, members, seed=members))
        factors.update(pack_factors(verdicts))
    return factors.hexdigest()


def pack_factors(verdicts: Sequence[FilterVerdict]) -> bytes:
    return b"".join(verdict.factors.tobytes() for verdict in verdicts)


def record_run(folder: Path) -> None:
    run = WrittenRun(folder, outer={**OUTER, "robust": True}, tensors=TENSORS)
    for name in NAMES:
        run.join(name)
    run.start()
    judge = Filter(run.parameters.plan)
    for number in range(ROUNDS):
        _record_round(run, judge, number)
        if number == CUT:
            run.cut()
    run.end()


def _record_round(run: WrittenRun, judge: Filter, number: int) -> None:
    fragment = number % P
    for island in run.islands.values():
        island.train()
    deltas = draw_contributions(number, run.parameters.plan.fragments[fragment].size, len(NAMES), seed=43)
    verdicts = judge.judge(fragment, NAMES, deltas, run.parameters.momentum(fragment))
    shares = [run._share(name, fragment) for name in NAMES]
    weights, bases = [share.weight for share in shares], [share.base for share in shares]
    factors = [verdict.factors for verdict in verdicts]
    mark = run.parameters.stage_merge(fragment, deltas, weights, factors, bases)
    version = run.history.versions[fragment] + 1
    judged = tuple(map(_with_factors, shares, verdicts))
    told = MergedRecord(number, fragment, version, 1, "every live learner reported", judged, mark, step=run.step)
    run.raw(told, run.parameters.round_payload(fragment))
    run.history.apply(told)
    run.parameters.commit_version(fragment, version, number)
    run.rounds[fragment] = number
    for name in NAMES:
        run._adopt(run.islands[name], fragment, version)


def _with_factors(share: Share, verdict: FilterVerdict) -> Share:
    left_out = 1.0 - float(verdict.factors.mean())
    factors = b"" if (verdict.factors == 1).all() else verdict.factors.tobytes()
    return replace(share, factors=factors, filtered=round(left_out * share.tokens))


def main() -> None:
    folder = Path(sys.argv[1])
    record_run(folder / "run")
    verdicts = {str(members): judge_drawn_rounds(members) for members in JUDGED}
    (folder / "verdicts.json").write_text(json.dumps(verdicts, indent=1) + "\n")


if __name__ == "__main__":
    main()
