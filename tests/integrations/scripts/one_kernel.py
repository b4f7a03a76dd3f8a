"""The cells of a notebook in a real kernel of IPython: `one_kernel.py SYNCER NAME STEPS...` joins a run once for each
number of steps, and leaves it between them; 0: until the run is done. A cell in between fails. Below zero: so many
steps, and the kernel ends before the learner has left. What the cells show is printed."""

import sys
from typing import Any

from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpec

BEGIN = """
import asyncio
import time
import torch
from torch import nn
import atoll
asyncio.get_running_loop()  # as every cell has it
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
TRAIN = """
learner = atoll.attach(model, optimizer, tokens=8, loss=lambda: loss, at_end="go on", syncer={where!r}, name={name!r})
while not learner.done and ({steps} == 0 or learner.steps < {steps}):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.01)
"""
LEAVE = "learner.leave()"
FAIL = "raise LookupError('of an earlier cell')"


def show(message: dict[str, Any]) -> None:
    kind, content = message["msg_type"], message["content"]
    if kind in ("display_data", "update_display_data", "execute_result"):
        print(f"{kind}: {content['data']['text/plain']}", flush=True)
    elif kind in ("stream", "error"):
        print(content.get("text") or content["evalue"], end="", file=sys.stderr, flush=True)


where, name, *lives = sys.argv[1:]
manager = KernelManager(shutdown_wait_time=120.0)
launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
manager._kernel_spec = KernelSpec(argv=launch, display_name="this Python", language="python")
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=240)


def run_cell(text: str) -> str:
    return client.execute_interactive(text, timeout=240, output_hook=show)["content"]["status"]


assert run_cell(BEGIN) == "ok"
for steps in map(int, lives):
    assert run_cell(TRAIN.format(where=where, name=name, steps=abs(steps))) == "ok"
    assert run_cell("learner") == "ok"
    if steps >= 0:
        assert run_cell(LEAVE) == "ok"
    assert run_cell(FAIL) == "error"
client.stop_channels()
manager.shutdown_kernel()
