"""`atoll.Learner`: the public face inside a training script.

Alone, without a syncer, it only counts. In a run, what happens on entering, between two steps and on leaving is told by
session.py; here is what the script sees of it.

What goes wrong between Atoll and the operator ends the script with one line and an exit code, no traceback: 2 for what
the operator can mend (model, settings, data), 1 for the rest, 130 for a second Ctrl-C: the first one is a drain, like
SIGTERM (script.py). 130 and 143 also for Ctrl-C and SIGTERM before it joined. The script's own errors pass unchanged.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from atoll.fabric.address import without_secrets
from atoll.learner.averaging import GradientAverage, count_averaging_ranks, join_averaging_ranks
from atoll.learner.capture import Stateful
from atoll.learner.courier_process import CourierProcess
from atoll.learner.data import Datasets, Drawn, Feed, MapDataset, NamedDataset, collect
from atoll.learner.folder import LearnerFolder, claim_folder
from atoll.learner.joining import JoinRequest
from atoll.learner.loading import (
    DrawCounter,
    LeasedSampler,
    UsedBatches,
    check_dataset,
    check_options,
    check_stream,
    checked_batch_size,
    load,
    seed_of,
)
from atoll.learner.model import BufferRule, check_model, refuse_old_shards
from atoll.learner.notebook import show_progress
from atoll.learner.placement import WISHES, PlacementWish
from atoll.learner.ranks import DataShare, RankGroup, count_ranks, find_ranks, rank_folder
from atoll.learner.script import INTERRUPTED, LeftUnjoined, end_script, explain_keywords, find_syncer, say
from atoll.learner.session import RunSession
from atoll.learner.state import Optimizers, check_kept, check_trained
from atoll.learner.step_stats import StepCounter
from atoll.learner.streams import DataStream, StreamDataset, StreamShare, is_stream
from atoll.learner.trained_model import TorchModel, TrainedModel, as_torch
from atoll.learner.unmerged import FrozenRule
from atoll.protocol.errors import AtollError, ConfigError
from atoll.protocol.messages import BUFFER_RULES

ALONE = "learner-0"
"""What a learner without a run is called: the order of its batches goes by its name."""
JOIN_WAIT_S = 60.0
"""How long entering waits for the run's parameters and a peer's state before training begins without them."""


class BaseLearner:
    """What learners of torch and of JAX share: all but how the script hands its model over."""

    def __init__(
        self,
        trained: TrainedModel,
        *,
        syncer: str | None = None,
        name: str | None = None,
        seed: int | None = None,
        data: str = "",
        tokens_per_step: int = 0,
        frozen: FrozenRule = "run",
        placement: PlacementWish | None = None,
        join_wait_s: float = JOIN_WAIT_S,
    ) -> None:
        refuse_evaluator()
        self._trained = trained
        url = find_syncer(os.environ, syncer)
        self._ranks = _find_ranks(trained) if url or count_ranks() > 1 else None
        self._folder = folder = _claim_folder(url, name or os.environ.get("ATOLL_LEARNER", ""), self._ranks)
        self.name = folder.name
        seed = int(os.environ.get("ATOLL_SEED", "0")) if seed is None else seed
        if tokens_per_step < 0:
            raise ValueError(f"tokens_per_step = {tokens_per_step} is below zero")
        if frozen not in ("run", "refuse", "mine"):
            raise ValueError(f'frozen = {frozen!r} is not known: use "run", "refuse" or "mine"')
        declared, place = operator.index(tokens_per_step), _find_placement(placement)
        whence = (folder.host, folder.pid, folder.proof)
        self._joining = JoinRequest(url, self.name, seed, data, join_wait_s, declared, *whence, frozen, place)
        self._courier = CourierProcess(os.environ.get("ATOLL_REPLAY", ""))
        self._tally = StepCounter()
        self._feed = Feed(seed=seed, name=self.name)
        self._rank_seen = self._ranks.rank if self._ranks is not None and count_averaging_ranks() > 1 else -1
        """Number of this rank of a data-parallel run, where the script sees it as a learner; −1 in any other run."""
        self._extras: dict[str, Stateful] = {}
        self._from_peers: set[str] = set()
        """Of these: what a newcomer may take from a peer."""
        self._session: RunSession | None = None
        """From entering on; alone there is none."""
        self._share = DataShare()
        """Alone, of several ranks: which part of a batch is this one's."""
        self._inside = self._left = False
        self._at_leaving: list[Callable[[], None]] = []
        self._end_progress: Callable[[], None] = lambda: None
        """In a notebook: of the line that shows it."""

    def __repr__(self) -> str:
        """For a notebook: where it belongs and how far it is."""
        where = "alone" if self.alone else without_secrets(self._joining.url)
        return f"<atoll.Learner {self.name}, {where}: {self._describe()}>"

    def _describe(self) -> str:
        state = "training" if self._inside else "has left" if self._left else "not entered yet: with ... as learner"
        return f"{state}, {self.steps:,} steps, {self.progress:.0%} of the run"

    def _describe_live(self) -> str:
        """Another thread may ask."""
        loss = self._tally.known_loss
        return f"{self.name}: {self._describe()}{'' if loss is None else f', loss {loss:.4g}'}"

    @property
    def alone(self) -> bool:
        """No syncer was named: this is plain training."""
        return not self._joining.url

    @property
    def done(self) -> bool:
        """The run has ended, or this machine is taken away; the training loop should end too."""
        return self._session is not None and self._session.done

    @property
    def finished(self) -> bool:
        """The run has ended, and the model holds its final parameters: known once this learner has left."""
        return self._session is not None and self._left and self._session.finished

    @property
    def has_budget(self) -> bool:
        """The run ends after so many steps or tokens. False while it has not been heard of, and alone."""
        return self._session is not None and self._session.has_budget

    @property
    def index(self) -> int:
        """This learner's number in the run, 0 or above: no other has it, and it keeps it when it starts again.

        It is the one that the name ends in (learner-2) where the run was begun with so many learners and it is free,
        otherwise the lowest that is free. The run says it, so it is known inside of 'with'. Alone: 0.
        """
        if self._rank_seen >= 0:
            return self._rank_seen
        if self._session is None:
            if not self.alone:
                raise RuntimeError("learner.index is known inside of 'with atoll.Learner(...) as learner:'")
            return 0
        if self._session.shared.index < 0:
            raise RuntimeError(
                "learner.index is not known: the run was not heard of; use learner.seed, or wait longer "
                f"for it (join_wait_s, now {self._joining.wait_s:g})"
            )
        return self._session.shared.index

    @property
    def seed(self) -> int:
        """A seed of this learner's own, for shuffles and chance, known inside of 'with'. 32 bits.

        It is made of the run's seed, this learner's name and how often it has joined the run. So it differs between
        learners, and a learner that starts again draws another order than before.
        """
        if not self.alone and self._session is None:
            raise RuntimeError("learner.seed is known inside of 'with atoll.Learner(...) as learner:'")
        return self._make_seed(0 if self._session is None else self._session.shared.incarnation)

    def _make_seed(self, incarnation: int = 0) -> int:
        name = f"learner-{self._rank_seen}" if self._rank_seen >= 0 else self.name
        return seed_of(self._joining.seed, name, incarnation)

    @property
    def steps(self) -> int:
        """Steps of this learner's present life, also those after the run's end."""
        return self._tally.t + (0 if self._session is None else self._session.steps_after_end)

    @property
    def global_step(self) -> int:
        """How far the run is, in learner steps; it changes between two steps only. Alone: the own steps."""
        return self._tally.t if self._session is None else self._session.global_step

    @property
    def progress(self) -> float:
        """How much of the run's budget is spent, in [0, 1]: what learning rate schedules should follow.

        It changes between two steps only, and is 0 while the run has not been heard of. Alone: of the pass that
        `batches` makes. A run without a budget stays at 0. A larger budget sets it back: to the share of that, or to 0
        with the setting `progress=added`.
        """
        return self._feed.passed if self._session is None else self._session.progress

    def register(self, name: str, thing: Stateful, *, from_peers: bool = False) -> None:
        """Have something with a state of its own (a schedule, a GradScaler) saved with cuts and put back on resume.

        `from_peers`: a newcomer takes it from a peer too; its load_state_dict() then reads what another learner of the
        run wrote, which nobody checks. To be called before the learner is entered. TypeError: no cut could keep it.
        """
        if self._inside:
            raise RuntimeError(f"register({name!r}, …) comes before 'with atoll.Learner(...) as learner:'")
        check_kept(None, {name: thing})
        self._extras[name] = thing
        (self._from_peers.add if from_peers else self._from_peers.discard)(name)

    def __enter__(self) -> Self:
        if self._inside or (self._left and not self.alone):
            raise RuntimeError("a Learner is entered once: make another one for another run")
        if not self.alone and count_ranks() != (1 if self._ranks is None else self._ranks.size):
            raise RuntimeError("torch.distributed.init_process_group comes before atoll.Learner(...)")
        self._inside = True
        if self.alone:
            self._begin_alone()
        else:
            self._session = RunSession(
                self._joining,
                self._trained,
                self._extras,
                self._from_peers,
                folder=self._folder,
                courier=self._courier,
                tally=self._tally,
                feed=self._feed,
                ranks=self._ranks,
            )
            try:
                self._session.join()
            except BaseException as error:
                self._leave(self._session, error)
                raise
        if self._ranks is None:
            self._end_progress = show_progress(self._describe_live)
        self._tally.train()
        return self

    def _begin_alone(self) -> None:
        if self._ranks is not None:
            self._share = as_torch(self._trained).find_data_share(self._ranks)
        if self._ranks is None or self._ranks.rank == 0:
            say(
                "alone: no run is named, so nothing is merged (join one by atoll train, or by ATOLL_JOIN and a link); "
                "learner.batches and learner.sampler make one pass, learner.done stays False"
            )

    def _step(self, tokens: int, loss: torch.Tensor | float | None) -> None:
        if not self._inside:
            raise RuntimeError("learner.step() outside of 'with atoll.Learner(...) as learner:'")
        try:
            tokens = operator.index(tokens)
        except TypeError:
            raise TypeError(
                f"learner.step(tokens, loss): tokens is a whole number, the tokens or samples the step trained on; "
                f"here it is a {type(tokens).__name__}. As in learner.step(len(batch), loss)"
            ) from None
        if tokens < 0:
            raise ValueError(f"tokens = {tokens} is below zero")
        if 0 < self._joining.tokens_per_step < tokens:
            raise ValueError(
                f"tokens = {tokens} is more than the {self._joining.tokens_per_step} that were declared: "
                "name the most that a step can have, Learner(tokens_per_step=...)"
            )
        if self._session is not None and self._session.trains_after_end:
            self._session.count_step_after_end()
            return
        self._tally.stepped(tokens if self._ranks is None else 0)
        if self._session is not None:
            self._session.stepped(tokens, loss)
        else:
            self._feed.stepped()
        self._tally.train()

    def batches(
        self,
        dataset: Datasets | Iterable[Any],
        batch_size: int | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        epochs: int = 0,
        drop_last: bool = False,
        **loader: Any,
    ) -> Iterator[Any]:
        """Batches of what this run leases to this learner, until the run is done or the data is used up.

        `dataset` is anything with a length and an index, or several of them by name, with `weights`. `epochs` is how
        many passes the run makes over them; 0: no end. The rest of a pass is a smaller batch, which `drop_last` leaves
        out. Alone, without a syncer, it is one pass in a seeded order, and its rest is always left out.
        `loader`: what torch's DataLoader takes and does not change the order (num_workers, collate_fn, pin_memory,
        prefetch_factor, ...); with any of these, batches come through a DataLoader.
        A dataset without a length is a stream: each learner reads a share of it in the stream's own order, and goes on
        where it was if the stream has state_dict() and load_state_dict(). So is a StatefulDataLoader, without
        `batch_size`: it is read as it is.
        """
        if is_stream(dataset):
            options = {"drop_last": True, **loader} if drop_last else loader
            check_stream(batch_size, weights, options, is_loader=isinstance(dataset, DataLoader))
            return self._load_stream(dataset, batch_size, epochs, loader.get("collate_fn", default_collate))
        check_dataset(dataset, "batches")
        check_options(loader)
        size = checked_batch_size(batch_size, "batches")
        found = self._feed.open(dataset, size, weights)  # type: ignore[arg-type]
        return self._load(found, size, epochs, drop_last, loader)

    def sampler(
        self, dataset: MapDataset, batch_size: int | None = None, *, epochs: int = 0, drop_last: bool = False
    ) -> LeasedSampler:
        """The same for a DataLoader of the script's own: `DataLoader(dataset, batch_sampler=learner.sampler(...))`.

        A batch counts when a step is made on it, however many the loader prefetches. It ends when the run is done; a
        loop that is to leave at once, without the batches that are loaded already, asks `learner.done`.
        """
        check_dataset(dataset, "sampler")
        if isinstance(dataset, Mapping):
            raise TypeError("learner.sampler takes one dataset; learner.batches takes several by name, with weights")
        batch_size = checked_batch_size(batch_size, "sampler")
        found = self._feed.open(dataset, batch_size, None)

        def begin(loop: int) -> Iterator[Drawn]:
            ahead = DrawCounter(self._draw(found, batch_size, epochs, drop_last, loop))
            self._feed.count_by(ahead.count_step)
            return iter(ahead)

        return LeasedSampler(begin)

    def stream(self, dataset: Iterable[Any], batch_size: int) -> StreamDataset:
        """The same of a stream, for a DataLoader of the script's own: `DataLoader(learner.stream(data, 8), 8)`, a pass
        for each loop over it. With workers the stream's position is not known."""
        if not is_stream(dataset) or isinstance(dataset, DataLoader):
            raise TypeError("learner.stream takes a dataset without a length: others go to learner.sampler")
        return self._make_stream_dataset(dataset, batch_size, by_rank=True)

    def _make_stream_dataset(self, dataset: Any, batch_size: int, *, by_rank: bool) -> StreamDataset:
        """`by_rank`: the loader does not deal it out to the ranks of a learner itself."""
        stream = self._open_stream(dataset, batch_size, by_rank=by_rank)

        def watch(batches: Iterator[Any]) -> Iterator[Any]:
            ahead = DrawCounter(batches)
            self._feed.count_by(ahead.count_step)
            return iter(ahead)

        return StreamDataset(stream, watch)

    def _open_stream(self, source: Any, batch_size: int | None, *, by_rank: bool = True) -> DataStream:
        if not self._inside:
            raise RuntimeError("a stream is read inside of 'with atoll.Learner(...) as learner:'")
        session = self._session
        share, ranks = StreamShare(), self._share if session is None else session.data_share
        learners = 1 if session is None else session.learners
        if learners == 0:
            say("the stream is read whole, as the run was not heard of: other learners may read the same samples")
        elif by_rank:
            share = StreamShare(self.index % learners * ranks.parts + ranks.part, learners * ranks.parts)
        else:
            share = StreamShare(self.index % learners, learners)
        stream = self._feed.open_stream(source, batch_size, share)
        if session is not None and not stream.is_positioned:
            say("the stream does not say where it is (state_dict), so it begins again whenever this learner does")
        return stream

    def _load_stream(self, source: Any, batch_size: int | None, epochs: int, collate: Any) -> Iterator[Any]:
        stream, counted = self._open_stream(source, batch_size), UsedBatches()
        self._feed.count_by(counted.count_step)
        for batch in stream.read(1 if self.alone else epochs or None):
            if self.done:
                return
            counted.count()
            yield batch if batch_size is None else collate(batch)

    def _load(
        self, found: tuple[NamedDataset, ...], batch_size: int, epochs: int, drop_last: bool, loader: Mapping[str, Any]
    ) -> Iterator[Any]:
        draws, counted = self._draw(found, batch_size, epochs, drop_last), UsedBatches()
        self._feed.count_by(counted.count_step)
        incarnation = 0 if self._session is None else self._session.shared.incarnation
        if not loader:
            batches: Iterable[Any] = (collect(found[dataset].samples, indices) for dataset, indices in draws)
        else:
            batches = load(found, draws, loader, self._make_seed(incarnation))
        for batch in batches:
            if self.done:
                return
            counted.count()
            yield batch

    def _draw(
        self, found: tuple[NamedDataset, ...], batch_size: int, epochs: int, drop_last: bool, loop: int = 1
    ) -> Iterator[Drawn]:
        """Leases; alone, one pass in an order of this loop's own."""
        session, share = self._session, self._share if self._session is None else self._session.data_share
        size = batch_size * share.parts
        if session is None or not self._inside:
            drawn = self._feed.draw_own(found, size, lambda: self.done, incarnation=loop, passes=1)
        else:
            session.ask_for_leases(found, batch_size, epochs, drop_last=drop_last)
            drawn = self._feed.draw_leased(found, size, lambda: self.done, session.wait, self._joining.wait_s)
        return drawn if share.parts == 1 else ((dataset, share.take(indices)) for dataset, indices in drawn)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_leaving, self._at_leaving = self._at_leaving, []
        for call in at_leaving:
            call()
        if self._session is None:
            self._inside, self._left = False, True
            self._end_progress()
            return
        if error is None:
            try:
                self._session.finish()
            except BaseException as late:
                error = late
        self._leave(self._session, error)
        if error is not None and kind is None:
            raise error

    def leave(self, error: BaseException | None = None) -> None:
        """What the end of `with` does, for a learner that was entered without it (`atoll.attach`, a notebook): its last
        steps go to the run. `error`: why, if something went wrong. Once it has left, nothing happens."""
        if self._inside:
            self.__exit__(type(error) if error is not None else None, error, None)

    def on_leaving(self, call: Callable[[], None]) -> None:
        """Called once, before the last steps go to the run."""
        self._at_leaving.append(call)

    def _leave(self, session: RunSession, error: BaseException | None) -> None:
        """Errors that are for the operator end the script here."""
        self._inside, self._left = False, True
        self._end_progress()
        session.end(error)
        self._folder.release()
        if isinstance(error, AtollError):
            end_script(str(error), error.exit_code, error)
        if isinstance(error, LeftUnjoined):
            say(str(error))
        if isinstance(error, KeyboardInterrupt):
            end_script("interrupted; the same command lets it join again", INTERRUPTED, error)


