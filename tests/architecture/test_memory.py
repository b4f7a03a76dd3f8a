"""What docs/architecture.md says of memory is what layout, parameters and bounds come to."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.architecture.pages import table_after

from atoll.choices import CODEC
from atoll.config import Outer
from atoll.learner.offload import READ_STAGES
from atoll.learner.placement import device_bytes, staging_bytes
from atoll.mailbox.box import BoxLayout
from atoll.numerics.codec import body_nbytes, largest_body, make_codec
from atoll.numerics.fragments import FragmentPlan, make_plan
from atoll.numerics.moments import most_bytes
from atoll.protocol.messages import TensorSpec
from atoll.protocol.settings import Settings
from atoll.syncer.model import contribution_bytes, memory_bound
from atoll.syncer.parameters import Parameters

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
SETTINGS = Settings(fragments=24, sync_every=24)


def gpt(layers: int, width: int, hidden: int, keys: int, words: int, *, tied: bool) -> FragmentPlan:
    """A model of the kind of Llama, or (tied) of Gemma."""
    shapes = {"embed": (words, width), **({} if tied else {"head": (words, width)}), "norm": (width,)}
    for n in range(layers):
        shapes |= {f"blocks.{n}.{name}": (width, width) for name in ("query", "output")}
        shapes |= {f"blocks.{n}.{name}": (keys, width) for name in ("key", "value")}
        shapes |= {f"blocks.{n}.{name}": (hidden, width) for name in ("gate", "up")}
        shapes |= {f"blocks.{n}.down": (width, hidden), f"blocks.{n}.norm1": (width,), f"blocks.{n}.norm2": (width,)}
    return make_plan([TensorSpec(name, shape, "float32") for name, shape in shapes.items()], 24)


PLANS = [
    gpt(32, 4096, 11008, 4096, 32_000, tied=False),
    gpt(18, 2048, 16384, 256, 256_000, tied=True),
]


def figures(plan: FragmentPlan) -> list[float]:
    """In bytes, row by row of the page."""
    layout = BoxLayout.of(plan, SETTINGS)
    slots = len(Outer().make().slots())
    return [
        layout.first_bytes,
        layout.total_bytes,
        layout.slot_bytes * BoxLayout.of(plan, msgspec.structs.replace(SETTINGS, codec="topk")).first_rests,
        largest_body(make_codec(SETTINGS.codec), plan),
        (READ_STAGES + 1) * 4 * layout.largest,
        (READ_STAGES + 4) * 4 * layout.largest,
        (2 + slots) * 4 * plan.size,
        contribution_bytes(plan, SETTINGS),
        memory_bound(plan, SETTINGS, slots).fixed,
    ]


def said() -> list[list[str]]:
    return table_after(PAGE.read_text(), "## Memory")


@pytest.mark.parametrize("model", [0, 1])
def test_the_page_says_what_it_comes_to(model: int) -> None:
    rows = said()
    due = figures(PLANS[model])
    assert len(rows) == len(due)
    for row, number in zip(rows, due, strict=True):
        each = float(row[2])
        assert number / PLANS[model].size == pytest.approx(each, rel=0.025), row[0]
        assert row[3 + model] == f"{number / 1e9:.1f} GB", row[0]


@pytest.mark.parametrize("plan", PLANS)
def test_the_page_says_what_shared_moments_take(plan: FragmentPlan) -> None:
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith("`--share moments` takes more")]
    share = msgspec.structs.replace(SETTINGS, share="moments")
    alone, shared = BoxLayout.of(plan, SETTINGS), BoxLayout.of(plan, share)
    value, first, most, version, contribution = map(float, re.findall(r"\d+\.\d+", line))
    assert most_bytes(plan) / plan.largest == pytest.approx(value, rel=0.025)
    assert (shared.first_bytes - alone.first_bytes) / plan.size == pytest.approx(first, rel=0.025)
    assert (shared.total_bytes - alone.total_bytes) / plan.size == pytest.approx(most, rel=0.025)
    assert len(plan.fragments) * most_bytes(plan) / plan.size == pytest.approx(version, rel=0.025)
    assert most_bytes(plan) / plan.size == pytest.approx(contribution, rel=0.025)


@pytest.mark.parametrize("row", table_after(PAGE.read_text(), "### Placements"), ids=lambda row: row[0])
@pytest.mark.parametrize("model", [0, 1])
def test_the_page_says_what_placements_take(model: int, row: list[str]) -> None:
    plan, settings = PLANS[model], msgspec.structs.replace(SETTINGS, codec=row[0].strip("`"))
    body = sum(body_nbytes(make_codec(settings.codec), part) for part in plan.fragments)
    host, device = (BoxLayout.of(plan, settings, on_device=on_device).first_bytes for on_device in (False, True))
    due = [host, staging_bytes(plan), 4 * plan.size, device, device_bytes(plan, settings), body]
    for said, number in zip(row[1:], due, strict=True):
        assert float(said) == pytest.approx(number / plan.size, rel=0.025)


def test_the_page_has_codecs_that_exist() -> None:
    """It need not have all: a codec is added as one file with its test."""
    named = {row[0].strip("`") for row in table_after(PAGE.read_text(), "### Placements")}
    assert len(named) >= 5 and named <= set(CODEC.names())


def test_the_page_counts_the_slots() -> None:
    layout = BoxLayout.of(PLANS[0], SETTINGS)
    out, back = re.findall(r"(\d+) slots for copies, (\d+) for versions", said()[0][1])[0]
    assert (int(out), int(back)) == (layout.first_outgoing, layout.first_incoming)


def test_a_syncer_holds_three_copies_in_the_long_run() -> None:
    """Θ, the version before it, which is the next one's buffer, and the momentum."""
    plan = make_plan([TensorSpec("w", (240, 5), "float32")], 24)
    parameters = Parameters(plan, Outer())
    parameters.commit_initial()
    for version in range(1, 4):
        for part in plan.fragments:
            parameters.stage_merge(part.index, [np.ones(part.size, np.float32)], [1.0])
            parameters.commit_version(part.index, version, version)
    held = [buffer for versions in parameters._versions for buffer in (versions.committed, *versions._spare)]
    outer = [array for state in parameters._state for array in state.own_arrays().values()]
    assert sum(buffer.values.nbytes for buffer in held) + sum(array.nbytes for array in outer) == 12 * plan.size
