"""A paced step lasts its time and no longer; an unpaced one is not held up."""

import pytest

from atoll.workloads import training


class Clock:
    now = 5.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("pace_s", "work_s", "lasts_s"), [(0.5, 0.125, 0.5), (0.5, 0.75, 0.75), (0.0, 0.125, 0.125)])
def test_a_step_lasts_its_pace_or_its_work(
    monkeypatch: pytest.MonkeyPatch, pace_s: float, work_s: float, lasts_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(training, "time", clock)
    paced = training.StepPace(pace_s)
    paced.begin_step()
    clock.now += work_s
    paced.sleep_rest()
    assert clock.now - 5.0 == lasts_s
