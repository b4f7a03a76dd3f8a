"""The learner's rules, with no clock, no socket and no tensors: `handle(now, event) -> effects`.

It runs in the courier beside the training process. Training never waits for it: it reports steps, says which fragment
to copy at the coming boundary, answers pulls from those copies, and hands new versions over to be adopted between two
steps. In a synchronous run it also says at which step to wait for which round.

orders.py knows which copy to make and when, copies.py which are at hand and what they answer, versions.py what is held
of the run; here is what the syncer says, what a pull gets, adoption and the end. Rules kept here, each with its test:
nothing is contributed from a fragment that was not adopted from this run; a pull is declined while the version that
holds this learner's last contribution is not adopted; a copy dies with the adoption of its fragment; a run of another
name makes it forget what it held, and so does an incarnation that changed while it was away.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from atoll.protocol.clock import Clock, merged
from atoll.protocol.copies import Copies
from atoll.protocol.effects import (
    Adopt,
    Adopted,
    Arrived,
    Copied,
    Cut,
    Drop,
    Fetched,
    FetchFailed,
    Forget,
    HangUp,
    Inform,
    LearnerEffect,
    LearnerEvent,
    Note,
    Own,
    Registered,
    Save,
    Saved,
    Say,
    Stepped,
    Stop,
    Supply,
    Tick,
    UploadAll,
    Uploaded,
    UploadFailed,
)
from atoll.protocol.messages import (
    PROTOCOL,
    Announce,
    CutSaved,
    Decline,
    Ending,
    Finish,
    FromLearner,
    FromSyncer,
    Heartbeat,
    Hello,
    Lease,
    Leave,
    Progress,
    Pull,
    Recover,
    Refused,
    Register,
    Started,
    TensorSpec,
    Welcome,
)
from atoll.protocol.orders import Orders
from atoll.protocol.settings import Settings
from atoll.protocol.versions import Versions

Phase = Literal["out", "joining", "training", "ending", "finished"]


class Learner:
    def __init__(self, name: str, session: str, tensors: tuple[TensorSpec, ...], data: str = "") -> None:
        self.name, self.session = name, session
        self.phase: Phase = "out"
        self.run = ""
        self.term = 0
        self.incarnation = 0
        self.settings = Settings()
        self.t = 0
        self.wake_at: float | None = None
        self._tensors, self._data = tensors, data
        self._connected = False
        self._clock: Clock = {}
        self._stepped = Stepped(0, (), ())
        self._half_told = False
        """It adopted at a boundary whose step is not told yet: its counters do not fit together."""
        self._data_of: Registered | None = None
        self._marker = 0
        """The newest cut it has heard of."""
        self._effects: list[LearnerEffect] = []
        self._orders = Orders(self._do)
        self._versions = Versions(self._do)
        self._copies = Copies(self._do)
        self._said_at = 0.0
        self._final: tuple[int, ...] | None = None

    # ---- the face ---------------------------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """Adopted, per fragment."""
        return self._versions.held

    @property
    def newest(self) -> list[int]:
        """Announced, per fragment."""
        return self._versions.newest

    @property
    def recovered(self) -> bool:
        return self._versions.complete

    @property
    def _stepping(self) -> bool:
        """More boundaries will come."""
        return self.phase == "training" and not self._stepped.stopped

    def restore(
        self, run: str, versions: list[int], stepped: Stepped, incarnation: int = 0, counted: list[int] | None = None
    ) -> None:
        """What the shared memory says, for a courier that takes over from a dead one."""
        self.run, self.incarnation, self._versions.held = run, incarnation, list(versions)
        self._versions.counted = list(versions if counted is None else counted)
        self._stepped, self.t = stepped, stepped.t

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            learner=self.name,
            session=self.session,
            run=self.run,
            versions=tuple(self.versions),
            incarnation=self.incarnation,
            t=self.t,
            tensors=self._tensors,
            data=self._data,
            clock=self._now_clock(),
            term=self.term,
        )

    def handle(self, now: float, event: LearnerEvent) -> list[LearnerEffect]:
        self._effects.clear()
        match event:
            case Arrived(message):
                self._hear(now, message)
            case Cut(reason):
                self._cut(reason)
            case Stepped():
                self._stepped, self.t, self._half_told = event, event.t, False
                self._report(now)
            case Registered():
                self._data_of = event
                self._register(now)
            case Copied():
                self._copied(now, event)
            case Adopted():
                self._adopted(now, event)
            case Fetched(fragment, version):
                self._fetched(fragment, version)
            case FetchFailed(fragment, reason):
                self._versions.failed(now, fragment)
                self._note("warning", f"fragment {fragment} could not be fetched: {reason}; trying again")
            case Uploaded(number, attempt, digest):
                if (contribution := self._copies.arrived(number, attempt, digest)) is not None:
                    self._say(now, contribution)
            case UploadFailed(number, attempt, reason):
                self._note("warning", f"the answer to round {number} did not arrive: {reason}")
                if self._copies.failed(number, attempt):
                    self._say(
                        now, Decline(round=number, attempt=attempt, reason=f"its answer did not arrive: {reason}")
                    )
            case Saved():
                self._saved(now, event)
            case Tick():
                pass
        self._by_time(now)
        return list(self._effects)

    # ---- messages ---------------------------------------------------------------------------------------------

    def _hear(self, now: float, message: FromSyncer) -> None:
        if message.term < self.term and not isinstance(message, Refused):
            self._do(HangUp(f"it speaks for term {message.term}, the run is in term {self.term}"))
            return
        self.term = max(self.term, message.term)
        self._clock = merged(self._clock, message.clock)
        self._mark(message)
        self._arrive(now, message)

    def _mark(self, message: FromSyncer) -> None:
        """The first message that names a cut is the marker. At a welcome it is old news: others have saved theirs."""
        if message.cut > self._marker and not isinstance(message, Welcome) and self.phase == "training":
            self._do(Save(message.cut))
        self._marker = max(self._marker, message.cut)

    def _arrive(self, now: float, message: FromSyncer) -> None:
        match message:
            case Welcome():
                self._welcome(now, message)
            case Started(uploader=uploader):
                self._started(now, uploader)
            case Lease(ranges=ranges, over=over, own=own):
                self._do(Supply(ranges, over, own))
            case Pull():
                self._pull(now, message)
                self._move_on(message.gathering)
            case Announce():
                self._announced(now, message)
            case Recover(incarnation=incarnation, reason=reason):
                self.incarnation = incarnation
                self._recover(reason, reset=True)
                self._fetch_missing()
                self._register(now)
            case Ending(reason=reason):
                self._ending(reason)
            case Finish(reason=reason, versions=versions):
                self._ending(reason)
                self._final = versions
                self._versions.newest = list(versions)
                self._fetch_missing()
                self._finish_if_done(now)
            case Refused(reason=reason, final=True, over=over):
                self.phase = "finished"
                self._do(Stop(reason, final=True, failed=not over))
            case Refused():
                self._note("warning", message.reason)

    def _welcome(self, now: float, welcome: Welcome) -> None:
        before, self.incarnation = self.incarnation, welcome.incarnation
        self._connected = True
        self.settings = self._orders.settings = welcome.settings
        if self.run != welcome.run or len(self.versions) != len(welcome.versions):
            self._change_run(welcome)
        elif before not in (0, welcome.incarnation):
            self._recover("it was given up while the connection was down", reset=welcome.reset)
        self._versions.welcomed(welcome)
        if welcome.leases:
            self._do(Supply(welcome.leases))
        self._register(now)
        self._orders.gathering = max(welcome.gathering, 0)
        if self.phase not in ("ending", "finished"):
            self.phase = "training" if self.recovered else "joining"
        self._do(Inform(welcome.progress, welcome.global_step))
        if welcome.upload:
            self._do(UploadAll())
        self._keep_up(welcome.committed - 1)
        for number in range(max(0, welcome.committed - len(self.newest)), welcome.committed):
            if not self._versions.lacks(number % len(self.newest)):
                self._pass_over(number)
        self._fetch_missing()
        self._plan()
        self._report(now)

    def _change_run(self, welcome: Welcome) -> None:
        if self.run:
            self._note("warning", f"this is run {welcome.run}, not {self.run}: its parameters are taken")
        self.run, self._clock = welcome.run, dict(welcome.clock)
        self._forget("a new run", fragments=len(welcome.versions), reset=False)

    def _started(self, now: float, uploader: str) -> None:
        self._versions.newest = [max(version, 0) for version in self.newest]
        if uploader != self.name:
            self._fetch_missing()
            return
        self._versions.held, self._versions.counted = [0] * len(self.newest), [0] * len(self.newest)
        if self.phase == "joining":
            self.phase = "training"
        self._plan()
        self._do(Own())
        self._report(now)

    def _announced(self, now: float, announce: Announce) -> None:
        mine = [m for m in announce.members if m.learner == self.name and m.incarnation == self.incarnation]
        self._versions.announced(announce, mine[0] if mine else None)
        self._do(Inform(announce.progress, announce.global_step))
        self._copies.committed(announce.fragment, announce.round)
        self._move_on(announce.gathering)
        if self._keep_up(announce.round):
            self._plan()
            self._report(now)
        if not announce.members:
            self._pass_over(announce.round)
        self._fetch_missing()

    def _pass_over(self, number: int) -> None:
        """Nothing comes of that round: nobody waits for it, and the copy made for it would only take up room."""
        self._orders.let_go(number)
        self._copies.drop(number % len(self.versions), until=number)

    def _ending(self, reason: str) -> None:
        if self.phase in ("training", "joining"):
            self.phase = "ending"
            self._orders.pending.clear()
            self._do(Stop(reason))

    def _cut(self, reason: str) -> None:
        self._connected = False
        self._copies.cut()
        if self._final is not None:
            self._stop_for_good("the run is over")
        elif self.phase != "finished":
            self._note("warning", f"the syncer is out of reach ({reason}); training goes on")

    # ---- copies and pulls ---------------------------------------------------------------------------------------

    def _copied(self, now: float, copy: Copied) -> None:
        ordered = self._orders.pending.pop(copy.round, None) is not None
        if self._is_useful(copy, ordered):
            self._keep(now, copy)
        else:
            self._do(Drop(copy.fragment, copy.t))
        if not self._orders.pending:
            self._order_next(copy.t + 1)

    def _is_useful(self, copy: Copied, ordered: bool) -> bool:
        if copy.base < 0 or copy.base != self.versions[copy.fragment]:
            return False
        if not self._stepping or copy.fragment in self._copies.waiting:
            return True
        return ordered if self.settings.synchronous else copy.steps > 0

    def _keep(self, now: float, copy: Copied) -> None:
        if (pull := self._copies.keep(copy)) is not None:
            self._answer(now, pull)
        elif self.settings.synchronous:
            self._report(now)

    def _order_next(self, step: int) -> None:
        """A pull that waits comes first; else (asynchronous) a fresher copy for the round that gathers."""
        if self._copies.waiting:
            self._orders.order(next(iter(self._copies.waiting.values())).round, step)
        elif self._stepping and not self.settings.synchronous:
            self._orders.order(self._orders.gathering, step)

    def _pull(self, now: float, pull: Pull) -> None:
        fragment = pull.fragment
        if not self.recovered:
            self._decline(now, pull, "it has not recovered yet")
        elif (owed := self._versions.owed(fragment)) is not None:
            self._decline(now, pull, f"version {owed}, which holds its last steps, is not adopted yet")
        elif fragment in self._copies:
            self._answer(now, pull)
        elif not pull.probe and self._nothing_comes(fragment):
            self._decline(now, pull, "no steps since its last adoption")
        else:
            self._copies.waiting[fragment] = pull
            if len(self._copies.waiting) == 1:
                self._orders.order(pull.round, self.t)

    def _nothing_comes(self, fragment: int) -> bool:
        """Whether the next boundary would bring no copy with steps in it."""
        if self._stepping:
            return self.settings.synchronous
        return not self._stepped.steps or self._stepped.steps[fragment] == 0

    def _answer(self, now: float, pull: Pull) -> None:
        if not self._copies.send(pull):
            self._decline(now, pull, "no steps since its last adoption")

    def _decline(self, now: float, pull: Pull, reason: str) -> None:
        self._say(now, Decline(round=pull.round, attempt=pull.attempt, reason=reason))

    # ---- its place in the run -----------------------------------------------------------------------------------

    def _move_on(self, gathering: int) -> None:
        """The syncer gathers a later round: aim at its fragment."""
        if gathering > self._orders.gathering:
            self._orders.gathering = gathering
            if self._stepping and not self.settings.synchronous and not self._copies.waiting:
                self._orders.ahead(self.t)

    def _plan(self) -> None:
        """Orders for a learner that has just recovered or come back."""
        if not self._stepping:
            return
        if self.settings.synchronous:
            self._orders.align(self.t)
        else:
            self._order_next(self.t + 1)

    def _keep_up(self, number: int) -> bool:
        """Synchronous: a learner that the run has gone past takes its place anew, and waits for nothing older."""
        if self.phase != "training" or not self._orders.behind(number):
            return False
        self._orders.forget()
        return True

    # ---- new versions -------------------------------------------------------------------------------------------

    def _fetch_missing(self) -> None:
        if self._connected:
            self._versions.fetch_missing()

    def _fetched(self, fragment: int, version: int) -> None:
        if not self._versions.fetched(fragment, version):
            return
        number = self._versions.rounds.get(fragment, -1)
        if self.settings.synchronous:
            self._before_adoption(fragment, number)
        plain = not self.recovered or self._final is not None
        adopt = Adopt(
            fragment=fragment,
            version=version,
            round=number,
            rule="overwrite" if plain else self.settings.adopt,
            step=self._orders.adopt_step(number) if self.phase == "training" else 0,
            copy_t=self._versions.copy_in(fragment, version),
            held_tokens=self._versions.tokens_in(fragment, version),
        )
        self._do(adopt)

    def _before_adoption(self, fragment: int, number: int) -> None:
        """The training process goes on once it has adopted: its next orders must be there before."""
        if self.phase == "training":
            self._orders.plan(max(number, 0) + 1)
        elif self.phase == "joining" and self._versions.complete_with(fragment):
            self.phase = "training"
            self._plan()

    def _adopted(self, now: float, event: Adopted) -> None:
        fragment = event.fragment
        if (number := self._versions.adopted(fragment, event.version)) is None:
            return
        self._orders.adopted(fragment, number)
        self._copies.drop(fragment)
        if event.t > self.t:
            self._half_told = True  # the report of that step is on its way, with all counters as they are then
        else:
            self._stepped = _counted(self._stepped, event)
        if self.phase == "joining" and self.recovered:
            self.phase = "training"
            self._plan()
        self._fetch_missing()
        self._finish_if_done(now)
        if self.phase != "finished":
            self._report(now)

    def _recover(self, reason: str, *, reset: bool) -> None:
        fresh = ", with a fresh inner optimizer" if reset else ""
        self._note("recovering", f"taking the run's parameters anew{fresh}: {reason}")
        self._forget(reason, fragments=len(self.versions), reset=reset)

    def _forget(self, reason: str, *, fragments: int, reset: bool) -> None:
        self._copies.forget()
        self._orders.forget()
        self._versions.forget(fragments)
        zeros = (0,) * fragments
        self._stepped = msgspec.structs.replace(self._stepped, steps=zeros, tokens=zeros, dropped=zeros)
        if self.phase == "training":
            self.phase = "joining"
        self._do(Forget(reason, reset))

    # ---- the end and small things -------------------------------------------------------------------------------

    def _finish_if_done(self, now: float) -> None:
        if self._final is None or self.phase == "finished":
            return
        if all(held >= final for held, final in zip(self.versions, self._final, strict=True)):
            self._report(now)
            self._say(now, Leave(reason="the run is over"))
            self._stop_for_good("the run is over")

    def _stop_for_good(self, reason: str) -> None:
        if self.phase != "finished":
            self.phase = "finished"
            self._do(Stop(reason, final=True))

    def _by_time(self, now: float) -> None:
        retries = self._versions.retry_at
        for fragment in [f for f, at in retries.items() if now >= at]:
            del retries[fragment]
            self._fetch_missing()
        beat_at = self._said_at + self.settings.heartbeat_s
        if self._connected and now >= beat_at:
            self._say(now, Heartbeat())
            beat_at = now + self.settings.heartbeat_s
        self.wake_at = min([*retries.values(), *([beat_at] if self._connected else [])], default=None)

    def _saved(self, now: float, saved: Saved) -> None:
        said = CutSaved(
            of=saved.cut,
            incarnation=self.incarnation,
            t=saved.t,
            file=saved.file,
            digest=saved.digest,
            reason=saved.reason,
        )
        self._say(now, said)

    def _register(self, now: float) -> None:
        if (data := self._data_of) is not None:
            self._say(now, Register(datasets=data.datasets, epochs=data.epochs, batch=data.batch))

    def _report(self, now: float) -> None:
        if not self._connected or not self.versions or self._half_told:
            return
        last, fragments = self._stepped, len(self.versions)
        progress = Progress(
            t=last.t,
            steps=last.steps or (0,) * fragments,
            tokens=last.tokens or (0,) * fragments,
            versions=tuple(self.versions),
            offer=self._copies.offer,
            aims=self._orders.aims,
            tokens_total=last.tokens_total,
            busy_s=last.busy_s,
            loss=last.loss,
            stopped=last.stopped,
            incarnation=self.incarnation,
            dropped=last.dropped or (0,) * fragments,
            counted=tuple(self._versions.counted),
            position=last.position,
        )
        self._say(now, progress)

    def _say(self, now: float, message: FromLearner) -> None:
        if self._connected:
            self._said_at = now
            self._do(Say(msgspec.structs.replace(message, clock=self._now_clock(), term=self.term)))

    def _now_clock(self) -> Clock:
        return merged(self._clock, {self.name: self.t})

    def _do(self, effect: LearnerEffect) -> None:
        self._effects.append(effect)

    def _note(self, kind: str, text: str) -> None:
        self._do(Note(kind, f"{self.name}: {text}", {"learner": self.name}))


def _counted(stepped: Stepped, adopted: Adopted) -> Stepped:
    """The counters after an adoption."""
    if not stepped.steps:
        return stepped
    steps, tokens, dropped = (
        list(stepped.steps),
        list(stepped.tokens),
        list(stepped.dropped) or [0] * len(stepped.steps),
    )
    steps[adopted.fragment], tokens[adopted.fragment] = adopted.steps, adopted.tokens
    dropped[adopted.fragment] = adopted.dropped
    return msgspec.structs.replace(stepped, steps=tuple(steps), tokens=tuple(tokens), dropped=tuple(dropped))
