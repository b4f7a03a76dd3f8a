"""Python imports this at the start of every process that tools/decisions.py starts: it writes down what the syncer, its
shards, relays and couriers send (tap.py), and ends a process where tools/decisions.py was killed."""

import os
import sys
import threading
import time

import lean_torch
import plain_loops

# What tests/startup does, whose place this file takes.
lean_torch.install()
plain_loops.install()
PARENT = os.getppid()


def end_with_parent() -> None:
    while os.getppid() == PARENT:
        time.sleep(1.0)
    os._exit(1)


if os.environ.get("ATOLL_STARTED_BY") == str(PARENT):
    threading.Thread(target=end_with_parent, daemon=True).start()
if os.environ.get("ATOLL_TAP"):
    import tap

    tap.install(sys.orig_argv)
