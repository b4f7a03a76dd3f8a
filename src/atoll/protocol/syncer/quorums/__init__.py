"""Quorum policies, a module each: how long a round waits after its quorum for learners that are not ready yet.

A module has `wait_s(grace_s, late_s)`. `grace_s` is the part of the overlap's slack that may be spent on waiting
(`closing.grace_s`); `late_s` is up to one step where a learner was late for this fragment the last time, else 0. If
every stepping learner is ready, a round waits no longer under any policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module


@cache
def load_policy(name: str) -> Callable[[float, float], float]:
    """The policy's `wait_s`. The name was checked where it was set (choices.py)."""
    wait_s: Callable[[float, float], float] = import_module(f"{__name__}.{name.replace('-', '_')}").wait_s
    return wait_s
