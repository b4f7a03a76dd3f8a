"""Points at which a syncer kills itself (SIGKILL), laid around the product's own code from outside.

`before:Commit:12, half:segment.write:9`: the first life of the syncer dies before it carries out its 12th Commit, the
second in the middle of the 9th write to its segment, the third lives on. A point is WHEN:WHAT:NUMBER, counted anew in
every life, from the first round on in which every learner took part; `before:Commit:1!` counts from the beginning.
WHAT is one of

    Send.Pull, Note.round, Commit, …                 an effect that is carried out (Persist: once it is durable)
    payload.write, payload.sync, segment.write, …    a step of an append to the journal; `half` writes half of its bytes
    syncer.json, manifest.json                       the file that makes the syncer's part of a cut, or the cut, whole
    trim                                             deleting payloads that a cut has made needless
    model                                            writing the finished model

Of a shard (docs/adr/0031), whose points are counted from the beginning: TellLead.Staged, Step, Write, Apply,
CaptureCut, … are its effects, and its chain and its parts of cuts are written like the lead's.

Every death is written to deaths.jsonl in the run's (or shard's) directory: when it was, and at which point. Of a shard
the first round that each life staged is written to returns.jsonl: when that was, and what of its own time it took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

Step = Callable[..., Any]


class Point(NamedTuple):
    when: str
    what: str
    number: int
    at_once: bool

    @classmethod
    def parse(cls, text: str) -> Point:
        when, what, number = text.strip().split(":")
        return cls(when, what, int(number.removesuffix("!")), number.endswith("!"))

    def __str__(self) -> str:
        return f"{self.when}:{self.what}:{self.number}{'!' if self.at_once else ''}"


NEVER = Point("never", "nothing", 0, False)


class Fuse:
    """One point, and how far it is away. Which one it is shows when this life begins to do something: a successor that
    waits for its turn is started while its predecessor is alive."""

    def __init__(self, points: list[Point], deaths: Path) -> None:
        self._points, self._deaths = points, deaths

    @cached_property
    def point(self) -> Point:
        lived = len(self._deaths.read_text().splitlines()) if self._deaths.exists() else 0
        return self._points[lived] if lived < len(self._points) else NEVER

    @cached_property
    def _left(self) -> int:
        return self.point.number

    @cached_property
    def _burns(self) -> bool:
        return self.point.at_once

    def due(self, what: str) -> bool:
        """Whether this is the step; every step of its kind is counted."""
        counts = self._burns and what == self.point.what
        self._left -= counts
        return counts and self._left == 0

    def watch(self, service: Any, effect: Any) -> None:
        """Everybody is in: from now on steps are counted."""
        if _effect(effect) == "Note.round" and len(effect.data["members"]) == service._config.protocol.learners:
            self._burns = True

    def blow(self, when: str) -> None:
        """Die here, if here is where to die. What was handed to the kernel stays; nothing else does."""
        if when == self.point.when:
            with self._deaths.open("a") as file:
                file.write(json.dumps({"at": time.time(), "point": str(self.point)}) + "\n")
            os.kill(os.getpid(), signal.SIGKILL)


def arm(points: str, out: str, *, of_shard: bool = False) -> None:
    """The point of this life, if one is left for it."""
    fuse = Fuse([Point.parse(text) for text in points.split(",")], Path(out) / "deaths.jsonl")
    _lay_in_shard(fuse, out) if of_shard else _lay(fuse)
    _lay_on_disk(fuse)


def _lay_in_shard(fuse: Fuse, out: str) -> None:
    from atoll.syncer import shard_service

    _around(fuse, shard_service.ShardService, "_carry_out", lambda self, effect: _effect(effect))
    _note_return(Path(out) / "returns.jsonl")


def _note_return(path: Path) -> None:
    """What the first round that a life staged took of its own time: from the start of its process until it was back
    (TakenUp), and from the order to the answer (Staged). Between these it waits for learners."""
    from atoll.syncer.shard_service import ShardService

    clock, carry_out, back_s, ordered_s = OwnClock(), ShardService._carry_out, 0.0, 0.0

    def carried_out(self: Any, effect: Any) -> None:
        nonlocal back_s, ordered_s
        if (what := _effect(effect)) == "Step":
            ordered_s = clock.own_s()
        carry_out(self, effect)
        if what == "TellLead.TakenUp":
            back_s = clock.own_s()
        elif what == "TellLead.Staged":
            ShardService._carry_out = carry_out  # type: ignore[method-assign]
            took_s = clock.own_s() - ordered_s
            with path.open("a") as file:
                file.write(json.dumps({"at": time.time(), "back_s": back_s, "staged_s": took_s}) + "\n")

    ShardService._carry_out = carried_out  # type: ignore[method-assign]


class OwnClock:
    """Seconds since this process started, without those in which it waited to be told to begin, as a successor does
    that is kept ready, or its main thread for a core that others had, by the kernel's count."""

    def __init__(self) -> None:
        self._started, self._idle_s, self._waited_s = time.monotonic(), 0.0, _waited_s()
        read = os.read

        def timed(descriptor: int, size: int) -> bytes:
            began = time.monotonic()
            try:
                return read(descriptor, size)
            finally:
                self._idle_s += (time.monotonic() - began) * (descriptor == sys.stdin.fileno())

        os.read = timed

    def own_s(self) -> float:
        return time.monotonic() - self._started - self._idle_s - (_waited_s() - self._waited_s)


def _waited_s() -> float:
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _lay(fuse: Fuse) -> None:
    from atoll.syncer import process, service

    def carried_out(self: service.SyncerService, effect: Any) -> str:
        fuse.watch(self, effect)
        return _effect(effect)

    _around(fuse, service.SyncerService, "_carry_out", carried_out)
    _around(fuse, process, "save_model", lambda path, tensors, facts: "model")


def _lay_on_disk(fuse: Fuse) -> None:
    from atoll.store import cuts, disk, journal

    _around(fuse, disk.GrowingFile, "write", lambda self, data: f"{self.path.name.partition('-')[0]}.write")
    _around(fuse, disk.GrowingFile, "datasync", lambda self: f"{self.path.name.partition('-')[0]}.sync")
    _around(fuse, cuts, "write_atomic", lambda path, data: path.name)
    _around(fuse, journal.Journal, "trim", lambda self, term, file: "trim")


def _around(fuse: Fuse, owner: Any, name: str, what: Callable[..., str]) -> None:
    step: Step = getattr(owner, name)

    def fused(*arguments: Any) -> Any:
        if not fuse.due(what(*arguments)):
            return step(*arguments)
        fuse.blow("before")
        if fuse.point.when == "half":
            *first, data = arguments
            step(*first, memoryview(data)[: len(data) // 2])
            fuse.blow("half")
        result = step(*arguments)
        fuse.blow("after")
        return result

    setattr(owner, name, fused)


def _effect(effect: Any) -> str:
    """Sends and notes by what they say: there are many kinds of them."""
    name = type(effect).__name__
    if name in ("Send", "TellLead"):
        return f"{name}.{type(effect.message).__name__}"
    return f"Note.{effect.kind}" if name == "Note" else name
