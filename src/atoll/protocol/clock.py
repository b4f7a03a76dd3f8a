"""Vector clocks: for every worker, the last step its holder knows of.

A clock never goes back. The syncer's own entry is named `syncer` and counts rounds; a learner's counts its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from atoll.protocol.limits import Count, Name

MOST_NAMES = 16384
"""In one clock that a peer sends."""

Clock = Annotated[dict[Name, Count], Meta(max_length=MOST_NAMES)]

SYNCER = "syncer"


def merged(ours: Mapping[str, int], theirs: Mapping[str, int]) -> Clock:
    """The newest of both, entry by entry; a name that is new finds its place in the order of names."""
    newest = dict(ours)
    for name, step in theirs.items():
        if name not in newest:
            return {name: max(ours.get(name, 0), theirs.get(name, 0)) for name in sorted({*ours, *theirs})}
        if step > newest[name]:
            newest[name] = step
    return newest


def knows(clock: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether `clock` has seen all that `other` has."""
    return all(clock.get(name, 0) >= step for name, step in other.items())
