"""Codes of 8 bits, with one scale for each block of 64 values of a row: 8.375 bits an element."""

from __future__ import annotations

from functools import partial

from atoll.numerics.absmax import Absmax

make = partial(Absmax, 8)
