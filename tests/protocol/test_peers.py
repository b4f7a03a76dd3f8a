"""A newcomer takes a peer's inner optimizer: who helps whom, for how long, and what happens when nobody does."""

from typing import Any

import msgspec
import pytest
from tests.protocol.world import World

from atoll.protocol.effects import Note
from atoll.protocol.learner import effects as learner_fx
from atoll.protocol.messages import Fresh, Help, Helped, Leave, Ready, Release, Seek, Settled, Stream, Unable
from atoll.protocol.syncer import effects as syncer_fx


def running(learners: int = 4, present: int = 3, **settings: Any) -> World:
    """A run with room for one more, a few rounds old."""
    defaults: dict[str, Any] = {"fragments": 4, "sync_every": 4, "latency_s": 0.05}
    return World(learners, present=present, **{**defaults, **settings}).run_until(round=10)


def until(world: World, kind: str, count: int = 1) -> Note:
    while len(world.said(kind)) < count:
        before = world.now
        world.run_until(seconds=0.05)
        assert world.now < before + 1 and world.now < 1000, f"{kind} was never said:\n{world.story()}"
    return world.said(kind)[count - 1]


@pytest.mark.parametrize("direct", [True, False])
def test_a_newcomer_goes_on_with_a_peers_inner_optimizer(direct: bool) -> None:
    world = running(direct=direct)
    newcomer = world.join("learner-3")
    helped = until(world, "helped")
    peer = world.learners[str(helped.data["peer"])]
    assert newcomer.source == peer.machine.name == "learner-0"
    assert newcomer.moments >= peer.moments - 2 > 0, "not fresh"
    assert (helped.data["learner"], helped.data["bytes"], helped.data["peer_t"]) == ("learner-3", 100, peer.t)
    assert bool(world.sent(Stream)) is not direct
    world.run_until(seconds=10)
    assert "learner-3" in world.members(world.syncer.committed - 1)
    assert not world.said("fresh")
    assert peer.given == {}, "let go once it is not needed"


def test_the_first_learners_of_a_run_are_all_fresh_and_ask_nobody() -> None:
    world = World(4, fragments=4, sync_every=4, latency_s=0.05).run_until(round=6)
    assert not world.said("helping") and not world.said("fresh")


def test_one_that_brings_its_inner_optimizer_out_of_a_cut_asks_nobody() -> None:
    world = running()
    newcomer = world.join("learner-3", restored=True)
    world.run_until(seconds=10)
    assert not world.said("helping") and newcomer.source == ""
    assert "learner-3" in world.members(world.syncer.committed - 1)


def test_nothing_is_trained_before_the_peers_state_is_there() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 5.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=4.5)
    assert min(newcomer.adopted) >= 2 and newcomer.t == 0, "it holds the run's parameters, and waits"
    assert world.syncer.members.learners["learner-3"].state == "joining"
    world.run_until(seconds=5)
    assert newcomer.t > 0 and newcomer.source == "learner-0"


def test_versions_that_are_committed_meanwhile_are_adopted_meanwhile() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 6.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=2)
    early = list(newcomer.adopted)
    world.run_until(seconds=3.5)
    assert newcomer.waits and all(now > before for now, before in zip(newcomer.adopted, early, strict=True))


def test_a_peer_answers_only_once_it_has_adopted_what_was_committed() -> None:
    """Its copy would be older than the newcomer's parameters otherwise."""
    world = World(3, present=2, fragments=2, sync_every=2, overlap=1, latency_s=0.4, pull_floor_s=1.0)
    world.run_until(round=6)
    peer = world.learners["learner-0"]
    world.pause("learner-1")
    world.run_until(seconds=15.3)  # it is not healthy any more
    world.join("learner-2")
    [seek] = said_next(world, Seek)
    at_seek, held_then = list(world.syncer.versions), list(peer.adopted)
    assert held_then < at_seek, "a version is still on its way to it"
    while not peer.given:
        world.run_until(seconds=0.01)
    [(_, help)] = world.sent(Help)
    assert help.after == seek.after
    [given] = peer.given.values()
    assert all(held >= version for held, version in zip(given.held, at_seek, strict=True))


