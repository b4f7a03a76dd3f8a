"""The relay as a process: its folder, its secrets, signals, exit code.

DIR/link          the join link for learners of the region; a secret where the run has keys (mode 600)
DIR/sums.jsonl    what was summed: round, fragment, members and weights, digest, bytes
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from atoll.fabric.address import SyncerAddress
from atoll.fabric.listener import Tls
from atoll.fabric.local_secrets import publish_secrets, published_secrets, withdraw_secrets
from atoll.numerics import kernels
from atoll.protocol.errors import AtollError, ConfigError
from atoll.relay.service import RelayService
from atoll.store.atomic import Appender, make_folder

SECRETS_S = 1.0
"""Between two looks at the secrets of a syncer on this machine: it publishes them when it starts."""


@dataclass(frozen=True, slots=True)
class RelayOptions:
    address: SyncerAddress
    name: str
    out: Path
    host: str
    port: int
    tls: Tls | None
    names: frozenset[str]
    make_link: Callable[[int, str], str]
    """From the port that was opened and the run's name."""


def run_relay(options: RelayOptions, ready: Callable[[Path, str], None]) -> int:
    """Until it is told to end; 0. A refusal of the syncer is one line and another code. `ready` gets the file that
    holds the join link, and the run's name."""
    kernels.warm()
    code = 0
    try:
        make_folder(options.out)
        with suppress(KeyboardInterrupt):
            asyncio.run(_run(options, ready))
    except* AtollError as errors:
        error = _first(errors)
        print(f"atoll: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    return code


async def _run(options: RelayOptions, ready: Callable[[Path, str], None]) -> None:
    with Appender(options.out / "sums.jsonl") as sums:
        service = RelayService(
            options.address,
            name=options.name,
            host=options.host,
            port=options.port,
            tls=options.tls,
            names=options.names,
            say=lambda text: print(f"relay {options.name}: {text}", flush=True),
            log=lambda entry: sums(msgspec.json.encode(entry) + b"\n"),
        )
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stopped.set)
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(_announce(options, service, ready))]
            if not options.address.private:
                beside.append(tasks.create_task(_share_secrets(options.address, service)))
            running = tasks.create_task(service.run())
            waiting = tasks.create_task(stopped.wait())
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            for task in (*beside, waiting, running):
                task.cancel()
        withdraw_secrets(service.port.host, service.port.port)


async def _announce(options: RelayOptions, service: RelayService, ready: Callable[[Path, str], None]) -> None:
    await service.connected.wait()
    file = _write_link(options.out, options.make_link(service.port.port, service.run_name))
    ready(file, service.run_name)


def _write_link(folder: Path, link: str) -> Path:
    """For this user alone."""
    file = folder / "link"
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as out:
            os.fchmod(out.fileno(), 0o600)
            out.write(link + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}: name another folder by --out") from error
    return file


async def _share_secrets(address: SyncerAddress, service: RelayService) -> None:
    """Learners of the same user on this machine show the syncer's secret here too; the relay passes it on."""
    known: object = None
    while True:
        for url in address.urls:
            parts = urlsplit(url)
            found = published_secrets(parts.hostname or "", parts.port or 0)
            if found and found != known and service.port.port:
                publish_secrets(service.port.host, service.port.port, found)
                known = found
        await asyncio.sleep(SECRETS_S)


def _first(errors: BaseExceptionGroup[AtollError]) -> AtollError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
