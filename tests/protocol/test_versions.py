"""Adoption: what is taken, when, by which rule; worked out by hand."""

from tests.protocol.world import TENSORS, World

from atoll.protocol.effects import Note, Tick
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.learner.versions import Versions
from atoll.protocol.messages import Announce, Decline, Member, Pull, Started, Welcome
from atoll.protocol.settings import Settings

SETTINGS = Settings(learners=2, fragments=2, sync_every=4, adopt="carry").resolved(10)


def a_learner(**welcome: object) -> LearnerMachine:
    learner = LearnerMachine("a", "s", TENSORS)
    learner.restore("run", [3, 3], fx.Stepped(10, (4, 4), (40, 40)))
    learner.handle(0.0, fx.Arrived(welcomed(**welcome)))
    return learner


def welcomed(**changes: object) -> Welcome:
    known: dict[str, object] = {
        "versions": (3, 3),
        "gathering": 8,
        "committed": 8,
        "incarnation": 1,
        "term": 1,
        **changes,
    }
    return Welcome(run="run", settings=SETTINGS, fingerprint="p", **known)  # type: ignore[arg-type]


def announce(version: int, round: int, *members: Member) -> fx.Arrived:
    return fx.Arrived(Announce(round=round, fragment=0, version=version, members=members, gathering=round + 1, term=1))


