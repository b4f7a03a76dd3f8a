"""Rounds in the virtual world: members, failures, order, deadlines, mutes."""

from itertools import pairwise

import pytest
from tests.protocol.world import SimulatedLearner, World

from atoll.protocol.history import History
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.messages import Announce, Decline, Pull
from atoll.protocol.records import BegunRecord
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as syncer_fx
from atoll.protocol.syncer.closing import RoundClosing
from atoll.protocol.syncer.rounds import SILENT_BEATS
from atoll.protocol.syncer.state import Round, SyncerState
from atoll.simulate import campaign
from atoll.simulate.disk import AGAIN_S


def test_round_n_takes_fragment_n_mod_p() -> None:
    world = World(2, fragments=3, sync_every=3).run_until(round=9)
    assert [commit.fragment for _, commit in world.commits()] == [0, 1, 2] * 3
    assert world.syncer.versions == [3, 3, 3]


def test_a_killed_member_does_not_hold_up_its_round() -> None:
    world = World(3, fragments=2, sync_every=2, overlap=1, latency_s=0.1).run_until(round=5)
    world.run_until(seconds=0.05)
    while not any(r.number == 6 and r.stage == "pulling" for r in world.syncer.state.open_rounds.values()):
        world.run_until(seconds=0.01)
    world.kill("learner-1")
    world.run_until(round=7)
    assert world.members(6) == {"learner-0", "learner-2"}


def test_a_round_below_its_quorum_gathers_once_more() -> None:
    world = World(2, fragments=2, sync_every=4, quorum=2, latency_s=0.1).run_until(round=3)
    while not any(r.number == 3 and r.stage == "pulling" for r in world.syncer.state.open_rounds.values()):
        world.run_until(seconds=0.01)
    world.unlink("learner-1")
    world.link("learner-1")
    world.run_until(round=4)
    assert world.round_note(3)["attempt"] == 2
    assert world.members(3) == {"learner-0", "learner-1"}
    assert "1 of 2 contributions came (learner-1: connection reset)" in world.said("again")[0].text


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("learners", [2, 4])
def test_one_that_is_always_ready_and_never_gives_does_not_keep_the_others_from_merging(
    learners: int, synchronous: bool
) -> None:
    """The quorum cannot be met without it. It steps and reports, and answers each pull: nothing to give."""
    world = World(learners, fragments=2, sync_every=4, quorum=learners, synchronous=synchronous).run_until(round=6)
    world.learners["learner-1"].answers = False
    answered: set[tuple[int, int]] = set()
    while world.syncer.committed < 16:
        world.run_until(seconds=0.05)
        for _, pull in world.sent(Pull, "learner-1"):
            if pull.round >= 6 and not pull.probe and (pull.round, pull.attempt) not in answered:
                answered.add((pull.round, pull.attempt))
                no = Decline(round=pull.round, attempt=pull.attempt, reason="nothing")
                world.inject(syncer_fx.Received("learner-1", no))
    assert {attempt for _, attempt in answered} == {1, 2} and not world.said("passed")
    assert all(world.members(number) == {*world.learners} - {"learner-1"} for number in range(7, 16))


def test_a_second_attempt_takes_no_fewer_than_gave_to_the_first() -> None:
    """Of three, one is away for a moment in the first attempt; in the second the two others die."""
    world = World(3, fragments=2, sync_every=4, quorum=3, latency_s=0.1).run_until(round=3)
    while not any(r.number == 3 and r.stage == "pulling" for r in world.syncer.state.open_rounds.values()):
        world.run_until(seconds=0.01)
    world.unlink("learner-1")
    world.link("learner-1")
    round_ = world.syncer.state.open_rounds[3]
    while (round_.stage, round_.attempt) != ("pulling", 2):
        world.run_until(seconds=0.01)
    for name in ("learner-0", "learner-2"):
        world.kill(name)
    world.run_until(round=4)
    [passed] = world.said("passed")
    assert "1 of 2 contributions came" in passed.text


def test_a_round_that_loses_its_quorum_in_the_window_opens_a_new_window_at_the_next() -> None:
    """Two are ready at 2.0, one of them dies in the window; the third is ready at 6.0, the fourth at 7.0."""
    world = World(4, step_s=[1.0, 1.0, 6.0, 7.0], fragments=2, sync_every=2, overlap=1, quorum=2, startup_s=3.0)
    world.at(3.0, lambda: world.kill("learner-1"))
    world.run_until(round=1)
    assert world.members(0) == {"learner-0", "learner-2", "learner-3"} and world.now == pytest.approx(7.0)
    learners = world.syncer.members.learners
    assert [name for name, one in learners.items() if 0 in one.late] == ["learner-3"], "the third made the quorum"


