"""The syncer as a process: run directory, signals, exit code."""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
from collections.abc import Callable

from atoll.config import Config
from atoll.numerics import kernels
from atoll.protocol.errors import AtollError
from atoll.store.atomic import Appender, write_atomic
from atoll.store.rundir import RunDir, save_model
from atoll.syncer.parameters import Parameters
from atoll.syncer.service import SyncerService
from atoll.telemetry.events import EventLog


def serve(config: Config, out: RunDir, *, evaluated: bool, ready: Callable[[str], None] | None = None) -> int:
    """Run a syncer until its run is over. Its address goes to the run directory, and to `ready`."""
    kernels.warm()
    code = 0
    try:
        asyncio.run(_serve(config, out, evaluated, ready or (lambda url: None)))
    except* AtollError as errors:
        error = _first(errors)
        print(f"atoll: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    return code


async def _serve(config: Config, out: RunDir, evaluated: bool, ready: Callable[[str], None]) -> None:
    with Appender(out.events) as sink:
        service = SyncerService(config, run=secrets.token_hex(4), events=EventLog(sink), evaluated=evaluated)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, service.end, "the operator asked for it")

        def save(parameters: Parameters) -> None:
            save_model(out.model, dict(parameters.tensors()))

        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run(save))
            started = tasks.create_task(service.started.wait())
            await asyncio.wait([running, started], return_when=asyncio.FIRST_COMPLETED)
            started.cancel()
            if not running.done():
                url = f"http://{service.server.host}:{service.server.port}"
                write_atomic(out.address, url.encode())
                ready(url)


def _first(errors: BaseExceptionGroup[AtollError]) -> AtollError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
