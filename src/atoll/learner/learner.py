"""`atoll.Learner`: the public face inside a training script.

Between two steps the training process only counts, starts copies of fragments off the device and takes arrived ones in;
everything else happens in the courier beside it. No step waits for the network, the syncer or a peer, except in a
synchronous run, where waiting is what was asked for. If the courier dies another one is started; training goes on.

What goes wrong between Atoll and the operator ends the script with one line and an exit code, no traceback: 2 for what
the operator can mend (model, settings, data), 1 for the rest, 130 for Ctrl-C. The script's own errors pass unchanged.
"""

from __future__ import annotations

import operator
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from atoll.learner.boundary import Boundary
from atoll.learner.data import Samples, collect, generator, orders
from atoll.learner.ending import INTERRUPTED, end_script, say
from atoll.learner.losses import Losses
from atoll.learner.model import describe, load_weights, trained
from atoll.learner.partner import Partner
from atoll.mailbox.box import Mailbox
from atoll.mailbox.channel import Box, Bye, ForgetOrder, Start, Step, StopOrder, ToTraining, Welcomed
from atoll.numerics.fragments import make_plan
from atoll.protocol.effects import Stepped
from atoll.protocol.errors import AtollError, ConfigError, PlanError, RunFailed

JOIN_WAIT_S = 60.0
"""How long entering waits for the run's parameters before training begins without them."""
LEAVE_WAIT_S = 10.0
"""How long leaving early waits for the last steps to be merged; longer where the others need longer for two cycles."""
END_WAIT_S = 120.0
"""How long a learner waits for the run to end once it was told that it ends."""