def of(kind: type, effects: list[fx.LearnerEffect]) -> list[fx.LearnerEffect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_a_member_carries_from_the_copy_that_was_merged() -> None:
    learner = a_learner()
    assert of(fx.Fetch, learner.handle(1.0, announce(4, 8, Member("a", 1, 9)))) == [fx.Fetch(0, 4)]
    (adopt,) = of(fx.Adopt, learner.handle(1.1, fx.Fetched(0, 4)))
    assert isinstance(adopt, fx.Adopt) and (adopt.rule, adopt.copy_t) == ("carry", 9)


def test_a_non_member_carries_from_its_base() -> None:
    learner = a_learner()
    learner.handle(1.0, announce(4, 8, Member("b", 1, 9)))
    (adopt,) = of(fx.Adopt, learner.handle(1.1, fx.Fetched(0, 4)))
    assert isinstance(adopt, fx.Adopt) and adopt.copy_t is None


def test_a_version_that_came_before_the_own_copy_was_merged_is_carried_from_the_base() -> None:
    """It was on its way when the next one was announced, which contains the copy."""
    learner = a_learner()
    learner.handle(1.0, announce(4, 8, Member("b", 1, 9)))
    learner.handle(1.1, announce(5, 10, Member("a", 1, 9, 30)))
    (adopt,) = of(fx.Adopt, learner.handle(1.2, fx.Fetched(0, 4)))
    assert isinstance(adopt, fx.Adopt)
    assert (adopt.rule, adopt.version, adopt.copy_t, adopt.held_tokens) == ("carry", 4, None, 0)


def test_a_copy_is_subtracted_by_the_first_version_that_contains_it_alone() -> None:
    learner = a_learner()
    learner.handle(1.0, announce(4, 8, Member("a", 1, 9, 30)))
    learner.handle(1.1, fx.Fetched(0, 4))
    learner.handle(1.2, fx.Adopted(0, 4, 10, 1, 10))
    learner.handle(1.3, announce(5, 10, Member("b", 1, 9)))
    (adopt,) = of(fx.Adopt, learner.handle(1.4, fx.Fetched(0, 5)))
    assert isinstance(adopt, fx.Adopt) and (adopt.rule, adopt.copy_t, adopt.held_tokens) == ("carry", None, 0)


def test_a_version_that_nobody_has_told_of_yet_is_fetched_again_once_it_is() -> None:
    """A fetch brings the newest; whether our steps are in it only its announcement will say."""
    learner = a_learner()
    learner.handle(1.0, announce(4, 8, Member("b", 1, 9)))
    assert of(fx.Adopt, learner.handle(1.1, fx.Fetched(0, 5))) == []
    assert of(fx.Fetch, learner.handle(1.2, announce(5, 10, Member("a", 1, 9, 30)))) == [fx.Fetch(0, 5)]
    (adopt,) = of(fx.Adopt, learner.handle(1.3, fx.Fetched(0, 5)))
    assert isinstance(adopt, fx.Adopt) and (adopt.rule, adopt.held_tokens) == ("carry", 30)


def test_the_version_that_is_needed_soonest_is_ordered_first() -> None:
    """Once the way down is measured: the next one when the link holds little more, and never a superseded one."""
    ordered: list[fx.LearnerEffect] = []
    versions = Versions(ordered.append, held=[3] * 4, newest=[4] * 4)
    versions.ways.down.add(8_000_000, 1.0)
    versions.ways.add_latency(0.05)
    versions.fetch_missing(gathering=10)
    assert ordered == [fx.Fetch(2, 4)], "fragment 10 mod 4 is gathered next; the others wait"
    versions.newest[3] = 5  # came while it waited
    versions.way_is_free = True
    versions.fetch_missing(gathering=10)
    assert ordered[1:] == [fx.Fetch(3, 5)]
    assert versions.take_fetched(2, 4)
    versions.fetch_missing(gathering=10)
    assert len(ordered) == 2, "the way is full until the rest of the body is on its way"


def test_with_a_share_only_versions_that_hold_own_steps_are_ordered() -> None:
    ordered: list[fx.LearnerEffect] = []
    versions = Versions(ordered.append, held=[3] * 4, newest=[4] * 4)
    versions.ways.down.add(8_000_000, 1.0)
    versions.ways.add_latency(0.05)
    member = Member("a", 1, 9, 30)
    versions.take_announcement(Announce(round=5, fragment=1, version=5, members=(member,), gathering=6, term=1), member)
    versions.fetch_missing(gathering=10, owed_only=True)
    assert ordered == [fx.Fetch(1, 5)], "the next version that holds its steps contains what the others hold"


def test_a_syncer_of_an_earlier_term_is_not_listened_to() -> None:
    learner = a_learner()
    learner.handle(1.0, fx.Arrived(welcomed(term=3)))
    effects = learner.handle(1.1, announce(4, 8, Member("b", 1, 9)))
    assert [type(effect) for effect in effects] == [fx.HangUp] and learner.newest == [3, 3]


def test_a_courier_that_missed_the_order_to_recover_makes_up_for_it() -> None:
    learner = LearnerMachine("a", "s", TENSORS)
    learner.restore("run", [3, 3], fx.Stepped(10, (4, 4), (40, 40)), incarnation=1)
    effects = learner.handle(0.0, fx.Arrived(welcomed(incarnation=2, reset=True)))
    assert [forget.reset for forget in of(fx.ForgetVersions, effects)] == [True]  # type: ignore[attr-defined]


def test_a_merge_whose_announcement_was_lost_is_told_at_the_welcome() -> None:
    learner = a_learner(versions=(4, 3), merged=((4, 9, 30), (-1, 0, 0)))
    (adopt,) = of(fx.Adopt, learner.handle(1.1, fx.Fetched(0, 4)))
    assert isinstance(adopt, fx.Adopt) and adopt.copy_t == 9


def test_a_copy_given_in_an_earlier_term_holds_no_version_back() -> None:
    """A new term voids rounds that were not committed. After a rollback in that term nobody may give to the fragment
    before the version that it made is taken: if the copy still held it back, no round would ever close."""
    for term, fetched in ((1, []), (2, [fx.Fetch(0, 4)])):
        learner = a_learner()
        learner.handle(1.0, fx.Copied(8, 0, 11, 5, 50, 3))
        pull = Pull(round=8, attempt=1, fragment=0, gathering=9, deadline_s=1.0, term=1)
        assert len(of(fx.Upload, learner.handle(1.1, fx.Arrived(pull)))) == 1
        learner.handle(1.2, fx.Disconnected("the syncer died"))
        back = welcomed(term=term, versions=(4, 3), least=(4, 3), committed=8)
        assert of(fx.Fetch, learner.handle(2.0, fx.Arrived(back))) == fetched


def test_versions_are_skipped_but_never_taken_twice_or_backwards() -> None:
    learner = a_learner()
    learner.handle(1.0, announce(4, 8, Member("b", 1, 9)))
    assert of(fx.Fetch, learner.handle(1.1, announce(5, 10, Member("b", 1, 9)))) == []
    assert len(of(fx.Adopt, learner.handle(1.2, fx.Fetched(0, 5)))) == 1
    assert of(fx.Adopt, learner.handle(1.3, fx.Fetched(0, 5))) == []
    learner.handle(1.4, fx.Adopted(0, 5, 11))
    assert of(fx.Adopt, learner.handle(1.5, fx.Fetched(0, 4))) == []
    assert learner.versions == [5, 3]


def test_a_failed_fetch_is_tried_again_after_a_while() -> None:
    learner = a_learner(versions=(4, 3))
    learner.handle(1.0, fx.FetchFailed(0, "reset"))
    assert of(fx.Fetch, learner.handle(1.1, Tick())) == []
    assert learner.wake_at is not None and learner.wake_at <= 1.5
    assert of(fx.Fetch, learner.handle(1.5, Tick())) == [fx.Fetch(0, 4)]


def test_an_adoption_from_before_a_recovery_does_not_count() -> None:
    learner = a_learner(versions=(4, 3))
    learner.handle(1.0, fx.Fetched(0, 4))
    learner.handle(1.1, fx.Arrived(welcomed(versions=(4, 3), incarnation=2)))
    learner.handle(1.2, fx.Adopted(0, 4, 11))
    assert learner.versions == [-1, -1] and not learner.recovered


def test_the_copy_for_a_round_that_was_passed_over_is_dropped() -> None:
    learner = a_learner()
    learner.handle(1.0, fx.Copied(8, 0, 11, 5, 50, 3))
    assert of(fx.Drop, learner.handle(1.1, announce(3, 8))) == [fx.Drop(0, 11)]


def test_a_learners_clock_never_goes_back() -> None:
    learner = a_learner()
    learner.handle(
        1.0, fx.Arrived(Announce(round=8, fragment=0, version=3, members=(), gathering=9, clock={"syncer": 9}, term=1))
    )
    learner.handle(1.1, fx.Arrived(Started(uploader="", clock={"syncer": 4, "a": 50}, term=1)))
    assert learner.hello().clock == {"syncer": 9}


def test_carry_by_hand_for_a_member_and_its_counters() -> None:
    """One fragment, H = 4, τ = 2, latency 0.6: copied after step 4 at 1 − 4 = −3, so Δ = 4 and Θ = 1 − 4 = −3.
    Step 5 brings θ to −4 before the version arrives: θ ← −3 + (−4 + 3) = −4, and one step stays counted."""
    world = World(1, fragments=1, sync_every=4, overlap=2, adopt="carry", latency_s=0.2)
    world.run_until(round=1)
    copied = world.round_note(0)["members"][0]["t"]
    learner = world.learners["learner-0"]
    while not [a for a in learner.adoptions if a[2] == 1]:
        world.run_until(seconds=0.05)
    t = next(a[0] for a in learner.adoptions if a[2] == 1)
    assert world.theta[0] == 1 - copied
    assert learner.theta[0] == 1 - t, "nothing is dropped and nothing counts twice"
    assert learner.steps[0] == t - copied


def test_overwrite_drops_the_steps_since_the_copy() -> None:
    world = World(1, fragments=1, sync_every=4, overlap=2, adopt="overwrite", latency_s=0.2).run_until(round=1)
    learner = world.learners["learner-0"]
    while not [a for a in learner.adoptions if a[2] == 1]:
        world.run_until(seconds=0.05)
    assert learner.theta == world.theta and learner.steps == [0]


def test_a_contribution_that_the_disk_did_not_keep_is_owed_no_more() -> None:
    """It was announced as merged, its round was lost with the machine, and the number of its version given again."""
    versions = Versions(lambda effect: None, held=[9], counted=[9], newest=[9])
    versions.take_announcement(
        Announce(round=9, fragment=0, version=10, members=(), gathering=10), Member("learner-0", 1, 34, tokens=10)
    )
    assert versions.owed_version(0) == 10
    settings = Settings(learners=1, fragments=1, sync_every=3)
    known = {"fingerprint": "plan", "gathering": 9, "committed": 9, "merged": ((9, 29, 50),)}
    versions.take_welcome(Welcome(run="run", incarnation=1, settings=settings, versions=(9,), **known))
    assert versions.owed_version(0) is None and versions.tokens_in(0, 10) == 0


# ---- what became of its answers, where the codec needs feedback ------------------------------------------------------


def settled(effects: list[fx.LearnerEffect]) -> list[fx.LearnerEffect]:
    return [effect for effect in effects if isinstance(effect, fx.Settle | fx.DropRests)]


def test_a_commit_that_names_its_copy_settles_it_and_any_other_drops_it() -> None:
    learner = a_learner()
    learner.keeps_feedback = True
    mine, others = Member("a", 1, 9), Member("b", 1, 9)
    assert settled(learner.handle(1.0, announce(4, 8, mine, others))) == [fx.Settle(0, 4, 9), fx.DropRests(0)]
    assert settled(learner.handle(2.0, announce(5, 10, others))) == [fx.DropRests(0)]
    assert settled(learner.handle(3.0, announce(5, 12))) == [fx.DropRests(0)], "passed over"
    assert settled(learner.handle(4.0, announce(6, 14, Member("a", 2, 30)))) == [fx.DropRests(0)], "of another life"


def test_a_welcome_settles_what_was_merged_meanwhile_and_drops_nothing() -> None:
    learner = LearnerMachine("a", "s", TENSORS)
    learner.keeps_feedback = True
    learner.restore("run", [3, 3], fx.Stepped(10, (4, 4), (40, 40)), 1)
    merged = welcomed(versions=(5, 3), merged=((4, 9, 30), (-1, 0, 0)))
    assert settled(learner.handle(0.0, fx.Arrived(merged))) == [fx.Settle(0, 4, 9), fx.Settle(1, -1, -1)]


def test_nothing_is_settled_across_a_rollback() -> None:
    learner = a_learner()
    learner.keeps_feedback = True
    restored = Announce(round=7, fragment=1, version=4, members=(), gathering=8, term=1, restored=True)
    assert settled(learner.handle(1.0, fx.Arrived(restored))) == [fx.Settle(1, 4, -1), fx.DropRests(1)]
    back = welcomed(versions=(6, 6), merged=((4, 9, 30), (5, 9, 30)), least=(5, 4))
    assert settled(learner.handle(2.0, fx.Arrived(back))) == [fx.Settle(0, 4, -1), fx.Settle(1, 5, 9)]


def test_a_codec_without_feedback_hears_nothing_of_it() -> None:
    learner = a_learner(merged=((4, 9, 30), (-1, 0, 0)))
    assert settled(learner.handle(1.0, announce(4, 8, Member("a", 1, 9)))) == []


def test_dials_that_fail_for_the_same_reason_are_said_once() -> None:
    learner = a_learner()

    def said(reason: str) -> list[str]:
        effects = learner.handle(1.0, fx.Disconnected(reason))
        return [effect.text for effect in effects if isinstance(effect, Note)]

    assert said("connection reset") == ["a: the syncer is out of reach (connection reset); training goes on"]
    assert said("refused") == ["a: the syncer is out of reach (refused); training goes on"]
    assert said("refused") == [] == said("refused")
    learner.handle(2.0, fx.Arrived(welcomed()))
    assert said("refused") != [], "it was connected in between"


def test_after_the_last_step_a_pull_waits_for_the_version_that_is_being_adopted() -> None:
    """Seed 143 with ranks: a copy on the version before was sent, which the first rank had replaced by then. At the
    end nobody asks twice, so the last steps were lost."""
    learner = a_learner()
    learner.handle(1.0, announce(4, 8, Member("b", 1, 9)))
    learner.handle(1.1, fx.Fetched(0, 4))
    learner.handle(1.2, fx.Stepped(11, (5, 5), (50, 50), stopped=True))
    learner.handle(1.3, fx.Copied(10, 0, 11, 5, 50, base=3))  # before it adopted
    pull = Pull(round=10, attempt=1, fragment=0, gathering=11, deadline_s=1.0, term=1)
    assert of(fx.Upload, learner.handle(1.4, fx.Arrived(pull))) == []
    assert of(fx.Upload, learner.handle(1.5, fx.Copied(10, 0, 11, 5, 50, base=3))) == []
    learner.handle(1.6, fx.Adopted(0, 4, 11, steps=5, tokens=50))
    assert of(fx.Upload, learner.handle(1.7, fx.Copied(10, 0, 11, 5, 50, base=4))) == [fx.Upload(10, 1, 0)]


def test_a_copy_that_had_to_give_way_after_the_last_step_is_made_again() -> None:
    """With few slots, a copy of all steps gave way to that of another fragment. At the end nobody asks twice."""
    learner = a_learner()
    learner.handle(1.2, fx.Stepped(11, (5, 5), (50, 50), stopped=True))
    learner.handle(1.3, fx.Copied(9, 0, 11, 5, 50, base=3))
    pull = Pull(round=10, attempt=1, fragment=0, gathering=11, deadline_s=60.0, term=1)
    assert of(fx.Upload, learner.handle(1.4, fx.Arrived(pull))) == [fx.Upload(10, 1, 0)]
    failed = learner.handle(1.5, fx.UploadFailed(10, 1, "its copy gave way to newer ones", no_copy=True))
    assert of(fx.Read, failed) == [fx.Read(10, 0, 11)]
    assert not [one for one in of(fx.Say, failed) if isinstance(one.message, Decline)]
    assert of(fx.Upload, learner.handle(1.6, fx.Copied(10, 0, 11, 5, 50, base=3))) == [fx.Upload(10, 1, 0)]
    failed = learner.handle(1.7, fx.UploadFailed(10, 1, "unreachable"))
    assert [one for one in of(fx.Say, failed) if isinstance(one.message, Decline)]
