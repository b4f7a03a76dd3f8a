from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.learner.earlier import find_part_of_ranks
from atoll.learner.packing import Packing
from atoll.learner.ranks import RankGroup
from atoll.learner.resharding import PLACE, make_whole_boxes, part_of_rank, refit, saved_boxes
from atoll.learner.snapshot import Snapshot, write
from atoll.protocol.errors import ConfigError
from atoll.protocol.messages import Box, RankBoxes, TensorSpec

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


class TwoRanks:
    """Rank 0 of two, and what the other one says."""

    rank = 0

    def __init__(self, other: str) -> None:
        self._other = other

    def share(self, value: str, kind: type[str]) -> str:
        return value

    def gather(self, value: str, kind: type[str]) -> list[str]:
        return [value, self._other]


@pytest.mark.parametrize(("here", "there"), [("rank 1's part is gone", ""), ("", "rank 1's part is gone")])
def test_where_a_part_is_missing_all_ranks_begin_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: str, there: str
) -> None:
    monkeypatch.delenv("ATOLL_STATE", raising=False)
    (tmp_path / "run").write_text("r1")
    (tmp_path / "cut-000024.safetensors").touch()

    def fit(root: Path, file: str) -> Snapshot:
        if here:
            raise ConfigError(here)
        return Snapshot({}, {})

    assert find_part_of_ranks(cast(RankGroup, TwoRanks(there)), tmp_path, "r1", fit) is None
    said = capsys.readouterr().err
    assert "begins afresh: rank 1's part is gone" in said and said.count("\n") == 1


def test_a_part_that_somebody_named_has_to_be_there_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "cut-000024.safetensors"))
    with pytest.raises(ConfigError, match="rank 1's part is gone"):
        find_part_of_ranks(
            cast(RankGroup, TwoRanks("rank 1's part is gone")), tmp_path, "r1", lambda root, file: Snapshot({}, {})
        )
