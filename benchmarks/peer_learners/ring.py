"""One rank of a data-parallel run: a ring all-reduce of fp32 gradients over plain TCP, with pretended steps.

    python ring.py RANK RANKS ELEMENTS STEPS STEP_S FOLDER

Listens on a port that it writes to FOLDER/port-RANK, dials the port in FOLDER/next-RANK once that is there. A step is a
forward pass of a third of STEP_S, then a backward pass; the all-reduce begins with the backward pass and runs beside
it, as if every gradient were there at once: the best case. Writes its step times, and the first values of the last sum,
to FOLDER/rank-RANK.json.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np

FORWARD = 1 / 3
WAIT_S = 120.0


class Ring:
    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks = rank, ranks
        server = socket.create_server(("127.0.0.1", 0))
        write_whole(folder / f"port-{rank}", str(server.getsockname()[1]))
        address, deadline = folder / f"next-{rank}", time.monotonic() + WAIT_S
        while not address.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.out = socket.create_connection(("127.0.0.1", int(address.read_text())), WAIT_S)
        self.back, _ = server.accept()
        self.out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def all_reduce(self, values: np.ndarray) -> None:
        """In place: every rank has the sum."""
        parts = np.array_split(values, self.ranks)
        came = np.empty_like(parts[0])
        for turn in range(2 * (self.ranks - 1)):
            gathers = turn >= self.ranks - 1
            sent = parts[(self.rank - turn) % self.ranks]
            target = parts[(self.rank - turn - 1) % self.ranks]
            place = target if gathers else came[: len(target)]
            sending = threading.Thread(target=self.out.sendall, args=(memoryview(sent).cast("B"),))
            sending.start()
            self._receive(memoryview(place).cast("B"))
            sending.join()
            if not gathers:
                target += place

    def _receive(self, view: memoryview) -> None:
        while view:
            count = self.back.recv_into(view)
            if not count:
                raise ConnectionError("the rank before this one is gone")
            view = view[count:]


def make_gradients(rank: int, elements: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(elements, dtype=np.float32)


def write_whole(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def main() -> None:
    rank, ranks, elements, steps = (int(word) for word in sys.argv[1:5])
    step_s, folder = float(sys.argv[5]), Path(sys.argv[6])
    ring, own = Ring(rank, ranks, folder), make_gradients(rank, elements)
    gradients, times = own.copy(), []
    ring.all_reduce(gradients)  # everybody is there, every page was touched
    for _ in range(steps):
        np.copyto(gradients, own)
        began = time.monotonic()
        time.sleep(FORWARD * step_s)
        backward = time.monotonic() + (1 - FORWARD) * step_s
        ring.all_reduce(gradients)
        time.sleep(max(0.0, backward - time.monotonic()))
        times.append(time.monotonic() - began)
    write_whole(folder / f"rank-{rank}.json", json.dumps({"times": times, "sum": gradients[:1000].tolist()}))


if __name__ == "__main__":
    main()
