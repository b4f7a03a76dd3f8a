"""What tools/site.py does to pages on their way into the site, and what it finds in a site that is built."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.architecture.pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def site() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "site.py"))


@pytest.mark.parametrize(
    ("link", "turned"),
    [
        ("[a](settings.md#exit-codes)", "[a](settings.md#exit-codes)"),
        ("[a](../examples/my_script.py)", "[a](examples/my_script.py.md)"),
        ("[a](../examples)", "[a](examples/index.md)"),
        ("[a](../README.md#install)", "[a](index.md)"),
        ("[a](../CONTRIBUTING.md#tests)", "[a](project/contributing.md#tests)"),
        ("[`a`](../src/atoll/config.py)", "`a`"),
        ("[a](https://arxiv.org)", "[a](https://arxiv.org)"),
        ("![a](screen.svg)", "![a](screen.svg)"),
    ],
)
def test_links_lead_to_pages_of_the_site(site: dict[str, Any], link: str, turned: str) -> None:
    assert site["turn_links"](link, DOCS / "scripts.md", "scripts.md") == turned


def test_a_list_behind_a_paragraph_is_parted_from_it(site: dict[str, Any]) -> None:
    assert site["part_lists"]("so:\n- a\n- b\n  c\n- d\n") == "so:\n\n- a\n- b\n  c\n- d\n"


def test_a_long_name_in_a_table_may_be_broken_and_nothing_else(site: dict[str, Any]) -> None:
    soften, long = site["soften_cells"], "tests/system/test_crash_matrix.py"
    assert soften(f"<td><code>{long}</code></td>") == (
        "<td><code>tests/<wbr>system/<wbr>test_<wbr>crash_<wbr>matrix.py</code></td>"
    )
    for html in (f"<p><code>{long}</code></p>", "<td><code>sync_every</code></td>", f'<td><a href="{long}">a</a></td>'):
        assert soften(html) == html


def test_every_page_is_in_the_navigation(site: dict[str, Any], tmp_path: Path) -> None:
    site["stage"].__globals__["STAGED"] = tmp_path
    site["stage"]()
    assert list(site["find_lost"]()) == []


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ('<a href="other.html">', "leads to other.html, which is not there"),
        ('<a href="#here">', "leads to #here, a heading that is not there"),
        ('<script src="https://example.org/a.js">', "loads https://example.org/a.js"),
        ('<link rel="stylesheet" href="//example.org/a.css">', "loads //example.org/a.css"),
    ],
)
def test_a_fault_of_a_built_page_is_found(site: dict[str, Any], tmp_path: Path, page: str, fault: str) -> None:
    (tmp_path / "index.html").write_text(f'<h1 id="there"></h1><a href="#there"></a>{page}')
    find_faults = site["find_faults"]
    find_faults.__globals__["SITE"] = tmp_path
    assert list(find_faults()) == [f"index.html {fault}"]
