"""The live figures, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.syncer.conftest import TENSORS

from atoll.config import Config, convert
from atoll.fabric.wire import ScoreReport
from atoll.observe.dashboard.metrics import exposition
from atoll.observe.tail import describe_presence
from atoll.protocol.history import History, Life
from atoll.protocol.messages import PROTOCOL, Hello, Progress
from atoll.protocol.syncer.effects import Greeted, Initialised, Lost, Received
from atoll.protocol.syncer.machine import Syncer
from atoll.syncer.status import Meter, nobody_here, nobody_started

CONFIG: Config = convert(
    {"protocol": {"learners": 2, "fragments": 2, "sync_every": 4, "overlap": 1, "steps": 40}}, "a test"
)


def progress(t: int, versions: tuple[int, int] = (0, 0)) -> Progress:
    counts = (t, t)
    return Progress(
        incarnation=1,
        t=t,
        steps=counts,
        tokens=counts,
        versions=versions,
        tokens_total=10 * t,
        busy_s=0.5 * t,
        loss=2.0,
        dropped=(0, 0),
        counted=versions,
    )


@pytest.fixture
def machine() -> Syncer:
    """a and b joined at second 0; a gave the first parameters; both took them."""
    machine = Syncer.fresh(CONFIG.protocol.resolved(2), run="r", fingerprint="f")
    for name in ("a", "b"):
        machine.handle(0.0, Greeted(Hello(protocol=PROTOCOL, learner=name, session=name, tensors=TENSORS)))
    machine.handle(0.0, Initialised("a", "a"))
    for name in ("a", "b"):
        machine.handle(0.0, Received(name, progress(0)))
    return machine


def committed(meter: Meter, at: float, number: int, *members: str, live: int = 2) -> None:
    data = {
        "round": number,
        "fragment": number % 2,
        "version": 1 + number // 2,
        "live": live,
        "members": [{"learner": name} for name in members],
    }
    meter.note_event(at, "round", data)


ROUND = {"version": 1, "live": 2, "members": [{"learner": "a"}]}


def test_before_anybody_came() -> None:
    status = Meter(CONFIG).make_status(100.0, "r", None)
    assert (status.phase, status.round, status.learners, status.goodput, status.left_s) == (
        "waiting",
        0,
        (),
        None,
        None,
    )
    assert (status.sync_every, status.quorum) == (4, 1)
    assert Meter(Config()).make_status(100.0, "r", None).sync_every == 24, "as it will be, not 0"


def test_the_time_left_goes_by_what_this_session_did(machine: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after a resume 60 % are done and nothing is known of how long that took."""
    monkeypatch.setattr(Syncer, "progress", property(lambda machine: done))
    meter, done = Meter(CONFIG), 0.6
    meter.note_event(100.0, "recovered", {})
    assert meter.make_status(100.5, "r", machine).left_s is None
    done = 0.605
    assert meter.make_status(101.0, "r", machine).left_s is None
    done = 0.7
    assert meter.make_status(110.5, "r", machine).left_s == pytest.approx(30.0)


