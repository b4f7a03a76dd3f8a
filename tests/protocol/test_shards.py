"""A lead and its shards in virtual time: who is told what, in which order, and what a lost one costs.

Both state machines run here, with a disk for each shard, over channels that keep their order. `World.kill` takes what
was not durable.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from atoll.protocol import shard as sh
from atoll.protocol.effects import Note
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Box, Contribution, Decline, RankBoxes
from atoll.protocol.records import MergedRecord, ResetRecord, TermRecord
from atoll.protocol.shard_messages import (
    AskInitial,
    BodyHere,
    CutDone,
    CutHere,
    DeclareRanks,
    Expect,
    FromLead,
    FromShard,
    InitialHere,
    NormsHere,
    NormsOfAll,
    RoundDecided,
    Stage,
    Staged,
    TakenUp,
    TakeUp,
    Unstage,
    Unstaged,
)
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer import shard_effects as to_shards
from atoll.protocol.syncer import shards as lead

HOLDERS = ((1, 2, 3), (1, 3))
"""Of two fragments: shard 2 holds nothing of the second."""


@dataclass
class SimulatedShard:
    """A shard's process: its machine, its memory, and a disk that outlives it."""

    number: int
    process: int = 0
    alive: bool = False
    machine: sh.Shard = field(init=False)
    chain: list[tuple[str, Stage]] = field(default_factory=list)
    cuts: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Each with the versions in it."""
    versions: list[int] = field(default_factory=list)
    bodies: set[tuple[str, int, int]] = field(default_factory=set)
    staged: set[int] = field(default_factory=set)
    held: list[sh.Step | sh.Write] = field(default_factory=list)
    """What a thread works on, where the test says so."""
    ended: str = ""
    ranks: dict[str, tuple[RankBoxes, ...]] = field(default_factory=dict)
    """By learner, as it was told."""
    ranks_at_pull: tuple[RankBoxes, ...] = ()
    """Of the learner that was pulled last, as they were known then."""


class World:
    def __init__(self, shards: int = 3, *, begun: bool = True, threads: bool = False) -> None:
        self.now, self.threads = 0.0, threads
        self.shards = {n: SimulatedShard(n) for n in range(2, shards + 1)}
        self.lead = lead.LeadShards(shards, term=1)
        self.up: dict[int, deque[FromShard]] = {n: deque() for n in self.shards}
        self.told: list[fx.SyncerEvent] = []
        self.done: list[to_shards.LeadEffect] = []
        self.own: list[FromLead] = []
        """Orders to the lead's own part."""
        if begun:
            self.lead.begin_run("a-run", b"begun", HOLDERS)
        for n in self.shards:
            self.start(n)

    def start(self, n: int) -> None:
        one = self.shards[n]
        one.process, one.alive, one.ended, one.held = one.process + 1, True, "", []
        one.ranks, one.ranks_at_pull = {}, ()
        one.machine = sh.Shard(n, len(self.shards) + 1, f"process-{one.process}", run="a-run" if one.cuts else "")
        self.connect(n)

    def connect(self, n: int) -> None:
        one = self.shards[n]
        hello = one.machine.hello(f"http://shard-{n}", tuple(sorted((cut for cut, _ in one.cuts), reverse=True)))
        self.lead.open_shard(self.now, hello)
        self.run()

    def kill(self, n: int) -> None:
        one = self.shards[n]
        one.alive, one.bodies, one.staged, one.versions = False, set(), set(), []
        self.up[n].clear()
        self.lead.lose_shard(self.now, n, "killed")
        self.run()

    def run(self) -> None:
        """Until nothing is under way."""
        moved = True
        while moved:
            moved = self._carry_out_lead()
            for n, channel in self.up.items():
                while channel:
                    moved = True
                    self.lead.hear(self.now, n, channel.popleft())

    def notes(self, kind: str) -> list[Note]:
        return [one for one in self.done if isinstance(one, Note) and one.kind == kind]

    def _carry_out_lead(self) -> bool:
        effects = self.lead.take_effects()
        for effect in effects:
            match effect:
                case to_shards.Order(1, message):
                    self.own.append(message)
                    if isinstance(message, Stage):
                        self.lead.hear(self.now, 1, Staged(order=message.order, digest="own", head=""))
                case to_shards.Order(n, message):
                    if self.shards[n].alive:
                        self._carry_out(self.shards[n], self.shards[n].machine.handle(sh.LeadSaid(message)))
                case to_shards.Tell(event):
                    self.told.append(event)
                case _:
                    self.done.append(effect)
        return bool(effects)

    def _carry_out(self, one: SimulatedShard, effects: list[sh.ShardEffect]) -> None:
        for effect in effects:
            match effect:
                case sh.TellLead(message):
                    self.up[one.number].append(message)
                case sh.RestoreParameters(take_up):
                    self._hear(one, self._recover(one, take_up))
                case sh.KnowRanks(DeclareRanks(learner=learner, ranks=ranks)):
                    one.ranks = {who: of for who, of in {**one.ranks, learner: ranks}.items() if of}
                case sh.ExpectBody(expect):
                    one.bodies.add(expect.body)
                    one.ranks_at_pull = one.ranks.get(expect.learner, ())
                case sh.FreeBody(body):
                    one.bodies.discard(body)
                case (sh.Step() | sh.Write()) as work if self.threads:
                    one.held.append(work)
                case sh.Step(stage):
                    one.staged.add(stage.fragment)
                    self._hear(one, sh.PartStepped(stage.order, f"digest-{one.number}", b"", 0.1))
                case sh.Write(stage):
                    head = f"head-{one.number}-{len(one.chain)}"
                    one.chain.append((head, stage))
                    self._hear(one, sh.Written(stage.order, head))
                case sh.Undo(fragment):
                    one.staged.remove(fragment)
                case sh.Apply(RoundDecided(_, fragment, version, head), staged):
                    assert staged == (fragment in one.staged)
                    assert any(known == head for known, _ in one.chain), "a decision names what the chain holds"
                    one.staged.discard(fragment)
                    assert version == one.versions[fragment] + 1
                    one.versions[fragment] = version
                case sh.CaptureCut(write):
                    one.cuts.append((write.cut, tuple(one.versions)))
                    self._hear(one, sh.Came(CutHere(cut=write.cut, digest=f"cut-{one.number}")))
                case sh.CompletePart(finish):
                    self._hear(one, sh.Came(CutDone(cut=finish.cut)))
                case sh.End(reason):
                    one.ended, one.alive = reason, False
                case _:
                    pass

    def _recover(self, one: SimulatedShard, take_up: TakeUp) -> sh.TookUp:
        one.bodies, one.staged, one.ranks = set(), set(), {}
        known = dict(one.cuts)
        one.versions = list(known[take_up.cut]) if take_up.cut in known else [0, 0]
        rounds = [one for one in take_up.decisions if isinstance(one, RoundDecided)]
        for decision in rounds:
            if not any(head == decision.head for head, _ in one.chain):
                return sh.TookUp("a-run", reason=f"its chain does not hold round {decision.round}")
            one.versions[decision.fragment] = decision.version
        return sh.TookUp("a-run", len(rounds))

    def _hear(self, one: SimulatedShard, event: sh.ShardEvent) -> None:
        self._carry_out(one, one.machine.handle(event))

    # ---- what happens in a run ----------------------------------------------------------------------------------

    def pull(self, round: int, learner: str = "a", attempt: int = 1) -> None:
        expect = Expect(learner=learner, session="s", round=round, attempt=attempt, fragment=round % 2)
        self.lead.expect_body(expect)
        self.run()

    def give(self, round: int, learner: str = "a", attempt: int = 1, *, to: tuple[int, ...] = (1, 2, 3)) -> None:
        for n in to:
            if n in HOLDERS[round % 2]:
                here = BodyHere(learner=learner, round=round, attempt=attempt, digest=f"body-{n}")
                if n == 1:
                    self.lead.hear(self.now, 1, here)
                elif here.body in self.shards[n].bodies:
                    self._hear(self.shards[n], sh.Came(here))
        self.run()

    def say(self, round: int, learner: str = "a", attempt: int = 1) -> None:
        self.lead.hear_contribution(learner, contribution(round, attempt))
        self.run()

    def collect(self, round: int, attempt: int = 1) -> None:
        self.pull(round, attempt=attempt)
        self.give(round, attempt=attempt)
        self.say(round, attempt=attempt)

    def merge(self, round: int, attempt: int = 1) -> None:
        self.lead.merge(fx.Merge(round, round % 2, (fx.Part("a", attempt, 1.0),)))
        self.run()

    def combined(self) -> list[to_shards.Combine]:
        return [one for one in self.done if isinstance(one, to_shards.Combine)]

    def commit(self, version: int) -> None:
        """The decision is durable."""
        combine = self.combined()[-1]
        merge = combine.merge
        heads = combine.heads(self.lead.shards)
        record = MergedRecord(merge.round, merge.fragment, version, 1, "", (), "", heads=heads)
        self.lead.note_record(record)
        self.run()

    def play(self, round: int, version: int) -> None:
        self.collect(round)
        self.merge(round)
        self.commit(version)


