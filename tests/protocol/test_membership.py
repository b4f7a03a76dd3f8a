"""Joining, leaving, coming back; the first parameters; silence."""

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.protocol.world import World

from atoll.protocol.learner.effects import (
    Adopted,
    Arrived,
    Disconnected,
    Fetch,
    Fetched,
    Own,
    Registered,
    Say,
    Stepped,
)
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.ledger import Ledger
from atoll.protocol.messages import (
    Announce,
    Box,
    Ending,
    Fresh,
    Heartbeat,
    Hello,
    Leave,
    Progress,
    Recover,
    Refused,
    Started,
    Welcome,
)
from atoll.protocol.records import OwnedRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer.effects import Expel, Greeted, Initialised, Lost, Persist, Received, Send, Uploading
from atoll.protocol.syncer.machine import Syncer
from atoll.protocol.syncer.membership import Membership


def test_the_first_joiner_gives_the_first_parameters_and_the_others_take_them() -> None:
    world = World(3, latency_s=0.1).run_until(round=1)
    assert world.said("initial")[0].text == "learner-0 gave the first parameters"
    assert [a for a in world.learners["learner-0"].adoptions if a[2] == 0] == []
    assert [a[1:] for a in world.learners["learner-1"].adoptions if a[2] == 0] == [(0, 0), (1, 0)]


def test_a_learner_has_a_number_of_its_own_and_keeps_it_in_its_next_life_and_under_the_next_syncer() -> None:
    world = World(3, latency_s=0.1).run_until(round=4)
    world.kill("learner-0")
    world.run_until(round=6)
    world.join("learner-0")
    world.run_until(round=8)
    world.crash_syncer(down_s=1.0)
    world.run_until(round=12)
    numbers = [{welcome.index for _, welcome in world.sent(Welcome, name)} for name in world.learners]
    assert sorted(numbers, key=min) == [{0}, {1}, {2}]
    assert all(len(world.sent(Welcome, name)) >= 2 for name in world.learners)


def test_when_the_uploader_dies_the_next_is_asked() -> None:
    world = World(3, latency_s=0.5)
    world.run_until(seconds=0.6)
    world.kill("learner-0")
    world.run_until(round=2)
    assert world.said("initial")[0].text == "learner-1 gave the first parameters"
    asked = [message.upload for _, message in world.sent(Welcome, "learner-1")]
    assert asked == [False, True]


def empty(*names: str, **hello: Any) -> Syncer:
    """A run without parameters; those that joined it dial every moment and send nothing."""
    syncer = Syncer.fresh(Settings(learners=2, fragments=2, sync_every=4).resolved(4), run="r", fingerprint="")
    for number, name in enumerate(names):
        syncer.handle(number / 10, Greeted(Hello(protocol=2, learner=name, session=f"s-{name}", **hello)))
    return syncer


def asked(syncer: Syncer, names: Iterable[str], start: int, stop: int, sends: int = 0) -> dict[float, str]:
    """Who is asked for the first parameters at which second, while everybody shows signs of life; with `sends`, whoever
    is asked comes to the end of a fragment so often."""
    found = {}
    for second in range(start, stop):
        for name in names:
            for effect in syncer.handle(float(second), Received(name, Heartbeat())):
                if isinstance(effect, Send) and isinstance(effect.message, Welcome) and effect.message.upload:
                    found[float(second)] = effect.learner
        if sends and second % sends == 0 and syncer.run_start._uploader is not None:
            syncer.handle(float(second), Uploading(syncer.run_start._uploader, 0))
    return found


def test_an_uploader_that_sends_nothing_is_followed_by_the_next() -> None:
    syncer = empty("evil", "honest")
    assert asked(syncer, ("evil", "honest"), 1, 300) == {61.0: "honest", 121.0: "evil", 181.0: "honest", 241.0: "evil"}
    syncer.handle(300.0, Initialised("honest", "s-honest"))
    assert syncer.phase == "empty", "it is not its turn"
    syncer.handle(302.0, Received("evil", Heartbeat()))
    syncer.handle(302.0, Initialised("honest", "s-honest"))
    assert syncer.phase == "running"


