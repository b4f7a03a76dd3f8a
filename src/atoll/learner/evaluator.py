"""The evaluator: fetches the global model, scores it, reports the scores, until the run is over.

It keeps the model with the best score so far in model-best.safetensors, at once: by the end of a run nothing else holds
those values, since outer gradients are trimmed at snapshots. The fragments are written as they were fetched, since the
model's own parameters may be of another type. The file says which version of each fragment it holds, and the journal
has the digest of every version, so `atoll verify` can check the file against what the run committed.

With `ema` it also keeps the average of the models that it fetches (averaged_model.py), and scores it after each of
them: its figures have the names of the others behind "ema_".
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from atoll.fabric.address import parse_address
from atoll.fabric.bodies import fetch_one_version
from atoll.fabric.transfer import get_fragment_once, get_json, post_score, tell_presence
from atoll.fabric.wire import METRICS, SAMPLE_CHARS, ScoreReport
from atoll.learner.averaged_model import AveragedModel
from atoll.learner.evaluate import ScoredModel
from atoll.learner.model import view_piece
from atoll.learner.script import say
from atoll.numerics.arrays import FloatArray
from atoll.numerics.fragments import FragmentPlan, assemble_tensors
from atoll.numerics.shard_plan import PartPlace, make_shard_plan
from atoll.protocol.errors import AtollError, ConfigError, NotAdmitted, PeerError, Unreachable
from atoll.protocol.limits import LONGEST, Direction, near
from atoll.store.rundir import RunDir, facts_of_model, read_model_facts, save_model
from atoll.telemetry.status import RunStatus

LOSS = "loss"
OF_AVERAGE = "ema_"
"""Before the names of the average's figures."""
POLL_S = 0.25
GIVE_UP_S = 60.0
"""How long an evaluator waits for a syncer before it has joined, and after the run was at its end."""
AWAY_S = 43200.0
"""How long one that has joined waits for the run's syncer to come back."""
NEAR_END = 0.99
"""Progress from which on a syncer that is gone has probably ended the run."""
PRESENCE_S = 5.0
"""Time between two words to the syncer that it is there."""
FETCH_S = 120.0
FIFTHS = 5


@dataclass(frozen=True, slots=True)
class DecidingFigure:
    """What a model is judged by."""

    name: str
    value: float
    direction: Direction

    def is_better(self, than: float) -> bool:
        return self.value < than if self.direction == "min" else self.value > than


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """The fragments that were scored, and of which versions they are."""

    run: str
    round: int
    plan: FragmentPlan
    values: Sequence[FloatArray]
    versions: Sequence[int]

    def tensors(self) -> dict[str, FloatArray]:
        return assemble_tensors(self.plan, self.values)


def deciding_figure(
    loss: float | None, metrics: Mapping[str, float | None], directions: Mapping[str, Direction]
) -> DecidingFigure | None:
    """The loss; where the scorer gives none, the first metric of which it says what is better."""
    if loss is not None:
        return DecidingFigure(LOSS, loss, "min")
    declared = ((name, metrics.get(name), direction) for name, direction in directions.items())
    return next((DecidingFigure(name, value, better) for name, value, better in declared if value is not None), None)


