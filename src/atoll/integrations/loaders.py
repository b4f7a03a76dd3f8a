"""The samples and the learning rate of a run, under the dataloader and the schedule of another library.

A dataloader keeps its own BatchSampler, workers and collate function; only where the indices come from is changed. A
schedule keeps its shape; only how far it is, is the run's word and not the count of this learner's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from atoll.extras import explained

with explained(__name__, "torch"):
    from torch import Generator
    from torch.optim.lr_scheduler import LambdaLR
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler
    from torch.utils.data.distributed import DistributedSampler

    from atoll.learner.learner import Learner
    from atoll.learner.script import say

__all__ = ["follow_run", "lease_samples", "share_stream"]


class LeasedIndices(Sampler[int]):
    """The samples that the run leases to this learner, one by one, for a BatchSampler of the same batch size."""

    def __init__(self, learner: Learner, dataset: Any, batch_size: int, ranks: int = 1) -> None:
        """Of a learner of several ranks: `batch_size` is of this one."""
        self._batches = learner.sampler(dataset, batch_size)
        self._length = -(-len(dataset) // ranks)

    def __len__(self) -> int:
        """Of one pass, as other libraries count their epochs; the leases themselves go on until the run is done."""
        return self._length

    def __iter__(self) -> Iterator[int]:
        for batch in self._batches:
            yield from batch


def lease_samples(loader: Any, learner: Learner) -> bool:
    """Let a dataloader load what the run leases; False: its data has no length, or it chooses its own samples.

    `loader`: torch's DataLoader, or what Accelerate's `prepare` or Lightning has made of it, before it is read.
    A sampler that does more than put all samples in order or shuffle them stays, since a batch may depend on its choice
    (groups, weights, lengths): it is seeded by the learner, and a line says so."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    shard = None
    if type(batches).__name__ == "BatchSamplerShard" and not batches.split_batches:  # Accelerate's, of several ranks
        shard, batches = batches, batches.batch_sampler
    if type(batches) is not BatchSampler:
        say("the loader's own batch sampler stays: samples are counted, not leased. Let it draw by learner.seed")
        return False
    if not _leaves_choice(batches.sampler):
        _keep_sampler(batches.sampler, learner.seed)
        return False
    ranks = getattr(batches.sampler, "num_replicas", 1)  # a DistributedSampler, as Lightning's
    if shard is not None:  # leases are parted by rank already, so the shard takes whole batches
        ranks, shard.num_processes, shard.process_index = shard.num_processes, 1, 0
    batches.sampler = LeasedIndices(learner, loader.dataset, batches.batch_size, ranks)
    return True


def _leaves_choice(sampler: object) -> bool:
    """Whether a sampler takes every sample once, so that leases may take its place. Derived ones may do more."""
    if type(sampler) is RandomSampler or type(sampler).__name__ == "SeedableRandomSampler":  # the second: Accelerate's
        return not getattr(sampler, "replacement", False)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def _keep_sampler(sampler: Any, seed: int) -> None:
    inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)  # Lightning wraps it for several ranks
    seeded = True
    if isinstance(getattr(inner, "generator", None), Generator):
        inner.generator.manual_seed(seed)
    elif hasattr(inner, "generator"):
        inner.generator = Generator().manual_seed(seed)
    elif isinstance(getattr(inner, "seed", None), int):
        inner.seed = seed
    else:
        seeded = False
    order = "seeded by this learner" if seeded else "its own: make it from learner.seed, or all train on the same"
    say(f"{type(inner).__name__} chooses the samples and stays: they are counted, not leased; its order is {order}")


def share_stream(loader: Any, learner: Learner) -> bool:
    """Let a dataloader of a stream read this learner's share of it; False: it is something else, or makes batches."""
    inner = getattr(loader, "base_dataloader", loader)  # Accelerate wraps it
    if not isinstance(inner, DataLoader) or not isinstance(inner.dataset, IterableDataset):
        return False
    if not inner.batch_size:
        say("the stream makes its own batches and is read as it is: share it out by learner.index")
        return False
    dataset: Any = inner.dataset
    if type(dataset).__name__ == "IterableDatasetShard":  # each rank reads all, and takes its part of every batch
        of_all = dataset.batch_size * (1 if dataset.split_batches else dataset.num_processes)
        dataset.dataset = learner._make_stream_dataset(dataset.dataset, of_all, by_rank=False)
        return True
    dispatches = type(loader).__name__ == "DataLoaderDispatcher"  # rank 0 reads for all, batch by batch
    of_all = inner.batch_size * (1 if not dispatches or loader.split_batches else loader.state.num_processes)
    shared = learner._make_stream_dataset(dataset, of_all, by_rank=not dispatches)
    inner.__dict__["dataset"] = shared  # torch refuses to be told by assignment; nothing has been read yet
    return True


def follow_run(schedule: object, learner: Learner, steps: int) -> bool:
    """Let a schedule over `steps` steps be as far as the run is; False: it is no LambdaLR, and is left as it is.

    `schedule`: torch's own, as `get_scheduler` of transformers makes it; of one that Accelerate has prepared, its
    `.scheduler`."""
    if not isinstance(schedule, LambdaLR):
        return False
    schedule.lr_lambdas = [_at_progress(factor, learner, steps) for factor in schedule.lr_lambdas]
    rates = [base * factor(0) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # who joins late begins with the rate of the others
    schedule._last_lr = rates
    return True


def _at_progress(factor: Callable[[Any], float], learner: Learner, steps: int) -> Callable[[Any], float]:
    return lambda _: factor(learner.progress * steps)