def contribution(round: int, attempt: int = 1) -> Contribution:
    return Contribution(
        round=round, attempt=attempt, fragment=round % 2, base=0, t=1, steps=1, tokens=1, digest="of all", learner="a"
    )


def test_a_round_is_staged_everywhere_before_it_is_decided() -> None:
    world = World()
    assert world.lead.all_ready
    world.collect(0)
    assert next(one.parts for one in world.done if isinstance(one, to_shards.Complete))[1].digest == "body-2"
    world.merge(0)
    [combine] = world.combined()
    assert [n for n, _ in combine.parts] == [1, 2, 3]
    assert combine.heads(3) == ("own", "head-2-0", "head-3-0")
    assert world.shards[2].versions == [0, 0], "nothing is committed before the decision"
    world.commit(1)
    assert [one.versions for one in world.shards.values()] == [[1, 0], [1, 0]]


def test_a_shard_that_holds_nothing_of_a_fragment_is_not_asked() -> None:
    world = World()
    world.play(1, version=1)
    assert world.combined()[0].heads(3) == ("own", "", "head-3-0")
    assert world.shards[2].chain == [] and world.shards[3].versions == [0, 1]


def test_first_parameters_of_who_is_not_asked_any_more_count_for_nothing() -> None:
    """What a shard says of them may be on its way while another learner, or another process of it, is asked."""
    world = World()
    world.lead.ask_initial(AskInitial(learner="a", session="a/2"))
    for learner, session in (("a", "a/1"), ("b", "a/2"), ("a", "a/2")):
        world.lead.hear(world.now, 2, InitialHere(learner=learner, session=session, complete=True))
    world.run()
    told = [one.message for one in world.done if isinstance(one, to_shards.InitialParts)]
    assert [(one.learner, one.session) for one in told] == [("a", "a/2")]


