"""One rank of a data-parallel group that can be formed anew: the baselines of `atoll compare`.

The launcher owns generations. On standard input it says who trains together, one line of JSON each time:
`{"generation": 3, "ranks": [0, 2, 3]}`, and at the end `{"stop": true, "scores": 0}`. A rank that hears of a new
generation leaves the old group between two steps; who was in the middle of one finds the connections closed, and that
step is not made. In the new group everybody takes the state of whoever is furthest: so a newcomer is sent weights and
optimizer, and nobody differs.

With ATOLL_CHECKPOINT rank 0 saves its state there every ATOLL_CHECKPOINT_EVERY steps (0: every 10 s), and every rank
begins with what lies there: restarted all together, they go on from it.

What it says, as lines of JSON on standard output: `ready` (step), `formed` (generation, step, digest), `step` (times of
its parts), `saved` (step), `broken` (generation, text) and `end` (step, digest; the one that scores: validation_loss).
Times are those of the machine's monotonic clock.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll.protocol.errors import ConfigError
from atoll.store.atomic import write_atomic
from atoll.workloads.settings import WorkloadSettings, read_run
from atoll.workloads.text import Text, Windows
from atoll.workloads.training import StepPace, build_model, build_optimizers, set_learning_rate, validation_loss

PEER_DEADLINE = timedelta(seconds=30)
"""A collective that takes longer has failed. Deaths are noticed at once, by closed connections."""
LOOK_S = 0.01
SAVE_EVERY_S = 10.0
PrintEvent = Callable[[dict[str, object]], None]


MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}
STEP = "step"
"""Of the run, in a checkpoint."""


class TrainedState:
    """Everything a rank has learned, as named tensors: sent to a new rank, and kept in a checkpoint.

    Parameters, the optimizers' moments and AdamW's step count. The optimizers' part is made before their first step, so
    that every rank has the same tensors in the same order whether it has trained or not.
    """

    def __init__(self, model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        self._tensors: dict[str, Tensor] = {}
        kinds = {p: kind for kind, one in optimizers.items() for group in one.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            kind = kinds[parameter]
            state = {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS[kind]}
            if kind == "adamw":
                state = {"step": torch.zeros(()), **state}
            optimizers[kind].state[parameter] = state
            self._tensors[f"parameter.{name}"] = parameter.detach()
            for part, tensor in state.items():
                self._tensors[f"{part}.{name}"] = tensor

    def flatten(self) -> Tensor:
        """A copy of all of it in one row."""
        return torch.cat([tensor.flatten() for tensor in self._tensors.values()])

    def load_flat(self, flat: Tensor) -> None:
        sizes = [tensor.numel() for tensor in self._tensors.values()]
        for tensor, part in zip(self._tensors.values(), torch.split(flat, sizes), strict=True):
            tensor.copy_(part.view_as(tensor))

    def digest(self) -> str:
        return hashlib.sha256(self.flatten().numpy().tobytes()).hexdigest()

    def save(self, path: Path, step: int) -> None:
        """Whole and durable, or as it was before."""
        write_atomic(path, safetensors.torch.save({**self._tensors, STEP: torch.tensor(step)}))

    def load(self, path: Path) -> int:
        """The step it was saved after; 0, and nothing changed, where nothing was saved."""
        if not path.exists():
            return 0
        saved = safetensors.torch.load_file(path)
        if saved.keys() - {STEP} != self._tensors.keys():
            raise ConfigError(
                f"{path} is the checkpoint of another model or optimizer: remove it, or name another folder"
            )
        for name, tensor in self._tensors.items():
            tensor.copy_(saved[name])
        return int(saved[STEP])


class FlatGradients:
    """Every parameter's gradient as a view of one buffer, so that averaging and clipping are one operation each."""

    def __init__(self, model: nn.Module) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        sizes = [p.numel() for p in parameters]
        self.buffer = torch.zeros(sum(sizes))
        for parameter, part in zip(parameters, torch.split(self.buffer, sizes), strict=True):
            parameter.grad = part.view_as(parameter)

    def average(self, world: int) -> None:
        if world > 1:
            dist.all_reduce(self.buffer)
            self.buffer.div_(world)

    def clip(self, limit: float) -> None:
        self.buffer.mul_(torch.clamp(limit / (self.buffer.norm() + 1e-6), max=1.0))

    def clear(self) -> None:
        self.buffer.zero_()


