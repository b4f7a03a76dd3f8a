"""The courier beside a rank that is not the first: it does what rank 0's courier tells it, and says when it is done.

It has no state machine and no control channel. Frames for its training process it passes on as they come, so every
training process gets the same ones in the same order. Bodies it encodes, sends, fetches and copies into its own shared
memory, in the slots that the leader names. If it loses the leader, its training process is told to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import msgspec

from atoll.courier.body import FragmentTransfers, open_box
from atoll.courier.rank_channel import (
    FROM_LEADER,
    LACKING_S,
    BoxReady,
    FetchPart,
    FromFollower,
    PartLacking,
    RankChannel,
    RankFailed,
    RunCallback,
    RunKnown,
    ShardsKnown,
    UploadPart,
    dial_leader,
)
from atoll.fabric.bodies import BodyConnection
from atoll.fabric.tasks import lasting
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import (
    CopyMade,
    CourierChannel,
    ForgetOrder,
    Goodbye,
    MailboxReady,
    ReadOrder,
    SlotFreed,
    Start,
    StopOrder,
    ToCourier,
    VersionTaken,
)
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.learner import effects as fx


class RankFollower:
    def __init__(
        self, channel: CourierChannel, start: Start, run_callback: RunCallback, tasks: asyncio.TaskGroup
    ) -> None:
        self._training, self._start, self._tasks = channel, start, tasks
        self._run_callback = run_callback
        self._leader: RankChannel | None = None
        self._unsaid: list[FromFollower] = []
        """Until the leader is reached."""
        self._link = BodyConnection(start.url)
        self._box: Mailbox | None = None
        self._bodies: FragmentTransfers | None = None
        self._epoch = 0
        self._watching: asyncio.Task[None] | None = None
        self._ending = False
        """The leader may go: all ranks do."""

    async def reach_leader(self, ready: Awaitable[object]) -> None:
        """`ready`: whatever this rank needs before it can do what it is told."""
        await ready
        try:
            sock = await dial_leader(self._start.leader, self._start.secret, self._start.rank)
        except PeerError as error:
            self._end_learner(str(error))
            return
        self._leader = RankChannel(sock, FROM_LEADER, self._obey, self._lose_leader, self._run_callback)
        for frame in self._unsaid:
            self._leader.send(frame)
        self._unsaid.clear()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._leader is not None:
            self._leader.close()
        if self._bodies is not None:
            self._bodies.close()
        await self._link.close()

    # ---- from the training process ------------------------------------------------------------------------------

    def take_frame(self, frame: ToCourier) -> None:
        """Reports of steps, the tape and the data are rank 0's to tell."""
        match frame:
            case MailboxReady():
                self._open_box(frame)
            case CopyMade(slot=slot, feedback=feedback):
                assert self._bodies is not None
                self._bodies.encoded_with[slot] = feedback
                self._say(frame)
            case VersionTaken():
                self._take_adoption(frame)
            case SlotFreed() | fx.Saved():
                self._say(frame)

    def say_goodbye(self, reason: str, *, left: bool) -> None:
        """`left`: it ends as it should; otherwise its training process is gone, and the learner with it."""
        self._say(Goodbye(reason) if left or self._ending else RankFailed(reason))
        self._ending = True

    def _open_box(self, frame: MailboxReady) -> None:
        assert self._bodies is None, "a learner of several ranks ends where the memory does not serve any more"
        opened = open_box(self._training.take_descriptor(), self._start, frame)
        self._box = opened.box
        self._bodies = FragmentTransfers(
            opened.box, self._link, frame.settings, self._start, self._say, self._tasks, opened.rank_plan
        )
        adopted, base = (tuple(map(int, row)) for row in (opened.box.adopted, opened.box.base_version))
        self._say(BoxReady(adopted, base))
        self._watching = self._tasks.create_task(lasting("report what it lacks", self._watch_lacking))

    async def _watch_lacking(self) -> None:
        told = 0
        while True:
            await asyncio.sleep(LACKING_S)
            if self._bodies is not None and (lacking := self._bodies.count_lacking()) != told:
                told = lacking
                self._say(PartLacking(lacking))

    def _take_adoption(self, frame: VersionTaken) -> None:
        assert self._bodies is not None
        if self._bodies.replace_base(frame, lambda: frame.epoch != self._epoch, self._say):
            self._say(frame)

    # ---- from the leader ----------------------------------------------------------------------------------------

    def _obey(self, frame: msgspec.Struct) -> None:
        match frame:
            case Goodbye():
                self._ending = True
            case StopOrder(final=final, failed=failed):
                self._ending |= final or failed
                self._training.send(frame)
            case (
                UploadPart() | FetchPart() | RunKnown() | ShardsKnown() | fx.Settle() | fx.DropRests() | fx.UploadAll()
            ):
                assert self._box is not None and self._bodies is not None
                self._carry_out(frame, self._box, self._bodies)
            case _:
                if self._box is not None and self._bodies is not None:
                    self._prepare(frame, self._box, self._bodies)
                self._training.send(frame)

    def _carry_out(self, order: msgspec.Struct, box: Mailbox, bodies: FragmentTransfers) -> None:
        """What the training process has no part in."""
        match order:
            case UploadPart():
                bodies.upload_part(order)
            case FetchPart(slot=slot):
                self._need_slot(bodies.reserve_slot(slot, incoming=True))
                bodies.fetch_part(order)
            case ShardsKnown(addresses):
                self._use_shards(addresses, bodies)
            case RunKnown(run, incarnation, term):
                box.run = run
                box.set_count("incarnation", incarnation)
                box.set_count("term", term)
            case fx.Settle(fragment, version, t):
                bodies.feedback.settle(fragment, version, t)
            case fx.DropRests(fragment):
                bodies.feedback.drop_rests(fragment)
            case fx.UploadAll():
                bodies.upload_all()

    def _use_shards(self, addresses: tuple[str, ...], bodies: FragmentTransfers) -> None:
        try:
            bodies.use_shards(addresses)
        except ConfigError as error:
            self._say(RankFailed(f"the syncer names a shard that cannot be reached from here: {error}"))

    def _prepare(self, frame: msgspec.Struct, box: Mailbox, bodies: FragmentTransfers) -> None:
        """What a frame means for the shared memory, before the training process has it."""
        match frame:
            case ReadOrder(slot=slot):
                self._need_slot(bodies.reserve_slot(slot, incoming=False))
            case fx.Own():
                box.base_version[:] = 0
            case ForgetOrder(epoch=epoch):
                self._epoch = epoch
                box.base_version[:] = -1
                bodies.feedback.forget_all()
                bodies.shards.forget_arrivals()

    def _need_slot(self, there: bool) -> None:
        if not there:
            self._say(RankFailed("there is no memory for one more copy of a fragment"))

    # ---- ending -------------------------------------------------------------------------------------------------

    def _say(self, frame: FromFollower) -> None:
        if self._leader is None:
            self._unsaid.append(frame)
        else:
            self._leader.send(frame)

    def _lose_leader(self, reason: str) -> None:
        if not self._ending:
            self._end_learner(f"rank 0 of {self._start.learner} is lost: {reason}")

    def _end_learner(self, reason: str) -> None:
        self._ending = True
        self._training.send(StopOrder(reason, final=True, failed=True))