def said_next(world: World, kind: type[Any]) -> list[Any]:
    """Runs until a learner has said something of this kind."""
    heard: list[Any] = []
    deliver = world._deliver

    def listen(event: syncer_fx.SyncerEvent) -> list[syncer_fx.SyncerEffect]:
        if isinstance(event, syncer_fx.Received) and isinstance(event.message, kind):
            heard.append(event.message)
        return deliver(event)

    world._deliver = listen  # type: ignore[method-assign]
    while not heard:
        world.run_until(seconds=0.01)
    return heard


def test_a_peer_that_dies_in_the_middle_is_followed_by_another() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 5.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=3)
    assert [n.data["peer"] for n in world.said("helping")] == ["learner-0"]
    world.kill("learner-0")
    helped = until(world, "helped")
    assert helped.data["peer"] == newcomer.source == "learner-1"
    again = world.said("helping")[1]
    assert again.data["attempt"] == 2 and "learner-0: killed" in again.text


def test_when_every_peer_dies_the_newcomer_goes_on_alone_and_says_so() -> None:
    world = running()
    for learner in world.learners.values():
        learner.stream_s = 5.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=3)
    for name in ("learner-0", "learner-1", "learner-2"):
        world.inject(syncer_fx.Received(name, leaves()))
        world.learners[name].alive, world.learners[name].connection = False, None
    fresh = until(world, "fresh")
    assert "two tries came to nothing (learner-0: its training process died; learner-1: " in fresh.text
    assert "warms up" in fresh.text
    world.run_until(seconds=20)
    assert newcomer.source == "" and newcomer.moments == newcomer.t > 0
    assert world.members(world.syncer.committed - 1) == {"learner-3"}


def leaves() -> Leave:
    return Leave(reason="its training process died")


def test_alone_in_a_running_run_it_is_not_kept_waiting() -> None:
    world = World(1, fragments=2, sync_every=2, overlap=1).run_until(round=6)
    world.inject(syncer_fx.Received("learner-0", leaves()))
    world.join("learner-0")
    fresh = until(world, "fresh")
    assert fresh.data["reason"] == "no healthy peer is there"
    at = next(at for at, note in world.notes if note is fresh)
    joined = next(at for at, note in world.notes if note is world.said("joined")[-1])
    assert at == joined, "nobody may come"


def test_after_a_crash_of_the_syncer_those_that_trained_are_given_time_to_come_back() -> None:
    world = running(3, 2)
    world.crash_syncer(down_s=1.0)
    newcomer = world.join("learner-2")  # it comes before the others have dialled again
    helped = until(world, "helped")
    assert helped.data["peer"] in ("learner-0", "learner-1") and newcomer.source
    assert not world.said("fresh")


def opened_again(**changes: int) -> World:
    """A run of two that the operator ended, and opened again in another term."""
    world = running(2, 2, steps=400)
    world.end("the operator asked for it")
    world.run_to_end()
    world.inject(syncer_fx.Over())
    for name in world.learners:
        world.kill(name)
    world.finished = False
    settings = msgspec.structs.replace(world.syncer.settings, **changes)
    opening = syncer_fx.ChangeAsked(settings, {}, "more", reopen=True)  # the first thing that a resumed syncer is told
    world.begin_term = lambda syncer: world.deliver(syncer, opening)  # type: ignore[method-assign]
    world.crash_syncer()
    assert all(one.closed for one in world.syncer.members.learners.values()) and world.syncer.phase == "running"
    return world


@pytest.mark.parametrize("later_s", [0.12, 40.0])
def test_in_a_run_that_is_opened_again_the_peers_that_come_back_are_waited_for(later_s: float) -> None:
    """It was told that nobody is there, 0.12 s before the other came; its contributions were refused from then on."""
    world = opened_again()
    newcomer = world.join("learner-0")
    world.at(world.now + later_s, lambda: world.join("learner-1", restored=True))
    world.run_until(seconds=later_s + 0.2)
    assert until(world, "helped").data["peer"] == newcomer.source == "learner-1"
    assert not world.said("fresh") and not world.said("refused")


