"""What happens in the training process between two steps: count, adopt what has arrived, copy what was ordered.

The order matters: adopt first, then copy, then (synchronous runs) wait and adopt what was waited for.

On a device copies take time, and two threads keep the next boundary out of it: one tells the courier of a copy the
moment it is in host memory, and the one that reads the courier's frames (courier_process.py) starts to bring a version
the moment it has arrived, so that it is on the device at the next boundary. Both wait without the interpreter's lock.

Adoption takes a new version Θ of a fragment into the model's parameters θ, by one of the rules in adoption/.

The memory that a learner shares with its courier is made when the run's settings are known, or filled from a snapshot.
It outlives a courier: the next one finds counters, versions and the base in it. It is made anew when the run's fragment
plan changes.
"""

from __future__ import annotations

import math
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import msgspec
import torch

from atoll.choices import ADOPT
from atoll.learner.courier_process import CourierProcess, TapeRecorder
from atoll.learner.device_offload import DeviceOffload
from atoll.learner.model import view_piece
from atoll.learner.moments import InnerMoments
from atoll.learner.offload import DeviceCopy, Offload, find_device, make_offload
from atoll.learner.placement import PlacementWish, choose_placement, free_bytes
from atoll.learner.ranks import RankGroup
from atoll.learner.saved_state import fill_box, settings_of
from atoll.learner.script import say
from atoll.learner.trained_model import TrainedModel, as_torch
from atoll.mailbox.box import Mailbox, serves
from atoll.mailbox.channel import (
    BASE,
    AdoptOrder,
    CopyMade,
    ForgetOrder,
    HoldOrder,
    MailboxReady,
    ReadOrder,
    SlotFreed,
    ToTraining,
    VersionTaken,
    Welcomed,
)
from atoll.numerics.codec import make_codec
from atoll.numerics.fragments import FragmentPlan, difference, make_plan
from atoll.numerics.initial import is_halved
from atoll.numerics.rank_plan import choose_senders, make_rank_plan
from atoll.protocol.errors import ConfigError, PlanError
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.effects import Adopted, Stepped
from atoll.protocol.messages import RankBoxes, TensorSpec
from atoll.protocol.settings import Settings
from atoll.protocol.statistics import after_adoption
from atoll.protocol.tape import AdoptedEntry, MomentsEntry, OwnedEntry, shorten_rule


