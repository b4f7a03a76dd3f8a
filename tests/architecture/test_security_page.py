"""docs/security.md says what is tested and what the limits are: neither may go its own way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.fabric import test_abuse, test_abuse_learners

from atoll.config import Service
from atoll.fabric.wire import KIB, MIB, FabricLimits
from atoll.numerics.fragments import make_plan
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.syncer.model import memory_bound

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
TABLES = {
    "test_abuse_is_refused_and_changes_nothing": test_abuse.CASES,
    "test_nobody_gets_in_like_this": test_abuse_learners.OUTSIDE,
    "test_a_body_is_refused": test_abuse_learners.SAID_OF,
    "test_a_contribution_is_refused": test_abuse_learners.GIVEN,
    "test_a_message_costs_its_sender_the_channel": test_abuse_learners.TALK,
}


def rows(after: str) -> list[str]:
    """The first column of the table behind a text."""
    _, _, rest = PAGE.partition(after)
    table = re.search(r"\| --- .*\n((?:\|.*\n)*)", rest)
    assert table is not None, after
    return [line.split(" | ")[0].removeprefix("| ") for line in table[1].splitlines()]


@pytest.mark.parametrize("test", TABLES)
def test_every_case_is_in_the_table_of_its_test(test: str) -> None:
    assert rows(f"::{test}[CASE]`") == list(TABLES[test])


def test_every_test_that_is_named_is_there() -> None:
    found = re.findall(r"`(tests/[a-z_/]+\.py)::([a-z_]+)", PAGE)
    assert len(found) > 10
    for file, name in found:
        assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text(), name


def test_every_limit_is_there_with_its_number() -> None:
    limits = FabricLimits()
    for name in FabricLimits.__struct_fields__:
        assert f"| `{name}` | {shown(name, getattr(limits, name))} |" in PAGE


def shown(name: str, value: float) -> str:
    if name == "messages_rate":
        return f"{value:,.0f}/s"
    if name.endswith(("_rate", "bytes")):
        size = f"{int(value) // MIB:,} MiB" if value >= MIB else f"{int(value) // KIB:,} KiB"
        return f"{size}/s" if name.endswith("_rate") else size
    if name.endswith("_s"):
        return f"{value:g} s"
    return f"{value:,}"


@pytest.mark.parametrize(
    ("model", "size"), [("0.8M parameters", 800_000), ("168M", 168_000_000), ("1B", 1_000_000_000)]
)
def test_the_memory_table_is_what_the_bound_gives(model: str, size: int) -> None:
    plan = make_plan([TensorSpec(f"w{n}", (size // 24,), "float32") for n in range(24)], 24, "balanced")
    settings, budget = Settings(fragments=24, sync_every=24, codec="bf16"), Service().round_memory_mib
    assert f"| with 16 learners, `round_memory_mib = {budget}` (default) |" in PAGE
    most = memory_bound(plan, settings, slots=1, round_memory=budget * MIB)
    cells = (model, *map(memory, (most.fixed, most.each, most.total_bytes(16))))
    assert f"| {' | '.join(cells)} |" in PAGE


def memory(size: int) -> str:
    if size < 1024 * MIB:
        return f"{size / MIB:.0f} MiB"
    return f"{size / (1024 * MIB):.{1 if size < 10 * 1024 * MIB else 0}f} GiB"
