"""Two torchft replicas of one tensor: `python torchft_diloco.py ROWS ROUNDS DELAY` prints what each round took.

DiLoCo of torchft with its defaults (fp32, gloo): the sync runs in a hook of the inner optimizer's step, which is called
here as that optimizer would. With a delay, the all-reduce is under way for so many pretended steps.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

WIDTH = 4096
STEP_S = 0.02


def replica(number: int, rows: int, rounds: int, delay: int, lighthouse: str) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(rows, WIDTH))})
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{number}",
        init_sync=False,
    )
    diloco = DiLoCo(manager, [model], inner, outer, sync_every=delay + 1, fragment_sync_delay=delay)
    found = []
    while len(found) < rounds:
        with torch.no_grad():
            model["w"] += 1e-3
        began, held = time.monotonic(), []
        before = manager.current_step()
        for _ in range(delay + 1):
            called = time.monotonic()
            diloco._step_pre_hook(inner, (), {})
            diloco._step_post_hook(inner, (), {})
            held.append(time.monotonic() - called)
            if len(held) <= delay:
                time.sleep(STEP_S)
        if manager.current_step() > before:
            found.append({"began": began, "ended": time.monotonic(), "held_s": sum(held), "longest_s": max(held)})
    print(json.dumps(found), flush=True)
    os._exit(0)  # its manager's threads outlive the work


def main() -> None:
    rows, rounds, delay = sys.argv[1:4]
    if len(sys.argv) > 4:
        return replica(int(sys.argv[4]), int(rows), int(rounds), int(delay), sys.argv[5])
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10_000)
    command = [sys.executable, __file__, rows, rounds, delay]
    both = [
        subprocess.Popen([*command, str(number), lighthouse.address()], stdout=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    print(json.dumps([json.loads(one.communicate()[0]) for one in both]))
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
