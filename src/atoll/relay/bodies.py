"""Bodies that a relay holds, and the sums that it makes of them. The rules are those of protocol/relay.py.

Bodies are kept as they came and decoded when they are measured and when they are summed: encoded they take the least
memory, and of one member alone the body goes on as it came.

With a codec that keeps feedback a sum is encoded with what earlier sums of its fragment left out. What it leaves out
itself, its rest, waits until a commit names the sum; then it is the fragment's feedback. Otherwise it is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.digests import compute_digest
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.compiled import thread_count
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.group_sums import mean_rows, sum_group
from atoll.numerics.screen import measure_delta
from atoll.protocol.errors import PeerError
from atoll.protocol.limits import FAR
from atoll.protocol.messages import ContributionKey, TensorSpec
from atoll.protocol.relay import HeldBody, RelayHoldings, SumAsked, SumSettled
from atoll.protocol.settings import Settings


class MadeSum(NamedTuple):
    data: ByteArray
    digest: str
    rest: FloatArray | None
    """What it leaves out, where the codec keeps feedback."""


class HeldBodies:
    def __init__(self, tensors: tuple[TensorSpec, ...], settings: Settings) -> None:
        """Of a run with this model."""
        self.plan: FragmentPlan = make_plan(tensors, settings.fragments, settings.plan)
        self._threads = thread_count()
        self._codec: Codec = make_codec(settings.codec, self._threads)
        self.holdings = RelayHoldings()
        self._bodies: dict[ContributionKey, ByteArray] = {}
        self._feedback: dict[int, FloatArray] = {}
        self._rests: dict[int, FloatArray] = {}
        """By ask, of sums that are not committed."""

    def body_nbytes(self, fragment: int) -> int:
        return body_nbytes(self._codec, self.plan.fragments[fragment])

    def measure(self, fragment: int, data: ByteArray, digest: str) -> HeldBody:
        """By what it is screened."""
        delta = np.empty(self.plan.fragments[fragment].size, np.float32)
        try:
            decode_contribution(self._codec, self.plan.fragments[fragment], data, delta)
        except PeerError as error:
            return HeldBody(digest, 0.0, str(error))
        norm, broken = measure_delta(delta)
        return HeldBody(digest, min(norm, 0.99 * FAR), broken)

    def hold(self, key: ContributionKey, digest: str, data: ByteArray) -> bool:
        """False: it was forgotten while it came."""
        if not self.holdings.hold_body(key, digest):
            return False
        self._bodies[key] = data
        return True

    def find_bodies(self, keys: list[ContributionKey]) -> list[ByteArray]:
        """Taken before a thread sums them: meanwhile they may be dropped here."""
        return [self._bodies[key] for key in keys]

    def make_sum(self, asked: SumAsked, bodies: list[ByteArray]) -> MadeSum:
        """Touches nothing that the event loop changes, but the fragment's feedback, which stays as it is while a sum of
        the fragment is not settled."""
        part = self.plan.fragments[asked.fragment]
        weights = [member.weight for member in asked.members]
        if len(bodies) == 1 and not asked.rows:
            return MadeSum(bodies[0], compute_digest(bodies[0].data), None)
        deltas = []
        for body in bodies:
            deltas.append(np.empty(part.size, np.float32))
            decode_contribution(self._codec, part, body, deltas[-1])
        if asked.rows:
            means = mean_rows(asked.rule, part, asked.rows, deltas, weights).view(np.uint8)
            return MadeSum(means, compute_digest(means.data), None)
        total = np.empty(part.size, np.float32)
        radii = sum_group(asked.rule, part, deltas, weights, total, self._threads)
        rest = np.empty(part.size, np.float32) if self._codec.needs_feedback else None
        size = self.body_nbytes(asked.fragment)
        data = np.empty(size + radii.nbytes, np.uint8)
        feedback = self._feedback.get(asked.fragment) if self._codec.needs_feedback else None
        encode_contribution(self._codec, part, Delta(total, np.zeros_like(total), feedback, rest), data[:size])
        data[size:] = radii.view(np.uint8)
        return MadeSum(data, compute_digest(data.data), rest)

    def note_sum(self, asked: SumAsked, made: MadeSum) -> None:
        """It is sent. Only one sum of a fragment may still be committed: rests of earlier ones are dropped."""
        self.holdings.note_summed(asked)
        if made.rest is not None:
            for ask in [ask for ask in self._rests if self.holdings.summed.get(ask, (0, -1))[1] == asked.fragment]:
                del self._rests[ask]
            self._rests[asked.ask] = made.rest

    def settle(self, settled: SumSettled) -> None:
        """The round is committed with the sum of this ask in it."""
        gone, fragment = self.holdings.settle_round(settled)
        self._forget(gone)
        rest = self._rests.pop(settled.ask, None)
        if fragment is not None and rest is not None:
            self._feedback[fragment] = rest
        self._rests = {ask: rest for ask, rest in self._rests.items() if ask in self.holdings.summed}

    def expect(self, key: ContributionKey, fragment: int) -> None:
        self._forget(self.holdings.expect_body(*key, fragment))

    def drop(self, key: ContributionKey) -> None:
        self.holdings.forget_body(key)
        self._forget([key])

    def lose_syncer(self) -> None:
        self.holdings.lose_syncer()
        self._bodies.clear()
        self._rests.clear()

    def _forget(self, keys: list[ContributionKey]) -> None:
        for key in keys:
            self._bodies.pop(key, None)
