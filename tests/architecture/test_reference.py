"""docs/reference is what the code says; tools/reference.py writes it."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.architecture.pages import ROOT
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


def test_every_variable_is_for_users_or_for_us(reference: dict[str, Any]) -> None:
    assert reference["find_variables"]() == {*reference["VARIABLES"], *reference["INTERNAL"]}


def test_every_metric_is_there(reference: dict[str, Any]) -> None:
    shown = {name.removesuffix("_total") for name, _, _ in reference["find_metrics"]()}
    served = {family.name for family in text_string_to_metric_families(exposition(a_status()).decode())}
    assert served and served <= shown
