"""`python -m atoll.syncer RUN_DIR [--evaluated] [--port N] [--pages NAME]`: the syncer of a run that has a directory;
with `--shard 2/3 --join LEAD` a shard of it other than the lead (docs/adr/0031).

Started by a supervisor, which holds its standard input (see `process`).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

import msgspec

from atoll.config import load, parse_shard
from atoll.numerics import kernels
from atoll.protocol.errors import AtollError
from atoll.store.rundir import RunDir
from atoll.syncer.process import import_named, serve
from atoll.syncer.shard_process import serve_shard


def _told_to_begin() -> bool:
    """Wait for a line on standard input; False: it was closed. Byte by byte: later lines are orders (`process`)."""
    kernels.warm()
    while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"\n", b""):
        continue
    return byte == b"\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m atoll.syncer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--evaluated", action="store_true", help="wait at the end for the evaluator's last score")
    parser.add_argument("--port", type=int, help="instead of the one in run.toml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings that change now")
    parser.add_argument("--reopen", action="store_true", help="a run that was ended goes on")
    parser.add_argument("--pages", metavar="MODULE:FUNCTION", help="makes what shows the run on its port")
    parser.add_argument("--wait", action="store_true", help="be ready, and begin when a line comes on standard input")
    parser.add_argument("--disk", metavar="MODULE:FUNCTION", help="what makes the disk that the journal lies on")
    parser.add_argument("--shard", metavar="I/N", help="of a syncer of several processes, this one")
    parser.add_argument("--join", metavar="LEAD", help="the address of the first of them")
    said = parser.parse_args()
    out = RunDir(said.out)
    if said.wait and not _told_to_begin():
        return 0
    try:
        config = load(out.settings)
        pages = import_named("--pages", said.pages) if said.pages else None
        disk = import_named("--disk", said.disk)(out) if said.disk else None
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return error.exit_code
    if said.port is not None:
        config = msgspec.structs.replace(config, service=msgspec.structs.replace(config.service, port=said.port))
    if said.shard is not None:
        shard, count = parse_shard(said.shard)
        return serve_shard(config.service, out, said.join, shard, count, supervised=True)
    return serve(
        config,
        out,
        evaluated=said.evaluated,
        supervised=True,
        changes=tuple(said.set),
        reopen=said.reopen,
        pages=pages,
        disk=disk,
    )


if __name__ == "__main__":
    code = main()
    gc.freeze()  # Python would look at every object once more before it ends; who waits for the summary waits for that
    sys.exit(code)
