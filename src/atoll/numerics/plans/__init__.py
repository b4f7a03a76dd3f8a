"""Fragment plans, a module each: how tensors are dealt into fragments.

A module has `deal(tensors, count)`: the pieces of the tensors, which come sorted by name, in `count` lists, none of
them empty; PlanError where that cannot be done. And `most_fragments(tensors)`: the largest count that it can deal.
"""
