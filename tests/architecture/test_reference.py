"""docs/reference is what the code says; tools/reference.py writes it."""

from __future__ import annotations

import re
import runpy
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.architecture.pages import PAGES, ROOT
from tests.observe.conftest import a_status

import atoll
from atoll.observe.dashboard.metrics import exposition


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "reference.py"))


def test_every_page_is_what_the_code_says(reference: dict[str, Any]) -> None:
    assert reference["stale"]() == [], "python tools/reference.py --write"
    written = {path.name for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert written == set(reference["WRITERS"])


def test_every_public_name_is_there(reference: dict[str, Any]) -> None:
    named = {name for name in reference["API"] if name.count(".") == 1}
    assert named == {f"atoll.{name}" for name in atoll.__all__ if not name.startswith("_")}


def test_what_an_integration_offers_is_there(reference: dict[str, Any]) -> None:
    for path in sorted((ROOT / "src" / "atoll" / "integrations").glob("*.py")):
        found = re.search(r"^__all__ = \[(.+)\]$", path.read_text(), re.MULTILINE)
        offered = re.findall(r'"(\w+)"', found[1]) if found else []
        assert offered or path.stem in ("__init__", "jax_arrays"), f"{path.name} says not in __all__ what it offers"
        shown = {name for name in reference["API"] if name.startswith(f"atoll.integrations.{path.stem}.")}
        assert shown == {f"atoll.integrations.{path.stem}.{name}" for name in offered}


def test_what_pages_and_examples_import_is_there(reference: dict[str, Any]) -> None:
    text = "\n".join(page.read_text() for page in (*PAGES, *(ROOT / "examples").rglob("*.py")))
    lines = re.findall(r"^ *from (atoll[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    told = {f"{module}.{name}" for module, names in lines for name in names.split(", ")}
    assert len(told) >= 5 and told <= set(reference["API"])


def test_no_setting_is_without_a_meaning(reference: dict[str, Any]) -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", reference["write_settings"](), re.MULTILINE)
    assert len(rows) > 80 and [name for name, meaning in rows if not meaning] == []


def test_every_variable_is_for_users_or_for_us(reference: dict[str, Any]) -> None:
    assert reference["find_variables"]() == {*reference["VARIABLES"], *reference["INTERNAL"]}


def test_every_metric_is_there(reference: dict[str, Any]) -> None:
    shown = {name.removesuffix("_total") for name, _, _ in reference["find_metrics"]()}
    served = {family.name for family in text_string_to_metric_families(exposition(a_status()).decode())}
    assert served and served <= shown
