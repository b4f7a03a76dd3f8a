"""`atoll.Learner`: the public face inside a training script.

Between two steps the training process only counts, starts copies of fragments off the device and takes arrived ones in;
everything else happens in the courier beside it. No step waits for the network, the syncer or a peer, except in a
synchronous run, where waiting is what was asked for. If the courier dies another one is started; training goes on.

What goes wrong between Atoll and the operator ends the script with one line and an exit code, no traceback: 2 for what
the operator can mend (model, settings, data), 1 for the rest, 130 for a second Ctrl-C: the first one is a drain, like
SIGTERM (preempt.py). The script's own errors pass unchanged.
"""

from __future__ import annotations

import operator
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from atoll.learner.boundary import Boundary
from atoll.learner.data import Datasets
from atoll.learner.ending import INTERRUPTED, end_script, say
from atoll.learner.feed import Feed
from atoll.learner.losses import Losses
from atoll.learner.model import describe, load_weights, trained
from atoll.learner.partner import Partner
from atoll.learner.peer import PeerOrder, PeerStates
from atoll.learner.place import Place, describe_place, fill_box, settings_of
from atoll.learner.preempt import DRAIN_S, FILE, LIMIT_S, Preemption
from atoll.learner.recorder import Recorder, describe_machine
from atoll.learner.saving import Saver
from atoll.learner.snapshot import Snapshot, read, write
from atoll.learner.state import Stateful, capture, restore
from atoll.mailbox.box import Mailbox, cut_alike
from atoll.mailbox.channel import (
    Box,
    Bye,
    DrainOrder,
    ForgetOrder,
    GoOrder,
    Kept,
    SaveOrder,
    Start,
    Step,
    StopOrder,
    Supplies,
    ToTraining,
    Welcomed,
)
from atoll.mailbox.channel import Sources as SourcesFrame
from atoll.numerics.fragments import make_plan
from atoll.protocol.effects import Stepped
from atoll.protocol.errors import AtollError, ConfigError, PlanError, RunFailed
from atoll.protocol.tape import Began, Forgot, Informed, Marked, Stopped, Supplied

JOIN_WAIT_S = 60.0
"""How long entering waits for the run's parameters before training begins without them."""
LEAVE_WAIT_S = 10.0
"""How long leaving early waits for the last steps to be merged; longer where the others need longer for two cycles."""
PLACE = "atoll"
"""Under this name a learner's place in its run is saved beside what the script registered."""
END_WAIT_S = 120.0
"""How long a learner waits for the run to end once it was told that it ends."""