def test_an_uploader_has_its_time_while_fragments_come() -> None:
    syncer = empty("slow", "other")
    assert asked(syncer, ("slow", "other"), 1, 7200, sends=50) == {}
    syncer.handle(7200.0, Uploading("slow", 100 * 32 * 1024))
    assert asked(syncer, ("slow", "other"), 7200, 7350) == {7310.0: "other"}, "a large fragment takes its time"


def test_an_uploader_that_is_alone_keeps_its_turn_until_another_comes() -> None:
    syncer = empty("slow")
    assert asked(syncer, ("slow",), 1, 1000) == {}
    syncer.handle(1000.0, Greeted(Hello(protocol=2, learner="other", session="s")))
    assert asked(syncer, ("slow", "other"), 1001, 1100) == {1060.0: "other"}


def test_a_model_that_is_said_to_be_held_does_not_stop_an_upload_that_has_begun() -> None:
    syncer = empty("first")
    holder = Hello(protocol=2, learner="holder", session="s", run="before", versions=(3, 3))
    syncer.handle(1.0, Uploading("first", 1000))
    effects = syncer.handle(2.0, Greeted(holder))
    assert [e.message.upload for e in effects if isinstance(e, Send) and isinstance(e.message, Welcome)] == [False]
    again = empty("first")
    effects = again.handle(2.0, Greeted(holder))
    assert [e.message.upload for e in effects if isinstance(e, Send) and isinstance(e.message, Welcome)] == [True]


def test_what_a_process_uploaded_before_another_took_its_name_is_not_version_0() -> None:
    syncer = empty("a")
    syncer.handle(1.0, Greeted(Hello(protocol=2, learner="a", session="new")))
    syncer.handle(2.0, Initialised("a", "s-a"))
    assert syncer.phase == "empty"
    syncer.handle(3.0, Initialised("a", "new"))
    assert syncer.phase == "running"


def test_a_learner_with_a_model_goes_before_one_that_was_asked_in_place_of_another_with_a_model() -> None:
    syncer = empty("other")
    for name in ("holder", "last"):
        hello = Hello(protocol=2, learner=name, session="s", run="before", versions=(3, 3))
        effects = syncer.handle(2.0, Greeted(hello))
        assert [e.message.upload for e in effects if isinstance(e, Send) and isinstance(e.message, Welcome)] == [True]
        syncer.handle(3.0, Lost(name, "gone"))
        assert syncer.run_start._uploader == "other"


def test_when_the_only_joiner_dies_the_next_to_come_is_asked() -> None:
    world = World(2, present=1, latency_s=0.5)
    world.kill("learner-0")
    world.join("learner-1")
    world.run_until(round=2)
    assert world.said("initial")[0].text == "learner-1 gave the first parameters"


@pytest.mark.parametrize("versions", [(0,), (0, 0, 0), (0,) * 1000])
def test_a_hello_with_a_row_of_another_length_is_refused_and_costs_only_its_sender(versions: tuple[int, ...]) -> None:
    """Who comes back is asked by what it says it holds: a row that is too short would end the syncer."""
    world = World(2, fragments=2, sync_every=4).run_until(round=6)
    session = world.learners["learner-1"].session
    hello = Hello(protocol=2, learner="learner-1", session=session, run="run", versions=versions, incarnation=1)
    assert hello.run == world.syncer.run
    effects = world.inject(Greeted(hello))
    [expel] = [effect for effect in effects if isinstance(effect, Expel)]
    assert expel.reason == f"a hello with versions of {len(versions)} fragments in a run of 2"
    [refused] = [effect.message for effect in effects if isinstance(effect, Send)]
    assert isinstance(refused, Refused) and refused.final
    assert not world.syncer.members.learners["learner-1"].connected
    world.run_until(round=12)
    assert world.members(11) == {"learner-0"}


def test_what_a_learner_holds_of_another_run_may_have_any_length() -> None:
    syncer = Syncer.fresh(Settings(fragments=2, sync_every=4).resolved(4), run="r", fingerprint="")
    effects = syncer.handle(0.0, Greeted(Hello(protocol=2, learner="a", session="s", run="before", versions=(3,) * 7)))
    assert [type(effect.message) for effect in effects if isinstance(effect, Send)] == [Welcome]