def test_when_those_that_may_come_back_do_not_it_goes_on_alone() -> None:
    world = opened_again(assemble_s=20)
    world.join("learner-0")
    world.run_until(seconds=19.5)
    assert not world.said("fresh")
    world.run_until(seconds=1.5)
    assert world.said("fresh")[0].data["reason"] == "no healthy peer is there"


def test_nobody_is_waited_for_that_the_opened_run_has_no_room_for() -> None:
    world = opened_again(learners=1)
    world.join("learner-0")
    world.run_until(seconds=0.5)
    assert world.said("fresh")


def test_one_that_had_left_before_the_run_ended_is_not_waited_for() -> None:
    world = opened_again()
    world.syncer.members.learners["learner-1"].merged = [0, 0, 0, 0]
    world.syncer.members.expect_back(world.syncer.versions)
    world.join("learner-0")
    world.run_until(seconds=0.5)
    assert world.said("fresh")


def test_a_peer_that_does_not_answer_just_now_is_given_time() -> None:
    """On a busy machine the only other one may miss a pull or two while the newcomer starts."""
    world = running(2, 1)
    world.learners["learner-0"].answers = False
    until(world, "muted")
    newcomer = world.join("learner-1")
    world.run_until(seconds=1)
    world.learners["learner-0"].answers = True
    until(world, "probed")
    assert until(world, "helped").data["peer"] == newcomer.source == "learner-0"
    assert not world.said("fresh")


def test_a_crash_of_the_syncer_in_the_middle_makes_the_newcomer_ask_anew() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 8.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=3)
    assert newcomer.fetching
    world.crash_syncer()
    world.run_until(seconds=20)
    assert newcomer.source and world.syncer.members.learners["learner-3"].live
    assert len(world.said("helping")) == 2


def test_several_newcomers_are_spread_over_several_peers() -> None:
    world = running(6, 3)
    for learner in world.learners.values():
        learner.stream_s = 3.0
    for name in ("learner-3", "learner-4", "learner-5"):
        world.join(name)
    world.run_until(seconds=15)
    assert sorted(str(n.data["peer"]) for n in world.said("helping")) == ["learner-0", "learner-1", "learner-2"]
    assert len(world.said("helped")) == 3


def test_one_copy_serves_newcomers_that_come_together() -> None:
    world = World(4, present=1, fragments=2, sync_every=8, latency_s=0.05).run_until(round=3)
    world.learners["learner-0"].stream_s = 2.0
    for name in ("learner-1", "learner-2", "learner-3"):
        world.join(name)
    world.run_until(seconds=6)
    assert len(world.said("helped")) == 3
    assert len({note.data["peer_t"] for note in world.said("helped")}) == 1
    assert world.learners["learner-0"].machine._helping._number == 1


def test_a_stream_past_its_bound_is_tried_once_more_elsewhere_and_then_given_up() -> None:
    world = running()
    for learner in world.learners.values():
        learner.stream_s = 1000.0
    newcomer = world.join("learner-3")
    fresh = until(world, "fresh")
    assert [n.data["peer"] for n in world.said("helping")] == ["learner-0", "learner-1"]
    assert fresh.text.count("not done within 4 rounds and 10") == 2
    assert len(world.sent(Release)) == 2
    world.run_until(seconds=10)
    assert newcomer.moments == newcomer.t > 0 and "learner-3" in world.members(world.syncer.committed - 1)


def test_the_bound_is_the_longer_of_h_rounds_and_ten_seconds() -> None:
    slow = running(fragments=1, sync_every=8, latency_s=0.0)  # a round every 8 s
    for learner in slow.learners.values():
        learner.stream_s = 1000.0
    slow.join("learner-3")
    again = until(slow, "helping", count=2)
    assert "not done within 8 rounds" in str(again.data["reason"])
    first, second = (at for at, note in slow.notes if note.kind == "helping")
    assert 56 <= second - first <= 72


def test_a_large_state_has_the_time_its_bytes_need() -> None:
    world = running()
    peer = world.learners["learner-0"]
    peer.stream_s, peer.state_bytes = 1000.0, 800 * 2**20  # at 8 MiB/s that is 100 s
    world.join("learner-3")
    until(world, "helping")
    world.run_until(seconds=95)
    assert len(world.said("helping")) == 1
    world.run_until(seconds=10)
    assert len(world.said("helping")) == 2


