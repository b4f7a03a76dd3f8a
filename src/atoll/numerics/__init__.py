"""Pure functions on arrays: how a model is cut into fragments, how contributions become a new version of one.

Nothing here does I/O, knows a clock or imports torch. Arrays are flat, contiguous float32 of one fragment; results go
into buffers the caller allocated once.

    fragments   tensors → a plan of fragments, and its fingerprint
    codec       Δ ↔ bytes
    screen      whether a contribution's numbers may be merged at all
    merge       contributions → one outer gradient
    outer       outer gradient → a new version
    kernels     the loops under all of these, compiled once
"""