class Learner:
    """Joins the run it was launched in; alone, without a syncer, it only counts.

    `model`'s trained parameters are replaced by the run's on entering. `optimizer` is the inner one; its state is never
    sent, and reset only when this learner's numbers are broken and it recovers from the run. `data` is a digest of what
    it trains on: it is noted in the run, and learners whose digests differ are warned of.
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
        self._partner = Partner()
        self._boundary: Boundary | None = None
        self._box: Mailbox | None = None
        self._losses = Losses()
        self._t = self._tokens = 0
        self._busy_s = 0.0
        self._left_at = 0.0
        self._pass = 0.0
        self._done = self._final = False
        self._stopped = False
        self._inside = self._left = False

    # ---- the face -----------------------------------------------------------------------------------------------

    @property
    def alone(self) -> bool:
        """No syncer was named: this is plain training."""
        return not self._url

    @property
    def done(self) -> bool:
        """The run has ended; the training loop should too."""
        return self._done

    @property
    def steps(self) -> int:
        """Steps of this learner's present life."""
        return self._t

    @property
    def global_step(self) -> int:
        """How far the run is, in learner steps. Alone: the own steps."""
        return self._t if self._box is None else self._box.count("global_step")

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent, in [0, 1]: what learning rate schedules should follow.

        Alone: of the pass that `batches` makes. A run without a budget stays at 0.
        """
        return self._pass if self._box is None else min(1.0, self._box.measure("progress"))

    def __enter__(self) -> Learner:
        if self._inside or (self._left and not self.alone):
            raise RuntimeError("a Learner is entered once: make another one for another run")
        self._inside = True
        if not self.alone:
            try:
                self._tensors = describe(self.model)
                if init := os.environ.get("ATOLL_INIT"):
                    load_weights(self.model, Path(init))
                self._partner.start()
                self._introduce()
                self._join()
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
            self._losses.add(loss)
            self._at_boundary(tokens)
        self._left_at = time.perf_counter()

    def batches(self, dataset: Samples, batch_size: int) -> Iterator[Any]:
        """Batches of a map-style dataset in this learner's own order, until the run is done (alone: one pass)."""
        incarnation = 1 if self._box is None else self._box.count("incarnation")
        random = generator(self._seed, self.name, incarnation)
        for number, indices in enumerate(orders(len(dataset), batch_size, random, passes=1 if self.alone else None)):
            if self._done:
                return
            if self.alone:
                self._pass = number / (len(dataset) // batch_size)
            yield collect(dataset, indices)

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

    def _introduce(self) -> None:
        boxed = self._boundary is not None
        self._partner.send(Start(self.name, self._session, self._url, self._tensors, boxed, self._data))
        if self._box is not None and self._boundary is not None:
            self._partner.send(Box(self._boundary.settings, self._stepped()), self._box.fd)

    def _join(self) -> None:
        """Wait for the run's parameters; past the patience, train on and take them when they come."""
        deadline = time.monotonic() + self._join_wait_s
        while not self._final and (self._boundary is None or not self._boundary.recovered):
            left = deadline - time.monotonic()
            if left <= 0:
                waited = f"no parameters from the syncer at {self._url} for {self._join_wait_s:g} s"
                say(f"{waited}: training goes on, joining when it can")
                return
            self._partner.wait(min(left, 0.5))
            self._listen()
            if self._boundary is not None:
                self._boundary.idle()

    def _welcomed(self, frame: Welcomed) -> None:
        """The run's settings are known: cut the model as they say, and share memory with the courier."""
        plan = make_plan(self._tensors, frame.settings.fragments, frame.settings.plan)
        if plan.fingerprint != frame.fingerprint:
            raise PlanError("the run cuts its model another way than this version of Atoll: install the same version")
        if self._box is not None and self._boundary is not None:
            if self._box.plan.fingerprint == plan.fingerprint and self._boundary.settings == frame.settings:
                return
            self._drop_box()
        self._box = Mailbox.create(plan, frame.settings)
        self._box.set_count("incarnation", frame.incarnation)
        self._boundary = Boundary(self._box, frame.settings, trained(self.model), self._partner)
        self._partner.send(Box(frame.settings, self._stepped()), self._box.fd)

    # ---- between two steps --------------------------------------------------------------------------------------

    def _at_boundary(self, tokens: int) -> None:
        if self._boundary is not None:
            self._boundary.count(self._t, tokens)
        self._listen()
        if self._boundary is not None:
            self._boundary.adopt_ready(self._t)
            self._boundary.make_copies(self._t)
            self._report()
            self._hold()

    def _hold(self) -> None:
        """Only a synchronous run ever holds."""
        assert self._boundary is not None
        while self._boundary.held(self._t) and not self._done:
            self._partner.wait(0.5)
            self._listen()
            self._boundary.adopt_ready(self._t)
            self._boundary.settle()

    def _listen(self) -> None:
        if not self._final and self._partner.restart_if_dead():
            say("the courier died; another one is started, training goes on")
            if self._boundary is not None:
                self._boundary.drop_orders()
            self._introduce()
            self._report()
        for frame in self._partner.receive():
            self._obey(frame)
        if self._boundary is not None:
            self._boundary.settle_done()

    def _obey(self, frame: ToTraining) -> None:
        match frame:
            case Welcomed():
                self._welcomed(frame)
            case StopOrder(reason, final, failed, mistake):
                self._done = True
                self._final = self._final or final
                if failed:
                    raise ConfigError(reason) if mistake else RunFailed(reason)
            case _:
                assert self._boundary is not None
                self._boundary.obey(frame)
                if isinstance(frame, ForgetOrder) and frame.reset and self.optimizer is not None:
                    self.optimizer.state.clear()
                    say("the inner optimizer starts afresh")

    def _report(self) -> None:
        """Counters go on counting: where the courier does not keep up, a later report says it all."""
        if self._stopped or not self._partner.clogged:
            self._partner.send(Step(self._stepped()))

    def _stepped(self) -> Stepped:
        steps: tuple[int, ...] = ()
        tokens: tuple[int, ...] = ()
        if self._box is not None:
            steps, tokens = tuple(self._box.steps.tolist()), tuple(self._box.tokens.tolist())
        return Stepped(
            t=self._t,
            steps=steps,
            tokens=tokens,
            tokens_total=self._tokens,
            busy_s=round(self._busy_s, 6),
            loss=self._losses.latest(),
            stopped=self._stopped,
        )

    # ---- leaving ------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Stay until the last steps are in the model; a run that ended leaves its final parameters here."""
        self._stopped = True
        early = not self._done
        self._report()
        deadline = time.monotonic() + (self._leave_wait_s() if early else END_WAIT_S)
        while not self._final and time.monotonic() < deadline and self._boundary is not None:
            self._partner.wait(0.2)
            self._listen()
            self._boundary.idle(over=True)
            if early and self._done:
                early, deadline = False, time.monotonic() + END_WAIT_S
            if early and not self._box_has_more():
                break
        if self._final and self._boundary is not None:
            self._boundary.take_base()
        if not self._final:
            self._partner.send(Bye("it left before the run ended" if early else "the end of the run did not come"))

    def _leave_wait_s(self) -> float:
        if self._boundary is None or self._t == 0:
            return LEAVE_WAIT_S
        return max(LEAVE_WAIT_S, 2 * self._boundary.settings.sync_every * self._busy_s / self._t)

    def _box_has_more(self) -> bool:
        return self._box is not None and bool(self._box.steps.any())

    def _leave(self, error: BaseException | None) -> None:
        """Let everything go; the syncer hears why. Errors that are for the operator end the script here."""
        if error is not None and not self._final:
            self._partner.send(Bye(_reason(error)))
        self._inside, self._left = False, True
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
