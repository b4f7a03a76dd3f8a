"""RDA for each row of Δ = Θ − θ, with the newest Θ as the paper prints it, not the base that the learner began from.

The two differ for a learner whose base is old: it then takes back what others have merged since. A syncer keeps the
last versions of each fragment for it (`Parameters`); what was made on an older one, or on one of an earlier term,
counts as base − θ.
"""

from __future__ import annotations

from atoll.numerics.merges.rda_row import direction_rows, merge_piece, merges_rows_apart

__all__ = ["SUBTRACTS_FROM_NEWEST", "direction_rows", "merge_piece", "merges_rows_apart"]

SUBTRACTS_FROM_NEWEST = True
