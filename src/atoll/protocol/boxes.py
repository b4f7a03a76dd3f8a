"""What a rank holds of a model: boxes, rectangles of its tensors.

A learner of several ranks declares the boxes of all of them when it joins (`Hello.ranks`). A plain learner declares
none: its one rank holds everything.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocol.limits import Count


class Box(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    tensor: Annotated[str, Meta(max_length=1024)]
    offsets: Annotated[tuple[Count, ...], Meta(max_length=64)]
    sizes: Annotated[tuple[Count, ...], Meta(max_length=64)]
    """Zero: the rank holds nothing of this tensor."""
    sends: bool = True
    """Of equal boxes of several ranks, one is sent."""


RankBoxes = Annotated[tuple[Box, ...], Meta(max_length=1 << 16)]
"""Of one rank, by names of tensors."""
