"""A noisy line by a learner that keeps a diary of what it saw: what the crash tests train.

One line of JSON in diary-<learner>.jsonl of the current folder after every step, {"at", "t", "queued_s"}, and one for
every version that it adopted, {"at", "fragment", "version", "digest"}, with the digest of the bytes as they lie in its
memory. `queued_s`: how long it has waited for a core so far, which no syncer can help.
Options: --width N, --pace (seconds that a step takes, at least).
"""

import argparse
import json
import os
import time
import zlib
from pathlib import Path

import numpy as np
import torch

import atoll
from atoll.digests import compute_digest

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=4)
parser.add_argument("--pace", type=float, default=0.005)
said = parser.parse_args()

torch.manual_seed(0)
model = torch.nn.Linear(said.width, said.width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
torch.manual_seed(zlib.crc32(os.environ["ATOLL_LEARNER"].encode()))
held: dict[int, int] = {}


def queued_s() -> float:
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def adopted(learner: atoll.Learner) -> list[dict[str, object]]:
    """Versions that lie whole in its memory since the last look. Version 0 may be its own: nobody told of it."""
    found, box = [], learner._session.shared.box
    for fragment, version in enumerate(box.base_version.tolist() if box is not None else ()):
        values = box.base(fragment).copy()
        if version > held.get(fragment, 0) and int(box.base_version[fragment]) == version:
            held[fragment] = version
            mark = compute_digest(values.view(np.uint8).data)
            found.append({"at": time.time(), "fragment": fragment, "version": version, "digest": mark})
    return found


with Path(f"diary-{os.environ['ATOLL_LEARNER']}.jsonl").open("a") as diary, atoll.Learner(model, optimizer) as learner:
    while not learner.done:
        x = torch.randn(16, said.width)
        loss = ((model(x) - 2 * x - 1 - torch.randn_like(x)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(said.pace)
        learner.step(tokens=16, loss=loss)
        for line in ({"at": time.time(), "t": learner.steps, "queued_s": queued_s()}, *adopted(learner)):
            diary.write(json.dumps(line) + "\n")
        diary.flush()
