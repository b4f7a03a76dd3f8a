"""Pure functions on arrays: how a model is cut into fragments, how contributions become a new version of one.

Nothing here does I/O, knows a clock or imports torch. Arrays are flat, contiguous float32 of one fragment; results go
into buffers the caller allocated once.

    fragments      tensors → a plan of fragments, and its fingerprint
    rank_plan      what one rank of a learner holds of each fragment
    codec          Δ ↔ bytes
    absmax         int8 and int4: few bits a value, and a scale for every block
    screen         refuses contributions with broken or absurd numbers
    filter         judges the contributions of a round by each other, with the cosines of `agreement`
    sample         some values of a fragment, for the filter
    merge          contributions → one outer gradient
    outer          outer gradient → a new version
    permutation    the order of a dataset's samples
    kernels        the loops under norms, merges and outer steps
    codec_kernels  those under the codecs
    compiled       how loops are compiled, once, and run on several threads

The choices (codecs, plans, merge rules, outer optimizers) are the modules of the folders below.
"""
