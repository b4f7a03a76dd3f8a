"""A shard of the syncer as a process (docs/adr/0031): its folder, its port, signals, a supervisor, exit code.

It runs until the lead says that the run is over, or does not let it in. Signals end it alone: whatever it has confirmed
is on its disk, and another process goes on with the folder. When the supervisor is gone (standard input is closed) it
ends with the lead, which brings the run to its end and needs all shards for that.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable

from atoll.bucket.uploader import ShardUploader, make_shard_uploader
from atoll.config import Service
from atoll.fabric.address import host_port
from atoll.fabric.listener import allow_files
from atoll.numerics import kernels
from atoll.protocol.errors import AtollError, ConfigError, first_error
from atoll.protocol.shard import Shard
from atoll.store.atomic import write_atomic
from atoll.store.disk import Disk
from atoll.store.rundir import RunDir
from atoll.store.writer_lease import acquire
from atoll.syncer.credentials import make_port_access
from atoll.syncer.shard_service import ShardEnded, ShardService
from atoll.syncer.shard_store import ShardStore


def serve_shard(
    service: Service,
    out: RunDir,
    lead: str,
    shard: int,
    count: int,
    *,
    supervised: bool = False,
    ready: Callable[[str], None] | None = None,
    name_address: Callable[[str], str] = str,
    disk: Disk | None = None,
) -> int:
    """Run a shard until the lead ends it. Its address on this machine is written to its folder, and told to `ready`;
    `name_address` makes of that the address by which learners reach it."""
    kernels.warm()
    allow_files()
    code = 0
    try:
        lease = acquire(out.journal)
        uploader: ShardUploader | None = None
        if service.store:
            first = service.durability == "store"
            uploader = make_shard_uploader(out, service.store, shard, lease.term, told_after_put=first)
        store = ShardStore(out, lease, shard, disk=disk, uploader=uploader)
        machine = Shard(shard, count, secrets.token_hex(8), run=store.run)
        ended = asyncio.run(_serve(service, out, store, machine, lead, supervised, ready, name_address))
        lease.release()
        if ended.refused:
            raise ConfigError(str(ended))
        print(f"shard {shard} of {count}: ends, {ended}", flush=True)
    except* AtollError as errors:
        error = first_error(errors)
        print(f"atoll: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    return code


async def _serve(
    service: Service,
    out: RunDir,
    store: ShardStore,
    machine: Shard,
    lead: str,
    supervised: bool,
    ready: Callable[[str], None] | None,
    name_address: Callable[[str], str],
) -> ShardEnded:
    access = make_port_access(service, lambda: store.run, _say, secrets=out.secrets)

    def tell_operator(text: str) -> None:
        print(f"shard {machine.shard} of {machine.shards}: {text}", flush=True)

    running = ShardService(
        machine, store, lead, access, host=service.host, port=service.port, tell_operator=tell_operator
    )
    await running.server.start()
    access.publish(running.server.host, running.server.port)
    url = _local_url(service, running)
    running.url = name_address(url)
    write_atomic(out.address, url.encode())
    if ready is not None:
        ready(url)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, running.end, "the operator asked for it")
    if supervised:
        loop.add_reader(sys.stdin.fileno(), _look_for_supervisor, running)
    try:
        return await running.run()
    finally:
        access.withdraw(running.server.host, running.server.port)


def _look_for_supervisor(running: ShardService) -> None:
    """No orders come to a shard; what closes standard input is the end of its supervisor."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        running.end_with_lead("its supervisor is gone")


def _local_url(service: Service, running: ShardService) -> str:
    """The address for processes on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(running.server.host, running.server.host)
    scheme = "https" if service.keys and not service.front else "http"
    return f"{scheme}://{host_port(host, running.server.port)}"


def _say(kind: str, text: str) -> None:
    print(f"{kind}: {text}", flush=True)