def test_a_contribution_waits_for_the_body_of_every_holder() -> None:
    world = World()
    world.pull(0)
    world.give(0, to=(1, 3))
    world.say(0)
    assert not world.done or not any(isinstance(one, to_shards.Complete) for one in world.done)
    world.give(0, to=(2,))
    assert sum(isinstance(one, to_shards.Complete) for one in world.done) == 1


def test_what_nobody_asked_for_is_complete_without_bodies_so_that_it_is_refused() -> None:
    world = World()
    world.say(7)
    assert [one.parts for one in world.done if isinstance(one, to_shards.Complete)] == [()]


def test_a_part_that_one_shard_cannot_stage_is_void_in_all() -> None:
    world = World(threads=True)
    world.collect(0)
    world.merge(0)
    [step], two = world.shards[2].held, world.shards[2]
    assert isinstance(step, sh.Step)
    world._hear(two, sh.StepFailed(step.stage.order, "not finite", reset=True))
    world.run()
    assert world.told == [fx.Unmergeable(0, "not finite", reset=True)]
    three = world.shards[3]
    three.staged.add(0)
    world._hear(three, sh.PartStepped(step.stage.order, "digest", b"", 0.1))
    assert three.staged == set(), "its thread was at work when the order was taken back"
    world.lead.note_record(ResetRecord(0, "not finite"))
    world.run()
    assert world.combined() == []


def test_orders_wait_while_a_thread_works_on_what_is_void() -> None:
    one = sh.Shard(2, 2, "p")
    one.handle(sh.LeadSaid(TakeUp(begun=b"", term=1)))
    one.handle(sh.TookUp("a-run"))
    stage = Stage(order=1, round=0, attempt=1, fragment=0, given=(), term=1)
    assert one.handle(sh.LeadSaid(stage)) == [sh.Step(stage)]
    assert one.handle(sh.LeadSaid(Unstage(order=1, fragment=0, term=1))) == [sh.Abandon(1)]
    again = Stage(order=2, round=0, attempt=2, fragment=0, given=(), term=1)
    assert one.handle(sh.LeadSaid(again)) == []
    assert one.handle(sh.PartStepped(1, "digest", b"", 0.1)) == [sh.Undo(0), sh.Step(again)]