class Learner(BaseLearner):
    """Joins the run it was launched in; alone, without a syncer, it only counts.

        with atoll.Learner(model, optimizer) as learner:
            for batch in learner.batches(dataset, batch_size=8):  # or your own loader, until learner.done
                loss = model(batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=batch.numel(), loss=loss)

    - `model`: its trained parameters are replaced by the run's on entering.
    - `optimizer`: the inner one, or several in a list or in a dict by name, all of parameters of `model`. Its state
      stays here, but for a copy that a newcomer may ask for; joining a running run, or when this learner's numbers are
      broken, its tensors are replaced by a healthy peer's, together with the model's buffers and what was registered
      for it. Its options (learning rate, betas) stay the script's own.
    - `syncer`: a join link, a file that holds one, or an address on this machine; by default what the script was
      launched with (`atoll train`, `atoll learn`, ATOLL_JOIN), and without any of these it trains alone.
    - `name`: its own in the run; by default the machine and the lowest free number.
    - `seed`: of the run's random choices; by default the run's (ATOLL_SEED). `learner.seed` is made of it and the name.
    - `data`: a digest of what it trains on: noted in the run, and learners whose digests differ are warned of.
    - `tokens_per_step`: the most tokens that a step will have: noted too, and `step` with more is refused.
    - `buffers`: how the model's buffers are merged. "mean" averages those of floating point, "first" takes those of a
      round's first learner, "local" leaves each learner its own; by default running statistics (BatchNorm) are averaged
      and all others are local.
    - `frozen`: frozen parameters and local buffers are not merged. Where they are not those of the run's first learner,
      a peer's are taken ("run"), the learner is refused ("refuse"), or they may differ ("mine").
    - `placement`: where base and feedback are: "host", "device" or, by default, what fits; also ATOLL_PLACEMENT.
    - `join_wait_s`: how long entering waits for the run's parameters and a peer's state before it trains without them.
    """

    @explain_keywords
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        syncer: str | None = None,
        name: str | None = None,
        seed: int | None = None,
        data: str = "",
        tokens_per_step: int = 0,
        buffers: BufferRule = None,
        frozen: FrozenRule = "run",
        placement: PlacementWish | None = None,
        join_wait_s: float = JOIN_WAIT_S,
    ) -> None:
        refuse_evaluator()
        check_model(model)
        check_kept(optimizer)
        _refuse_mistakes(model, optimizer)
        if buffers not in (None, "local", *BUFFER_RULES):
            raise ValueError(f'buffers = {buffers!r} is not known: use "local", "mean" or "first"')
        self.model, self.optimizer = model, optimizer
        self._average: GradientAverage | None = None
        super().__init__(
            TorchModel(model, optimizer, buffers),
            syncer=syncer,
            name=name,
            seed=seed,
            data=data,
            tokens_per_step=tokens_per_step,
            frozen=frozen,
            placement=placement,
            join_wait_s=join_wait_s,
        )

    def __enter__(self) -> Self:
        _refuse_mistakes(self.model, self.optimizer)  # parameters may have been replaced since
        if self._rank_seen >= 0:
            self._average = GradientAverage(self.model, lambda: self.steps)
        return super().__enter__()

    @explain_keywords
    def step(self, tokens: int, loss: torch.Tensor | float | None = None) -> None:
        """Call after every optimizer step, with the tokens (or samples) it trained on."""
        if self._average is not None and self._average.deferred:
            raise RuntimeError("the last backward pass before a step has to be outside of learner.no_sync()")
        self._step(tokens, loss)

    def no_sync(self) -> AbstractContextManager[None]:
        """For every backward pass of a step but the last, where gradients are accumulated: `--algorithm data-parallel`
        averages them then once for each step, with the same result. In any other run it does nothing."""
        return nullcontext() if self._average is None else self._average.defer()

    def _leave(self, session: RunSession, error: BaseException | None) -> None:
        if self._average is not None:
            self._average.end()
        super()._leave(session, error)


