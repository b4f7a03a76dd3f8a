"""What an operator asks of a running syncer: other settings, a learner that is to leave.

An answer is given once what was asked for is durable, or heard, or after a while. A drain is in no record: an operator
is told that the learner leaves once the learner has said so, since it then leaves whatever becomes of the syncer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from atoll.fabric.wire import one_line
from atoll.protocol.errors import ConfigError, PeerError
from atoll.protocol.syncer import effects as fx
from atoll.protocol.syncer.machine import Syncer
from atoll.protocol.syncer.membership import KnownLearner
from atoll.syncer.changes import parse_changes

ANSWER_S = 8.0
"""An operator is answered after this long, also if a change of settings is not made yet, or a learner has not heard
that it is to leave. Less than the client's deadline (fabric/transfer.py)."""


class OperatorRequests:
    """Belongs to one event loop."""

    def __init__(
        self,
        machine: Callable[[], Syncer | None],
        handle: Callable[[fx.SyncerEvent], None],
        retunes: Callable[[], bool],
    ) -> None:
        """`machine`: None while the run has not begun; `retunes`: whether changed settings wait to be carried out."""
        self._machine, self._handle, self._retunes = machine, handle, retunes
        self._all_changed = asyncio.Event()
        """Every change of settings that was asked for is durable."""
        self._all_changed.set()
        self._drained: dict[str, asyncio.Future[str]] = {}
        """By learner that the operator drains: what is said once it is leaving, or has left."""

    async def change_settings(self, words: Sequence[str]) -> str:
        """Change settings, as an operator writes them; returns what changed, once that is durable. PeerError: nothing
        was changed."""
        what = self.ask_to_change(words)
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._all_changed.wait()
        except TimeoutError:
            when = "it holds once the rounds under way are committed and the disk has it"
            return f"{what or 'nothing more'} (asked for: {when})"
        return what

    def ask_to_change(self, words: Sequence[str], *, reopen: bool = False) -> str:
        """Returns what will change: at once, or once the rounds under way are committed."""
        if (machine := self._machine()) is None:
            raise PeerError("the run has not begun: settings can change once its first learner is there")
        try:
            asked = parse_changes(machine.history, words, reopen=reopen, before=machine.next_settings)
        except ConfigError as error:
            raise PeerError(str(error)) from None
        if asked is None:
            return ""
        self._all_changed.clear()
        self._handle(asked)
        return asked.what

    def note_changed(self) -> None:
        """A change of settings is durable. Another may have been asked for, or decided, meanwhile."""
        machine = self._machine()
        if machine is not None and machine.next_settings is machine.history and not self._retunes():
            self._all_changed.set()

    async def drain_learner(self, learner: str) -> str:
        """Ask a learner to leave in good order; returns what came of it, once it has heard or is gone. PeerError: it
        cannot be asked."""
        if answer := check_drain(learner, self._machine()):
            return answer
        drained = self._drained.setdefault(learner, asyncio.get_running_loop().create_future())
        self._handle(fx.DrainAsked(learner, "the operator asked"))
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(drained)
        except TimeoutError:
            machine = self._machine()
            assert machine is not None, "a learner was there to be asked"
            return check_drain(learner, machine) or describe_unheard_drain(machine.members.learners[learner])

    def note_event(self, kind: str, text: str, data: Mapping[str, object]) -> None:
        """Of the run: a learner that is drained may be leaving."""
        if kind in ("leaving", "left") and (drained := self._drained.pop(str(data["learner"]), None)):
            drained.set_result(text)


def check_drain(name: str, machine: Syncer | None) -> str:
    """The answer to an operator who drains this learner, where it need not be asked; empty: ask it. PeerError: it
    cannot be asked."""
    learner = machine.members.learners.get(name) if machine is not None else None
    if machine is None or learner is None:
        raise PeerError(f"no learner of this run is called {one_line(name)!r}: atoll status says who is there")
    if machine.phase in ("ending", "finished") and learner.connected:
        return f"the run is ending, and {name} leaves with it: its last steps are collected"
    if learner.closed:
        raise PeerError(f"{name} has left the run: should it come back, it can be drained then")
    if learner.leaving:
        return f"{name} is leaving already: it stopped at step {learner.t}"
    if not learner.connected and not learner.draining:
        raise PeerError(f"{name} is away: it can be drained once it is back")
    return "" if learner.connected else describe_unheard_drain(learner)


def describe_unheard_drain(learner: KnownLearner) -> str:
    """It was asked to leave and has not said that it does. PeerError: the process that was asked is gone."""
    if not learner.draining:
        raise PeerError(f"another process is {learner.name} by now: drain it again if that is to leave too")
    place = "it hears of it after its step" if learner.connected else "it is away, and hears of it when it is back"
    return (
        f"{learner.name} is asked to leave, but has not answered yet: {place}. If the syncer restarts before that, the "
        "request may be lost: the same command tells later whether it is leaving, or asks it again"
    )
