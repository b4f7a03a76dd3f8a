"""The ranks of one learner: what each holds of the model, and what they agree on between two steps.

A learner is one process, or all ranks of the default process group (docs/adr/0030): DDP, FSDP2 (`fully_shard`), HSDP,
and FSDP2 with tensor parallel.

All ranks carry out the courier's frames at the same step. After each step they exchange, by an all_gather of a few
numbers over gloo that nobody waits for, how many frames each has received; at the next boundary all carry out the
frames that all had by then. What a script reads between two steps (whether it is done, how far the run is) is agreed
in the same way. Where the learner does not train (joining, a synchronous round, the end) they exchange and wait.

FSDP2 keeps a model's shards as DTensors. They are taken once, on entering: after a forward pass without a backward one,
`named_parameters` shows other tensors, and what is written into a shard is ignored, until `reshard` was called.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from msgspec import structs
from torch import nn

from atoll.learner.courier_process import CourierProcess
from atoll.learner.meeting import AgreedFacts, RankFacts, agree_on
from atoll.mailbox.channel import Start
from atoll.protocol.errors import ConfigError, RunFailed
from atoll.protocol.messages import Box, RankBoxes

MEET_S = 600.0
"""How long a rank waits for the others before it takes them for dead."""
COME_S = 60.0
"""How long a rank waits for the others to make their learners."""
T = TypeVar("T")


class RankGroup:
    """All ranks of the default process group. Its calls are made by all ranks, in the same order."""

    def __init__(self) -> None:
        """ConfigError names a rank that makes no learner."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        _await_all(self.rank, self.size)
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEET_S))
        self._pending: tuple[dist.Work, list[torch.Tensor], torch.Tensor] | None = None

    def begin_exchange(self, facts: RankFacts) -> None:
        """Nobody waits here."""
        assert self._pending is None, "one exchange at a time"
        progress = torch.tensor([facts.progress], dtype=torch.float64).view(torch.int64)
        words = [facts.frames, facts.tokens, int(facts.leaving), int(facts.vote), facts.committed, facts.global_step]
        own = torch.cat([torch.tensor(words, dtype=torch.int64), progress])
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with reach_ranks():
            work = dist.all_gather(rows, own, group=self._group, async_op=True)
        assert work is not None
        self._pending = work, rows, own

    def finish_exchange(self) -> AgreedFacts | None:
        """Of the exchange that was begun last; None: none was."""
        if self._pending is None:
            return None
        work, rows, _ = self._pending
        self._pending = None
        with reach_ranks():
            work.wait()
        told = [_read_facts(row) for row in rows]
        return agree_on(told)

    def share(self, value: T, kind: type[T]) -> T:
        """What rank 0 has, for all."""
        return self.gather(value, kind)[0]

    def gather(self, value: T, kind: type[T]) -> list[T]:
        """What every rank has, for all."""
        own = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        sizes = self._gather_rows(torch.tensor([own.numel()]))
        room = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
        room[: own.numel()] = own
        rows = self._gather_rows(room)
        told = [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
        return [msgspec.msgpack.decode(one, type=kind) for one in told]

    def _gather_rows(self, own: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with reach_ranks():
            dist.all_gather(rows, own, group=self._group)
        return rows


@contextmanager
def reach_ranks() -> Iterator[None]:
    """RunFailed: another rank is gone."""
    try:
        yield
    except RuntimeError as error:  # of whatever kind a process group has
        raise RunFailed(f"another rank of this learner is gone: {str(error).splitlines()[0][:200]}") from error


_MADE = count()


def _await_all(rank: int, size: int) -> None:
    store, number = dist.distributed_c10d._get_default_store(), next(_MADE)
    store.set(f"atoll/{number}/{rank}", "here")
    for other in range(size):
        try:
            store.wait([f"atoll/{number}/{other}"], timedelta(seconds=COME_S))
        except RuntimeError as error:  # torch.distributed's errors are of this kind
            raise ConfigError(
                f"rank {other} of {size} made no atoll.Learner within {COME_S:g} s: every rank makes one, of its model"
            ) from error


def _read_facts(row: torch.Tensor) -> RankFacts:
    frames, tokens, leaving, vote, committed, global_step = row[:6].tolist()
    progress = row[6:].view(torch.float64).item()
    return RankFacts(frames, tokens, bool(leaving), bool(vote), committed, progress, global_step)


def find_ranks() -> RankGroup | None:
    """None: this process is the whole learner. ConfigError: several ranks were started, and there is no process group
    yet."""
    if count_ranks() > 1:
        return RankGroup()
    if dist.is_available() and dist.is_initialized():
        return None
    size = os.environ.get("WORLD_SIZE", "")
    started = "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_WORLD_SIZE" in os.environ  # torchrun; atoll train --ranks
    if started and size.isdecimal() and int(size) > 1:
        raise ConfigError(
            f"{size} ranks were started, and there is no process group: call torch.distributed.init_process_group "
            'before atoll.Learner(...), or Lightning with Trainer(devices=..., strategy="ddp")'
        )
    return None


def count_ranks() -> int:
    """Ranks of the default process group; 1: there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def introduce_rank(ranks: RankGroup, courier: CourierProcess, start: Start, boxes: tuple[RankBoxes, ...]) -> str:
    """Tell a new courier which rank it is beside; the couriers of the other ranks find rank 0's at a socket that is
    made here. The session: rank 0's is that of all."""
    listening, address = _open_meeting_place() if ranks.rank == 0 else (None, "")
    session, address, secret = ranks.share((start.session, address, secrets.token_hex(16)), tuple[str, str, str])
    leader = address if ranks.rank else ""
    told = structs.replace(start, session=session, ranks=boxes, rank=ranks.rank, leader=leader, secret=secret)
    courier.send(told, listening.fileno() if listening is not None else None)
    if listening is not None:
        listening.close()
    return session


def _open_meeting_place() -> tuple[socket.socket, str]:
    """Where it listens, and its address."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # the machine of rank 0, as all ranks reach it
    if host in ("localhost", "127.0.0.1", "::1"):
        listening = socket.create_server(("127.0.0.1", 0))
        return listening, f"127.0.0.1:{listening.getsockname()[1]}"
    both = socket.has_dualstack_ipv6()
    listening = socket.create_server(("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)
    return listening, f"{host}:{listening.getsockname()[1]}"


# ---- what a rank holds ----------------------------------------------------------------------------------------------


def is_dtensor(tensor: torch.Tensor) -> bool:
    """By name: to import it costs every learner a second, and a model that has any has it imported already."""
    return any(
        one.__name__ == "DTensor" and one.__module__.startswith("torch.distributed") for one in type(tensor).__mro__
    )


def take_local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of it that this rank holds, in the same memory."""
    local: torch.Tensor = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def make_like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A shard of the parameter's layout where it is one and the values are of its local shape; else the values."""
    if not is_dtensor(parameter) or values.shape != take_local(parameter).shape:
        return values
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    kind: Any = next(one for one in type(parameter).__mro__ if one.__name__ == "DTensor")
    made: torch.Tensor = kind.from_local(
        values, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return made


def rank_folder(first: str, rank: int) -> Path | None:
    """Where a rank saves its state, in the folder of rank 0 or beside it; None: nowhere."""
    return (Path(first) if rank == 0 else Path(first) / f"rank-{rank}") if first else None


def find_boxes(tensors: Mapping[str, torch.Tensor], rank: int) -> RankBoxes:
    """As if it sent all of them (`choose_senders`). ConfigError names the first tensor whose layout is not known."""
    return tuple(_find_box(name, tensor, rank) for name, tensor in tensors.items())


def _find_box(name: str, tensor: torch.Tensor, rank: int) -> Box:
    if not is_dtensor(tensor):
        return Box(name, (0,) * tensor.dim(), tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    for placement in placements:
        if not (placement.is_replicate() or type(placement).__name__ in ("Shard", "_StridedShard")):
            raise ConfigError(f"parameter '{name}' is laid out as {placement}: only shards and replicas can be merged")
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tuple(take_local(tensor).shape)
    if tuple(sizes) != local:
        raise ConfigError(f"parameter '{name}' is {local} on rank {rank}, and its layout says {tuple(sizes)}")
    return Box(name, tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class DataShare:
    """Which part of the learner's data a rank trains on."""

    part: int = 0
    parts: int = 1
    counts: bool = True
    """False: another rank of its tensor-parallel group trains on the same data, and counts its tokens."""

    def take(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of the samples of one step of the learner; parts differ by one sample at most."""
        return indices[len(indices) * self.part // self.parts : len(indices) * (self.part + 1) // self.parts]


def find_data_share(ranks: RankGroup, model: nn.Module) -> DataShare:
    """Ranks of a mesh dimension called tp… train on the same data: it is the innermost, so they are neighbours."""
    first = ranks.gather(_is_first_of_its_data(model), bool)
    return DataShare(sum(first[: ranks.rank + 1]) - 1, sum(first), first[ranks.rank])


def _is_first_of_its_data(model: nn.Module) -> bool:
    for parameter in model.parameters():
        if is_dtensor(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            for at, name in zip(mesh.get_coordinate() or (), mesh.mesh_dim_names or (), strict=False):
                if name.startswith("tp") and at > 0:
                    return False
    return True


def reshard(model: nn.Module) -> None:
    """What is written into shards counts from now on."""
    for module in model.modules():
        if any(one.__name__ == "FSDPModule" for one in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
