"""The clock of every message: how many rounds its sender has heard of.

It is a table of one entry, `syncer`. Everything goes through the syncer, so the number of rounds orders all that
happened, and a table of every learner's steps would grow each message with the number of learners (docs/adr/0044).
Earlier versions send such a table; its other entries are read past.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from atoll.protocol.limits import Count, Name

MOST_NAMES = 16384
"""In one clock of an earlier version."""

Clock = Annotated[dict[Name, Count], Meta(max_length=MOST_NAMES)]

SYNCER = "syncer"