class Boundary:
    def __init__(
        self,
        box: Mailbox,
        settings: Settings,
        parameters: Mapping[str, torch.Tensor],
        courier: CourierProcess,
        tape: TapeRecorder | None = None,
        moments: InnerMoments | None = None,
        prepare: Callable[[], None] | None = None,
        note_adopted: Callable[[Iterable[str]], None] | None = None,
        *,
        is_base: bool = True,
    ) -> None:
        """`moments`: the optimizer's, if shared. `prepare`: called before parameters of a learner of several
        ranks are read or written; its ranks then adopt orders at the same step, and wait for each other if need be.
        `note_adopted`: called with the names of the parameters that were written. `is_base`: whether the model's
        parameters are written as the base. A newcomer's are replaced before they are trained, and writing them takes as
        long as fetching the run's."""
        self.settings, self._moments = settings, moments
        self._prepare: Callable[[], None] = prepare or (lambda: None)
        self._together = prepare is not None
        self._note_adopted: Callable[[Iterable[str]], None] = note_adopted or (lambda names: None)
        self._box, self._courier, self._tape = box, courier, tape or TapeRecorder(courier)
        self._steps, self._tokens = box.steps, box.tokens
        self._parameters = parameters
        self._buffers = [
            [place for place, piece in enumerate(part.pieces) if piece.tensor.buffer_rule]
            for part in box.plan.fragments
        ]
        self._offload = self._make_offload()
        self._t = 0
        self._total = 0
        self._position = -1
        self.epoch = 0
        """Number of orders to forget so far."""
        self._reads: dict[int, ReadOrder] = {}
        self._copying: list[tuple[DeviceCopy, CopyMade]] = []
        self._telling = threading.Lock()
        """Held while copies are taken from that list, so that the courier hears of them in order."""
        self._awaited: queue.SimpleQueue[DeviceCopy | None] = queue.SimpleQueue()
        self._brought: dict[int, DeviceCopy] = {}
        """Versions that are brought before this process has taken the order to adopt them, keyed by slot."""
        self._arriving: list[tuple[DeviceCopy, AdoptOrder]] = []
        self._holds: dict[int, HoldOrder] = {}
        self._copied: dict[int, tuple[int, int]] = {}
        """Step and version at the last copy of each fragment."""
        self._base_copies: dict[int, Future[None]] = {}
        """Copies of bases that a snapshot has not finished, keyed by fragment."""
        self._rounding_error: float | None = None
        """Relative error of a base that was rounded, as long as the model holds the values from before."""
        if is_base:
            self._write_base(rounds=settings.rounds_initial)
        if self._offload.takes_time:
            threading.Thread(target=self._tell_copies, name="atoll-copies", daemon=True).start()
            courier.read_in_background(self._bring, self._offload.enter_thread)

    def _write_base(self, *, rounds: bool) -> None:
        """Make the model's values the base, which is version 0 if the run asks this learner for it. `rounds`: to bf16,
        by the rules of numerics/initial.py. The model keeps its own values until the run has taken version 0: another
        learner may be the one that gives it."""
        lost, whole = 0.0, 0.0
        for part in self._box.plan.fragments:
            for piece, at, own in zip(part.pieces, part.offsets, self._own(part.index), strict=True):
                values = own.detach().to("cpu", torch.float32).contiguous()
                if rounds:
                    rounded = values.to(torch.bfloat16).to(torch.float32) if is_halved(piece.tensor) else values
                    lost += float((rounded - values).square().sum(dtype=torch.float64))
                    whole += float(values.square().sum(dtype=torch.float64))
                    values = rounded
                self._box.write_base(part.index, values.numpy(), at)
        if rounds:
            self._rounding_error = math.sqrt(lost / whole) if whole else 0.0
            if math.isfinite(self._rounding_error):  # else the syncer refuses these parameters
                self._box.set_count("loss_ppb", round(1e9 * self._rounding_error))

    def _make_offload(self) -> Offload:
        if self._box.layout.on_device:
            codec = make_codec(self.settings.codec)
            device = find_device(self._own, self._box.layout.fragments)
            return DeviceOffload(self._box, self._own, device, codec, keeps_copies=self.settings.may_carry)
        return make_offload(self._box, self._own)

    def take_base(self) -> None:
        """Take the base from shared memory: the run's version 0, or the one that a cut kept."""
        self._offload.take_base()

    def hold_bases(self, copies: Sequence[Future[None]]) -> None:
        """Keep every fragment's base as it is until its copy is made: it changes once the courier hears of an
        adoption."""
        self._base_copies = dict(enumerate(copies))

    def _own(self, fragment: int) -> list[torch.Tensor]:
        pieces = self._box.plan.fragments[fragment].pieces
        return [view_piece(self._parameters[piece.tensor.name], piece) for piece in pieces]

    @property
    def recovered(self) -> bool:
        return bool((self._box.adopted >= 0).all())

    def carry_out(self, frame: ToTraining) -> None:
        match frame:
            case ReadOrder():
                self._read(frame)
            case fx.CancelRead(round):
                self._cancel_read(round)
            case AdoptOrder():
                under_way = self._brought.pop(frame.slot, None) or self._start_bringing(frame)
                self._arriving.append((under_way, frame))
            case HoldOrder():
                self._holds[frame.round] = frame
            case fx.LetGo(round):
                self._holds.pop(round, None)
            case fx.Own():
                self._tape.add(OwnedEntry(self._t))
                self.take_base()
                self._take_rounded()
                self._box.adopted[:] = 0
            case ForgetOrder(epoch, reset):
                self._forget(epoch)
                if reset:
                    self._reset_to_base()

    def _take_rounded(self) -> None:
        """Take version 0 into the model, if it is this model rounded. A model that has made steps meanwhile keeps its
        values: what the rounding took away is then part of its first contribution."""
        if (error := self._rounding_error) is None:
            return
        self._reset_to_base()
        self._rounding_error = None
        of = " of this rank" if self._together else ""
        say(f"version 0 is this model{of} rounded to bf16: relative error {error:.2e} (norm of the difference / norm)")

    def continue_from(self, t: int, total: int, position: int) -> None:
        """Go on after this step."""
        self._t, self._total, self._position = t, total, position

    def count_step(self, t: int, tokens: int, total: int = 0, position: int = -1) -> None:
        self.continue_from(t, total, position)
        self._rounding_error = None
        self._steps += 1
        self._tokens += tokens

    def add_tokens(self, tokens: int, *, of_this_life: bool) -> None:
        """Add the tokens of all ranks' last step, which are known later than the step. If that step belongs to a life
        that is over, it was made before this one had the run's parameters: its tokens are dropped."""
        self._total += tokens
        if of_this_life:
            self._tokens += tokens
        else:
            self._box.dropped[:] += tokens

    def _read(self, order: ReadOrder) -> None:
        self._cancel_read(order.round)
        self._reads[order.round] = order

    def _cancel_read(self, round: int) -> None:
        if (order := self._reads.pop(round, None)) is not None:
            self._courier.send(SlotFreed(order.slot, incoming=False))

    # ---- copies -------------------------------------------------------------------------------------------------

    def make_copies(self, t: int) -> None:
        self._t = t
        for round in [r for r, order in self._reads.items() if order.step <= t]:
            self._copy(self._reads.pop(round), t)
        self.send_finished_copies()

    def _copy(self, order: ReadOrder, t: int) -> None:
        f, version = order.fragment, int(self._box.adopted[order.fragment])
        steps, tokens = int(self._box.steps[f]), int(self._box.tokens[f])
        moments = None if self._moments is None else self._moments.encode(f)
        self._prepare()
        under_way = self._offload.read(f, order.slot, t, moments)
        told = (self.epoch, self._total, self._position, under_way.feedback)
        made = CopyMade(order.slot, order.round, f, t, steps, tokens, version, *told)
        self._copying.append((under_way, made))
        if self._offload.takes_time:
            self._awaited.put(under_way)
        self._copied[f] = (t, version)

    def send_finished_copies(self) -> None:
        """Tell the courier of copies that have reached host memory, and of those for which there was no memory."""
        with self._telling:
            while self._copying and self._copying[0][0].done():
                copy, made = self._copying.pop(0)
                if copy.failed:
                    self._copied.pop(made.fragment, None)
                self._courier.send(SlotFreed(made.slot, incoming=False) if copy.failed else made)

    def _tell_copies(self) -> None:
        """Run as a thread that tells the courier as soon as a copy is there. The training thread meets errors of the
        device."""
        self._offload.enter_thread()
        with suppress(RuntimeError):
            while (under_way := self._awaited.get()) is not None:
                under_way.wait()
                self.send_finished_copies()

    def _bring(self, order: AdoptOrder) -> None:
        """Start to bring a version, in the thread that reads the courier's frames, before the order is passed on."""
        self._brought[order.slot] = self._start_bringing(order)

    def _start_bringing(self, order: AdoptOrder) -> DeviceCopy:
        return self._offload.bring(order.fragment, order.slot, moments=order.moments)

    def settle(self) -> None:
        """Wait for the copies under way, then tell the courier."""
        for transfer, _ in list(self._copying):
            transfer.wait()
        self.send_finished_copies()

    # ---- adoptions ----------------------------------------------------------------------------------------------

    def adopt_ready(self, t: int) -> None:
        self._t = t
        waiting = []
        for transfer, order in self._arriving:
            awaited = any(hold.fragment == order.fragment and hold.step <= t for hold in self._holds.values())
            if awaited or (order.step <= t and (self._together or transfer.done())):
                transfer.wait()
                self._take(order)
            else:
                waiting.append((transfer, order))
        self._arriving = waiting

    def _take(self, order: AdoptOrder) -> None:
        """Take a version, book what it drops, and set the fragment's counters to what is left."""
        f, steps, tokens = order.fragment, 0, 0
        read = self._find_subtrahend(order)
        if order.rule == "carry" and read is None:
            say(f"the copy to carry on from is gone: fragment {f} is overwritten this once")
            order = msgspec.structs.replace(order, rule="overwrite", minus=BASE, copy_t=-1)
        if order.rule == "carry":
            steps = int(self._box.steps[f]) - order.minus_steps
            tokens = int(self._box.tokens[f]) - order.minus_tokens
        self._prepare()
        self._rounding_error = None
        self._write(f, self._offload.arrived(f, order.slot), order.rule, blend=order.blend, read=read)
        if order.moments:
            self._take_moments(order, steps)
        self._offload.release(f, order.slot)
        counters = (int(self._box.dropped[f]), int(self._box.missed[f]))
        dropped, missed = after_adoption(int(self._box.tokens[f]), order.held_tokens, tokens, *counters)
        self._box.dropped[f], self._box.missed[f] = dropped, missed
        self._box.steps[f], self._box.tokens[f] = steps, tokens
        self._box.adopted[f] = order.version
        for round in [r for r, hold in self._holds.items() if hold.fragment == f and r <= order.round]:
            del self._holds[round]
        self._tape.add(AdoptedEntry(self._t, f, order.version, shorten_rule(order.rule), order.copy_t))
        adopted = Adopted(f, order.version, self._t, steps, tokens, dropped, missed)
        if (copy := self._base_copies.pop(f, None)) is not None:
            copy.result()
        self._courier.send(VersionTaken(order.slot, adopted, self.epoch))

    def _find_subtrahend(self, order: AdoptOrder) -> list[torch.Tensor] | None:
        """Return what carry subtracts: the copy that the version contains, or the base if it contains none. None: the
        rule subtracts nothing, or the copy is gone."""
        if order.rule != "carry":
            return None
        if order.minus == BASE:
            return self._offload.held_base(order.fragment)
        return self._offload.outgoing(order.fragment, order.minus, order.copy_t)

    def _write(
        self,
        fragment: int,
        new: list[torch.Tensor],
        rule: str = "overwrite",
        *,
        blend: float = 0.0,
        read: list[torch.Tensor] | None = None,
    ) -> None:
        """Write a version into the model by a rule of adoption."""
        own = self._own(fragment)
        adopt(own, new, rule, blend=blend, read=read)
        if held := self._buffers[fragment]:  # taken as they are: carried on, a variance could fall below zero
            adopt([own[place] for place in held], [new[place] for place in held], "overwrite")
        self._note_adopted(piece.tensor.name for piece in self._box.plan.fragments[fragment].pieces)

    def _take_moments(self, order: AdoptOrder, steps: int) -> None:
        """Adopt the averaged moments that came with a version. The courier sends none with a carry that has no copy to
        subtract."""
        assert self._moments is not None, "only learners that share moments get any"
        read = self._offload.outgoing_moments(order.fragment, order.minus) if order.rule == "carry" else None
        averaged = self._offload.arrived_moments(order.fragment, order.slot)
        self._moments.adopt(order.fragment, averaged, order.rule, blend=order.blend, read=read, steps=steps)
        self._tape.add(MomentsEntry(self._t, order.fragment, order.version))

    def is_held(self, t: int) -> bool:
        return any(hold.step <= t for hold in self._holds.values())

    def serve_orders(self, *, over: bool = False) -> None:
        """Serve every order that is due at once, outside of training; after the last step (`over`) serve all."""
        for transfer, order in self._arriving:
            transfer.wait()
            self._take(order)
        self._arriving = []
        for read in list(self._reads.values()):
            if read.step <= self._t or (over and not self._is_copied(read.fragment)):
                self._copy(self._reads.pop(read.round), self._t)
        self.settle()

    def _is_copied(self, fragment: int) -> bool:
        """Return whether another copy would hold the same values as the last one."""
        return self._copied.get(fragment) == (self._t, int(self._box.adopted[fragment]))

    def load_base(self) -> None:
        """Write the run's own values into the model, without steps of this learner: a finished run leaves these."""
        self._prepare()
        for fragment in range(self._box.layout.fragments):
            if self._box.base_version[fragment] >= 0:
                self._write(fragment, self._offload.base(fragment))

    # ---- forgetting ---------------------------------------------------------------------------------------------

    def drop_orders(self) -> None:
        """Drop the orders of a dead courier. The next one starts with every slot free and knows of no copy."""
        with self._telling:
            copying, self._copying = self._copying, []
        for transfer in [*(copy for copy, _ in [*copying, *self._arriving]), *self._brought.values()]:
            transfer.wait()
        self._reads, self._arriving, self._brought, self._holds = {}, [], {}, {}
        self._offload.drop_copies()
        self.epoch = 0

    def _forget(self, epoch: int) -> None:
        self.epoch = epoch
        self._box.adopted[:] = -1
        for row in (self._box.steps, self._box.tokens, self._box.dropped, self._box.missed):
            row[:] = 0  # another life's account
        for round in list(self._reads):
            self._cancel_read(round)
        for transfer, order in self._arriving:
            transfer.wait()
            self._courier.send(SlotFreed(order.slot, incoming=True))
        self._arriving, self._holds = [], {}
        self._offload.drop_copies()

    def _reset_to_base(self) -> None:
        """Write the base into the model, so that broken numbers are gone at once: steps on them would break the fresh
        optimizer again."""
        self._prepare()
        for fragment in range(self._box.layout.fragments):
            self._write(fragment, self._offload.base(fragment))

    def close(self) -> None:
        self._awaited.put(None)
        if self._offload.takes_time:
            self._courier.read_in_background(None)
        self.drop_orders()
        self._offload.close()


