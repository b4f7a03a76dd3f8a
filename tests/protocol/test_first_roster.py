"""Training of a new run begins once every learner of its first roster holds version 0, as far as it is waited for."""

from functools import partial

import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.history import History
from atoll.protocol.learner.effects import Lacking
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Hello, Progress, TensorSpec, TrainingBegins, Welcome
from atoll.protocol.records import BegunRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.beginning import LEAST_RATE
from atoll.protocol.syncer.downloads import Download, parameter_bytes
from atoll.protocol.syncer.machine import Syncer

MB = 1_000_000


def make_world(fetch_s: float = 20.0, **more: object) -> World:
    """Three learners, the last of which has a narrow link: each of its fragments takes so long."""
    world = World(3, **more)  # type: ignore[arg-type]
    world.learners["learner-2"].fetch_s = fetch_s
    return world


def steps_of(world: World) -> list[int]:
    return [learner.t for learner in world.learners.values()]


def report_download(world: World, name: str, seconds: int, whole: int = 80 * MB) -> None:
    """Have it report every second how much has arrived, evenly over so many seconds."""
    world.learners[name].handle_event(Lacking(whole))
    for second in range(1, seconds):
        lacking = whole - whole * second // seconds
        world.queue.call_later(second, partial(world.learners[name].handle_event, Lacking(lacking)))


def test_nobody_trains_before_all_hold_version_0() -> None:
    world = make_world().run_until(seconds=19)
    assert world.syncer.phase == "running" and steps_of(world) == [0, 0, 0]
    assert [one.name for one in world.syncer.beginning.awaited] == ["learner-2"]
    assert not world.syncer.state.open_rounds, "no round opens either"
    world.run_until(seconds=2.5)
    assert steps_of(world) == [1, 1, 1], "all begin together"
    [begun] = world.said("begun")
    assert begun.text == "training begins after 20.0 s: every learner that is here holds version 0"
    assert not world.said("stalled") and not world.said("warning"), "who waits is not taken for stalled"
    world.run_until(round=1)
    assert world.members(0) == {"learner-0", "learner-1", "learner-2"}


def test_one_alone_begins_at_once() -> None:
    world = World(3, present=1).run_until(seconds=1.5)
    assert steps_of(world) == [1] and world.said("begun")[0].data["seconds"] == 0.0


def test_a_download_that_does_not_move_is_not_waited_for() -> None:
    world = make_world(fetch_s=50.0, join_stall_s=30.0).run_until(seconds=29)
    assert steps_of(world) == [0, 0, 0]
    world.run_until(seconds=4)
    assert steps_of(world) == [3, 3, 0]
    [warning] = world.said("warning")
    assert warning.text == ("training does not wait for learner-2: its download of version 0 has not moved for 30 s")
    assert world.said("begun")[0].text == "training begins after 30.0 s: not all hold version 0"
    world.run_until(seconds=20)
    world.learners["learner-2"].fetch_s = 0.0
    world.run_until(seconds=60)
    assert "learner-2" in world.members(world.syncer.committed - 1), "it comes later, like any newcomer"


def test_a_download_that_moves_is_waited_for() -> None:
    world = make_world(fetch_s=50.0, join_stall_s=10.0)
    report_download(world, "learner-2", 50)
    world.run_until(seconds=49)
    assert steps_of(world) == [0, 0, 0]
    status = world.syncer.members.learners["learner-2"].download
    assert status.describe() == "78.4 of 80 MB, 1 s left"
    assert [note.text for note in world.said("fetching")][:2] == [
        "learner-2 fetches the run's parameters: 16 of 80 MB, 40 s left",
        "learner-2 fetches the run's parameters: 32 of 80 MB, 30 s left",
    ]
    world.run_until(seconds=2.5)
    assert steps_of(world) == [1, 1, 1]


def test_one_that_disconnects_is_not_waited_for() -> None:
    world = make_world().run_until(seconds=5)
    world.kill("learner-2")
    world.run_until(seconds=2.5)
    assert steps_of(world)[:2] == [2, 2] and "begun" in {note.kind for _, note in world.notes}


