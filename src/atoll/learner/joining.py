"""A learner on its way into a run: who comes, how long it waits, and what is said of that.

It waits for the run's name, its parameters and a peer's state, all within `JoinRequest.wait_s`; then training begins
without them. The wait goes on while the download of the parameters moves, and while the syncer holds back a learner
that has them, because others fetch version 0. Where no syncer ever answered it ends instead: to train on would be to
train alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from atoll.fabric.address import parse_address
from atoll.learner.folder import ask_run
from atoll.learner.placement import PlacementWish
from atoll.learner.script import say
from atoll.learner.unmerged import FrozenRule
from atoll.mailbox.channel import DialFailed, JoinProgress, Welcomed
from atoll.protocol.errors import Unreachable, WrongCertificate

SILENT_S = 2.0
"""A learner that nobody has answered for so long says where it dials."""
SAY_S = 10.0
"""Time between two lines about the same download. One that takes less has none."""
RECENT_S = 10.0
"""Time left is estimated from the bytes that came within this time."""
PIECES = 3
"""More pieces than these must have come in that time."""
DIAL_S = 5.0
"""A courier has this long to dial, also where all other time was spent on asking which run it is."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Who comes to which run."""

    url: str
    name: str
    seed: int
    data: str
    """A digest of what it trains on."""
    wait_s: float
    """How long it waits for the run's parameters and a peer's state before training begins without them."""
    tokens_per_step: int = 0
    """The most that a step has, where the script says so."""
    host: str = ""
    pid: int = 0
    proof: str = ""
    """Where it is, and that it is the successor of whoever had its name (folder.py)."""
    frozen: FrozenRule = "run"
    placement: PlacementWish = "auto"