def until_sent(world: World, kind: type[Any]) -> list[tuple[float, Any]]:
    while not (sent := world.sent(kind)):
        world.run_until(seconds=0.01)
    return sent


def test_a_peer_that_does_not_step_is_not_asked() -> None:
    world = running(latency_s=0.0)
    world.pause("learner-0")
    world.run_until(seconds=15)
    assert world.said("stalled")
    world.join("learner-3")
    assert until(world, "helping").data["peer"] == "learner-1"


def test_a_peer_that_stops_stepping_before_its_copy_is_made_is_given_up() -> None:
    world = running(3, 2)
    world.pause("learner-0")  # healthy, as far as anybody knows
    newcomer = world.join("learner-2")
    assert until(world, "helping").data["peer"] == "learner-0"
    assert until(world, "helping", count=2).data["peer"] == "learner-1"
    assert "it makes no steps" in str(world.said("helping")[1].data["reason"])
    world.run_until(seconds=5)
    assert newcomer.source == "learner-1"


def test_one_whose_contributions_were_refused_helps_nobody() -> None:
    world = running()
    world.syncer.members.learners["learner-0"].strikes = 1
    world.learners["learner-0"].answers = False
    world.join("learner-3")
    assert until(world, "helping").data["peer"] == "learner-1"


def test_a_peer_that_goes_into_quarantine_is_followed_by_another() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 9.0
    newcomer = world.join("learner-3")
    until(world, "helping")
    world.learners["learner-0"].broken = True
    until(world, "quarantined")
    world.run_until(seconds=15)
    reasons = [str(note.data["reason"]) for note in world.said("helping") if note.data["learner"] == "learner-3"]
    assert reasons == ["", "learner-0: it is in quarantine"]
    assert newcomer.source in ("learner-1", "learner-2")


def test_a_learner_out_of_quarantine_trains_on_and_takes_a_peers_inner_optimizer() -> None:
    world = running(3, 3)
    world.learners["learner-1"].broken = True
    for name in ("learner-0", "learner-2"):
        world.learners[name].stream_s = 5.0
    until(world, "quarantined")
    learner = world.learners["learner-1"]
    at = learner.t
    world.run_until(seconds=4)
    assert learner.t > at and learner.moments < learner.t, "it steps meanwhile, with a fresh one"
    assert not world.syncer.members.learners["learner-1"].live, "and gives nothing"
    until(world, "helped")
    assert learner.source == "learner-0" and learner.moments > 4
    world.run_until(seconds=6)
    assert "learner-1" in world.members(world.syncer.committed - 1)


def test_frozen_parameters_are_awaited_from_one_that_comes_out_of_quarantine() -> None:
    world = running(learners=2, present=1)
    world.join("learner-1")
    world.run_until(seconds=0.06)
    peers, members = world.syncer.peers, world.syncer.members.learners
    peers.begin_recovery(world.now, members["learner-1"], 0, frozen=True)
    peers.begin_recovery(world.now, members["learner-0"], 0)
    peers.advance_recoveries(world.now, [])
    assert [note.data["learner"] for note in world.syncer.state.out.take_effects() if isinstance(note, Note)] == [
        "learner-0"
    ]
    assert list(peers.open) == ["learner-1"], "without them it could not train at all"


def test_the_peer_is_chosen_by_chance_among_the_healthy() -> None:
    """Whoever would serve newcomers a state of its making cannot see to it that they come to it."""
    asked = []
    for round_ in range(6, 36):
        world = World(4, present=3, fragments=4, sync_every=4, latency_s=0.05).run_until(round=round_)
        world.join("learner-3")
        asked.append(str(until(world, "helping").data["peer"]))
    assert min(asked.count(name) for name in ("learner-0", "learner-1", "learner-2")) >= 5, asked