# ---- adoption -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def adopt(
    own: list[torch.Tensor],
    new: list[torch.Tensor],
    rule: str,
    *,
    blend: float = 0.0,
    read: list[torch.Tensor] | None = None,
) -> None:
    """Adopt a version in place, computed in fp32 for parameters of any type. A rank may hold nothing of a fragment."""
    if own:
        ADOPT.load(rule).adopt(own, new, blend=blend, read=read)


# ---- the shared memory ----------------------------------------------------------------------------------------------


class SharedMailbox:
    def __init__(
        self,
        trained: TrainedModel,
        courier: CourierProcess,
        tape: TapeRecorder,
        placement: PlacementWish = "auto",
        ranks: RankGroup | None = None,
    ) -> None:
        self._ranks = ranks
        self.boxes: tuple[RankBoxes, ...] = ()
        """Of every rank, where there are several."""
        self._trained, self._courier, self._tape = trained, courier, tape
        self._fingerprint = ""
        """Of the whole model's plan."""
        self._wish, self._made_for = placement, Settings()
        """Where it is to encode; and the settings that the shared memory was made for."""
        self.tensors: tuple[TensorSpec, ...] = ()
        self.box: Mailbox | None = None
        self.boundary: Boundary | None = None
        """Both are there once the run's settings are known; a box that is closed can still be read."""
        self._newest: tuple[int, ...] | None = None
        """The run's versions at the last welcome."""
        self.index = -1
        """This learner's number in the run, as the last welcome said."""
        self.incarnation = 0
        """Number of the life that this process began with; a quarantine or a long absence does not change it."""

    def describe(self) -> None:
        """ConfigError: this model cannot take part."""
        self.tensors = self._trained.describe()
        if self._ranks is not None:
            self.boxes = self._exchange_boxes(self._ranks)

    def _exchange_boxes(self, ranks: RankGroup) -> tuple[RankBoxes, ...]:
        """ConfigError: another rank has another model. All ranks find that, and say it."""
        own = (self.tensors, as_torch(self._trained).find_boxes(ranks.rank))
        told = ranks.gather(own, tuple[tuple[TensorSpec, ...], RankBoxes])
        for rank, (tensors, _) in enumerate(told):
            if (apart := difference(tensors, told[0][0])) is not None:
                raise ConfigError(f"rank {rank} has another model than rank 0: {apart.partition(': ')[2]}")
        return choose_senders([boxes for _, boxes in told])

    def apply_welcome(self, frame: Welcomed) -> bool:
        """The run's settings are known: split the model as they say. True: the courier is to get other memory."""
        self._newest, self.index = frame.versions, frame.index
        self.incarnation = self.incarnation or frame.incarnation
        plan = make_plan(self.tensors, frame.settings.fragments, frame.settings.plan)
        if plan.fingerprint != frame.fingerprint:
            raise PlanError(
                "this version of Atoll makes other fragments of the model than the run's: install the same version"
            )
        if self.box is not None and self.boundary is not None:
            same_plan = self._fingerprint == plan.fingerprint
            if same_plan and serves(self._made_for, frame.settings):
                self.boundary.settings = frame.settings
                return False
            self.close()
        box, _ = self._make(plan, frame.settings, is_base=min(frame.versions, default=-1) < 0)
        box.set_count("incarnation", frame.incarnation)
        return True

    def continue_from(self, place: dict[str, Any]) -> None:
        """As it was when this place (saved_state.py) was saved."""
        settings, self.index = settings_of(place), place.get("index", -1)
        self.incarnation = place["incarnation"]
        plan = make_plan(self.tensors, settings.fragments, settings.plan)
        box, boundary = self._make(plan, settings, is_base=False)
        fill_box(box, place, os.environ.get("ATOLL_RUN", ""))
        boundary.take_base()
        boundary.continue_from(place["t"], place["total"], place["feed"].get("position", -1))

    def _make(self, plan: FragmentPlan, settings: Settings, *, is_base: bool) -> tuple[Mailbox, Boundary]:
        replays, self._fingerprint, prepare = self._courier.replays, plan.fingerprint, None
        if self._ranks is not None:
            plan = make_rank_plan(plan, self.boxes[self._ranks.rank]).plan
            prepare = as_torch(self._trained).reshard
        device = self._trained.device
        moments = self._trained.make_moments(plan) if settings.shares_moments else None
        case = {"replays": replays, "ranks": self._ranks is not None}
        placement = choose_placement(self._wish, device, plan, settings, free_bytes(device), **case)
        if placement.text:
            say(placement.text)
        how = {"on_device": placement.on_device, "ranks": self._ranks is not None}
        self.box, self._made_for = Mailbox.create(plan, settings, **how), settings
        using = (self._courier, self._tape, moments, prepare, self._trained.note_adopted)
        self.boundary = Boundary(self.box, settings, self._trained.tensors(), *using, is_base=is_base)
        return self.box, self.boundary

    def hand_to_courier(self, stepped: Stepped, *, sure: bool = False, waits: bool = False) -> None:
        """To the courier, if there is anything yet."""
        if self.box is not None and self.boundary is not None:
            on_device = self.box.layout.on_device
            ready = MailboxReady(self._made_for, stepped, sure, waits=waits, on_device=on_device)
            self._courier.send(ready, self.box.fd)

    def has_parameters(self) -> bool:
        """What the run had when this learner was welcomed."""
        if self.boundary is None or self.box is None or self._newest is None or not self.boundary.recovered:
            return False
        return all(held >= newest for held, newest in zip(self.box.adopted.tolist(), self._newest, strict=False))

    def unmerged(self) -> bool:
        """There are steps that no version holds yet."""
        return self.box is not None and bool(self.box.steps.any())

    def counters(self) -> dict[str, tuple[int, ...]]:
        """Steps, tokens, and dropped and missed tokens of every fragment."""
        if (box := self.box) is None:
            return {"steps": (), "tokens": (), "dropped": (), "missed": ()}
        rows = {"steps": box.steps, "tokens": box.tokens, "dropped": box.dropped, "missed": box.missed}
        return {name: tuple(row.tolist()) for name, row in rows.items()}

    def close(self) -> None:
        if self.boundary is not None:
            self.boundary.close()
        if self.box is not None:
            self.box.close()
        self.boundary = None