def merging(*holders: int, compare: bool = False) -> lead.LeadShards:
    """The lead of two shards, who merge a round of one contribution."""
    one = lead.LeadShards(2, 1)
    one.begin_run("a-run", b"", [holders])
    one.open_shard(0.0, sh.Shard(2, 2, "p").hello("http://2", ()))
    one.hear(0.0, 2, TakenUp())
    expect = Expect(learner="a", session="s", round=0, attempt=1, fragment=0)
    one.expect_body(expect)
    for shard in (1, 2):
        one.hear(0.0, shard, BodyHere(learner="a", round=0, attempt=1, digest="d"))
    one.merge(fx.Merge(0, 0, (fx.Part("a", 1, 1.0, 0),)), compare=compare)
    one.take_effects()
    return one


@pytest.mark.parametrize("holders", [(1, 2), (2,)])
def test_the_lead_hears_how_far_all_agree_and_the_others_hear_the_lead(holders: tuple[int, ...]) -> None:
    """Also where it holds nothing of the fragment: it judges all the same."""
    one = merging(*holders, compare=True)
    one.hear(0.0, 2, NormsHere(order=1, turn=0, squares=b"2"))
    assert one.take_effects() == []
    one.hear(0.0, 1, NormsHere(order=1, turn=0, squares=b"1"))
    for_lead = NormsOfAll(order=1, turn=0, squares=(b"1", b"2"), fragment=0, term=1)
    for_other = NormsOfAll(order=1, turn=0, squares=(b"1",), fragment=0, term=1)
    assert one.take_effects() == [to_shards.Order(1, for_lead), to_shards.Order(2, for_other)]


def test_norms_go_from_every_holder_to_all_of_them() -> None:
    one = merging(1, 2)
    one.hear(0.0, 2, NormsHere(order=1, turn=0, squares=b"2"))
    assert one.take_effects() == []
    one.hear(0.0, 1, NormsHere(order=7, turn=0, squares=b"x"))
    assert one.take_effects() == [], "of another order"
    one.hear(0.0, 1, NormsHere(order=1, turn=0, squares=b"1"))
    all_of = NormsOfAll(order=1, turn=0, squares=(b"1", b"2"), fragment=0, term=1)
    assert one.take_effects() == [to_shards.Order(1, all_of), to_shards.Order(2, all_of)]


def test_a_merge_that_waits_for_norms_ends_with_its_order_or_its_lead() -> None:
    one = sh.Shard(2, 2, "p")
    one.handle(sh.LeadSaid(TakeUp(begun=b"", term=1)))
    one.handle(sh.TookUp("a-run"))
    stage = Stage(order=1, round=0, attempt=1, fragment=0, given=(), term=1)
    one.handle(sh.LeadSaid(stage))
    assert one.handle(sh.Measured(1, 0, b"2")) == [sh.TellLead(NormsHere(order=1, turn=0, squares=b"2"))]
    norms = NormsOfAll(order=1, turn=0, squares=(b"1", b"2"), fragment=0, term=1)
    assert one.handle(sh.LeadSaid(norms)) == [sh.UseNorms(norms)]
    assert one.handle(sh.LeadLost()) == [sh.Abandon(1)]
    again = TakeUp(begun=b"", term=1)
    assert one.handle(sh.LeadSaid(again)) == [sh.Abandon(1)]
    assert one.handle(sh.Measured(1, 1, b"2")) == [sh.Abandon(1)], "it was not waiting when it was made void"
    assert one.handle(sh.StepFailed(1, "taken back")) == [sh.RestoreParameters(again)]


def test_a_killed_shard_takes_up_what_was_decided_while_it_was_away() -> None:
    world = World()
    world.lead.take_cut(0, 0, hurry=True)
    world.lead.hear(0.0, 1, CutHere(cut=0))
    world.run()
    world.play(0, version=1)
    world.collect(2)
    world.merge(2)
    world.kill(2)
    world.commit(2)
    assert not world.lead.all_ready
    world.start(2)
    assert world.shards[2].versions == world.shards[3].versions == [2, 0]


def test_the_operator_hears_which_shard_is_away_and_that_it_is_back() -> None:
    world = World()
    world.kill(2)
    [told] = world.notes("alarm")
    assert told.text.startswith("shard 2 was lost (") and "no round is committed until it is back" in told.text
    assert told.data == {"shard": 2, "about": "shard 2", "over": False}
    world.start(2)
    back = world.notes("alarm")[-1]
    assert back.text == "shard 2 is back" and back.data["about"] == "shard 2" and back.data["over"] is True