def test_a_state_that_is_refused_is_a_strike_and_another_peer_is_asked() -> None:
    world = running()
    world.learners["learner-0"].lies = True
    newcomer = world.join("learner-3")
    refused = until(world, "refused")
    assert world.syncer.members.learners["learner-0"].strikes == 1
    assert refused.text.startswith("state of learner-0 refused by learner-3: ")
    assert (refused.data["learner"], refused.data["newcomer"]) == ("learner-0", "learner-3")
    helped = until(world, "helped")
    first, second = (str(note.data["peer"]) for note in world.said("helping"))
    assert first == "learner-0" != second == newcomer.source == helped.data["peer"]
    world.run_until(seconds=10)
    assert world.syncer.members.learners["learner-0"].strikes == 0, "its next contribution is good"
    assert not world.said("fresh") and not world.said("quarantined")


def test_when_every_peers_state_is_refused_the_newcomer_starts_fresh() -> None:
    world = running()
    newcomer = world.join("learner-3")
    newcomer.fits = False
    fresh = until(world, "fresh")
    assert "two tries came to nothing" in fresh.text and fresh.text.count("SGD here, AdamW in the snapshot") == 2
    asked = [note.data["peer"] for note in world.said("helping")]
    assert len(set(asked)) == len(asked) == 2, "none of them twice"
    world.run_until(seconds=10)
    assert newcomer.moments == newcomer.t > 0 and "learner-3" in world.members(world.syncer.committed - 1)


def test_the_only_peer_is_not_asked_again_once_its_state_was_refused() -> None:
    world = running(2, 1)
    world.learners["learner-0"].lies = True
    newcomer = world.join("learner-1")
    fresh = until(world, "fresh")
    assert len(world.said("helping")) == 1 and "no healthy peer is there (learner-0: " in fresh.text
    at = {note.kind: when for when, note in world.notes}
    assert at["fresh"] == at["refused"], "nobody else may come"
    world.run_until(seconds=10)
    assert newcomer.t > 0 and "learner-1" in world.members(world.syncer.committed - 1)


def test_one_that_goes_into_quarantine_with_a_peers_state_asks_that_peer_no_more() -> None:
    """A state may be finite and of the right shapes, and lead to broken numbers all the same."""
    world = running()
    newcomer = world.join("learner-3")
    first = str(until(world, "helped").data["peer"])
    newcomer.broken = True
    until(world, "quarantined")
    blame = world.said("refused")[-1]
    due = f"learner-3 went into quarantine after it took the state of {first}: look at the script and data of learner-3"
    assert blame.text.startswith(due)
    assert blame.data["learner"] == first
    until(world, "helped", count=2)
    asked = [note.data["peer"] for note in world.said("helping") if note.data["learner"] == "learner-3"]
    assert asked[0] == first and first not in asked[1:]


def test_one_that_was_in_quarantine_before_it_took_a_peers_state_is_itself_to_blame() -> None:
    """A loss that is not finite on one learner was told as "state of learner-0 refused by learner-1"."""
    world = running()
    learner = world.learners["learner-1"]
    learner.broken = True
    helper = until(world, "helped").data["peer"]
    learner.broken = True
    until(world, "quarantined", count=2)
    blame = world.said("refused")[-1]
    due = f"learner-1 went into quarantine again, as before it took the state of {helper}: look at the script and data"
    assert blame.text.startswith(due)
    assert not any("refused by learner-1" in note.text for note in world.said("refused"))


def test_one_whose_numbers_stay_broken_runs_out_of_peers_and_hurts_none_of_them() -> None:
    world = running()
    newcomer = world.join("learner-3")
    until(world, "helped")
    while len(world.said("fresh")) < 2:
        newcomer.broken = True
        world.run_until(seconds=0.5)
        assert world.now < 500
    asked = [note.data["peer"] for note in world.said("helping") if note.data["learner"] == "learner-3"]
    assert len(asked) == len(set(asked)) == 3
    assert {str(note.data["learner"]) for note in world.said("quarantined")} == {"learner-3"}


def test_one_whose_contribution_was_taken_blames_nobody_for_a_later_quarantine() -> None:
    world = running()
    newcomer = world.join("learner-3")
    helped = until(world, "helped")
    world.run_until(seconds=10)
    assert "learner-3" in world.members(world.syncer.committed - 1)
    newcomer.broken = True
    until(world, "quarantined")
    assert all(note.data["learner"] == "learner-3" for note in world.said("refused")), helped


