"""Python imports this at the start of every process that tools/decisions.py starts: it writes down what the syncer, its
shards, relays and couriers send (tap.py), kills a process at the points that ATOLL_DIE_AT names (deadly.py of
tests/system/crashing), and ends it where tools/decisions.py was killed."""

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
if points := os.environ.get("ATOLL_DIE_AT"):
    import deadly

    words = sys.orig_argv
    folder = words[words.index("--resume" if "--resume" in words else "--out") + 1]
    deadly.arm(points, folder, of_shard="--join" in words)