def test_the_pulls_of_a_failed_attempt_are_no_time_to_a_quorum() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=0.4)
    world.unmergeable = {(4, 1)}
    while not any(note.data["round"] == 4 for note in world.said("again")):
        world.run_until(seconds=0.01)
    round_, quorum_s = world.syncer.state.open_rounds[4], world.syncer.estimates.quorum_s.value
    while round_.stage == "gathering":
        world.run_until(seconds=0.01)
    assert round_.attempt == 2 and world.syncer.estimates.quorum_s.value == quorum_s


def test_a_round_that_fails_twice_is_passed_over_and_its_version_stays() -> None:
    world = World(2, fragments=2, sync_every=2, overlap=1)
    world.unmergeable = {(4, 1), (4, 2)}
    world.run_until(round=7)
    assert [note.data["round"] for note in world.said("passed")] == [4]
    assert world.syncer.versions == [3, 3]
    assert [commit.round for _, commit in world.commits()] == [0, 1, 2, 3, 5, 6]
    empty = [message for _, message in world.sent(Announce, "learner-0") if not message.members]
    assert [(message.round, message.version) for message in empty] == [(4, 2)]


def test_a_later_round_waits_for_the_one_that_gathers_again_and_then_commits() -> None:
    world = World(2, fragments=4, sync_every=4, overlap=2, latency_s=0.2)
    world.unmergeable = {(6, 1), (6, 2)}
    world.run_until(round=12)
    commits = [commit.round for _, commit in world.commits()]
    assert commits == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


def test_no_more_rounds_are_under_way_than_the_overlap_allows() -> None:
    world = World(2, fragments=6, sync_every=6, overlap=2, latency_s=0.4)
    most = 0
    while world.syncer.committed < 20:
        world.run_until(seconds=0.1)
        most = max(most, sum(r.stage != "gathering" for r in world.syncer.state.open_rounds.values()))
    assert most == 2


def test_everyone_declining_voids_the_round() -> None:
    world = World(1, fragments=1, sync_every=2, overlap=1, adopt="overwrite").run_until(round=2)
    world.learners["learner-0"].tokens_per_step = 0
    world.learners["learner-0"].dropped[0] += world.learners["learner-0"].tokens[0]
    world.learners["learner-0"].tokens = [0]
    world.run_until(round=5)
    passed = world.said("passed")[0]
    assert "nothing to give" in passed.text
    assert not world.said("refused") and not world.said("muted")


def test_a_mute_learner_is_probed_and_lives_again() -> None:
    world = World(3, fragments=4, sync_every=4).run_until(round=4)
    world.learners["learner-2"].answers = False
    world.run_until(seconds=20)
    assert [note.data["learner"] for note in world.said("muted")] == ["learner-2"]
    assert world.members(world.syncer.committed - 1) == {"learner-0", "learner-1"}
    assert [one.name for one in world.syncer.members.live_learners()] == ["learner-0", "learner-1"]
    probes = [message for _, message in world.sent(Pull, "learner-2") if message.probe]
    assert len(probes) > 2
    world.learners["learner-2"].answers = True
    world.run_until(seconds=10)
    assert world.said("probed")
    assert "learner-2" in world.members(world.syncer.committed - 1)


def test_who_is_muted_or_not_ready_stays_in_the_denominator_of_participation() -> None:
    world = World(4, fragments=4, sync_every=4, step_s=[1.0, 1.0, 1.0, 3.0]).run_until(round=4)
    world.learners["learner-2"].answers = False
    world.run_until(seconds=20)
    assert world.said("muted"), "or nothing is shown here"
    last = world.round_note(world.syncer.committed - 1)
    assert last["live"] == 4 and len(last["members"]) < 4
    assert "learner-2" not in {member["learner"] for member in last["members"]}


def test_a_machine_that_stands_and_one_that_makes_no_steps_are_not_missed_in_a_round() -> None:
    world = World(4, fragments=4, sync_every=4, lost_after_s=60.0, stalled_after_s=5.0).run_until(round=4)
    world.pause("learner-1")
    world.hold_up("learner-2", 60.0)
    world.run_until(seconds=30)
    learners = world.syncer.members.learners
    assert learners["learner-1"].connected and learners["learner-2"].connected, "or nothing is shown here"
    last = world.round_note(world.syncer.committed - 1)
    assert last["live"] == 2