def test_a_newcomer_that_lies_costs_a_peer_one_strike_and_no_more() -> None:
    world = running()
    world.join("learner-3")
    for _ in range(12):
        world.inject(syncer_fx.Received("learner-3", Seek(after=0)))
        if (recovery := world.syncer.peers.open.get("learner-3")) is not None and recovery.peer is not None:
            said = Settled(ticket=recovery.ticket, peer=recovery.peer.name, size=9, reason="bad", again=True)
            world.inject(syncer_fx.Received("learner-3", said))
    struck = [note.data["learner"] for note in world.said("refused")]
    assert sorted(struck) == ["learner-0", "learner-1", "learner-2"]
    assert not world.said("quarantined")


def test_a_newcomer_that_names_a_peer_which_nobody_asked_costs_that_peer_nothing() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 5.0
    world.join("learner-3")
    until(world, "helping")
    world.inject(syncer_fx.Received("learner-3", Settled(ticket="", peer="learner-1", size=9)))
    assert world.said("fresh")[0].data["reason"] == "it says that learner-1 helped, which was not asked"
    learners = world.syncer.members.learners
    world.syncer.strikes.quarantine_learner(world.now, learners["learner-3"], "now", "its numbers are broken")
    assert [one.strikes for one in learners.values()] == [0, 0, 0, 0]


def test_a_newcomer_that_is_cut_off_asks_anew_when_it_is_back() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 5.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=3)
    world.unlink("learner-3")
    world.run_until(seconds=1)
    assert world.sent(Release, "learner-0"), "its peer is free"
    world.link("learner-3")
    until(world, "helped")
    assert newcomer.source and world.syncer.members.learners["learner-3"].incarnation == 1


def test_a_newcomer_whose_courier_dies_is_helped_all_the_same() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 5.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=3)
    world.restart_courier("learner-3")
    until(world, "helped")
    assert newcomer.source and newcomer.t == 0


def test_a_peer_whose_courier_dies_is_followed_by_another() -> None:
    world = running()
    world.learners["learner-0"].stream_s = 5.0
    newcomer = world.join("learner-3")
    world.run_until(seconds=3)
    world.restart_courier("learner-0")
    until(world, "helped")
    assert newcomer.source == "learner-1"


def test_a_synchronous_run_takes_the_newcomer_in_once_it_is_helped() -> None:
    world = running(synchronous=True, overlap=1)
    for learner in world.learners.values():
        learner.stream_s = 3.0
    newcomer = world.join("learner-3")
    committed = world.syncer.committed
    world.run_until(seconds=2.5)
    assert world.syncer.committed > committed, "nobody waits for it meanwhile"
    world.run_until(seconds=20)
    assert newcomer.source and "learner-3" in world.members(world.syncer.committed - 1)
    assert world.members(world.syncer.committed - 1) == set(world.learners)


def test_what_a_synchronous_newcomer_goes_on_with_is_on_order_before_it_is_told_to() -> None:
    """It goes on at once; a copy or a hold that came behind would be missed."""
    world = running(synchronous=True, overlap=1)
    machine = world.join("learner-3").machine
    told: list[list[learner_fx.LearnerEffect]] = []
    handle = machine.handle

    def listen(now: float, event: learner_fx.LearnerEvent) -> list[learner_fx.LearnerEffect]:
        told.append(handle(now, event))
        return told[-1]

    machine.handle = listen  # type: ignore[method-assign]
    until(world, "helped")
    [effects] = [one for one in told if any(isinstance(effect, learner_fx.Begin) for effect in one)]
    kinds = [type(effect) for effect in effects]
    assert learner_fx.Read in kinds and learner_fx.Hold in kinds
    assert kinds.index(learner_fx.Begin) > max(
        i for i, kind in enumerate(kinds) if kind in (learner_fx.Read, learner_fx.Hold)
    )


def test_one_that_seeks_gives_nothing_to_a_round_that_had_asked_it() -> None:
    world = running(3, 3)
    world.learners["learner-1"].answers = False
    while not any(round_.asked for round_ in world.syncer.state.open_rounds.values()):
        world.run_until(seconds=0.01)
    world.inject(syncer_fx.Received("learner-1", Seek(after=3)))
    seats = [
        round_.seats["learner-1"] for round_ in world.syncer.state.open_rounds.values() if "learner-1" in round_.seats
    ]
    assert seats and all(seat.why_out == "it takes a peer's state first" for seat in seats)


