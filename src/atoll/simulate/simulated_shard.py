"""A simulated shard of the syncer (docs/adr/0031): the shipped state machine of a shard, on a host with its own disk.

The host outlives its processes, the disk the host's power: a record of the chain counts once it is written, a part of a
cut once the lead said that it is complete. What a process had in memory goes with it. Its channel to the lead keeps its
order; a partition holds up what is said, until both ends give the channel up.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import Protocol

from atoll.protocol import shard as sh
from atoll.protocol import shard_messages as msg
from atoll.protocol.messages import ContributionKey
from atoll.simulate.cells import Cells
from atoll.simulate.virtual_time import EventQueue

AGAIN_S = 0.5
"""Between two dials."""


@dataclass(frozen=True, slots=True)
class ChainRecord:
    head: str
    fragment: int
    gradient: Cells


@dataclass(slots=True)
class ShardDisk:
    chain: dict[str, ChainRecord] = field(default_factory=dict)
    """By head: what survives the machine."""
    run: str = ""
    written: dict[int, tuple[list[Cells], list[int]]] = field(default_factory=dict)
    """Parts of cuts, which may not count yet: values and versions."""
    complete: list[int] = field(default_factory=list)
    """Cuts that count, the oldest first."""
    count: int = 0

    def append(self, fragment: int, gradient: Cells) -> str:
        self.count += 1
        head = f"head {self.count}"
        self.chain[head] = ChainRecord(head, fragment, gradient)
        return head


class ShardLink:
    """A channel between a shard and a lead, as both ends hold it."""

    __slots__ = ("arrives", "lead", "shard")

    def __init__(self, shard: SimulatedShard, lead: LeadEnd) -> None:
        self.shard, self.lead = shard, lead
        self.arrives: dict[str, float] = {}


class LeadEnd(Protocol):
    """What a shard needs of the lead that it dials."""

    def open_shard(self, link: ShardLink, hello: msg.ShardHello) -> str: ...

    def hear_shard(self, link: ShardLink, message: msg.FromShard) -> object: ...

    def lose_shard(self, link: ShardLink, reason: str) -> object: ...


class ShardChecks(Protocol):
    def watch_shard(self, shard: SimulatedShard, fragment: int) -> None: ...

    def watch_missing_head(self, shard: SimulatedShard, decision: msg.RoundDecided) -> None: ...

    def watch_orders(self, shard: SimulatedShard, event: sh.ShardEvent, effects: Sequence[sh.ShardEffect]) -> None: ...


class ShardWorld(Protocol):
    """What a shard needs of the world around it."""

    queue: EventQueue
    random: random.Random
    outer_lr: float
    merge_s: float
    events: int

    @property
    def shard_checks(self) -> ShardChecks: ...

    def lead_at(self, shard: SimulatedShard) -> LeadEnd | None: ...

    def shard_delay(self) -> float: ...

    def draw_sync_s(self) -> float: ...

    def on_handled(self, machine: type, node: str, event: object, effects: Sequence[object]) -> None: ...


class SimulatedShard:
    def __init__(self, world: ShardWorld, number: int, shards: int, parts: list[slice]) -> None:
        """`parts`: which values of every fragment it holds."""
        self.world, self.number, self.shards, self.parts = world, number, shards, parts
        self.fragments = len(parts)
        self.disk = ShardDisk()
        self.alive = False
        self.blocked = False
        """Nothing passes between it and the lead."""
        self._held: deque[tuple[ShardLink, Callable[..., object], tuple[object, ...]]] = deque()
        """What waits for that, of channels that are closed by now too."""
        self.dies_at = 0
        """So many effects from now its process dies; 0: it does not."""
        self._processes = 0
        self.link: ShardLink | None = None
        self._forget()
        self.start()

    def _forget(self) -> None:
        self.machine = sh.Shard(self.number, self.shards, f"shard-{self.number}/{self._processes}", run=self.disk.run)
        self.theta: list[Cells] = []
        self.versions = [-1] * self.fragments
        self.staged: dict[int, tuple[Cells, Cells]] = {}
        self._measured: dict[int, msg.Stage] = {}
        """By order, what waits for the norms of all."""
        """By fragment: the outer gradient of its part, and the new values."""
        self.bodies: dict[ContributionKey, Cells] = {}
        self.expected: dict[ContributionKey, msg.Expect] = {}
        self.asked: msg.AskInitial | None = None

    # ---- its processes ------------------------------------------------------------------------------------------

    def start(self) -> object:
        if self.alive:
            return False
        self._processes += 1
        self.alive = True
        self._forget()
        self.dial_later()
        return None

    def kill(self) -> object:
        """The lead's end notices that the channel is closed, if anything passes."""
        if not self.alive:
            return False
        self.alive, self.dies_at = False, 0
        self._close_link("its process died")
        return None

    def _close_link(self, reason: str) -> None:
        if (link := self.link) is not None:
            self.link = None
            self._pass(link, "up", link.lead.lose_shard, link, reason)

    def dial_later(self) -> None:
        self.world.queue.call_later(AGAIN_S * self.world.random.random(), self._dial, self.machine)

    def _dial(self, machine: sh.Shard) -> object:
        if not self.alive or self.machine is not machine or self.link is not None:
            return False
        lead = None if self.blocked else self.world.lead_at(self)
        if lead is None:
            self.world.queue.call_later(AGAIN_S, self._dial, machine)
            return None
        self.link = link = ShardLink(self, lead)
        cuts = tuple(sorted(self.disk.complete, reverse=True))
        if lead.open_shard(link, machine.hello(f"shard-{self.number}", cuts)):
            self.link = None
            self.world.queue.call_later(AGAIN_S, self._dial, machine)
        return None

    # ---- its channel --------------------------------------------------------------------------------------------

    def _pass(self, link: ShardLink, way: str, action: Callable[..., object], *arguments: object) -> None:
        """In order, and late."""
        queue = self.world.queue
        at = max(queue.now + self.world.shard_delay(), link.arrives.get(way, 0.0))
        link.arrives[way] = at
        queue.call_at(at, self._arrive, link, action, arguments)

    def _arrive(self, link: ShardLink, action: Callable[..., object], arguments: tuple[object, ...]) -> object:
        if self.blocked:
            self._held.append((link, action, arguments))
            return None
        return action(*arguments)

    def send_down(self, link: ShardLink, message: msg.FromLead) -> None:
        """From the lead."""
        self._pass(link, "down", self._hear, link, message)

    def close_down(self, link: ShardLink) -> None:
        """The lead's end is gone."""
        self._pass(link, "down", self._lose_lead, link)

    def _hear(self, link: ShardLink, message: msg.FromLead) -> object:
        if self.link is not link or not self.alive:
            return False
        self.handle(sh.LeadSaid(message))
        return None

    def _lose_lead(self, link: ShardLink) -> object:
        if self.link is not link or not self.alive:
            return False
        self.link = None
        self.handle(sh.LeadLost())
        self.dial_later()
        return None

    def unblock(self) -> None:
        self.blocked = False
        while self._held and not self.blocked:
            _, action, arguments = self._held.popleft()
            action(*arguments)

    def give_up_link(self) -> object:
        """Both ends notice that nothing passes: whatever was held up is lost."""
        link = self.link
        if not self.blocked or link is None:
            return False
        self._held = deque(one for one in self._held if one[0] is not link)
        self.link = None
        link.lead.lose_shard(link, "ping timeout")
        if self.alive:
            self.handle(sh.LeadLost())
            self.dial_later()
        return None

    # ---- the machine --------------------------------------------------------------------------------------------

    def handle(self, event: sh.ShardEvent) -> None:
        self.world.events += 1
        effects = self.machine.handle(event)
        self.world.on_handled(sh.Shard, self.machine.process, event, effects)
        self.world.shard_checks.watch_orders(self, event, effects)
        for effect in effects:
            if not self.alive:
                return
            self._carry_out(effect)
            if self.dies_at > 0:
                self.dies_at -= 1
                if self.dies_at == 0:
                    self.kill()
                    self.world.queue.call_later(2.0, self.start)

    def _later(self, seconds: float, action: Callable[..., object], *arguments: object) -> None:
        """If the same process is still there."""
        self.world.queue.call_later(seconds, self._if_same, self.machine, action, arguments)

    def _if_same(self, machine: sh.Shard, action: Callable[..., object], arguments: tuple[object, ...]) -> object:
        return action(*arguments) if self.alive and self.machine is machine else False

    def _carry_out(self, effect: sh.ShardEffect) -> None:
        match effect:
            case sh.TellLead(message):
                if (link := self.link) is not None:
                    self._pass(link, "up", link.lead.hear_shard, link, message)
            case sh.RestoreParameters(take_up):
                self._later(self.world.draw_sync_s(), self._recover, take_up)
            case sh.ExpectBody(expect):
                self.expected[expect.body] = expect
                self.bodies.pop(expect.body, None)
            case sh.FreeBody(body):
                self.expected.pop(body, None)
                self.bodies.pop(body, None)
            case sh.AskFor(asked):
                self.asked = asked
            case sh.Step(stage):
                self._later(self.world.merge_s / 2, self._measure, stage)
            case sh.UseNorms(norms):
                if (waits := self._measured.pop(norms.order, None)) is not None:
                    self._later(self.world.merge_s / 2, self._step, waits)
            case sh.Abandon(order):
                if self._measured.pop(order, None) is not None:
                    self._later(0.0, self.handle, sh.StepFailed(order, "taken back while norms were waited for"))
            case sh.Write(stage):
                self._later(self.world.draw_sync_s(), self._write, stage)
            case sh.Undo(fragment):
                self.staged.pop(fragment, None)
            case sh.Apply(msg.RoundDecided() as decision, staged):
                self._commit(decision, staged=staged)
            case sh.CaptureCut(write):
                captured = (list(self.theta), list(self.versions))
                self._later(self.world.draw_sync_s(), self._write_part, write.cut, captured)
            case sh.CompletePart(finish):
                self._later(self.world.draw_sync_s(), self._complete_part, finish)
            case sh.LeaveLead():
                self._close_link("it follows a newer lead")
                self.dial_later()
            case sh.End():
                self.alive = False
                self._close_link("it was told to end")
            case _:
                pass

    # ---- what it does -------------------------------------------------------------------------------------------

    def _recover(self, take_up: msg.TakeUp) -> None:
        self.disk.run = self.disk.run or "run"
        self.expected.clear()
        self.bodies.clear()
        self.staged.clear()
        self.asked = None
        if take_up.cut < 0:
            self.theta, self.versions = [], [-1] * self.fragments
        else:
            theta, versions = self.disk.written[take_up.cut]
            self.theta, self.versions = list(theta), list(versions)
        replayed = 0
        for decision in take_up.decisions:
            if isinstance(decision, msg.RoundDecided):
                if decision.head not in self.disk.chain:
                    self.world.shard_checks.watch_missing_head(self, decision)
                self._replay(decision)
                replayed += 1
        for fragment in range(self.fragments if self.theta else 0):
            self.world.shard_checks.watch_shard(self, fragment)
        self.handle(sh.TookUp(self.disk.run, replayed))

    def _replay(self, decision: msg.RoundDecided) -> None:
        record = self.disk.chain[decision.head]
        self.theta[decision.fragment] = self.theta[decision.fragment] - self.world.outer_lr * record.gradient
        self.versions[decision.fragment] = decision.version

    def _measure(self, stage: msg.Stage) -> None:
        """Its merge needs the norms of all holders, as that of merge = "rda" does."""
        self._measured[stage.order] = stage
        self.handle(sh.Measured(stage.order, 0, b"own"))

    def _step(self, stage: msg.Stage) -> None:
        bodies = [self.bodies.get((one.learner, stage.round, one.attempt)) for one in stage.given]
        if any(one is None for one in bodies):
            self.handle(sh.StepFailed(stage.order, f"shard {self.number} lacks a contribution to round {stage.round}"))
            return
        total = sum(one.weight for one in stage.given)
        deltas = [one.weight * body for one, body in zip(stage.given, bodies, strict=True) if body is not None]
        gradient = sum(deltas[1:], deltas[0]) / total
        self.staged[stage.fragment] = gradient, self.theta[stage.fragment] - self.world.outer_lr * gradient
        self.handle(sh.PartStepped(stage.order, "digest", b"", 0.0))

    def _write(self, stage: msg.Stage) -> None:
        gradient, _ = self.staged[stage.fragment]
        self.handle(sh.Written(stage.order, self.disk.append(stage.fragment, gradient)))

    def _commit(self, decision: msg.RoundDecided, *, staged: bool) -> None:
        if staged:
            self.theta[decision.fragment] = self.staged.pop(decision.fragment)[1]
            self.versions[decision.fragment] = decision.version
        else:
            if decision.head not in self.disk.chain:
                self.world.shard_checks.watch_missing_head(self, decision)
            self._replay(decision)
        self.world.shard_checks.watch_shard(self, decision.fragment)

    def _write_part(self, cut: int, captured: tuple[list[Cells], list[int]]) -> None:
        self.disk.written[cut] = captured
        self.handle(sh.Came(msg.CutHere(cut=cut, digest="digest")))

    def _complete_part(self, finish: msg.FinishCut) -> None:
        """Older ones go."""
        found = [*(cut for cut in self.disk.complete if cut != finish.cut), finish.cut]
        self.disk.complete = [cut for cut in found if cut >= finish.oldest]
        kept = {*self.disk.complete, *(cut for cut in self.disk.written if cut > finish.cut)}
        self.disk.written = {cut: part for cut, part in self.disk.written.items() if cut in kept}
        self.handle(sh.Came(msg.CutDone(cut=finish.cut)))

    # ---- bodies -------------------------------------------------------------------------------------------------

    def cut_out(self, whole: Cells, fragment: int) -> Cells:
        return Cells(whole.values[self.parts[fragment]])

    def receive_body(self, body: ContributionKey, session: str, part: Cells, digest: str) -> str:
        """Why it is not taken; empty: it is."""
        expect = self.expected.get(body)
        if expect is None or expect.session != session:
            return f"no contribution to round {body[1]} (attempt {body[2]}) is waited for"
        if body in self.bodies:
            return "the contribution is here already"
        self.bodies[body] = part
        learner, number, attempt = body
        broken = int(isnan(part))
        here = msg.BodyHere(learner=learner, round=number, attempt=attempt, digest=digest, broken=broken)
        self.handle(sh.Came(here))
        return ""

    def receive_initial(self, learner: str, session: str, whole: list[Cells]) -> bool:
        """All its parts of the first parameters."""
        asked = self.asked
        if asked is None or (asked.learner, asked.session) != (learner, session) or not self.machine.serves:
            return False
        self.theta = [self.cut_out(one, f) for f, one in enumerate(whole)]
        self.versions = [0] * self.fragments
        self.handle(sh.Came(msg.InitialHere(learner=learner, session=session, complete=True)))
        return True
