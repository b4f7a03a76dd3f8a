"""A learner of `links.py --gpu`: the built-in GPT at a real size, its steps on random bytes that lie on the device.

Its size comes from DEPTH, BATCH and BLOCK. When the run is over it writes the ends of its steps, and how long
`learner.step()` held each of them up, to a file in the folder HELD, as flights.py does.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from real_size import Loop

import atoll


def main() -> None:
    loop = Loop(int(os.environ["DEPTH"]), int(os.environ["BATCH"]), int(os.environ["BLOCK"]))
    held: list[float] = []
    ends: list[float] = []
    with atoll.Learner(loop.model, loop.optimizer) as learner:
        while not learner.done:
            loss = loop.make_step()
            # A usual loop is a step or two ahead of the device; here each end is waited for, so that it has a time.
            if loop.device.type == "cuda":
                loss.item()
            began = time.perf_counter()
            learner.step(tokens=loop.tokens, loss=loss)
            ends.append(time.perf_counter())
            held.append(ends[-1] - began)
    told = {"learner": os.environ["ATOLL_LEARNER"], "held": held, "ends": ends}
    Path(os.environ["HELD"], f"held-{os.getpid()}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
