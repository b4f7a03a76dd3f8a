"""Contributions, from the pull that asks for one to the version that is made of them.

- Only a contribution that was asked for may arrive: `Inbox` holds its body, in a buffer that is used again, until its
  round is merged; nobody keeps it decoded (numerics/deltas.py). Of a learner of several ranks it has a body of each
  that sends something of the fragment, and has arrived when all have. These are decoded, each by its rank's plan, into
  one delta; nothing behind that knows of ranks.
- It is checked and screened when it has arrived, and merged when the state machine says so (`Merging`).
- Of one that a relay holds there is no body here, but what the relay says of it; it is screened by that, and its round
  is merged with the relay's sum (relays.py).
- Large fragments are worked on in a thread, small ones on the event loop. A contribution that is discarded while a
  thread reads it gives its buffers back afterwards.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from atoll.digests import combine_digests
from atoll.fabric.wire import SMALL_BYTES
from atoll.numerics.agreement import Autocorrelation, by_size
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, body_nbytes, check_contribution, decode_contribution, largest_body
from atoll.numerics.compiled import thread_count
from atoll.numerics.deltas import DecodedDelta, EncodedDelta, ReadableDelta
from atoll.numerics.filter import Filter, FilterVerdict, check_kept
from atoll.numerics.fragments import Fragment, FragmentPlan
from atoll.numerics.merge import NormExchange
from atoll.numerics.moments import check_moments, most_bytes
from atoll.numerics.rank_plan import RankPlan
from atoll.numerics.references import MOST as MOST_REFERENCES
from atoll.numerics.screen import NormScreen
from atoll.numerics.shard_plan import ShardPlan
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Contribution, ContributionKey
from atoll.protocol.relay import HeldBody
from atoll.protocol.settings import Settings
from atoll.protocol.syncer import effects as fx
from atoll.syncer.outer_state import Overflow
from atoll.syncer.parameters import Parameters
from atoll.syncer.shared_filter import SharedFilter

MOST_CYCLES = 16
"""Cycles of H steps that a contribution may claim when its norm is judged: a learner that was away gives several."""
LARGE = SMALL_BYTES // 4
"""Fragments of more elements than this are screened and merged in a thread …"""
ALIGNED = 8
"""Bytes: where numbers of any size may begin."""
STALE = 3
"""Bodies of one learner that are still being received after they were discarded; more are refused until one ends."""
PAIRS = 16
"""… and smaller ones too where more pairs of contributions than this are compared."""


@dataclass(slots=True)
class PendingBody:
    """Of a contribution, or of one rank's part of it."""

    start: int
    size: int
    """Where it lies in the contribution's buffer, in bytes."""
    receiving: bool = False
    digest: str | None = None
    """Set once it has arrived."""


@dataclass(slots=True)
class PendingContribution:
    fragment: int
    plans: tuple[RankPlan, ...]
    """Of its learner's ranks; none: it is of a plain learner."""
    bodies: dict[int, PendingBody]
    """By rank, in order: of those that send something of this fragment."""
    buffer: ByteArray | None = None
    """For all its bodies."""
    held: bool = False
    """A thread reads it, or is about to."""
    delta: ReadableDelta | None = None
    """Once it was opened."""
    values: FloatArray | None = None
    """What the bodies of several ranks give together."""
    figures: HeldBody | None = None
    """Its body is held by a relay, which says this of it."""
    screened: bool = False
    """Of such a one: its message has come."""
    unwanted: bool = False
    """Discarded while it was received or read: its buffers are freed when that ends."""

    @property
    def size(self) -> int:
        return max(body.start + body.size for body in self.bodies.values())

    @property
    def receiving(self) -> bool:
        return any(body.receiving for body in self.bodies.values())

    @property
    def digest(self) -> str | None:
        """Set once all bodies have arrived."""
        digests = [body.digest for body in self.bodies.values() if body.digest is not None]
        return combine_digests(digests) if len(digests) == len(self.bodies) else None