class Learner:
    """Joins the run it was launched in; alone, without a syncer, it only counts.

    `model`'s trained parameters are replaced by the run's on entering. `optimizer` is the inner one: its state stays
    here, but for a copy that a newcomer may ask for; joining a running run, or when this learner's numbers are broken,
    it is replaced by a healthy peer's, together with the model's buffers and whatever was registered. `data` is a
    digest of what it trains on: it is noted in the run, and learners whose digests differ are warned of.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        syncer: str | None = None,
        name: str | None = None,
        seed: int | None = None,
        data: str = "",
        join_wait_s: float = JOIN_WAIT_S,
    ) -> None:
        if os.environ.get("ATOLL_ROLE") == "evaluator":
            raise SystemExit("atoll: this script brings no scorer (atoll.evaluate); validation loss is not measured")
        self.model, self.optimizer = model, optimizer
        self._url = syncer or os.environ.get("ATOLL_SYNCER", "")
        self.name = name or os.environ.get("ATOLL_LEARNER", "learner-0")
        self._seed = int(os.environ.get("ATOLL_SEED", "0")) if seed is None else seed
        self._data = data
        self._join_wait_s = join_wait_s
        self._session = secrets.token_hex(8)
        self._partner = Partner(os.environ.get("ATOLL_REPLAY", ""))
        self._tape = Recorder(self._partner)
        self._until: int | None = 0 if self._partner.replays else None
        """Replay: the step at which it waits."""
        self._progress, self._global_step, self._committed = 0.0, 0, 0
        self._boundary: Boundary | None = None
        self._box: Mailbox | None = None
        self._losses = Losses()
        self._t = self._tokens = 0
        self._feed = Feed(seed=self._seed, name=self.name)
        self._extras: dict[str, Stateful] = {}
        self._peers = PeerStates(model, optimizer, self._extras, self._partner, self._tape)
        self._went_on_from = ""
        self._kept = False
        """Its inner optimizer comes out of a cut, and is put back once it has joined."""
        folder = os.environ.get("ATOLL_FOLDER")
        self._saver = Saver(Path(folder) if folder else None)
        self._newest: tuple[int, ...] | None = None
        """The run's versions at the last welcome."""
        self._busy_s = 0.0
        self._left_at = 0.0
        self._done = self._final = False
        self._preemption = Preemption()
        self._stopped = False
        self._inside = self._left = False

    # ---- the face -----------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """No syncer was named: this is plain training."""
        return not self._url

    @property
    def done(self) -> bool:
        """The run has ended, or this machine is taken away; the training loop should end too."""
        return self._done or self._preemption.asked

    @property
    def steps(self) -> int:
        """Steps of this learner's present life."""
        return self._t

    @property
    def global_step(self) -> int:
        """How far the run is, in learner steps. Alone: the own steps."""
        return self._t if self._box is None else self._global_step

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent, in [0, 1]: what learning rate schedules should follow.

        Alone: of the pass that `batches` makes. A run without a budget stays at 0.
        """
        return self._feed.passed if self._box is None else self._progress

    def register(self, name: str, thing: Stateful) -> None:
        """Have something with a state of its own (a schedule, a GradScaler) saved with cuts and put back on resume.

        A newcomer takes it from a peer. To be called before the learner is entered.
        """
        if self._inside:
            raise RuntimeError(f"register({name!r}, …) comes before 'with atoll.Learner(...) as learner:'")
        self._extras[name] = thing

    def __enter__(self) -> Learner:
        if self._inside or (self._left and not self.alone):
            raise RuntimeError("a Learner is entered once: make another one for another run")
        self._inside = True
        if not self.alone:
            try:
                self._preemption.watch()
                self._tensors = describe(self.model)
                if init := os.environ.get("ATOLL_INIT"):
                    load_weights(self.model, Path(init))
                saved, exact, self._went_on_from = _saved_state()
                self._kept = saved is not None
                if saved is not None and exact:
                    self._stand_where(saved)
                self._partner.start()
                self._tape.add(self._began(exact))
                self._introduce(sure=exact)
                self._join()
                if saved is not None:
                    self._put_back(saved)
                    self._kept = False
                self._look_up()
                self._preemption.begun = True
            except BaseException as error:
                self._leave(error)
                raise
        self._left_at = time.perf_counter()
        return self

    def step(self, tokens: int, loss: torch.Tensor | float | None = None) -> None:
        """Call after every optimizer step, with the tokens (or samples) it trained on."""
        if not self._inside:
            raise RuntimeError("learner.step() outside of 'with atoll.Learner(...) as learner:'")
        tokens = operator.index(tokens)
        if tokens < 0:
            raise ValueError(f"tokens = {tokens} is below zero")
        self._busy_s += time.perf_counter() - self._left_at
        self._t += 1
        self._tokens += tokens
        if not self.alone:
            self._feed.stepped()
            self._losses.add(loss)
            self._at_boundary(tokens)
        self._left_at = time.perf_counter()

    def batches(
        self, dataset: Datasets, batch_size: int, *, weights: Mapping[str, float] | None = None, epochs: int = 0
    ) -> Iterator[Any]:
        """Batches of what this run leases to this learner, until the run is done or the data is used up.

        `dataset` is anything with a length and an index, or several of them by name, with `weights`. `epochs` is how
        many passes the run makes over them; 0: no end. Alone, without a syncer, it is one pass in a seeded order.
        """
        found = self._feed.open(dataset, batch_size, weights)
        if self.alone or not self._inside:
            yield from self._feed.own(found, batch_size, lambda: self.done, incarnation=1, passes=1)
            return
        seed = self._boundary.settings.seed if self._boundary is not None else self._seed
        self._partner.send(SourcesFrame(self._feed.ask(found, batch_size, epochs, seed)))
        yield from self._feed.leased(found, batch_size, lambda: self.done, self._wait, self._join_wait_s)

    def _wait(self, seconds: float) -> None:
        """Not training: listen, and serve what is due."""
        self._partner.wait(seconds)
        self._listen()
        if self._boundary is not None:
            self._boundary.idle()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.alone:
            self._inside, self._left = False, True
            return
        if error is None:
            try:
                self._finish()
            except BaseException as late:
                error = late
        self._leave(error)
        if error is not None and kind is None:
            raise error

    # ---- joining ------------------------------------------------------------------------------------------------

    def _introduce(self, *, sure: bool = False) -> None:
        boxed = self._boundary is not None
        self._partner.send(Start(self.name, self._session, self._url, self._tensors, boxed, self._data, self._kept))
        if self._box is not None and self._boundary is not None:
            box = Box(self._boundary.settings, self._stepped(), sure, waits=self._peers.waits)
            self._partner.send(box, self._box.fd)
        if self._feed.registered is not None:
            self._partner.send(SourcesFrame(self._feed.registered))
        self._tape.tell_again()

    def _join(self) -> None:
        """Wait for the run's parameters and a peer's state; past the patience, train on and take them later."""
        deadline = time.monotonic() + self._join_wait_s
        while self._until is not None and self._until <= self._t and not self._final:
            self._wait(0.5)
        while self._until is None and not self._final and not self._is_current() and not self._preemption.asked:
            left = deadline - time.monotonic()
            if left <= 0:
                syncer = self._url.rpartition("@")[2]  # what stands before it is a secret
                what = "state of a peer's" if self._has_parameters() else f"parameters from the syncer at {syncer}"
                waited = f"no {what} for {self._join_wait_s:g} s"
                say(f"{waited}: training goes on, joining when it can")
                return
            self._wait(min(left, 0.5))

    def _is_current(self) -> bool:
        return self._has_parameters() and not self._peers.waits

    def _has_parameters(self) -> bool:
        """What the run had when this learner was welcomed."""
        if self._boundary is None or self._box is None or self._newest is None or not self._boundary.recovered:
            return False
        return all(held >= newest for held, newest in zip(self._box.adopted.tolist(), self._newest, strict=False))

    def _welcomed(self, frame: Welcomed) -> None:
        """The run's settings are known: cut the model as they say, and share memory with the courier."""
        self._newest = frame.versions
        plan = make_plan(self._tensors, frame.settings.fragments, frame.settings.plan)
        if plan.fingerprint != frame.fingerprint:
            raise PlanError("the run cuts its model another way than this version of Atoll: install the same version")
        if self._box is not None and self._boundary is not None:
            same_plan = self._box.plan.fingerprint == plan.fingerprint
            if same_plan and cut_alike(plan, self._boundary.settings, frame.settings):
                self._boundary.settings = frame.settings
                return
            self._drop_box()
        self._box = Mailbox.create(plan, frame.settings)
        self._box.set_count("incarnation", frame.incarnation)
        self._boundary = Boundary(self._box, frame.settings, trained(self.model), self._partner, self._tape)
        self._partner.send(Box(frame.settings, self._stepped()), self._box.fd)

    # ---- between two steps --------------------------------------------------------------------------------------

    def _at_boundary(self, tokens: int) -> None:
        if self._boundary is not None:
            self._boundary.count(self._t, tokens, self._tokens, self._feed.position)
        self._listen()
        if self._boundary is not None:
            self._boundary.adopt_ready(self._t)
            self._tape.tell()
            self._boundary.make_copies(self._t)
            self._report()
            self._hold()
            self._look_up()

    def _hold(self) -> None:
        """Only a synchronous run ever holds, and a replay."""
        assert self._boundary is not None
        while self._boundary.held(self._t) and not self.done:
            self._partner.wait(0.5)
            self._listen()
            self._boundary.adopt_ready(self._t)
            self._boundary.settle()
        while self._until is not None and self._until <= self._t and not self.done:
            self._partner.wait(0.5)
            self._listen()
            self._boundary.idle()

    def _look_up(self) -> None:
        """How far the run is, as the next step is to know it. It does not change while that step is under way."""
        if self._box is None:
            return
        if (committed := self._box.count("committed")) != self._committed:
            self._committed, self._global_step = committed, self._box.count("global_step")
            self._progress = min(1.0, self._box.measure("progress"))
            self._tape.add(Informed(self._t, committed))

    def _listen(self) -> None:
        if not self._final and self._partner.restart_if_dead():
            say("the courier died; another one is started, training goes on")
            if self._boundary is not None:
                self._boundary.drop_orders()
            self._peers.courier_died()
            self._introduce()
            self._report()
        for frame in self._partner.receive():
            self._obey(frame)
        for saved in self._saver.results():
            self._partner.send(Kept(saved))
        self._peers.settle()
        if self._boundary is not None:
            self._boundary.settle_done()

    def _obey(self, frame: ToTraining) -> None:
        if isinstance(frame, PeerOrder):
            self._peers.obey(frame, self._t)
            return
        match frame:
            case Welcomed():
                self._welcomed(frame)
            case GoOrder(until):
                self._until = until
            case DrainOrder(reason):
                self._preemption.ask(f"it was drained: {reason}")
            case StopOrder(reason, final, failed, mistake):
                if not self._done:
                    self._tape.add(Stopped(self._t))
                self._done = True
                self._final = self._final or final
                if failed:
                    raise ConfigError(reason) if mistake else RunFailed(reason)
            case SaveOrder(cut, kept):
                self._save(cut, kept)
            case Supplies(ranges, over, own):
                self._tape.add(Supplied(self._t, tuple(one.lease for one in ranges), over, bool(own)))
                self._feed.supplied(ranges, over, own)
            case _:
                assert self._boundary is not None
                self._boundary.obey(frame)
                if isinstance(frame, ForgetOrder):
                    self._tape.add(Forgot(self._t, frame.reset))
                    self._forget(frame.reset)

    def _forget(self, reset: bool) -> None:
        self._feed.forget()
        if reset and self.optimizer is not None:
            self.optimizer.state.clear()
            say("the inner optimizer starts afresh")

    def _report(self) -> None:
        """Counters go on counting: where the courier does not keep up, a later report says it all."""
        if self._stopped or self._until is not None or not self._partner.clogged:
            self._partner.send(Step(self._stepped(), self._boundary.epoch if self._boundary else 0))

    def _stepped(self) -> Stepped:
        steps: tuple[int, ...] = ()
        tokens: tuple[int, ...] = ()
        dropped: tuple[int, ...] = ()
        if (box := self._box) is not None:
            steps, tokens, dropped = tuple(box.steps.tolist()), tuple(box.tokens.tolist()), tuple(box.dropped.tolist())
        return Stepped(
            t=self._t,
            steps=steps,
            tokens=tokens,
            tokens_total=self._tokens,
            busy_s=round(self._busy_s, 6),
            loss=self._losses.latest(),
            stopped=self._stopped,
            dropped=dropped,
            position=self._feed.position,
            leaving=self._preemption.asked,
        )

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def _save(self, cut: int, kept: tuple[int, ...]) -> None:
        """Between two steps: only copies are made here."""
        self._tape.add(Marked(self._t, cut))
        if reason := self._saver.reason_not_to():
            self._saver.refuse(cut, self._t, reason)
            return
        try:
            snapshot = self._captured()
        except AtollError as error:
            self._saver.refuse(cut, self._t, str(error))
        else:
            self._saver.save(cut, self._t, snapshot, kept)

    def _captured(self) -> Snapshot:
        assert self._box is not None and self._boundary is not None
        place = describe_place(
            self._box,
            self._boundary.settings,
            self._tensors,
            name=self.name,
            session=self._session,
            t=self._t,
            total=self._tokens,
            busy_s=self._busy_s,
            feed=self._feed.state(),
        )
        return capture(self.model, self.optimizer, {**self._extras, PLACE: place})

    def _began(self, exact: bool) -> Began:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return describe_machine(self._t, device, self._went_on_from, exact)

    def _stand_where(self, saved: Snapshot) -> None:
        """The same incarnation goes on: the courier finds its place in the shared memory, as if another had died."""
        place = Place({})
        restore(self.model, self.optimizer, {**self._extras, PLACE: place}, saved, rng=False)
        state = place.state
        if state["learner"] != self.name:
            raise ConfigError(f"the saved state is of {state['learner']}, this is {self.name}")
        self._session, self._t, self._tokens = state["session"], state["t"], state["total"]
        self._busy_s = state["busy_s"]
        settings = settings_of(state)
        self._box = Mailbox.create(make_plan(self._tensors, settings.fragments, settings.plan), settings)
        self._boundary = Boundary(self._box, settings, trained(self.model), self._partner, self._tape)
        fill_box(self._box, state, os.environ.get("ATOLL_RUN", ""))
        self._feed.load(state["feed"])
        self._boundary.stand(self._t, self._tokens, state["feed"].get("position", -1))

    def _put_back(self, saved: Snapshot) -> None:
        """What the run does not know: optimizer, schedules, chance. Parameters are the run's."""
        place = Place({})
        restore(self.model, self.optimizer, {**self._extras, PLACE: place}, saved, parameters=False)
        say(f"goes on with the inner optimizer, schedules and random states of step {place.state['t']}")

    # ---- leaving ------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Stay until the last steps are in the model; a run that ended leaves its final parameters here."""
        self._stopped = True
        early = not self._done
        if self._preemption.asked:
            self._tape.add(Stopped(self._t))
        self._tape.tell()
        self._report()
        began = time.monotonic()
        saved = False
        while not self._final and self._boundary is not None:
            wait_s = self._leave_wait_s() if early else END_WAIT_S
            if time.monotonic() > began + wait_s and self._until is None:
                break
            self._partner.wait(0.2)
            self._listen()
            self._boundary.idle(over=True)
            self._tape.tell()
            if early and self._done:
                early, began = False, time.monotonic()
            if early and not self._box_has_more():
                break
        if self._final and self._boundary is not None:
            self._boundary.take_base()
        if self._preemption.asked and not self._final:
            saved = self._save_for_later()
        if not self._final:
            self._partner.send(Bye(self._goodbye(early, saved)))

    def _goodbye(self, early: bool, saved: bool) -> str:
        if self._preemption.asked:
            return f"{self._preemption.why}; its state is {'saved' if saved else 'not saved: it has no folder'}"
        return "it left before the run ended" if early else "the end of the run did not come"

    def _save_for_later(self) -> bool:
        """Whoever is started next under this name goes on with this inner optimizer; False: it has no folder."""
        folder = os.environ.get("ATOLL_FOLDER")
        if self._boundary is None or not folder:
            return False
        self._saver.finish(LIMIT_S - DRAIN_S)
        Path(folder).mkdir(parents=True, exist_ok=True)
        write(Path(folder) / FILE, self._captured())
        return True

    def _leave_wait_s(self) -> float:
        if self._boundary is None or self._t == 0:
            return LEAVE_WAIT_S
        if self._preemption.hurried:
            return DRAIN_S
        return max(LEAVE_WAIT_S, 2 * self._boundary.settings.sync_every * self._busy_s / self._t)

    def _box_has_more(self) -> bool:
        return self._box is not None and bool(self._box.steps.any())

    def _leave(self, error: BaseException | None) -> None:
        """Let everything go; the syncer hears why. Errors that are for the operator end the script here."""
        if error is not None and not self._final:
            self._partner.send(Bye(_reason(error)))
        self._inside, self._left = False, True
        self._preemption.stop()
        self._partner.close()
        self._drop_box()
        if isinstance(error, AtollError):
            end_script(str(error), error.exit_code, error)
        if isinstance(error, KeyboardInterrupt):
            end_script("interrupted; the same command lets it join again", INTERRUPTED, error)

    def _drop_box(self) -> None:
        if self._boundary is not None:
            self._boundary.close()
        if self._box is not None:
            self._box.close()
        self._boundary = None


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return f"its training script ended with {type(error).__name__}"


def _saved_state() -> tuple[Snapshot | None, bool, str]:
    """What the launcher says to go on from, whether all of it is to be as it was, and the file's name."""
    path, exact = os.environ.get("ATOLL_STATE"), os.environ.get("ATOLL_EXACT") == "1"
    left = Path(os.environ.get("ATOLL_FOLDER", ".")) / FILE
    if not exact and "ATOLL_FOLDER" in os.environ and left.exists():
        snapshot = read(left)
        left.unlink()  # once: the next cut is newer
        return snapshot, False, left.name
    return (read(Path(path)), exact, Path(path).name) if path else (None, False, "")
