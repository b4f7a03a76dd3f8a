"""Sums of groups, against the flat merge and a float64 reference."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import Delta, body_nbytes, decode_contribution, encode_contribution, make_codec
from atoll.numerics.fragments import Fragment, make_plan
from atoll.numerics.group_sums import (
    GroupTerm,
    count_rows,
    mean_rows,
    merge_groups,
    place_means,
    sum_group,
    why_not_summed,
)
from atoll.numerics.merge import merge
from atoll.protocol.messages import TensorSpec, buffer_name

TENSORS = (
    TensorSpec("embedding", (7, 16), "float32", True),
    TensorSpec("matrix", (12, 40), "float32"),
    TensorSpec("vector", (33,), "float32"),
)
RULES = ("mean", "rda", "rda-row", "rda-row-embeddings")
PART: Fragment = make_plan(TENSORS, 1).fragments[0]


def draw(count: int, seed: int = 0) -> list[FloatArray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 0.01 * (1 + at), PART.size).astype(np.float32) for at in range(count)]


def flat(rule: str, deltas: list[FloatArray], weights: list[float]) -> FloatArray:
    out = np.empty(PART.size, np.float32)
    merge(PART, deltas, weights, out, rule)
    return out


def exact(rule: str, deltas: list[FloatArray], weights: list[float]) -> np.ndarray:
    """In float64, as the page prints it, row by row."""
    w, found = np.array(weights) / sum(weights), np.empty(PART.size)
    for piece, values in PART.parts:
        given = [delta[values].astype(np.float64) for delta in deltas]
        mean = rule == "mean" or (piece.tensor.embedding and rule != "rda-row-embeddings")
        rows = 1 if mean or rule == "rda" or len(piece.shape) < 2 else piece.rows
        for row in np.split(np.arange(values.start, values.stop), rows):
            here = [delta[row - values.start] for delta in given]
            total = sum(share * delta for share, delta in zip(w, here, strict=True))
            if not mean:
                norms = [np.linalg.norm(delta) for delta in here]
                pairs = zip(w, here, norms, strict=True)
                direction = sum(share * delta / norm for share, delta, norm in pairs if norm)
                if (length := np.linalg.norm(direction)) >= 1e-3:
                    total = float(w @ norms) * direction / length
            found[row] = total
    return found


def through_codec(name: str, values: FloatArray) -> FloatArray:
    codec, out = make_codec(name), np.empty_like(values)
    data = np.empty(body_nbytes(codec, PART), np.uint8)
    encode_contribution(codec, PART, Delta(values, np.zeros_like(values)), data)
    decode_contribution(codec, PART, data, out)
    return out


def grouped(
    rule: str, groups: list[list[int]], deltas: list[FloatArray], weights: list[float], codec: str = "fp32"
) -> FloatArray:
    """Every group but those of one member through a relay, and merged."""
    terms = []
    for group in groups:
        some, own = [deltas[at] for at in group], [weights[at] for at in group]
        if len(group) == 1:
            terms.append(GroupTerm(some[0], own[0]))
            continue
        total = np.empty(PART.size, np.float32)
        radii = sum_group(rule, PART, some, own, total, threads=2)
        terms.append(GroupTerm(through_codec(codec, total), sum(own), radii))
    out = np.empty(PART.size, np.float32)
    rows = merge_groups(rule, PART, terms, out, threads=2)
    means = [
        mean_rows(rule, PART, rows, [deltas[at] for at in group], [weights[at] for at in group])
        if len(group) > 1
        else None
        for group in groups
    ]
    place_means(rule, PART, rows, terms, means, out)
    return out


def error(found: FloatArray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1], [3]], [[0], [1, 2, 3]]])
def test_groups_merge_to_the_flat_merge_to_rounding(rule: str, groups: list[list[int]]) -> None:
    deltas, weights = draw(4), [1.0, 5.0, 0.25, 2.0]
    found = grouped(rule, groups, deltas, weights)
    assert error(found, exact(rule, deltas, weights)) < 1e-6
    assert error(found, flat(rule, deltas, weights).astype(np.float64)) < 1e-6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("codec", "most"), [("bf16", 3e-3), ("int8", 1.5e-2), ("int4", 0.2)])
def test_a_lossy_codec_costs_its_own_error_and_no_more(rule: str, codec: str, most: float) -> None:
    deltas, weights = draw(4), [1.0, 5.0, 0.25, 2.0]
    found = grouped(rule, [[0, 1], [2, 3]], deltas, weights, codec)
    assert error(found, exact(rule, deltas, weights)) < most


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2], [3]]])
def test_rows_whose_directions_cancel_are_merged_by_the_mean(groups: list[list[int]]) -> None:
    """Across groups too: a relay alone cannot tell."""
    first = draw(1)[0]
    deltas = [first, -3 * first] if len(groups) == 1 else [first, -3 * first, 2 * first, -first]
    weights = [1.0] * len(deltas)
    found = grouped("rda-row", groups, deltas, weights)
    assert error(found, exact("rda-row", deltas, weights)) < 1e-6
    assert error(found, flat("mean", deltas, weights).astype(np.float64)) < 1e-6


def test_who_weighs_nothing_is_as_if_not_there() -> None:
    deltas = draw(4)
    found = grouped("rda-row", [[0, 1, 2], [3]], deltas, [1.0, 0.0, 2.0, 0.0])
    assert error(found, exact("rda-row", [deltas[0], deltas[2]], [1.0, 2.0])) < 1e-6
    with pytest.raises(ValueError, match="nothing to merge"):
        sum_group("rda-row", PART, deltas, [0.0] * 4, np.empty(PART.size, np.float32))


@pytest.mark.parametrize("rule", RULES)
def test_one_contribution_comes_out_as_itself(rule: str) -> None:
    delta, out = draw(1)[0], np.empty(PART.size, np.float32)
    assert merge_groups(rule, PART, [GroupTerm(delta, 3.0)], out) == []
    assert (out == delta).all()


def test_rows_of_zeros_have_no_direction() -> None:
    deltas = draw(3)
    for delta in deltas:
        delta[PART.parts[1][1]] = 0.0
    found = grouped("rda-row", [[0, 1], [2]], deltas, [1.0, 1.0, 1.0])
    assert (found[PART.parts[1][1]] == 0.0).all()
    assert error(found, exact("rda-row", deltas, [1.0, 1.0, 1.0])) < 1e-6


def test_no_bit_depends_on_the_number_of_threads() -> None:
    deltas, made = draw(5), []
    for threads in (1, 3):
        total = np.empty(PART.size, np.float32)
        made.append((sum_group("rda-row", PART, deltas, [1.0] * 5, total, threads).tobytes(), total.tobytes()))
    assert made[0] == made[1]


def test_radii_are_of_rows_with_a_direction() -> None:
    assert count_rows("mean", PART) == 0
    assert count_rows("rda", PART) == 2
    assert count_rows("rda-row", PART) == 12 + 1
    assert count_rows("rda-row-embeddings", PART) == 7 + 12 + 1


def test_what_needs_each_contribution_is_not_summed() -> None:
    plan = make_plan(TENSORS, 2)
    buffered = make_plan((*TENSORS, TensorSpec(buffer_name("first", "mean"), (4,), "float32")), 1)
    assert why_not_summed("rda-row", plan, robust=False, moments=False) == ""
    assert "robust" in why_not_summed("rda-row", plan, robust=True, moments=False)
    assert "moments" in why_not_summed("rda-row", plan, robust=False, moments=True)
    assert "rda-row-literal" in why_not_summed("rda-row-literal", plan, robust=False, moments=False)
    assert "buffers" in why_not_summed("mean", buffered, robust=False, moments=False)