def refuse_evaluator() -> None:
    """A script that came this far in the evaluator process has not called atoll.evaluate."""
    if os.environ.get("ATOLL_ROLE") == "evaluator":
        raise SystemExit("atoll: this script brings no scorer: it does not call atoll.evaluate")


def _find_ranks(model: TrainedModel) -> RankGroup | None:
    try:
        if count_averaging_ranks() > 1:
            if not isinstance(model, TorchModel):
                raise ConfigError(
                    "--algorithm data-parallel averages gradients of torch, which this script has none of"
                )
            join_averaging_ranks()
        return find_ranks()
    except ConfigError as error:
        end_script(str(error), error.exit_code, error)


def _claim_folder(url: str, name: str, ranks: RankGroup | None) -> LearnerFolder:
    """Alone, and in a replay, there is nothing to take from others. Of several ranks the first has the name."""
    if not url or "ATOLL_REPLAY" in os.environ:
        return LearnerFolder(name or ALONE)
    if ranks is not None and ranks.rank > 0:
        name, first = ranks.share(("", ""), tuple[str, str])
        return LearnerFolder(name, rank_folder(first, ranks.rank))
    try:
        folder = claim_folder(url, name)
    except ConfigError as error:
        end_script(str(error), error.exit_code, error)
    if ranks is not None:
        ranks.share((folder.name, str(folder.path or "")), tuple[str, str])
    return folder


def _find_placement(named: PlacementWish | None) -> PlacementWish:
    wish = named or os.environ.get("ATOLL_PLACEMENT") or "auto"
    for known in WISHES:
        if wish == known:
            return known
    raise ValueError(f'placement = {wish!r} is not known: use "auto", "host" or "device"')


def _refuse_mistakes(model: nn.Module, optimizers: Optimizers) -> None:
    try:
        refuse_old_shards(model)
        check_trained(optimizers, model)
    except ConfigError as error:
        end_script(str(error), error.exit_code, error)