class BestModel:
    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        """None: it is kept nowhere."""
        self._complained = False

    def keep(self, figure: DecidingFigure, model: FetchedModel) -> bool:
        """Write it down if it is better than what lies there; a disk that fails costs the file, not the scores."""
        if self.path is None or not self._is_better(self.path, figure, model.run):
            return False
        facts = facts_of_model(model.run, model.round, model.versions)
        facts |= {"figure": figure.name, "score": repr(figure.value)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _set_aside(self.path, model.run)
            save_model(self.path, model.tensors(), facts)
        except (OSError, AtollError) as error:
            if not self._complained:
                print(f"atoll: the best model is not kept: {error}", file=sys.stderr, flush=True)
            self._complained = True
            return False
        return True

    def _is_better(self, path: Path, figure: DecidingFigure, run: str) -> bool:
        """What another evaluator of the same run has left counts; of another run, or by another figure, it does not."""
        known = read_model_facts(path)
        if known.get("run") != run or known.get("figure") != figure.name:
            return True
        try:
            return figure.is_better(float(known["score"]))
        except (KeyError, ValueError):
            return True


def _set_aside(path: Path, run: str) -> None:
    """Give the best model of an earlier run, such as the one that this run was restored from, a name of its own."""
    before = read_model_facts(path).get("run", "")
    if before in ("", run) or not before.isalnum():
        return
    names = (f"{path.stem}-of-{before}{number}{path.suffix}" for number in ("", *(f"-{n}" for n in range(2, 100))))
    free = next((path.with_name(name) for name in names if not path.with_name(name).exists()), None)
    if free is not None:
        path.rename(free)
        say(f"the best model of run {before} is in {free.name} now")


# ---- scoring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoreFigures:
    """What a scorer found, as it may be sent; None: not a number, or beyond all measure."""

    loss: float | None
    metrics: dict[str, float | None]
    has_loss: bool = True

    @property
    def by_name(self) -> dict[str, float | None]:
        return {**({LOSS: self.loss} if self.has_loss else {}), **self.metrics}

    def with_average(self, average: ScoreFigures, scorer: str) -> ScoreFigures:
        """These figures, and those of the average under names of its own."""
        metrics = {**self.metrics, **{OF_AVERAGE + name: value for name, value in average.by_name.items()}}
        if len(metrics) > METRICS:
            raise ValueError(f"{scorer} returned {len(self.by_name)} figures: with ema return up to {METRICS // 2}")
        return ScoreFigures(self.loss, metrics, self.has_loss)

    def describe(self) -> str:
        figures = self.by_name
        return ", ".join(f"{name} {'not finite' if v is None else f'{v:.6g}'}" for name, v in figures.items())


def read_figures(found: object, scorer: str = "the scorer") -> ScoreFigures:
    """What a scorer returned: a loss, or figures by name. TypeError, ValueError: it is neither. `scorer`: how it is
    called."""
    if not isinstance(found, Mapping):
        return ScoreFigures(read_figure(LOSS, found, scorer), {})
    for name in found:
        check_figure_name(name, scorer)
    figures = {name: read_figure(name, value, scorer) for name, value in found.items()}
    if not figures or len(figures) > METRICS:
        raise ValueError(f"{scorer} returned {len(figures)} figures: return 1 to {METRICS} of them")
    has_loss = LOSS in figures
    return ScoreFigures(figures.pop(LOSS, None), figures, has_loss)


def read_figure(name: str, value: Any, scorer: str) -> float | None:
    try:
        return near(float(value))
    except (TypeError, ValueError):
        kind = type(value).__name__
        raise TypeError(
            f"{scorer} returned {kind} as {name!r}: return a loss, or figures by name as in "
            '{"loss": 0.31, "accuracy": 0.91}'
        ) from None


def check_figure_name(name: object, scorer: str) -> None:
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable()):
        raise ValueError(f"{scorer} named a figure {str(name)[:LONGEST]!r}: use 1 to {LONGEST} printable characters")


def name_scorer(score: Callable[..., object]) -> str:
    """The user's function, and the line where it begins."""
    code = getattr(score, "__code__", None)
    if code is None:
        return f"the scorer ({type(score).__name__})"
    return f"the scorer {score.__qualname__} (line {code.co_firstlineno} of {Path(code.co_filename).name})"


