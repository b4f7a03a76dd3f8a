from __future__ import annotations

import pytest

from atoll.observe.figures import (
    clock,
    count,
    decimal,
    listing,
    percent,
    plain,
    span,
    sparkline,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (6204, "6,204"), (84_136.8, "84.1k"), (12_700_000, "12.7M"), (312e6, "312M"), (2.5e9, "2.5G")],
)
def test_count(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.031, "31 ms"),
        (0.31, "0.31 s"),
        (6.1, "6.1 s"),
        (59.4, "59 s"),
        (104, "1 min 44 s"),
        (7500, "2 h 5 min"),
    ],
)
def test_span(value: float | None, text: str) -> None:
    assert span(value) == text


def test_clock() -> None:
    assert [clock(s) for s in (None, -3, 41, 725, 3753)] == ["–", "0:00", "0:41", "12:05", "1:02:33"]


def test_nearly_all_is_not_all() -> None:
    shares = (None, 0.934, 0.997, 0.9997, 0.99999, 1.0)
    assert [percent(s) for s in shares] == ["–", "93 %", "99.7 %", "99.9 %", "99.9 %", "100 %"]


def test_sparkline() -> None:
    assert sparkline([1.0], 8) == ""
    assert sparkline([2.0, 2.0], 8) == "▁▁"
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert len(sparkline([float(i) for i in range(100)], 10)) == 10


def test_listing() -> None:
    assert [listing(list("abcdef"[:n])) for n in (0, 1, 2, 4, 6)] == [
        "",
        "a",
        "a and b",
        "a, b, c and d",
        "a, b, c and 3 more",
    ]


def test_plain() -> None:
    assert plain("a\x1b[1m\nb", keep="\n") == "a·[1m\nb"
    assert decimal(None) == "–"
