"""`atoll.Learner`: the public face inside a training script.

Alone, without a syncer, it only counts. In a run, what happens on entering, between two steps and on leaving is told by
`stay`; here is what the script sees of it.

What goes wrong between Atoll and the operator ends the script with one line and an exit code, no traceback: 2 for what
the operator can mend (model, settings, data), 1 for the rest, 130 for a second Ctrl-C: the first one is a drain, like
SIGTERM (preempt.py). The script's own errors pass unchanged.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from atoll.learner.data import Datasets
from atoll.learner.ending import INTERRUPTED, end_script
from atoll.learner.feed import Feed
from atoll.learner.folder import LearnerFolder, claim_folder
from atoll.learner.partner import Partner
from atoll.learner.ranks import refuse_several_ranks
from atoll.learner.state import Stateful
from atoll.learner.stay import Joining, Stay
from atoll.learner.tally import Tally
from atoll.protocol.errors import AtollError, ConfigError

ALONE = "learner-0"
"""What a learner without a run is called: the order of its batches goes by its name."""
JOIN_WAIT_S = 60.0
"""How long entering waits for the run's parameters before training begins without them."""


class Learner:
    """Joins the run it was launched in; alone, without a syncer, it only counts.

    `model`'s trained parameters are replaced by the run's on entering. `optimizer` is the inner one: its state stays
    here, but for a copy that a newcomer may ask for; joining a running run, or when this learner's numbers are broken,
    its tensors are replaced by a healthy peer's, together with the model's buffers and what was registered for it; its
    options (learning rate, betas) stay the script's own. `data` is a digest of what it trains on: it is noted in the
    run, and learners whose digests differ are warned of.
    `name` is its own in the run; by default the machine and the lowest free number (folder.py).
    `tokens_per_step` declares the most tokens that a step will have: it is noted too, and `step` with more is refused.
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
        tokens_per_step: int = 0,
        join_wait_s: float = JOIN_WAIT_S,
    ) -> None:
        if os.environ.get("ATOLL_ROLE") == "evaluator":
            raise SystemExit("atoll: this script brings no scorer (atoll.evaluate); validation loss is not measured")
        _refuse_several_ranks(model)
        self.model, self.optimizer = model, optimizer
        url = syncer or os.environ.get("ATOLL_SYNCER", "")
        self._folder = folder = _claim_folder(url, name or os.environ.get("ATOLL_LEARNER", ""))
        self.name = folder.name
        seed = int(os.environ.get("ATOLL_SEED", "0")) if seed is None else seed
        if tokens_per_step < 0:
            raise ValueError(f"tokens_per_step = {tokens_per_step} is below zero")
        declared = operator.index(tokens_per_step)
        whence = (folder.host, folder.pid, folder.proof)
        self._joining = Joining(url, self.name, seed, data, join_wait_s, declared, *whence)
        self._partner = Partner(os.environ.get("ATOLL_REPLAY", ""))
        self._tally = Tally()
        self._feed = Feed(seed=seed, name=self.name)
        self._extras: dict[str, Stateful] = {}
        self._from_peers: set[str] = set()
        """Of these: what a newcomer may take from a peer."""
        self._stay: Stay | None = None
        """From entering on; alone there is none."""
        self._inside = self._left = False

    @property
    def alone(self) -> bool:
        """No syncer was named: this is plain training."""
        return not self._joining.url

    @property
    def done(self) -> bool:
        """The run has ended, or this machine is taken away; the training loop should end too."""
        return self._stay is not None and self._stay.done

    @property
    def steps(self) -> int:
        """Steps of this learner's present life."""
        return self._tally.t

    @property
    def global_step(self) -> int:
        """How far the run is, in learner steps; it changes between two steps only. Alone: the own steps."""
        return self._tally.t if self._stay is None else self._stay.global_step

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent, in [0, 1]: what learning rate schedules should follow.

        It changes between two steps only, and is 0 while the run has not been heard of. Alone: of the pass that
        `batches` makes. A run without a budget stays at 0.
        """
        return self._feed.passed if self._stay is None else self._stay.progress

    def register(self, name: str, thing: Stateful, *, from_peers: bool = False) -> None:
        """Have something with a state of its own (a schedule, a GradScaler) saved with cuts and put back on resume.

        `from_peers`: a newcomer takes it from a peer too; its load_state_dict() then reads what another learner of the
        run wrote, which nobody checks. To be called before the learner is entered.
        """
        if self._inside:
            raise RuntimeError(f"register({name!r}, …) comes before 'with atoll.Learner(...) as learner:'")
        self._extras[name] = thing
        (self._from_peers.add if from_peers else self._from_peers.discard)(name)

    def __enter__(self) -> Learner:
        if self._inside or (self._left and not self.alone):
            raise RuntimeError("a Learner is entered once: make another one for another run")
        _refuse_several_ranks(self.model)  # they may have come together since
        self._inside = True
        if not self.alone:
            self._stay = Stay(
                self._joining,
                self.model,
                self.optimizer,
                self._extras,
                self._from_peers,
                partner=self._partner,
                tally=self._tally,
                feed=self._feed,
            )
            try:
                self._stay.enter()
            except BaseException as error:
                self._leave(self._stay, error)
                raise
        self._tally.train()
        return self

    def step(self, tokens: int, loss: torch.Tensor | float | None = None) -> None:
        """Call after every optimizer step, with the tokens (or samples) it trained on."""
        if not self._inside:
            raise RuntimeError("learner.step() outside of 'with atoll.Learner(...) as learner:'")
        tokens = operator.index(tokens)
        if tokens < 0:
            raise ValueError(f"tokens = {tokens} is below zero")
        if 0 < self._joining.tokens_per_step < tokens:
            raise ValueError(
                f"tokens = {tokens} is more than the {self._joining.tokens_per_step} that were declared: "
                "name the most that a step can have, Learner(tokens_per_step=...)"
            )
        self._tally.stepped(tokens)
        if self._stay is not None:
            self._stay.stepped(tokens, loss)
        self._tally.train()

    def batches(
        self, dataset: Datasets, batch_size: int, *, weights: Mapping[str, float] | None = None, epochs: int = 0
    ) -> Iterator[Any]:
        """Batches of what this run leases to this learner, until the run is done or the data is used up.

        `dataset` is anything with a length and an index, or several of them by name, with `weights`. `epochs` is how
        many passes the run makes over them; 0: no end. Alone, without a syncer, it is one pass in a seeded order.
        """
        found = self._feed.open(dataset, batch_size, weights)
        if self._stay is None or not self._inside:
            yield from self._feed.own(found, batch_size, lambda: self.done, incarnation=1, passes=1)
            return
        self._stay.ask_for_leases(found, batch_size, epochs)
        yield from self._feed.leased(found, batch_size, lambda: self.done, self._stay.wait, self._joining.wait_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stay is None:
            self._inside, self._left = False, True
            return
        if error is None:
            try:
                self._stay.finish()
            except BaseException as late:
                error = late
        self._leave(self._stay, error)
        if error is not None and kind is None:
            raise error

    def _leave(self, stay: Stay, error: BaseException | None) -> None:
        """Errors that are for the operator end the script here."""
        self._inside, self._left = False, True
        stay.end(error)
        self._folder.release()
        if isinstance(error, AtollError):
            end_script(str(error), error.exit_code, error)
        if isinstance(error, KeyboardInterrupt):
            end_script("interrupted; the same command lets it join again", INTERRUPTED, error)


def _claim_folder(url: str, name: str) -> LearnerFolder:
    """Alone, and in a replay, there is nothing to take from others."""
    if not url or "ATOLL_REPLAY" in os.environ:
        return LearnerFolder(name or ALONE)
    try:
        return claim_folder(url, name)
    except ConfigError as error:
        end_script(str(error), error.exit_code, error)


def _refuse_several_ranks(model: nn.Module) -> None:
    try:
        refuse_several_ranks(model)
    except ConfigError as error:
        end_script(str(error), error.exit_code, error)
