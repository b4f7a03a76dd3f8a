"""Several ranks are refused before training: by process group, by torchrun, by wrapped and sharded models."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atoll.learner.learner import Learner
from atoll.learner.model import refuse_several_ranks
from atoll.protocol.errors import ConfigError

WAIT_S = 240.0
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0"}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """Of one rank: what it wraps is wrapped for real."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_process_group_of_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(ConfigError, match=r"rank 3 of a .* process group of 8.*atoll train SCRIPT --learners 8"):
        refuse_several_ranks(model())


def test_a_torchrun_of_several_ranks_that_made_no_process_group() -> None:
    with pytest.raises(ConfigError, match=r"torchrun started 4 ranks.*atoll train SCRIPT --learners 4"):
        refuse_several_ranks(model(), {**TORCHRUN, "WORLD_SIZE": "4"})


def test_ddp_also_of_one_rank_and_deep_inside(group: None) -> None:
    wrapped = DistributedDataParallel(model())
    with pytest.raises(ConfigError, match=r"the model is wrapped in DistributedDataParallel.*its \.module"):
        refuse_several_ranks(wrapped)
    with pytest.raises(ConfigError, match="'0' is wrapped"):
        refuse_several_ranks(nn.Sequential(wrapped))
    refuse_several_ranks(wrapped.module)


def test_fully_sharded_data_parallel(group: None) -> None:
    class FullyShardedDataParallel(nn.Module):
        """Its constructor asks for an accelerator."""

    FullyShardedDataParallel.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    with pytest.raises(ConfigError, match=r"'1' is sharded \(FullyShardedDataParallel\)"):
        refuse_several_ranks(nn.Sequential(nn.Linear(1, 1), FullyShardedDataParallel()))


def test_the_names_by_which_sharding_is_found_are_those_of_torch() -> None:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    for kind in (FSDPModule, FullyShardedDataParallel, DTensor):
        assert kind.__module__.startswith("torch.distributed")
    assert [kind.__name__ for kind in (FullyShardedDataParallel, FSDPModule, DTensor)] == [
        *("FullyShardedDataParallel", "FSDPModule", "DTensor")
    ]


def test_fully_shard_of_torch(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = model()
    fully_shard(sharded[0], mesh=init_device_mesh("cpu", (1,)))  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"'0' is sharded \(FSDPLinear\).*one process per learner"):
        refuse_several_ranks(sharded)


def test_a_parameter_that_is_a_shard(group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    one = nn.Linear(2, 2)
    mesh = init_device_mesh("cpu", (1,))
    one.weight = nn.Parameter(distribute_tensor(one.weight.detach(), mesh, [Shard(0)]))
    with pytest.raises(ConfigError, match="parameter 'weight' is a DTensor"):
        refuse_several_ranks(one)


# ---- what is not -----------------------------------------------------------------------------------------------------


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
def test_a_job_of_one_rank_under_any_launcher(environment: dict[str, str]) -> None:
    refuse_several_ranks(model(), environment)


def test_a_process_group_of_one_rank(group: None) -> None:
    refuse_several_ranks(model())


# ---- how a script ends -----------------------------------------------------------------------------------------------


def test_the_script_ends_with_one_line_when_the_learner_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**TORCHRUN, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        Learner(model())
    assert ended.value.code == 2 and isinstance(ended.value.__cause__, ConfigError)
    said = capsys.readouterr().err
    assert said.startswith("atoll: torchrun started 2 ranks") and said.count("\n") == 1


def test_what_was_wrapped_after_the_learner_was_made_is_found_on_entering(
    group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = Learner(model())
    learner.model = DistributedDataParallel(learner.model)
    with pytest.raises(SystemExit):
        learner.__enter__()
    assert "DistributedDataParallel" in capsys.readouterr().err


SCRIPT = """
import sys
import torch
import atoll

if "--group" in sys.argv:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(2, 1)
with atoll.Learner(model, torch.optim.SGD(model.parameters(), lr=0.1), syncer="http://127.0.0.1:9") as learner:
    print("TRAINING")
"""


def run(command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """In a session of its own, so that nothing of it outlives a test that fails."""
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, env=known, stderr=subprocess.PIPE, text=True, start_new_session=True)


def said_by(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=WAIT_S)[1]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.system
@pytest.mark.parametrize("options", [pytest.param([], marks=pytest.mark.faults), ["--group"]])
def test_two_ranks_of_a_real_torchrun_end_at_once(tmp_path: Path, options: list[str]) -> None:
    script, logs = tmp_path / "script.py", tmp_path / "logs"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun = run([*command, "--redirects", "3", "--log-dir", str(logs), str(script), *options])
    said_by(torchrun)
    assert torchrun.returncode != 0
    said = [path.read_text() for path in sorted(logs.rglob("stderr.log"))]
    assert said and not any("TRAINING" in path.read_text() for path in logs.rglob("stdout.log"))
    ours = [line for text in said for line in text.splitlines() if line.startswith("atoll: ")]
    assert ours and all("atoll train SCRIPT --learners 2" in line for line in ours), said
    assert not any("Traceback" in text for text in said)


@pytest.mark.system
@pytest.mark.faults
def test_each_of_two_ranks_ends_with_an_error_code(tmp_path: Path) -> None:
    """torchrun stops the others when one ends; here nobody does, and still none hangs."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    command, where = [sys.executable, str(script), "--group"], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [run(command, RANK=str(rank), WORLD_SIZE="2", **where) for rank in range(2)]
    for number, (rank, said) in enumerate([(rank, said_by(rank)) for rank in ranks]):
        assert rank.returncode == 2, said
        assert f"atoll: this process is rank {number} of a torch.distributed process group of 2" in said
