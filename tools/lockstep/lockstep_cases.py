"""The cases that tools/decisions.py runs, and what each is for.

    small     int4 with feedback, versions whole, fragments that are worked on by event loops; all layouts
    wide      int8 both ways (versions as steps), a fragment that is worked on in threads and that shards cut inside a
              tensor, whose merge needs the norms of both; version 0 in bf16; learner-1 leaves before the end
"""

from __future__ import annotations

from lockstep_run import LAYOUTS, Case

SMALL = {"steps": 12, "fragments": 2, "sync_every": 4, "overlap": 1, "cut_every": 4, "codec": "int4"}
WIDE = {
    "steps": 8, "fragments": 2, "sync_every": 4, "overlap": 1, "cut_every": 3, "codec": "int8", "version_codec": "int8",
    "initial_codec": "bf16", "merge": "rda", "keep_cuts": 1,
}  # fmt: skip

CASES = [
    *(Case(layout, "small", SMALL, about="int4 with feedback, small fragments") for layout in LAYOUTS),
    *(
        Case(
            layout, "wide", WIDE, ("--robust",) if LAYOUTS[layout].shards > 1 else (), ("--wide", "--leave-after", "5"),
            about="int8 both ways, fragments in threads, a merge over shards, a learner leaves",
        )
        for layout in LAYOUTS
    ),
]  # fmt: skip