def test_a_late_joiner_takes_the_runs_parameters_before_it_contributes() -> None:
    world = World(3, present=2, fragments=4, sync_every=4, latency_s=0.1).run_until(round=10)
    world.join("learner-2")
    joined = world.syncer.committed
    world.run_until(round=joined + 8)
    first = next(n for n in range(joined, joined + 8) if "learner-2" in world.members(n))
    base = next(m["base"] for m in world.round_note(first)["members"] if m["learner"] == "learner-2")
    assert base >= 2
    assert "learner-2" in world.members(joined + 7)


def test_an_unlinked_learner_trains_on_and_comes_back_in_the_same_incarnation() -> None:
    world = World(3, fragments=4, sync_every=4).run_until(round=10)
    learner = world.learners["learner-1"]
    before = learner.t
    world.unlink("learner-1")
    world.run_until(seconds=15)
    assert learner.t >= before + 14, "nobody waits"
    held = list(learner.adopted)
    world.link("learner-1")
    world.run_until(seconds=3)
    assert world.syncer.members.learners["learner-1"].incarnation == 1
    assert all(new > old + 1 for new, old in zip(learner.adopted, held, strict=True)), "it skipped to the newest"
    world.run_until(seconds=3)
    assert "learner-1" in world.members(world.syncer.committed - 1)


def test_another_process_takes_the_name_of_one_that_is_still_connected() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.1).run_until(round=4)
    world.join("learner-1")
    world.run_until(seconds=10)
    assert any("another process took its name" in note.text for note in world.said("lost"))
    assert world.syncer.members.learners["learner-1"].incarnation == 2
    assert "learner-1" in world.members(world.syncer.committed - 1)


def test_a_silent_learner_is_expelled_and_may_come_back() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1).run_until(round=4)
    world.learners["learner-1"].silent = True
    world.run_until(seconds=10)
    assert any("nothing heard for 6 s" in note.text for note in world.said("lost"))
    world.learners["learner-1"].silent = False
    world.link("learner-1")
    world.run_until(seconds=5)
    assert "learner-1" in world.members(world.syncer.committed - 1)


def test_a_learner_with_nothing_to_say_still_sends_heartbeats() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1).run_until(round=4)
    world.pause("learner-1")
    world.run_until(seconds=60)
    assert not world.said("lost")


def test_a_restarted_courier_continues_as_the_same_incarnation() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.05, adopt="carry").run_until(round=5)
    world.restart_courier("learner-0")
    world.run_until(seconds=8)
    assert world.syncer.members.learners["learner-0"].incarnation == 1
    assert "learner-0" in world.members(world.syncer.committed - 1)


def test_a_syncer_of_another_run_makes_learners_forget_and_start_over() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1, latency_s=0.05).run_until(round=9)
    world.replace_syncer("another run")
    world.run_until(seconds=10)
    assert world.syncer.committed > 3
    assert all(learner.machine.run == "another run" for learner in world.learners.values())
    assert world.syncer.members.learners["learner-0"].incarnation == 1


def test_whoever_comes_after_the_end_is_told_so() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1, steps=6).run_to_end()
    world.join("learner-9")
    assert [message.reason for _, message in world.sent(Refused)] == ["the run is over"]


def test_one_that_was_cut_off_at_the_end_still_ends_in_good_order() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1, steps=10).run_until(round=6)
    world.unlink("learner-1")
    world.run_to_end()
    world.finished = False
    world.link("learner-1")
    world.run_until(seconds=5)
    assert world.learners["learner-1"].over and not world.learners["learner-1"].failed
    assert world.learners["learner-1"].adopted == world.syncer.versions


def test_learners_whose_loops_end_by_themselves_end_the_run() -> None:
    world = World(2, fragments=2, sync_every=4).run_until(round=6)
    for learner in world.learners.values():
        learner.done = True
    world.run_to_end(seconds=60)
    assert world.said("ending")[0].text.startswith("the run ends: every learner has stopped")


