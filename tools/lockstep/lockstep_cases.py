"""The cases that tools/decisions.py runs, and what each is for.

    small     int4 with feedback, versions whole, fragments that are worked on by event loops; all layouts
    wide      int8 both ways (versions as steps), a fragment that is worked on in threads and that shards cut inside a
              tensor, whose merge needs the norms of both; version 0 in bf16; learner-1 leaves before the end
"""

from __future__ import annotations

from functools import partial

from lockstep_run import LAYOUTS, SECTIONS, Case, LockstepRun

SMALL = {"steps": 12, "fragments": 2, "sync_every": 4, "overlap": 1, "cut_every": 4, "codec": "int4"}
THIRDS = {"steps": 8, "fragments": 3, "sync_every": 6, "overlap": 1, "cut_every": 3, "codec": "int8"}
"""For --wide: the last third is cut between two shards, inside a tensor."""
WIDE = {**THIRDS, "version_codec": "int8", "initial_codec": "bf16", "keep_cuts": 1}

AFTER_DEATH = ("journal", "members", "adopted", "model", "replay")
HELD = "PUT /v1/contributions/learner-1/2/1"
"""Its fragment is cut between shards, and between ranks."""


def restart(name: str, run: LockstepRun) -> None:
    """Kill a process once it has all of learner-0's contribution to the round that is held, and start it again."""
    sent = "PUT /v1/contributions/learner-0/2/1"
    run.wait_until(lambda: sent in run.read_tap(name), f"learner-0 has sent to {name}")
    run.restart(name)
    run.wait_until(lambda: any(event["over"] for event in run.read_events("alarm")), f"{name} is back")


CASES = [
    *(Case(layout, "small", SMALL, about="int4 with feedback, small fragments") for layout in LAYOUTS),
    *(
        Case(
            layout, "wide", {**WIDE, "merge": merge}, options, ("--wide", "--leave-after", "5"),
            about="int8 both ways, fragments in threads, a merge over shards, a learner leaves",
        )
        for layout, merge, options in (
            ("plain", "rda", ()),
            ("ranks", "rda", ()),
            ("shards", "rda", ()),
            ("relay", "rda-row", ()),
            ("ranks-shards", "rda-row", ("--robust",)),
        )
    ),
    Case("plain", "device", {**SMALL, "codec": "int8"}, script=("--device",), about="a learner's device encodes"),
    *(
        Case(
            layout, "refused", THIRDS, script=("--wide",), hold=HELD, held=held, replayed=False,
            about="requests that have to be refused while a body is awaited",
        )
        for layout, held in (("plain", 1), ("ranks", 2), ("shards", 2), ("relay", 1), ("ranks-shards", 4))
    ),
    Case(
        "shards", "restart", {**THIRDS, "codec": "bf16"}, script=("--wide",), hold=HELD, held=2, drive=partial(restart, "shard-2"),
        sections=AFTER_DEATH, about="a shard dies while a round waits for a body",
    ),
]  # fmt: skip
