"""What a rank holds of a model, what ranks agree on, and what cannot be a rank.

DTensors are imported where they are used: every worker collects this file, and to load them takes seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.learner.lone_rank import draw_alone
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from atoll.learner.learner import Learner
from atoll.learner.model import describe, merged, merged_here, refuse_old_shards
from atoll.learner.ranks import DataShare, find_boxes, find_ranks, make_like, take_local
from atoll.numerics.rank_plan import check_tiling, choose_senders
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Box

WAIT_S = 240.0
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0"}


@contextmanager
def pretended(rank: int, size: int) -> Iterator[None]:
    """One rank of a group in which nothing is sent."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear_layouts

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_layouts()  # torch keeps them by mesh, and an equal mesh of another rank would get this one's


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


# ---- boxes -----------------------------------------------------------------------------------------------------------


def find_layouts(rank: int) -> dict[str, tuple[Box, ...]]:
    """What one of four ranks holds of the model in each layout. Layouts follow from the mesh alone, so the ranks may be
    pretended: tests/system/test_ranks.py has real ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with pretended(rank, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        parallel = model()
        for layer, dim in ((parallel[0], 0), (parallel[1], 1)):
            made = distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (4,)), [Shard(dim)])
            layer.weight = nn.Parameter(made)
        both, two = model(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(both, two["tp"], {"0": ColwiseParallel()})  # 1.weight is cut by FSDP alone
        models = {"fsdp": fully_shard(model()), "hsdp": fully_shard(model(), mesh=mesh), "tp": parallel, "ddp": model()}
        models["fsdp-tp"] = fully_shard(both, mesh=two["dp"])
        return {name: find_boxes(merged(one), rank) for name, one in models.items()}


@pytest.fixture(scope="module")
def layouts() -> list[dict[str, dict[str, Box]]]:
    """By rank, layout and tensor."""
    held = [find_layouts(rank) for rank in range(4)]
    chosen = {name: choose_senders([one[name] for one in held]) for name in held[0]}
    return [{name: {box.tensor: box for box in of[rank]} for name, of in chosen.items()} for rank in range(4)]


def test_fsdp_shards_are_uneven_and_may_be_empty(layouts: list[dict[str, dict[str, Box]]]) -> None:
    found = [one["fsdp"] for one in layouts]
    assert [one["0.weight"].sizes for one in found] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert [one["0.weight"].offsets[0] for one in found[:3]] == [0, 2, 4]
    assert [one["1.bias"].sizes for one in found] == [(1,), (1,), (0,), (0,)]
    assert all(box.sends for one in found for box in one.values())


def test_of_replicas_the_first_sends(layouts: list[dict[str, dict[str, Box]]]) -> None:
    assert [one["hsdp"]["0.weight"].offsets[0] for one in layouts] == [0, 3, 0, 3]
    assert [one["hsdp"]["0.weight"].sends for one in layouts] == [True, True, False, False]
    sends = [True, False, False, False]
    assert [one["ddp"]["0.weight"] for one in layouts] == [Box("0.weight", (0, 0), (5, 3), one) for one in sends]


def test_tensor_parallel_cuts_columns_too(layouts: list[dict[str, dict[str, Box]]]) -> None:
    assert [one["tp"]["1.weight"].sizes for one in layouts] == [(2, 2), (2, 2), (2, 1), (2, 0)]
    assert [one["tp"]["1.weight"].offsets for one in layouts[:3]] == [(0, 0), (0, 2), (0, 4)]


def test_beside_tensor_parallel_what_only_fsdp_cut_is_sent_once(layouts: list[dict[str, dict[str, Box]]]) -> None:
    assert [one["fsdp-tp"]["0.weight"].offsets[0] for one in layouts] == [0, 3, 2, 4]
    assert [one["fsdp-tp"]["1.weight"].offsets[0] for one in layouts] == [0, 0, 1, 1]
    assert [one["fsdp-tp"]["1.weight"].sends for one in layouts] == [True, False, True, False]


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp", "ddp", "fsdp-tp"])
def test_what_is_sent_tiles_the_model(layouts: list[dict[str, dict[str, Box]]], layout: str) -> None:
    check_tiling(describe(model()), [tuple(one[layout].values()) for one in layouts])


def test_what_a_rank_works_on_is_its_part_in_the_same_memory() -> None:
    from torch.distributed.fsdp import fully_shard

    with pretended(1, 2):
        made = model()
        whole = describe(made)
        fully_shard(made)
        assert describe(made) == whole, "names, shapes and types of the whole model"
        here = merged_here(made)
        assert here["0.weight"].shape == (2, 3) and type(here["0.weight"]) is torch.Tensor
        here["0.weight"].fill_(7.0)
        assert take_local(made[0].weight).eq(7.0).all()


def test_an_optimizer_s_state_is_a_shard_like_its_parameter() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with pretended(0, 2):
        made = fully_shard(model())
        local = torch.full_like(take_local(made[0].weight), 3.0)
        state = make_like(made[0].weight, local)
        assert isinstance(state, DTensor) and state.shape == (5, 3) and state.to_local().eq(3.0).all()
        assert make_like(made[0].weight, torch.tensor(1.0)).shape == (), "a step count is none"


def test_a_layout_that_cannot_be_merged_is_named() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    with pretended(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()], run_check=False)
        with pytest.raises(ConfigError, match="parameter 'weight' is laid out as"):
            find_boxes({"weight": partial}, 0)
        replica = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()], run_check=False)
        assert find_boxes({"weight": replica}, 0)[0].sends


def test_samples_are_dealt_without_rest() -> None:
    parts = [list(DataShare(part, 3).take(np.arange(8))) for part in range(3)]
    assert [one for part in parts for one in part] == list(range(8)) and [len(part) for part in parts] == [2, 3, 3]


# ---- who is a rank ---------------------------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": "8", "RANK": "1"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "WORLD_SIZE": "8"},
        {**TORCHRUN, "WORLD_SIZE": "1"},
        {**TORCHRUN, "WORLD_SIZE": "many"},
        TORCHRUN,
    ],
)
def test_a_job_of_one_rank_under_any_launcher(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_ranks() is None


def test_a_process_group_of_one_rank_is_a_plain_learner(group: None) -> None:
    assert find_ranks() is None
    assert list(merged(DistributedDataParallel(model()))) == list(merged(model()))


def test_a_torchrun_of_several_ranks_that_made_no_process_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        Learner(model(), syncer="http://127.0.0.1:9")
    assert ended.value.code == 2 and isinstance(ended.value.__cause__, ConfigError)
    said = capsys.readouterr().err
    assert said.startswith("atoll: 2 ranks were started, and there is no process group") and said.count("\n") == 1


def test_a_process_group_that_came_after_the_learner(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(model(), syncer="http://127.0.0.1:9", name="late")
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="init_process_group comes before"):
        learner.__enter__()


def test_shards_without_shapes_are_refused() -> None:
    class FullyShardedDataParallel(nn.Linear):
        __module__ = "torch.distributed.fsdp"

    with pytest.raises(ConfigError, match=r"'1' is sharded by FullyShardedDataParallel.*fully_shard"):
        refuse_old_shards(nn.Sequential(nn.Linear(1, 1), FullyShardedDataParallel(1, 1)))


# ---- real ranks ------------------------------------------------------------------------------------------------------

LONELY = """
import torch, atoll
from atoll.learner import ranks
ranks.COME_S = 2.0
torch.distributed.init_process_group("gloo")
if torch.distributed.get_rank() == 0:
    model = torch.nn.Linear(2, 1)
    atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), syncer="http://127.0.0.1:9")
else:
    import time
    time.sleep(600)
"""


def run(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """In a session of its own, so that nothing of it outlives a test that fails."""
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=known, stderr=subprocess.PIPE, text=True, start_new_session=True)


def stop(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.system
def test_a_learner_on_one_rank_alone_is_refused(tmp_path: Path) -> None:
    """It used to train, and its replicas drifted apart."""
    script = tmp_path / "script.py"
    script.write_text(LONELY)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = [run([sys.executable, str(script)], RANK=str(rank), **where) for rank in range(2)]
    try:
        said = both[0].communicate(timeout=WAIT_S)[1]
    finally:
        for one in both:
            stop(one)
    assert both[0].returncode == 2
    assert "atoll: rank 1 of 2 made no atoll.Learner within 2 s: every rank makes one, of its model" in said


def test_ranks_without_a_run_share_the_data_and_say_once_that_they_are_alone(tmp_path: Path) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
        both = [processes.submit(draw_alone, rank, str(tmp_path / "store")) for rank in range(2)]
        (first, said), (second, more) = (one.result(WAIT_S) for one in both)
    assert len(first) == len(second) == 12 and sorted(first + second) == list(range(24))
    assert said.startswith("atoll: alone") and more == ""