def test_no_time_is_left_to_tell_while_nobody_steps(machine: Syncer, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "left 0:31" stood there while every learner was dead."""
    monkeypatch.setattr(Syncer, "progress", property(lambda machine: done))
    meter, done = Meter(CONFIG), 0.0
    meter.note_event(100.0, "recovered", {})
    meter.make_status(100.0, "r", machine)
    done = 0.5
    machine.handle(0.0, Lost("a", "gone"))
    assert meter.make_status(110.0, "r", machine).left_s == pytest.approx(10.0), "b steps"
    machine.handle(0.0, Lost("b", "gone"))
    assert meter.make_status(110.0, "r", machine).left_s is None


def test_a_run_without_a_budget_says_so() -> None:
    assert Meter(CONFIG).make_status(1.0, "r", None).budgeted
    assert not Meter(Config()).make_status(1.0, "r", None).budgeted


def test_gaps_and_participation() -> None:
    meter = Meter(CONFIG)
    meter.note_event(100.0, "recovered", {})
    for at, number, members in ((101.0, 0, "ab"), (102.0, 1, "a"), (105.0, 2, "ab")):
        committed(meter, at, number, *members)
    status = meter.make_status(110.0, "r", None)
    assert status.elapsed_s == 10.0
    assert status.median_gap_s == 2.0  # of 1 and 3
    assert status.participation == pytest.approx((1 + 0.5 + 1) / 3)


def test_the_outer_step_is_the_mean_over_the_last_rounds_of_each_fragment() -> None:
    meter = Meter(CONFIG)
    for number, rho in enumerate([None, None, -0.9, 0.1, 0.1, 0.3, 0.1, 0.3, 0.1, 0.3, 0.1, 0.3]):
        figures = {"rho": rho, "outer_step": None if rho is None else 1 + rho}
        meter.note_event(1.0, "round", {**ROUND, "round": number, "fragment": number % 2, **figures})
        if number == 1:
            assert meter.make_status(2.0, "r", None).rho is None
    status = meter.make_status(2.0, "r", None)
    assert (status.rho, status.outer_step, status.outer_lr) == (pytest.approx(0.2), pytest.approx(1.2), 0.6)
    meter.note_event(3.0, "phase", {})
    assert meter.make_status(4.0, "r", None).outer_step is None, "nothing is measured in the new phase yet"


def hello(name: str, session: str = "", **told: Any) -> Greeted:
    return Greeted(Hello(protocol=PROTOCOL, learner=name, session=session or name, tensors=TENSORS, **told))


def test_goodput_counts_those_who_are_gone(machine: Syncer) -> None:
    meter = Meter(CONFIG)
    meter.note_event(100.0, "recovered", {})
    machine.handle(1.0, Received("a", progress(4)))  # 2 s of steps
    machine.handle(1.0, Received("b", progress(2)))  # 1 s
    machine.handle(1.0, hello("c"))
    machine.handle(1.0, Received("c", progress(0)))
    machine.handle(2.0, Received("c", progress(6)))  # 3 s
    machine.handle(2.0, Lost("c", "gone"))
    assert meter.make_status(110.0, "r", machine).goodput == pytest.approx((2 + 1 + 3) / (2 * 10))
    machine.handle(2.0, Lost("a", "gone"))  # and comes back: it counts once
    machine.handle(2.0, hello("a", run="r", versions=(0, 0), incarnation=1, t=4))
    machine.handle(2.0, Received("a", progress(5)))
    assert meter.make_status(110.0, "r", machine).goodput == pytest.approx((2.5 + 1 + 3) / (2 * 10))
    meter.note_event(112.0, "ending", {})
    assert meter.make_status(150.0, "r", machine).elapsed_s == 12.0, "the training part ends with `ending`"


def test_the_processes_of_one_name_are_added_up(machine: Syncer) -> None:
    meter = Meter(CONFIG)
    meter.note_event(0.0, "recovered", {})
    for incarnation in range(1, 101):
        machine.handle(1.0, hello("c", str(incarnation)))
        for t in (0, 1, 2):
            machine.handle(1.0, Received("c", replace(progress(t), incarnation=incarnation)))
        machine.handle(1.0, Lost("c", "gone"))
    assert machine.members.learners["c"].busy_in_term == 100.0
    assert meter.make_status(200.0, "r", machine).goodput == pytest.approx(100 / (2 * 200))


def test_a_process_in_its_second_life_counts_its_steps_once(machine: Syncer) -> None:
    """A learner that was lost, came back and went into quarantine was counted with both lives' clocks."""
    members, a = machine.members, machine.members.learners["a"]
    machine.handle(1.0, Received("a", progress(4)))
    machine.handle(1.0, Lost("a", "gone"))
    machine.handle(1.0, hello("a", run="r", versions=(0, 0), incarnation=1, t=4))
    machine.strikes.quarantine_learner(2.0, a, "now", "NaN")
    machine.handle(3.0, Received("a", replace(progress(6), incarnation=2)))
    assert a.busy_in_term == 3.0
    machine.handle(4.0, Lost("a", "gone"))
    machine.handle(4.0 + machine.settings.abandon_s, Received("b", progress(1)))  # its life is closed by now
    machine.handle(400.0, hello("a", run="r", versions=(0, 0), incarnation=2, t=8))
    machine.handle(400.0, Received("a", replace(progress(8), incarnation=3)))
    assert (members.learners["a"].incarnation, members.learners["a"].busy_in_term) == (3, 4.0)


def test_a_new_term_counts_the_steps_since_it_first_heard_of_a_learner(machine: Syncer) -> None:
    """Goodput was 100 % after every takeover: hours of steps were divided by the seconds of the new term."""
    machine.handle(1.0, Received("a", progress(4000)))
    later = Syncer(History.restore(machine.history.state()))
    meter = Meter(CONFIG)
    for at, t in ((0.0, 4002), (10.0, 4012)):  # 5 s of steps
        if not at:
            later.handle(at, hello("a", run="r", versions=(0, 0), incarnation=1, t=t))
            meter.note_event(100.0, "recovered", {})
        later.handle(at, Received("a", progress(t)))
    assert meter.make_status(110.0, "r", later).goodput == pytest.approx(5 / (2 * 10))


def test_a_learners_last_adopted_round_is_that_of_the_versions_it_holds(machine: Syncer) -> None:
    meter = Meter(CONFIG)
    for number in range(5):  # fragment 0: versions 1, 2, 3 in rounds 0, 2, 4; fragment 1: 1, 2 in 1, 3
        committed(meter, 100.0 + number, number, "a")
    machine.members.learners["a"].versions = (3, 2)
    machine.members.learners["b"].versions = (1, 0)
    by_name = {one.learner: one.version_round for one in meter.make_status(110.0, "r", machine).learners}
    assert by_name == {"a": 4, "b": 0}
    machine.members.learners["b"].versions = (0, 0)
    assert meter.make_status(110.0, "r", machine).learners[1].version_round == -1


def test_tokens_per_second_over_the_last_looks(machine: Syncer) -> None:
    meter = Meter(CONFIG)
    meter.make_status(100.0, "r", machine)
    machine.handle(1.0, Received("a", progress(4)))
    status = meter.make_status(102.0, "r", machine)
    assert {one.learner: one.tokens_per_s for one in status.learners} == {"a": 20.0, "b": 0.0}
    assert status.tokens_per_s == 20.0
    assert status.tokens == 40


def test_the_tokens_of_an_absence_are_in_no_rate(machine: Syncer) -> None:
    meter = Meter(CONFIG)
    back = Hello(
        protocol=PROTOCOL, learner="a", session="a", run="r", versions=(0, 0), incarnation=1, t=80, tensors=TENSORS
    )
    rates = []
    for at, event in (
        (100.0, Received("a", progress(4))),
        (102.0, Received("a", progress(8))),
        (104.0, Lost("a", "cut off")),
        (180.0, None),
        (181.0, Greeted(back)),
        (181.5, Received("a", progress(81))),
        (183.5, Received("a", progress(85))),
    ):
        if event is not None:
            machine.handle(at - 100, event)
        rates.append(meter.make_status(at, "r", machine).tokens_per_s)
    assert rates == [0.0, 20.0, 0.0, 0.0, 0.0, 0.0, 20.0]


def test_the_newest_score_is_shown() -> None:
    meter = Meter(CONFIG)
    for round, loss in ((0, 3.0), (10, 2.5)):
        meter.note_score(ScoreReport(round=round, loss=loss, cpu_s=0.1))
    status = meter.make_status(1.0, "r", None)
    assert (status.validation_loss, status.validation_round) == (2.5, 10)


def test_states_in_the_words_of_the_screen(machine: Syncer) -> None:
    a, b = machine.members.learners["a"], machine.members.learners["b"]
    meter = Meter(CONFIG)

    def states() -> list[str]:
        return [one.state for one in meter.make_status(1.0, "r", machine).learners]

    assert states() == ["training", "training"]
    a.muted, b.stalled = True, True
    assert states() == ["muted", "stalled"]
    a.stalled = True
    assert states() == ["stalled", "stalled"], "one that hangs answers no pulls either: it is stalled all the same"
    a.starting = a.excused = True
    assert states() == ["muted", "stalled"], "a long first step is no stall"
    a.stopped, b.state = True, "gone"
    assert states() == ["stopped", "away"]
    b.closed = True
    assert states() == ["stopped", "gone"]


def test_a_learner_that_hangs_is_stalled_though_it_was_muted_first(machine: Syncer) -> None:
    """The event `stalled` came, and screen, status and metrics said "muted" to the end."""
    a = machine.members.learners["a"]
    machine.handle(1.0, Received("a", progress(4)))
    machine.handle(1.0, Received("b", progress(4)))
    a.muted = True
    for second in range(2, 20):  # its courier reports, its script makes no step
        machine.handle(float(second), Received("a", progress(4)))
        machine.handle(float(second), Received("b", progress(4 + second)))
    status = Meter(CONFIG).make_status(20.0, "r", machine)
    assert {one.learner: one.state for one in status.learners} == {"a": "stalled", "b": "training"}
    assert describe_presence(status) == "2 of 2 learners here, 1 stalled"
    assert 'atoll_learners{state="stalled"} 1.0' in exposition(status).decode()


def test_a_learner_is_missing_until_it_is_back_or_was_asked_to_leave(machine: Syncer) -> None:
    a, b = machine.members.learners["a"], machine.members.learners["b"]

    def missing() -> dict[str, bool]:
        return {one.learner: one.missing for one in Meter(CONFIG).make_status(1.0, "r", machine).learners}

    assert missing() == {"a": False, "b": False}
    machine.handle(1.0, Lost("a", "cut off"))
    machine.handle(1.0, Lost("b", "cut off"))
    assert missing() == {"a": True, "b": True}
    machine.handle(1.0 + machine.settings.abandon_s, Received("b", progress(1)))  # any event: the time is over
    assert (a.closed, missing()["a"]) == (True, True), "it is gone by now, and nobody wanted that"
    b.leaving = True
    assert missing() == {"a": True, "b": False}


def test_a_learner_whose_life_was_closed_in_an_earlier_term_is_not_missing(machine: Syncer) -> None:
    machine.members.remember_life("drained", Life(1, "d", 0, [(-1, 0, 0), (-1, 0, 0)], open=False))
    (drained,) = [one for one in Meter(CONFIG).make_status(1.0, "r", machine).learners if one.learner == "drained"]
    assert (drained.state, drained.missing) == ("gone", False)


def test_liveness_is_the_mean_share_of_the_learners_alive() -> None:
    meter = Meter(CONFIG)
    meter.note_event(90.0, "joined", {"learner": "a"})
    assert meter.make_status(95.0, "r", None).liveness is None, "before the first parameters nothing counts"
    meter.note_event(100.0, "recovered", {"learner": "a"})
    assert meter.make_status(104.0, "r", None).liveness == pytest.approx(1 / 2)
    meter.note_event(105.0, "joined", {"learner": "b"})
    meter.note_event(108.0, "lost", {"learner": "a", "incarnation": 1, "busy_s": 5.0})
    assert meter.make_status(110.0, "r", None).liveness == pytest.approx((8 + 5) / (2 * 10))
    meter.note_event(110.0, "ending", {})
    assert meter.make_status(150.0, "r", None).liveness == pytest.approx((8 + 5) / (2 * 10)), "nor after the end"


def test_traffic_fates_and_versions(machine: Syncer) -> None:
    machine.handle(1.0, Received("a", progress(4)))
    status = Meter(CONFIG).make_status(1.0, "r", machine, (70, 80))
    assert (status.bytes_in, status.bytes_out, status.expected) == (70, 80, 2)
    assert status.versions == (0, 0)
    assert status.fates.keys() == {"computed", "merged", "dropped", "lost", "rolled_back", "filtered", "in_flight"}
    assert status.fates["computed"] == sum(count for fate, count in status.fates.items() if fate != "computed")


def test_a_run_that_nobody_works_for_says_so_and_how_to_start_a_learner(machine: Syncer) -> None:
    meter = Meter(CONFIG)
    assert meter.make_status(1.0, "r", None).notice.startswith("No learner has come yet: start one with `atoll learn")
    assert meter.make_status(1.0, "r", machine).notice == ""
    machine.handle(1.0, Lost("a", "gone"))
    assert meter.make_status(1.0, "r", machine).notice == ""
    machine.handle(1.0, Lost("b", "gone"))
    assert meter.make_status(1.0, "r", machine).notice.startswith(
        "Nobody is here: all 2 learners are away or gone, and the run"
    )
    meter.notice = lambda: "the certificate ends"
    assert meter.make_status(1.0, "r", machine).notice == "the certificate ends"


def test_a_run_whose_learners_are_started_for_it_says_that_they_come(machine: Syncer) -> None:
    meter = Meter(CONFIG)
    meter.supervised = True
    assert meter.make_status(1.0, "r", None).notice == "Starting 2 learners …"
    assert meter.make_status(1.0, "r", machine).notice == ""
    machine.handle(1.0, Lost("a", "gone"))
    machine.handle(1.0, Lost("b", "gone"))
    assert meter.make_status(1.0, "r", machine).notice == "Starting 2 learners …", "a run that goes on knows them"
    meter.note_event(1.0, "joined", {"learner": "a"})
    assert meter.make_status(1.0, "r", machine).notice == "Nobody is here: the supervisor restarts 2 learners …"
    machine.state.phase = "finished"
    assert meter.make_status(1.0, "r", machine).notice == ""


def test_at_the_end_who_did_its_work_is_done_and_who_died_is_away(machine: Syncer) -> None:
    machine.members.learners["a"].stopped = True
    machine.handle(1.0, Lost("a", "gone"))
    machine.handle(1.0, Lost("b", "gone"))

    def states() -> list[str]:
        return [one.state for one in Meter(CONFIG).make_status(1.0, "r", machine).learners]

    assert states() == ["away", "away"], "while the run goes on"
    machine.state.phase = "finished"
    assert states() == ["done", "away"]


def test_a_run_that_is_over_waits_for_nobody() -> None:
    assert nobody_here("finished", ()) == nobody_here("ending", ()) == ""


def test_how_long_a_start_takes_is_told_in_steps_that_double() -> None:
    told = [nobody_started("1 learner", seconds, joined=False) for seconds in range(100)]
    assert told[0] == told[9] == "Starting 1 learner …"
    assert list(dict.fromkeys(told))[1:] == [
        f"Starting 1 learner … for {seconds} s so far: scripts load, then connect (atoll logs RUN learner-0)"
        for seconds in (10, 20, 40, 80)
    ]


def test_a_run_that_waits_for_learners_says_for_how_many() -> None:
    settings = convert({"protocol": {"learners": 2, "wait_for_learners_s": 30.0}}, "a test").protocol.resolved(2)
    waiting = Syncer.fresh(settings, run="r", fingerprint="f")
    waiting.handle(0.0, Greeted(Hello(protocol=PROTOCOL, learner="a", session="s", tensors=TENSORS), ""))
    waiting.handle(0.1, Initialised("a", "s"))
    status = Meter(CONFIG).make_status(1.0, "r", waiting)
    assert (status.phase, status.notice) == (
        "waiting",
        "Waiting for 1 more of 2 learners, up to 30 s; then training begins.",
    )


def test_bytes_and_time_left_of_a_learner_that_joins_are_told() -> None:
    run = Syncer.fresh(convert({"protocol": {"learners": 2}}, "a test").protocol.resolved(2), run="r", fingerprint="f")
    for name in ("a", "b"):
        run.handle(0.0, Greeted(Hello(protocol=PROTOCOL, learner=name, session=name, tensors=TENSORS), ""))
    run.handle(0.1, Initialised("a", "a"))
    zeros = (0,) * len(run.versions)
    none = (-1,) * len(run.versions)
    said = {"t": 0, "steps": zeros, "tokens": zeros, "versions": none, "counted": none, "incarnation": 1}
    for at, lacking in ((1.0, 80_000_000), (5.0, 46_000_000)):
        run.handle(at, Received("b", Progress(**said, dropped=zeros, lacking_bytes=lacking)))
    status = Meter(CONFIG).make_status(5.0, "r", run)
    assert (status.phase, status.notice) == (
        "waiting",
        "Training begins once the learners hold version 0. b fetches the run's parameters: 34 of 80 MB, 5 s left.",
    )
    [_, fetches] = status.learners
    assert (fetches.whole_bytes, fetches.lacking_bytes, fetches.fetch_left_s) == (80_000_000, 46_000_000, 5.4)


def test_an_alarm_that_is_over_leaves_one_about_something_else() -> None:
    meter = Meter(CONFIG)
    meter.note_event(1.0, "alarm", {"over": False}, "the loss is bad")
    meter.note_event(2.0, "alarm", {"over": False, "about": "numbers"}, "the numbers are not finite")
    assert meter.make_status(3.0, "r", None).alarm == "the numbers are not finite", "the newest"
    meter.note_event(4.0, "alarm", {"over": True, "about": "numbers"}, "they are again")
    assert meter.make_status(5.0, "r", None).alarm == "the loss is bad"
    meter.note_event(6.0, "alarm", {"over": True}, "it is good again")
    assert meter.make_status(7.0, "r", None).alarm == ""


def test_a_learner_in_quarantine_is_shown_with_the_reason_until_a_round_takes_from_it(machine: Syncer) -> None:
    """Its state was "joining", and nothing said why."""
    meter = Meter(CONFIG)
    before = meter.make_status(0.0, "r", machine).learners[0]

    def show() -> tuple[str, str]:
        [a, b] = meter.make_status(3.0, "r", machine).learners
        assert not b.quarantine and b.state != "quarantined"
        return a.state, a.quarantine

    meter.note_event(1.0, "quarantined", {"learner": "a", "reason": "not finite", "times": 1, "wait_s": 0.0})
    assert show() == ("quarantined", "not finite")
    meter.note_event(1.0, "quarantined", {"learner": "a", "reason": "not finite", "times": 3, "wait_s": 20.0})
    assert show() == ("quarantined", "not finite (3 times of late, each time for longer: now 20 s)")
    committed(meter, 2.0, 1, "b")
    assert show()[0] == "quarantined"
    committed(meter, 3.0, 2, "a", "b")
    assert show() == (before.state, "")