def test_a_shard_that_goes_when_the_run_is_over_is_no_alarm() -> None:
    world = World()
    world.lead.end_run("the run is over")
    world.run()
    world.lead.lose_shard(1.0, 2, "it closed the channel")
    world.run()
    assert not world.notes("alarm")


def test_a_decision_that_becomes_durable_while_it_reads_its_folder_is_read_from_the_chain() -> None:
    world = World()
    world.lead.take_cut(0, 0, hurry=True)
    world.run()
    world.collect(0)
    world.merge(0)
    world.kill(2)
    world.start(2)
    assert world.shards[2].versions == [0, 0]
    world.commit(1)
    assert world.shards[2].versions == [1, 0]


def test_a_round_under_way_fails_once_the_lost_shard_is_back() -> None:
    world = World(threads=True)
    world.collect(0)
    world.merge(0)
    world.kill(2)
    assert world.told == [], "while it is away nothing could be tried again"
    world.now = 3.0
    world.start(2)
    assert world.told == [fx.StoodStill(3.0), fx.Unmergeable(0, "shard 2 was lost")]


def test_what_a_lost_shard_held_of_contributions_is_asked_for_again() -> None:
    world = World()
    world.collect(0)
    world.kill(2)
    world.start(2)
    world.merge(0)
    assert world.told[-1] == fx.Unmergeable(0, "the contribution of a was lost with a shard")
    world.lead.discard(("a", 0, 1))
    world.collect(0, attempt=2)
    world.merge(0, attempt=2)
    assert len(world.combined()) == 1


def test_a_body_that_is_still_to_come_is_expected_by_the_next_process() -> None:
    world = World()
    world.pull(0)
    world.give(0, to=(1, 3))
    world.kill(2)
    world.start(2)
    world.give(0, to=(2,))
    world.say(0)
    assert sum(isinstance(one, to_shards.Complete) for one in world.done) == 1


def test_a_body_that_was_acknowledged_and_lost_costs_its_learner_no_strike() -> None:
    world = World()
    world.pull(0)
    world.give(0, to=(1, 2))
    world.say(0)
    world.kill(2)
    world.start(2)
    [declined] = [one for one in world.told if isinstance(one, fx.Received)]
    assert declined.learner == "a" and isinstance(declined.message, Decline)


def test_shards_hear_of_ranks_before_a_pull_and_again_when_they_come_back() -> None:
    world = World()
    ranks: tuple[RankBoxes, ...] = ((Box("w", (0,), (3,)),), (Box("w", (3,), (5,)),))
    world.lead.declare_ranks(DeclareRanks(learner="plain"))
    world.run()
    assert all(one.ranks == {} for one in world.shards.values()), "of a plain learner there is nothing to say"
    world.lead.declare_ranks(DeclareRanks(learner="a", ranks=ranks))
    world.pull(0)
    assert all(one.ranks == {"a": ranks} and one.ranks_at_pull == ranks for one in world.shards.values())
    world.kill(2)
    world.lead.declare_ranks(DeclareRanks(learner="b", ranks=ranks[::-1]))
    world.start(2)
    assert all(one.ranks == {"a": ranks, "b": ranks[::-1]} for one in world.shards.values())
    assert world.shards[2].ranks_at_pull == ranks, "the body that is still to come is expected behind them"
    world.lead.declare_ranks(DeclareRanks(learner="a"))
    world.run()
    assert all(one.ranks == {"b": ranks[::-1]} for one in world.shards.values())


def test_no_deadline_runs_while_a_shard_is_away() -> None:
    world = World()
    assert world.lead.take_standstill_s(1.0) == 0.0
    world.now = 2.0
    world.kill(3)
    assert world.lead.take_standstill_s(5.0) == 3.0
    assert world.lead.take_standstill_s(5.5) == 0.5
    world.now = 6.0
    world.start(3)
    assert world.told == [fx.StoodStill(0.5)]
    assert world.lead.take_standstill_s(9.0) == 0.0


def test_a_shard_that_lost_what_it_had_confirmed_says_so_and_does_not_serve() -> None:
    world = World()
    world.lead.take_cut(0, 0, hurry=True)
    world.run()
    world.play(0, version=1)
    world.kill(2)
    world.shards[2].chain.clear()
    world.start(2)
    assert world.shards[2].ended == "its chain does not hold round 0"
    assert not world.lead.all_ready
    assert any(isinstance(one, Note) and one.kind == "alarm" for one in world.done)


