"""Makes the processes of a run die or run out of room: Python imports this at the start of every process that has this
folder on its PYTHONPATH.

ATOLL_CRASH_AT kills the syncer at the points it names (deadly.py); ATOLL_FULL_DISK is a folder that can be made to take
no more bytes (full.py). Without them nothing is touched.
"""

import os
import sys

import lean_torch
import plain_loops

# What tests/startup does, whose place this file takes.
lean_torch.install()
plain_loops.install()
if "ATOLL_CRASH_AT" in os.environ and "atoll.syncer" in sys.orig_argv:
    import deadly

    deadly.arm(os.environ["ATOLL_CRASH_AT"], sys.orig_argv[sys.orig_argv.index("atoll.syncer") + 1])
if "ATOLL_FULL_DISK" in os.environ:
    import full

    full.lay(os.environ["ATOLL_FULL_DISK"])
