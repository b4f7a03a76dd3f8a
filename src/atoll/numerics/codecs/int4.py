"""Codes of 4 bits, with one scale for each block of 64 values of a row: 4.25 bits an element."""

from __future__ import annotations

from functools import partial

from atoll.numerics.absmax import Absmax

make = partial(Absmax, 4)
