"""From a contribution's body to the next version: decoded and screened when it comes, merged when the rules say so.

Large fragments are worked on beside the event loop, small ones at once. A contribution that is discarded while it is
decoded beside it gives its buffers back only afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from atoll.numerics.agreement import by_size
from atoll.numerics.filter import Filter, Judged
from atoll.numerics.screen import Screen
from atoll.protocol import effects as fx
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import Contribution
from atoll.syncer.inbox import Inbox, Key
from atoll.syncer.parameters import Overflow, Parameters

LARGE = 1 << 18
"""Fragments of more elements than this are decoded and merged beside the event loop …"""
PAIRS = 16
"""… and smaller ones too where more pairs of contributions than this are compared."""


class Merging:
    def __init__(
        self,
        parameters: Parameters,
        inbox: Inbox,
        screen: Screen,
        robust: bool,
        tell: Callable[[fx.SyncerEvent], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._parameters, self._inbox, self._screen = parameters, inbox, screen
        self._fragments, self._filter, self.robust = parameters.plan.fragments, Filter(parameters.plan), robust
        self._tell, self._spawn = tell, spawn

    # ---- contributions ------------------------------------------------------------------------------------------

    def contribution(self, learner: str, message: Contribution) -> None:
        """Its body is whole, or should be; the rules hear of it once it was looked at."""
        key = (learner, message.round, message.attempt)
        if self._inbox.opened(key):
            return  # said twice: once is what counts
        in_range = 0 <= message.fragment < len(self._fragments)
        if not in_range or self._fragments[message.fragment].size <= LARGE:
            self._tell(fx.Delivered(learner, message, self._examine(key, message)))
        else:
            self._spawn(self._examine_aside(key, message))

    async def _examine_aside(self, key: Key, message: Contribution) -> None:
        with self._inbox.hold(key):
            refusal = await asyncio.to_thread(self._examine, key, message)
        self._tell(fx.Delivered(key[0], message, refusal))

    def _examine(self, key: Key, message: Contribution) -> str | None:
        """Decode and screen; the reason of a refusal."""
        try:
            delta = self._inbox.open(key, message.digest)
        except PeerError as error:
            return str(error)
        if message.probe or message.steps <= 0:
            return None
        return self._screen.judge(message.fragment, delta, message.steps, key)

    def discard(self, key: Key) -> None:
        self._inbox.discard(key)
        self._screen.forget(key)

    # ---- rounds -------------------------------------------------------------------------------------------------

    def merge(self, merge: fx.Merge) -> None:
        for part in merge.parts:
            self._screen.merged((part.learner, merge.round, part.attempt))
        pairs = len(merge.parts) ** 2  # each is compared with each
        if self._fragments[merge.fragment].size * max(1, pairs / PAIRS) <= LARGE:
            asyncio.get_running_loop().call_soon(self._tell, self._staged(merge))
        else:
            self._spawn(self._merge_aside(merge))

    async def _merge_aside(self, merge: fx.Merge) -> None:
        self._tell(await asyncio.to_thread(self._staged, merge))

    def _staged(self, merge: fx.Merge) -> fx.SyncerEvent:
        began = time.perf_counter()
        deltas = [self._inbox.delta((part.learner, merge.round, part.attempt)) for part in merge.parts]
        try:
            # Everybody is judged, so that the events name an attacker also where nothing is left out.
            momentum = self._parameters.momentum(merge.fragment)
            judged = self._filter.judge(merge.fragment, [part.learner for part in merge.parts], deltas, momentum)
            factors = [one.factors for one in judged] if self.robust else []
            weights, bases = [part.weight for part in merge.parts], [part.base for part in merge.parts]
            mark = self._parameters.stage(merge.fragment, deltas, weights, factors, bases)
        except Overflow as error:
            return fx.Unmergeable(merge.round, str(error), reset=True)
        except ValueError as error:
            return fx.Unmergeable(merge.round, str(error))
        marks = self._parameters.marks(merge.fragment)
        return fx.Merged(merge.round, mark, time.perf_counter() - began, marks, self._judged(merge, judged))

    def _judged(self, merge: fx.Merge, judged: list[Judged]) -> tuple[fx.Judged, ...]:
        """For the rules: who agrees, what share of the merge each has, and the factors that were used."""
        fragment = self._fragments[merge.fragment]
        kept = [by_size(fragment, one.factors.astype(np.float64)) if self.robust else 1.0 for one in judged]
        counts = [part.weight * float(of) for part, of in zip(merge.parts, kept, strict=True)]
        return tuple(
            fx.Judged(
                learner=part.learner,
                agreement=one.agreement,
                influence=count / sum(counts),
                factors=one.factors.tobytes() if self.robust and (one.factors != 1).any() else b"",
                suspect=one.suspect,
            )
            for part, one, count in zip(merge.parts, judged, counts, strict=True)
        )
