"""A simulated learner of several ranks (docs/adr/0030): rank 0's courier leads with the learner's state machine, as
courier/service.py does; the others follow it over channels that keep their order and may be late.

The slots, the leader's orders, what all ranks have said and what they agree on between two steps are the product's own
(courier/slots.py, rank_orders.py, rank_events.py, learner/meeting.py). Ranks make their steps together, as collectives
make real ones. A rank that dies ends the learner: until the leader notices, its other ranks stand still.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from atoll.courier.rank_channel import FetchPart, PartFetched, PartUploaded, UploadPart
from atoll.courier.rank_events import Said, SaidByAll
from atoll.courier.rank_orders import FetchAgain, RankOrders
from atoll.courier.slots import SLOT_S, IncomingSlots, OutgoingSlots, make_adopt_order
from atoll.digests import compute_digest
from atoll.learner.meeting import AgreedFacts, Meeting, agree_on
from atoll.mailbox.channel import (
    AdoptOrder,
    CopyMade,
    ForgetOrder,
    Goodbye,
    HoldOrder,
    SlotFreed,
    StepReport,
    StopOrder,
    ToTraining,
    VersionTaken,
    is_counted,
)
from atoll.protocol import schedule
from atoll.protocol.learner import effects as fx
from atoll.protocol.messages import RankBoxes
from atoll.simulate.cells import CellModel, Cells, front_of, join_parts
from atoll.simulate.simulated_learner import MUTE_S, LearnerWorld, SimulatedLearner
from atoll.simulate.simulated_rank import FromRank, ReadFact, SentPart, SimulatedRank
from atoll.simulate.training import Copy, Payload

BASE_REPLACED = "the version it was made on is being replaced"
MOST_SENDING = 256
"""Answers that are remembered while some rank may still send its part."""
NOTICE_S = 0.5
"""Until the leader knows that a rank is gone."""


class RankLayout(NamedTuple):
    """How the ranks of a learner share the model, and what memory and time they have."""

    boxes: tuple[RankBoxes, ...]
    delay_s: float
    """The most that a frame takes between two couriers."""
    most_copies: int
    """Slots for copies that there is memory for."""


class RankNetwork(Protocol):
    def send_part(
        self, learner: RankedLearner, rank: int, order: UploadPart, part: SentPart, told: Callable[[str], object]
    ) -> None: ...

    def fetch_part(
        self, learner: RankedLearner, rank: int, fragment: int, told: Callable[[int, Cells | str], object]
    ) -> None: ...

    def send_initial_parts(self, learner: RankedLearner) -> None: ...


class RankChecks(Protocol):
    def watch_slot(self, learner: RankedLearner, rank: int, order: UploadPart, read: ReadFact) -> None: ...

    def watch_rank(self, learner: RankedLearner, rank: int, done: str) -> None: ...

    def watch_tokens(self, learner: RankedLearner) -> None: ...

    def watch_disagreement(self, learner: RankedLearner, error: Exception) -> None: ...

    def watch_rank_adoption(self, learner: RankedLearner, rank: int, order: AdoptOrder) -> None: ...


class RankedWorld(LearnerWorld, Protocol):
    """What a learner of several ranks needs of the world around it."""

    @property
    def rank_network(self) -> RankNetwork: ...

    @property
    def rank_checks(self) -> RankChecks: ...

    def draw_delay(self, most_s: float) -> float: ...

    def on_handled(self, machine: type, node: str, event: object, effects: Sequence[object]) -> None: ...

    def on_supply(self, learner: RankedLearner, supply: fx.Supply) -> None: ...

    def on_final_stop(self, learner: RankedLearner, rank: int, adopted: Sequence[int]) -> None: ...


class RankedLearner(SimulatedLearner):
    world: RankedWorld

    def __init__(
        self,
        world: RankedWorld,
        name: str,
        session: str,
        step_s: float,
        gradient: Callable[[int], float],
        model: CellModel,
        layout: RankLayout,
        *,
        restored: bool = False,
        data: fx.Registered | None = None,
    ) -> None:
        self.layout, self.model = layout, model
        self.plans = model.make_plans(layout.boxes)
        self.ranks: list[SimulatedRank] = []
        self._epoch = 0
        self._lives = {0: 0}
        """Incarnation that begins with each epoch."""
        self._pending: AgreedFacts | None = None
        """The exchange that was begun last, where nobody has taken what it says."""
        self._frames: deque[StepReport | FromRank | Goodbye] = deque()
        """Of rank 0's training process, not handled yet."""
        self._adopting: VersionTaken | None = None
        """Those wait until an adopted version is the base, in all ranks."""
        self._unheard: list[tuple[int, Said]] = []
        """What couriers said while the host stood still."""
        self._arrive_at: dict[tuple[int, str], float] = {}
        self._fetching: deque[int] = deque()
        """Fragments that wait for a slot."""
        self._wants_slot = False
        self.gone_rank: int | None = None
        self._sending: dict[int, Payload] = {}
        """By ask: what is said of the answers that are on their way."""
        super().__init__(
            world,
            name,
            session,
            step_s,
            gradient,
            restored=restored,
            data=data,
            tensors=model.tensors,
            ranks=layout.boxes,
        )
        self._share_counters()

    def set_first_weights(self, value: float) -> None:
        super().set_first_weights(value)
        count = len(self.plans)
        whole = [one for one in self.theta if isinstance(one, Cells)]
        each = [self.tokens_per_step // count + (rank < self.tokens_per_step % count) for rank in range(count)]
        self.ranks = [SimulatedRank(self, rank, self.plans[rank], whole, each[rank]) for rank in range(count)]
        self._share_counters()
        self.outgoing = OutgoingSlots([], reserve=lambda slot: slot < self.layout.most_copies)
        self.incoming = IncomingSlots(2, reserve=lambda slot: True)
        self.orders = RankOrders(count)
        self.orders.use_slots(self.outgoing, self.incoming)

    def _share_counters(self) -> None:
        """Rank 0's count."""
        first = self.ranks[0]
        self.adopted, self.steps, self.tokens = first.adopted, first.steps, first.tokens
        self.dropped, self.missed = first.dropped, first.missed

    @property
    def lease_position(self) -> int:
        return self.leased.position if self.leased is not None else -1

    # ---- the loop: between two steps ----------------------------------------------------------------------------

    def count_step(self) -> None:
        down = self.gradient(self.t)
        assert isinstance(down, Cells)
        for rank in self.ranks:
            rank.count_step(down)

    def listen(self, *, stepped: bool) -> None:
        """What the last exchange said holds from now on. Only who waits anyway waits for this one."""
        self._apply(self._pending)
        facts = [rank.make_facts(stepped) for rank in self.ranks]
        self._pending = agree_on(facts)
        self.world.on_handled(Meeting, self.session, "agree", (*facts, self._pending))
        if not stepped or self.world.settings.synchronous:
            self._finish_exchange()
        for rank in self.ranks:
            rank.carry_out_agreed()
        if stepped and (self.done or self.leaving.why):
            self._finish_exchange()  # the last copies know of all tokens

    def _finish_exchange(self) -> None:
        self._apply(self._pending)
        self._pending = None

    def _apply(self, agreed: AgreedFacts | None) -> None:
        if agreed is not None:
            self.tokens_total += agreed.tokens
            for rank in self.ranks:
                rank.add_tokens(agreed.tokens, of_this_life=rank.meeting.take_facts(agreed))
            self.world.rank_checks.watch_tokens(self)

    def on_agreed(self, rank: int, frames: list[ToTraining]) -> None:
        """Take note of the frames that a rank carries out now."""
        if frames:
            self.world.on_handled(Meeting, self.session, rank, frames)

    def _stop_if_done(self) -> bool:
        if self.done or self.leaving.why:
            self._finish_exchange()
        return super()._stop_if_done()

    def stands_still(self) -> bool:
        return self.gone_rank is not None or super().stands_still()

    def holding(self, fragment: int | None = None) -> bool:
        return self.ranks[0].holding(self.t, fragment)

    def adopt_arrived(self) -> None:
        for rank in self.ranks:
            rank.adopt_ready(self.t, stopped=self.stopped or not self.training)

    def make_copies(self) -> None:
        for rank in self.ranks:
            rank.make_copies(self.t, stopped=self.stopped)

    def hear_order(self, frame: ToTraining) -> None:
        """Of an order that all ranks carry out, what concerns the loop and the data."""
        match frame:
            case fx.Supply():
                if self.ranks[0].epoch == self._epoch:  # else it is of a life that is over
                    self.world.on_supply(self, frame)
                self._supply(frame)
            case fx.HoldBack():
                self.held_back = True
            case fx.BeginTraining():
                self.held_back = False
            case fx.AskToLeave(reason):
                self.leave(reason)
            case StopOrder(final=final):
                self.stop(final, failed=False)
            case fx.Own():
                self.plain = self.plain and all(rank.theta == rank.base for rank in self.ranks)
            case ForgetOrder(epoch, reset):
                self.life = self._lives[epoch]
                if reset:
                    self.broken, self.moments = False, 0
                if self.leased is not None:
                    self.leased.forget()
            case _:
                pass

    def stop(self, final: bool, failed: bool) -> object:
        for rank in self.ranks:
            rank.holds.clear()
        return super().stop(final, failed)

    def watch_rank(self, rank: int, done: str) -> None:
        self.world.rank_checks.watch_rank(self, rank, f"{done} after step {self.t}")

    def watch_save(self, epoch: int, cut: int) -> None:
        self.world.on_save(self, cut, self._lives[epoch])

    def watch_final_stop(self, rank: int, adopted: Sequence[int]) -> None:
        self.world.on_final_stop(self, rank, adopted)

    def watch_rank_adoption(self, rank: int, order: AdoptOrder, dropped: int) -> None:
        self.world.rank_checks.watch_rank_adoption(self, rank, order)
        self.plain = self.plain and order.rule != "blend"
        if rank == 0:
            copy_t = order.copy_t if order.copy_t >= 0 else None
            counted = (order.round, order.rule, order.step, copy_t, order.held_tokens)
            whole = self._join([one.incoming.get(order.slot) for one in self.ranks], order.fragment)
            self.world.on_adoption(self, fx.Adopt(order.fragment, order.version, *counted), whole, dropped)

    def _join(self, parts: list[Cells | None], fragment: int) -> Cells:
        """What nobody has is NaN."""
        sent = {
            rank: front_of(self.plans[rank], fragment, part)
            for rank, part in enumerate(parts)
            if part is not None and self.plans[rank].sent(fragment).size
        }
        return join_parts(self.plans, fragment, sent)

    # ---- what ranks say to the leader ---------------------------------------------------------------------------

    def tell_courier(self, rank: int, frame: FromRank) -> None:
        if isinstance(frame, fx.Saved) and not self.saves:
            return
        if rank == 0:
            self._frames.append(frame)
            self._handle_frames()
            return
        if isinstance(frame, VersionTaken):
            self.ranks[rank].take_into_base(frame)
        self._say_to_leader(rank, frame)

    def handle_event(self, event: fx.LearnerEvent, least: float = 0.0) -> object:
        """Rank 0's reports wait for their turn among its frames."""
        if isinstance(event, fx.Stepped):
            self._frames.append(StepReport(event, self.ranks[0].epoch))
            self._handle_frames()
            return None
        return super().handle_event(event, least)

    def _handle_frames(self) -> None:
        while self._frames and self._adopting is None:
            frame = self._frames.popleft()
            match frame:
                case StepReport(stepped, epoch):
                    if epoch == self._epoch:
                        super().handle_event(stepped)
                case Goodbye():
                    super().leave_now()
                case VersionTaken():
                    self._adopting = frame if frame.epoch == self._epoch else None
                    self.ranks[0].take_into_base(frame)
                    self._hear(0, frame)
                case _:
                    self._hear(0, frame)

    def leave_now(self) -> None:
        """The courier says goodbye once it has dealt with all that came before."""
        if not any(isinstance(frame, Goodbye) for frame in self._frames):
            self._frames.append(Goodbye(self.leaving.why))
            self._handle_frames()

    def _say_to_leader(self, rank: int, said: Said) -> None:
        if rank == 0:
            self._hear(0, said)
        else:
            self._send_late(rank, "up", self._hear, rank, said)

    def _send_late(self, rank: int, way: str, action: Callable[..., object], *arguments: object) -> None:
        """In order: not before what was sent before it."""
        queue, key = self.world.queue, (rank, way)
        at = queue.now + self.ranks[rank].lag_s + self.world.draw_delay(self.layout.delay_s)
        self._arrive_at[key] = at = max(at, self._arrive_at.get(key, 0.0))
        queue.call_at(at, action, *arguments)

    def _hear(self, rank: int, said: Said) -> object:
        if not self.alive or self.gone_rank == rank:
            return False
        if self.frozen:
            self._unheard.append((rank, said))
            return None
        try:
            whole = self.orders.take_answer(rank, said)
        except Exception as error:
            self.world.rank_checks.watch_disagreement(self, error)
            raise
        self._on_ordered((rank, said), whole)
        self._take_whole(whole)
        for order in self.outgoing.order_waiting():
            self._send(order)
        self._fetch_waiting()
        return None

    def _take_whole(self, whole: SaidByAll | fx.LearnerEvent | FetchAgain | None) -> None:
        """What all ranks have done."""
        match whole:
            case FetchAgain(order, ranks):
                for rank in ranks:
                    self._order(rank, order)
            case CopyMade():
                self._take_copy(whole)
            case VersionTaken():
                self._finish_adoption(whole)
            case SlotFreed(slot, incoming):
                self._free(slot, incoming)
            case fx.Fetched(fragment):
                super().handle_event(whole)
                self.incoming.release_unwanted(fragment)
            case fx.Saved():
                self.world.queue.call_later(self.world.network.delay(), super().handle_event, whole)
            case fx.Uploaded() | fx.UploadFailed() | fx.FetchFailed():
                super().handle_event(whole)
            case _:
                pass

    def _free(self, slot: int, incoming: bool) -> None:
        if incoming:
            self.incoming.give_back(slot)
        else:
            self.outgoing.free.append(slot)

    def _take_copy(self, made: CopyMade) -> None:
        if made.epoch != self._epoch:
            self._free(made.slot, incoming=False)
            return
        self.outgoing.add_copy(made.fragment, made.t, made.slot, made.steps, made.tokens)
        counters = (made.t, made.steps, made.tokens, made.base, made.total, made.position)
        fact = fx.Copied(made.round, made.fragment, *counters)
        self.copies[made.fragment, made.t] = Copy(0.0, 0.0, fact)
        super().handle_event(fact)
        self._drop_released()

    def _finish_adoption(self, taken: VersionTaken) -> None:
        if taken is self._adopting:
            self._adopting = None
        if taken.epoch != self._epoch:
            self._free(taken.slot, incoming=True)
        else:
            f = taken.adopted.fragment
            self.base[f] = self._join([rank.base[f] for rank in self.ranks], f)
            self.incoming.give_back(taken.slot)
            self.outgoing.adopted(f)
            super().handle_event(taken.adopted)
            self._drop_released()
        self.world.queue.call_later(0.0, self._handle_frames)

    def _drop_released(self) -> None:
        for key in self.copies.keys() - self.outgoing.copies.keys():
            del self.copies[key]

    # ---- what the leader orders ---------------------------------------------------------------------------------

    def carry_out(self, effect: fx.LearnerEffect) -> None:
        match effect:
            case fx.Read(step=step):
                urgent = self.machine.settings.synchronous or step <= self.machine.t
                if (order := self.outgoing.order_read(effect, urgent=urgent)) is not None:
                    self._send(order)
            case fx.Hold(number, step):
                self._send(HoldOrder(number, schedule.fragment_of(number, self.machine.settings), step))
            case fx.Adopt():
                blend = self.machine.settings.blend
                self._send(make_adopt_order(effect, self.outgoing, self.incoming, blend=blend))
            case fx.Own():
                self.world.on_own(self)
                self._send(effect)
            case fx.ForgetVersions(reset=reset):
                self._epoch += 1
                self._lives[self._epoch] = self.machine.incarnation
                self.outgoing.clear()
                self._send(ForgetOrder(self._epoch, reset))
            case fx.CancelRead(number):
                self.outgoing.cancel_waiting(number)
                self._send(effect)
            case fx.LetGo() | fx.Supply() | fx.Save() | fx.AskToLeave() | fx.HoldBack() | fx.BeginTraining():
                self._send(effect)
            case fx.Stop(reason, final, failed):
                if failed:
                    super().carry_out(effect)
                else:
                    self._send(StopOrder(reason, final))
            case fx.Fetch(fragment):
                self._fetch(fragment)
            case fx.Upload(number, attempt, fragment):
                self._upload(number, attempt, fragment)
            case fx.Drop(fragment, t):
                self.outgoing.drop(fragment, t)
            case fx.UploadAll():
                self.world.rank_network.send_initial_parts(self)
            case _:
                super().carry_out(effect)
        self._drop_released()

    def _on_ordered(self, event: object, *orders: object) -> None:
        self.world.on_handled(RankOrders, self.session, event, orders)

    def _send(self, frame: ToTraining) -> None:
        """To all ranks; they carry it out once all have it."""
        assert is_counted(frame)
        self._on_ordered("send", frame)
        self.ranks[0].take_frame(frame)
        for rank in self.ranks[1:]:
            self._send_late(rank.rank, "down", self._arrive, rank, frame)
        self.wake_soon()

    def _arrive(self, rank: SimulatedRank, frame: ToTraining) -> object:
        if not self.alive or rank.rank == self.gone_rank:
            return False
        rank.take_frame(frame)
        self.wake_soon()
        return None

    def _order(self, rank: int, order: UploadPart | FetchPart) -> None:
        """What the training processes have no part in."""
        if rank == 0:
            self._obey(0, order)
        else:
            self._send_late(rank, "down", self._obey, rank, order)

    def _obey(self, rank: int, order: UploadPart | FetchPart) -> object:
        if not self.alive or rank == self.gone_rank:
            return False
        if isinstance(order, UploadPart):
            self._upload_part(rank, order)
        else:
            self._fetch_part(rank, order)
        return None

    def _upload(self, number: int, attempt: int, fragment: int) -> None:
        order = self.orders.order_upload(number, attempt, fragment, base=self.machine.versions[fragment])
        self._on_ordered("upload", order)
        if isinstance(order, fx.UploadFailed):
            super().handle_event(order)
            return
        fact = self.copies[fragment, order.t].fact
        self.world.on_contribution_sent(self, fact)
        self._sending[order.ask] = Payload(self.session, self.machine.incarnation, fact, 0.0, self.plain)
        self._sending.pop(order.ask - MOST_SENDING, None)
        for rank in range(len(self.ranks)):
            self._order(rank, order)

    def _upload_part(self, rank: int, order: UploadPart) -> None:
        held = self.ranks[rank]
        if held.base_version[order.fragment] != order.base:
            self._say_to_leader(rank, PartUploaded(order.ask, reason=BASE_REPLACED))
            return
        if not held.plan.sent(order.fragment).size:
            self._say_to_leader(rank, PartUploaded(order.ask))
            return
        if not self.answers:
            failed = PartUploaded(order.ask, reason="it got stuck")
            self.world.queue.call_later(MUTE_S, self._say_to_leader, rank, failed)
            return
        base = held.base[order.fragment]
        encode_s = self.layout.delay_s * (1 + rank) + held.lag_s
        self.world.queue.call_later(encode_s, self._encode_part, rank, order, base)

    def _encode_part(self, rank: int, order: UploadPart, base: Cells) -> object:
        """By a thread, which reads the slot until it is done: if it was used again by then, that shows."""
        if not self.alive or rank == self.gone_rank or order.ask not in self._sending:
            return False
        held = self.ranks[rank]
        self.world.rank_checks.watch_slot(self, rank, order, held.outgoing[order.slot][0])
        read, delta = held.find_delta(order.fragment, order.slot, base)
        delta = float("nan") * delta if self.broken else delta
        part = SentPart(read, delta, compute_digest(delta.values.tobytes()), self._sending[order.ask])

        def told(reason: str) -> None:
            self._say_to_leader(rank, PartUploaded(order.ask, () if reason else ((1, part.digest),), reason))

        self.world.rank_network.send_part(self, rank, order, part, told)
        return None

    def _fetch(self, fragment: int) -> None:
        """Into the next slot that is free; those that wait get one in their order."""
        self._fetching.append(fragment)
        self._fetch_waiting()

    def _fetch_waiting(self) -> None:
        while self._fetching and (slot := self.incoming.take_free()) is not None:
            order = self.orders.order_fetch(self._fetching.popleft(), slot)
            self._on_ordered("fetch", order)
            for rank in range(len(self.ranks)):
                self._order(rank, order)
        if self._fetching and not self._wants_slot:
            self._wants_slot = True
            self.world.queue.call_later(SLOT_S, self._want_slot)

    def _want_slot(self) -> object:
        self._wants_slot = False
        if not self.alive or not self._fetching:
            return False
        self.incoming.add_slot_if_held_up()
        self._fetch_waiting()
        return None

    def _fetch_part(self, rank: int, order: FetchPart) -> None:
        if not self.plans[rank].plan.fragments[order.fragment].size:
            self.ranks[rank].incoming[order.slot] = self.ranks[rank].base[order.fragment]
            self._say_to_leader(rank, PartFetched(order.fragment))
            return

        def told(version: int, found: Cells | str) -> None:
            if isinstance(found, str):
                self._say_to_leader(rank, PartFetched(order.fragment, reason=found))
            else:
                self.ranks[rank].incoming[order.slot] = found
                self._say_to_leader(rank, PartFetched(order.fragment, version))

        self.world.rank_network.fetch_part(self, rank, order.fragment, told)

    # ---- what happens to its hosts ------------------------------------------------------------------------------

    def resume_host(self) -> None:
        super().resume_host()
        heard, self._unheard = self._unheard, []
        for rank, said in heard:
            self._hear(rank, said)

    def lose_rank(self, rank: int, then: Callable[[], object]) -> object:
        """Its process dies. Rank 0's courier notices, says goodbye and ends the learner."""
        if not self.alive or self.gone_rank is not None:
            return False
        self.gone_rank = rank
        self.world.queue.call_later(NOTICE_S if rank else 0.0, self._end_learner, then)
        return None

    def _end_learner(self, then: Callable[[], object]) -> object:
        if not self.alive:
            return False
        self.world.network.say_goodbye(self, f"rank {self.gone_rank} of {self.name} is lost: its courier is gone")
        self.world.end_process(self)
        then()
        return None