class ScoreClock:
    """When the model is scored next: by learner steps, so a phase of a small H is scored no more often; and at least
    once in each fifth of the run, so a short run has a curve too."""

    def __init__(self) -> None:
        self._due_step = self._due_fifth = 0.0

    def is_due(self, step: int, progress: float) -> bool:
        return step >= self._due_step or FIFTHS * progress >= self._due_fifth

    def note_score(self, step: int, progress: float, every: float) -> None:
        """`every`: learner steps between two scores."""
        self._due_step, self._due_fifth = (step // every + 1) * every, FIFTHS * progress // 1 + 1


class ShardedSyncer:
    """Where the parts of a model are: at one process, or at each shard (docs/adr/0031)."""

    def __init__(self, url: str, plan: FragmentPlan, shards: Sequence[str], codecs: Sequence[str]) -> None:
        lead = parse_address(url)
        self._addresses = [lead, *map(lead.address_of_shard, shards)]
        self._plan = make_shard_plan(plan, len(self._addresses), codecs)

    async def fetch_fragment(self, fragment: int, values: FloatArray) -> int:
        """The version that is then in `values`."""
        places = self._plan.places(fragment)
        return await fetch_one_version([partial(self._fetch_place, one, values[one.values]) for one in places])

    async def _fetch_place(self, place: PartPlace, values: FloatArray, least: int) -> int:
        where, data = self._addresses[place.shard - 1], values.view(np.uint8).data
        version, _, _ = await get_fragment_once(where, place.part.index, data, FETCH_S, least)
        return version


class Evaluator:
    def __init__(
        self,
        url: str,
        scored: ScoredModel,
        score: Callable[[Any], float | Mapping[str, float]],
        sample: Callable[[Any], str] | None,
        directions: Mapping[str, Direction],
        unit: str,
        best: BestModel | None = None,
        average: AveragedModel | None = None,
        find_folder: Callable[[str], RunDir] | None = None,
    ) -> None:
        """`find_folder`: where the models of a run are kept; None: nowhere."""
        self._url, self._scored, self._score, self._sample = url, scored, score, sample
        self._directions, self._unit = dict(directions), unit
        self._best, self._find_folder = best, find_folder
        self._average = average
        """None: there is none."""
        if average is not None:
            self._directions |= {OF_AVERAGE + name: better for name, better in directions.items()}
            self._directions[OF_AVERAGE + LOSS] = "min"
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._checked = False
        self._cpu_s = 0.0
        self._last: tuple[tuple[str, tuple[int, ...]], ScoreReport, float] | None = None
        """The model that was scored last, by its run and versions, what was told of it, and the steps to the next."""
        self._presence: threading.Thread | None = None
        self._over = threading.Event()

    async def run(self) -> None:
        try:
            await self._score_to_end()
        finally:
            self._over.set()

    async def _score_to_end(self) -> None:
        clock, run, heard_at, patience_s, complaint = ScoreClock(), "", time.monotonic(), GIVE_UP_S, ""
        while True:
            try:
                status = msgspec.convert(await get_json(self._url, "/v1/status"), RunStatus)
            except (PeerError, Unreachable) as error:
                if isinstance(error, NotAdmitted) and not run:
                    raise ConfigError(str(error)) from None
                if time.monotonic() - heard_at > patience_s:
                    raise Unreachable(f"no syncer answers for {patience_s:g} s: is the run over? ({error})") from None
                if run and not complaint:
                    complaint = str(error)
                    say(f"no syncer answers this evaluator ({complaint}): it waits for one")
                await asyncio.sleep(POLL_S)
                continue
            if complaint:
                say("a syncer answers again")
            heard_at, complaint = time.monotonic(), ""
            if status.run != run:
                if not run:
                    await self._check_admitted()
                clock, run = ScoreClock(), status.run
                say(f"joined run {run} as its evaluator{self._enter_folder(run)}")
                self._tell_presence()
            final = status.phase == "finished"
            progress = status.progress if status.budgeted else 0.0
            patience_s = GIVE_UP_S if status.phase in ("ending", "finished") or progress >= NEAR_END else AWAY_S
            if status.phase != "waiting" and (final or clock.is_due(status.global_step, progress)):
                try:
                    if (every := await self._tell_again(status, final)) is None:
                        every = await self._once(status.round, final)
                except Unreachable:  # the syncer went in the middle of it: look whether it comes back
                    await asyncio.sleep(POLL_S)
                    continue
                if every > 0:
                    clock.note_score(status.global_step, progress, every)
            if final:
                return
            await asyncio.sleep(POLL_S)

    async def _check_admitted(self) -> None:
        """ConfigError: the token is for another role. With it the status may be read, and no score be sent."""
        try:
            await tell_presence(self._url)
        except NotAdmitted as error:
            raise ConfigError(str(error)) from None
        except (PeerError, Unreachable):
            return  # it is told again every few seconds

    def _enter_folder(self, run: str) -> str:
        """Keep the models of this run in its folder, and return what the operator is told of that."""
        if self._find_folder is None:
            return ""
        folder = self._find_folder(run)
        if self._best is not None:
            self._best.path = folder.best_model
        if self._average is not None:
            self._average.path = folder.ema_model
        kept = "the best model is" if self._average is None else "the best model and the average are"
        return f"; {kept} kept in {folder.path}"

    def _tell_presence(self) -> None:
        """From a thread of its own, since the scorer holds up the event loop."""
        if self._presence is None:
            self._presence = threading.Thread(target=self._keep_telling, name="atoll-presence", daemon=True)
            self._presence.start()

    def _keep_telling(self) -> None:
        while not self._over.is_set():
            with suppress(PeerError, Unreachable):
                asyncio.run(tell_presence(self._url))
            self._over.wait(PRESENCE_S)

    async def _tell_again(self, status: RunStatus, final: bool) -> float | None:
        """Where the newest model was scored already, score it no more: at the end tell that score once more, as the
        last. Return steps to the next score, 0 before the next version; None: the model is new, or has to write."""
        if self._last is None or not status.versions or self._last[0] != (status.run, status.versions):
            return None
        if not final:
            return 0.0
        if self._sample is not None and self._average is not None:
            return None  # the average was scored after it, so the model holds that
        _, score, every = self._last
        text = self._sample(self._scored.hand_over())[:SAMPLE_CHARS] if self._sample is not None else ""
        again = msgspec.structs.replace(score, round=status.round, cpu_s=0.0, sample=text, final=True)
        await post_score(self._url, again)
        return every

    async def _once(self, round: int, final: bool) -> float:
        """Score the model as it is now; how many learner steps lie between two scores."""
        manifest: Any = await get_json(self._url, "/v1/manifest")
        plan = msgspec.convert(manifest["plan"], FragmentPlan)
        if not self._checked:
            self._parameters = self._scored.fit_run(plan.tensors, str(manifest.get("frozen", "")))
            self._checked = True
        shards = ShardedSyncer(self._url, plan, manifest.get("shards", ()), manifest.get("codecs", ()))
        fetched = await self._fetch(plan, shards, str(manifest["run"]), round)
        model = self._scored.hand_over()
        scorer = name_scorer(self._score)
        found = read_figures(self._score(model), scorer)
        text = self._sample(model)[:SAMPLE_CHARS] if final and self._sample is not None else ""
        figure = deciding_figure(found.loss, found.metrics, self._directions)
        if self._average is not None:
            average = await self._score_average(self._average, fetched, manifest.get("least", ()), found, scorer)
            found = found.with_average(average, scorer) if average is not None else found
        spent = time.process_time() - self._cpu_s
        self._cpu_s += spent
        score = ScoreReport(
            round=round,
            loss=found.loss,
            cpu_s=float(f"{spent:.3f}"),
            sample=text,
            final=final,
            metrics=found.metrics,
            directions={name: better for name, better in self._directions.items() if name in found.metrics},
            unit=self._unit,
            has_loss=found.has_loss,
        )
        if self._best is not None and figure is not None:  # before the last score is told: with it the run is over
            await asyncio.to_thread(self._best.keep, figure, fetched)
        await post_score(self._url, score)
        say(f"scored round {round}: {found.describe()}")
        every = float(manifest["evaluate_steps"])
        self._last = ((fetched.run, tuple(fetched.versions)), score, every)
        return every

    async def _score_average(
        self, average: AveragedModel, fetched: FetchedModel, least: Sequence[int], found: ScoreFigures, scorer: str
    ) -> ScoreFigures | None:
        """Take in what was fetched and found, and score the average; None: it holds nothing yet."""
        if None not in found.by_name.values():
            tensors = fetched.tensors()
            await asyncio.to_thread(average.add, fetched.run, fetched.plan, fetched.versions, tensors, least)
            await asyncio.to_thread(average.save, fetched.round)
        if not average.models:
            return None
        for spec in fetched.plan.tensors:
            self._parameters[spec.name].data.copy_(torch.from_numpy(average.tensors[spec.name_in_model]))
        return read_figures(self._score(self._scored.hand_over()), scorer)

    async def _fetch(self, plan: FragmentPlan, shards: ShardedSyncer, run: str, round: int) -> FetchedModel:
        """Into the model; and as it came, where the best or an average is kept. Fragments may be of different rounds:
        each is the newest when it is fetched."""
        kept: list[FloatArray] = []
        versions: list[int] = []
        for part in plan.fragments:
            values = np.empty(part.size, dtype=np.float32)
            version = await shards.fetch_fragment(part.index, values)
            for piece, place in part.parts:
                own = view_piece(self._parameters[piece.tensor.name], piece)
                own.data.copy_(torch.from_numpy(values[place]).view(piece.shape))
            versions.append(version)
            if self._best is not None or self._average is not None:
                kept.append(values)
        return FetchedModel(run, round, plan, kept, versions)
