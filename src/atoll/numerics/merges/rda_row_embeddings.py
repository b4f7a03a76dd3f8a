"""RDA for each row, of embeddings too: what "rda-row" does not do, which takes their mean."""

from __future__ import annotations

from atoll.numerics.merges.rda_row import direction_rows, merge_piece, merges_rows_apart

__all__ = ["MERGES_EMBEDDINGS", "direction_rows", "merge_piece", "merges_rows_apart"]

MERGES_EMBEDDINGS = True
