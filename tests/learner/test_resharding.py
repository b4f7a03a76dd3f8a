from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.learner.packing import Packing
from atoll.learner.resharding import PLACE, make_whole_boxes, part_of_rank, refit, saved_boxes
from atoll.learner.snapshot import Snapshot, write
from atoll.protocol.boxes import Box, RankBoxes
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import TensorSpec

SPEC = TensorSpec("0.weight", (5, 4), "float32")
WHOLE = torch.arange(20.0).reshape(5, 4)
NAME = "optimizer/state/0.weight/exp_avg"


def cut(boxes: list[Box], file: str, root: Path) -> Snapshot:
    """A part of every rank, as they save them; rank 0's."""
    ranks = tuple((box,) for box in boxes)
    found = []
    for rank, box in enumerate(boxes):
        packing = Packing()
        packing.keep(NAME, WHOLE[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))])
        packing.keep("optimizer/state/0.weight/step", torch.tensor(7.0))
        told = {"boxes": msgspec.to_builtins(ranks)} if len(boxes) > 1 else {}
        state = packing.pack(told, PLACE)
        packing.settle()
        packing.finish()
        part = Snapshot(packing.tensors, {PLACE: state})
        path = part_of_rank(root, rank, file)
        path.parent.mkdir(exist_ok=True)
        write(path, part)
        found.append(part)
    return found[0]


@st.composite
def layouts(draw: st.DrawFn) -> list[Box]:
    """By rows or by columns, uneven, perhaps empty."""
    by, count = draw(st.integers(0, 1)), draw(st.integers(1, 4))
    stops = sorted(draw(st.lists(st.integers(0, SPEC.shape[by]), min_size=count - 1, max_size=count - 1)))
    edges = [0, *stops, SPEC.shape[by]]
    boxes = []
    for start, stop in pairwise(edges):
        offsets, sizes = [0, 0], list(SPEC.shape)
        offsets[by], sizes[by] = start, stop - start
        boxes.append(Box(SPEC.name, tuple(offsets), tuple(sizes)))
    return boxes


@given(before=layouts(), now=layouts())
def test_any_layout_is_read_by_any_other(
    before: list[Box], now: list[Box], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("parts")
    first = cut(before, "cut-000010.safetensors", root)
    for box in now:
        made = refit(first, root, "cut-000010.safetensors", (box,), [SPEC])
        wanted = WHOLE[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        assert made.tensors[NAME].equal(wanted)
        assert made.tensors["optimizer/state/0.weight/step"] == 7.0


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    halves = [Box(SPEC.name, (0, 0), (3, 4)), Box(SPEC.name, (3, 0), (2, 4))]
    first = cut(halves, "cut-000010.safetensors", tmp_path)
    assert saved_boxes(first) == tuple((box,) for box in halves)
    part_of_rank(tmp_path, 1, "cut-000010.safetensors").unlink()
    own: RankBoxes = make_whole_boxes([SPEC])
    with pytest.raises(ConfigError, match="the part of rank 1 cannot be read"):
        refit(first, tmp_path, "cut-000010.safetensors", own, [SPEC])
