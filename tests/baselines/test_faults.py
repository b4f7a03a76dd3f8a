"""What each fault does to a rank."""

from __future__ import annotations

import signal

from atoll.baselines.faults import RankFault, inject_faults


class Noted:
    """Writes down what happens to it."""

    def __init__(self, patience_s: float = 1.0) -> None:
        self.patience_s = patience_s
        self.what: list[tuple[object, ...]] = []

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        self.what.append((rank, number.name))

    def end_rank(self, rank: int, number: signal.Signals, away_s: float) -> None:
        self.what.append((rank, number.name, away_s))

    def record_pause(self, rank: int, seconds: float) -> None:
        self.what.append((rank, "stood still"))

    def log_fault(self, fault: RankFault) -> None:
        self.what.append((fault.describe(),))


async def test_kills_come_in_their_order() -> None:
    run = Noted()
    await inject_faults(run, (RankFault(0.01, "kill", 1), RankFault(0.0, "leave", 2, for_s=9.0)))
    assert run.what == [
        ("leave rank-2 for 9.0 s",), (2, "SIGTERM", 9.0), ("kill rank-1",), (1, "SIGKILL", 0.0),
    ]  # fmt: skip


async def test_a_short_pause_is_waited_for() -> None:
    run = Noted()
    await inject_faults(run, (RankFault(0.0, "pause", 0, for_s=0.001),))
    assert run.what[1:] == [(0, "SIGSTOP"), (0, "stood still"), (0, "SIGCONT")]


async def test_a_rank_that_stands_still_for_too_long_is_given_up_and_its_host_away_for_the_rest() -> None:
    run = Noted(patience_s=0.0)
    await inject_faults(run, (RankFault(0.0, "pause", 0, for_s=4.0),))
    assert run.what[1:] == [(0, "SIGSTOP"), (0, "stood still"), (0, "SIGKILL", 4.0)]


async def test_a_slowed_rank_runs_by_turns_and_is_free_in_the_end() -> None:
    run = Noted()
    await inject_faults(run, (RankFault(0.0, "slow", 1, for_s=0.001, size=0.5),))
    assert run.what[1] == (1, "SIGSTOP") and run.what[-1] == (1, "SIGCONT")
