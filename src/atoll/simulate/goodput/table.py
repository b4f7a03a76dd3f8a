"""Many experiments: every method, number of learners and size of cluster, each with several seeds, on all cores.

`python -m atoll.simulate.goodput.table` is a worker: jobs in, one a line, outcomes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from atoll.simulate import worker_pool
from atoll.simulate.goodput.cell import ALONE, WAITING, Cell, Job, Method, Outcome, gather, run
from atoll.simulate.goodput.profile import Profile

WAITING_STEPS = 5
"""Where learners wait, goodput itself comes from the rounds: so many times more steps are played."""


class Answer(msgspec.Struct, frozen=True):
    index: int
    outcome: Outcome


class Question(msgspec.Struct, frozen=True):
    index: int
    job: Job


def experiments(
    profile: Profile,
    methods: Sequence[Method],
    learners: Sequence[int],
    chips: Sequence[int],
    *,
    hours: float,
    rounds: int,
) -> list[Job]:
    """One job per cell, with seed 0. A cluster that steps together is one learner, so it stands in the table where
    M = 1 does, and every other method where M is above that."""
    return [
        Job(profile, method, count, size, 0, hours, _rounds(profile, method, rounds))
        for method in methods
        for count in learners
        if (count == 1) == (method in ALONE) or (count == 1 and ALONE.isdisjoint(methods))
        for size in chips
    ]


def _rounds(profile: Profile, method: Method, rounds: int) -> int:
    if method not in WAITING:
        return rounds
    steps = WAITING_STEPS * rounds
    return max(10, steps // profile.rules.sync_every) if method == "synchronous-diloco" else steps


def cells(
    jobs: Sequence[Job], seeds: int, *, workers: int = 1, progress: Callable[[int, int], None] = lambda done, of: None
) -> list[Cell]:
    """In the order of the jobs, whatever finished first."""
    every = [msgspec.structs.replace(job, seed=seed) for job in jobs for seed in range(seeds)]
    found: dict[int, Outcome] = {}
    for answer in _answers(every, workers):
        found[answer.index] = answer.outcome
        progress(len(found), len(every))
    return [gather(job, [found[at * seeds + seed] for seed in range(seeds)]) for at, job in enumerate(jobs)]


def _answers(jobs: Sequence[Job], workers: int) -> Iterator[Answer]:
    if workers <= 1 or len(jobs) == 1:
        yield from (Answer(index, run(job)) for index, job in enumerate(jobs))
        return
    # The longest first, or one core would be left alone with them at the end.
    order = sorted(range(len(jobs)), key=lambda index: -jobs[index].learners * jobs[index].rounds)
    lines = [msgspec.json.encode(Question(index, jobs[index])).decode() for index in order]
    for line in worker_pool.run("atoll.simulate.goodput.table", lines, workers):
        yield msgspec.json.decode(line, type=Answer)


def _serve(lines: Iterator[str]) -> Iterator[bytes]:
    for line in lines:
        question = msgspec.json.decode(line, type=Question)
        yield msgspec.json.encode(Answer(question.index, run(question.job))) + b"\n"


if __name__ == "__main__":
    worker_pool.serve(_serve)
