"""The array types of this package. Apart from the kernels, so that a training process need not load a compiler."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32]
DoubleArray: TypeAlias = NDArray[np.float64]
ByteArray: TypeAlias = NDArray[np.uint8]
HalfBits: TypeAlias = NDArray[np.uint16]
IndexArray: TypeAlias = NDArray[np.int64]
