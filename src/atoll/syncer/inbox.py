"""Contributions on their way into a merge: who was asked, what has arrived, in buffers that are used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from atoll.numerics.arrays import ByteArray, FloatArray
from atoll.numerics.codec import Codec
from atoll.numerics.fragments import Plan
from atoll.protocol.errors import PeerError

Key = tuple[str, int, int]
"""Learner, round, attempt."""


@dataclass(slots=True)
class Parcel:
    fragment: int
    body: ByteArray | None = None
    digest: str | None = None
    """Set once the body is whole."""
    receiving: bool = False
    held: bool = False
    """Somebody reads it beside the event loop."""
    delta: FloatArray | None = None
    unwanted: bool = False
    """Discarded while it was being received or read: its buffers wait for that to end."""


class Inbox:
    def __init__(self, plan: Plan, codec: Codec) -> None:
        self._plan, self._codec = plan, codec
        self._parcels: dict[Key, Parcel] = {}
        self._bodies: list[ByteArray] = []
        self._deltas: list[FloatArray] = []
        self._probes: dict[str, Key] = {}

    def ask(self, key: Key, fragment: int, *, probe: bool = False) -> None:
        """A pull was sent: this contribution, and no other, may arrive. A learner is probed once at a time."""
        if probe:
            self.discard(self._probes.get(key[0], key))  # whatever came of it
            self._probes[key[0]] = key
        self.discard(key)
        parcel = self._parcels.setdefault(key, Parcel(fragment))
        parcel.unwanted = False

    def receive(self, key: Key) -> memoryview:
        parcel = self._parcels.get(key)
        if parcel is None:
            raise PeerError(f"no contribution to round {key[1]} (attempt {key[2]}) is waited for")
        if parcel.receiving or parcel.digest is not None:
            raise PeerError(f"the contribution to round {key[1]} is here already")
        size = self._plan.fragments[parcel.fragment].size
        if parcel.body is None:
            length = self._codec.nbytes(self._plan.largest)
            parcel.body = self._bodies.pop() if self._bodies else np.empty(length, dtype=np.uint8)
        parcel.receiving = True
        return parcel.body[: self._codec.nbytes(size)].data

    def arrived(self, key: Key, mark: str) -> None:
        if (parcel := self._parcels.get(key)) is not None:
            parcel.receiving, parcel.digest = False, mark
            self._let_go_if_unwanted(key, parcel)

    def aborted(self, key: Key) -> None:
        if (parcel := self._parcels.get(key)) is not None:
            parcel.receiving = False
            self._let_go_if_unwanted(key, parcel)

    def opened(self, key: Key) -> bool:
        """Whether its message has come and was looked at."""
        parcel = self._parcels.get(key)
        return parcel is not None and (parcel.held or parcel.delta is not None)

    @contextmanager
    def hold(self, key: Key) -> Iterator[None]:
        """While it is read beside the event loop its buffers are not given to another, even if it is discarded."""
        parcel = self._parcels.get(key)
        if parcel is not None:
            parcel.held = True
        yield
        if parcel is not None:
            parcel.held = False
            self._let_go_if_unwanted(key, parcel)

    def open(self, key: Key, mark: str) -> FloatArray:
        """Decode a whole body; PeerError when it is not what its message says."""
        parcel = self._parcels.get(key)
        if parcel is None or parcel.body is None or parcel.digest is None:
            raise PeerError("its body did not arrive")
        if parcel.digest != mark:
            raise PeerError("its body is not the one its message names")
        assert parcel.delta is None, "a body is opened once"
        size = self._plan.fragments[parcel.fragment].size
        buffer = self._deltas.pop() if self._deltas else np.empty(self._plan.largest, dtype=np.float32)
        self._codec.decode(parcel.body[: self._codec.nbytes(size)], buffer[:size])
        parcel.delta = buffer
        return buffer[:size]

    def delta(self, key: Key) -> FloatArray:
        parcel = self._parcels[key]
        assert parcel.delta is not None
        return parcel.delta[: self._plan.fragments[parcel.fragment].size]

    def discard(self, key: Key) -> None:
        if (parcel := self._parcels.get(key)) is not None:
            parcel.unwanted = True
            self._let_go_if_unwanted(key, parcel)

    def _let_go_if_unwanted(self, key: Key, parcel: Parcel) -> None:
        if not parcel.unwanted or parcel.receiving or parcel.held:
            return
        del self._parcels[key]
        if parcel.body is not None:
            self._bodies.append(parcel.body)
        if parcel.delta is not None:
            self._deltas.append(parcel.delta)