def test_a_shard_without_any_of_the_cuts_is_refused() -> None:
    world = World()
    world.lead.take_cut(0, 0, hurry=True)
    world.run()
    world.kill(2)
    world.shards[2].cuts.clear()
    world.start(2)
    assert "holds none of the run's cuts (0)" in world.shards[2].ended


def test_a_cut_counts_once_every_part_is_durable() -> None:
    world = World()
    world.lead.take_cut(8, 8, hurry=False)
    world.run()
    assert not any(isinstance(one, to_shards.CutPartsKept) for one in world.done)
    world.lead.hear(0.0, 1, CutHere(cut=8))
    world.run()
    assert to_shards.CutPartsKept(8, ("cut-2", "cut-3"), "") in world.done
    world.lead.finish_cut(8, [], -1)
    world.run()
    assert to_shards.CutPartsDone(8, "") in world.done


def test_a_cut_comes_to_nothing_with_a_lost_shard() -> None:
    world = World()
    world.kill(2)
    world.lead.take_cut(8, 8, hurry=False)
    world.run()
    assert world.done[-1] == to_shards.CutPartsKept(8, (), "shard 2 is not connected")


def test_shards_follow_a_new_lead_and_refuse_the_old_one() -> None:
    world = World()
    two = world.shards[2].machine
    two.handle(sh.LeadSaid(TakeUp(begun=b"", term=5)))
    assert two.term == 5
    [hung_up] = two.handle(sh.LeadSaid(Stage(order=1, round=0, attempt=1, fragment=0, given=(), term=1)))
    assert isinstance(hung_up, sh.LeaveLead)
    with pytest.raises(PeerError, match="follows term 5 already"):
        world.lead.open_shard(0.0, two.hello("http://shard-2", ()))


def test_a_new_lead_makes_shards_that_lived_on_take_up_its_decisions() -> None:
    world = World()
    world.lead.take_cut(0, 0, hurry=True)
    world.run()
    world.play(0, version=1)
    world.collect(2)
    world.merge(2)  # staged everywhere, and decided by nobody
    record = MergedRecord(0, 0, 1, 1, "", (), "", heads=("own", "head-2-0", "head-3-0"))
    world.lead = lead.LeadShards(3, term=2)
    world.lead.restore_decisions([0, record, TermRecord(2, 0, "", 1)])
    world.lead.begin_run("a-run", b"begun", HOLDERS)
    for n in world.shards:
        world._hear(world.shards[n], sh.LeadLost())
        world.connect(n)
    assert world.lead.all_ready
    assert [one.versions for one in world.shards.values()] == [[1, 0], [1, 0]]
    assert [one.staged for one in world.shards.values()] == [set(), set()]


@pytest.mark.parametrize(
    ("shard", "shards", "run", "match"),
    [
        (2, 2, "", "has 3 shards, not 2"),
        (4, 3, "", "there is no shard 4"),
        (1, 3, "", "there is no shard 1"),
        (2, 3, "another", "its folder holds shard 2 of run another"),
    ],
)
def test_who_is_no_shard_of_this_run_is_refused(shard: int, shards: int, run: str, match: str) -> None:
    world = World()
    with pytest.raises(PeerError, match=match):
        world.lead.open_shard(0.0, sh.Shard(shard, shards, "p", run=run).hello("http://x", ()))


def test_two_processes_cannot_be_one_shard() -> None:
    world = World()
    with pytest.raises(PeerError, match="another process is shard 2 already"):
        world.lead.open_shard(0.0, sh.Shard(2, 3, "other").hello("http://x", ()))


def test_a_shard_that_is_told_to_stage_fails_only_its_own_order() -> None:
    world = World(threads=True)
    world.collect(0)
    world.merge(0)
    world.lead.hear(0.0, 2, Unstaged(order=99, reason="of an order long past"))
    assert world.told == []


def test_decisions_are_kept_back_to_a_cut_that_every_shard_has() -> None:
    """However many cuts came to nothing since."""
    world = World()
    world.lead.take_cut(0, 0, hurry=True)
    world.lead.hear(0.0, 1, CutHere(cut=0))
    world.lead.finish_cut(0, [], -1)
    world.run()
    world.play(0, version=1)
    for cut in range(1, 9):
        world.lead.take_cut(cut, cut, hurry=False)  # the lead's own part is never written
        world.run()
    world.kill(2)
    world.shards[2].cuts = [one for one in world.shards[2].cuts if one[0] == 0]
    world.start(2)
    assert world.shards[2].versions == [1, 0]
