"""Merge rules, a module each: how many contributions become one outer gradient.

A module has `merge_piece(piece, deltas, shares, out)`: the contributions to one piece (a tensor, or the rows of it that
the fragment holds), as an array of [contributions, values], and their shares w / Σ w, into `out`. merge.py calls it for
two contributions or more, and not for embeddings and buffers. `merges_rows_apart(piece)` says whether it gives the same
bits for a piece and for runs of its rows, one after the other.

`direction_rows(piece)` says of how many rows norms and directions are averaged apart, 0 where the mean is taken: from
it follows what a relay sums (group_sums.py). A rule without it is merged without sums.

Two more names are for rules that differ from the others, and need not be there. `MERGES_EMBEDDINGS = True`: embeddings
are merged by it too. `SUBTRACTS_FROM_NEWEST = True`: it is given Δ = Θ − θ of the newest Θ, in place of base − θ.
"""
