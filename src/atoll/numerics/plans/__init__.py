"""Fragment plans, a module each: how tensors are dealt into fragments.

A module has `deal(tensors, count)`: the tensors, sorted by name, in `count` lists, none of them empty; PlanError where
that cannot be done.
"""
