"""A run that has begun: the parts that are made of its model, and which of them carries out an effect.

`service.py` is the way of an event to the state machine; this is the way of its effects to whoever carries them out,
in this process or, where the syncer has several shards, in all of them:

- `contributions`: their bodies, and the versions made of them; `relays`: those that came as sums;
- `first_parameters`: version 0; `ranks`: what each rank of a learner of several holds, and fetches;
- `run_store`: cuts, and the values of a rollback; `lead`: the other shards.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from atoll.choices import CODEC
from atoll.config import Outer
from atoll.fabric.control_channel import ControlChannel, SharedAnnouncement
from atoll.fabric.wire import MIB
from atoll.numerics.codec import body_nbytes, largest_body, make_codec
from atoll.numerics.fragments import FragmentPlan
from atoll.numerics.group_sums import why_not_summed
from atoll.numerics.shard_plan import make_shard_plan
from atoll.protocol import schedule
from atoll.protocol.messages import FromSyncer, Pull, Welcome
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer
from atoll.syncer.contributions import Inbox, Merging, make_screen, most_steps
from atoll.syncer.first_parameters import FirstParameters, FirstUpload
from atoll.syncer.lead import ShardLead
from atoll.syncer.model import Model, contribution_bytes, moments_room
from atoll.syncer.ranks import LearnerRanks
from atoll.syncer.recovery import outer_of
from atoll.syncer.relays import RelaySums
from atoll.syncer.run_store import CutWriter, Restorer, RunStore
from atoll.telemetry.events import EventLog


class BegunRun:
    """Belongs to one event loop."""

    def __init__(
        self,
        model: Model,
        *,
        run_store: RunStore,
        events: EventLog,
        channels: dict[str, ControlChannel],
        relays: RelaySums,
        lead: ShardLead | None,
        round_memory_mib: int,
        handle: Callable[[fx.SyncerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`channels`: of the connected learners, as they are; `lead`: None in a syncer of one process."""
        history, settings = model.history, model.history.settings
        outer = outer_of(history)
        self.model, self.parameters = model, model.parameters
        self._channels, self._relays, self._lead, self._handle = channels, relays, lead, handle
        self._announcement = SharedAnnouncement()
        codec = make_codec(settings.codec, self.parameters.threads)
        self.inbox = Inbox(self.parameters.plan, codec, moments=settings.shares_moments)
        declare = (lambda *ranks: None) if lead is None else lead.declare_ranks
        self.ranks = LearnerRanks(self.parameters.plan, model.plan, declare)
        self.screen = make_screen(model.plan, settings, outer.norm_limit, feedback=codec.needs_feedback)
        self.merging = Merging(self.parameters, self.inbox, self.screen, outer.robust, handle, spawn)
        self.merging.relays, self.merging.sync_every = relays, settings.sync_every
        relays.begin(self.inbox, model.plan, codec, self.parameters.threads)
        self._set_relays(outer, settings)
        self._cuts = CutWriter(run_store, self.parameters, history.run, handle, spawn)
        self._restorer = Restorer(run_store, self.parameters, handle, spawn)
        self.machine = Syncer(history)
        self._size_rounds(settings, round_memory_mib * MIB)
        first = FirstParameters(self.parameters, lambda: self.machine.phase == "empty")
        self.first = FirstUpload(first, self.ranks, channels, events, handle, lead)

    def join_shards(self) -> None:
        """Tell the other shards, if there are any. What they answer at once needs the run in its place already."""
        if self._lead is not None:
            settings, shards = self.model.history.settings, self.model.history.begun.shards
            plan = make_shard_plan(self.model.plan, shards, (settings.codec, settings.version_codec))
            self._lead.set_up(self.model, self.inbox, self.screen, self.merging, self._cuts, plan)

    def _size_rounds(self, settings: Settings, budget_bytes: int) -> None:
        """Tell the state machine how large bodies are: on the links and in memory."""
        interval, plan = self.machine.rounds.interval, self.model.plan
        moments = moments_room(plan, settings)
        interval.bodies = {name: largest_body(make_codec(name), plan) + moments for name in CODEC.names()}
        interval.up_bytes = _mean_body(settings.codec, plan) + moments
        interval.down_bytes = _mean_body(settings.version_codec, plan) + moments
        interval.contribution_bytes = contribution_bytes(plan, settings)
        interval.budget_bytes = budget_bytes

    def _set_relays(self, outer: Outer, settings: Settings) -> None:
        """Whether relays sum what they hold, by these settings."""
        why_not = why_not_summed(
            outer.merge, self.parameters.plan, robust=outer.robust, moments=settings.shares_moments
        )
        self._relays.set_mode(outer.merge, why_not)

    # ---- effects ------------------------------------------------------------------------------------------------

    def carry_out(self, effect: fx.SyncerEffect) -> None:
        """All but what is told to people, and the run's end."""
        if self._lead is not None and (self._lead.hold(effect) or self._carry_out_with_shards(self._lead, effect)):
            return
        match effect:
            case fx.Send(learner, message):
                self._send(learner, message)
            case fx.ConfirmSent(number, attempt, probed):
                self._handle(fx.PullsSent(number, attempt, probed))
            case fx.Merge():
                self.merging.merge_round(effect)
            case fx.Commit(number, fragment, version):
                self.parameters.commit_version(fragment, version, number)
                self._relays.settle_round(number, merged=True)
            case fx.Restore():
                self._restorer.prepare_values(effect)
            case fx.CommitRestored(versions, at):
                self._restorer.commit_values(versions, at)
            case fx.Retune(outer):
                self._retune(msgspec.convert(outer, Outer))
            case fx.TakeCut():
                self._cuts.take_cut(effect)
            case fx.CompleteCut():
                self._cuts.complete_cut(effect)
            case fx.Discard(learner, number, attempt):
                self.merging.discard((learner, number, attempt))
            case fx.Expel(learner, reason):
                if (channel := self._channels.pop(learner, None)) is not None:
                    self.ranks.remove_learner(learner)
                    channel.close(reason)

    def _carry_out_with_shards(self, lead: ShardLead, effect: fx.SyncerEffect) -> bool:
        """Whether that is all that there is to do."""
        match effect:
            case fx.Persist(found):
                lead.note_records(found)
            case fx.Merge():
                lead.merge(effect)
            case fx.TakeCut():
                lead.take_cut(effect)
            case fx.CompleteCut():
                lead.complete_cut(effect)
            case fx.Discard(learner, number, attempt):
                lead.discard((learner, number, attempt))
                return False
            case _:
                return False
        return True

    async def write_first_cut(self, cut: fx.TakeCut) -> None:
        await (self._cuts.write_first(cut) if self._lead is None else self._lead.write_first_cut(cut))

    def _send(self, learner: str, message: FromSyncer) -> None:
        channel = self._channels.get(learner)
        if isinstance(message, Pull):
            key, plans = (learner, message.round, message.attempt), self.ranks.plans_of(learner)
            self.inbox.expect_body(key, message.fragment, probe=message.probe, plans=plans)
            if self._lead is not None and channel is not None:
                self._lead.expect_body(learner, channel.session, channel.token, message)
        elif isinstance(message, Welcome) and message.upload and channel is not None:
            self.first.ask_learner(channel)
        if self._lead is not None and isinstance(message, Welcome):
            message = self._lead.address_shards(message)
        if channel is not None:
            channel.send_encoded(self._announcement.encode(learner, message))

    def _retune(self, outer: Outer) -> None:
        settings = self.machine.settings
        self.parameters.change_outer(outer)
        self.screen.limit, self.merging.robust = outer.norm_limit, outer.robust
        self.screen.most_steps, self.merging.sync_every = most_steps(settings), settings.sync_every
        self._set_relays(outer, settings)

    def payload_of(self, persist: fx.Persist) -> memoryview | None:
        """What the journal keeps beside the records of a round, or of a rollback."""
        if persist.restored:
            return self._restorer.packed.data
        if persist.round < 0:
            return None
        return self.parameters.round_payload(schedule.fragment_of(persist.round, self.machine.settings))


def _mean_body(codec: str, plan: FragmentPlan) -> float:
    """Bytes of one fragment by this codec, averaged over the fragments."""
    return sum(body_nbytes(make_codec(codec), part) for part in plan.fragments) / len(plan.fragments)