class Inbox:
    def __init__(self, plan: FragmentPlan, codec: Codec, *, moments: bool = False) -> None:
        """`moments`: those of the inner optimizer come behind every contribution (numerics/moments.py)."""
        self._plan, self._codec, self._moments = plan, codec, moments
        self._sizes = [body_nbytes(codec, part) for part in plan.fragments]
        """Of whole bodies, in bytes."""
        self._largest = largest_body(codec, plan) + (most_bytes(plan) if moments else 0)
        self._pending: dict[ContributionKey, PendingContribution] = {}
        self._buffers: list[ByteArray] = []
        self._arrays: list[FloatArray] = []
        """For the values of ranks together."""
        self._probes: dict[str, ContributionKey] = {}
        self._unwanted: dict[str, set[ContributionKey]] = {}
        """By learner, what was discarded while it was received or read."""

    def expect_body(
        self, key: ContributionKey, fragment: int, *, probe: bool = False, plans: tuple[RankPlan, ...] = ()
    ) -> None:
        """A pull was sent: this contribution may arrive. A learner has at most one probe at a time. `plans`: of its
        ranks."""
        if probe:
            self.discard(self._probes.get(key[0], key))  # whatever came of it
            self._probes[key[0]] = key
        self.discard(key)
        if (pending := self._pending.get(key)) is None:
            self._pending[key] = PendingContribution(fragment, plans, self._lay_out_bodies(fragment, plans))
            return
        pending.unwanted = False
        self._forget_unwanted(key)
        for body in pending.bodies.values():
            if not body.receiving and not pending.held:
                body.digest = None  # that rank sends it again

    def _lay_out_bodies(self, fragment: int, plans: tuple[RankPlan, ...]) -> dict[int, PendingBody]:
        """One for each rank that sends something, at multiples of ALIGNED bytes."""
        if not plans:
            return {0: PendingBody(0, self._sizes[fragment])}
        bodies, start = {}, 0
        for rank, plan in enumerate(plans):
            if size := body_nbytes(self._codec, plan.sent(fragment)):
                bodies[rank] = PendingBody(start, size)
                start += -(-size // ALIGNED) * ALIGNED
        return bodies

    def receive_body(self, key: ContributionKey, named: int = 0, rank: int = 0) -> memoryview:
        """`named`: the bytes that it is said to have, which count where moments come with it: their number follows from
        what they are. PeerError: nobody waits for this body."""
        pending, body = self._find_wanted(key, rank)
        if pending.buffer is None:
            pending.buffer = self._take_buffer(pending.size)
        body.receiving = True
        if self._moments:
            least = self._body_nbytes(pending) + len(self._plan.fragments[pending.fragment].pieces)
            body.size = max(least, min(named, pending.buffer.size))
        return pending.buffer[body.start : body.start + body.size].data

    def _find_wanted(self, key: ContributionKey, rank: int) -> tuple[PendingContribution, PendingBody]:
        pending = self._pending.get(key)
        if pending is None:
            raise PeerError(f"no contribution to round {key[1]} (attempt {key[2]}) is waited for")
        if (body := pending.bodies.get(rank)) is None:
            raise PeerError(_describe_wrong_rank(key[0], rank, pending))
        if body.receiving or body.digest is not None:
            raise PeerError(f"the contribution to round {key[1]} is here already")
        if pending.unwanted:
            raise PeerError(f"no contribution to round {key[1]} (attempt {key[2]}) is waited for any more")
        stale = sum(self._pending[one].receiving for one in self._unwanted.get(key[0], ()))
        if stale >= STALE:
            raise PeerError(f"{stale} bodies of {key[0]} that nobody waits for are still being received")
        return pending, body

    def _take_buffer(self, size: int) -> ByteArray:
        """One that is used again; ranks' parts may take more together than any whole body."""
        if size > self._largest:
            return np.empty(size, dtype=np.uint8)
        return self._buffers.pop() if self._buffers else np.empty(self._largest, dtype=np.uint8)

    def fragment_of(self, key: ContributionKey) -> int | None:
        """Of a contribution that is waited for."""
        pending = self._pending.get(key)
        return None if pending is None or pending.unwanted else pending.fragment

    def mark_arrived(self, key: ContributionKey, mark: str, rank: int = 0) -> str | None:
        """The digest of the contribution; None: bodies of other ranks are still to come, or nobody waits for it."""
        pending = self._pending.get(key)
        if pending is None or rank not in pending.bodies:
            return None
        pending.bodies[rank].digest = mark
        digest = pending.digest
        self.mark_aborted(key, rank)
        return digest

    def mark_aborted(self, key: ContributionKey, rank: int = 0) -> None:
        pending = self._pending.get(key)
        if pending is not None and rank in pending.bodies:
            pending.bodies[rank].receiving = False
            self._free_if_unwanted(key, pending)

    def note_held(self, key: ContributionKey, figures: HeldBody) -> None:
        """A relay holds its body. PeerError: nobody waits for it."""
        pending, _ = self._find_wanted(key, 0)
        pending.figures = figures
        self.mark_arrived(key, figures.digest)

    def is_held(self, key: ContributionKey) -> bool:
        """Whether a relay has its body."""
        pending = self._pending.get(key)
        return pending is not None and pending.figures is not None

    def held_norm(self, key: ContributionKey) -> float:
        """As the relay has measured it."""
        figures = self._pending[key].figures
        assert figures is not None
        return figures.norm

    def screen_held(self, key: ContributionKey, mark: str) -> float:
        """Its norm; PeerError: it is not the one that its message names, or no body of its fragment."""
        pending = self._pending[key]
        assert pending.figures is not None
        pending.screened = True
        if pending.figures.digest != mark:
            raise PeerError("its body is not the one its message names")
        if pending.figures.refusal:
            raise PeerError(pending.figures.refusal)
        return pending.figures.norm

    def is_opened(self, key: ContributionKey) -> bool:
        """Whether its message has come before."""
        pending = self._pending.get(key)
        return pending is not None and (pending.held or pending.screened or pending.delta is not None)

    def hold_buffers(self, key: ContributionKey) -> PendingContribution | None:
        """Until they are released its buffers are not reused, even if it is discarded."""
        pending = self._pending.get(key)
        if pending is not None:
            pending.held = True
        return pending

    def release_buffers(self, key: ContributionKey, pending: PendingContribution | None) -> None:
        if pending is not None:
            pending.held = False
            self._free_if_unwanted(key, pending)

    def open_body(self, key: ContributionKey, mark: str) -> ReadableDelta:
        """Check the body; PeerError: it is not the one that its message names, or none of its fragment."""
        pending = self._pending.get(key)
        if pending is None or pending.buffer is None or (digest := pending.digest) is None:
            raise PeerError(_describe_missing(pending))
        if digest != mark:
            raise PeerError("its body is not the one its message names")
        assert pending.delta is None, "a body is opened once"
        part = self._plan.fragments[pending.fragment]
        if pending.plans:
            pending.values = self._arrays.pop() if self._arrays else np.empty(self._plan.largest, dtype=np.float32)
            self._decode_ranks(pending, pending.buffer, pending.values[: part.size])
            pending.delta = DecodedDelta(part, pending.values[: part.size])
        else:
            data = pending.buffer[: self._body_nbytes(pending)]
            check_contribution(self._codec, part, data)
            pending.delta = EncodedDelta(self._codec, part, data)
        if self._moments:
            check_moments(part, self._moments_of(pending))
        return pending.delta

    def _decode_ranks(self, pending: PendingContribution, data: ByteArray, out: FloatArray) -> None:
        """Each rank's part to its place: together they are the whole (`check_tiling`)."""
        for rank, body in pending.bodies.items():
            plan = pending.plans[rank]
            part = plan.sent(pending.fragment)
            values = np.empty(part.size, np.float32)
            try:
                decode_contribution(self._codec, part, data[body.start : body.start + body.size], values)
            except PeerError as error:
                raise PeerError(f"rank {rank}: {error}") from None
            plan.scatter(pending.fragment, values, out)

    def _body_nbytes(self, pending: PendingContribution) -> int:
        return self._sizes[pending.fragment]

    def get_delta(self, key: ContributionKey) -> ReadableDelta:
        delta = self._pending[key].delta
        assert delta is not None, "it was opened"
        return delta

    def get_moments(self, keys: Sequence[ContributionKey]) -> list[ByteArray]:
        """What came with these contributions; nothing where moments are not shared."""
        return [self._moments_of(self._pending[key]) for key in keys] if self._moments else []

    def _moments_of(self, pending: PendingContribution) -> ByteArray:
        assert pending.buffer is not None
        return pending.buffer[self._body_nbytes(pending) : pending.size]

    def discard(self, key: ContributionKey) -> None:
        if (pending := self._pending.get(key)) is not None:
            pending.unwanted = True
            self._unwanted.setdefault(key[0], set()).add(key)
            self._free_if_unwanted(key, pending)

    def _forget_unwanted(self, key: ContributionKey) -> None:
        if (unwanted := self._unwanted.get(key[0])) is not None:
            unwanted.discard(key)
            if not unwanted:
                del self._unwanted[key[0]]

    def _free_if_unwanted(self, key: ContributionKey, pending: PendingContribution) -> None:
        if not pending.unwanted or pending.receiving or pending.held:
            return
        self._forget_unwanted(key)
        del self._pending[key]
        if pending.buffer is not None and pending.buffer.size == self._largest:
            self._buffers.append(pending.buffer)
        if pending.values is not None:
            self._arrays.append(pending.values)


def _describe_wrong_rank(learner: str, rank: int, pending: PendingContribution) -> str:
    if not pending.plans:
        return f"{learner} is a plain learner: there is no part of a rank {rank}"
    if rank >= len(pending.plans):
        return f"{learner} has no rank {rank}: it has declared {len(pending.plans)}"
    return f"rank {rank} of {learner} sends nothing of fragment {pending.fragment}"


def _describe_missing(pending: PendingContribution | None) -> str:
    if pending is None or not pending.plans:
        return "its body did not arrive"
    missing = [str(rank) for rank, body in pending.bodies.items() if body.digest is None]
    return f"the bodies of its ranks {', '.join(missing[:8])} did not arrive"


def make_screen(plan: FragmentPlan, settings: Settings, limit: float, *, feedback: bool) -> NormScreen:
    """Norms are judged after eight rounds of every learner: while a learning rate warms up they are tiny."""
    few = 8 * settings.learners
    return NormScreen(plan, limit, 2 * few, few, most_steps(settings), feedback, thread_count())


def most_steps(settings: Settings) -> int:
    """That a contribution may claim."""
    return MOST_CYCLES * max(one.sync_every for one in settings.in_all_phases)


class SumMissing(Exception):
    """A relay did not give what a round needs."""


class RelayedSums(Protocol):
    """What merging needs of relays (relays.py)."""

    def holds_any(self, merge: fx.Merge) -> bool: ...

    def drop_body(self, key: ContributionKey) -> None: ...

    def settle_round(self, round: int, *, merged: bool) -> None: ...

    async def merge_sums(self, merge: fx.Merge) -> tuple[FloatArray, tuple[tuple[str, ...], ...]]:
        """The outer gradient, and the learners whose contributions came as one sum. SumMissing, ValueError: there is
        none."""
        ...


class Merging:
    def __init__(
        self,
        parameters: Parameters,
        inbox: Inbox,
        screen: NormScreen,
        robust: bool,
        tell: Callable[[fx.SyncerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._parameters, self._inbox, self._screen = parameters, inbox, screen
        self._fragments, self.robust = parameters.plan.fragments, robust
        self._filter = Filter(parameters.plan, parameters.threads, secrets.randbits(128))
        self._autocorrelation = Autocorrelation(parameters.plan)
        self._outer_figures: dict[int, dict[str, float | None]] = {}
        """By fragment, of its newest merged gradient."""
        self._tell, self._spawn = tell, spawn
        self.sync_every = 1
        """H."""
        self.relays: RelayedSums | None = None
        self._shared_filter: Filter | None = None

    def use_shards(self, plan: ShardPlan) -> None:
        """Of several shards this is the lead: with `robust` it judges whole fragments, of which it holds a part."""
        self._shared_filter = Filter(plan.whole)

    # ---- contributions ------------------------------------------------------------------------------------------

    def screen_contribution(self, learner: str, message: Contribution) -> None:
        """Check and screen it; then the state machine gets the event."""
        key = (learner, message.round, message.attempt)
        if self._inbox.is_opened(key):
            return  # sent twice: the first one counts
        in_range = 0 <= message.fragment < len(self._fragments)
        if not in_range or self._fragments[message.fragment].size <= LARGE:
            self._tell(fx.Delivered(learner, message, self._open_and_screen(key, message)))
        else:
            # Held from now on, not from when the task starts: a second copy of the message may be read before that.
            self._spawn(self._screen_in_thread(key, message, self._inbox.hold_buffers(key)))

    async def _screen_in_thread(
        self, key: ContributionKey, message: Contribution, held: PendingContribution | None
    ) -> None:
        refusal = await asyncio.to_thread(self._open_and_screen, key, message)
        self._inbox.release_buffers(key, held)
        self._tell(fx.Delivered(key[0], message, refusal))

    def _open_and_screen(self, key: ContributionKey, message: Contribution) -> str | None:
        """The reason for a refusal, or None."""
        if self._inbox.is_held(key):
            return self._screen_held(key, message)
        try:
            delta = self._inbox.open_body(key, message.digest)
        except PeerError as error:
            return str(error)
        if message.probe or message.steps <= 0:
            return None
        committed = self._parameters.values_of_version(message.fragment, message.base)
        return self._screen.judge(message.fragment, delta, message.steps, key, committed)

    def _screen_held(self, key: ContributionKey, message: Contribution) -> str | None:
        try:
            norm = self._inbox.screen_held(key, message.digest)
        except PeerError as error:
            return str(error)
        if message.probe or message.steps <= 0 or not 0 <= message.fragment < len(self._fragments):
            return None  # a fragment that there is not is against the rules
        return self._screen.judge_measured(message.fragment, norm, message.steps, key)

    def discard(self, key: ContributionKey) -> None:
        self._inbox.discard(key)
        self._screen.forget_norm(key)
        if self.relays is not None:
            self.relays.drop_body(key)

    # ---- rounds -------------------------------------------------------------------------------------------------

    def merge_round(self, merge: fx.Merge) -> None:
        for part in merge.parts:
            self._screen.note_merged((part.learner, merge.round, part.attempt))
        if self.relays is not None and self.relays.holds_any(merge):
            self._spawn(self._merge_sums(self.relays, merge))
            return
        pairs = len(merge.parts) * min(len(merge.parts), MOST_REFERENCES)
        if self._fragments[merge.fragment].size * max(1, pairs / PAIRS) <= LARGE:
            asyncio.get_running_loop().call_soon(self._tell, self.merge_and_step(merge))
        else:
            self._spawn(self._merge_in_thread(merge))

    async def _merge_in_thread(self, merge: fx.Merge) -> None:
        self._tell(await asyncio.to_thread(self.merge_and_step, merge))

    async def _merge_sums(self, relays: RelayedSums, merge: fx.Merge) -> None:
        """Members behind relays come as sums: nobody compares them with each other."""
        began = time.perf_counter()
        answer: fx.SyncerEvent
        try:
            gradient, groups = await relays.merge_sums(merge)
            answer = await asyncio.to_thread(self._step_merged, merge, gradient, groups, began)
        except (SumMissing, ValueError) as error:
            answer = fx.Unmergeable(merge.round, str(error))
        if isinstance(answer, fx.Unmergeable):  # or the next attempt's commit would name these sums too
            relays.settle_round(merge.round, merged=False)
        self._tell(answer)

    def _step_merged(
        self, merge: fx.Merge, gradient: FloatArray, groups: tuple[tuple[str, ...], ...], began: float
    ) -> fx.SyncerEvent:
        try:
            mark = self._parameters.stage_merge(merge.fragment, [gradient], [1.0])
            self._outer_figures[merge.fragment] = self._measure_gradient(merge.fragment)
        except Overflow as error:
            return fx.Unmergeable(merge.round, str(error), reset=True)
        marks = self._parameters.piece_marks(merge.fragment)
        return fx.Merged(merge.round, mark, time.perf_counter() - began, marks, groups=groups)

    def merge_and_step(
        self, merge: fx.Merge, exchange: NormExchange | None = None, shared: SharedFilter | None = None
    ) -> fx.Merged | fx.Unmergeable:
        """`exchange`, `shared`: of a part, where the merge or the filter needs what the other shards have."""
        began = time.perf_counter()
        keys = [(part.learner, merge.round, part.attempt) for part in merge.parts]
        held = self._fragments[merge.fragment].size > 0  # else no body of it comes here
        deltas = [self._inbox.get_delta(key) for key in keys] if held else []
        moments = self._inbox.get_moments(keys) if held else []
        weights, bases = [part.weight for part in merge.parts], [part.base for part in merge.parts]
        try:
            if shared is not None:
                judged, factors = self._judge_with_others(shared, merge, deltas, weights)
            else:
                # The filter judges also without `robust`, so that events name an attacker although nothing is left out.
                # A sample does for that: a round waits for the filter.
                judged = self._judge_deltas(merge, deltas) if held else []
                factors = [one.factors for one in judged] if self.robust else []
                if factors:
                    check_kept(factors, weights)
            mark = self._parameters.stage_merge(merge.fragment, deltas, weights, factors, bases, moments, exchange)
            self._outer_figures[merge.fragment] = self._measure_gradient(merge.fragment)
        except Overflow as error:
            return fx.Unmergeable(merge.round, str(error), reset=True)
        except ValueError as error:
            return fx.Unmergeable(merge.round, str(error))
        marks = self._parameters.piece_marks(merge.fragment)
        fragment = self._fragments[merge.fragment] if shared is None else shared.plan.whole.fragments[merge.fragment]
        told = self._describe_verdicts(merge, fragment, judged)
        return fx.Merged(merge.round, mark, time.perf_counter() - began, marks, told)

    def _judge_deltas(self, merge: fx.Merge, deltas: Sequence[ReadableDelta]) -> list[FilterVerdict]:
        momentum, names = self._parameters.momentum(merge.fragment), [part.learner for part in merge.parts]
        steps = self._count_steps(self._filter, merge)
        return self._filter.judge(merge.fragment, names, deltas, momentum, merge.round, steps, sample=not self.robust)

    def _count_steps(self, by: Filter, merge: fx.Merge) -> list[int]:
        by.sync_every = self.sync_every
        return [part.steps for part in merge.parts]

    def _judge_with_others(
        self, shared: SharedFilter, merge: fx.Merge, deltas: Sequence[ReadableDelta], weights: Sequence[float]
    ) -> tuple[list[FilterVerdict], list[FloatArray]]:
        """The verdicts on the whole fragment, and the factors of this part of it."""
        assert self._shared_filter is not None, "the lead of several shards says so before the first round"
        names = [part.learner for part in merge.parts]
        steps = self._count_steps(self._shared_filter, merge)
        judged = shared.judge(self._shared_filter, merge.fragment, names, weights, deltas, self._parameters, steps)
        return judged, shared.select_factors(merge.fragment, [one.factors for one in judged])

    def _measure_gradient(self, fragment: int) -> dict[str, float | None]:
        gradient = self._parameters.outer_gradient(fragment)
        rho = self._autocorrelation.measure(fragment, gradient) if gradient.size else None
        if rho is None:
            return {"rho": None, "outer_step": None}
        return {"rho": round(rho, 4), "outer_step": round(self._parameters.effective_step(rho), 4)}

    def describe_outer_step(self, fragment: int) -> dict[str, float | None]:
        """For the event of its last round: ρ and the effective outer step. None: it was the first gradient here."""
        return self._outer_figures[fragment]

    def _describe_verdicts(
        self, merge: fx.Merge, fragment: Fragment, judged: list[FilterVerdict]
    ) -> tuple[fx.Judged, ...]:
        """For the state machine: who agrees, what share of the merge each has, and the factors that were used."""
        if not judged:
            return ()
        kept = [by_size(fragment, one.factors.astype(np.float64)) if self.robust else 1.0 for one in judged]
        counts = [part.weight * float(of) for part, of in zip(merge.parts, kept, strict=True)]
        return tuple(
            fx.Judged(
                learner=part.learner,
                agreement=one.agreement,
                influence=count / sum(counts),
                factors=one.factors.tobytes() if self.robust and (one.factors != 1).any() else b"",
                suspect=one.suspect,
                kept=float(of),
            )
            for part, one, count, of in zip(merge.parts, judged, counts, kept, strict=True)
        )