def test_a_slow_link_is_learned_even_when_every_first_pull_misses_its_deadline() -> None:
    world = World(2, fragments=2, sync_every=4, latency_s=1.5, step_s=2.0).run_until(seconds=300)
    assert len(world.commits()) > 20
    assert world.said("passed") == [] or max(note.data["round"] for note in world.said("passed")) < 10  # type: ignore[type-var]


def test_a_quorum_above_the_live_is_lowered_once_and_not_at_every_round() -> None:
    world = World(3, fragments=4, sync_every=4, quorum=3, patience_s=5.0).run_until(round=8)
    world.kill("learner-2")
    start, before = world.now, world.syncer.committed
    world.run_until(round=before + 2)
    assert world.now - start >= 5.0
    world.run_until(round=before + 12)
    assert world.now - start < 25.0
    assert world.members(before + 5) == {"learner-0", "learner-1"}


def lose_downloads(world: World, name: str) -> None:
    """From now on this learner steps and reports, but whatever it fetches does not come."""
    fetch, failed = world.network.fetch, learner_fx.FetchFailed

    def fetch_or_fail(learner: SimulatedLearner, fragment: int) -> None:
        if learner.name == name:
            world.at(world.now + 0.1, lambda: learner.handle_event(failed(fragment, "too large for its proxy")))
        else:
            fetch(learner, fragment)

    world.network.fetch = fetch_or_fail  # type: ignore[method-assign]


def test_one_that_steps_but_never_comes_by_a_version_does_not_stop_a_run_for_good() -> None:
    """Two learners, K = 2: the run goes on without it, as late as it would without one that makes no steps."""
    world = World(2, fragments=2, sync_every=4, quorum=2, stalled_after_s=10.0).run_until(round=8)
    lose_downloads(world, "learner-1")
    before, start = world.syncer.committed, world.now
    world.run_until(round=before + 6)
    assert {"learner-0"} in [world.members(number) for number in range(before, before + 6)]
    assert world.now - start >= 10.0, "the quorum stands until then"


def test_nor_does_it_where_the_quorum_was_lowered_already() -> None:
    """Three learners, K = 3: one is dead, one cannot fetch, so of the two that step only one is ever ready."""
    world = World(3, fragments=2, sync_every=4, quorum=3, patience_s=3.0, stalled_after_s=10.0).run_until(round=8)
    world.kill("learner-2")
    lose_downloads(world, "learner-1")
    before = world.syncer.committed
    world.run_until(round=before + 8)
    assert world.members(before + 7) == {"learner-0"}


def longest_wait_s(world: World, rounds: int) -> float:
    """Of the next so many rounds."""
    longest_s = 0.0
    for _ in range(rounds):
        before = world.now
        world.run_until(round=world.syncer.committed + 1)
        longest_s = max(longest_s, world.now - before)
    return longest_s


def test_one_whose_steps_get_slower_and_slower_makes_no_quorum_wait_longer_and_longer() -> None:
    """Three learners, K = 3: one is never ready, and each of its steps takes half as long again."""
    world = World(3, fragments=2, sync_every=4, quorum=3, lost_after_s=1e6).run_until(round=8)
    lose_downloads(world, "learner-2")
    slow = world.learners["learner-2"]
    for _ in range(26):
        t = slow.t
        longest_s = longest_wait_s(world, 1)
        slow.step_s *= 1.5 if slow.t > t else 1.0
        assert longest_s < 8 * 16 + 10
    assert slow.step_s > 1000.0


def test_nobody_makes_a_quorum_wait_without_end_by_coming_and_going() -> None:
    """Three learners, K = 4: one is never ready, and a fourth comes, makes steps and goes, again and again."""
    world = World(4, present=3, fragments=2, sync_every=4, quorum=4, stalled_after_s=10.0).run_until(round=8)
    lose_downloads(world, "learner-2")
    before = world.syncer.committed
    for turn in range(30):
        visitor = world.join(f"visitor-{turn}", restored=True)
        world.run_until(seconds=4.0)
        assert visitor.t > 0
        world.kill(f"visitor-{turn}")
    assert world.syncer.committed >= before + 8


def test_time_in_which_the_syncer_stood_still_lowers_no_quorum() -> None:
    world = World(2, fragments=2, sync_every=4, quorum=2, patience_s=5.0, lost_after_s=30.0).run_until(round=8)
    world.kill("learner-1")
    world.run_until(seconds=1.0)
    before = world.syncer.committed
    world.simulated_syncer.stop()
    world.run_until(seconds=8.0)
    world.simulated_syncer.wake_up()
    world.run_until(seconds=3.0)
    assert world.syncer.committed <= before + 1, "patience counts the time in which the syncer was there"
    world.run_until(round=before + 4)


