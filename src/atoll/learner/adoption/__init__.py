"""Adoption rules, a module each: how a new version is taken into the model between two steps.

A module has `adopt(own, new, *, blend, read)`, which changes `own` in place and computes in fp32 whatever the tensors'
type. `read` is the copy that the version already contains, or the base; it is given to "carry" alone. The inner
optimizer's moments are not touched here (moments.py). "overwrite" and "blend" reset a fragment's counters, so both book
all steps that the version does not contain as dropped, although under "blend" a share of their values stays in the
model.
"""
