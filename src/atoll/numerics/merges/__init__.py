"""Merge rules, a module each: how many contributions become one outer gradient.

A module has `merge_tensor(tensor, deltas, shares, out)`: the contributions to one tensor, each flat, and their shares
w / Σ w, into `out`. merge.py calls it for two contributions or more, and not for embeddings and buffers.
"""
