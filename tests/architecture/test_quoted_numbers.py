"""Numbers that the pages quote from benchmarks/results are those of the committed logs.

A quoted number is marked by a comment behind it, which GitHub does not show:

    0.977<!-- overhead.json: ratio -->                         the value there, as exactly as it is written
    95.7 %<!-- percent of compare-8.json: methods/0/goodput -->
    1.363<!-- parity.json: results/decoupled/*/loss -->        the mean where there are several
    1.98<!-- largest of storms.json: storms/*/gap -->          or their largest, or smallest
    +1.35 %<!-- parity.json: A relative to B -->               how far A's mean lies above B's

A step of a path is a key, an index, `*`, or `key=value` for the element of a list that has it. A value that is a text
counts as the number it begins with. Numbers without a mark are not checked: docs/LOG.md and the decisions tell of
logs as they were on their day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from tests.architecture.pages import PAGES, ROOT, name_of

MARK = re.compile(r"([+−-]?\d[\d,]*(?:\.\d+)?)(k?)(?: ?(?:%|s|ms|MiB|KiB))?\**<!-- (?:(\w+) of )?([\w.-]+): (.+?) -->")
PICKS = {"largest": max, "smallest": min}


@cache
def results(file: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / file).read_text())


def values(found: Any, path: str) -> Iterator[float]:
    step, _, rest = path.partition("/")
    if not path:
        yield float(re.match(r"[+-]?[\d.]+", str(found))[0])  # type: ignore[index]
    elif step == "*":
        for one in found.values() if isinstance(found, dict) else found:
            yield from values(one, rest)
    elif "=" in step and isinstance(found, list):
        key, _, wanted = step.partition("=")
        yield from values(next(one for one in found if str(one[key]) == wanted), rest)
    else:
        yield from values(found[int(step)] if isinstance(found, list) else found[step], rest)


def logged(how: str, file: str, path: str) -> float:
    first, relative, second = path.partition(" relative to ")
    some = list(values(results(file), first))
    assert some, f"{file} has nothing at {first}"
    if relative:
        return 100 * (mean(some) / mean(values(results(file), second)) - 1)
    assert how in ("", "percent", *PICKS), f"{how!r} is no way to take a number"
    value = PICKS[how](some) if how in PICKS else mean(some)
    return 100 * value if how == "percent" else value


def wrong(text: str) -> list[str]:
    """The marked numbers that are not those of the log, as they are written."""
    found = []
    for number, thousands, how, file, path in MARK.findall(text):
        plain = number.replace(",", "").replace("−", "-")
        _, _, decimals = plain.partition(".")
        value = logged(how, file, path) / (1000 if thousands else 1)
        if abs(value - float(plain)) > 0.5 * 10 ** -len(decimals) + 1e-9:
            found.append(f"{number} is {value:.6g} in {file}: {path}")
    return found


MARKED = [page for page in PAGES if MARK.search(page.read_text())]


@pytest.mark.parametrize("page", MARKED, ids=name_of)
def test_the_numbers_are_those_of_the_log(page: Path) -> None:
    text = page.read_text()
    assert wrong(text) == []
    assert len(MARK.findall(text)) == len(re.findall(r"<!-- [^>]*\.json: ", text)), "a mark stands behind no number"


def test_pages_that_name_a_log_mark_what_they_quote_of_it() -> None:
    logs = [path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    for page in PAGES:
        own_day = page.name == "LOG.md" or page.parent.name == "adr"
        if not own_day and any(re.search(rf"(?<![\w-]){log}", page.read_text()) for log in logs):
            assert page in MARKED, f"{name_of(page)} names a log, and none of its numbers is marked"
    assert len(MARKED) >= 7


def test_the_check_sees() -> None:
    ratio = results("overhead.json")["ratio"]
    assert wrong(f"{ratio:.3f}<!-- overhead.json: ratio -->") == []
    assert wrong(f"**{100 * ratio:.1f} %**<!-- percent of overhead.json: ratio -->") == []
    assert len(wrong(f"{ratio + 0.001:.3f}<!-- overhead.json: ratio -->")) == 1
    with pytest.raises(KeyError):
        wrong("1<!-- overhead.json: nothing -->")