def test_one_loop_that_ends_by_itself_holds_up_nobody_and_its_last_steps_are_merged() -> None:
    world = World(2, fragments=2, sync_every=4, quorum=2, patience_s=1.0).run_until(round=6)
    world.learners["learner-1"].done = True
    world.run_until(seconds=30)
    assert world.syncer.committed > 15
    assert world.learners["learner-1"].steps == [0, 0]


def test_the_last_to_stop_ends_the_run_also_when_the_others_have_left() -> None:
    """It would wait for a minute otherwise, and its last steps with it."""
    world = World(2, fragments=2, sync_every=4).run_until(round=6)
    world.learners["learner-1"].done = True
    world.run_until(seconds=20)
    world.inject(Received("learner-1", Leave(reason="it left before the run ended")))
    world.learners["learner-1"].alive = False
    world.learners["learner-0"].done = True
    world.run_to_end(seconds=10)
    assert world.said("ending")[0].text.startswith("the run ends: every learner has stopped")


def test_those_that_have_stopped_do_not_end_the_run_while_the_others_lines_are_down() -> None:
    """As many have stopped as the run is meant for, under names of their own; the two that train are away for a
    moment."""
    world = World(2, fragments=2, sync_every=4).run_until(seconds=20)
    for name in ("x", "y"):
        world.join(name)
    world.run_until(seconds=10)
    for name in ("x", "y"):
        world.learners[name].done = True
    world.run_until(seconds=10)
    assert all(world.syncer.members.learners[name].stopped for name in ("x", "y"))
    for name in ("learner-0", "learner-1"):
        world.unlink(name)
    world.run_until(seconds=0.5)
    for name in ("learner-0", "learner-1"):
        world.link(name)
    before = world.syncer.committed
    world.run_until(seconds=2 * world.settings.assemble_s)
    assert world.syncer.phase == "running" and world.syncer.committed > before + 10


def test_one_that_has_stopped_does_not_end_the_run_of_a_new_term_while_the_others_are_away() -> None:
    """The syncer's machine has been up for longer than `assemble_s`. The other two come back half a minute later, and a
    minute later."""
    world = World(3, fragments=2, sync_every=4).run_until(seconds=100)
    world.learners["learner-0"].done = True
    world.run_until(seconds=10)
    world.crash_syncer(apart_s=world.settings.assemble_s / 2)
    world.run_until(seconds=20)
    learners = world.syncer.members.learners
    assert learners["learner-0"].stopped and not learners["learner-1"].connected and not learners["learner-2"].connected
    assert world.syncer.phase == "running"
    before = world.syncer.committed
    world.run_until(seconds=2 * world.settings.assemble_s)
    assert world.syncer.phase == "running" and world.syncer.committed > before + 10


def test_one_that_holds_a_global_model_gives_the_first_parameters_rather_than_a_newcomer() -> None:
    """After a restart of the syncer a learner that has only just started may well be the first to come."""
    syncer = Syncer.fresh(Settings(learners=2, fragments=2, sync_every=4), run="new", fingerprint="plan")
    newcomer = Hello(protocol=2, learner="learner-0", session="a")
    survivor = Hello(protocol=2, learner="learner-1", session="b", run="old", versions=(3, 3))
    asked = [effect.message for effect in syncer.handle(0.0, Greeted(newcomer)) if isinstance(effect, Send)]
    assert [message.upload for message in asked if isinstance(message, Welcome)] == [True]
    asked = [effect.message for effect in syncer.handle(0.1, Greeted(survivor)) if isinstance(effect, Send)]
    assert [message.upload for message in asked if isinstance(message, Welcome)] == [True]
    syncer.handle(0.2, Initialised("learner-0", "a"))
    assert syncer.phase == "empty", "what the newcomer sends is not wanted any more"


