"""How a run ends in good order.

At its end learners fetch the last versions and the evaluator scores them: the syncer waits for both, each for a limited
time, and an event says whom it did not wait for any longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atoll.fabric.wire import one_line
from atoll.protocol.account import make_account
from atoll.protocol.errors import AtollError
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer
from atoll.store.writer_lease import Deposed
from atoll.syncer.effect_queue import EffectQueue
from atoll.syncer.run_store import RunStore
from atoll.telemetry.events import EventLog
from atoll.telemetry.status import RelayStatus

GOODBYE_S = 15.0
"""How long a finished run stays up for learners that fetch its last versions."""
LAST_SCORE_S = 120.0
"""How long it waits for the last score of an evaluator that the supervisor keeps alive."""
BY_HAND_S = 20.0
"""The same for one that was started by hand and may be gone, beside three times what its last score took."""


class RunEnding:
    """Belongs to one event loop."""

    def __init__(self, events: EventLog, *, evaluated: bool, score_wait_s: float = 0.0) -> None:
        """`evaluated`: the run was started with an evaluator. `score_wait_s`: wait that long for its last score."""
        self._events, self._score_s = events, max(LAST_SCORE_S, score_wait_s) if evaluated else 0.0
        """How long the last score is waited for; 0: there is no evaluator."""
        self._reason = ""
        self.computed_before = 0
        """Tokens of the run that were computed before this syncer served it."""
        self._finished, self._emptied, self._scored = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def finish_run(self, reason: str) -> None:
        self._reason = reason
        self._finished.set()

    async def wait_until_finished(self) -> None:
        await self._finished.wait()

    def count_connected(self, learners: int) -> None:
        """Note how many learners are connected."""
        if learners:
            self._emptied.clear()
        else:
            self._emptied.set()

    def note_score(self, *, final: bool, took_s: float = 0.0) -> None:
        """A score came: there is an evaluator, also where it was started by hand."""
        if self._score_s < LAST_SCORE_S:
            self._score_s = min(LAST_SCORE_S, BY_HAND_S + 3 * took_s)
        if final:
            self.stop_scoring()

    def stop_scoring(self) -> None:
        """The evaluator has sent its last score, or is gone."""
        self._scored.set()

    def log_last_work(self) -> None:
        """Log what the end waits for, before it does."""
        scored = " and scored" if self._score_s and not self._scored.is_set() else ""
        self._events.say("closing", f"the last steps are in; the model is written{scored}")

    async def wait_for_last(self, *, trained: bool) -> None:
        """Wait for learners and the evaluator; `trained`: there are parameters to score."""
        await self._wait_for(self._emptied, GOODBYE_S, "its last learners")
        if self._score_s and trained:
            await self._wait_for(self._scored, self._score_s, "the evaluator's last score")

    async def _wait_for(self, event: asyncio.Event, limit_s: float, whom: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await event.wait()
        except TimeoutError:
            self._events.say("warning", f"the run closes without {whom}, after a wait of {limit_s:g} s")

    def log_end(self, machine: Syncer | None, traffic: tuple[int, int], relays: Sequence[RelayStatus] = ()) -> None:
        """Log the last event; `traffic`: bytes received and sent."""
        # A learner that this term never met is left out: the earlier term logged more of it than is known here.
        known = machine.members.learners.values() if machine is not None else ()
        learners = [one for one in known if one.joined_at]
        account = make_account(machine.history, {one.name: one.t for one in learners}) if machine is not None else {}
        data: dict[str, object] = {
            "reason": self._reason,
            **account,
            "learners": [
                {
                    "learner": one.name,
                    "incarnation": one.incarnation,
                    "t": one.t,
                    "tokens": one.tokens_total,
                    "busy_s": one.busy_s,
                }
                for one in learners
            ],
            "computed_before": self.computed_before,
            "bytes_in": traffic[0],
            "bytes_out": traffic[1],
        }
        if relays:
            data["relays"] = {one.relay: {"bytes_in": one.bytes_in, "bytes_out": one.bytes_out} for one in relays}
        self._events.say("finished", f"the run is over: {self._reason}", data)


async def write_tail(cycles: int, run_store: RunStore, queue: EffectQueue, events: EventLog) -> None:
    """The mean of the last versions, if it is asked for: its record first, then the file."""
    if not cycles:
        return
    try:
        tail = await asyncio.to_thread(run_store.average_tail, cycles)
        for remark in tail.remarks:
            events.say("warning", remark)
        queue.enqueue([fx.Persist((tail.record,))])
        await queue.wait_until_empty()
        path = await asyncio.to_thread(run_store.write_tail, tail)
    except Deposed:
        raise
    except (AtollError, MemoryError) as error:
        reason = one_line(error) or "it does not fit into this syncer's memory"
        events.say("warning", f"no averaged model is written: {reason}")
    else:
        events.say("closing", f"the mean of the last {cycles} cycles is in {path.name}")
