"""Forgather's DiLoCo server and two workers: `python forgather_diloco.py ROWS ROUNDS CHECKOUT` prints their rounds.

CHECKOUT is a clone of https://github.com/jdinalt/forgather. Only its package forgather.ml.diloco and what that imports
is used, so its other requirements need not be there. Its defaults: the synchronous mode, pseudo-gradients in bf16,
parameters in fp32, a save of the server's state after every tenth round. A sync runs in a hook of the inner optimizer.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

WIDTH = 4096
LIMIT_S = 120.0


def find_package(checkout: str) -> None:
    """As a package of its path alone: forgather's __init__ imports its whole platform."""
    package = types.ModuleType("forgather")
    package.__path__ = [str(Path(checkout) / "src" / "forgather")]
    sys.modules["forgather"] = package


def make_model(rows: int) -> torch.nn.ParameterDict:
    return torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(rows, WIDTH))})


def serve(rows: int, folder: Path) -> None:
    from forgather.ml.diloco import DiLoCoServer

    checkpoint = folder / "checkpoints" / "checkpoint-0"
    checkpoint.mkdir(parents=True)
    save_file({name: one.data for name, one in make_model(rows).items()}, checkpoint / "model.safetensors")
    server = DiLoCoServer(str(folder), num_workers=2, from_checkpoint=str(checkpoint))
    server.start()
    (folder / "port-new").write_text(str(server.port))
    (folder / "port-new").rename(folder / "port")
    time.sleep(2 * LIMIT_S)


def work(number: int, rows: int, rounds: int, folder: Path) -> None:
    from forgather.ml.diloco import DiLoCoWorker

    model = make_model(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    address = f"127.0.0.1:{(folder / 'port').read_text()}"
    found = []
    with DiLoCoWorker(model, optimizer, address, sync_every=1, worker_id=f"worker-{number}") as worker:
        (folder / f"registered-{number}").touch()
        wait_for(folder / f"registered-{1 - number}")
        while len(found) < rounds:
            with torch.no_grad():
                model["w"] += 1e-3
            before, began = worker.sync_metrics["diloco/sync_count"], time.monotonic()
            optimizer.step()
            ended = time.monotonic()
            assert worker.sync_metrics["diloco/sync_count"] == before + 1
            found.append({"began": began, "ended": ended, "held_s": ended - began, "longest_s": ended - began})
        print(json.dumps(found), flush=True)
    os._exit(0)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{path.name} was not written within {LIMIT_S:.0f} s")
        time.sleep(0.02)


def main() -> None:
    rows, rounds, checkout = sys.argv[1:4]
    if len(sys.argv) > 4:
        torch.set_num_threads(1)
        logging.disable(logging.WARNING)
        find_package(checkout)
        role, folder = sys.argv[4], Path(sys.argv[5])
        return serve(int(rows), folder) if role == "serve" else work(int(role), int(rows), int(rounds), folder)
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        command = [sys.executable, __file__, rows, rounds, checkout]
        server = subprocess.Popen([*command, "serve", scratch], stdout=subprocess.DEVNULL)
        try:
            while not (Path(scratch) / "port").exists():
                if server.poll() is not None:
                    raise SystemExit("Forgather's server did not start: its output is above")
                time.sleep(0.05)
            both = [
                subprocess.Popen([*command, str(number), scratch], stdout=subprocess.PIPE, text=True)
                for number in range(2)
            ]
            print(json.dumps([json.loads(one.communicate(timeout=LIMIT_S)[0]) for one in both]))
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