def test_whose_a_name_is_is_written_down_before_its_welcome() -> None:
    syncer = Syncer.fresh(Settings(learners=2, fragments=2, sync_every=4), run="r", fingerprint="plan")

    def greeted(session: str, token: str) -> list[str]:
        """Which owners are written down, and where the welcome stands among them."""
        hello = Hello(protocol=2, learner="anna", session=session)
        effects = syncer.handle(0.0, Greeted(hello, token))
        said = [record for effect in effects if isinstance(effect, Persist) for record in effect.records]
        first = next(place for place, effect in enumerate(effects) if isinstance(effect, Send))
        assert not any(isinstance(effect, Persist) for effect in effects[first:])
        return [record.token for record in said if isinstance(record, OwnedRecord)]

    assert greeted("a", "eu") == ["eu"]
    assert greeted("a", "eu") == [] == greeted("b", "eu"), "once is enough"
    assert greeted("c", "us") == ["us"], "the door has let it in: the token of before counts no more"
    assert greeted("d", "") == [], "where nobody is asked, nothing is owned; and whose it was stays known"
    assert syncer.history.owners == {"anna": "us"}


def test_names_keep_their_order_whoever_comes_when() -> None:
    members = Membership(Settings(fragments=2))
    for session, name in enumerate(["c", "a", "d", "b", "a", "c"]):
        members.find_or_begin_life(0.0, Hello(protocol=2, learner=name, session=str(session)), "r")
    assert [(one.name, one.incarnation) for one in members.connected_learners()] == [
        ("a", 2),
        ("b", 1),
        ("c", 2),
        ("d", 1),
    ]
    assert all(members.learners[one.name] is one for one in members.connected_learners())


def test_progress_does_not_go_back_when_one_returns_whose_account_was_closed() -> None:
    """Its tokens of before count on; they were left out until its first report of the new life."""
    world = World(2, fragments=2, sync_every=4, tokens=4000, abandon_s=8.0).run_until(round=10)
    world.unlink("learner-1")
    world.run_until(seconds=12)
    before = world.syncer.progress
    world.link("learner-1")
    assert world.syncer.members.learners["learner-1"].incarnation == 2
    assert world.syncer.progress >= before


def test_nothing_is_heeded_before_the_welcome() -> None:
    """What waited for the disk while its learner dialled anew goes to the new connection, and may come first."""
    learner = LearnerMachine("learner-0", "session", ())
    announce = Announce(round=6, fragment=0, version=4, members=(), gathering=7, term=1)
    assert learner.handle(0.0, Arrived(announce)) == []
    assert learner.handle(0.0, Arrived(Ending(reason="asked to", term=1))) == [] and learner.phase == "out"


def test_the_welcome_of_an_earlier_process_is_passed_over() -> None:
    """Its process died while the welcome waited for the disk, and another has the name by the time it is sent."""
    learner = LearnerMachine("learner-0", "second", ())
    settings = Settings(learners=2, fragments=2, sync_every=4)
    welcome = Welcome(run="run", incarnation=1, settings=settings, fingerprint="p", versions=(1, 0), gathering=1)
    merged = ((1, 1, 10), (-1, 0, 0))
    assert learner.handle(0.0, Arrived(replace(welcome, session="first", merged=merged))) == []
    assert learner.incarnation == 0
    learner.handle(0.0, Arrived(replace(welcome, session="second", incarnation=2)))
    assert learner.incarnation == 2 and learner.run == "run"


def test_a_life_that_begins_in_the_middle_of_a_step_is_told_of_once_the_step_is_over() -> None:
    """A peer's word came before the training process had forgotten: the step under way was in no life's account."""
    learner = LearnerMachine("learner-0", "session", ())
    settings = Settings(learners=2, fragments=1, sync_every=4)
    welcome = Welcome(
        run="run", incarnation=1, settings=settings, fingerprint="p", versions=(5,), gathering=5, committed=5
    )
    learner.handle(0.0, Arrived(welcome))
    learner.handle(0.1, Arrived(Fresh(reason="nobody is there")))
    learner.handle(0.2, Fetched(0, 5))
    learner.handle(0.3, Adopted(0, 5, 0))
    learner.handle(1.0, Stepped(t=3, steps=(3,), tokens=(30,), tokens_total=30, dropped=(0,)))
    learner.handle(1.1, Arrived(Recover(incarnation=2, reason="broken", clock={"syncer": 5})))
    said = learner.handle(1.2, Arrived(Fresh(reason="nobody is there")))
    assert not [one for one in said if isinstance(one, Say) and isinstance(one.message, Progress)]
    learner.handle(1.3, Fetched(0, 5))
    learner.handle(1.4, Adopted(0, 5, 4))  # at the boundary of step 4, which was under way
    said = learner.handle(1.4, Stepped(t=4, steps=(0,), tokens=(0,), tokens_total=40, dropped=(0,)))
    told = [one.message for one in said if isinstance(one, Say) and isinstance(one.message, Progress)]
    assert [(one.incarnation, one.tokens_total) for one in told] == [(2, 40)]