def test_a_quorum_stands_where_its_second_learner_is_only_slow() -> None:
    """A step of 12 s is longer than `stalled_after_s`, and than many steps of the other."""
    world = World(2, fragments=2, sync_every=2, overlap=1, quorum=2, step_s=[0.5, 12.0], stalled_after_s=13.0)
    world.run_until(round=12)
    assert all(len(world.members(number)) == 2 for number in range(12))


def test_a_stalled_learner_is_not_waited_for() -> None:
    world = World(3, fragments=4, sync_every=4, quorum=3, patience_s=2.0).run_until(round=8)
    world.pause("learner-1")
    world.run_until(seconds=40)
    assert [note.data["learner"] for note in world.said("stalled")] == ["learner-1"]
    assert world.syncer.committed > 20
    world.resume("learner-1")
    world.run_until(seconds=10)
    assert [note.data["learner"] for note in world.said("steps")] == ["learner-1"]
    assert "learner-1" in world.members(world.syncer.committed - 1)


def test_weights_are_tokens_times_tokens_per_step() -> None:
    world = World(2, fragments=1, sync_every=4)
    world.learners["learner-1"].tokens_per_step = 30
    world.run_until(round=1)
    weights = {m["learner"]: (m["tokens"], m["steps"], m["weight"]) for m in world.round_note(0)["members"]}
    for tokens, steps, weight in weights.values():
        assert weight == pytest.approx(tokens * tokens / steps)


def test_a_quorum_is_lowered_at_the_moment_it_says_whatever_the_clock_shows() -> None:
    """now − since could round to just under the patience; nothing would happen then until somebody says something."""
    settings = Settings(learners=2, fragments=2, sync_every=4, quorum=2, patience_s=3.2)
    for number in range(1000):
        gathering = RoundClosing(SyncerState(History(BegunRecord("run", settings, {}, (), ""))))
        gathering.follow_members(number / 7)
        round_, wakes = Round(0, 0, 0.0), list[float]()
        assert gathering._current_quorum(number / 7, round_, 1, wakes) == 2
        assert gathering._current_quorum(wakes[0], round_, 1, []) == 1


def test_one_that_falls_mute_is_probed_at_once() -> None:
    """Not only when somebody happens to say something next."""
    world = World(2, fragments=2, sync_every=4, quorum=1, latency_s=0.1).run_until(round=5)
    world.learners["learner-1"].answers = False
    while not world.said("muted"):
        world.run_until(seconds=0.01)
    (muted_at,) = [at for at, note in world.notes if note.kind == "muted"]
    probes = [at for at, pull in world.sent(Pull, "learner-1") if pull.probe]
    assert probes[0] == muted_at


@pytest.mark.parametrize(("synchronous", "later_s"), [(False, 0.75), (False, 1.5), (True, 2.25)])
def test_one_that_falls_mute_by_its_silence_is_probed_at_once(synchronous: bool, later_s: float) -> None:
    world = World(3, fragments=4, sync_every=4, latency_s=0.4, synchronous=synchronous).run_until(round=12)
    world.run_until(seconds=later_s).learners["learner-1"].frozen = True
    world.run_until(seconds=8.0)
    [muted_at] = [at for at, note in world.notes if note.kind == "muted"]
    probes = [at for at, pull in world.sent(Pull, "learner-1") if pull.probe]
    assert probes[0] == muted_at


def test_one_that_falls_mute_in_a_round_that_waits_for_the_one_before_is_probed_too() -> None:
    """Seed 191145: two rounds under way, and silence in the second was no reason to look once more."""
    outcome = campaign.run(campaign.plan(191145, 3))
    assert not outcome.invariant, outcome.message


@pytest.mark.parametrize("later_s", [0.25 * phase for phase in range(12)])
def test_a_member_that_says_nothing_is_not_waited_for_as_long_as_one_on_a_slow_link(later_s: float) -> None:
    world = World(3, fragments=4, sync_every=4, latency_s=0.4).run_until(round=12).run_until(seconds=later_s)
    deadline_s = world.syncer.estimates.pull_deadline_s(world.settings)
    assert deadline_s > 3.5, "the link is slow, and known to be"
    world.learners["learner-1"].frozen = True
    before = world.now
    world.run_until(round=world.syncer.committed + 6)
    times = [before] + [at for at, note in world.notes if note.kind == "round" and at > before]
    longest = max(b - a for a, b in pairwise(times))
    two_steps_s = 2.0
    assert longest <= SILENT_BEATS * world.settings.heartbeat_s + two_steps_s < deadline_s


