"""The run's first parameters, version 0: from whom they come, and when all of them are here.

- They come from one learner at a time, in one of its sessions. If it dies on the way, or sends numbers that are not
  finite, another one is asked, and what the first sent counts for nothing.
- They come as values, or in 2 bytes a value where nothing is lost by it (numerics/initial.py). A body in that form is
  kept as it came, for the learners that fetch version 0.
- Of a learner of several ranks they come as parts, which are put together here. In a syncer of several shards
  (docs/adr/0031) each shard gets its part of every fragment; all of them have to be whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from atoll.digests import compute_digest
from atoll.fabric.control_channel import ControlChannel
from atoll.fabric.wire import SMALL_BYTES, digest_aside
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import Fragment
from atoll.numerics.initial import count_initial_bytes, decode_initial, encode_initial
from atoll.numerics.rank_plan import RankPlan
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Refused
from atoll.protocol.shard_messages import InitialHere
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.downloads import Download
from atoll.syncer.lead import ShardLead
from atoll.syncer.parameters import Parameters
from atoll.syncer.ranks import LearnerRanks
from atoll.syncer.versions import CodedVersion, is_finite
from atoll.telemetry.events import EventLog


class AssembledFragment(NamedTuple):
    """Of first parameters that come as parts of ranks."""

    values: FloatArray
    begun: set[int]
    """Ranks whose parts are put into it …"""
    here: set[int]
    """… and those whose parts are in it."""


class InitialBody(NamedTuple):
    """Body of version 0: of a whole fragment, or of what one rank sends of it."""

    values: FloatArray
    digest: str
    """Digest of the values."""
    finite: bool
    coded: CodedVersion | None = None
    """The same in 2 bytes a value; None: it has no such form, or is a part."""


class FirstParameters:
    def __init__(self, parameters: Parameters, are_wanted: Callable[[], bool] = lambda: True) -> None:
        self._parameters, self._are_wanted = parameters, are_wanted
        self._asked = ("", "")
        """The learner and its session."""
        self._here: set[int] = set()
        """Fragments that have arrived."""
        self._assembled: dict[int, AssembledFragment] = {}
        """Those that come as parts of ranks."""

    def ask_learner(self, learner: str, session: str) -> None:
        self._asked = (learner, session)
        # What another learner sent is not used. Of an empty part (docs/adr/0031) nothing comes.
        self._here = {part.index for part in self._parameters.plan.fragments if not part.size}
        self._assembled.clear()
        if self.is_complete:
            self._parameters.commit_initial()

    def is_asked(self, learner: str, session: str) -> bool:
        return self._are_wanted() and (learner, session) == self._asked

    def make_room(self, fragment: int, plan: RankPlan | None = None, codec: str = "") -> memoryview:
        """Where a body is received: apart from the parameters, since one that is no longer asked may still send.
        `plan`: of the rank whose part it is; None: it is the whole. `codec`: its form."""
        if fragment >= len(self._parameters.plan.fragments):
            raise PeerError(f"there is no fragment {fragment}")
        part = self._part_of(fragment, plan)
        if not part.size:
            who = "this rank sends" if plan is not None else "this shard holds"
            raise PeerError(f"{who} nothing of fragment {fragment}")
        return np.empty(count_initial_bytes(part) if codec else 4 * part.size, np.uint8).data

    def _part_of(self, fragment: int, plan: RankPlan | None) -> Fragment:
        return self._parameters.plan.fragments[fragment] if plan is None else plan.sent(fragment)

    async def read_body(
        self, fragment: int, plan: RankPlan | None, body: memoryview, digest: str, codec: str
    ) -> InitialBody:
        """Return what is in a body that has arrived, which has this digest."""
        part = self._part_of(fragment, plan)
        work = partial(_read_coded, part, body, digest) if codec else partial(_read_values, body, digest)
        return await asyncio.to_thread(work) if 4 * part.size > SMALL_BYTES else work()

    async def join_part(
        self, fragment: int, rank: int, plans: Sequence[RankPlan], received: InitialBody, codec: str
    ) -> InitialBody | None:
        """Put a rank's part to those of the others. The whole fragment and its digest, with the last one; None before,
        and for a part that came twice: the first one counts. PeerError: all was asked for anew meanwhile. `codec`: the
        form in which the part came, which the whole has too if every part has it."""
        part, values = self._parameters.plan.fragments[fragment], received.values
        empty = np.empty(part.size, np.float32)
        whole = self._assembled.setdefault(fragment, AssembledFragment(empty, set(), set()))
        if self.has_part(fragment, rank):
            return None
        whole.begun.add(rank)
        work = partial(plans[rank].scatter, fragment, values, whole.values)
        await asyncio.to_thread(work) if values.nbytes > SMALL_BYTES else work()
        whole.here.add(rank)
        if whole.here != {number for number, plan in enumerate(plans) if plan.sent(fragment).size}:
            return None
        digest, coded = await digest_aside(whole.values.view(np.uint8).data), None
        if codec:
            encode = partial(_code_whole, part, whole.values)
            coded = await asyncio.to_thread(encode) if whole.values.nbytes > SMALL_BYTES else encode()
        if self._assembled.get(fragment) is not whole:
            raise PeerError("the first parameters were asked for anew")
        return InitialBody(whole.values, digest, finite=True, coded=coded)

    def accept_fragment(self, fragment: int, received: InitialBody) -> None:
        self._parameters.put_initial(fragment, received.values, received.digest, received.coded)
        self._here.add(fragment)
        if self.is_complete:
            self._parameters.commit_initial()

    def count_bytes(self, codec: str) -> int:
        """Return the bytes of all bodies together, in this form."""
        fragments = self._parameters.plan.fragments
        return sum(count_initial_bytes(part) if codec else 4 * part.size for part in fragments)

    def has_fragment(self, fragment: int) -> bool:
        return fragment in self._here

    def has_part(self, fragment: int, rank: int) -> bool:
        return fragment in self._assembled and rank in self._assembled[fragment].begun

    @property
    def is_complete(self) -> bool:
        return len(self._here) == len(self._parameters.plan.fragments)


def _read_values(body: memoryview, digest: str) -> InitialBody:
    values = np.frombuffer(body, np.float32)
    return InitialBody(values, digest, is_finite(values))


def _read_coded(part: Fragment, body: memoryview, digest: str) -> InitialBody:
    data, values = np.frombuffer(body, np.uint8), np.empty(part.size, np.float32)
    decode_initial(part, data, values)
    of_values = compute_digest(values.view(np.uint8).data)
    return InitialBody(values, of_values, is_finite(values), CodedVersion(data, digest))


def _code_whole(part: Fragment, values: FloatArray) -> CodedVersion | None:
    data = encode_initial(part, values)
    return None if data is None else CodedVersion(data, compute_digest(data.data))


class FirstUpload:
    """The bodies of the first parameters, from the learner that was asked to the state machine."""

    def __init__(
        self,
        first: FirstParameters,
        ranks: LearnerRanks,
        channels: Mapping[str, ControlChannel],
        events: EventLog,
        tell: Callable[[fx.SyncerEvent], None],
        lead: ShardLead | None,
    ) -> None:
        """`channels`: of the connected learners, as they are; `lead`: None in a syncer of one process."""
        self._first, self._ranks, self._channels = first, ranks, channels
        self._events, self._tell, self._lead = events, tell, lead
        self._shards_here: set[int] = set()
        """Other shards that hold all their parts."""
        self._loss = 0.0
        """Relative error that was told of the parameters; of several ranks the largest."""
        self._uploader, self._progress = "", Download()

    def ask_learner(self, channel: ControlChannel) -> None:
        self._first.ask_learner(channel.learner, channel.session)
        self._loss = 0.0
        self._uploader, self._progress = channel.learner, Download()
        self._shards_here.clear()
        if self._lead is not None:
            self._lead.ask_initial(channel.learner, channel.session, channel.token)

    def expect_body(self, learner: str, session: str, fragment: int, rank: int, codec: str = "") -> memoryview:
        if not self._first.is_asked(learner, session):
            raise PeerError(f"{learner} was not asked for the first parameters")
        body = self._first.make_room(fragment, self._ranks.find_sender(learner, rank), codec)
        self._tell(fx.Uploading(learner, body.nbytes))
        if not self._progress.whole:
            self._note_arrived(-self._first.count_bytes(codec))
        return body

    def _note_arrived(self, nbytes: int) -> None:
        self._progress.note_lacking(time.monotonic(), self._progress.lacking - nbytes, most=0)

    def describe_progress(self) -> str:
        """Return a notice while the first parameters are on their way; empty: they are not, or none has begun."""
        if self._first.is_complete or not self._progress.is_under_way or self._uploader not in self._channels:
            return ""
        return f"{self._uploader} sends the first parameters: {self._progress.describe()}."

    async def take_body(
        self,
        learner: str,
        session: str,
        fragment: int,
        body: memoryview,
        digest: str,
        rank: int,
        codec: str = "",
        loss: float = 0.0,
    ) -> None:
        self._find_uploader(learner, session)
        plan = self._ranks.find_sender(learner, rank)
        received = await self._first.read_body(fragment, plan, body, digest, codec)
        channel = self._find_uploader(learner, session)  # again: another may be asked by now
        self._loss = max(self._loss, loss)
        if not received.finite:
            self._refuse(channel, f"fragment {fragment} of the first parameters is not finite")
            return
        if plans := self._ranks.plans_of(learner):
            known = self._first.has_part(fragment, rank)
            whole = await self._first.join_part(fragment, rank, plans, received, codec)
            self._find_uploader(learner, session)
            if whole is None:  # other ranks' parts are to come
                if not known:
                    self._tell(fx.Uploading(learner, 0))
                    self._note_arrived(body.nbytes)
                return
            received = whole
        known = self._first.has_fragment(fragment)
        self._first.accept_fragment(fragment, received)
        if not known:
            self._tell(fx.Uploading(learner, 0))
            self._note_arrived(body.nbytes)
        self._end_if_complete(learner, session)

    def hear_shard(self, shard: int, message: InitialHere) -> None:
        """Another shard has heard of them."""
        channel = self._channels.get(message.learner)
        if channel is None or not self._first.is_asked(message.learner, message.session):
            return
        if message.reason:
            self._refuse(channel, message.reason)
            return
        self._tell(fx.Uploading(message.learner, message.size))
        if message.complete:
            self._shards_here.add(shard)
            self._end_if_complete(message.learner, message.session)

    def _end_if_complete(self, learner: str, session: str) -> None:
        others = set() if self._lead is None else self._lead.state.seats.keys() - self._shards_here
        if self._first.is_complete and not others:
            if self._lead is not None:
                self._lead.end_initial()
            self._tell(fx.Initialised(learner, session, self._loss))

    def _find_uploader(self, learner: str, session: str) -> ControlChannel:
        channel = self._channels.get(learner)
        if channel is None or not self._first.is_asked(learner, session):
            raise PeerError(f"{learner} is not asked for the first parameters any more")
        return channel

    def _refuse(self, channel: ControlChannel, reason: str) -> None:
        learner = channel.learner
        self._events.say("refused", f"{learner}: {reason}", {"learner": learner, "reason": reason})
        refuse_learner(channel, reason)


def refuse_learner(channel: ControlChannel, reason: str) -> None:
    channel.send(Refused(reason=reason, final=True))
    channel.close(reason)
