"""Moments of the inner optimizer as bytes and back, and their mean, against plain float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics.moment_bodies import INT8, Values, pack, unpack

from atoll.numerics import moments
from atoll.numerics.arrays import ByteArray, DoubleArray
from atoll.numerics.fragments import Fragment, make_plan
from atoll.numerics.moments import (
    FORMS,
    NAMES,
    average_moments,
    check_moments,
    list_moments,
    moments_nbytes,
    most_bytes,
    read_forms,
    read_moments,
)
from atoll.protocol.errors import PeerError
from atoll.protocol.messages import TensorSpec

ADAM, MOMENTUM, NONE = (NAMES.index(name) for name in ("adam", "momentum", "none"))
PLAN = make_plan((TensorSpec("a", (5, 70), "float32"), TensorSpec("b", (130,), "float32")), 1)
PART = PLAN.fragments[0]


def draw(part: Fragment, forms: Sequence[int], seed: int = 0, scale: float = 1.0) -> Values:
    dice = np.random.default_rng(seed)
    found = {}
    for moment in list_moments(INT8, part, forms):
        values = dice.standard_normal(part.pieces[moment.piece].size) * scale
        found[moment.piece, moment.slot] = (values**2 if moment.squared else values).astype(np.float32)
    return found


def block_scale(values: DoubleArray, width: int) -> DoubleArray:
    """Of each value, the largest of its block over 127."""
    rows = values.reshape(-1, width)
    scales = np.empty_like(rows)
    for start in range(0, width, 64):
        scales[:, start : start + 64] = np.abs(rows[:, start : start + 64]).max(axis=1, keepdims=True) / 127
    return scales.reshape(-1)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_comes_back_within_half_a_code_of_its_block(name: str) -> None:
    forms = [NAMES.index(name)] * len(PART.pieces)
    sent = draw(PART, forms)
    body = pack(PART, forms, sent)
    check_moments(PART, body)
    found = unpack(PART, body)
    assert found.keys() == sent.keys()
    for moment in list_moments(INT8, PART, forms):
        given, width = sent[moment.piece, moment.slot].astype(np.float64), moment.rows[0][1]
        came = found[moment.piece, moment.slot].astype(np.float64)
        given, came = (np.sqrt(given), np.sqrt(came)) if moment.squared else (given, came)
        assert (np.abs(came - given) <= 0.502 * block_scale(given, width)).all()


def test_a_squared_moment_travels_as_its_root_with_half_a_code_as_the_floor() -> None:
    values = np.zeros(130, np.float32)
    values[:3] = [127.0**2, 2.0**2, 1e-9]
    forms = [NONE, NAMES.index("square")]
    came = unpack(PART, pack(PART, forms, {(1, 0): values}))[1, 0]
    assert came[:4].tolist() == [127.0**2, 4.0, 0.25, 0.25], "the scale is 1"
    assert (came[64:] == 0).all(), "a block of zeros stays zero"


positive = st.floats(0, float(np.finfo(np.float32).max), width=32)


@given(st.lists(positive, min_size=130, max_size=130))
@settings(max_examples=60, deadline=None)
def test_a_positive_one_never_becomes_zero_and_all_stay_finite(drawn: list[float]) -> None:
    values, forms = np.array(drawn, np.float32), [NONE, NAMES.index("square")]
    body = pack(PART, forms, {(1, 0): values})
    check_moments(PART, body)
    once = unpack(PART, body)[1, 0]
    again = unpack(PART, average_moments(PART, [body, body], [1.0, 1e-9]))[1, 0]
    for came in (once, again):
        assert (came[values > 0] > 0).all() and (came >= 0).all() and np.isfinite(came).all()


@pytest.mark.parametrize("run", [moments.RUN, 140])
@pytest.mark.parametrize("scale", [1.0, 1e-21, 1e18])
def test_the_mean_is_the_one_of_float64_by_weight(run: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "RUN", run)
    forms, weights = [ADAM, MOMENTUM], [3.0, 1.0, 0.5]
    bodies = [pack(PART, forms, draw(PART, forms, seed, scale)) for seed in range(3)]
    arrived = [unpack(PART, body) for body in bodies]
    expected = {
        key: sum(w * one[key].astype(np.float64) for w, one in zip(weights, arrived, strict=True)) / sum(weights)
        for key in arrived[0]
    }
    as_sent = pack(PART, forms, {key: values.astype(np.float32) for key, values in expected.items()})
    assert (average_moments(PART, bodies, weights) == as_sent).all()
    assert (average_moments(PART, bodies, weights, threads=4) == as_sent).all()


def test_one_alone_comes_back_as_it_was_sent() -> None:
    forms = [ADAM, ADAM]
    body = pack(PART, forms, draw(PART, forms))
    assert (average_moments(PART, [body], [7.0]) == body).all()


def test_who_has_none_or_another_form_is_left_out() -> None:
    adam = [pack(PART, [ADAM, ADAM], draw(PART, [ADAM, ADAM], seed)) for seed in (1, 2)]
    fresh = pack(PART, [NONE, NONE], {})
    other = pack(PART, [MOMENTUM, NONE], draw(PART, [MOMENTUM, NONE], 3))
    alone = average_moments(PART, adam, [1.0, 2.0])
    assert (average_moments(PART, [adam[0], fresh, other, adam[1]], [1.0, 9.0, 2.5, 2.0]) == alone).all()
    outweighed = average_moments(PART, [adam[0], other], [1.0, 9.0])
    assert read_forms(PART, outweighed) == [MOMENTUM, ADAM], "the form with the most weight, piece by piece"
    assert average_moments(PART, [fresh], [1.0]).tolist() == [NONE, NONE]


@pytest.mark.parametrize("slot", [0, 1])
def test_one_that_would_drown_the_others_is_left_out_where_there_are_three(slot: int) -> None:
    forms, honest = [ADAM, ADAM], [draw(PART, [ADAM, ADAM], seed) for seed in range(3)]
    loud = {key: values * np.float32(1e6 if key == (0, slot) else 1.0) for key, values in honest[0].items()}
    bodies = [pack(PART, forms, values) for values in (*honest[1:], loud)]
    found, two = (unpack(PART, average_moments(PART, some, [1.0] * len(some))) for some in (bodies, bodies[:2]))
    assert (found[0, slot] == two[0, slot]).all(), "it counts for nothing in what it is loud in"
    three = [pack(PART, forms, values) for values in (*honest[1:], honest[0])]
    assert (found[1, slot] == unpack(PART, average_moments(PART, three, [1.0] * 3))[1, slot]).all(), "and elsewhere"
    quiet = {key: values * np.float32(1e-6) for key, values in honest[0].items()}
    kept = average_moments(PART, [*bodies[:2], pack(PART, forms, quiet)], [1.0] * 3)
    assert unpack(PART, kept)[0, slot].max() < two[0, slot].max(), "a small one counts"


def test_what_the_filter_leaves_out_is_left_out_of_the_moments_too() -> None:
    bodies = [pack(PART, [ADAM, ADAM], draw(PART, [ADAM, ADAM], seed)) for seed in (1, 2)]
    kept = [np.array([1.0, 1.0], np.float32), np.array([0.0, 1.0], np.float32)]
    found = unpack(PART, average_moments(PART, bodies, [1.0, 1.0], kept))
    first, both = unpack(PART, bodies[0]), unpack(PART, average_moments(PART, bodies, [1.0, 1.0]))
    assert (found[0, 0] == first[0, 0]).all() and (found[1, 0] == both[1, 0]).all()


def test_what_is_refused_says_why() -> None:
    forms = [ADAM, ADAM]
    values = draw(PART, forms)
    good = pack(PART, forms, values)

    def broken(**changed: float) -> ByteArray:
        wrong = {key: one.copy() for key, one in values.items()}
        wrong[0, int("square" in changed)][7] = next(iter(changed.values()))
        return pack(PART, forms, wrong)

    negative = good.copy()
    negative[list_moments(INT8, PART, forms)[1].data.start + 3] = 0xFF  # a code of −1
    huge = good.copy()
    huge[list_moments(INT8, PART, forms)[1].data.start + 2] = 0x7A  # the upper byte of a scale
    for body, reason in [
        (good[:-1], f"moments of {good.size - 1} bytes came, those of their forms are {good.size} bytes"),
        (np.append(good, np.uint8(0)), f"moments of {good.size + 1} bytes came"),
        (good[:1], "no form that is known"),
        (np.append(np.array([ADAM, len(NAMES)], np.uint8), good[2:]), "no form that is known"),
        (broken(mean=np.nan), "a moment of a: block 0 of tensor 0 has a scale that is not finite"),
        (broken(mean=np.inf), "a moment of a: .* not finite"),
        (broken(square=np.inf), "a moment of a: .* not finite"),
        (broken(square=-1.0), "a moment of a: .* not finite"),
        (negative, "a squared moment of a is below zero or too large"),
        (huge, "a squared moment of a is below zero or too large"),
    ]:
        with pytest.raises(PeerError, match=reason):
            check_moments(PART, body)


def test_the_length_is_read_from_the_first_bytes_and_has_a_bound() -> None:
    for name in FORMS:
        forms = [NAMES.index(name), ADAM]
        body = pack(PART, forms, draw(PART, forms))
        memory = np.append(body, np.full(1000, 255, np.uint8))
        assert (read_moments(PART, memory) == body).all() and body.size <= most_bytes(PLAN)
    assert body.size < most_bytes(PLAN) == moments_nbytes(INT8, PART, [ADAM, ADAM])


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_refused_or_decoded(data: bytes) -> None:
    body = np.frombuffer(data, np.uint8)
    try:
        check_moments(PART, body)
    except PeerError:
        return
    assert all(np.isfinite(values).all() for values in unpack(PART, body).values())