def test_the_last_steps_of_one_that_has_stopped_are_waited_for_also_when_it_says_nothing_for_a_moment() -> None:
    """The run goes on, but what it left out of that learner nobody would ask for again."""
    world = World(3, fragments=4, sync_every=8, latency_s=0.4).run_until(round=12)
    world.learners["learner-1"].done = True
    asked: list[int] = []
    while not asked:
        before = len(world.log)
        world.run_until(seconds=0.05)
        if world.syncer.members.learners["learner-1"].stopped:
            sent = [effect for _, effect in world.log[before:] if isinstance(effect, syncer_fx.Send)]
            asked = [e.message.round for e in sent if isinstance(e.message, Pull) and e.learner == "learner-1"]
    world.hold_up("learner-1", (SILENT_BEATS + 0.9) * world.settings.heartbeat_s)
    world.run_until(round=asked[0] + 1)
    assert "learner-1" in world.members(asked[0])


# ---- the disk is full ------------------------------------------------------------------------------------------------


def full_for(world: World, seconds: float) -> float:
    """Nothing can be written for so long; the moment at which it can be again."""
    world.disk.full = True
    world.run_until(seconds=seconds)
    world.disk.full = False
    return world.now


@pytest.mark.parametrize("seconds", [1.3, 2.0, 5.0, 60.0])
def test_nobody_is_blamed_for_pulls_that_waited_for_the_disk(seconds: float) -> None:
    world = World(4, step_s=0.4, latency_s=0.02, fragments=8, sync_every=8).run_until(round=40)
    before = len(world.commits())
    mended_at = full_for(world, seconds)
    assert len(world.commits()) == before, "nothing is told that is not durable"
    world.run_until(seconds=1.0)
    commits = [at for at, _ in world.commits() if at >= mended_at]
    assert commits[0] - mended_at <= AGAIN_S + 0.001, "what waited is committed with the first try"
    assert commits[1] - mended_at <= 0.3, "rounds go on at once"
    assert not world.said("muted") and not world.said("again") and not world.said("passed")
    world.run_until(seconds=5.0)
    assert world.members(world.syncer.committed - 1) == set(world.learners)


def test_a_learner_that_does_not_answer_is_still_found_after_the_disk_was_full() -> None:
    """Its time runs from the moment at which the pull has left."""
    world = World(3, step_s=0.4, latency_s=0.02, fragments=8, sync_every=8).run_until(round=40)
    world.learners["learner-2"].answers = False
    mended_at = full_for(world, 10.0)
    assert not world.said("muted")
    world.run_until(seconds=10.0)
    assert {note.data["learner"] for note in world.said("muted")} == {"learner-2"}
    (muted_at,) = [at for at, note in world.notes if note.kind == "muted"]
    assert muted_at - mended_at <= 4.0


def test_one_that_is_mute_is_probed_as_soon_as_the_disk_has_room_and_not_before() -> None:
    world = World(3, step_s=0.4, latency_s=0.02, fragments=8, sync_every=8).run_until(round=40)
    world.learners["learner-2"].answers = False
    world.run_until(seconds=10.0)
    assert world.said("muted")
    mended_at = full_for(world, 30.0)
    world.learners["learner-2"].answers = True
    world.run_until(seconds=1.0)
    probes = [at for at, pull in world.sent(Pull, "learner-2") if pull.probe and at > mended_at - 28.0]
    assert len(probes) == 1 and probes[0] <= mended_at + AGAIN_S, "one, and it waits for nothing but the disk"
    assert world.said("probed")


def test_a_standstill_puts_off_no_window_that_opened_after_it() -> None:
    """Seed 528179: the syncer noticed its standstill after it had noticed the quorum."""
    before, after = Round(4, 0, 10.0, quorum_at=11.0, due_at=11.0), Round(5, 1, 16.0, quorum_at=16.0, due_at=16.0)
    for round_ in (before, after):
        round_.put_off(16.0, 4.0)
    assert (before.quorum_at, before.due_at, after.quorum_at, after.due_at) == (15.0, 15.0, 16.0, 16.0)


def test_a_round_moves_only_from_stage_to_stage_as_the_table_says() -> None:
    round_ = Round(number=0, fragment=0, opened_at=0.0)
    round_.enter_stage("pulling")
    round_.gather_again(1.0)
    assert (round_.stage, round_.attempt) == ("gathering", 2)
    with pytest.raises(AssertionError, match="a round that is gathering cannot be merging next"):
        round_.enter_stage("merging")
