"""Fragments on their way: encoded and sent, fetched and put where the training process takes them; and their slots.

A slot of the shared memory holds a copy that was ordered, made or sent, or a version that waits to be adopted. If all
are in use, one more is reserved. If there is no memory for it, a copy ordered ahead is not made: an older one gives way
only to a copy that a pull waits for.

With placement device copies come encoded (learner/device_offload.py), and are sent from the slot they lie in.

The work on a large fragment (encode, digest, round, copy) is done in threads. A base never changes under a Δ: what
replaces it waits until every answer that was begun is encoded, and no answer is begun meanwhile. What an answer leaves
out is kept in feedback.py.

Of a syncer of several shards each gets and has its part of a fragment (shards.py).

Every body tells what a way of the link carries (`Ways`). Bodies are sent one after the other (turns.py). When little of
a version is still to come, the state machine hears it, and asks for the next one in time (`VersionArrival`).

Beside a rank of a learner of several (`rank_plan`) bodies are parts: what this rank sends of a fragment, and what it
holds of it. The leader's slots are those of every rank, under the same numbers: it takes and frees them for all.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from atoll.choices import CODEC
from atoll.courier.feedback import Feedback, RestBuffer
from atoll.courier.held import HeldVersions
from atoll.courier.rank_channel import FetchPart, PartArriving, PartFetched, PartUploaded, UploadPart
from atoll.courier.shards import BODY_S, ShardBody, ShardConnections
from atoll.courier.slots import COPY_GONE, IncomingSlots, OutgoingSlots
from atoll.courier.turns import UploadTurns
from atoll.digests import combine_digests
from atoll.fabric.bodies import BodyConnection, fetch_one_version, run_together
from atoll.fabric.body_meter import ArrivalMeter, ArrivedBytes, PartArrival
from atoll.fabric.transfer import CodedBody, FetchedVersion
from atoll.fabric.wire import BF16, SMALL_BYTES, digest_aside
from atoll.mailbox.box import BoxLayout, Mailbox, can_spare
from atoll.mailbox.channel import MailboxReady, Start, VersionTaken
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Delta, body_nbytes, encode_contribution, make_codec, round_to_dtype
from atoll.numerics.fragments import Fragment, FragmentPlan, make_plan
from atoll.numerics.initial import count_initial_bytes, decode_initial, encode_initial
from atoll.numerics.moments import check_moments, read_moments
from atoll.numerics.rank_plan import RankPlan, make_rank_plan
from atoll.numerics.rank_shards import RankPart
from atoll.numerics.shard_plan import PartPlace
from atoll.protocol.errors import PeerError, Unreachable
from atoll.protocol.learner import effects as fx
from atoll.protocol.learner.ways import Ways
from atoll.protocol.settings import Settings

T = TypeVar("T")
UPLOADS = 3
"""Fragments of version 0 that are on their way at once: as many as a newcomer has slots to fetch into."""
RETRY_S = 1.0
WHOLE = -1
"""In place of an ask: the answer is this courier's alone."""
BASE_REPLACED = "the version it was made on is being replaced"


def is_small(part: Fragment) -> bool:
    """It may be worked on by the event loop itself."""
    return 4 * part.size <= SMALL_BYTES


def as_held(part: Fragment, values: FloatArray) -> None:
    """Round to what the model's tensors can hold, so that the base is exactly what is adopted."""
    for piece, place in part.parts:
        if piece.tensor.dtype != "float32":
            round_to_dtype(values[place], piece.tensor.dtype)


def load_kernels() -> None:
    """They are loaded at their first use: a second of work, many seconds on a busy machine."""
    one, rows = np.zeros(1, dtype=np.float32), ((1, 1),)
    for codec in map(make_codec, CODEC.names()):
        body = np.zeros(codec.nbytes(rows), dtype=np.uint8)
        codec.encode_delta(Delta(one, one), rows, body)
        codec.check(body, rows)
        codec.decode(body, rows, np.zeros(1, dtype=np.float32))
    round_to_dtype(one, "bfloat16")


async def _run_aside(part: Fragment, work: Callable[[], T]) -> T:
    """Do work on all values of a part: in a thread, unless they are few."""
    return work() if is_small(part) else await asyncio.to_thread(work)


