"""The shared memory of a learner, as its state machine uses it: what it orders of the memory becomes orders to the
training process and work on fragments (body.py); what the training process has done becomes events.

Rules kept here:
- what was done before all was forgotten (an older epoch) frees its slot, and nothing else;
- an adopted version is told of once it is the base, in all ranks;
- the first adoption of each fragment after a courier's death overwrites: the dead one may have known more.

Of a learner of several ranks this is rank 0's, and what it orders goes to all (rank_leader.py).
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.courier.body import FragmentTransfers, OpenBox, say
from atoll.courier.rank_channel import RunKnown
from atoll.courier.rank_leader import RankLeader
from atoll.courier.slots import make_adopt_order
from atoll.mailbox.box import serves
from atoll.mailbox.channel import (
    AdoptOrder,
    CopyMade,
    ForgetOrder,
    HoldOrder,
    SlotFreed,
    ToTraining,
    VersionTaken,
)
from atoll.protocol import schedule
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.machine import LearnerMachine
from atoll.protocol.messages import Recover, Welcome
from atoll.protocol.settings import Settings


class LearnerMemory:
    def __init__(
        self,
        opened: OpenBox,
        settings: Settings,
        bodies: FragmentTransfers,
        machine: LearnerMachine,
        ranks: RankLeader | None,
        send: Callable[[ToTraining], None],
        handle: Callable[[fx.LearnerEvent], None],
        *,
        epoch: int = 0,
        unsure: set[int] | None = None,
    ) -> None:
        """`settings`: those it was made for; `send`: to the training process, of all ranks; `handle`: hears events;
        `unsure`: fragments whose next adoption is an overwrite."""
        self.box, self.bodies = opened.box, bodies
        self._plan, self._settings, self._machine, self._ranks = opened.plan, settings, machine, ranks
        self._send, self._handle = send, handle
        self.epoch, self.unsure = epoch, unsure or set()
        self.in_use = True
        """It serves the run; if not, the training process is making another."""

    def fits(self, welcome: Welcome) -> bool:
        same_plan = self._plan.fingerprint == welcome.fingerprint
        return same_plan and serves(self._settings, welcome.settings)

    def note_run(self, message: Welcome | Recover) -> None:
        """In its head, for the next courier; in all ranks."""
        if isinstance(message, Welcome):
            self.box.run = message.run
            self.box.set_count("term", message.term)
        self.box.set_count("incarnation", message.incarnation)
        if self._ranks is not None:
            self._ranks.send(RunKnown(self.box.run, self.box.count("incarnation"), self.box.count("term")))

    # ---- what the training process has done ---------------------------------------------------------------------

    def take_copy(self, frame: CopyMade) -> None:
        if frame.epoch != self.epoch:
            self.bodies.freed(frame.slot, incoming=False)
            return
        self.bodies.encoded_with[frame.slot] = frame.feedback
        self.bodies.outgoing.add_copy(frame.fragment, frame.t, frame.slot, frame.steps, frame.tokens)
        counters = (frame.t, frame.steps, frame.tokens, frame.base, frame.total, frame.position)
        self._handle(fx.Copied(frame.round, frame.fragment, *counters))

    def free_slot(self, frame: SlotFreed) -> None:
        self.bodies.freed(frame.slot, frame.incoming)
        self.order_waiting()

    def order_waiting(self) -> None:
        """Copies that waited for a slot are ordered once there is one."""
        for order in self.bodies.outgoing.order_waiting():
            self._send(order)

    def finish_adoption(self, frame: VersionTaken) -> None:
        """It is the base, in all ranks."""
        if frame.epoch != self.epoch:
            self.bodies.freed(frame.slot, incoming=True)
            return
        self.bodies.finish_adoption(frame.slot, frame.adopted.fragment)
        self.unsure.discard(frame.adopted.fragment)
        self._handle(frame.adopted)

    # ---- what the state machine orders --------------------------------------------------------------------------

    def carry_out(self, effect: fx.LearnerEffect) -> None:
        send, bodies, settings = self._send, self.bodies, self._machine.settings
        if self._ranks is not None and isinstance(effect, fx.Settle | fx.DropRests | fx.UploadAll):
            self._ranks.send(effect)
        match effect:
            case fx.Read(step=step):
                urgent = settings.synchronous or step <= self._machine.t
                if (order := bodies.outgoing.order_read(effect, urgent=urgent)) is not None:
                    send(order)
            case fx.CancelRead(number):
                bodies.outgoing.cancel_waiting(number)
                send(effect)
            case fx.LetGo():
                send(effect)
            case fx.Hold(number, step):
                send(HoldOrder(number, schedule.fragment_of(number, settings), step))
            case fx.Adopt():
                send(self._order_adoption(effect))
            case fx.Own():
                self.box.base_version[:] = 0
                send(effect)
            case fx.ForgetVersions(_, reset):
                self.epoch += 1
                self.box.base_version[:] = -1
                bodies.outgoing.clear()
                bodies.feedback.forget_all()
                bodies.shards.forget_arrivals()
                send(ForgetOrder(self.epoch, reset))
            case fx.Fetch(fragment, _):
                (bodies if self._ranks is None else self._ranks).fetch(fragment)
            case fx.Upload(number, attempt, fragment):
                if self._ranks is None:
                    bodies.upload(number, attempt, fragment)
                else:
                    self._ranks.upload(number, attempt, fragment, base=self._machine.versions[fragment])
            case fx.Settle(fragment, version, t):
                bodies.feedback.settle(fragment, version, t)
            case fx.DropRests(fragment):
                bodies.feedback.drop_rests(fragment)
            case fx.UploadAll():
                bodies.upload_all()
            case fx.Drop(fragment, t):
                bodies.outgoing.drop(fragment, t)

    def _order_adoption(self, adopt: fx.Adopt) -> AdoptOrder:
        unsure, blend = adopt.fragment in self.unsure, self._machine.settings.blend
        order = make_adopt_order(adopt, self.bodies.outgoing, self.bodies.incoming, blend=blend, unsure=unsure)
        if order.rule != adopt.rule and not unsure:
            say(f"the copy to carry on from is gone: fragment {adopt.fragment} is overwritten this once")
        return order
