from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.numerics.arrays import FloatArray
from atoll.numerics.codec import round_to_dtype
from atoll.numerics.fragments import Fragment, make_plan
from atoll.numerics.initial import count_initial_bytes, decode_initial, encode_initial, is_halved, lay_out_initial
from atoll.protocol.messages import TensorSpec

TENSORS = (
    TensorSpec("a", (5, 3), "float32"),
    TensorSpec("b", (3,), "float16"),
    TensorSpec("buffers/first/c", (2,), "float32"),
    TensorSpec("buffers/mean/d", (1,), "float32"),
    TensorSpec("e", (7,), "bfloat16"),
    TensorSpec("f", (), "float32"),
)
[PART] = make_plan(TENSORS, 1).fragments


def rounded(part: Fragment, values: FloatArray) -> FloatArray:
    found = values.copy()
    for piece, place in part.parts:
        if is_halved(piece.tensor):
            round_to_dtype(found[place], "bfloat16")
    return found


def some_values(seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(PART.size).astype(np.float32)


def test_parameters_take_2_bytes_and_what_must_stay_exact_takes_4() -> None:
    exact = {"b", "buffers/first/c", "buffers/mean/d"}
    assert {tensor.name for tensor in TENSORS if not is_halved(tensor)} == exact
    assert count_initial_bytes(PART) == 2 * (15 + 7 + 1) + 4 * (3 + 2 + 1)


def test_the_runs_tile_values_and_bytes_and_floats_are_aligned() -> None:
    runs = lay_out_initial(PART)
    values = sorted((run.values.start, run.values.stop) for run in runs)
    assert [start for start, _ in values] == [0, *(stop for _, stop in values[:-1])] and values[-1][1] == PART.size
    assert [run.data.start for run in runs] == [0, *(run.data.stop for run in runs[:-1])]
    assert runs[-1].data.stop == count_initial_bytes(PART)
    assert all(run.data.start % 4 == 0 for run in runs if not run.halved)


def test_rounded_values_come_back_bit_for_bit_and_exact_ones_are_untouched() -> None:
    values = rounded(PART, some_values())
    body, found = encode_initial(PART, values), np.full(PART.size, np.nan, np.float32)
    assert body is not None and body.size == count_initial_bytes(PART)
    decode_initial(PART, body, found)
    assert np.array_equal(found.view(np.uint32), values.view(np.uint32))
    for piece, place in PART.parts:
        if not is_halved(piece.tensor):
            assert np.array_equal(found[place], some_values()[place])


@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan"), -0.0, 1e-40])
def test_odd_values_come_back_too(odd: float) -> None:
    values = rounded(PART, some_values())
    values[0] = torch.tensor(odd).to(torch.bfloat16).float().item()
    body, found = encode_initial(PART, values), np.empty(PART.size, np.float32)
    assert body is not None
    decode_initial(PART, body, found)
    assert np.array_equal(found.view(np.uint32), values.view(np.uint32))


def test_a_value_that_bf16_cannot_hold_has_no_such_form() -> None:
    values = rounded(PART, some_values())
    for piece, place in PART.parts:
        changed = values.copy()
        changed[place.start] = 1.0 + 2.0**-8
        assert (encode_initial(PART, changed) is None) == is_halved(piece.tensor), piece.tensor.name


def test_the_loss_is_the_one_that_the_settings_reference_states() -> None:
    values = (np.random.default_rng(1).standard_normal(100_000) * 10.0).astype(np.float32)
    found = values.copy()
    round_to_dtype(found, "bfloat16")
    assert 2.0**-9 < np.max(np.abs(found - values) / np.abs(values)) <= 2.0**-8
    assert np.array_equal(found, torch.from_numpy(values).to(torch.bfloat16).float().numpy()), "as the learner rounds"


def test_an_empty_part_has_no_bytes() -> None:
    nothing = Fragment(0, (), (), 0)
    body = encode_initial(nothing, np.empty(0, np.float32))
    assert body is not None and body.size == count_initial_bytes(nothing) == 0
    decode_initial(nothing, body, np.empty(0, np.float32))
