"""A fragment of 64 MiB on its whole way, with a real courier and a real syncer on one event loop.

Heartbeats go out by that loop, so nothing that touches all of a fragment may run on it. And what is hashed is hashed
once by each side: the passes are counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.courier.conftest import Stage

from atoll import digests
from atoll.courier import body
from atoll.fabric.wire import MIB, SMALL_BYTES
from atoll.numerics.codecs.bf16 import Bf16
from atoll.store import cuts
from atoll.store.journal import Journal
from atoll.syncer import first_parameters
from atoll.syncer.contributions import Merging

ELEMENTS = 16 * MIB
ROUNDS = 3

HEAVY: list[tuple[object, str]] = [
    (np, "copyto"),
    (body, "encode_contribution"),
    (body, "as_held"),
    (first_parameters, "is_finite"),
    (Bf16, "decode_runs"),
    (Merging, "_open_and_screen"),
    (Merging, "merge_and_step"),
    (Journal, "append"),
    (cuts, "_write"),
]


class Watch:
    """Who works on which thread, and how often how many bytes are hashed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on_loop: set[str] = set()
        self.aside: set[str] = set()
        self.hashed: Counter[int] = Counter()
        for owner, name in HEAVY:
            patch.setattr(owner, name, self._watched(name, getattr(owner, name)))
        whole = digests.digest_pieces

        def digest_pieces(pieces: Any) -> str:
            given = list(pieces)
            size = sum(memoryview(piece).nbytes for piece in given)
            self.hashed[size] += 1
            if size > SMALL_BYTES:
                self._note("digest")
            return whole(given)

        patch.setattr(digests, "digest_pieces", digest_pieces)
        finish = digests.DigestInParts.finish

        def finish_parts(one: digests.DigestInParts) -> str:
            self.hashed[one._data.nbytes] += 1
            self._note("digest")
            return finish(one)

        patch.setattr(digests.DigestInParts, "finish", finish_parts)

    def _watched(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*given: Any, **more: Any) -> Any:
            sizes = [one.nbytes for one in given if isinstance(one, np.ndarray)]
            if not sizes or max(sizes) > SMALL_BYTES:
                self._note(name)
            return work(*given, **more)

        return watched

    def _note(self, name: str) -> None:
        here = threading.current_thread() is threading.main_thread()
        (self.on_loop if here else self.aside).add(name)


async def test_a_large_fragment_never_holds_up_an_event_loop_and_is_hashed_once_by_each_side(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(monkeypatch)
    run = await stage.run(fragments=1, sync_every=1, codec="bf16", cut_every=2, pull_floor_s=60.0)
    training = stage.training(run, {"w": torch.full((ELEMENTS,), 4.0, dtype=torch.bfloat16)})
    await training.join()
    for version in range(1, ROUNDS + 1):
        training.step(-0.5)
        await training.until(lambda version=version: training.box.base_version[0] == version)  # type: ignore[union-attr,misc]
    base = training.box.base(0)  # type: ignore[union-attr]
    assert base.min() == base.max() == run.theta()["w"][0] != 4.0
    await run.until_said("cut")
    assert watch.on_loop == set()
    assert watch.aside == {name for _, name in HEAVY} | {"digest"}
    # A contribution: by the courier that encoded it, by the syncer that received it.
    assert watch.hashed[2 * ELEMENTS] == 2 * ROUNDS
    # Version 0 by courier and syncer. In each round: the journal's payload, the new version, and whoever fetched it.
    assert watch.hashed[4 * ELEMENTS] == 2 + 3 * ROUNDS
