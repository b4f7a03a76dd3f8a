"""Makes the processes of a run die or run out of room: Python imports this at the start of every process that has this
folder on its PYTHONPATH.

ATOLL_CRASH_AT kills the syncer at the points it names, ATOLL_CRASH_SHARD_AT a shard of it (deadly.py); ATOLL_FULL_DISK
is a folder that can be made to take no more bytes (full.py). Without them nothing is touched.
"""

import os
import sys

import lean_torch
import plain_loops

# What tests/startup does, whose place this file takes.
lean_torch.install()
plain_loops.install()
POINTS = os.environ.get("ATOLL_CRASH_SHARD_AT" if "--shard" in sys.orig_argv else "ATOLL_CRASH_AT", "")
if POINTS and "atoll.syncer" in sys.orig_argv:
    import deadly

    deadly.arm(POINTS, sys.orig_argv[sys.orig_argv.index("atoll.syncer") + 1], of_shard="--shard" in sys.orig_argv)
if "ATOLL_FULL_DISK" in os.environ:
    import full

    full.lay(os.environ["ATOLL_FULL_DISK"])