def batch_indices(size: int, batch: int, seed: int, rank: int) -> Iterator[NDArray[np.int64]]:
    """Endless batches of dataset indices: each rank its own permutation of the whole, a new one every epoch."""
    if size < batch:
        raise ConfigError(
            f"the training part has {size} windows, too few for workload.batch = {batch}: set a smaller one"
        )
    rng = np.random.default_rng((seed, rank))
    while True:
        order = rng.permutation(size)
        for start in range(0, size - batch + 1, batch):
            yield order[start : start + batch]


class GroupBroken(Exception):
    """Somebody of the group is gone, or there is a newer one."""


class GroupOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    generation: int = 0
    ranks: tuple[int, ...] = ()
    stop: bool = False
    scores: int = 0
    """At the end: the rank that scores the model."""


class OrderReader:
    """Lines of standard input, read beside the training; the newest counts."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._heard: queue.SimpleQueue[GroupOrder] = queue.SimpleQueue()
        threading.Thread(target=self._read_orders, args=(lines,), name="orders", daemon=True).start()

    def _read_orders(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._heard.put(msgspec.json.decode(line, type=GroupOrder))
        self._heard.put(GroupOrder(stop=True, scores=-1))  # nobody is left to give orders

    @property
    def waiting(self) -> bool:
        return not self._heard.empty()

    def read_newest(self) -> GroupOrder:
        """Waits for one; of several that wait, the last."""
        order = self._heard.get()
        while self.waiting and not order.stop:
            order = self._heard.get()
        return order


class Batches:
    """The same batch for the same step, however often it is tried."""

    def __init__(self, indices: Iterator[NDArray[np.int64]]) -> None:
        self._indices = indices
        self._drawn = 0
        self._last: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def indices_of(self, step: int) -> NDArray[np.int64]:
        assert step >= self._drawn, "batches are drawn in order"
        while self._drawn < step:
            self._last = next(self._indices)
            self._drawn += 1
        return self._last


@dataclass(frozen=True, slots=True)
class RankEnvironment:
    """What the launcher told this rank by its environment."""

    rank: int
    steps: int
    """Over which the learning rate falls."""
    groups: Path
    """A folder in which groups find each other."""
    checkpoint: Path | None = None
    checkpoint_every: int = 0


class Rank:
    def __init__(
        self, settings: WorkloadSettings, seed: int, place: RankEnvironment, orders: OrderReader, say: PrintEvent
    ) -> None:
        self.settings, self.place, self.orders, self.say = settings, place, orders, say
        self.text = Text.load(settings.data)
        self.dataset = Windows(self.text, settings.block)
        self.model = build_model(settings, seed)
        self.optimizers = build_optimizers(self.model, settings)
        self.trained = TrainedState(self.model, self.optimizers)
        self.gradients, self.pace = FlatGradients(self.model), StepPace(settings.pace_s)
        self.batches = Batches(batch_indices(len(self.dataset), settings.batch, seed, place.rank))
        self.step = self.trained.load(place.checkpoint) if place.checkpoint is not None else 0
        self._saved_at = time.monotonic()

    def run(self) -> None:
        self.say({"kind": "ready", "step": self.step})
        while not (order := self.orders.read_newest()).stop:
            try:
                with group(order, self.place, lambda: self.orders.waiting):
                    self._share_state(order)
                    while not self.orders.waiting:
                        self._train_steps(order)
            except GroupBroken as error:
                self.say({"kind": "broken", "generation": order.generation, "text": str(error)})
        self._report_end(order)

    def _share_state(self, order: GroupOrder) -> None:
        """Everybody takes the state of the first of those who have made the most steps."""
        if len(order.ranks) > 1:
            made = torch.zeros(len(order.ranks), dtype=torch.int64)
            made[order.ranks.index(self.place.rank)] = self.step
            flat = self.trained.flatten()
            with collective():
                dist.all_reduce(made)
                dist.broadcast(flat, src=int(made.argmax()))
            self.trained.load_flat(flat)
            self.step = int(made.max())
        digest = self.trained.digest()
        self.say(
            {
                "kind": "formed",
                "generation": order.generation,
                "world": len(order.ranks),
                "step": self.step,
                "digest": digest,
                "at": time.monotonic(),
            }
        )

    def _train_steps(self, order: GroupOrder) -> None:
        self.pace.begin_step()
        began = time.monotonic()
        set_learning_rate(self.optimizers, self.step / self.place.steps, self.settings)
        self.gradients.clear()
        loss = self.model(self.dataset.gather(self.batches.indices_of(self.step + 1)))
        loss.backward()
        self.pace.sleep_rest()
        computed = time.monotonic()
        with collective():
            self.gradients.average(len(order.ranks))
        averaged = time.monotonic()
        self.gradients.clip(self.settings.clip)
        for optimizer in self.optimizers.values():
            optimizer.step()
        self.step += 1
        self.say(
            {
                "kind": "step",
                "step": self.step,
                "generation": order.generation,
                "began": began,
                "compute_s": computed - began,
                "collective_s": averaged - computed,
                "update_s": time.monotonic() - averaged,
                "tokens": self.settings.batch * self.settings.block,
                "loss": float(loss.detach()),
            }
        )
        self._save_if_due()

    def _save_if_due(self) -> None:
        path, every = self.place.checkpoint, self.place.checkpoint_every
        if path is None or self.place.rank != 0:
            return
        if self.step % every == 0 if every else time.monotonic() - self._saved_at >= SAVE_EVERY_S:
            self.trained.save(path, self.step)
            self._saved_at = time.monotonic()
            self.say({"kind": "saved", "step": self.step})

    def _report_end(self, order: GroupOrder) -> None:
        words: dict[str, object] = {"kind": "end", "step": self.step, "digest": self.trained.digest()}
        if order.scores == self.place.rank:
            words["validation_loss"] = validation_loss(self.model, self.text, self.settings.eval_windows)
        self.say(words)


@contextmanager
def collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupBroken(str(error).splitlines()[0]) from error


@contextmanager
def group(order: GroupOrder, place: RankEnvironment, newer: Callable[[], bool]) -> Iterator[None]:
    """The gloo group of a generation. Nobody begins to form it before all are there, so that a death in the meantime,
    of which the launcher tells, holds nobody up."""
    if len(order.ranks) == 1:
        yield
        return
    with collective():
        path = str(place.groups / str(order.generation))
        store = dist.FileStore(path, len(order.ranks))  # type: ignore[attr-defined]  # torch does not list it
        store.set(f"here/{place.rank}", "yes")
        while not store.check([f"here/{rank}" for rank in order.ranks]):
            if newer():
                raise GroupBroken("there is a newer generation")
            time.sleep(LOOK_S)
        me, world = order.ranks.index(place.rank), len(order.ranks)
        dist.init_process_group("gloo", store=store, rank=me, world_size=world, timeout=PEER_DEADLINE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank_main() -> None:
    torch.set_num_threads(int(os.environ.get("ATOLL_THREADS", "1")))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that resolves nowhere does no harm
    settings, seed = read_run(Path(os.environ["ATOLL_RUN_TOML"]))
    checkpoint = os.environ.get("ATOLL_CHECKPOINT")
    place = RankEnvironment(
        rank=int(os.environ["RANK"]),
        steps=int(os.environ["ATOLL_STEPS"]),
        groups=Path(os.environ["ATOLL_GROUPS"]),
        checkpoint=Path(checkpoint) if checkpoint else None,
        checkpoint_every=int(os.environ.get("ATOLL_CHECKPOINT_EVERY", "0")),
    )
    with open(0, "rb", buffering=0, closefd=False) as lines:  # unbuffered: no lock is held when the process ends
        Rank(settings, seed, place, OrderReader(lines), lambda words: print(json.dumps(words), flush=True)).run()


if __name__ == "__main__":
    rank_main()
