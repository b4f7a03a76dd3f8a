"""What the run depends on ends the syncer when it fails, so that a supervisor or a standby acts; nothing else does."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.config import Config
from atoll.protocol.syncer import effects as fx
from atoll.store.rundir import RunDir
from atoll.syncer.service import SyncerService

from .conftest import WAIT_S, Stage

KILLED = {
    "accept": ("atoll.fabric.listener", "Listener", "_accept"),
    "sweep": ("atoll.fabric.server", "Server", "_sweep"),
    "journal": ("atoll.syncer.effect_queue", "EffectQueue", "run"),
}
DIES = """
import sys
from importlib import import_module

async def die(*_): {how}

import_module("atoll.numerics.kernels").warm = lambda: None  # it merges nothing

module, name, method = {where!r}
setattr(getattr(import_module(module), name), method, die)
from atoll.syncer.__main__ import main
sys.exit(main())
"""


RAISES, RETURNS = ("raise KeyError('gone')", "KeyError: 'gone'"), ("return", "ended, and the")


@pytest.mark.parametrize(
    ("task", "how", "said"),
    [
        ("accept", *RAISES),
        ("journal", *RAISES),
        ("sweep", *RETURNS),
        pytest.param("sweep", *RAISES, marks=pytest.mark.faults),
        *(pytest.param(task, *RETURNS, marks=pytest.mark.faults) for task in KILLED if task != "sweep"),
    ],
)
def test_a_vital_task_that_dies_ends_the_process(tmp_path: Path, task: str, how: str, said: str) -> None:
    run = RunDir.create(tmp_path / "run")
    run.settings.write_bytes(Config().toml())
    code = DIES.format(how=how, where=KILLED[task])
    command = [sys.executable, "-c", code, str(run.path), "--port", "0"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.wait(WAIT_S) == 1, "and not by closing its standard input"
        assert process.stderr is not None
        assert said in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


async def until_it_falls(folder: Path, act: Callable[[Stage, SyncerService], Awaitable[None]]) -> None:
    """A syncer, and the tasks around it, that what is done here ends."""
    stage = Stage(folder)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        stage._tasks = tasks
        service = await stage.open()
        try:
            await act(stage, service)
            await asyncio.Event().wait()
        finally:
            await service.server.stop()
            stage.run_store.close()


async def test_a_port_whose_listener_is_gone_ends_the_run(tmp_path: Path) -> None:
    async def shut_down(stage: Stage, service: SyncerService) -> None:
        assert service.server._listener is not None and service.server._listener._listener is not None
        service.server._listener._listener.shutdown(socket.SHUT_RDWR)

    with pytest.raises(ExceptionGroup) as caught:
        await until_it_falls(tmp_path, shut_down)
    assert caught.value.subgroup(OSError) is not None


async def test_a_mistake_in_the_rules_ends_the_run_whoever_met_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a connection's message led to it: half of what follows from the message may have been decided."""

    async def step(stage: Stage, service: SyncerService) -> None:
        learner = stage.join("learner-0")
        await learner.begin()
        machine = service._machine
        assert machine is not None
        handle = machine.handle

        def broken(now: float, event: fx.SyncerEvent) -> list[fx.SyncerEffect]:
            if isinstance(event, fx.Received):
                raise KeyError("a mistake")
            return handle(now, event)

        monkeypatch.setattr(machine, "handle", broken)
        learner.step()

    with pytest.raises(ExceptionGroup) as caught:
        await until_it_falls(tmp_path, step)
    assert caught.value.subgroup(KeyError) is not None