@pytest.mark.parametrize(("ranks", "adopted"), [(0, False), (0, True), (2, False), (2, True)])
def test_ranks_that_may_hold_two_versions_fetch_the_first_parameters_that_they_gave(ranks: int, adopted: bool) -> None:
    """Seed 1103 of the ranks' worlds: the disk had lost the run, and one rank had adopted a version that another had
    not when all was forgotten. Replicas would have gone on from different bases."""
    boxes = tuple((Box("w", (rank,), (1,)),) for rank in range(ranks))
    learner = LearnerMachine("learner-0", "session", (), ranks=boxes)
    settings = Settings(learners=2, fragments=1, sync_every=4)
    welcome = Welcome(run="run", incarnation=1, settings=settings, fingerprint="p", versions=(0,), gathering=0, term=1)
    if adopted:
        learner.handle(0.0, Arrived(welcome))
        learner.handle(0.1, Fetched(0, 0))
        learner.handle(0.2, Disconnected("the machine went down"))
    learner.handle(1.0, Arrived(replace(welcome, incarnation=2, versions=(-1,), upload=True, term=2)))
    did = learner.handle(1.1, Arrived(Started(uploader="learner-0", gathering=0, term=2)))
    fetches = ranks > 0 and adopted
    assert [one for one in did if isinstance(one, Own | Fetch)] == [Fetch(0, 0) if fetches else Own()]


def test_a_new_life_has_taken_none_of_its_samples() -> None:
    """Its first report spoke of the samples of the life before, as if they were of its own leases."""
    learner = LearnerMachine("learner-0", "session", ())
    learner.handle(0.0, Registered((("text", 1000, 1.0),), 0, 4))
    settings = Settings(learners=2, fragments=2, sync_every=4)
    welcome = Welcome(run="run", incarnation=1, settings=settings, fingerprint="p", versions=(0, 0), gathering=0)
    learner.handle(0.0, Arrived(welcome))
    learner.handle(1.0, Stepped(t=9, steps=(9, 9), tokens=(90, 90), tokens_total=90, dropped=(0, 0), position=36))
    learner.handle(2.0, Disconnected("connection reset"))
    learner.handle(9.0, Arrived(replace(welcome, incarnation=2)))
    learner.handle(9.1, Fetched(0, 0))
    assert [report.position for report in reports(learner.handle(9.2, Adopted(0, 0, 9)))] == [0]


def reports(effects: list[Any]) -> list[Progress]:
    return [one.message for one in effects if isinstance(one, Say) and isinstance(one.message, Progress)]


@pytest.mark.parametrize("late", [False, True])
def test_a_life_that_begins_while_it_joins_is_told_of_once_the_step_under_way_is_over(late: bool) -> None:
    """It trained on without the run, or before the life before had the run's parameters: "the ledger does not balance",
    for the step in the middle of which its courier was welcomed was in no life's account."""
    learner, ledger = LearnerMachine("learner-0", "session", ()), Ledger(1)
    settings = Settings(learners=2, fragments=1, sync_every=4)
    welcome = Welcome(run="run", incarnation=1, settings=settings, fingerprint="p", versions=(0,), gathering=0)
    if not late:
        learner.handle(0.0, Arrived(welcome))
    said = learner.handle(1.0, Stepped(t=3, steps=(3,), tokens=(30,), tokens_total=30, dropped=(0,)))
    learner.handle(1.1, Disconnected("connection reset"))
    said += learner.handle(1.2, Arrived(replace(welcome, incarnation=2)))  # step 4 is under way, …
    said += learner.handle(1.5, Stepped(t=4, steps=(0,), tokens=(0,), tokens_total=40, dropped=(0,)))  # … forgotten
    said += learner.handle(2.0, Stepped(t=5, steps=(1,), tokens=(10,), tokens_total=50, dropped=(0,)))
    told = [one for one in reports(said) if one.incarnation == 2]
    assert [one.tokens_total for one in told] == [40, 50]
    ledger.joined("learner-0", 2, 0)
    for one in told:
        assert ledger.reported("learner-0", 2, one.tokens_total, one.tokens, one.dropped, one.counted) is None