class JoinWait:
    def __init__(self, request: JoinRequest, *, speaks: bool) -> None:
        """`speaks`: False for ranks that leave it to rank 0, and for replays."""
        self._request, self._speaks = request, speaks
        self._silent_since = 0.0
        """From here on a syncer could have answered."""
        self._until = 0.0
        """When it stops waiting and lets training begin."""
        self._answered = self._dialling = False
        """A syncer has answered; the line 'dialling …' was printed."""
        self._connected = False
        """The line 'connected to run …' was printed."""
        self.held_back = False
        """The syncer has said that training has not begun."""
        self._least: int | None = None
        """Fewest bytes that were lacking so far."""
        self._seen: deque[tuple[float, int]] = deque(maxlen=int(RECENT_S / 0.5))
        self._said_at: float | None = None
        self.unreached = ""
        """Why the syncer could not be reached, while it was not."""
        self._met_another = False
        """Whether that is another's certificate."""

    def begin(self) -> None:
        self._silent_since = time.monotonic()
        self._until = self._silent_since + self._request.wait_s

    def find_run(self, is_asked_to_leave: Callable[[], bool], *, asks: bool) -> str:
        """The run's name, as the join link has it; else, if it `asks`, what the syncer at a plain address says: what
        was saved of its run is looked for before the run hears of this learner. Empty: nobody answers; then the courier
        goes on asking."""
        run: str | None = parse_address(self._request.url).run
        if run or not asks:
            return run or ""
        while (run := ask_run(self._request.url)) is None and not is_asked_to_leave():
            self.unreached = "nothing answers there"  # whether or not a courier comes to dial in the time it has
            if time.monotonic() >= self._until:
                break
            self.say_dialling()
            time.sleep(0.25)
        else:
            self.unreached = ""
        self._answered = run is not None
        return run or ""

    def give_courier_time(self) -> None:
        """To dial: asking for the run, and reading what an earlier life saved, may have used up the rest. Nobody has
        dialled meanwhile."""
        self._silent_since = time.monotonic()
        self._until = max(self._until, self._silent_since + min(self._request.wait_s, DIAL_S))

    def note_failed_dial(self, failed: DialFailed) -> None:
        """Where somebody else answers at one address, that is the reason: another may be that of a standby."""
        if failed.met_another or not self._met_another:
            self.unreached, self._met_another = failed.reason, failed.met_another

    def note_progress(self, told: JoinProgress) -> None:
        """Wait on while the download moves, or while others are waited for; say so every SAY_S seconds."""
        now = time.monotonic()
        if self._least is None or told.lacking < self._least or (not told.lacking and self.held_back):
            self._until = max(self._until, now + self._request.wait_s)
            self._least = told.lacking
        self._seen.append((now, told.lacking))
        self._said_at = now if self._said_at is None else self._said_at
        if self._speaks and now >= self._said_at + SAY_S:
            self._said_at = now
            self._say_progress(told)

    def _say_progress(self, told: JoinProgress) -> None:
        if told.lacking:
            (since, before), (at, _) = self._seen[0], self._seen[-1]
            rate = (before - told.lacking) / (at - since) if at > since else 0.0  # below 0 where it starts over
            # A small model comes in a few pieces: from one or two of them no rate follows.
            known = rate > 0 and len({lacking for _, lacking in self._seen}) > PIECES
            left = f"{told.lacking / rate:.0f} s left" if known else "time left not known"
            arrived, whole = (nbytes / 1e6 for nbytes in (told.whole - told.lacking, told.whole))
            say(f"fetches the run's parameters: {arrived:.3g} of {whole:.3g} MB, {left}")
        elif self.held_back:
            say("holds version 0, and waits until the others hold it too: then training begins")

    def note_beginning(self, reason: str) -> None:
        """Note that training begins. `reason` is empty if no learner was waited for."""
        if self.held_back and self._least is not None and reason and self._speaks:
            say(f"training begins: {reason}")
        self.held_back = False

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def check_reached(self) -> None:
        """Unreachable, WrongCertificate: no syncer has ever answered this process."""
        if self.unreached:
            raise (WrongCertificate if self._met_another else Unreachable)(
                f"no syncer answers at {self._hosts}: {self.unreached}, tried for {self._request.wait_s:g} s; is the "
                "run over, or its address another now? On its machine, atoll tokens link --run DIR prints a fresh link"
            )

    @property
    def _hosts(self) -> str:
        """Without secrets."""
        return ", ".join(url.partition("://")[2] for url in parse_address(self._request.url).urls)

    def say_dialling(self) -> None:
        """Once, where nobody has answered for a while: the terminal would stay empty."""
        if self._answered or self._dialling or not self._speaks or time.monotonic() < self._silent_since + SILENT_S:
            return
        self._dialling = True
        # A courier that has only just started has not failed to dial.
        why = f": no syncer answers yet ({self.unreached}); it gives up after {self._request.wait_s:g} s"
        say(f"dialling {self._hosts}{why if self.unreached else ''}")

    def say_connected(self, welcome: Welcomed) -> None:
        """Once, where the run has not begun: the terminal would stay empty until the others are there."""
        self._answered = True
        if self._connected or not self._speaks or min(welcome.versions, default=0) >= 0:
            return
        self._connected = True
        learners, wait_s = welcome.settings.learners, welcome.settings.wait_for_learners_s
        begins = f"it begins once {learners} learners are here, or after {wait_s:g} s"
        waits = begins if wait_s and learners > 1 else "it begins with the first parameters"
        say(f"connected to run {welcome.run} as {self._request.name}; {waits}")

    def say_joined(self, run: str, ranks: int) -> None:
        if self._speaks:
            say(f"joined run {run} as {self._request.name}{f', {ranks} ranks' if ranks > 1 else ''}")

    def say_unjoined(self, *, has_parameters: bool) -> None:
        if has_parameters and self.held_back:
            say(f"no word that training begins for {self._request.wait_s:g} s: it begins here")
            return
        syncer = self._request.url.rpartition("@")[2]  # what stands before it is a secret
        what = "state of a peer's" if has_parameters else f"parameters from the syncer at {syncer}"
        say(f"no {what} for {self._request.wait_s:g} s: training begins without it, and joins when it can")