def test_one_that_comes_back_in_time_is_waited_for_again() -> None:
    """Its connection breaks while another is waited for as well."""
    world = make_world()
    world.learners["learner-1"].fetch_s = 10.0
    world.run_until(seconds=5)
    world.unlink("learner-2")
    world.run_until(seconds=1)
    world.link("learner-2")
    world.run_until(seconds=5)
    assert steps_of(world) == [0, 0, 0] and world.sent(Welcome, "learner-2")[-1][1].waits
    world.run_until(seconds=12)
    assert steps_of(world)[0] == steps_of(world)[2] > 0


def test_one_that_comes_back_later_hears_from_its_welcome_that_training_has_begun() -> None:
    world = make_world().run_until(seconds=5)
    world.unlink("learner-0")
    world.run_until(seconds=20)
    assert steps_of(world)[1] > 0 and steps_of(world)[0] == 0, "it waits where nobody tells it"
    world.link("learner-0")
    world.run_until(seconds=1.5)
    assert not world.sent(Welcome, "learner-0")[-1][1].waits and steps_of(world)[0] == 1
    assert not world.sent(TrainingBegins, "learner-0")


def test_one_that_joins_meanwhile_is_held_back_and_not_waited_for() -> None:
    world = make_world().run_until(seconds=5)
    late = world.join("learner-3")
    later = world.join("learner-4")
    later.fetch_s = 60.0
    world.run_until(seconds=10)
    assert late.t == 0 and min(late.adopted) == 0
    world.run_until(seconds=10)
    assert late.t == steps_of(world)[0] > 0 and later.t == 0


def test_one_that_joins_a_run_under_way_begins_when_it_holds_the_parameters() -> None:
    world = World(3, present=2).run_until(seconds=5)
    world.join("learner-2")
    assert not world.sent(Welcome, "learner-2")[-1][1].waits
    world.run_until(seconds=2)
    assert world.learners["learner-2"].t > 0


def test_a_new_term_holds_nobody_back() -> None:
    world = make_world().run_until(seconds=5)
    world.crash_syncer()
    world.run_until(seconds=2.5)
    assert not world.syncer.beginning.holds_back
    assert steps_of(world) == [2, 2, 0]
    world.run_until(seconds=60)
    assert steps_of(world)[2] > 0


def test_a_new_courier_hears_that_training_has_not_begun() -> None:
    world = make_world().run_until(seconds=5)
    world.restart_courier("learner-0")
    world.restart_courier("learner-1")
    world.run_until(seconds=10)
    assert steps_of(world) == [0, 0, 0]
    world.run_until(seconds=7.5)
    assert steps_of(world) == [2, 2, 2]


def test_a_courier_that_dies_with_the_word_does_not_hold_its_training_process_for_ever() -> None:
    world = make_world().run_until(seconds=15)
    learner = world.learners["learner-0"]
    world.unlink("learner-0")
    learner.lose_courier()
    world.run_until(seconds=10)
    assert learner.t == 0
    learner.new_courier()
    world.link("learner-0")
    world.run_until(seconds=1.5)
    assert learner.t == 1


def test_a_run_that_is_ended_meanwhile_is_over() -> None:
    world = make_world().run_until(seconds=5)
    world.end()
    world.run_to_end()
    assert world.syncer.phase == "finished" and steps_of(world) == [0, 0, 0]


def test_a_synchronous_run_waits_too() -> None:
    world = make_world(synchronous=True, overlap=0, quorum=3).run_until(seconds=19)
    assert steps_of(world) == [0, 0, 0]
    world.run_until(seconds=1.5)
    world.learners["learner-2"].fetch_s = 0.0
    world.run_until(round=2)
    assert world.members(0) == world.members(1) == {"learner-0", "learner-1", "learner-2"}


def test_a_second_word_or_one_that_comes_late_changes_nothing() -> None:
    world = World(2).run_until(seconds=5)
    machine: LearnerMachine = world.learners["learner-0"].machine
    before = machine.phase, world.learners["learner-0"].t
    world.network.send_down(world.simulated_syncer, "learner-0", TrainingBegins(reason="again", term=1))
    world.run_until(seconds=0.1)
    assert (machine.phase, world.learners["learner-0"].t) == before == ("training", 5)