def test_at_the_end_nobody_waits_for_a_peer() -> None:
    world = running(steps=0)
    for learner in world.learners.values():
        learner.stream_s = 1000.0
    world.join("learner-3")
    until(world, "helping")
    world.run_until(seconds=2)
    world.end()
    world.run_to_end(seconds=60)
    assert world.learners["learner-3"].over and not world.learners["learner-3"].waits


class TestTickets:
    def test_they_differ_and_belong_to_two(self) -> None:
        world = running(5, 3)
        for name in ("learner-3", "learner-4"):
            world.learners["learner-0"].stream_s = world.learners["learner-1"].stream_s = 5.0
            world.join(name)
        world.run_until(seconds=3)
        asked = world.sent(Help)
        peers, tickets = world.syncer.peers, [help.ticket for _, help in asked]
        assert len(set(tickets)) == 2 and all(len(ticket) == 32 for ticket in tickets)
        for _, help in asked:
            peer = peers.open[help.newcomer].peer
            assert peer is not None
            assert peers.wrong_newcomer(help.ticket, help.newcomer) is None
            assert peers.wrong_peer(help.ticket, peer.name) is None
            assert "no recovery of learner-2" in str(peers.wrong_newcomer(help.ticket, "learner-2"))
            assert "learner-2 is not asked" in str(peers.wrong_peer(help.ticket, "learner-2"))
            assert peers.wrong_newcomer("", help.newcomer) and peers.wrong_peer("", peer.name)

    def test_nobody_may_ask_before_the_copy_is_ready(self) -> None:
        world = running(latency_s=0.2)
        world.join("learner-3")
        [(_, help), *_] = until_sent(world, Help)
        assert world.syncer.peers.wrong_newcomer(help.ticket, "learner-3") is not None

    @pytest.mark.parametrize("size", [0, -1])
    def test_a_state_of_no_size_is_none(self, size: int) -> None:
        world = running()
        world.learners["learner-0"].answers = True
        world.join("learner-3")
        [(_, help), *_] = until_sent(world, Help)
        before = len(world.sent(Helped))
        world.inject(syncer_fx.Received("learner-0", Ready(ticket=help.ticket, size=size, digest="d", t=1)))
        assert len(world.sent(Helped)) == before

    def test_what_others_say_of_a_ticket_counts_for_nothing(self) -> None:
        world = running()
        world.learners["learner-0"].stream_s = 3.0
        newcomer = world.join("learner-3")
        [(_, help), *_] = until_sent(world, Help)
        world.inject(syncer_fx.Received("learner-1", Ready(ticket=help.ticket, size=7, digest="d", t=1)))
        assert [m.reason for _, m in world.sent(Release, "learner-1")] == ["nobody waits for it"]
        world.inject(syncer_fx.Received("learner-1", Unable(ticket=help.ticket, reason="mischief")))
        world.inject(syncer_fx.Received("learner-2", Settled(ticket=help.ticket, peer="learner-0", size=7)))
        until(world, "helped")
        assert newcomer.source == "learner-0" and len(world.said("helping")) == 1


def test_fresh_is_told_to_the_newcomer_with_its_reason() -> None:
    world = running(2, 1)
    world.pause("learner-0")
    world.run_until(seconds=15)
    world.join("learner-1")
    until(world, "fresh")
    assert [m.reason for _, m in world.sent(Fresh, "learner-1")] == ["no healthy peer is there"]


def test_a_newcomer_that_asks_for_another_peer_while_it_has_none_changes_nothing() -> None:
    world = running(2, 1)
    world.learners["learner-0"].answers = False
    until(world, "muted")
    world.join("learner-1")
    world.run_until(seconds=0.5)
    assert world.syncer.peers.open["learner-1"].peer is None
    world.inject(syncer_fx.Received("learner-1", Settled(ticket="", peer="", reason="none came", again=True)))
    assert not world.syncer.peers.open["learner-1"].failed
