"""Python imports this at the start of every process that tools/decisions.py starts: it writes down what the syncer, its
shards, relays and couriers send (tap.py), and kills a process at a point that is named in ATOLL_DIE_AT (`dying`)."""

import os
import sys

import lean_torch
import plain_loops

# What tests/startup does, whose place this file takes.
lean_torch.install()
plain_loops.install()
if os.environ.get("ATOLL_TAP"):
    import tap

    tap.install(sys.orig_argv)
if points := os.environ.get("ATOLL_DIE_AT"):
    import deadly

    words = sys.orig_argv
    folder = words[words.index("--resume" if "--resume" in words else "--out") + 1]
    deadly.arm(points, folder, of_shard="--join" in words)
