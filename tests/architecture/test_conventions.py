"""The files that hosts and tools read say what pyproject.toml and the Makefile say."""

from __future__ import annotations

import re
import tomllib

from tests.architecture.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_ci_runs_on_every_python_that_the_package_names() -> None:
    named = [one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)]
    (matrix,) = re.findall(r"python: \[(.+)\]", WORKFLOW)
    assert [one.strip('" ') for one in matrix.split(",")] == named


def test_ci_and_the_makefile_have_the_same_verbs() -> None:
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {line.split()[-1] for line in re.findall(r"run: (make .+)", WORKFLOW)}
    assert {"test", "integrations"} <= asked <= verbs


def test_the_citation_is_of_this_version() -> None:
    found = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert found is not None and found[1] == PROJECT["version"]


def test_the_changelog_begins_with_this_version() -> None:
    found = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None and found[1] == PROJECT["version"].partition(".dev")[0]


def test_hooks_name_files_and_tools_that_are_there() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    tools = {word.rpartition("/")[2] for word in re.findall(r"entry: (\S+)", text)}
    wanted = {re.split(r"[>=<]", one)[0] for one in PROJECT["optional-dependencies"]["dev"]}
    assert tools <= wanted | {"lint-imports"} and "import-linter" in wanted
    assert all((ROOT / word).exists() for word in re.findall(r"tests/\S+\.py", text))
