"""Lists of numbers on the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.cli.lists import count, counts, names, number, numbers
from atoll.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1,5", [1.0, 5.0]),
        (" 0.5 , 2k ", [0.5, 2000.0]),
        ("-3", [-3.0]),
        ("1e6,1.5B", [1e6, 1.5e9]),
    ],
)
def test_numbers_are_read_as_people_write_them(text: str, meant: list[float]) -> None:
    assert numbers("--step-s", text) == meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("150000,300000", [150_000, 300_000]),
        ("150k,1.2M", [150_000, 1_200_000]),
        ("7B,5e9", [7_000_000_000, 5_000_000_000]),
        ("0.35m", [350_000]),
        ("2.0", [2]),
    ],
)
def test_counts_are_exact_whatever_their_suffix(text: str, meant: list[int]) -> None:
    assert counts("--chips", text) == meant


@given(st.integers(min_value=-(10**18), max_value=10**18))
def test_a_count_of_any_size_comes_back_as_it_was(whole: int) -> None:
    assert count("--chips", str(whole)) == whole


def test_one_value_is_no_list() -> None:
    assert number("--latency-s", "0.05") == 0.05
    with pytest.raises(ConfigError, match="'1,5' is no number"):
        number("--latency-s", "1,5")


@pytest.mark.parametrize(
    "word", ["", "k", "five", "nan", "inf", "1e999", "5%", "1 000", "1e6kk", "-", "sNaN", "9e999999999B"]
)
def test_what_is_no_number_is_refused_with_the_option_named(word: str) -> None:
    for read in (numbers, counts):
        with pytest.raises(ConfigError, match=r"^--chips ") as refused:
            read("--chips", f"8,{word}")
        assert "\n" not in str(refused.value)


def test_half_a_chip_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--chips '1\.5,2': 1\.5 is no whole number"):
        counts("--chips", "1.5,2")


def test_a_gap_in_a_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--chips '1,,2': a value is missing"):
        counts("--chips", "1,,2")


def test_names_are_out_of_those_known() -> None:
    assert names("--codec", "int4, bf16", ("bf16", "int4")) == ["int4", "bf16"]
    with pytest.raises(ConfigError, match=r"--codec 'int4,int3': there is no 'int3'; take bf16, int4"):
        names("--codec", "int4,int3", ("bf16", "int4"))
