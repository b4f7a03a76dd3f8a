"""Two nodes of GradientMail on a folder: `python gradientmail_session.py ROWS ROUNDS POLL_S FSYNC` prints its rounds.

One fragment, both nodes in every round, everything else by default: deltas and versions in fp32, rda, overwrite, nodes
that train and close rounds. Steps are pretended. The folder is a mailbox such as its own S3Mailbox: objects that are
created once, calls on threads.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import gradientmail as gm
import torch
from gradientmail.clock import Clock, MonotonicClock

WIDTH = 4096
STEP_S = 0.02


class FolderMailbox:
    def __init__(self, folder: Path, fsync: bool) -> None:
        self._folder, self._fsync, self._made = folder, fsync, 0

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        return await asyncio.to_thread(self._put, key, data)

    async def get(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self._get, key)

    async def list(self, prefix: str, *, after: str = "") -> Sequence[str]:
        return await asyncio.to_thread(self._list, prefix, after)

    async def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            (self._folder / "objects" / key).unlink(missing_ok=True)

    def clock(self) -> Clock:
        return MonotonicClock()

    def _put(self, key: str, data: bytes) -> bool:
        self._made += 1
        whole = self._folder / f"{os.getpid()}-{self._made}-{time.monotonic_ns()}"
        place = self._folder / "objects" / key
        place.parent.mkdir(parents=True, exist_ok=True)
        with whole.open("wb") as file:
            file.write(data)
            if self._fsync:
                file.flush()
                os.fsync(file.fileno())
        try:
            os.link(whole, place)
        except FileExistsError:
            return False
        finally:
            whole.unlink()
        if self._fsync:
            folder = os.open(place.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        return True

    def _get(self, key: str) -> bytes | None:
        try:
            return (self._folder / "objects" / key).read_bytes()
        except FileNotFoundError:
            return None

    def _list(self, prefix: str, after: str) -> list[str]:
        top = self._folder / "objects"
        start = top / prefix.rpartition("/")[0]
        keys = (str(path.relative_to(top)) for path in start.rglob("*") if path.is_file())
        return sorted(key for key in keys if key.startswith(prefix) and key > after)


def node(number: int, rows: int, rounds: int, poll_s: float, fsync: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.zeros(rows, WIDTH))})
    session = gm.Session(
        model,
        algorithm=gm.DiLoCo(sync_every=1, fragments=1, in_flight=1, quorum_size=2),
        mailbox=FolderMailbox(folder, fsync),
        node_id=f"node-{number}",
        poll_interval=poll_s,
        callbacks=(),
    )
    session.join()
    learner = session._learner
    assert learner is not None
    while len(list((folder / "objects").rglob("*lease*/*"))) < 2 and not (folder / "go").exists():
        time.sleep(0.02)
    (folder / "go").touch()
    began: dict[int, float] = {}
    held: dict[int, list[float]] = {}
    ended: dict[int, float] = {}
    bare = learner.step

    def timed(samples: int) -> None:
        published, seen, called = learner._state.last_published, learner._state.rounds_seen, time.monotonic()
        bare(samples)
        spent = time.monotonic() - called
        after = learner._state
        if after.rounds_seen > seen:
            ended[after.rounds_seen] = called + spent
            held.setdefault(after.rounds_seen, []).append(spent)
        if after.last_published > published:
            began[after.last_published] = called
            if after.rounds_seen == seen:
                held.setdefault(after.last_published, []).append(spent)

    learner.step = timed  # type: ignore[method-assign]

    def batches() -> Iterator[int]:
        while len(ended) < rounds:
            yield 1

    def step(batch: int) -> int:
        with torch.no_grad():
            model["w"][0] += 1e-3
        time.sleep(STEP_S)
        return batch

    session.run(step, batches())
    rows_found = [
        {"began": began[r], "ended": ended[r], "held_s": sum(held[r]), "longest_s": max(held[r])}
        for r in sorted(ended)
        if r in began
    ]
    print(json.dumps(rows_found[:rounds]), flush=True)
    os._exit(0)


def main() -> None:
    rows, rounds, poll_s, fsync = sys.argv[1:5]
    if len(sys.argv) > 5:
        return node(int(sys.argv[5]), int(rows), int(rounds), float(poll_s), fsync == "1", Path(sys.argv[6]))
    with tempfile.TemporaryDirectory(dir=os.environ.get("ATOLL_SCRATCH")) as scratch:
        (Path(scratch) / "objects").mkdir()
        command = [sys.executable, __file__, rows, rounds, poll_s, fsync]
        both = [
            subprocess.Popen([*command, str(number), scratch], stdout=subprocess.PIPE, text=True) for number in range(2)
        ]
        print(json.dumps([json.loads(one.communicate(timeout=300)[0]) for one in both]))


if __name__ == "__main__":
    main()
