"""Small synchronous runs of real processes take the decisions that tools/decisions.json has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import decisions
from decisions import CASES, Case, compare_case, find_kinds, hash_sections, play_case

RECORDED = json.loads(decisions.RECORDED.read_text())
SAMPLE = [case for case in CASES if case.title == "plain/sample"]


def find_differences(case: Case) -> list[str]:
    return compare_case(play_case(case), RECORDED["cases"][case.title], find_kinds(RECORDED["machine"]))


def test_every_case_is_recorded() -> None:
    assert {case.title for case in CASES} == set(RECORDED["cases"])


@pytest.mark.system
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.title)
def test_a_synchronous_run_decides_as_recorded(case: Case) -> None:
    assert not find_differences(case)


@pytest.mark.system
@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [case for case in CASES if case not in SAMPLE], ids=lambda case: case.title)
def test_every_layout_decides_as_recorded(case: Case) -> None:
    assert not find_differences(case)


def test_a_line_that_differs_is_shown_and_bits_of_values_count_apart() -> None:
    lines = {
        "sent": [
            '1× syncer sends Pull on /v1/control {"round": 1}',
            f'1× a sends Staged on b {{"digest": "{"0" * 32}"}}',
        ]
    }
    recorded = hash_sections(lines)
    assert not compare_case(lines, recorded, ("decisions", "values"))
    other_bits = {"sent": [lines["sent"][0], lines["sent"][1].replace("0" * 32, "1" * 32)]}
    assert not compare_case(other_bits, recorded, ("decisions",))
    [counts, line] = compare_case(other_bits, recorded, ("decisions", "values"))
    assert counts.strip() == "sent (values): 1 lines of 2 are new, 1 of those recorded are gone" and "1" * 32 in line
    other_round = {"sent": [lines["sent"][0].replace('"round": 1', '"round": 2'), lines["sent"][1]]}
    assert '"round": 2' in compare_case(other_round, recorded, ("decisions",))[1]
