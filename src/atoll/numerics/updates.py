"""What changes a version, where versions come down by a lossy codec: encoded once, applied by everybody from the bytes.

    u = what the outer step would lower Θ by           t = u + feedback
    bytes = encode(t),  û = decode(bytes)              Θ ← Θ − û,  feedback ← t − û

and the outer state moves on by the gradient that û stands for. So whoever holds Θ of the version before needs nothing
but the bytes, and whoever holds the outer state too needs nothing else for that one.

Rules kept here: all is float32, element by element, in the order written. Feedback is kept where the codec asks for it
(`needs_feedback`). Merged buffers have none; they travel as bf16, rounded towards zero, as in a contribution.
"""

from __future__ import annotations

import numpy as np

from atoll.choices import OUTER_OPTIMIZER
from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec, Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Fragment
from atoll.numerics.outer import OuterOptimizer, UpdatingOptimizer, advance_state, compute_update
from atoll.protocol.errors import ConfigError, PeerError

WHOLE = "fp32"
"""The version codec with which Θ comes down whole, and the journal keeps outer gradients."""


def make_version_codec(name: str, threads: int = 1) -> Codec | None:
    """None: Θ comes down whole."""
    return None if name == WHOLE else make_codec(name, threads)


def check_version_codec(name: str, optimizer: str) -> None:
    """ConfigError where this outer optimizer cannot say what it lowers Θ by."""
    if name != WHOLE and not isinstance(OUTER_OPTIMIZER.load(optimizer).make(1.0, 0.0), UpdatingOptimizer):
        raise ConfigError(
            f"version_codec = {name!r} needs an outer optimizer with `update` and `advance`, which "
            f"outer_optimizer = {optimizer!r} does not have: use version_codec = {WHOLE!r} with it"
        )


def updating(optimizer: OuterOptimizer) -> UpdatingOptimizer:
    assert isinstance(optimizer, UpdatingOptimizer), "settings are checked before"
    return optimizer


def encode_update(
    codec: Codec,
    fragment: Fragment,
    optimizer: OuterOptimizer,
    state: dict[str, FloatArray],
    gradient: FloatArray,
    feedback: FloatArray | None,
    threads: int = 1,
) -> tuple[ByteArray, FloatArray]:
    """The bytes that change a whole fragment, and t, of which they hold as much as the codec can."""
    total = np.empty(fragment.size, dtype=np.float32)
    compute_update(updating(optimizer), fragment, state, gradient, total, threads)
    if feedback is not None:
        total += feedback
    data = np.empty(body_nbytes(codec, fragment), dtype=np.uint8)
    encode_contribution(codec, fragment, Delta(total, np.zeros_like(total)), data)
    return data, total


def decode_update(codec: Codec, fragment: Fragment, data: ByteArray) -> FloatArray:
    """What Θ is lowered by. ValueError: these bytes are no update of the fragment."""
    update = np.empty(fragment.size, dtype=np.float32)
    try:
        decode_contribution(codec, fragment, data, update)
    except PeerError as error:
        raise ValueError(str(error)) from None
    return update


def apply_update(
    optimizer: OuterOptimizer,
    fragment: Fragment,
    theta: FloatArray,
    new_theta: FloatArray,
    state: dict[str, FloatArray],
    update: FloatArray,
    threads: int = 1,
) -> None:
    """The next version into `new_theta`, which may be `theta` itself; the outer state moves on in place."""
    np.subtract(theta, update, out=new_theta)
    advance_state(updating(optimizer), fragment, state, update, threads)


def compute_rest(fragment: Fragment, total: FloatArray, update: FloatArray) -> FloatArray:
    """What the bytes left out of t: the next feedback. It takes the place of t."""
    np.subtract(total, update, out=total)
    total[fragment.buffers] = 0.0
    return total