def say(text: str) -> None:
    print(f"courier: {text}", file=sys.stderr, flush=True)


class OpenBox(NamedTuple):
    """The shared memory, and what it was made by."""

    box: Mailbox
    plan: FragmentPlan
    """Of the whole model."""
    rank_plan: RankPlan | None
    """Of what this rank holds, where there are several; the memory is of that."""


def open_box(fd: int, start: Start, frame: MailboxReady) -> OpenBox:
    plan = make_plan(start.tensors, frame.settings.fragments, frame.settings.plan)
    rank_plan = make_rank_plan(plan, start.ranks[start.rank]) if start.ranks else None
    held = plan if rank_plan is None else rank_plan.plan
    layout = BoxLayout.of(held, frame.settings, on_device=frame.on_device, ranks=rank_plan is not None)
    return OpenBox(Mailbox(fd, layout, held), plan, rank_plan)


def _put_apart(part: RankPart, came: FloatArray, values: FloatArray) -> None:
    """What the rank sends, and behind it in what came the rest, to their places."""
    values[part.front], values[part.behind] = came[: part.sent.size], came[part.sent.size :]


class Answer(NamedTuple):
    """A copy on its way out."""

    order: UploadPart
    rest: RestBuffer | None
    buffer: ByteArray
    data: ByteArray
    """Of the buffer, the part that its body fills."""


class EncodedAnswer(NamedTuple):
    bodies: list[ShardBody]
    seconds: float
    """Seconds that it took to encode."""

    @property
    def nbytes(self) -> int:
        return sum(body.data.nbytes for body in self.bodies)


NOTHING = EncodedAnswer([], 0.0)


