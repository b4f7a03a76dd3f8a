"""The learner's rules, with no clock, no socket and no tensors: `handle(now, event) -> effects`.

It runs in the courier beside the training process. Training never waits for it: it reports steps, says which fragment
to copy at the coming boundary, answers pulls from those copies, and hands new versions over to be adopted between two
steps. In a synchronous run it also says at which step to wait for which round.

Rules kept here, each with its test: nothing is contributed from a fragment that was not adopted from this run; a pull is
declined while the version that holds this learner's last contribution is not adopted; a copy dies with the adoption of
its fragment; versions may be skipped, never taken twice or backwards; after a reconnect every version it lacks is
fetched; a run of another name makes it forget what it held.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from atoll.protocol import schedule
from atoll.protocol.clock import Clock, merged
from atoll.protocol.effects import (
    Adopt,
    Adopted,
    Arrived,
    Copied,
    Cut,
    Drop,
    Fetch,
    Fetched,
    FetchFailed,
    Forget,
    Hold,
    Inform,
    LearnerEffect,
    LearnerEvent,
    LetGo,
    Note,
    Own,
    Read,
    Say,
    Stepped,
    Stop,
    Tick,
    Upload,
    UploadAll,
    Uploaded,
    UploadFailed,
)
from atoll.protocol.messages import (
    PROTOCOL,
    Announce,
    Contribution,
    Decline,
    Ending,
    Finish,
    FromLearner,
    FromSyncer,
    Heartbeat,
    Hello,
    Leave,
    Progress,
    Pull,
    Recover,
    Refused,
    Started,
    TensorSpec,
    Welcome,
)
from atoll.protocol.settings import Settings

Phase = Literal["out", "joining", "training", "ending", "finished"]
RETRY_S = 0.5
"""After a failed fetch."""


class Learner:
    def __init__(self, name: str, session: str, tensors: tuple[TensorSpec, ...]) -> None:
        self.name, self.session = name, session
        self.phase: Phase = "out"
        self.run = ""
        self.incarnation = 0
        self.settings = Settings()
        self.versions: list[int] = []
        """Adopted, per fragment."""
        self.newest: list[int] = []
        """Announced, per fragment."""
        self.t = 0
        self.wake_at: float | None = None
        self._tensors = tensors
        self._connected = False
        self._clock: Clock = {}
        self._stepped = Stepped(0, (), ())
        self._gathering = 0
        self._offer = -1
        self._orders: dict[int, int] = {}
        """Copies ordered and not made yet: round → step."""
        self._shift: int | None = None
        """Synchronous: own step minus the run's nominal step."""
        self._ordered = -1
        self._copies: dict[int, Copied] = {}
        self._pulls: dict[int, Pull] = {}
        """Pulls that wait for a copy, by fragment."""
        self._uploads: dict[tuple[int, int], tuple[Copied, Pull]] = {}
        self._fetching: set[int] = set()
        self._adopting: dict[int, int] = {}
        self._retry_at: dict[int, float] = {}
        self._rounds: dict[int, int] = {}
        """Per fragment, the round of its newest version."""
        self._named: dict[int, tuple[int, int]] = {}
        """Per fragment, the (version, copy step) of the last round this learner was a member of."""
        self._said_at = 0.0
        self._final: tuple[int, ...] | None = None
        self._effects: list[LearnerEffect] = []

    # ---- the face ---------------------------------------------------------------------------------------------

    def restore(self, run: str, versions: list[int], stepped: Stepped) -> None:
        """What the shared memory says, for a courier that takes over from a dead one."""
        self.run, self.versions = run, list(versions)
        self._stepped, self.t = stepped, stepped.t

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            learner=self.name,
            session=self.session,
            run=self.run,
            versions=tuple(self.versions),
            t=self.t,
            tensors=self._tensors,
            clock=self._now_clock(),
        )

    def handle(self, now: float, event: LearnerEvent) -> list[LearnerEffect]:
        self._effects = []
        match event:
            case Arrived(message):
                self._clock = merged(self._clock, message.clock)
                self._arrive(now, message)
            case Cut(reason):
                self._cut(reason)
            case Stepped():
                self._step(now, event)
            case Copied():
                self._copied(now, event)
            case Adopted():
                self._adopted(now, event)
            case Fetched(fragment, version):
                self._fetched(fragment, version)
            case FetchFailed(fragment, reason):
                self._fetching.discard(fragment)
                self._retry_at[fragment] = now + RETRY_S
                self._note("warning", f"fragment {fragment} could not be fetched: {reason}; trying again")
            case Uploaded(number, attempt, digest):
                self._uploaded(now, number, attempt, digest)
            case UploadFailed(number, attempt, reason):
                self._uploads.pop((number, attempt), None)
                self._note("warning", f"the answer to round {number} did not arrive: {reason}")
            case Tick():
                pass
        self._by_time(now)
        return self._effects

    @property
    def recovered(self) -> bool:
        return bool(self.versions) and min(self.versions) >= 0

    # ---- messages ---------------------------------------------------------------------------------------------

    def _arrive(self, now: float, message: FromSyncer) -> None:
        match message:
            case Welcome():
                self._welcome(now, message)
            case Started(uploader=uploader):
                self._started(now, uploader)
            case Pull():
                self._move_on(message.gathering)
                self._pull(now, message)
            case Announce():
                self._announced(message)
            case Recover(incarnation=incarnation, reason=reason):
                self.incarnation = incarnation
                self._note("recovering", f"taking the run's parameters anew, with a fresh inner optimizer: {reason}")
                self._forget(reason, reset=True)
                self._fetch_missing()
            case Ending(reason=reason):
                self._ending(reason)
            case Finish(reason=reason, versions=versions):
                self._ending(reason)
                self._final = versions
                self.newest = list(versions)
                self._fetch_missing()
                self._finish_if_done(now)
            case Refused(reason=reason, final=True):
                self.phase = "finished"
                self._effects.append(Stop(reason, final=True, failed=True))
            case Refused():
                self._note("warning", message.reason)

    def _welcome(self, now: float, welcome: Welcome) -> None:
        self._connected = True
        self.settings, self.incarnation = welcome.settings, welcome.incarnation
        self._gathering = max(welcome.gathering, 0)
        if self.run != welcome.run or len(self.versions) != len(welcome.versions):
            if self.run:
                self._note("warning", f"this is run {welcome.run}, not {self.run}: its parameters are taken")
            self.run = welcome.run
            self.versions = [-1] * len(welcome.versions)
            self._forget("a new run", reset=False)
        self.newest = list(welcome.versions)
        if self.phase not in ("ending", "finished"):
            self.phase = "training" if self.recovered else "joining"
        self._effects.append(Inform(welcome.progress, welcome.global_step))
        if welcome.upload:
            self._effects.append(UploadAll())
        self._fetch_missing()
        if self.recovered:
            self._plan()
        self._report(now)

    def _started(self, now: float, uploader: str) -> None:
        self.newest = [max(version, 0) for version in self.newest]
        if uploader != self.name:
            self._fetch_missing()
            return
        self.versions = [0] * len(self.newest)
        self.phase = "training"
        self._plan()
        self._effects.append(Own())
        self._report(now)

    def _announced(self, announce: Announce) -> None:
        fragment, version = announce.fragment, announce.version
        mine = [m for m in announce.members if m.learner == self.name and m.incarnation == self.incarnation]
        self.newest[fragment] = max(self.newest[fragment], version)
        if mine:
            self._named[fragment] = (version, mine[0].t)
        if announce.members:
            self._rounds[fragment] = announce.round
        else:
            self._effects.append(LetGo(announce.round))
        self._effects.append(Inform(announce.progress, announce.global_step))
        self._move_on(announce.gathering)
        self._fetch_missing()

    def _ending(self, reason: str) -> None:
        if self.phase in ("training", "joining"):
            self.phase = "ending"
            self._orders.clear()
            self._effects.append(Stop(reason))

    def _cut(self, reason: str) -> None:
        self._connected = False
        self._pulls.clear()
        self._uploads.clear()
        if self._final is not None:
            self._stop_for_good("the run is over")
        elif self.phase != "finished":
            self._note("warning", f"the syncer is out of reach ({reason}); training goes on")

    # ---- steps, copies and pulls ------------------------------------------------------------------------------

    def _step(self, now: float, event: Stepped) -> None:
        self._stepped, self.t = event, event.t
        self._report(now)

    def _copied(self, now: float, copy: Copied) -> None:
        fragment = copy.fragment
        self._orders.pop(copy.round, None)
        if self.versions[fragment] != copy.base:
            self._effects.append(Drop(fragment, copy.t))
            self._again(fragment, copy)
            return
        if (old := self._copies.get(fragment)) is not None:
            self._effects.append(Drop(fragment, old.t))
        self._copies[fragment] = copy
        self._offer = max(self._offer, copy.round)
        if fragment in self._pulls:
            self._answer(now, self._pulls.pop(fragment))
        elif self.settings.synchronous:
            self._report(now)
        else:
            self._again(fragment, copy)

    def _again(self, fragment: int, copy: Copied) -> None:
        """A fresher copy at the next boundary: the round it is for has not frozen yet, or a pull waits for it."""
        waits = self._pulls.get(fragment)
        if waits is not None:
            self._order(waits.round, copy.t + 1)
        elif copy.round == self._gathering and self.phase == "training" and not self.settings.synchronous:
            self._order(copy.round, copy.t + 1)

    def _pull(self, now: float, pull: Pull) -> None:
        fragment = pull.fragment
        version, _ = self._named.get(fragment, (-1, 0))
        steps = self._stepped.steps[fragment] if self._stepped.steps else 0
        if not self.recovered:
            self._decline(now, pull, "it has not recovered yet")
        elif self.versions[fragment] < version:
            self._decline(now, pull, f"version {version}, which holds its last steps, is not adopted yet")
        elif fragment in self._copies:
            self._answer(now, pull)
        elif steps == 0 and not pull.probe and not any(self._orders):
            self._decline(now, pull, "no steps since its last adoption")
        else:
            self._pulls[fragment] = pull
            self._order(pull.round, self.t)

    def _answer(self, now: float, pull: Pull) -> None:
        copy = self._copies[pull.fragment]
        if copy.steps == 0 and not pull.probe:
            self._decline(now, pull, "no steps since its last adoption")
            return
        self._uploads[(pull.round, pull.attempt)] = (copy, pull)
        self._effects.append(Upload(pull.round, pull.attempt, pull.fragment))

    def _uploaded(self, now: float, number: int, attempt: int, digest: str) -> None:
        if (upload := self._uploads.pop((number, attempt), None)) is None:
            return
        copy, pull = upload
        contribution = Contribution(
            round=number,
            attempt=attempt,
            fragment=copy.fragment,
            base=copy.base,
            t=copy.t,
            steps=copy.steps,
            tokens=copy.tokens,
            digest=digest,
            probe=pull.probe,
        )
        self._say(now, contribution)

    def _decline(self, now: float, pull: Pull, reason: str) -> None:
        self._say(now, Decline(round=pull.round, attempt=pull.attempt, reason=reason))

    # ---- which copy to make, and when ---------------------------------------------------------------------------

    def _move_on(self, gathering: int) -> None:
        """The syncer gathers a later round: aim at its fragment."""
        if gathering > self._gathering:
            self._gathering = gathering
            if self.phase == "training" and self.recovered and not self.settings.synchronous:
                ahead = max(1, int(schedule.interval(self.settings)) - 1)
                self._order(gathering, self.t + ahead)

    def _plan(self) -> None:
        """Orders for a learner that has just recovered or come back."""
        if self.phase != "training":
            return
        if not self.settings.synchronous:
            self._order(self._gathering, self.t + 1)
            return
        if self._shift is None:
            nominal = schedule.adopt_step(self._gathering - 1, self.settings) if self._gathering else 0
            self._shift = self.t - nominal
            self._ordered = self._gathering - 1
            while schedule.read_step(self._ordered + 1, self.settings) <= nominal:
                self._ordered += 1
        self._plan_ahead(self._ordered + 1)

    def _plan_ahead(self, oldest: int) -> None:
        """Synchronous: every copy that may be due before round `oldest` is adopted must be ordered before."""
        assert self._shift is not None
        until = schedule.adopt_step(oldest, self.settings)
        while schedule.read_step(self._ordered + 1, self.settings) <= until:
            self._ordered += 1
            self._order(self._ordered, schedule.read_step(self._ordered, self.settings) + self._shift)
            self._effects.append(Hold(self._ordered, schedule.adopt_step(self._ordered, self.settings) + self._shift))

    def _order(self, number: int, step: int) -> None:
        if not self.settings.synchronous:
            self._orders.clear()
        self._orders[number] = step
        self._effects.append(Read(number, schedule.fragment_of(number, self.settings), step))

    # ---- new versions -------------------------------------------------------------------------------------------

    def _fetch_missing(self) -> None:
        if not self._connected:
            return
        for fragment, version in enumerate(self.newest):
            held = max(self.versions[fragment], self._adopting.get(fragment, -1))
            if version > held and fragment not in self._fetching and fragment not in self._adopting:
                self._fetching.add(fragment)
                self._retry_at.pop(fragment, None)
                self._effects.append(Fetch(fragment, version))

    def _fetched(self, fragment: int, version: int) -> None:
        self._fetching.discard(fragment)
        if version <= self.versions[fragment]:
            return
        self._adopting[fragment] = version
        self.newest[fragment] = max(self.newest[fragment], version)
        number = self._rounds.get(fragment, -1)
        if self.settings.synchronous and self.phase in ("training", "joining"):
            self._before_adoption(fragment, number)
        plain = not self.recovered or self._final is not None
        named = self._named.get(fragment)
        self._effects.append(
            Adopt(
                fragment=fragment,
                version=version,
                round=number,
                rule="overwrite" if plain else self.settings.adopt,
                step=self._adopt_at(number),
                copy_t=named[1] if named and self.versions[fragment] < named[0] <= version else None,
            )
        )

    def _before_adoption(self, fragment: int, number: int) -> None:
        """The training process goes on once it has adopted: its next orders must be there before."""
        if self._shift is not None:
            self._plan_ahead(max(number, 0) + 1)
        elif all(v >= 0 or f == fragment or f in self._adopting for f, v in enumerate(self.versions)):
            self.phase = "training"
            self._plan()

    def _adopt_at(self, number: int) -> int:
        if not self.settings.synchronous or self._shift is None or number < 0 or self.phase != "training":
            return 0
        return schedule.adopt_step(number, self.settings) + self._shift

    def _adopted(self, now: float, event: Adopted) -> None:
        fragment = event.fragment
        self.versions[fragment] = max(self.versions[fragment], event.version)
        self._adopting.pop(fragment, None)
        if (copy := self._copies.pop(fragment, None)) is not None:
            self._effects.append(Drop(fragment, copy.t))
        self._stepped = _counted(self._stepped, fragment, event.steps, event.tokens)
        if self.phase == "joining" and self.recovered:
            self.phase = "training"
            self._plan()
        self._fetch_missing()
        self._finish_if_done(now)
        if self.phase != "finished":
            self._report(now)

    def _forget(self, reason: str, *, reset: bool) -> None:
        for copy in self._copies.values():
            self._effects.append(Drop(copy.fragment, copy.t))
        for number in range(self._gathering, self._ordered + 1):
            self._effects.append(LetGo(number))
        self.versions = [-1] * len(self.versions)
        self._copies.clear()
        self._pulls.clear()
        self._uploads.clear()
        self._orders.clear()
        self._adopting.clear()
        self._fetching.clear()
        self._named.clear()
        self._rounds.clear()
        self._shift, self._offer, self._ordered = None, -1, -1
        if self.phase == "training":
            self.phase = "joining"
        self._effects.append(Forget(reason, reset))

    # ---- the end and small things -------------------------------------------------------------------------------

    def _finish_if_done(self, now: float) -> None:
        if self._final is None or self.phase == "finished":
            return
        if all(held >= final for held, final in zip(self.versions, self._final, strict=True)):
            self._say(now, Leave(reason="the run is over"))
            self._stop_for_good("the run is over")

    def _stop_for_good(self, reason: str) -> None:
        if self.phase != "finished":
            self.phase = "finished"
            self._effects.append(Stop(reason, final=True))

    def _by_time(self, now: float) -> None:
        for fragment in [f for f, at in self._retry_at.items() if now >= at]:
            del self._retry_at[fragment]
            self._fetch_missing()
        beat_at = self._said_at + self.settings.heartbeat_s
        if self._connected and now >= beat_at:
            self._say(now, Heartbeat())
            beat_at = now + self.settings.heartbeat_s
        self.wake_at = min([*self._retry_at.values(), *([beat_at] if self._connected else [])], default=None)

    def _report(self, now: float) -> None:
        if not self._connected or not self.versions:
            return
        last, fragments = self._stepped, len(self.versions)
        progress = Progress(
            t=last.t,
            steps=last.steps or (0,) * fragments,
            tokens=last.tokens or (0,) * fragments,
            versions=tuple(self.versions),
            offer=self._offer,
            aims=min(self._orders, default=-1),
            tokens_total=last.tokens_total,
            busy_s=last.busy_s,
            loss=last.loss,
            stopped=last.stopped,
        )
        self._say(now, progress)

    def _say(self, now: float, message: FromLearner) -> None:
        if self._connected:
            self._said_at = now
            self._effects.append(Say(msgspec.structs.replace(message, clock=self._now_clock())))

    def _now_clock(self) -> Clock:
        return {**self._clock, self.name: self.t}

    def _note(self, kind: str, text: str) -> None:
        self._effects.append(Note(kind, f"{self.name}: {text}", {"learner": self.name}))


def _counted(stepped: Stepped, fragment: int, steps: int, tokens: int) -> Stepped:
    """The counters after an adoption."""
    if not stepped.steps:
        return stepped
    new_steps, new_tokens = list(stepped.steps), list(stepped.tokens)
    new_steps[fragment], new_tokens[fragment] = steps, tokens
    return msgspec.structs.replace(stepped, steps=tuple(new_steps), tokens=tuple(new_tokens))