# ---- the figures of a download ---------------------------------------------------------------------------------------


def test_no_claim_holds_the_others_up_for_ever() -> None:
    """It reports one byte less every second, as no real link would carry them."""
    tensors = (TensorSpec("w", (1024, 1024), "float32"),)
    settings = Settings(learners=2, fragments=1, sync_every=4).resolved(1)
    syncer = Syncer(History(BegunRecord("run", settings, {}, tensors, "plan")))
    for name in ("learner-0", "learner-1"):
        syncer.handle(0.0, fx.Greeted(Hello(protocol=2, learner=name, session=name)))
    syncer.handle(0.0, fx.Initialised("learner-0", "learner-0"))
    longest_s = 30 + parameter_bytes(tensors) / LEAST_RATE
    now = 0.0
    while syncer.beginning.holds_back and now < 1000:
        now += 1.0
        for name in ("learner-0", "learner-1"):
            versions = (0,) if name == "learner-0" else (-1,)
            lacking = 0 if name == "learner-0" else 10**12 - int(now)
            said = Progress(
                t=0, steps=(0,), tokens=(0,), versions=versions, incarnation=1, dropped=(0,), counted=versions,
                lacking_bytes=lacking,
            )  # fmt: skip
            syncer.handle(now, fx.Received(name, said))
    assert now <= longest_s + 1
    assert syncer.members.learners["learner-1"].download.whole == 4 * 1024**2, "no model here has more"


@pytest.mark.parametrize(
    ("reports", "left_s", "words"),
    [
        ([(0.0, 80 * MB)], None, "0 of 80 MB, time left not known"),
        ([(0.0, 80 * MB), (1.0, 80 * MB)], None, "0 of 80 MB, time left not known"),
        ([(0.0, 80 * MB), (5.0, 70 * MB)], 35.0, "10 of 80 MB, 35 s left"),
        ([(0.0, 80 * MB), (5.0, 70 * MB), (20.0, 69 * MB), (25.0, 50 * MB)], 50.0, "30 of 80 MB, 50 s left"),
        ([(0.0, 80 * MB), (5.0, 10 * MB), (6.0, 80 * MB), (7.0, 60 * MB)], 3.0, "20 of 80 MB, 3 s left"),
    ],
)
def test_time_left_is_by_the_rate_of_the_last_ten_seconds(
    reports: list[tuple[float, int]], left_s: float | None, words: str
) -> None:
    download = Download()
    for at, lacking in reports:
        download.note_lacking(at, lacking, 0)
    assert download.left_s == left_s and download.describe() == words


def test_a_download_that_begins_again_moves_once_it_has_less_to_come_than_ever() -> None:
    download = Download()
    for at, lacking in [(0.0, 80), (1.0, 50), (2.0, 80), (3.0, 60), (4.0, 49)]:
        download.note_lacking(at, lacking, 0)
        assert download.moved_at == {0.0: 0.0, 4.0: 4.0}.get(at, 1.0)


def test_the_loss_of_a_version_0_that_was_rounded_is_said_when_the_run_begins() -> None:
    settings = Settings(learners=1, fragments=1, sync_every=4, initial_codec="bf16").resolved(1)
    for loss, text in (
        (0.0, ""),
        (0.00166, ", rounded to bf16: relative error 1.66e-03 (norm of the difference / norm)"),
    ):
        tensors = (TensorSpec("w", (4,), "float32"),)
        syncer = Syncer(History(BegunRecord("run", settings, {}, tensors, "plan")))
        syncer.handle(0.0, fx.Greeted(Hello(protocol=2, learner="a", session="a")))
        said = [one for one in syncer.handle(0.0, fx.Initialised("a", "a", loss)) if isinstance(one, Note)]
        [initial] = [one for one in said if one.kind == "initial"]
        assert initial.text == "a gave the first parameters" + text
        assert initial.data.get("relative_error", 0.0) == loss