class VersionArrival:
    """A version on its way: it is measured, and once little of it is still to come this is said, exactly once."""

    def __init__(
        self,
        arrived: ArrivedBytes,
        pipe_bytes: float,
        tell_arriving: Callable[[], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`pipe_bytes`: bytes that are under way at once on a full link: with no more to come than these, the next
        request is due."""
        self.meter = ArrivalMeter(self._look, arrived=arrived)
        self._pipe_bytes, self._tell_arriving, self._spawn = pipe_bytes, tell_arriving, spawn
        self._is_near = self._told = False

    def _look(self) -> None:
        if not self._is_near and self.meter.to_come <= self._pipe_bytes:
            self._is_near = True
            self._spawn(self._tell_soon())  # a mistake in what follows has to end the courier, not this connection

    async def _tell_soon(self) -> None:
        self.tell()

    def tell(self) -> None:
        """Say it, unless it was said before."""
        if not self._told:
            self._is_near = self._told = True
            self._tell_arriving()

    def give_up(self) -> None:
        """Never say it from now on: the version does not come."""
        self._is_near = self._told = True


class FragmentTransfers:
    def __init__(
        self,
        box: Mailbox,
        link: BodyConnection,
        settings: Settings,
        start: Start,
        tell: Callable[..., None],
        tasks: asyncio.TaskGroup,
        rank_plan: RankPlan | None = None,
        ways: Ways | None = None,
    ) -> None:
        """`tell` hears events of the learner's state machine; with a `rank_plan` PartUploaded, PartArriving and
        PartFetched. `ways`: what was measured so far; every body is added to it here."""
        self.outgoing = OutgoingSlots(list(range(box.layout.first_outgoing)), box.reserve_outgoing)
        self.incoming = IncomingSlots(box.layout.first_incoming, box.reserve_incoming)
        self._box, self._link, self._start, self._tell = box, link, start, tell
        self._codec, self._rank_plan = make_codec(settings.codec), rank_plan
        self._rounds_initial = settings.rounds_initial
        codecs = (self._codec, settings.version_codec)
        self.shards = ShardConnections(link, start, box.plan, *codecs, say, tasks, rank_plan)
        self.feedback = Feedback(box)
        self.ways = ways or Ways()
        self._turns = UploadTurns(self.ways.up)
        self._arrived = ArrivedBytes()
        self._held = HeldVersions(box, settings.version_codec if rank_plan is None else "fp32")
        self.encoded_with: dict[int, int] = {}
        """Placement device: slot → the step of the copy whose rest the copy in it was encoded with."""
        self._applying = asyncio.Lock()
        """Steps of one large fragment at a time: each takes memory for another fragment."""
        self._group = tasks
        self._running: set[asyncio.Task[None]] = set()
        self._fetching: set[int] = set()
        self._base_locks = [asyncio.Lock() for _ in box.plan.fragments]
        """Held while a fragment's base is read for a Δ, or replaced."""
        self._replacing: set[int] = set()
        """Fragments whose base is being replaced, or waits for that."""
        self._initial: list[asyncio.Task[None]] = []
        self._body_bytes = self._find_largest()
        self._spare: list[ByteArray] = []
        """Buffers of bodies. One is made when all are under way; two of a fragment are under way after a miss."""
        self._buffers_left = 2 * box.layout.fragments

    def _find_largest(self) -> int:
        """Bytes of the largest body."""
        layout = self._box.layout
        return max(self._body_bytes_of(fragment) for fragment in range(layout.fragments)) + layout.moments_bytes

    def use_shards(self, addresses: Sequence[str]) -> None:
        """Where shards 2, 3 … of the syncer are. ConfigError: one of them cannot be reached from here."""
        self.shards.use_addresses(addresses)
        if (largest := self._find_largest()) > self._body_bytes:  # blocks of a codec begin anew at every shard
            self._body_bytes, self._buffers_left = largest, 2 * self._box.layout.fragments
            self._spare.clear()

    def close(self) -> None:
        for task in self._running:
            task.cancel()
        self.shards.close()

    def retire(self) -> None:
        """Other memory takes the place of this one: what was on its way here is fetched again."""
        self.close()
        self._box.close()
        for fragment in sorted(self._fetching):
            self._tell(fx.FetchFailed(fragment, "the shared memory was made anew"))

    def freed(self, slot: int, incoming: bool) -> None:
        if incoming:
            self.incoming.give_back(slot)
        else:
            self.outgoing.free.append(slot)

    def replace_base(
        self, taken: VersionTaken, is_forgotten: Callable[[], bool], tell_later: Callable[[VersionTaken], None]
    ) -> bool:
        """What the model has adopted is the base from now on. False: once it is copied, which `tell_later` hears of.
        `is_forgotten`: nothing that was adopted counts any more; nor does it where that happens while it is copied."""
        if is_forgotten():
            return True
        copying = self.into_base(taken.slot, taken.adopted.fragment, taken.adopted.version)
        if copying is not None:
            self._group.create_task(self._await_base(copying, taken, is_forgotten, tell_later))
        return copying is None

    async def _await_base(
        self,
        copying: asyncio.Task[None],
        taken: VersionTaken,
        is_forgotten: Callable[[], bool],
        tell: Callable[[VersionTaken], None],
    ) -> None:
        await copying
        if is_forgotten():
            self._box.base_version[taken.adopted.fragment] = -1
        tell(taken)

    def into_base(self, slot: int, fragment: int, version: int) -> asyncio.Task[None] | None:
        """It is the base from now on, or once the task is done. A base half written has no version."""
        if not is_small(self._box.plan.fragments[fragment]):
            self._replacing.add(fragment)
            return self._spawn(self._copy_into_base(slot, fragment, version))
        self._box.base_version[fragment] = -1
        np.copyto(self._box.base(fragment), self._box.incoming(slot, fragment))
        self._box.base_version[fragment] = version
        return None

    async def _copy_into_base(self, slot: int, fragment: int, version: int) -> None:
        async with self._base_locks[fragment]:
            arrived, is_first = self._box.incoming(slot, fragment), self._box.base_version[fragment] < 0
            self._box.base_version[fragment] = -1
            if is_first:  # of a newcomer, whose pages nobody has touched yet
                await asyncio.to_thread(self._box.write_base, fragment, arrived)
            else:
                await asyncio.to_thread(np.copyto, self._box.base(fragment), arrived)
        self._replacing.discard(fragment)
        self._box.base_version[fragment] = version

    def finish_adoption(self, slot: int, fragment: int) -> None:
        """The version is the base, in all ranks: nothing reads its slot any more, nor the copy that was subtracted."""
        self.incoming.give_back(slot)
        self.outgoing.adopted(fragment)

    def reserve_slot(self, slot: int, *, incoming: bool) -> bool:
        """The leader has taken this slot: it is used here under the same number. False: there is no memory for it."""
        return self.incoming.reserve_until(slot) if incoming else self.outgoing.reserve_until(slot)

    # ---- out ----------------------------------------------------------------------------------------------------

    def upload(self, number: int, attempt: int, fragment: int) -> None:
        """The answer to a pull."""
        if fragment in self._replacing:
            self._tell(fx.UploadFailed(number, attempt, BASE_REPLACED))
        elif (copy := self.outgoing.send(fragment)) is None:
            self._tell(fx.UploadFailed(number, attempt, COPY_GONE, no_copy=True))
        else:
            slot, t = copy
            self._send_copy(UploadPart(WHOLE, number, attempt, fragment, slot, t))

    def upload_part(self, order: UploadPart) -> None:
        """This rank's part of an answer."""
        if order.fragment in self._replacing or self._box.base_version[order.fragment] != order.base:
            self._tell_uploaded(order, reason=BASE_REPLACED)
        elif not self.shards.part_sent(order.fragment).size:
            self._tell_uploaded(order)
        else:
            self._send_copy(order)

    def _send_copy(self, order: UploadPart) -> None:
        fragment, slot, t = order.fragment, order.slot, order.t
        if self._box.layout.on_device:
            self._upload_encoded(order)
            return
        if (buffer := self._take_buffer()) is None:
            self._tell_uploaded(order, reason="earlier answers are still on their way")
            return
        needs_rest = self._codec.needs_feedback and not self.feedback.has_settled(fragment, t)
        rest = self.feedback.take_buffer(fragment, t) if needs_rest else None
        if needs_rest and rest is None:
            self._give_back(buffer)
            self._tell_uploaded(order, reason="there is no memory for what it leaves out")
            return
        part = self._box.plan.fragments[fragment]
        size = self._body_bytes_of(fragment) + self._moments_nbytes(part, slot)
        answer = Answer(order, rest, buffer, buffer[:size])
        encoded = None
        if is_small(part):
            encoded = self._encode(answer)
            self._keep_rest(answer)
        else:
            self.outgoing.hold_slot(slot)
        self._spawn(self._upload(answer, encoded))

    def _tell_uploaded(
        self, order: UploadPart, answer: EncodedAnswer = NOTHING, seconds: float = 0.0, reason: str = ""
    ) -> None:
        """`seconds`: how long its bodies took; `reason`: why it did not arrive."""
        if order.ask != WHOLE:
            digests = tuple((body.shard, body.digest) for body in answer.bodies)
            self._tell(PartUploaded(order.ask, digests, reason, answer.nbytes, seconds))
        elif reason:
            self._tell(fx.UploadFailed(order.round, order.attempt, reason))
        else:
            digest = combine_digests([body.digest for body in answer.bodies])
            self._tell(fx.Uploaded(order.round, order.attempt, digest, answer.nbytes, seconds))

    def _body_bytes_of(self, fragment: int) -> int:
        part = self.shards.part_sent(fragment)
        return body_nbytes(self._codec, part) if part.size else 0

    def _moments_nbytes(self, part: Fragment, slot: int) -> int:
        """Of those that were copied with the fragment."""
        return read_moments(part, self._box.outgoing_moments(slot)).size if self._box.layout.moments_bytes else 0

    def _take_buffer(self) -> ByteArray | None:
        """For one body; None where too many are under way, or where memory is short."""
        if self._spare:
            return self._spare.pop()
        if self._buffers_left == 0 or not can_spare(self._body_bytes):
            return None
        self._buffers_left -= 1
        return np.empty(self._body_bytes, dtype=np.uint8)

    def _give_back(self, buffer: ByteArray) -> None:
        if buffer.size == self._body_bytes:
            self._spare.append(buffer)

    def _encode(self, answer: Answer) -> EncodedAnswer:
        began = time.monotonic()
        fragment, slot, rest = answer.order.fragment, answer.order.slot, answer.rest
        delta = Delta(self._box.base(fragment), self._box.outgoing(slot, fragment))
        if rest is not None:
            delta = delta._replace(feedback=rest.feedback, rest=rest.rest)
        part, values = self.shards.part_sent(fragment), self._body_bytes_of(fragment)
        encode_contribution(self._codec, part, delta.cut_out(slice(0, part.size)), answer.data[:values])
        moments = answer.data[values:]
        moments[:] = self._box.outgoing_moments(slot)[: moments.size]
        return self._cut_body(fragment, answer.data, began)

    def _cut_body(self, fragment: int, data: ByteArray, began: float) -> EncodedAnswer:
        """`began`: when the work on this answer did."""
        return EncodedAnswer(self.shards.cut_body(fragment, data), time.monotonic() - began)

    def _keep_rest(self, answer: Answer) -> None:
        if answer.rest is not None:
            self.feedback.keep_rest(answer.rest)

    async def _upload(self, answer: Answer, encoded: EncodedAnswer | None) -> None:
        try:
            if encoded is None:
                async with self._base_locks[answer.order.fragment]:
                    encoded = await asyncio.to_thread(self._encode, answer)
                self._keep_rest(answer)
                self.outgoing.let_slot_go(answer.order.slot)
            await self._send_bodies(answer.order, encoded)
        finally:
            self._give_back(answer.buffer)

    async def _send_bodies(self, order: UploadPart, answer: EncodedAnswer) -> None:
        try:
            async with self._turns.take_turn(answer.nbytes):
                sent = await self.shards.put_contribution(order, answer.bodies)
        except (PeerError, Unreachable) as error:
            self._tell_uploaded(order, reason=str(error))
            return
        seconds = max(body.seconds(self.ways.latency_s) for body in sent)
        if seconds:  # what came in one piece says nothing of the link
            seconds = max(seconds, answer.seconds)  # answers leave no faster than they are encoded
        self.ways.up.add(answer.nbytes, seconds)
        self._tell_uploaded(order, answer, seconds)

    def _upload_encoded(self, order: UploadPart) -> None:
        """A copy that the training process has encoded, as it lies in its slot. What it was encoded with has to be what
        it would be encoded with now: so both placements give equal bytes."""
        fragment, slot, t = order.fragment, order.slot, order.t
        if self._codec.needs_feedback:
            if self.encoded_with.get(slot, -1) != self._box.feedback_for(fragment, t):
                self._tell_uploaded(order, reason="its feedback has changed since it was copied")
                return
            if not self.feedback.has_settled(fragment, t):
                self.feedback.note_answer(fragment, t)
        self.outgoing.hold_slot(slot)
        self._spawn(self._send_encoded(order, self._box.body(slot, self._body_bytes_of(fragment))))

    async def _send_encoded(self, order: UploadPart, data: ByteArray) -> None:
        try:
            encoded = await asyncio.to_thread(self._cut_body, order.fragment, data, time.monotonic())
            await self._send_bodies(order, encoded)
        finally:
            self.outgoing.let_slot_go(order.slot)

    def upload_all(self) -> None:
        """Every fragment's base as version 0, some at a time."""
        self._cancel_initial()
        left = iter(range(self._box.layout.fragments))
        self._initial = [self._spawn(self._upload_each(left)) for _ in range(UPLOADS)]

    def _cancel_initial(self) -> None:
        for task in self._initial:
            task.cancel()

    async def _upload_each(self, left: Iterator[int]) -> None:
        """One that failed is sent again, until the link is lost; of a rank that has none of its own, until the leader
        says otherwise."""
        for fragment in left:
            if places := self.shards.places_sent(fragment):
                await run_together([self._upload_initial(fragment, one) for one in places])

    async def _upload_initial(self, fragment: int, place: PartPlace) -> None:
        values, codec = self._box.base(fragment)[place.values], ""
        data: ByteArray | None = None
        if self._rounds_initial:
            data = await _run_aside(place.part, lambda: encode_initial(place.part, values))
            codec = BF16 if data is not None else ""
        if data is None:  # also a base that was adopted in an earlier run, which is not rounded
            data = values.view(np.uint8)
        digest, loss_ppb = await digest_aside(data.data), self._box.count("loss_ppb") if codec else 0
        while self._link.up:
            try:
                await self.shards.put_initial(fragment, place, data, digest, codec, loss_ppb)
                break
            except (PeerError, Unreachable):
                await asyncio.sleep(RETRY_S)

    # ---- in -----------------------------------------------------------------------------------------------------

    @property
    def whole_bytes(self) -> int:
        """Bytes of all that this process holds of the run's parameters, as versions travel."""
        return sum(4 * part.size for part in self._box.plan.fragments)

    def count_lacking(self) -> int:
        """Return the bytes of them that it neither holds nor has received."""
        held = self._box.base_version
        return sum(
            max(0, 4 * part.size - self.shards.arrived_bytes(part.index))
            for part in self._box.plan.fragments
            if held[part.index] < 0
        )

    def fetch(self, fragment: int) -> None:
        self._cancel_initial()  # the run has its parameters
        self._fetching.add(fragment)
        self._spawn(self._fetch(fragment))

    async def _fetch(self, fragment: int) -> None:
        slot = await self.incoming.take_slot()
        part = self._box.plan.fragments[fragment]
        arrival = self._expect_version(fx.Arriving())
        # Moments that may follow the version are still to come: the way down is not free before them.
        moments = arrival.meter.expect_part() if self._may_fetch_moments(part) else None
        try:
            version = await self._bring(part, slot, arrival.meter)
        except (PeerError, Unreachable) as error:
            arrival.give_up()
            self._fetching.discard(fragment)
            self.incoming.note_failed(slot)
            self._tell(fx.FetchFailed(fragment, str(error)))
            return
        has_moments = moments is not None and await self._fetch_moments(part, version, slot, moments)
        self._fetching.discard(fragment)
        self.incoming.note_landed(fragment, slot, moments=has_moments)
        arrival.tell()
        self._tell(fx.Fetched(fragment, version, *self._add_arrival(arrival.meter)))
        self.incoming.release_unwanted(fragment)

    def _expect_version(self, arriving: fx.Arriving | PartArriving) -> VersionArrival:
        return VersionArrival(self._arrived, self.ways.pipe_bytes, lambda: self._tell(arriving), self._spawn)

    def _add_arrival(self, meter: ArrivalMeter) -> tuple[int, float, float]:
        """Add a version to what was measured; return its bytes, its seconds and its latency."""
        nbytes, seconds = meter.measure()
        self.ways.down.add(nbytes, seconds)
        self.ways.add_latency(meter.latency_s)
        return nbytes, seconds, meter.latency_s

    def fetch_part(self, order: FetchPart) -> None:
        """What this rank holds of the newest version."""
        self._cancel_initial()
        if self._box.plan.fragments[order.fragment].size:
            self._spawn(self._fetch_part(order))
        else:
            self._tell(PartArriving(order.fragment))
            self._tell(PartFetched(order.fragment))

    async def _fetch_part(self, order: FetchPart) -> None:
        fragment = order.fragment
        arrival = self._expect_version(PartArriving(fragment))
        try:
            version = await self._bring(self._box.plan.fragments[fragment], order.slot, arrival.meter)
        except (PeerError, Unreachable) as error:
            arrival.give_up()
            self._tell(PartFetched(fragment, reason=str(error)))
        else:
            arrival.tell()
            self._tell(PartFetched(fragment, version, "", *self._add_arrival(arrival.meter)))

    async def _bring(self, part: Fragment, slot: int, meter: ArrivalMeter) -> int:
        """The version that is now in the slot, as the model can hold it."""
        values = self._box.incoming(slot, part.index)
        version = await self._fetch_into(part.index, values, meter)
        if is_small(part):
            with meter.working():
                self._keep_and_round(part, version, values)
        else:
            with meter.working():
                await asyncio.to_thread(self._keep_and_round, part, version, values)
            async with self._base_locks[part.index]:
                pass  # the training process may subtract the base when it adopts this: it is whole by then
        return version

    def _may_fetch_moments(self, part: Fragment) -> bool:
        return bool(self._box.layout.moments_bytes) and int(self._box.adopted[part.index]) >= 0

    async def _fetch_moments(self, part: Fragment, version: int, slot: int, arrival: PartArrival) -> bool:
        """Whether the averaged moments of that version are behind it in the slot. Only who holds the version before
        asks for them, and a version is adopted without where they cannot be had."""
        if not self._may_fetch_moments(part) or int(self._box.adopted[part.index]) != version - 1:
            return False
        room = self._box.incoming_moments(slot)
        try:
            size = await self._link.get_moments(part.index, version, room.data, BODY_S, arrival)
            if is_small(part):
                check_moments(part, room[:size])
            else:
                await asyncio.to_thread(check_moments, part, room[:size])
        except (PeerError, Unreachable):
            return False
        return True

    async def _fetch_into(self, fragment: int, values: FloatArray, meter: ArrivalMeter) -> int:
        """The version that is now in `values`: all parts of it, where the syncer has several shards."""
        if self._rank_plan is not None:
            parts = [(one, values, meter.expect_part()) for one in self.shards.parts_held(fragment)]
            return await fetch_one_version([partial(self._fetch_rank_part, *part) for part in parts])
        held = self.shards.places_of(self._box.plan.fragments[fragment])
        places = [(one, values[one.values], meter.expect_part()) for one in held]
        return await fetch_one_version([partial(self._fetch_place, *place) for place in places])

    async def _fetch_rank_part(self, part: RankPart, values: FloatArray, arrival: PartArrival, least: int) -> int:
        """The version that one shard has of what this rank holds, now in its places in `values`."""
        fragment, front, behind = part.held.index, part.front, part.behind
        side_by_side = front.stop == behind.start
        if side_by_side or not part.sent.size or part.sent.size == part.held.size:
            first = front.start if part.sent.size else behind.start
            into, apart = values[first : first + part.held.size], False
        else:
            into, apart = np.empty(part.held.size, np.float32), True
        data, who = into.view(np.uint8).data, (self._start.learner, self._start.rank)
        coded = self._expect_coded(fragment, part.held)
        version, _, _ = await self.shards.reach(
            part.shard, lambda to: to.get_fragment(fragment, data, BODY_S, *who, least, arrival, coded)
        )
        await self._decode(part.held, coded, into)
        if apart and is_small(part.held):
            _put_apart(part, into, values)
        elif apart:
            await asyncio.to_thread(_put_apart, part, into, values)
        return version

    async def _fetch_place(self, place: PartPlace, values: FloatArray, arrival: PartArrival, least: int) -> int:
        """The version that one shard has; made of what is held where the shard has the steps from there. `least`: the
        one that other shards have."""
        fragment, data = place.part.index, values.view(np.uint8).data
        have, step_bytes = self._held.version_of(fragment), self._held.step_bytes(place.part)
        if have >= 0:
            found = await self.shards.reach(
                place.shard, lambda to: to.get_version(fragment, have, step_bytes, data, BODY_S, least, arrival)
            )
            if not found.steps or await self._apply_steps(place, have, found, values, arrival):
                return found.version
            say(f"fragment {fragment} is fetched whole: its steps do not fit version {have}")
        coded = self._expect_coded(fragment, place.part)
        version, _, _ = await self.shards.reach(
            place.shard, lambda to: to.get_fragment(fragment, data, BODY_S, least=least, part=arrival, coded=coded)
        )
        await self._decode(place.part, coded, values)
        return version

    def _expect_coded(self, fragment: int, part: Fragment) -> CodedBody | None:
        """Return the form in which version 0 may come. None: no version that this learner lacks has another form."""
        may_come = self._rounds_initial and self._box.base_version[fragment] < 0
        return CodedBody(BF16, count_initial_bytes(part)) if may_come else None

    async def _decode(self, part: Fragment, coded: CodedBody | None, values: FloatArray) -> None:
        if coded is not None and coded.data is not None:
            data = np.frombuffer(coded.data, np.uint8)
            await _run_aside(part, lambda: decode_initial(part, data, values))

    async def _apply_steps(
        self, place: PartPlace, have: int, found: FetchedVersion, values: FloatArray, arrival: PartArrival
    ) -> bool:
        given = (place, have, found.steps, values, found.digest)
        if is_small(place.part):
            with arrival.working():
                return self._held.apply_steps(*given)
        async with self._applying, self._base_locks[place.part.index]:
            with arrival.working():
                return await asyncio.to_thread(self._held.apply_steps, *given)

    def _keep_and_round(self, part: Fragment, version: int, values: FloatArray) -> None:
        self._held.keep(part.index, version, values)
        as_held(part, values)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task
