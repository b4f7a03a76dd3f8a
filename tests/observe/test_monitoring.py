"""The files of docs/monitoring.md: what they name exists, and they can be read."""

from __future__ import annotations

import configparser
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from atoll.observe.dashboard.metrics import STATES, exposition
from atoll.protocol.errors import ConfigError
from atoll.store.writer_lease import Deposed
from atoll.telemetry.status import STEPPING, RunStatus

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "deploy" / "monitoring"
UNIT = ROOT / "examples" / "deploy" / "systemd" / "atoll-syncer.service"
WANTED = (
    "NobodyTrains",
    "LearnerAway",
    "Stalled",
    "LowShare",
    "PaceBehind",
    "DiskSmall",
    "StandbyMissing",
    "RelayGone",
    "EvaluatorGone",
    "StoreBehind",
)


@pytest.mark.parametrize("name", ["atoll-alerts.yml", "grafana.json"])
def test_every_metric_that_is_named_exists(name: str, status: Callable[..., RunStatus]) -> None:
    shown = exposition(status(store="s3://bucket/run", disk_free_bytes=1)).decode()
    known = {sample.name for family in text_string_to_metric_families(shown) for sample in family.samples}
    reference = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    named = set(re.findall(r"\batoll_\w+", (FILES / name).read_text()))
    missing = {one for one in named - known if f"`{one.removesuffix('_total')}`" not in reference}
    assert named and not missing


def test_the_rules_parse_and_each_says_when_and_what() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((FILES / "atoll-alerts.yml").read_text())["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    assert all(f"Atoll{name}" in rules for name in WANTED)
    page = (ROOT / "docs" / "monitoring.md").read_text()
    for name, rule in rules.items():
        assert f"| {name} |" in page
        assert all(rule["expr"].count(a) == rule["expr"].count(b) for a, b in ("()", "[]", "{}"))
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
    scrape = yaml.safe_load((FILES / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["atoll-alerts.yml"]
    (job,) = scrape["scrape_configs"]
    assert job["authorization"]["credentials_file"] and job["tls_config"]["ca_file"]


def test_the_alerts_are_in_the_page_also_where_no_yaml_is_installed() -> None:
    named = re.findall(r"- alert: (\w+)", (FILES / "atoll-alerts.yml").read_text())
    assert re.findall(r"^\| (Atoll\w+) \|", (ROOT / "docs" / "monitoring.md").read_text(), re.MULTILINE) == named


def test_the_rules_name_states_of_learners_that_exist() -> None:
    rules = (FILES / "atoll-alerts.yml").read_text()
    named = re.findall(r'atoll_learners\{state=~?"([a-z|]+)"\}', rules)
    assert named and {state for states in named for state in states.split("|")} <= set(STATES)
    assert "|".join(STEPPING) in named, "nobody trains where no learner is in one of these"


def test_each_section_of_the_runbook_that_a_rule_names_exists() -> None:
    sections = re.findall(r'docs/runbook\.md, \\?"([^"\\]+)\\?"', (FILES / "atoll-alerts.yml").read_text())
    runbook = (ROOT / "docs" / "runbook.md").read_text()
    assert len(sections) >= 5 and all(f"\n## {section}\n" in runbook for section in sections)
    assert all(f"Atoll{name}" in runbook for name in ("NobodyTrains", "LearnerAway", "LearnerStalled"))


def test_the_boards_panels_do_not_overlap() -> None:
    board = json.loads((FILES / "grafana.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert f"It has {len(panels)} panels" in (ROOT / "docs" / "monitoring.md").read_text()
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_the_unit_restarts_what_a_restart_mends() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]
    assert service["RestartPreventExitStatus"].split() == [str(ConfigError("").exit_code), str(Deposed().exit_code)]
    assert service["KillSignal"] == "SIGKILL", "SIGTERM would end the run"
    commands = (ROOT / "docs" / "reference" / "commands.md").read_text().partition("atoll syncer")[2]
    options = re.findall(r"--[a-z-]+", service["ExecStart"])
    assert options and all(f"  {option} " in commands for option in options)
