"""`python -m atoll.syncer RUN_DIR [--evaluated] [--port N] [--pages NAME]`: the syncer of a run that has a directory;
with `--shard 2/3 --join LEAD` a shard of it other than the lead (docs/adr/0031).

Started by a supervisor, which holds its standard input (see `process`). With `--mortal` it does not end the run when
its supervisor is gone: it dies at once, and another syncer that waits for its turn (`--standby`) goes on
(docs/adr/0034).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from atoll.config import Config, load, parse_shard
from atoll.numerics import kernels
from atoll.protocol.errors import AtollError
from atoll.store.rundir import RunDir


def _told_to_begin() -> bool:
    """Wait for a line on standard input; False: it was closed. Byte by byte: later lines are orders (`process`)."""
    kernels.warm()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"\n", b""):
        continue
    return byte == b"\n"


LOOK_S = 0.5


def _die_with(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(LOOK_S)
    os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m atoll.syncer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--evaluated", action="store_true", help="wait at the end for the evaluator's last score")
    parser.add_argument(
        "--score-wait", type=float, default=0.0, metavar="SECONDS", help="wait longer for it than usual"
    )
    parser.add_argument("--port", type=int, help="instead of the one in run.toml")
    parser.add_argument("--or-any-port", action="store_true", help="another, where that one is taken")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings that change now")
    parser.add_argument("--reopen", action="store_true", help="a run that was ended goes on")
    parser.add_argument("--pages", metavar="MODULE:FUNCTION", help="makes what shows the run on its port")
    parser.add_argument("--wait", action="store_true", help="be ready, and begin when a line comes on standard input")
    parser.add_argument("--disk", metavar="MODULE:FUNCTION", help="what makes the disk that the journal lies on")
    parser.add_argument("--shard", metavar="I/N", help="of a syncer of several processes, this one")
    parser.add_argument("--join", metavar="LEAD", help="the address of the first of them")
    parser.add_argument("--host", help="where to listen, and what learners dial, instead of what run.toml says")
    parser.add_argument("--standby", action="store_true", help="wait for the turn to serve this run")
    parser.add_argument("--mortal", action="store_true", help="die when the supervisor is gone; the run goes on")
    said = parser.parse_args()
    if said.mortal:
        threading.Thread(target=_die_with, args=(os.getppid(),), name="atoll-supervisor", daemon=True).start()
    return _serve(said) if said.shard is None else _serve_shard(said)


# A process has all that it needs in memory before it waits for its turn, and no more: a shard needs half of it.


def _serve(said: argparse.Namespace) -> int:
    from atoll.syncer.process import import_named, serve

    out = RunDir(said.out)
    if said.wait and not _told_to_begin():
        return 0
    try:
        config = _load(said)
        pages = import_named("--pages", said.pages) if said.pages else None
        disk = import_named("--disk", said.disk)(out) if said.disk else None
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return error.exit_code
    return serve(
        config,
        out,
        evaluated=said.evaluated,
        score_wait_s=said.score_wait,
        supervised=True,
        changes=tuple(said.set),
        reopen=said.reopen,
        pages=pages,
        disk=disk,
        standby=(lambda: print("standing by", flush=True)) if said.standby else None,
        mortal=said.mortal,
        or_any_port=said.or_any_port,
    )


def _serve_shard(said: argparse.Namespace) -> int:
    from atoll.syncer.shard_process import serve_shard

    if said.wait and not _told_to_begin():
        return 0
    try:
        config = _load(said)
        shard, count = parse_shard(said.shard)
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return error.exit_code
    return serve_shard(config.service, RunDir(said.out), said.join, shard, count, supervised=True)


def _load(said: argparse.Namespace) -> Config:
    config = load(RunDir(said.out).settings)
    service = config.service
    if said.port is not None:
        service = msgspec.structs.replace(service, port=said.port)
    if said.host is not None:
        service = msgspec.structs.replace(service, host=said.host, advertise=(said.host,))
    return msgspec.structs.replace(config, service=service)


if __name__ == "__main__":
    code = main()
    gc.freeze()  # Python would look at every object once more before it ends; who waits for the summary waits for that
    sys.exit(code)