def test_a_life_that_begins_when_everything_was_handed_over_is_told_of_once_that_is_answered() -> None:
    """Seed 168 with ranks: it had adopted all, and made steps before it was told to forget. Nobody knew of these when
    the new life said what it had counted so far, and the ledger did not balance."""
    learner = LearnerMachine("learner-0", "session", ())
    settings = Settings(learners=2, fragments=1, sync_every=4)
    welcome = Welcome(run="run", incarnation=1, settings=settings, fingerprint="p", versions=(5,), gathering=5)
    learner.handle(0.0, Arrived(welcome))
    learner.handle(0.1, Fetched(0, 5))
    learner.handle(0.2, Disconnected("connection reset"))
    assert reports(learner.handle(0.3, Arrived(replace(welcome, incarnation=2)))) == []
    said = learner.handle(1.5, Stepped(t=6, steps=(0,), tokens=(0,), tokens_total=60, dropped=(0,)))
    assert [(one.incarnation, one.tokens_total) for one in reports(said)] == [(2, 60)]


# ---- the syncer stands still -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [2.0, 6.5, 8.0])
def test_nobody_is_lost_muted_or_stalled_because_the_syncer_stood_still(seconds: float) -> None:
    """What was said meanwhile is read one by one; the first of it must not cost the others their place."""
    world = World(4, step_s=0.4, latency_s=0.02, fragments=8, sync_every=8, lost_after_s=6.0).run_until(round=40)
    world.simulated_syncer.stop()
    world.run_until(seconds=seconds)
    world.simulated_syncer.wake_up()
    world.run_until(seconds=5.0)
    assert not [kind for kind in ("lost", "muted", "stalled", "again", "passed") if world.said(kind)]
    assert world.members(world.syncer.committed - 1) == set(world.learners)


def test_a_learner_that_died_while_the_syncer_stood_still_is_lost_in_its_time() -> None:
    world = World(3, step_s=0.4, latency_s=0.02, fragments=8, sync_every=8, lost_after_s=6.0).run_until(round=40)
    world.simulated_syncer.stop()
    world.run_until(seconds=3.0)
    world.end_process(world.learners["learner-2"])
    world.run_until(seconds=5.0)
    world.simulated_syncer.wake_up()
    woke_at = world.now
    world.run_until(seconds=10.0)
    lost = [(at - woke_at, note.data["learner"]) for at, note in world.notes if note.kind == "lost"]
    assert [name for _, name in lost] == ["learner-2"] and lost[0][0] <= 6.0


def test_a_pause_in_the_training_loop_is_told_with_its_cause_and_its_end() -> None:
    world = World(2, fragments=2, sync_every=4, stalled_after_s=5.0, step_s=[1.0, 1.0]).run_until(seconds=10.0)
    world.learners["learner-1"].step_s = 30.0
    world.run_until(seconds=20.0)
    world.learners["learner-1"].step_s = 1.0
    world.run_until(seconds=30.0)
    [stalled], [again] = world.said("stalled"), world.said("steps")
    assert "(a pause in its training loop, as of validation or a checkpoint, or it hangs)" in stalled.text
    stood_s = float(again.text.removeprefix("learner-1 makes steps again, after ").partition(" s ")[0])
    assert 29.0 < stood_s < 32.0


def test_one_that_has_made_no_step_is_asked_for_its_call() -> None:
    """Not a word of being slow: the usual cause is a loop without learner.step()."""
    world = World(2, fragments=2, sync_every=4, stalled_after_s=5.0, step_s=[1.0, 1e6])
    world.run_until(seconds=12.0)
    [stalled] = world.said("stalled")
    assert stalled.text.startswith("learner-1 has made no step yet") and "learner.step()" in stalled.text
